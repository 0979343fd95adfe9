//! The questions that models ask of a device, instead of which one it is.

use crate::gpu::{DryRun, Pass};
use crate::{Device, KernelError};
use lowbit_formats::FloatType;

/// The sizes and forms in which a device computes a whole model fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePlan {
    /// Tokens of a prompt per pass.
    pub prompt_tokens: usize,
    /// Rows of a pass up to which products take the kernels for few rows.
    pub few_rows: usize,
    /// Floats of one intermediate result, such as the logits of many tokens, that are kept at a
    /// time.
    pub floats: usize,
    /// True if weights that multiply one x are joined into one, of which there is one product.
    pub joins_weights: bool,
    /// True if weights are copied to the device; false if they can stay in a mapped file.
    pub copies_weights: bool,
    /// True if exact products of one row, of few rows and of many add up in different orders.
    pub sums_by_rows: bool,
    /// The type of cached keys and values where products need not be exact; `None` for that of the
    /// activations.
    pub cache: Option<FloatType>,
    /// True if [`Device::capture`] has something to replay.
    pub captures: bool,
}

/// The processor's.
const CPU: DevicePlan = DevicePlan {
    prompt_tokens: 512,
    few_rows: 16,
    // 64 MB.
    floats: 1 << 24,
    joins_weights: false,
    copies_weights: false,
    sums_by_rows: true,
    // A step behind a long text waits for memory.
    cache: Some(FloatType::F16),
    captures: false,
};

/// Every GPU's: launches cost time, and large products keep its units busy.
const GPU: DevicePlan = DevicePlan {
    prompt_tokens: 4096,
    // Up to four rows go through one kernel on every device.
    few_rows: 4,
    // 2 GB.
    floats: 1 << 29,
    joins_weights: true,
    copies_weights: true,
    sums_by_rows: false,
    cache: None,
    captures: true,
};

impl Device {
    /// The sizes and forms in which it computes a whole model fastest.
    pub fn plan(&self) -> &'static DevicePlan {
        match self {
            Self::Cpu(_) => &CPU,
            Self::Gpu(_) => &GPU,
        }
    }

    /// Runs `work`. On a GPU it runs twice: the second time its launches are captured and do not
    /// run, and the pass that is returned replays them. A CPU has nothing to replay.
    ///
    /// # Errors
    /// The error of `work`; [`KernelError::Gpu`] when it does what cannot be captured.
    pub fn capture(
        &self,
        mut work: impl FnMut() -> Result<(), KernelError>,
    ) -> Result<Option<Pass>, KernelError> {
        match self {
            Self::Cpu(_) => work().map(|()| None),
            Self::Gpu(gpu) => gpu.capture(work).map(Some),
        }
    }

    /// A device like this one on which ops only list the kernels that they need; `None` for a CPU,
    /// which compiles none.
    pub fn dry_run(&self) -> Option<DryRun> {
        match self {
            Self::Cpu(_) => None,
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) => Some(gpu.dry_run()),
            #[cfg(not(feature = "gpu"))]
            Self::Gpu(gpu) => match *gpu {},
        }
    }

    /// True for the device of a [`DryRun`].
    pub fn is_dry_run(&self) -> bool {
        match self {
            Self::Cpu(_) => false,
            Self::Gpu(gpu) => gpu.is_dry_run(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_runs_the_work_once_and_keeps_no_pass() {
        let (device, mut runs) = (Device::cpu(Some(1)).unwrap(), 0);
        let pass = device.capture(|| {
            runs += 1;
            Ok(())
        });
        assert!(pass.unwrap().is_none());
        assert_eq!(runs, 1);
        let failed = device.capture(|| Err(KernelError::Threads { threads: 0, cores: 1, limit: 16 }));
        assert!(matches!(failed, Err(KernelError::Threads { threads: 0, .. })));
        assert!(device.dry_run().is_none() && !device.is_dry_run() && !device.plan().captures);
    }
}
