//! Sampling of tokens: a checkpoint's recommendations, and flags that override them.

use crate::support::{json, lowbit, root};
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use tempfile::TempDir;

/// The demo model with a generation_config.json.
fn recommending(generation: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in root().join("models/demo-4bit").read_dir().unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let _ = std::fs::remove_file(folder.path().join("generation_config.json"));
    std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
    folder
}

fn generate(model: &Path, flags: &[&str]) -> Output {
    let model = model.to_str().unwrap();
    let line = ["generate", "-m", model, "-p", "A vector is", "-n", "12", "--json"];
    lowbit(&[&line[..], flags].concat()).output().unwrap()
}

/// The line about sampling.
fn said(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = errors.lines().find_map(|line| line.strip_prefix("sampling: "));
    line.unwrap_or_else(|| panic!("no line about sampling in {errors:?}")).to_string()
}

fn tokens(output: &Output) -> Value {
    json(output)["tokens"].clone()
}

#[test]
fn what_a_checkpoint_recommends_is_the_default() {
    let model = recommending(
        r#"{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}"#,
    );
    let run = generate(model.path(), &[]);
    let line = said(&run);
    let want = "temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.05 over 64 tokens (generation_config.json), \
                seed ";
    let seed = line.strip_prefix(want).unwrap_or_else(|| panic!("{line}"));
    assert_eq!(json(&run)["seed"].to_string(), seed);
    assert_ne!(said(&generate(model.path(), &[])), line, "another seed on each run");
    // The seed that was printed gives the same text, also where flags say the rest.
    let demo = root().join("models/demo-4bit");
    let flags =
        ["--temp", "0.7", "--top-k", "20", "--top-p", "0.8", "--repetition-penalty", "1.05", "--seed", seed];
    let spelt = generate(&demo, &flags);
    assert_eq!(tokens(&spelt), tokens(&run));
    let own =
        format!("temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.05 over 64 tokens, seed {seed}");
    assert_eq!(said(&spelt), own);
    assert_eq!(tokens(&generate(model.path(), &["--seed", seed])), tokens(&run));
    let mixed =
        generate(model.path(), &["--temp", "0.2", "--top-k", "0", "--repetition-penalty", "1", "-s", "5"]);
    assert_eq!(said(&mixed), "top-p 0.8 (generation_config.json), temperature 0.2, seed 5");
}

#[test]
fn greedy_where_nothing_else_is_recommended() {
    let demo = root().join("models/demo-4bit");
    let plain = generate(&demo, &[]);
    assert_eq!(said(&plain), "greedy");
    let greedy = recommending(r#"{"do_sample": false, "temperature": 0.7, "typical_p": 0.5}"#);
    let run = generate(greedy.path(), &[]);
    assert_eq!((said(&run), tokens(&run)), ("greedy (generation_config.json)".into(), tokens(&plain)));
    let errors = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(
        errors.contains("generation_config.json also recommends typical_p: lowbit leaves that out"),
        "{errors}"
    );
    let hot = recommending(r#"{"do_sample": true}"#);
    assert!(said(&generate(hot.path(), &[])).starts_with("temperature 1 (generation_config.json), seed "));
    let cold = generate(hot.path(), &["--temp", "0"]);
    assert_eq!((said(&cold), tokens(&cold)), ("greedy".into(), tokens(&plain)));
}

#[test]
fn recommendations_that_cannot_be_computed_are_refused_unless_a_flag_says_otherwise() {
    let model = recommending(r#"{"do_sample": true, "top_p": 1.5}"#);
    let refused = generate(model.path(), &[]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{errors}");
    assert!(errors.contains("generation_config.json") && errors.contains("top_p is 1.5"), "{errors}");
    assert!(said(&generate(model.path(), &["--top-p", "0.9"])).contains("top-p 0.9"));
}

#[test]
fn penalties_biases_and_a_top_p_of_0() {
    let demo = root().join("models/demo-4bit");
    let plain = tokens(&generate(&demo, &[]));
    let biased = |flags: &[&str]| tokens(&generate(&demo, flags));
    assert_eq!(biased(&["--logit-bias", "7+10000"]), serde_json::json!(vec![7; 12]));
    assert_eq!(biased(&["-l", r#"{"7": 10000}"#]), serde_json::json!(vec![7; 12]));
    let first = plain[0].as_u64().unwrap();
    let never = biased(&["-l", &format!("{first}-inf")]);
    assert!(!never.as_array().unwrap().contains(&first.into()), "{never}");
    // Only the likeliest is left, as with llama.cpp and transformers.
    assert_eq!(biased(&["--temp", "2", "--top-p", "0"]), plain);
    let run = generate(&demo, &["--presence-penalty", "1000", "--frequency-penalty", "-0.5", "-n", "30"]);
    assert_eq!(
        said(&run),
        "greedy, presence penalty 1000 over 64 tokens, frequency penalty -0.5 over 64 tokens"
    );
    let mut written: Vec<u64> = serde_json::from_value(tokens(&run)).unwrap();
    let count = written.len();
    written.sort_unstable();
    written.dedup();
    assert_eq!(written.len(), count, "no token comes twice");
    let refused = generate(&demo, &["-l", "99999999+1"]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && errors.contains("99999999"), "{errors}");
}
