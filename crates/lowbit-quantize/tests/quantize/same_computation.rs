//! A conversion writes what lowbit, llama.cpp and mlx-lm read and compute as the source says, or
//! nothing; and names what it leaves out.

use lowbit_files::{Checkpoint, safetensors};
use lowbit_formats::{DType, FloatType};
use lowbit_kernels::{Device, Tensor};
use lowbit_models::{Drafter, Logits, Model, Mtp, Predictor, Target};
use lowbit_quantize::{Mix, MlxFormat, Recipe, Summary};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models").join(name)
}

/// A checkpoint in a folder that lasts as long.
struct Source {
    path: PathBuf,
    _folder: TempDir,
}

impl Source {
    fn path(&self) -> &Path {
        &self.path
    }
}

/// A copy of one of the vectors' checkpoints with another configuration and other tensors.
fn changed(
    name: &str,
    config: impl Fn(&mut Map<String, Value>),
    tensors: impl Fn(&mut BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>),
) -> Source {
    let (folder, from) = (tempfile::tempdir().unwrap(), model(name));
    let source = Source { path: folder.path().join("checkpoint"), _folder: folder };
    std::fs::create_dir(&source.path).unwrap();
    let mut json: Value =
        serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    let text = if json.get("text_config").is_some() { &mut json["text_config"] } else { &mut json };
    text["dtype"] = "float32".into();
    text.as_object_mut().unwrap().remove("torch_dtype");
    config(text.as_object_mut().unwrap());
    if json.get("dtype").or(json.get("torch_dtype")).is_some() {
        json["dtype"] = "float32".into();
        json.as_object_mut().unwrap().remove("torch_dtype");
    }
    std::fs::write(source.path.join("config.json"), json.to_string()).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), source.path.join(file)).unwrap();
    }
    let original = Checkpoint::open(&from).unwrap();
    let mut all = BTreeMap::new();
    for view in original.tensors() {
        let lowbit_files::Stored::Plain(dtype) = view.stored else { panic!("{view:?}") };
        // Conversions to MLX's layout round to the type that the configuration says.
        let float = FloatType::from_dtype(dtype).unwrap();
        let bytes = view.bytes.get();
        let values = (0..view.elements()).flat_map(|i| float.get(&bytes, i).to_le_bytes());
        all.insert(view.name.clone(), (DType::F32, view.shape.clone(), values.collect()));
    }
    tensors(&mut all);
    let mut writer = safetensors::Writer::new();
    for (name, (dtype, shape, _)) in &all {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    let mut body = writer.begin(&source.path, u64::MAX).unwrap();
    all.values().for_each(|(.., bytes)| body.tensor(bytes).unwrap());
    body.finish().unwrap();
    source
}

fn with(key: &'static str, value: Value) -> impl Fn(&mut Map<String, Value>) {
    move |config| drop(config.insert(key.into(), value.clone()))
}

/// The checkpoint as GGUF in F32, beside it.
fn to_gguf(source: &Path) -> Result<(PathBuf, Summary), String> {
    as_type(source, "F32")
}

fn as_type(source: &Path, mix: &str) -> Result<(PathBuf, Summary), String> {
    let output = source.with_extension("gguf");
    let recipe = Recipe::new(Mix::from_name(mix).unwrap()).with_replace(true);
    let made = recipe.run(&Checkpoint::open(source).unwrap(), &output, |_| Continue(()));
    let made = made.map_err(|error| error.to_string())?;
    Ok((output, made.summary))
}

/// The checkpoint in MLX's layout, unquantised, in a new folder.
fn to_mlx(source: &Path) -> Result<(TempDir, Summary), String> {
    let output = tempfile::tempdir().unwrap();
    let recipe =
        Recipe::new(MlxFormat::default()).with_rules(vec!["*=none".parse().unwrap()]).with_replace(true);
    let made = recipe.run(&Checkpoint::open(source).unwrap(), &output.path().join("made"), |_| Continue(()));
    let made = made.map_err(|error| error.to_string())?;
    Ok((output, made.summary))
}

