use std::path::Path;

use lowbit_files::{ChatTemplate, Message};
use serde_json::{Map, Value};

use crate::split;

/// A template, its variables and the messages, with a line `---` between them. Text that is not
/// JSON counts as absent.
///
/// Memory and time are libFuzzer's to watch; the interpreter must not panic, nor write more than it
/// says.
pub fn chat_template(data: &[u8]) {
    let mut parts = split(data, b"\n---\n");
    let source = String::from_utf8_lossy(parts.next().unwrap_or(b""));
    let Ok(mut template) = ChatTemplate::new(&source, Path::new("fuzz")).map_err(|error| check(&error))
    else {
        return;
    };
    let variables: Option<Map<String, Value>> =
        parts.next().and_then(|json| serde_json::from_slice(json).ok());
    for (name, value) in variables.unwrap_or_default() {
        template = template.with(&name, value);
    }
    let messages: Option<Vec<Value>> = parts.next().and_then(|json| serde_json::from_slice(json).ok());
    let rendered = match messages {
        Some(messages) => template.render(&messages, true),
        None => template.render(&[Message::new("system", "be brief"), Message::new("user", "hi")], true),
    };
    match rendered {
        Ok(text) => assert!(text.len() < 1 << 27, "{} bytes", text.len()),
        Err(error) => check(&error),
    }
}

/// Messages are short, and none says that a thread panicked.
fn check(error: &impl ToString) {
    let message = error.to_string();
    assert!(message.len() < 20_000 && !message.contains("interpreter failed"), "{message}");
}
