//! Times of attention's kernels by query rows, which the thresholds of `policy.rs` go by.

use super::AttentionParams;
use super::gpu::attention_by;
use super::policy::{self, Choice};
use crate::bench::median;
use crate::gpu::Gpu;
use crate::ops::testing::{gpu, normal};
use crate::{Device, Tensor};
use lowbit_formats::FloatType;
use numcheck::Random;

/// Runs of a pass: as many copies of keys and values, so that a cache on the chip has none of them.
const COPIES: usize = 8;

/// Microseconds of the kernel that `choice` says, and of combining its parts.
fn microseconds(
    gpu: &Gpu,
    (q, cache, positions): (&Tensor, &[[Tensor; 2]], &Tensor),
    params: &AttentionParams,
    choice: (Choice, usize),
) -> f64 {
    let pass = gpu.capture(|| {
        for [k, v] in cache {
            attention_by(gpu, [q, k, v, positions], None, params, |_| choice)?;
        }
        Ok(())
    });
    let pass = pass.unwrap();
    let time = |_| gpu.time(|| pass.replay()).unwrap().as_secs_f64() / cache.len() as f64;
    1e6 * median((0..9).map(time).collect())
}

/// For `MATRICES_FROM`: prints the times of cooperative matrices beside those of the kernel for any
/// rows.
#[test]
#[ignore = "a measurement"]
fn few_rows_by_matrices_and_by_streams_are_timed() {
    let (device, dtype, keys) = (gpu(), FloatType::F16, 8192);
    let Device::Gpu(queue) = &device else { unreachable!() };
    let mut random = Random::new(1);
    // Of Llama-3-8B and Qwen3.5-9B.
    for (group, heads, width) in [(4, 8, 128), (4, 4, 256)] {
        let params = AttentionParams::causal((width as f32).powf(-0.5));
        let mut operand = |shape: &[usize]| normal(&mut random, shape, dtype, &device).0;
        let cache = [(); COPIES].map(|()| [(); 2].map(|()| operand(&[heads, keys, width])));
        for rows in [4, 8, 12, 16, 20, 24, 32, 48, 64, 128] {
            let tokens = rows / group;
            let q = operand(&[tokens, group * heads, width]);
            let positions: Vec<u32> = (0..keys as u32).skip(keys - tokens).collect();
            let positions = Tensor::new(&positions, &[tokens], &device).unwrap();
            let sizes = [rows, heads, keys, width, width];
            let (stream, splits) = policy::stream_config([dtype; 2], sizes, queue.target().caps());
            let time = |choice| microseconds(queue, (&q, &cache, &positions), &params, choice);
            let streams = time((Choice::Stream(stream), splits));
            let matrices = policy::cmma_tiles([dtype; 2], sizes, queue.target()).into_iter().next();
            let matrices = matrices.map(|(tile, splits)| time((Choice::CmmaTile(tile), splits)));
            let matrices = matrices.map_or("none".into(), |time| format!("{time:.1} us"));
            println!("{rows} rows, D {width}: streams {streams:.1} us, matrices {matrices}");
        }
    }
}
