//! `generate --prompts`: each reply is the one that its prompt gets alone.

use crate::support::{json as object, lowbit, refusal};
use serde_json::{Value, json};

const FLAGS: [&str; 7] = ["-m", "models/demo-4bit", "--device", "cpu", "--exact", "--json", "--logprobs=2"];

fn generate(flags: &[&str], more: &[&str]) -> std::process::Output {
    lowbit(&[&["generate"], &FLAGS[..], flags, more].concat()).output().unwrap()
}

#[test]
fn prompts_side_by_side_are_answered_as_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    let prompts = ["A vector is", "The function returns a", "To sort"];
    let lines: Vec<String> = prompts.iter().map(|prompt| json!({ "prompt": prompt }).to_string()).collect();
    std::fs::write(&file, lines.join("\n\n") + "\n").unwrap();
    // Greedy and cut; drawn, with a text that ends it.
    let drawn = ["-n", "24", "--temp", "0.9", "--seed", "3", "--stop", " the"];
    for flags in [&["-n", "12", "--temp", "0"][..], &drawn] {
        let output = generate(flags, &["--prompts", file.to_str().unwrap()]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        let replies: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(replies.len(), prompts.len());
        for (index, (reply, prompt)) in replies.iter().zip(prompts).enumerate() {
            let alone = object(&generate(flags, &["-p", prompt]));
            assert_eq!(reply["index"], index);
            for field in ["schema", "prompt_tokens", "cached_tokens", "tokens", "text", "content", "seed"] {
                assert_eq!(reply[field], alone[field], "{field} of {prompt}");
            }
            assert_eq!(reply["finish_reason"], alone["finish_reason"], "{prompt}");
            let scores = |reply: &Value| reply["logprobs"].as_array().unwrap().len();
            assert_eq!(scores(reply), scores(&alone));
        }
    }
}

#[test]
fn wrong_files_are_refused_by_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    let refused = |content: &str| {
        std::fs::write(&file, content).unwrap();
        refusal(generate(&[], &["--prompts", file.to_str().unwrap()]))
    };
    let error = refused("{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n");
    assert!(error.contains("line 2: unknown field `text`, expected `prompt`"), "{error}");
    let error = refused("\n");
    assert!(error.ends_with("prompts.jsonl: there are no prompts\n"), "{error}");
    let error = refused("{\"prompt\": \"\"}\n");
    assert!(error.contains("prompt 0: there are no tokens to start from"), "{error}");
}
