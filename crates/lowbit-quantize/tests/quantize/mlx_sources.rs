//! Checkpoints in MLX's layout, quantised ones among them, as sources of others in MLX's layout.

use bytes::Bytes;
use lowbit_files::{Checkpoint, Stored, TensorView, Tokenizer, safetensors};
use lowbit_formats::{DType, FloatType, Format};
use lowbit_kernels::Device;
use lowbit_models::{Logits, Model, Target};
use lowbit_quantize::{MlxFormat, QuantizeError, Recipe, Rule};
use std::collections::BTreeMap;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

/// Those of the peers' tiny checkpoints: every architecture and mode, mixtures of formats.
const MODELS: [&str; 7] = [
    "llama-bias-mlx-mixed",
    "llama3-mlx-mixed",
    "mistral-mlx-fp",
    "qwen3-mlx-4bit",
    "qwen3_5-mlx-8bit",
    "qwen3_5_moe-mlx-4bit",
    "qwen3_next-mlx-4bit",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn model(name: &str) -> PathBuf {
    root().join("tests/vectors/models").join(name)
}

/// Quantises `source` into `output`.
#[track_caller]
fn quantised(source: &Path, output: &Path, recipe: &Recipe<'_>) -> Checkpoint {
    let source = Checkpoint::open(source).unwrap();
    recipe.run(&source, output, |_| Continue(())).unwrap();
    Checkpoint::open(output).unwrap()
}

/// Each tensor's shape and bytes, by name.
fn tensors(checkpoint: &Checkpoint) -> BTreeMap<&str, (&[usize], Bytes)> {
    checkpoint.tensors().iter().map(|view| (&view.name[..], (&view.shape[..], view.bytes.get()))).collect()
}

#[track_caller]
fn assert_same(what: &str, one: &Checkpoint, other: &Checkpoint) {
    let [one, other] = [one, other].map(tensors);
    assert!(one.keys().eq(other.keys()), "{what}: {:?} {:?}", one.keys(), other.keys());
    one.iter().for_each(|(name, tensor)| assert!(*tensor == other[name], "{what}: {name}"));
}

/// A tensor's format, the bytes of each component, and the values that they decode to in f32.
struct Held {
    format: Format,
    k: usize,
    components: Vec<Vec<u8>>,
    values: Vec<f32>,
}

/// Reads a checkpoint by its configuration, without what is tested here.
fn held(checkpoint: &Checkpoint, view: &TensorView) -> Held {
    let Stored::Plain(dtype) = view.stored else { panic!("{} is in blocks", view.name) };
    let module = view.name.strip_suffix(".weight").unwrap_or(&view.name);
    let part = |part: &str| checkpoint.tensors().get(&format!("{module}.{part}"));
    let (format, k) = match part("scales") {
        Some(scales) => {
            let Stored::Plain(dtype) = scales.stored else { panic!("{}", scales.name) };
            let format = checkpoint.quantization(module).unwrap().unwrap().format(dtype).unwrap();
            (format, scales.shape.last().unwrap() * format.block())
        }
        None => (Format::Float(FloatType::from_dtype(dtype).unwrap()), *view.shape.last().unwrap()),
    };
    let components = match format {
        Format::Float(_) => vec![view.bytes.get().to_vec()],
        _ => {
            let names = format.components(k).unwrap();
            names.iter().map(|component| part(component.name).unwrap().bytes.get().to_vec()).collect()
        }
    };
    let row = format.components(k).unwrap()[0].row_bytes();
    let rows = components[0].len() / row;
    let mut values = vec![0.0; rows * k];
    let parts = std::array::from_fn(|i| components.get(i).map_or(&[][..], Vec::as_slice));
    format.decode(&parts, rows, k, &mut values).unwrap();
    Held { format, k, components, values }
}

/// Every tensor is what its old values encode to, and the same bytes where its format stays.
#[test]
fn every_weight_is_encoded_from_what_the_source_decodes_to() {
    let folder = tempfile::tempdir().unwrap();
    let (mut kept, mut again, mut first) = (0, 0, 0);
    for name in MODELS {
        for (mode, bits, group_size) in
            [("affine", 4, 32), ("affine", 3, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
        {
            let recipe = Recipe::new(MlxFormat::new(mode, bits, group_size));
            let output = folder.path().join(format!("{name}-{mode}-{bits}"));
            let made = quantised(&model(name), &output, &recipe);
            let source = Checkpoint::open(&model(name)).unwrap();
            let is_value =
                |view: &&TensorView| !view.name.ends_with(".scales") && !view.name.ends_with(".biases");
            let names = |checkpoint: &Checkpoint| -> Vec<String> {
                checkpoint.tensors().iter().filter(is_value).map(|view| view.name.clone()).collect()
            };
            assert_eq!(names(&source), names(&made));
            for view in made.tensors().iter().filter(is_value) {
                let what = format!("{name} as {mode} {bits}: {}", view.name);
                let (old, new) =
                    (held(&source, source.tensors().get(&view.name).unwrap()), held(&made, view));
                assert_eq!(old.k, new.k, "{what}");
                if old.format == new.format {
                    assert!(old.components == new.components, "{what}");
                    kept += usize::from(!matches!(new.format, Format::Float(_)));
                    continue;
                }
                let from = match old.format {
                    Format::Float(float) => float,
                    _ => FloatType::F32,
                };
                let want = new.format.encode_from(from, &old.values, old.k).unwrap();
                assert!(want == new.components, "{what}: {} to {}", old.format, new.format);
                *(if from == FloatType::F32 { &mut again } else { &mut first }) += 1;
            }
            let quantization = &made.config().unwrap()["quantization"];
            assert_eq!(quantization, &made.config().unwrap()["quantization_config"]);
            assert!(quantization["mode"] == mode && quantization["bits"] == bits, "{name}: {quantization}");
            assert_eq!(made.surplus_quantization(), [""; 0], "{name}");
            assert!(
                std::fs::read(output.join("tokenizer.json")).unwrap()
                    == std::fs::read(model(name).join("tokenizer.json")).unwrap()
            );
        }
    }
    println!("{kept} kept, {again} quantised again, {first} quantised for the first time");
    assert!(kept > 100 && again > 500 && first > 0);
}

/// As mlx-lm converts without `-q`: what Hugging Face's checkpoint becomes, this one becomes.
#[test]
fn a_dense_checkpoint_becomes_what_its_original_becomes() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama-bias", "qwen3_next", "qwen3_5_moe"] {
        let dense = folder.path().join(format!("{name}-dense"));
        let nothing = Recipe::new(MlxFormat::default()).with_rules(vec!["*=none".parse().unwrap()]);
        quantised(&model(name), &dense, &nothing);
        std::fs::copy(model(name).join("config.json"), dense.join("config.json")).unwrap();
        for (mode, bits, group_size) in [("affine", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)] {
            let recipe = Recipe::new(MlxFormat::new(mode, bits, group_size));
            let outputs = ["direct", "again"].map(|way| folder.path().join(format!("{name}-{mode}-{way}")));
            let direct = quantised(&model(name), &outputs[0], &recipe);
            let again = quantised(&dense, &outputs[1], &recipe);
            assert_same(name, &direct, &again);
            assert_eq!(direct.config().unwrap(), again.config().unwrap(), "{name} {mode}");
        }
    }
}

/// Asserts that `made` has every key of `old`, with the same value. It may also state what `old`
/// leaves to defaults.
#[track_caller]
fn assert_has(made: &serde_json::Value, old: &serde_json::Value) {
    match old.as_object() {
        Some(old) => old.iter().for_each(|(key, value)| assert_has(&made[key], value)),
        None => assert_eq!(made, old),
    }
}

#[test]
fn the_demo_model_of_4_bits_stays_as_it_is_and_of_8_bits_becomes_4() {
    let folder = tempfile::tempdir().unwrap();
    let demo = root().join("models/demo-4bit");
    let recipe = Recipe::new(MlxFormat::default());
    let same = quantised(&demo, &folder.path().join("same"), &recipe);
    let demo = Checkpoint::open(&demo).unwrap();
    assert_same("the demo model", &demo, &same);
    assert_has(same.config().unwrap(), demo.config().unwrap());
    let fine = folder.path().join("8");
    let fine_recipe = Recipe::new(MlxFormat::default().with_bits(8));
    quantised(&root().join("models/demo"), &fine, &fine_recipe);
    let coarse = quantised(&fine, &folder.path().join("4"), &recipe);
    assert_has(coarse.config().unwrap(), demo.config().unwrap());
    // Errors of both roundings are independent, so their squares add up: sqrt(1 + (15 / 255)^2) =
    // 1.002.
    let original = Checkpoint::open(&root().join("models/demo")).unwrap();
    let name = "language_model.model.layers.0.mlp.switch_mlp.down_proj.weight";
    let [direct, twice] =
        [&demo, &coarse].map(|checkpoint| held(checkpoint, checkpoint.tensors().get(name).unwrap()));
    let exact = original.tensors().iter().find(|view| view.name.ends_with("layers.0.mlp.experts.down_proj"));
    let exact = held(&original, exact.unwrap()).values;
    let error = |held: &Held| -> f64 {
        held.values.iter().zip(&exact).map(|(value, exact)| f64::from(value - exact).powi(2)).sum()
    };
    let ratio = (error(&twice) / error(&direct)).sqrt();
    println!("error of 4 bits after 8, by that of 4 bits alone: {ratio}");
    assert!((0.99..1.02).contains(&ratio) && twice.components != direct.components);
}

fn logits(path: &Path, tokens: &[u32]) -> Vec<f32> {
    let checkpoint = Checkpoint::open(path).unwrap();
    Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
    let model = Model::load_for(&checkpoint, target).unwrap();
    let logits = model.forward(tokens, &mut model.cache(), Logits::All).unwrap().unwrap();
    logits.as_slice::<f32>().unwrap().to_vec()
}

/// For each token, how far its logits `got` are from `want`, by their size: the median, since
/// another expert may be chosen where two were nearly as good.
fn median_error(want: &[f32], got: &[f32], vocab_size: usize) -> f64 {
    let relative = |(want, got): (&[f32], &[f32])| {
        let pairs = want.iter().zip(got).map(|(&want, &got)| (f64::from(want), f64::from(got)));
        let sums = pairs
            .fold((0.0, 0.0), |sums, (want, got)| (sums.0 + (want - got).powi(2), sums.1 + want.powi(2)));
        (sums.0 / sums.1).sqrt()
    };
    let mut errors: Vec<f64> = want.chunks(vocab_size).zip(got.chunks(vocab_size)).map(relative).collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

/// The steps of 8 bits are 255 / 7 = 36 times as fine as those of 3 bits, so logits move much less,
/// however sensitive a model is. A norm that was shifted twice, or a convolution that was turned,
/// would move both alike.
#[test]
fn what_is_made_computes_what_its_source_computes() {
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| (i * i + 7 * i) % 199).collect();
    for name in MODELS.into_iter().chain(["qwen3_moe-mlx-4bit"]) {
        let want = logits(&model(name), &tokens);
        let [fine, coarse] = [8, 3].map(|bits| {
            let output = folder.path().join(format!("{name}-{bits}"));
            quantised(&model(name), &output, &Recipe::new(MlxFormat::default().with_bits(bits)));
            median_error(&want, &logits(&output, &tokens), want.len() / tokens.len())
        });
        println!("{name}: {fine:.4} at 8 bits, {coarse:.4} at 3");
        assert!(fine < coarse / 8.0, "{name}: {fine} at 8 bits, {coarse} at 3");
    }
}

#[test]
fn rules_and_rows_that_do_not_fit_leave_a_weight_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let source = Checkpoint::open(&model("mistral-mlx-fp")).unwrap();
    let rules: Vec<Rule> = ["lm_head=none", "v_proj=6"].map(|rule| rule.parse().unwrap()).into();
    let output = folder.path().join("new");
    let made = quantised(source.path(), &output, &Recipe::new(MlxFormat::default()).with_rules(rules));
    let format = |checkpoint: &Checkpoint, module: &str| {
        let view = checkpoint.tensors().get(&format!("{module}.weight")).unwrap();
        held(checkpoint, view).format.to_string()
    };
    assert_eq!(format(&made, "lm_head"), "mxfp8");
    let bytes = |checkpoint: &Checkpoint| checkpoint.tensors().get("lm_head.weight").unwrap().bytes.get();
    assert_eq!(bytes(&made), bytes(&source));
    // The source's modes do not say which type the weights had: scales have the norms'.
    let embedding = held(&made, made.tensors().get("model.embed_tokens.weight").unwrap());
    assert_eq!(embedding.format, Format::affine(4, 64, FloatType::BF16).unwrap());
    assert_eq!(format(&made, "model.layers.0.self_attn.v_proj"), "affine6g64");
    assert_eq!(format(&made, "model.layers.0.self_attn.o_proj"), "affine4g32");

    // Rows of 48 values are no groups of 32.
    let small = folder.path().join("small");
    std::fs::create_dir(&small).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 1,
        "vocab_size": 8, "rms_norm_eps": 1e-6, "quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    });
    std::fs::write(small.join("config.json"), config.to_string()).unwrap();
    let name = "model.layers.0.mlp.down_proj";
    let layer = |part: &str| format!("model.layers.0.{part}.weight");
    let mut writer = safetensors::Writer::new();
    let mut bytes = vec![];
    for (name, shape) in [
        ("model.embed_tokens.weight".to_string(), vec![8, 32]),
        ("model.norm.weight".into(), vec![32]),
        (layer("input_layernorm"), vec![32]),
        (layer("post_attention_layernorm"), vec![32]),
        (layer("self_attn.q_proj"), vec![32, 32]),
        (layer("self_attn.k_proj"), vec![32, 32]),
        (layer("self_attn.v_proj"), vec![32, 32]),
        (layer("self_attn.o_proj"), vec![32, 32]),
        (layer("mlp.gate_proj"), vec![48, 32]),
        (layer("mlp.up_proj"), vec![48, 32]),
    ] {
        writer.tensor(&name, DType::BF16, &shape).unwrap();
        bytes.push(vec![0; 2 * shape.iter().product::<usize>()]);
    }
    writer.tensor(&format!("{name}.weight"), DType::U32, &[32, 6]).unwrap();
    writer.tensor(&format!("{name}.scales"), DType::U8, &[32, 3]).unwrap();
    bytes.push((0..768).map(|i| (i % 251) as u8).collect());
    bytes.push((0..96).map(|i| 40 + i % 12).collect());
    let mut body = writer.begin(&small, u64::MAX).unwrap();
    bytes.iter().for_each(|bytes| body.tensor(bytes).unwrap());
    body.finish().unwrap();
    let rules = ["self_attn=none", "gate_proj=none", "up_proj=none", "embed=none"];
    let rules: Vec<Rule> = rules.map(|rule| rule.parse().unwrap()).into();
    let source = Checkpoint::open(&small).unwrap();
    for mode in ["affine", "mxfp8"] {
        let recipe = Recipe::new(MlxFormat::for_mode(mode)).with_rules(rules.clone());
        let output = folder.path().join(mode);
        let summary = recipe.run(&source, &output, |_| Continue(())).unwrap().summary;
        let made = Checkpoint::open(&output).unwrap();
        assert_eq!(format(&made, name), "nvfp4");
        assert_same(mode, &source, &made);
        let fallbacks: Vec<_> =
            summary.fallbacks.iter().map(|fallback| (fallback.k, fallback.taken)).collect();
        assert_eq!(fallbacks, [(48, Format::from_mlx_mode("nvfp4").unwrap())]);
    }
}

