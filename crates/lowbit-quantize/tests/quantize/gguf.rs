//! GGUF files made here against llama.cpp's own: whole files, and the types of tensors.

use lowbit_files::gguf::{self, Array, Value as Entry, Writer};
use lowbit_files::{Checkpoint, Stored, TensorView, Tokenizer, safetensors};
use lowbit_formats::DType;
use lowbit_kernels::Device;
use lowbit_models::Model;
use lowbit_quantize::{Mix, MlxFormat, Progress, QuantizeError, Recipe, Rule};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn vectors(name: &str) -> Value {
    let path = root().join("tests/vectors/quantize").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn recipe(mix: &str) -> Recipe<'static> {
    Recipe::new(Mix::from_name(mix).unwrap())
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Quantises `source` in a new folder and returns the file's bytes.
fn quantised(source: &Path, mix: &str) -> Vec<u8> {
    quantised_with(source, &recipe(mix))
}

fn quantised_with(source: &Path, recipe: &Recipe<'_>) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new.gguf");
    let checkpoint = Checkpoint::open(source).unwrap();
    let summary = recipe.run(&checkpoint, &output, |_| Continue(())).unwrap().summary;
    let made = Checkpoint::open(&output).unwrap();
    assert_eq!(summary.bytes, made.tensors().iter().map(|view| view.bytes.len() as u64).sum::<u64>());
    assert_eq!(summary.kinds.iter().map(|kind| kind.bytes).sum::<u64>(), summary.bytes);
    std::fs::read(output).unwrap()
}

#[test]
fn files_are_llama_quantizes_byte_for_byte() {
    let files = vectors("files.json");
    let models = files["models"].as_object().unwrap();
    assert!(models.len() >= 8);
    for (model, digests) in models {
        let source = root().join("tests/vectors/models").join(model).join("model.gguf");
        for (mix, want) in digests.as_object().unwrap() {
            assert_eq!(digest(&quantised(&source, mix)), want.as_str().unwrap(), "{model} as {mix}");
        }
        // llama-quantize has no mix of NVFP4.
        let mixes = Mix::names().filter(|&name| name != "NVFP4");
        assert_eq!(digests.as_object().unwrap().len(), mixes.count(), "{model}");
    }
}

fn rules(list: &Value) -> Vec<Rule> {
    list.as_array().unwrap().iter().map(|rule| rule.as_str().unwrap().parse().unwrap()).collect()
}

/// lowbit computes everything that the file says: nothing in it is refused when it is loaded.
#[test]
fn converted_files_load() {
    let folder = tempfile::tempdir().unwrap();
    for model in ["demo", "llama3", "qwen3_5", "qwen3_next", "qwen3-mlx-4bit"] {
        let path = folder.path().join(model);
        std::fs::write(&path, quantised(&checkpoint_path(model), "Q8_0")).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        Model::load(&checkpoint, &Device::cpu(Some(1)).unwrap()).unwrap();
        Tokenizer::from_checkpoint(&checkpoint).unwrap();
    }
}

#[test]
fn rules_are_llama_quantizes_tensor_types() {
    let ruled = &vectors("files.json")["ruled"];
    let source = checkpoint_path(ruled["model"].as_str().unwrap()).join("model.gguf");
    let mix = recipe(ruled["mix"].as_str().unwrap());
    let made = quantised_with(&source, &mix.clone().with_rules(rules(&ruled["rules"])));
    assert_eq!(digest(&made), ruled["digest"]);
    assert_ne!(digest(&quantised_with(&source, &mix)), ruled["digest"]);
}

#[test]
fn rules_that_mean_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&checkpoint_path("qwen3").join("model.gguf")).unwrap();
    let output = folder.path().join("new.gguf");
    for (rule, want) in [
        (
            "ffn_dwn=Q6_K",
            "rule ffn_dwn=Q6_K matches nothing that is quantised; some of that is token_embd.weight, \
             blk.0.attn_k.weight, blk.0.attn_output.weight",
        ),
        (
            "ffn_down=Q7_K",
            "rule ffn_down=Q7_K names no type of GGML's that lowbit has: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, \
             Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, TQ1_0, TQ2_0, Q1_0, Q2_0",
        ),
    ] {
        let recipe = recipe("Q4_0").with_rules(vec![rule.parse().unwrap()]);
        let error = recipe.run(&checkpoint, &output, |_| Continue(())).unwrap_err();
        assert_eq!(error.to_string(), want);
        assert!(!output.exists());
    }
}

