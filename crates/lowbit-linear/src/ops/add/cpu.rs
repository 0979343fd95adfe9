use crate::simd::{Simd, slices::Map};

pub(in crate::ops) struct Add;

impl Map<2> for Add {
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, [x, y]: [S::V; 2]) -> S::V {
        simd.add(x, y)
    }
}