/// The logits of more tokens than any window here has.
fn logits(path: &Path) -> Vec<f32> {
    let target = Target::new(&Device::cpu(Some(1)).unwrap(), None).unwrap().with_exact(true);
    let model = Model::load_for(&Checkpoint::open(path).unwrap(), target).unwrap();
    let tokens: Vec<u32> = (0..60).map(|i| i * 7 % 200).collect();
    let logits = model.forward(&tokens, &mut model.cache(), Logits::All).unwrap().unwrap();
    logits.as_slice::<f32>().unwrap().to_vec()
}

#[track_caller]
fn assert_same(what: &str, want: &Path, got: &Path) {
    let (want, got) = (logits(want), logits(got));
    let most = want.iter().fold(0f32, |most, value| most.max(value.abs()));
    let apart = want.iter().zip(&got).fold(0f32, |apart, (want, got)| apart.max((want - got).abs()));
    assert!(apart <= 1e-4 * most, "{what}: {apart} of {most}");
}

#[test]
fn settings_that_a_source_leaves_to_defaults_are_written() {
    for (name, keys) in [
        ("qwen3_next", &["norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"][..]),
        ("qwen3_moe", &["norm_topk_prob", "tie_word_embeddings", "attention_bias"]),
        ("qwen3", &["attention_bias", "hidden_act", "rope_scaling"]),
        ("llama2", &["tie_word_embeddings", "rope_theta", "rope_scaling", "num_key_value_heads"]),
    ] {
        for key in keys {
            let source = changed(name, |config| drop(config.remove(*key)), |_| ());
            let Ok((made, _)) = to_mlx(source.path()) else { panic!("{name} without {key}") };
            let made = made.path().join("made");
            assert_same(&format!("{name} without {key}"), source.path(), &made);
            let config = Checkpoint::open(&made).unwrap().config().unwrap().clone();
            assert!(config.get(key).is_some(), "{name}: {key} is not written");
        }
    }
}

/// Norms that are stored as `w - 1` in f16, whose sum with 1 has no f16.
#[test]
fn norms_of_mlx_become_the_sums_that_are_computed_with() {
    let source = changed("gemma3", with("dtype", "float16".into()), |_| ());
    let (mlx, _) = to_mlx(source.path()).unwrap();
    let mlx = mlx.path().join("made");
    let (gguf, _) = to_gguf(&mlx).unwrap();
    let values = |path: &Path, name: &str| -> Vec<f32> {
        let checkpoint = Checkpoint::open(path).unwrap();
        let view = checkpoint.tensors().get(name).unwrap().clone();
        let lowbit_files::Stored::Plain(dtype) = view.stored else { panic!("{view:?}") };
        let (float, bytes) = (FloatType::from_dtype(dtype).unwrap(), view.bytes.get());
        (0..view.elements()).map(|i| float.get(&bytes, i)).collect()
    };
    let stored = values(&mlx, "model.layers.0.self_attn.k_norm.weight");
    let sums: Vec<f32> = stored.iter().map(|value| value + 1.0).collect();
    assert_eq!(values(&gguf, "blk.0.attn_k_norm.weight"), sums);
    assert!(sums.iter().any(|&sum| FloatType::F16.round(sum) != sum), "{sums:?}");
    assert_same("norms", &mlx, &gguf);
}

