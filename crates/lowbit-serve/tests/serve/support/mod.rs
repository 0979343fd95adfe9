//! A server over a model that writes what a test says, and a client that reads bytes.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod client;
pub mod opened;

use lowbit::{ChatTemplate, Checkpoint, Tokenizer};
use lowbit_engine::{
    Backend, Dropped, EngineError, Event, Finish, Handle, Logprob, Request, Sink, Stats, TokenLogprobs, Turn,
    Usage,
};
use lowbit_serve::{Log, Offer, ServeError, ServeOptions, Served, Server};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A template in Qwen's style, with tools and a switch for reasoning.
pub const QWEN: &str = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call>{\"name\": ..}</tool_call><|im_end|>\n\
    {% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}\
    {% for c in m.tool_calls %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking %}\
    <think>\n{% endif %}{% endif %}{# </think> #}";

/// The script of a model: its answer to a request.
#[derive(Clone, Debug)]
pub struct Script {
    pub ids: Vec<u32>,
    /// After the last id.
    pub finish: Finish,
    /// Before the first event.
    pub queued: Duration,
    /// Before each token.
    pub pause: Duration,
    pub cached: usize,
    /// The error at its end, if it fails.
    pub fails: Option<EngineError>,
    pub panics: bool,
}

impl Script {
    pub fn new(ids: Vec<u32>) -> Self {
        let (queued, pause) = (Duration::ZERO, Duration::ZERO);
        Self { ids, finish: Finish::Stop, queued, pause, cached: 0, fails: None, panics: false }
    }
}

/// A model that writes what it is told: the next script of its list, the last one again and again.
pub struct Scripted {
    scripts: Mutex<VecDeque<Script>>,
    pub requests: Mutex<Vec<Request>>,
    pub context: usize,
    pub limit: usize,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    running: AtomicUsize,
    cancelled: AtomicUsize,
    /// Turns that were given.
    turns: AtomicUsize,
    draining: AtomicBool,
    stopped: AtomicBool,
}

impl Scripted {
    pub fn new(scripts: Vec<Script>) -> Self {
        Self {
            scripts: Mutex::new(scripts.into()),
            requests: Mutex::default(),
            context: 1000,
            limit: usize::MAX,
            state: Arc::default(),
        }
    }

    pub fn running(&self) -> usize {
        self.state.running.load(Ordering::SeqCst)
    }

    pub fn cancelled(&self) -> usize {
        self.state.cancelled.load(Ordering::SeqCst)
    }

    pub fn turns(&self) -> usize {
        self.state.turns.load(Ordering::SeqCst)
    }

    /// Waits until nothing runs.
    #[track_caller]
    pub fn assert_idle_within(&self, limit: Duration) {
        let start = Instant::now();
        while self.running() > 0 {
            assert!(start.elapsed() < limit, "{} still run", self.running());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Other scripts from here on.
    pub fn script(&self, scripts: Vec<Script>) {
        *self.scripts.lock().unwrap() = scripts.into();
    }

    fn next(&self) -> Script {
        let mut scripts = self.scripts.lock().unwrap();
        match scripts.len() {
            1 => scripts[0].clone(),
            _ => scripts.pop_front().expect("a script"),
        }
    }
}

impl Backend for Scripted {
    fn submit(&self, request: Request, mut sink: Sink) -> Result<Handle, EngineError> {
        let prompt = request.prompt.len();
        if self.state.draining.load(Ordering::SeqCst) {
            return Err(EngineError::Draining);
        }
        if prompt > self.context {
            return Err(EngineError::ContextLength { tokens: prompt, limit: self.context });
        }
        if self.running() >= self.limit {
            return Err(EngineError::Overloaded { waiting: self.running(), limit: self.limit });
        }
        let script = self.next();
        assert!(!script.panics, "a defect");
        self.requests.lock().unwrap().push(request.clone());
        self.state.running.fetch_add(1, Ordering::SeqCst);
        let (state, cancel) = (self.state.clone(), Arc::new(AtomicBool::new(false)));
        let cancelled = cancel.clone();
        thread::spawn(move || {
            let is_over = || cancelled.load(Ordering::SeqCst) || state.stopped.load(Ordering::SeqCst);
            let last = play(&script, &request, &mut sink, &is_over);
            if cancelled.load(Ordering::SeqCst)
                && matches!(last, Event::Finished { finish: Finish::Interrupted, .. })
            {
                state.cancelled.fetch_add(1, Ordering::SeqCst);
            }
            let last = match state.stopped.load(Ordering::SeqCst) {
                true => Event::Failed(EngineError::Draining),
                false => last,
            };
            state.running.fetch_sub(1, Ordering::SeqCst);
            _ = sink(last);
        });
        Ok(Handle::new(move || cancel.store(true, Ordering::SeqCst)))
    }

    fn turn(&self) -> Result<Turn, EngineError> {
        if self.state.stopped.load(Ordering::SeqCst) {
            return Err(EngineError::Draining);
        }
        self.state.turns.fetch_add(1, Ordering::SeqCst);
        Ok(Turn::new(()))
    }

    fn drop_kept(&self) -> Dropped {
        Dropped::new(2, 300)
    }

    fn context(&self) -> usize {
        self.context
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        stats.running = self.running();
        // Whatever is here is told.
        stats.budget_bytes = 1 << 20;
        (stats.running_bytes, stats.running_states) = (1 << 18, 2);
        (stats.cached_bytes, stats.cached_states, stats.cached_texts) = (1 << 17, 3, 2);
        (stats.token_bytes, stats.state_bytes, stats.block_tokens) = (64, 1000, 64);
        (stats.prompt_tokens, stats.cached_tokens) = (70, 64);
        (stats.prefill_passes, stats.prefill_time) = (3, Duration::from_millis(1500));
        stats.draining = self.state.draining.load(Ordering::SeqCst);
        stats
    }

    fn drain(&self) {
        self.state.draining.store(true, Ordering::SeqCst);
    }

    fn stop(&self) {
        self.drain();
        self.state.stopped.store(true, Ordering::SeqCst);
    }
}

/// Sleeps in short parts; false if the request is over by then.
fn sleep(time: Duration, is_over: &dyn Fn() -> bool) -> bool {
    let end = Instant::now() + time;
    while Instant::now() < end && !is_over() {
        thread::sleep((end - Instant::now()).min(Duration::from_millis(2)));
    }
    !is_over()
}

/// The token that a script wants, or another at random where a mask forbids it.
fn allowed(mask: &[u32], wanted: Option<u32>, random: &mut u64) -> u32 {
    let is_allowed = |id: u32| mask[id as usize / 32] >> (id % 32) & 1 == 1;
    if let Some(id) = wanted.filter(|&id| is_allowed(id)) {
        return id;
    }
    let all: Vec<u32> = (0..32 * mask.len() as u32).filter(|&id| is_allowed(id)).collect();
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    all[(*random >> 33) as usize % all.len()]
}

/// Sends a request's events; returns its last one. A script that a grammar forbids goes on at
/// random.
fn play(script: &Script, request: &Request, sink: &mut Sink, is_over: &dyn Fn() -> bool) -> Event {
    let prompt = request.prompt.len();
    let end = |finish, written| Event::Finished {
        finish,
        usage: Usage::new(prompt, script.cached, written),
        times: Default::default(),
    };
    if !sleep(script.queued, is_over) || sink(Event::Started { cached_tokens: script.cached }).is_break() {
        return end(Finish::Interrupted, 0);
    }
    let mut held = request.options.grammar.as_ref().map(|grammar| grammar.start());
    let mut random = request.options.sampling.seed;
    let mut written = 0;
    loop {
        let wanted = script.ids.get(written).copied();
        let id = match &mut held {
            None => wanted,
            Some(held) => Some(allowed(held.mask().expect("a mask"), wanted, &mut random)),
        };
        let Some(id) = id else { break };
        if !sleep(script.pause, is_over) {
            return end(Finish::Interrupted, written);
        }
        if written == request.options.max_tokens {
            return end(Finish::Length, written);
        }
        written += 1;
        if request.options.stop_ids.contains(&id) {
            return end(Finish::Stop, written);
        }
        let logprobs = request.logprobs.map(|count| {
            let of = |id: u32| Logprob { id, logprob: -0.5 };
            TokenLogprobs { token: of(id), top: (0..count as u32).map(of).collect() }
        });
        if sink(Event::Token { id, logprobs }).is_break() {
            return end(Finish::Interrupted, written);
        }
        if held.as_mut().is_some_and(|held| held.accept(id).expect("it was allowed")) {
            return end(Finish::Stop, written);
        }
    }
    match &script.fails {
        Some(error) => Event::Failed(error.clone()),
        None => end(script.finish, written),
    }
}

pub fn tokenizer() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo-chat");
    Tokenizer::from_checkpoint(&Checkpoint::open(&path).unwrap()).unwrap()
}

/// A server that runs until it is dropped.
pub struct Running {
    pub address: SocketAddr,
    pub engine: Arc<Scripted>,
    pub tokenizer: Tokenizer,
    pub lines: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// A model with this template, on a free port, with settings that `set` has changed.
    pub fn with(template: &str, engine: Scripted, set: impl FnOnce(&mut ServeOptions)) -> Self {
        let template =
            (!template.is_empty()).then(|| ChatTemplate::new(template, "template".as_ref()).unwrap());
        let served = Served::new("test", tokenizer(), template).with_aliases(vec!["other/name".into()]);
        Self::of(served, engine, set)
    }

    /// As [`Self::with`], of any model.
    pub fn of(served: Served, engine: Scripted, set: impl FnOnce(&mut ServeOptions)) -> Self {
        let engine = Arc::new(engine);
        let backend = engine.clone();
        Self::start(engine, set, move |server, log, stop| server.run(served, backend, log, stop))
    }

    /// Models that are loaded when they are asked for, `most` at a time.
    pub fn offered(offers: Vec<Offer>, most: usize) -> Self {
        let none = Arc::new(Scripted::new(vec![]));
        Self::start(none, |_| {}, move |server, log, stop| server.run_offered(offers, most, log, stop))
    }

    fn start(
        engine: Arc<Scripted>,
        set: impl FnOnce(&mut ServeOptions),
        run: impl FnOnce(Server, Log, Box<dyn Fn() -> bool>) -> Result<(), ServeError> + Send + 'static,
    ) -> Self {
        let mut options = ServeOptions::default();
        options.port = 0;
        set(&mut options);
        let server = Server::bind(options).unwrap();
        let address = server.address();
        let stop = Arc::new(AtomicBool::new(false));
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (stopped, log) = (stop.clone(), lines.clone());
        let thread = thread::spawn(move || {
            let log = Arc::new(move |line: &str| log.lock().unwrap().push(line.into()));
            run(server, log, Box::new(move || stopped.load(Ordering::SeqCst))).unwrap();
        });
        Self { address, engine, tokenizer: tokenizer(), lines, stop, thread: Some(thread) }
    }

    /// A model in Qwen's style.
    pub fn new(engine: Scripted) -> Self {
        Self::with(QWEN, engine, |_| {})
    }

    pub fn ids(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false).unwrap()
    }

    /// Has the next requests answered with this text.
    pub fn says(&self, text: &str) {
        self.engine.script(vec![Script::new(self.ids(text))]);
    }

    /// Tells the server to stop, as a signal does.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Waits for its end.
    pub fn join(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !thread::panicking() {
                ended.unwrap();
            }
        }
    }
}
