//! A quantised model distilled from the one that it was made from, and likelihoods, on the CPU and,
//! in builds that have one, on a GPU.

use crate::support::{PROMPT, root};
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{WeightGradient, WeightPart};
use lowbit_kernels::{Device, Tensor};
use lowbit_models::tape::{Kept, Parameter, Parameters};
use lowbit_models::{Distillation, Model, TargetDistillation, likelihood_gradients, top_k_targets};
use std::collections::BTreeMap;
use std::rc::Rc;

fn load(name: &str, device: &Device) -> Model {
    crate::support::load_to_learn(&root().join("models").join(name), device, FloatType::F32)
}

fn texts() -> [&'static [u32]; 2] {
    [&PROMPT[..25], &PROMPT[25..]]
}

fn fetched(model: &Model, gradient: &WeightGradient) -> Vec<f32> {
    let gradient = gradient.to_device(model.host()).unwrap();
    gradient.tensors().iter().flat_map(|x| x.as_slice::<f32>().unwrap().to_vec()).collect()
}

/// The divergence of demo-4bit from demo, and its gradients by all scales and biases.
fn distilled(device: &Device, kept: Kept) -> (f64, BTreeMap<String, Vec<f32>>) {
    distilled_from(device, None, kept)
}

/// The same from the teacher's `top_k` most likely tokens, where that is a number.
fn distilled_from(device: &Device, top_k: Option<usize>, kept: Kept) -> (f64, BTreeMap<String, Vec<f32>>) {
    let (teacher, student) = (load("demo", device), load("demo-4bit", device));
    let weights = student.inventory().weights.into_iter();
    let scaled = weights.filter(|weight| weight.value.format().scheme().group_size().is_some());
    let parameters: Parameters =
        scaled.map(|weight| (weight.name, Parameter::Weight(weight.value, WeightPart::Scales))).collect();
    let parameters = Rc::new(parameters);
    let (distilled, kl) = match top_k {
        None => {
            let distillation = Distillation::new(&student, &teacher, 2.0).unwrap().keeping(kept);
            let distilled = distillation.gradients(&texts(), &parameters, 1.0).unwrap();
            (distilled, distillation.kl(&texts(), &parameters).unwrap())
        }
        Some(top_k) => {
            let targets = top_k_targets(&teacher, &texts(), top_k, 2.0).unwrap();
            let targets = targets.to_device(device).unwrap();
            let distillation = TargetDistillation::new(&student, 2.0).keeping(kept);
            let distilled = distillation.gradients((&texts(), &targets), &parameters, 1.0).unwrap();
            (distilled, distillation.kl((&texts(), &targets), &parameters).unwrap())
        }
    };
    assert!((distilled.kl - kl).abs() <= 1e-5 * kl, "{} {kl}", distilled.kl);
    let gradients = distilled.gradients.parameters().iter();
    (kl, gradients.map(|(name, gradient)| (name.to_string(), fetched(&student, gradient))).collect())
}

#[test]
fn a_student_diverges_from_its_teacher_and_not_from_itself() {
    let device = Device::cpu(Some(2)).unwrap();
    let (kl, gradients) = distilled(&device, Kept::Ops);
    let mean = kl / PROMPT.len() as f64;
    assert!((0.02..0.5).contains(&mean) && gradients.len() > 60, "{mean} {}", gradients.len());
    let teacher = load("demo", &device);
    let same = Distillation::new(&teacher, &teacher, 2.0).unwrap();
    assert!(same.kl(&texts(), &Rc::default()).unwrap().abs() < 1e-5);
}

/// The largest difference of a parameter's gradient, as a share of it.
fn difference(got: &BTreeMap<String, Vec<f32>>, want: &BTreeMap<String, Vec<f32>>) -> f64 {
    assert!(got.keys().eq(want.keys()));
    let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let of = want.iter().map(|(name, want)| {
        let error = squares(&mut want.iter().zip(&got[name]).map(|(want, got)| want - got));
        (error / squares(&mut want.iter().copied())).sqrt()
    });
    of.fold(0.0, |most, share| if share > most || share.is_nan() { share } else { most })
}

