use super::{SampleParams, philox, reference, sample};
use crate::{
    Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::{DType, FloatType};

inventory::submit!(Cases(cases));

/// A token of Qwen3.5's vocabulary: as its card advises, by top-p alone, and from all of it.
fn cases() -> Vec<Case> {
    let all = SampleParams { temperature: 0.7, ..Default::default() };
    [SampleParams { top_k: 20, top_p: 0.8, ..all }, SampleParams { top_p: 0.8, ..all }, all].map(case).into()
}

fn case(params: SampleParams) -> Case {
    let (count, dtype) = (248_320, FloatType::F32);
    Case {
        op: "sample",
        shape: format!("V={count} top_k={} top_p={}", params.top_k, params.top_p),
        format: "-".into(),
        dtype,
        bytes: count * dtype.size(),
        flops: count,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| {
            // Sharp, as a model's: a few tokens have most of the probability.
            let logits = activations(&[count], dtype, 1, device)?;
            let sharp: Vec<f32> =
                logits.cast(DType::F32)?.as_slice::<f32>()?.iter().map(|x| x * 3.5).collect();
            let logits = Tensor::new(&sharp, &[count], device)?;
            let mut expected = reference::distribution(&sharp, &[], &params);
            if params.top_k == 0 && params.top_p == 1.0 {
                expected.sort_by_key(|&(id, _)| id);
            }
            let mut left = philox::uniform(0, params.seed);
            let drawn = expected.iter().find(|(_, p)| {
                left -= p;
                left < 0.0
            });
            let value = drawn.map_or(f64::NAN, |&(id, _)| f64::from(id));
            let run = move || {
                let id = sample(&logits, &[], &params, 0)?;
                Tensor::new(&[id as f32], &[1], logits.device())
            };
            Ok(Prepared::warm(run, vec![Expected { index: 0, value, bound: 0.0 }]))
        }),
    }
}
