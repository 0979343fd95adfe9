//! The features of a Vulkan device that kernels can use: asked for once, enabled when the device is
//! opened, and told to CubeCL.

use super::device::checked;
use crate::KernelError;
use ash::vk;
use cubecl_core::WgpuCompilationOptions;
use cubecl_core::ir::features::{AtomicUsage, MmaConfig, Plane, TypeUsage};
use cubecl_core::ir::{
    AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, IntKind,
    MemoryDeviceProperties, Type, UIntKind,
};
use std::ffi::{CStr, c_void};

/// Abilities that are there or not, as the names of Vulkan's features have them.
#[derive(Clone, Debug, Default)]
pub(super) struct Features {
    // Needed.
    vulkan_memory_model: bool,
    buffer_device_address: bool,
    timeline_semaphore: bool,
    synchronization2: bool,
    // Of Vulkan 1.0 to 1.3.
    shader_int16: bool,
    shader_int64: bool,
    shader_float16: bool,
    shader_float64: bool,
    shader_int8: bool,
    storage_buffer16: bool,
    storage_buffer8: bool,
    subgroup_extended_types: bool,
    integer_dot_product: bool,
    // Of extensions.
    pub cooperative_matrix: bool,
    /// The layout of shared memory is the kernel's: with 8-bit and 16-bit numbers.
    explicit_shared_memory: bool,
    float_controls2: bool,
    /// bf16: the type, its dot product, and matrices of it.
    bfloat16: [bool; 3],
    maintenance9: bool,
    pub pipeline_executables: bool,
    pub memory_budget: bool,
}

/// A structure of features that ash 0.38 does not know, being younger.
#[repr(C)]
struct Flags<const N: usize> {
    s_type: vk::StructureType,
    p_next: *mut c_void,
    flags: [vk::Bool32; N],
}

impl<const N: usize> Flags<N> {
    /// `s_type` as the Vulkan registry has it, and the flags to enable; none to ask.
    fn new(s_type: i32, flags: [bool; N]) -> Self {
        let s_type = vk::StructureType::from_raw(s_type);
        Self { s_type, p_next: std::ptr::null_mut(), flags: flags.map(vk::Bool32::from) }
    }

    fn get(&self) -> [bool; N] {
        self.flags.map(|flag| flag == vk::TRUE)
    }
}

// SAFETY: the registry has these structures with so many flags, and lets them extend both.
unsafe impl<const N: usize> vk::ExtendsPhysicalDeviceFeatures2 for Flags<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> vk::ExtendsDeviceCreateInfo for Flags<N> {}

/// `VkPhysicalDeviceShaderBfloat16FeaturesKHR`
const BFLOAT16_FEATURES: i32 = 1_000_141_000;
/// `VkPhysicalDeviceMaintenance9FeaturesKHR`
const MAINTENANCE9_FEATURES: i32 = 1_000_584_000;
/// `VK_COMPONENT_TYPE_BFLOAT16_KHR`
const BFLOAT16_COMPONENT: i32 = 1_000_141_000;

const BFLOAT16: &CStr = c"VK_KHR_shader_bfloat16";
const MAINTENANCE9: &CStr = c"VK_KHR_maintenance9";

/// The structures that features are asked for with, and enabled with.
struct Chain<'a> {
    core: vk::PhysicalDeviceFeatures,
    v11: vk::PhysicalDeviceVulkan11Features<'a>,
    v12: vk::PhysicalDeviceVulkan12Features<'a>,
    v13: vk::PhysicalDeviceVulkan13Features<'a>,
    matrices: vk::PhysicalDeviceCooperativeMatrixFeaturesKHR<'a>,
    shared: vk::PhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR<'a>,
    floats: vk::PhysicalDeviceShaderFloatControls2FeaturesKHR<'a>,
    bfloat16: Flags<3>,
    maintenance9: Flags<1>,
    executables: vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR<'a>,
}

