//! Vulkan's loader, the choice of a device, and the device itself.

use super::features::{Features, Sizes};
use crate::KernelError;
use crate::gpu::no_such_device;
use ash::prelude::VkResult;
use ash::vk;
use std::sync::atomic::{AtomicU32, Ordering};

/// An open device. Objects made with it hold it by reference count, so that it is closed last.
pub(super) struct Context {
    pub instance: ash::Instance,
    pub physical: vk::PhysicalDevice,
    pub device: ash::Device,
    /// The family of the one queue.
    pub family: u32,
    pub features: Features,
    pub sizes: Sizes,
    pub properties: vk::PhysicalDeviceProperties,
    /// Bits of a timestamp that count; 0 where the queue has none.
    pub timestamp_bits: u32,
    pub matrices: Vec<vk::CooperativeMatrixPropertiesKHR<'static>>,
    pub statistics: Option<ash::khr::pipeline_executable_properties::Device>,
    pub memory: vk::PhysicalDeviceMemoryProperties,
    /// Allocations of memory, of which a device has a limited number.
    pub allocations: AtomicU32,
    /// The loaded library, last.
    _entry: ash::Entry,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.product())
    }
}

/// As `--device` spells it.
pub(super) const NAME: &str = "vulkan";

/// An error of this device.
pub(super) fn refused(problem: impl Into<String>) -> KernelError {
    KernelError::Gpu { device: NAME.into(), problem: problem.into() }
}

/// The answer of a call, by its name.
pub(super) fn checked<T>(call: &str, answer: VkResult<T>) -> Result<T, KernelError> {
    answer.map_err(|error| refused(format!("{call}: {}", described(error))))
}

/// An error as Vulkan's documentation has it, with its name.
pub(super) fn described(error: vk::Result) -> String {
    format!("{error} ({error:?})")
}

fn absent(problem: impl Into<String>) -> KernelError {
    KernelError::NoGpu { device: NAME.into(), problem: problem.into() }
}

/// An instance that is destroyed unless a device takes it.
struct Instance(Option<(ash::Entry, ash::Instance)>);

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some((_, instance)) = self.0.take() {
            // SAFETY: nothing of the instance is used any more.
            unsafe { instance.destroy_instance(None) };
        }
    }
}

impl Context {
    /// The device of this number, counted from 0 with the best first: cards of their own, then
    /// parts of the processor, virtual ones, and programs. Without a number, the first of them that
    /// has what is needed.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] without a loader, a driver or a device of this number;
    /// [`KernelError::Gpu`] when a device lacks what is needed.
    pub fn open(number: Option<usize>) -> Result<Self, KernelError> {
        // SAFETY: the system's Vulkan loader is what it says.
        let entry = unsafe { ash::Entry::load() }.map_err(|_| {
            absent("Vulkan's loader is not installed (there is no libvulkan): install it, or choose another device")
        })?;
        // SAFETY: a plain call of the loader.
        let version =
            checked("vkEnumerateInstanceVersion", unsafe { entry.try_enumerate_instance_version() })?
                .unwrap_or(vk::API_VERSION_1_0);
        if version < vk::API_VERSION_1_3 {
            return Err(refused(format!("the loader knows Vulkan {}, and 1.3 is needed", shown(version))));
        }
        let application =
            vk::ApplicationInfo::default().engine_name(c"lowbit").api_version(vk::API_VERSION_1_3);
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: what `info` points at lives until the call is done.
        let instance = match unsafe { entry.create_instance(&info, None) } {
            Err(vk::Result::ERROR_INCOMPATIBLE_DRIVER) => {
                return Err(absent("no Vulkan driver is installed"));
            }
            made => checked("vkCreateInstance", made)?,
        };
        Self::choose(Instance(Some((entry, instance))), number)
    }

