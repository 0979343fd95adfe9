//! A hub on the loopback, honest or not.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;
use sha1::Digest;
use tempfile::TempDir;

use crate::HubError;
use crate::{Hub, HubLimits, HubSettings, Token};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba98";
pub const CONFIG: &str = "/config.json";

/// A request.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    /// The number of requests before it.
    pub number: usize,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn is_list(&self) -> bool {
        self.path.contains("/api/models/")
    }

    /// True if it is about the file with that end.
    pub fn is(&self, method: &str, end: &str) -> bool {
        self.method == method && self.path.ends_with(end)
    }
}

/// An answer, written part by part with a pause before each but the first.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// All that is sent, instead.
    pub raw: Option<Vec<u8>>,
    /// So many bytes at once, with pauses.
    pub drip: Option<(usize, Duration)>,
    /// Sends the body again and again, as chunks without an end.
    pub endless: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    /// The header, in place of one of that name.
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(name));
        self.and(name, value)
    }

    /// The header, beside one of that name.
    pub fn and(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.into(), value.to_string()));
        self
    }

    fn write(self, stream: &mut TcpStream, head: bool) -> std::io::Result<()> {
        let with_body = !head && self.raw.is_none();
        let mut bytes = self.raw.unwrap_or_else(|| {
            let mut text = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", self.status);
            let has = |name: &str| self.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
            if self.endless {
                text += "Transfer-Encoding: chunked\r\n";
            } else if !has("Content-Length") && !has("Transfer-Encoding") {
                text += &format!("Content-Length: {}\r\n", self.body.len());
            }
            for (name, value) in self.headers {
                text += &format!("{name}: {value}\r\n");
            }
            (text + "\r\n").into_bytes()
        });
        if self.endless {
            stream.write_all(&bytes)?;
            // It ends when the client hangs up; the bound is for a test that fails.
            for _ in 0..200_000 {
                write!(stream, "{:x}\r\n", self.body.len())?;
                stream.write_all(&self.body)?;
                stream.write_all(b"\r\n")?;
            }
            return Ok(());
        }
        if with_body {
            bytes.extend(self.body);
        }
        let (size, pause) = self.drip.unwrap_or((usize::MAX, Duration::ZERO));
        for part in bytes.chunks(size.min(bytes.len().max(1))).take(2000) {
            stream.write_all(part)?;
            std::thread::sleep(pause);
        }
        Ok(())
    }
}

/// Serves what `answer` says; returns the endpoint and what was asked for.
pub fn serve(answer: impl Fn(&Asked) -> Reply + Send + Sync + 'static) -> (String, Arc<Mutex<Vec<Asked>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let log = Arc::new(Mutex::new(Vec::new()));
    let (shared, answer) = (log.clone(), Arc::new(answer));
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (log, answer) = (shared.clone(), answer.clone());
            std::thread::spawn(move || converse(stream, &log, &*answer));
        }
    });
    (endpoint, log)
}

fn converse(mut stream: TcpStream, log: &Mutex<Vec<Asked>>, answer: &dyn Fn(&Asked) -> Reply) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let request = lines.next().unwrap_or_default();
    let mut words = request.split(' ').map(String::from);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let header = |line: String| line.split_once(": ").map(|(name, value)| (name.into(), value.into()));
    let headers = lines.take_while(|line| !line.is_empty()).filter_map(header).collect();
    let asked = {
        let mut log = log.lock().unwrap();
        let asked = Asked { method, path, headers, number: log.len() };
        log.push(asked.clone());
        asked
    };
    // The client may hang up before the end.
    _ = answer(&asked).write(&mut stream, asked.method == "HEAD");
}

