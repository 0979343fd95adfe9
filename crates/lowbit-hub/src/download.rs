//! One file: from the hub to its blob, resumed where it was cut, verified, and only then named.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lowbit_files::staging::sync;

use super::Progress;
use super::answers::{self, Remote, announced, check_status, same_file};
use super::cache::{Repository, problem};
use super::client::{Answer, Attempts, Client, Paced, Problem, Request};
use super::names::{Commit, Digest, FileName, ModelName};
use super::verify::Verifier;

/// Receiving this many bytes resets the count of attempts: long downloads are cut more often.
const MUCH: u64 = 16 << 20;
/// The interval at which another process's lock is polled.
const LOOK: Duration = Duration::from_millis(50);

/// The source and the destination of a download.
pub(super) struct Transfer<'a> {
    pub client: &'a Client,
    pub repository: &'a Repository,
    pub model: ModelName<'a>,
    pub commit: &'a Commit,
}

impl Transfer<'_> {
    /// Downloads `file`, of at most `limit` bytes, unless its blob is there, and links it into the
    /// snapshot.
    pub fn fetch(
        &self,
        file: &FileName,
        limit: u64,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), Problem> {
        let Self { client, model, commit, .. } = *self;
        let remote = client.retried(|| answers::remote(client, model, commit, file))?;
        if remote.bytes > limit {
            let bytes = remote.bytes;
            return Err(Problem::Lasting(format!("has {bytes} bytes; at most {limit} are downloaded")));
        }
        let mut report = |bytes| progress(Progress { file: file.as_str(), bytes, total: remote.bytes });
        let folder = self.repository.blobs()?;
        let blob = self.repository.blob(&remote.etag);
        let lock = self.lock(&remote)?;
        // Whoever had the lock may have downloaded it.
        if !is_whole(&blob, &remote)? {
            let partial = match &lock {
                Some(_) => incomplete(&blob),
                // Without locks two processes must not write to one file.
                None => incomplete(&folder.join(format!("{}.{}", remote.etag.as_str(), std::process::id()))),
            };
            self.download(&partial, &remote, &mut report)?;
            fs::rename(&partial, &blob).map_err(|error| problem(&blob, &error))?;
        }
        report(remote.bytes);
        Ok(self.repository.link(commit, file, &remote.etag)?)
    }

    /// Waits for the file's lock as long as who has it makes progress. `None` on file systems that
    /// have no locks.
    fn lock(&self, remote: &Remote) -> Result<Option<File>, Problem> {
        let path = self.repository.lock(&remote.etag)?;
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(|error| problem(&path, &error))?;
        let partial = incomplete(&self.repository.blob(&remote.etag));
        let size = || fs::symlink_metadata(&partial).map_or(0, |metadata| metadata.len());
        let (mut seen, mut since) = (size(), Instant::now());
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::Error(_)) => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
            let now = size();
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > self.client.limits.window {
                let path = path.display();
                return Err(Problem::Lasting(format!(
                    "another process has locked {path} and makes no progress"
                )));
            }
        }
    }

    fn download(&self, path: &Path, remote: &Remote, report: &mut dyn FnMut(u64)) -> Result<(), Problem> {
        let mut partial = Partial::open(path, remote)?;
        let (mut attempts, mut best) = (Attempts::new(self.client.limits), partial.bytes);
        let result = loop {
            let before = partial.bytes;
            let result = self.attempt(&mut partial, remote, report).and_then(|()| partial.finish(remote));
            if partial.bytes > before {
                attempts.heard();
            }
            // A hub that makes a file start over again and again gets no extra attempts for it.
            if partial.bytes >= best.saturating_add(MUCH) {
                best = partial.bytes;
                attempts.reset();
            }
            match result.or_else(|problem| attempts.next(problem).map(|()| false)) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(problem) => break Err(problem),
            }
        };
        if result.is_err() && (partial.bytes == 0 || remote.etag.digest() == Digest::Unknown) {
            _ = fs::remove_file(path);
        }
        result
    }

    /// Appends the missing bytes, as many as arrive.
    fn attempt(
        &self,
        partial: &mut Partial,
        remote: &Remote,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), Problem> {
        report(partial.bytes);
        if partial.bytes == remote.bytes {
            return Ok(());
        }
        let from = (partial.bytes > 0).then_some((partial.bytes, remote.raw_etag.as_str()));
        let bytes = remote.bytes - partial.bytes;
        let request = Request { path: &remote.path, from, bytes, ..Default::default() };
        let mut answer = self.client.send(request)?;
        self.continues(&answer, partial, remote)?;
        let left = remote.bytes - partial.bytes;
        if let Some(length) =
            announced(&answer, partial.bytes, remote.bytes)?.filter(|length| *length != left)
        {
            let text = format!("the hub sends {length} bytes, but said before that they are {left}");
            return Err(Problem::Lasting(text));
        }
        let mut body = Paced::new(answer.body.as_reader(), self.client);
        let mut buffer = vec![0; 128 << 10];
        loop {
            let read = body.read(&mut buffer)?;
            if read as u64 > remote.bytes - partial.bytes {
                partial.restart()?;
                return Err(Problem::Lasting(format!("the hub sends more than its {} bytes", remote.bytes)));
            }
            if read == 0 {
                break;
            }
            partial.append(&buffer[..read])?;
            report(partial.bytes);
        }
        match partial.bytes == remote.bytes {
            true => Ok(()),
            false => {
                let Partial { bytes, .. } = partial;
                Err(Problem::Passing(format!(
                    "the connection was cut after {bytes} of {} bytes",
                    remote.bytes
                )))
            }
        }
    }

    /// Empties `partial` unless `answer` continues it.
    fn continues(&self, answer: &Answer, partial: &mut Partial, remote: &Remote) -> Result<(), Problem> {
        let is_verified = remote.etag.digest() != Digest::Unknown;
        if !is_verified {
            same_file(answer, remote)?;
        }
        match answer.status {
            206 if partial.bytes == 0 => {
                Err(Problem::Lasting("the hub sends a part, but was asked for the whole file".into()))
            }
            206 if is_verified || answer.is_endpoint => {
                partial.joined = true;
                Ok(())
            }
            // 416: the hub has nothing after these bytes. 206: without a digest, a part that does
            // not fit would go unnoticed.
            206 | 416 if partial.bytes > 0 => {
                partial.restart()?;
                Err(Problem::Passing("the hub does not continue the file".into()))
            }
            _ => {
                check_status(self.client, answer)?;
                Ok(partial.restart()?)
            }
        }
    }
}

