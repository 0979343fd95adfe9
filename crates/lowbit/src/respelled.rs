//! Conversations with calls, for templates that do not take them as transformers gives them.

use lowbit_files::{ChatTemplate, FileError, Message};
use serde_json::Value;

/// Changes that a template may need in messages that call tools.
const CHANGES: [fn(&mut Value); 3] = [arguments_as_text, no_empty_content, content_without_reasoning];

/// The text of `messages`, with the start of an answer. Messages that call tools are spelled
/// otherwise where the template refuses them or leaves the calls out: templates differ in whether
/// arguments are an object or text, and whether content or reasoning may stand beside calls.
///
/// # Errors
/// As [`ChatTemplate::render`].
pub fn render(template: &ChatTemplate, messages: &[Message]) -> Result<String, FileError> {
    let plain = template.render(messages, true);
    let names: Vec<&str> =
        messages.iter().flat_map(|message| &message.tool_calls).map(|call| call.name()).collect();
    let has_calls = |text: &String| names.iter().all(|name| text.contains(name));
    if names.is_empty() || plain.as_ref().is_ok_and(has_calls) {
        return plain;
    }
    let Ok(Value::Array(spelled)) = serde_json::to_value(messages) else { return plain };
    // Every choice of changes, those of few first.
    let mut choices: Vec<usize> = (1..1 << CHANGES.len()).collect();
    choices.sort_by_key(|choice| choice.count_ones());
    let others = choices.into_iter().filter_map(|choice| {
        let mut messages = spelled.clone();
        for message in messages.iter_mut().filter(|message| message.get("tool_calls").is_some()) {
            let chosen = CHANGES.iter().enumerate().filter(|(index, _)| choice >> index & 1 == 1);
            chosen.for_each(|(_, change)| change(message));
        }
        template.render(&messages, true).ok()
    });
    match (others.into_iter().find(has_calls), plain) {
        (Some(text), _) => Ok(text),
        (None, plain) => plain,
    }
}

/// DeepSeek's templates add arguments to a text.
fn arguments_as_text(message: &mut Value) {
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        if !arguments.is_string() {
            *arguments = arguments.to_string().into();
        }
    }
}

/// DeepSeek's take a message for one of calls where its content is none.
fn no_empty_content(message: &mut Value) {
    if message["content"] == "" {
        message["content"] = Value::Null;
    }
}

/// gpt-oss's takes either of them beside a call.
fn content_without_reasoning(message: &mut Value) {
    if message["content"] != "" {
        message["reasoning_content"] = Value::Null;
    }
}