impl Features {
    /// The device's features of Vulkan 1.3 and of extensions.
    pub fn of(instance: &ash::Instance, device: vk::PhysicalDevice) -> Result<Self, KernelError> {
        // SAFETY: the device is the instance's.
        let listed = unsafe { instance.enumerate_device_extension_properties(device) };
        let listed = checked("vkEnumerateDeviceExtensionProperties", listed)?;
        let has =
            |name: &CStr| listed.iter().any(|it| it.extension_name_as_c_str().is_ok_and(|it| it == name));
        let mut chain = Self::default().chain();
        let mut asked = vk::PhysicalDeviceFeatures2::default()
            .push_next(&mut chain.v11)
            .push_next(&mut chain.v12)
            .push_next(&mut chain.v13);
        if has(ash::khr::cooperative_matrix::NAME) {
            asked = asked.push_next(&mut chain.matrices);
        }
        if has(ash::khr::workgroup_memory_explicit_layout::NAME) {
            asked = asked.push_next(&mut chain.shared);
        }
        if has(ash::khr::shader_float_controls2::NAME) {
            asked = asked.push_next(&mut chain.floats);
        }
        if has(BFLOAT16) {
            asked = asked.push_next(&mut chain.bfloat16);
        }
        if has(MAINTENANCE9) {
            asked = asked.push_next(&mut chain.maintenance9);
        }
        if has(ash::khr::pipeline_executable_properties::NAME) {
            asked = asked.push_next(&mut chain.executables);
        }
        // SAFETY: the device has the extensions of all structures in the chain.
        unsafe { instance.get_physical_device_features2(device, &mut asked) };
        chain.core = asked.features;
        Ok(Self { memory_budget: has(ash::ext::memory_budget::NAME), ..chain.features() })
    }

