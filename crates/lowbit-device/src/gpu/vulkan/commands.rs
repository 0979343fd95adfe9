//! A command buffer as it is recorded: launches and copies, with a barrier before each that touches
//! what an earlier one wrote, or writes what an earlier one touched.

use super::device::{Context, checked};
use super::memory::{HostMemory, Use};
use super::pipelines::Pipeline;
use crate::KernelError;
use ash::vk;
use std::sync::Arc;
use vk::{AccessFlags2 as Access, PipelineStageFlags2 as Stage};

/// Addresses from the first to behind the last.
pub(super) type Range = [u64; 2];

/// The ranges that commands since the last barrier read and wrote.
#[derive(Debug, Default)]
struct Touched {
    read: Vec<Range>,
    written: Vec<Range>,
}

impl Touched {
    /// True if a command that touches these must wait. Each is with whether the command writes it.
    fn conflicts(&self, ranges: &[(Range, bool)]) -> bool {
        let overlaps = |a: &Range, b: &Range| a[0] < b[1] && b[0] < a[1];
        let any = |list: &[Range], range: &Range| list.iter().any(|other| overlaps(other, range));
        ranges
            .iter()
            .any(|(range, written)| any(&self.written, range) || (*written && any(&self.read, range)))
    }

    fn add(&mut self, ranges: &[(Range, bool)]) {
        for &(range, written) in ranges {
            if written { &mut self.written } else { &mut self.read }.push(range);
        }
    }

    fn clear(&mut self) {
        self.read.clear();
        self.written.clear();
    }

    fn len(&self) -> usize {
        self.read.len() + self.written.len()
    }
}

/// A launch, ready to record.
pub(super) struct Launch<'a> {
    pub pipeline: Pipeline,
    pub cubes: [u32; 3],
    /// Addresses of the buffers in the kernel's order.
    pub addresses: &'a [u64],
    /// Their ranges, each with a flag that says whether the kernel writes it.
    pub ranges: &'a [(Range, bool)],
    /// The numbers, as CubeCL lays them out.
    pub info: &'a [u64],
}

/// A command buffer, and the numbers that its launches read.
#[derive(Debug)]
pub(super) struct Commands {
    context: Arc<Context>,
    pool: vk::CommandPool,
    buffer: vk::CommandBuffer,
    usage: vk::CommandBufferUsageFlags,
    touched: Touched,
    /// True if it has commands other than launches.
    transfers: bool,
    /// Numbers of launches, and how many bytes of the last memory are taken.
    numbers: Vec<HostMemory>,
    current: usize,
    filled: usize,
    /// Commands since it was begun, and barriers between them.
    pub count: usize,
    pub barriers: usize,
    /// True if the host reads what it writes.
    host_reads: bool,
}

/// Launches, and what they do with memory.
const LAUNCHES: (Stage, Access) = (
    Stage::COMPUTE_SHADER,
    Access::from_raw(Access::SHADER_STORAGE_READ.as_raw() | Access::SHADER_STORAGE_WRITE.as_raw()),
);

/// Launches and all other commands.
const ALL: (Stage, Access) = (
    Stage::from_raw(Stage::COMPUTE_SHADER.as_raw() | Stage::ALL_TRANSFER.as_raw()),
    Access::from_raw(Access::MEMORY_READ.as_raw() | Access::MEMORY_WRITE.as_raw()),
);

/// Bytes of numbers that are allocated at once.
const NUMBERS: usize = 64 << 10;

/// More ranges are not searched: a barrier comes first.
const MOST_TOUCHED: usize = 256;

impl Commands {
    /// Commands that are submitted once, begun.
    pub fn once(context: &Arc<Context>) -> Result<Self, KernelError> {
        Self::new(context, vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT)
    }

    /// Commands that may be submitted again while the device is still at them, begun.
    pub fn replayed(context: &Arc<Context>) -> Result<Self, KernelError> {
        Self::new(context, vk::CommandBufferUsageFlags::SIMULTANEOUS_USE)
    }

