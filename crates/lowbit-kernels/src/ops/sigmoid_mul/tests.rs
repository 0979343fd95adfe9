use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal};
use numcheck::{Random, gamma};

#[test]
fn a_gate_an_element_and_a_gate_a_row() {
    a_gate_an_element_and_a_gate_a_row_on(&devices());
}

pub(super) fn a_gate_an_element_and_a_gate_a_row_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for width in WIDTHS {
            for dtype in FLOATS {
                let shape = [5, 2, width];
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                for gate_width in [width, 1] {
                    let (gate, gates) = normal(&mut random, &[5, 2, gate_width], FLOATS[width % 3], device);
                    let want = reference::sigmoid_mul(&xs, &gates);
                    let y = sigmoid_mul(&x, &gate).unwrap();
                    assert_close(&y, &shape, dtype, &want, |i| gamma(reference::ROUNDINGS) * want[i].abs());
                }
                // `[query | gate]`, and columns that are no whole number of them.
                for columns in [2 * width, width + 3] {
                    let (both, wide) = normal(&mut random, &[5, 2, columns], FLOATS[width % 3], device);
                    let gates: Vec<f32> =
                        wide.chunks(columns).flat_map(|row| &row[columns - width..]).copied().collect();
                    let want = reference::sigmoid_mul(&xs, &gates);
                    let y = sigmoid_mul(&x, &both).unwrap();
                    assert_close(&y, &shape, dtype, &want, |i| gamma(reference::ROUNDINGS) * want[i].abs());
                }
            }
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let gate = |shape: &[usize]| Tensor::zeros(shape, lowbit_formats::DType::F32, &device);
    assert_eq!(
        sigmoid_mul(&x, &gate(&[3, 1])).unwrap_err().to_string(),
        "sigmoid_mul: gate is [3, 1], but x [2, 3] wants the same shape, or a last size that is larger or 1"
    );
    for shape in [&[2][..], &[1, 3], &[2, 2], &[2, 1, 1], &[]] {
        assert!(sigmoid_mul(&x, &gate(shape)).is_err(), "{shape:?}");
    }
    let scalar = gate(&[]);
    assert!(sigmoid_mul(&scalar, &gate(&[1])).is_err());
    assert_eq!(sigmoid_mul(&scalar, &scalar).unwrap().len(), 1);
    let ids = Tensor::new(&[0u32; 6], &[2, 3], &device).unwrap();
    assert!(sigmoid_mul(&x, &ids).is_err() && sigmoid_mul(&ids, &x).is_err());
}
