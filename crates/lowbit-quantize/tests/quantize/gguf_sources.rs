//! GGUF files as sources of checkpoints in MLX's layout.

use lowbit_files::gguf::{Array, Value as Entry, Writer};
use lowbit_files::{Checkpoint, Stored, TensorView, Tokenizer};
use lowbit_formats::{DType, FloatType};
use lowbit_kernels::Device;
use lowbit_models::{Logits, Model, Target};
use lowbit_quantize::{Learn, LearnOptions, Learning, Mix, MlxFormat, Recipe, Summary};
use serde_json::Value;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

/// Every architecture, with the type of its checkpoint.
const ORIGINALS: [(&str, &str); 11] = [
    ("demo", "BF16"),
    ("llama-bias", "F16"),
    ("llama2", "F32"),
    ("llama3", "BF16"),
    ("mistral", "BF16"),
    ("qwen3", "BF16"),
    ("qwen3-yarn", "BF16"),
    ("qwen3_5", "BF16"),
    ("qwen3_5_moe", "BF16"),
    ("qwen3_moe", "BF16"),
    ("qwen3_next", "BF16"),
];

/// A checkpoint of the vectors without a sliding window, which llama.cpp does not read for these
/// architectures.
fn windowless(name: &str, folder: &Path) -> PathBuf {
    let (from, copy) = (original(name), folder.join(format!("{name}-original")));
    let Ok(config) = std::fs::read_to_string(from.join("config.json")) else { return from };
    let mut config: Value = serde_json::from_str(&config).unwrap();
    if config["sliding_window"].is_null() || name.starts_with("qwen") {
        return from;
    }
    config["sliding_window"] = Value::Null;
    std::fs::create_dir(&copy).unwrap();
    for entry in from.read_dir().unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(copy.join("config.json"), config.to_string()).unwrap();
    copy
}

fn original(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(if name == "demo" { "models" } else { "tests/vectors/models" }).join(name)
}

/// A file that llama.cpp's converter made.
fn gguf(name: &str) -> PathBuf {
    original(name).join("model.gguf")
}

#[track_caller]
fn to_gguf(source: &Path, mix: &str, output: &Path) {
    let options = Recipe::new(Mix::from_name(mix).unwrap());
    options.run(&Checkpoint::open(source).unwrap(), output, |_| Continue(())).unwrap();
}

#[track_caller]
fn to_mlx(source: &Path, output: &Path, options: &Recipe<'_>) -> Summary {
    options.run(&Checkpoint::open(source).unwrap(), output, |_| Continue(())).unwrap().summary
}

/// As it is, in the type of the source.
fn unquantised() -> Recipe<'static> {
    Recipe::new(MlxFormat::default()).with_rules(vec!["*=none".parse().unwrap()])
}

fn values(view: &TensorView) -> Vec<f32> {
    let Stored::Plain(dtype) = view.stored else { panic!("{view:?}") };
    let float = FloatType::from_dtype(dtype).unwrap();
    let bytes = view.bytes.get();
    (0..view.elements()).map(|i| float.get(&bytes, i)).collect()
}

/// The text model's configuration.
fn text(checkpoint: &Checkpoint) -> &Value {
    let config = checkpoint.config().unwrap();
    config.get("text_config").unwrap_or(config)
}

/// Each number of `config.json` that is made is the original's, unless that has none.
fn assert_config(name: &str, made: &Checkpoint, direct: &Checkpoint) {
    let [made, direct] = [made, direct].map(text);
    let mut compared = 0;
    for (key, value) in made.as_object().unwrap() {
        let own = ["dtype", "quantization", "quantization_config", "_name_or_path"].contains(&key.as_str());
        let by_peers =
            ["rope_scaling", "rope_parameters", "model_type", "eos_token_id"].contains(&key.as_str());
        let Some(want) = direct.get(key).filter(|want| !want.is_null() && !own && !by_peers) else {
            continue;
        };
        match (value.as_f64(), want.as_f64()) {
            (Some(value), Some(want)) => assert!(value == want, "{name}: {key} is {value}, not {want}"),
            _ => assert_eq!(value, want, "{name}: {key}"),
        }
        compared += 1;
    }
    assert!(compared >= 8, "{name}: {compared} keys");
}

