//! Models and packages by name, from servers that nobody trusts: `org/name` on the Hugging Face
//! hub, in the cache that Python's huggingface_hub uses ([`resolve`], [`Hub`]), and wheels of a
//! Python package index ([`wheels`]).
//!
//! A server's answer is bounded in time and bytes, becomes a path only if it is a plain name, and a
//! file gets its name only once it is whole and has the digest that was promised. Nothing is
//! written outside of the cache.

// `names` says what may become a path, `client` where requests go and how long they may take,
// `answers` what an answer may say, `download` and `verify` how a file arrives whole, and `cache`
// where it may be written.
mod answers;
mod cache;
mod choose;
mod client;
mod download;
mod error;
mod names;
mod settings;
#[cfg(test)]
mod tests;
mod verify;
pub mod wheels;

use std::path::{Path, PathBuf};

use cache::Repository;
use client::{Client, Problem, Site};
use download::Transfer;
pub use error::HubError;
use lowbit_files::names::{CONFIG, INDEX, SINGLE};
use lowbit_files::{shard_names, shown};
use names::{FileName, ModelName};
pub use settings::{HubLimits, HubSettings, Token};

/// The progress of a download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// The file that is being downloaded.
    pub file: &'a str,
    /// Its bytes that are here.
    pub bytes: u64,
    /// All its bytes.
    pub total: u64,
}

/// Finds a model: `model` itself when there is such a path, else the model of that name on the
/// Hugging Face hub, from the cache when it is there whole, else downloaded into it.
///
/// `org/name` is a directory of config.json and safetensors, or the one GGUF model of a repository
/// that has only GGUF; `org/name:Q4_K_M` or `org/name:FILE.gguf` names one of several. The address
/// of a repository or of a GGUF file on huggingface.co stands for it. The environment is read as
/// [`HubSettings::from_env`] says.
///
/// # Errors
/// [`HubError::NoSuchModel`], or [`HubError::Download`] when the network is needed and fails.
pub fn resolve(model: &str) -> Result<PathBuf, HubError> {
    resolve_with(model, &mut |_| {})
}

/// [`resolve`], with `progress` called during a download.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_with(model: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, HubError> {
    if Path::new(model).exists() {
        return Ok(model.into());
    }
    let name = parse(model)?;
    let settings = HubSettings::from_env(&|name| std::env::var_os(name), std::env::home_dir().as_deref());
    let mut settings = settings.map_err(|problem| name.failed("the settings", problem))?;
    settings.proxy = ureq::Proxy::try_from_env();
    Hub::new(settings).resolve(model, progress)
}

/// The hub and its cache, where models are looked for.
pub struct Hub {
    settings: HubSettings,
    agent: Box<dyn Fn(ureq::config::Config) -> ureq::Agent>,
}

fn parse(model: &str) -> Result<ModelName<'_>, HubError> {
    ModelName::parse(model).ok_or_else(|| {
        let problem = "there is no such file or directory, and it is no name of the form org/name";
        HubError::NoSuchModel { model: shown(model).to_string(), problem: problem.into() }
    })
}

impl ModelName<'_> {
    fn missing(&self, problem: impl Into<String>) -> HubError {
        HubError::NoSuchModel { model: self.whole.into(), problem: problem.into() }
    }

    fn failed(&self, what: &str, problem: impl Into<String>) -> HubError {
        HubError::Download { model: self.whole.into(), what: what.into(), problem: problem.into() }
    }
}

impl Hub {
    /// A hub that is reached over the network.
    pub fn new(settings: HubSettings) -> Self {
        Self::with_agent(settings, ureq::Agent::new_with_config)
    }

    /// A hub whose connections are those of `agent`, given its settings: for tests.
    #[doc(hidden)]
    pub fn with_agent(
        settings: HubSettings,
        agent: impl Fn(ureq::config::Config) -> ureq::Agent + 'static,
    ) -> Self {
        Self { settings, agent: Box::new(agent) }
    }

