//! Conversations in files: JSON with `type`, `version` and `messages`, which are as templates see
//! them.

use crate::{Failure, habits};
use lowbit::Message;
use lowbit_files::shown_path;
use lowbit_files::staging::{Content, Existing, Staged};
use serde::{Deserialize, Serialize};
use std::io::Write;

const TYPE: &str = "lowbit chat";

/// A change that a reader of version 1 would misread makes it 2.
const VERSION: u32 = 1;

/// The content that a new conversation may replace.
const CONTENT: Content = Content { name: "a saved conversation", begins: b"{\n  \"type\": \"lowbit chat\"," };

#[derive(Serialize, Deserialize)]
struct Saved {
    r#type: String,
    version: u32,
    messages: Vec<Message>,
}

/// Writes the conversation to `path`. Of what is there already only another conversation is
/// replaced.
pub fn save(path: &str, messages: &[Message]) -> Result<(), Failure> {
    let path = habits::expand_home(path);
    let saved = Saved { r#type: TYPE.into(), version: VERSION, messages: messages.to_vec() };
    let text = format!("{}\n", serde_json::to_string_pretty(&saved)?);
    let mut staged = Staged::file(&path, Existing::Replace(CONTENT))?;
    let written = staged.file_handle().write_all(text.as_bytes());
    written.map_err(|error| format!("{}: {error}", shown_path(&path)))?;
    Ok(staged.commit()?)
}

/// The conversation in `path`.
pub fn load(path: &str) -> Result<Vec<Message>, Failure> {
    let path = habits::expand_home(path);
    let text = habits::read_text(&path)?;
    let file = shown_path(&path);
    let saved: Result<Saved, _> = serde_json::from_str(&text);
    match saved.map_err(|error| format!("{file} is no conversation that /save has written: {error}"))? {
        Saved { r#type, .. } if r#type != TYPE => {
            Err(format!("{file} is no conversation that /save has written").into())
        }
        Saved { version, .. } if version != VERSION => {
            Err(format!("{file} has version {version}, but {VERSION} is the one that is known").into())
        }
        Saved { messages, .. } => Ok(messages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_comes_back_and_nothing_else_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a chat.json");
        let name = path.to_str().unwrap();
        let messages = [Message::new("system", "Be brief."), Message::new("user", "Hi\n\u{1b}[0m"), {
            let mut answer = Message::new("assistant", "Hello");
            answer.reasoning_content = Some("They say hi.".into());
            answer
        }];
        save(name, &messages[..2]).unwrap();
        save(name, &messages).unwrap();
        assert_eq!(load(name).unwrap(), messages);
        for (text, want) in [
            ("{}", "is no conversation"),
            (r#"{"type": "lowbit chat", "version": 2, "messages": []}"#, "has version 2, but 1"),
            (r#"{"type": "other", "version": 1, "messages": []}"#, "is no conversation"),
            ("a text", "is no conversation"),
        ] {
            std::fs::write(&path, text).unwrap();
            let message = load(name).unwrap_err().to_string();
            assert!(message.contains(want) && message.contains("a chat.json"), "{message}");
            let message = save(name, &messages).unwrap_err().to_string();
            assert!(message.contains("a chat.json"), "{message}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert!(load("none/such").unwrap_err().to_string().contains("none/such"));
    }
}
