//! OpenAI's `/v1/responses`, without state: a request brings its whole conversation.

mod input;
mod reply;

use crate::app::{App, Record, now};
use crate::body;
use crate::error::ApiError;
use crate::fields::Fields;
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
use serde_json::Value;
use std::sync::Arc;

/// Fields that say nothing of the reply: nothing is stored here.
const WITHOUT_EFFECT: [&str; 13] = [
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

struct Asked {
    job: Job,
    head: Head,
    stream: bool,
    warnings: Warnings,
}

/// Answers a conversation.
pub(crate) async fn responses(
    State(app): State<Arc<App>>,
    Extension(record): Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    app.admit()?;
    let asked = body::worked(&app, body, Asked::read).await?;
    let jobs = vec![asked.job];
    if asked.stream {
        let writer = ResponseStream::new(asked.head);
        return Ok(asked.warnings.on(stream(app, record, jobs, writer).await?));
    }
    let whole = Whole::one(Replies::submit(&app, &record, &jobs)?).await?;
    Ok(asked.warnings.on(answer(&whole_response(&asked.head, &whole))))
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
        let why = "nothing is stored here: send the whole conversation as input";
        fields.refuse(&["previous_response_id", "conversation"], why)?;
        fields.refuse(&["background", "prompt", "top_logprobs"], "is not done here")?;
        let instructions: Option<String> = fields.take("instructions")?;
        let format = fields.object("text")?.map(|mut text| text.object("format")).transpose()?.flatten();
        if let Some(of) = format.map(|mut format| format.need::<String>("type")).transpose()?
            && of != "text"
        {
            let problem = format!("is {of}: replies cannot be held to a form yet, text alone is taken");
            return Err(ApiError::unsupported("text.format.type", problem));
        }
        let one_call = fields.take("parallel_tool_calls")? == Some(false);
        let tools = fields.value("tools").unwrap_or(Value::Array(vec![]));
        fields.put("tools", tools.clone());
        let conversation = conversation(app, &mut fields, instructions.as_deref(), &mut warnings)?;
        fields.ignore(&WITHOUT_EFFECT);
        warnings.unknown(&fields);
        let prompt = conversation.prompt(served)?;
        let sampling = options.sampling;
        let head = Head {
            id: app.id("resp_"),
            created: now(),
            model,
            instructions,
            tools,
            no_calls: conversation.no_calls,
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
