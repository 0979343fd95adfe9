//! `lowbit serve` with a demo model, from its start to its end.
#![cfg(all(feature = "serve", unix))]

use crate::support::{lowbit, refusal, root, with_signals};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

/// A program that is killed when the test ends.
struct Served {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
    /// The lines before the server was ready.
    lines: Vec<String>,
}

impl Served {
    fn start(arguments: &[&str]) -> Self {
        let mut command = with_signals(env!("CARGO_BIN_EXE_lowbit"));
        command.current_dir(root()).args(arguments).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let (mut lines, mut line) = (vec![], String::new());
        while stderr.read_line(&mut line).unwrap() > 0 {
            lines.push(std::mem::take(&mut line).trim_end().to_string());
            if lines.last().unwrap().starts_with("try: ") {
                break;
            }
        }
        let url = lines.iter().find_map(|line| line.strip_prefix("page       http://"));
        let address = url.unwrap_or_else(|| panic!("{lines:?}")).trim_end_matches('/').to_string();
        Self { child, stderr, address, lines }
    }

    /// The whole answer to a request, header included.
    fn ask(&self, path: &str, body: &Value) -> String {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn json(&self, path: &str, body: &Value) -> Value {
        let answer = self.ask(path, body);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Stops it as a supervisor does, for which it has ten seconds. Returns the rest of its log.
    fn stop(&mut self) -> String {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &process]).status().unwrap().success());
        let start = Instant::now();
        let status = self.child.wait().unwrap();
        assert!(status.success() && start.elapsed() < Duration::from_secs(10), "{status}");
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        rest
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn chat(further: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "What is a vector?"}], "temperature": 0, "max_tokens": 12});
    further.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

#[test]
fn a_model_is_served_until_a_signal() {
    let mut served = Served::start(&["serve", "--port", "0", "--device", "cpu"]);
    assert!(
        served.lines.iter().any(|line| line.starts_with("demo-chat: ready after ")),
        "{:?}",
        served.lines
    );
    let whole = served.json("/v1/chat/completions", &chat(&json!({})));
    let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!content.is_empty() && whole["model"] == "demo-chat", "{whole}");
    // The same text as the program writes without a server.
    let line = [
        "generate",
        "-m",
        "models/demo-chat",
        "-p",
        "What is a vector?",
        "--temp",
        "0",
        "-n",
        "12",
        "--device",
        "cpu",
        "--json",
    ];
    let alone = crate::support::json(&lowbit(&line).output().unwrap());
    assert_eq!(
        (&alone["content"], &alone["finish_reason"]),
        (&json!(content), &whole["choices"][0]["finish_reason"])
    );
    let stream = served.ask("/v1/chat/completions", &chat(&json!({"stream": true})));
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: {"));
    let chunks = data.map(|rest| serde_json::from_str::<Value>(&format!("{{{rest}")).unwrap());
    let deltas: String = chunks
        .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_string()))
        .collect();
    assert_eq!(deltas, content);
    let message = served.json("/v1/messages", &chat(&json!({})));
    assert_eq!(message["content"][0]["text"], content);

    let rest = served.stop();
    let lines: Vec<&str> = rest.lines().collect();
    assert_eq!(lines.len(), 4, "{rest}");
    assert!(
        lines[0].starts_with("POST /v1/chat/completions 200 ") && lines[0].contains(" written 12 length"),
        "{rest}"
    );
    assert_eq!(lines[3], "stopped");
}

/// A pipe has room for some 64 KiB, of which a line takes 20 or more.
const MORE_THAN_A_PIPE: usize = 8000;

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let mut served = Served::start(&["serve", "--port", "0", "--device", "cpu"]);
    let mut stream = TcpStream::connect(&served.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let ask = format!("GET /nothing HTTP/1.1\r\nhost: {}\r\n\r\n", served.address);
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    for _ in 0..MORE_THAN_A_PIPE / 100 {
        stream.write_all(ask.repeat(100).as_bytes()).unwrap();
        let mut answered = 0;
        while answered < 100 {
            line.clear();
            assert!(answers.read_line(&mut line).unwrap() > 0, "the server has closed the connection");
            answered += usize::from(line.contains("HTTP/1.1 404 "));
        }
    }
    let rest = served.stop();
    let lines = rest.lines().filter(|line| line.starts_with("GET other 404 ")).count();
    assert!((1000..MORE_THAN_A_PIPE).contains(&lines), "{lines}");
}

#[test]
fn flags_of_llama_server_are_taken() {
    let line = [
        "llama-server",
        "-m",
        "models/demo-4bit",
        "--port",
        "0",
        "-np",
        "4",
        "-c",
        "64",
        "--api-key",
        "secret",
        "-a",
        "mine",
    ];
    let served = Served::start(&line);
    assert!(
        served
            .lines
            .iter()
            .any(|line| line.starts_with("mine: ready after ") && line.ends_with("context 64"))
    );
    assert!(served.ask("/v1/completions", &json!({"prompt": "A vector is"})).starts_with("HTTP/1.1 401 "));
}

