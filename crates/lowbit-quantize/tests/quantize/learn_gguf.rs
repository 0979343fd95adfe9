//! Learning GGML's types, on a small checkpoint with random weights whose rows are whole
//! superblocks.

use lowbit_files::{Checkpoint, Stored, safetensors};
use lowbit_formats::{DType, Format};
use lowbit_kernels::Device;
use lowbit_models::Model;
use lowbit_quantize::{
    Data, Found, Learn, LearnOptions, LearnReport, Learning, Mix, Progress, QuantizeError, Recipe, Saving,
};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;

const HIDDEN: usize = 256;

/// Qwen3 of one layer. Heads of 24 make rows of `attn_output` that are no whole superblocks.
fn write_model(folder: &Path) {
    let qwen3 = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models/qwen3");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(qwen3.join(name), folder.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(qwen3.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    for (key, value) in [("hidden_size", HIDDEN), ("intermediate_size", HIDDEN), ("num_hidden_layers", 1)] {
        config[key] = value.into();
    }
    config["torch_dtype"] = "float32".into();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let tensors = [
        ("model.embed_tokens.weight".into(), vec![275, HIDDEN]),
        (layer("input_layernorm"), vec![HIDDEN]),
        (layer("mlp.down_proj"), vec![HIDDEN, HIDDEN]),
        (layer("mlp.gate_proj"), vec![HIDDEN, HIDDEN]),
        (layer("mlp.up_proj"), vec![HIDDEN, HIDDEN]),
        (layer("post_attention_layernorm"), vec![HIDDEN]),
        (layer("self_attn.k_norm"), vec![24]),
        (layer("self_attn.k_proj"), vec![48, HIDDEN]),
        (layer("self_attn.o_proj"), vec![HIDDEN, 96]),
        (layer("self_attn.q_norm"), vec![24]),
        (layer("self_attn.q_proj"), vec![96, HIDDEN]),
        (layer("self_attn.v_proj"), vec![48, HIDDEN]),
        ("model.norm.weight".into(), vec![HIDDEN]),
    ];
    let mut writer = safetensors::Writer::new();
    for (name, shape) in &tensors {
        writer.tensor(name, DType::F32, shape).unwrap();
    }
    let mut body = writer.begin(folder, 1 << 30).unwrap();
    let mut random = 1u32;
    for (_, shape) in &tensors {
        let values = (0..shape.iter().product()).flat_map(|_| {
            // The generator of Numerical Recipes.
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let uniform = (random >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let value = if shape.len() == 1 { 1.0 + 0.2 * uniform } else { 0.15 * uniform };
            value.to_le_bytes()
        });
        body.tensor(&values.collect::<Vec<u8>>()).unwrap();
    }
    body.finish().unwrap();
}

/// A folder with the model in it, gone when it is dropped.
fn model() -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    std::fs::create_dir(&path).unwrap();
    write_model(&path);
    let checkpoint = Checkpoint::open(&path).unwrap();
    (folder, checkpoint)
}

fn data() -> Data {
    Data::new(&[(0..1500u32).map(|i| (i * i + 7 * i) % 263).collect()], 32).unwrap()
}

fn options(learn: Learn, steps: u32) -> LearnOptions {
    let mut options = LearnOptions::new(learn);
    (options.steps, options.batch, options.validate_every) = (steps, 4, 4);
    options
}

fn to(mix: &str) -> Recipe<'static> {
    Recipe::new(Mix::from_name(mix).unwrap())
}

/// Learns until `stop`, which sees the number of every step.
fn learn_until(
    (checkpoint, output): (&Checkpoint, &Path),
    mix: &str,
    options: &LearnOptions,
    (threads, saving): (usize, Option<Saving<'_>>),
    stop: impl Fn(u32) -> bool,
) -> Result<LearnReport, QuantizeError> {
    let (data, device) = (data(), Device::cpu(Some(threads)).unwrap());
    let learning = Learning { data: &data, options, device: &device, saving };
    let progress = |progress: Progress<'_>| match progress {
        Progress::Learning(done) if stop(done.step) => Break(()),
        _ => Continue(()),
    };
    to(mix).with_learning(learning).run(checkpoint, output, progress).map(|made| made.learned.unwrap())
}

