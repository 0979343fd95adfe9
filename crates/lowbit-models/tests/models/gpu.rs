//! Whole models on a GPU against the CPU: the demo model and the tiny checkpoints of every
//! architecture. Runs on Vulkan, which a software driver gives everywhere, or on what `LOWBIT_GPU`
//! names.
#![cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]

use crate::support::{PROMPT, gpu, is_software, load, root};
use lowbit_formats::FloatType;
use lowbit_kernels::Device;
use lowbit_kernels::ops::SampleParams;
use lowbit_models::{GenerationOptions, Logits, Model, Session};
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

/// All logits of `tokens`, run through in pieces of the given size.
fn logits(model: &Model, tokens: &[u32], piece: usize) -> Vec<f32> {
    let mut cache = model.cache();
    let pieces = tokens.chunks(piece).map(|piece| {
        let logits = model.forward(piece, &mut cache, Logits::All).unwrap().unwrap();
        logits.to_device(model.host()).unwrap().as_slice::<f32>().unwrap().to_vec()
    });
    pieces.flatten().collect()
}

/// As many tokens as a reply has on `device`, and on the CPU beside it.
fn count(device: &Device) -> usize {
    if is_software(device) { 10 } else { 24 }
}

fn generate(model: &Model, prompt: &[u32], sampling: SampleParams, count: usize) -> Vec<u32> {
    let options = GenerationOptions::default().with_sampling(sampling).with_max_tokens(count);
    let mut session = Session::new(model);
    let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
    session.generate(logits, &options, |_| Continue(())).unwrap().tokens
}

/// The error of logits: the largest difference, and the norm of all over the norm of the expected
/// logits.
#[derive(Clone, Copy, Debug, Default)]
struct Error {
    largest: f32,
    relative: f64,
}

impl Error {
    fn of(got: &[f32], want: &[f32]) -> Self {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().all(|x| x.is_finite()), "a logit is not finite");
        let differences = || got.iter().zip(want).map(|(got, want)| (got - want).abs());
        let norm =
            |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        Self {
            largest: differences().fold(0.0, f32::max),
            relative: norm(&mut differences()) / norm(&mut want.iter().copied()),
        }
    }

    fn or(self, other: Self) -> Self {
        Self { largest: self.largest.max(other.largest), relative: self.relative.max(other.relative) }
    }
}

/// The error of the logits, and the tokens that either writes.
fn compare(path: &Path, device: &Device, activations: FloatType) -> (Error, Vec<u32>, Vec<u32>) {
    let cpu = load(path, &Device::cpu(Some(2)).unwrap(), FloatType::F32);
    let gpu = load(path, device, activations);
    let vocab_size = cpu.config().vocab_size as u32;
    let prompt: Vec<u32> = PROMPT.iter().map(|id| id % vocab_size).collect();
    let want = logits(&cpu, &prompt, prompt.len());
    let few = if is_software(device) { 15 } else { prompt.len() };
    let error = [(prompt.len(), prompt.len()), (few, 1), (few, 7)]
        .map(|(count, piece)| {
            let got = logits(&gpu, &prompt[..count], piece);
            let error = Error::of(&got, &want[..got.len()]);
            println!("{} {activations:?}, pieces of {piece}: {error:?}", path.display());
            error
        })
        .into_iter()
        .fold(Error::default(), Error::or);
    let greedy = SampleParams::default();
    let reply = |model| generate(model, &prompt, greedy, count(device));
    (error, reply(&gpu), reply(&cpu))
}

#[test]
fn the_demo_models_agree_with_the_cpu() {
    let device = gpu();
    for path in ["models/demo", "models/demo-4bit"] {
        for activations in [FloatType::F32, FloatType::F16] {
            let (error, got, want) = compare(&root().join(path), &device, activations);
            match activations {
                FloatType::F32 => assert!(error.largest <= 1e-3, "{path} {activations:?}: {error:?}"),
                _ => assert!(error.relative <= 1e-2, "{path} {activations:?}: {error:?}"),
            }
            assert_eq!(got, want, "{path} {activations:?}: greedy tokens");
        }
    }
}

#[test]
fn every_architecture_agrees_with_the_cpu() {
    let device = gpu();
    let folders = root().join("tests/vectors/models").read_dir().unwrap();
    let mut paths: Vec<PathBuf> = folders.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 20, "only {} checkpoints were found", paths.len());
    for folder in paths {
        let gguf = folder.join("model.gguf");
        let path = if folder.join("config.json").is_file() { folder } else { gguf };
        let (error, got, want) = compare(&path, &device, FloatType::F32);
        println!("{} on {device}: {error:?}", path.display());
        assert!(error.largest <= 1e-3, "{}: {error:?}", path.display());
        assert_eq!(got, want, "{}: greedy tokens", path.display());
    }
}

#[test]
fn sampling_on_the_device_writes_what_the_cpu_writes() {
    let sampling = SampleParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.1,
        seed: 7,
        ..Default::default()
    };
    let path = root().join("models/demo-4bit");
    let (host, device) = (Device::cpu(Some(2)).unwrap(), gpu());
    let [got, want] = [&device, &host]
        .map(|on| generate(&load(&path, on, FloatType::F32), &PROMPT, sampling, count(&device)));
    assert_eq!(got, want);
}
