//! Tells routers which blocks of tokens are in the prefix cache, over ZeroMQ and as vLLM 0.11 does,
//! so that they send a prompt to the server that has its start.
//!
//! Each message has three frames: the topic, a number that grows by one each time (8 bytes,
//! big-endian: who misses one was too slow), and a batch of events in MessagePack.

mod msgpack;
mod zmtp;

use crate::ServeError;
use lowbit_engine::{CacheEvent, CacheEvents};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use zmtp::Subscriber;

/// The most subscribers; further ones are refused.
const SUBSCRIBERS: usize = 16;
/// Time between two attempts to reach a subscriber.
const RETRY: Duration = Duration::from_secs(1);

/// Publishes changes of the prefix cache until it is dropped. Tokens of prompts go out as they are,
/// to all who subscribe.
#[derive(Debug)]
pub struct KvPublisher {
    shared: Arc<Shared>,
    topic: Arc<str>,
    /// The address that subscribers connect to, if they do.
    address: Option<SocketAddr>,
}

#[derive(Debug, Default)]
struct Shared {
    subscribers: Mutex<Vec<Arc<Subscriber>>>,
    /// Connections that others made, those included that have not said yet that they subscribe.
    connections: AtomicUsize,
    ended: AtomicBool,
}

impl Shared {
    fn subscribers(&self) -> MutexGuard<'_, Vec<Arc<Subscriber>>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a subscriber until one of both has enough.
    fn serve(&self, stream: TcpStream) {
        let Ok(subscriber) = Subscriber::greet(stream) else { return };
        let subscriber = Arc::new(subscriber);
        self.subscribers().push(subscriber.clone());
        // The end closes those that it sees.
        if !self.ended.load(Ordering::SeqCst) {
            subscriber.listen();
        }
        self.subscribers().retain(|other| !Arc::ptr_eq(other, &subscriber));
    }
}

/// The other side of an endpoint.
#[derive(Debug, PartialEq, Eq)]
enum Endpoint<'a> {
    /// Subscribers connect to this address.
    Bound(String),
    /// A subscriber waits for publishers at this one.
    Connected(&'a str),
}

/// Reads `tcp://HOST:PORT`: the address of a subscriber, or, with the host `*` or in front an `@`,
/// an address of this machine. (vLLM's rule, with CZMQ's sign for others.)
fn endpoint(text: &str) -> Option<Endpoint<'_>> {
    let (bound, rest) = text.strip_prefix('@').map_or((false, text), |rest| (true, rest));
    let address = rest.strip_prefix("tcp://")?;
    let (host, port) = address.rsplit_once(':')?;
    port.parse::<u16>().ok()?;
    match host {
        "" => None,
        "*" => Some(Endpoint::Bound(format!("0.0.0.0:{port}"))),
        _ if bound => Some(Endpoint::Bound(address.into())),
        _ => Some(Endpoint::Connected(address)),
    }
}

impl KvPublisher {
    /// Publishes at `endpoint` under `topic`: `tcp://HOST:PORT` connects to a subscriber (again and
    /// again, until it is there), `tcp://*:PORT` and `@tcp://HOST:PORT` listen for some.
    ///
    /// # Errors
    /// [`ServeError::Host`] for an endpoint that is none of these, and for an address of this
    /// machine that is taken.
    pub fn start(endpoint: &str, topic: &str) -> Result<Self, ServeError> {
        let shared = Arc::<Shared>::default();
        let wrong = |problem: &str| ServeError::Host { host: endpoint.into(), problem: problem.into() };
        let theirs = shared.clone();
        let mut address = None;
        match self::endpoint(endpoint) {
            None => return Err(wrong("tcp://HOST:PORT, tcp://*:PORT or @tcp://HOST:PORT is wanted")),
            Some(Endpoint::Bound(own)) => {
                let listener = TcpListener::bind(&own);
                let listener = listener.map_err(|error| wrong(&error.to_string()))?;
                address = Some(listener.local_addr().map_err(|error| wrong(&error.to_string()))?);
                spawn(move || accept(&theirs, &listener)).map_err(|error| wrong(&error.to_string()))?;
            }
            Some(Endpoint::Connected(other)) => {
                let other = other.to_string();
                spawn(move || connect(&theirs, &other)).map_err(|error| wrong(&error.to_string()))?;
            }
        }
        Ok(Self { shared, topic: topic.into(), address })
    }

