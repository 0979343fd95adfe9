//! The items of a conversation, as templates take them.

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::form::choice;
use crate::openai::Warnings;
use crate::openai::messages::{content, tools};
use crate::prompt::{Conversation, check_tools, check_variables, set_effort};
use lowbit::{Message, ToolCall};
use serde_json::{Value, json};

/// The messages, tools and variables of a request.
///
/// # Errors
/// 400 for what they may not be.
pub(super) fn conversation(
    app: &App,
    fields: &mut Fields,
    instructions: Option<&str>,
    warnings: &mut Warnings,
) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    conversation.messages.extend(instructions.map(|text| Message::new("system", text)));
    match fields.value("input") {
        None => return Err(ApiError::field("input", "is missing")),
        Some(Value::String(text)) => conversation.messages.push(Message::new("user", text)),
        Some(Value::Array(list)) => {
            for (index, value) in list.into_iter().enumerate() {
                item(value, &format!("input[{index}]"), &mut conversation.messages, warnings)?;
            }
        }
        Some(other) => {
            let problem = format!("must be a string or a list of items, but is {}", kind(&other));
            return Err(ApiError::field("input", problem));
        }
    }
    let list = fields.list("tools")?.unwrap_or_default();
    check_tools(&list)?;
    (conversation.tools, conversation.strict) = tools(list, |warning| warnings.say(warning))?;
    conversation.choice = choice(fields.value("tool_choice"))?;
    conversation.variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
    check_variables(&conversation.variables)?;
    let reasoning = fields.object("reasoning")?;
    if let Some(effort) =
        reasoning.map(|mut reasoning| reasoning.take::<String>("effort")).transpose()?.flatten()
        && !set_effort(&app.served, &mut conversation.variables, &effort)
    {
        warnings.say("reasoning.effort: the chat template knows none, ignored");
    }
    Ok(conversation)
}

/// Adds an item to the messages. Reasoning, text and calls of one turn of the assistant are one
/// message.
fn item(
    value: Value,
    path: &str,
    messages: &mut Vec<Message>,
    warnings: &mut Warnings,
) -> Result<(), ApiError> {
    let mut fields = Fields::of(value, path)?;
    let of: String = fields.take("type")?.unwrap_or_else(|| "message".into());
    match of.as_str() {
        "message" => {
            let role: String = fields.need("role")?;
            let text = content(fields.value("content"), &fields.path("content"))?;
            match role.as_str() {
                "assistant" => {
                    let message =
                        turn(messages, |message| message.content.is_empty() && message.tool_calls.is_empty());
                    message.content = text;
                }
                "system" | "developer" => messages.push(Message::new("system", text)),
                "user" => messages.push(Message::new("user", text)),
                other => {
                    let problem = format!("is {other}, but user, assistant, system or developer is wanted");
                    return Err(ApiError::field(&fields.path("role"), problem));
                }
            }
        }
        "reasoning" => {
            let text = content(fields.value("content").map(of_reasoning), &fields.path("content"))?;
            if !text.is_empty() {
                let empty = |message: &Message| *message == Message::new("assistant", "");
                turn(messages, empty).reasoning_content = Some(text);
            }
        }
        "function_call" => {
            let (id, name): (String, String) = (fields.need("call_id")?, fields.need("name")?);
            let text: String = fields.take("arguments")?.unwrap_or_default();
            let arguments = match text.trim() {
                "" => json!({}),
                trimmed => serde_json::from_str(trimmed).unwrap_or_else(|_| text.clone().into()),
            };
            turn(messages, |_| true).tool_calls.push(ToolCall::new(Some(id), name, arguments));
        }
        "function_call_output" => {
            let id: String = fields.need("call_id")?;
            let text = content(fields.value("output"), &fields.path("output"))?;
            let calls = messages.iter().flat_map(|message| &message.tool_calls);
            let name = calls
                .into_iter()
                .find(|call| call.id.as_ref() == Some(&id))
                .map(|call| call.name().to_string());
            let mut message = Message::new("tool", text);
            (message.tool_call_id, message.name) = (Some(id), name);
            messages.push(message);
        }
        "item_reference" => {
            return Err(ApiError::unsupported(path, "nothing is stored here: send the item itself"));
        }
        other => warnings.say(format!("{path}: an item of type {other} is left out")),
    }
    Ok(())
}

/// The assistant's last message if what comes next belongs to it, else a new one.
fn turn(messages: &mut Vec<Message>, belongs: impl Fn(&Message) -> bool) -> &mut Message {
    let goes_on = messages.last().is_some_and(|message| message.role == "assistant" && belongs(message));
    if !goes_on {
        messages.push(Message::new("assistant", ""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// Parts of reasoning as parts of text.
fn of_reasoning(mut parts: Value) -> Value {
    for part in parts.as_array_mut().into_iter().flatten() {
        if part["type"] == "reasoning_text" {
            part["type"] = "text".into();
        }
    }
    parts
}