#[test]
fn scaled_rotary_embeddings_are_written_as_they_were_computed() {
    for (name, scaling) in [
        (
            "llama2",
            json!({"rope_type": "llama3", "factor": 2, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ),
        (
            "qwen3",
            json!({"rope_type": "llama3", "factor": 4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 100}),
        ),
        (
            "qwen3",
            json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8}),
        ),
        ("qwen3", json!({"rope_type": "yarn", "factor": 2.0, "mscale": 1.4, "mscale_all_dim": 0.5})),
        ("llama2", json!({"rope_type": "linear", "factor": 3})),
    ] {
        let what = format!("{name} with {scaling}");
        let change = |config: &mut Map<String, Value>| {
            config.remove("rope_parameters");
            config.insert("rope_theta".into(), 500.0.into());
            config.insert("max_position_embeddings".into(), 128.into());
            config.insert("rope_scaling".into(), scaling.clone());
        };
        let source = changed(name, change, |_| ());
        let (file, summary) = to_gguf(source.path()).unwrap();
        let is_refused_there = name == "qwen3" && scaling["rope_type"] == "llama3";
        let warned = summary.warnings.iter().any(|warning| {
            warning.contains("llama.cpp does not read rope_freqs.weight for the architecture qwen3")
        });
        assert_eq!(warned, is_refused_there, "{what}: {:?}", summary.warnings);
        assert_same(&what, source.path(), &file);
        let (made, _) = to_mlx(source.path()).unwrap();
        assert_same(&what, source.path(), &made.path().join("made"));
    }
    // Of a part of each head alone.
    let change = with(
        "rope_parameters",
        json!({"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 64, "rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    );
    let source = changed("qwen3_5", change, |_| ());
    let (file, _) = to_gguf(source.path()).unwrap();
    assert_same("a half", source.path(), &file);
}

#[test]
fn sections_and_experts_that_are_odd_are_read_again() {
    // No sections, over a quarter of a head of 32.
    let change = with("rope_parameters", json!({"rope_theta": 1e7, "partial_rotary_factor": 0.25}));
    let source = changed("qwen3_5", change, |_| ());
    let (file, _) = to_gguf(source.path()).unwrap();
    assert_same("no sections", source.path(), &file);
    // Qwen3-MoE has no shared expert, whatever this says.
    let source = changed("qwen3_moe", with("shared_expert_intermediate_size", 32.into()), |_| ());
    let (file, _) = to_gguf(source.path()).unwrap();
    // llama.cpp always divides by the sum of the chosen experts.
    assert_same("an idle shared expert", source.path(), &file);
}

#[test]
fn a_context_within_the_window_needs_none() {
    let short = |config: &mut Map<String, Value>| {
        config.insert("sliding_window".into(), 61.into());
        config.insert("max_position_embeddings".into(), 61.into());
    };
    let source = changed("mistral", short, |_| ());
    let (file, _) = to_gguf(source.path()).unwrap();
    assert_same("a window of the context", source.path(), &file);
}

#[test]
fn one_expert_is_read_again_though_gguf_drops_its_dimension() {
    let one = |config: &mut Map<String, Value>| {
        config.insert("num_experts".into(), 1.into());
        config.insert("num_experts_per_tok".into(), 1.into());
    };
    let source = changed("qwen3_moe", one, |tensors| {
        tensors.retain(|name, _| !name.contains(".experts.") || name.contains(".experts.0."));
        for (_, (_, shape, bytes)) in tensors.iter_mut().filter(|(name, _)| name.ends_with("mlp.gate.weight"))
        {
            bytes.truncate(bytes.len() / shape[0]);
            shape[0] = 1;
        }
    });
    let (file, _) = to_gguf(source.path()).unwrap();
    assert_same("one expert", source.path(), &file);
    // Of blocks as of plain values, and back.
    let (quantised, _) = as_type(source.path(), "Q8_0").unwrap();
    let (folder, _) = to_mlx(&quantised).unwrap();
    assert_eq!(logits(&quantised).len(), logits(&folder.path().join("made")).len());
}

#[test]
fn what_cannot_be_said_is_refused_before_anything_is_written() {
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "beta_slow": 2.0});
    for (name, key, value, want) in [
        (
            "mistral",
            "sliding_window",
            json!(21),
            ": layer 0's sliding_window is 21, but a GGUF file made of it would be computed with none, so nothing is \
             written; with a max_position_embeddings of at most 21 in config.json no window is needed",
        ),
        (
            "qwen3_moe",
            "norm_topk_prob",
            json!(false),
            "'s norm_topk_prob is false, but a GGUF file made of it would be computed with true, so nothing is written",
        ),
        (
            "qwen3",
            "rope_scaling",
            yarn,
            "qwen3.rope.scaling.yarn_beta_slow is F32(2.0), but only 1.0 is supported: a GGUF file cannot say otherwise what \
             this checkpoint computes, so nothing is written",
        ),
    ] {
        let source = changed(name, with(key, value), |_| ());
        let message = to_gguf(source.path()).map(drop).unwrap_err();
        assert!(message.ends_with(want), "{message}");
        assert!(!source.path().with_extension("gguf").exists());
    }
}

