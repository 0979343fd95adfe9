//! gpt-oss between layouts: windows in some layers, YaRN that llama.cpp rounds, experts in MXFP4 as
//! they were published.

use crate::support::layouts::{apart, changed, logits, plain};
use lowbit_files::{Checkpoint, Stored, safetensors};
use lowbit_formats::DType;
use lowbit_kernels::Device;
use lowbit_models::Model;
use lowbit_quantize::{Learn, LearnOptions, Learning, Mix, MlxFormat, Recipe, Summary};
use serde_json::{Value, json};
use std::ops::ControlFlow::Continue;
use std::path::Path;

fn truncates(config: &mut Value) {
    config["rope_scaling"]["truncate"] = true.into();
}

fn to_gguf(source: &Path, output: &Path, mix: &str) -> Summary {
    to(source, output, &Recipe::new(Mix::from_name(mix).unwrap()))
}

fn to(source: &Path, output: &Path, recipe: &Recipe<'_>) -> Summary {
    recipe.run(&Checkpoint::open(source).unwrap(), output, |_| Continue(())).unwrap().summary
}

/// MLX's layout with experts alone in mxfp4.
fn experts_in_mxfp4() -> Recipe<'static> {
    let others = ["model.embed_tokens", "lm_head", "*self_attn*", "*router"];
    let rules = others.iter().map(|name| format!("{name}=none").parse().unwrap()).collect();
    Recipe::new(MlxFormat::for_mode("mxfp4")).with_rules(rules)
}

#[test]
fn every_layout_computes_the_same_whichever_layers_have_windows() {
    for kinds in [["sliding", "full"], ["full", "sliding"], ["sliding", "sliding"], ["full", "full"]] {
        let (folder, source) = changed("gpt_oss", |config| {
            truncates(config);
            config["layer_types"] = kinds.map(|kind| format!("{kind}_attention")).to_vec().into();
        });
        let want = logits(&source);
        let made = |name: &str| folder.path().join(name);
        to_gguf(&source, &made("a.gguf"), "F32");
        to(&source, &made("b"), &plain());
        to(&made("a.gguf"), &made("c"), &plain());
        to_gguf(&made("c"), &made("d.gguf"), "F32");
        for name in ["a.gguf", "b", "c", "d.gguf"] {
            let apart = apart(&want, &logits(&made(name)));
            assert!(apart <= 1e-5, "{kinds:?}: {name} is {apart} apart");
        }
        let names: Vec<_> =
            Checkpoint::open(&made("c")).unwrap().tensors().names().map(String::from).collect();
        for name in
            ["self_attn.sinks", "mlp.router.bias", "mlp.experts.up_proj.bias", "mlp.experts.down_proj.weight"]
        {
            let name = format!("model.layers.1.{name}");
            assert!(names.contains(&name), "{name} is not among {names:?}");
        }
    }
}

#[test]
fn a_plain_rotary_embedding_is_named() {
    let (folder, source) =
        changed("gpt_oss", |config| config["rope_scaling"] = json!({"rope_type": "default"}));
    let made = |name: &str| folder.path().join(name);
    to(&source, &made("a"), &plain());
    to_gguf(&source, &made("b.gguf"), "F32");
    to(&made("b.gguf"), &made("c"), &plain());
    for name in ["a", "b.gguf", "c"] {
        assert!(apart(&logits(&source), &logits(&made(name))) <= 1e-5, "{name}");
    }
    // Without it transformers takes YaRN, and mlx-lm does not.
    let (_folder, unnamed) =
        changed("gpt_oss", |config| drop(config.as_object_mut().unwrap().remove("rope_scaling")));
    let error = Model::load(&Checkpoint::open(&unnamed).unwrap(), &Device::cpu(Some(1)).unwrap());
    assert!(error.unwrap_err().to_string().ends_with("rope_scaling is missing from the configuration"));
}

/// llama.cpp has no key for it: its converter drops it, and its readers round.
#[test]
fn gguf_rounds_the_bounds_of_yarn_and_says_so() {
    let (folder, source) = changed("gpt_oss", |_| ());
    let (_other, rounded) = changed("gpt_oss", truncates);
    let file = folder.path().join("model.gguf");
    let summary = to_gguf(&source, &file, "F32");
    let said = |warning: &String| warning.contains("llama.cpp rounds the bounds of YaRN's ramp");
    assert!(summary.warnings.iter().any(said), "{:?}", summary.warnings);
    let got = logits(&file);
    assert!(apart(&logits(&rounded), &got) <= 1e-5);
    assert!(apart(&logits(&source), &got) > 1e-3, "rounding changes this model");
    // The converted file says that it rounds.
    let mlx = folder.path().join("mlx");
    to(&file, &mlx, &plain());
    assert!(apart(&got, &logits(&mlx)) <= 1e-5);
}

