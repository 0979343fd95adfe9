//! `quantize` as signals, full disks and other processes end it: never half a checkpoint under the
//! final name, and nothing left behind. `tools/kill_quantize` does the same hundreds of times.
#![cfg(unix)]

use crate::support::root;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `lowbit quantize` of a checkpoint of this repository in `folder`, through a shell that runs
/// `before` first.
fn quantize(folder: &Path, before: &str, model: &str, arguments: &[&str]) -> Command {
    let mut command = crate::support::with_signals("sh");
    command.arg("-c").arg(format!("{before} exec \"$0\" quantize \"$@\"")).arg(env!("CARGO_BIN_EXE_lowbit"));
    command.arg("--model").arg(root().join(model)).args(arguments).current_dir(folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const TINY: &str = "tests/vectors/models/qwen3";
/// One that takes a moment.
const DEMO: &str = "models/demo";

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// All files of a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let file = |name: String| (name.clone(), std::fs::read(folder.join(name)).unwrap());
    names(folder).into_iter().map(file).collect()
}

#[track_caller]
fn succeeds(output: Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The one line of a run that must fail.
#[track_caller]
fn refusal(mut command: Command) -> String {
    let output = command.output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.starts_with("error: ") && message.lines().count() == 1, "{message}");
    message
}

/// Waits until the child writes, and sends it a signal.
fn signal_while_writing(child: &Child, folder: &Path, signal: &str) {
    let start = Instant::now();
    while !folder.join("new.lowbit-partial/model.safetensors").exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn signals_remove_what_was_written() {
    for (signal, number) in [("-INT", 2), ("-TERM", 15), ("-HUP", 1)] {
        // A signal that comes with the last rename comes too late: then the checkpoint is there.
        let stopped = (0..20).any(|_| {
            let folder = tempfile::tempdir().unwrap();
            let child = quantize(folder.path(), "", DEMO, &["--output", "new"]).spawn().unwrap();
            signal_while_writing(&child, folder.path(), signal);
            let output = child.wait_with_output().unwrap();
            let stopped = output.status.signal() == Some(number);
            assert!(stopped || output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(names(folder.path()), if stopped { vec![] } else { vec!["new"] }, "{signal}");
            stopped
        });
        assert!(stopped, "{signal} never stopped it");
    }
}

#[test]
fn what_is_started_to_outlive_its_terminal_does() {
    let folder = tempfile::tempdir().unwrap();
    let child = quantize(folder.path(), "trap '' HUP;", DEMO, &["--output", "new"]).spawn().unwrap();
    signal_while_writing(&child, folder.path(), "-HUP");
    succeeds(child.wait_with_output().unwrap());
    assert_eq!(names(folder.path()), ["new"]);
}

#[test]
fn kills_leave_the_old_the_new_or_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    succeeds(quantize(folder.path(), "", TINY, &["--output", "reference", "--bits", "8"]).output().unwrap());
    let takes = start.elapsed();
    let old = files(&folder.path().join("reference"));
    succeeds(quantize(folder.path(), "", TINY, &["--output", "reference", "--force"]).output().unwrap());
    let new = files(&folder.path().join("reference"));
    assert_ne!(old, new);
    let output = folder.path().join("new");
    for i in 0..16 {
        let replaces = i % 2 == 1;
        if replaces {
            succeeds(
                quantize(folder.path(), "", TINY, &["--output", "new", "--bits", "8"]).output().unwrap(),
            );
        }
        let flags: &[&str] = if replaces { &["--output", "new", "--force"] } else { &["--output", "new"] };
        let mut child = quantize(folder.path(), "", TINY, flags).spawn().unwrap();
        std::thread::sleep(takes * i / 16);
        child.kill().unwrap();
        child.wait().unwrap();
        match output.exists() {
            true => {
                let found = files(&output);
                assert!(found == new || (replaces && found == old), "half a checkpoint");
            }
            false => assert!(!replaces, "the old one is gone"),
        }
        // The next one takes what was left for what it is.
        succeeds(quantize(folder.path(), "", TINY, &["--output", "new", "--force"]).output().unwrap());
        assert!(files(&output) == new);
        assert_eq!(names(folder.path()), ["new", "reference"]);
        std::fs::remove_dir_all(&output).unwrap();
    }
}

#[test]
fn a_full_disk_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // In blocks of 512 bytes or 1024, as the shell has it.
    for blocks in [1, 10, 100] {
        let before = format!("ulimit -f {blocks};");
        let message = refusal(quantize(folder.path(), &before, TINY, &["--output", "new"]));
        assert!(message.contains("new.lowbit-partial/") && message.contains("arge"), "{message}");
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[test]
fn of_four_at_once_one_wins() {
    let folder = tempfile::tempdir().unwrap();
    let start = || quantize(folder.path(), "", DEMO, &["--output", "new"]).spawn().unwrap();
    let children = [start(), start(), start(), start()];
    let outputs = children.map(|child| child.wait_with_output().unwrap());
    let (won, lost): (Vec<_>, Vec<_>) = outputs.into_iter().partition(|output| output.status.success());
    assert_eq!(won.len(), 1);
    for output in lost {
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(
            message.contains("is being written by another") || message.contains("exists already"),
            "{message}"
        );
    }
    assert_eq!(names(folder.path()), ["new"]);
    let bundled = root().join("models/demo-4bit/model.safetensors");
    assert!(
        std::fs::read(folder.path().join("new/model.safetensors")).unwrap()
            == std::fs::read(bundled).unwrap()
    );
}

#[test]
fn outputs_that_cannot_be_are_refused_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("file"), "text").unwrap();
    std::fs::create_dir(path.join("folder")).unwrap();
    std::os::unix::fs::symlink("nowhere", path.join("dangling")).unwrap();
    std::os::unix::fs::symlink("folder", path.join("link")).unwrap();
    let before = names(path);
    for (output, want) in [
        ("file", "exists already"),
        ("folder", "exists already"),
        ("folder/", "exists already"),
        ("dangling", "is a link to nowhere"),
        ("dangling/", "is a link to nowhere"),
        ("link", "is a link to folder"),
        (".", "is no name for something new"),
        ("./", "is no name for something new"),
        ("file/new", "file"),
        ("/proc/new", "/proc"),
    ] {
        let message = refusal(quantize(path, "", TINY, &["--output", output]));
        assert!(message.contains(want), "{output}: {message}");
        assert_eq!(names(path), before);
    }
    for (output, want) in [("file", "is no directory"), ("folder", "no config.json"), ("link", "is a link")] {
        let message = refusal(quantize(path, "", TINY, &["--output", output, "--force"]));
        assert!(message.contains(want), "{output}: {message}");
        assert_eq!(names(path), before);
    }
    let inside = root().join(TINY).join("new");
    let message = refusal(quantize(path, "", TINY, &["--output", inside.to_str().unwrap()]));
    assert!(message.contains("lies in"), "{message}");
    let itself = root().join(TINY);
    let message = refusal(quantize(path, "", TINY, &["--output", itself.to_str().unwrap(), "--force"]));
    assert!(message.contains("--output") && message.contains("are the same file"), "{message}");
}

/// Enough text for a few windows.
fn text() -> String {
    (0..300).map(|i| format!("{} and {}. ", i * 7 % 31, i)).collect()
}

const LEARN: [&str; 14] = [
    "--output",
    "new",
    "--bits",
    "3",
    "--group-size",
    "32",
    "--learn",
    "scales",
    "--steps",
    "10",
    "--windows",
    "2",
    "--context",
    "32",
];

#[test]
fn learning_writes_a_checkpoint_and_a_log() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.txt"), text()).unwrap();
    let lines =
        text().lines().map(|line| serde_json::json!({ "text": line }).to_string()).collect::<Vec<_>>();
    std::fs::write(folder.path().join("data.jsonl"), lines.join("\n\n")).unwrap();
    for data in ["data.txt", "data.jsonl"] {
        let more = ["--data", data, "--log", "log.csv", "--force"];
        let output = quantize(folder.path(), "", TINY, &[&LEARN[..], &more].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        succeeds(output);
        assert!(said.contains("22 weights learned") && said.contains("after step"), "{said}");
        let log = std::fs::read_to_string(folder.path().join("log.csv")).unwrap();
        let rows: Vec<Vec<&str>> = log.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(rows[0], ["step", "block", "loss", "held_out", "tokens", "seconds"]);
        assert_eq!(rows.len(), 11);
        let held_out = |row: &Vec<&str>| row[3].parse::<f64>().unwrap();
        assert!(held_out(&rows[10]) < held_out(&rows[1]) && held_out(&rows[10]) > 0.0, "{log}");
        assert_eq!(names(folder.path()), ["data.jsonl", "data.txt", "log.csv", "new"]);
        // The learned checkpoint is an ordinary one.
        let mut command = Command::new(env!("CARGO_BIN_EXE_lowbit"));
        command.args(["perplexity", "--model", "new", "--file", "data.txt", "--context", "32"]);
        succeeds(command.current_dir(folder.path()).output().unwrap());
    }
}

#[test]
fn learning_writes_gguf() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.txt"), text()).unwrap();
    let learn = "--output new.gguf --format q4_0 --learn codes --data data.txt --steps 4 --windows 2 --context 32 --log log.csv";
    let learn: Vec<&str> = learn.split(' ').collect();
    let output = quantize(folder.path(), "", TINY, &learn).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    succeeds(output);
    assert!(said.contains("22 weights learned") && said.contains("Q4_0"), "{said}");
    assert_eq!(std::fs::read_to_string(folder.path().join("log.csv")).unwrap().lines().count(), 5);
    assert_eq!(names(folder.path()), ["data.txt", "log.csv", "new.gguf"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_lowbit"));
    command.args(["perplexity", "--model", "new.gguf", "--file", "data.txt", "--context", "32"]);
    succeeds(command.current_dir(folder.path()).output().unwrap());
}

#[test]
fn learning_goes_block_by_block() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.txt"), text()).unwrap();
    let mut learn: Vec<&str> = LEARN.into_iter().map(|x| if x == "scales" { "codes" } else { x }).collect();
    learn.extend(["--by-block", "--block-windows", "4", "--data", "data.txt", "--log", "log.csv"]);
    let output = quantize(folder.path(), "", TINY, &learn).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    succeeds(output);
    for want in ["block 1: held-out error", "block 3: held-out error", " of 5\n", "with blocks learned"] {
        assert!(said.contains(want), "{want}: {said}");
    }
    // Five steps of four windows for each of three blocks, and ten of two for the whole model.
    let log = std::fs::read_to_string(folder.path().join("log.csv")).unwrap();
    let rows = log.lines().skip(1).enumerate().map(|(i, line)| (i, line.split(',').collect::<Vec<_>>()));
    for (i, row) in rows {
        assert_eq!(row[0], (i + 1).to_string());
        assert_eq!(row[1], ["1", "2", "3"].get(i / 5).copied().unwrap_or_default(), "{log}");
    }
    assert_eq!(log.lines().count(), 1 + 3 * 5 + 10);
    let scales = [&LEARN[..], &["--data", "data.txt", "--force", "--by-block"]].concat();
    let message = refusal(quantize(folder.path(), "", TINY, &scales));
    assert!(message.contains("codes learn block by block, scales alone do not"), "{message}");
}

#[test]
fn learning_from_targets_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.txt"), text()).unwrap();
    let run = |output: &str, more: &[&str]| {
        let learn: Vec<&str> = LEARN.into_iter().map(|x| if x == "new" { output } else { x }).collect();
        let data = ["--data", "data.txt", "--targets", "targets", "--targets-top-k", "16"];
        quantize(folder.path(), "", TINY, &[&learn[..], &data, more].concat())
    };
    succeeds(run("one", &[]).output().unwrap());
    let made = std::fs::read(folder.path().join("targets")).unwrap();
    succeeds(run("two", &[]).output().unwrap());
    assert!(files(&folder.path().join("one")) == files(&folder.path().join("two")));
    assert!(std::fs::read(folder.path().join("targets")).unwrap() == made);
    assert_eq!(names(folder.path()), ["data.txt", "one", "targets", "two"]);
    let message = refusal(run("three", &["--seed", "3"]));
    assert!(message.contains("targets has the targets of another run: seed was 0, and is 3"), "{message}");
    let blocks: Vec<&str> = LEARN.into_iter().map(|x| if x == "scales" { "codes" } else { x }).collect();
    let more = ["--by-block", "--data", "data.txt", "--targets", "other"];
    let message = refusal(quantize(folder.path(), "", TINY, &[&blocks[..], &more].concat()));
    assert!(message.contains("learning block by block takes the states between its blocks"), "{message}");
    assert_eq!(names(folder.path()), ["data.txt", "one", "targets", "two"]);
}