/// The name of a blob until it is whole, as in huggingface_hub.
fn incomplete(blob: &Path) -> PathBuf {
    let mut path = blob.as_os_str().to_owned();
    path.push(".incomplete");
    path.into()
}

/// True if the blob exists and is as `remote` says. Otherwise it stays until another is renamed
/// over it: other files may be links to it.
fn is_whole(blob: &Path, remote: &Remote) -> Result<bool, String> {
    let Ok(metadata) = fs::symlink_metadata(blob) else { return Ok(false) };
    if !metadata.is_file() {
        return Ok(false);
    }
    let (here, want) = (metadata.len(), remote.bytes);
    if here != want {
        return match remote.etag.digest() {
            // It may be another file's, whose link would lead to this one.
            Digest::Unknown => {
                let tag = remote.etag.as_str();
                Err(format!("its ETag is {tag} and it has {want} bytes, but {} has {here}", blob.display()))
            }
            _ => Ok(false),
        };
    }
    let mut verifier = Verifier::new(&remote.etag, want);
    let mut file = File::open(blob).map_err(|error| problem(blob, &error))?;
    update(&mut verifier, &mut file).map_err(|error| problem(blob, &error))?;
    Ok(verifier.finish(&remote.etag).is_ok())
}

fn update(verifier: &mut Verifier, file: &mut File) -> Result<u64, std::io::Error> {
    let (mut buffer, mut bytes) = (vec![0; 128 << 10], 0);
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(bytes);
        }
        verifier.update(&buffer[..read]);
        bytes += read as u64;
    }
}

/// The beginning of a file.
struct Partial {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Hashes the bytes written so far.
    verifier: Verifier,
    /// Of zero bytes.
    start: Verifier,
    /// True if its parts are from several answers.
    joined: bool,
}

impl Partial {
    /// The file of an earlier download, if it can be verified in the end, or a new file.
    fn open(path: &Path, remote: &Remote) -> Result<Self, String> {
        let failed = |error| problem(path, &error);
        let usable = remote.etag.digest() != Digest::Unknown
            && fs::symlink_metadata(path)
                .is_ok_and(|metadata| metadata.is_file() && metadata.len() <= remote.bytes);
        if !usable && fs::symlink_metadata(path).is_ok() {
            fs::remove_file(path).map_err(failed)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).append(true);
        let mut file =
            if usable { options.open(path) } else { options.create_new(true).open(path) }.map_err(failed)?;
        let start = Verifier::new(&remote.etag, remote.bytes);
        let mut verifier = start.clone();
        let bytes = update(&mut verifier, &mut file).map_err(failed)?;
        Ok(Self { path: path.into(), file, bytes, verifier, start, joined: bytes > 0 })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), String> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(format!("{}: nothing more can be written", self.path.display())),
                Ok(written) => {
                    self.verifier.update(&rest[..written]);
                    self.bytes += written as u64;
                    rest = &rest[written..];
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(problem(&self.path, &error)),
            }
        }
        Ok(())
    }

    /// Drops the bytes received so far.
    fn restart(&mut self) -> Result<(), String> {
        self.file.set_len(0).map_err(|error| problem(&self.path, &error))?;
        (self.bytes, self.joined) = (0, false);
        self.verifier = self.start.clone();
        Ok(())
    }

    /// Checks the whole file; true if it is right. If it was joined from several answers, the next
    /// attempt starts over.
    fn finish(&mut self, remote: &Remote) -> Result<bool, Problem> {
        let Err(text) = self.verifier.clone().finish(&remote.etag) else {
            sync(&self.file).map_err(|error| problem(&self.path, &error))?;
            return Ok(true);
        };
        let joined = self.joined;
        self.restart()?;
        Err(if joined { Problem::Passing(text) } else { Problem::Lasting(text) })
    }
}
