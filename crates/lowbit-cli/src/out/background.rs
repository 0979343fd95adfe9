//! Lines for a reader who may not read: a pipe that nobody empties is full after some kilobytes,
//! and whoever writes to it waits.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

/// Lines that wait for the reader.
const LINES: usize = 1024;

/// The last lines wait so long for their reader.
const PATIENCE: Duration = Duration::from_secs(1);

static WRITER: OnceLock<Background> = OnceLock::new();

/// From now on lines for standard error never wait for its reader: where he is slow they are
/// dropped, and counted.
///
/// # Errors
/// The system's, if it gives no thread.
pub fn in_background() -> io::Result<()> {
    if WRITER.get().is_none() {
        // Two calls at a time leave one of two threads without lines.
        _ = WRITER.set(Background::new(io::stderr())?);
    }
    Ok(())
}

/// Waits until the reader has what was told so far, but not for long.
pub fn settle() {
    if let Some(writer) = WRITER.get() {
        writer.settle(PATIENCE);
    }
}

/// The line, if it is not written in the background.
pub(super) fn take(line: String) -> Option<String> {
    match WRITER.get() {
        Some(writer) => {
            writer.add(&line);
            None
        }
        None => Some(line),
    }
}

/// A thread that writes lines.
struct Background {
    lines: SyncSender<Told>,
    /// Lines that were dropped since the last one that was not.
    dropped: AtomicUsize,
}

enum Told {
    Text(String),
    /// All that was told before is written.
    Settled(SyncSender<()>),
}

impl Background {
    fn new(to: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, told) = sync_channel(LINES);
        thread::Builder::new().name("log".into()).spawn(move || write(&told, to))?;
        Ok(Self { lines, dropped: AtomicUsize::new(0) })
    }

    /// Adds a line, and before it the number of those that were dropped.
    fn add(&self, line: &str) {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        let text = match dropped {
            0 => line.to_string(),
            count => format!("({count} lines were dropped here: nobody read them)\n{line}"),
        };
        if let Err(TrySendError::Full(_)) = self.lines.try_send(Told::Text(text)) {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
        }
    }

    fn settle(&self, longest: Duration) {
        let (settled, waits) = sync_channel(1);
        // A full channel has a reader who does not read.
        if self.lines.try_send(Told::Settled(settled)).is_ok() {
            _ = waits.recv_timeout(longest);
        }
    }
}

fn write(told: &Receiver<Told>, mut to: impl Write) {
    for told in told {
        match told {
            // When that fails there is nowhere left to say so.
            Told::Text(text) => _ = to.write_all(text.as_bytes()).and_then(|()| to.flush()),
            Told::Settled(settled) => _ = settled.send(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    /// A pipe that is full until the test lets it be read.
    struct Slow {
        may_write: Receiver<()>,
        written: Sender<String>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            _ = self.may_write.recv();
            _ = self.written.send(String::from_utf8(bytes.to_vec()).unwrap());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_nobody_reads_are_dropped_and_counted() {
        let ((read, may_write), (written, texts)) = (channel(), channel());
        let background = Background::new(Slow { may_write, written }).unwrap();
        let count = LINES + 100;
        (0..count).for_each(|line| background.add(&format!("{line}\n")));
        let start = Instant::now();
        background.settle(Duration::from_millis(1));
        assert!(start.elapsed() < Duration::from_secs(10), "nobody is waited for");
        // Without a sender the pipe takes all.
        drop(read);
        let text = |_| texts.recv_timeout(Duration::from_secs(60)).unwrap();
        let mut lines: Vec<String> = (0..LINES).map(text).collect();
        background.settle(Duration::from_secs(60));
        lines.extend(texts.try_iter());
        assert!(lines.iter().enumerate().all(|(index, line)| *line == format!("{index}\n")), "in order");
        // One more than wait may be on its way.
        assert!((LINES..=LINES + 1).contains(&lines.len()), "{}", lines.len());
        background.add("last\n");
        background.settle(Duration::from_secs(60));
        let want = format!("({} lines were dropped here: nobody read them)\nlast\n", count - lines.len());
        assert_eq!(texts.try_iter().collect::<String>(), want);
    }
}
