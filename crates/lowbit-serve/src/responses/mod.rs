//! OpenAI's `/v1/responses`, without state: a request brings its whole conversation.

mod input;
mod reply;

use crate::app::{App, Host, Record, now};
use crate::body;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::form;
use crate::openai::{Warnings, answer};
use crate::run::{Job, Replies, Whole};
use crate::sampling::{max_tokens, model, options};
use crate::stream::stream;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use input::conversation;
use reply::{Head, ResponseStream, whole_response};
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields that say nothing of the reply: nothing is stored here.
pub(crate) const WITHOUT_EFFECT: [&str; 13] = [
    "store",
    "metadata",
    "user",
    "include",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
    "truncation",
    "max_tool_calls",
    "client_metadata",
    "verbosity",
];

/// Fields of a request to count tokens that say nothing of the prompt.
pub(crate) const COUNT_WITHOUT_EFFECT: [&str; 3] = ["text", "parallel_tool_calls", "truncation"];

/// The reason why a request cannot go on from an earlier one.
const STATELESS: &str = "nothing is stored here: send the whole conversation as input";

struct Asked {
    job: Job,
    head: Head,
    stream: bool,
    warnings: Warnings,
}

/// Answers a conversation.
pub(crate) async fn responses(
    State(host): State<Arc<Host>>,
    Extension(record): Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, Asked::read).await?;
    let jobs = vec![asked.job];
    if asked.stream {
        let writer = ResponseStream::new(asked.head);
        return Ok(asked.warnings.on(stream(app, record, jobs, writer).await?));
    }
    let whole = Whole::one(Replies::submit(&app, &record, &jobs)?).await?;
    Ok(asked.warnings.on(answer(&whole_response(&asked.head, &whole))))
}

/// `/v1/responses/input_tokens`: the tokens of a request's prompt.
pub(crate) async fn input_tokens(
    State(host): State<Arc<Host>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    let count = body::worked(&host, body, |app, mut fields| {
        let mut warnings = Warnings::default();
        model(&mut fields, &app.served)?;
        fields.refuse(&["previous_response_id", "conversation"], STATELESS)?;
        let instructions: Option<String> = fields.take("instructions")?;
        let conversation = conversation(app, &mut fields, instructions.as_deref(), &mut warnings)?;
        fields.ignore(&COUNT_WITHOUT_EFFECT);
        warnings.unknown(&fields);
        Ok((conversation.prompt(&app.served)?.ids.len(), warnings))
    });
    let (_, (tokens, warnings)) = count.await?;
    Ok(warnings.on(answer(&json!({"object": "response.input_tokens", "input_tokens": tokens}))))
}

impl Asked {
    fn read(app: &App, mut fields: Fields) -> Result<Self, ApiError> {
        let served = &app.served;
        let mut warnings = Warnings::default();
        let model = model(&mut fields, served)?;
        let mut options = options(&mut fields, served, app.random())?;
        if let Some(tokens) = max_tokens(&mut fields, &["max_output_tokens"], 1)? {
            options.max_tokens = tokens;
        }
        let stream = fields.take("stream")?.unwrap_or(false);
        fields.refuse(&["previous_response_id", "conversation"], STATELESS)?;
        fields.refuse(&["background", "prompt", "top_logprobs"], "is not done here")?;
        let instructions: Option<String> = fields.take("instructions")?;
        let mut text = fields.object("text")?;
        let format = text.as_mut().and_then(|text| text.value("format"));
        let wanted = match &format {
            Some(format) => form::format(Fields::of(format.clone(), "text.format")?, "text.format")?,
            None => None,
        };
        let choice = fields.value("tool_choice").unwrap_or_else(|| "auto".into());
        fields.put("tool_choice", choice.clone());
        let one_call = fields.take("parallel_tool_calls")? == Some(false);
        let tools = fields.value("tools").unwrap_or(Value::Array(vec![]));
        fields.put("tools", tools.clone());
        let conversation = conversation(app, &mut fields, instructions.as_deref(), &mut warnings)?;
        fields.ignore(&WITHOUT_EFFECT);
        warnings.unknown(&fields);
        let prompt = conversation.prompt(served)?;
        conversation.hold(served, &mut options, wanted.as_ref(), (&prompt.ids, one_call))?;
        let sampling = options.sampling;
        let head = Head {
            id: app.id("resp_"),
            created: now(),
            model,
            instructions,
            tools,
            choice,
            format: format.unwrap_or_else(|| json!({"type": "text"})),
            one_call,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
        };
        let job = Job {
            prompt: prompt.ids,
            options,
            logprobs: None,
            checkpoints: prompt.checkpoints,
            syntax: prompt.syntax,
            stops: vec![],
            calls: prompt.calls,
            one_call,
        };
        Ok(Self { job, head, stream, warnings })
    }
}