/// git's name of a file with that content.
pub fn git(content: &[u8]) -> String {
    let digest =
        sha1::Sha1::new_with_prefix(format!("blob {}\0", content.len())).chain_update(content).finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn sha256(content: &[u8]) -> String {
    sha2::Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Files of a repository.
pub type Files = Vec<(String, Vec<u8>)>;

pub fn files(files: &[(&str, &str)]) -> Files {
    files.iter().map(|(name, content)| (name.to_string(), content.as_bytes().to_vec())).collect()
}

/// A small model.
pub fn small() -> Files {
    files(&[
        ("config.json", "{\"model_type\": \"x\"}"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", "weights"),
    ])
}

/// The answer of an honest hub that has `files` as `org/name`.
pub fn honest(files: &Files, asked: &Asked) -> Reply {
    let path = asked.path.trim_start_matches("/mirror");
    if path == "/api/models/org/name/revision/main" {
        let siblings: Vec<_> = files.iter().map(|(name, _)| json!({ "rfilename": name })).collect();
        let list = json!({ "siblings": siblings, "sha": COMMIT, "private": false });
        return Reply::new(200, list.to_string()).with("Content-Type", "application/json");
    }
    let name = path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/"));
    let Some((name, content)) = files.iter().find(|(known, _)| Some(known.as_str()) == name) else {
        return Reply::new(404, "no");
    };
    let digest =
        if name.contains("safetensors") || name.contains("gguf") { sha256(content) } else { git(content) };
    let length = content.len();
    let range =
        asked.header("Range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    let reply = match range {
        Some(first) if first < length => Reply::new(206, &content[first..])
            .with("Content-Range", format!("bytes {first}-{}/{length}", length - 1)),
        _ => Reply::new(200, content.clone()).with("Content-Length", length),
    };
    reply.with("ETag", format!("\"{digest}\"")).with("X-Repo-Commit", COMMIT)
}

/// Patient enough for a busy machine.
pub fn limits() -> HubLimits {
    let seconds = Duration::from_secs(20);
    let backoff = Duration::from_millis(1);
    HubLimits {
        connect: seconds,
        answer: seconds,
        idle: seconds,
        silence: 30 * seconds,
        window: seconds,
        backoff,
        ..HubLimits::default()
    }
}

/// A folder with a cache and a file that nobody may touch.
pub struct Sandbox {
    pub folder: TempDir,
    pub limits: HubLimits,
    pub token: Option<&'static str>,
}

impl Sandbox {
    pub fn new() -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("victim"), "precious").unwrap();
        Self { folder, limits: limits(), token: None }
    }

    pub fn path(&self, below: &str) -> std::path::PathBuf {
        self.folder.path().join(below)
    }

    pub fn repository(&self) -> std::path::PathBuf {
        self.path("cache/models--org--name")
    }

    pub fn hub(&self, endpoint: &str) -> Hub {
        let mut settings = HubSettings::new(self.path("cache"));
        settings.endpoint = endpoint.into();
        settings.limits = self.limits;
        settings.token = self.token.map(|token| Token::new(token).unwrap());
        Hub::new(settings)
    }

    pub fn resolve(&self, endpoint: &str, model: &str) -> Result<std::path::PathBuf, HubError> {
        self.hub(endpoint).resolve(model, &mut |_| {})
    }

    /// The content of the folder: files and links, but for locks, sorted.
    pub fn tree(&self) -> Vec<String> {
        let mut found = Vec::new();
        walk(self.folder.path(), "", &mut found);
        found.sort();
        found
    }

    /// Nothing was written but what is allowed before a file is whole.
    pub fn is_untouched(&self) {
        assert_eq!(self.tree(), ["victim"]);
        assert_eq!(std::fs::read_to_string(self.path("victim")).unwrap(), "precious");
    }
}

fn walk(folder: &Path, prefix: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            walk(&entry.path(), &format!("{name}/"), found);
        } else if kind.is_symlink() {
            found.push(format!("{name} -> {}", std::fs::read_link(entry.path()).unwrap().display()));
        } else if !name.ends_with(".lock") {
            found.push(name);
        }
    }
}
