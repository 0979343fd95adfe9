//! A hub that attacks: what it sends becomes an error that says so, and nothing is written that is
//! not whole.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::server::*;
use lowbit_files::names::SINGLE;

/// Resolves `org/name` where `change` has its way with every honest answer; the error and how often
/// was asked.
fn attack(
    sandbox: &Sandbox,
    change: impl Fn(&Asked, Reply) -> Reply + Send + Sync + 'static,
) -> (String, usize) {
    let (endpoint, asked) = serve(move |asked| change(asked, honest(&small(), asked)));
    let message = sandbox.resolve(&endpoint, "org/name").expect_err("an attack").to_string();
    assert!(message.len() < 1500 && !message.contains(|c: char| c.is_control()), "{message:?}");
    let asked = asked.lock().unwrap().len();
    (message, asked)
}

/// The same, for the answers about config.json.
fn attack_file(change: impl Fn(Reply) -> Reply + Send + Sync + 'static) -> String {
    let sandbox = Sandbox::new();
    let (message, _) = attack(&sandbox, move |asked, reply| match asked.path.ends_with(CONFIG) {
        true => change(reply),
        false => reply,
    });
    no_config(&sandbox);
    message
}

/// Files that came before are there, config.json and `refs/main` are not.
fn no_config(sandbox: &Sandbox) {
    let token = git(b"{}");
    let prefix = "cache/models--org--name";
    let allowed = [
        "victim".into(),
        format!("{prefix}/blobs/{token}"),
        format!("{prefix}/snapshots/{COMMIT}/tokenizer.json -> ../../blobs/{token}"),
    ];
    let tree = sandbox.tree();
    assert!(tree.iter().all(|path| allowed.contains(path)), "{tree:?}");
    assert_eq!(std::fs::read_to_string(sandbox.path("victim")).unwrap(), "precious");
}

#[test]
fn etags_that_are_paths_are_refused() {
    let victim = Sandbox::new();
    let absolute = victim.path("victim").display().to_string();
    let hostile = [
        absolute.clone(),
        format!("\"{absolute}\""),
        format!("W/\"{absolute}\""),
        "\"../../../victim\"".into(),
        "..".into(),
        "\".\"".into(),
        "\"\"".into(),
        "\"refs/main\"".into(),
        "\"a\\b\"".into(),
        "\"a b\"".into(),
        "\"x.incomplete\"".into(),
        "\"x.lock\"".into(),
        "\"\u{e9}\"".into(),
        format!("\"{}\"", "a".repeat(60_000)),
        format!("\"{}\"", "a".repeat(129)),
    ];
    for etag in hostile {
        for name in ["ETag", "X-Linked-ETag"] {
            let etag = etag.clone();
            let message = attack_file(move |reply| reply.with(name, &etag));
            assert!(message.contains("config.json: the hub's ETag is "), "{message}");
        }
    }
    victim.is_untouched();
    for raw in ["ETag: a\0b\r\n", "ETag: a\rb\r\n", "ETag: a\n  b\r\n"] {
        let text =
            format!("HTTP/1.1 200 OK\r\nX-Repo-Commit: {COMMIT}\r\nContent-Length: 2\r\n{raw}\r\n{{}}");
        let text = text.into_bytes();
        attack_file(move |reply| Reply { raw: Some(text.clone()), ..reply });
    }
    assert!(attack_file(|reply| reply.and("ETag", "\"other\"")).contains("several ETag that differ"));
    let without = |reply: Reply| {
        let headers = reply.headers.iter().filter(|(name, _)| name != "ETag").cloned().collect();
        Reply { headers, ..reply }
    };
    assert!(attack_file(without).contains("config.json: the hub sends no ETag"));
}

#[test]
fn commits_that_are_none_are_refused() {
    let long = "a".repeat(50_000);
    for commit in
        ["../../..", "/tmp", "main", "", "c0ffee", OTHER, "0123456789abcdef0123456789abcdef0123456/", &long]
    {
        let value = commit.to_string();
        let message = attack_file(move |reply| reply.with("X-Repo-Commit", &value));
        assert!(message.contains(&format!(", but was asked for commit {COMMIT}")), "{message}");
        let body =
            serde_json::json!({ "sha": commit, "siblings": [{ "rfilename": "config.json" }] }).to_string();
        if commit != OTHER {
            let sandbox = Sandbox::new();
            let (message, _) = attack(&sandbox, move |_, _| Reply::new(200, body.clone()));
            assert!(message.contains("the hub says that its commit is "), "{message}");
            sandbox.is_untouched();
        }
    }
    assert!(
        attack_file(|reply| reply.and("X-Repo-Commit", OTHER)).contains("several X-Repo-Commit that differ")
    );
}