#[test]
fn targets_of_the_whole_vocabulary_are_the_teacher_and_fewer_are_near_it() {
    let device = Device::cpu(Some(2)).unwrap();
    let dense = distilled(&device, Kept::Ops);
    let of = |top_k| {
        let (kl, gradients) = distilled_from(&device, Some(top_k), Kept::Ops);
        let (share, off) = (kl / dense.0, difference(&gradients, &dense.1));
        println!("{top_k}: {share} of the divergence, gradients {off:e} off");
        (share, off)
    };
    let vocabulary = load("demo", &device).config().vocab_size;
    let (share, off) = of(vocabulary);
    assert!((share - 1.0).abs() < 1e-5 && off < 1e-4, "{share} {off:e}");
    // Tokens that are put together in one sum diverge less, and never more.
    let (mut most, mut least) = (share + 1e-5, 0.0);
    for top_k in [vocabulary / 4, 128, 4] {
        let (share, off) = of(top_k);
        assert!(share < most && off > least, "{top_k}: {share} {off:e}");
        (most, least) = (share, off);
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
#[test]
fn gpu_distils_as_the_cpu() {
    for top_k in [None, Some(128)] {
        let [gpu, cpu] = [crate::support::gpu(), Device::cpu(Some(2)).unwrap()]
            .map(|device| distilled_from(&device, top_k, Kept::Ops));
        assert!((gpu.0 - cpu.0).abs() <= 1e-4 * cpu.0, "{top_k:?} {} {}", gpu.0, cpu.0);
        let off = difference(&gpu.1, &cpu.1);
        assert!(off < 1e-3, "{top_k:?}: {off:e}");
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
#[test]
fn gpu_repeats_a_pass_bit_for_bit() {
    assert_repeats(&crate::support::gpu());
}

#[test]
fn blocks_that_are_computed_again_have_the_same_gradients() {
    assert_repeats(&Device::cpu(Some(2)).unwrap());
}

/// Two passes are equal to the last bit, one of which keeps all that gradients need, and the other
/// what goes into blocks.
fn assert_repeats(device: &Device) {
    let [(kl, gradients), (again, same)] = [Kept::Ops, Kept::Blocks].map(|kept| distilled(device, kept));
    assert_eq!(gradients.len(), same.len());
    assert_eq!(kl.to_bits(), again.to_bits());
    for (name, want) in &gradients {
        numcheck::assert_bits(name, &same[name], want);
    }
}

/// The demo; a model whose logits have a factor; one whose logits have a cap.
#[test]
fn likelihood_gradients_are_differences_of_likelihoods() {
    let device = Device::cpu(Some(2)).unwrap();
    assert_slopes(&load("demo", &device), &texts());
    let tiny: Vec<u32> = (1..48).map(|i| (7 * i + i * i) % 200).collect();
    for name in ["granite", "gemma4"] {
        let folder = root().join("tests/vectors/models").join(name);
        assert_slopes(
            &crate::support::load_to_learn(&folder, &device, FloatType::F32),
            &[&tiny[..20], &tiny[20..]],
        );
    }
}

fn assert_slopes(model: &Model, texts: &[&[u32]; 2]) {
    let device = model.device();
    let norm = model.inventory().tensors.pop().expect("the last norm");
    let weight = norm.value.as_slice::<f32>().unwrap();
    let with = |values: &[f32]| {
        let tensor = Tensor::new(values, &[values.len()], device).unwrap();
        Rc::new(Parameters::from([(norm.name.clone(), Parameter::Tensor(tensor))]))
    };
    let gradients = likelihood_gradients(model, texts, &with(weight)).unwrap();
    let got = fetched(model, &gradients.parameters()[&norm.name]);
    let nll = |values: &[f32]| {
        let tape = lowbit_models::tape::Tape::new(with(values));
        let logits = model.record(texts, &tape).unwrap();
        let rows =
            logits.tensor().as_slice::<f32>().unwrap().chunks_exact(logits.dim(-1)).collect::<Vec<_>>();
        let mut first = 0;
        let of_text = texts.map(|text| {
            let nll = text.windows(2).enumerate().map(|(i, pair)| {
                let row = rows[first + i];
                let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                sum.ln() - f64::from(row[pair[1] as usize])
            });
            let nll: f64 = nll.sum();
            first += text.len();
            nll
        });
        of_text.iter().sum::<f64>()
    };
    // Along the gradient, where the difference is largest.
    let length = got.iter().map(|g| g * g).sum::<f32>().sqrt();
    let moved = |step: f32| weight.iter().zip(&got).map(|(w, g)| w + step * g / length).collect::<Vec<_>>();
    let step = 1e-2;
    let slope = (nll(&moved(step)) - nll(&moved(-step))) / (2.0 * f64::from(step));
    assert!((slope - f64::from(length)).abs() < 1e-3 * slope.abs(), "{slope} {length}");
}