#[test]
fn a_server_that_cannot_start_says_why_at_once() {
    let refused = |line: &[&str]| refusal(lowbit(line).output().unwrap());
    let error = refused(&["serve", "--host", "0.0.0.0"]);
    assert_eq!(
        error,
        "error: other machines reach 0.0.0.0: name a key (--api-key), or say --no-auth to serve anyone\n"
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert!(refused(&["serve", "--port", &port]).starts_with(&format!("error: 127.0.0.1:{port}: ")));
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "# none\n").unwrap();
    assert!(refused(&["serve", "--api-key-file", keys.to_str().unwrap()]).ends_with("keys: has no key\n"));
    assert!(refused(&["serve", "--tools", "x.json"]).contains("clients name their tools"));
    assert_eq!(
        refused(&["serve", "--port", "0", "--kv-events", "udp://a:1"]),
        "error: --kv-events: udp://a:1: tcp://HOST:PORT, tcp://*:PORT or @tcp://HOST:PORT is wanted\n"
    );
}

/// Writes a file for `--models` of the demo and of an embedding model beside the file.
fn models(folder: &std::path::Path) -> String {
    std::fs::create_dir(folder.join("small")).unwrap();
    crate::embedding::Embedding::default().write(&folder.join("small"));
    let demo = root().join("models/demo-chat");
    let text = format!(
        "max_loaded = 1\n[[model]]\nname = \"chat\"\nalias = [\"gpt\"]\npath = {:?}\ndevice = \"cpu\"\ncontext = 512\n\
         [[model]]\nname = \"texts\"\npath = \"small\"\ndevice = \"cpu\"\n",
        demo.to_str().unwrap()
    );
    let file = folder.join("models.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().into()
}

#[test]
fn models_of_a_file_are_loaded_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = models(folder.path());
    let mut served = Served::start(&["serve", "--port", "0", "--models", &file]);
    assert_eq!(served.lines[0], "chat, texts: loaded when asked for, at most 1 at a time");
    let chat = served.json("/v1/chat/completions", &chat(&json!({"model": "gpt"})));
    assert!(!chat["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    let text = "the thing";
    let answer = served.json("/v1/embeddings", &json!({"model": "texts", "input": text}));
    let line =
        ["embed", "-m", folder.path().join("small").to_str().unwrap(), text, "--device", "cpu", "--json"]
            .map(String::from);
    let alone = lowbit(&line.each_ref().map(String::as_str)).output().unwrap();
    let alone: Value = serde_json::from_slice(&alone.stdout).unwrap();
    let numbers = |value: &Value| -> Vec<f32> {
        value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
    };
    let alone = alone.get("embeddings").map_or(&alone, |list| &list[0]);
    assert_eq!(numbers(&answer["data"][0]["embedding"]), numbers(&alone["embedding"]));
    _ = served.child.kill();
    let mut rest = String::new();
    served.stderr.read_to_string(&mut rest).unwrap();
    // T2: what can be found again is said, by models of attention and by those with states.
    let says = |start: &str, what: &str| {
        assert!(rest.lines().any(|line| line.starts_with(start) && line.contains(what)), "{rest}");
    };
    says("chat: caches of ", "; prompts share their starts ");
    says("texts: caches of ", "; prompts share their starts in blocks of 64 tokens");
    assert!(rest.contains("chat: unloaded\n"), "{rest}");
}

#[test]
fn a_file_of_models_that_is_wrong_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("models.toml");
    for (text, want) in [
        ("", "line 1: missing field `model`"),
        ("model = []", "has no [[model]]"),
        ("[[model]]\nname = \"a\"\npath = \"x\"\ncolour = 1\n", "line 4: unknown field `colour`"),
        (
            "max_loaded = 0\n[[model]]\nname = \"a\"\npath = \"x\"\n",
            "max_loaded: is 0, but at least 1 is wanted",
        ),
        (
            "[[model]]\nname = \"a\"\npath = \"x\"\n[[model]]\nname = \"b\"\nalias = [\"a\"]\npath = \"x\"\n",
            "two models are named a",
        ),
        ("[[model]]\nname = \"a\"\npath = \"x\"\ndevice = \"tpu\"\n", "a: device: there is no device tpu"),
    ] {
        std::fs::write(&file, text).unwrap();
        let line = ["serve", "--port", "0", "--models", file.to_str().unwrap()];
        let error = refusal(lowbit(&line).output().unwrap());
        assert!(error.contains(want) && error.contains("models.toml: "), "{text}: {error}");
    }
    let output = lowbit(&["serve", "--models", "x.toml", "-m", "y"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(2) && error.contains("'--models <FILE>' cannot be used with"),
        "{error}"
    );
}

#[test]
fn a_server_that_was_killed_starts_again() {
    let mut served = Served::start(&["serve", "--port", "0", "--device", "cpu"]);
    let port = served.address.rsplit_once(':').unwrap().1.to_string();
    let before = served.json("/v1/chat/completions", &chat(&json!({})));
    // Kill -9, while a reply is written.
    let body = chat(&json!({"stream": true, "max_tokens": 1000})).to_string();
    let mut stream = TcpStream::connect(&served.address).unwrap();
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\n", served.address);
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    assert!(stream.read(&mut [0; 64]).unwrap() > 0);
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    let again = Served::start(&["serve", "--port", &port, "--device", "cpu"]);
    let after = again.json("/v1/chat/completions", &chat(&json!({})));
    assert_eq!(after["choices"], before["choices"]);
}
