//! The state of the server and of its models, for all handlers.

use crate::budget::Budget;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::options::ServeOptions;
use crate::places::Places;
use crate::served::Served;
use axum::http::StatusCode;
use lowbit_engine::{Backend, Stats};
use std::hash::{BuildHasher, RandomState};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Semaphore, watch};

/// Writes a line about a request or a fault.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// All that a server's models share.
pub(crate) struct Host {
    pub(crate) models: Models<App>,
    pub(crate) options: ServeOptions,
    pub(crate) metrics: Metrics,
    pub(crate) bodies: Budget,
    pub(crate) places: Places,
    pub(crate) log: Log,
    /// True once the server was told to stop: it takes no more requests.
    draining: AtomicBool,
    /// True once what still runs ends with an error.
    ending: watch::Sender<bool>,
    /// Requests that are read, rendered and tokenised at a time: such work keeps a core busy, and
    /// a body as JSON takes several times its bytes.
    workers: Arc<Semaphore>,
    random: RandomState,
    ids: AtomicU64,
    /// The time of the start, for the list of models.
    pub(crate) created: u64,
}

/// A model that requests are answered by.
pub(crate) struct App {
    host: Arc<Host>,
    pub(crate) served: Served,
    pub(crate) engine: Arc<dyn Backend>,
}

impl Deref for App {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl App {
    pub(crate) fn new(host: Arc<Host>, served: Served, engine: Arc<dyn Backend>) -> Self {
        Self { host, served, engine }
    }

    /// Tokens that a prompt and its reply may have together.
    pub(crate) fn context(&self) -> usize {
        self.engine.context().min(self.served.context)
    }
}

impl Host {
    pub(crate) fn new(models: Models<App>, options: ServeOptions, log: Log) -> Self {
        Self {
            models,
            metrics: Metrics::new(options.metric_names),
            bodies: Budget::new(options.limits.bodies),
            places: Places::default(),
            options,
            log,
            draining: AtomicBool::new(false),
            ending: watch::Sender::new(false),
            workers: Arc::new(Semaphore::new(thread::available_parallelism().map_or(2, usize::from))),
            random: RandomState::new(),
            ids: AtomicU64::new(0),
            created: now(),
        }
    }

    /// Takes no more requests.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.models.loaded().iter().for_each(|app| app.engine.drain());
    }

    /// Ends what still runs.
    pub(crate) fn end(&self) {
        self.ending.send_replace(true);
        self.models.loaded().iter().for_each(|app| app.engine.stop());
    }

    /// Turns true once what still runs is to end.
    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// The loaded models' names and figures.
    pub(crate) fn stats(&self) -> Vec<(String, Stats)> {
        // Without a hold on the models: who has one, uses it.
        let of = |app: &Arc<App>| (app.served.name.clone(), app.engine.stats());
        self.models.entries().iter().filter_map(|entry| entry.with(of)).collect()
    }

    /// True if requests are answered: of the models that are loaded, if any is, one at least has
    /// its device.
    pub(crate) fn is_ready(&self) -> bool {
        let stats = self.stats();
        let answers = |(_, stats): &(String, Stats)| !stats.draining && !stats.lost;
        !self.is_draining() && (stats.is_empty() || stats.iter().any(answers))
    }

    /// True if nothing waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.stats().iter().all(|(_, stats)| stats.is_idle()) && self.places.is_idle()
    }

    /// A number of a key, which does not tell the key.
    pub(crate) fn client(&self, key: &str) -> u64 {
        self.random.hash_one(key)
    }

    /// A number that does not repeat, and cannot be guessed from another.
    pub(crate) fn random(&self) -> u64 {
        self.random.hash_one(self.ids.fetch_add(1, Ordering::Relaxed))
    }

    /// An id that begins with `start`.
    pub(crate) fn id(&self, start: &str) -> String {
        format!("{start}{:016x}{:08x}", self.random(), self.random() as u32)
    }

    /// Runs work that keeps a core busy, away from the threads that serve connections. A panic of
    /// it is one of its handler.
    ///
    /// # Errors
    /// Those of `work`.
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = self.workers.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        match done.await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(ApiError::stopping()),
            },
        }
    }

    /// Refuses a request while the server drains.
    ///
    /// # Errors
    /// 503 while the server drains.
    pub(crate) fn admit(&self) -> Result<(), ApiError> {
        if self.is_draining() { Err(ApiError::stopping()) } else { Ok(()) }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The time now, as RFC 3339 has it.
pub(crate) fn rfc3339() -> String {
    at(now())
}

/// The time so many seconds after the start of 1970, in the proleptic Gregorian calendar. The years
/// are counted from March of year 0 on, so that a leap day is the last of its year.
fn at(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// A request while it is answered, and its line in the log, which is written when it ends: for a
/// stream that is after its last byte.
pub(crate) struct Record {
    host: Arc<Host>,
    pub(crate) start: Instant,
    method: String,
    /// The path of a route, or `other`.
    path: &'static str,
    /// A number of the client's key; 0 without one.
    pub(crate) client: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    status: Option<StatusCode>,
    /// Words about it.
    words: Vec<String>,
}

impl Record {
    pub(crate) fn new(host: Arc<Host>, (method, path): (String, &'static str), client: u64) -> Arc<Self> {
        Arc::new(Self { host, start: Instant::now(), method, path, client, state: Mutex::default() })
    }

    /// Adds words to the line.
    pub(crate) fn say(&self, words: String) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).words.push(words);
    }

    pub(crate) fn status(&self, status: StatusCode) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).status = Some(status);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let took = self.start.elapsed();
        // Nginx' number for a client that has gone before the answer.
        let status = state.status.map_or(499, |status| status.as_u16());
        self.host.metrics.answered(self.path, status, took);
        // Probes come every few seconds.
        if self.path.starts_with("/health") && status == 200 || self.path == "/metrics" {
            return;
        }
        let words = state.words.iter().fold(String::new(), |line, words| line + " " + words);
        (self.host.log)(&format!("{} {} {status} {}{words}", self.method, self.path, shown(took)));
    }
}

/// A time as a log has it.
pub(crate) fn shown(time: Duration) -> String {
    match time.as_secs_f64() {
        seconds if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::at;

    #[test]
    fn times_are_written_as_dates() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_784_447, "2026-11-27T13:00:47Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(at(seconds), want);
        }
    }
}
