//! Shared by the program's tests.
#![allow(dead_code, reason = "each test file uses a part")]

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

pub fn lowbit(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowbit"));
    command.current_dir(root()).args(arguments).stdin(Stdio::null());
    command
}

/// `program` with the default of each signal that the tests send: a test run in the background may
/// have been started with some of them ignored, which programs inherit.
pub fn with_signals(program: &str) -> Command {
    if cfg!(target_os = "linux") {
        let mut command = Command::new("env");
        command.args(["--default-signal=INT,TERM,HUP", program]);
        return command;
    }
    Command::new(program)
}

pub fn with_input(mut command: Command, input: &[u8]) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

#[track_caller]
pub fn json(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The message of a run that must fail, without a panic and without output.
#[track_caller]
pub fn refusal(output: Output) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: ") && !error.contains("panicked"), "{error}");
    assert!(output.stdout.is_empty());
    error
}

/// A copy of a tiny checkpoint with a chat template in Qwen's style.
pub fn with_template(folder: &Path) {
    let source = root().join("tests/vectors/models/qwen3");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), folder.join(name)).unwrap();
    }
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}\
                    {% if add_generation_prompt %}<assistant>{% endif %}";
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
}
