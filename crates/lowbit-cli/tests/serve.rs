//! `lowbit serve` with a demo model, from its start to its end.
#![cfg(all(feature = "serve", unix))]

mod support;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};
use support::{lowbit, refusal, root, with_signals};

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
    let alone = support::json(&lowbit(&line).output().unwrap());
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

    let process = served.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &process]).status().unwrap().success());
    let start = Instant::now();
    let status = served.child.wait().unwrap();
    assert!(status.success() && start.elapsed() < Duration::from_secs(10), "{status}");
    let mut rest = String::new();
    served.stderr.read_to_string(&mut rest).unwrap();
    let lines: Vec<&str> = rest.lines().collect();
    assert_eq!(lines.len(), 4, "{rest}");
    assert!(
        lines[0].starts_with("POST /v1/chat/completions 200 ") && lines[0].contains(" written 12 length"),
        "{rest}"
    );
    assert_eq!(lines[3], "stopped");
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
}