/// A GGUF file of zeros in f16 with the metadata and tensors of `model`.
fn write_zeros(model: &Value, path: &Path) {
    let architecture = model["architecture"].as_str().unwrap();
    let mut writer = Writer::new();
    writer.entry("general.architecture", Entry::String(architecture.into())).unwrap();
    for (key, value) in model["metadata"].as_object().unwrap() {
        writer.entry(&format!("{architecture}.{key}"), Entry::U32(value.as_u64().unwrap() as u32)).unwrap();
    }
    let mut sizes = vec![];
    for (name, shape) in model["tensors"].as_object().unwrap() {
        let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
        sizes.push(writer.tensor(name, Stored::Plain(DType::F16), &shape).unwrap());
    }
    let mut body = writer.begin(std::fs::File::create(path).unwrap()).unwrap();
    sizes.iter().for_each(|&size| body.tensor(&vec![0; size]).unwrap());
    body.finish().unwrap();
}

#[test]
fn types_are_those_that_llama_quantize_chooses() {
    let types = vectors("types.json");
    let letters = types["letters"].as_object().unwrap();
    for model in types["models"].as_array().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source.gguf");
        write_zeros(model, &source);
        let checkpoint = Checkpoint::open(&source).unwrap();
        let names = model["tensors"].as_object().unwrap().keys();
        for (mix, want) in model["types"].as_object().unwrap() {
            let output = folder.path().join(mix);
            recipe(mix).run(&checkpoint, &output, |_| Continue(())).unwrap();
            let made = Checkpoint::open(&output).unwrap();
            let letter = |name: &String| {
                let stored = made.tensors().get(name).unwrap().stored.to_string().to_uppercase();
                letters[&stored].as_str().unwrap().to_string()
            };
            let got: String = names.clone().map(letter).collect();
            assert_eq!(
                got,
                want.as_str().unwrap(),
                "{} {} as {mix}",
                model["architecture"],
                model["metadata"]
            );
            std::fs::remove_file(output).unwrap();
        }
    }
}

#[test]
fn metadata_is_carried_over() {
    let source = root().join("tests/vectors/models/qwen3/model.gguf");
    let old = gguf::read(&source).unwrap().metadata;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new.gguf");
    std::fs::write(&path, quantised(&source, "Q5_1")).unwrap();
    let new = gguf::read(&path).unwrap().metadata;
    for (key, value) in old.iter().filter(|(key, _)| *key != "general.file_type") {
        assert_eq!(new.value(key), Some(value), "{key}");
    }
    assert_eq!(new.get::<u32>("general.file_type").unwrap(), 9);
    assert_eq!(new.iter().count(), old.iter().count());
}

