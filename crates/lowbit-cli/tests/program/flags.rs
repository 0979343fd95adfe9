//! Every flag of every command with numbers that are too small, too large or none: an answer or a
//! message, at once.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const VALUES: [&str; 9] = [
    "0",
    "-1",
    "2147483648",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "nan",
    "inf",
    "1e308",
];

/// The longest time of a command; most take a fraction of a second.
const LIMIT: Duration = Duration::from_secs(60);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_lowbit")).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

fn commands() -> Vec<String> {
    let help = help(&[]);
    let (_, list) = help.split_once("Commands:\n").unwrap();
    let names =
        list.lines().take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next());
    names.filter(|&name| name != "help").map(str::to_string).collect()
}

/// The flags that take a value.
fn flags(command: &str) -> Vec<String> {
    let flag = |line: &str| {
        let line = line.trim_start();
        let (_, rest) = line.starts_with('-').then(|| line.split_once("--"))??;
        let (name, value) = rest.split_once(' ')?;
        value.starts_with('<').then(|| format!("--{name}"))
    };
    help(&[command]).lines().filter_map(flag).collect()
}

/// Flags that make a command run for a moment only.
fn base(command: &str) -> Vec<(&'static str, String)> {
    let root = root();
    let path = |name: &str| root.join(name).to_str().unwrap().to_string();
    let model = path(if command == "quantize" {
        "tests/vectors/models/qwen3"
    } else {
        "tests/vectors/models/llama3"
    });
    let more = match command {
        "generate" => vec![("--prompt", "a text".into()), ("--max-tokens", "2".into())],
        "chat" => vec![("--max-tokens", "2".into())],
        "perplexity" => vec![("--file", path("rustfmt.toml")), ("--context", "64".into())],
        "quantize" => vec![("--output", "new".into())],
        "bench" => vec![("--prompt-tokens", "4".into()), ("--generated-tokens", "2".into())],
        "serve" => vec![("--port", "0".into())],
        _ => vec![],
    };
    [("--model", model)].into_iter().chain(more).collect()
}

/// Runs a command with one flag set. Returns what went wrong, if anything.
fn problem(command: &str, flag: &str, value: &str, folder: &Path) -> Option<String> {
    let base = base(command).into_iter().filter(|(name, _)| *name != flag);
    let base = base.flat_map(|(name, value)| [name.to_string(), value]);
    let mut program = Command::new("sh");
    // An allocation that no machine should make fails.
    let limit = if cfg!(target_os = "linux") { "ulimit -v 6000000; " } else { "" };
    program.arg("-c").arg(format!("{limit}exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_lowbit"));
    program.arg(command).args(base).arg(format!("{flag}={value}")).current_dir(folder);
    program.env("HF_HUB_OFFLINE", "1").env("HF_ENDPOINT", "http://127.0.0.1:9");
    let (input, output, errors) = (folder.join("input"), folder.join("output"), folder.join("errors"));
    std::fs::write(&input, "a text\n").unwrap();
    let file = |path: &Path| Stdio::from(std::fs::File::create(path).unwrap());
    program.stdin(std::fs::File::open(&input).unwrap()).stdout(file(&output)).stderr(file(&errors));
    let start = Instant::now();
    let mut child = program.spawn().unwrap();
    // A server that is ready has taken the number, and would run for ever.
    let is_ready = || {
        let said = || String::from_utf8_lossy(&std::fs::read(&errors).unwrap()).contains(": ready after ");
        command == "serve" && said()
    };
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if is_ready() => {
                child.kill().unwrap();
                child.wait().unwrap();
                return None;
            }
            None if start.elapsed() > LIMIT => {
                child.kill().unwrap();
                child.wait().unwrap();
                return Some("does not end".into());
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let errors = String::from_utf8_lossy(&std::fs::read(&errors).unwrap()).into_owned();
    let output = String::from_utf8_lossy(&std::fs::read(&output).unwrap()).into_owned();
    let is_good = match status.code() {
        Some(0) => !errors.contains("panicked") && !output.contains("NaN"),
        Some(1 | 2) => errors.contains("error: ") && !errors.contains("panicked"),
        _ => false,
    };
    (!is_good).then(|| format!("{status}: {errors}"))
}

#[test]
fn numbers_of_any_size_are_taken_or_refused() {
    let mut cases = vec![];
    for command in commands() {
        for flag in flags(&command) {
            cases.extend(VALUES.map(|value| (command.clone(), flag.clone(), value)));
        }
    }
    assert!(cases.len() > 200, "the help is read wrongly: {} cases", cases.len());
    let check = |part: usize| {
        let folder = tempfile::tempdir().unwrap();
        let cases = cases.iter().skip(part).step_by(2);
        let problems = cases.filter_map(|(command, flag, value)| {
            // Without a model, `bench` measures ops for minutes.
            if command == "bench" && flag == "--model" {
                return None;
            }
            let problem = problem(command, flag, value, folder.path())?;
            Some(format!("lowbit {command} {flag}={value}: {problem}\n"))
        });
        problems.collect::<String>()
    };
    let problems = std::thread::scope(|scope| {
        let parts = [0, 1].map(|part| {
            scope.spawn({
                let check = &check;
                move || check(part)
            })
        });
        parts.map(|part| part.join().unwrap()).concat()
    });
    assert!(problems.is_empty(), "{problems}");
}