    fn new(context: &Arc<Context>, usage: vk::CommandBufferUsageFlags) -> Result<Self, KernelError> {
        let device = &context.device;
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(context.family);
        // SAFETY: the family is the device's; the pool is destroyed with what is made here.
        let pool = checked("vkCreateCommandPool", unsafe { device.create_command_pool(&info, None) })?;
        let mut commands = Self {
            context: context.clone(),
            pool,
            buffer: vk::CommandBuffer::null(),
            usage,
            touched: Touched::default(),
            transfers: false,
            numbers: vec![],
            current: 0,
            filled: 0,
            count: 0,
            barriers: 0,
            host_reads: false,
        };
        let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
        // SAFETY: the pool is used by this thread alone until it is returned.
        let buffers = unsafe { context.device.allocate_command_buffers(&info) };
        commands.buffer = checked("vkAllocateCommandBuffers", buffers)?[0];
        commands.begin()?;
        Ok(commands)
    }

    /// Begins anew. The device has done what was recorded before.
    pub fn begin(&mut self) -> Result<(), KernelError> {
        let device = &self.context.device;
        (self.current, self.filled, self.count, self.barriers) = (0, 0, 0, 0);
        self.host_reads = false;
        let info = vk::CommandBufferBeginInfo::default().flags(self.usage);
        // SAFETY: the pool and the buffer are this value's, and the device does not use them.
        unsafe {
            let flags = vk::CommandPoolResetFlags::empty();
            checked("vkResetCommandPool", device.reset_command_pool(self.pool, flags))?;
            checked("vkBeginCommandBuffer", device.begin_command_buffer(self.buffer, &info))?;
        }
        // After all that was submitted before.
        self.transfers = true;
        self.barrier();
        self.transfers = false;
        Ok(())
    }

    /// Ends it.
    pub fn end(&mut self) -> Result<vk::CommandBuffer, KernelError> {
        if self.host_reads {
            self.wait(ALL, (Stage::HOST, Access::HOST_READ));
        }
        // SAFETY: it was begun.
        checked("vkEndCommandBuffer", unsafe { self.context.device.end_command_buffer(self.buffer) })?;
        Ok(self.buffer)
    }

    /// Later commands see the results of earlier ones.
    fn barrier(&mut self) {
        if self.transfers {
            self.wait(ALL, ALL);
        } else {
            self.wait(LAUNCHES, LAUNCHES);
        }
        self.touched.clear();
        self.barriers += 1;
    }

    /// Later commands, in the stages of `after`, see the results of earlier ones in those of
    /// `before`.
    fn wait(&mut self, before: (Stage, Access), after: (Stage, Access)) {
        let barriers = [vk::MemoryBarrier2::default()
            .src_stage_mask(before.0)
            .src_access_mask(before.1)
            .dst_stage_mask(after.0)
            .dst_access_mask(after.1)];
        let info = vk::DependencyInfo::default().memory_barriers(&barriers);
        // SAFETY: the buffer is being recorded.
        unsafe { self.context.device.cmd_pipeline_barrier2(self.buffer, &info) };
    }

    /// A command comes that is no launch: barriers until now were for launches alone.
    fn transfer(&mut self) {
        if !self.transfers {
            self.transfers = true;
            self.barrier();
        }
    }

    /// The command to come touches these.
    fn touch(&mut self, ranges: &[(Range, bool)]) {
        if self.touched.len() > MOST_TOUCHED || self.touched.conflicts(ranges) {
            self.barrier();
        }
        self.touched.add(ranges);
        self.count += 1;
    }

    /// Records a launch.
    ///
    /// # Safety
    /// The kernel takes these arguments, and stays within its buffers, which live until the device
    /// is done.
    pub unsafe fn launch(
        &mut self,
        layout: vk::PipelineLayout,
        launch: &Launch<'_>,
    ) -> Result<(), KernelError> {
        let info = self.keep(bytemuck::cast_slice(launch.info))?;
        self.touch(launch.ranges);
        let mut constants = launch.addresses.to_vec();
        constants.push(info);
        let [x, y, z] = launch.cubes;
        let device = &self.context.device;
        // SAFETY: the buffer is being recorded, pipeline and layout live as long as the device; the
        // caller answers for the rest.
        unsafe {
            device.cmd_bind_pipeline(self.buffer, vk::PipelineBindPoint::COMPUTE, launch.pipeline.handle());
            let constants = bytemuck::cast_slice(&constants);
            device.cmd_push_constants(self.buffer, layout, vk::ShaderStageFlags::COMPUTE, 0, constants);
            device.cmd_dispatch(self.buffer, x, y, z);
        }
        Ok(())
    }

