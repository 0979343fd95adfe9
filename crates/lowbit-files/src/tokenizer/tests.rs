use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::Value as Json;

use super::*;
use crate::gguf::{self, Array, Value};

fn vectors(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/files").join(name)
}

fn ids() -> Json {
    serde_json::from_slice(&std::fs::read(vectors("ids.json")).unwrap()).unwrap()
}

fn list(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn metadata(file: &str) -> Metadata {
    gguf::read(&vectors(file)).unwrap().metadata
}

/// `metadata` with `key` set to `value`, or left out.
fn with(metadata: &Metadata, key: &str, value: Option<Value>) -> Metadata {
    let mut changed = Metadata::new(metadata.file().into());
    for (known, value) in metadata.iter().filter(|(known, _)| *known != key) {
        changed.insert(known.into(), value.clone()).unwrap();
    }
    if let Some(value) = value {
        changed.insert(key.into(), value).unwrap();
    }
    changed
}

fn byte_level(pre: &str) -> Tokenizer {
    let pre = Value::String(pre.into());
    Tokenizer::from_gguf(&with(&metadata("byte_level.gguf"), "tokenizer.ggml.pre", Some(pre))).unwrap()
}

fn sentencepiece() -> Tokenizer {
    Tokenizer::from_gguf(&metadata("sentencepiece.gguf")).unwrap()
}

/// tokenizer.json and tokenizer_config.json of the vectors, in a checkpoint.
fn huggingface() -> Tokenizer {
    let directory = tempfile::TempDir::new().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(vectors("tokenizer").join(name), directory.path().join(name)).unwrap();
    }
    let header = b"{}      ";
    let model = [&8u64.to_le_bytes()[..], header].concat();
    std::fs::write(directory.path().join("model.safetensors"), model).unwrap();
    std::fs::write(directory.path().join("config.json"), r#"{"eos_token_id": [3, 4]}"#).unwrap();
    Tokenizer::from_checkpoint(&Checkpoint::open(directory.path()).unwrap()).unwrap()
}

/// Checks the ids of every text that the peer has ids for.
#[track_caller]
fn assert_ids(tokenizer: &Tokenizer, want: &Json, peer: &str) {
    let all = ids();
    let mut compared = 0;
    for (text, want) in all["texts"].as_array().unwrap().iter().zip(want.as_array().unwrap()) {
        let text = text.as_str().unwrap();
        if want.is_null() || text.is_empty() {
            continue;
        }
        assert_eq!(tokenizer.encode(text, true).unwrap(), list(want), "{peer}: {text:?}");
        compared += 1;
    }
    assert!(compared > 10, "{compared} texts");
}

#[test]
fn byte_level_ids_are_llama_cpps() {
    let ids = ids();
    for (pre, want) in ids["byte_level"].as_object().unwrap() {
        assert_ids(&byte_level(pre), want, pre);
    }
}

#[test]
fn sentencepiece_ids_are_sentencepieces_and_llama_cpps() {
    let ids = ids();
    for peer in ["sentencepiece", "llama.cpp"] {
        assert_ids(&sentencepiece(), &ids["sentencepiece"][peer], peer);
    }
}

#[test]
fn tokenizer_json_ids_are_transformers() {
    let tokenizer = huggingface();
    assert_ids(&tokenizer, &ids()["tokenizer"], "transformers");
    assert_eq!(tokenizer.bos(), tokenizer.id("<s>"));
    assert!(tokenizer.adds_bos());
    assert_eq!(tokenizer.encode("", true).unwrap(), [tokenizer.bos().unwrap()]);
    let mut want = vec![3, 4, tokenizer.id("</s>").unwrap()];
    want.sort_unstable();
    assert_eq!(tokenizer.eos_ids(), want);
    assert!(tokenizer.is_special(tokenizer.bos().unwrap()));
    assert!(!tokenizer.is_special(tokenizer.id("<think>").unwrap()));
}

#[test]
fn special_tokens_come_from_the_metadata() {
    let llama3 = byte_level("llama-bpe");
    assert!(llama3.adds_bos());
    assert_eq!(llama3.eos_ids(), [llama3.id("</s>").unwrap(), llama3.id("<|im_end|>").unwrap()]);
    assert!(!byte_level("qwen2").adds_bos());
    let sentencepiece = sentencepiece();
    assert_eq!((sentencepiece.bos(), sentencepiece.eos()), (Some(1), Some(2)));
    let add_eos =
        with(&metadata("sentencepiece.gguf"), "tokenizer.ggml.add_eos_token", Some(Value::Bool(true)));
    let ids = Tokenizer::from_gguf(&add_eos).unwrap().encode("a", true).unwrap();
    assert_eq!((ids.first(), ids.last()), (Some(&1), Some(&2)));
}

#[test]
fn decoding_undoes_encoding() {
    for tokenizer in [byte_level("qwen35"), sentencepiece(), huggingface()] {
        for text in ids()["texts"].as_array().unwrap() {
            let text = text.as_str().unwrap();
            let special = ["<|im_start|>", "<|im_end|>", "</s"].iter().any(|token| text.contains(token));
            // SentencePiece spells a space as this character.
            if special || text.contains('\u{2581}') {
                continue;
            }
            assert_eq!(tokenizer.decode(&tokenizer.encode(text, true).unwrap()).unwrap(), text);
        }
    }
}

#[track_caller]
fn streamed(tokenizer: &Tokenizer, context: &[u32], ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream(context).unwrap();
    let mut pieces: Vec<_> = ids.iter().filter_map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.flush().unwrap());
    pieces
}

