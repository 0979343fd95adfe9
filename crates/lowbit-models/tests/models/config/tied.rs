//! Output layers that are the embedding, and how a checkpoint's kind says how norms are stored.

use super::{changed, refused, set};
use crate::tiny::{Tiny, logits};
use safetensors::Dtype;
use serde_json::json;

/// A second output layer, that differs from the embedding or not.
fn with_head_of(tiny: &mut Tiny, part: &str, differs: bool) {
    let embedding = format!("embed_tokens.{part}");
    let embedding = tiny.tensors.iter().find(|(name, _)| name.ends_with(&embedding)).unwrap();
    let mut head = embedding.1.clone();
    if differs {
        head.2.reverse();
    }
    tiny.tensors.insert(format!("lm_head.{part}"), head);
}

#[test]
fn an_output_layer_beside_the_tied_embedding_is_used_only_if_it_is_the_same() {
    let plain = changed("llama3", &|_| ()).unwrap();
    for format in ["pt", "mlx"] {
        let mut tiny = Tiny::open("llama3");
        tiny.format = Some(format.into());
        with_head_of(&mut tiny, "weight", false);
        assert_eq!(logits(&tiny.load().unwrap()), plain);
        with_head_of(&mut tiny, "weight", true);
        let message = tiny.refused();
        assert!(
            message.contains("tie_word_embeddings is true") && message.contains("lm_head.weight"),
            "{message}"
        );
        tiny.text().insert("tie_word_embeddings".into(), json!(false));
        assert_ne!(logits(&tiny.load().unwrap()), plain);
        // Without the key mlx-lm ties Llama's; transformers does not.
        tiny.text().remove("tie_word_embeddings");
        assert_eq!(tiny.load().is_err(), format == "mlx");
    }
    let message = refused("llama3", &set("tie_word_embeddings", json!(false)));
    assert!(message.contains("lm_head.weight is missing"), "{message}");
}

/// Codes that are equal say nothing of weights whose scales are not.
#[test]
fn a_quantized_output_layer_is_the_embedding_only_with_its_scales() {
    let plain = changed("qwen3-mlx-4bit", &|_| ()).unwrap();
    let mut tiny = Tiny::open("qwen3-mlx-4bit");
    for part in ["weight", "scales", "biases"] {
        with_head_of(&mut tiny, part, false);
    }
    assert_eq!(logits(&tiny.load().unwrap()), plain);
    with_head_of(&mut tiny, "scales", true);
    assert!(tiny.refused().contains("tie_word_embeddings is true"));
}

#[test]
fn a_multimodal_model_is_tied_as_its_whole_says() {
    let load = |whole: Option<bool>, text: Option<bool>, head: bool, format: &str| {
        let mut tiny = Tiny::open("qwen3_5");
        tiny.format = Some(format.into());
        if format == "mlx" {
            make_mlx(&mut tiny);
        }
        if !head {
            tiny.tensors.remove("lm_head.weight");
        }
        tiny.config.as_object_mut().unwrap().remove("tie_word_embeddings");
        tiny.text().remove("tie_word_embeddings");
        if let Some(flag) = text {
            tiny.text().insert("tie_word_embeddings".into(), json!(flag));
        }
        if let Some(flag) = whole {
            tiny.config["tie_word_embeddings"] = json!(flag);
        }
        tiny.load().map(|model| model.config().tie_word_embeddings).map_err(|error| error.to_string())
    };
    for (whole, text, head, format, want) in [
        (Some(false), Some(true), true, "pt", Some(false)),
        (None, Some(true), true, "pt", Some(false)),
        (None, None, true, "pt", Some(false)),
        (Some(true), Some(false), true, "pt", None),
        (Some(true), Some(false), false, "pt", Some(true)),
        (Some(true), None, false, "pt", Some(true)),
        (None, None, false, "pt", None),
        (Some(false), Some(true), true, "mlx", None),
        (Some(true), Some(false), true, "mlx", Some(false)),
        (Some(false), Some(true), false, "mlx", Some(true)),
    ] {
        let got = load(whole, text, head, format);
        assert_eq!(got.clone().ok(), want, "{whole:?} {text:?} head {head} {format}: {got:?}");
    }
}

/// As mlx-lm stores a hybrid, but not quantised: norms with 1 added, convolutions turned.
fn make_mlx(tiny: &mut Tiny) {
    tiny.format = Some("mlx".into());
    let norms = [
        "layernorm.weight",
        "model.norm.weight",
        "language_model.norm.weight",
        "q_norm.weight",
        "k_norm.weight",
    ];
    for (name, (dtype, shape, bytes)) in &mut tiny.tensors {
        if name.ends_with("conv1d.weight") {
            shape.swap(1, 2);
        }
        if name.contains("visual") || !norms.iter().any(|norm| name.ends_with(norm)) {
            continue;
        }
        let values: Vec<f32> = match dtype {
            Dtype::F32 => {
                bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
            }
            Dtype::BF16 => bytes
                .chunks_exact(2)
                .map(|value| f32::from_bits(u32::from(u16::from_le_bytes(value.try_into().unwrap())) << 16))
                .collect(),
            other => panic!("a norm of {other:?}"),
        };
        *bytes = values.iter().flat_map(|value| (value + 1.0).to_le_bytes()).collect();
        *dtype = Dtype::F32;
    }
}

/// Only the layers of full attention, so that nothing but the checkpoint's kind says how norms are
/// stored.
fn attention_only(name: &str) -> Tiny {
    let mut tiny = Tiny::open(name);
    let full = {
        let names: Vec<String> = tiny.tensors.keys().cloned().collect();
        let layer =
            names.iter().find(|name| name.contains("layers.") && name.contains(".self_attn.q_proj")).unwrap();
        layer.split("layers.").nth(1).unwrap().split('.').next().unwrap().to_string()
    };
    tiny.tensors = std::mem::take(&mut tiny.tensors)
        .into_iter()
        .filter(|(name, _)| {
            !name.contains(".layers.")
                || name.contains("visual")
                || name.contains(&format!(".layers.{full}."))
        })
        .map(|(name, tensor)| (name.replace(&format!(".layers.{full}."), ".layers.0."), tensor))
        .collect();
    tiny.text().insert("num_hidden_layers".into(), json!(1));
    tiny.text().insert("layer_types".into(), json!(["full_attention"]));
    tiny
}

#[test]
fn the_kind_of_checkpoint_says_how_norms_are_stored() {
    for name in ["qwen3_next", "qwen3_5", "qwen3_5_moe"] {
        for open in [Tiny::open, attention_only] {
            let mut tiny = open(name);
            let published = logits(&tiny.load().unwrap());
            make_mlx(&mut tiny);
            assert_eq!(logits(&tiny.load().unwrap()), published, "{name}");
            // The same tensors under the other kind are another model, or none.
            tiny.format = Some("pt".into());
            match tiny.load() {
                Ok(model) => assert_ne!(logits(&model), published, "{name}"),
                Err(error) => assert!(error.to_string().contains("conv1d"), "{error}"),
            }
        }
    }
}
