//! Embeddings against sentence-transformers' (tools/peer_vectors/embed.py), from every layout.

use crate::embedding::{Embedding, behead, gemma, texts};
use lowbit::quantize::{Mix, MlxFormat, Recipe};
use lowbit::{
    Checkpoint, Device, EmbedOptions, Embedder, Error, Model, Pooling, Prompt, Target, Tokenizer, cosine,
};
use numcheck::Vectors;
use serde_json::json;
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;

/// The error of sums in another order, as a part of an embedding's length: 21 products, one after
/// the other, each of up to 160 terms in f32.
const BOUND: f32 = 21.0 * 160.0 * f32::EPSILON / 2.0;

fn embed(path: &Path, options: &EmbedOptions, exact: bool) -> Result<Vec<Vec<f32>>, Error> {
    let checkpoint = Checkpoint::open(path)?;
    let target = Target::new(&Device::cpu(Some(2))?, None)?.with_exact(exact);
    let (model, tokenizer) =
        (Model::load_for(&checkpoint, target)?, Tokenizer::from_checkpoint(&checkpoint)?);
    Embedder::new(&checkpoint, (&model, &tokenizer), options)?.embed(&texts())
}

#[track_caller]
fn assert_close(what: &str, got: &[Vec<f32>], want: &[Vec<f32>], bound: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}, text {index}");
        let length = want.iter().map(|value| value * value).sum::<f32>().sqrt();
        let error = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
        // Not `error > bound`: a NaN must fail.
        assert!(error <= bound * length, "{what}, text {index}: an error of {error} beside {length}");
    }
}

fn expected(name: &str) -> Vec<Vec<f32>> {
    expected_in("embed/expected", name)
}

fn expected_in(file: &str, name: &str) -> Vec<Vec<f32>> {
    let vector = Vectors::open(file).get(name);
    vector.f32s().chunks(vector.shape[1]).map(<[f32]>::to_vec).collect()
}

fn named(name: &str) -> EmbedOptions {
    EmbedOptions::default().with_prompt(Prompt::Named(name.into()))
}

#[test]
fn embeddings_are_those_of_sentence_transformers() {
    let plain = EmbedOptions::default;
    let left = json!({"max_seq_length": 24, "truncation_side": "left"});
    let default = json!({"default_prompt_name": "query", "include_prompt": false});
    let cases = [
        ("last", "lasttoken", true, json!({}), plain()),
        ("query", "lasttoken", true, json!({}), named("query")),
        ("mean", "mean_tokens", false, json!({}), plain()),
        ("cls", "cls_token", true, json!({}), plain().with_prompt(Prompt::Text("in the ".into()))),
        ("short", "lasttoken", true, json!({"max_seq_length": 24}), plain()),
        ("short_left", "mean_tokens", true, left, named("query")),
        ("default", "mean_tokens", true, default, plain()),
        ("dimensions", "lasttoken", true, json!({}), plain().with_dimensions(24)),
    ];
    for (name, pooling, normalize, settings, options) in cases {
        let folder = tempfile::tempdir().unwrap();
        Embedding { pooling, normalize, settings, ..Embedding::default() }.write(folder.path());
        let want = expected(name);
        assert_close(name, &embed(folder.path(), &options, true).unwrap(), &want, BOUND);
        // With activations in 8 bits.
        for (got, want) in embed(folder.path(), &options, false).unwrap().iter().zip(&want) {
            assert!(cosine(got, want) > 0.99, "{name}: {}", cosine(got, want));
        }
    }
}

#[test]
fn a_model_without_its_output_layer_makes_embeddings() {
    let folder = tempfile::tempdir().unwrap();
    Embedding::default().write(folder.path());
    behead(folder.path());
    let got = embed(folder.path(), &EmbedOptions::default(), true).unwrap();
    assert_close("headless", &got, &expected("last"), BOUND);
    let model = lowbit::LanguageModel::open(folder.path().to_str().unwrap()).unwrap();
    let message = model.generate("the thing").unwrap_err().to_string();
    assert!(message.starts_with("the qwen3 model has no output layer (lm_head)"), "{message}");
}

