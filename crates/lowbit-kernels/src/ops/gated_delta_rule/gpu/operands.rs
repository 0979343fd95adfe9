//! The data that the kernels of both chunked forms, `../cuda/` and `chunked/`, have in common:
//! their operands, and the results that the first of them leaves to the second.

use super::Problem;
use crate::KernelError;
use crate::gpu::launch::LaunchArgs;
use crate::gpu::{Memory, sequences};
use crate::ops::gated_delta_rule::{CHECK, GatedDeltaInputs, Rule};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// The operands of the rule that `T`, `P` and the gates are made of.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops::gated_delta_rule) struct Inputs {
    pub q: Box<[Vector<u32, Const<4>>]>,
    pub k: Box<[Vector<u32, Const<4>>]>,
    pub log_decay: Box<[f32]>,
    pub beta: Box<[f32]>,
}

/// The operands of a pass: keys, queries, values, and the first kernel's results; of values and
/// gates elements or vectors `V` and `G`.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
pub(in crate::ops::gated_delta_rule) struct Operands<V: CubePrimitive, G: CubePrimitive> {
    pub q: Box<[Vector<u32, Const<4>>]>,
    pub k: Box<[Vector<u32, Const<4>>]>,
    pub v: Box<[V]>,
    pub transforms: Box<[Vector<u32, Const<4>>]>,
    pub pairs: Box<[Vector<u32, Const<4>>]>,
    pub gates: Box<[G]>,
}

/// The results that the first kernel leaves to the second, for each slot of a chunk and each value
/// head. Without a correction, `delta` is `v` in the second kernel, and the betas are factors
/// of `P` and of `D[last]`: there is no `T`.
pub(in crate::ops::gated_delta_rule) struct Prepared {
    /// `T`: 16-bit floats, `[tokens, tokens]` of a chunk. Blocks of 16 by 16 above the diagonal are
    /// undefined.
    pub transforms: Memory,
    /// `P`, likewise.
    pub pairs: Memory,
    /// Floats: `g` of each token, then `D[last]` of each.
    pub gates: Memory,
}

impl Prepared {
    /// Room for chunks of `tokens` tokens.
    fn new(problem: &Problem, slots: usize, tokens: usize) -> Result<Self, KernelError> {
        let (gpu, value_heads) = (problem.gpu, problem.dims.value_heads);
        let matrices = slots * value_heads * tokens * tokens;
        CHECK.index(matrices)?;
        let transforms = match problem.params.rule {
            Rule::Delta => 2 * matrices,
            // An unused operand gets a placeholder buffer.
            Rule::Additive => 16,
        };
        Ok(Self {
            transforms: gpu.allocate(transforms)?,
            pairs: gpu.allocate(2 * matrices)?,
            gates: gpu.allocate(4 * slots * value_heads * 2 * tokens)?,
        })
    }
}

impl Problem<'_> {
    /// The operands of a pass.
    pub(in crate::ops::gated_delta_rule) fn operands<'a>(
        &'a self,
        prepared: &'a Prepared,
    ) -> Result<OperandsArgs<'a>, KernelError> {
        let GatedDeltaInputs { q, k, v, .. } = *self.inputs;
        Ok(OperandsArgs {
            q: q.buffer()?,
            k: k.buffer()?,
            v: v.buffer()?,
            transforms: (&prepared.transforms).into(),
            pairs: (&prepared.pairs).into(),
            gates: (&prepared.gates).into(),
        })
    }
}

/// Has `launch` prepare all chunks of `tokens` tokens, in as many slots as it is given, and pass
/// over them. Its q and k are normalised.
pub(in crate::ops::gated_delta_rule) fn in_chunks(
    problem: &Problem,
    tokens: usize,
    launch: impl FnOnce(&Problem, usize, &Prepared) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let Problem { inputs, params, .. } = *problem;
    let (q, k) = (params.normalised(inputs.q)?, params.normalised(inputs.k)?);
    let inputs = GatedDeltaInputs { q: &q, k: &k, ..*inputs };
    let slots = sequences::slots(q.dim(0), inputs.sequences(), tokens);
    let prepared = Prepared::new(problem, slots, tokens)?;
    launch(&Problem { inputs: &inputs, ..*problem }, slots, &prepared)
}
