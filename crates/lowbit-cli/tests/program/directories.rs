//! Tokens and templates of a model's directory, of the GGUF file that is made of it, and in texts
//! that are scored and learned.

use crate::support::{json, lowbit, refusal, with_template};
use serde_json::{Value, json};
use std::path::Path;

/// Changes a JSON file.
fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut content = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    change(&mut content);
    std::fs::write(file, content.to_string()).unwrap();
}

/// The tokens that a chat's prompt becomes.
#[track_caller]
fn prompt(model: &Path, arguments: &[&str]) -> Vec<u64> {
    let line = ["generate", "--model", model.to_str().unwrap(), "-n", "1", "--ignore-eos", "--json"];
    let reply = json(&lowbit(&[&line[..], arguments].concat()).output().unwrap());
    serde_json::from_value(reply["prompt_tokens"].clone()).unwrap()
}

#[track_caller]
fn convert(model: &Path, output: &Path, arguments: &[&str]) -> String {
    let [model, output] = [model, output].map(|path| path.to_str().unwrap());
    let line = [&["quantize", "-m", model, "-o", output], arguments].concat();
    let done = lowbit(&line).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success(), "{said}");
    said
}

/// Conversions of `model`: GGUF, MLX, and MLX by way of GGUF.
fn conversions(model: &Path, folder: &Path) -> [std::path::PathBuf; 3] {
    let [gguf, mlx, both] = ["model.gguf", "mlx", "both"].map(|name| folder.join(name));
    convert(model, &gguf, &["--format", "F16"]);
    convert(model, &mlx, &["--bits", "8", "--group-size", "32"]);
    convert(&gguf, &both, &["--bits", "8", "--group-size", "32"]);
    [gguf, mlx, both]
}

#[test]
fn tokens_and_templates_stay_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    with_template(&model);
    // The vocabulary has 260 tokens; the model has more embeddings.
    edit(&model.join("tokenizer_config.json"), |config| {
        let token = |content: &str| json!({"content": content, "normalized": false, "special": true});
        config["added_tokens_decoder"] = json!({"259": token("<|endoftext|>"), "260": token("<user>")});
        config["chat_template"] = "other".into();
    });
    std::fs::create_dir(model.join("additional_chat_templates")).unwrap();
    std::fs::write(model.join("additional_chat_templates/tool_use.jinja"), "{{ tools[0].name }}<user>")
        .unwrap();
    let tools = folder.path().join("tools.json");
    std::fs::write(&tools, r#"[{"name": "f"}]"#).unwrap();
    let tools = ["-p", "hi", "--tools", tools.to_str().unwrap()];
    let [plain, called] = [prompt(&model, &["-p", "hi"]), prompt(&model, &tools)];
    assert_eq!(plain[0], 260);
    assert_eq!(called, [69, 260]);
    for made in conversions(&model, folder.path()) {
        assert_eq!(prompt(&made, &["-p", "hi"]), plain, "{}", made.display());
        assert_eq!(prompt(&made, &tools), called, "{}", made.display());
        let facts =
            json(&lowbit(&["inspect", "--model", made.to_str().unwrap(), "--json"]).output().unwrap());
        assert_eq!(facts["chat_templates"], json!(["default", "tool_use"]), "{}", made.display());
    }
    assert!(folder.path().join("mlx/additional_chat_templates/tool_use.jinja").exists());
}