/// Tokens that see those after them, windows on both sides, linear layers behind pooling.
#[test]
fn embeddings_of_gemma_are_those_of_sentence_transformers() {
    // Two products more in each of three layers, and two behind them.
    const BOUND: f32 = 29.0 * 160.0 * f32::EPSILON / 2.0;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (source, file, mlx) = (path("source"), path("x.gguf"), path("mlx"));
    std::fs::create_dir(&source).unwrap();
    gemma(&source);
    for (name, options) in [("plain", EmbedOptions::default()), ("query", named("query"))] {
        let want = expected_in("embed/gemma", name);
        assert_close(name, &embed(&source, &options, true).unwrap(), &want, BOUND);
        for (got, want) in embed(&source, &options, false).unwrap().iter().zip(&want) {
            assert!(cosine(got, want) > 0.99, "{name}: {}", cosine(got, want));
        }
    }
    let model = lowbit::LanguageModel::open(source.to_str().unwrap()).unwrap();
    let message = model.generate("the thing").unwrap_err().to_string();
    assert!(message.starts_with("the tokens of the gemma3_text model see those after them"), "{message}");

    let open = |path: &Path| Checkpoint::open(path).unwrap();
    let want = expected_in("embed/gemma", "plain");
    Recipe::new(Mix::from_name("F32").unwrap()).run(&open(&source), &file, |_| Continue(())).unwrap();
    assert_close("GGUF", &embed(&file, &EmbedOptions::default(), true).unwrap(), &want, BOUND);
    let checkpoint = open(&file);
    let metadata = checkpoint.metadata().unwrap();
    assert_eq!(metadata.get::<&str>("general.architecture").unwrap(), "gemma-embedding");
    for (key, want) in [("pooling_type", 1), ("dense_2_feat_out", 96), ("attention.sliding_window", 20)] {
        assert_eq!(metadata.get::<u32>(&format!("gemma-embedding.{key}")).unwrap(), want, "{key}");
    }
    let recipe = Recipe::new(MlxFormat::new("affine", 8, 32));
    let made = recipe.run(&open(&source), &mlx, |_| Continue(())).unwrap();
    assert!(made.summary.warnings.iter().any(|it| it.contains("do not see those after them")));
    for (got, want) in embed(&mlx, &EmbedOptions::default(), true).unwrap().iter().zip(&want) {
        assert!(cosine(got, want) > 0.99, "MLX: {}", cosine(got, want));
    }
    // A directory would lack the layers behind pooling.
    let message = recipe.run(&checkpoint, &path("b"), |_| Continue(())).unwrap_err().to_string();
    assert!(message.contains("dense_2.weight"), "{message}");
}

#[test]
fn layers_behind_pooling_fit_and_are_known() {
    let folder = tempfile::tempdir().unwrap();
    gemma(folder.path());
    let path = folder.path().join("2_Dense/config.json");
    let plain = std::fs::read_to_string(&path).unwrap();
    let refused = |from: &str, to: &str| {
        assert!(plain.contains(from), "{plain}");
        std::fs::write(&path, plain.replace(from, to)).unwrap();
        embed(folder.path(), &EmbedOptions::default(), true).unwrap_err().to_string()
    };
    let message = refused("\"in_features\":64", "\"in_features\":65");
    assert!(message.contains("in_features of 2_Dense") && message.contains("64 values"), "{message}");
    let message = refused("linear.Identity", "activation.GELU");
    assert!(message.contains("activation_function") && message.contains("Identity or Tanh"), "{message}");
    let message = refused("\"bias\"", "\"use_residual\": true, \"bias\"");
    assert!(message.contains("use_residual"), "{message}");
}

