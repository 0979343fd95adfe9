//! The properties of a device that decide which kernels it runs, and how they are cut.

use lowbit_formats::FloatType;

/// Sizes of a product of cooperative matrices, which the units of a plane compute together:
/// `[m, k]` times `[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrices {
    /// Rows of the left operand.
    pub m: usize,
    /// Columns of the right operand.
    pub n: usize,
    /// Elements of each sum.
    pub k: usize,
}

/// A device's abilities and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Units that run in step, where that is always the same.
    pub plane: Option<usize>,
    /// The most units that run in step in any launch.
    pub largest_plane: usize,
    /// The most units of a cube.
    pub units: usize,
    /// Multiprocessors, which run cubes at the same time. Where the device does not say, those of a
    /// large GPU, or of a CPU.
    pub multiprocessors: usize,
    /// Bytes that a cube's units can share.
    pub shared_memory: usize,
    /// Bytes of the last-level cache; 0 where the device does not say.
    pub cache: usize,
    /// Cooperative matrices of f16 whose sums are f32 (Vulkan's `VK_KHR_cooperative_matrix`,
    /// Metal's `simdgroup_matrix`), if the device reports such.
    pub f16_matrices: Option<Matrices>,
    /// The same of bf16.
    pub bf16_matrices: Option<Matrices>,
    /// True if kernels may ask for tensor cores in PTX: from compute capability 8.0 on they
    /// multiply f16 and bf16.
    pub tensor_cores: bool,
    /// True if four planes can multiply matrices together (`wgmma`): Hopper alone.
    pub warp_groups: bool,
    /// True if a launch may begin before the one before it has ended: kernels then wait themselves.
    pub overlaps: bool,
    /// True if the vendor BLAS is there.
    pub vendor_blas: bool,
}

impl Caps {
    /// The device's cooperative matrices of `dtype`.
    pub fn matrices(&self, dtype: FloatType) -> Option<Matrices> {
        match dtype {
            FloatType::F32 => None,
            FloatType::F16 => self.f16_matrices,
            FloatType::BF16 => self.bf16_matrices,
        }
    }

    /// True if products run on matrix units of some kind.
    pub fn has_matrix_units(&self) -> bool {
        self.tensor_cores || self.f16_matrices.is_some()
    }
}
