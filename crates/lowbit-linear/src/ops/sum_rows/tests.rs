use super::*;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{FLOATS, assert_close, device, devices, normal, values};
use lowbit_formats::DType;
use numcheck::{Random, assert_bits, gamma};

/// Below, at and above a block of rows, and more than a block of blocks.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 7], [3, 21, 9], [2, 32, 1], [5, 13, 33], [1, 200, 19], [1, 64, 300], [1, 4097, 5], [2, 4161, 3]];

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for (shape, dtype) in SHAPES.into_iter().flat_map(|shape| FLOATS.map(|dtype| (shape, dtype))) {
            let [blocks, rows, width] = shape;
            let (x, xs) = normal(&mut random, &shape, dtype, device);
            let (want, magnitude) = reference::sum_rows(&xs, width);
            let gamma = gamma(reference::roundings(blocks * rows));
            assert_close(&sum_rows(&x).unwrap(), &[width], FLOATS[0], &want, |i| gamma * magnitude[i]);
            // A view that starts anywhere.
            let (part, parts) = (x.reshape(&[blocks * rows, width]).unwrap(), &xs[width..]);
            let (want, magnitude) = reference::sum_rows(parts, width);
            let y = sum_rows(&part.rows(1, blocks * rows).unwrap()).unwrap();
            assert_close(&y, &[width], FLOATS[0], &want, |i| gamma * magnitude[i]);
        }
        let none = |shape: &[usize]| Tensor::new::<f32>(&[], shape, device).unwrap();
        assert_eq!(values(&sum_rows(&none(&[4, 0, 3])).unwrap()), [0.0; 3]);
        assert_eq!(sum_rows(&none(&[4, 0])).unwrap().shape(), [0]);
        let row = Tensor::new(&[1f32, f32::NAN, 3.0], &[3], device).unwrap();
        let y = values(&sum_rows(&row).unwrap());
        assert!(y[0] == 1.0 && y[1].is_nan() && y[2] == 3.0, "{y:?}");
    }
}

#[test]
fn the_same_for_every_number_of_threads() {
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        values(&sum_rows(&normal(&mut Random::new(2), &[999, 33], FLOATS[0], &device).0).unwrap())
    };
    assert_bits("threads", &of(3), &of(1));
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let refused = |x: &Tensor| sum_rows(x).unwrap_err().to_string();
    assert_eq!(
        refused(&Tensor::zeros(&[2, 3], DType::U32, &device)),
        "sum_rows: x is u32, but f32, f16 or bf16 is wanted"
    );
    assert_eq!(refused(&Tensor::zeros(&[], DType::F32, &device)), "sum_rows: x is [], but [.., D] is wanted");
}