    /// The first of what kernels cannot do without that is not there.
    pub fn missing(&self) -> Option<&'static str> {
        let needed = [
            (self.buffer_device_address, "buffer device addresses (bufferDeviceAddress)"),
            (self.vulkan_memory_model, "Vulkan's memory model (vulkanMemoryModelDeviceScope)"),
            (self.timeline_semaphore, "timeline semaphores (timelineSemaphore)"),
            (self.synchronization2, "synchronization2"),
        ];
        needed.into_iter().find_map(|(is_there, name)| (!is_there).then_some(name))
    }

    /// The device with one queue of `family`, and all of these features enabled.
    pub fn open(
        &self,
        instance: &ash::Instance,
        device: vk::PhysicalDevice,
        family: u32,
    ) -> Result<ash::Device, KernelError> {
        let mut chain = self.chain();
        let has_bfloat16 = self.bfloat16.contains(&true);
        let extensions = [
            (self.cooperative_matrix, ash::khr::cooperative_matrix::NAME),
            (self.explicit_shared_memory, ash::khr::workgroup_memory_explicit_layout::NAME),
            (self.float_controls2, ash::khr::shader_float_controls2::NAME),
            (has_bfloat16, BFLOAT16),
            (self.maintenance9, MAINTENANCE9),
            (self.pipeline_executables, ash::khr::pipeline_executable_properties::NAME),
            (self.memory_budget, ash::ext::memory_budget::NAME),
        ];
        let names: Vec<_> =
            extensions.iter().filter(|(is_there, _)| *is_there).map(|(_, name)| name.as_ptr()).collect();
        let queues =
            [vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(&[1.0])];
        let mut info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&names)
            .enabled_features(&chain.core)
            .push_next(&mut chain.v11)
            .push_next(&mut chain.v12)
            .push_next(&mut chain.v13);
        if self.cooperative_matrix {
            info = info.push_next(&mut chain.matrices);
        }
        if self.explicit_shared_memory {
            info = info.push_next(&mut chain.shared);
        }
        if self.float_controls2 {
            info = info.push_next(&mut chain.floats);
        }
        if has_bfloat16 {
            info = info.push_next(&mut chain.bfloat16);
        }
        if self.maintenance9 {
            info = info.push_next(&mut chain.maintenance9);
        }
        if self.pipeline_executables {
            info = info.push_next(&mut chain.executables);
        }
        // SAFETY: the device has the extensions and features; all that `info` points at lives until
        // the call is done.
        checked("vkCreateDevice", unsafe { instance.create_device(device, &info, None) })
    }

    /// These features as Vulkan's structures.
    fn chain<'a>(&self) -> Chain<'a> {
        let core = vk::PhysicalDeviceFeatures::default()
            .shader_int16(self.shader_int16)
            .shader_int64(self.shader_int64)
            .shader_float64(self.shader_float64);
        let v11 = vk::PhysicalDeviceVulkan11Features::default()
            .storage_buffer16_bit_access(self.storage_buffer16)
            .uniform_and_storage_buffer16_bit_access(self.storage_buffer16);
        let v12 = vk::PhysicalDeviceVulkan12Features::default()
            .vulkan_memory_model(self.vulkan_memory_model)
            .vulkan_memory_model_device_scope(self.vulkan_memory_model)
            .buffer_device_address(self.buffer_device_address)
            .timeline_semaphore(self.timeline_semaphore)
            .shader_float16(self.shader_float16)
            .shader_int8(self.shader_int8)
            .storage_buffer8_bit_access(self.storage_buffer8)
            .uniform_and_storage_buffer8_bit_access(self.storage_buffer8)
            .shader_subgroup_extended_types(self.subgroup_extended_types);
        let v13 = vk::PhysicalDeviceVulkan13Features::default()
            .synchronization2(self.synchronization2)
            .shader_integer_dot_product(self.integer_dot_product);
        Chain {
            core,
            v11,
            v12,
            v13,
            matrices: vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default()
                .cooperative_matrix(self.cooperative_matrix),
            shared: vk::PhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR::default()
                .workgroup_memory_explicit_layout(self.explicit_shared_memory)
                .workgroup_memory_explicit_layout8_bit_access(self.explicit_shared_memory)
                .workgroup_memory_explicit_layout16_bit_access(self.explicit_shared_memory),
            floats: vk::PhysicalDeviceShaderFloatControls2FeaturesKHR::default()
                .shader_float_controls2(self.float_controls2),
            bfloat16: Flags::new(BFLOAT16_FEATURES, self.bfloat16),
            maintenance9: Flags::new(MAINTENANCE9_FEATURES, [self.maintenance9]),
            executables: vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
                .pipeline_executable_info(self.pipeline_executables),
        }
    }

    /// The features that CubeCL's compiler may use.
    pub fn options(&self, limits: &vk::PhysicalDeviceLimits) -> WgpuCompilationOptions {
        let mut options = WgpuCompilationOptions {
            supports_u64: self.shader_int64,
            supports_vulkan_compiler: true,
            ..Default::default()
        };
        options.vulkan.max_spirv_version = (1, 6);
        options.vulkan.max_vector_size = VECTOR;
        options.vulkan.push_constant_size = limits.max_push_constants_size as usize;
        options.vulkan.supports_dp4a = self.integer_dot_product;
        options.vulkan.supports_fp_fast_math = self.float_controls2;
        options.vulkan.supports_explicit_smem = self.explicit_shared_memory;
        options.vulkan.supports_arbitrary_bitwise = self.maintenance9;
        options
    }

    /// Registers what kernels may be made of.
    fn register(&self, properties: &mut DeviceProperties) {
        let (buffers16, buffers8) = (self.storage_buffer16, self.storage_buffer8);
        properties.register_address_type(AddressType::U32);
        let everywhere = [
            ElemType::Index,
            ElemType::UInt(UIntKind::U32),
            ElemType::Int(IntKind::I32),
            ElemType::Float(FloatKind::F32),
            ElemType::Bool,
        ];
        let mut types: Vec<_> = everywhere.map(|it| (true, it, TypeUsage::all())).into();
        for it in [ElemType::UInt(UIntKind::U64), ElemType::Int(IntKind::I64)] {
            types.push((self.shader_int64, it, TypeUsage::all()));
        }
        for it in [ElemType::UInt(UIntKind::U16), ElemType::Int(IntKind::I16)] {
            types.push((self.shader_int16, it, TypeUsage::maybe_store(buffers16)));
        }
        for it in [ElemType::UInt(UIntKind::U8), ElemType::Int(IntKind::I8)] {
            types.push((self.shader_int8, it, TypeUsage::maybe_store(buffers8)));
        }
        let bf16 = ElemType::Float(FloatKind::BF16);
        types.extend([
            (self.shader_float64, ElemType::Float(FloatKind::F64), TypeUsage::all()),
            (self.shader_float16, ElemType::Float(FloatKind::F16), TypeUsage::maybe_store(buffers16)),
            (self.bfloat16[0], bf16, TypeUsage::Conversion.into()),
            (self.bfloat16[0] && buffers16, bf16, TypeUsage::Buffer.into()),
            (self.bfloat16[1], bf16, TypeUsage::DotProduct.into()),
        ]);
        for (_, it, uses) in types.into_iter().filter(|(is_there, ..)| *is_there) {
            properties.register_type_usage(it, uses);
        }
        for it in [ElemType::Int(IntKind::I32), ElemType::UInt(UIntKind::U32)] {
            properties.register_atomic_type_usage(Type::atomic(it), AtomicUsage::all());
        }
        properties.features.plane.insert(Plane::Ops);
        properties.features.plane.insert(Plane::Sync);
        properties.features.plane.insert(Plane::NonUniformControlFlow);
        properties.features.device_memory_scope = true;
    }
}