#[test]
fn what_is_not_possible_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.gguf");
    std::fs::copy(root().join("tests/vectors/models/qwen3/model.gguf"), &source).unwrap();
    let checkpoint = Checkpoint::open(&source).unwrap();
    let refusal = |checkpoint: &Checkpoint, output: &Path| {
        let recipe = recipe("Q4_0").with_replace(true);
        recipe.run(checkpoint, output, |_| Continue(())).unwrap_err().to_string()
    };
    let path = source.display();
    let want = format!("{path} is {path}, the checkpoint that is to be quantised; name a path outside of it");
    assert_eq!(refusal(&checkpoint, &source), want);
    let other = folder.path().join("other.gguf");
    let mut writer = Writer::new();
    writer.entry("general.architecture", Entry::String("falcon".into())).unwrap();
    writer.begin(std::fs::File::create(&other).unwrap()).unwrap().finish().unwrap();
    let error = refusal(&Checkpoint::open(&other).unwrap(), &folder.path().join("new.gguf"));
    let want =
        format!("{}: architecture \"falcon\" is not supported; supported are llama, ", other.display());
    assert!(error.starts_with(&want) && error.contains("qwen35moe"), "{error}");
    for end in 1..4 {
        let output = folder.path().join("new.gguf");
        let result = recipe("Q4_0").run(&checkpoint, &output, |progress| match progress {
            Progress::Tensors(done, _) if done == end => Break(()),
            _ => Continue(()),
        });
        assert!(matches!(result, Err(QuantizeError::Interrupted)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}

/// A metadata value as the vectors have it: of longer lists the digest of their JSON.
fn comparable(entry: &Entry) -> Value {
    let json: Value = match entry {
        Entry::String(text) => text.as_str().into(),
        Entry::U32(number) => (*number).into(),
        Entry::I32(number) => (*number).into(),
        Entry::F32(number) => f64::from(*number).into(),
        Entry::Bool(flag) => (*flag).into(),
        Entry::Array(Array::String(list)) => serde_json::json!(list),
        Entry::Array(Array::I32(list)) => serde_json::json!(list),
        Entry::Array(Array::Bool(list)) => serde_json::json!(list),
        other => panic!("{other:?} is not written"),
    };
    match json.as_array().is_some_and(|list| list.len() > 8) {
        true => digest(json.to_string().as_bytes()).into(),
        false => json,
    }
}

/// The path of a checkpoint of the vectors.
fn checkpoint_path(name: &str) -> PathBuf {
    root().join(if name == "demo" { "models" } else { "tests/vectors/models" }).join(name)
}

/// A copy of the directory without layers that predict further tokens, under the same name; the
/// directory itself where there are none.
fn without_predictors(directory: &Path, folder: &Path) -> PathBuf {
    let checkpoint = Checkpoint::open(directory).unwrap();
    if !checkpoint.tensors().names().any(|name| name.starts_with("mtp.")) {
        return directory.into();
    }
    let copy = folder.join(directory.file_name().unwrap());
    std::fs::create_dir(&copy).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(directory.join(name), copy.join(name)).unwrap();
    }
    let kept: Vec<_> = checkpoint.tensors().iter().filter(|view| !view.name.starts_with("mtp.")).collect();
    let mut writer = safetensors::Writer::new();
    for view in &kept {
        let Stored::Plain(dtype) = view.stored else { panic!("{view:?}") };
        writer.tensor(&view.name, dtype, &view.shape).unwrap();
    }
    let mut body = writer.begin(&copy, u64::MAX).unwrap();
    kept.iter().for_each(|view| body.tensor(&view.bytes.get()).unwrap());
    body.finish().unwrap();
    copy
}

#[test]
fn directories_become_what_llama_cpps_converter_and_quantiser_make_of_them() {
    let models = vectors("converted.json");
    for (model, want) in models["models"].as_object().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.gguf");
        // The vectors are of `--no-mtp`.
        let source = without_predictors(&checkpoint_path(model), folder.path());
        std::fs::write(&path, quantised(&source, "Q4_K_M")).unwrap();
        let made = gguf::read(&path).unwrap();
        let mut keys: Vec<_> = made.metadata.iter().map(|(key, _)| key).collect();
        let mut want_keys: Vec<_> =
            want["metadata"].as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        want_keys.sort_unstable();
        assert_eq!(keys, want_keys, "{model}");
        // The converter writes its default where config.json has no list of layers, whatever
        // config.json says; and sections that do not cover all pairs.
        let wrong = |key: &str| match model.as_str() {
            "qwen3_next" => key == "qwen3next.full_attention_interval",
            "demo" => key == "qwen35moe.rope.dimension_sections",
            _ => false,
        };
        for (key, value) in made.metadata.iter().filter(|(key, _)| !wrong(key)) {
            assert_eq!(comparable(value), want["metadata"][key], "{model}: {key}");
        }
        assert_eq!(made.tensors.len(), want["tensors"].as_object().unwrap().len(), "{model}");
        for view in &made.tensors {
            let want = &want["tensors"][&view.name];
            assert_eq!(view.stored.to_string().to_uppercase(), want["type"], "{model}: {}", view.name);
            assert_eq!(serde_json::json!(view.shape), want["shape"], "{model}: {}", view.name);
            match want["content"].as_array() {
                None => assert_eq!(digest(&view.bytes.get()), want["content"], "{model}: {}", view.name),
                Some(rates) => {
                    for (i, rate) in rates.iter().enumerate() {
                        let got = f32::from_le_bytes(view.bytes.get()[4 * i..4 * i + 4].try_into().unwrap());
                        let apart = got.to_bits().abs_diff((rate.as_f64().unwrap() as f32).to_bits());
                        // Their exp of f32 may be off by a unit in the last place.
                        assert!(apart <= 1, "{model}: {} {i}: {got} - {rate}", view.name);
                    }
                }
            }
        }
    }
}

