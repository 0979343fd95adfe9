//! Files that a stranger made, or that somebody cuts, as the program meets them.
#![cfg(target_os = "linux")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo-4bit").canonicalize().unwrap()
}

fn lowbit(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowbit"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[track_caller]
fn refusal(output: Output) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: ") && !error.contains("panicked"), "{error}");
    assert!(!error.contains('\u{1b}') && error.len() < 9000, "{} bytes: {error:?}", error.len());
    error
}

#[test]
fn weights_that_are_cut_while_they_are_in_use_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let weights = folder.path().join("model.safetensors");
    let mut child = lowbit(&["chat", "--threads", "1", "--model", folder.path().to_str().unwrap()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let maps = format!("/proc/{}/maps", child.id());
    let start = Instant::now();
    while !std::fs::read_to_string(&maps).unwrap_or_default().contains("model.safetensors") {
        assert!(start.elapsed() < Duration::from_secs(60), "the weights were never mapped");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(0).unwrap();
    // It may have read the header only now, and be gone.
    _ = child.stdin.take().unwrap().write_all(b"Hello\n");
    let error = refusal(child.wait_with_output().unwrap());
    assert!(error.contains("a model file was cut") && error.contains("model.safetensors"), "{error}");
}

#[test]
fn texts_are_regular_files() {
    let model = demo();
    for path in ["/dev/zero", "/", "/dev/null"] {
        let error = refusal(
            lowbit(&["perplexity", "--model", model.to_str().unwrap(), "--file", path]).output().unwrap(),
        );
        assert!(error.contains("not a regular file"), "{error}");
    }
}

#[test]
fn inspect_escapes_names_and_counts_what_is_absurd() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"model_type":"llama\u001b[31m","quantization":{"bits":4,"group_size":32}}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let none = |name: &str, shape: &str| {
        format!(r#""{name}":{{"dtype":"U32","shape":{shape},"data_offsets":[0,0]}}"#)
    };
    let header = format!(
        "{{{},{},{},{}}}",
        none("x\\u001b[2J\\u202e", "[0]"),
        none("many", "[0,4000000000,400000000]"),
        none("q.weight", "[0,1000000000000000000]"),
        none("q.scales", "[0]").replace("U32", "F16"),
    );
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let output =
        lowbit(&["inspect", "--tensors", "--model", folder.path().to_str().unwrap()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(r"x\u{1b}[2J\u{202e}") && text.contains(r"llama\u{1b}[31m"), "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
}
