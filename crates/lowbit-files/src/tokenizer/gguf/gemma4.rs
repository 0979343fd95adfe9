//! Gemma 4's BPE: characters are joined by merges, spaces are spelled `▁`, and characters without a
//! token are spelled byte by byte.

use serde_json::{Value as Json, json};
use tokenizers::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::replace::Replace;

use super::description::Description;
use super::sentencepiece::SPACE;
use super::{Defaults, Merge, Vocabulary, byte_level};
use crate::tokenizer::steps::{Inner, Matcher, Normalize, split_by};
use crate::{FileError, shown};

/// llama.cpp joins nothing across these. transformers does not cut, and published merges do not
/// cross them either.
const LINE_BREAKS: &str = r"\n+";

/// Tokens that replies show, although they are special: what takes replies apart looks for them.
///
/// Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/gemma.py`, `Gemma4Model.set_vocab`.
pub(super) const VISIBLE: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

pub(super) fn build(vocabulary: &Vocabulary<'_>, defaults: &mut Defaults) -> Result<Inner, FileError> {
    *defaults = Defaults { bos: None, eos: None, add_bos: true };
    let mut builder = BPE::builder().fuse_unk(true).byte_fallback(true);
    if let Some(unknown) = vocabulary.special_id("unknown")? {
        builder = builder.unk_token(vocabulary.tokens[unknown as usize].clone());
    }
    let mut inner = vocabulary.model(builder, byte_level::merges(vocabulary)?)?;
    let spaces = |from, to| Replace::new(from, to).map_err(|error| vocabulary.error(error));
    let normalizer = Normalize::from(spaces(" ", SPACE)?);
    inner.with_normalizer(Some(normalizer)).map_err(|error| vocabulary.error(error))?;
    let breaks = Matcher::new(LINE_BREAKS).map_err(|error| vocabulary.error(error))?;
    inner.with_pre_tokenizer(Some(split_by(breaks)));
    let decoders: Vec<DecoderWrapper> =
        vec![spaces(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    inner.with_decoder(Some(Sequence::new(decoders)));
    Ok(inner)
}

/// The same in tokenizer.json.
pub(super) fn describe(vocabulary: &Vocabulary<'_>) -> Result<Description, FileError> {
    let spaces =
        |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let decoders = [spaces(SPACE, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    let unknown = vocabulary.special_id("unknown")?.map(|id| &vocabulary.tokens[id as usize]);
    Ok(Description {
        normalizer: spaces(" ", SPACE),
        pre_tokenizer: json!({
            "type": "Split", "pattern": { "Regex": LINE_BREAKS }, "behavior": "Isolated", "invert": false,
        }),
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: json!({ "unk_token": unknown, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false }),
        merges: byte_level::merges(vocabulary)?,
    })
}

/// Checks that the tokenizer.json `json` is such a tokenizer.
///
/// # Errors
/// The step that GGUF has no counterpart for.
pub(super) fn check(json: &Json) -> Result<(), String> {
    let none = |part: &str, step: &Json| {
        Err(format!("{part} {} has no counterpart in GGUF's gemma4 tokenizers", shown(&step["type"])))
    };
    let normalizer = &json["normalizer"];
    let spells = |step: &Json| step["pattern"]["String"] == " " && step["content"] == SPACE;
    if normalizer["type"] != "Replace" || !spells(normalizer) {
        return none("normalizer", normalizer);
    }
    let cut = &json["pre_tokenizer"];
    // No space is left to cut at.
    let harmless = cut["pattern"]["String"] == " " || cut["pattern"]["Regex"] == LINE_BREAKS;
    match cut.is_null() || cut["type"] == "Split" && harmless {
        true if json["model"]["ignore_merges"] == Json::Bool(true) => {
            Err("model.ignore_merges has no counterpart in GGUF's gemma4 tokenizers".into())
        }
        true => Ok(()),
        false => none("pre_tokenizer", cut),
    }
}

/// True if a merge joins a line break with another character, which llama.cpp does not.
pub(super) fn crosses_lines((left, right): Merge<'_>) -> bool {
    let all = || left.chars().chain(right.chars());
    all().any(|c| c == '\n') && all().any(|c| c != '\n')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;
    use crate::gguf::{Array, Metadata, Value};
    use crate::tokenizer::Tokenizer;
    use crate::tokenizer::tests::exported;

    /// The bytes' tokens come after three special ones.
    const BYTES: u32 = 3;
    const OTHERS: u32 = BYTES + 256;

    fn metadata() -> Metadata {
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let others = ["\u{2581}", "a", "b", "\n", "ab", "\u{2581}ab", "\n\n", "<|tool_call>"];
        let special = ["<unk>", "<bos>", "<eos>"].map(String::from).into_iter();
        let tokens: Vec<String> = special.chain(bytes).chain(others.map(String::from)).collect();
        let mut kinds = vec![1; tokens.len()];
        kinds[..3].copy_from_slice(&[2, 3, 3]);
        kinds[BYTES as usize..OTHERS as usize].fill(6);
        kinds[tokens.len() - 1] = 4;
        let merges = ["a b", "\u{2581} ab", "\n \n"].map(String::from).to_vec();
        let mut metadata = Metadata::new(std::path::Path::new("gemma4.gguf").into());
        for (key, value) in [
            ("model", Value::String("gemma4".into())),
            ("tokens", Value::Array(Array::String(tokens))),
            ("token_type", Value::Array(Array::I32(kinds))),
            ("merges", Value::Array(Array::String(merges))),
            ("bos_token_id", Value::U32(1)),
            ("eos_token_id", Value::U32(2)),
            ("unknown_token_id", Value::U32(0)),
            ("add_space_prefix", Value::Bool(false)),
            // llama.cpp does not obey it.
            ("add_bos_token", Value::Bool(false)),
        ] {
            metadata.insert(format!("tokenizer.ggml.{key}"), value).unwrap();
        }
        metadata
    }

    #[test]
    fn characters_are_joined_and_others_are_bytes() {
        let metadata = metadata();
        let tokenizer = Tokenizer::from_gguf(&metadata).unwrap();
        let text = "ab ab\n\n\u{e4}b<|tool_call>";
        let ids = tokenizer.encode(text, true).unwrap();
        let [b, ab, space_ab, breaks, call] = [2, 4, 5, 6, 7].map(|n| OTHERS + n);
        assert_eq!(ids, [1, ab, space_ab, breaks, BYTES + 0xC3, BYTES + 0xA4, b, call]);
        assert_eq!(tokenizer.decode(&ids[1..]).unwrap(), text);
        // A directory made of it makes the same ids, and the same file again.
        let folder = tempfile::TempDir::new().unwrap();
        let directory = exported(&metadata, folder.path());
        assert_eq!(directory.encode(text, true).unwrap(), ids);
        let config = folder.path().join("config.json");
        std::fs::write(&config, r#"{"model_type": "gemma4_text"}"#).unwrap();
        let made = Tokenizer::gguf_entries(&Checkpoint::open(folder.path()).unwrap(), 267).unwrap();
        assert_eq!(made.warnings, [""; 0]);
        let mut again = Metadata::new(std::path::Path::new("again.gguf").into());
        for (key, value) in made.entries {
            again.insert(key, value).unwrap();
        }
        for key in ["model", "tokens", "token_type", "merges", "bos_token_id", "add_space_prefix"] {
            let key = format!("tokenizer.ggml.{key}");
            assert_eq!(again.value(&key), metadata.value(&key), "{key}");
        }
        assert_eq!(Tokenizer::from_gguf(&again).unwrap().encode(text, true).unwrap(), ids);
        // Of another model, the same tokenizer is SentencePiece's, which wants scores.
        std::fs::write(&config, r#"{"model_type": "gemma3_text"}"#).unwrap();
        let made = Tokenizer::gguf_entries(&Checkpoint::open(folder.path()).unwrap(), 267);
        assert!(made.is_err_and(|error| error.to_string().contains("pre_tokenizer")));
    }

    #[test]
    fn other_steps_are_refused() {
        let folder = tempfile::TempDir::new().unwrap();
        exported(&metadata(), folder.path());
        let bytes = std::fs::read(folder.path().join("tokenizer.json")).unwrap();
        let json: Json = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(check(&json), Ok(()));
        let with = |part: &str, step: Json| {
            let mut json = json.clone();
            json[part] = step;
            check(&json)
        };
        let published =
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"});
        assert_eq!(with("pre_tokenizer", published), Ok(()));
        let error = with("pre_tokenizer", json!({"type": "Digits"})).unwrap_err();
        assert!(error.contains("pre_tokenizer") && error.contains("Digits"), "{error}");
        let error = with("normalizer", json!({"type": "NFC"})).unwrap_err();
        assert!(error.contains("normalizer") && error.contains("NFC"), "{error}");
    }

    #[test]
    fn merges_across_lines_are_known() {
        assert!(crosses_lines(("a", "\n")) && crosses_lines(("\n", "\na")));
        assert!(!crosses_lines(("\n", "\n")) && !crosses_lines(("a", "b")));
    }
}
