//! A mapped file that is cut while it is in use: a process of its own dies of it, and says why.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

const FILE: &str = "LOWBIT_TEST_CUT_FILE";

/// The child's work. (Run as a test, without its variable, it does nothing.)
#[test]
fn child() {
    let Ok(path) = std::env::var(FILE) else { return };
    lowbit_files::report_cut_files().unwrap();
    let file = lowbit_files::safetensors::read(path.as_ref()).unwrap();
    println!("\nmapped");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    if line == "abort\n" {
        let own = std::process::id().to_string();
        // Rust's own handler lets the first one pass.
        for _ in 0..3 {
            Command::new("kill").args(["-BUS", &own]).status().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
    let sum: u64 = file.tensors.iter().flat_map(|view| view.bytes.get()).map(u64::from).sum();
    println!("sum {sum}");
}

fn run(change: impl FnOnce(&std::path::Path) -> &'static str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model\u{1b}[2J.safetensors");
    let header = br#"{"x":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header, &vec![1; 1_000_000]].concat();
    std::fs::write(&path, bytes).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(FILE, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "mapped"));
    let line = change(&path);
    child.stdin.take().unwrap().write_all(line.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_cut_file_is_named_and_ends_the_program() {
    let output = run(|path| {
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(100).unwrap();
        "go\n"
    });
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.starts_with("error: a model file was cut") && error.ends_with("[2J.safetensors\n"),
        "{error}"
    );
    assert!(!error.contains('\u{1b}'), "{error:?}");
}

#[test]
fn a_whole_file_and_other_signals_are_as_before() {
    assert!(run(|_| "go\n").status.success());
    // A signal that no access caused has no address in a map; it ends the process as it always did.
    let output = run(|_| "abort\n");
    assert!(output.status.signal().is_some(), "{output:?}");
}
