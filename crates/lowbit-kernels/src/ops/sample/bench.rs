use super::{DecodeBatch, SampleKind, SampleParams, philox, reference, sample, sample_rows};
use crate::{
    Device, KernelError, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared},
    inputs::activations,
};
use lowbit_formats::FloatType;

/// Qwen3.5's vocabulary.
const VOCABULARY: usize = 248_320;

inventory::submit!(Cases(cases));

/// As Qwen3.5's card advises, by top-p alone, and from all of the vocabulary.
fn settings() -> [SampleParams; 3] {
    let all = SampleParams { temperature: 0.7, ..Default::default() };
    [SampleParams { top_k: 20, top_p: 0.8, ..all }, SampleParams { top_p: 0.8, ..all }, all]
}

fn cases() -> Vec<Case> {
    let rows = [SampleParams::default()].into_iter().chain(settings());
    let rows = rows.flat_map(|params| [1, 16, 64].map(|rows| case_of_rows(rows, params)));
    settings().map(case).into_iter().chain(rows).collect()
}

/// Logits that are sharp, as a model's: a few tokens have most of the probability.
fn sharp(rows: usize, device: &Device) -> Result<Vec<f32>, KernelError> {
    let logits = activations(&[rows, VOCABULARY], FloatType::F32, 1, &device.host()?)?;
    Ok(logits.as_slice::<f32>()?.iter().map(|x| x * 3.5).collect())
}

/// The token of step 0.
fn expected(index: usize, logits: &[f32], params: &SampleParams) -> Expected {
    let mut distribution = match params.temperature {
        0.0 => reference::distribution(logits, &[], &SampleParams { temperature: 1.0, top_k: 1, ..*params }),
        _ => reference::distribution(logits, &[], params),
    };
    distribution.sort_by_key(|&(id, _)| id);
    let mut left = philox::uniform(0, params.seed);
    let drawn = distribution.iter().find(|(_, p)| {
        left -= p;
        left < 0.0
    });
    let value = drawn.map_or(f64::NAN, |&(id, _)| f64::from(id));
    Expected { index, value, bound: 0.0 }
}

fn case(params: SampleParams) -> Case {
    let shape = format!("V={VOCABULARY} top_k={} top_p={}", params.top_k, params.top_p);
    let prepare = move |device: &Device| {
        let logits = sharp(1, device)?;
        let expected = vec![expected(0, &logits, &params)];
        let logits = Tensor::new(&logits, &[VOCABULARY], device)?;
        let run = move || Tensor::new(&[sample(&logits, &[], &params, 0)?], &[1], logits.device());
        Ok(Prepared::warm(run, expected))
    };
    reading("sample", shape, 1, prepare)
}

/// A token of each row of a batch.
fn case_of_rows(rows: usize, params: SampleParams) -> Case {
    let SampleParams { temperature, top_k, top_p, .. } = params;
    let shape = format!("B={rows} V={VOCABULARY} temperature={temperature} top_k={top_k} top_p={top_p}");
    let prepare = move |device: &Device| {
        let logits = sharp(rows, device)?;
        let of = |row: usize| expected(row, &logits[row * VOCABULARY..][..VOCABULARY], &params);
        let expected = [0, rows - 1].map(of).into();
        let logits = Tensor::new(&logits, &[rows, VOCABULARY], device)?;
        let mut batch = DecodeBatch::new(rows, 0, device)?;
        (0..rows).try_for_each(|row| batch.set_row(row, &[0], 0, &params, 0))?;
        let run = move || {
            sample_rows(&logits, &mut batch, SampleKind::of(&params))?;
            Ok(batch.tokens().clone())
        };
        Ok(Prepared::warm(run, expected))
    };
    reading("sample_rows", shape, rows, prepare)
}

/// A case that reads the logits of `rows` rows.
fn reading(
    op: &'static str,
    shape: String,
    rows: usize,
    prepare: impl Fn(&Device) -> Result<Prepared, KernelError> + 'static,
) -> Case {
    let dtype = FloatType::F32;
    Case {
        op,
        shape,
        format: "-".into(),
        dtype,
        bytes: rows * VOCABULARY * dtype.size(),
        flops: rows * VOCABULARY,
        arithmetic: Arithmetic::F32,
        cold_bytes: 0,
        prepare: Box::new(move |device, _| prepare(device)),
    }
}
