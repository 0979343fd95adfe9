//! Devices that are not here, for kernels that are listed or compiled without one.

use super::float_kind;
use super::{Target, portable};
use crate::gpu::caps::Matrices;
use cubecl_core::ir::{DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties};
use cubecl_core::ir::{ElemType, FloatKind, features::MmaConfig};
use lowbit_formats::FloatType;
use std::sync::Arc;

impl Target {
    /// A device that is not here, with planes (CUDA's warps, Vulkan's subgroups) of `plane` units
    /// and vectors of up to `vector` elements.
    pub fn offline(plane: u32, vector: usize) -> Self {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: plane,
            plane_size_max: plane,
            max_bindings: 32,
            max_shared_memory_size: 48 << 10,
            max_cube_count: (i32::MAX as u32, u16::MAX.into(), u16::MAX.into()),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: None,
            num_tensor_cores: None,
            min_tensor_cores_dim: None,
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: vector,
            cube_mma_reserved_shared_memory: 0,
        };
        let identity = DeviceIdentity { name: String::new(), fingerprint: String::new(), physical: None };
        let properties = DeviceProperties::new(
            Default::default(),
            MemoryDeviceProperties::new(u64::MAX, 256),
            hardware,
            cubecl_core::profile::TimingMethod::Device,
            identity,
        );
        let caps = portable(&properties);
        Self { properties: Arc::new(properties), registers: Arc::default(), caps, binding: 1 }
    }

    /// The same with cooperative matrices of these sizes and types, whose sums are f32, for devices
    /// that are not here.
    pub fn with_matrices(mut self, of: Matrices, dtypes: &[FloatType]) -> Self {
        let properties = Arc::make_mut(&mut self.properties);
        for &dtype in dtypes {
            let (operand, sum) = (ElemType::Float(float_kind(dtype)), ElemType::Float(FloatKind::F32));
            let [m, n, k] = [of.m, of.n, of.k].map(|size| size as u32);
            let config = MmaConfig { a_type: operand, b_type: operand, cd_type: sum, m, n, k };
            properties.features.matmul.cmma.insert(config);
        }
        self.caps = portable(&self.properties);
        self
    }

    /// An Apple GPU as Metal reports it: the matrices that CubeCL lists there, and the least
    /// threadgroup memory.
    #[cfg(feature = "metal")]
    pub fn apple() -> Self {
        let mut target = Self::offline(32, 4).on_metal();
        Arc::make_mut(&mut target.properties).hardware.max_shared_memory_size = 32 << 10;
        target.with_matrices(Matrices { m: 8, n: 8, k: 8 }, &[FloatType::F16])
    }
}
