use super::grow;
use crate::ops::testing::{fetched, gpu, patterns};

#[test]
fn keeps_what_was_there_and_zeroes_the_rest() {
    for (len, capacity, dim) in [(3, 8, 5), (0, 4, 8), (8, 8, 16), (2, 256, 128)] {
        for x in patterns(2 * len * dim) {
            let x = x.reshape(&[2, len, dim]).unwrap();
            let want = grow(&x, capacity).unwrap();
            let y = grow(&x.to_device(&gpu()).unwrap(), capacity).unwrap();
            assert_eq!(y.shape(), want.shape());
            assert_eq!(fetched(&y).bytes(), want.bytes(), "{len} {capacity} {dim} {}", x.dtype());
        }
    }
}
