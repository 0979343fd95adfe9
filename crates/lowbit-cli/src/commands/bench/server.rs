//! `bench --server`: how fast a server answers, alone and under load.

use super::Arguments;
use super::request::{Asked, Client, End, Reply};
use crate::options::at_least_one;
use crate::{Failure, json, out, progress};
use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Flags of `bench --server`.
#[derive(clap::Args)]
#[command(next_help_heading = "Load on a server")]
pub struct ServerArguments {
    /// Time requests to the server at this URL, which speaks OpenAI's /v1/completions: lowbit's,
    /// llama.cpp's, vLLM's.
    #[arg(long, value_name = "URL", conflicts_with_all = ["model", "hf_repo", "list", "scaling"])]
    pub server: Option<String>,
    /// Requests at a time: each number is a row. The next request begins when one ends.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16], requires = "server", value_parser = at_least_one())]
    concurrency: Vec<usize>,
    /// Begin so many requests per second instead, at random times, however many run.
    #[arg(long, value_name = "PER_SECOND", requires = "server", conflicts_with = "concurrency")]
    rate: Option<f64>,
    /// Requests of each row [default: 4 for each that runs at a time, and at least 8].
    #[arg(long, requires = "server", value_parser = at_least_one())]
    requests: Option<usize>,
    /// Tokens at the start of each prompt that all prompts share.
    #[arg(long, value_name = "TOKENS", default_value_t = 0, requires = "server")]
    shared_tokens: usize,
    /// Requests in a hundred whose connection is closed in the middle of the reply.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, requires = "server", value_parser = clap::value_parser!(u8).range(0..=100))]
    disconnect: u8,
    /// The server's key.
    #[arg(long, requires = "server")]
    api_key: Option<String>,
    /// The model to ask for [default: the first that the server lists].
    #[arg(long, value_name = "NAME", requires = "server")]
    served_model: Option<String>,
}

/// Requests under one load.
#[derive(Serialize)]
struct Figures {
    server: String,
    model: String,
    /// `None` where requests begin at a rate.
    concurrency: Option<usize>,
    requests_per_second_asked: Option<f64>,
    requests: usize,
    complete: usize,
    disconnected: usize,
    refused: usize,
    failed: usize,
    seconds: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    tokens: u64,
    tokens_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_token_ms: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    between_tokens_ms: Option<Percentiles>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_ms: Option<Percentiles>,
}

/// Of times, in milliseconds.
#[derive(Clone, Copy, Serialize)]
struct Percentiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

impl Percentiles {
    /// The nearest ranks; `None` of nothing.
    fn of(times: impl Iterator<Item = Duration>) -> Option<Self> {
        let mut times: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * times.len() as f64).ceil() as usize;
            times.get(rank.saturating_sub(1)).copied()
        };
        Some(Self { p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)? })
    }
}

