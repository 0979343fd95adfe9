//! Replies as a stream of events, in whatever form an API has them.

use crate::app::{App, Record};
use crate::error::ApiError;
use crate::run::{Job, Replies, Step};
use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue, Response};
use futures_util::{FutureExt, stream};
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::sync::mpsc::{Sender, channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

/// Pieces of a stream that wait for a client that reads slowly.
const AHEAD: usize = 16;

/// The form of an API's streams: each method adds to `out` what is to be sent.
pub(crate) trait Writer: Send + 'static {
    /// Something happened to the reply of this index; failures go to [`Self::failed`].
    fn step(&mut self, index: usize, step: Step, out: &mut String);

    /// All replies have ended.
    fn done(&mut self, out: &mut String);

    /// The stream ends with an error.
    fn failed(&mut self, error: &ApiError, out: &mut String);

    /// The text that is sent when nothing else was for a while.
    fn ping(&self) -> String {
        ": ping\n\n".into()
    }

    /// The stream's media type.
    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }
}

/// Submits the jobs, and answers with their stream.
///
/// # Errors
/// Those of [`Replies::submit`]; later ones are part of the stream.
pub(crate) async fn stream(
    app: Arc<App>,
    record: Arc<Record>,
    jobs: Vec<Job>,
    mut writer: impl Writer,
) -> Result<Response<Body>, ApiError> {
    let content_type = writer.content_type();
    let (sender, receiver) = channel(AHEAD);
    let (begun, begins) = oneshot::channel();
    tokio::spawn(async move {
        let writing = write(&app, &record, &jobs, &mut writer, (&sender, begun));
        if AssertUnwindSafe(writing).catch_unwind().await.is_err() {
            app.metrics.panicked();
            let mut out = String::new();
            writer.failed(&ApiError::internal(), &mut out);
            _ = sender.send(out.into()).await;
        }
    });
    begins.await.unwrap_or_else(|_| Err(ApiError::internal()))?;
    let pieces = stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|bytes: Bytes| (Ok::<_, Infallible>(bytes), receiver))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would collect the events.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}

async fn write(
    app: &App,
    record: &Record,
    jobs: &[Job],
    writer: &mut impl Writer,
    (sender, begun): (&Sender<Bytes>, oneshot::Sender<Result<(), ApiError>>),
) {
    let mut replies = match Replies::submit(app, record, jobs) {
        Ok(replies) => replies,
        Err(error) => {
            _ = begun.send(Err(error));
            return;
        }
    };
    _ = begun.send(Ok(()));
    let (mut ending, ping) = (app.ending(), app.options.limits.ping);
    let mut sent = Instant::now();
    loop {
        let mut out = String::new();
        let next = tokio::select! {
            biased;
            // Dropping the replies cancels them.
            () = sender.closed() => return record.say("the client has gone".into()),
            _ = ending.wait_for(|ending| *ending) => Ok(Some((0, Step::Failed(ApiError::stopping())))),
            next = timeout_at(sent + ping, replies.next()) => next,
        };
        let goes_on = match next {
            Err(_) => {
                out.push_str(&writer.ping());
                true
            }
            Ok(None) => {
                writer.done(&mut out);
                false
            }
            Ok(Some((_, Step::Failed(error)))) => {
                writer.failed(&error, &mut out);
                false
            }
            Ok(Some((index, step))) => {
                writer.step(index, step, &mut out);
                true
            }
        };
        if !out.is_empty() {
            if sender.send(out.into()).await.is_err() {
                return record.say("the client has gone".into());
            }
            sent = Instant::now();
        }
        if !goes_on {
            return;
        }
    }
}
