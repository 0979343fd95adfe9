//! The one queue: commands are recorded as they come, submitted in batches, and done in their
//! order.

use super::commands::{Commands, Launch};
use super::device::{Context, checked};
use super::memory::{Block, HostMemory, Use};
use super::pipelines::Pipelines;
use crate::KernelError;
use crate::gpu::encoder::lock;
use ash::vk;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// The device's queue, and all that its work needs.
#[derive(Debug)]
pub(super) struct Queue {
    context: Arc<Context>,
    pub pipelines: Pipelines,
    /// Counts batches that the device has done.
    timeline: vk::Semaphore,
    state: Mutex<State>,
    /// Host memory that reads pass through, by one thread at a time.
    reading: Mutex<Option<HostMemory>>,
    /// Slots of host memory in which words arrive, for the next reads.
    slots: Mutex<Vec<Slot>>,
}

#[derive(Debug)]
struct State {
    queue: vk::Queue,
    /// The commands being recorded; none if there were none since the last submission.
    current: Option<Commands>,
    /// Commands that are recorded and not submitted, those of passes among them, and their
    /// launches.
    ended: Vec<vk::CommandBuffer>,
    launches: usize,
    /// Those of `ended` that are used again.
    owned: Vec<Commands>,
    /// Submitted commands, by the count that the timeline reaches with them.
    running: VecDeque<(u64, Vec<Commands>)>,
    spare: Vec<Commands>,
    submitted: u64,
    staging: Staging,
}

/// Memory that uploads pass through, a part after the other.
#[derive(Debug, Default)]
struct Staging {
    /// With the count of the batch that last reads from it.
    parts: Vec<(HostMemory, u64)>,
    current: usize,
    filled: usize,
}

/// Bytes of a part, and how many there are: the host fills one while copies read the others.
const PART: usize = 16 << 20;
const PARTS: usize = 4;

/// Writes up to so many bytes lie in the commands themselves.
const SHORT: usize = 4096;

/// Launches that are submitted together: few while the device has nothing to do.
const BATCH: [usize; 2] = [8, 64];

/// Words that a copy writes and the host reads, of memory with many.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    memory: Arc<HostMemory>,
    /// The byte at which they start.
    at: usize,
    /// The number of words that it has room for.
    room: usize,
}

impl Queue {
    pub fn new(context: &Arc<Context>, pipelines: Pipelines) -> Result<Self, KernelError> {
        let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device was opened with one queue of the family, and with timeline semaphores.
        let (queue, timeline) = unsafe {
            let device = &context.device;
            (device.get_device_queue(context.family, 0), device.create_semaphore(&info, None))
        };
        let state = State {
            queue,
            current: None,
            ended: vec![],
            launches: 0,
            owned: vec![],
            running: VecDeque::new(),
            spare: vec![],
            submitted: 0,
            staging: Staging::default(),
        };
        Ok(Self {
            timeline: checked("vkCreateSemaphore", timeline)?,
            context: context.clone(),
            pipelines,
            state: Mutex::new(state),
            reading: Mutex::default(),
            slots: Mutex::default(),
        })
    }