/// As llama.cpp's server and transformers have it.
#[test]
fn a_gguf_chat_begins_with_bos_and_a_directorys_as_its_template_says() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    with_template(&model);
    edit(&model.join("tokenizer_config.json"), |config| config["bos_token"] = "<|endoftext|>".into());
    edit(&model.join("tokenizer.json"), |tokenizer| {
        let bos = json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [259], "tokens": ["<|endoftext|>"]}},
        });
    });
    let [gguf, both] = ["model.gguf", "both"].map(|name| folder.path().join(name));
    let said = convert(&model, &gguf, &["--format", "F16"]);
    assert!(said.contains("GGUF chats begin with <|endoftext|>, as texts do"), "{said}");
    let chat = prompt(&model, &["-p", "hi"]);
    assert_eq!(prompt(&gguf, &["-p", "hi"]), [&[259][..], &chat].concat());
    // Chats of a directory made from the file also begin with bos: in a directory, only the
    // template writes it.
    convert(&gguf, &both, &["--bits", "8", "--group-size", "32"]);
    assert_eq!(prompt(&both, &["-p", "hi"]), prompt(&gguf, &["-p", "hi"]));
    let text = ["-p", "hi", "--ignore-chat-template"];
    assert_eq!(prompt(&gguf, &text), prompt(&model, &text));
    // One that writes bos itself makes the same of both.
    let template = std::fs::read_to_string(model.join("chat_template.jinja")).unwrap();
    std::fs::write(model.join("chat_template.jinja"), format!("{{{{ bos_token }}}}{template}")).unwrap();
    let said = convert(&model, &gguf, &["--format", "F16", "--force"]);
    assert!(!said.contains("chats begin"), "{said}");
    assert_eq!(prompt(&model, &["-p", "hi"]), [&[259][..], &chat].concat());
    assert_eq!(prompt(&gguf, &["-p", "hi"]), prompt(&model, &["-p", "hi"]));
}

#[test]
fn a_normalizer_that_gguf_has_no_place_for_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    with_template(&model);
    edit(&model.join("tokenizer.json"), |tokenizer| tokenizer["normalizer"] = json!({"type": "NFC"}));
    let said = convert(&model, &folder.path().join("model.gguf"), &["--format", "F16"]);
    assert!(
        said.contains("warning: ") && said.contains("normalizer NFC has no counterpart in GGUF: left out"),
        "{said}"
    );
}

/// By llama.cpp's rule a special token that is spelled in the text is text.
#[test]
fn special_tokens_in_a_scored_text_are_text_by_llama_cpps_rule() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let scored = |text: &str, score: &str| {
        std::fs::write(&file, text).unwrap();
        let line = [
            "perplexity",
            "-m",
            "tests/vectors/models/qwen3",
            "-f",
            file.to_str().unwrap(),
            "-c",
            "8",
            "--json",
        ];
        let output = lowbit(&[&line[..], &["--score", score]].concat()).output().unwrap();
        json(&output)["tokens"].as_u64().unwrap()
    };
    // A token each but for the special one, which is a token or 13.
    let text = "abcdefg<|endoftext|>hijklmn";
    assert_eq!(scored(text, "all"), 15 - 2);
    // Three whole windows of 8, and of each the last 3 tokens.
    assert_eq!(scored(text, "second-half"), 9);
}

/// Editors' marks and line ends are no part of a prompt; lines to learn from have tools, as in
/// mlx-lm.
#[test]
fn what_files_hold_is_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    with_template(&model);
    let want = prompt(&model, &["-p", "hi"]);
    let file = folder.path().join("text.txt");
    for text in ["hi", "hi\n", "hi\r\n", "\u{feff}hi\r\n"] {
        std::fs::write(&file, text).unwrap();
        assert_eq!(prompt(&model, &["-f", file.to_str().unwrap()]), want, "{text:?}");
    }
    let template =
        "{% if tools %}{{ raise_exception('tools: ' ~ (tools | tojson)) }}{% endif %}{{ messages }}";
    std::fs::write(model.join("chat_template.jinja"), template).unwrap();
    let [data, new] = ["data.jsonl", "new"].map(|name| folder.path().join(name));
    let plain = r#"{"messages": [{"role": "user", "content": "7"}], "tools": null}"#;
    std::fs::write(&data, format!("\u{feff}{plain}\n{}\n", plain.replace("null", r#"[{"name": "f"}]"#)))
        .unwrap();
    let [model, new, data] = [&model, &new, &data].map(|path| path.to_str().unwrap());
    let line = ["quantize", "-m", model, "-o", new, "--bits", "4", "--group-size", "32", "--learn", "scales"];
    let message = refusal(lowbit(&[&line[..], &["--data", data, "--steps", "1"]].concat()).output().unwrap());
    assert!(
        message.contains("data.jsonl: line 2: ") && message.contains(r#"tools: [{"name": "f"}]"#),
        "{message}"
    );
}
