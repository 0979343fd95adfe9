//! Tokens and templates are the same in a directory, in the GGUF file made of it, in a copy of the
//! directory and in a directory made of the GGUF file.

use std::path::Path;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::gguf::Metadata;
use crate::{ChatTemplate, Checkpoint, Message, Tokenizer};

/// Ids of tokenizer.json's own vocabulary are below this.
const NEXT: u32 = 96;
/// More embeddings than tokens.
const EMBEDDINGS: usize = 128;

fn added(id: u32, content: &str, special: bool) -> Json {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
}

/// A token of `added_tokens_decoder`.
fn token(content: &str, special: bool) -> Json {
    json!({"content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
}

/// A byte-level vocabulary of ASCII.
fn tokenizer(added: &[Json]) -> Json {
    let mut vocab: serde_json::Map<String, Json> =
        (33..127u8).map(|c| (char::from(c).to_string(), (c - 33).into())).collect();
    vocab.insert("\u{120}".into(), 94.into());
    vocab.insert("\u{120}a".into(), 95.into());
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": byte_level,
        "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["\u{120}", "a"]]},
    })
}

/// A checkpoint without tensors of these files. Values that are texts are files as they are, others
/// are JSON.
fn checkpoint(folder: &Path, files: &[(&str, Json)]) -> Checkpoint {
    std::fs::write(folder.join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    std::fs::write(folder.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    for (name, content) in files {
        let content = content.as_str().map_or_else(|| content.to_string(), str::to_string);
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    Checkpoint::open(folder).unwrap()
}

/// The GGUF metadata made of `checkpoint`, and what is left out.
fn to_gguf(checkpoint: &Checkpoint) -> (Metadata, Vec<String>) {
    let mut metadata = Metadata::new(Path::new("made.gguf").into());
    let made = Tokenizer::gguf_entries(checkpoint, EMBEDDINGS).unwrap();
    for (key, value) in made.entries {
        metadata.insert(key, value).unwrap();
    }
    (metadata, made.warnings)
}

/// A chat rendered without and with tools; the error's message where the template refuses it.
fn rendered(template: Option<ChatTemplate>) -> [String; 2] {
    let Some(mut template) = template else { return ["none".into(), "none".into()] };
    let mut render = |tools: Json| {
        template = std::mem::replace(&mut template, ChatTemplate::new("", Path::new("")).unwrap())
            .with("tools", tools);
        let text = template.render(&[Message::new("user", "hi")], true);
        text.unwrap_or_else(|error| error.to_string())
    };
    [render(Json::Null), render(json!([{"name": "f"}]))]
}

/// The tokenizers and templates of a directory, of the GGUF file made of it, of a copy, and of a
/// directory made of the file.
fn everywhere(files: &[(&str, Json)]) -> Vec<(Tokenizer, Option<ChatTemplate>)> {
    let [folder, copied, exported] = [(); 3].map(|()| TempDir::new().unwrap());
    let source = checkpoint(folder.path(), files);
    let (metadata, warnings) = to_gguf(&source);
    assert_eq!(warnings, [""; 0]);
    let directory = |folder: &Path| {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap();
        (Tokenizer::from_checkpoint(&checkpoint).unwrap(), template)
    };
    let companions = Tokenizer::companions(&metadata, None).unwrap();
    for (target, companions) in [(&copied, source.companions().unwrap()), (&exported, companions)] {
        checkpoint(target.path(), &[]);
        for companion in companions {
            let path = target.path().join(&companion.name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, companion.bytes).unwrap();
        }
    }
    let gguf = (Tokenizer::from_gguf(&metadata).unwrap(), ChatTemplate::from_gguf(&metadata).unwrap());
    vec![directory(folder.path()), gguf, directory(copied.path()), directory(exported.path())]
}

/// Checks tokens (id, text, whether it is special), bos, eos, and the ids of a text: all are
/// transformers' 5.24.
#[track_caller]
fn assert_tokens(
    files: &[(&str, Json)],
    tokens: &[(u32, &str, bool)],
    [bos, eos]: [Option<u32>; 2],
    (text, ids): (&str, &[u32]),
) {
    for (index, (tokenizer, _)) in everywhere(files).into_iter().enumerate() {
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (bos, eos), "{index}");
        for &(id, content, special) in tokens {
            assert_eq!(tokenizer.token(id).as_deref(), Some(content), "{index}");
            assert_eq!(tokenizer.is_special(id), special, "{index}: {content}");
            assert_eq!(tokenizer.encode(content, true).unwrap(), [id], "{index}: {content}");
        }
        let next = tokens.iter().map(|(id, ..)| id + 1).max().unwrap_or(NEXT).max(NEXT);
        assert!(tokenizer.token(next).is_none_or(|token| token == format!("[PAD{next}]")), "{index}");
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{index}");
    }
}

#[test]
fn tokens_that_the_settings_alone_declare_are_tokens() {
    let config = json!({
        "bos_token": "<s>",
        "added_tokens_decoder": {"97": token("<x>", true), "96": {"content": "<y>"}, "120": token("<z>", false)},
    });
    // Neither of the other files counts beside `added_tokens_decoder`; an id that would leave a gap
    // is not kept.
    let files = [
        ("tokenizer.json", tokenizer(&[])),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", json!({"bos_token": "<q>"})),
        ("added_tokens.json", json!({"<w>": 98})),
    ];
    let tokens = [(96, "<y>", false), (97, "<x>", true), (98, "<z>", false), (99, "<s>", true)];
    assert_tokens(&files, &tokens, [Some(99), None], ("<x><y><z>a a", &[97, 96, 98, 64, 95]));
}

#[test]
fn older_files_declare_tokens_too() {
    let files = [
        ("tokenizer.json", tokenizer(&[added(96, "<s>", false), added(97, "<x>", false)])),
        ("tokenizer_config.json", json!({"bos_token": "<q>", "eos_token": "<e>", "pad_token": "<p>"})),
        (
            "special_tokens_map.json",
            json!({"bos_token": token("<s>", false), "pad_token": null, "additional_special_tokens": ["<x>", "<a>"]}),
        ),
        ("added_tokens.json", json!({"<w>": 99, "<v>": 98, "<e>": 97})),
    ];
    let tokens = [
        (96, "<s>", true),
        (97, "<x>", false),
        (98, "<v>", false),
        (99, "<w>", false),
        (100, "<e>", true),
        (101, "<a>", true),
    ];
    assert_tokens(&files, &tokens, [Some(96), Some(100)], ("<v><p>", &[98, 27, 79, 29]));
}

#[test]
fn a_token_with_a_name_is_found_in_texts() {
    let config = json!({
        "image_token": "<i>", "mask_token": "a", "eos_token": "<e>", "add_bos_token": true,
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": false, "special": true},
        "extra_special_tokens": {"audio_token": "<u>"},
    });
    let files = [("tokenizer.json", tokenizer(&[])), ("tokenizer_config.json", config)];
    let tokens =
        [(64, "a", true), (96, "<s>", true), (97, "<e>", true), (98, "<i>", true), (99, "<u>", true)];
    assert_tokens(&files, &tokens, [Some(96), Some(97)], ("a a", &[64, 94, 64]));
    // The file of names may be the only one.
    let files = [
        ("tokenizer.json", tokenizer(&[added(96, "<s>", true)])),
        ("special_tokens_map.json", json!({"bos_token": "<s>"})),
    ];
    assert_tokens(&files, &[(96, "<s>", true)], [Some(96), None], ("a a", &[64, 95]));
    let config = json!({"extra_special_tokens": ["<b>"], "additional_special_tokens": ["<c>"]});
    let files = [("tokenizer.json", tokenizer(&[])), ("tokenizer_config.json", config)];
    assert_tokens(&files, &[(96, "<b>", true)], [None, None], ("a a", &[64, 95]));
}

#[test]
fn what_gguf_has_no_place_for_is_said() {
    let folder = TempDir::new().unwrap();
    let many: Vec<String> = (0..32).map(|i| format!("<{i}>")).collect();
    let mut tokenizer = tokenizer(&[]);
    tokenizer["normalizer"] = json!({"type": "NFC"});
    let config = json!({"extra_special_tokens": many, "pad_token": "<p>"});
    let source = checkpoint(
        folder.path(),
        &[("tokenizer.json", tokenizer.clone()), ("tokenizer_config.json", config)],
    );
    let (metadata, warnings) = to_gguf(&source);
    let file = folder.path().join("tokenizer.json");
    let file = file.display();
    let nfc = "normalizer NFC has no counterpart in GGUF: left out, so text that is not in Unicode's NFC gets other tokens";
    let embedding = "token <31> has id 128, but the model has 128 embeddings: left out";
    assert_eq!(warnings, [format!("{file}: {nfc}"), format!("{file}: {embedding}")]);
    assert_eq!(Tokenizer::from_gguf(&metadata).unwrap().id("<30>"), Some(127));
    tokenizer["normalizer"] = json!({"type": "Lowercase"});
    let source = checkpoint(folder.path(), &[("tokenizer.json", tokenizer)]);
    let message = Tokenizer::gguf_entries(&source, EMBEDDINGS).unwrap_err().to_string();
    assert!(message.ends_with("normalizer \"Lowercase\" has no counterpart in GGUF"), "{message}");
}

#[test]
fn settings_that_name_no_tokens_are_refused() {
    let cases = [
        ("tokenizer_config.json", json!({"bos_token": 3}), "bos_token should be a token, but is 3"),
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": []}),
            "an object of ids and tokens, but is an array",
        ),
        ("tokenizer_config.json", json!({"added_tokens_decoder": {"x": {}}}), "ids as keys, but is \"x\""),
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": {"96": "<x>"}}),
            "96 should be an object with a token's content",
        ),
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": {"96": {"content": "<x>", "special": 1}}}),
            "special of <x> should be a bool, but is 1",
        ),
        (
            "tokenizer_config.json",
            json!({"extra_special_tokens": "<x>"}),
            "extra_special_tokens should be a list of tokens",
        ),
        ("tokenizer_config.json", json!([]), "the whole should be an object, but is an array"),
        ("special_tokens_map.json", json!({"eos_token": []}), "eos_token should be a token, but is an array"),
        ("added_tokens.json", json!({"<x>": "96"}), "<x> should be a token's id, but is \"96\""),
        ("added_tokens.json", json!({"x".repeat(5000): 96}), "has 5000 bytes; at most 4096 are supported"),
    ];
    for (name, content, want) in cases {
        let folder = TempDir::new().unwrap();
        let checkpoint = checkpoint(folder.path(), &[("tokenizer.json", tokenizer(&[])), (name, content)]);
        let message = Tokenizer::from_checkpoint(&checkpoint).unwrap_err().to_string();
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
}

