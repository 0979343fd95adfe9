use super::dequant_gather;
use crate::random::Random;
use crate::{
    Device, KernelError, QuantizedTensor, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, Prepared, Run},
    inputs,
    ops::quantized_matmul::reference,
};
use lowbit_formats::{FloatType, Format};

inventory::submit!(Cases(cases));

/// Qwen3.5-0.8B's embeddings and a prompt of 512 tokens.
const VOCAB: usize = 248_320;
const K: usize = 1024;
const TOKENS: usize = 512;

fn cases() -> Vec<Case> {
    let names = ["affine4g64", "affine6g64", "affine8g64", "Q8_0", "Q4_K", "Q6_K"];
    inputs::formats(&names).into_iter().map(case).collect()
}

fn case(format: Format) -> Case {
    let row: usize = format.components(K).map_or(0, |all| all.iter().map(|c| c.row_bytes()).sum());
    Case {
        op: "dequant_gather",
        shape: format!("T={TOKENS} V={VOCAB} K={K}"),
        format: format.to_string(),
        dtype: FloatType::F32,
        bytes: TOKENS * (row + K * size_of::<f32>()),
        flops: 0,
        arithmetic: Arithmetic::F32,
        cold_bytes: TOKENS * row,
        prepare: Box::new(move |device, copies| {
            let table = inputs::weight(format, &[VOCAB, K], 2, &device.host()?)?;
            let distinct = reference::decoded(&table, inputs::DISTINCT)?;
            let value = |(i, id): (usize, u32)| {
                let row = &distinct[id as usize % inputs::DISTINCT * K..][..K];
                let exact =
                    |(j, &y): (usize, &f32)| Expected { index: i * K + j, value: y.into(), bound: 0.0 };
                row.iter().enumerate().map(exact).collect::<Vec<_>>()
            };
            let expected = ids(0).into_iter().enumerate().flat_map(value).collect();
            let tables = inputs::copies(&table, (copies * TOKENS).div_ceil(VOCAB))?;
            let tables = tables.iter().map(|table| table.to_device(device)).collect::<Result<Vec<_>, _>>()?;
            let runs = (0..copies).map(|i| run(&tables[i % tables.len()], i, device));
            Ok(Prepared { runs: runs.collect::<Result<_, _>>()?, expected })
        }),
    }
}

fn ids(seed: usize) -> Vec<u32> {
    let mut random = Random::new(seed as u64);
    (0..TOKENS).map(|_| random.below(VOCAB) as u32).collect()
}

fn run(table: &QuantizedTensor, seed: usize, device: &Device) -> Result<Run, KernelError> {
    let (table, ids) = (table.clone(), Tensor::new(&ids(seed), &[TOKENS], device)?);
    Ok(Box::new(move || dequant_gather(&table, &ids, FloatType::F32)))
}
