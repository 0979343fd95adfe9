use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// One message of a chat, in the form in which templates see it and files of conversations have it.
/// Absent fields are not serialised, since templates test whether they are defined.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text.
    #[serde(default)]
    pub content: String,
    /// The assistant's reasoning before its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The assistant's tool calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// In a tool's message: the id of the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the tool that answers, or of the speaker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }

    /// The answer of the tool `name` to the call `tool_call_id`.
    pub fn tool(
        name: impl Into<String>,
        tool_call_id: impl Into<String>,
        content: impl Into<String>,
    ) -> Self {
        Self {
            tool_call_id: Some(tool_call_id.into()),
            name: Some(name.into()),
            ..Self::new("tool", content)
        }
    }
}

/// A tool call: `{"type": "function", "id": .., "function": {"name": .., "arguments": {..}}}`, as
/// in OpenAI's and transformers' messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename = "function")]
#[non_exhaustive]
pub struct ToolCall {
    /// The id that the tool's answer refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    function: Function,
}

/// The function that a call names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: Json,
}

impl ToolCall {
    /// A call of the function `name`. `arguments` is an object, or whatever else the model gave.
    pub fn new(id: Option<String>, name: impl Into<String>, arguments: Json) -> Self {
        Self { id, function: Function { name: name.into(), arguments } }
    }

    /// The function's name.
    pub fn name(&self) -> &str {
        &self.function.name
    }

    /// Its arguments, usually an object.
    pub fn arguments(&self) -> &Json {
        &self.function.arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn messages_are_spelled_as_templates_expect() {
        let plain = json!({"role": "user", "content": "hi"});
        assert_eq!(serde_json::to_value(Message::new("user", "hi")).unwrap(), plain);
        let call = ToolCall::new(Some("call00001".into()), "f", json!({"x": 1}));
        let mut message = Message::new("assistant", "");
        message.reasoning_content = Some("hm".into());
        message.tool_calls.push(call);
        let spelled = json!({
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"x": 1}}},
            ],
        });
        assert_eq!(serde_json::to_value(&message).unwrap(), spelled);
        assert_eq!(serde_json::from_value::<Message>(spelled).unwrap(), message);
        let answer = json!({"role": "tool", "content": "2", "tool_call_id": "call00001", "name": "f"});
        assert_eq!(serde_json::from_value::<Message>(answer).unwrap(), Message::tool("f", "call00001", "2"));
    }
}