/// Tensors of one file: name, type, shape and bytes.
type Parts = Vec<(String, DType, Vec<usize>, Vec<u8>)>;

fn write(folder: &Path, tensors: &Parts) {
    let mut writer = safetensors::Writer::new();
    for (name, dtype, shape, _) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    let mut body = writer.begin(folder, u64::MAX).unwrap();
    tensors.iter().for_each(|(.., bytes)| body.tensor(bytes).unwrap());
    body.finish().unwrap();
}

/// Rows of gate and up by turns.
fn alternate([gate, up]: [&[u8]; 2], row: usize) -> Vec<u8> {
    gate.chunks(row).zip(up.chunks(row)).flat_map(|(gate, up)| [gate, up].concat()).collect()
}

/// MLX's experts in mxfp4 as the published checkpoints have them.
fn published(mlx: &Checkpoint) -> Parts {
    let mut parts = vec![];
    for view in mlx.tensors() {
        let Stored::Plain(dtype) = view.stored else { panic!("{view:?}") };
        let Some((module, part)) = view.name.split_once("experts.").and_then(|(before, rest)| {
            let (module, part) = rest.split_once('.')?;
            Some((format!("{before}experts.{module}"), part))
        }) else {
            parts.push((view.name.clone(), dtype, view.shape.clone(), view.bytes.get().to_vec()));
            continue;
        };
        let end = match part {
            "weight" => "_blocks",
            "scales" => "_scales",
            _ => "_bias",
        };
        let (name, mut shape, mut bytes) = (module, view.shape.clone(), view.bytes.get().to_vec());
        if name.ends_with("up_proj") {
            continue;
        }
        let name = name.replace("gate_proj", "gate_up_proj");
        if name.ends_with("gate_up_proj") {
            let up = mlx.tensors().get(&view.name.replace("gate_proj", "up_proj")).unwrap();
            let row = shape[2..].iter().product::<usize>() * dtype.size();
            bytes = alternate([&bytes, &up.bytes.get()], row);
            shape[1] *= 2;
        }
        let dtype = if end == "_bias" { dtype } else { DType::U8 };
        if end == "_blocks" {
            // 8 codes per word, 32 per block.
            let words = shape.pop().unwrap();
            shape.extend([words / 4, 16]);
        }
        parts.push((format!("{name}{end}"), dtype, shape, bytes));
    }
    parts
}

#[test]
fn published_mxfp4_is_read_and_keeps_its_codes_in_every_layout() {
    let (folder, source) = changed("gpt_oss", truncates);
    let made = |name: &str| folder.path().join(name);
    to(&source, &made("mlx"), &experts_in_mxfp4());
    let mlx = Checkpoint::open(&made("mlx")).unwrap();
    let want = logits(&made("mlx"));
    assert!(apart(&logits(&source), &want) > 1e-3, "experts are rounded");

    let hub = made("hub");
    std::fs::create_dir(&hub).unwrap();
    write(&hub, &published(&mlx));
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["quantization_config"] =
        json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]});
    std::fs::write(hub.join("config.json"), config.to_string()).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(file), hub.join(file)).unwrap();
    }
    assert_eq!(logits(&hub), want);

    // The same codes again, and in GGUF's blocks.
    to(&hub, &made("again"), &experts_in_mxfp4());
    let again = Checkpoint::open(&made("again")).unwrap();
    for view in mlx.tensors().iter().filter(|view| view.name.contains(".experts.")) {
        let other = again.tensors().get(&view.name).unwrap();
        assert!(view.bytes.get() == other.bytes.get() && view.shape == other.shape, "{}", view.name);
    }
    to_gguf(&hub, &made("model.gguf"), "MXFP4_MOE");
    let gguf = Checkpoint::open(&made("model.gguf")).unwrap();
    let stored = gguf.tensors().get("blk.0.ffn_up_exps.weight").unwrap().stored;
    assert_eq!(stored.to_string(), "MXFP4");
}

#[test]
fn learning_is_refused_by_name() {
    let (data, options) = (crate::support::data(400, 32), LearnOptions::new(Learn::Scales));
    let device = Device::cpu(Some(1)).unwrap();
    let learning = Learning { data: &data, options: &options, device: &device, saving: None };
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("made");
    for (name, model_type, what) in [
        ("gpt_oss", "gpt_oss", "attention with sinks"),
        ("gemma4_small", "gemma4_text", "the embeddings of each layer"),
        ("nemotron_h", "nemotron_h", "Mamba-2"),
    ] {
        let checkpoint = crate::support::checkpoint(name);
        let made =
            crate::support::to_3_bits().with_learning(learning).run(&checkpoint, &output, |_| Continue(()));
        let want = format!("learning: gradients of {model_type} are wanted, but {what} has none");
        assert_eq!(made.unwrap_err().to_string(), want);
        assert!(!output.exists());
    }
}
