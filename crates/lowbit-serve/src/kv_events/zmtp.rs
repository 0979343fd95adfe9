//! ZeroMQ's transport protocol, the side of a PUB socket.
//!
//! Source: ZMTP 3.0 (RFC 23 of ZeroMQ) with its mechanism NULL; RFC 29 for PUB and SUB.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time for a greeting to arrive, and for bytes to be taken.
const PATIENCE: Duration = Duration::from_secs(10);
/// Messages that wait for a subscriber; further ones are not sent to it, as ZeroMQ does.
const WAITING: usize = 1000;
/// Bytes of a command or a subscription, and the most subscriptions of a subscriber.
const LONGEST: u64 = 4096;
const PREFIXES: usize = 64;

/// Flags of a frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The frames of a message, as they are sent.
pub(super) fn message(parts: &[&[u8]]) -> Arc<[u8]> {
    let mut bytes = vec![];
    for (index, part) in parts.iter().enumerate() {
        frame(&mut bytes, if index + 1 < parts.len() { MORE } else { 0 }, part);
    }
    bytes.into()
}

fn frame(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => bytes.extend([flags, short]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((body.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(body);
}

/// A connection to a SUB socket.
#[derive(Debug)]
pub(super) struct Subscriber {
    stream: TcpStream,
    /// The beginnings of the topics that it wants.
    prefixes: Mutex<Vec<Vec<u8>>>,
    outbox: SyncSender<Arc<[u8]>>,
    /// Until the thread that writes takes it.
    inbox: Mutex<Option<Receiver<Arc<[u8]>>>>,
}

fn wrong(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

impl Subscriber {
    /// Greets the other side.
    ///
    /// # Errors
    /// When it goes, is silent, or is no subscriber that speaks ZMTP 3 without encryption.
    pub(super) fn greet(mut stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut greeting = [0u8; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting)?;
        let mut theirs = [0u8; 64];
        stream.read_exact(&mut theirs)?;
        if (theirs[0], theirs[9]) != (0xff, 0x7f) || theirs[10] < 3 || theirs[12..32] != greeting[12..32] {
            return Err(wrong("a greeting of ZMTP 3 with the mechanism NULL is wanted"));
        }
        let mut ready = vec![];
        frame(&mut ready, COMMAND, b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB");
        stream.write_all(&ready)?;
        let (flags, body) = read(&mut stream)?;
        if flags & COMMAND == 0 || !body.starts_with(b"\x05READY") || !has_type(&body[6..]) {
            return Err(wrong("the command READY of a socket SUB is wanted"));
        }
        stream.set_read_timeout(None)?;
        let (outbox, inbox) = sync_channel(WAITING);
        Ok(Self { stream, prefixes: Mutex::default(), outbox, inbox: Mutex::new(Some(inbox)) })
    }

    /// Reads subscriptions until the connection ends. Another thread writes meanwhile.
    pub(super) fn listen(self: &Arc<Self>) {
        let inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(inbox), Ok(mut stream)) = (inbox, self.stream.try_clone()) else { return };
        let writer = std::thread::Builder::new().name("lowbit-kv-events".into());
        let written = writer.spawn(move || {
            // Ends with the outbox, of which `close` is told by an empty message.
            let sent = inbox.iter().take_while(|message| !message.is_empty());
            for message in sent {
                if stream.write_all(&message).is_err() {
                    break;
                }
            }
            let _ = stream.shutdown(Shutdown::Both);
        });
        let Ok(writer) = written else { return self.close() };
        while self.subscription().is_ok() {}
        self.close();
        // It ends now; a panic has been printed.
        let _ = writer.join();
    }

    /// Reads a subscription, or the end of one.
    fn subscription(&self) -> io::Result<()> {
        let (flags, body) = read(&mut &self.stream)?;
        if flags & COMMAND != 0 {
            // Nothing of ZMTP 3.0 that matters here.
            return Ok(());
        }
        let mut prefixes = self.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
        match body.split_first() {
            Some((1, prefix)) if prefixes.len() < PREFIXES => prefixes.push(prefix.to_vec()),
            Some((0, prefix)) => {
                // One of several equal ones.
                if let Some(place) = prefixes.iter().position(|known| known == prefix) {
                    prefixes.swap_remove(place);
                }
            }
            _ => return Err(wrong("a subscription is wanted, and 64 at most")),
        }
        Ok(())
    }

    /// Sends a message, if its topic is wanted and not too many wait. Never blocks.
    pub(super) fn send(&self, topic: &[u8], message: &Arc<[u8]>) {
        let prefixes = self.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
        if prefixes.iter().any(|prefix| topic.starts_with(prefix)) {
            let _ = self.outbox.try_send(message.clone());
        }
    }

    /// Ends the connection.
    pub(super) fn close(&self) {
        let _ = self.outbox.try_send(Arc::from([]));
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// A frame's flags and its body.
fn read(stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0u8; 2];
    stream.read_exact(&mut head)?;
    let [flags, first] = head;
    let size = if flags & LONG == 0 {
        u64::from(first)
    } else {
        let mut size = [first, 0, 0, 0, 0, 0, 0, 0];
        stream.read_exact(&mut size[1..])?;
        u64::from_be_bytes(size)
    };
    if size > LONGEST {
        return Err(wrong("a frame is too long"));
    }
    let mut body = vec![0; size as usize];
    stream.read_exact(&mut body)?;
    Ok((flags, body))
}

/// True if READY's properties say that it is a subscriber.
fn has_type(mut properties: &[u8]) -> bool {
    while let Some((&length, rest)) = properties.split_first() {
        let Some((name, rest)) = rest.split_at_checked(usize::from(length)) else { return false };
        let Some((size, rest)) = rest.split_first_chunk::<4>() else { return false };
        let Some((value, rest)) = rest.split_at_checked(u32::from_be_bytes(*size) as usize) else {
            return false;
        };
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return value == b"SUB" || value == b"XSUB";
        }
        properties = rest;
    }
    false
}