    /// As [`resolve_with`], but `model` is no path.
    ///
    /// # Errors
    /// As [`resolve`].
    pub fn resolve(&self, model: &str, progress: &mut dyn FnMut(Progress<'_>)) -> Result<PathBuf, HubError> {
        let model = parse(model)?;
        let repository = Repository::new(&self.settings.cache, model);
        if let Some(path) = self.cached(model, &repository)? {
            return Ok(path);
        }
        if self.settings.offline {
            let cache = self.settings.cache.display();
            let problem = format!("HF_HUB_OFFLINE is set, and {cache} does not have all of it");
            return Err(model.failed("its files", problem));
        }
        let HubSettings { endpoint, token, proxy, limits, .. } = &self.settings;
        let site = Site {
            name: "the hub",
            address: endpoint,
            setting: "HF_ENDPOINT",
            token: token.clone(),
            proxy: proxy.clone(),
            limits: *limits,
        };
        let client = Client::new(site, &self.agent);
        let client = client.map_err(|problem| model.failed("the list of its files", problem))?;
        let listing = client.retried(|| answers::listing(&client, model));
        let answers::Listing { commit, files } =
            listing.map_err(|problem| model.failed("the list of its files", problem.text()))?;
        let here = repository.files(&commit).map_err(|problem| model.missing(problem))?;
        let transfer = Transfer { client: &client, repository: &repository, model, commit: &commit };
        let path = Download { transfer, here, progress }.run(&files)?;
        // Until everything has arrived, the name keeps referring to the previous commit.
        repository.set_main(&commit).map_err(|problem| model.failed("refs/main", problem))?;
        Ok(path)
    }

    /// The model, if the cache has all of it.
    fn cached(&self, model: ModelName<'_>, repository: &Repository) -> Result<Option<PathBuf>, HubError> {
        let Some(commit) = repository.main() else { return Ok(None) };
        let files = repository.files(&commit).map_err(|problem| model.missing(problem))?;
        let (names, snapshot) = (strings(&files), repository.snapshot(&commit));
        let has = |file: &str| names.iter().any(|name| name == file);
        let most = self.settings.limits.files;
        if model.tag.is_none() && has(CONFIG) && has("tokenizer.json") {
            // As where a directory is opened, a single file comes before shards beside it.
            let shards = match has(INDEX) && !has(SINGLE) {
                true => shard_names(&snapshot.join(INDEX))?,
                false => choose::shards(&names, most).unwrap_or_else(|_| vec![SINGLE.into()]),
            };
            if shards.len() <= most && shards.iter().all(|shard| has(shard)) {
                return Ok(Some(snapshot));
            }
        }
        let parts = choose::gguf(&names, model.tag, most).unwrap_or_default();
        Ok(parts.first().map(|first| snapshot.join(first)))
    }
}

fn strings(files: &[FileName]) -> Vec<String> {
    files.iter().map(|file| file.as_str().to_string()).collect()
}

/// A download under way.
struct Download<'a, 'p> {
    transfer: Transfer<'a>,
    /// The files that the snapshot has already.
    here: Vec<FileName>,
    progress: &'p mut dyn FnMut(Progress<'_>),
}

impl Download<'_, '_> {
    fn run(mut self, listed: &[FileName]) -> Result<PathBuf, HubError> {
        let model = self.transfer.model;
        let names = strings(listed);
        let has = |file: &str| names.iter().any(|name| name == file);
        let most = self.transfer.client.limits.files;
        let snapshot = self.transfer.repository.snapshot(self.transfer.commit);
        let weights = names.iter().any(|name| name.ends_with(".safetensors"));
        if model.tag.is_some() || !has(CONFIG) || !weights {
            let parts = choose::gguf(&names, model.tag, most).map_err(|problem| model.missing(problem))?;
            self.files(&parts)?;
            return Ok(snapshot.join(&parts[0]));
        }
        self.files(&choose::small(listed))?;
        let shards = match has(INDEX) && !has(SINGLE) {
            true => shard_names(&snapshot.join(INDEX))?,
            false => choose::shards(&names, most).map_err(|problem| model.missing(problem))?,
        };
        self.files(&shards)?;
        Ok(snapshot)
    }

    fn files(&mut self, names: &[String]) -> Result<(), HubError> {
        let Transfer { model, client, .. } = self.transfer;
        let files = choose::plain(names, client.limits.files).map_err(|problem| model.missing(problem))?;
        for file in files {
            if self.here.binary_search(&file).is_ok() {
                continue;
            }
            let limit = choose::limit(file.as_str()).unwrap_or(client.limits.file);
            let fetched = self.transfer.fetch(&file, limit, self.progress);
            fetched.map_err(|problem: Problem| model.failed(file.as_str(), problem.text()))?;
        }
        Ok(())
    }
}

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