/// llama.cpp knows some by their spelling, and has two more names.
#[test]
fn tokens_that_end_a_text_have_names_in_gguf() {
    let own = [
        added(96, "<|im_end|>", true),
        added(97, "<a>", true),
        added(98, "<b>", true),
        added(99, "<c>", true),
    ];
    let made = |ids: Json| {
        let folder = TempDir::new().unwrap();
        let settings = ("generation_config.json", json!({"eos_token_id": ids}));
        let config = ("tokenizer_config.json", json!({"eos_token": "<|im_end|>"}));
        to_gguf(&checkpoint(folder.path(), &[("tokenizer.json", tokenizer(&own)), config, settings]))
    };
    let (metadata, warnings) = made(json!([96, 97, 98]));
    assert_eq!(warnings, [""; 0]);
    assert_eq!(Tokenizer::from_gguf(&metadata).unwrap().eos_ids(), [96, 97, 98]);
    let (_, warnings) = made(json!([99, 97, 98, 200]));
    assert!(
        warnings.len() == 1
            && warnings[0].ends_with("token 99 ends a text, but GGUF has no name left for it: left out")
    );
}

fn list(names: &[&str]) -> Json {
    names.iter().map(|name| json!({"name": name, "template": format!("{name}{{{{ tools }}}}")})).collect()
}

