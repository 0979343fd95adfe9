use super::*;
use crate::ops::testing::{FLOATS, assert_close, device, devices, normal, values};
use lowbit_formats::DType;
use numcheck::{Random, gamma};

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        // Blocks of 1 to 1024 elements, and of the short ones more rows than a device has planes.
        for (i, width) in [1, 3, 4, 6, 16, 48, 64, 80, 96, 128, 256, 512, 1024].into_iter().enumerate() {
            let shapes = [[3, 2, width], [1, 1, width], [1 + 4096 / width, 1, width]];
            for (shape, dtype) in shapes.into_iter().zip(FLOATS) {
                let dtype = FLOATS[(dtype as usize + i) % 3];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                let xs: Vec<f64> = xs.into_iter().map(f64::from).collect();
                let made = reference::hadamard_transform(&xs, width);
                let want: Vec<f64> = made.iter().map(|made| made.0).collect();
                let bound = |i: usize| gamma(reference::roundings(width)) * made[i].1;
                assert_close(&hadamard_transform(&x).unwrap(), &shape, dtype, &want, bound);
            }
        }
    }
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

/// The matrix of 4, by hand, beside what the reference makes of it.
#[test]
fn a_block_of_four_by_hand() {
    let want = [5.0, -1.0, -2.0, 0.0];
    let made = reference::hadamard_transform(&[1.0, 2.0, 3.0, 4.0], 4);
    assert_eq!(made.iter().map(|made| made.0).collect::<Vec<_>>(), want);
    let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &[4], &device()).unwrap();
    assert_eq!(values(&hadamard_transform(&x).unwrap()), want.map(|y| y as f32));
}

#[test]
fn other_tensors_are_refused() {
    let refused = |shape: &[usize], dtype| {
        hadamard_transform(&Tensor::zeros(shape, dtype, &device())).unwrap_err().to_string()
    };
    assert_eq!(refused(&[2], DType::U32), "hadamard_transform: x is u32, but f32, f16 or bf16 is wanted");
    assert_eq!(
        refused(&[2, 1025], DType::F32),
        "hadamard_transform: x is [2, 1025], but rows of 1 to 1024 elements are wanted"
    );
    let none = Tensor::zeros(&[0, 4], DType::F32, &device());
    assert_eq!(hadamard_transform(&none).unwrap().shape(), [0, 4]);
}

#[cfg(feature = "gpu")]
#[test]
fn agrees_with_f64_on_a_gpu() {
    agrees_with_f64_on(&[crate::ops::testing::gpu()]);
}