    fn choose(mut owner: Instance, number: Option<usize>) -> Result<Self, KernelError> {
        let (_, instance) = owner.0.as_ref().expect("it is there until a device takes it");
        // SAFETY: the instance is alive, and devices are its own.
        let devices = unsafe { instance.enumerate_physical_devices() };
        let mut devices: Vec<_> = checked("vkEnumeratePhysicalDevices", devices)?
            .into_iter()
            // SAFETY: as above.
            .map(|device| (device, unsafe { instance.get_physical_device_properties(device) }))
            .collect();
        devices.sort_by_key(|(_, properties)| rank(properties.device_type));
        if let Some(number) = number
            && !devices.is_empty()
        {
            let names: Vec<_> = devices.iter().map(|(_, properties)| product(properties)).collect();
            if number >= names.len() {
                return Err(no_such_device(NAME, number, &names));
            }
            devices = vec![devices.swap_remove(number)];
        }
        let mut refusal = None;
        for (physical, properties) in devices {
            match usable(instance, physical, &properties) {
                Ok((features, family)) => {
                    let device = features.open(instance, physical, family)?;
                    let (entry, instance) = owner.0.take().expect("it was there above");
                    return Self::new((entry, instance), (physical, properties), (device, family), features);
                }
                Err(error) => _ = refusal.get_or_insert(error),
            }
        }
        Err(refusal.unwrap_or_else(|| absent("no Vulkan driver has a device")))
    }

    fn new(
        (entry, instance): (ash::Entry, ash::Instance),
        (physical, properties): (vk::PhysicalDevice, vk::PhysicalDeviceProperties),
        (device, family): (ash::Device, u32),
        features: Features,
    ) -> Result<Self, KernelError> {
        // SAFETY: the device is the instance's.
        let (families, memory) = unsafe {
            let families = instance.get_physical_device_queue_family_properties(physical);
            (families, instance.get_physical_device_memory_properties(physical))
        };
        let statistics = features
            .pipeline_executables
            .then(|| ash::khr::pipeline_executable_properties::Device::new(&instance, &device));
        let mut context = Self {
            sizes: Sizes::of(&instance, physical),
            timestamp_bits: families[family as usize].timestamp_valid_bits,
            matrices: vec![],
            allocations: AtomicU32::new(0),
            _entry: entry,
            instance,
            physical,
            device,
            family,
            features,
            properties,
            statistics,
            memory,
        };
        context.matrices = context.listed_matrices()?;
        Ok(context)
    }

