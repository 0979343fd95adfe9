//! T21: ten thousand hostile bodies, beside a client that goes on undisturbed.

use crate::support::client::{chat, message, read};
use crate::support::{Running, Scripted};
use serde_json::{Value, json};
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

const BODIES: usize = 10_000;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below
    }

    /// A value of some type, which may be deep.
    fn value(&mut self, depth: usize) -> Value {
        match self.next(if depth == 0 { 7 } else { 10 }) {
            0 => Value::Null,
            1 => json!(self.next(2) == 0),
            2 => json!(self.next(1000) as i64 - 500),
            3 => json!([1e308, -1e308, 5e-324, 0.5, 1e19][self.next(5)]),
            4 => json!(["", "\u{0}", "\u{202e}\u{feff}", "<|im_start|>", "user"][self.next(5)]),
            5 => json!("x".repeat(self.next(300))),
            6 => json!(u64::MAX),
            7 => (0..self.next(4)).map(|_| self.value(depth - 1)).collect(),
            8 => json!({["role", "content", "type", "name"][self.next(4)]: self.value(depth - 1)}),
            _ => json!([self.value(depth - 1)]),
        }
    }
}

const FIELDS: [&str; 24] = [
    "messages",
    "model",
    "stream",
    "n",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "tools",
    "tool_choice",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "stream_options",
    "system",
    "chat_template_kwargs",
    "reasoning",
    "prompt",
    "input",
    "response_format",
    "tokens",
    "documents",
];

/// A request that is wrong in one of many ways.
fn body(random: &mut Random, good: &[Value]) -> Vec<u8> {
    let mut body = good[random.next(good.len())].clone();
    match random.next(4) {
        // Fields of any type.
        0 | 1 => {
            for _ in 0..1 + random.next(3) {
                body[FIELDS[random.next(FIELDS.len())]] = random.value(4);
            }
            // A reply would be one of the good ones.
            body["stream"] = false.into();
            body.to_string().into_bytes()
        }
        // Bytes that are changed.
        2 => {
            let mut bytes = body.to_string().into_bytes();
            for _ in 0..1 + random.next(4) {
                let at = random.next(bytes.len());
                bytes[at] = random.next(256) as u8;
            }
            bytes
        }
        // A body that is cut.
        _ => {
            let mut bytes = body.to_string().into_bytes();
            bytes.truncate(random.next(bytes.len()));
            bytes
        }
    }
}

/// Says that all is done, when it is dropped.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Resident bytes of this process.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

#[test]
fn t21_ten_thousand_hostile_bodies_harm_nobody() {
    let paths = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/tokenize",
        "/detokenize",
        "/apply-template",
    ];
    let good = [
        chat(&json!({})),
        message(&json!({})),
        json!({"prompt": "hi"}),
        json!({"input": "hi"}),
        json!({"model": "test", "tokens": [1, 2]}),
    ];
    let server = Running::new(Scripted::new(vec![]));
    server.says("Well, yes: \u{1f642} and so on.");
    let want = server.chat(&json!({})).ok()["choices"].clone();
    let (sent, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut before = 0;
    let part = |seed: u64, count: usize| {
        let (mut random, mut stream) = (Random(seed), None);
        for _ in 0..count {
            let body = body(&mut random, &good);
            let path = paths[random.next(paths.len())];
            let connection = stream.get_or_insert_with(|| {
                let stream = TcpStream::connect(server.address).unwrap();
                stream.set_nodelay(true).unwrap();
                BufReader::new(stream)
            });
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\n\r\n",
                server.address,
                body.len()
            );
            connection.get_mut().write_all(&[head.as_bytes(), &body].concat()).unwrap();
            let answer = read(connection);
            assert!([200, 400, 404].contains(&answer.status), "{path}: {} {}", answer.status, answer.text());
            if answer.status != 200 {
                assert!(!answer.json()["error"].is_null() && answer.body.len() < 5000, "{}", answer.text());
            }
            if answer.header("connection") == Some("close") {
                stream = None;
            }
            sent.fetch_add(1, Ordering::SeqCst);
        }
    };
    thread::scope(|scope| {
        // Also if a part fails, or the test would not end.
        let end = Done(&done);
        let undisturbed = scope.spawn(|| {
            let mut asked = 0;
            while !done.load(Ordering::SeqCst) {
                assert_eq!(server.chat(&json!({})).ok()["choices"], want);
                asked += 1;
            }
            asked
        });
        // The allocator has all that it keeps after the first tenth.
        part(7, BODIES / 10);
        before = resident();
        let rest: Vec<_> = (0..3)
            .map(|index| {
                scope.spawn({
                    let part = &part;
                    move || part(100 + index, BODIES * 3 / 10)
                })
            })
            .collect();
        rest.into_iter().for_each(|part| part.join().unwrap());
        drop(end);
        assert!(undisturbed.join().unwrap() > 10);
    });
    assert_eq!(sent.load(Ordering::SeqCst), BODIES);
    let grown = resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes more");
    assert!(server.get("/metrics").text().contains("lowbit_panics_total 0"));
    assert_eq!(server.chat(&json!({})).ok()["choices"], want);
}