/// Times requests under each load.
///
/// # Errors
/// A server that does not answer, and a row of which every request failed.
pub fn run(arguments: &Arguments, url: &str) -> Result<(), Failure> {
    let flags = &arguments.server;
    let client = Client::new(url, flags.api_key.clone(), flags.served_model.clone())?;
    let prompt_tokens = *arguments.prompt_tokens.first().unwrap_or(&512);
    if arguments.prompt_tokens.len() > 1 {
        return Err("--server takes one length of prompts (--prompt-tokens)".into());
    }
    let mut prompts = Prompts::new(&client, prompt_tokens, flags.shared_tokens)?;
    let loads: Vec<Load> = match flags.rate {
        Some(rate) if rate > 0.0 && rate.is_finite() => vec![Load::Rate(rate)],
        Some(rate) => return Err(format!("--rate {rate}: a number above 0 is wanted").into()),
        None => flags.concurrency.iter().map(|&at_a_time| Load::Concurrency(at_a_time)).collect(),
    };
    if !arguments.json {
        header(&client.model)?;
    }
    let mut rows = vec![];
    for load in loads {
        let row = measure(&client, &prompts, arguments, load)?;
        // The server may have cached what it was asked before.
        prompts.first += row.requests;
        if !arguments.json {
            row.print()?;
        }
        rows.push(row);
    }
    if arguments.json {
        json::print("bench", &serde_json::json!({ "loads": rows }))?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Load {
    Concurrency(usize),
    /// Requests per second.
    Rate(f64),
}

fn measure(
    client: &Client,
    prompts: &Prompts,
    arguments: &Arguments,
    load: Load,
) -> Result<Figures, Failure> {
    let flags = &arguments.server;
    let (threads, label) = match load {
        Load::Concurrency(at_a_time) => (at_a_time, format!("{at_a_time} at a time")),
        Load::Rate(rate) => (0, format!("{rate} per second")),
    };
    let requests = flags.requests.unwrap_or((4 * threads).max(8));
    let threads = if threads == 0 { requests } else { threads.min(requests) };
    let bar = progress::bar("asking", "requests", requests);
    bar.set_message(label);
    let (next, replies, start) = (AtomicUsize::new(0), Mutex::new(vec![]), Instant::now());
    let times = begin_times(load, requests);
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&begin) = times.get(index) else { return };
            std::thread::sleep(begin.saturating_sub(start.elapsed()));
            let reply = client.ask(&prompts.request(index, arguments));
            bar.inc(1);
            // Only a panic poisons it, and that ends the scope.
            if let Ok(mut replies) = replies.lock() {
                replies.push(reply);
            }
        }
    };
    let started = std::thread::scope(|scope| {
        (0..threads).try_for_each(|_| std::thread::Builder::new().spawn_scoped(scope, work).map(drop))
    });
    started.map_err(|error| format!("{threads} threads cannot be started: {error}"))?;
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let replies = replies.into_inner().unwrap_or_default();
    if let Some(End::Failed(problem)) = replies.iter().map(|reply| &reply.end).find(|end| failed(end))
        && replies.iter().all(|reply| failed(&reply.end))
    {
        return Err(format!("every request failed: {problem}").into());
    }
    Ok(Figures::new(client, flags.server.as_deref().unwrap_or_default(), load, &replies, seconds))
}

fn failed(end: &End) -> bool {
    matches!(end, End::Failed(_))
}

/// When each request begins, from the start of its row: at a rate, with gaps of exponential lengths
/// (a Poisson process).
fn begin_times(load: Load, requests: usize) -> Vec<Duration> {
    let Load::Rate(rate) = load else { return vec![Duration::ZERO; requests] };
    let mut at = 0.0;
    let gaps = (0..requests).map(|index| -(1.0 - random(index as u64)).ln() / rate);
    gaps.map(|gap| {
        at += gap;
        Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX)
    })
    .collect()
}