    /// Records a launch, and submits what has gathered.
    ///
    /// # Safety
    /// As [`Commands::launch`].
    pub unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        let mut state = lock(&self.state);
        let commands = self.current(&mut state)?;
        // SAFETY: the caller answers for it.
        unsafe { commands.launch(self.pipelines.layout, launch)? };
        state.launches += 1;
        self.submit_enough(&mut state)
    }

    /// Records a pass's commands.
    ///
    /// # Safety
    /// They were ended, and live until the device is done: see [`Self::bury`].
    pub unsafe fn replay(&self, commands: vk::CommandBuffer, launches: usize) -> Result<(), KernelError> {
        let mut state = lock(&self.state);
        self.end(&mut state)?;
        state.ended.push(commands);
        state.launches += launches;
        self.submit_enough(&mut state)
    }

    /// Waits until the device is done with a pass's commands, and destroys them.
    pub fn bury(&self, commands: Commands) {
        // If the device is lost there is nothing to wait for.
        let _ = self.synchronize();
        drop(commands);
    }

    /// Records a copy of `size` bytes within the device's memory.
    pub fn copy(&self, from: &Block, to: &Block, size: u64) -> Result<(), KernelError> {
        assert!(size <= from.size.min(to.size), "both blocks hold as many");
        let mut state = lock(&self.state);
        let commands = self.current(&mut state)?;
        let ranges = [from.range(), to.range()];
        // SAFETY: the blocks hold so many bytes, and are two. The memory of blocks lives until the
        // device is done.
        unsafe { commands.copy((from.buffer, from.offset), (to.buffer, to.offset), ranges, size) };
        Ok(())
    }

    /// Records that timestamp `index` of two is taken when all before is done.
    ///
    /// # Safety
    /// As [`Commands::timestamp`].
    pub unsafe fn timestamp(&self, queries: vk::QueryPool, index: u32) -> Result<(), KernelError> {
        let mut state = lock(&self.state);
        // It is submitted together with what is timed: the device must not wait for the host in
        // between. SAFETY: the caller answers for it.
        unsafe { self.current(&mut state)?.timestamp(queries, index) };
        Ok(())
    }

    /// Writes `bytes` over those of the block from byte `start` on.
    pub fn write(&self, block: &Block, start: usize, bytes: &[u8]) -> Result<(), KernelError> {
        assert!(start + bytes.len() <= block.size as usize, "a tensor lies in its memory");
        let mut state = lock(&self.state);
        if bytes.len() <= SHORT && (start | bytes.len()).is_multiple_of(4) {
            let commands = self.current(&mut state)?;
            // SAFETY: the range was checked; blocks begin at multiples of 4, and their memory lives
            // until the device is done.
            unsafe { commands.update(block.buffer, block.offset + start as u64, block.range(), bytes) };
            return Ok(());
        }
        let mut done = 0;
        while done < bytes.len() {
            let part = self.part(&mut state)?;
            let (filled, rest) = (state.staging.filled, &bytes[done..]);
            let piece = &rest[..rest.len().min(PART - filled)];
            state.staging.parts[part].0.write(filled, piece);
            let from = state.staging.parts[part].0.buffer();
            state.staging.filled += piece.len().next_multiple_of(16);
            let to = (block.buffer, block.offset + (start + done) as u64);
            let ranges = [[0, 0], block.range()];
            let commands = self.current(&mut state)?;
            // SAFETY: the piece lies in both buffers. The part is not used again until the copy is
            // done.
            unsafe { commands.copy((from, filled as u64), to, ranges, piece.len() as u64) };
            done += piece.len();
        }
        Ok(())
    }

    /// The part of the staging memory that is filled now, with room for more; where it is full, the
    /// next one.
    fn part(&self, state: &mut State) -> Result<usize, KernelError> {
        if state.staging.filled >= PART {
            let submitted = self.submit(state)?;
            let staging = &mut state.staging;
            staging.parts[staging.current].1 = submitted;
            staging.current = (staging.current + 1) % PARTS;
            staging.filled = 0;
            if let Some((_, last)) = staging.parts.get(staging.current) {
                self.wait_for(*last)?;
            }
        }
        let at = state.staging.current;
        if at == state.staging.parts.len() {
            state.staging.parts.push((HostMemory::new(&self.context, PART, Use::Staging)?, 0));
        }
        Ok(at)
    }

    /// Reads what lies in the block from byte `start` on, when all that was recorded is done.
    pub fn read(&self, block: &Block, start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        assert!(start + bytes.len() <= block.size as usize, "a tensor lies in its memory");
        let mut reading = lock(&self.reading);
        let memory = match &mut *reading {
            Some(memory) => memory,
            none => none.insert(HostMemory::new(&self.context, PART, Use::Reading)?),
        };
        for (piece, to) in bytes.chunks_mut(PART).enumerate() {
            let at = start + piece * PART;
            self.wait(self.fetch(block, at, memory, 0, to.len())?)?;
            memory.read(0, to);
        }
        Ok(())
    }

    /// Submits a copy of `size` bytes of the block to the host's memory; gives the count that it is
    /// done with.
    fn fetch(
        &self,
        block: &Block,
        start: usize,
        memory: &HostMemory,
        at: usize,
        size: usize,
    ) -> Result<u64, KernelError> {
        assert!(at + size <= memory.len(), "there is room");
        let mut state = lock(&self.state);
        let commands = self.current(&mut state)?;
        let to = memory.address() + at as u64;
        let ranges = [block.range(), [to, to + size as u64]];
        let from = (block.buffer, block.offset + start as u64);
        // SAFETY: the caller checked the block's range, the host's is checked above, and both live
        // until the copy is done.
        unsafe { commands.copy(from, (memory.buffer(), at as u64), ranges, size as u64) };
        commands.for_the_host();
        self.submit(&mut state)
    }

    /// Submits a copy of `words` words to a slot; gives the count that it is done with.
    pub fn fetch_words(&self, block: &Block, start: usize, words: usize) -> Result<(Slot, u64), KernelError> {
        /// Slots that are made together.
        const SLOTS: usize = 16;
        let size = words * size_of::<u32>();
        assert!(start + size <= block.size as usize, "a tensor lies in its memory");
        let spare = {
            let mut slots = lock(&self.slots);
            let at = slots.iter().position(|slot| slot.room >= words);
            at.map(|at| slots.swap_remove(at))
        };
        let slot = match spare {
            Some(slot) => slot,
            None => {
                let room = words.next_power_of_two();
                let each = room * size_of::<u32>();
                let memory = Arc::new(HostMemory::new(&self.context, SLOTS * each, Use::Reading)?);
                let new = |at| Slot { memory: memory.clone(), at: at * each, room };
                lock(&self.slots).extend((1..SLOTS).map(new));
                new(0)
            }
        };
        let count = self.fetch(block, start, &slot.memory, slot.at, size)?;
        Ok((slot, count))
    }

    /// The first `words` words of a slot, when the timeline has reached `count`.
    pub fn words(&self, slot: &Slot, words: usize, count: u64) -> Result<Vec<u32>, KernelError> {
        self.wait(count)?;
        let mut all = vec![0u32; words];
        slot.memory.read(slot.at, bytemuck::cast_slice_mut(&mut all));
        Ok(all)
    }

    /// A slot that is used again. The queue orders the copies to it.
    pub fn give_back(&self, slot: Slot) {
        lock(&self.slots).push(slot);
    }

    /// Waits for all that was recorded.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        let count = self.submit(&mut lock(&self.state))?;
        self.wait(count)
    }

    /// Calls `f` when all that was recorded is done. Nothing is recorded meanwhile.
    pub fn when_idle(&self, f: impl FnOnce()) -> Result<(), KernelError> {
        let mut state = lock(&self.state);
        let count = self.submit(&mut state)?;
        self.wait_for(count)?;
        f();
        Ok(())
    }

    /// Waits until the device has done the batch of this count.
    fn wait(&self, count: u64) -> Result<(), KernelError> {
        self.wait_for(count)?;
        self.collect(&mut lock(&self.state))
    }

    fn wait_for(&self, count: u64) -> Result<(), KernelError> {
        let (semaphores, counts) = ([self.timeline], [count]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&counts);
        // SAFETY: the semaphore is the device's, and lives.
        checked("vkWaitSemaphores", unsafe { self.context.device.wait_semaphores(&info, u64::MAX) })
    }

    /// The commands being recorded.
    fn current<'a>(&self, state: &'a mut State) -> Result<&'a mut Commands, KernelError> {
        if state.current.is_none() {
            state.current = Some(match state.spare.pop() {
                Some(mut commands) => {
                    commands.begin()?;
                    commands
                }
                None => Commands::once(&self.context)?,
            });
        }
        Ok(state.current.as_mut().expect("it is there"))
    }

    /// Ends what is recorded now, if there is anything.
    fn end(&self, state: &mut State) -> Result<(), KernelError> {
        if let Some(mut commands) = state.current.take() {
            state.ended.push(commands.end()?);
            state.owned.push(commands);
        }
        Ok(())
    }

    /// Submits what was recorded if it is enough: less while the device has nothing else to do.
    fn submit_enough(&self, state: &mut State) -> Result<(), KernelError> {
        if state.launches < BATCH[0] {
            return Ok(());
        }
        if state.launches < BATCH[1] {
            self.collect(state)?;
            if !state.running.is_empty() {
                return Ok(());
            }
        }
        self.submit(state).map(drop)
    }

    /// Submits what was recorded; gives the count that the timeline reaches when all that was
    /// submitted is done.
    fn submit(&self, state: &mut State) -> Result<u64, KernelError> {
        self.end(state)?;
        if state.ended.is_empty() {
            return Ok(state.submitted);
        }
        let buffers: Vec<_> = state
            .ended
            .drain(..)
            .map(|buffer| vk::CommandBufferSubmitInfo::default().command_buffer(buffer))
            .collect();
        let count = state.submitted + 1;
        let signals = [vk::SemaphoreSubmitInfo::default()
            .semaphore(self.timeline)
            .value(count)
            .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)];
        let info =
            [vk::SubmitInfo2::default().command_buffer_infos(&buffers).signal_semaphore_infos(&signals)];
        // SAFETY: the buffers were ended, and live until the count is reached; the queue is used
        // under the state's lock.
        let done = unsafe { self.context.device.queue_submit2(state.queue, &info, vk::Fence::null()) };
        let owned = std::mem::take(&mut state.owned);
        state.launches = 0;
        checked("vkQueueSubmit2", done)?;
        state.submitted = count;
        state.running.push_back((count, owned));
        self.collect(state)?;
        Ok(count)
    }

    /// Takes back the commands that the device has done.
    fn collect(&self, state: &mut State) -> Result<(), KernelError> {
        // SAFETY: the semaphore is the device's, and lives.
        let count = unsafe { self.context.device.get_semaphore_counter_value(self.timeline) };
        let count = checked("vkGetSemaphoreCounterValue", count)?;
        while state.running.front().is_some_and(|(last, _)| *last <= count) {
            let (_, commands) = state.running.pop_front().expect("there is one");
            state.spare.extend(commands);
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Recorded commands that were not submitted are dropped. SAFETY: the device is the queue's
        // own, and passes hold the queue: nothing else uses the semaphore.
        unsafe {
            let _ = self.context.device.device_wait_idle();
            self.context.device.destroy_semaphore(self.timeline, None);
        }
    }
}
