//! Kernels are compiled before a model runs: on Vulkan, which a software driver gives everywhere,
//! or on what `LOWBIT_GPU` names. A test alone in its process: it counts what the device compiles.
#![cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]

use crate::support::{PROMPT, gpu, gpu_that_keeps_nothing, root};
use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_kernels::gpu::DryRun;
use lowbit_kernels::ops::SampleParams;
use lowbit_models::{
    GenerationOptions, Model, ModelError, Scoring, Session, Target, dry_generation, dry_perplexity,
    perplexity,
};
use std::ops::ControlFlow::Continue;
use std::sync::Mutex;

fn compilations(device: &Device) -> usize {
    let Device::Gpu(gpu) = device else { unreachable!("a GPU") };
    gpu.compilations()
}

/// The reports to `progress` while a model was loaded.
fn loaded(
    path: &str,
    device: &Device,
    work: impl FnOnce(&Model) -> Result<(), ModelError> + Send,
) -> (Model, Vec<(usize, usize)>) {
    let checkpoint = Checkpoint::open(&root().join(path)).unwrap();
    let told = Mutex::new(vec![]);
    let target = Target::new(device, None).unwrap();
    let progress = |done, of| told.lock().unwrap().push((done, of));
    let model = Model::load_compiled(&checkpoint, target, work, progress).unwrap();
    (model, told.into_inner().unwrap())
}

#[test]
fn nothing_is_compiled_after_loading() {
    const DEMO: &str = "models/demo-4bit";
    let device = gpu_that_keeps_nothing();
    let scoring = (Scoring::All, None);
    let (model, told) = loaded(DEMO, &device, |model| dry_perplexity(model, PROMPT.len(), 32, Scoring::All));
    let of = told.last().unwrap().1;
    assert!(of > 10, "{told:?}");
    assert_eq!(told, (0..=of).map(|done| (done, of)).collect::<Vec<_>>());
    let before = compilations(&device);
    perplexity(&model, &PROMPT, 32, scoring, |_| Continue(())).unwrap();
    assert_eq!(compilations(&device), before, "scoring compiled kernels");

    let sampling = SampleParams {
        temperature: 0.8,
        top_p: 0.95,
        repetition_penalty: 1.1,
        seed: 3,
        ..Default::default()
    };
    let options = GenerationOptions::default().with_sampling(sampling).with_max_tokens(12);
    let generate = |model: &Model| dry_generation(model, &[PROMPT.len(), 0, 3, usize::MAX], &options);
    let (model, told) = loaded(DEMO, &device, generate);
    assert!(!told.is_empty(), "one token at a time takes other kernels");
    let before = compilations(&device);
    let mut session = Session::new(&model);
    for prompt in [&PROMPT[..], &PROMPT[..3]] {
        let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
        session.generate(logits, &options, |_| Continue(())).unwrap();
    }
    assert_eq!(compilations(&device), before, "replies compiled kernels");

    let (_, told) = loaded(DEMO, &device, generate);
    assert_eq!((told, compilations(&device)), (vec![], before), "all was compiled");
}

#[test]
fn every_architecture_runs_dry() {
    let device = gpu();
    let Device::Gpu(gpu) = &device else { unreachable!("a GPU") };
    run_dry(|| gpu.dry_run());
}

/// The plans for NVIDIA's GPUs, without one: of Ampere, Hopper and Blackwell.
#[cfg(feature = "cuda")]
#[test]
fn every_architecture_runs_dry_on_cuda() {
    for (capability, own) in [(80, "MmaTile"), (90, "Wgmma"), (120, "MmaTile")] {
        let kernels = run_dry(|| lowbit_kernels::gpu::DryRun::of_cuda(capability));
        assert!(kernels.iter().any(|name| name.contains(own)), "{capability}: no {own} among {kernels:?}");
    }
}

/// The names of the kernels of all checkpoints.
fn run_dry(new: impl Fn() -> DryRun) -> Vec<String> {
    let folders = root().join("tests/vectors/models").read_dir().unwrap();
    let mut paths: Vec<_> = folders.map(|entry| entry.unwrap().path()).collect();
    paths.extend(["demo", "demo-4bit"].map(|name| root().join("models").join(name)));
    paths.sort();
    assert!(paths.len() >= 20, "only {} checkpoints were found", paths.len());
    let mut kernels = vec![];
    for folder in paths {
        let gguf = folder.join("model.gguf");
        let path = if folder.join("config.json").is_file() { folder } else { gguf };
        let checkpoint = Checkpoint::open(&path).unwrap();
        let dry_run = new();
        let target = Target::new(&dry_run.device(), None).unwrap();
        let model = Model::load_for(&checkpoint, target).unwrap();
        let run = dry_generation(&model, &[1, 9, 33, 200], &GenerationOptions::default());
        run.and_then(|()| dry_perplexity(&model, 30, 20, Scoring::All))
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        kernels.extend(dry_run.kernels());
    }
    kernels
}
