//! `bench --server` against a server whose answers are written here.

use crate::support::lowbit;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Answers one connection: requests of any number, streams of three pieces, the second request of
/// all refused.
fn answer(stream: TcpStream, seen: &Mutex<Vec<Value>>, streams: &AtomicUsize) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    loop {
        let (mut first, mut length) = (String::new(), 0);
        if reader.read_line(&mut first)? == 0 {
            return Ok(());
        }
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let mut whole = |status: &str, body: String| {
            let length = body.len();
            write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}")
        };
        if first.starts_with("GET /v1/models ") {
            whole("200 OK", json!({ "data": [{ "id": "scripted" }] }).to_string())?;
            continue;
        }
        let request: Value = serde_json::from_slice(&body).unwrap();
        seen.lock().unwrap().push(request.clone());
        let tokens = request["prompt"].as_str().unwrap().split_whitespace().count() * 2;
        if request["stream"] != true {
            whole("200 OK", json!({ "usage": { "prompt_tokens": tokens } }).to_string())?;
            continue;
        }
        if streams.fetch_add(1, Ordering::Relaxed) == 1 {
            whole("429 Too Many Requests", json!({ "error": { "message": "full" } }).to_string())?;
            continue;
        }
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")?;
        for piece in ["a", "b", "c"] {
            let event = json!({ "choices": [{ "text": piece, "finish_reason": null }] });
            write!(stream, "data: {event}\n\n")?;
        }
        let details = json!({ "cached_tokens": 64 });
        let usage =
            json!({ "prompt_tokens": tokens, "completion_tokens": 3, "prompt_tokens_details": details });
        write!(stream, "data: {}\n\ndata: [DONE]\n\n", json!({ "choices": [], "usage": usage }))?;
        return Ok(());
    }
}

/// The URL of a server that runs until the test ends, and the requests that it has seen.
fn server() -> (String, Arc<Mutex<Vec<Value>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/", listener.local_addr().unwrap());
    let seen = Arc::<Mutex<Vec<Value>>>::default();
    let (told, streams) = (seen.clone(), Arc::new(AtomicUsize::new(0)));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (told, streams) = (told.clone(), streams.clone());
            // A client may close a connection at any time.
            std::thread::spawn(move || drop(answer(stream.unwrap(), &told, &streams)));
        }
    });
    (url, seen)
}

#[test]
fn loads_are_counted_and_timed() {
    let (url, seen) = server();
    let load = ["--concurrency", "3,2", "--requests", "6", "--prompt-tokens", "40", "--shared-tokens", "20"];
    let arguments = [&["bench", "--server", &url, "--generated-tokens", "3", "--json"][..], &load].concat();
    let output = lowbit(&arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &printed["loads"][0];
    assert_eq!((&row["model"], &row["concurrency"]), (&"scripted".into(), &3.into()));
    let counts = ["requests", "complete", "refused", "failed", "disconnected"].map(|name| row[name].as_u64());
    assert_eq!(counts, [6, 5, 1, 0, 0].map(Some));
    // A word is two tokens here.
    assert_eq!(
        (&row["prompt_tokens"], &row["cached_tokens"], &row["tokens"]),
        (&200.into(), &320.into(), &15.into())
    );
    assert!(row["first_token_ms"]["p50"].as_f64().unwrap() <= row["request_ms"]["p99"].as_f64().unwrap());
    let seen = seen.lock().unwrap();
    let prompts: Vec<&str> = seen[1..].iter().map(|request| request["prompt"].as_str().unwrap()).collect();
    let start = |prompt: &str| prompt.split(' ').take(10).map(str::to_string).collect::<Vec<_>>();
    assert!(prompts.iter().all(|prompt| start(prompt) == start(prompts[0])));
    // Those of the second row, too.
    let different: std::collections::BTreeSet<_> = prompts.iter().collect();
    assert_eq!(different.len(), 12);
    assert!(seen[1..].iter().all(|request| request["max_tokens"] == 3 && request["ignore_eos"] == true));
}

#[test]
fn connections_are_closed_and_rates_kept() {
    let (url, _) = server();
    let arguments = [
        "bench",
        "--server",
        &url,
        "--rate",
        "200",
        "--requests",
        "8",
        "--disconnect",
        "100",
        "--prompt-tokens",
        "4",
        "--generated-tokens",
        "2",
    ];
    let output = lowbit(&arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("200 per second") && text.contains("7 closed here, 1 refused"), "{text}");
}

#[test]
fn servers_that_are_not_there_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let output = lowbit(&["bench", "--server", &url]).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains(&format!("{url}/v1/models")), "{message}");
    let output = lowbit(&["bench", "--prompt-tokens", "4"]).output().unwrap();
    assert!(
        String::from_utf8(output.stderr).unwrap().contains("--prompt-tokens goes with --model or --server")
    );
}
