//! Strangers, faults, overload, and the end of a server. The names begin with the numbers of the
//! acceptance tests.

use crate::support::client::{chat, read, read_chunk, read_head};
use crate::support::{QWEN, Running, Script, Scripted};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// A reply that takes long.
fn slow(server: &Running) -> Script {
    let ids = server.ids(&"and so on ".repeat(2000));
    Script { pause: Duration::from_millis(5), ..Script::new(ids) }
}

#[test]
fn keys_are_asked_for() {
    let server = Running::with(QWEN, Scripted::new(vec![]), |options| {
        options.keys = lowbit_serve::Keys::new(["secret".into(), "other".into()]);
    });
    server.says("x");
    let ask = |headers: &[(&str, &str)]| {
        let body = chat(&json!({})).to_string();
        server.request("POST", "/v1/chat/completions", headers, body.as_bytes())
    };
    for headers in
        [[("authorization", "Bearer secret")], [("Authorization", "bearer other")], [("x-api-key", "secret")]]
    {
        assert_eq!(ask(&headers).status, 200, "{headers:?}");
    }
    for headers in [
        [("authorization", "Bearer wrong")],
        [("authorization", "secret")],
        [("x-api-key", "")],
        [("x-api-key", "secre")],
    ] {
        let answer = ask(&headers);
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (401, &json!("invalid_api_key")),
            "{headers:?}"
        );
    }
    assert_eq!(server.message(&json!({})).json()["error"]["type"], "authentication_error");
    for path in ["/v1/models", "/metrics", "/nothing"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    for path in ["/", "/page.js", "/health", "/health/live", "/health/ready"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert!(
        server.lines.lock().unwrap().iter().all(|line| !line.contains("secret") && !line.contains("wrong"))
    );
}

#[test]
fn pages_and_names_of_others_are_kept_out() {
    let server = Running::with(QWEN, Scripted::new(vec![]), |options| {
        options.origins = vec!["https://a.example".into()]
    });
    server.says("x");
    let ask = |method: &str, headers: &[(&str, &str)]| server.request(method, "/v1/models", headers, b"");
    assert_eq!(ask("GET", &[("host", "evil.example")]).status, 403);
    assert_eq!(ask("GET", &[("origin", "https://evil.example")]).status, 403);
    assert_eq!(ask("GET", &[("origin", "null")]).status, 403);
    let own = format!("http://{}", server.address);
    let answer = ask("GET", &[("origin", &own)]);
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, None));
    for method in ["GET", "OPTIONS"] {
        let answer = ask(method, &[("origin", "https://a.example")]);
        assert_eq!(answer.header("access-control-allow-origin"), Some("https://a.example"));
        assert!(answer.status < 300);
    }
    assert_eq!(ask("OPTIONS", &[]).status, 405);
}

#[test]
fn the_page_is_small_and_its_own() {
    let server = Running::new(Scripted::new(vec![]));
    let files = ["/", "/page.js", "/page.css"].map(|path| server.get(path));
    assert!(files.iter().map(|file| file.body.len()).sum::<usize>() < 60_000);
    let policy = files[0].header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"), "{policy}");
    let html = files[0].text();
    assert!(
        !html.contains("style=") && !html.contains("onclick") && !html.contains("http"),
        "the policy would stop it"
    );
}

#[test]
fn t21_hostile_requests_harm_nobody() {
    let server = Running::with(QWEN, Scripted::new(vec![]), |options| {
        options.limits.header = SECOND / 2;
        options.limits.body_idle = SECOND / 2;
        options.limits.body = 1 << 20;
    });
    server.says("Well, yes.");
    let deep = "[".repeat(100_000);
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"null".to_vec(),
        b"{".to_vec(),
        b"\xff\xfe{}".to_vec(),
        deep.clone().into_bytes(),
        format!("{{\"messages\": {deep}").into_bytes(),
        format!("{{\"messages\": {}{}}}", "[".repeat(120), "]".repeat(120)).into_bytes(),
        b"{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud800\"}]}".to_vec(),
        json!({"messages": [{"role": "user", "content": "a".repeat(900_000)}]}).to_string().into_bytes(),
        json!({"messages": vec![json!({}); 1000]}).to_string().into_bytes(),
        json!({"messages": [{"role": "user", "content": "x"}], "seed": 1e300, "n": -1}).to_string().into_bytes(),
        json!({"messages": [{"role": "user", "content": "x"}], "temperature": 1e300}).to_string().into_bytes(),
        json!({"messages": [{"role": "user", "content": "x"}], "stop": [[]]}).to_string().into_bytes(),
        json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"m\0": 1e308}, "tools": [5]}).to_string().into_bytes(),
        vec![b'a'; (1 << 20) + 1],
    ];
    for path in [
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/messages/count_tokens",
    ] {
        for body in &bodies {
            let answer = server.request("POST", path, &[], body);
            assert!([200, 400, 413].contains(&answer.status), "{path} {}: {}", answer.status, answer.text());
            if answer.status != 200 {
                assert!(
                    answer.json()["error"]["message"].is_string() && answer.body.len() < 5000,
                    "{}",
                    answer.text()
                );
            }
        }
    }
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    ] {
        let mut rest = vec![];
        _ = server.open(bytes).read_to_end(&mut rest);
    }
    // A header that never ends, one that is too long, and a body that does not come.
    let mut half = server.open(b"GET / HTTP/1.1\r\nhost: x");
    let bomb = format!("GET / HTTP/1.1\r\nhost: x\r\na: {}\r\n\r\n", "b".repeat(1 << 20));
    let mut stream = std::net::TcpStream::connect(server.address).unwrap();
    _ = stream.write_all(bomb.as_bytes());
    let host = server.address;
    let start = format!("POST /v1/messages HTTP/1.1\r\nhost: {host}\r\ncontent-length: 100\r\n\r\n{{");
    let mut waiting = server.open(start.as_bytes());
    let began = Instant::now();
    assert_eq!(read(&mut waiting).status, 408);
    let mut rest = vec![];
    _ = half.read_to_end(&mut rest);
    assert!(began.elapsed() < 3 * SECOND);
    let answer = server.chat(&json!({}));
    assert_eq!(answer.ok()["choices"][0]["message"]["content"], "Well, yes.");
}