/// Single experts, as Hugging Face has them, but quantised: lowbit stacks them when it loads them,
/// and here.
#[test]
fn single_experts_that_are_quantised_are_stacked() {
    let folder = tempfile::tempdir().unwrap();
    let source = model("qwen3_moe-mlx-4bit");
    let apart = folder.path().join("apart");
    std::fs::create_dir(&apart).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), apart.join(name)).unwrap();
    }
    let stacked = Checkpoint::open(&source).unwrap();
    let (mut writer, mut bodies) = (safetensors::Writer::new(), vec![]);
    writer.metadata("format", "mlx");
    for view in stacked.tensors().iter() {
        let Stored::Plain(dtype) = view.stored else { panic!("{} is in blocks", view.name) };
        let Some((layer, part)) = view.name.split_once("switch_mlp.") else {
            writer.tensor(&view.name, dtype, &view.shape).unwrap();
            bodies.push(view.bytes.get());
            continue;
        };
        let size = view.bytes.len() / view.shape[0];
        for expert in 0..view.shape[0] {
            writer.tensor(&format!("{layer}experts.{expert}.{part}"), dtype, &view.shape[1..]).unwrap();
            bodies.push(view.bytes.get().slice(expert * size..(expert + 1) * size));
        }
    }
    let mut body = writer.begin(&apart, u64::MAX).unwrap();
    bodies.into_iter().for_each(|bytes| body.tensor(&bytes).unwrap());
    body.finish().unwrap();
    Model::load(&Checkpoint::open(&apart).unwrap(), &Device::cpu(Some(1)).unwrap()).unwrap();
    for (name, bits) in [("same", 4), ("coarser", 3)] {
        let recipe = Recipe::new(MlxFormat::new("affine", bits, 32));
        let outputs = ["apart", "stacked"].map(|way| folder.path().join(format!("{name}-{way}")));
        assert_same(
            name,
            &quantised(&apart, &outputs[0], &recipe),
            &quantised(&source, &outputs[1], &recipe),
        );
    }
}

#[test]
fn what_cannot_be_a_source_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new");
    // A scale that is no number, in a weight that is quantised again and in one that stays.
    let broken = folder.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        std::fs::copy(model("qwen3_5-mlx-8bit").join(name), broken.join(name)).unwrap();
    }
    let bytes = std::fs::read(broken.join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let module = "language_model.model.layers.0.mlp.up_proj";
    let start = header + json[format!("{module}.scales")]["data_offsets"][0].as_u64().unwrap() as usize;
    let mut bytes = bytes;
    bytes[start + 2..start + 4].copy_from_slice(&f32::NAN.to_le_bytes()[2..]);
    std::fs::write(broken.join("model.safetensors"), bytes).unwrap();
    for bits in [4, 8] {
        let source = Checkpoint::open(&broken).unwrap();
        let recipe = Recipe::new(MlxFormat::new("affine", bits, 32));
        let error = recipe.run(&source, &output, |_| Continue(())).unwrap_err();
        assert!(matches!(error, QuantizeError::Encode { .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains(module) && message.contains("value 32 is NaN"), "{message}");
        assert!(!output.exists());
    }
}