    /// The sizes and types of cooperative matrices that the device lists.
    fn listed_matrices(&self) -> Result<Vec<vk::CooperativeMatrixPropertiesKHR<'static>>, KernelError> {
        if !self.features.cooperative_matrix {
            return Ok(vec![]);
        }
        let calls = ash::khr::cooperative_matrix::Instance::new(&self._entry, &self.instance);
        // SAFETY: the device has the extension.
        let listed = unsafe { calls.get_physical_device_cooperative_matrix_properties(self.physical) };
        let listed = checked("vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", listed)?;
        // Nothing follows them: the lifetime is that of a chain of structures.
        Ok(listed
            .into_iter()
            .map(|it| vk::CooperativeMatrixPropertiesKHR {
                p_next: std::ptr::null_mut(),
                _marker: Default::default(),
                ..it
            })
            .collect())
    }

    /// As its maker calls it.
    pub fn product(&self) -> String {
        product(&self.properties)
    }

    pub fn is_software(&self) -> bool {
        self.properties.device_type == vk::PhysicalDeviceType::CPU
    }

    /// A name that tells compiled code of this device and driver from that of others.
    pub fn fingerprint(&self) -> String {
        let it = &self.properties;
        let uuid: String = it.pipeline_cache_uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("vulkan-{:x}-{:x}-{:x}-{uuid}", it.vendor_id, it.device_id, it.driver_version)
    }

    /// Bytes of the largest heap of the device's own memory, and which it is.
    pub fn heap(&self) -> (usize, u64) {
        let heaps = self.memory.memory_heaps_as_slice().iter().enumerate();
        let own = heaps.filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        own.map(|(at, heap)| (at, heap.size)).max_by_key(|(_, size)| *size).unwrap_or((0, 0))
    }

    /// Bytes of [`Self::heap`] that this process may still take, where the driver tells.
    pub fn free_memory(&self) -> Option<u64> {
        if !self.features.memory_budget {
            return None;
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut asked = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the device has the extension.
        unsafe { self.instance.get_physical_device_memory_properties2(self.physical, &mut asked) };
        let (heap, _) = self.heap();
        Some(budget.heap_budget[heap].saturating_sub(budget.heap_usage[heap]))
    }

    /// Memory of the first type among `bits` that has all of the first of `wanted`, else of the
    /// next.
    pub fn allocate(
        &self,
        requirements: &vk::MemoryRequirements,
        wanted: &[vk::MemoryPropertyFlags],
    ) -> VkResult<vk::DeviceMemory> {
        if self.allocations.load(Ordering::Relaxed) >= self.sizes.limits.max_memory_allocation_count {
            return Err(vk::Result::ERROR_TOO_MANY_OBJECTS);
        }
        let types = self.memory.memory_types_as_slice();
        let find = |flags: &vk::MemoryPropertyFlags| {
            let fits = |at: &usize| {
                requirements.memory_type_bits >> at & 1 == 1 && types[*at].property_flags.contains(*flags)
            };
            (0..types.len()).find(fits)
        };
        let index = wanted.iter().find_map(find).ok_or(vk::Result::ERROR_FEATURE_NOT_PRESENT)?;
        let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(requirements.size)
            .memory_type_index(index as u32)
            .push_next(&mut flags);
        // SAFETY: the type is one of the device's, and what `info` points at lives until the call
        // is done.
        let memory = unsafe { self.device.allocate_memory(&info, None) }?;
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(memory)
    }

    /// Gives memory back.
    ///
    /// # Safety
    /// It is this device's, and nothing uses it any more.
    pub unsafe fn free(&self, memory: vk::DeviceMemory) {
        // SAFETY: the caller answers for it.
        unsafe { self.device.free_memory(memory, None) };
        self.allocations.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all that was made with the device holds it, and is gone.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

fn product(properties: &vk::PhysicalDeviceProperties) -> String {
    properties.device_name_as_c_str().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// A version as Vulkan's documentation has it.
fn shown(version: u32) -> String {
    format!("{}.{}", vk::api_version_major(version), vk::api_version_minor(version))
}

/// Smaller is better.
fn rank(kind: vk::PhysicalDeviceType) -> usize {
    let kinds = [
        vk::PhysicalDeviceType::DISCRETE_GPU,
        vk::PhysicalDeviceType::INTEGRATED_GPU,
        vk::PhysicalDeviceType::VIRTUAL_GPU,
        vk::PhysicalDeviceType::CPU,
    ];
    kinds.iter().position(|known| *known == kind).unwrap_or(kinds.len())
}

/// The device's features and its first family of queues that compute.
///
/// # Errors
/// [`KernelError::Gpu`] with what it lacks.
fn usable(
    instance: &ash::Instance,
    device: vk::PhysicalDevice,
    properties: &vk::PhysicalDeviceProperties,
) -> Result<(Features, u32), KernelError> {
    let lacks = |what: String| refused(format!("{} {what}", product(properties)));
    if properties.api_version < vk::API_VERSION_1_3 {
        return Err(lacks(format!("has Vulkan {}, and 1.3 is needed", shown(properties.api_version))));
    }
    let features = Features::of(instance, device)?;
    if let Some(missing) = features.missing() {
        return Err(lacks(format!("has no {missing}, which is needed")));
    }
    // SAFETY: the device is the instance's.
    let families = unsafe { instance.get_physical_device_queue_family_properties(device) };
    let computes = |family: &vk::QueueFamilyProperties| family.queue_flags.contains(vk::QueueFlags::COMPUTE);
    let family = families.iter().position(computes);
    let family = family.ok_or_else(|| lacks("has no queue that computes".into()))?;
    Ok((features, family as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_come_before_programs() {
        let mut kinds = [
            vk::PhysicalDeviceType::CPU,
            vk::PhysicalDeviceType::OTHER,
            vk::PhysicalDeviceType::INTEGRATED_GPU,
            vk::PhysicalDeviceType::DISCRETE_GPU,
        ];
        kinds.sort_by_key(|kind| rank(*kind));
        assert_eq!(kinds[0], vk::PhysicalDeviceType::DISCRETE_GPU);
        assert_eq!(kinds[1], vk::PhysicalDeviceType::INTEGRATED_GPU);
        assert_eq!(kinds[2], vk::PhysicalDeviceType::CPU);
        assert_eq!(shown(vk::make_api_version(0, 1, 2, 7)), "1.2");
    }
}