fn learn(checkpoint: &Checkpoint, output: &Path, mix: &str, options: &LearnOptions) -> LearnReport {
    learn_until((checkpoint, output), mix, options, (2, None), |_| false).unwrap()
}

/// The types of a file's tensors.
fn formats(path: &Path) -> BTreeSet<String> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let blocks = checkpoint.tensors().iter().filter(|view| matches!(view.stored, Stored::Blocks(_)));
    blocks.map(|view| view.stored.to_string()).collect()
}

#[test]
fn every_type_learns_scales_and_codes() {
    let (folder, checkpoint) = model();
    let mut learned = BTreeSet::new();
    for mix in ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K"] {
        let rounded = folder.path().join(format!("{mix}.gguf"));
        to(mix).run(&checkpoint, &rounded, |_| Continue(())).unwrap();
        for what in [Learn::Scales, Learn::Codes] {
            let output = folder.path().join(format!("{mix}-{what:?}.gguf"));
            let mut options = options(what, 12);
            // Eight bits lose so little that few steps of the usual rate on random weights are
            // noise.
            options.rate = (mix == "Q8_0").then_some(5e-7);
            let report = learn(&checkpoint, &output, mix, &options);
            println!("{mix} {what:?}: {report:?}");
            assert!(report.after < report.before && report.best_step > 0, "{mix} {what:?}: {report:?}");
            assert!(report.weights == 8 && report.skipped.is_empty(), "{report:?}");
            // A file of the same size and types, that loads, and whose weights differ.
            let (before, after) = (std::fs::read(&rounded).unwrap(), std::fs::read(&output).unwrap());
            assert!(before.len() == after.len() && before != after, "{mix} {what:?}");
            assert_eq!(formats(&rounded), formats(&output));
            learned.extend(formats(&output));
            Model::load(&Checkpoint::open(&output).unwrap(), &Device::cpu(Some(1)).unwrap()).unwrap();
        }
    }
    let all = ["Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"];
    assert_eq!(learned.iter().map(String::as_str).collect::<Vec<_>>(), all);
}

/// Experts, delta nets and permuted heads have other names and shapes in GGUF than where they come
/// from.
#[test]
fn every_architecture_learns() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama3", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe-gguf-Q8_0"] {
        let path = models.join(name);
        let gguf = path.join("model.gguf");
        let checkpoint = Checkpoint::open(if gguf.exists() { &gguf } else { &path }).unwrap();
        let [rounded, learned] =
            ["rounded", "learned"].map(|what| folder.path().join(format!("{name}-{what}")));
        to("Q4_0").run(&checkpoint, &rounded, |_| Continue(())).unwrap();
        let report = learn(&checkpoint, &learned, "Q4_0", &options(Learn::Codes, 8));
        println!("{name}: {report:?}");
        assert!(report.after < report.before, "{name}: {report:?}");
        let [rounded, learned] = [rounded, learned].map(|path| Checkpoint::open(&path).unwrap());
        let blocks = rounded.tensors().iter().filter(|view| matches!(view.stored, Stored::Blocks(_)));
        let mut same = blocks
            .clone()
            .filter(|view| learned.tensors().get(&view.name).unwrap().bytes.get() == view.bytes.get());
        // A Q8_0 that is carried over is what the teacher computes with.
        assert_eq!(same.next().map(|view| &view.name), None, "{name}");
        assert_eq!(blocks.count(), report.weights, "{name}");
    }
}