#[test]
fn streams_join_to_the_whole_text() {
    for tokenizer in [byte_level("qwen35"), sentencepiece(), huggingface()] {
        for text in ids()["texts"].as_array().unwrap() {
            let ids = tokenizer.encode(text.as_str().unwrap(), true).unwrap();
            let want = tokenizer.decode(&ids).unwrap();
            let pieces = streamed(&tokenizer, &[], &ids);
            assert!(pieces.iter().all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
            assert_eq!(pieces.concat(), want);
            for cut in 0..ids.len() {
                let (before, after) = ids.split_at(cut);
                let context = tokenizer.decode(before).unwrap();
                let Some(rest) = want.strip_prefix(&context) else { continue };
                assert_eq!(streamed(&tokenizer, before, after).concat(), rest, "{context:?} | {rest:?}");
            }
        }
    }
}

#[test]
fn streams_give_whole_characters_as_soon_as_they_are_whole() {
    let tokenizer = byte_level("qwen2");
    let bytes: Vec<u32> = ["Ã", "©", "a", "ð", "Ł", "Ļ"].map(|byte| tokenizer.id(byte).unwrap()).into();
    let mut stream = tokenizer.stream(&[]).unwrap();
    let pieces: Vec<_> = bytes.iter().map(|&id| stream.push(id).unwrap()).collect();
    let some = |text: &str| Some(text.to_string());
    assert_eq!(pieces, [None, some("\u{e9}"), some("a"), None, None, None]);
    assert_eq!(stream.flush().unwrap(), "\u{fffd}");
    assert_eq!(stream.flush().unwrap(), "");
}

proptest::proptest! {
    #[test]
    fn streams_of_any_bytes_join_to_what_decode_gives(ids in proptest::collection::vec(0u32..606, 0..40)) {
        static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| byte_level("qwen2"));
        let want = TOKENIZER.decode(&ids).unwrap();
        proptest::prop_assert_eq!(streamed(&TOKENIZER, &[], &ids).concat(), want);
    }
}

#[test]
fn ids_without_a_token_are_refused() {
    let tokenizer = byte_level("qwen2");
    let size = tokenizer.vocab_size() as u32;
    for id in [size, u32::MAX] {
        let message = tokenizer.decode(&[0, id]).unwrap_err().to_string();
        assert!(
            message.contains(&format!("token id {id} has no token; the vocabulary has {size}")),
            "{message}"
        );
        tokenizer.stream(&[]).unwrap().push(id).expect_err("no such token");
    }
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused() {
    let (bytes, pieces) = (metadata("byte_level.gguf"), metadata("sentencepiece.gguf"));
    let strings =
        |list: &[&str]| Some(Value::Array(Array::String(list.iter().map(|s| s.to_string()).collect())));
    let text = |text: &str| Some(Value::String(text.into()));
    let cases = [
        (
            &bytes,
            "tokenizer.ggml.pre",
            text("nonsense"),
            r#"pre "nonsense" is not supported; supported are gpt-2, llama"#,
        ),
        (
            &bytes,
            "tokenizer.ggml.model",
            text("t5"),
            r#"model "t5" is not supported; supported are gpt2 and llama"#,
        ),
        (&bytes, "tokenizer.ggml.model", Some(Value::U32(1)), "model should be a string, but is u32 1"),
        (&bytes, "tokenizer.ggml.model", None, "metadata key tokenizer.ggml.model is missing"),
        (&bytes, "tokenizer.ggml.merges", None, "metadata key tokenizer.ggml.merges is missing"),
        (&bytes, "tokenizer.ggml.merges", strings(&["ab"]), r#"merges: "ab" is not two tokens"#),
        (&bytes, "tokenizer.ggml.merges", strings(&["zzz qqq"]), "zzz"),
        (&bytes, "tokenizer.ggml.tokens", strings(&["a", "a"]), r#"tokens: "a" is both token 0 and token 1"#),
        (&bytes, "tokenizer.ggml.tokens", strings(&["a", "b"]), "token_type has 606 entries for 2 tokens"),
        (
            &bytes,
            "tokenizer.ggml.eos_token_id",
            Some(Value::U32(606)),
            "eos_token_id is 606, but there are 606 tokens",
        ),
        (
            &bytes,
            "tokenizer.ggml.token_type",
            Some(Value::Array(Array::I32(vec![9; 606]))),
            "9 is not 1 to 6",
        ),
        (
            &pieces,
            "tokenizer.ggml.scores",
            Some(Value::Array(Array::F32(vec![0.0]))),
            "scores has 1 entries for 700",
        ),
        (
            &pieces,
            "tokenizer.ggml.scores",
            Some(Value::Array(Array::F32(vec![f32::NAN; 700]))),
            "token 0 is NaN",
        ),
        (&pieces, "tokenizer.ggml.token_type", None, "<0x00> is no token of type byte"),
    ];
    for (metadata, key, value, want) in cases {
        let message = Tokenizer::from_gguf(&with(metadata, key, value)).unwrap_err().to_string();
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
}