/// Checks what a chat without and with tools is rendered to: transformers' 5.24.
#[track_caller]
fn assert_templates(files: &[(&str, Json)], want: [&str; 2]) {
    let files: Vec<_> =
        [("tokenizer.json", tokenizer(&[]))].into_iter().chain(files.iter().cloned()).collect();
    for (index, (_, template)) in everywhere(&files).into_iter().enumerate() {
        let got = rendered(template);
        for (got, want) in got.iter().zip(want) {
            assert!(got == want || want.starts_with("error") && got.contains(&want[7..]), "{index}: {got}");
        }
    }
}

#[test]
fn one_of_the_templates_runs_and_all_are_written() {
    let config = |template: Json| ("tokenizer_config.json", json!({"chat_template": template}));
    let [file, json] =
        [("chat_template.jinja", "FILE".into()), ("chat_template.json", json!({"chat_template": "JSON"}))];
    let folder = |name: &'static str| (name, Json::from("FOLDER"));
    let tool_use = folder("additional_chat_templates/tool_use.jinja");
    assert_templates(&[], ["none", "none"]);
    assert_templates(&[config(Json::Null), json.clone()], ["JSON", "JSON"]);
    assert_templates(&[config("CONFIG".into()), json.clone()], ["CONFIG", "CONFIG"]);
    assert_templates(&[config("CONFIG".into()), json, file.clone()], ["FILE", "FILE"]);
    // Without tokenizer_config.json, as well.
    assert_templates(std::slice::from_ref(&file), ["FILE", "FILE"]);
    let tools = "[{'name': 'f'}]";
    let named = config(list(&["rag", "tool_use", "default"]));
    assert_templates(std::slice::from_ref(&named), ["defaultNone", &format!("tool_use{tools}")]);
    assert_templates(&[config(list(&["default", "rag"]))], ["defaultNone", &format!("default{tools}")]);
    assert_templates(&[named.clone(), file.clone(), tool_use.clone()], ["FILE", "FOLDER"]);
    assert_templates(&[named.clone(), file.clone()], ["FILE", "FILE"]);
    assert_templates(
        &[named, tool_use],
        ["error: there is no template called default, only tool_use", "FOLDER"],
    );
    let own = folder("additional_chat_templates/default.jinja");
    assert_templates(&[file, own], ["FOLDER", "FOLDER"]);
    let object = json!({"default": "D", "tool_use": "T"});
    assert_templates(&[config(object)], ["D", "T"]);
}