#[test]
fn types_that_do_not_learn_are_listed() {
    let (folder, checkpoint) = model();
    let output = folder.path().join("new.gguf");
    let report = learn(&checkpoint, &output, "IQ4_XS", &options(Learn::Scales, 2));
    let made = Checkpoint::open(&output).unwrap();
    let is_iq4 = |name: &&String| {
        let view = made.tensors().get(&format!("{name}.weight")).unwrap();
        matches!(view.stored, Stored::Blocks(Format::IQ4_XS | Format::IQ4_NL))
    };
    assert_eq!(report.skipped.len() + report.weights, 8);
    assert!(report.skipped.len() >= 5 && report.weights > 0, "{report:?}");
    assert!(report.skipped.iter().all(|name| is_iq4(&name)), "{report:?}");
    let learning = learn_until(
        (&checkpoint, &folder.path().join("f16")),
        "F16",
        &options(Learn::Scales, 1),
        (1, None),
        |_| false,
    );
    let error = learning.unwrap_err().to_string();
    assert_eq!(error, "learning: no weight has scales and biases that can be learned");
}

#[test]
fn what_has_not_moved_is_what_was_rounded() {
    let (folder, checkpoint) = model();
    for mix in ["Q4_0", "Q4_1", "Q3_K_M", "Q4_K_M", "Q6_K"] {
        let [rounded, learned] =
            ["rounded", "learned"].map(|name| folder.path().join(format!("{mix}-{name}")));
        to(mix).run(&checkpoint, &rounded, |_| Continue(())).unwrap();
        // Steps of less than half an f32's precision.
        let mut options = options(Learn::Scales, 2);
        options.rate = Some(1e-14);
        learn(&checkpoint, &learned, mix, &options);
        assert!(std::fs::read(&rounded).unwrap() == std::fs::read(&learned).unwrap(), "{mix}");
    }
}

#[test]
fn the_same_bytes_for_every_number_of_threads() {
    let (folder, checkpoint) = model();
    let options = options(Learn::Codes, 4);
    for mix in ["Q4_0", "Q4_1", "Q3_K_M", "Q4_K_M", "Q6_K"] {
        let of = |threads: usize| {
            let output = folder.path().join(format!("{mix}-{threads}"));
            learn_until((&checkpoint, &output), mix, &options, (threads, None), |_| false).unwrap();
            std::fs::read(output).unwrap()
        };
        assert!(of(1) == of(3), "{mix}");
    }
}

#[test]
fn a_run_that_is_resumed_gives_what_an_uninterrupted_one_gives() {
    let (folder, checkpoint) = model();
    let state = folder.path().join("state");
    let saving = Some(Saving { path: &state, found: Found::Resume });
    for (mix, what) in [
        ("Q4_0", Learn::Codes),
        ("Q4_1", Learn::Codes),
        ("Q3_K_M", Learn::Codes),
        ("Q4_K_M", Learn::Codes),
        ("Q4_K_M", Learn::Scales),
        ("Q6_K", Learn::Codes),
    ] {
        let options = options(what, 7);
        let [whole, resumed] =
            ["whole", "resumed"].map(|name| folder.path().join(format!("{mix}-{what:?}-{name}")));
        let want = learn(&checkpoint, &whole, mix, &options);
        // In the middle of an interval, and after a validation.
        for last in [2, 4] {
            let stopped =
                learn_until((&checkpoint, &resumed), mix, &options, (2, saving), |step| step == last);
            assert!(matches!(stopped, Err(QuantizeError::Interrupted)), "{mix} {stopped:?}");
            assert!(state.exists() && !resumed.exists());
        }
        let got = learn_until((&checkpoint, &resumed), mix, &options, (2, saving), |step| step < 5).unwrap();
        assert_eq!(format!("{got:?}"), format!("{want:?}"), "{mix} {what:?}");
        assert!(std::fs::read(&whole).unwrap() == std::fs::read(&resumed).unwrap(), "{mix} {what:?}");
        assert!(!state.exists());
    }
}