#[test]
fn a_file_becomes_what_its_original_becomes_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    for (name, mix) in ORIGINALS {
        let [file, direct, made] =
            ["file", "direct", "made"].map(|what| folder.path().join(format!("{name}-{what}")));
        let original = windowless(name, folder.path());
        to_gguf(&original, mix, &file);
        let options = Recipe::new(MlxFormat::new("affine", 4, 32));
        to_mlx(&original, &direct, &options);
        let summary = to_mlx(&file, &made, &options);
        // Layers that predict further tokens.
        let predictors = |warning: &String| {
            warning.contains(": 15 tensors of the layers of multi-token prediction (blk.4.")
        };
        assert_eq!(
            summary.warnings.iter().filter(|&warning| predictors(warning)).count(),
            usize::from(name == "qwen3_5")
        );
        assert!(summary.warnings.iter().all(predictors), "{name}: {:?}", summary.warnings);
        let [direct, made] = [direct, made].map(|path| Checkpoint::open(&path).unwrap());
        // GGUF's layers that predict further tokens are left out, as the warning says.
        let predicts = |name: &&str| name.starts_with("language_model.mtp.");
        let names = |checkpoint: &Checkpoint| {
            let names = checkpoint.tensors().names().filter(|name| !predicts(name));
            names.map(String::from).collect::<Vec<_>>()
        };
        assert_eq!(names(&direct), names(&made), "{name}");
        let mut logarithms = 0;
        let kept = direct.tensors().iter().filter(|view| !predicts(&view.name.as_str()));
        for (want, got) in kept.zip(made.tensors()) {
            assert_eq!(want.shape, got.shape, "{name}: {}", got.name);
            if got.name.ends_with("A_log") {
                // GGUF has -exp(A_log) rounded to f32: half an ulp of it moves its logarithm by
                // 2^-24, and that is rounded.
                logarithms += 1;
                for (want, got) in values(want).into_iter().zip(values(got)) {
                    assert!(
                        (want - got).abs() <= 2f32.powi(-24) * (1.0 + want.abs()),
                        "{name}: {want} {got}"
                    );
                }
                continue;
            }
            assert!(want.stored == got.stored && want.bytes.get() == got.bytes.get(), "{name}: {}", got.name);
        }
        assert_eq!(logarithms > 0, name.contains("_5") || name.contains("next") || name == "demo", "{name}");
        assert_config(name, &made, &direct);
        let quantization = |checkpoint: &Checkpoint| checkpoint.config().unwrap()["quantization"].clone();
        assert_eq!(quantization(&made), quantization(&direct), "{name}");
    }
}

/// The logits of all tokens, in f32.
fn logits(path: &Path) -> Vec<f32> {
    let tokens: Vec<u32> = (0..40).map(|i| (i * i + 7 * i) % 199).collect();
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
    let model = Model::load_for(&Checkpoint::open(path).unwrap(), target).unwrap();
    assert_eq!(model.warnings(), [""; 0], "{}", path.display());
    let logits = model.forward(&tokens, &mut model.cache(), Logits::All).unwrap().unwrap();
    logits.as_slice::<f32>().unwrap().to_vec()
}

/// The largest difference, by the largest logit.
fn difference(want: &[f32], got: &[f32]) -> f32 {
    assert_eq!(want.len(), got.len());
    let most = want.iter().fold(0f32, |most, value| most.max(value.abs()));
    want.iter().zip(got).fold(0f32, |most, (want, got)| most.max((want - got).abs())) / most
}

/// The rotary embedding's settings and each tensor's place: nothing is rounded, so that only f32
/// sums in another order are left (of at most 256 products, through at most 8 layers).
#[test]
fn what_is_made_computes_what_the_file_computes() {
    let folder = tempfile::tempdir().unwrap();
    for (name, _) in ORIGINALS {
        let [file, made] = ["file", "made"].map(|what| folder.path().join(format!("{name}-{what}")));
        to_gguf(&windowless(name, folder.path()), "F32", &file);
        to_mlx(&file, &made, &unquantised());
        let difference = difference(&logits(&file), &logits(&made));
        println!("{name}: {difference:e}");
        assert!(difference < 1e-4, "{name}: {difference}");
    }
}