#[test]
fn files_that_are_paths_are_never_asked_for() {
    let names = [
        "../../../victim.gguf",
        "/tmp/victim.gguf",
        "..\\victim.gguf",
        "C:victim.gguf",
        "a\0.gguf",
        "a\n.gguf",
        ".gguf",
        "a\u{202e}.gguf",
        "nul.gguf",
        "folder/a.gguf",
        &format!("{}.gguf", "a".repeat(300)),
    ];
    let siblings: Vec<_> = names.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
    let body = serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string();
    let sandbox = Sandbox::new();
    let (message, asked) = attack(&sandbox, move |_, _| Reply::new(200, body.clone()));
    assert_eq!(message, "org/name: it has neither config.json with safetensors nor GGUF files");
    assert_eq!(asked, 1);
    sandbox.is_untouched();
}

#[test]
fn an_index_reaches_nothing_but_shards() {
    for (shard, want) in [
        ("../../../../victim.safetensors", "is said to be in \"../../../../victim.safetensors\""),
        ("/tmp/x.safetensors", "is said to be in"),
        ("a\\b.safetensors", "is said to be in"),
        ("refs", "is said to be in"),
        (".safetensors", "is no plain name"),
        ("a\u{1b}[2J.safetensors", "is no plain name"),
        ("..safetensors", "is no plain name"),
    ] {
        let index = serde_json::json!({ "weight_map": { "a": shard } }).to_string();
        let mut known = small();
        known.retain(|(name, _)| name != lowbit_files::names::SINGLE);
        known.push(("model-00001-of-00001.safetensors".into(), b"weights".to_vec()));
        known.push((lowbit_files::names::INDEX.into(), index.into_bytes()));
        let sandbox = Sandbox::new();
        let (endpoint, asked) = serve(move |asked| honest(&known, asked));
        let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
        assert!(message.contains(want), "{message}");
        assert!(!asked.lock().unwrap().iter().any(|asked| asked.path.contains(".safetensors?")), "{shard}");
        assert!(!sandbox.repository().join("refs").exists());
    }
    let map: Vec<_> = (0..3000).map(|shard| format!("\"{shard}\": \"{shard}.safetensors\"")).collect();
    let index = format!("{{\"weight_map\": {{{}}}}}", map.join(","));
    let mut known = small();
    known.retain(|(name, _)| name != lowbit_files::names::SINGLE);
    known.push(("model-00001-of-00001.safetensors".into(), b"weights".to_vec()));
    known.push((lowbit_files::names::INDEX.into(), index.into_bytes()));
    let (endpoint, _) = serve(move |asked| honest(&known, asked));
    let message = Sandbox::new().resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert_eq!(message, "org/name: it is in 3000 files; at most 2048 are downloaded");
}

