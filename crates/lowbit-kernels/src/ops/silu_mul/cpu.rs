use crate::{
    Cpu, KernelError, Tensor,
    ops::elementwise,
    simd::{Simd, math::Math, slices::Map},
};

struct SiluMul;

impl Map<2> for SiluMul {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [gate, up]: [S::V; 2]) -> S::V {
        simd.mul(simd.silu(gate), up)
    }
}

pub(super) fn silu_mul(cpu: &Cpu, gate: &Tensor, up: &Tensor) -> Result<Tensor, KernelError> {
    elementwise::map(cpu, SiluMul, [gate, up])
}
