//! The engine's thread.

use crate::model::ModelRunner;
use crate::pooled::PooledRunner;
use crate::runner::{BLOCK, Runner, Sizes};
use crate::scheduler::{Scheduler, check_size, longest};
use crate::{Backend, CacheEvents, Dropped, EngineError, EngineOptions, Handle, Request, Sink, Stats, Turn};
use lowbit_kernels::Device;
use lowbit_models::Model;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A model and the thread that runs it. Dropping it ends all requests with
/// [`EngineError::Draining`] and waits for the thread.
pub struct Engine {
    runner: ModelRunner,
    sizes: Sizes,
    options: EngineOptions,
    start: Instant,
    shared: Arc<Mutex<Shared>>,
    control: Sender<Control>,
    thread: Option<JoinHandle<()>>,
}

/// Messages to the thread.
enum Control {
    Submit {
        id: u64,
        request: Box<Request>,
        sink: Sink,
        submitted: Duration,
    },
    Cancel(u64),
    Turn(Asked),
    /// Drops what is kept, and tells.
    DropKept(Sender<Dropped>),
    /// Ends all requests.
    Stop,
    /// Ends the thread, too.
    Quit,
}

/// A turn that was asked for: told when it begins, and gone when it has ended.
struct Asked {
    begins: Sender<()>,
    ended: Receiver<()>,
}

/// The state that callers and the thread share.
#[derive(Default)]
struct Shared {
    /// Requests that callers have handed in, and how many of them the thread has seen.
    submitted: u64,
    seen: u64,
    /// Requests that wait and have never run, as of the last step.
    queued: usize,
    stats: Stats,
    draining: bool,
    lost: Option<EngineError>,
}

impl Shared {
    /// Requests on their way to the thread.
    fn coming(&self) -> usize {
        (self.submitted - self.seen) as usize
    }
}

/// The state is whole whoever panicked: it is written in single assignments.
fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts the engine's thread.
    ///
    /// # Errors
    /// [`EngineError::Thread`]; [`EngineError::Model`] when a device fails. A model without an
    /// output layer starts: it has turns, and refuses requests.
    pub fn start(model: Model, options: EngineOptions) -> Result<Self, EngineError> {
        let runner = ModelRunner::new(model, options.guesses.clone())?;
        match runner.model.device() {
            Device::Cpu(_) => Self::launch(runner.clone(), runner, options),
            Device::Gpu(_) => {
                let mut options = options;
                let pooled = PooledRunner::new(runner.clone(), &mut options)?;
                Self::launch(pooled, runner, options)
            }
        }
    }

    /// The same with all caches in a pool, as on a GPU.
    #[cfg(test)]
    pub(crate) fn start_pooled(model: Model, mut options: EngineOptions) -> Result<Self, EngineError> {
        let runner = ModelRunner::new(model, options.guesses.clone())?;
        let pooled = PooledRunner::new(runner.clone(), &mut options)?;
        Self::launch(pooled, runner, options)
    }

    fn launch<R: Runner + Send + 'static>(
        owned: R,
        runner: ModelRunner,
        options: EngineOptions,
    ) -> Result<Self, EngineError>
    where
        R::Cache: Send,
        R::Mark: Send,
        R::Sampler: Send,
    {
        let (sizes, start, shared) = (owned.sizes(), Instant::now(), Arc::<Mutex<Shared>>::default());
        lock(&shared).stats = Stats {
            budget_bytes: options.cache_bytes,
            token_bytes: sizes.per_token,
            state_bytes: sizes.states,
            block_tokens: BLOCK,
            ..Stats::default()
        };
        let (control, messages) = channel();
        let thread = std::thread::Builder::new().name("lowbit-engine".into());
        let (context, limits, theirs) = (runner.context(), options.clone(), shared.clone());
        let cache_events = options.cache_events.clone();
        let run = move || {
            let scheduler = Scheduler::new(owned, context, limits, Box::new(move || start.elapsed()));
            let turns = VecDeque::new();
            Thread { scheduler, shared: theirs, messages, seen: 0, turns, cache_events, stopped: false }
                .run();
        };
        let thread = thread.spawn(run).map_err(|error| EngineError::Thread(Arc::new(error)))?;
        Ok(Self { runner, sizes, options, start, shared, control, thread: Some(thread) })
    }

    /// Sends a message; a thread that has ended needs none.
    fn send(&self, message: Control) {
        let _ = self.control.send(message);
    }
}

impl Backend for Engine {
    fn submit(&self, request: Request, sink: Sink) -> Result<Handle, EngineError> {
        self.runner.check(&request)?;
        check_size(&self.sizes, self.runner.context(), &self.options, &request)?;
        let mut shared = lock(&self.shared);
        if let Some(lost) = &shared.lost {
            return Err(lost.clone());
        }
        if shared.draining {
            return Err(EngineError::Draining);
        }
        let (waiting, limit) = (shared.queued + shared.coming(), self.options.max_waiting.max(1));
        if waiting >= limit {
            return Err(EngineError::Overloaded { waiting, limit });
        }
        shared.submitted += 1;
        let id = shared.submitted;
        let submitted = self.start.elapsed();
        self.send(Control::Submit { id, request: request.into(), sink, submitted });
        drop(shared);
        let control = self.control.clone();
        Ok(Handle::new(move || drop(control.send(Control::Cancel(id)))))
    }

