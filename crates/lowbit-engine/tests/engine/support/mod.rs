//! Models and requests for all tests of the engine.
#![allow(dead_code)] // Each test uses its part.

#[path = "../../../../lowbit-models/tests/models/support/thirds.rs"]
pub mod thirds;
#[path = "../../../../lowbit-models/tests/models/support/tiny.rs"]
pub mod tiny;

use lowbit_engine::{
    Backend, Engine, EngineError, EngineOptions, Event, Finish, GenerationOptions, Handle, Request,
    SampleParams, TokenLogprobs, Usage,
};
use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_models::{Model, Session, Target};
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A model of `tests/vectors/models`, or the demo, computed exactly in f32.
pub fn exact(name: &str) -> Model {
    load(name, true)
}

/// The same, with products in integers unless they are to be exact.
pub fn load(name: &str, exact: bool) -> Model {
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(exact);
    Model::load_for(&checkpoint(name), target).unwrap_or_else(|error| panic!("{error}"))
}

pub fn checkpoint(name: &str) -> Checkpoint {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = match name {
        "demo-4bit" => root.join("models"),
        _ => root.join("tests/vectors/models"),
    };
    Checkpoint::open(&folder.join(name)).unwrap_or_else(|error| panic!("{error}"))
}

/// Options whose prompts are always read in whole parts, however slow the machine is.
pub fn patient(model: &Model) -> EngineOptions {
    EngineOptions::new(model.device()).with_target_inter_token(PATIENCE)
}

pub fn start(model: &Model, options: EngineOptions) -> Engine {
    Engine::start(model.clone(), options).unwrap()
}

/// `length` ids that depend on `seed`.
pub fn ids(model: &Model, seed: u32, length: usize) -> Vec<u32> {
    let vocab_size = model.config().vocab_size as u32;
    let id = |i: u32| (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)).rotate_left(7) % vocab_size;
    (0..length as u32).map(id).collect()
}

/// Greedy; drawn with penalties, another seed for each `index`.
pub fn options(index: u64, max_tokens: usize) -> GenerationOptions {
    let drawn = SampleParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.2,
        seed: index,
        ..Default::default()
    };
    let sampling = if index.is_multiple_of(2) { SampleParams::default() } else { drawn };
    let bias = vec![(1, 0.5), (2, f32::NEG_INFINITY)];
    GenerationOptions::default()
        .with_sampling(sampling)
        .with_max_tokens(max_tokens)
        .with_repetition_context(20)
        .with_logit_bias(bias)
}

/// A session's reply.
pub fn alone(model: &Model, request: &Request) -> (Vec<u32>, Finish) {
    let mut session = Session::new(model);
    let logits = session.prefill(&request.prompt, |_| Continue(())).unwrap().unwrap();
    let reply = session.generate(logits, &request.options, |_| Continue(())).unwrap();
    (reply.tokens, reply.finish)
}

/// A request on its way.
pub struct Asked {
    pub handle: Option<Handle>,
    pub events: Receiver<Event>,
}

/// A request's result.
#[derive(Debug)]
pub struct Answer {
    pub cached: usize,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub end: Result<(Finish, Usage), EngineError>,
}

pub fn ask(engine: &Engine, request: Request) -> Asked {
    let (sender, events) = channel();
    let sink = Box::new(move |event| if sender.send(event).is_ok() { Continue(()) } else { Break(()) });
    let handle = engine.submit(request, sink).unwrap_or_else(|error| panic!("{error}"));
    Asked { handle: Some(handle), events }
}

impl Asked {
    /// The next event for which `is` is true.
    pub fn until(&self, is: impl Fn(&Event) -> bool) -> Event {
        loop {
            let event = self.events.recv_timeout(PATIENCE).expect("another event");
            if is(&event) {
                return event;
            }
        }
    }

    pub fn answer(self) -> Answer {
        let (mut cached, mut tokens, mut scores) = (0, vec![], vec![]);
        let end = loop {
            match self.events.recv_timeout(PATIENCE).expect("an end") {
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Token { id, logprobs } => {
                    tokens.push(id);
                    scores.extend(logprobs);
                }
                Event::Finished { finish, usage, .. } => break Ok((finish, usage)),
                Event::Failed(error) => break Err(error),
                _ => {}
            }
        };
        Answer { cached, tokens, logprobs: scores, end }
    }
}

/// Waits until nothing runs.
pub fn settle(engine: &Engine) {
    while !engine.stats().is_idle() {
        std::thread::sleep(Duration::from_millis(2));
    }
}
