//! The server's figures, as Prometheus reads them: under names that begin with `lowbit_`, or under
//! those of vLLM, which gateways and autoscalers know.

use crate::options::MetricNames;
use lowbit_engine::Stats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::time::Duration;

pub(crate) struct Metrics {
    names: MetricNames,
    registry: Registry,
    requests: Family<Answered, Counter>,
    /// From a request's arrival to its end.
    whole: Histogram,
    panics: Counter,
    /// From a request's arrival to its reply's first token.
    first_token: OfModels,
    /// Between two tokens of a reply.
    between_tokens: OfModels,
    /// From a request's arrival to its reply's end.
    reply: OfModels,
    /// Until the engine has taken a request.
    queued: OfModels,
    ended: Family<Ended, Counter>,
}

/// A histogram per model.
type OfModels = Family<OfModel, Histogram, fn() -> Histogram>;

/// The label of a model's figures.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfModel {
    model_name: String,
}

/// The labels of a request that was answered.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answered {
    path: &'static str,
    status: u32,
}

/// The labels of a reply that has ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Ended {
    model_name: String,
    finished_reason: &'static str,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

impl Metrics {
    pub(crate) fn new(names: MetricNames) -> Self {
        let each = || OfModels::new_with_constructor(seconds);
        let mut metrics = Self {
            names,
            registry: Registry::default(),
            requests: Family::default(),
            whole: seconds(),
            panics: Counter::default(),
            first_token: each(),
            between_tokens: each(),
            reply: each(),
            queued: each(),
            ended: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        // vLLM has no names for these.
        registry.register("lowbit_requests", "Requests by path and status", self.requests.clone());
        registry.register("lowbit_panics", "Handlers that panicked", self.panics.clone());
        let (help, unit) = ("From a request's arrival to its end", Unit::Seconds);
        registry.register_with_unit("lowbit_request_duration", help, unit, self.whole.clone());
        let is_vllm = self.names == MetricNames::Vllm;
        for (name, vllm, help, histogram) in [
            ("time_to_first_token", "time_to_first_token", "To a reply's first token", &self.first_token),
            ("inter_token_latency", "inter_token_latency", "Between two tokens", &self.between_tokens),
            ("reply_duration", "e2e_request_latency", "To a reply's end", &self.reply),
            ("queue_time", "request_queue_time", "Until a request has left the queue", &self.queued),
        ] {
            let name = if is_vllm { format!("vllm:{vllm}") } else { format!("lowbit_{name}") };
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let name = if is_vllm { "vllm:request_success" } else { "lowbit_replies" };
        registry.register(name, "Replies by how they ended", self.ended.clone());
    }

    pub(crate) fn answered(&self, path: &'static str, status: u16, took: Duration) {
        self.requests.get_or_create(&Answered { path, status: status.into() }).inc();
        self.whole.observe(took.as_secs_f64());
    }

    pub(crate) fn first_token(&self, model: &str, after: Duration) {
        observe(&self.first_token, model, after);
    }

    pub(crate) fn between_tokens(&self, model: &str, time: Duration) {
        observe(&self.between_tokens, model, time);
    }

    pub(crate) fn queued(&self, model: &str, time: Duration) {
        observe(&self.queued, model, time);
    }

    /// A reply has ended, `took` after its request.
    pub(crate) fn replied(&self, model: &str, reason: &'static str, took: Duration) {
        observe(&self.reply, model, took);
        self.ended.get_or_create(&Ended { model_name: model.into(), finished_reason: reason }).inc();
    }

    pub(crate) fn panicked(&self) {
        self.panics.inc();
    }

    /// All figures, those of the loaded models among them, in OpenMetrics' text.
    pub(crate) fn text(&self, models: Vec<(String, Stats)>) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode_registry(&mut out, &self.registry)?;
        let mut engines = Registry::default();
        engines.register_collector(Box::new(Engines { names: self.names, models }));
        text::encode_registry(&mut out, &engines)?;
        text::encode_eof(&mut out)?;
        Ok(out)
    }
}

fn observe(histogram: &OfModels, model: &str, time: Duration) {
    histogram.get_or_create(&OfModel { model_name: model.into() }).observe(time.as_secs_f64());
}

/// The engines' figures.
#[derive(Debug)]
struct Engines {
    names: MetricNames,
    models: Vec<(String, Stats)>,
}

/// A figure's name, what it says, and how it is read.
type Figure<T> = (&'static str, &'static str, fn(&Stats) -> T);

const GAUGES: [Figure<usize>; 7] = [
    ("lowbit_requests_waiting", "Requests that wait", |stats| stats.waiting),
    ("lowbit_requests_running", "Requests that are read or written", |stats| stats.running),
    ("lowbit_cache_budget_bytes", "Bytes that all caches may take", |stats| stats.budget_bytes),
    ("lowbit_cache_running_bytes", "Bytes of running requests' caches", |stats| stats.running_bytes),
    ("lowbit_cache_kept_bytes", "Bytes of caches kept for later requests", |stats| stats.cached_bytes),
    ("lowbit_cache_texts", "Texts whose caches are kept", |stats| stats.cached_texts),
    ("lowbit_batch_size", "Sequences in the last step", |stats| stats.last_batch),
];

const COUNTERS: [Figure<u64>; 17] = [
    ("lowbit_submitted", "Requests that the engine took", |stats| stats.submitted),
    ("lowbit_finished", "Requests with a complete reply", |stats| stats.finished),
    ("lowbit_cancelled", "Requests that were cancelled", |stats| stats.cancelled),
    ("lowbit_failed", "Requests that failed", |stats| stats.failed),
    ("lowbit_preempted", "Requests that gave way to others", |stats| stats.preempted),
    ("lowbit_evicted", "Kept texts that were dropped for room", |stats| stats.evicted),
    ("lowbit_prompt_tokens", "Tokens of prompts", |stats| stats.prompt_tokens),
    ("lowbit_cached_tokens", "Tokens of prompts that were cached", |stats| stats.cached_tokens),
    ("lowbit_completion_tokens", "Tokens that were sampled", |stats| stats.completion_tokens),
    ("lowbit_draft_tokens", "Guesses of next tokens that were verified", |stats| stats.drafted_tokens),
    ("lowbit_accepted_tokens", "Guesses that became tokens", |stats| stats.accepted_tokens),
    ("lowbit_recomputed_tokens", "Tokens computed again after a preemption", |stats| stats.recomputed_tokens),
    ("lowbit_steps", "Turns of the engine", |stats| stats.steps),
    ("lowbit_decode_passes", "Passes in which replies got a token each", |stats| stats.decode_passes),
    ("lowbit_decode_rows", "Sequences in these passes", |stats| stats.decode_rows),
    ("lowbit_prefill_passes", "Passes over prompts", |stats| stats.prefill_passes),
    ("lowbit_prefill_tokens", "Tokens in these passes", |stats| stats.prefill_tokens),
];

const SECONDS: [Figure<f64>; 2] = [
    ("lowbit_decode_seconds", "The time of passes in which replies got a token each", |stats| {
        stats.decode_time.as_secs_f64()
    }),
    ("lowbit_prefill_seconds", "The time of passes over prompts", |stats| stats.prefill_time.as_secs_f64()),
];

const VLLM_GAUGES: [Figure<f64>; 3] = [
    ("vllm:num_requests_waiting", "Requests that wait", |stats| stats.waiting as f64),
    ("vllm:num_requests_running", "Requests that are read or written", |stats| stats.running as f64),
    // As vLLM counts: what is kept for later requests is free.
    ("vllm:kv_cache_usage_perc", "The share of the budget that running requests have", |stats| {
        stats.running_bytes as f64 / stats.budget_bytes.max(1) as f64
    }),
];

const VLLM_COUNTERS: [Figure<u64>; 7] = [
    ("vllm:prompt_tokens", "Tokens of prompts", |stats| stats.prompt_tokens),
    ("vllm:generation_tokens", "Tokens that were sampled", |stats| stats.completion_tokens),
    ("vllm:prefix_cache_queries", "Tokens of prompts that were looked up", |stats| stats.prompt_tokens),
    ("vllm:prefix_cache_hits", "Tokens of prompts that were cached", |stats| stats.cached_tokens),
    ("vllm:spec_decode_num_draft_tokens", "Guesses that were verified", |stats| stats.drafted_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Guesses that became tokens", |stats| stats.accepted_tokens),
    ("vllm:num_preemptions", "Requests that gave way to others", |stats| stats.preempted),
];

/// The labels of vLLM's description of its cache.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CacheConfig {
    model_name: String,
    block_size: usize,
    num_gpu_blocks: usize,
}

impl Collector for Engines {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        if self.names == MetricNames::Vllm {
            for (name, help, of) in VLLM_GAUGES {
                self.each(&mut encoder, (name, help), |stats| ConstGauge::new(of(stats)))?;
            }
            for (name, help, of) in VLLM_COUNTERS {
                self.each(&mut encoder, (name, help), |stats| ConstCounter::new(of(stats)))?;
            }
            return self.cache_config(&mut encoder);
        }
        for (name, help, of) in GAUGES {
            let value = |stats: &Stats| ConstGauge::new(i64::try_from(of(stats)).unwrap_or(i64::MAX));
            self.each(&mut encoder, (name, help), value)?;
        }
        for (name, help, of) in COUNTERS {
            self.each(&mut encoder, (name, help), |stats| ConstCounter::new(of(stats)))?;
        }
        for (name, help, of) in SECONDS {
            self.each(&mut encoder, (name, help), |stats| ConstCounter::new(of(stats)))?;
        }
        Ok(())
    }
}

impl Engines {
    /// A figure of each model.
    fn each<M: EncodeMetric>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        value: impl Fn(&Stats) -> M,
    ) -> Result<(), fmt::Error> {
        let Some((_, first)) = self.models.first() else { return Ok(()) };
        let mut of = encoder.encode_descriptor(name, help, None, value(first).metric_type())?;
        for (model, stats) in &self.models {
            value(stats).encode(of.encode_family(&OfModel { model_name: model.clone() })?)?;
        }
        Ok(())
    }

    fn cache_config(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        if self.models.is_empty() {
            return Ok(());
        }
        let help = "The cache: tokens per block, and blocks that the budget holds";
        let mut of = encoder.encode_descriptor("vllm:cache_config_info", help, None, MetricType::Gauge)?;
        for (model, stats) in &self.models {
            let block_bytes = (stats.token_bytes * stats.block_tokens).max(1);
            let labels = CacheConfig {
                model_name: model.clone(),
                block_size: stats.block_tokens,
                num_gpu_blocks: stats.budget_bytes / block_bytes,
            };
            ConstGauge::new(1_i64).encode(of.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}