/// Files of llama.cpp's own, quantised ones among them. Blocks become what their values become: the
/// same as by way of a file of f32.
#[test]
fn blocks_are_decoded_in_f32_and_rounded_once() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["qwen3-Q4_0", "qwen3_moe-gguf-Q5_1", "qwen3_5_moe-gguf-Q8_0"] {
        let [wide, made, by_f32] =
            ["wide", "made", "by-f32"].map(|what| folder.path().join(format!("{name}-{what}")));
        to_gguf(&gguf(name), "F32", &wide);
        let options = Recipe::new(MlxFormat::for_mode("mxfp8"));
        to_mlx(&gguf(name), &made, &options);
        to_mlx(&wide, &by_f32, &options);
        let [made, by_f32] = [made, by_f32].map(|path| Checkpoint::open(&path).unwrap());
        assert_eq!(made.config().unwrap()["dtype"], "bfloat16");
        assert_eq!(by_f32.config().unwrap()["dtype"], "float32");
        let mut quantised = 0;
        for (want, got) in by_f32.tensors().iter().zip(made.tensors()) {
            assert_eq!((&want.name, &want.shape), (&got.name, &got.shape));
            let what = format!("{name}: {}", got.name);
            match (want.stored, got.stored) {
                (Stored::Plain(DType::U32 | DType::U8), _)
                    if !what.contains("mlp.gate") && !what.contains("expert_gate") =>
                {
                    assert!(want.bytes.get() == got.bytes.get(), "{what}");
                    quantised += 1;
                }
                (Stored::Plain(DType::F32), Stored::Plain(DType::BF16)) => {
                    let rounded: Vec<_> =
                        values(want).into_iter().map(|x| FloatType::BF16.round(x)).collect();
                    // Routers' scales are computed from weights, which bf16 has not rounded yet.
                    assert!(
                        rounded == values(got) || what.contains("scales") || what.contains("biases"),
                        "{what}"
                    );
                }
                _ => {}
            }
        }
        assert!(quantised > 20, "{name}: {quantised}");
    }
}

#[test]
fn every_file_of_llama_cpps_converter_is_a_source() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "qwen3",
        "qwen3-yarn",
        "qwen3-Q4_0",
        "qwen3_5-gguf",
        "qwen3_5_moe-gguf-Q8_0",
        "qwen3_moe-gguf",
        "qwen3_moe-gguf-Q5_1",
        "qwen3_next-gguf",
    ] {
        let made = folder.path().join(name);
        let summary = to_mlx(&gguf(name), &made, &Recipe::new(MlxFormat::new("affine", 8, 32)));
        // Layers that predict further tokens.
        let predictors = |warning: &String| {
            warning.contains(": 15 tensors of the layers of multi-token prediction (blk.4.")
        };
        assert_eq!(
            summary.warnings.iter().filter(|&warning| predictors(warning)).count(),
            usize::from(name == "qwen3_5")
        );
        assert!(summary.warnings.iter().all(predictors), "{name}: {:?}", summary.warnings);
        let made = Checkpoint::open(&made).unwrap();
        Model::load(&made, &Device::cpu(Some(1)).unwrap()).unwrap();
        let [file, made] =
            [Checkpoint::open(&gguf(name)).unwrap(), made].map(|c| Tokenizer::from_checkpoint(&c).unwrap());
        assert_eq!((file.eos_ids(), file.bos()), (made.eos_ids(), made.bos()), "{name}");
        for text in ["the in 12 \u{e9}\n\n x", "<|endoftext|>the<|endoftext|>"] {
            assert_eq!(file.encode(text, true).unwrap(), made.encode(text, true).unwrap(), "{name}");
        }
    }
}

#[test]
fn a_file_teaches() {
    let (folder, device) = (tempfile::tempdir().unwrap(), Device::cpu(Some(2)).unwrap());
    let mut options = LearnOptions::new(Learn::Scales);
    (options.steps, options.batch, options.validate_every) = (60, 4, 12);
    let data = crate::support::data(2000, 32);
    let learning = Learning { data: &data, options: &options, device: &device, saving: None };
    let source = Checkpoint::open(&gguf("qwen3_next-gguf")).unwrap();
    let output = folder.path().join("new");
    let learned = crate::support::to_3_bits().with_learning(learning).run(&source, &output, |_| Continue(()));
    let report = learned.unwrap().learned.unwrap();
    println!("{report:?}");
    assert!(report.after < 0.9 * report.before && report.went_back == 0, "{report:?}");
}

