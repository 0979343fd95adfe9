//! A repository's folder in the cache, laid out as huggingface_hub does: `blobs/ETAG`,
//! `snapshots/COMMIT/FILE` (links to blobs) and `refs/main`.
//!
//! Nothing is written through a link below the cache's own folder, and no link that leads out of it
//! is followed: an earlier client may have let a hub place one.

use std::fs::{self, DirEntry, File};
use std::io::{Error, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::names::{Commit, ETag, FileName, ModelName, TEMPLATES};
use lowbit_files::shown;
use lowbit_files::staging::sync;

/// The most files of a snapshot that are listed.
const ENTRIES: usize = 10_000;

/// A repository in the cache.
pub(super) struct Repository {
    cache: PathBuf,
    folder: PathBuf,
    name: String,
}

/// The message for an error of the cache at `path`.
pub(super) fn problem(path: &Path, error: &Error) -> String {
    let path = path.display();
    match error.kind() {
        ErrorKind::StorageFull => format!("{path}: the disk is full"),
        ErrorKind::QuotaExceeded => format!("{path}: the disk quota is used up"),
        ErrorKind::FileTooLarge => format!("{path}: the file system allows no file of that size"),
        _ => format!("{path}: {error}"),
    }
}

impl Repository {
    pub fn new(cache: &Path, model: ModelName<'_>) -> Self {
        let name = model.folder();
        Self { cache: cache.into(), folder: cache.join(&name), name }
    }

    /// The commit that `refs/main` names.
    pub fn main(&self) -> Option<Commit> {
        let path = self.folder.join("refs/main");
        let bytes =
            fs::symlink_metadata(&path).ok()?.is_file().then(|| lowbit_files::read::read(&path, 100))?;
        Commit::parse(str::from_utf8(&bytes.ok()?).ok()?.trim())
    }

    pub fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.folder.join("snapshots").join(commit.as_str())
    }

    pub fn blob(&self, etag: &ETag) -> PathBuf {
        self.folder.join("blobs").join(etag.as_str())
    }

    /// The files of a snapshot that are there whole, sorted.
    ///
    /// # Errors
    /// A link that leads out of the cache.
    pub fn files(&self, commit: &Commit) -> Result<Vec<FileName>, String> {
        let mut files = self.files_in(&self.snapshot(commit), "")?;
        files.extend(self.files_in(&self.snapshot(commit).join(TEMPLATES), TEMPLATES)?);
        let folders = fs::read_dir(self.snapshot(commit)).into_iter().flatten().flatten().take(ENTRIES);
        for folder in folders.filter_map(|entry| entry.file_name().into_string().ok()) {
            let Some(file) = FileName::of_module(&folder) else { continue };
            let found = self.files_in(&self.snapshot(commit).join(&folder), &format!("{folder}/"))?;
            files.extend(found.into_iter().filter(|found| *found == file));
        }
        files.sort_unstable();
        Ok(files)
    }

    /// The files in `folder`, with `prefix` before their names.
    fn files_in(&self, folder: &Path, prefix: &str) -> Result<Vec<FileName>, String> {
        let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
        // The user may have moved the repository or the whole cache, and left a link.
        let homes: Vec<PathBuf> =
            [&self.cache, &self.folder].into_iter().filter_map(|home| home.canonicalize().ok()).collect();
        let inside = |path: &Path| homes.iter().any(|home| path.starts_with(home));
        let mut files = Vec::new();
        for entry in entries.flatten().take(ENTRIES) {
            let Some(target) = target(&entry) else { continue };
            if !inside(&target) {
                let (link, target) = (entry.path(), target.display());
                return Err(format!(
                    "{}: is a link to {}, out of the cache; remove it",
                    shown(link.display()),
                    shown(target)
                ));
            }
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap_or_default());
            files.extend(FileName::parse(&name).filter(|_| target.is_file()));
        }
        Ok(files)
    }

    /// A folder of the repository, made if it is missing.
    ///
    /// # Errors
    /// A link in its place, or what the system says.
    fn make(&self, parts: &[&str]) -> Result<PathBuf, String> {
        fs::create_dir_all(&self.cache).map_err(|error| problem(&self.cache, &error))?;
        let mut path = self.cache.clone();
        for part in parts {
            path.push(part);
            match fs::create_dir(&path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(problem(&path, &error)),
                _ => {}
            }
            let metadata = fs::symlink_metadata(&path).map_err(|error| problem(&path, &error))?;
            if !metadata.is_dir() {
                let what = if metadata.is_symlink() { "a link" } else { "a file" };
                return Err(format!(
                    "{}: should be a folder of the cache, but is {what}; remove it",
                    path.display()
                ));
            }
        }
        Ok(path)
    }

    /// The folder of blobs.
    pub fn blobs(&self) -> Result<PathBuf, String> {
        self.make(&[&self.name, "blobs"])
    }

    /// The file whose lock says who downloads `etag`: the one that huggingface_hub takes.
    pub fn lock(&self, etag: &ETag) -> Result<PathBuf, String> {
        let path = self.make(&[".locks", &self.name])?.join(format!("{}.lock", etag.as_str()));
        match fs::symlink_metadata(&path) {
            Ok(metadata) if !metadata.is_file() => Err(format!("{}: should be a plain file", path.display())),
            _ => Ok(path),
        }
    }

    /// Gives the blob its name in the snapshot.
    pub fn link(&self, commit: &Commit, file: &FileName, etag: &ETag) -> Result<(), String> {
        let snapshot = self.make(&[&self.name, "snapshots", commit.as_str()])?;
        let folder = match file.folder() {
            Some(folder) => self.make(&[&self.name, "snapshots", commit.as_str(), folder])?,
            None => snapshot.clone(),
        };
        let (path, beside) = (snapshot.join(file.as_str()), folder.join(unique()));
        // A process that was killed may have had the same number.
        _ = fs::remove_file(&beside);
        let linked = link(&self.blob(etag), file, etag, &beside).and_then(|()| fs::rename(&beside, &path));
        linked.map_err(|error| {
            _ = fs::remove_file(&beside);
            problem(&path, &error)
        })
    }

    /// Points `refs/main` at `commit`.
    pub fn set_main(&self, commit: &Commit) -> Result<(), String> {
        let refs = self.make(&[&self.name, "refs"])?;
        let (path, beside) = (refs.join("main"), refs.join(unique()));
        _ = fs::remove_file(&beside);
        let write = || {
            let mut file = File::create_new(&beside)?;
            file.write_all(commit.as_str().as_bytes())?;
            sync(&file)?;
            fs::rename(&beside, &path)
        };
        write().map_err(|error| {
            _ = fs::remove_file(&beside);
            problem(&path, &error)
        })
    }
}

/// The target of a snapshot's entry; `None` when nothing is there.
fn target(entry: &DirEntry) -> Option<PathBuf> {
    entry.path().canonicalize().ok()
}

#[cfg(unix)]
fn link(_: &Path, file: &FileName, etag: &ETag, path: &Path) -> Result<(), Error> {
    let blobs = if file.folder().is_some() { "../../../blobs" } else { "../../blobs" };
    std::os::unix::fs::symlink(Path::new(blobs).join(etag.as_str()), path)
}

/// Links need rights that not everybody has.
#[cfg(not(unix))]
fn link(blob: &Path, _: &FileName, _: &ETag, path: &Path) -> Result<(), Error> {
    fs::hard_link(blob, path).or_else(|_| fs::copy(blob, path).map(|_| ()))
}

/// A unique temporary name, for a file that is renamed once it is complete.
fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!(".{}-{}.incomplete", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}
