use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, tensor, values};
use numcheck::Random;

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    let shapes =
        WIDTHS.map(|width| [2, 3, width]).into_iter().chain([[1, 99, 70], [1, 1, 4096], [1, 2, 5120]]);
    for (i, shape) in shapes.enumerate() {
        for (h_type, x_type) in
            FLOATS.into_iter().zip([FLOATS[i % 3], FLOATS[(i + 1) % 3], FLOATS[(i + 2) % 3]])
        {
            for device in devices {
                let (h, hs) = normal(&mut random, &shape, h_type, device);
                let (x, xs) = normal(&mut random, &shape, x_type, device);
                let (weight, weights) = normal(&mut random, &shape[2..], FLOATS[i % 3], device);
                let [sums, ys] = reference::add_rms_norm(&hs, &xs, &weights, 1e-3);
                let (sum, y) = add_rms_norm(&h, &x, &weight, 1e-3).unwrap();
                for (got, want, dtype) in [(sum, sums, h_type), (y, ys, x_type)] {
                    let (want, bounds): (Vec<f64>, Vec<f64>) = want.into_iter().unzip();
                    assert_close(&got, &shape, dtype, &want, |i| bounds[i]);
                }
            }
        }
    }
}

#[test]
fn the_sum_is_normed_before_it_is_rounded() {
    the_sum_is_normed_before_it_is_rounded_on(&devices());
}

pub(super) fn the_sum_is_normed_before_it_is_rounded_on(devices: &[Device]) {
    for device in devices {
        // 256 + 1 is no bf16: it would be rounded to 256.
        let (h, _) = tensor(&[256.0, -256.0], &[1, 2], FLOATS[2], device);
        let (x, _) = tensor(&[1.0, 0.0], &[1, 2], FLOATS[0], device);
        let (weight, _) = tensor(&[1.0, 1.0], &[2], FLOATS[0], device);
        let (sum, y) = add_rms_norm(&h, &x, &weight, 0.0).unwrap();
        assert_eq!(values(&sum), [256.0, -256.0]);
        let y = values(&y);
        assert!(y[0] > 1.001 && y[1] > -0.999, "{y:?}");
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, FLOATS[0].dtype(), &device);
    let refused = |h: &Tensor, x: &Tensor, weight: &Tensor, eps: f32| {
        add_rms_norm(h, x, weight, eps).unwrap_err().to_string()
    };
    let (h, weight) = (zeros(&[2, 3]), zeros(&[3]));
    assert_eq!(refused(&h, &zeros(&[3]), &weight, 0.0), "add_rms_norm: x is [3], but h wants [2, 3]");
    assert_eq!(refused(&h, &h, &zeros(&[2]), 0.0), "add_rms_norm: weight is [2], but h [2, 3] wants [3]");
    assert_eq!(
        refused(&h, &h, &weight, -1.0),
        "add_rms_norm: eps is -1, but a finite number from 0 is wanted"
    );
    let ids = Tensor::zeros(&[2, 3], lowbit_formats::DType::U32, &device);
    assert_eq!(refused(&h, &ids, &weight, 0.0), "add_rms_norm: x is u32, but f32, f16 or bf16 is wanted");
    assert!(add_rms_norm(&zeros(&[]), &zeros(&[]), &weight, 0.0).is_err());
}