/// The values of a GGUF file of an MLX checkpoint at 8 bits differ from the unquantised weights by
/// MLX's rounding alone: half a step of at most `(max - min) / 255`, and the rounding of scales,
/// biases and norms to bf16 (2^-9 of them).
#[test]
fn mlx_checkpoints_become_what_they_stand_for() {
    let folder = tempfile::tempdir().unwrap();
    for model in ["demo", "qwen3", "qwen3_next"] {
        let source = Checkpoint::open(&checkpoint_path(model)).unwrap();
        let mlx = folder.path().join(format!("{model}-mlx"));
        Recipe::new(MlxFormat::new("affine", 8, 32)).run(&source, &mlx, |_| Continue(())).unwrap();
        let paths = [checkpoint_path(model), mlx].map(|path| {
            let output = path.file_name().unwrap().to_str().unwrap().to_string() + ".gguf";
            let output = folder.path().join(output);
            let checkpoint = Checkpoint::open(&path).unwrap();
            recipe("F32").run(&checkpoint, &output, |_| Continue(())).unwrap();
            output
        });
        let [exact, rounded] = paths.map(|path| gguf::read(&path).unwrap());
        assert_eq!(exact.tensors.len(), rounded.tensors.len());
        let mut quantised = 0;
        for (exact, rounded) in exact.tensors.iter().zip(&rounded.tensors) {
            assert_eq!((&exact.name, &exact.shape), (&rounded.name, &rounded.shape));
            let values = |view: &TensorView| -> Vec<f32> {
                let bytes = view.bytes.get();
                bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
            };
            let [exact, got] = [exact, rounded].map(values);
            let (min, max) = exact.iter().fold((0f32, 0f32), |(min, max), &x| (min.min(x), max.max(x)));
            let bound = (max - min) / 510.0 + 2f32.powi(-9) * (max - min + max.max(-min)) * 1.01;
            let differ = exact.iter().zip(&got).filter(|(one, other)| one != other).count();
            quantised += usize::from(differ > 0);
            assert!(
                exact.iter().zip(&got).all(|(one, other)| (one - other).abs() <= bound),
                "{model}: {}",
                rounded.name
            );
        }
        assert!(quantised > 10, "{model}");
    }
}

#[test]
fn tokenizers_without_a_name_in_gguf_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(checkpoint_path("qwen3").join(name), source.join(name)).unwrap();
    }
    let original = std::fs::read_to_string(source.join("tokenizer.json")).unwrap();
    for (from, to, want) in [
        (
            r#""pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false"#,
            r#""pre_tokenizer":{"type":"ByteLevel","add_prefix_space":true"#,
            "tokenizer.ggml.pre has no name for how its pre_tokenizer cuts text, so it cannot be written to GGUF",
        ),
        (
            r#""normalizer":null"#,
            r#""normalizer":{"type":"Lowercase"}"#,
            "normalizer \"Lowercase\" has no counterpart in GGUF",
        ),
        (
            r#""byte_fallback":false"#,
            r#""byte_fallback":true"#,
            "pre_tokenizer \"ByteLevel\" has no counterpart in GGUF's llama tokenizers",
        ),
    ] {
        assert!(original.contains(from), "{from}");
        std::fs::write(source.join("tokenizer.json"), original.replace(from, to)).unwrap();
        let checkpoint = Checkpoint::open(&source).unwrap();
        let output = folder.path().join("new.gguf");
        let error = recipe("Q8_0").run(&checkpoint, &output, |_| Continue(())).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{}: tokenizer: {want}", source.join("tokenizer.json").display())
        );
        assert!(!output.exists());
    }
}

#[test]
fn sizes_that_no_tensor_has_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(checkpoint_path("qwen3_5").join(name), folder.path().join(name)).unwrap();
    }
    let config = std::fs::read_to_string(checkpoint_path("qwen3_5").join("config.json")).unwrap();
    let huge = 1u64 << 40;
    for (key, value, want) in [
        ("vocab_size", huge, format!("is bf16 [283, 64], but the configuration wants [{huge}, 64]")),
        ("hidden_size", 65, "is bf16 [283, 64], but the configuration wants [283, 65]".into()),
        ("hidden_size", 0, "hidden_size is 0, but a size is at least 1".into()),
        ("head_dim", huge, format!("head_dim is {huge}, but tensors have 1 to 283 rows")),
        ("num_hidden_layers", huge, format!("num_hidden_layers is {huge}, but the checkpoint has 89 tensors")),
        (
            "linear_value_head_dim",
            u64::MAX,
            format!("linear_value_head_dim is 4 * {}, but that is more than memory can hold", u64::MAX),
        ),
        (
            "linear_value_head_dim",
            huge,
            "linear_attn.conv1d.weight is bf16 [160, 1, 4], but the configuration wants 17592186044672 values".into(),
        ),
        (
            "linear_num_key_heads",
            3,
            "linear_num_value_heads is 4, but a multiple of the 3 key heads is wanted".into(),
        ),
    ] {
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["text_config"][key] = value.into();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let output = folder.path().with_extension("gguf");
        let error =
            recipe("Q8_0").run(&checkpoint, &output, |_| Continue(())).unwrap_err();
        assert!(error.to_string().ends_with(&want), "{key}: {error}");
        assert!(!output.exists());
    }
}
