//! Connections: taken, timed, and closed.

use crate::app::Host;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep};

/// Bytes of a request's header, and of what is read ahead.
const HEADER: usize = 64 << 10;
/// Pause after a connection could not be taken, as where there are no file descriptors left.
const PAUSE: Duration = Duration::from_millis(50);

/// Takes connections until `closing`, and serves each.
pub(crate) async fn accept(
    listener: TcpListener,
    host: Arc<Host>,
    router: Router,
    closing: watch::Receiver<bool>,
) {
    let room = Arc::new(Semaphore::new(host.options.limits.connections));
    let mut closed = closing.clone();
    loop {
        let Ok(place) = room.clone().acquire_owned().await else { return };
        let taken = tokio::select! {
            taken = listener.accept() => taken,
            _ = closed.wait_for(|closed| *closed) => return,
        };
        let Ok((stream, _)) = taken else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // A token is a small packet, and must not wait for the next.
        _ = stream.set_nodelay(true);
        let (router, closing, limits) = (router.clone(), closing.clone(), host.options.limits);
        tokio::spawn(async move {
            serve(stream, router, limits.header, limits.write_idle, closing).await;
            drop(place);
        });
    }
}

async fn serve(
    stream: TcpStream,
    router: Router,
    header: Duration,
    write_idle: Duration,
    mut closing: watch::Receiver<bool>,
) {
    let io = TokioIo::new(Timed::new(stream, write_idle));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header)
        .max_buf_size(HEADER)
        .serve_connection(io, TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    // A connection that fails is the client's loss alone.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = closing.wait_for(|closed| *closed) => connection.as_mut().graceful_shutdown(),
    }
    _ = connection.await;
}

/// A stream whose writes fail if the peer takes nothing for a while.
struct Timed {
    stream: TcpStream,
    idle: Duration,
    /// Since when a write waits.
    waits: Option<Pin<Box<Sleep>>>,
}

impl Timed {
    fn new(stream: TcpStream, idle: Duration) -> Self {
        Self { stream, idle, waits: None }
    }

    /// The result of a write, or an error if it has waited too long.
    fn timed<T>(&mut self, result: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waits = None;
            return result;
        }
        let idle = self.idle;
        let waits =
            self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + idle)));
        ready!(waits.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.timed(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.timed(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.timed(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.timed(shut, context)
    }
}
