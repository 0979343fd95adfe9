use std::collections::VecDeque;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowbit_hub::{Hub, HubSettings};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport,
};
use ureq::{Agent, Error};

use crate::split;

const VICTIM: &str = "nobody may touch this";

/// The bytes that a hub writes on one connection after the other, with a line `---` between them.
/// Whatever they are, files are written into the cache alone, and those that have their name are
/// whole.
pub fn hub(data: &[u8]) {
    // In memory where there is such a folder: the disk is not what is tested.
    let memory = Path::new("/dev/shm");
    let folder =
        if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.expect("a temporary folder");
    fs::write(folder.path().join("victim"), VICTIM).expect("a file");
    let answers = Wires(Arc::new(Mutex::new(split(data, b"\n---\n").map(Vec::from).collect())));
    let cache = folder.path().join("cache");
    let mut settings = HubSettings::new(cache.clone());
    settings.endpoint = "http://hub".into();
    settings.limits.backoff = Duration::ZERO;
    settings.limits.attempts = 3;
    settings.limits.headers = 8 << 10;
    settings.limits.list = 64 << 10;
    settings.limits.files = 8;
    let agent = move |config: Config| Agent::with_parts(config, answers.clone(), Nowhere);
    let hub = Hub::with_agent(settings, agent);
    for model in ["org/name", "org/name:Q8_0", "org/name"] {
        if let Ok(path) = hub.resolve(model, &mut |progress| assert!(progress.bytes <= progress.total)) {
            let path = path.canonicalize().expect("what was resolved is there");
            assert!(path.starts_with(cache.canonicalize().expect("a folder")), "{}", path.display());
        }
    }
    check(folder.path());
}

/// Only what belongs there is in the folder.
fn check(folder: &Path) {
    assert_eq!(fs::read_to_string(folder.join("victim")).expect("a file"), VICTIM);
    only(folder, &["victim", "cache"]);
    let cache = folder.join("cache");
    only(&cache, &["models--org--name", ".locks"]);
    let repository = cache.join("models--org--name");
    only(&repository, &["blobs", "snapshots", "refs"]);
    for (name, path) in entries(&repository.join("blobs")) {
        assert!(is_file(&path), "{name}");
        let (whole, etag) = match name.strip_suffix(".incomplete") {
            Some(etag) => (false, etag),
            None => (true, name.as_str()),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        assert!(etag.starts_with(|c: char| c.is_ascii_alphanumeric()) && etag.chars().all(plain), "{name}");
        if whole && is_hex(etag, &[64]) {
            let digest = Sha256::digest(fs::read(&path).expect("a file"));
            assert!(
                digest
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect::<String>()
                    .eq_ignore_ascii_case(etag)
            );
        }
    }
    for (commit, snapshot) in entries(&repository.join("snapshots")) {
        assert!(is_hex(&commit, &[40, 64]), "{commit}");
        for (name, path) in entries(&snapshot) {
            assert!(!name.starts_with('.') && !name.contains(['/', '\\']), "{name:?}");
            let target = path.canonicalize().expect("a link leads to a blob");
            let blobs = repository.join("blobs").canonicalize().expect("a folder");
            assert!(target.parent() == Some(&blobs) && is_file(&target), "{name}: {}", target.display());
        }
    }
    only(&repository.join("refs"), &["main"]);
    if let Ok(main) = fs::read_to_string(repository.join("refs/main")) {
        assert!(is_hex(&main, &[40, 64]), "{main}");
        assert!(repository.join("snapshots").join(main).is_dir());
    }
}

fn is_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file())
}

fn is_hex(text: &str, lengths: &[usize]) -> bool {
    lengths.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let entry = |entry: fs::DirEntry| (entry.file_name().into_string().expect("UTF-8"), entry.path());
    entries.map(|found| entry(found.expect("an entry"))).collect()
}

fn only(folder: &Path, names: &[&str]) {
    for (name, _) in entries(folder) {
        assert!(names.contains(&name.as_str()), "{name} in {}", folder.display());
    }
}

/// The answers that are left.
#[derive(Clone, Debug)]
struct Wires(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl Connector for Wires {
    type Out = Wire;

    fn connect(&self, _: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<Wire>, Error> {
        let bytes = self.0.lock().expect("no panic").pop_front().unwrap_or_default();
        Ok(Some(Wire { bytes, at: 0, buffers: LazyBuffers::new(16 << 10, 4 << 10) }))
    }
}

/// A connection on which the next answer has been written already.
#[derive(Debug)]
struct Wire {
    bytes: Vec<u8>,
    at: usize,
    buffers: LazyBuffers,
}

impl Transport for Wire {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, _: usize, _: NextTimeout) -> Result<(), Error> {
        Ok(())
    }

    fn await_input(&mut self, _: NextTimeout) -> Result<bool, Error> {
        let left = &self.bytes[self.at..];
        let space = self.buffers.input_append_buf();
        // In pieces, as a network has it.
        let count = left.len().min(space.len()).min(1000);
        space[..count].copy_from_slice(&left[..count]);
        self.buffers.input_appended(count);
        self.at += count;
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        false
    }
}

/// Every name has an address, and nobody asks for it.
#[derive(Debug)]
struct Nowhere;

impl Resolver for Nowhere {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        addresses.push(SocketAddr::from(([127, 0, 0, 1], 1)));
        Ok(addresses)
    }
}