#[test]
fn redirects_lead_somewhere_and_end() {
    let (victim, stolen) = serve(|_| Reply::new(404, ""));
    let own = Arc::new(std::sync::Mutex::new(0));
    let count = own.clone();
    let sandbox = Sandbox { token: Some("secret"), ..Sandbox::new() };
    let (message, asked) = attack(&sandbox, move |asked, _| {
        *count.lock().unwrap() += 1;
        Reply::new(302, "").with("Location", &asked.path)
    });
    assert!(message.ends_with("the list of its files: the hub redirects more than 5 times"), "{message}");
    assert_eq!(asked, 6);
    for (location, want) in [
        ("file:///etc/passwd", "the hub redirects to file:///etc/passwd: "),
        ("gopher://127.0.0.1/", "only http and https addresses are followed"),
        ("ftp://x/y", "only http and https addresses are followed"),
        ("http://user@host/", "an address should have no user"),
        ("config.json", "the hub redirects to config.json: "),
        ("http://", "that is no address"),
        ("http:///x", "that is no address"),
        ("a b", "that is no address"),
        ("", "that is no address"),
        ("?x", "the hub redirects to"),
    ] {
        let (message, asked) = attack(&sandbox, move |_, _| Reply::new(302, "").with("Location", location));
        assert!(message.contains(want), "{location}: {message}");
        assert_eq!(asked, 1);
    }
    let (message, _) = attack(&sandbox, |_, _| Reply::new(307, ""));
    assert!(message.ends_with("the hub redirects to nowhere"), "{message}");
    // Another host, be it by scheme-relative address, has no token, and neither does another port.
    for scheme in ["http:", ""] {
        let location = format!("{scheme}//{}/steal", victim.trim_start_matches("http://"));
        let (message, _) = attack(&sandbox, move |_, _| Reply::new(302, "").with("Location", &location));
        assert!(message.contains("the hub answers 404"), "{message}");
    }
    let stolen = stolen.lock().unwrap();
    assert!(
        stolen.len() == 2 && stolen.iter().all(|asked| asked.header("authorization").is_none()),
        "{stolen:?}"
    );
    sandbox.is_untouched();
}

/// Limits that a test can wait for.
fn hasty() -> Sandbox {
    let mut sandbox = Sandbox::new();
    let limits = &mut sandbox.limits;
    limits.answer = Duration::from_millis(300);
    limits.idle = Duration::from_millis(300);
    limits.window = Duration::from_millis(400);
    limits.pace = 10_000;
    limits.attempts = 2;
    sandbox
}

#[test]
fn a_hub_that_says_nothing_is_not_asked_again_and_again() {
    let mut sandbox = hasty();
    (sandbox.limits.attempts, sandbox.limits.silence) = (100, Duration::from_millis(500));
    let (message, _) = attack(&sandbox, |_, reply| {
        std::thread::sleep(Duration::from_secs(2));
        reply
    });
    // Another attempt could end 600 ms after the first began.
    assert!(message.contains("no answer in 300ms, in 1 attempt"), "{message}");
    let limits = crate::HubLimits::default();
    assert!(limits.silence <= Duration::from_secs(30));
    // Looking up a name, and connecting, which is not tried again.
    assert!(2 * limits.connect <= limits.silence);
}

/// True for the requests that are attacked.
type Which = fn(&Asked) -> bool;

#[test]
fn a_hub_that_stalls_is_left() {
    let (slow, long) = (Duration::from_millis(50), Duration::from_secs(3));
    let list = |asked: &Asked| asked.is_list();
    let weights = |asked: &Asked| asked.is("GET", SINGLE);
    let cases: [(&str, Which, &str); 5] = [
        ("silence", list, "no answer in 300ms"),
        ("headers that drip", list, "no answer in 300ms"),
        ("a list that drips", list, "the answer trickles: "),
        ("a file that stops", weights, "nothing arrived in 300ms"),
        ("a file that drips", weights, "the answer trickles: "),
    ];
    let run = |(name, which, want): (&'static str, Which, &str)| {
        let sandbox = hasty();
        let start = Instant::now();
        let (message, _) = attack(&sandbox, move |asked, reply| match name {
            _ if asked.is("HEAD", SINGLE) => reply.with("Content-Length", 1000),
            _ if !which(asked) => reply,
            "silence" => {
                std::thread::sleep(long);
                reply
            }
            "headers that drip" => Reply { drip: Some((1, slow)), ..reply },
            "a file that stops" => slow_body(&reply, long),
            _ => slow_body(&reply, slow),
        });
        assert!(message.contains(want) && message.ends_with(", in 2 attempts"), "{name}: {message}");
        assert!(start.elapsed() < Duration::from_secs(20), "{name}: {:?}", start.elapsed());
    };
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || run(case));
        }
    });
}

/// The headers at once, then about 30 bytes after each pause.
fn slow_body(reply: &Reply, pause: Duration) -> Reply {
    let mut head = format!("HTTP/1.1 200 X\r\nX-Repo-Commit: {COMMIT}\r\nTransfer-Encoding: chunked\r\n");
    for (name, value) in reply.headers.iter().filter(|(name, _)| name == "ETag") {
        head += &format!("{name}: {value}\r\n");
    }
    let raw = format!("{head}\r\n{}", "1\r\n \r\n".repeat(1000)).into_bytes();
    Reply { raw: Some(raw), drip: Some((head.len() + 2, pause)), ..Reply::default() }
}