    /// The address that subscribers connect to, if they do.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The receiver of an engine's changes.
    pub fn events(&self) -> CacheEvents {
        let (shared, topic) = (self.shared.clone(), self.topic.clone());
        let number = Mutex::new(0u64);
        CacheEvents::new(move |events| {
            let mut number = number.lock().unwrap_or_else(PoisonError::into_inner);
            let batch = batch(&events);
            let message = zmtp::message(&[topic.as_bytes(), &number.to_be_bytes(), &batch]);
            *number += 1;
            for subscriber in shared.subscribers().iter() {
                subscriber.send(topic.as_bytes(), &message);
            }
        })
    }
}

impl Drop for KvPublisher {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.shared.subscribers().iter().for_each(|subscriber| subscriber.close());
        if let Some(address) = self.address {
            // Wakes the thread that waits for subscribers.
            let _ = TcpStream::connect_timeout(&address, RETRY);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    thread::Builder::new().name("lowbit-kv-events".into()).spawn(work).map(drop)
}

/// Lets subscribers connect.
fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    for stream in listener.incoming() {
        if shared.ended.load(Ordering::SeqCst) {
            return;
        }
        match stream {
            Ok(_) if shared.connections.load(Ordering::SeqCst) >= SUBSCRIBERS => {}
            Ok(stream) => {
                shared.connections.fetch_add(1, Ordering::SeqCst);
                let theirs = shared.clone();
                let serve = move || {
                    theirs.serve(stream);
                    theirs.connections.fetch_sub(1, Ordering::SeqCst);
                };
                // Without a thread for it, the connection is closed.
                if spawn(serve).is_err() {
                    shared.connections.fetch_sub(1, Ordering::SeqCst);
                }
            }
            // Out of file descriptors, for instance.
            Err(_) => thread::sleep(RETRY),
        }
    }
}

/// Connects to a subscriber, as often as it goes.
fn connect(shared: &Shared, address: &str) {
    while !shared.ended.load(Ordering::SeqCst) {
        // A name may have another address by now.
        let found = address.to_socket_addrs().ok().and_then(|mut found| found.next());
        if let Some(Ok(stream)) = found.map(|address| TcpStream::connect_timeout(&address, RETRY)) {
            shared.serve(stream);
        }
        thread::sleep(RETRY);
    }
}

/// The batch of these events: `[time, events, rank]`.
fn batch(events: &[CacheEvent]) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let mut out = msgpack::Writer::default();
    out.array(3).float(now).array(events.len());
    for event in events {
        match event {
            CacheEvent::Stored { parent, blocks, tokens } => {
                // Its tag, hashes, parent, tokens, tokens per block, LoRA, and the tier: "GPU"
                // means the device's own memory, which is a CPU's here, too.
                out.array(7).text("BlockStored").numbers(blocks.iter().copied());
                match parent {
                    Some(parent) => out.number(*parent),
                    None => out.nil(),
                };
                out.numbers(tokens.iter().map(|&id| u64::from(id)));
                out.number((tokens.len() / blocks.len().max(1)) as u64).nil().text("GPU");
            }
            CacheEvent::Removed { blocks } => {
                out.array(3).text("BlockRemoved").numbers(blocks.iter().copied()).text("GPU");
            }
            // Others may come: who hears of them late asks again.
            _ => {
                out.array(1).text("AllBlocksCleared");
            }
        }
    }
    out.number(0);
    out.into_bytes()
}

#[cfg(test)]
mod tests;