#[test]
fn a_body_may_not_take_all_memory() {
    let server = Running::with(QWEN, Scripted::new(vec![]), |options| options.limits.bodies = 64 << 10);
    server.says("x");
    let long = |bytes: usize| server.chat(&json!({"user": "a".repeat(bytes)}));
    assert_eq!(long(50_000).status, 200);
    let answer = long(100_000);
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert_eq!(long(50_000).status, 200, "what is taken is given back");
}

#[test]
fn a_panic_is_one_requests_fault() {
    let server = Running::new(Scripted::new(vec![]));
    let ids = server.ids("x");
    server.engine.script(vec![
        Script { panics: true, ..Script::new(ids.clone()) },
        Script { panics: true, ..Script::new(ids.clone()) },
        Script::new(ids),
    ]);
    for stream in [false, true] {
        let answer = server.chat(&json!({"stream": stream}));
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (500, &json!("internal_error")));
    }
    server.chat(&json!({})).ok();
    assert!(server.lines.lock().unwrap().iter().any(|line| line.contains("panicked: a defect")));
    assert!(server.get("/metrics").text().contains("lowbit_panics_total 2"));
}

#[test]
fn t24_a_client_that_goes_is_seen_wherever_its_request_is() {
    let server = Running::new(Scripted::new(vec![]));
    let queued = Script { queued: 20 * SECOND, ..slow(&server) };
    for (script, stream) in
        [(queued.clone(), true), (queued, false), (slow(&server), true), (slow(&server), false)]
    {
        let before = server.engine.cancelled();
        server.engine.script(vec![script]);
        let body = chat(&json!({"stream": stream})).to_string();
        let mut connection = server.send("POST", "/v1/chat/completions", &[], body.as_bytes());
        while server.engine.running() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if stream {
            read_head(&mut connection);
        }
        drop(connection);
        server.engine.assert_idle_within(SECOND / 2);
        assert_eq!(server.engine.cancelled(), before + 1);
    }
    assert!(server.lines.lock().unwrap().iter().any(|line| line.contains("the client has gone")));
}

