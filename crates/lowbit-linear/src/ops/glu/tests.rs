use super::constants::OAI_LIMIT;
use super::*;
use crate::ops::testing::{FLOATS, WIDTHS, assert_close, device, devices, normal, tensor, values};
use numcheck::{Random, gamma};

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

/// Gates per element and per row, `[query | gate]`, and columns that are no whole number of them.
pub(super) fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(1);
    for device in devices {
        for (i, width) in WIDTHS.into_iter().enumerate() {
            for by in Gate::ALL {
                let (shape, dtype) = ([5, 2, width], FLOATS[(i + by as usize) % 3]);
                let (x, xs) = normal(&mut random, &shape, dtype, device);
                for columns in [width, 1, 2 * width, width + 3] {
                    let (gate, gates) = normal(&mut random, &[5, 2, columns], FLOATS[width % 3], device);
                    let read = columns - width.min(columns);
                    let gates: Vec<f32> =
                        gates.chunks(columns).flat_map(|row| &row[read..]).copied().collect();
                    let [want, magnitude] = by.references(&xs, &gates);
                    let bound = |i: usize| gamma(by.roundings()) * magnitude[i];
                    assert_close(&glu(&x, &gate, by).unwrap(), &shape, dtype, &want, bound);
                    // The same of heads side by side.
                    let joined = x.reshape(&[5, 2 * width]).unwrap();
                    let y = glu(&joined, &gate, by).unwrap();
                    assert_close(&y, &[5, 2 * width], dtype, &want, bound);
                }
            }
        }
    }
}

#[test]
fn formulas_are_the_peers() {
    // `torch.nn.functional.gelu(x, approximate="tanh")`, and `GptOssExperts._apply_gate`, in f64.
    let gelu =
        |g: f64| 0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh());
    let oai = |x: f64, g: f64| {
        let (x, g) = (x.clamp(-7.0, 7.0), g.min(7.0));
        (x + 1.0) * g * (1.0 / (1.0 + (-1.702 * g).exp()))
    };
    for i in -400..=400 {
        let (x, g) = (f64::from(i * 7 % 391) / 32.0, f64::from(i) / 32.0);
        let relu = x * g.max(0.0);
        for (by, want) in [(Gate::GeluTanh, x * gelu(g)), (Gate::SwigluOai, oai(x, g)), (Gate::Relu, relu)] {
            let got = by.value(x).0 * by.reference(g).factor.0;
            assert!(
                (got - want).abs() <= 1e-14 * (1.0 + x.abs()) * (1.0 + g.abs()),
                "{by:?} {x} {g}: {got}, {want}"
            );
        }
    }
}

#[test]
fn gates_far_from_zero() {
    // If e^-|gate| is subnormal, it may lose half its last place (2^-150).
    gates_far_from_zero_on(&devices(), 2f64.powi(-150));
}

/// `lost`: what a small sigmoid may be off by; it is times gate, 104 at most, times x.
pub(super) fn gates_far_from_zero_on(devices: &[Device], lost: f64) {
    let gates = [-1e30, -200.0, -100.0, -88.5, -20.0, 0.0, 20.0, 88.5, 100.0, 1e30];
    for (device, by) in devices.iter().flat_map(|device| Gate::ALL.map(|by| (device, by))) {
        let (gate, _) = tensor(&gates, &[10], FLOATS[0], device);
        for x in [3.0, -20.0, 20.0] {
            let (x, xs) = tensor(&[x; 10], &[10], FLOATS[0], device);
            let [want, magnitude] = by.references(&xs, &gates);
            let bound = |i: usize| gamma(by.roundings()) * magnitude[i] + lost * 104.0 * 20.0;
            assert_close(&glu(&x, &gate, by).unwrap(), &[10], FLOATS[0], &want, bound);
        }
        let nan = Tensor::new(&[f32::NAN, 1.0], &[2], device).unwrap();
        let one = Tensor::new(&[1.0, f32::NAN], &[2], device).unwrap();
        assert!(values(&glu(&nan, &one, by).unwrap()).iter().all(|y| y.is_nan()), "{by:?}");
    }
}

#[test]
fn limits_are_their_own() {
    limits_are_their_own_on(&device());
}

/// At a limit nothing is cut off, and beyond it nothing changes.
pub(super) fn limits_are_their_own_on(device: &Device) {
    let limit = OAI_LIMIT;
    let beyond = [limit, limit.next_up(), 8.0, 1e30, f32::INFINITY];
    let x = Tensor::new(&beyond, &[5], device).unwrap();
    let below = Tensor::new(&beyond.map(|x| -x), &[5], device).unwrap();
    let y = values(&glu(&x, &x, Gate::SwigluOai).unwrap());
    assert!(y.iter().all(|&value| value == y[0] && (value - 56.0).abs() < 0.01), "{y:?}");
    let y = values(&glu(&below, &x, Gate::SwigluOai).unwrap());
    assert!(y.iter().all(|&value| value == y[0] && (value + 42.0).abs() < 0.01), "{y:?}");
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let x = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
    let gate = |shape: &[usize]| Tensor::zeros(shape, lowbit_formats::DType::F32, &device);
    let sigmoid = |x: &Tensor, gate: &Tensor| glu(x, gate, Gate::Sigmoid);
    assert_eq!(
        sigmoid(&x, &gate(&[3, 1])).unwrap_err().to_string(),
        "glu: gate is [3, 1], but x [2, 3] wants the same shape, or a last size that is larger or 1"
    );
    for shape in
        [&[2][..], &[1, 3], &[2, 2], &[3, 1, 3], &[2, 2, 3], &[2, 0, 3], &[2, 1, 2], &[2, 3, 1, 1], &[]]
    {
        assert!(sigmoid(&x, &gate(shape)).is_err(), "{shape:?}");
    }
    let scalar = gate(&[]);
    assert!(sigmoid(&scalar, &gate(&[1])).is_err());
    assert_eq!(sigmoid(&scalar, &scalar).unwrap().len(), 1);
    let ids = Tensor::new(&[0u32; 6], &[2, 3], &device).unwrap();
    let error = sigmoid(&ids, &x).unwrap_err();
    assert_eq!(error.to_string(), "glu: x is u32, but f32, f16 or bf16 is wanted");
    assert!(sigmoid(&x, &ids).is_err());
}