/// A number from 0 to below 1, the same for the same `seed`.
fn random(seed: u64) -> f64 {
    // SplitMix64 (Steele, Lea, Flood, 2014).
    let mut bits = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ (bits >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Prompts of a length that the server has measured.
struct Prompts {
    /// Words for a token, on average.
    words_per_token: f64,
    tokens: usize,
    shared: usize,
    /// Tells the prompts of this run from those of earlier ones, which the server may have cached.
    run: u64,
    /// Requests of the rows before.
    first: usize,
}

impl Prompts {
    fn new(client: &Client, tokens: usize, shared: usize) -> Result<Self, Failure> {
        const PROBE: usize = 256;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let run = now.as_nanos() as u64;
        let counted = client.count(&words(run, PROBE))?.max(1);
        let words_per_token = PROBE as f64 / counted as f64;
        Ok(Self { words_per_token, tokens, shared: shared.min(tokens), run, first: 0 })
    }

    fn words_of(&self, tokens: usize) -> usize {
        (self.words_per_token * tokens as f64).round() as usize
    }

    fn request(&self, index: usize, arguments: &Arguments) -> Asked {
        let seed = self.run.wrapping_add(1000 * ((self.first + index) as u64 + 1));
        let own = self.words_of(self.tokens - self.shared).max(1);
        let prompt = words(self.run, self.words_of(self.shared)) + &words(seed, own);
        let tokens = arguments.generated_tokens.unwrap_or(super::GENERATED);
        let leaves = random(seed) * 100.0 < f64::from(arguments.server.disconnect);
        Asked { prompt, tokens, leave_after: leaves.then_some((tokens / 2).max(1)) }
    }
}

/// So many words, the same for the same seed.
fn words(seed: u64, count: usize) -> String {
    const WORDS: [&str; 16] = [
        "river", "stone", "light", "garden", "number", "paper", "window", "winter", "letter", "market",
        "music", "table", "village", "morning", "history", "machine",
    ];
    let word = |index| WORDS[(random(seed.wrapping_add(index as u64)) * WORDS.len() as f64) as usize];
    (0..count).flat_map(|index| [word(index), " "]).collect()
}

impl Figures {
    fn new(client: &Client, server: &str, load: Load, replies: &[Reply], seconds: f64) -> Self {
        let count = |end: &End| replies.iter().filter(|reply| reply.end == *end).count();
        let sum = |of: fn(&Reply) -> u64| replies.iter().map(of).sum::<u64>();
        let complete = || replies.iter().filter(|reply| reply.end == End::Complete);
        let (concurrency, rate) = match load {
            Load::Concurrency(at_a_time) => (Some(at_a_time), None),
            Load::Rate(rate) => (None, Some(rate)),
        };
        let tokens = sum(|reply| reply.tokens);
        Self {
            server: server.into(),
            model: client.model.clone(),
            concurrency,
            requests_per_second_asked: rate,
            requests: replies.len(),
            complete: count(&End::Complete),
            disconnected: count(&End::Left),
            refused: count(&End::Refused),
            failed: replies.iter().filter(|reply| failed(&reply.end)).count(),
            seconds,
            prompt_tokens: sum(|reply| reply.prompt_tokens),
            cached_tokens: sum(|reply| reply.cached_tokens),
            tokens,
            tokens_per_second: tokens as f64 / seconds.max(1e-9),
            first_token_ms: Percentiles::of(replies.iter().filter_map(|reply| reply.first)),
            between_tokens_ms: Percentiles::of(replies.iter().flat_map(|reply| reply.gaps.iter().copied())),
            request_ms: Percentiles::of(complete().map(|reply| reply.total)),
        }
    }

    fn print(&self) -> Result<(), Failure> {
        let load = match (self.concurrency, self.requests_per_second_asked) {
            (Some(at_a_time), _) => format!("{at_a_time} at a time"),
            (None, rate) => format!("{} per second", rate.unwrap_or_default()),
        };
        let times = |times: Option<Percentiles>| match times {
            Some(Percentiles { p50, p90, p99 }) => format!("{p50:.1} {p90:.1} {p99:.1}"),
            None => "-".into(),
        };
        out::line!(
            "{load:<16} {:>8} {:>10.1} {:>26} {:>26} {:>30}",
            self.complete,
            self.tokens_per_second,
            times(self.first_token_ms),
            times(self.between_tokens_ms),
            times(self.request_ms),
        )?;
        let others = [("closed here", self.disconnected), ("refused", self.refused), ("failed", self.failed)];
        let others: Vec<_> = others
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        if !others.is_empty() {
            out::line!("                 {}", others.join(", "))?;
        }
        Ok(())
    }
}

fn header(model: &str) -> Result<(), Failure> {
    out::line!("{}; times in ms: p50 p90 p99\n", lowbit_files::shown(model))?;
    out::line!(
        "{:<16} {:>8} {:>10} {:>26} {:>26} {:>30}",
        "load",
        "complete",
        "tokens/s",
        "first token",
        "between tokens",
        "request"
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let times = (1..=200).rev().map(Duration::from_millis);
        let Percentiles { p50, p90, p99 } = Percentiles::of(times).unwrap();
        assert_eq!((p50, p90, p99), (100.0, 180.0, 198.0));
        let one = Percentiles::of([Duration::from_millis(7)].into_iter()).unwrap();
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
        assert!(Percentiles::of(std::iter::empty()).is_none());
    }

    #[test]
    fn requests_begin_at_the_rate() {
        let times = begin_times(Load::Rate(50.0), 5000);
        assert!(times.is_sorted());
        let seconds = times.last().unwrap().as_secs_f64();
        assert!((95.0..105.0).contains(&seconds), "{seconds}");
    }
}
