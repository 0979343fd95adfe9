//! The examples run on the bundled demo checkpoints.

#![allow(dead_code, reason = "main of each example")]

#[path = "../../examples/chat.rs"]
mod chat;
#[path = "../../examples/generate.rs"]
mod generate;
#[path = "../../examples/quantize.rs"]
mod quantize;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models");

/// A prompt that the demo continues with more than one token.
const PROMPT: &str = "A vector is";

fn text(out: Vec<u8>) -> String {
    String::from_utf8(out).expect("text")
}

#[test]
fn generate_writes_on_from_the_prompt() {
    let mut out = vec![];
    generate::run(&format!("{MODELS}/demo-4bit"), PROMPT, &mut out).unwrap();
    let out = text(out);
    assert!(out.starts_with(PROMPT) && out.len() > PROMPT.len() + 20, "{out}");
}

#[test]
fn chat_answers_each_line() {
    let mut out = vec![];
    chat::run(&format!("{MODELS}/demo-4bit"), &b"A vector is\nA slice is\n"[..], &mut out).unwrap();
    let out = text(out);
    assert!(out.lines().count() >= 2 && out.len() > 40, "{out}");
}

#[test]
fn quantize_makes_a_checkpoint_that_answers() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("demo-4bit");
    let mut out = vec![];
    quantize::run(format!("{MODELS}/demo").as_ref(), &output, &mut out).unwrap();
    let out = text(out);
    let bits: f64 = out.split(", ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((4.0..5.0).contains(&bits), "{out}");
    assert!(out.contains(PROMPT) && out.len() > 60, "{out}");
    assert!(output.join("model.safetensors").is_file());
}
