//! Models by name: `org/name` on the Hugging Face hub, in the cache that Python's huggingface_hub uses.

mod choose;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo};

use crate::FileError;
use crate::checkpoint::{CONFIG, shard_names};
use crate::{INDEX, SINGLE};

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is being downloaded.
    pub file: &'a str,
    /// Its bytes that are here.
    pub bytes: u64,
    /// All its bytes.
    pub total: u64,
}

/// Finds a model: `model` itself when there is such a path, else the model of that name on the Hugging Face hub,
/// from the cache when it is there whole, else downloaded into it.
///
/// `org/name` is a directory of config.json and safetensors, or the one GGUF model of a repository that has only
/// GGUF; `org/name:Q4_K_M` names one of several. As in huggingface_hub, `HF_HOME` says where the cache is (else
/// `~/.cache/huggingface`), and a token that `hf auth login` stored there is used.
///
/// # Errors
/// [`FileError::NoSuchModel`], or [`FileError::Download`] when the network is needed and fails.
pub fn resolve(model: &str) -> Result<PathBuf, FileError> {
    resolve_with(model, &mut |_| {})
}

/// [`resolve`], with `progress` called as a download goes on.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_with(model: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, FileError> {
    match Path::new(model) {
        path if path.exists() => Ok(path.into()),
        _ => Hub::new().resolve(model, progress),
    }
}

/// Where models are looked for.
struct Hub {
    cache: Cache,
    builder: ApiBuilder,
}

/// `org/name` or `org/name:tag`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Name<'a> {
    whole: &'a str,
    repository: &'a str,
    tag: Option<&'a str>,
}

impl<'a> Name<'a> {
    fn parse(whole: &'a str) -> Option<Self> {
        let (repository, tag) = match whole.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (whole, None),
        };
        let (org, name) = repository.split_once('/')?;
        let is_allowed = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(allowed)
        };
        let all = [Some(org), Some(name), tag].into_iter().flatten().all(is_allowed);
        all.then_some(Self { whole, repository, tag })
    }

    fn missing(&self, problem: impl Into<String>) -> FileError {
        FileError::NoSuchModel { model: self.whole.into(), problem: problem.into() }
    }
}

/// The files of a checkpoint that are read, but for config.json and the tensors.
const FILES: [&str; 5] =
    ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.json", INDEX];

impl Hub {
    fn new() -> Self {
        Self { cache: Cache::from_env(), builder: ApiBuilder::from_env() }
    }

    fn resolve(self, model: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, FileError> {
        let Some(name) = Name::parse(model) else {
            let problem = "there is no such file or directory, and it is no name of the form org/name";
            return Err(FileError::NoSuchModel { model: model.into(), problem: problem.into() });
        };
        if let Some(path) = self.cached(name)? {
            return Ok(path);
        }
        let api = self.builder.with_progress(false).build();
        let failed = |what: &str, error| download_error(name, what, error);
        let api: Api = api.map_err(|error| failed("anything", error))?;
        let repository = api.repo(Repo::model(name.repository.into()));
        let info = repository.info().map_err(|error| failed("the list of its files", error))?;
        let listed: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Download { name, repository, progress }.run(&listed)
    }

    /// The model, if the cache has all of it.
    fn cached(&self, name: Name<'_>) -> Result<Option<PathBuf>, FileError> {
        let repository = self.cache.repo(Repo::model(name.repository.into()));
        let refs = self.cache.path().join(Repo::model(name.repository.into()).folder_name());
        let Ok(commit) = std::fs::read_to_string(refs.join("refs/main")) else { return Ok(None) };
        let snapshot = refs.join("snapshots").join(commit.trim());
        let has = |file: &str| repository.get(file).is_some();
        if name.tag.is_none() && has(CONFIG) && has("tokenizer.json") {
            let shards = match repository.get(INDEX) {
                Some(index) => shard_names(&index)?,
                None => vec![SINGLE.into()],
            };
            if shards.iter().all(|shard| has(shard)) {
                return Ok(Some(snapshot));
            }
        }
        let Ok(entries) = std::fs::read_dir(&snapshot) else { return Ok(None) };
        let names: Vec<_> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        let parts = choose::gguf(&names, name.tag).unwrap_or_default();
        let whole = choose::expected(&parts) == parts;
        Ok(parts.first().filter(|_| whole).map(|first| snapshot.join(first)))
    }
}

/// A download under way.
struct Download<'a, 'p> {
    name: Name<'a>,
    repository: ApiRepo,
    progress: &'p mut dyn FnMut(Progress<'_>),
}

impl Download<'_, '_> {
    fn run(mut self, listed: &[String]) -> Result<PathBuf, FileError> {
        let has = |file: &str| listed.iter().any(|name| name == file);
        let weights = listed.iter().any(|name| name.ends_with(".safetensors"));
        if self.name.tag.is_none() && has(CONFIG) && weights {
            return self.safetensors(&has);
        }
        let parts = choose::gguf(listed, self.name.tag).map_err(|problem| self.name.missing(problem))?;
        let mut paths = Vec::new();
        for part in choose::expected(&parts) {
            paths.push(self.file(&part)?);
        }
        Ok(paths.swap_remove(0))
    }

    /// Small files first, config.json last of them: once the tensors are there, everything is.
    fn safetensors(mut self, has: &dyn Fn(&str) -> bool) -> Result<PathBuf, FileError> {
        for file in FILES.into_iter().filter(|file| has(file)) {
            self.file(file)?;
        }
        let config = self.file(CONFIG)?;
        let directory = config.parent().unwrap_or(&config).to_path_buf();
        let shards = if has(INDEX) { shard_names(&directory.join(INDEX))? } else { vec![SINGLE.into()] };
        for shard in &shards {
            self.file(shard)?;
        }
        Ok(directory)
    }

    fn file(&mut self, file: &str) -> Result<PathBuf, FileError> {
        let reporter = Reporter { file, bytes: 0, total: 0, progress: &mut *self.progress };
        let path = self.repository.download_with_progress(file, reporter);
        path.map_err(|error| download_error(self.name, file, error))
    }
}

struct Reporter<'a> {
    file: &'a str,
    bytes: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress<'_>),
}

impl Reporter<'_> {
    fn report(&mut self) {
        let Self { file, bytes, total, .. } = *self;
        (self.progress)(Progress { file, bytes, total });
    }
}

impl hf_hub::api::Progress for Reporter<'_> {
    fn init(&mut self, size: usize, _: &str) {
        (self.bytes, self.total) = (0, size as u64);
        self.report();
    }

    fn update(&mut self, size: usize) {
        self.bytes += size as u64;
        self.report();
    }

    fn finish(&mut self) {}
}

fn download_error(name: Name<'_>, what: &str, error: ApiError) -> FileError {
    let problem = match error {
        ApiError::RequestError(error) => {
            let text = error.to_string();
            match error.into_response().map(|response| response.status()) {
                Some(status @ (401 | 403 | 404)) => {
                    format!(
                        "the hub answers {status}: there is no such model or file, or it needs an access token"
                    )
                }
                Some(status) => format!("the hub answers {status}"),
                None => format!("there is no network, or the hub cannot be reached ({text})"),
            }
        }
        other => other.to_string(),
    };
    FileError::Download { model: name.whole.into(), what: what.into(), problem }
}
