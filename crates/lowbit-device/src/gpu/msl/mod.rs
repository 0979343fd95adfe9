//! Runs the kernels that Metal would be given on this machine's processor: kernels in the Metal
//! Shading Language, compiled by clang, whose threads run one after the other. For tests alone
//! (`LOWBIT_GPU=msl`): it shows what kernels compute and that they keep to Metal's and wgpu's
//! limits, not how fast they are, nor what Apple's compiler makes of them.
//!
//! | file | holds |
//! |---|---|
//! | `translate.rs` | MSL to C++, and Metal's limits |
//! | `library.rs` | clang, and its libraries on the disk |
//! | `shim/` | Metal's library in C++, and what runs threads |

#![allow(unsafe_code)] // Code that clang compiled, and its memory.

mod library;
#[cfg(test)]
mod tests;
mod translate;

use super::compile::{self, METAL_BINDING, Target};
use super::encoder::{Dispatch, Driver, Pass, Range, Replay, Unlaunched, lock};
use super::{CUBES, Gpu, Memory};
use crate::KernelError;
use cubecl_core::InfoBuilder;
use cubecl_core::ir::AddressType;
use cubecl_core::prelude::{CubeKernel, KernelId};
use library::Shim;
pub use library::check;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One thread of a kernel, with the addresses of its buffers.
type Thread = unsafe extern "C" fn(*mut *mut u8);
/// `msl_machine` and `msl_run` of `shim/threads.cpp`.
type NewMachine = unsafe extern "C" fn() -> *mut c_void;
type Run = unsafe extern "C" fn(*mut c_void, Thread, *mut *mut u8, *const u32, u32, bool) -> *const c_char;

/// A compiled kernel.
#[derive(Clone, Copy, Debug)]
struct Code {
    thread: Thread,
    units: [u32; 3],
    shared: u32,
}

/// Memory that starts where a buffer of wgpu may start.
#[derive(Debug)]
struct Block {
    address: *mut u8,
    size: usize,
}

// SAFETY: it is memory, which the driver reads and writes in one order: a device is one thread's.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Bytes that are ones, NaN in every float type.
    fn new(size: usize) -> Option<Self> {
        let layout = Self::layout(size)?;
        // SAFETY: the size is not 0.
        let address = unsafe { alloc(layout) };
        if address.is_null() {
            return None;
        }
        // SAFETY: as many bytes were allocated.
        unsafe { address.write_bytes(0xff, size) };
        Some(Self { address, size })
    }

    fn layout(size: usize) -> Option<Layout> {
        Layout::from_size_align(size.max(1), 256).ok()
    }

    /// The address of `len` bytes from `start` on.
    fn at(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start + len <= self.size, "a tensor lies in its memory");
        // SAFETY: byte `start` is in the block, or its end.
        unsafe { self.address.add(start) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let layout = Self::layout(self.size).expect("it was allocated with it");
        // SAFETY: it was allocated with this layout, and nothing else frees it.
        unsafe { dealloc(self.address, layout) };
    }
}

/// One launch with all that it reads and writes.
#[derive(Clone, Debug)]
struct Launch {
    name: String,
    code: Code,
    cubes: [u32; 3],
    buffers: Vec<(Range, usize)>,
    info: Vec<u64>,
}

impl Launch {
    fn run(&self) -> Result<(), KernelError> {
        let block = |range: &Range| range.downcast_ref::<Block>().expect("this driver's memory").at(0, 0);
        // SAFETY: launching checked that each start lies in its block.
        let starts = self.buffers.iter().map(|(range, start)| unsafe { block(range).add(*start) });
        let mut buffers: Vec<*mut u8> = starts.collect();
        buffers.push(self.info.as_ptr().cast_mut().cast());
        let [x, y, z] = self.cubes;
        let [units_x, units_y, units_z] = self.code.units;
        let sizes = [x, y, z, units_x, units_y, units_z];
        let machine = Machine::take()?;
        let reverse = std::env::var_os("LOWBIT_MSL_REVERSE").is_some();
        let Code { thread, shared, .. } = self.code;
        // SAFETY: the machine is ours alone, the kernel is compiled from what the op launches, the
        // buffers are in its order and alive, and `Gpu::launch`'s caller answers for what it
        // indexes.
        let problem = unsafe {
            let problem =
                (machine.run)(machine.address, thread, buffers.as_mut_ptr(), sizes.as_ptr(), shared, reverse);
            (!problem.is_null()).then(|| CStr::from_ptr(problem).to_string_lossy().into_owned())
        };
        machine.give_back();
        problem.map_or(Ok(()), |problem| Err(refuse(format!("{}: {problem}", self.name))))
    }
}

/// Runs threadgroups, with the stacks of their threads. It runs one launch at a time.
#[derive(Debug)]
struct Machine {
    address: *mut c_void,
    run: Run,
}

// SAFETY: it is used by the thread that took it alone.
unsafe impl Send for Machine {}

/// Machines that no thread uses.
static MACHINES: Mutex<Vec<Machine>> = Mutex::new(Vec::new());

impl Machine {
    fn take() -> Result<Self, KernelError> {
        if let Some(machine) = lock(&MACHINES).pop() {
            return Ok(machine);
        }
        let runtime = Shim::get().map_err(refuse)?.runtime;
        let [new, run] = ["msl_machine", "msl_run"].map(|name| runtime.function(name).map_err(refuse));
        // SAFETY: these are the functions' types in `shim/threads.cpp`.
        let (new, run) = unsafe {
            (
                std::mem::transmute::<*mut c_void, NewMachine>(new?),
                std::mem::transmute::<*mut c_void, Run>(run?),
            )
        };
        // SAFETY: it takes nothing.
        let address = unsafe { new() };
        if address.is_null() {
            return Err(refuse("no memory for threads".into()));
        }
        Ok(Self { address, run })
    }

