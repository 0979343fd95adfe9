//! Ctrl-C, Ctrl-D and signals, in a terminal and without one.
#![cfg(target_os = "linux")]

use crate::bigram::Bigram;

use crate::support::{lowbit, root, with_signals, with_template};
use nix::pty::{Winsize, openpty};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
/// The editor has given the terminal back.
const LINE_IS_READ: &str = "\x1b[?2004l\r\n";

/// The program in a terminal.
struct Terminal {
    child: Child,
    pty: File,
    shown: Arc<Mutex<String>>,
    /// Bytes of the output that a test has waited for.
    seen: usize,
    /// The folder where the program keeps what is typed.
    _state: Option<TempDir>,
}

impl Terminal {
    fn new(arguments: &[&str]) -> Self {
        Self::of_kind("xterm", arguments)
    }

    fn of_kind(term: &str, arguments: &[&str]) -> Self {
        let state = tempfile::tempdir().unwrap();
        Self::with_state(term, arguments, state.path()).keeping(state)
    }

    fn keeping(mut self, state: TempDir) -> Self {
        self._state = Some(state);
        self
    }

    fn with_state(term: &str, arguments: &[&str], state: &Path) -> Self {
        let size = Winsize { ws_row: 24, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(Some(&size), None).unwrap();
        // A session of its own, so that Ctrl-C in this terminal is a signal for it.
        let mut command = with_signals("setsid");
        command.args(["--ctty", "sh"]).current_dir(root()).env("TERM", term).env("XDG_STATE_HOME", state);
        let side = || Stdio::from(terminal.slave.try_clone().unwrap());
        command.stdin(side()).stdout(side()).stderr(side());
        // The terminal's mode afterwards is part of the output. Ctrl-C comes to the shell, too.
        let script = "trap : INT; \"$0\" \"$@\"; echo \"[status $?]\"; stty -a; echo \"[end]\"";
        let program = env!("CARGO_BIN_EXE_lowbit");
        let child = command.args(["-c", script, program]).args(arguments).spawn().unwrap();
        let (pty, shown) = (File::from(terminal.master), Arc::new(Mutex::new(String::new())));
        let (mut reader, text) = (pty.try_clone().unwrap(), shown.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                text.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Self { child, pty, shown, seen: 0, _state: None }
    }

    fn types(&mut self, text: &str) {
        self.pty.write_all(text.as_bytes()).unwrap();
    }

    /// Waits until `text` is shown after what was waited for before; returns what came up to it.
    #[track_caller]
    fn waits_for(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let shown = self.shown.lock().unwrap().clone();
            if let Some(at) = shown[self.seen..].find(text) {
                let before = shown[self.seen..self.seen + at].to_string();
                self.seen += at + text.len();
                return before;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no {text:?} in {:?}", &shown[self.seen..]);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the program's end: its status, and a terminal that echoes, edits lines and makes
    /// Ctrl-C a signal.
    #[track_caller]
    fn ends_with(&mut self, status: i32) {
        self.waits_for("[status ");
        assert_eq!(self.waits_for("]"), status.to_string());
        let settings = self.waits_for("[end]");
        for setting in ["isig", "icanon", "echo"] {
            assert!(settings.split_whitespace().any(|word| word == setting), "{settings}");
        }
        self.child.wait().unwrap();
    }

    /// Sends a signal to the program itself, not to the shell around it.
    fn signal(&self, signal: &str) {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        let child = std::fs::read_to_string(children).unwrap();
        kill(child.trim(), signal);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kill(process: &str, signal: &str) {
    let status = Command::new("kill").args([signal, process]).status().unwrap();
    assert!(status.success());
}

/// The demo that was not taught to answer goes on writing until it is stopped.
const CHAT: [&str; 5] = ["chat", "-m", "models/demo-4bit", "-n", "20000"];

#[test]
fn an_interrupt_stops_the_reply_and_the_session_goes_on() {
    let mut chat = Terminal::new(&CHAT);
    chat.waits_for("> ");
    for _ in 0..2 {
        chat.types("A vector is\r");
        chat.waits_for(LINE_IS_READ);
        std::thread::sleep(Duration::from_millis(300));
        chat.types(CTRL_C);
        let reply = chat.waits_for("[stopped]");
        assert!(reply.len() > 5, "{reply:?}");
        chat.waits_for("generation: ");
        let tokens = chat.waits_for(" tokens");
        assert!((1..20000).contains(&tokens.parse::<usize>().unwrap()), "{tokens}");
        chat.waits_for("> ");
    }
    chat.types(CTRL_D);
    chat.ends_with(0);
}

#[test]
fn at_the_prompt_an_interrupt_clears_the_line_and_two_end_the_chat() {
    let mut chat = Terminal::new(&CHAT);
    chat.waits_for("> ");
    for _ in 0..3 {
        chat.types("half a line");
        chat.waits_for("half a line");
        chat.types(CTRL_C);
        chat.waits_for("> ");
    }
    chat.types(CTRL_C);
    chat.waits_for("ends the chat");
    chat.waits_for("> ");
    // Something in between: the next one is a first one again.
    chat.types("\r");
    chat.waits_for("> ");
    chat.types(CTRL_C);
    chat.waits_for("ends the chat");
    chat.waits_for("> ");
    chat.types(CTRL_C);
    chat.ends_with(130);
}

#[test]
fn the_end_of_input_and_exit_end_the_chat() {
    for end in [CTRL_D, "/exit\r", "/bye\r"] {
        let mut chat = Terminal::new(&CHAT);
        chat.waits_for("> ");
        chat.types(end);
        chat.ends_with(0);
    }
}

#[test]
fn signals_at_the_prompt_and_in_a_reply_leave_the_terminal_as_it_was() {
    for (signal, status) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        let mut chat = Terminal::new(&CHAT);
        chat.waits_for("> ");
        // The editor shows its prompt after it has changed the terminal's mode.
        chat.signal(signal);
        chat.ends_with(status);
    }
    let mut chat = Terminal::new(&CHAT);
    chat.waits_for("> ");
    chat.types("A vector is\r");
    chat.waits_for(LINE_IS_READ);
    chat.signal("-TERM");
    chat.ends_with(143);
}

#[test]
fn a_dumb_terminal_has_a_prompt_too() {
    let mut chat = Terminal::of_kind("dumb", &["chat", "-n", "3"]);
    chat.waits_for("> ");
    chat.types("A vector is\n");
    chat.waits_for("generation: 3 tokens");
    chat.waits_for("> ");
    chat.types(CTRL_C);
    chat.ends_with(130);
}

#[test]
fn an_interrupt_prints_what_generate_has_written() {
    let mut run = Terminal::new(&["generate", "-p", "A vector is", "-n", "20000", "--ignore-eos"]);
    run.waits_for("vector");
    std::thread::sleep(Duration::from_millis(300));
    run.types(CTRL_C);
    run.waits_for("generation: ");
    run.ends_with(130);
}

/// Starts the program with pipes and waits for the first byte of its output.
fn piped(arguments: &[&str]) -> Child {
    let mut command = with_signals(env!("CARGO_BIN_EXE_lowbit"));
    command.current_dir(root()).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits at most a minute for the end.
#[track_caller]
fn end(mut child: Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("the program goes on");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn piped_input_interrupt_at_the_prompt_ends() {
    let mut child = piped(&CHAT);
    // The handler is there before the first word, which says that the demo has no chat template.
    let mut notice = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut notice).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    kill(&child.id().to_string(), "-INT");
    assert_eq!(end(child).code(), Some(130));
}

#[test]
fn piped_input_interrupt_in_a_reply_keeps_the_session() {
    let mut child = piped(&CHAT);
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    for _ in 0..2 {
        input.write_all(b"A vector is\n").unwrap();
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        kill(&child.id().to_string(), "-INT");
        let mut text = vec![];
        while !text.ends_with(b" [stopped]\n") {
            output.read_exact(&mut byte).unwrap();
            text.push(byte[0]);
        }
    }
    drop(input);
    assert_eq!(end(child).code(), Some(0));
}

#[test]
fn nohup_outlives_its_terminal() {
    let mut nohup = Command::new("nohup");
    nohup.current_dir(root()).arg(env!("CARGO_BIN_EXE_lowbit")).args([
        "generate",
        "-p",
        "A vector is",
        "-n",
        "200",
    ]);
    let mut child = nohup.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut byte = [0];
    output.read_exact(&mut byte).unwrap();
    kill(&child.id().to_string(), "-HUP");
    std::io::copy(&mut output, &mut std::io::sink()).unwrap();
    assert_eq!(end(child).code(), Some(0));
}

#[test]
fn terminated_is_terminated() {
    let mut child = piped(&CHAT);
    let mut notice = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut notice).unwrap();
    kill(&child.id().to_string(), "-TERM");
    assert_eq!(end(child).signal(), Some(15));
}

#[test]
fn generate_stops_once_and_is_ended_by_the_second() {
    let mut child = piped(&["generate", "-p", "A vector is", "-n", "20000", "--ignore-eos"]);
    let mut output = child.stdout.take().unwrap();
    let mut byte = [0];
    output.read_exact(&mut byte).unwrap();
    kill(&child.id().to_string(), "-INT");
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    assert!(text.ends_with('\n'), "{text}");
    let mut figures = String::new();
    child.stderr.take().unwrap().read_to_string(&mut figures).unwrap();
    assert!(figures.contains("generation: "), "{figures}");
    assert_eq!(end(child).code(), Some(130));

    // While the prompt is read there is nothing to print: a file that never ends is one that is
    // never read.
    let child = piped(&["generate", "-n", "20000"]);
    std::thread::sleep(Duration::from_millis(300));
    kill(&child.id().to_string(), "-INT");
    assert_eq!(end(child).code(), Some(130));
}

#[test]
fn json_of_an_interrupted_text_is_whole() {
    // Nothing says when loading is over, and an interrupt before that ends the program: wait longer
    // then.
    for milliseconds in [500, 2000, 8000, 20000] {
        let child = piped(&["generate", "-p", "A vector is", "-n", "30000", "--ignore-eos", "--json"]);
        std::thread::sleep(Duration::from_millis(milliseconds));
        kill(&child.id().to_string(), "-INT");
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130));
        if !output.stdout.is_empty() {
            let reply: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(reply["finish_reason"], "interrupted");
            return;
        }
    }
    panic!("loading takes too long");
}

/// The messages that `/save` has written.
fn saved(path: &Path) -> Vec<(String, String)> {
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!((&saved["type"], &saved["version"]), (&"lowbit chat".into(), &1.into()));
    let part = |message: &serde_json::Value, name: &str| message[name].as_str().unwrap().to_string();
    let messages = saved["messages"].as_array().unwrap().iter();
    messages.map(|message| (part(message, "role"), part(message, "content"))).collect()
}

#[test]
fn commands_change_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    with_template(folder.path());
    let (file, text) = (folder.path().join("saved chat.json"), folder.path().join("text.txt"));
    std::fs::write(&text, "one\ntwo").unwrap();
    let model = folder.path().to_str().unwrap();
    let mut chat = Terminal::new(&["chat", "-m", model, "-n", "4", "--temp", "0"]);
    let mut says = |line: &str, answer: &str| {
        chat.waits_for("> ");
        chat.types(&format!("{line}\r"));
        chat.waits_for(LINE_IS_READ);
        chat.waits_for(answer);
    };
    says("/help", "/regen ");
    says("/nonsense", "/nonsense is no command");
    says("/undo", "nothing was said yet");
    says("/regen", "there is no answer yet");
    says("hi", "generation: ");
    says("/regen", "generation: ");
    says(&format!("/read {}", text.display()), "7 characters");
    says("three", "generation: ");
    says("/system Be brief.", "is set");
    says("/system", "Be brief.");
    let save = format!("/save {}", file.display());
    says(&save, "5 messages are saved");
    let whole = saved(&file);
    let users: Vec<_> =
        whole.iter().filter(|(role, _)| role == "user").map(|(_, text)| text.as_str()).collect();
    assert_eq!((users, whole[0].1.as_str()), (vec!["hi", "one\ntwo\nthree"], "Be brief."));
    says("/undo", "taken back: one\\ntwo\\nthree");
    says("/clear", "forgotten");
    says(&save, "1 messages are saved");
    assert_eq!(saved(&file), whole[..1]);
    says(&format!("/load {}", file.display()), "1 messages are loaded");
    says(&format!("/save {}", text.display()), "error: ");
    assert_eq!(std::fs::read_to_string(&text).unwrap(), "one\ntwo");
    chat.waits_for("> ");
    chat.types("/exit\r");
    chat.ends_with(0);
}

#[test]
fn lines_continue_and_are_remembered() {
    let (folder, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    with_template(folder.path());
    let model = folder.path().to_str().unwrap();
    let file = folder.path().join("saved.json");
    let save = format!("/save {}\r", file.display());
    let line = ["chat", "-m", model, "-n", "2", "--temp", "0"];
    // A backslash, Alt-Enter, and what an earlier session was told.
    for (term, typed, want) in [
        ("xterm", "one\\\rtwo\x1b\rthree\r", "one\ntwo\nthree"),
        ("xterm", "\x1b[A\x1b[A\r", "one\ntwo\nthree"),
        ("dumb", "four\\\nfive\n", "four\nfive"),
    ] {
        let mut chat = Terminal::with_state(term, &line, state.path());
        chat.waits_for("> ");
        chat.types(typed);
        chat.waits_for("generation: ");
        chat.waits_for("> ");
        chat.types(&save);
        chat.waits_for("2 messages are saved");
        chat.waits_for("> ");
        chat.types(CTRL_D);
        chat.ends_with(0);
        assert_eq!(saved(&file)[0].1, want, "{term}");
    }
    let history = state.path().join("lowbit/chat-history");
    assert_eq!(std::fs::metadata(&history).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn control_characters_reach_a_pipe_and_no_terminal() {
    let tokens = std::fs::read(root().join("models/demo-4bit/tokenizer.json")).unwrap();
    let tokens: serde_json::Value = serde_json::from_slice(&tokens).unwrap();
    // The byte 0x1b, as byte-level tokenizers spell it.
    let escape = format!("{}+10000", tokens["model"]["vocab"]["\u{11b}"]);
    let line = ["generate", "-p", "A vector is", "-n", "3", "--temp", "0", "--logit-bias", &escape];
    let piped = lowbit(&line).output().unwrap();
    assert_eq!(String::from_utf8(piped.stdout).unwrap(), "\x1b\x1b\x1b\n");
    let mut terminal = Terminal::new(&line);
    let shown = terminal.waits_for("generation: 3 tokens");
    assert!(shown.contains(r"\u{1b}\u{1b}\u{1b}") && !shown.contains("\x1b\x1b"), "{shown:?}");
    assert!(shown.contains("[cut by --max-tokens 3]"), "{shown:?}");
    terminal.ends_with(0);
}

#[test]
fn reasoning_is_grey_or_hidden_and_calls_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let bigram = Bigram {
        added: &[
            "</s>",
            "<u>",
            "</u>",
            "+<think>",
            "+hm",
            "+</think>",
            "+Yes",
            "+<tool_call>",
            "+{\"name\": \"f\", \"arguments\": {}}",
            "+</tool_call>",
        ],
        next: &[
            ("</u>", "<think>"),
            ("<think>", "hm"),
            ("hm", "</think>"),
            ("</think>", "Yes"),
            ("Yes", "<tool_call>"),
            ("<tool_call>", "{\"name\": \"f\", \"arguments\": {}}"),
            ("{\"name\": \"f\", \"arguments\": {}}", "</tool_call>"),
        ],
        template: "{# <think> </think> <tool_call> </tool_call> #}{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}",
        ..Bigram::default()
    };
    bigram.write(folder.path());
    let line = ["generate", "-m", folder.path().to_str().unwrap(), "-p", "hi"];
    let hide = [&line[..], &["--reasoning", "hide"]].concat();
    let whole = "<think>hm</think>Yes<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n";
    let piped = |line: &[&str]| String::from_utf8(lowbit(line).output().unwrap().stdout).unwrap();
    assert_eq!(piped(&line), whole);
    assert_eq!(piped(&hide), "Yes\n\n[calls f {}]\n");
    for (line, term, want) in [
        (&line[..], "xterm", "\x1b[90mhm\x1b[0m\r\n\r\nYes\r\n\r\n[calls f {}]\r\n"),
        (&line, "dumb", "hm\r\n\r\nYes\r\n\r\n[calls f {}]\r\n"),
        (&hide, "xterm", "Yes\r\n\r\n[calls f {}]\r\n"),
    ] {
        let mut terminal = Terminal::of_kind(term, line);
        let shown = terminal.waits_for("prompt: ");
        assert!(shown.ends_with(want), "{shown:?}");
        terminal.ends_with(0);
    }
}
