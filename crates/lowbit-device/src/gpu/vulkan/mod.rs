//! Vulkan: a driver on `ash`, which loads the system's Vulkan when it is first used. CubeCL's
//! SPIR-V takes the addresses of its buffers as push constants, the numbers' last: there are no
//! descriptor sets.
//!
//! | file | holds |
//! |---|---|
//! | `device.rs`, `features.rs` | the choice of a device, and what it has |
//! | `memory.rs` | blocks of the device's memory, and the host's |
//! | `pipelines.rs` | kernels: compiled, and kept on the disk |
//! | `commands.rs` | launches and copies with the barriers between them |
//! | `queue.rs` | recording, submitting and waiting |
#![allow(unsafe_code)] // Vulkan's calls.

mod commands;
mod device;
mod features;
mod memory;
mod pipelines;
mod queue;
#[cfg(test)]
mod tests;

use super::compile::{self, Target};
use super::encoder::{Dispatch, Driver, Pass, Pending, Replay, Unlaunched, lock};
use super::recording::Recording;
use super::{Gpu, Memory};
use crate::KernelError;
use ash::vk;
use commands::{Commands, Launch};
use cubecl_core::InfoBuilder;
use cubecl_core::ir::AddressType;
use cubecl_core::prelude::CubeKernel;
use device::{Context, NAME, checked, refused};
use memory::{Block, Pool};
use pipelines::Pipelines;
use queue::{Queue, Slot};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

/// A choice of Vulkan device, and its cache of kernels. The program decides; nothing is read from
/// the environment, except by Vulkan's loader itself.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct VulkanOptions {
    /// Keeps compiled kernels between runs.
    pub cache: Option<PathBuf>,
    /// The device's number, counted from 0 with the best first; without it the best that has what
    /// is needed.
    pub device: Option<usize>,
}

impl VulkanOptions {
    /// With compiled kernels kept in the folder `cache`.
    #[must_use]
    pub fn with_cache(self, cache: impl Into<PathBuf>) -> Self {
        Self { cache: Some(cache.into()), ..self }
    }

    /// With the device of this number, see [`Self::device`].
    #[must_use]
    pub fn with_device(self, number: usize) -> Self {
        Self { device: Some(number), ..self }
    }
}

/// A Vulkan device with one queue, which everything goes through in order.
#[derive(Debug)]
struct Vulkan {
    context: Arc<Context>,
    target: Target,
    queue: Arc<Queue>,
    pool: Arc<Pool>,
    /// The captures of threads.
    captures: Mutex<HashMap<ThreadId, Capture>>,
}

/// A pass that is being captured.
#[derive(Debug)]
struct Capture {
    commands: Commands,
    memory: Recording,
}

impl Gpu {
    /// The Vulkan device that `options` name, or the machine's best: a discrete GPU before an
    /// integrated one, a software driver last.
    ///
    /// # Errors
    /// [`KernelError::NoGpu`] when there is none, or none of this number; [`KernelError::Gpu`] when
    /// it cannot run the kernels.
    pub fn vulkan(options: &VulkanOptions) -> Result<Self, KernelError> {
        let context = Arc::new(Context::open(options.device)?);
        let properties =
            features::properties(&context.features, &context.sizes, &context.matrices, &context.product());
        let pipelines = Pipelines::new(&context, options.cache.as_deref())?;
        Ok(Self(Arc::new(Vulkan {
            target: Target::new(Arc::new(properties), Arc::default()),
            pool: Pool::new(context.clone()),
            queue: Arc::new(Queue::new(&context, pipelines)?),
            captures: Mutex::default(),
            context,
        })))
    }
}

impl Vulkan {
    fn block(memory: &Memory) -> &Block {
        memory.range()
    }

    /// Memory from the pool, or, where none is left, from what nobody has any more.
    fn take(&self, bytes: usize) -> Result<Memory, KernelError> {
        if let Some(block) = self.pool.allocate(bytes)? {
            return Ok(Memory::new(block));
        }
        self.queue.when_idle(|| self.pool.release())?;
        let block = self.pool.allocate(bytes)?;
        block.map(Memory::new).ok_or_else(|| self.pool.shortage(bytes))
    }

