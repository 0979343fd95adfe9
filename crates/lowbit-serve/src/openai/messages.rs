//! OpenAI's messages and tools, as templates take them.

use crate::error::ApiError;
use crate::fields::{Fields, kind};
use lowbit::{Message, ToolCall};
use serde_json::{Value, json};

/// The messages of a chat.
///
/// # Errors
/// 400 with the path of what is no message.
pub(crate) fn messages(list: Vec<Value>) -> Result<Vec<Message>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty"));
    }
    list.into_iter().enumerate().map(|(index, value)| message(value, &format!("messages[{index}]"))).collect()
}

fn message(value: Value, path: &str) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role: String = fields.need("role")?;
    // OpenAI's newer name, which templates do not know.
    let role = if role == "developer" { "system".into() } else { role };
    if !["system", "user", "assistant", "tool"].contains(&role.as_str()) {
        let problem = format!("is {role}, but system, developer, user, assistant or tool is wanted");
        return Err(ApiError::field(&fields.path("role"), problem));
    }
    let content = content(fields.value("content"), &fields.path("content"))?;
    let mut message = Message::new(role, content);
    message.reasoning_content = match fields.take("reasoning_content")? {
        Some(reasoning) => Some(reasoning),
        None => fields.take("reasoning")?,
    };
    message.name = fields.take("name")?;
    message.tool_call_id = fields.take("tool_call_id")?;
    let path = fields.path("tool_calls");
    for (index, call) in fields.list("tool_calls")?.unwrap_or_default().into_iter().enumerate() {
        message.tool_calls.push(tool_call(call, &format!("{path}[{index}]"))?);
    }
    Ok(message)
}

/// A text, or a list of parts of text.
pub(crate) fn content(value: Option<Value>, path: &str) -> Result<String, ApiError> {
    let parts = match value {
        None => return Ok(String::new()),
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            let problem = format!("must be a string or a list of parts, but is {}", kind(&other));
            return Err(ApiError::field(path, problem));
        }
    };
    let mut texts = vec![];
    for (index, part) in parts.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        let mut fields = Fields::of(part, &path)?;
        let of: String = fields.need("type")?;
        match of.as_str() {
            "text" | "input_text" | "output_text" => texts.push(fields.need::<String>("text")?),
            "refusal" => texts.push(fields.need::<String>("refusal")?),
            _ => {
                return Err(ApiError::unsupported(
                    &path,
                    format!("is of type {of}: lowbit reads text alone"),
                ));
            }
        }
    }
    // As vLLM and llama.cpp join them.
    Ok(texts.join("\n"))
}

/// A call of an earlier answer. Templates take arguments as an object.
fn tool_call(value: Value, path: &str) -> Result<ToolCall, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let id: Option<String> = fields.take("id")?;
    let Some(mut function) = fields.object("function")? else {
        return Err(ApiError::field(&fields.path("function"), "is missing"));
    };
    let name: String = function.need("name")?;
    let arguments = match function.value("arguments") {
        None => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        Some(other) => other,
    };
    Ok(ToolCall::new(id, name, arguments))
}

/// The functions among a request's tools, as templates take them, and the names of those whose
/// schemas are to be enforced; `skip` is told of tools of other kinds.
///
/// # Errors
/// 400 with the path of what is no tool.
pub(crate) fn tools(
    list: Vec<Value>,
    mut skip: impl FnMut(String),
) -> Result<(Vec<Value>, Vec<String>), ApiError> {
    let (mut tools, mut strict) = (vec![], vec![]);
    for (index, tool) in list.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        let mut fields = Fields::of(tool, &path)?;
        let of: String = fields.take("type")?.unwrap_or_else(|| "function".into());
        if of != "function" {
            skip(format!("{path}: a tool of type {of} is left out"));
            continue;
        }
        // The form of /v1/responses has no object of its own for the function.
        let mut function = match fields.object("function")? {
            Some(function) => function,
            None => fields,
        };
        let name: String = function.need("name")?;
        if function.take("strict")? == Some(true) {
            strict.push(name.clone());
        }
        let mut schema = json!({"name": name});
        if let Some(description) = function.take::<String>("description")? {
            schema["description"] = description.into();
        }
        schema["parameters"] =
            function.value("parameters").unwrap_or_else(|| json!({"type": "object", "properties": {}}));
        tools.push(json!({"type": "function", "function": schema}));
    }
    Ok((tools, strict))
}