/// A file's metadata.
type Entries = Vec<(String, Entry)>;

/// A copy of `source` with other metadata and tensors.
fn rewritten(
    source: &Path,
    output: &Path,
    metadata: impl Fn(&mut Entries),
    tensor: impl Fn(&mut TensorView) -> bool,
) {
    let checkpoint = Checkpoint::open(source).unwrap();
    let entries = checkpoint.metadata().unwrap().iter();
    let mut entries: Vec<_> = entries.map(|(key, value)| (key.to_string(), value.clone())).collect();
    metadata(&mut entries);
    let mut views: Vec<_> = checkpoint.tensors().iter().cloned().collect();
    views.retain_mut(tensor);
    let mut writer = Writer::new();
    entries.into_iter().for_each(|(key, value)| writer.entry(&key, value).unwrap());
    for view in &views {
        writer.tensor(&view.name, view.stored, &view.shape).unwrap();
    }
    let mut body = writer.begin(std::fs::File::create(output).unwrap()).unwrap();
    views.iter().for_each(|view| body.tensor(&view.bytes.get()).unwrap());
    body.finish().unwrap();
}

fn put(entries: &mut Entries, key: &str, value: Entry) {
    entries.retain(|(known, _)| known != key);
    entries.push((key.into(), value));
}

/// A source that is refused, and the end of the message.
struct Refused<'a> {
    model: &'a str,
    metadata: &'a dyn Fn(&mut Entries),
    tensor: &'a dyn Fn(&mut TensorView) -> bool,
    want: &'a str,
}

#[test]
fn what_mlx_has_no_place_for_is_refused_before_anything_is_written() {
    let same = |_: &mut Entries| {};
    let all = |_: &mut TensorView| true;
    let without = |name: &'static str| move |view: &mut TensorView| view.name != name;
    let with =
        |key: &'static str, value: Entry| move |entries: &mut Entries| put(entries, key, value.clone());
    let floats = |name: &'static str, values: &'static [f32]| {
        move |view: &mut TensorView| {
            if view.name == name {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                (view.shape, view.bytes) = (vec![values.len()], bytes.into());
            }
            true
        }
    };
    let narrow = |view: &mut TensorView| {
        if view.name == "blk.1.ffn_up.weight" {
            view.shape.swap(0, 1);
        }
        true
    };
    let no_tokens = |entries: &mut Entries| entries.retain(|(key, _)| !key.starts_with("tokenizer."));
    // Two layers change places.
    let moved = |view: &mut TensorView| {
        for (from, to) in [("blk.1.", "blk.2."), ("blk.2.", "blk.1.")] {
            if let Some(rest) = view.name.strip_prefix(from) {
                view.name = format!("{to}{rest}");
                break;
            }
        }
        true
    };
    let bool_list = |list: &[bool]| Entry::Array(Array::Bool(list.into()));
    let cases = [
        Refused {
            model: "qwen3",
            metadata: &with("general.architecture", Entry::String("falcon".into())),
            tensor: &all,
            want: "architecture \"falcon\" is not supported; supported are llama, ",
        },
        Refused {
            model: "qwen3",
            metadata: &no_tokens,
            tensor: &all,
            want: "tokenizer.ggml.tokens is missing",
        },
        Refused {
            model: "qwen3",
            metadata: &with("tokenizer.ggml.model", Entry::String("rwkv".into())),
            tensor: &all,
            want: "tokenizer: tokenizer.ggml.model \"rwkv\" is not supported; supported are gpt2, llama and gemma4",
        },
        Refused {
            model: "qwen3",
            metadata: &same,
            tensor: &narrow,
            want: "tensor blk.1.ffn_up.weight is bf16 [64, 160], but the configuration wants [160, 64]",
        },
        Refused {
            model: "qwen3",
            metadata: &same,
            tensor: &without("blk.0.attn_q.weight"),
            want: "tensor blk.0.attn_q.weight is missing; there are blk.0.attn_k.weight, blk.0.attn_k_norm.weight, \
                   blk.0.attn_norm.weight and 31 more",
        },
        Refused {
            model: "llama-bias",
            metadata: &same,
            tensor: &without("blk.1.attn_k.bias"),
            want: "tensor blk.1.attn_k.bias is missing",
        },
        Refused {
            model: "llama3",
            metadata: &same,
            tensor: &floats("rope_freqs.weight", &[2.0; 20]),
            want: "rope_freqs.weight is 20 divisors of frequencies, but no scaling of Llama 3's kind with low and high factors of 1 and 4 \
                   has these",
        },
        Refused {
            model: "qwen3_5-gguf",
            metadata: &same,
            tensor: &floats("blk.0.ssm_a", &[-1.0, -0.5, 0.0, -2.0]),
            want: "tensor blk.0.ssm_a: value 2 is 0, but -exp(A_log) is below 0",
        },
        Refused {
            model: "qwen3",
            metadata: &with("qwen3.rope.dimension_count", Entry::U32(16)),
            tensor: &all,
            want: "rope.dimension_count is 16, but MLX's layout of this model rotates whole heads, of 24 elements",
        },
        Refused {
            model: "qwen3_5-gguf",
            metadata: &with("qwen35.attention.recurrent_layers", bool_list(&[true, true, false, false])),
            tensor: &moved,
            want: "attention.recurrent_layers is layers of attention at [2, 3], but MLX's layout has one interval between them",
        },
    ];
    let folder = tempfile::tempdir().unwrap();
    for (index, Refused { model, metadata, tensor, want }) in cases.into_iter().enumerate() {
        let (source, output) = (folder.path().join(format!("{index}.gguf")), folder.path().join("new"));
        rewritten(&gguf(model), &source, metadata, tensor);
        let checkpoint = Checkpoint::open(&source).unwrap();
        let refused = Recipe::new(MlxFormat::default()).run(&checkpoint, &output, |_| panic!("written"));
        let message = refused.unwrap_err().to_string();
        assert!(message.contains(want), "{message}\n{want}");
        let left: Vec<_> =
            folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), index + 1, "{left:?}");
    }
}

