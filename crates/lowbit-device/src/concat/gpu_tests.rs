use super::concat;
use crate::Tensor;
use crate::testing::{fetched, gpu, patterns};

#[test]
fn joins_what_the_cpu_joins() {
    let device = gpu();
    for widths in [&[3, 1, 0, 5][..], &[16, 32], &[7], &[2, 4, 8]] {
        let all: usize = widths.iter().sum();
        for x in patterns(19 * all) {
            let mut first = 0;
            let parts: Vec<Tensor> = widths
                .iter()
                .map(|&width| {
                    first += 19 * width;
                    let flat = x.reshape(&[19 * all]).unwrap();
                    flat.rows(first - 19 * width, first).unwrap().reshape(&[19, width]).unwrap()
                })
                .collect();
            let moved: Vec<Tensor> = parts.iter().map(|part| part.to_device(&device).unwrap()).collect();
            let want = concat(&parts.iter().collect::<Vec<_>>()).unwrap();
            let y = concat(&moved.iter().collect::<Vec<_>>()).unwrap();
            assert_eq!(y.shape(), want.shape());
            assert_eq!(fetched(&y).bytes(), want.bytes(), "{widths:?} {}", x.dtype());
        }
    }
}
