//! Learning on Vulkan's device, which a software driver gives everywhere.
#![cfg(feature = "vulkan")]

use crate::support::{checkpoint, data, files, to_3_bits};
use lowbit_kernels::Device;
use lowbit_quantize::{Found, Learn, LearnOptions, LearnReport, Learning, Progress, QuantizeError, Saving};
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;

fn options() -> LearnOptions {
    let mut options = LearnOptions::new(Learn::Scales);
    (options.steps, options.batch, options.validate_every) = (8, 2, 3);
    options
}

/// Learns, or stops after this step; the loss of each step.
fn learn(
    output: &Path,
    device: &Device,
    saving: Option<Saving<'_>>,
    stop: Option<u32>,
) -> (Result<LearnReport, QuantizeError>, Vec<f64>) {
    let (data, options, mut losses) = (data(800, 32), options(), vec![]);
    let learning = Learning { data: &data, options: &options, device, saving };
    let progress = |progress: Progress<'_>| match progress {
        Progress::Learning(done) => {
            losses.push(done.loss);
            if stop == Some(done.step) { Break(()) } else { Continue(()) }
        }
        _ => Continue(()),
    };
    let result = to_3_bits().with_learning(learning).run(&checkpoint("qwen3_5_moe"), output, progress);
    (result.map(|made| made.learned.unwrap()), losses)
}

/// Scales stay on the GPU from step to step there: a run learns what the CPU's does, and one that
/// was interrupted between two validations ends in the same bytes.
#[test]
fn gpu_learns_as_the_cpu_and_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let options = lowbit_kernels::gpu::VulkanOptions::default();
    let (gpu, cpu) = (Device::vulkan(&options).expect("a Vulkan driver"), Device::cpu(Some(2)).unwrap());
    let (whole, losses) = learn(&at("whole"), &gpu, None, None);
    let (of_cpu, want) = learn(&at("cpu"), &cpu, None, None);
    assert_eq!(losses.len(), 8);
    // Rounding in f32 grows as weights learn from it.
    for (i, (got, want)) in losses.iter().zip(&want).enumerate() {
        assert!((got - want).abs() < 1e-4 * want * 2f64.powi(i as i32), "{losses:?} {want:?}");
    }
    let (whole, of_cpu) = (whole.unwrap(), of_cpu.unwrap());
    assert!(whole.after < 0.97 * whole.before, "{whole:?}");
    assert!((whole.after - of_cpu.after).abs() < 1e-2 * of_cpu.after, "{whole:?} {of_cpu:?}");

    let state = at("state");
    let saving = |found| Some(Saving { path: &state, found });
    let (stopped, _) = learn(&at("again"), &gpu, saving(Found::Refuse), Some(5));
    assert_eq!(stopped.unwrap_err().to_string(), "interrupted");
    let (resumed, rest) = learn(&at("again"), &gpu, saving(Found::Resume), None);
    assert_eq!(resumed.unwrap().after.to_bits(), whole.after.to_bits());
    assert_eq!(rest, losses[5..]);
    assert!(files(&at("again")) == files(&at("whole")));
}