#[test]
fn what_is_left_out_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (source, output) = (folder.path().join("model.gguf"), folder.path().join("new"));
    let metadata = |entries: &mut Entries| {
        for (key, value) in [
            ("general.author", Entry::String("someone".into())),
            ("general.sampling.temp", Entry::F32(0.7)),
            ("general.sampling.mirostat", Entry::I32(2)),
            ("tokenizer.ggml.fim_pre_token_id", Entry::U32(3)),
            ("tokenizer.chat_template", Entry::String("{{ messages }}".into())),
            ("quantize.imatrix.file", Entry::String("x.dat".into())),
            // Three of four pairs: one is a place that no section covers.
            ("qwen35.rope.dimension_sections", Entry::Array(Array::I32(vec![3, 1, 0, 0]))),
        ] {
            put(entries, key, value);
        }
    };
    rewritten(&gguf("qwen3_5-gguf"), &source, metadata, |_| true);
    let path = source.display();
    let summary = to_mlx(&source, &output, &Recipe::new(MlxFormat::new("affine", 8, 32)));
    assert_eq!(
        summary.warnings,
        [
            format!(
                "{path}: llama.cpp does not rotate 1 pairs of each head, which rope.dimension_sections does not cover; the new \
                 checkpoint rotates them, as transformers does"
            ),
            format!(
                "{path}: MLX's layout has no place for general.author, general.sampling.mirostat, \
                 tokenizer.ggml.fim_pre_token_id: left out"
            ),
        ]
    );
    let json =
        |name: &str| -> Value { serde_json::from_slice(&std::fs::read(output.join(name)).unwrap()).unwrap() };
    assert_eq!(
        json("generation_config.json"),
        serde_json::json!({ "eos_token_id": [259], "do_sample": true, "temperature": 0.7 })
    );
    assert_eq!(json("tokenizer_config.json")["chat_template"], "{{ messages }}");
    assert_eq!(
        json("config.json")["text_config"]["rope_parameters"]["mrope_section"],
        serde_json::json!([3, 1, 0])
    );
    assert_eq!(json("config.json")["_name_or_path"], "Checkpoint");
}
