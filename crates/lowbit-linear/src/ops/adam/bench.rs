//! Benchmark cases of `adam`: the scales of a weight of Qwen3.5-9B's feed-forward layer, and all of
//! its values.

use super::{Adam, AdamStep, adam, reference};
use crate::bench::{Arithmetic, Case, Cases, Expected, Prepared};
use crate::inputs::activations;
use lowbit_formats::FloatType;
use std::cell::RefCell;

inventory::submit!(Cases(cases));

fn cases() -> Vec<Case> {
    [4096 * 12288 / 64, 4096 * 12288].map(case).into()
}

fn case(len: usize) -> Case {
    Case {
        op: "adam",
        shape: format!("N={len}"),
        format: "-".into(),
        dtype: FloatType::F32,
        bytes: 7 * len * size_of::<f32>(),
        flops: 12 * len,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            let host = device.host()?;
            let random = |seed| activations(&[len], FloatType::F32, seed, &host);
            let (value, gradient) = (random(1)?, random(2)?);
            // A step of length 0 can be repeated: it moves the averages alone.
            let step = AdamStep { rate: 0.0, count: 1 };
            let (values, gradients) = (value.as_slice::<f32>()?, gradient.as_slice::<f32>()?);
            let each = values.iter().zip(gradients);
            let (want, most): (Vec<_>, Vec<_>) = each
                .map(|(&value, &gradient)| reference::adam([value, 0.0, 0.0], gradient, step))
                .map(|(want, most)| (want[0], most[0]))
                .unzip();
            let expected = Expected::all(&want, FloatType::F32, |i| f64::from(f32::EPSILON) * most[i]);
            let zeros = || crate::Tensor::allocate_zeros(&[len], lowbit_formats::DType::F32, device);
            let state = Adam { value: value.to_device(device)?, mean: zeros()?, square: zeros()? };
            let (state, gradient) = (RefCell::new(state), gradient.to_device(device)?);
            Ok(Prepared::warm(
                move || {
                    let mut state = state.borrow_mut();
                    adam(&mut state, &gradient, step)?;
                    Ok(state.value.clone())
                },
                expected,
            ))
        }),
    }
}
