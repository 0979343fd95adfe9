//! Anthropic's messages, as templates take them.

use super::billing::without_billing;
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::form::{Wanted, format};
use crate::openai::Warnings;
use crate::prompt::{Choice, Conversation, check_tools, check_variables, set_effort};
use lowbit::{Message, ToolCall};
use serde_json::{Value, json};
use std::collections::HashMap;

/// The messages, tools and variables of a request.
///
/// # Errors
/// 400 for what they may not be.
pub(super) fn conversation(
    app: &App,
    fields: &mut Fields,
    warnings: &mut Warnings,
) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(system) = fields.value("system") {
        let keep = app.options.keep_billing_header;
        let system = if keep { system } else { without_billing(system) };
        conversation.messages.push(Message::new("system", text(system, "system")?));
    }
    let Some(list) = fields.list("messages")? else { return Err(ApiError::field("messages", "is missing")) };
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty"));
    }
    let mut read = Read::default();
    for (index, message) in list.into_iter().enumerate() {
        read.message(message, &format!("messages[{index}]"))?;
    }
    conversation.messages.append(&mut read.messages);
    if conversation.messages.last().is_some_and(|message| message.role == "assistant") {
        let problem = "end with the assistant's: an answer cannot be begun by the client yet";
        return Err(ApiError::unsupported("messages", problem));
    }
    let list = fields.list("tools")?.unwrap_or_default();
    check_tools(&list)?;
    (conversation.tools, conversation.strict) = tools(list, warnings)?;
    conversation.variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
    check_variables(&conversation.variables)?;
    let mut choice = fields.object("tool_choice")?;
    if let Some(choice) = &mut choice {
        conversation.choice = self::choice(choice)?;
    }
    if let Some(mut thinking) = fields.object("thinking")? {
        let effort = match thinking.need::<String>("type")?.as_str() {
            "enabled" | "adaptive" => "high",
            "disabled" => "none",
            other => {
                let problem = format!("is {other}, but enabled, adaptive or disabled is wanted");
                return Err(ApiError::field("thinking.type", problem));
            }
        };
        // A template without the variable thinks, or does not, whatever is asked for.
        if !set_effort(&app.served, &mut conversation.variables, effort) && effort != "none" {
            warnings.say("thinking: the chat template does not ask for it, ignored");
        }
        if thinking.value("budget_tokens").is_some() {
            warnings.say("thinking.budget_tokens: ignored, reasoning is as long as the model makes it");
        }
    }
    if let Some(effort) = fields.object("output_config")?.and_then(|mut config| config.value("effort")) {
        let effort: String = serde_json::from_value(effort)
            .map_err(|_| ApiError::field("output_config.effort", "must be a string"))?;
        if !set_effort(&app.served, &mut conversation.variables, &effort) {
            warnings.say("output_config.effort: the chat template knows none, ignored");
        }
    }
    Ok(conversation)
}

/// True if the reply ends after its first call.
pub(super) fn one_call(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(mut choice) = fields.value("tool_choice") else { return Ok(false) };
    let only = choice.as_object_mut().and_then(|choice| choice.shift_remove("disable_parallel_tool_use"));
    fields.put("tool_choice", choice);
    match only {
        None | Some(Value::Null | Value::Bool(false)) => Ok(false),
        Some(Value::Bool(true)) => Ok(true),
        Some(other) => {
            let problem = format!("must be a boolean, but is {}", kind(&other));
            Err(ApiError::field("tool_choice.disable_parallel_tool_use", problem))
        }
    }
}

fn choice(fields: &mut Fields) -> Result<Choice, ApiError> {
    match fields.need::<String>("type")?.as_str() {
        "auto" => Ok(Choice::Auto),
        "none" => Ok(Choice::None),
        "any" => Ok(Choice::Required),
        "tool" => fields.need("name").map(Choice::Named),
        other => {
            let problem = format!("is {other}, but auto, any, tool or none is wanted");
            Err(ApiError::unsupported("tool_choice.type", problem))
        }
    }
}

/// The reply's form: `output_config.format`, or `output_format`, as it was called.
///
/// # Errors
/// 400 for another than a JSON schema.
pub(super) fn wanted(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    let mut config = fields.object("output_config")?;
    let of = config.as_mut().map(|config| config.object("format")).transpose()?.flatten();
    let old = fields.object("output_format")?;
    if let (Some(_), Some(_)) = (&of, &old) {
        return Err(ApiError::field(
            "output_format",
            "is the old name of output_config.format: one may be given",
        ));
    }
    // Read with the conversation.
    if let Some(effort) = config.as_mut().and_then(|config| config.value("effort")) {
        fields.put("output_config", json!({"effort": effort}));
    }
    match (of, old) {
        (Some(of), _) => format(of, "output_config.format"),
        (None, Some(old)) => format(old, "output_format"),
        (None, None) => Ok(None),
    }
}

