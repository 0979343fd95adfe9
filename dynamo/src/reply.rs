//! Events of the engine as Dynamo's chunks.

use crate::error;
use dynamo_backend_common::{
    BackendError, DynamoError, GenerateContext, LLMEngineOutput, LLMEngineOutputExt, PromptTokensDetails,
    TopLogprob, usage,
};
use futures::Stream;
use lowbit_engine::{EngineError, Event, Finish, Handle, TokenLogprobs, Usage};
use tokio::sync::mpsc::UnboundedReceiver;

/// The error of a request.
pub(crate) fn failed(problem: EngineError) -> DynamoError {
    let kind = match &problem {
        EngineError::ContextLength { .. } | EngineError::TooLarge { .. } | EngineError::Invalid(_) => {
            BackendError::InvalidArgument
        }
        EngineError::Draining | EngineError::DeviceLost(_) => BackendError::EngineShutdown,
        _ => BackendError::Unknown,
    };
    error(kind, problem)
}

/// The chunks of a reply: one per token, and one that ends it. A token of `last_ids` is part of the
/// reply, and ends it. Dropping the stream cancels the request.
pub(crate) fn stream(
    context: GenerateContext,
    (handle, mut events): (Handle, UnboundedReceiver<Event>),
    last_ids: Vec<u32>,
) -> impl Stream<Item = Result<LLMEngineOutput, DynamoError>> + Send {
    async_stream::stream! {
        let _handle = handle;
        let mut tokens = 0;
        loop {
            let event = tokio::select! {
                biased;
                () = context.stopped() => None,
                () = context.killed() => None,
                event = events.recv() => Some(event),
            };
            match event {
                None => {
                    yield Ok(LLMEngineOutput::cancelled());
                    return;
                }
                Some(Some(Event::Token { id, logprobs })) => {
                    tokens += 1;
                    yield Ok(chunk(id, logprobs));
                    if last_ids.contains(&id) {
                        yield Ok(LLMEngineOutput::stop());
                        return;
                    }
                }
                Some(Some(Event::Finished { finish, usage, .. })) => {
                    yield Ok(end(finish, usage, tokens));
                    return;
                }
                Some(Some(Event::Failed(problem))) => {
                    yield Err(failed(problem));
                    return;
                }
                Some(Some(_)) => {}
                Some(None) => {
                    yield Err(error(BackendError::StreamIncomplete, "the engine has gone"));
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

/// The last chunk. Dynamo counts `tokens`, those that it got: the id that ends a reply is not among
/// them.
fn end(finish: Finish, of: Usage, tokens: u32) -> LLMEngineOutput {
    let end = match finish {
        Finish::Stop => LLMEngineOutput::stop(),
        Finish::Length => LLMEngineOutput::length(),
        // Cancelled.
        _ => LLMEngineOutput::cancelled(),
    };
    let mut used = usage(of.prompt_tokens as u32, tokens);
    let cached_tokens = Some(of.cached_tokens as u32);
    used.prompt_tokens_details = Some(PromptTokensDetails { cached_tokens, audio_tokens: None });
    end.with_usage(used)
}
