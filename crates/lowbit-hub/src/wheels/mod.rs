//! Packages of a Python package index, as much of them as it takes to bring NVIDIA's run-time
//! compiler: a package's wheels for this machine, one of them verified by its SHA-256, and some of
//! its files unpacked.
//!
//! The index is trusted for digests, since it is asked over TLS; where files lie need not be. Names
//! in a wheel never become paths: who unpacks says where each file goes.

#[cfg(test)]
mod tests;

use std::io::{Cursor, Read};
use std::path::{Component, Path, PathBuf};

use lowbit_files::{FileError, shown};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use zip::ZipArchive;
use zip::read::ZipFile;

use crate::client::{Client, Paced, Problem, Request, Site};
use crate::{HubError, HubLimits, Progress};

/// The most bytes of a wheel.
const LARGEST: u64 = 1 << 30;
/// The most bytes of a wheel's files.
const UNPACKED: u64 = 1 << 30;

/// A Python package index with the JSON answers of PEP 691, and how it is reached.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Index {
    /// The address that packages' names are appended to.
    pub address: String,
    /// The proxy of all connections.
    pub proxy: Option<ureq::Proxy>,
    /// The limits of an answer.
    pub limits: HubLimits,
}

/// A package's file for this machine, whatever the version of Python.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Wheel {
    /// The package's name, as it was asked for.
    pub package: String,
    /// The parts of the version, which is final: no release candidate.
    pub version: Vec<u32>,
    /// 64 hexadecimal digits.
    pub sha256: String,
    /// The whole address.
    url: String,
}

/// A file's entry in the index.
#[derive(Deserialize)]
struct Listed {
    filename: String,
    url: String,
    #[serde(default)]
    hashes: Hashes,
    /// False, or true, or the reason.
    #[serde(default)]
    yanked: serde_json::Value,
}

#[derive(Default, Deserialize)]
struct Hashes {
    sha256: Option<String>,
}

#[derive(Deserialize)]
struct Page {
    files: Vec<Listed>,
}

impl Index {
    /// The public index, without a proxy.
    pub fn new() -> Self {
        Self { address: "https://pypi.org/simple".into(), proxy: None, limits: HubLimits::default() }
    }

    /// The proxy that the environment names, as for models.
    pub fn proxy_of_environment() -> Option<ureq::Proxy> {
        ureq::Proxy::try_from_env()
    }

    /// The wheels of `package` for this machine, the newest first.
    ///
    /// # Errors
    /// [`HubError::Package`] when the index cannot be reached, does not have the package or answers
    /// something else.
    pub fn wheels(&self, package: &str) -> Result<Vec<Wheel>, HubError> {
        let path = format!("{package}/");
        let bytes =
            self.get(&self.address, &path, self.limits.list, &mut |_, _| {}).map_err(failed(package))?;
        let page: Page = serde_json::from_slice(&bytes).map_err(|error| {
            let problem = format!(
                "the package index does not answer with a list of files in JSON; is a proxy or a login page in between? ({})",
                shown(error)
            );
            HubError::Package { package: package.into(), problem }
        })?;
        let folder = format!("{}/{path}", self.address.trim_end_matches('/'));
        let mut wheels: Vec<_> =
            page.files.into_iter().filter_map(|listed| listed.wheel(package, &folder)).collect();
        wheels.sort_by(|a, b| b.version.cmp(&a.version));
        Ok(wheels)
    }

    /// The whole wheel, verified.
    ///
    /// # Errors
    /// [`HubError::Package`] when it does not arrive, or has another SHA-256 than the index says.
    pub fn download(
        &self,
        wheel: &Wheel,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Vec<u8>, HubError> {
        let failed = failed(&wheel.package);
        // Files may lie on another server than the index.
        let start = wheel.url.find("://").map_or(0, |at| at + 3);
        let (origin, path) =
            wheel.url.split_at(wheel.url[start..].find('/').map_or(wheel.url.len(), |at| at + start));
        if self.address.starts_with("https:") && !origin.starts_with("https:") {
            return Err(failed(format!("the index refers to {}, which is no https", shown(origin))));
        }
        let mut report = |bytes, total| progress(Progress { file: &wheel.package, bytes, total });
        let bytes = self.get(origin, path.trim_start_matches('/'), LARGEST, &mut report).map_err(&failed)?;
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if digest != wheel.sha256 {
            let want = &wheel.sha256;
            return Err(failed(format!("what arrived has SHA-256 {digest}, but the index says {want}")));
        }
        Ok(bytes)
    }

    /// All that `path` below `address` has, of at most `limit` bytes.
    fn get(
        &self,
        address: &str,
        path: &str,
        limit: u64,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<u8>, String> {
        let Self { proxy, limits, .. } = self.clone();
        let site =
            Site { name: "the package index", address, setting: "--index", token: None, proxy, limits };
        let client = Client::new(site, ureq::Agent::new_with_config)?;
        client.retried(|| once(&client, path, limit, report)).map_err(Problem::text)
    }
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

fn failed(package: &str) -> impl Fn(String) -> HubError + '_ {
    move |problem| HubError::Package { package: package.into(), problem }
}

fn once(
    client: &Client,
    path: &str,
    limit: u64,
    report: &mut dyn FnMut(u64, u64),
) -> Result<Vec<u8>, Problem> {
    let request = Request {
        path,
        accept: Some("application/vnd.pypi.simple.v1+json, */*;q=0.1"),
        bytes: limit.min(LARGEST / 8),
        ..Default::default()
    };
    let mut answer = client.send(request)?;
    match answer.status {
        200 => {}
        404 => {
            return Err(Problem::Lasting("the package index answers 404: there is no such package".into()));
        }
        status @ (408 | 429 | 500..=599) => {
            return Err(Problem::Passing(format!("the package index answers {status}")));
        }
        status => return Err(Problem::Lasting(format!("the package index answers {status}"))),
    }
    let length = answer.headers.get("Content-Length").and_then(|length| length.to_str().ok()?.parse().ok());
    let mut paced = Paced::new(answer.body.as_reader(), client);
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; 128 << 10]);
    loop {
        let read = paced.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        bytes.extend_from_slice(&buffer[..read]);
        let received = bytes.len() as u64;
        if received > limit {
            return Err(Problem::Lasting(format!("the answer has more than {limit} bytes")));
        }
        report(received, length.unwrap_or(received).max(received));
    }
    match length {
        Some(length) if length != bytes.len() as u64 => {
            let received = bytes.len();
            Err(Problem::Passing(format!("the connection was cut after {received} of {length} bytes")))
        }
        _ => Ok(bytes),
    }
}

