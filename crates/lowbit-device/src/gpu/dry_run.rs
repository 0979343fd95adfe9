//! A GPU that launches nothing: it lists the kernels that ops ask for. A model that is loaded and
//! run on it once thereby lists all kernels that it needs, which are then compiled on all cores
//! before the model runs on the GPU itself. It has no memory: all data read from it is zeros.

#![allow(unsafe_code)] // The driver's interface.

use super::compile::Target;
use super::encoder::{Dense, Dispatch, Driver, Pass, Replay, Unlaunched, lock};
use super::{Gpu, Memory};
use crate::{Device, KernelError};
use cubecl_core::prelude::KernelId;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// Lists the kernels that work on a GPU needs, and compiles them: see [`Gpu::dry_run`].
#[derive(Clone, Debug)]
pub struct DryRun(Arc<Recorder>);

/// The driver of [`DryRun::device`].
#[derive(Debug)]
struct Recorder {
    /// The GPU whose kernels it lists.
    gpu: Listed,
    needed: Mutex<Needed>,
}

/// A GPU whose kernels are listed.
#[derive(Debug)]
enum Listed {
    Here(Gpu),
    /// An NVIDIA GPU that need not exist on this machine, with the vendor BLAS.
    #[cfg(feature = "cuda")]
    Cuda(Target),
}

impl Listed {
    fn driver(&self) -> Option<&dyn Driver> {
        match self {
            Self::Here(gpu) => Some(&*gpu.0),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }
}

/// Kernels in the order of their first launches, each once.
#[derive(Default)]
struct Needed {
    ids: HashSet<KernelId>,
    kernels: Vec<Unlaunched>,
}

impl std::fmt::Debug for Needed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.ids.iter().map(|id| id.to_string())).finish()
    }
}

/// Memory of no bytes.
#[derive(Debug)]
struct Nothing;

impl Gpu {
    /// A device like this one on which ops only record the kernels that they need: it takes no
    /// memory, launches nothing, and all data read from it is zeros. Weights that are moved to it
    /// are not read.
    pub fn dry_run(&self) -> DryRun {
        DryRun(Arc::new(Recorder { gpu: Listed::Here(self.clone()), needed: Mutex::default() }))
    }

    /// True for the device of a [`DryRun`].
    pub fn is_dry_run(&self) -> bool {
        self.0.is_dry_run()
    }

    /// The number of kernels that were compiled on this device so far. Kernels found on the disk do
    /// not count.
    #[doc(hidden)]
    pub fn compilations(&self) -> usize {
        self.0.compilations()
    }
}

impl DryRun {
    /// The dry run of an NVIDIA GPU of this compute capability, as in 90, which need not exist on
    /// this machine.
    ///
    /// # Panics
    /// For an unknown capability.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    pub fn of_cuda(capability: u32) -> Self {
        let target = Target::cuda(super::compile::CudaDevice::example(capability));
        Self(Arc::new(Recorder { gpu: Listed::Cuda(target), needed: Mutex::default() }))
    }

    /// The recorded kernels' names, as a debugger would show them.
    #[doc(hidden)]
    pub fn kernels(&self) -> Vec<String> {
        lock(&self.0.needed).kernels.iter().map(|needed| needed.kernel.id().to_string()).collect()
    }

    /// The device on which the work runs.
    pub fn device(&self) -> Device {
        Device::Gpu(Gpu(self.0.clone()))
    }

    /// Compiles the recorded kernels that are neither in the process nor in its cache on the disk,
    /// several at a time if the device's compiler can. `progress` is called with the number of
    /// kernels done, from 0 on, and of all; it is not called if there is nothing to compile.
    ///
    /// Kernels of a device that does not exist on this machine are not compiled.
    ///
    /// # Errors
    /// [`KernelError::Kernel`] for a kernel that does not compile, [`KernelError::Gpu`] when the
    /// device fails; the other kernels that were begun are finished.
    pub fn compile(self, mut progress: impl FnMut(usize, usize)) -> Result<(), KernelError> {
        let Some(driver) = self.0.gpu.driver() else { return Ok(()) };
        let mut missing = std::mem::take(&mut lock(&self.0.needed).kernels);
        missing.retain(|needed| !driver.is_compiled(&*needed.kernel));
        let count = missing.len();
        if count == 0 {
            return Ok(());
        }
        progress(0, count);
        let tasks: Vec<_> = missing.into_iter().map(|kernel| Mutex::new(Some(kernel))).collect();
        let (next, (send, done)) = (AtomicUsize::new(0), mpsc::channel());
        std::thread::scope(|scope| {
            for _ in 0..driver.compilers().clamp(1, count) {
                let (send, next, tasks) = (send.clone(), &next, &tasks);
                let work = move || {
                    while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let kernel = lock(task).take().expect("each is taken once");
                        // Nobody listens after an error, and then no other kernel is begun.
                        if send.send(driver.compile(kernel)).is_err() {
                            return;
                        }
                    }
                };
                if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, work) {
                    // Those that were spawned stop after the kernel that each is at.
                    next.store(tasks.len(), Ordering::Relaxed);
                    return Err(KernelError::ThreadPool(error));
                }
            }
            drop(send);
            // `done` moves in, so that it is dropped at an error, while threads may still send.
            done.into_iter()
                .enumerate()
                .try_for_each(|(before, result)| result.map(|()| progress(before + 1, count)))
        })
    }
}

