//! `/v1/chat/completions`.

use super::chat_reply::{ChatStream, Extras, whole_chat};
use super::messages::{messages, tools};
use super::{Head, Warnings};
use crate::app::{App, Host, Record};
use crate::body;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::form::{choice, wanted};
use crate::options::{LOGPROBS, REPLIES};
use crate::prompt::{Conversation, check_tools, check_variables, set_effort};
use crate::run::{Job, Replies, Whole};
use crate::sampling::{max_tokens, model, options, stops};
use crate::stream::stream;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use std::sync::Arc;

/// Fields that say nothing of the reply.
pub(crate) const WITHOUT_EFFECT: [&str; 13] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "verbosity",
    "cache_prompt",
    "cache_key",
    "add_generation_prompt",
    "timings_per_token",
];

/// A chat that is to be answered.
struct Asked {
    jobs: Vec<Job>,
    model: String,
    stream: bool,
    include_usage: bool,
    extras: Extras,
    warnings: Warnings,
}

/// Answers a chat.
pub(crate) async fn chat(
    State(host): State<Arc<Host>>,
    Extension(record): Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, Asked::read).await?;
    let head = Head::new(&app, "chatcmpl-", asked.model);
    if asked.stream {
        let writer =
            ChatStream::new(app.clone(), head, (asked.jobs.len(), asked.extras), asked.include_usage);
        return Ok(asked.warnings.on(stream(app, record, asked.jobs, writer).await?));
    }
    let whole = Whole::all(Replies::submit(&app, &record, &asked.jobs)?).await?;
    Ok(asked.warnings.on(super::answer(&whole_chat(&app.served.tokenizer, &head, &whole, &asked.extras))))
}

impl Asked {
    fn read(app: &App, mut fields: Fields) -> Result<Self, ApiError> {
        let served = &app.served;
        let mut warnings = Warnings::default();
        let model = model(&mut fields, served)?;
        let n = fields.count("n", 1, REPLIES)?.unwrap_or(1);
        let mut options = options(&mut fields, served, app.random())?;
        if let Some(tokens) = max_tokens(&mut fields, &["max_completion_tokens", "max_tokens"], 1)? {
            options.max_tokens = tokens;
        }
        let stops = stops(&mut fields, "stop")?;
        let logprobs = logprobs(&mut fields)?;
        let (stream, include_usage) = streaming(&mut fields)?;
        let ids = fields.take("return_token_ids")?.unwrap_or(false);
        let wanted = wanted(&mut fields)?;
        let one_call = fields.take("parallel_tool_calls")? == Some(false);
        let conversation = conversation(app, &mut fields, &mut warnings)?;
        refuse(&mut fields)?;
        warnings.unknown(&fields);
        let prompt = conversation.prompt(served)?;
        conversation.hold(served, &mut options, wanted.as_ref(), (&prompt.ids, one_call))?;
        let job = |index: usize| {
            let mut options = options.clone();
            options.sampling.seed = options.sampling.seed.wrapping_add(index as u64);
            Job {
                prompt: prompt.ids.clone(),
                options,
                logprobs,
                checkpoints: prompt.checkpoints.clone(),
                syntax: prompt.syntax.clone(),
                stops: stops.clone(),
                calls: prompt.calls,
                one_call,
            }
        };
        let jobs = (0..n).map(job).collect();
        let extras = Extras { logprobs: logprobs.is_some(), prompt: ids.then(|| prompt.ids.clone()) };
        Ok(Self { jobs, model, stream, include_usage, extras, warnings })
    }
}

/// The messages, tools and variables of a request.
///
/// # Errors
/// 400 for what they may not be.
pub(crate) fn conversation(
    app: &App,
    fields: &mut Fields,
    warnings: &mut Warnings,
) -> Result<Conversation, ApiError> {
    let Some(list) = fields.list("messages")? else { return Err(ApiError::field("messages", "is missing")) };
    let mut conversation = Conversation { messages: messages(list)?, ..Conversation::default() };
    let list = fields.list("tools")?.unwrap_or_default();
    check_tools(&list)?;
    (conversation.tools, conversation.strict) = tools(list, |warning| warnings.say(warning))?;
    conversation.choice = choice(fields.value("tool_choice"))?;
    conversation.variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
    check_variables(&conversation.variables)?;
    let effort = match fields.object("reasoning")? {
        Some(mut reasoning) => reasoning.take::<String>("effort")?,
        None => None,
    };
    let effort = fields.take::<String>("reasoning_effort")?.or(effort);
    if let Some(effort) = effort
        && !set_effort(&app.served, &mut conversation.variables, &effort)
    {
        warnings.say("reasoning_effort: the chat template knows none, ignored");
    }
    Ok(conversation)
}

/// The number of likeliest tokens beside each, if log-probabilities are asked for.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let asked = fields.take::<bool>("logprobs")?.unwrap_or(false);
    match (fields.count("top_logprobs", 0, LOGPROBS)?, asked) {
        (top, true) => Ok(Some(top.unwrap_or(0))),
        (None | Some(0), false) => Ok(None),
        (Some(_), false) => Err(ApiError::field("top_logprobs", "needs logprobs to be true")),
    }
}

/// The two flags of streams: the reply is streamed; its usage comes at the end.
pub(crate) fn streaming(fields: &mut Fields) -> Result<(bool, bool), ApiError> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else { return Ok((stream, false)) };
    Ok((stream, options.take("include_usage")?.unwrap_or(false)))
}

/// Refuses and drops what a chat may also have.
fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.take::<Vec<String>>("modalities")? {
        Some(list) if list != ["text"] => {
            return Err(ApiError::unsupported("modalities", "lowbit writes text alone"));
        }
        _ => {}
    }
    fields.refuse(&["functions", "function_call"], "is the old name: tools and tool_choice are taken")?;
    fields.refuse(&["audio", "web_search_options"], "lowbit reads and writes text alone")?;
    refuse_others(fields)?;
    fields.refuse(&["continue_final_message"], "an answer cannot be begun by the client yet")?;
    fields.ignore(&WITHOUT_EFFECT);
    Ok(())
}

/// Refuses fields of peers for what is not done here.
pub(crate) fn refuse_others(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse(&["use_beam_search", "lora", "adapters", "images"], "is not done here")
}