    /// The address of a copy of `bytes`, which lives as long as what is recorded.
    fn keep(&mut self, bytes: &[u8]) -> Result<u64, KernelError> {
        assert!(bytes.len() <= NUMBERS, "a kernel takes a few numbers");
        if self.filled + bytes.len() > NUMBERS {
            (self.current, self.filled) = (self.current + 1, 0);
        }
        if self.current == self.numbers.len() {
            self.numbers.push(HostMemory::new(&self.context, NUMBERS, Use::Numbers)?);
        }
        let (memory, start) = (&mut self.numbers[self.current], self.filled);
        memory.write(start, bytes);
        self.filled += bytes.len().next_multiple_of(16);
        Ok(memory.address() + start as u64)
    }

    /// Records a copy of `size` bytes from one buffer to another, with the addresses of both.
    ///
    /// # Safety
    /// The ranges lie in the buffers and do not overlap, and the buffers live until the device is
    /// done.
    pub unsafe fn copy(
        &mut self,
        from: (vk::Buffer, u64),
        to: (vk::Buffer, u64),
        ranges: [Range; 2],
        size: u64,
    ) {
        let [read, written] = ranges;
        self.transfer();
        self.touch(&[(read, false), (written, true)]);
        let region = [vk::BufferCopy { src_offset: from.1, dst_offset: to.1, size }];
        // SAFETY: the buffer is being recorded; the caller answers for the rest.
        unsafe { self.context.device.cmd_copy_buffer(self.buffer, from.0, to.0, &region) };
    }

    /// Records that `bytes` are written to a buffer at `start`.
    ///
    /// # Safety
    /// They lie in the buffer, which lives until the device is done; `start` and their number are
    /// multiples of 4, and they are at most 65536.
    pub unsafe fn update(&mut self, buffer: vk::Buffer, start: u64, range: Range, bytes: &[u8]) {
        self.transfer();
        self.touch(&[(range, true)]);
        // SAFETY: the buffer is being recorded; the caller answers for the rest.
        unsafe { self.context.device.cmd_update_buffer(self.buffer, buffer, start, bytes) };
    }

    /// The host reads what was copied to its memory.
    pub fn for_the_host(&mut self) {
        self.host_reads = true;
    }

    /// Records that timestamp `index` of `queries` is taken when all before is done; the first one
    /// resets both.
    ///
    /// # Safety
    /// The queries are the device's, two, and live until it is done.
    pub unsafe fn timestamp(&mut self, queries: vk::QueryPool, index: u32) {
        self.transfers = true;
        self.barrier();
        self.count += 1;
        let device = &self.context.device;
        // SAFETY: the buffer is being recorded; the caller answers for the rest.
        unsafe {
            if index == 0 {
                device.cmd_reset_query_pool(self.buffer, queries, 0, 2);
            }
            device.cmd_write_timestamp2(self.buffer, Stage::ALL_COMMANDS, queries, index);
        }
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        // SAFETY: its owner has waited for the device.
        unsafe { self.context.device.destroy_command_pool(self.pool, None) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_waits_for_what_it_reads_and_overwrites() {
        let mut touched = Touched::default();
        touched.add(&[([0, 10], false), ([10, 20], true)]);
        let waits = |ranges: &[(Range, bool)]| touched.conflicts(ranges);
        assert!(!waits(&[([0, 10], false), ([20, 30], true)]), "both only read the first");
        assert!(waits(&[([9, 10], true)]), "it overwrites what is read");
        assert!(waits(&[([19, 21], false)]), "it reads what is written");
        assert!(waits(&[([10, 11], true)]), "both write");
    }
}
