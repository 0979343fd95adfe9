use super::*;
use crate::ops::testing::{FLOATS, device, devices, normal};
use numcheck::Random;

#[test]
fn finds_the_first_of_the_greatest() {
    for device in devices() {
        for width in [1, 3, 8, 15, 16, 17, 63, 64, 65, 129, 1000] {
            for dtype in FLOATS {
                let (x, xs) = normal(&mut Random::new(width as u64), &[2, 3, width], dtype, &device);
                let ids = argmax(&x).unwrap();
                assert_eq!(ids.shape(), [2, 3]);
                for (x, &id) in xs.chunks(width).zip(ids.as_slice::<u32>().unwrap()) {
                    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    assert_eq!(id as usize, x.iter().position(|&x| x == max).unwrap());
                }
            }
        }
    }
}

#[test]
fn ties_and_infinities() {
    let inf = f32::INFINITY;
    for device in devices() {
        for (at, width) in [(0, 200), (63, 64), (64, 200), (199, 200)] {
            let mut x = vec![-inf; width];
            (x[at], x[width - 1]) = (-3.0, -3.0);
            let ids = argmax(&Tensor::new(&x, &[width], &device).unwrap()).unwrap();
            assert_eq!(ids.shape(), [0; 0]);
            assert_eq!(ids.as_slice::<u32>().unwrap(), [at as u32]);
        }
    }
}

#[test]
fn rows_without_an_answer() {
    let device = device();
    let refused = |x: &[f32], shape: &[usize]| {
        argmax(&Tensor::new(x, shape, &device).unwrap()).unwrap_err().to_string()
    };
    let mut x = [1.0; 70];
    x[66] = f32::NAN;
    assert_eq!(refused(&x, &[70]), "argmax: x is NaN at 66, but numbers are wanted");
    x[66] = f32::INFINITY;
    assert_eq!(refused(&x, &[70]), "argmax: x is inf at 66, but numbers are wanted");
    assert_eq!(
        refused(&[f32::NEG_INFINITY; 3], &[3]),
        "argmax: x is -inf everywhere, but one must be finite"
    );
    assert_eq!(refused(&[], &[2, 0]), "argmax: x is [2, 0], but [.., V] with a V of at least 1 is wanted");
    assert!(argmax(&Tensor::new(&[0u32], &[1], &device).unwrap()).is_err());
}
