//! Directories' tokenizers that are written to GGUF: SentencePiece's, and cuts whose names are
//! found by their patterns.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::Tokenizer;
use super::tests::{checkpoint, exported, metadata, with};
use crate::gguf::{Metadata, Value};
use crate::shown;

#[test]
fn a_sentencepiece_directory_has_the_scores_of_the_file_it_was_made_of() {
    let pieces = metadata("sentencepiece.gguf");
    for prefix in [true, false] {
        let pieces = with(&pieces, "tokenizer.ggml.add_space_prefix", Some(Value::Bool(prefix)));
        let folder = tempfile::TempDir::new().unwrap();
        exported(&pieces, folder.path());
        let size = pieces.get::<&[String]>("tokenizer.ggml.tokens").unwrap().len();
        let made = Tokenizer::gguf_entries(&checkpoint(folder.path()), size).unwrap();
        assert_eq!(made.warnings, [""; 0]);
        let mut again = Metadata::new(Path::new("again.gguf").into());
        for (key, value) in made.entries {
            again.insert(key, value).unwrap();
        }
        for key in ["model", "tokens", "token_type", "bos_token_id", "eos_token_id"] {
            let key = format!("tokenizer.ggml.{key}");
            assert_eq!(again.value(&key), pieces.value(&key), "{key}");
        }
        assert_eq!(again.find("tokenizer.ggml.add_space_prefix").unwrap(), (!prefix).then_some(false));
        let scores = |metadata: &Metadata| metadata.get::<&[f32]>("tokenizer.ggml.scores").unwrap().to_vec();
        // Special tokens come first, then bytes.
        assert_eq!(scores(&again)[..3], [-1000.0; 3]);
        assert_eq!(scores(&again)[3..], scores(&pieces)[3..]);
    }
}

/// The SentencePiece vectors' tokenizer.json, changed by `change`, as GGUF; the warnings or the
/// error.
fn sentencepiece_to_gguf(change: impl Fn(&mut Json)) -> Result<(Tokenizer, Vec<String>), String> {
    let (metadata, warnings) = to_gguf(&metadata("sentencepiece.gguf"), change)?;
    Ok((Tokenizer::from_gguf(&metadata).unwrap(), warnings))
}

/// The tokenizer.json made of `source`, changed by `change`, as GGUF; the warnings or the error.
fn to_gguf(source: &Metadata, change: impl Fn(&mut Json)) -> Result<(Metadata, Vec<String>), String> {
    let folder = tempfile::TempDir::new().unwrap();
    exported(source, folder.path());
    let path = folder.path().join("tokenizer.json");
    let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&path, json.to_string()).unwrap();
    let made = Tokenizer::gguf_entries(&checkpoint(folder.path()), 800).map_err(|error| error.to_string())?;
    let mut metadata = Metadata::new(Path::new("made.gguf").into());
    for (key, value) in made.entries {
        metadata.insert(key, value).unwrap();
    }
    let prefix = |text: String| text.replace(&format!("{}: ", shown(path.display())), "");
    Ok((metadata, made.warnings.into_iter().map(prefix).collect()))
}

#[test]
fn spaces_are_spelled_as_tokenizer_json_has_it_or_the_difference_is_said() {
    let metaspace = |scheme: &str| json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false });
    let again = "in GGUF a text that begins with a space gets another one before it, which this tokenizer does not do";
    let behind =
        "in GGUF a text behind a special token gets a space before it, which this tokenizer does not do";
    for (scheme, prefix, want) in
        [("always", true, &[again][..]), ("first", true, &[again, behind]), ("never", false, &[])]
    {
        let (tokenizer, warnings) = sentencepiece_to_gguf(|json| {
            json["normalizer"] = Json::Null;
            json["pre_tokenizer"] = metaspace(scheme);
        })
        .unwrap();
        assert_eq!(warnings, want, "{scheme}");
        let plain = with(
            &metadata("sentencepiece.gguf"),
            "tokenizer.ggml.add_space_prefix",
            Some(Value::Bool(prefix)),
        );
        let plain = Tokenizer::from_gguf(&plain).unwrap();
        for text in ["a b", " a", ""] {
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                plain.encode(text, true).unwrap(),
                "{scheme}: {text:?}"
            );
        }
    }
    // The spaces that it would cut at are spelled otherwise by then.
    let split = json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false });
    let (_, warnings) = sentencepiece_to_gguf(|json| json["pre_tokenizer"] = split.clone()).unwrap();
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn added_tokens_of_sentencepiece_keep_their_ids_and_what_is_lost_is_said() {
    let token = |id: u32, content: &str, rstrip: bool| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": rstrip,
            "normalized": false, "special": false })
    };
    let (tokenizer, warnings) = sentencepiece_to_gguf(|json| {
        let added = json["added_tokens"].as_array_mut().unwrap();
        added.extend([token(700, "\u{2581}\u{2581}\u{2581}", false), token(701, "<|im_end|>", true)]);
    })
    .unwrap();
    assert_eq!(tokenizer.encode("   <|im_end|>", false).unwrap(), [700, 701]);
    assert!(tokenizer.eos_ids().contains(&701));
    let want = [
        "added token \u{2581}\u{2581}\u{2581}: spelled with spaces for \u{2581}, so a text that has \u{2581} itself gets other tokens",
        "added token <|im_end|>: GGUF has no place for lstrip, rstrip and single_word: left out, so spaces beside such a \
         token become tokens, or it is found inside a word",
    ];
    assert_eq!(warnings, want);
}

