//! Replies in a form, by the program: a demo model, which would write anything else, is held to it.

use crate::support::lowbit;
use serde_json::{Value, json};
use std::io::Write;
use std::process::Stdio;

const SCHEMA: &str = r#"{"type": "object", "properties": {"kind": {"enum": ["vector", "slice"]},
    "size": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["kind", "size"], "additionalProperties": false}"#;

fn reply(arguments: &[&str]) -> Value {
    let line = ["generate", "--device", "cpu", "--json", "-p", "What is a vector?"];
    crate::support::json(&lowbit(&[&line, arguments].concat()).output().unwrap())
}

#[track_caller]
fn assert_taken(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let kinds = [json!("vector"), json!("slice")];
    let size = value["size"].as_u64();
    assert!(kinds.contains(&value["kind"]) && size.is_some_and(|size| size < 10), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 2, "{text}");
}

#[test]
fn t19_replies_are_held_to_a_schema() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("schema.json");
    std::fs::write(&file, SCHEMA).unwrap();
    for model in ["models/demo-chat", "models/demo-4bit"] {
        for (temperature, schema) in [("0", SCHEMA), ("1.5", file.to_str().unwrap())] {
            let reply = reply(&["-m", model, "--json-schema", schema, "--temp", temperature]);
            assert_taken(reply["content"].as_str().unwrap());
            assert_eq!(reply["finish_reason"], "stop");
        }
    }
    let cut = reply(&["-m", "models/demo-chat", "--json-schema", SCHEMA, "-n", "3"]);
    assert_eq!(cut["finish_reason"], "length");
}

#[test]
fn replies_are_held_to_grammars() {
    let gbnf = "root ::= \"It is \" (\"a \" | \"no \") [a-z]{3} \".\"";
    let content = reply(&["-m", "models/demo-4bit", "--grammar", gbnf, "--temp", "0"])["content"].clone();
    let text = content.as_str().unwrap();
    assert!(text.starts_with("It is ") && text.ends_with('.') && (12..=13).contains(&text.len()), "{text}");
    let regex =
        reply(&["-m", "models/demo-4bit", "--regex", "[0-9]{4}-[0-9]{2}", "--temp", "0"])["content"].clone();
    let text = regex.as_str().unwrap();
    assert!(text.len() == 7 && text.as_bytes()[4] == b'-', "{text}");
}

/// Prompts side by side, and the turns of a chat.
#[test]
fn every_reply_is_held() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    std::fs::write(&file, "{\"prompt\": \"A vector\"}\n".repeat(5)).unwrap();
    let line = ["generate", "--device", "cpu", "--json", "-m", "models/demo-chat", "--json-schema", SCHEMA];
    let output = lowbit(&[&line[..], &["--prompts", file.to_str().unwrap()]].concat()).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines.lines().count(), 5, "{}", String::from_utf8_lossy(&output.stderr));
    for line in lines.lines() {
        assert_taken(serde_json::from_str::<Value>(line).unwrap()["content"].as_str().unwrap());
    }
    let line = ["chat", "--device", "cpu", "--json", "-m", "models/demo-chat", "--json-schema", SCHEMA];
    let mut chat = lowbit(&line);
    chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut chat = chat.spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"What is a vector?\nAnd a slice?\n").unwrap();
    let output = chat.wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    assert_eq!(lines.lines().count(), 2, "{}", String::from_utf8_lossy(&output.stderr));
    for line in lines.lines() {
        assert_taken(serde_json::from_str::<Value>(line).unwrap()["content"].as_str().unwrap());
    }
}

#[test]
fn forms_that_are_none_are_refused() {
    let error = |arguments: &[&str]| {
        let line = ["generate", "-m", "models/demo-4bit", "--device", "cpu", "-p", "x"];
        let output = lowbit(&[&line, arguments].concat()).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(error(&["--json-schema", "{"]).contains("--json-schema: this is no JSON schema: "));
    assert!(error(&["--json-schema", "none.json"]).contains("none.json: "));
    assert!(error(&["--json-schema", r#"{"not": {}}"#]).contains("schema: Unimplemented keys: [\"not\"]"));
    assert!(error(&["--grammar", "root ::= x"]).contains("grammar: there is no rule x"));
    assert!(error(&["--regex", "("]).contains("regex: "));
    assert!(error(&["--regex", "a", "--grammar", "x"]).contains("cannot be used with"));
    assert!(error(&["--regex", "a", "--ignore-eos"]).contains("cannot be used with"));
}
