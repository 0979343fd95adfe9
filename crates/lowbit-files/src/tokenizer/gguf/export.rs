//! A GGUF tokenizer as the files that transformers and mlx-lm read: tokenizer.json, which makes the
//! same ids as [`load`](super::load), and tokenizer_config.json with the special tokens and the
//! chat templates.

use serde_json::{Map, Value as Json, json};

use super::description::Description;
use super::{GEMMA_4, Kind, Vocabulary, byte_level, gemma4, sentencepiece};
use crate::chat::named::{self, Named};
use crate::gguf::Metadata;
use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::{ChatTemplate, Companion, FileError};

/// Special tokens that have no default, as GGUF and tokenizer_config.json call them.
const NAMED: [(&str, &str); 4] =
    [("padding", "pad_token"), ("seperator", "sep_token"), ("cls", "cls_token"), ("mask", "mask_token")];

/// The files. `model_max_length` is the context's length.
///
/// # Errors
/// As [`load`](super::load), and [`FileError::Tokenizer`] when tokenizer.json would be larger than
/// what is read.
pub(in crate::tokenizer) fn companions(
    metadata: &Metadata,
    model_max_length: Option<usize>,
) -> Result<Vec<Companion>, FileError> {
    // Checks everything.
    let tokenizer = Tokenizer::from_gguf(metadata)?;
    let vocabulary = Vocabulary::new(metadata)?;
    let json = tokenizer_json(&vocabulary, tokenizer.special())?;
    let bytes = json.to_string().into_bytes();
    Tokenizer::from_json(metadata.file(), &bytes)?;
    let config = settings(&vocabulary, tokenizer.special(), model_max_length)?;
    let config = serde_json::to_vec_pretty(&config).map_err(|error| vocabulary.error(error))?;
    Ok(vec![
        Companion { name: "tokenizer.json".into(), bytes },
        Companion { name: "tokenizer_config.json".into(), bytes: config },
    ])
}

fn tokenizer_json(vocabulary: &Vocabulary<'_>, special: &SpecialTokens) -> Result<Json, FileError> {
    let Description { normalizer, pre_tokenizer, decoder, model, merges } =
        match vocabulary.metadata.get::<&str>("tokenizer.ggml.model")? {
            "llama" => sentencepiece::describe(vocabulary)?,
            GEMMA_4 => gemma4::describe(vocabulary)?,
            _ => byte_level::describe(vocabulary)?,
        };
    let tokens = || (0..).zip(vocabulary.tokens.iter().zip(&vocabulary.kinds));
    let mut ids = Map::new();
    for (id, (token, kind)) in tokens() {
        // Made up by llama.cpp's converter for embeddings without a token.
        if *kind == Kind::Unused && *token == format!("[PAD{id}]") {
            continue;
        }
        ids.insert(token.clone(), Json::from(id));
    }
    let added = |(id, (token, kind)): (u32, (&String, &Kind))| {
        let special = match kind {
            Kind::Control | Kind::Unknown => true,
            Kind::UserDefined => false,
            Kind::Normal | Kind::Unused | Kind::Byte => return None,
        };
        Some(json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": special,
        }))
    };
    let mut whole = json!({ "type": "BPE", "dropout": null, "continuing_subword_prefix": null, "end_of_word_suffix": null });
    if let (Some(whole), Json::Object(model)) = (whole.as_object_mut(), model) {
        whole.extend(model);
        whole.insert("vocab".into(), Json::Object(ids));
        whole.insert("merges".into(), json!(merges));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens().filter_map(added).collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(vocabulary, special),
        "decoder": decoder,
        "model": whole,
    }))
}

/// The post-processor, which puts bos before a text or eos behind it.
fn post_processor(vocabulary: &Vocabulary<'_>, special: &SpecialTokens) -> Json {
    let [before, after] = [special.before, special.after];
    if before.or(after).is_none() {
        // Changes offsets alone, and says that no token is put around a text.
        return json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    }
    let token = |id: u32| &vocabulary.tokens[id as usize];
    let piece = |id: Option<u32>, text: u32| {
        id.map(|id| json!({ "SpecialToken": { "id": token(id), "type_id": text } }))
    };
    let around = |sequence: &str, text: u32| {
        let sequence = json!({ "Sequence": { "id": sequence, "type_id": text } });
        [piece(before, text), Some(sequence), piece(after, text)].into_iter().flatten().collect::<Vec<_>>()
    };
    let mut tokens = Map::new();
    for id in [before, after].into_iter().flatten() {
        tokens.insert(token(id).clone(), json!({ "id": token(id), "ids": [id], "tokens": [token(id)] }));
    }
    let pair = [around("A", 0), around("B", 1)].concat();
    json!({
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": pair,
        "special_tokens": tokens,
    })
}

/// tokenizer_config.json.
fn settings(
    vocabulary: &Vocabulary<'_>,
    special: &SpecialTokens,
    model_max_length: Option<usize>,
) -> Result<Json, FileError> {
    let token = |id: Option<u32>| id.map_or(Json::Null, |id| vocabulary.tokens[id as usize].clone().into());
    let mut settings = Map::new();
    settings.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    for (name, id) in [("bos_token", special.bos), ("eos_token", special.eos)] {
        settings.insert(name.into(), token(id));
    }
    let unknown = match vocabulary.metadata.get::<&str>("tokenizer.ggml.model")? {
        "llama" => Some(sentencepiece::unknown(vocabulary)?),
        _ => vocabulary.special_id("unknown")?,
    };
    settings.insert("unk_token".into(), token(unknown));
    for (gguf, name) in NAMED {
        if let Some(id) = vocabulary.special_id(gguf)? {
            settings.insert(name.into(), token(Some(id)));
        }
    }
    settings.insert("clean_up_tokenization_spaces".into(), false.into());
    if let Some(length) = model_max_length {
        settings.insert("model_max_length".into(), length.into());
    }
    if let Some(template) = chat_template(vocabulary, special)? {
        settings.insert("chat_template".into(), template);
    }
    Ok(Json::Object(settings))
}

/// A template, or a list of named ones where there are several.
fn chat_template(vocabulary: &Vocabulary<'_>, special: &SpecialTokens) -> Result<Option<Json>, FileError> {
    let mut templates = named::of_gguf(vocabulary.metadata)?;
    if let Some(bos) = special.before {
        let bos = &vocabulary.tokens[bos as usize];
        templates.iter_mut().for_each(|template| write_bos(template, bos));
    }
    Ok(match &templates[..] {
        [] => None,
        [only] if only.name == named::DEFAULT => Some(only.source.as_str().into()),
        _ => {
            let entry = |template: &Named| json!({ "name": template.name, "template": template.source });
            Some(templates.iter().map(entry).collect())
        }
    })
}

/// llama.cpp puts bos before every chat; transformers and mlx-lm, where the template does.
fn write_bos(template: &mut Named, bos: &str) {
    let Ok(parsed) = ChatTemplate::new(&template.source, &template.file) else { return };
    if parsed.with("bos_token", bos).begins_with(bos) == Some(false) {
        template.source.insert_str(0, "{{ bos_token }}");
    }
}