/// Kills a run after its first steps, and goes on.
#[test]
fn learning_that_was_killed_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.txt"), text()).unwrap();
    let run = |output: &str, more: &[&str]| {
        let learn: Vec<&str> = LEARN.into_iter().map(|x| if x == "new" { output } else { x }).collect();
        quantize(folder.path(), "", TINY, &[&learn[..], &["--data", "data.txt"], more].concat())
    };
    succeeds(run("whole", &["--log", "whole.csv"]).output().unwrap());
    let state = folder.path().join("new.lowbit-learning");
    let mut killed = run("new", &["--log", "log.csv", "--resume"]).spawn().unwrap();
    while !state.exists() && killed.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    // The state would be gone, had the run ended first.
    assert!(state.exists() && !folder.path().join("new").exists());
    let message = refusal(run("new", &["--log", "log.csv"]));
    assert!(message.contains("log.csv exists already"), "{message}");
    let message = refusal(run("new", &[]));
    assert!(message.contains("new.lowbit-learning is the state of a run that was interrupted"), "{message}");
    succeeds(run("new", &["--log", "log.csv", "--resume"]).output().unwrap());
    assert!(files(&folder.path().join("new")) == files(&folder.path().join("whole")));
    let steps = |name: &str| {
        let log = std::fs::read_to_string(folder.path().join(name)).unwrap();
        let rows = log.lines().map(|line| line.rsplit_once(',').unwrap().0.to_owned());
        rows.collect::<Vec<_>>()
    };
    assert_eq!(steps("log.csv"), steps("whole.csv"));
    assert_eq!(names(folder.path()), ["data.txt", "log.csv", "new", "whole", "whole.csv"]);
    let message = refusal(run("other", &["--log", "new/config.json", "--resume"]));
    assert!(message.contains("config.json: is not a log of learning, and is not replaced"), "{message}");
}

