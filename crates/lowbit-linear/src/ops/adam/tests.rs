use super::*;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{FLOATS, device, devices, normal, values};
use numcheck::{Random, assert_bits};

fn parts(state: &Adam) -> [Vec<f32>; 3] {
    [&state.value, &state.mean, &state.square].map(values)
}

fn state(parts: &[Vec<f32>; 3], shape: &[usize], device: &Device) -> Adam {
    let [value, mean, square] = parts.each_ref().map(|part| Tensor::new(part, shape, device).unwrap());
    Adam { value, mean, square }
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_agrees_with_f64() {
    agrees_with_f64_on(&[gpu()]);
}

/// Each step from the state that the one before left.
fn agrees_with_f64_on(devices: &[Device]) {
    for device in devices {
        let (mut random, shape) = (Random::new(3), [7, 4099]);
        let (value, first) = normal(&mut random, &shape, FLOATS[0], device);
        let zeros = vec![0.0; first.len()];
        let mut state = Adam { value, ..state(&[first, zeros.clone(), zeros], &shape, device) };
        for (count, scale) in (1..).zip([1.0, 1e-3, 0.0, 1e-6, 30.0]) {
            let gradient: Vec<f32> =
                normal(&mut random, &shape, FLOATS[0], device).1.iter().map(|x| x * scale).collect();
            let step = AdamStep { rate: 0.01, count };
            let (kept, before) = (state.clone(), parts(&state));
            adam(&mut state, &Tensor::new(&gradient, &shape, device).unwrap(), step).unwrap();
            let after = parts(&state);
            for i in 0..gradient.len() {
                let of = |parts: &[Vec<f32>; 3]| parts.each_ref().map(|part| part[i]);
                let (want, most) = reference::adam(of(&before), gradient[i], step);
                for ((got, want), most) in of(&after).into_iter().zip(want).zip(most) {
                    let error = (f64::from(got) - want).abs();
                    let bound = f64::from(f32::EPSILON) * most + f64::from(f32::MIN_POSITIVE);
                    assert!(error <= bound, "step {count}, {i}: {got} {want} {error:e} {bound:e}");
                }
            }
            // A state that others share stays unchanged.
            parts(&kept).iter().zip(&before).for_each(|(kept, before)| assert_bits("kept", kept, before));
        }
    }
}

/// The values are torch 2.15's: `torch.optim.Adam([x], lr=0.1)` with these gradients.
#[test]
fn steps_are_torchs() {
    let device = device();
    let mut state = state(&[vec![1.0, -2.0, 0.5], vec![0.0; 3], vec![0.0; 3]], &[3], &device);
    for (count, gradient) in (1..).zip([[0.1, -4.0, 0.0], [0.3, 1.0, 1e-4], [-0.2, 2.0, -1e-6]]) {
        let gradient = Tensor::new::<f32>(&gradient, &[3], &device).unwrap();
        adam(&mut state, &gradient, AdamStep { rate: 0.1, count }).unwrap();
    }
    let want: [f32; 3] = [0.782_431_5, -1.848_309_9, 0.368_726_67];
    for (got, want) in values(&state.value).into_iter().zip(want) {
        assert!((got - want).abs() <= 4.0 * f32::EPSILON * want.abs(), "{got} {want}");
    }
}

#[test]
fn the_same_for_every_number_of_threads() {
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        let (mut random, shape) = (Random::new(5), [40_000]);
        let [value, mean, gradient] = [1, 2, 3].map(|_| normal(&mut random, &shape, FLOATS[0], &device).0);
        let mut state = Adam { square: Tensor::zeros(&shape, DType::F32, &device), value, mean };
        adam(&mut state, &gradient, AdamStep { rate: 0.1, count: 3 }).unwrap();
        parts(&state)
    };
    of(3).iter().zip(&of(1)).for_each(|(got, want)| assert_bits("threads", got, want));
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let new = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let mut state = Adam { value: new(&[2, 3]), mean: new(&[2, 3]), square: new(&[2, 3]) };
    let step = AdamStep { rate: 0.1, count: 1 };
    let error = adam(&mut state, &new(&[3, 2]), step).unwrap_err().to_string();
    assert_eq!(error, "adam: gradient is [3, 2], but value wants [2, 3]");
    let error = adam(&mut state, &new(&[2, 3]), AdamStep { count: 0, ..step }).unwrap_err().to_string();
    assert_eq!(error, "adam: count is 0, but steps are counted from 1");
    state.mean = Tensor::zeros(&[2, 3], DType::F16, &device);
    assert!(adam(&mut state, &new(&[2, 3]), step).is_err());
    let none = || new(&[0]);
    adam(&mut Adam { value: none(), mean: none(), square: none() }, &none(), step).unwrap();
}
