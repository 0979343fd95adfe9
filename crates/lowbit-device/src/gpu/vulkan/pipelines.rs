//! Kernels as pipelines: SPIR-V by CubeCL, machine code by the driver, and both kept on the disk.

use super::device::{Context, checked, described};
use crate::KernelError;
use crate::gpu::compile::{self, Code, DiskCache};
use crate::gpu::encoder::lock;
use ash::vk;
use cubecl_core::WgpuCompilationOptions;
use cubecl_core::prelude::{CubeKernel, KernelId};
use std::collections::HashMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A kernel ready to launch. It lives as long as its [`Pipelines`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Pipeline(vk::Pipeline);

impl Pipeline {
    pub fn handle(self) -> vk::Pipeline {
        self.0
    }
}

/// The files of a device's kernels, kept between runs.
#[derive(Debug)]
struct Kept {
    /// SPIR-V.
    modules: DiskCache,
    /// The driver's code for it: the data of a pipeline cache with one pipeline.
    machine: DiskCache,
}

/// The kernels of a device.
#[derive(Debug)]
pub(super) struct Pipelines {
    context: Arc<Context>,
    /// Of every kernel: addresses are all that it takes.
    pub layout: vk::PipelineLayout,
    options: WgpuCompilationOptions,
    kept: Option<Kept>,
    loaded: Mutex<HashMap<KernelId, Pipeline>>,
    /// Kernels that were not on the disk.
    compilations: AtomicUsize,
}

/// The target of the log that says what the driver made of a kernel.
const LOG: &str = "lowbit::vulkan";

impl Pipelines {
    /// With compiled pipelines kept in the folder `cache`.
    pub fn new(context: &Arc<Context>, cache: Option<&Path>) -> Result<Self, KernelError> {
        let ranges = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(context.sizes.limits.max_push_constants_size)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&ranges);
        // SAFETY: what `info` points at lives until the call is done.
        let layout = unsafe { context.device.create_pipeline_layout(&info, None) };
        let device = context.fingerprint();
        Ok(Self {
            layout: checked("vkCreatePipelineLayout", layout)?,
            options: context.features.options(&context.sizes.limits),
            kept: cache.map(|folder| Kept {
                modules: DiskCache::new(folder, &device, "spv"),
                machine: DiskCache::new(folder, &device, "pipeline"),
            }),
            loaded: Mutex::default(),
            compilations: AtomicUsize::new(0),
            context: context.clone(),
        })
    }

    /// True if loading the kernel compiles nothing.
    pub fn is_compiled(&self, kernel: &dyn CubeKernel) -> bool {
        let on_disk = |kept: &Kept| {
            let name = compile::name(kernel);
            kept.modules.has(&name) && kept.machine.has(&name)
        };
        lock(&self.loaded).contains_key(&kernel.id()) || self.kept.as_ref().is_some_and(on_disk)
    }

    pub fn compilations(&self) -> usize {
        self.compilations.load(Ordering::Relaxed)
    }

    /// The most buffers of a kernel: their addresses and that of its numbers are all that is
    /// pushed.
    pub fn most_buffers(&self) -> usize {
        self.options.vulkan.push_constant_size / size_of::<vk::DeviceAddress>() - 1
    }

    /// The kernel ready to launch: from memory, from the disk, or compiled.
    pub fn load(&self, kernel: &dyn CubeKernel) -> Result<Pipeline, KernelError> {
        let id = kernel.id();
        if let Some(pipeline) = lock(&self.loaded).get(&id) {
            return Ok(*pipeline);
        }
        let name = compile::name(kernel);
        let kept = self.kept.as_ref().and_then(|kept| kept.modules.get(&name));
        let code = match kept {
            Some(code) => code,
            None => {
                let code = compile::spirv(kernel, &self.options)?;
                self.compilations.fetch_add(1, Ordering::Relaxed);
                if let Some(kept) = &self.kept {
                    kept.modules.put(&name, &code);
                }
                code
            }
        };
        let pipeline = self.pipeline(&name, &code)?;
        let mut loaded = lock(&self.loaded);
        // Another thread may have made it meanwhile.
        if let Some(other) = loaded.get(&id) {
            // SAFETY: nobody else knows the pipeline.
            unsafe { self.context.device.destroy_pipeline(pipeline.0, None) };
            return Ok(*other);
        }
        loaded.insert(id, pipeline);
        Ok(pipeline)
    }

    /// The pipeline of a kernel's SPIR-V: with what the driver compiled of it before, or compiled
    /// and kept.
    fn pipeline(&self, name: &str, code: &Code) -> Result<Pipeline, KernelError> {
        let refuse = |call: &str, error: vk::Result| KernelError::Kernel {
            name: name.into(),
            problem: format!("{call}: {}", described(error)),
        };
        let device = &self.context.device;
        let kept = self.kept.as_ref().and_then(|kept| kept.machine.get(name));
        let kept = kept.map_or(vec![], |kept| kept.bytes);
        let info = vk::PipelineCacheCreateInfo::default().initial_data(&kept);
        // SAFETY: the data is what this driver gave (its digest was checked, and the file is named
        // by the driver); the driver checks its header.
        let cache = unsafe { device.create_pipeline_cache(&info, None) };
        let cache = cache.map_err(|error| refuse("vkCreatePipelineCache", error))?;
        let made = self.create(cache, code);
        let made = made.and_then(|(pipeline, was_found)| {
            if let Some(folder) = self.kept.as_ref().filter(|_| !was_found) {
                // SAFETY: the cache is this function's.
                let bytes = unsafe { device.get_pipeline_cache_data(cache) }?;
                // Not every driver says that it found what it did.
                if bytes != kept {
                    let code = Code { entry: code.entry.clone(), shared: code.shared, bytes };
                    folder.machine.put(name, &code);
                }
            }
            Ok(pipeline)
        });
        // SAFETY: as above, and no call uses it any more.
        unsafe { device.destroy_pipeline_cache(cache, None) };
        let pipeline = made.map_err(|error| refuse("vkCreateComputePipelines", error))?;
        self.report(name, pipeline);
        Ok(Pipeline(pipeline))
    }

    /// Makes a pipeline, and says whether the driver found it in `cache`.
    fn create(&self, cache: vk::PipelineCache, code: &Code) -> Result<(vk::Pipeline, bool), vk::Result> {
        let device = &self.context.device;
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&code.bytes);
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: the words are CubeCL's for a device with these features.
        let module = unsafe { device.create_shader_module(&info, None) }?;
        let entry = CString::new(code.entry.as_str()).expect("a function's name has no zero");
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(&entry);
        let mut feedback = vk::PipelineCreationFeedback::default();
        let mut stages = [vk::PipelineCreationFeedback::default()];
        let mut told = vk::PipelineCreationFeedbackCreateInfo::default()
            .pipeline_creation_feedback(&mut feedback)
            .pipeline_stage_creation_feedbacks(&mut stages);
        let flags = match self.reports() {
            true => vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR,
            false => vk::PipelineCreateFlags::empty(),
        };
        let info = [vk::ComputePipelineCreateInfo::default()
            .flags(flags)
            .stage(stage)
            .layout(self.layout)
            .push_next(&mut told)];
        // SAFETY: all that `info` points at lives until the call is done; the module is used by it
        // alone.
        let made = unsafe {
            let made = device.create_compute_pipelines(cache, &info, None);
            device.destroy_shader_module(module, None);
            made
        };
        let pipeline = made.map_err(|(_, error)| error)?[0];
        let found = vk::PipelineCreationFeedbackFlags::VALID
            | vk::PipelineCreationFeedbackFlags::APPLICATION_PIPELINE_CACHE_HIT;
        Ok((pipeline, feedback.flags.contains(found)))
    }

    fn reports(&self) -> bool {
        self.context.statistics.is_some() && log::log_enabled!(target: LOG, log::Level::Debug)
    }

    /// Logs what the driver tells of a pipeline: registers, shared memory, spills.
    fn report(&self, name: &str, pipeline: vk::Pipeline) {
        let Some(calls) = self.context.statistics.as_ref().filter(|_| self.reports()) else { return };
        let info = vk::PipelineInfoKHR::default().pipeline(pipeline);
        // SAFETY: the pipeline was made for this.
        let count = unsafe { calls.get_pipeline_executable_properties(&info) }.map_or(0, |all| all.len());
        let mut told = vec![];
        for index in 0..count as u32 {
            let info = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline).executable_index(index);
            // SAFETY: as above; there are so many executables.
            let statistics = unsafe { calls.get_pipeline_executable_statistics(&info) };
            told.extend(statistics.unwrap_or_default().iter().map(statistic));
        }
        log::debug!(target: LOG, "{name}: {}", told.join(", "));
    }
}

/// A statistic as its name and value.
fn statistic(it: &vk::PipelineExecutableStatisticKHR<'_>) -> String {
    let name = it.name_as_c_str().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    type Format = vk::PipelineExecutableStatisticFormatKHR;
    // SAFETY: the format says which of the values it is.
    let value = unsafe {
        match it.format {
            Format::BOOL32 => (it.value.b32 == vk::TRUE).to_string(),
            Format::INT64 => it.value.i64.to_string(),
            Format::UINT64 => it.value.u64.to_string(),
            _ => it.value.f64.to_string(),
        }
    };
    format!("{name} {value}")
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        let device = &self.context.device;
        // SAFETY: the queue, which used them, was waited for, and passes hold this value.
        unsafe {
            for pipeline in lock(&self.loaded).values() {
                device.destroy_pipeline(pipeline.0, None);
            }
            device.destroy_pipeline_layout(self.layout, None);
        }
    }
}
