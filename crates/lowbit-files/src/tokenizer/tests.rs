use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::Value as Json;

use super::*;
use crate::gguf::{Array, Value};

fn vectors(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/files").join(name)
}

fn ids() -> Json {
    serde_json::from_slice(&std::fs::read(vectors("ids.json")).unwrap()).unwrap()
}

fn list(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub(super) fn metadata(file: &str) -> Metadata {
    crate::gguf::read(&vectors(file)).unwrap().metadata
}

/// `metadata` with `key` set to `value`, or left out.
pub(super) fn with(metadata: &Metadata, key: &str, value: Option<Value>) -> Metadata {
    let mut changed = Metadata::new(metadata.file().into());
    for (known, value) in metadata.iter().filter(|(known, _)| *known != key) {
        changed.insert(known.into(), value.clone()).unwrap();
    }
    if let Some(value) = value {
        changed.insert(key.into(), value).unwrap();
    }
    changed
}

fn with_pre(file: &str, pre: &str) -> Tokenizer {
    let pre = Value::String(pre.into());
    Tokenizer::from_gguf(&with(&metadata(file), "tokenizer.ggml.pre", Some(pre))).unwrap()
}

fn byte_level(pre: &str) -> Tokenizer {
    with_pre("byte_level.gguf", pre)
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
    Tokenizer::from_checkpoint(&checkpoint(directory.path())).unwrap()
}

/// `folder` with what else a checkpoint needs.
pub(super) fn checkpoint(folder: &Path) -> Checkpoint {
    let header = b"{}      ";
    let model = [&8u64.to_le_bytes()[..], header].concat();
    std::fs::write(folder.join("model.safetensors"), model).unwrap();
    std::fs::write(folder.join("config.json"), r#"{"eos_token_id": [3, 4]}"#).unwrap();
    Checkpoint::open(folder).unwrap()
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

/// The tokens of this vocabulary span words, so that its ids show where a text is cut.
#[test]
fn every_pattern_cuts_where_its_peer_cuts() {
    let boundaries = &ids()["boundaries"];
    for pre in super::gguf::pre_names() {
        let want = &boundaries[pre];
        // The same ids as under another name.
        let want = want.as_str().map_or(want, |same| &boundaries[same]);
        assert_ids(&with_pre("boundaries.gguf", pre), want, pre);
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

fn flag(metadata: &Metadata, name: &str) -> Metadata {
    with(metadata, &format!("tokenizer.ggml.{name}"), Some(Value::Bool(true)))
}

/// As llama.cpp's server has it: what the template wrote of it goes first.
#[test]
fn a_gguf_chat_has_bos_once_and_a_directorys_what_its_template_writes() {
    let metadata = flag(&metadata("sentencepiece.gguf"), "add_bos_token");
    let gguf = Tokenizer::from_gguf(&metadata).unwrap();
    let text = gguf.encode("a b", false).unwrap();
    let around = |before: &[u32], after: &[u32]| [before, &text, after].concat();
    assert_eq!(gguf.encode_chat("a b").unwrap(), around(&[1], &[]));
    assert_eq!(gguf.encode_chat("<s>a b").unwrap(), around(&[1], &[]));
    let both = Tokenizer::from_gguf(&flag(&metadata, "add_eos_token")).unwrap();
    assert_eq!(both.encode_chat("a b").unwrap(), around(&[1], &[2]));
    assert_eq!(both.encode_chat("<s>a b</s>").unwrap(), around(&[1], &[2]));
    let none = with(&metadata, "tokenizer.ggml.add_bos_token", Some(Value::Bool(false)));
    let none = Tokenizer::from_gguf(&none).unwrap();
    assert_eq!(none.encode_chat("a b").unwrap(), text);
    assert_eq!(none.encode_chat("<s>a b").unwrap(), none.encode("<s>a b", false).unwrap());
    let directory = huggingface();
    assert!(directory.adds_bos());
    for text in ["a b", "<s>a b"] {
        assert_eq!(directory.encode_chat(text).unwrap(), directory.encode(text, false).unwrap());
    }
}

#[test]
fn special_tokens_may_be_text() {
    for tokenizer in [byte_level("llama-bpe"), huggingface()] {
        let end = tokenizer.id("</s>").unwrap();
        assert!(tokenizer.is_special(end));
        let text = "a</s>b";
        assert!(tokenizer.encode(text, true).unwrap().contains(&end));
        let ids = tokenizer.encode_as_text(text, true).unwrap();
        assert!(!ids.contains(&end), "{ids:?}");
        assert_eq!(ids.first().copied(), tokenizer.bos());
        assert_eq!(tokenizer.decode(&ids[1..]).unwrap(), text);
        // Of text without such tokens the ids are the same.
        assert_eq!(tokenizer.encode_as_text("a b", true).unwrap(), tokenizer.encode("a b", true).unwrap());
    }
    // A token that is not special is one in text, too.
    let directory = huggingface();
    let think = directory.id("<think>").unwrap();
    assert!(directory.encode_as_text("a<think>", false).unwrap().contains(&think));
}

/// A vocabulary of llama.cpp's kind with these tokens behind its own, all of them normal.
fn with_tokens(names: &[&str]) -> Metadata {
    let metadata = metadata("byte_level.gguf");
    let tokens: &[String] = metadata.get("tokenizer.ggml.tokens").unwrap();
    let kinds: Vec<i32> = metadata.get("tokenizer.ggml.token_type").unwrap();
    let known = |name: &&&str| !tokens.iter().any(|token| token == *name);
    let names: Vec<String> = names.iter().filter(known).map(|name| name.to_string()).collect();
    let kinds = [&kinds[..], &vec![1; names.len()]].concat();
    let more = with(
        &metadata,
        "tokenizer.ggml.tokens",
        Some(Value::Array(Array::String([tokens, &names].concat()))),
    );
    with(&more, "tokenizer.ggml.token_type", Some(Value::Array(Array::I32(kinds))))
}

/// Names and sets are those of llama.cpp's `llama-vocab.cpp`.
#[test]
fn tokens_that_end_a_text_are_known_by_their_spelling() {
    let ends = |metadata: &Metadata| {
        let tokenizer = Tokenizer::from_gguf(metadata).unwrap();
        let named = |id: &u32| (tokenizer.token(*id).unwrap(), tokenizer.is_special(*id));
        tokenizer.eos_ids().iter().map(named).collect::<Vec<_>>()
    };
    let own = ends(&metadata("byte_level.gguf"));
    let more = |names: &[&str]| {
        let ends = ends(&with_tokens(names));
        let new = ends.into_iter().filter(|end| !own.contains(end));
        new.map(|(name, special)| format!("{name}{}", if special { "" } else { " as text" }))
            .collect::<Vec<_>>()
    };
    for name in [
        "<|return|>",
        "<|end|>",
        "[EOS]",
        "<eos>",
        "<turn|>",
        "[e~[",
        "<end_of_utterance>",
        "<|fim_pad|>",
        "<reponame>",
    ] {
        assert_eq!(more(&["x", name]), [name]);
    }
    // The first spelling alone stands for what fills; a middle ends nothing.
    assert_eq!(
        more(&["<PAD>", "<fim_pad>", "<|fim_middle|>", "<|file_sep|>"]),
        ["<fim_pad>", "<|file_sep|>"]
    );
    assert_eq!(more(&["<|end|>", "<|return|>", "<|call|>"]), ["<|return|>", "<|call|>"]);
    let harmony =
        Tokenizer::from_gguf(&with_tokens(&["<|end|>", "<|return|>", "<|call|>", "<|channel|>"])).unwrap();
    assert!(["<|end|>", "<|channel|>"].iter().all(|token| !harmony.is_special(harmony.id(token).unwrap())));
    let end = harmony.id("</s>").unwrap();
    let gemma = Tokenizer::from_gguf(&with_tokens(&["<|tool_response>"])).unwrap();
    assert!(!gemma.is_special(end) && gemma.is_special(gemma.id("<|tool_response>").unwrap()));
    // A key names another one.
    let named = with(&with_tokens(&["<|fim_pad|>"]), "tokenizer.ggml.fim_pad_token_id", Some(Value::U32(7)));
    let tokenizer = Tokenizer::from_gguf(&named).unwrap();
    assert!(tokenizer.eos_ids().contains(&7) && !tokenizer.is_special(tokenizer.id("<|fim_pad|>").unwrap()));
    let none = with(&named, "tokenizer.ggml.fim_pad_token_id", Some(Value::U32(9999)));
    assert!(Tokenizer::from_gguf(&none).unwrap().is_special(tokenizer.id("<|fim_pad|>").unwrap()));
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
            assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap()).unwrap(), text);
        }
    }
}

#[test]
fn special_tokens_are_decoded_as_they_are_spelled() {
    for tokenizer in [byte_level("qwen35"), sentencepiece(), huggingface()] {
        let text = tokenizer.decode(&tokenizer.encode("a b", false).unwrap()).unwrap();
        let mut all = 0..tokenizer.vocab_size() as u32;
        let special = all.find(|&id| tokenizer.is_special(id)).unwrap();
        let spelled = tokenizer.token(special).unwrap();
        assert!(tokenizer.is_added(special), "{spelled}");
        let mut ids = tokenizer.encode("a b", false).unwrap();
        ids.push(special);
        assert_eq!(tokenizer.decode(&ids).unwrap(), format!("{text}{spelled}"));
        assert_eq!(streamed(&tokenizer, &[], &ids).concat(), format!("{text}{spelled}"));
        assert_eq!(streamed(&tokenizer, &ids, &[special]).concat(), spelled);
        assert!(!tokenizer.is_added(ids[0]) && !tokenizer.is_added(u32::MAX));
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
fn ids_without_a_token_have_no_text() {
    for tokenizer in [byte_level("qwen2"), sentencepiece(), huggingface()] {
        let size = tokenizer.vocab_size() as u32;
        let ids = tokenizer.encode("a cat \u{e9}\u{1f642}\u{65e5}!", false).unwrap();
        let want = tokenizer.decode(&ids).unwrap();
        let padded: Vec<u32> = ids.iter().flat_map(|&id| [size, id, u32::MAX]).collect();
        assert_eq!(tokenizer.decode(&padded).unwrap(), want);
        assert_eq!(tokenizer.decode(&[size, u32::MAX]).unwrap(), "");
        assert_eq!(streamed(&tokenizer, &[], &padded).concat(), want);
        assert_eq!(streamed(&tokenizer, &padded, &[size]).concat(), "");
        assert_eq!(tokenizer.decode(&[]).unwrap(), "");
        assert_eq!((tokenizer.token(size), tokenizer.is_special(size)), (None, false));
    }
}

/// Texts on which patterns and merges may stumble, of `bytes` each.
fn long_texts(bytes: usize) -> Vec<String> {
    let of = |part: &str| part.repeat(bytes / part.len());
    let mut texts: Vec<String> =
        ["a", " ", "\u{301}", "\u{1f642}", "A", "\n", "\u{4e00}", "1", "a ", "'s", "\u{fdfa}"].map(of).into();
    texts.push(of(" ") + "x");
    texts.push(of("\u{a0}") + "\n");
    texts
}

/// Encoding has a limit of time that is linear in the text.
#[track_caller]
fn assert_encodes(name: &str, tokenizer: &Tokenizer, texts: &[String]) {
    for text in texts {
        let shown: String = text.chars().take(3).collect();
        let ids = tokenizer.encode(text, false).unwrap_or_else(|error| panic!("{name}: {shown:?}: {error}"));
        assert_eq!(tokenizer.decode(&ids).unwrap(), *text, "{name}: {shown:?}");
    }
}

#[test]
fn long_texts_take_linear_time_with_the_demos_tokenizer() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json");
    let demo = Tokenizer::from_json(&path, &std::fs::read(&path).unwrap()).unwrap();
    // Spaces first of all: a million of them once were more than the pattern's stack could hold.
    assert_encodes("demo", &demo, &long_texts(1 << 20)[1..2]);
    for text in long_texts(1 << 18) {
        demo.encode(&text, false).unwrap();
    }
}

#[test]
fn long_texts_take_linear_time_with_vocabularies_of_gguf() {
    assert_encodes("sentencepiece", &sentencepiece(), &long_texts(1 << 18)[..4]);
    for pre in ["tekken", "deepseek-llm", "default"] {
        assert_encodes(pre, &byte_level(pre), &long_texts(1 << 17)[..4]);
    }
    for pre in
        ["llama-bpe", "tekken", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon", "bloom"]
    {
        assert_encodes(pre, &byte_level(pre), &long_texts(1 << 14));
    }
}

#[test]
fn what_stands_instead_of_tokenizer_json_is_named() {
    let cases: [(&[&str], &str); 7] = [
        (&[], "tokenizer: it is missing: copy it"),
        (
            &["tokenizer.model"],
            "tokenizer.model (SentencePiece or tiktoken) is not read: load it with transformers",
        ),
        (&["tekken.json"], "tekken.json (Mistral's own format)"),
        (&["vocab.json", "merges.txt"], "vocab.json and merges.txt do not say how text is cut"),
        (&["vocab.txt"], "vocab.txt (WordPiece)"),
        (&["qwen.tiktoken"], "qwen.tiktoken (tiktoken)"),
        // Kimi's.
        (&["tiktoken.model"], "tiktoken.model (tiktoken)"),
    ];
    for (files, want) in cases {
        let folder = tempfile::TempDir::new().unwrap();
        for name in files {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let message = Tokenizer::from_checkpoint(&checkpoint(folder.path())).unwrap_err().to_string();
        assert!(
            message.contains("tokenizer.json: ") && message.contains(want),
            "{message}\nshould say: {want}"
        );
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
            r#"pre "nonsense" is not supported; supported are gpt-2, phi-2"#,
        ),
        (
            &bytes,
            "tokenizer.ggml.model",
            text("t5"),
            r#"model "t5" is not supported; supported are gpt2, llama and gemma4"#,
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

/// The tokenizer of the files that are made of `metadata`.
#[track_caller]
pub(super) fn exported(metadata: &Metadata, folder: &Path) -> Tokenizer {
    for Companion { name, bytes } in Tokenizer::companions(metadata, Some(512)).unwrap() {
        std::fs::write(folder.join(name), bytes).unwrap();
    }
    Tokenizer::from_checkpoint(&checkpoint(folder)).unwrap()
}

#[test]
fn files_made_of_a_gguf_tokenizer_make_the_same_ids() {
    let (bytes, cuts) = (metadata("byte_level.gguf"), metadata("boundaries.gguf"));
    let pieces = metadata("sentencepiece.gguf");
    let pre = |name: &str| ("tokenizer.ggml.pre", Value::String(name.into()));
    let flag = |key, value| (key, Value::Bool(value));
    let (bos, eos) = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token");
    let mut sources: Vec<_> = super::gguf::pre_names().map(|name| (&cuts, pre(name))).collect();
    sources.extend([
        (&bytes, pre("qwen2")),
        (&bytes, pre("llama-bpe")),
        (&bytes, flag(bos, false)),
        (&pieces, flag(bos, true)),
        (&pieces, flag(bos, false)),
        (&pieces, flag(eos, true)),
        (&pieces, flag("tokenizer.ggml.add_space_prefix", false)),
    ]);
    for (metadata, (key, value)) in sources {
        let what = format!("{key} {value:?}");
        let metadata = with(metadata, key, Some(value));
        let folder = tempfile::TempDir::new().unwrap();
        let (want, got) = (Tokenizer::from_gguf(&metadata).unwrap(), exported(&metadata, folder.path()));
        assert_eq!((want.bos(), want.eos()), (got.bos(), got.eos()), "{what}");
        assert_eq!(want.vocab_size(), got.vocab_size(), "{what}");
        for id in 0..want.vocab_size() as u32 {
            assert_eq!((want.token(id), want.is_special(id)), (got.token(id), got.is_special(id)), "{what}");
        }
        for text in ids()["texts"].as_array().unwrap() {
            let text = text.as_str().unwrap();
            for add_special in [true, false] {
                let [want, got] = [&want, &got].map(|tokenizer| tokenizer.encode(text, add_special).unwrap());
                assert_eq!(want, got, "{what}: {text:?}");
            }
            let ids = want.encode(text, true).unwrap();
            assert_eq!(want.decode(&ids).unwrap(), got.decode(&ids).unwrap(), "{what}: {text:?}");
        }
    }
}

#[test]
fn files_made_of_a_gguf_tokenizer_have_its_special_tokens_and_templates() {
    let one = with(&metadata("byte_level.gguf"), "tokenizer.chat_template", Some(Value::String("a".into())));
    let padded = with(&one, "tokenizer.ggml.padding_token_id", Some(Value::U32(5)));
    let json = |metadata: &Metadata, name: &str| -> Json {
        let files = Tokenizer::companions(metadata, Some(512)).unwrap();
        serde_json::from_slice(&files.iter().find(|file| file.name == name).unwrap().bytes).unwrap()
    };
    let config = json(&padded, "tokenizer_config.json");
    let token = |id| Tokenizer::from_gguf(&padded).unwrap().token(id).unwrap();
    assert_eq!(config["pad_token"], token(5));
    assert_eq!((&config["chat_template"], &config["model_max_length"]), (&"a".into(), &512.into()));
    let tools = with(&one, "tokenizer.chat_template.tool_use", Some(Value::String("b".into())));
    let template = &json(&tools, "tokenizer_config.json")["chat_template"];
    let want =
        serde_json::json!([{ "name": "default", "template": "a" }, { "name": "tool_use", "template": "b" }]);
    assert_eq!(*template, want);
    let folder = tempfile::TempDir::new().unwrap();
    exported(&tools, folder.path());
    let template = crate::ChatTemplate::from_checkpoint(&checkpoint(folder.path())).unwrap().unwrap();
    assert_eq!(template.render(&[crate::Message::new("user", "x")], true).unwrap(), "a");
    let wrong = with(&one, "tokenizer.chat_template.tool_use", Some(Value::U32(1)));
    let message = Tokenizer::companions(&wrong, None).unwrap_err().to_string();
    assert!(
        message.ends_with("tokenizer.chat_template.tool_use is u32 1, but a string is wanted"),
        "{message}"
    );
    // llama.cpp's converter names embeddings without a token; such a name is no token.
    let Some(Value::Array(Array::String(tokens))) = one.value("tokenizer.ggml.tokens") else {
        panic!("strings")
    };
    let kinds: Vec<i32> = one.get("tokenizer.ggml.token_type").unwrap();
    let last = tokens.len();
    let tokens = [&tokens[..], &[format!("[PAD{last}]"), "[PAD1]".into()]].concat();
    let kinds = Value::Array(Array::I32([&kinds[..], &[5, 5]].concat()));
    let more = with(&one, "tokenizer.ggml.tokens", Some(Value::Array(Array::String(tokens))));
    let more = with(&more, "tokenizer.ggml.token_type", Some(kinds));
    let vocabulary = &json(&more, "tokenizer.json")["model"]["vocab"];
    assert_eq!(vocabulary[format!("[PAD{last}]")], Json::Null);
    assert_eq!(vocabulary["[PAD1]"], last + 1);
}

/// Texts are the bytes of their tokens, joined: of every kind of tokenizer, with characters that
/// span tokens.
#[test]
fn tokens_have_bytes() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo-4bit/tokenizer.json");
    let demo = Tokenizer::from_json(&demo, &std::fs::read(&demo).unwrap()).unwrap();
    let texts =
        ["x {\"name\": [1, 2.5e-3]}\n\n\t", "x na\u{ef}ve \u{4e2d}\u{6587} \u{1f600}\u{1f468}", "x  y"];
    for tokenizer in [demo, huggingface(), byte_level("default"), sentencepiece()] {
        let bytes = tokenizer.token_bytes(tokenizer.vocab_size() + 3).unwrap();
        assert!(bytes[tokenizer.vocab_size()..].iter().all(Vec::is_empty));
        for text in texts {
            let Ok(ids) = tokenizer.encode(text, false) else { continue };
            let joined: Vec<u8> = ids.iter().flat_map(|&id| bytes[id as usize].clone()).collect();
            let joined = String::from_utf8(joined).unwrap();
            // SentencePiece puts a space before a text, which its decoder takes away.
            let decoded = tokenizer.decode(&ids).unwrap();
            assert_eq!(joined.strip_prefix(' ').unwrap_or(&joined), decoded.trim_start(), "{tokenizer:?}");
        }
        let whole = (0..tokenizer.vocab_size()).filter(|&id| !bytes[id].is_empty()).count();
        assert!(whole + 2 >= tokenizer.vocab_size(), "{tokenizer:?}: {whole}");
    }
}