#[test]
fn lists_have_an_end() {
    let mut sandbox = Sandbox::new();
    sandbox.limits.list = 100_000;
    sandbox.limits.headers = 10_000;
    sandbox.limits.listed = 100;
    let (message, asked) =
        attack(&sandbox, |_, _| Reply { endless: true, ..Reply::new(200, vec![b' '; 1000]) });
    assert!(message.ends_with("the list of its files: the answer has more than 100000 bytes"), "{message}");
    assert_eq!(asked, 1);
    let (message, _) = attack(&sandbox, |_, _| Reply::new(200, "").with("X-Y", "z".repeat(20_000)));
    assert!(message.ends_with("the answer's headers have more than 10000 bytes"), "{message}");
    let many = vec![serde_json::json!({ "rfilename": "config.json" }); 101];
    let body = serde_json::json!({ "sha": COMMIT, "siblings": many }).to_string();
    let (message, _) = attack(&sandbox, move |_, _| Reply::new(200, body.clone()));
    assert!(message.ends_with("the hub lists 101 files; at most 100 are read"), "{message}");
    sandbox.is_untouched();
}

#[test]
fn answers_that_are_no_list_are_named() {
    let sandbox = Sandbox::new();
    let deep = "[".repeat(50_000);
    for body in [
        "<html><body>Please log in</body></html>",
        "",
        "{",
        "null",
        "[]",
        "{\"sha\": 1, \"siblings\": []}",
        "{\"sha\": \"\"}",
        "{\"siblings\": []}",
        "{\"sha\": \"x\", \"siblings\": [{}]}",
        "{\"sha\": \"x\", \"siblings\": {\"a\": 1}}",
        "\u{0}\u{1b}[2J",
        &deep,
    ] {
        let body = body.to_string();
        let (message, _) =
            attack(&sandbox, move |_, _| Reply::new(200, body.clone()).with("Content-Type", "text/html"));
        let want = "the answer (text/html) is no list of files; is a proxy or a login page in between? (";
        assert!(message.contains(want), "{message}");
    }
    for raw in
        ["", "x", "HTTP/1.1 200", "HTTP/9.9 200 OK\r\n\r\n", "HTTP/1.1 999999 X\r\n\r\n", "\0\0\0\0\r\n\r\n"]
    {
        attack(&sandbox, move |_, reply| Reply { raw: Some(raw.as_bytes().to_vec()), ..reply });
    }
    let bad = ["Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: x"];
    for header in
        bad.into_iter().chain(["Transfer-Encoding: chunked\r\nContent-Length: 5", "Content-Encoding: gzip"])
    {
        let raw = format!("HTTP/1.1 200 OK\r\n{header}\r\n\r\nzzzzzzzz");
        attack(&sandbox, move |_, reply| Reply { raw: Some(raw.as_bytes().to_vec()), ..reply });
    }
    sandbox.is_untouched();
}

/// The announced lengths and the bytes that arrive.
#[test]
fn lengths_must_agree() {
    let sandbox = || Sandbox::new();
    let get = |asked: &Asked| asked.is("GET", CONFIG);
    for (length, want) in [("-1", "its length is -1"), ("x", "its length is x"), ("1e9", "its length is 1e9")]
    {
        let message = attack_file(move |reply| reply.with("X-Linked-Size", length));
        assert!(message.contains(want), "{message}");
    }
    let message = attack_file(|reply| reply.with("X-Linked-Size", u64::MAX));
    assert!(
        message.ends_with("has 18446744073709551615 bytes; at most 16777216 are downloaded"),
        "{message}"
    );
    let message = attack_file(|reply| reply.with("X-Linked-Size", 7));
    assert!(message.ends_with("the hub sends 19 bytes, but said before that they are 7"), "{message}");
    let message = attack_file(|reply| reply.with("X-Linked-Size", 20));
    assert!(message.ends_with("the hub sends 19 bytes, but said before that they are 20"), "{message}");
    // Without a length in the answer itself.
    for (body, want) in [
        ("{\"model_type\": \"x\"}+", "the hub sends more than its 19 bytes"),
        ("{\"model_type\": \"x\"", "the connection was cut"),
    ] {
        let sandbox = sandbox();
        let (message, _) = attack(&sandbox, move |asked, reply| match get(asked) {
            true => Reply { raw: Some(format!("HTTP/1.1 200 OK\r\n\r\n{body}").into_bytes()), ..reply },
            false => reply,
        });
        assert!(message.contains(want), "{message}");
    }
    let sandbox = sandbox();
    let (message, _) = attack(&sandbox, move |asked, reply| match get(asked) {
        true => Reply { endless: true, ..reply },
        false => reply,
    });
    assert!(message.ends_with("the hub sends more than its 19 bytes"), "{message}");
    no_config(&sandbox);
}

