//! Work on the model that is no reply (embeddings, scores): in passes between the engine's steps.

use crate::app::App;
use crate::error::ApiError;
use crate::run::refused;
use lowbit_engine::{EngineError, Turn};
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells the work that nobody waits for it any more, when it is dropped.
struct Client(Arc<AtomicBool>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The turns of one request.
pub(crate) struct Turns<'a> {
    app: &'a App,
    gone: Arc<AtomicBool>,
    turn: Option<Turn>,
    refused: Option<EngineError>,
}

impl Turns<'_> {
    /// Gives the turn back, and waits for the next: to be called before each pass of the model.
    /// `Break` if there is none.
    pub(crate) fn next(&mut self) -> ControlFlow<()> {
        self.turn = None;
        if self.gone.load(Ordering::Relaxed) || *self.app.ending().borrow() {
            return Break(());
        }
        match self.app.engine.turn() {
            Ok(turn) => self.turn = Some(turn),
            Err(error) => self.refused = Some(error),
        }
        if self.turn.is_some() { Continue(()) } else { Break(()) }
    }

    /// The reason why there was no next turn.
    pub(crate) fn why(&self) -> ApiError {
        self.refused.as_ref().map_or_else(ApiError::stopping, |error| refused(self.app, error))
    }
}

impl App {
    /// Runs `work` on a thread of its own, with turns. It ends at its next turn if the request is
    /// dropped.
    ///
    /// # Errors
    /// 429 while too many such requests wait; those of `work`.
    pub(crate) async fn in_turns<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &mut Turns<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = self.places.take().await?;
        let gone = Arc::new(AtomicBool::new(false));
        let (_client, app) = (Client(gone.clone()), self.clone());
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work(&app, &mut Turns { app: &app, gone, turn: None, refused: None })
        });
        match done.await {
            Ok(result) => result,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(ApiError::stopping()),
            },
        }
    }
}
