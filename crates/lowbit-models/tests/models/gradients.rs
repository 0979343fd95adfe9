//! The tape's gradients of whole models against torch's autograd
//! (`tools/peer_vectors/gradients.py`), for every architecture.

use lowbit_formats::FloatType;
use lowbit_kernels::ops::{WeightGradient, WeightPart};
use lowbit_kernels::{Device, Tensor};
use lowbit_models::Model;
use lowbit_models::tape::{Inventory, Parameter, Parameters, Tape};
use numcheck::Vectors;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// The largest error of a gradient, relative to its norm.
const PEER: f64 = 1e-4;
/// As in `gradients.py`.
const TEXTS: [(u32, u32); 2] = [(7, 40), (3, 23)];
const MOST: usize = 61;

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors")
}

fn cpu(threads: usize) -> Device {
    Device::cpu(Some(threads)).unwrap()
}

fn load(name: &str, device: &Device) -> Model {
    load_with(name, device, FloatType::F32)
}

fn load_with(name: &str, device: &Device, activations: FloatType) -> Model {
    crate::support::load_to_learn(&vectors().join("models").join(name), device, activations)
}

fn texts() -> Vec<Vec<u32>> {
    TEXTS.map(|(step, count)| (1..=count).map(|i| (i * step + i * i) % 200).collect()).into()
}

/// All of the model's weights and tensors.
fn all(Inventory { weights, tensors }: Inventory) -> Parameters {
    let weights = weights.into_iter().map(|w| (w.name, Parameter::Weight(w.value, WeightPart::Values)));
    weights.chain(tensors.into_iter().map(|t| (t.name, Parameter::Tensor(t.value)))).collect()
}

/// The gradients by all parameters of the sum of `logits[t, v] * cos(1.3 t + 0.7 v)`, by name.
fn gradients(model: &Model, texts: &[Vec<u32>]) -> Vec<(String, Vec<f32>)> {
    let tape = Tape::new(Rc::new(all(model.inventory())));
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let logits = model.record(&texts, &tape).unwrap();
    let vocab_size = model.config().vocab_size;
    let at = texts.iter().flat_map(|text| 0..text.len());
    let dlogits =
        at.flat_map(|t| (0..vocab_size).map(move |v| (1.3 * t as f64 + 0.7 * v as f64).cos() as f32));
    let dlogits: Vec<f32> = dlogits.collect();
    let dlogits = Tensor::new(&dlogits, logits.tensor().shape(), model.device()).unwrap();
    let gradients = tape.backward(&[(&logits, &dlogits)]).unwrap();
    let values = |(name, gradient): (&Arc<str>, &WeightGradient)| {
        let WeightGradient::Values(values) = gradient else { panic!("{name}") };
        let values = values.to_device(model.host()).unwrap();
        (name.to_string(), values.as_slice::<f32>().unwrap().to_vec())
    };
    let mut all: Vec<_> = gradients.parameters().iter().map(values).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// Below the model's own prefix, with `.weight`.
fn short(name: &str) -> String {
    let name = name.rsplit_once("model.").map_or(name, |(_, name)| name);
    name.strip_suffix(".weight").unwrap_or(name).to_string()
}

#[test]
fn every_architecture_agrees_with_torch() {
    agree_with_torch(&cpu(2));
}

#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
#[test]
fn gpu_agrees_with_torch() {
    agree_with_torch(&crate::support::gpu());
}

fn agree_with_torch(device: &Device) {
    let mut failures = vec![];
    for entry in vectors().join("gradients").read_dir().unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_stem().unwrap().to_str().unwrap();
        let peer = Vectors::open(&format!("gradients/{name}"));
        let (mut worst, mut checked) = ((0.0, String::new()), 0);
        for (parameter, got) in gradients(&load(name, device), &texts()) {
            let found = peer.names().into_iter().find(|peer| short(peer) == short(&parameter));
            let want = peer.get(&found.unwrap_or_else(|| panic!("{name} has no {parameter}"))).f32s();
            let (whole, want) = want.split_last().unwrap();
            let kept = got.len().min(MOST);
            assert_eq!(kept, want.len(), "{name}: {parameter}");
            let some = (0..kept).map(|i| f64::from(got[i * got.len() / kept]));
            // Few values may be small by chance: a share of the whole norm is their share of its
            // size.
            let share = f64::from(*whole) * (kept as f64 / got.len() as f64).sqrt();
            let size = norm(want.iter().map(|&x| x.into())).max(share);
            let error = norm(some.zip(want).map(|(got, &want)| got - f64::from(want))) / size;
            let of_norm = (norm(got.iter().map(|&x| x.into())) - f64::from(*whole)).abs() / f64::from(*whole);
            let error = error.max(of_norm);
            // A NaN must fail.
            if error.is_nan() || error > PEER {
                failures.push(format!("{name}: {parameter} is off by {error:e} of its norm {whole:e}"));
            }
            worst = if error > worst.0 { (error, parameter) } else { worst };
            checked += 1;
        }
        println!("{name}: {checked} gradients, largest error {:.1e} ({})", worst.0, worst.1);
        assert!(checked >= 15, "{name}: only {checked} parameters");
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn gradients_of_16_bits_are_near_those_of_32() {
    are_near_f32(&cpu(2));
}

#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
#[test]
fn gpu_gradients_of_16_bits_are_near_those_of_32() {
    are_near_f32(&crate::support::gpu());
}

/// The largest errors of torch's gradients where all is bf16, relative to the norms of those in
/// f32: the models and losses of `gradients.py`, torch 2.11 and transformers 5.17, on the CPU and
/// on an H100 alike (`layers.2.self_attn.q_proj` and `layers.0.input_layernorm`). Routers choose
/// other experts where logits are rounded, so only models without them are compared.
const OF_BF16: [(&str, f64); 2] = [("qwen3", 0.034), ("qwen3_5", 0.192)];

/// No gradient in bf16 is farther from f32 than torch's farthest; a term that is missing changes
/// some by about all they are.
fn are_near_f32(device: &Device) {
    for (name, most) in OF_BF16 {
        let of = |device, activations| gradients(&load_with(name, device, activations), &texts());
        for ((parameter, got), (_, want)) in
            of(device, FloatType::BF16).iter().zip(&of(&cpu(2), FloatType::F32))
        {
            let error = norm(got.iter().zip(want).map(|(got, want)| f64::from(got - want)))
                / norm(want.iter().map(|&x| x.into()));
            assert!(error < most && error > 0.0, "{name}: {parameter} is off by {error} of its norm");
        }
    }
}

#[test]
fn the_same_bits_for_every_number_of_threads() {
    let of = |threads| gradients(&load("qwen3_5_moe", &cpu(threads)), &texts());
    for ((name, one), (_, three)) in of(1).iter().zip(&of(3)) {
        numcheck::assert_bits(name, three, one);
    }
}