impl Chain<'_> {
    /// The features that the structures report.
    fn features(&self) -> Features {
        let all = |flags: &[vk::Bool32]| flags.iter().all(|&flag| flag == vk::TRUE);
        let (core, v11, v12, v13) = (&self.core, &self.v11, &self.v12, &self.v13);
        Features {
            vulkan_memory_model: all(&[v12.vulkan_memory_model, v12.vulkan_memory_model_device_scope]),
            buffer_device_address: all(&[v12.buffer_device_address]),
            timeline_semaphore: all(&[v12.timeline_semaphore]),
            synchronization2: all(&[v13.synchronization2]),
            shader_int16: all(&[core.shader_int16]),
            shader_int64: all(&[core.shader_int64]),
            shader_float64: all(&[core.shader_float64]),
            shader_float16: all(&[v12.shader_float16]),
            shader_int8: all(&[v12.shader_int8]),
            storage_buffer16: all(&[
                v11.storage_buffer16_bit_access,
                v11.uniform_and_storage_buffer16_bit_access,
            ]),
            storage_buffer8: all(&[
                v12.storage_buffer8_bit_access,
                v12.uniform_and_storage_buffer8_bit_access,
            ]),
            subgroup_extended_types: all(&[v12.shader_subgroup_extended_types]),
            integer_dot_product: all(&[v13.shader_integer_dot_product]),
            cooperative_matrix: all(&[self.matrices.cooperative_matrix]),
            explicit_shared_memory: all(&[
                self.shared.workgroup_memory_explicit_layout,
                self.shared.workgroup_memory_explicit_layout8_bit_access,
                self.shared.workgroup_memory_explicit_layout16_bit_access,
            ]),
            float_controls2: all(&[self.floats.shader_float_controls2]),
            bfloat16: self.bfloat16.get(),
            maintenance9: self.maintenance9.get()[0],
            pipeline_executables: all(&[self.executables.pipeline_executable_info]),
            memory_budget: false,
        }
    }
}

/// Elements of the longest vector, without `VK_EXT_shader_long_vector`.
const VECTOR: usize = 4;

