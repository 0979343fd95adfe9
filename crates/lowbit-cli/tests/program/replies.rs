//! The parts of a reply, and how a chat goes on from it.

use crate::bigram::Bigram;
use crate::support::{json, lowbit, with_input};
use serde_json::{Value, json};
use tempfile::TempDir;

const TURNS: &str = "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools|tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}\
                     {% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content.split('[/THINK]')[-1] }}</s>\
                     {% endif %}{% endfor %}";

fn model(bigram: &Bigram<'_>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    bigram.write(folder.path());
    folder
}

fn calls(next: &'static [(&'static str, &'static str)]) -> TempDir {
    let added = &[
        "</s>",
        "<s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "+{\"name\": \"f\"}",
    ];
    model(&Bigram { added, next, template: TURNS, ..Bigram::default() })
}

/// The replies of a chat.
fn chat(folder: &TempDir, lines: &str) -> Vec<Value> {
    let output =
        with_input(lowbit(&["chat", "-m", folder.path().to_str().unwrap(), "--json"]), lines.as_bytes());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Mistral's marker is a special token, and no text that a template could render again.
#[test]
fn special_tokens_stay_in_replies() {
    let folder =
        calls(&[("[/INST]", "[TOOL_CALLS]"), ("[TOOL_CALLS]", "["), ("[", "{"), ("{", "}"), ("}", "]")]);
    let path = folder.path().to_str().unwrap();
    let tools = folder.path().join("tools.json");
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]);
    std::fs::write(&tools, tool.to_string()).unwrap();
    let line = ["generate", "-m", path, "-p", "hi", "--tools", tools.to_str().unwrap()];
    let told = |more: &[&str]| {
        let output = lowbit(&[&line[..], more].concat()).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(told(&[]), "[TOOL_CALLS][{}]\n", "as mlx-lm prints it");
    assert_eq!(told(&["--special"]), "[TOOL_CALLS][{}]</s>\n", "as llama.cpp prints it");
    let reply = json(&lowbit(&[&line[..], &["--json"]].concat()).output().unwrap());
    // This is no call.
    assert_eq!((&reply["content"], &reply["tool_calls"]), (&json!("[TOOL_CALLS][{}]"), &json!([])));

    let replies = chat(&folder, "one\ntwo\nthree\n");
    let marker = 256 + 4;
    let mut read = 0;
    for (reply, said) in replies.iter().zip(["one", "two", "three"]) {
        assert_eq!(reply["tokens"][0], marker);
        assert_eq!(reply["cached_tokens"], read, "what was drawn stays");
        let begun = u64::from(read == 0);
        let new = reply["prompt_tokens"].as_array().unwrap().len() as u64;
        assert_eq!(new, begun + 2 + said.len() as u64, "the new message alone is read");
        read += new + reply["tokens"].as_array().unwrap().len() as u64 + 1;
    }
}

#[test]
fn calls_are_apart_from_the_text() {
    let folder = calls(&[("[/INST]", "[TOOL_CALLS]"), ("[TOOL_CALLS]", "f"), ("f", "{"), ("{", "}")]);
    let replies = chat(&folder, "one\n");
    let call = json!({"type": "function", "id": "call00001", "function": {"name": "f", "arguments": "{}"}});
    assert_eq!(replies[0]["tool_calls"], json!([call]));
    assert_eq!((&replies[0]["content"], &replies[0]["text"]), (&json!(""), &json!("[TOOL_CALLS]f{}")));
}

#[test]
fn reasoning_is_apart_and_dropped_in_the_next_turn() {
    let folder = model(&Bigram {
        added: &["</s>", "<s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"],
        next: &[("[/INST]", "[THINK]"), ("[THINK]", "r"), ("r", "[/THINK]"), ("[/THINK]", "A")],
        template: TURNS,
        ..Bigram::default()
    });
    let replies = chat(&folder, "one\ntwo\nthree\n");
    for reply in &replies {
        assert_eq!((&reply["reasoning"], &reply["content"]), (&json!("r"), &json!("A")));
        assert_eq!(reply["text"], "[THINK]r[/THINK]A");
    }
    // The answer is read again without what was thought before it; all before that stays.
    let [inst, inst_end, eos] = [258, 259, 256];
    let a = u32::from(b'A');
    let prompt = |said: &str| {
        let said = said.bytes().map(u32::from);
        json!([a, eos, inst].into_iter().chain(said).chain([inst_end]).collect::<Vec<_>>())
    };
    assert_eq!((&replies[1]["prompt_tokens"], &replies[1]["cached_tokens"]), (&prompt("two"), &json!(6)));
    assert_eq!((&replies[2]["prompt_tokens"], &replies[2]["cached_tokens"]), (&prompt("three"), &json!(13)));
}

/// A stop text ends the reply wherever it is spelled, also in reasoning and across a marker.
#[test]
fn stop_texts_cut_what_is_apart() {
    let folder = calls(&[("[/INST]", "[TOOL_CALLS]"), ("[TOOL_CALLS]", "f"), ("f", "{"), ("{", "}")]);
    let path = folder.path().to_str().unwrap();
    for (stop, text) in [("CALLS]f", "[TOOL_"), ("{", "[TOOL_CALLS]f"), ("[TOOL_CALLS]", "")] {
        let line = ["generate", "-m", path, "-p", "hi", "--stop", stop, "--json"];
        let reply = json(&lowbit(&line).output().unwrap());
        assert_eq!((&reply["text"], &reply["content"]), (&json!(text), &json!(text)), "{stop}");
        assert_eq!(reply["finish_reason"], "stop");
        assert_eq!(reply["tool_calls"], json!([]));
    }
}
