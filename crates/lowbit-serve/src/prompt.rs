//! From a conversation to the ids that the engine reads.

use crate::error::{ApiError, boundary};
use crate::options::{TOOLS, TOOLS_BYTES};
use crate::served::Served;
use axum::http::StatusCode;
use lowbit::files::FileError;
use lowbit::{ChatTemplate, Message, Syntax, render_chat};
use serde_json::{Map, Value};
use std::sync::Arc;

/// The client's choice of tools.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Choice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

/// Prompts of fewer tokens are cheap to read again: no place in them is worth a checkpoint.
const SHORT: usize = 128;

/// A conversation that is to be answered, in no API's form any more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Message>,
    /// Functions' schemas, as templates take them.
    pub(crate) tools: Vec<Value>,
    /// Further variables of the template.
    pub(crate) variables: Map<String, Value>,
    /// The names of those whose arguments are held to their schemas.
    pub(crate) strict: Vec<String>,
    /// The client's choice: with none, the template sees no tools, and markup is text.
    pub(crate) choice: Choice,
}

/// A prompt.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) ids: Arc<[u32]>,
    pub(crate) syntax: Arc<Syntax>,
    /// Calls in the conversation so far.
    pub(crate) calls: usize,
    /// Places in it where other conversations are likely to branch off.
    pub(crate) checkpoints: Vec<usize>,
}

impl Conversation {
    /// The conversation's text, with the start of an answer.
    ///
    /// # Errors
    /// 400 for a model without a template, and for what the template refuses.
    pub(crate) fn render(&self, served: &Served) -> Result<(String, ChatTemplate), ApiError> {
        let template = self.template(served)?;
        let text = render_chat(&template, &self.messages).map_err(|error| of_template(&error))?;
        Ok((text, template))
    }

    /// The conversation's ids.
    ///
    /// # Errors
    /// Those of [`Self::render`].
    pub(crate) fn prompt(&self, served: &Served) -> Result<Prompt, ApiError> {
        let (text, template) = self.render(served)?;
        let ids = encode(|| served.ids.get(&text, |text| served.tokenizer.encode_chat(text)))?;
        let checkpoints =
            if ids.len() < SHORT { vec![] } else { self.checkpoints(served, &template, &text, &ids) };
        let syntax = Syntax::new(&template, Some(&served.tokenizer));
        let syntax = if self.choice == Choice::None { syntax.without_calls() } else { syntax };
        let calls = self.messages.iter().map(|message| message.tool_calls.len()).sum();
        Ok(Prompt { ids, syntax: Arc::new(syntax), calls, checkpoints })
    }

    fn template(&self, served: &Served) -> Result<ChatTemplate, ApiError> {
        let Some(template) = &served.template else {
            let message =
                format!("{} has no chat template: /v1/completions goes on with a text", served.name);
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "no_chat_template", message));
        };
        let mut template = template.clone();
        for (name, value) in &self.variables {
            template = template.with(name, value);
        }
        if !self.tools.is_empty() && self.choice != Choice::None {
            template = template.with("tools", &self.tools);
        }
        Ok(template)
    }

    /// The ends of the system's message with the tools, and of all before the last user's message:
    /// the ids that the whole conversation and one that ends there have in common.
    fn checkpoints(&self, served: &Served, template: &ChatTemplate, text: &str, ids: &[u32]) -> Vec<usize> {
        let system = usize::from(self.messages.first().is_some_and(|message| message.role == "system"));
        let user = self.messages.iter().rposition(|message| message.role == "user").unwrap_or(0);
        let mut found: Vec<usize> = [system, user]
            .into_iter()
            .filter(|&count| count > 0 && count < self.messages.len())
            .filter_map(|count| common(served, template, &self.messages[..count], (text, ids)))
            .collect();
        found.dedup();
        found
    }
}

/// The number of first ids that a text has in common with the conversation `messages`. A template
/// may refuse a conversation that ends there.
fn common(
    served: &Served,
    template: &ChatTemplate,
    messages: &[Message],
    (text, ids): (&str, &[u32]),
) -> Option<usize> {
    let start = template.render(messages, false).ok()?;
    let same = start.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
    let start = &text[..boundary(text, same)];
    let start = served.ids.get(start, |text| served.tokenizer.encode_chat(text)).ok()?;
    let same = start.iter().zip(ids).take_while(|(a, b)| a == b).count();
    (same > 0).then_some(same)
}

/// The ids of a text.
///
/// # Errors
/// 400 when the tokenizer refuses it.
pub(crate) fn encode<T>(encode: impl FnOnce() -> Result<T, FileError>) -> Result<T, ApiError> {
    encode().map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, "invalid_prompt", error.to_string()))
}

/// That a prompt of ids is one.
///
/// # Errors
/// 400 for no ids, and for those that the model does not have.
pub(crate) fn check(served: &Served, ids: &[u32], name: &str) -> Result<(), ApiError> {
    let size = served.vocab_size;
    match ids.iter().find(|&&id| id as usize >= size) {
        Some(id) => Err(ApiError::field(name, format!("token {id} is none of the model's {size}"))),
        None => Ok(()),
    }
}

fn of_template(error: &FileError) -> ApiError {
    let message = format!("the chat template refuses the messages: {error}");
    ApiError::new(StatusCode::BAD_REQUEST, "invalid_messages", message)
}

/// Tools as templates take them, within limits.
///
/// # Errors
/// 400 for too many.
pub(crate) fn check_tools(tools: &[Value]) -> Result<(), ApiError> {
    if tools.len() > TOOLS {
        return Err(ApiError::field("tools", format!("are {}, but {TOOLS} may be", tools.len())));
    }
    let bytes: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
    if bytes > TOOLS_BYTES {
        return Err(ApiError::field("tools", format!("have {bytes} bytes, but {TOOLS_BYTES} may be")));
    }
    Ok(())
}

/// The variables `chat_template_kwargs` of a request, which may not be what comes from its other
/// fields.
///
/// # Errors
/// 400.
pub(crate) fn check_variables(variables: &Map<String, Value>) -> Result<(), ApiError> {
    let own = ["messages", "add_generation_prompt", "tools"];
    match own.iter().find(|name| variables.contains_key(**name)) {
        Some(name) => {
            Err(ApiError::field("chat_template_kwargs", format!("{name} comes from the request itself")))
        }
        None => Ok(()),
    }
}

/// Sets how much the model is to reason, in the variable that its template has for it:
/// `reasoning_effort`, or `enable_thinking`, which is off for `none` alone. False if it has
/// neither.
pub(crate) fn set_effort(served: &Served, variables: &mut Map<String, Value>, effort: &str) -> bool {
    let mentions = |name| served.template.as_ref().is_some_and(|template| template.mentions(name));
    let (name, value) = match effort {
        "none" if mentions("enable_thinking") => ("enable_thinking", Value::Bool(false)),
        _ if mentions("reasoning_effort") => ("reasoning_effort", effort.into()),
        _ if mentions("enable_thinking") => ("enable_thinking", Value::Bool(true)),
        _ => return false,
    };
    variables.entry(name).or_insert(value);
    true
}