/// mlx-lm has no output layer beside the embedding in LFM2, whatever its configuration says.
#[test]
fn an_output_layer_that_mlx_lm_does_not_have_is_refused() {
    for name in ["lfm2", "lfm2_moe"] {
        let source = changed(name, with("tie_word_embeddings", false.into()), |tensors| {
            let (dtype, shape, mut bytes) = tensors["model.embed_tokens.weight"].clone();
            bytes.rotate_left(4);
            tensors.insert("lm_head.weight".into(), (dtype, shape, bytes));
        });
        let error = to_mlx(source.path()).map(|(_, summary)| summary).unwrap_err();
        assert!(error.contains("tie_word_embeddings is false, but mlx-lm always ties"), "{error}");
        let (file, _) = to_gguf(source.path()).unwrap();
        assert_same(name, source.path(), &file);
    }
}

fn assert_warned(what: &str, source: &Source, want: Option<&str>) {
    let (made, summary) = to_mlx(source.path()).unwrap();
    let of_mlx_lm: Vec<_> = summary.warnings.iter().filter(|text| text.contains("mlx-lm")).collect();
    match want {
        Some(want) => assert!(of_mlx_lm.iter().any(|text| text.contains(want)), "{what}: {of_mlx_lm:?}"),
        None => assert!(of_mlx_lm.is_empty(), "{what}: {of_mlx_lm:?}"),
    }
    assert_same(what, source.path(), &made.path().join("made"));
}

/// A model of LFM2's layer with attention alone.
fn without_convolutions() -> Source {
    let config = |config: &mut Map<String, Value>| {
        config.insert("num_hidden_layers".into(), 1.into());
        config.insert("layer_types".into(), json!(["full_attention"]));
    };
    changed("lfm2", config, |tensors| {
        let kept = std::mem::take(tensors).into_iter().filter_map(|(name, tensor)| {
            let name = name.replacen("layers.1.", "layers.0.", 1);
            let is_other = name.contains("layers.2.") || name.contains(".conv.");
            (!is_other).then_some((name, tensor))
        });
        // The first layer's MLP goes for that of the second one, which comes later.
        tensors.extend(kept);
    })
}

#[test]
fn differences_of_mlx_lm_are_named() {
    let scaled = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64});
    for (name, is_computed) in [
        ("qwen3", true),
        ("qwen3_moe", false),
        ("mixtral", false),
        ("glm4", false),
        ("glm4_moe", false),
        ("lfm2", false),
        ("hunyuan", false),
        ("minimax_m2", false),
        ("olmo2", true),
    ] {
        let change = |config: &mut Map<String, Value>| {
            config.remove("rope_parameters");
            config.insert("rope_scaling".into(), scaled.clone());
        };
        let want = "does not scale this architecture's rotary embedding as yarn";
        assert_warned(name, &changed(name, change, |_| ()), (!is_computed).then_some(want));
    }
    for (name, is_read) in [("llama2", true), ("glm4", false), ("qwen2_moe", false)] {
        let source = changed(name, with("tie_word_embeddings", true.into()), |tensors| {
            tensors.remove("lm_head.weight");
        });
        assert_warned(name, &source, (!is_read).then_some("wants an output layer of this architecture"));
    }
    let full = json!(["full_attention", "full_attention", "full_attention"]);
    for name in ["olmo3", "exaone4"] {
        let source = changed(name, with("layer_types", full.clone()), |_| ());
        assert_warned(name, &source, Some("wants layers of both kinds, with a window and without"));
        assert_warned(name, &changed(name, |_| (), |_| ()), None);
    }
    let source = without_convolutions();
    assert_warned("lfm2", &source, Some("wants layers of both kinds"));
    let (file, _) = to_gguf(source.path()).unwrap();
    assert_same("lfm2 without convolutions", source.path(), &file);
}

