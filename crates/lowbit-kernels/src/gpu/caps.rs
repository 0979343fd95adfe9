//! What of a device decides which kernels it runs, and how they are cut.

/// A device's abilities and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caps {
    /// Units that run in step, where that is always the same.
    pub plane: Option<usize>,
    /// Multiprocessors, which run cubes at the same time. Where the device does not say, those of a large GPU, or of a CPU.
    pub multiprocessors: usize,
    /// Bytes that a cube's units can share.
    pub shared_memory: usize,
    /// Bytes of the last-level cache; 0 where the device does not say.
    pub cache: usize,
    /// Whether kernels may ask for tensor cores in PTX: from compute capability 8.0 on they multiply f16 and bf16.
    pub tensor_cores: bool,
    /// Whether four planes can multiply matrices together (`wgmma`): Hopper alone.
    pub warp_groups: bool,
    /// Whether a launch may begin before the one before it has ended: kernels then wait themselves.
    pub overlaps: bool,
    /// Whether the vendor's library of dense products is there.
    pub vendor_blas: bool,
}
