//! Standard output and standard error that take nothing: closed pipes, full disks, closed
//! descriptors.
#![cfg(unix)]

use crate::support::{lowbit, root};
use std::fs::File;
use std::process::{Command, Stdio};

/// One run of every command, and of help, versions and complaints.
fn runs() -> Vec<(Vec<String>, i32)> {
    let folder = std::env::temp_dir().join(format!("lowbit-outputs-{}", std::process::id()));
    let text = folder.with_extension("txt");
    let eval = std::fs::read_to_string(root().join("models/demo/eval.txt")).unwrap();
    std::fs::write(&text, eval.chars().take(500).collect::<String>()).unwrap();
    let text = text.to_str().unwrap().to_string();
    let runs: [(&[&str], i32); 16] = [
        (&["generate", "-p", "A vector is", "-n", "3"], 0),
        (&["generate", "-p", "A vector is", "-n", "3", "--json"], 0),
        (&["generate", "-p", "A vector is", "-n", "-1", "-fa", "on", "-c", "20"], 0),
        (&["chat", "-n", "3", "--temp", "0"], 0),
        (&["chat", "-n", "3", "--json"], 0),
        (&["inspect"], 0),
        (&["inspect", "--json"], 0),
        (&["perplexity", "--file", &text], 0),
        (&["perplexity", "--file", &text, "--json"], 0),
        (&["bench", "rms_norm", "M=1"], 0),
        (&["--help"], 0),
        (&["generate", "--help"], 0),
        (&["--version"], 0),
        (&["generate", "--no-such-flag"], 2),
        (&["nothing"], 2),
        (&["generate", "-p", "x", "--model", "./none"], 1),
    ];
    runs.iter().map(|(run, code)| (run.iter().map(|word| word.to_string()).collect(), *code)).collect()
}

fn command(run: &[String]) -> Command {
    let mut command = lowbit(&run.iter().map(String::as_str).collect::<Vec<_>>());
    command.stdin(File::open(root().join("rustfmt.toml")).unwrap());
    command
}

/// The writing end of a pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Runs with one output as `stdio` makes it, the other read; returns the exit code and what was
/// read.
#[track_caller]
fn status(run: &[String], stdio: fn() -> Stdio, on_stdout: bool) -> (Option<i32>, String) {
    let mut command = command(run);
    if on_stdout {
        command.stdout(stdio()).stderr(Stdio::piped());
    } else {
        command.stderr(stdio()).stdout(Stdio::piped());
    }
    let output = command.output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(!text.contains("panicked"), "{run:?}: {text}");
    (output.status.code(), text)
}

#[test]
fn a_closed_pipe_ends_quietly() {
    for (run, code) in runs() {
        let (got, said) = status(&run, closed_pipe, true);
        assert_eq!(got, Some(code), "{run:?}: {said}");
        assert_eq!(said.contains("error"), code != 0, "{run:?}: {said}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    for (run, code) in runs() {
        let (got, said) = status(&run, full, true);
        // Complaints go to standard error.
        let want = if code == 0 { 1 } else { code };
        assert_eq!(got, Some(want), "{run:?}: {said}");
        assert!(code != 0 || said.contains("error: standard output: No space left"), "{run:?}: {said}");
    }
}

#[test]
fn figures_and_complaints_that_nobody_takes_change_nothing() {
    for (run, code) in runs() {
        let is_timed = run[0] == "bench" || run.iter().any(|word| word == "--json");
        let plain = if is_timed { vec![] } else { command(&run).output().unwrap().stdout };
        // It takes seconds, and prints nothing there.
        let kinds = if run[0] == "bench" { 1 } else { 2 };
        for stdio in [closed_pipe as fn() -> Stdio, full].into_iter().take(kinds) {
            let (got, said) = status(&run, stdio, false);
            assert_eq!(got, Some(code), "{run:?}: {said}");
            assert!(is_timed || said.as_bytes() == plain, "{run:?}: {said}");
        }
    }
}

#[test]
fn closed_descriptors_are_no_panic() {
    for (run, code) in runs() {
        let is_slow = run[0] == "bench";
        let closed = [">&- 2>&-", ">&-", "2>&-", "<&-"];
        for close in &closed[..if is_slow { 1 } else { 4 }] {
            let program = env!("CARGO_BIN_EXE_lowbit");
            let mut shell = Command::new("sh");
            shell
                .current_dir(root())
                .args(["-c", &format!("exec \"$0\" \"$@\" {close}"), program])
                .args(&run);
            let output = shell.stdin(Stdio::null()).output().unwrap();
            assert_eq!(output.status.code(), Some(code), "{run:?} {close}");
            assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"), "{run:?} {close}");
        }
    }
}

#[test]
fn a_reader_that_stops_early_ends_the_run() {
    for arguments in ["inspect", "inspect --json", "--help", "generate -p x -n 100000 --ignore-eos"] {
        let script = format!("set -- {arguments}; \"$0\" \"$@\" | head -c 10; exit ${{PIPESTATUS[0]}}");
        let mut shell = Command::new("bash");
        let output = shell.current_dir(root()).args(["-c", &script, env!("CARGO_BIN_EXE_lowbit")]).output();
        let output = output.unwrap();
        assert_eq!(output.stdout.len(), 10, "{arguments}");
        assert_eq!(output.status.code(), Some(0), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        let errors = String::from_utf8_lossy(&output.stderr);
        let is_quiet = errors.lines().all(|line| line == "sampling: greedy");
        assert!(is_quiet, "{arguments}: {errors}");
    }
}
