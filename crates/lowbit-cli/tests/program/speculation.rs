//! Guesses change the time that a reply takes, and nothing else.

use crate::support::{json, lowbit, refusal, with_input};
use serde_json::Value;

const DEMO: [&str; 5] = ["generate", "-m", "models/demo-4bit", "--device", "cpu"];

/// A prompt that repeats itself.
const PROMPT: &str =
    "A list is a vector. A vector is a slice. A list is a vector. A vector is a slice. A list is a";

fn generate(more: &[&str]) -> Value {
    let arguments = [&DEMO[..], &["-p", PROMPT, "-n", "40", "--json"], more].concat();
    json(&lowbit(&arguments).output().unwrap())
}

fn refused(arguments: &[&str]) -> String {
    refusal(lowbit(&[&DEMO[..], &["-p", "x"], arguments].concat()).output().unwrap())
}

#[test]
fn replies_are_the_same_with_and_without() {
    for sampling in [&["--temp", "0"][..], &["--temp", "0.9", "--seed", "4", "--repetition-penalty", "1.1"]] {
        let want = generate(sampling);
        assert!(want.get("drafted_tokens").is_none() && want.get("accepted_tokens").is_none());
        for flags in [
            &["--speculate", "ngram"][..],
            &["--draft-model", "models/demo-4bit"],
            &["-md", "models/demo-4bit", "--spec-draft-n-max", "2", "--draft-min", "2"],
        ] {
            let got = generate(&[sampling, flags].concat());
            for field in ["tokens", "text", "prompt_tokens", "finish_reason", "seed"] {
                assert_eq!(got[field], want[field], "{field} with {flags:?}");
            }
            let [drafted, accepted] =
                ["drafted_tokens", "accepted_tokens"].map(|field| got[field].as_u64().unwrap());
            assert!(accepted <= drafted, "{accepted} of {drafted}");
            // The very model guesses what is greedily taken.
            let is_greedy = sampling[1] == "0";
            assert!(drafted > 0 || !is_greedy && flags[0] == "--speculate", "{drafted} with {flags:?}");
            let is_sure = is_greedy && flags[0] != "--speculate";
            assert!(!is_sure || accepted > 10, "{accepted} of {drafted} with {flags:?}");
        }
    }
}

#[test]
fn a_chat_is_the_same_with_and_without() {
    let chat = |flags: &[&str]| {
        let demo = ["chat", "-m", "models/demo-4bit", "--device", "cpu", "--json", "-n", "12", "--temp", "0"];
        let command = lowbit(&[&demo[..], flags].concat());
        let output = with_input(command, b"one two three one two\nthree one two three one\n");
        let lines = String::from_utf8(output.stdout).unwrap();
        let replies = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        replies.map(|reply| (reply["tokens"].clone(), reply["cached_tokens"].clone())).collect::<Vec<_>>()
    };
    let want = chat(&[]);
    assert_eq!(want.len(), 2);
    assert_eq!(chat(&["--speculate", "ngram"]), want);
}

#[test]
fn flags_that_do_not_fit_are_refused() {
    let error = refused(&["--draft-max", "3"]);
    assert!(error.contains("--draft-max goes with --speculate or --draft-model"), "{error}");
    let error = refused(&["--speculate", "mtp"]);
    assert!(error.contains("models/demo-4bit: there is no layer that predicts further tokens"), "{error}");
    let error = refused(&["--draft-model", "tests/vectors/models/qwen3"]);
    let want = "a draft model has the model's tokens";
    assert!(
        error.contains("--draft-model tests/vectors/models/qwen3: token ") && error.contains(want),
        "{error}"
    );
    for both in [
        &["-p", "x", "--speculate", "ngram", "--draft-model", "models/demo-4bit"][..],
        &["--prompts", "x.jsonl", "--json", "--speculate", "ngram"],
    ] {
        let output = lowbit(&[&DEMO[..], both].concat()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains("cannot be used with"), "{error}");
    }
    let share = ["bench", "-m", "models/demo-4bit", "--draft-accept", "1.5"];
    let error = refusal(lowbit(&share).output().unwrap());
    assert!(error.contains("--draft-accept is 1.5: a share from 0 to 1 is wanted"), "{error}");
}
