//! The models of a server: one that is there from the start, or several that are loaded when they
//! are asked for (`loading.rs`).

use crate::error::ApiError;
use crate::sampling::not_served;
use crate::served::Served;
use lowbit_engine::Backend;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A model with its engine.
pub type Loaded = (Served, Arc<dyn Backend>);

/// Loads a model. The error is for the log: clients are told that the model cannot be loaded.
pub type Load = Box<dyn Fn() -> Result<Loaded, String> + Send + Sync>;

/// A model that is loaded when it is asked for.
#[non_exhaustive]
pub struct Offer {
    /// Its name for clients.
    pub name: String,
    /// Further names that it answers to.
    pub aliases: Vec<String>,
    load: Load,
}

impl Offer {
    /// A model of this name. What `load` returns must have the same names.
    pub fn new(name: impl Into<String>, load: Load) -> Self {
        Self { name: name.into(), aliases: vec![], load }
    }

    /// With these further names.
    #[must_use]
    pub fn with_aliases(self, aliases: Vec<String>) -> Self {
        Self { aliases, ..self }
    }
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The models, in the order in which they are listed; a loaded one is an `A`.
pub(crate) struct Models<A> {
    entries: Vec<Entry<A>>,
    /// The most models that are loaded at a time.
    pub(crate) most: usize,
    /// One model is loaded at a time.
    pub(crate) loading: Arc<tokio::sync::Mutex<()>>,
    /// Counts uses, as the time of the last one.
    clock: AtomicU64,
}

pub(crate) struct Entry<A> {
    pub(crate) name: String,
    pub(crate) aliases: Vec<String>,
    /// None for a model that stays.
    pub(crate) load: Option<Load>,
    state: Mutex<State<A>>,
}

pub(crate) enum State<A> {
    Unloaded,
    Loading,
    /// With the time of its last use.
    Loaded(Arc<A>, u64),
    /// The last attempt to load it has failed.
    Failed,
}

impl<A> Entry<A> {
    fn state(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result of `look` at the model, if it is loaded. It may not wait.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&Arc<A>) -> T) -> Option<T> {
        match &*self.state() {
            State::Loaded(loaded, _) => Some(look(loaded)),
            _ => None,
        }
    }

    /// The state's name for clients.
    pub(crate) fn state_name(&self) -> &'static str {
        match &*self.state() {
            State::Unloaded => "unloaded",
            State::Loading => "loading",
            State::Loaded(..) => "loaded",
            State::Failed => "failed",
        }
    }

    /// Its names, but for the one that stands for any.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(self.aliases.iter().filter(|alias| *alias != "*"))
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        [&self.name].into_iter().chain(&self.aliases).any(|known| known == name || known == "*")
    }

    /// The time of its last use, if no request has it and `is_idle` is true of it.
    pub(crate) fn idle_since(&self, is_idle: impl Fn(&A) -> bool) -> Option<u64> {
        match &*self.state() {
            State::Loaded(loaded, used) if Arc::strong_count(loaded) == 1 && is_idle(loaded) => Some(*used),
            _ => None,
        }
    }

    /// Sets the state. What was loaded goes, which may wait for its engine's thread.
    pub(crate) fn set(&self, state: State<A>) {
        // Not while the state is locked.
        let old = std::mem::replace(&mut *self.state(), state);
        drop(old);
    }
}

impl<A> Models<A> {
    /// Models that are loaded when they are asked for, `most` at a time.
    pub(crate) fn offered(offers: Vec<Offer>, most: usize) -> Self {
        let entry = |Offer { name, aliases, load }| Entry {
            name,
            aliases,
            load: Some(load),
            state: Mutex::new(State::Unloaded),
        };
        Self {
            entries: offers.into_iter().map(entry).collect(),
            most: most.max(1),
            loading: Arc::default(),
            clock: AtomicU64::new(0),
        }
    }

    /// A model that stays, once it was [put](Self::put) here.
    pub(crate) fn one(served: &Served) -> Self {
        let (name, aliases) = (served.name.clone(), served.aliases.clone());
        let entries = vec![Entry { name, aliases, load: None, state: Mutex::new(State::Unloaded) }];
        Self { entries, most: 1, loading: Arc::default(), clock: AtomicU64::new(0) }
    }

    /// Sets the model that stays.
    pub(crate) fn put(&self, loaded: A) {
        if let Some(entry) = self.entries.first() {
            entry.set(State::Loaded(Arc::new(loaded), 0));
        }
    }

    pub(crate) fn entries(&self) -> &[Entry<A>] {
        &self.entries
    }

    /// The model of this name, which Ollama's clients give with a tag; the first one for none. A
    /// server of one model leaves the check of the name to the path.
    ///
    /// # Errors
    /// 404 for a name that no model has.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<&Entry<A>, ApiError> {
        let found = name.and_then(|name| {
            let plain = name.strip_suffix(":latest").unwrap_or(name);
            let named = |name| self.entries.iter().find(|entry| entry.is_named(name));
            named(name).or_else(|| named(plain))
        });
        match (found, name) {
            (Some(entry), _) => Ok(entry),
            (None, Some(name)) if self.entries.len() > 1 => Err(self.unknown(name)),
            _ => self.entries.first().ok_or_else(ApiError::internal),
        }
    }

    /// 404 for a model that is not served.
    pub(crate) fn unknown(&self, name: &str) -> ApiError {
        let names: Vec<&str> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
        not_served(name, &names)
    }

    /// The loaded models.
    pub(crate) fn loaded(&self) -> Vec<Arc<A>> {
        self.entries.iter().filter_map(|entry| entry.with(Arc::clone)).collect()
    }

    /// Forgets all models. They refer to what refers to them.
    pub(crate) fn clear(&self) {
        self.entries.iter().for_each(|entry| entry.set(State::Unloaded));
    }

    /// Notes that a model is used, and returns it if it is loaded.
    pub(crate) fn used(&self, entry: &Entry<A>) -> Option<Arc<A>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        match &mut *entry.state() {
            State::Loaded(loaded, used) => {
                *used = now;
                Some(loaded.clone())
            }
            _ => None,
        }
    }
}