#[test]
fn t24_a_client_that_does_not_read_is_given_up() {
    let mut engine = Scripted::new(vec![]);
    engine.context = 1 << 20;
    let server = Running::with(QWEN, engine, |options| options.limits.write_idle = SECOND / 2);
    let ids = server.ids(&"and so on ".repeat(60_000));
    server.engine.script(vec![Script::new(ids)]);
    let body = chat(&json!({"stream": true})).to_string();
    let connection = server.send("POST", "/v1/chat/completions", &[], body.as_bytes());
    let start = Instant::now();
    let gone = || server.lines.lock().unwrap().iter().any(|line| line.contains("the client has gone"));
    while !gone() {
        assert!(start.elapsed() < 10 * SECOND);
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(connection);
}

#[test]
fn t25_a_stream_is_never_silent_for_long() {
    let server = Running::new(Scripted::new(vec![]));
    let ids = server.ids("x");
    server.engine.script(vec![Script { queued: SECOND * 5 / 2, ..Script::new(ids) }]);
    for (path, body, ping) in [
        ("/v1/chat/completions", chat(&json!({"stream": true})), ": ping\n\n"),
        (
            "/v1/messages",
            crate::support::client::message(&json!({"stream": true})),
            "event: ping\ndata: {\"type\": \"ping\"}\n\n",
        ),
    ] {
        let mut connection = server.send("POST", path, &[], body.to_string().as_bytes());
        assert_eq!(read_head(&mut connection).0, 200);
        for _ in 0..2 {
            let start = Instant::now();
            assert_eq!(String::from_utf8(read_chunk(&mut connection)).unwrap(), ping);
            assert!(start.elapsed() < SECOND * 3 / 2);
        }
        assert!(!String::from_utf8(read_chunk(&mut connection)).unwrap().contains("ping"));
    }
}

#[test]
fn t27_a_full_queue_says_when_to_come_back() {
    let mut engine = Scripted::new(vec![]);
    engine.limit = 2;
    let server = Running::with(QWEN, engine, |_| {});
    server.engine.script(vec![slow(&server)]);
    let body = chat(&json!({"stream": true})).to_string();
    let open = [0, 1].map(|_| {
        let mut connection = server.send("POST", "/v1/chat/completions", &[], body.as_bytes());
        assert_eq!(read_head(&mut connection).0, 200);
        connection
    });
    for stream in [false, true] {
        let answer = server.chat(&json!({"stream": stream}));
        assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
        assert_eq!(server.message(&json!({"stream": stream})).status, 429);
    }
    // Two replies of which one finds no place: both are given back.
    drop(open);
    server.engine.assert_idle_within(SECOND);
    assert_eq!(server.chat(&json!({"n": 3})).status, 429);
    server.engine.assert_idle_within(SECOND);
    server.says("x");
    server.chat(&json!({})).ok();
}

#[test]
fn t32_a_server_that_is_stopped_ends_what_runs() {
    let server = Running::with(QWEN, Scripted::new(vec![]), |options| options.drain = 2 * SECOND);
    let ids = server.ids(&"and so on ".repeat(30));
    let short = Script { pause: Duration::from_millis(10), ..Script::new(ids) };
    let endless = Script { pause: Duration::from_millis(50), ..slow(&server) };
    server.engine.script(vec![short, endless]);
    let body = chat(&json!({"stream": true})).to_string();
    let send = || {
        let mut connection = server.send("POST", "/v1/chat/completions", &[], body.as_bytes());
        assert_eq!(read_head(&mut connection).0, 200);
        connection
    };
    let (mut short, mut endless) = (send(), send());
    assert_eq!(server.get("/health/ready").status, 200);
    server.stop();
    std::thread::sleep(SECOND / 10);
    assert_eq!((server.get("/health/live").status, server.get("/health/ready").status), (200, 503));
    assert_eq!(server.get("/health").json()["draining"], true);
    let answer = server.chat(&json!({}));
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    let rest = |connection: &mut std::io::BufReader<std::net::TcpStream>| {
        let mut text = String::new();
        loop {
            match read_chunk(connection) {
                chunk if chunk.is_empty() => return text,
                chunk => text += std::str::from_utf8(&chunk).unwrap(),
            }
        }
    };
    let whole = rest(&mut short);
    assert!(whole.ends_with("data: [DONE]\n\n") && whole.contains("\"finish_reason\":\"stop\""), "{whole}");
    let cut = rest(&mut endless);
    let last: Value = serde_json::from_str(cut.trim_end().rsplit_once("data: ").unwrap().1).unwrap();
    assert_eq!(
        (&last["error"]["code"], &last["error"]["message"]),
        (&json!("stopping"), &json!("the server is stopping"))
    );
    let address = server.address;
    server.join();
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn requests_are_counted_and_logged() {
    let server = Running::new(Scripted::new(vec![]));
    let ids = server.ids("Well, yes.");
    let count = ids.len();
    server.engine.script(vec![Script { cached: 3, ..Script::new(ids) }]);
    server.chat(&json!({})).ok();
    server.chat(&json!({"n": 0}));
    server.get("/nothing");
    server.get("/health");
    let metrics = server.get("/metrics").text();
    for line in [
        "lowbit_requests_total{path=\"/v1/chat/completions\",status=\"200\"} 1",
        "lowbit_requests_total{path=\"/v1/chat/completions\",status=\"400\"} 1",
        "lowbit_requests_total{path=\"other\",status=\"404\"} 1",
        "lowbit_time_to_first_token_seconds_count{model_name=\"test\"} 1",
        "lowbit_requests_running{model_name=\"test\"} 0",
        "lowbit_prefill_passes_total{model_name=\"test\"} 3",
        "lowbit_prefill_seconds_total{model_name=\"test\"} 1.5",
        "# EOF",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    let gaps = format!("lowbit_inter_token_latency_seconds_count{{model_name=\"test\"}} {}", count - 1);
    assert!(metrics.contains(&gaps), "{gaps}: {metrics}");
    let lines = server.lines.lock().unwrap().clone();
    assert_eq!(lines.len(), 3, "{lines:?}");
    let prompt = server.engine.requests.lock().unwrap()[0].prompt.len();
    let end = format!("prompt {prompt} cached 3 written {count} stop");
    assert!(
        lines[0].starts_with("POST /v1/chat/completions 200 ") && lines[0].ends_with(&end),
        "{}",
        lines[0]
    );
    assert!(lines[1].ends_with(" invalid_value") && lines[2].starts_with("GET other 404 "), "{lines:?}");
}
