//! The server's figures, as Prometheus reads them. The names begin with `lowbit_`.

use lowbit_engine::Stats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An engine's figures, when they are asked for.
pub(crate) type Figures = Arc<dyn Fn() -> Stats + Send + Sync>;

pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Answered, Counter>,
    /// From a request's arrival to its reply's first token.
    first_token: Histogram,
    /// Between two tokens of a reply.
    between_tokens: Histogram,
    /// From a request's arrival to its end.
    whole: Histogram,
    /// Until the engine has taken a request.
    queued: Histogram,
    panics: Counter,
}

/// The labels of a request that was answered.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answered {
    path: &'static str,
    status: u32,
}

impl Metrics {
    pub(crate) fn new(figures: Figures) -> Self {
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let mut metrics = Self {
            registry: Registry::with_prefix("lowbit"),
            requests: Family::default(),
            first_token: seconds(),
            between_tokens: seconds(),
            whole: seconds(),
            queued: seconds(),
            panics: Counter::default(),
        };
        let registry = &mut metrics.registry;
        registry.register("requests", "Requests by path and status", metrics.requests.clone());
        registry.register("panics", "Handlers that panicked", metrics.panics.clone());
        for (name, help, histogram) in [
            ("time_to_first_token", "From a request's arrival to its first token", &metrics.first_token),
            ("inter_token_latency", "Between two tokens of a reply", &metrics.between_tokens),
            ("request_duration", "From a request's arrival to its end", &metrics.whole),
            ("queue_time", "Until a request has left the queue", &metrics.queued),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        registry.register_collector(Box::new(OfEngine(figures)));
        metrics
    }

    pub(crate) fn answered(&self, path: &'static str, status: u16, took: Duration) {
        self.requests.get_or_create(&Answered { path, status: status.into() }).inc();
        self.whole.observe(took.as_secs_f64());
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    pub(crate) fn between_tokens(&self, time: Duration) {
        self.between_tokens.observe(time.as_secs_f64());
    }

    pub(crate) fn queued(&self, time: Duration) {
        self.queued.observe(time.as_secs_f64());
    }

    pub(crate) fn panicked(&self) {
        self.panics.inc();
    }

    /// All figures, in OpenMetrics' text.
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// The engine's figures.
struct OfEngine(Figures);

impl fmt::Debug for OfEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OfEngine")
    }
}

impl Collector for OfEngine {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let stats = (self.0)();
        for (name, help, value) in [
            ("requests_waiting", "Requests that wait", stats.waiting),
            ("requests_running", "Requests that are read or written", stats.running),
            ("cache_budget_bytes", "Bytes that all caches may take", stats.budget_bytes),
            ("cache_running_bytes", "Bytes of running requests' caches", stats.running_bytes),
            ("cache_kept_bytes", "Bytes of caches kept for later requests", stats.cached_bytes),
            ("cache_texts", "Texts whose caches are kept", stats.cached_texts),
            ("batch_size", "Sequences in the last step", stats.last_batch),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let of = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(of)?;
        }
        for (name, help, value) in [
            ("submitted", "Requests that the engine took", stats.submitted),
            ("finished", "Requests with a complete reply", stats.finished),
            ("cancelled", "Requests that were cancelled", stats.cancelled),
            ("failed", "Requests that failed", stats.failed),
            ("preempted", "Requests that gave way to others", stats.preempted),
            ("evicted", "Kept texts that were dropped for room", stats.evicted),
            ("prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were cached", stats.cached_tokens),
            ("completion_tokens", "Tokens that were sampled", stats.completion_tokens),
            ("recomputed_tokens", "Tokens computed again after a preemption", stats.recomputed_tokens),
            ("steps", "Passes of the model", stats.steps),
        ] {
            let counter = ConstCounter::new(value);
            let of = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(of)?;
        }
        Ok(())
    }
}