#[test]
fn sentencepiece_tokenizers_that_scores_cannot_say_are_refused() {
    let swap = |json: &mut Json| {
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        // A token with several merges, and a merge of another one between them.
        let joined = |merge: &Json| format!("{}{}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
        let at = (1..merges.len()).find(|&at| joined(&merges[at - 1]) == joined(&merges[at])).unwrap();
        let merge = merges.remove(at);
        merges.push(merge);
    };
    let drop = |json: &mut Json| {
        json["model"]["merges"].as_array_mut().unwrap().pop().unwrap();
    };
    type Change<'a> = &'a dyn Fn(&mut Json);
    let cases: [(Change<'_>, &str); 6] = [
        (&swap, "stand in several places, but GGUF's scores give a token one"),
        (&drop, "which model.merges does not"),
        (&|json| json["normalizer"] = json!({ "type": "NFKC" }), "normalizer \"NFKC\" has no counterpart"),
        (
            &|json| json["normalizer"] = Json::Null,
            "it does not spell spaces as \u{2581}, as GGUF's llama tokenizers do",
        ),
        (
            &|json| json["pre_tokenizer"] = json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true }),
            "pre_tokenizer \"Metaspace\" has no counterpart in GGUF's llama tokenizers",
        ),
        (
            &|json| json["model"]["ignore_merges"] = true.into(),
            "model.ignore_merges has no counterpart in GGUF's llama tokenizers",
        ),
    ];
    for (change, want) in cases {
        let error = sentencepiece_to_gguf(change).map(|_| ()).unwrap_err();
        assert!(error.contains(want), "{error}\nshould say {want}");
    }
}

#[test]
fn cuts_have_a_name_however_their_pattern_is_spelled() {
    let source = metadata("byte_level.gguf");
    let named = |pre: &str, change: &dyn Fn(&mut Json)| {
        let source = with(&source, "tokenizer.ggml.pre", Some(Value::String(pre.into())));
        let (made, _) = to_gguf(&source, change)?;
        Ok::<_, String>(made.get::<&str>("tokenizer.ggml.pre").unwrap().to_string())
    };
    let pattern = |json: &mut Json, step: usize, from: &str, to: &str| {
        let pattern = &mut json["pre_tokenizer"]["pretokenizers"][step]["pattern"]["Regex"];
        let changed = pattern.as_str().unwrap().replace(from, to);
        assert_ne!(*pattern, changed);
        *pattern = changed.into();
    };
    // As in DeepSeek V3's and Seed-OSS's files.
    let lines = |json: &mut Json| {
        pattern(json, 2, r"\r", "\r");
        pattern(json, 2, r"\n", "\n");
    };
    assert_eq!(named("deepseek-v3", &lines), Ok("deepseek-v3".into()));
    assert_eq!(
        named("seed-coder", &|json| pattern(json, 0, r"|\p{N}|", r"|\p{N}{1}|")),
        Ok("seed-coder".into())
    );
    // Merges lead to each token, so it does not matter that words that are tokens stay whole, as in
    // gpt-oss.
    let whole = |json: &mut Json| json["model"]["ignore_merges"] = true.into();
    assert_eq!(named("gpt-4o", &whole), Ok("gpt-4o".into()));
    let unmerged = |json: &mut Json| {
        whole(json);
        json["model"]["merges"].as_array_mut().unwrap().pop().unwrap();
    };
    let error = named("gpt-4o", &unmerged).unwrap_err();
    let want = "tokenizer.ggml.pre gpt-4o cuts text as its pre_tokenizer does, but with model.ignore_merges false, which \
                matters for ";
    assert!(error.contains(want) && error.ends_with(": no merges lead to it"), "{error}");
    let suffix = |json: &mut Json| json["model"]["end_of_word_suffix"] = "</w>".into();
    let error = named("gpt-4o", &suffix).unwrap_err();
    assert!(error.ends_with("model.end_of_word_suffix </w> has no counterpart in GGUF"), "{error}");
}
