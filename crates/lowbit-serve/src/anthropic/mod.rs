//! Anthropic's API.

mod billing;
mod input;
mod reply;

use crate::app::{App, Host, Record};
use crate::body;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::openai::{Warnings, answer};
use crate::run::{Job, Replies, Whole};
use crate::sampling::{max_tokens, model, options, stops};
use crate::stream::stream;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use input::conversation;
use reply::{MessageStream, whole_message};
use serde_json::json;
use std::sync::Arc;

/// Fields that say nothing of the reply.
pub(crate) const WITHOUT_EFFECT: [&str; 5] =
    ["metadata", "service_tier", "container", "context_management", "betas"];

struct Asked {
    job: Job,
    model: String,
    stream: bool,
    warnings: Warnings,
}

/// `/v1/messages`.
pub(crate) async fn messages(
    State(host): State<Arc<Host>>,
    Extension(record): Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, Asked::read).await?;
    let id = app.id("msg_");
    let jobs = vec![asked.job];
    if asked.stream {
        let writer = MessageStream::new(id, asked.model);
        return Ok(asked.warnings.on(stream(app, record, jobs, writer).await?));
    }
    let whole = Whole::one(Replies::submit(&app, &record, &jobs)?).await?;
    Ok(asked.warnings.on(answer(&whole_message(&id, &asked.model, &whole))))
}

/// `/v1/messages/count_tokens`.
pub(crate) async fn count_tokens(
    State(host): State<Arc<Host>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    let count = body::worked(&host, body, |app, mut fields| {
        let mut warnings = Warnings::default();
        model(&mut fields, &app.served)?;
        let conversation = conversation(app, &mut fields, &mut warnings)?;
        warnings.unknown(&fields);
        Ok((conversation.prompt(&app.served)?.ids.len(), warnings))
    });
    let (_, (tokens, warnings)) = count.await?;
    Ok(warnings.on(answer(&json!({"input_tokens": tokens}))))
}

impl Asked {
    fn read(app: &App, mut fields: Fields) -> Result<Self, ApiError> {
        let served = &app.served;
        let mut warnings = Warnings::default();
        let model = model(&mut fields, served)?;
        let mut options = options(&mut fields, served, app.random())?;
        let Some(tokens) = max_tokens(&mut fields, &["max_tokens"], 1)? else {
            return Err(ApiError::field("max_tokens", "is missing"));
        };
        options.max_tokens = tokens;
        let stops = stops(&mut fields, "stop_sequences")?;
        let stream = fields.take("stream")?.unwrap_or(false);
        let one_call = input::one_call(&mut fields)?;
        let wanted = input::wanted(&mut fields)?;
        let conversation = conversation(app, &mut fields, &mut warnings)?;
        fields.ignore(&WITHOUT_EFFECT);
        fields.refuse(&["mcp_servers"], "is not done here")?;
        warnings.unknown(&fields);
        let prompt = conversation.prompt(served)?;
        conversation.hold(served, &mut options, wanted.as_ref(), (&prompt.ids, one_call))?;
        let job = Job {
            prompt: prompt.ids,
            options,
            logprobs: None,
            checkpoints: prompt.checkpoints,
            syntax: prompt.syntax,
            stops,
            calls: prompt.calls,
            one_call,
        };
        Ok(Self { job, model, stream, warnings })
    }
}