#[test]
fn an_output_layer_that_llama_cpp_wants_is_named() {
    for (name, architecture) in [("olmo2", "olmo2"), ("minimax_m2", "minimax-m2")] {
        let source = changed(name, with("tie_word_embeddings", true.into()), |tensors| {
            tensors.remove("lm_head.weight");
        });
        let (file, summary) = to_gguf(source.path()).unwrap();
        let want = format!("wants an output layer of the architecture {architecture}");
        assert!(summary.warnings.iter().any(|text| text.contains(&want)), "{:?}", summary.warnings);
        assert_same(name, source.path(), &file);
    }
}

/// The guesses of a checkpoint's own layer for them, from states that it makes.
fn guesses(path: &Path) -> Vec<u32> {
    let (device, checkpoint) = (Device::cpu(Some(2)).unwrap(), Checkpoint::open(path).unwrap());
    let target = Target::new(&device, Some(FloatType::F32)).unwrap().with_exact(true);
    let model = Model::load_for(&checkpoint, target).unwrap();
    let predictor = Predictor::load(&checkpoint, &model).unwrap();
    let (text, width): (Vec<u32>, _) = ((1..30).map(|id| id * 7).collect(), model.config().hidden_size);
    let states: Vec<f32> = (0..text.len() * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let states = Tensor::new(&states, &[text.len(), width], &device).unwrap();
    let mut all = vec![];
    for length in 4..text.len() {
        let mut drafter = Mtp::new(&model, &predictor);
        drafter.see(0, &text[..length], &states.rows(0, length).unwrap()).unwrap();
        all.extend(drafter.draft(&text[..=length], 3).unwrap());
    }
    assert_eq!(all.len(), 3 * (text.len() - 4));
    all
}

#[test]
fn layers_that_predict_further_tokens_are_kept_or_named() {
    let source = changed("qwen3_5", |_| (), |_| ());
    let (file, summary) = to_gguf(source.path()).unwrap();
    let [vision] = &summary.warnings[..] else { panic!("{:?}", summary.warnings) };
    assert!(vision.contains(" tensors of the part that sees images (model.visual."), "{vision}");
    let made = Checkpoint::open(&file).unwrap();
    let metadata = made.metadata().unwrap();
    assert_eq!(metadata.get::<u32>("qwen35.block_count").unwrap(), 5);
    assert_eq!(metadata.get::<u32>("qwen35.nextn_predict_layers").unwrap(), 1);
    for (name, shape) in [
        ("blk.4.nextn.eh_proj.weight", &[64, 128][..]),
        ("blk.4.nextn.enorm.weight", &[64]),
        ("blk.4.nextn.hnorm.weight", &[64]),
        ("blk.4.nextn.shared_head_norm.weight", &[64]),
        ("blk.4.attn_q.weight", &[192, 64]),
        ("blk.4.attn_norm.weight", &[64]),
        ("blk.4.ffn_down.weight", &[64, 160]),
    ] {
        assert_eq!(made.tensors().get(name).unwrap_or_else(|| panic!("{name}")).shape, shape, "{name}");
    }
    // The converter adds 1 to these norms, too.
    let first = |checkpoint: &Checkpoint, name: &str| {
        f32::from_le_bytes(checkpoint.tensors().get(name).unwrap().bytes.get()[..4].try_into().unwrap())
    };
    let original = Checkpoint::open(source.path()).unwrap();
    for (name, from) in [
        ("blk.4.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("blk.4.nextn.shared_head_norm.weight", "mtp.norm.weight"),
        ("blk.4.attn_k_norm.weight", "mtp.layers.0.self_attn.k_norm.weight"),
    ] {
        assert_eq!(first(&made, name), first(&original, from) + 1.0, "{name}");
    }
    assert_same("with a predictor", source.path(), &file);
    assert_eq!(guesses(&file), guesses(source.path()), "the predictor is the same");
    let (mlx, summary) = to_mlx(source.path()).unwrap();
    let [vision] = &summary.warnings[..] else { panic!("{:?}", summary.warnings) };
    assert!(vision.contains(" tensors of the part that sees images (model.visual."), "{vision}");
    let made = mlx.path().join("made");
    assert_same("with a predictor in MLX's layout", source.path(), &made);
    assert_eq!(guesses(&made), guesses(source.path()), "the predictor is the same in MLX's layout");
    // A layer behind the others stays in its checkpoint.
    let (_, summary) = to_mlx(&model("glm4_moe")).unwrap();
    let want = " of the layers of multi-token prediction (model.layers.3.eh_proj.weight, ..) left out: conversions keep those \
                of Qwen3-Next's and Qwen3.5's published checkpoints";
    assert!(summary.warnings.iter().any(|warning| warning.ends_with(want)), "{:?}", summary.warnings);
}

#[test]
fn constants_that_are_left_out_are_named() {
    let source = changed(
        "llama2",
        |_| (),
        |tensors| {
            for layer in 0..2 {
                let name = format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq");
                tensors.insert(name, (DType::F32, vec![2], vec![0; 8]));
            }
        },
    );
    for warnings in [to_gguf(source.path()).unwrap().1.warnings, to_mlx(source.path()).unwrap().1.warnings] {
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        let want = ": 2 tensors that are constants (model.layers.0.self_attn.rotary_emb.inv_freq, ..) left out: every reader \
                    computes them itself";
        assert!(warning.ends_with(want), "{warning}");
    }
}

/// The greatest value of the block is named, and the rule that it says, works.
#[test]
fn an_outlier_is_refused_with_a_way_out() {
    let name = "model.layers.0.mlp.down_proj.weight";
    let outlier = |value: f32, index: usize| {
        changed(
            "qwen3",
            |_| (),
            move |tensors| {
                let (_, _, bytes) = tensors.get_mut(name).unwrap();
                bytes[4 * index..4 * index + 4].copy_from_slice(&value.to_le_bytes());
            },
        )
    };
    let source = outlier(999_424.0, 7);
    let message = as_type(source.path(), "Q4_0").map(drop).unwrap_err();
    let want = "tensor blk.0.ffn_down.weight: value 7 is 999424, which Q4_0 cannot store; with the rule (--rule) \
                blk.0.ffn_down=F32 it stays in a type that can";
    assert_eq!(message, want);
    let recipe = Recipe::new(Mix::from_name("Q4_0").unwrap());
    let recipe = recipe.with_rules(vec!["blk.0.ffn_down=F32".parse().unwrap()]);
    let checkpoint = Checkpoint::open(source.path()).unwrap();
    recipe.run(&checkpoint, &source.path().with_extension("ruled.gguf"), |_| Continue(())).unwrap();
    // The peer's encoders write zeros for this value.
    let source = outlier(1e20, 7);
    for mix in ["Q6_K", "Q3_K_M", "IQ4_XS", "Q8_0", "F16"] {
        let message = as_type(source.path(), mix).map(drop).unwrap_err();
        assert!(message.starts_with("tensor blk.0.ffn_down.weight: value 7 is "), "{mix}: {message}");
    }
    let recipe = Recipe::new(MlxFormat::new("nvfp4", 4, 16));
    let error =
        recipe.run(&Checkpoint::open(source.path()).unwrap(), &source.path().with_extension("mlx"), |_| {
            Continue(())
        });
    let message = error.unwrap_err().to_string();
    assert!(
        message.ends_with(
            "; with the rule (--rule) model.layers.0.mlp.down_proj=none it stays in a type that can"
        ),
        "{message}"
    );
}