/// An output may be no other argument's file under any name, and only a regular file: opening a
/// FIFO would wait for its other end.
#[test]
fn outputs_of_learning_are_files_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("data.txt"), text()).unwrap();
    std::fs::hard_link(path("data.txt"), path("hard")).unwrap();
    std::os::unix::fs::symlink("data.txt", path("link")).unwrap();
    std::os::unix::fs::symlink(".", path("here")).unwrap();
    std::fs::write(path("model.gguf"), "GGUF and so on").unwrap();
    std::fs::write(path("letter"), "Dear ..").unwrap();
    assert!(
        Command::new("mkfifo").args([path("fifo"), path("x.lowbit-learning")]).status().unwrap().success()
    );
    let before = names(folder.path());
    let refused = |output: &str, more: &[&str], want: &str| {
        let mut words: Vec<&str> = LEARN.into_iter().map(|x| if x == "new" { output } else { x }).collect();
        words.extend(["--force", "--data", "data.txt"]);
        words.extend(more);
        let message = refusal(quantize(folder.path(), "", TINY, &words));
        assert!(message.contains(want), "{output} {more:?}: {message}");
        assert_eq!(names(folder.path()), before);
        assert_eq!(std::fs::read_to_string(path("data.txt")).unwrap(), text());
    };
    for name in ["data.txt", "./data.txt", "here/data.txt", "hard", "link"] {
        refused("new", &["--log", name], &format!("--log {name} and --data data.txt are the same file"));
        refused(
            "new",
            &["--targets", name],
            &format!("--targets {name} and --data data.txt are the same file"),
        );
        refused(name, &[], &format!("--output {name} and --data data.txt are the same file"));
    }
    let same = |a: &str, b: &str| format!("{a} and {b} are the same file; name another path");
    refused("new", &["--log", "here/new"], &same("--output new", "--log here/new"));
    refused("new", &["--log", "a", "--targets", "a"], &same("--targets a", "--log a"));
    let partial = same("--output while it is written new.lowbit-partial", "--log new.lowbit-partial");
    refused("new", &["--log", "new.lowbit-partial"], &partial);
    let state = same("--targets new.lowbit-learning", "the state of learning new.lowbit-learning");
    refused("new", &["--targets", "new.lowbit-learning"], &state);
    refused("new", &["--log", "new/log.csv"], "--log new/log.csv lies in --output new");
    let model = root().join(TINY).join("model.safetensors");
    refused("new", &["--log", model.to_str().unwrap()], "model.safetensors are the same file");
    // Nor is a file replaced that is no log.
    for name in ["model.gguf", "letter"] {
        let want = format!("{name}: is not a log of learning, and is not replaced");
        refused("new", &["--log", name], &want);
        refused("new", &["--log", name, "--resume"], &want);
    }
    refused("new", &["--log", "here"], "lies in --log here");
    refused("new", &["--log", "fifo"], "fifo: is a FIFO; an output is a regular file");
    refused("new", &["--log", "fifo", "--resume"], "fifo: is a FIFO; an output is a regular file");
    refused("new", &["--targets", "fifo"], "fifo: not a regular file");
    refused("x", &[], "x.lowbit-learning: is a FIFO; an output is a regular file");
    let gguf = ["--output", "letter", "--format", "Q4_0", "--force"];
    let message = refusal(quantize(folder.path(), "", TINY, &gguf));
    assert!(message.contains("letter: is not a GGUF file, and is not replaced"), "{message}");
}