#[test]
fn contents_must_have_their_digest() {
    for name in [CONFIG, SINGLE] {
        let sandbox = Sandbox::new();
        let (message, asked) = attack(&sandbox, move |asked, mut reply| {
            if asked.path.ends_with(name) {
                reply.body.iter_mut().for_each(|byte| *byte ^= 1);
            }
            reply
        });
        assert!(
            message.contains("what arrived has ") && message.contains(", but the hub says "),
            "{message}"
        );
        assert!(asked < 9, "another attempt does not help");
        let tree = sandbox.tree();
        assert!(!tree.iter().any(|path| path.contains("incomplete") || path.contains("refs")), "{tree:?}");
    }
}

/// A model with weights that a connection cannot carry at once.
fn large() -> Files {
    let mut files = small();
    files[2].1 = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    files
}

/// `reply` as it is, but cut after `bytes` of its body.
fn cut(mut reply: Reply, bytes: usize) -> Reply {
    let length = reply.body.len();
    reply.body.truncate(bytes);
    reply.with("Content-Length", length)
}

#[test]
fn cut_downloads_are_resumed() {
    let (endpoint, asked) = serve(|asked| match honest(&large(), asked) {
        reply if asked.is("GET", SINGLE) => cut(reply, 500_000),
        reply => reply,
    });
    let sandbox = Sandbox::new();
    let mut seen = Vec::new();
    let path = sandbox.hub(&endpoint).resolve("org/name", &mut |progress| seen.push(progress.bytes)).unwrap();
    assert_eq!(std::fs::read(path.join(SINGLE)).unwrap(), large()[2].1);
    let asked = asked.lock().unwrap();
    let parts: Vec<_> =
        asked.iter().filter(|asked| asked.is("GET", SINGLE)).map(|asked| asked.header("Range")).collect();
    assert_eq!(parts, [None, Some("bytes=500000-"), Some("bytes=1000000-")]);
    let tag = format!("\"{}\"", sha256(&large()[2].1));
    assert_eq!(asked[asked.len() - 1].header("If-Range"), Some(tag.as_str()));
    assert_eq!(seen.last(), Some(&1_200_000));
}

#[test]
fn what_was_cut_is_resumed_by_the_next_command() {
    let mut sandbox = Sandbox::new();
    sandbox.limits.attempts = 1;
    let (endpoint, _) = serve(|asked| match honest(&large(), asked) {
        reply if asked.is("GET", SINGLE) => cut(reply, 700_000),
        reply => reply,
    });
    let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert!(message.contains("model.safetensors: the connection was cut"), "{message}");
    assert!(!sandbox.repository().join("refs").exists());
    let (endpoint, asked) = serve(|asked| honest(&large(), asked));
    let path = sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(std::fs::read(path.join(SINGLE)).unwrap(), large()[2].1);
    let asked = asked.lock().unwrap();
    assert_eq!(asked.len(), 3, "the small files are there: {asked:?}");
    assert_eq!(asked[2].header("Range"), Some("bytes=700000-"));
}

#[test]
fn a_hub_that_ignores_ranges_starts_anew() {
    let (endpoint, _) = serve(|asked| {
        let mut plain = asked.clone();
        plain.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("Range"));
        let first = asked.header("Range").is_none();
        match honest(&large(), &plain) {
            reply if asked.is("GET", SINGLE) && first => cut(reply, 700_000),
            reply => reply,
        }
    });
    let sandbox = Sandbox::new();
    let path = sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(std::fs::read(path.join(SINGLE)).unwrap(), large()[2].1);
}

