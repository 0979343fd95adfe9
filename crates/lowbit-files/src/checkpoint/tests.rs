use lowbit_formats::{DType, FloatType, Format};
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::Stored;

/// A directory of the given files.
pub(super) fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = TempDir::new().unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

/// A safetensors file of one-element f32 tensors.
pub(super) fn tensors(format: &str, names: &[&str]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({ "format": format }));
    for (i, name) in names.iter().enumerate() {
        let offsets = [4 * i, 4 * i + 4];
        header.insert(name.to_string(), json!({ "dtype": "F32", "shape": [1], "data_offsets": offsets }));
    }
    let header = Value::from(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend((0..names.len()).flat_map(|i| (i as f32).to_le_bytes()));
    bytes
}

pub(super) fn index(map: &str) -> Vec<u8> {
    format!(r#"{{"metadata": {{}}, "weight_map": {map}}}"#).into_bytes()
}

#[track_caller]
pub(super) fn refused(files: &[(&str, &[u8])]) -> String {
    Checkpoint::open(directory(files).path()).expect_err("should be refused").to_string()
}

#[track_caller]
pub(super) fn assert_refused(files: &[(&str, &[u8])], want: &str) {
    let message = refused(files);
    assert!(message.contains(want), "{message}\nshould say: {want}");
}

pub(super) const EMPTY: (&str, &[u8]) = (CONFIG, b"{}");
pub(super) const INDEX: &str = "model.safetensors.index.json";
const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

#[test]
fn a_single_file_is_opened() {
    let directory = directory(&[
        (CONFIG, br#"{"model_type": "qwen3"}"#),
        ("model.safetensors", &tensors("pt", &["b", "a"])),
    ]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.layout(), Layout::HuggingFace);
    assert_eq!(checkpoint.config().unwrap()["model_type"], "qwen3");
    assert!(checkpoint.metadata().is_none());
    assert_eq!(checkpoint.tensors().names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.tensors().get("a").unwrap().bytes.get()[..], 1f32.to_le_bytes());
    assert!(checkpoint.tensors().get("c").is_none());
    assert_eq!(checkpoint.size_bytes(), 8);
}

#[test]
fn tensors_outlive_the_checkpoint() {
    let directory = directory(&[EMPTY, ("model.safetensors", &tensors("mlx", &["a", "b"]))]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.layout(), Layout::Mlx);
    let view = checkpoint.tensors().get("b").unwrap().clone();
    drop(checkpoint);
    assert_eq!(view.bytes.get()[..], 1f32.to_le_bytes());
}

#[test]
fn shards_are_opened_with_and_without_an_index() {
    let shards = [EMPTY, (FIRST, &tensors("mlx", &["c", "a"])), (SECOND, &tensors("mlx", &["b"]))];
    let index = index(&format!(r#"{{"a": "{FIRST}", "b": "{SECOND}", "c": "{FIRST}"}}"#));
    let indexed = [&shards[..], &[(INDEX, &index)]].concat();
    for files in [&shards[..], &indexed] {
        let directory = directory(files);
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        assert_eq!(checkpoint.tensors().names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(checkpoint.layout(), Layout::Mlx);
        assert!(checkpoint.tensors().get("b").unwrap().file.ends_with(SECOND));
    }
}

#[test]
fn the_single_file_comes_before_shards_beside_it() {
    let index = index(&format!(r#"{{"b": "{FIRST}"}}"#));
    let (single, shard) = (tensors("pt", &["a"]), tensors("pt", &["b"]));
    let directory = directory(&[EMPTY, ("model.safetensors", &single), (FIRST, &shard), (INDEX, &index)]);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(checkpoint.tensors().names().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn shards_that_are_missing_or_disagree_are_refused() {
    let (first, second) = (tensors("pt", &["a"]), tensors("pt", &["b"]));
    let both = [(FIRST, &first[..]), (SECOND, &second)];
    let with = |map: &str, shards: &[(&'static str, &[u8])]| {
        let index = index(map);
        refused(&[&[EMPTY, (INDEX, &index)], shards].concat())
    };
    let cases = [
        (
            with(&format!(r#"{{"a": "{FIRST}", "b": "{SECOND}"}}"#), &both[..1]),
            format!("shard {SECOND} is missing; tensor b is in it"),
        ),
        (
            with(&format!(r#"{{"a": "{FIRST}", "b": "{FIRST}"}}"#), &both),
            format!("tensor b is not in {FIRST}, where the index says that it is"),
        ),
        (
            with(&format!(r#"{{"a": "{FIRST}"}}"#), &[(FIRST, &tensors("pt", &["a", "b"]))]),
            format!("tensor b is in {FIRST}, but not in the index"),
        ),
        (with(&format!(r#"{{"a": "{INDEX}"}}"#), &both), "no file name ending in .safetensors".into()),
        (with(r#"{"a": "../model.safetensors"}"#, &both), "no file name ending in .safetensors".into()),
        (with(&format!(r#"{{"a": "{FIRST}", "a": "{SECOND}"}}"#), &both), "a occurs twice".into()),
        (with(r#"{"a": 1}"#, &both), "invalid type: integer `1`".into()),
        (with("[]", &both), "a map from strings to strings".into()),
        (refused(&[EMPTY, (INDEX, b"{}"), both[0], both[1]]), "missing field `weight_map`".into()),
        (refused(&[EMPTY, both[1]]), "part 1 of 2 is missing".into()),
        (refused(&[EMPTY, (FIRST, &first), (SECOND, &first)]), "tensor a is both in ".into()),
    ];
    for (message, want) in cases {
        assert!(message.contains(&want), "{message}\nshould say: {want}");
    }
}

#[cfg(unix)]
#[test]
fn a_shard_that_links_to_itself_is_refused() {
    let index = index(&format!(r#"{{"a": "{FIRST}"}}"#));
    let directory = directory(&[EMPTY, (INDEX, &index)]);
    std::os::unix::fs::symlink(FIRST, directory.path().join(FIRST)).unwrap();
    let message = Checkpoint::open(directory.path()).unwrap_err().to_string();
    assert!(message.contains(&format!("shard {FIRST} is missing")), "{message}");
}

#[test]
fn directories_without_a_model_are_refused() {
    assert_refused(&[], "holds neither config.json nor a .gguf file");
    assert_refused(&[EMPTY], "holds neither model.safetensors nor model.safetensors.index.json");
    assert_refused(&[(CONFIG, b"{")], "config.json: not the JSON that it should be: EOF");
    assert_refused(&[(CONFIG, b"\xff")], "config.json: not the JSON that it should be");
    assert_refused(&[(CONFIG, b"[]")], "config.json: the whole should be an object, but is an array");
    assert_refused(&[EMPTY, ("model.safetensors", b"")], "model.safetensors: no safetensors file");
    assert_refused(&[("a.gguf", b""), ("b.gguf", b"")], "holds 2 GGUF models (a.gguf, b.gguf)");
    let message = Checkpoint::open(Path::new("no/such/model")).unwrap_err().to_string();
    assert!(message.starts_with("no/such/model: "), "{message}");
}

#[test]
fn generation_config_falls_back_on_config() {
    let open = |config: &str, generation: Option<&str>| {
        let model = tensors("pt", &["a"]);
        let mut files = vec![(CONFIG, config.as_bytes()), ("model.safetensors", &model)];
        files.extend(generation.map(|json| ("generation_config.json", json.as_bytes())));
        Checkpoint::open(directory(&files).path()).and_then(|checkpoint| checkpoint.generation_config())
    };
    let config = open(r#"{"text_config": {"eos_token_id": 3, "bos_token_id": null}}"#, None).unwrap();
    assert_eq!(config, GenerationConfig { eos_token_ids: vec![3], ..Default::default() });
    let generation =
        r#"{"eos_token_id": [1, 2], "do_sample": true, "temperature": 0.5, "top_k": 20, "top_p": 1}"#;
    let config = open(r#"{"eos_token_id": 3}"#, Some(generation)).unwrap();
    assert_eq!(config.eos_token_ids, [1, 2]);
    assert_eq!((config.do_sample, config.temperature), (Some(true), Some(0.5)));
    assert_eq!((config.top_k, config.top_p, config.min_p), (Some(20), Some(1.0), None));
    for (generation, want) in [
        (
            r#"{"eos_token_id": "</s>"}"#,
            "eos_token_id should be a token id or a list of them, but is \"</s>\"",
        ),
        (r#"{"eos_token_id": [-1]}"#, "eos_token_id should be a token id or a list of them, but is an array"),
        (r#"{"top_k": 2.5}"#, "top_k should be an integer, but is 2.5"),
        (r#"{"temperature": "hot"}"#, "temperature should be a number, but is \"hot\""),
        ("7", "the whole should be an object, but is 7"),
    ] {
        let message = open("{}", Some(generation)).unwrap_err().to_string();
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
}

#[test]
fn the_recommended_temperature_says_whether_to_sample() {
    let of = |json: &str| {
        let model = tensors("pt", &["a"]);
        let files = [
            (CONFIG, &b"{}"[..]),
            ("model.safetensors", &model),
            ("generation_config.json", json.as_bytes()),
        ];
        Checkpoint::open(directory(&files).path()).unwrap().generation_config().unwrap()
    };
    for (json, want) in [
        ("{}", None),
        (r#"{"eos_token_id": 2, "repetition_penalty": 1.1}"#, None),
        (r#"{"do_sample": true}"#, Some(1.0)),
        (r#"{"do_sample": false, "temperature": 0.6, "top_p": 0.9}"#, Some(0.0)),
        (r#"{"do_sample": true, "temperature": 0.6}"#, Some(0.6)),
        (r#"{"temperature": 0.6, "do_sample": null}"#, Some(0.6)),
        (r#"{"temperature": 0}"#, Some(0.0)),
        (r#"{"top_k": 64}"#, Some(1.0)),
    ] {
        let config = of(json);
        assert_eq!(config.recommended_temperature(), want, "{json}");
        let written = config.to_json(Path::new("x")).unwrap().unwrap_or("{}".into());
        assert_eq!(of(&written).recommended_temperature(), want, "{json}, written as {written}");
    }
    let config =
        of(r#"{"top_k": -1, "typical_p": 0.9, "num_beams": 1, "suppress_tokens": [1], "bad_words_ids": [],
        "forced_eos_token_id": 0, "top_h": null, "max_length": 4096, "no_repeat_ngram_size": 3}"#);
    assert_eq!(config.top_k, Some(0));
    assert_eq!(
        config.unused,
        ["forced_eos_token_id", "no_repeat_ngram_size", "suppress_tokens", "typical_p"]
    );
}

/// A part of a split GGUF model that holds one tensor.
pub(super) fn part(tensor: &str, entries: &[(&str, u64)]) -> Vec<u8> {
    let mut writer = crate::gguf::Writer::new();
    for (key, value) in entries {
        writer.entry(key, crate::gguf::Value::U64(*value)).unwrap();
    }
    writer.tensor(tensor, Stored::Plain(DType::F32), &[1]).unwrap();
    let mut body = writer.begin(Vec::new()).unwrap();
    body.tensor(&[0; 4]).unwrap();
    body.finish().unwrap()
}

#[test]
fn gguf_is_opened_from_a_file_a_directory_or_parts() {
    let one = directory(&[EMPTY, ("m.gguf", &part("a", &[]))]);
    for path in [one.path().to_path_buf(), one.path().join("m.gguf")] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.layout(), Layout::Gguf);
        assert_eq!(checkpoint.tensors().names().collect::<Vec<_>>(), ["a"]);
        assert!(checkpoint.metadata().is_some());
        assert!(checkpoint.config().unwrap_err().to_string().contains("has no config.json"));
        assert_eq!(checkpoint.quantization("a").unwrap(), None);
    }
    let first = part("b", &[("split.no", 0), ("split.count", 2), ("split.tensors.count", 2)]);
    let second = part("a", &[("split.no", 1), ("split.count", 2)]);
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let two = directory(&[(names[0], &first), (names[1], &second)]);
    for path in [two.path().to_path_buf(), two.path().join(names[0]), two.path().join(names[1])] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.tensors().names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(checkpoint.metadata().unwrap().get::<u64>("split.no").unwrap(), 0);
    }
}

#[test]
fn gguf_parts_that_are_missing_or_disagree_are_refused() {
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let numbered =
        |tensor, no| part(tensor, &[("split.no", no), ("split.count", 2), ("split.tensors.count", 3)]);
    let (first, second) = (numbered("a", 0), numbered("b", 1));
    assert_refused(&[(names[0], &first)], "part 2 of 2 is missing: ");
    assert_refused(&[(names[1], &second)], "part 1 of 2 is missing: ");
    assert_refused(
        &[(names[0], &first), (names[1], &second)],
        "2 tensors in all parts, but split.tensors.count is 3",
    );
    assert_refused(
        &[(names[0], &first), (names[1], &first)],
        "says it is part 1 of 2, but its name says part 2 of 2",
    );
    assert_refused(&[(names[0], &first), (names[1], &numbered("a", 1))], "tensor a is both in ");
    assert_refused(&[(names[0], &first), (names[1], &part("b", &[]))], "metadata key split.no is missing");
    assert_refused(&[("m.gguf", &first)], "is one of 2 parts, but is not named as such");
}

/// A checkpoint of `config` with a quantised module `q` and a plain one `p`.
fn quantized(config: &Value) -> Result<Checkpoint, FileError> {
    let model = tensors("mlx", &["q.weight", "q.scales", "p.weight"]);
    Checkpoint::open(
        directory(&[(CONFIG, config.to_string().as_bytes()), ("model.safetensors", &model)]).path(),
    )
}

#[test]
fn quantization_is_as_mlx_takes_it() {
    let named = |quantization: Option<Quantization>| {
        quantization.map(|quantization| quantization.format(DType::BF16).unwrap().to_string())
    };
    let affine = |bits, group_size| Some(format!("affine{bits}g{group_size}"));
    let overrides = json!({
        "bits": 4, "group_size": 32, "mode": "affine",
        "gate": {"bits": 8, "group_size": 64}, "defaults": {}, "off": false, "on": true,
        "fp4": {"mode": "mxfp4", "bits": 4, "group_size": 32},
    });
    for key in ["quantization", "quantization_config"] {
        let checkpoint = quantized(&json!({ key: overrides })).unwrap();
        assert_eq!(checkpoint.layout(), Layout::Mlx);
        let quantization = |path| named(checkpoint.quantization(path).unwrap());
        assert_eq!(quantization("q"), affine(4, 32));
        assert_eq!(quantization("p"), None, "a module without scales");
        assert_eq!(quantization("gate"), affine(8, 64));
        assert_eq!(quantization("defaults"), affine(4, 64), "the mode's own defaults");
        assert_eq!(quantization("off"), None);
        assert_eq!(quantization("on"), affine(4, 32));
        let mxfp4 = checkpoint.quantization("fp4").unwrap().unwrap();
        assert_eq!(mxfp4.format(DType::U8).unwrap().to_string(), "mxfp4");
        assert!(mxfp4.format(DType::F32).is_err());
    }
    let checkpoint = quantized(&json!({ "quantization": overrides })).unwrap();
    let affine = checkpoint.quantization("q").unwrap().unwrap();
    for float in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        assert_eq!(affine.format(float.dtype()), Format::affine(4, 32, float));
    }
    assert!(affine.format(DType::U8).is_err());
    assert_eq!(quantized(&json!({})).unwrap().quantization("q").unwrap(), None);
}

#[test]
fn other_quantizations_are_refused() {
    let cases = [
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "GPTQ without any of its tensors quantization is not supported",
        ),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "supported are MLX's affine, mxfp4"),
        (json!({"text_config": {"quantization_config": {"quant_method": "awq"}}}), "AWQ without any"),
        (json!({"quantization_config": {"load_in_4bit": true}}), "an unnamed quantization is not supported"),
        (json!({"quantization": 4}), "quantization should be an object, but is 4"),
        (
            json!({"quantization": {"bits": 9}}),
            "quantization: affine at 9 bits, group 64 is not supported: bits are 2, 3, 4,",
        ),
        (json!({"quantization": {"bits": "4"}}), "quantization.bits should be a number, but is \"4\""),
        (
            json!({"quantization": {"mode": "int4"}}),
            "quantization: unknown MLX quantization mode \"int4\"; supported are affine, mxfp4, mxfp8 and nvfp4",
        ),
        (json!({"quantization": {"mode": 4}}), "quantization.mode should be a string, but is 4"),
        (
            json!({"quantization": {"mode": "nvfp4", "group_size": 32}}),
            "nvfp4 has 4 bits and groups of 16, but",
        ),
    ];
    for (config, want) in cases {
        let message = quantized(&config).unwrap_err().to_string();
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
    let config = json!({"quantization": {"bits": 4, "group_size": 64, "gate": {"bits": 9}}});
    let message = quantized(&config).unwrap().quantization("gate").unwrap_err().to_string();
    assert!(message.contains("quantization[\"gate\"]: affine at 9 bits"), "{message}");
}

#[test]
fn what_leads_nowhere_is_named() {
    let config = json!({"quantization": {
        "bits": 4, "group_size": 64, "mode": "affine", "q": {"bits": 8}, "p": false, "gone": {"bits": 8}, "quant": "x",
    }});
    let checkpoint = quantized(&config).unwrap();
    assert_eq!(checkpoint.surplus_quantization(), ["gone", "quant"]);
    assert!(quantized(&json!({})).unwrap().surplus_quantization().is_empty());
    assert!(checkpoint.adapters().is_empty());
    let model = tensors("pt", &["a"]);
    let files =
        [EMPTY, ("model.safetensors", &model), ("adapters.safetensors", b""), ("adapter_config.json", b"{}")];
    let folder = directory(&files);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.adapters(), ["adapter_config.json", "adapters.safetensors"]);
}