    fn context(&self) -> usize {
        longest(&self.sizes, self.runner.context(), &self.options)
    }

    fn turn(&self) -> Result<Turn, EngineError> {
        let ((begins, begun), (end, ended)) = (channel(), channel::<()>());
        self.send(Control::Turn(Asked { begins, ended }));
        match begun.recv() {
            Ok(()) => Ok(Turn::new(end)),
            Err(_) => Err(lock(&self.shared).lost.clone().unwrap_or(EngineError::Draining)),
        }
    }

    fn drop_kept(&self) -> Dropped {
        let (tell, told) = channel();
        self.send(Control::DropKept(tell));
        told.recv().unwrap_or_default()
    }

    fn stats(&self) -> Stats {
        let shared = lock(&self.shared);
        Stats {
            waiting: shared.stats.waiting + shared.coming(),
            submitted: shared.submitted,
            draining: shared.draining,
            lost: shared.lost.is_some(),
            ..shared.stats.clone()
        }
    }

    fn drain(&self) {
        lock(&self.shared).draining = true;
    }

    fn stop(&self) {
        self.drain();
        self.send(Control::Stop);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.drain();
        self.send(Control::Quit);
        // A sink may own the engine: its thread cannot wait for itself.
        if let Some(thread) = self.thread.take().filter(|it| it.thread().id() != std::thread::current().id())
        {
            // A panic outside of a step has been printed, and there is nobody to pass it on to.
            let _ = thread.join();
        }
    }
}

struct Thread<R: Runner> {
    scheduler: Scheduler<R>,
    shared: Arc<Mutex<Shared>>,
    messages: Receiver<Control>,
    /// [`Shared::seen`].
    seen: u64,
    turns: VecDeque<Asked>,
    cache_events: Option<CacheEvents>,
    /// True once all that runs was ended.
    stopped: bool,
}

impl Asked {
    /// Lets the turn begin, and waits for its end.
    fn wait(self) {
        if self.begins.send(()).is_ok() {
            // Nothing is sent: the sender is dropped.
            let _ = self.ended.recv();
        }
    }
}

impl<R: Runner> Thread<R> {
    fn run(mut self) {
        loop {
            if !self.listen() {
                self.scheduler.fail_all(&EngineError::Draining);
                self.publish();
                return;
            }
            if !self.scheduler.is_idle() {
                self.step();
            }
            if let Some(asked) = self.turns.pop_front() {
                asked.wait();
            }
            self.publish();
        }
    }

    fn step(&mut self) {
        match catch_unwind(AssertUnwindSafe(|| self.scheduler.step())) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                lock(&self.shared).lost = Some(error.clone());
                self.scheduler.fail_all(&error);
                self.turns.clear();
            }
            // Whatever the step left half done belongs to the requests that fail now.
            Err(panic) => self.scheduler.fail_all(&panicked(&*panic)),
        }
    }

    /// Takes all messages, and waits for one if there is nothing to do. False when the engine ends.
    fn listen(&mut self) -> bool {
        loop {
            let message = match self.scheduler.is_idle() && self.turns.is_empty() {
                true => self.messages.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.messages.try_recv(),
            };
            match message {
                Ok(Control::Submit { id, request, sink, submitted }) => {
                    self.scheduler.submit(id, *request, sink, submitted);
                    self.seen += 1;
                    self.refuse_if_lost();
                }
                Ok(Control::Cancel(id)) => self.scheduler.cancel(id),
                Ok(Control::Turn(asked)) => {
                    // A turn that is not kept is refused.
                    if !self.stopped && lock(&self.shared).lost.is_none() {
                        self.turns.push_back(asked);
                    }
                }
                Ok(Control::DropKept(tell)) => {
                    // The caller may have gone.
                    let _ = tell.send(self.scheduler.drop_kept());
                }
                Ok(Control::Stop) => {
                    self.stopped = true;
                    self.turns.clear();
                    self.scheduler.fail_all(&EngineError::Draining);
                }
                Ok(Control::Quit) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
            self.publish();
        }
    }

    /// Ends requests that came between the device's failure and the refusal of new ones.
    fn refuse_if_lost(&mut self) {
        let lost = lock(&self.shared).lost.clone();
        if let Some(error) = lost {
            self.scheduler.fail_all(&error);
        }
    }

    fn publish(&mut self) {
        let events = self.scheduler.take_cache_events();
        if let Some(sink) = self.cache_events.as_ref().filter(|_| !events.is_empty()) {
            sink.tell(events);
        }
        let (stats, queued) = (self.scheduler.stats(), self.scheduler.queued());
        let mut shared = lock(&self.shared);
        (shared.stats, shared.queued, shared.seen) = (stats, queued, self.seen);
    }
}

/// The message of a panic.
fn panicked(panic: &(dyn Any + Send)) -> EngineError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    EngineError::Panicked { message: text.unwrap_or_else(|| "without a message".into()).into() }
}