#[test]
fn a_dry_run_says_what_a_run_writes() {
    let folder = tempfile::tempdir().unwrap();
    let json = |more: &[&str]| -> serde_json::Value {
        let output = quantize(folder.path(), "", TINY, &[more, &["--json"]].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let mlx = ["--output", "new", "--bits", "3", "--group-size", "32", "--rule", "down_proj=6"];
    let gguf = ["--output", "new.gguf", "--format", "Q4_K_M"];
    for arguments in [&mlx[..], &gguf[..]] {
        let planned = json(&[arguments, &["--dry-run"]].concat());
        assert_eq!(names(folder.path()), [""; 0]);
        assert_eq!((&planned["written"], &planned["seconds"]), (&false.into(), &serde_json::Value::Null));
        let table =
            quantize(folder.path(), "", TINY, &[arguments, &["--dry-run"]].concat()).output().unwrap();
        assert!(String::from_utf8(table.stdout).unwrap().contains("nothing was written"));
        let made = json(arguments);
        for key in ["output", "bytes", "parameters", "bits_per_weight", "fallbacks", "warnings"] {
            assert_eq!(planned[key], made[key], "{key}");
        }
        let kinds = |of: &serde_json::Value| {
            let mut kinds = of["kinds"].clone();
            kinds.as_array_mut().unwrap().iter_mut().for_each(|kind| kind["relative_error"] = 0.into());
            kinds
        };
        assert_eq!(kinds(&planned), kinds(&made));
        // A dry run refuses what a run would refuse.
        let message = refusal(quantize(folder.path(), "", TINY, &[arguments, &["--dry-run"]].concat()));
        assert!(message.contains("exists already"), "{message}");
        let output = folder.path().join(arguments[1]);
        if output.is_dir() { std::fs::remove_dir_all(output) } else { std::fs::remove_file(output) }.unwrap();
    }
    let message =
        refusal(quantize(folder.path(), "", TINY, &["--output", "new", "--bits", "9", "--dry-run"]));
    assert!(message.contains('9'), "{message}");
}

#[test]
fn learning_that_wins_nothing_says_so() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.txt"), text()).unwrap();
    // No step of this length changes a weight.
    let learn = [&LEARN[..], &["--data", "data.txt", "--rate", "1e-30"]].concat();
    let output = quantize(folder.path(), "", TINY, &learn).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    succeeds(output);
    assert!(
        said.contains("learning won nothing back: the weights are written as they were rounded"),
        "{said}"
    );
}

#[test]
fn sharing_out_bits_stops_within_a_second() {
    let folder = tempfile::tempdir().unwrap();
    let text = root().join("models/demo/eval.txt");
    let more = ["--output", "new", "--target-bpw", "3.5", "-c", "512", "--data", text.to_str().unwrap()];
    let child = quantize(folder.path(), "", DEMO, &more).spawn().unwrap();
    signal_while_writing(&child, folder.path(), "-INT");
    let start = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(2));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn data_that_nothing_can_be_learned_from_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let data = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    data("good.txt", text().as_bytes());
    data("empty.txt", b"");
    data("short.txt", b"7 and");
    data("latin.txt", b"caf\xe9 and so on");
    data("broken.jsonl", b"{\"text\": \"7 and 8\"}\n{\"text\": 9}\n");
    data("cut.jsonl", b"{\"text\": \"7 and 8\"}\n\n{\"text\": \"9");
    data("both.jsonl", b"{\"text\": \"7\", \"messages\": []}");
    data("chat.jsonl", b"{\"messages\": [{\"role\": \"user\", \"content\": \"7\"}]}");
    data("log.csv", b"precious");
    let before = files(folder.path());
    let refused = |more: &[&str]| {
        let message = refusal(quantize(folder.path(), "", TINY, &[&LEARN[..], more].concat()));
        assert!(files(folder.path()) == before, "{more:?}");
        message
    };
    for (file, want) in [
        ("empty.txt", "0 tokens in 1 texts are too few"),
        ("short.txt", "are too few"),
        ("latin.txt", "latin.txt: invalid utf-8"),
        ("broken.jsonl", "broken.jsonl: line 2: its keys are text; a text as \"text\""),
        ("cut.jsonl", "cut.jsonl: line 3: EOF while parsing"),
        ("both.jsonl", "both.jsonl: line 1: its keys are text, messages"),
        ("chat.jsonl", "chat.jsonl: line 1: there are messages, but the model has no chat template"),
        ("missing.txt", "missing.txt: No such file"),
    ] {
        let message = refused(&["--data", file, "--log", "new.csv"]);
        assert!(message.contains(want), "{file}: {message}");
    }
    let message = refused(&["--data", "good.txt", "--log", "log.csv"]);
    assert!(message.contains("log.csv exists already"), "{message}");
    let message = refused(&["--data", "good.txt", "--log", "log.csv", "--force"]);
    assert!(message.contains("log.csv: is not a log of learning, and is not replaced"), "{message}");
    let message = refused(&["--data", "good.txt", "--format", "Q4_0"]);
    assert!(message.contains("--bits 3 goes with") && message.contains("Q4_0 has its own bits"), "{message}");
    let message = refused(&["--data", "good.txt", "--rate", "-1"]);
    assert!(message.contains("rate is -1, but a finite number above 0"), "{message}");
    std::fs::create_dir(folder.path().join("new")).unwrap();
    let message = refusal(quantize(
        folder.path(),
        "",
        TINY,
        &[&LEARN[..], &["--data", "good.txt", "--log", "new.csv"]].concat(),
    ));
    assert!(message.contains("new") && !folder.path().join("new.csv").exists(), "{message}");
}