/// Tools with a schema, and the names of those that are held to it; tools that Anthropic runs
/// itself are left out, with a warning.
fn tools(list: Vec<Value>, warnings: &mut Warnings) -> Result<(Vec<Value>, Vec<String>), ApiError> {
    let (mut tools, mut strict) = (vec![], vec![]);
    for (index, tool) in list.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        let mut fields = Fields::of(tool, &path)?;
        if let Some(of) = fields.take::<String>("type")?.filter(|of| of != "custom") {
            warnings.say(format!("{path}: a tool of type {of} is left out"));
            continue;
        }
        let name: String = fields.need("name")?;
        if fields.take("strict")? == Some(true) {
            strict.push(name.clone());
        }
        let mut function = json!({"name": name});
        if let Some(description) = fields.take::<String>("description")? {
            function["description"] = description.into();
        }
        function["parameters"] =
            fields.value("input_schema").unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        tools.push(json!({"type": "function", "function": function}));
    }
    Ok((tools, strict))
}

/// Messages so far.
#[derive(Default)]
struct Read {
    messages: Vec<Message>,
    /// The names of calls by their ids: results name the id alone.
    names: HashMap<String, String>,
}

impl Read {
    fn message(&mut self, value: Value, path: &str) -> Result<(), ApiError> {
        let mut fields = Fields::of(value, path)?;
        let role: String = fields.need("role")?;
        let at = fields.path("content");
        let content = fields.value("content").ok_or_else(|| ApiError::field(&at, "is missing"))?;
        match role.as_str() {
            "user" => self.user(content, &at),
            "assistant" => self.assistant(content, &at),
            "system" => {
                self.messages.push(Message::new("system", text(content, &at)?));
                Ok(())
            }
            other => {
                let problem = format!("is {other}, but user or assistant is wanted");
                Err(ApiError::field(&fields.path("role"), problem))
            }
        }
    }

    /// A user's message: results of calls, each a message of its own, and text.
    fn user(&mut self, content: Value, path: &str) -> Result<(), ApiError> {
        let mut texts = vec![];
        for (mut block, of, path) in blocks(content, path)? {
            match of.as_str() {
                "text" => texts.push(block.need::<String>("text")?),
                "tool_result" => {
                    let id: String = block.need("tool_use_id")?;
                    let result = match block.value("content") {
                        Some(content) => text(content, &block.path("content"))?,
                        None => String::new(),
                    };
                    let name = self.names.get(&id).cloned().unwrap_or_default();
                    let mut message = Message::tool(&name, id, result);
                    message.name = Some(name).filter(|name| !name.is_empty());
                    self.messages.push(message);
                }
                _ => return Err(unread(&path, &of)),
            }
        }
        if !texts.is_empty() {
            self.messages.push(Message::new("user", texts.join("\n")));
        }
        Ok(())
    }

    fn assistant(&mut self, content: Value, path: &str) -> Result<(), ApiError> {
        let (mut texts, mut thoughts) = (vec![], vec![]);
        let mut message = Message::new("assistant", "");
        for (mut block, of, path) in blocks(content, path)? {
            match of.as_str() {
                "text" => texts.push(block.need::<String>("text")?),
                "thinking" => thoughts.push(block.need::<String>("thinking")?),
                // Text that only its maker can read.
                "redacted_thinking" => {}
                "tool_use" => {
                    let (id, name): (String, String) = (block.need("id")?, block.need("name")?);
                    let input = block.value("input").unwrap_or_else(|| json!({}));
                    self.names.insert(id.clone(), name.clone());
                    message.tool_calls.push(ToolCall::new(Some(id), name, input));
                }
                _ => return Err(unread(&path, &of)),
            }
        }
        message.content = texts.join("\n");
        message.reasoning_content = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
        self.messages.push(message);
        Ok(())
    }
}

fn unread(path: &str, of: &str) -> ApiError {
    ApiError::unsupported(path, format!("is of type {of}: lowbit reads text alone"))
}

/// Blocks with their types and paths; a text is a block of text.
fn blocks(content: Value, path: &str) -> Result<Vec<(Fields, String, String)>, ApiError> {
    let list = match content {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        Value::Array(list) => list,
        other => {
            let problem = format!("must be a string or a list of blocks, but is {}", kind(&other));
            return Err(ApiError::field(path, problem));
        }
    };
    let read = |(index, block)| {
        let path = format!("{path}[{index}]");
        let mut block = Fields::of(block, &path)?;
        let of = block.need::<String>("type")?;
        Ok((block, of, path))
    };
    list.into_iter().enumerate().map(read).collect()
}

/// The text of a string, or of a list of blocks of text.
fn text(content: Value, path: &str) -> Result<String, ApiError> {
    let mut texts = vec![];
    for (mut block, of, path) in blocks(content, path)? {
        match of.as_str() {
            "text" => texts.push(block.need::<String>("text")?),
            _ => return Err(unread(&path, &of)),
        }
    }
    Ok(texts.join("\n"))
}
