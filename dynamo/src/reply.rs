//! Events of the engine as Dynamo's chunks.

use crate::{INVALID, SHUT_DOWN, UNKNOWN, error};
use dynamo_backend_common::{
    BackendError, DynamoError, ErrorType, GenerateContext, LLMEngineOutput, LLMEngineOutputExt,
    PromptTokensDetails, TopLogprob, usage,
};
use futures::Stream;
use lowbit_engine::{EngineError, Event, Finish, Handle, TokenLogprobs};
use tokio::sync::mpsc::UnboundedReceiver;

const INCOMPLETE: ErrorType = ErrorType::Backend(BackendError::StreamIncomplete);

/// The error of a request.
pub(crate) fn failed(problem: EngineError) -> DynamoError {
    let kind = match &problem {
        EngineError::ContextLength { .. } | EngineError::TooLarge { .. } | EngineError::Invalid(_) => INVALID,
        EngineError::Overloaded { .. } => ErrorType::WorkerOverloaded,
        EngineError::Draining | EngineError::DeviceLost(_) => SHUT_DOWN,
        _ => UNKNOWN,
    };
    error(kind, problem)
}

/// The tokens of a request. Dynamo counts those that it gets: an id that ends a reply and is not
/// part of it is not among them.
pub(crate) struct Counts {
    prompt: usize,
    cached: usize,
    written: usize,
}

impl Counts {
    pub(crate) fn new(prompt: usize) -> Self {
        Self { prompt, cached: 0, written: 0 }
    }

    /// The last chunk, with these counts.
    fn end(&self, chunk: LLMEngineOutput) -> LLMEngineOutput {
        let mut used = usage(self.prompt as u32, self.written as u32);
        let cached_tokens = Some(self.cached as u32);
        used.prompt_tokens_details = Some(PromptTokensDetails { cached_tokens, ..Default::default() });
        chunk.with_usage(used)
    }
}

/// The chunks of a reply: one per token, and one that ends it. A token of `last_ids` is part of the
/// reply, and ends it. Dropping the stream cancels the request.
pub(crate) fn stream(
    context: GenerateContext,
    (handle, mut events): (Handle, UnboundedReceiver<Event>),
    mut counts: Counts,
    last_ids: Vec<u32>,
) -> impl Stream<Item = Result<LLMEngineOutput, DynamoError>> + Send {
    async_stream::stream! {
        let _handle = handle;
        loop {
            let event = tokio::select! {
                biased;
                () = context.stopped() => None,
                () = context.killed() => None,
                event = events.recv() => Some(event),
            };
            match event {
                None => {
                    yield Ok(counts.end(LLMEngineOutput::cancelled()));
                    return;
                }
                Some(Some(Event::Started { cached_tokens })) => counts.cached = cached_tokens,
                Some(Some(Event::Token { id, logprobs })) => {
                    counts.written += 1;
                    yield Ok(chunk(id, logprobs));
                    if last_ids.contains(&id) {
                        yield Ok(counts.end(LLMEngineOutput::stop()));
                        return;
                    }
                }
                Some(Some(Event::Finished { finish, .. })) => {
                    yield Ok(counts.end(end(finish)));
                    return;
                }
                Some(Some(Event::Failed(problem))) => {
                    yield Err(failed(problem));
                    return;
                }
                Some(Some(_)) => {}
                Some(None) => {
                    yield Err(error(INCOMPLETE, "the engine has gone"));
                    return;
                }
            }
        }
    }
}

fn chunk(id: u32, logprobs: Option<TokenLogprobs>) -> LLMEngineOutput {
    let mut chunk = LLMEngineOutput { token_ids: vec![id], ..Default::default() };
    if let Some(TokenLogprobs { token, top }) = logprobs {
        let one = |(rank, of): (u32, lowbit_engine::Logprob)| TopLogprob {
            rank,
            token_id: of.id,
            token: None,
            logprob: of.logprob,
            bytes: None,
        };
        chunk.log_probs = Some(vec![token.logprob]);
        chunk.top_logprobs = Some(vec![(1..).zip(top).map(one).collect()]);
    }
    chunk
}

fn end(finish: Finish) -> LLMEngineOutput {
    match finish {
        Finish::Stop => LLMEngineOutput::stop(),
        Finish::Length => LLMEngineOutput::length(),
        // Cancelled.
        _ => LLMEngineOutput::cancelled(),
    }
}