    fn give_back(self) {
        lock(&MACHINES).push(self);
    }
}

/// A device of its own for whoever opens it: launches run at once, on the caller's thread.
#[derive(Debug)]
struct Msl {
    target: Target,
    captured: Mutex<Option<Vec<Launch>>>,
}

/// A kernel's place among those of this process, which is locked while it is compiled.
type Slot = Arc<Mutex<Option<Code>>>;

/// All kernels of this process: each is compiled once.
static KERNELS: Mutex<Option<HashMap<KernelId, Slot>>> = Mutex::new(None);

fn refuse(problem: String) -> KernelError {
    KernelError::Gpu { device: "msl".into(), problem }
}

/// The kernel's code, compiled where neither this process nor the disk has it.
fn code(kernel: &dyn CubeKernel) -> Result<Code, KernelError> {
    let id = kernel.id();
    let units = [id.cube_dim.x, id.cube_dim.y, id.cube_dim.z];
    let slot = lock(&KERNELS).get_or_insert_default().entry(id).or_default().clone();
    let mut slot = lock(&slot);
    if let Some(code) = *slot {
        return Ok(code);
    }
    let source = compile::msl(kernel)?;
    let problem = |problem| KernelError::Kernel { name: compile::name(kernel), problem };
    let (thread, shared) = library::entry(&source).map_err(problem)?;
    // SAFETY: it is the type of the entry that the translation writes.
    let thread = unsafe { std::mem::transmute::<*mut c_void, Thread>(thread) };
    Ok(*slot.insert(Code { thread, units, shared: shared as u32 }))
}

impl Gpu {
    /// Metal's kernels on this processor, for tests: each call is a device of its own, for one
    /// thread.
    pub fn msl() -> Self {
        let target = Target::apple();
        Self(Arc::new(Msl { target, captured: Mutex::new(None) }))
    }
}

impl Driver for Msl {
    fn product(&self) -> String {
        "Metal's kernels on this machine's processor".into()
    }

    fn is_software(&self) -> bool {
        true
    }

    fn name(&self) -> String {
        "msl".into()
    }

    fn target(&self) -> &Target {
        &self.target
    }

    fn allocate(&self, bytes: usize) -> Result<Memory, KernelError> {
        let block = Block::new(bytes).ok_or_else(|| refuse(format!("no memory for {bytes} bytes")))?;
        Ok(Memory::new(block))
    }

    fn write(&self, memory: &Memory, start: usize, bytes: &[u8]) -> Result<(), KernelError> {
        self.forbid_in_capture("a write")?;
        let to = memory.range::<Block>().at(start, bytes.len());
        // SAFETY: the block has as many bytes, and launches that use it are done.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn download(&self, memory: &Memory, start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        self.forbid_in_capture("a read")?;
        let from = memory.range::<Block>().at(start, bytes.len());
        // SAFETY: the block has as many bytes, all of which were written, and launches that use it
        // are done.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len()) };
        Ok(())
    }

    unsafe fn launch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError> {
        let Dispatch { kernel, cubes, buffers, scalars, .. } = dispatch;
        let name = compile::name(&*kernel);
        if let Some(count) = cubes.iter().find(|&&count| count as usize > CUBES) {
            return Err(refuse(format!("{name}: {count} cubes, and wgpu takes at most {CUBES}")));
        }
        for (index, &(memory, start)) in buffers.iter().enumerate() {
            memory.range::<Block>().at(start, 0);
            if !start.is_multiple_of(METAL_BINDING) {
                let want = format!("wgpu binds multiples of {METAL_BINDING} on Metal");
                return Err(refuse(format!("{name}: buffer {index} starts at byte {start}, and {want}")));
            }
        }
        let code = code(&*kernel)?;
        let mut info = InfoBuilder::default();
        scalars.iter().for_each(|&scalar| info.scalars.push(scalar));
        buffers.iter().for_each(|_| info.metadata.register_buffer(0, AddressType::U32));
        let info = info.finish(AddressType::U32).data;
        let buffers = buffers.iter().map(|&(memory, start)| (memory.keep(), start)).collect();
        let launch = Launch { name, code, cubes, buffers, info };
        match &mut *lock(&self.captured) {
            Some(captured) => captured.push(launch),
            None => launch.run()?,
        }
        Ok(())
    }

    fn is_compiled(&self, kernel: &dyn CubeKernel) -> bool {
        let slot = lock(&KERNELS).get_or_insert_default().get(&kernel.id()).cloned();
        slot.is_some_and(|slot| lock(&slot).is_some())
    }

    fn compile(&self, Unlaunched { kernel, .. }: Unlaunched) -> Result<(), KernelError> {
        code(&*kernel).map(drop)
    }

    /// Of all devices of this process, which share their kernels.
    fn compilations(&self) -> usize {
        lock(&KERNELS).get_or_insert_default().len()
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.forbid_in_capture("a wait")
    }

    fn is_capturing(&self) -> bool {
        lock(&self.captured).is_some()
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError> {
        work()?;
        *lock(&self.captured) = Some(Vec::new());
        let done = work();
        let launches = lock(&self.captured).take().unwrap_or_default();
        done?;
        let memory =
            launches.iter().flat_map(|it| it.buffers.iter().map(|(range, _)| range.clone())).collect();
        Ok(Pass::new(Captured(launches), memory))
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed())
    }
}

#[derive(Debug)]
struct Captured(Vec<Launch>);

impl Replay for Captured {
    fn replay(&self) -> Result<(), KernelError> {
        self.0.iter().try_for_each(Launch::run)
    }
}