/// A device's numbers.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub limits: vk::PhysicalDeviceLimits,
    /// Units that run in step, at the least and at the most.
    pub plane: [u32; 2],
    /// Bytes that an allocation holds at the most.
    pub allocation: u64,
}

impl Sizes {
    pub fn of(instance: &ash::Instance, device: vk::PhysicalDevice) -> Self {
        let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
        let mut v13 = vk::PhysicalDeviceVulkan13Properties::default();
        let mut asked = vk::PhysicalDeviceProperties2::default().push_next(&mut v11).push_next(&mut v13);
        // SAFETY: the device is the instance's, and both structures are of Vulkan 1.3.
        unsafe { instance.get_physical_device_properties2(device, &mut asked) };
        let limits = asked.properties.limits;
        Self {
            limits,
            plane: [v13.min_subgroup_size, v13.max_subgroup_size],
            allocation: v11.max_memory_allocation_size.min(v13.max_buffer_size),
        }
    }
}

/// The properties that kernels are written from.
pub(super) fn properties(
    features: &Features,
    sizes: &Sizes,
    matrices: &[vk::CooperativeMatrixPropertiesKHR<'_>],
    name: &str,
) -> DeviceProperties {
    let limits = &sizes.limits;
    let [x, y, z] = limits.max_compute_work_group_size;
    let cubes = limits.max_compute_work_group_count.into_iter().min().unwrap_or(0);
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: sizes.plane[0],
        plane_size_max: sizes.plane[1],
        max_bindings: limits.max_push_constants_size / size_of::<vk::DeviceAddress>() as u32 - 1,
        max_shared_memory_size: limits.max_compute_shared_memory_size as usize,
        max_cube_count: (cubes, cubes, cubes),
        max_units_per_cube: limits.max_compute_work_group_invocations,
        max_cube_dim: (x, y, z),
        num_streaming_multiprocessors: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VECTOR,
        cube_mma_reserved_shared_memory: 0,
    };
    let memory = MemoryDeviceProperties::new(sizes.allocation, super::memory::ALIGNMENT);
    let identity = DeviceIdentity { name: name.into(), fingerprint: "vulkan".into(), physical: None };
    let timing = cubecl_core::profile::TimingMethod::Device;
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, timing, identity);
    features.register(&mut properties);
    properties.features.matmul.cmma.extend(matrices.iter().filter_map(|it| config(features, it)));
    properties
}

/// A product of cooperative matrices that a plane computes, in CubeCL's words.
fn config(features: &Features, it: &vk::CooperativeMatrixPropertiesKHR<'_>) -> Option<MmaConfig> {
    let is_plain = it.saturating_accumulation == vk::FALSE && it.result_type == it.c_type;
    if !is_plain || it.scope != vk::ScopeKHR::SUBGROUP {
        return None;
    }
    let elem = |component: vk::ComponentTypeKHR| {
        Some(match component {
            vk::ComponentTypeKHR::FLOAT16 => ElemType::Float(FloatKind::F16),
            vk::ComponentTypeKHR::FLOAT32 => ElemType::Float(FloatKind::F32),
            vk::ComponentTypeKHR::SINT8 => ElemType::Int(IntKind::I8),
            vk::ComponentTypeKHR::UINT8 => ElemType::UInt(UIntKind::U8),
            vk::ComponentTypeKHR::SINT32 => ElemType::Int(IntKind::I32),
            vk::ComponentTypeKHR::UINT32 => ElemType::UInt(UIntKind::U32),
            other if other.as_raw() == BFLOAT16_COMPONENT && features.bfloat16[2] => {
                ElemType::Float(FloatKind::BF16)
            }
            _ => return None,
        })
    };
    let [a_type, b_type, cd_type] = [elem(it.a_type)?, elem(it.b_type)?, elem(it.c_type)?];
    Some(MmaConfig { a_type, b_type, cd_type, m: it.m_size, n: it.n_size, k: it.k_size })
}