    /// Checks that the device can launch this many cubes, with this many buffers.
    fn check(&self, kernel: &dyn CubeKernel, cubes: [u32; 3], buffers: usize) -> Result<(), KernelError> {
        let most = self.context.sizes.limits.max_compute_work_group_count;
        if cubes.iter().zip(&most).any(|(asked, most)| asked > most) {
            let name = compile::name(kernel);
            return Err(refused(format!("{name}: {cubes:?} cubes were asked for, and it launches {most:?}")));
        }
        let most = self.queue.pipelines.most_buffers();
        if buffers > most {
            let name = compile::name(kernel);
            return Err(refused(format!("{name} takes {buffers} buffers, and the device takes {most}")));
        }
        Ok(())
    }
}

impl Driver for Vulkan {
    fn name(&self) -> String {
        NAME.into()
    }

    fn product(&self) -> String {
        self.context.product()
    }

    fn is_software(&self) -> bool {
        self.context.is_software()
    }

    fn target(&self) -> &Target {
        &self.target
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, KernelError> {
        if let Some(capture) = lock(&self.captures).get_mut(&std::thread::current().id()) {
            if let Some(memory) = capture.memory.reuse(bytes) {
                return Ok(memory);
            }
            let memory = self.take(bytes)?;
            capture.memory.add(bytes, &memory);
            return Ok(memory);
        }
        self.take(bytes)
    }

    fn write(&self, memory: &Memory, start: usize, bytes: &[u8]) -> Result<(), KernelError> {
        self.forbid_in_capture("memory was written")?;
        match bytes {
            [] => Ok(()),
            _ => self.queue.write(Self::block(memory), start, bytes),
        }
    }

    fn download(&self, memory: &Memory, start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        self.forbid_in_capture("memory was read")?;
        self.queue.read(Self::block(memory), start, bytes)
    }

    fn read_later(
        &self,
        memory: &Memory,
        start: usize,
        count: usize,
    ) -> Result<Box<dyn Pending>, KernelError> {
        self.forbid_in_capture("memory was read")?;
        let (slot, done) = self.queue.fetch_words(Self::block(memory), start, count)?;
        Ok(Box::new(Arriving { queue: self.queue.clone(), slot, words: count, done }))
    }

    unsafe fn launch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError> {
        let Dispatch { kernel, cubes, buffers, written, scalars, early: _ } = dispatch;
        self.check(&*kernel, cubes, buffers.len())?;
        let pipeline = self.queue.pipelines.load(&*kernel)?;
        let addresses: Vec<_> =
            buffers.iter().map(|&(memory, start)| Self::block(memory).address + start as u64).collect();
        let ranges: Vec<_> = (0u32..)
            .zip(&buffers)
            .map(|(at, &(memory, _))| (Self::block(memory).range(), written >> at & 1 == 1))
            .collect();
        let info = info(&scalars, buffers.len());
        let launch = Launch { pipeline, cubes, addresses: &addresses, ranges: &ranges, info: &info };
        let mut captures = lock(&self.captures);
        match captures.get_mut(&std::thread::current().id()) {
            Some(capture) => {
                capture.memory.launch(buffers.iter().map(|&(memory, _)| memory));
                // SAFETY: the caller answers for it, and the pass keeps the memory.
                unsafe { capture.commands.launch(self.queue.pipelines.layout, &launch) }
            }
            None => {
                drop(captures);
                // SAFETY: the caller answers for it. Freed blocks are only given to what comes
                // later in the queue, or, when all before is done, to the driver.
                unsafe { self.queue.launch(&launch) }
            }
        }
    }

    fn is_compiled(&self, kernel: &dyn CubeKernel) -> bool {
        self.queue.pipelines.is_compiled(kernel)
    }

    fn compile(&self, Unlaunched { kernel, .. }: Unlaunched) -> Result<(), KernelError> {
        self.queue.pipelines.load(&*kernel).map(drop)
    }

    fn compilations(&self) -> usize {
        self.queue.pipelines.compilations()
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.queue.synchronize()
    }

    fn is_capturing(&self) -> bool {
        lock(&self.captures).contains_key(&std::thread::current().id())
    }

    /// Other threads may launch meanwhile: theirs are not captured.
    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError> {
        let thread = std::thread::current().id();
        self.forbid_in_capture("a pass was captured")?;
        work()?;
        let capture = Capture { commands: Commands::replayed(&self.context)?, memory: Recording::default() };
        lock(&self.captures).insert(thread, capture);
        let done = work();
        let capture = lock(&self.captures).remove(&thread);
        done?;
        let Capture { mut commands, memory } =
            capture.ok_or_else(|| refused("the captured pass was lost"))?;
        let buffer = commands.end()?;
        log::debug!(
            target: "lowbit::vulkan",
            "captured {} launches with {} barriers", commands.count, commands.barriers
        );
        let queue = self.queue.clone();
        let captured = Captured { queue, buffer, launches: commands.count, commands: Some(commands) };
        Ok(Pass::new(captured, memory.into_memory()))
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError> {
        self.forbid_in_capture("work was timed")?;
        let queries = Queries::new(&self.context, &self.queue)?;
        // SAFETY: `queries` waits for the device before it is dropped.
        unsafe { self.queue.timestamp(queries.pool, 0)? };
        let done = work();
        // SAFETY: as above.
        unsafe { self.queue.timestamp(queries.pool, 1)? };
        self.queue.synchronize()?;
        done?;
        queries.between()
    }

    fn total_memory(&self) -> Option<usize> {
        let (_, size) = self.context.heap();
        (size > 0).then_some(size as usize)
    }

    fn copy_bandwidth(&self) -> Result<Option<f64>, KernelError> {
        let most: usize = if self.is_software() { 64 << 20 } else { 1 << 30 };
        let size = most.min(self.context.sizes.allocation as usize);
        let (from, to) = (self.allocate(size)?, self.allocate(size)?);
        let mut best = 0.0f64;
        for _ in 0..10 {
            let (from, to) = (Self::block(&from), Self::block(&to));
            let time = self.time(&mut || self.queue.copy(from, to, size as u64))?;
            best = best.max(2.0 * size as f64 / time.as_secs_f64());
        }
        Ok(Some(best))
    }
}

/// The numbers, then the buffers' lengths, which no kernel asks for.
fn info(scalars: &[u32], buffers: usize) -> Vec<u64> {
    let mut builder = InfoBuilder::default();
    scalars.iter().for_each(|&scalar| builder.scalars.push(scalar));
    (0..buffers).for_each(|_| builder.metadata.register_buffer(0, AddressType::U32));
    builder.finish(AddressType::U32).data
}

/// Words on their way to a slot.
#[derive(Debug)]
struct Arriving {
    queue: Arc<Queue>,
    slot: Slot,
    words: usize,
    /// The timeline's count at which they have arrived.
    done: u64,
}

impl Pending for Arriving {
    fn wait(self: Box<Self>) -> Result<Vec<u32>, KernelError> {
        self.queue.words(&self.slot, self.words, self.done)
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.queue.give_back(self.slot.clone());
    }
}

/// A pass, captured.
#[derive(Debug)]
struct Captured {
    queue: Arc<Queue>,
    buffer: vk::CommandBuffer,
    launches: usize,
    /// There until it is dropped.
    commands: Option<Commands>,
}

impl Replay for Captured {
    fn replay(&self) -> Result<(), KernelError> {
        // SAFETY: it was ended when it was captured, and is dropped when the device is done with
        // it.
        unsafe { self.queue.replay(self.buffer, self.launches) }
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if let Some(commands) = self.commands.take() {
            self.queue.bury(commands);
        }
    }
}

/// Two timestamps.
struct Queries<'a> {
    context: &'a Context,
    queue: &'a Queue,
    pool: vk::QueryPool,
}

impl<'a> Queries<'a> {
    fn new(context: &'a Context, queue: &'a Queue) -> Result<Self, KernelError> {
        if context.timestamp_bits == 0 {
            return Err(refused("its queue has no timestamps"));
        }
        let info = vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(2);
        // SAFETY: what `info` points at lives until the call is done.
        let pool = unsafe { context.device.create_query_pool(&info, None) };
        Ok(Self { context, queue, pool: checked("vkCreateQueryPool", pool)? })
    }

    /// The time between both. The device has taken them.
    fn between(&self) -> Result<Duration, KernelError> {
        let mut ticks = [0u64; 2];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: the pool has two queries of this size.
        let done = unsafe { self.context.device.get_query_pool_results(self.pool, 0, &mut ticks, flags) };
        checked("vkGetQueryPoolResults", done)?;
        let mask = u64::MAX >> (64 - self.context.timestamp_bits);
        let passed = ticks[1].wrapping_sub(ticks[0]) & mask;
        let nanoseconds = passed as f64 * f64::from(self.context.sizes.limits.timestamp_period);
        Ok(Duration::from_secs_f64(nanoseconds / 1e9))
    }
}

impl Drop for Queries<'_> {
    fn drop(&mut self) {
        // After an error the device may still be at it.
        let _ = self.queue.synchronize();
        // SAFETY: the device was waited for.
        unsafe { self.context.device.destroy_query_pool(self.pool, None) };
    }
}
