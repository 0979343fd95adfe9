use super::{ConvGatedDeltaInputs, split};
use crate::inputs::rounding;
use crate::ops::causal_conv1d::reference::{self as convolution, causal_conv1d};
use crate::ops::gated_delta_rule::reference::{Bounded, of_inexact};
use crate::ops::{GatedDeltaInputs, GatedDeltaRule};
use crate::{KernelError, Tensor};
use lowbit_formats::{DType, FloatType};

/// Both in f64, one after the other: `y` and the last state, each with the bound of an f32 computation that goes `chunk`
/// tokens at a time and rounds q, k and v to `dtype`. Only the columns `(head, j)` that `wanted` names are computed.
pub(crate) fn conv_gated_delta_rule(
    inputs: &ConvGatedDeltaInputs,
    [conv_state, state]: [&Tensor; 2],
    params: &GatedDeltaRule,
    (dtype, chunk): (FloatType, usize),
    wanted: impl Fn(usize, usize) -> bool,
) -> Result<(Bounded, Bounded), KernelError> {
    let dims = super::check(inputs, [conv_state, state], params)?;
    let ConvGatedDeltaInputs { qkv, weight, activation, gates, cu_seqlens } = *inputs;
    let [channels, width] = [weight.dim(0), weight.dim(1)];
    let (x, weight) = (qkv.cast(DType::F32)?, weight.cast(DType::F32)?);
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for (s, tokens) in cu_seqlens.as_slice::<u32>()?.windows(2).enumerate() {
        let x = &x.as_slice()?[tokens[0] as usize * channels..tokens[1] as usize * channels];
        let per = channels * (width - 1);
        let state = &conv_state.as_slice()?[s * per..(s + 1) * per];
        let (y, magnitudes) = causal_conv1d(x, weight.as_slice()?, None, state, channels, activation);
        for (y, magnitude) in y.into_iter().zip(magnitudes) {
            let bound = convolution::bound(y, magnitude, width, activation);
            let value = y as f32;
            values.push(value);
            errors.push(bound + rounding(dtype, y.abs() + bound) + (f64::from(value) - y).abs());
        }
    }
    let whole = Tensor::new(&values, qkv.shape(), qkv.device())?;
    let [q, k, v] = split(&whole, dims)?;
    let (keys, rows) = (dims.key_heads * dims.key_dim, || errors.chunks_exact(channels));
    let errors = [
        rows().flat_map(|row| &row[..keys]).copied().collect(),
        rows().flat_map(|row| &row[keys..2 * keys]).copied().collect(),
        rows().flat_map(|row| &row[2 * keys..]).copied().collect(),
    ];
    let inputs = GatedDeltaInputs { q: &q, k: &k, v: &v, gates, cu_seqlens };
    of_inexact(&inputs, errors, state, params, chunk, wanted)
}