#[test]
fn conversions_keep_how_embeddings_are_made() {
    let folder = tempfile::tempdir().unwrap();
    for headless in [false, true] {
        let path = |name: &str| folder.path().join(format!("{name}-{headless}"));
        let source = path("source");
        std::fs::create_dir(&source).unwrap();
        Embedding::default().write(&source);
        if headless {
            behead(&source);
        }
        let open = |path: &Path| Checkpoint::open(path).unwrap();
        let (checkpoint, mlx, gguf) = (open(&source), path("mlx"), path("x.gguf"));
        let gguf_options = Recipe::new(Mix::from_name("BF16").unwrap());
        gguf_options.run(&checkpoint, &gguf, |_| Continue(())).unwrap();
        assert_close(
            "GGUF",
            &embed(&gguf, &EmbedOptions::default(), true).unwrap(),
            &expected("last"),
            BOUND,
        );
        assert_eq!(open(&gguf).metadata().unwrap().get::<u32>("qwen3.pooling_type").unwrap(), 3);

        Recipe::new(MlxFormat::new("affine", 8, 32)).run(&checkpoint, &mlx, |_| Continue(())).unwrap();
        for name in [
            "modules.json",
            "1_Pooling/config.json",
            "config_sentence_transformers.json",
            "sentence_bert_config.json",
        ] {
            assert_eq!(
                std::fs::read(mlx.join(name)).unwrap(),
                std::fs::read(source.join(name)).unwrap(),
                "{name}"
            );
        }
        let near = |path: &Path, options: &EmbedOptions, name: &str| {
            for (got, want) in embed(path, options, true).unwrap().iter().zip(&expected(name)) {
                assert!(cosine(got, want) > 0.99, "{name}: {}", cosine(got, want));
            }
        };
        near(&mlx, &named("query"), "query");
        // MLX's files are made of what GGUF says.
        let made = path("made");
        Recipe::new(MlxFormat::new("affine", 8, 32)).run(&open(&gguf), &made, |_| Continue(())).unwrap();
        let config = open(&made).embedding_config().unwrap();
        assert_eq!(
            (config.pooling, config.normalize, config.include_prompt),
            (Some(Pooling::Last), true, true)
        );
        near(&made, &EmbedOptions::default(), "last");
    }
}

#[test]
fn what_cannot_be_embedded_is_named() {
    let plain = crate::embedding::vectors().join("models/qwen3");
    let message = embed(&plain, &EmbedOptions::default(), true).unwrap_err().to_string();
    assert!(message.contains("nothing says how the states of a text become its embedding"), "{message}");
    let pooled = embed(&plain, &EmbedOptions::default().with_pooling(Pooling::Mean), true).unwrap_err();
    // Its tokenizer puts nothing around a text, and one of them is empty.
    assert_eq!(pooled.to_string(), "sequence 1 of the batch: there are no tokens to start from");
    let folder = tempfile::tempdir().unwrap();
    Embedding::default().write(folder.path());
    let refused = |options| embed(folder.path(), &options, true).unwrap_err().to_string();
    let message = refused(named("other"));
    assert!(message.ends_with("has no prompt other; it has query, document"), "{message}");
    let want = "embeddings of 65 dimensions are asked for, but the model's have 64: 1 to 64 can be kept";
    assert_eq!(refused(EmbedOptions::default().with_dimensions(65)), want);
}

#[test]
fn others_have_the_device_between_two_passes() {
    let folder = tempfile::tempdir().unwrap();
    Embedding::default().write(folder.path());
    // Longer than a pass.
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let longer = text.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 1030");
    assert_ne!(longer, text);
    std::fs::write(&config, longer).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap();
    let (model, tokenizer) =
        (Model::load_for(&checkpoint, target).unwrap(), Tokenizer::from_checkpoint(&checkpoint).unwrap());
    let embedder = Embedder::new(&checkpoint, (&model, &tokenizer), &EmbedOptions::default()).unwrap();
    let text = |length: u32| (0..length).map(|i| i * i % 200).collect::<Vec<u32>>();
    // Three parts of the first text, and a pass for each of the others.
    let texts = [text(1030), text(300), text(300)];
    let run = |last: usize| {
        let mut calls = 0;
        let made = embedder.embed_in_passes(&texts, || {
            calls += 1;
            if calls == last { Break(()) } else { Continue(()) }
        });
        (made.unwrap(), calls)
    };
    assert_eq!(run(0), (Some(embedder.embed_tokens(&texts).unwrap()), 4));
    (1..=4).for_each(|last| assert_eq!(run(last), (None, last)));
}