/// If the first part does not fit the rest, all of it is downloaded again, once.
#[test]
fn parts_that_do_not_fit_are_downloaded_anew() {
    let blob = sha256(&large()[2].1);
    for planted in [vec![7; 700_000], vec![7; 1_200_000], vec![7; 1_300_000]] {
        let sandbox = Sandbox::new();
        std::fs::create_dir_all(sandbox.repository().join("blobs")).unwrap();
        std::fs::write(sandbox.repository().join("blobs").join(format!("{blob}.incomplete")), planted)
            .unwrap();
        let (endpoint, _) = serve(|asked| honest(&large(), asked));
        let path = sandbox.resolve(&endpoint, "org/name").unwrap();
        assert_eq!(std::fs::read(path.join(SINGLE)).unwrap(), large()[2].1);
    }
    // Always wrong, and always cut: it ends.
    let sandbox = Sandbox::new();
    let (endpoint, asked) = serve(|asked| match honest(&large(), asked) {
        reply if asked.is("GET", SINGLE) => {
            let mut reply = cut(reply, 700_000);
            reply.body.fill(7);
            reply
        }
        reply => reply,
    });
    let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert!(message.contains("what arrived has SHA-256 "), "{message}");
    assert!(asked.lock().unwrap().len() < 15);
}

#[test]
fn answers_to_ranges_must_fit() {
    let range = |range: &'static str| {
        let sandbox = Sandbox::new();
        let (endpoint, _) = serve(move |asked| match honest(&large(), asked) {
            reply if !asked.is("GET", SINGLE) => reply,
            reply if asked.header("Range").is_none() => cut(reply, 700_000),
            reply => reply.with("Content-Range", range),
        });
        sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string()
    };
    for text in
        ["bytes 0-1199999/1200000", "bytes 700001-1199999/1200000", "bytes 700000-1199999/1200001", "x", ""]
    {
        let message = range(text);
        assert!(message.contains("but was asked for bytes 700000-1199999/1200000"), "{message}");
    }
    let message = attack_file(|reply| Reply { status: 206, ..reply });
    assert!(message.ends_with("the hub sends a part, but was asked for the whole file"), "{message}");
    let message = attack_file(|reply| Reply { status: 416, ..reply });
    assert!(message.contains("the hub answers 416"), "{message}");
    // 416 whenever a part is asked for.
    let sandbox = Sandbox::new();
    let (endpoint, asked) = serve(move |asked| match honest(&large(), asked) {
        reply if !asked.is("GET", SINGLE) => reply,
        reply if asked.header("Range").is_none() => cut(reply, 700_000),
        _ => Reply::new(416, ""),
    });
    let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert!(message.ends_with("in 4 attempts"), "{message}");
    assert!(asked.lock().unwrap().len() < 15);
}

/// Without a digest as ETag, nothing but the ETag says that two parts are of one file.
#[test]
fn a_file_that_changes_under_its_etag_is_noticed() {
    let serve_tagged = |second: &'static str| {
        serve(move |asked| {
            let get = asked.is("GET", SINGLE);
            let tag = if get && asked.header("Range").is_some() { second } else { "\"one\"" };
            match honest(&large(), asked) {
                reply if !asked.path.ends_with(SINGLE) => reply,
                reply if get && asked.header("Range").is_none() => cut(reply, 700_000).with("ETag", tag),
                reply => reply.with("ETag", tag),
            }
        })
    };
    let sandbox = Sandbox::new();
    let message = sandbox.resolve(&serve_tagged("\"two\"").0, "org/name").unwrap_err().to_string();
    assert!(
        message.ends_with("it changed while it was downloaded: its ETag was one and is two"),
        "{message}"
    );
    assert!(
        !sandbox.tree().iter().any(|path| path.contains("one") || path.contains("two")),
        "{:?}",
        sandbox.tree()
    );
    let (endpoint, _) = serve_tagged("\"one\"");
    let path = sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(std::fs::read(path.join(SINGLE)).unwrap(), large()[2].1);
}