#[test]
fn templates_see_all_special_tokens() {
    let template = "{{ bos_token }}{{ image_token }}{{ pad_token is defined }}";
    let config = json!({"image_token": "<i>", "bos_token": token("<q>", true), "chat_template": template});
    let map = ("special_tokens_map.json", json!({"bos_token": "<s>"}));
    let folder = TempDir::new().unwrap();
    let files = [("tokenizer.json", tokenizer(&[])), ("tokenizer_config.json", config), map];
    let checkpoint = checkpoint(folder.path(), &files);
    let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap();
    assert_eq!(rendered(template)[0], "<s><i>False");
}

#[test]
fn names_of_templates_are_checked() {
    let refused = |files: &[(&str, Json)]| {
        let folder = TempDir::new().unwrap();
        let checkpoint = checkpoint(folder.path(), files);
        ChatTemplate::from_checkpoint(&checkpoint).unwrap_err().to_string()
    };
    for name in ["", "../x", "a/b", ".x", "a\u{1b}[2J", &"x".repeat(65)] {
        let message = refused(&[("tokenizer_config.json", json!({"chat_template": list(&[name])}))]);
        assert!(message.contains("is no name of a template"), "{message}");
    }
    let many: Vec<String> = (0..65).map(|i| format!("t{i}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let message = refused(&[("tokenizer_config.json", json!({"chat_template": list(&many)}))]);
    assert!(message.ends_with("it has more than 64 templates"), "{message}");
    for wrong in [json!(3), json!([{"name": "default"}]), json!({"default": 3})] {
        let message = refused(&[("tokenizer_config.json", json!({"chat_template": wrong}))]);
        assert!(
            message.contains("chat_template should be a template, or a list of templates with names"),
            "{message}"
        );
    }
    // Windows has no such names.
    if cfg!(unix) {
        let message = refused(&[("additional_chat_templates/\u{1b}.jinja", "x".into())]);
        assert!(message.contains("is no name of a template"), "{message}");
    }
    // Two names that are one in GGUF.
    let folder = TempDir::new().unwrap();
    let config = json!({"chat_template": list(&["default", "tool-use"])});
    let source =
        checkpoint(folder.path(), &[("tokenizer.json", tokenizer(&[])), ("tokenizer_config.json", config)]);
    let message = Tokenizer::gguf_entries(&source, EMBEDDINGS).unwrap_err().to_string();
    assert!(message.contains("template tool-use would be called tool_use in GGUF"), "{message}");
}

#[test]
fn a_template_that_no_chat_needs_may_be_broken() {
    let folder = TempDir::new().unwrap();
    let config = json!({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "{% if %}"}]});
    let broken = checkpoint(folder.path(), &[("tokenizer_config.json", config)]);
    let [plain, tools] = rendered(ChatTemplate::from_checkpoint(&broken).unwrap());
    assert_eq!(plain, "D");
    assert!(tools.contains("tokenizer_config.json: chat template: "), "{tools}");
    let config = json!({"chat_template": [{"name": "default", "template": "{% if %}"}]});
    let broken = checkpoint(folder.path(), &[("tokenizer_config.json", config)]);
    assert!(ChatTemplate::from_checkpoint(&broken).is_err());
}