impl Driver for Recorder {
    fn name(&self) -> String {
        self.gpu.driver().map_or_else(|| "cuda".into(), Driver::name)
    }

    fn product(&self) -> String {
        self.gpu.driver().map_or_else(String::new, Driver::product)
    }

    fn is_software(&self) -> bool {
        self.gpu.driver().is_some_and(Driver::is_software)
    }

    fn is_dry_run(&self) -> bool {
        true
    }

    fn target(&self) -> &Target {
        match &self.gpu {
            Listed::Here(gpu) => gpu.0.target(),
            #[cfg(feature = "cuda")]
            Listed::Cuda(target) => target,
        }
    }

    fn library(&self) -> Option<&'static str> {
        self.gpu.driver().map_or(Some("cuBLASLt"), Driver::library)
    }

    fn total_memory(&self) -> Option<usize> {
        self.gpu.driver()?.total_memory()
    }

    fn allocate(&self, _bytes: usize) -> Result<Memory, KernelError> {
        Ok(Memory::new(Nothing))
    }

    fn upload(&self, _bytes: &[u8]) -> Result<Memory, KernelError> {
        Ok(Memory::new(Nothing))
    }

    fn write(&self, _memory: &Memory, _start: usize, _bytes: &[u8]) -> Result<(), KernelError> {
        Ok(())
    }

    fn download(&self, _memory: &Memory, _start: usize, bytes: &mut [u8]) -> Result<(), KernelError> {
        bytes.fill(0);
        Ok(())
    }

    unsafe fn launch(&self, dispatch: Dispatch<'_>) -> Result<(), KernelError> {
        let Dispatch { kernel, buffers, scalars, .. } = dispatch;
        let mut needed = lock(&self.needed);
        if needed.ids.insert(kernel.id()) {
            needed.kernels.push(Unlaunched { kernel, buffers: buffers.len(), scalars: scalars.len() });
        }
        Ok(())
    }

    fn is_compiled(&self, _kernel: &dyn cubecl_core::CubeKernel) -> bool {
        true
    }

    fn compile(&self, _kernel: Unlaunched) -> Result<(), KernelError> {
        Ok(())
    }

    fn compilations(&self) -> usize {
        0
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn capture(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Pass, KernelError> {
        work()?;
        work()?;
        Ok(Pass::new(NoLaunches, vec![]))
    }

    fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Duration, KernelError> {
        work()?;
        Ok(Duration::ZERO)
    }

    fn multiply(&self, _: Dense<'_>) -> Result<(), KernelError> {
        Ok(())
    }
}

#[derive(Debug)]
struct NoLaunches;

impl Replay for NoLaunches {
    fn replay(&self) -> Result<(), KernelError> {
        Ok(())
    }
}
