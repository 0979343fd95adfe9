use super::*;
use crate::Device;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, tensor, values};
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for dtype in FLOATS {
                let shape = [3, width];
                let (gate, gates) = normal(&mut random, &shape, dtype, device);
                let (up, ups) = normal(&mut random, &shape, FLOATS[width % 3], device);
                let want = SiluMul::references(&gates, &ups);
                assert_close(&silu_mul(&gate, &up).unwrap(), &shape, dtype, &want, |i| {
                    gamma(SiluMul::ROUNDINGS) * want[i].abs()
                });
            }
        }
    }
}

#[test]
fn gates_far_from_zero() {
    // Where e^-|gate| is subnormal, half its last place (2^-150).
    gates_far_from_zero_on(&devices(), 2f64.powi(-150));
}

/// `lost`: what a small sigmoid may be off by; it is times gate, 104 at most, times up.
fn gates_far_from_zero_on(devices: &[Device], lost: f64) {
    let gates = [-1e30, -200.0, -100.0, -88.5, -20.0, 0.0, 20.0, 88.5, 100.0, 1e30];
    for device in devices {
        let (gate, _) = tensor(&gates, &[10], FLOATS[0], device);
        let (up, ups) = tensor(&[3.0; 10], &[10], FLOATS[0], device);
        let want = SiluMul::references(&gates, &ups);
        let bound = |i: usize| gamma(SiluMul::ROUNDINGS) * want[i].abs() + lost * 104.0 * 3.0;
        assert_close(&silu_mul(&gate, &up).unwrap(), &[10], FLOATS[0], &want, bound);
        let nan = Tensor::new(&[f32::NAN, 1.0], &[2], device).unwrap();
        let one = Tensor::new(&[1.0, f32::NAN], &[2], device).unwrap();
        assert!(values(&silu_mul(&nan, &one).unwrap()).iter().all(|y| y.is_nan()));
    }
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::gpu;

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    #[test]
    fn gates_far_from_zero() {
        // A GPU may flush what is subnormal.
        gates_far_from_zero_on(&[gpu()], f64::from(f32::MIN_POSITIVE));
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let gate = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let up = gate.reshape(&[6]).unwrap();
    assert_eq!(silu_mul(&gate, &up).unwrap_err().to_string(), "silu_mul: up is [6], but gate wants [2, 3]");
    let ids = Tensor::new(&[0u32; 6], &[2, 3], &device).unwrap();
    let error = silu_mul(&ids, &gate).unwrap_err();
    assert_eq!(error.to_string(), "silu_mul: gate is u32, but f32, f16 or bf16 is wanted");
    assert!(silu_mul(&gate, &ids).is_err());
}