/// True if wheels of this platform's name run on this machine.
fn is_mine(platform: &str) -> bool {
    match (cfg!(windows), std::env::consts::ARCH) {
        (true, "x86_64") => platform == "win_amd64",
        (true, "aarch64") => platform == "win_arm64",
        (_, arch) => platform.starts_with("manylinux") && platform.ends_with(&format!("_{arch}")),
    }
}

impl Listed {
    /// The file as a wheel, if it is one for this machine. `folder` is where relative addresses
    /// begin.
    fn wheel(self, package: &str, folder: &str) -> Option<Wheel> {
        let is_yanked = matches!(self.yanked, serde_json::Value::Bool(true) | serde_json::Value::String(_));
        let mut parts = self.filename.strip_suffix(".whl")?.split('-');
        let (_name, version, _python, _abi, platforms) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if is_yanked || parts.next().is_some() || !platforms.split('.').any(is_mine) {
            return None;
        }
        let version = version.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()?;
        let sha256 = self.hashes.sha256.map(|digest| digest.to_ascii_lowercase())?;
        let is_digest = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
        let url = self.url.split('#').next().unwrap_or_default();
        let url = match url.contains("://") {
            true => url.to_string(),
            false => joined(folder, url),
        };
        is_digest.then(|| Wheel { package: package.into(), version, sha256, url })
    }
}

/// A relative address on a page of `folder`.
fn joined(folder: &str, mut relative: &str) -> String {
    let start = folder.find("://").map_or(0, |at| at + 3);
    let origin = folder[start..].find('/').map_or(folder.len(), |at| at + start);
    if relative.starts_with('/') {
        return format!("{}{relative}", &folder[..origin]);
    }
    let mut base = folder.trim_end_matches('/');
    while let Some(rest) = relative.strip_prefix("../") {
        relative = rest;
        base = base.rfind('/').filter(|&at| at >= origin).map_or(&folder[..origin], |at| &base[..at]);
    }
    format!("{base}/{relative}")
}

impl Wheel {
    /// The first two parts of the version.
    pub fn minor(&self) -> (u32, u32) {
        let part = |at| self.version.get(at).copied().unwrap_or(0);
        (part(0), part(1))
    }
}

impl std::fmt::Display for Wheel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let version: Vec<_> = self.version.iter().map(u32::to_string).collect();
        write!(f, "{} {}", self.package, version.join("."))
    }
}

/// Writes those of a wheel's files into `folder` for which `place` has a path there. Returns how
/// many there are.
///
/// # Errors
/// [`HubError::Package`] for a file that is no wheel, one that does not unpack to what the wheel's
/// directory promises, and a path that leads out of the folder, named as `package`'s;
/// [`FileError::Io`] as [`HubError::File`].
pub fn unpack(
    package: &str,
    wheel: &[u8],
    folder: &Path,
    place: impl Fn(&str) -> Option<PathBuf>,
) -> Result<usize, HubError> {
    let failed = failed(package);
    let broken = |error| failed(format!("it is no zip file, or a broken one: {}", shown(error)));
    let mut archive = ZipArchive::new(Cursor::new(wheel)).map_err(broken)?;
    let (mut count, mut left) = (0, UNPACKED);
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(broken)?;
        if entry.is_dir() {
            continue;
        }
        let name = entry.name().map_err(broken)?.into_owned();
        let Some(below) = place(&name) else { continue };
        if below.as_os_str().is_empty()
            || !below.components().all(|part| matches!(part, Component::Normal(_)))
        {
            return Err(failed(format!("{} leads out of the folder", shown(&name))));
        }
        let content =
            content(&mut entry, left).map_err(|problem| failed(format!("{}: {problem}", shown(&name))))?;
        left -= content.len() as u64;
        let path = folder.join(below);
        let io = |file: &Path| {
            let file = file.to_path_buf();
            move |source| FileError::Io { file, source }
        };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(io(parent))?;
        }
        std::fs::write(&path, content).map_err(io(&path))?;
        count += 1;
    }
    Ok(count)
}

/// The content of `entry`, of at most `limit` bytes. Its checksum is verified.
fn content<R: Read>(entry: &mut ZipFile<'_, R>, limit: u64) -> Result<Vec<u8>, String> {
    let size = entry.size();
    if size > limit {
        return Err("it unpacks to more bytes than are wanted".into());
    }
    let mut content = vec![];
    // The checksum is compared where the content ends, behind the last byte.
    match entry.take(size + 1).read_to_end(&mut content) {
        Ok(read) if read as u64 == size => Ok(content),
        Ok(read) => Err(format!("it unpacks to {read} bytes, but should to {size}")),
        Err(error) => Err(format!("it does not unpack: {}", shown(error))),
    }
}
