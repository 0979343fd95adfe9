//! Chat templates: Jinja, in the environment that transformers gives them.

mod input;
mod jinja;
mod message;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value as Json;

use crate::gguf::Metadata;
use crate::read::{limit, read};
use crate::tokenizer::special_token;
use crate::{Checkpoint, FileError};
use jinja::Program;
pub use message::{Message, ToolCall};

/// Turns a chat into the text that the model was trained on.
///
/// Templates see `messages`, `add_generation_prompt`, `tools` and `documents` (none), the special tokens (`bos_token`,
/// `eos_token`, `pad_token`, `unk_token`, where the checkpoint has them) and what [`Self::with`] adds; they may call
/// Python's string and list methods, `raise_exception`, `strftime_now` and `tojson`, and use `break`, `continue` and
/// `generation` blocks. A template is an untrusted program: its source, steps, memory, text, depth and time are limited,
/// and beyond them rendering is an error.
///
/// Source: transformers 5.23 `render_jinja_template`.
#[derive(Debug)]
pub struct ChatTemplate {
    program: Program,
    /// Each is an error, where it could not be turned into JSON.
    variables: BTreeMap<String, Result<Json, String>>,
    /// Where it came from, for errors.
    file: Arc<Path>,
}

impl ChatTemplate {
    /// The template of `checkpoint`: chat_template.jinja, or `chat_template` in tokenizer_config.json (the one called
    /// `default` where there are several), or GGUF's `tokenizer.chat_template`. `None` for a base model.
    ///
    /// # Errors
    /// [`FileError::Template`] when it is no valid Jinja; [`FileError`] when the files that hold it are malformed.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>, FileError> {
        match checkpoint.metadata() {
            Some(metadata) => Self::from_gguf(metadata),
            None => from_directory(checkpoint),
        }
    }

    /// The template in `file`, with the special tokens of `checkpoint`.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read, [`FileError::Template`] when it is no valid Jinja.
    pub fn from_file(file: &Path, checkpoint: &Checkpoint) -> Result<Self, FileError> {
        let template = Self::read(file)?;
        match checkpoint.metadata() {
            Some(metadata) => template.with_gguf_tokens(metadata),
            None => match checkpoint.json("tokenizer_config.json")? {
                Some((file, config)) => template.with_special_tokens(&file, &config),
                None => Ok(template),
            },
        }
    }

    fn read(file: &Path) -> Result<Self, FileError> {
        let source = String::from_utf8(read(file, limit::TEMPLATE)?);
        let source = source.map_err(|error| template_error(file, error.to_string()))?;
        Self::new(&source, file)
    }

    /// The template in `tokenizer.chat_template`, if there is one.
    ///
    /// # Errors
    /// [`FileError::Gguf`] and [`FileError::Template`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Self>, FileError> {
        let Some(source) = metadata.find::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        Self::new(source, metadata.file())?.with_gguf_tokens(metadata).map(Some)
    }

    fn with_gguf_tokens(mut self, metadata: &Metadata) -> Result<Self, FileError> {
        let tokens: &[String] = metadata.find("tokenizer.ggml.tokens")?.unwrap_or_default();
        for (name, key) in SPECIAL_TOKENS.iter().zip(["bos", "eos", "padding", "unknown"]) {
            let id = metadata.find::<usize>(&format!("tokenizer.ggml.{key}_token_id"))?;
            if let Some(token) = id.and_then(|id| tokens.get(id)) {
                self = self.with(name, token);
            }
        }
        Ok(self)
    }

    fn with_special_tokens(mut self, file: &Path, config: &Json) -> Result<Self, FileError> {
        for name in SPECIAL_TOKENS {
            if let Some(token) = special_token(file, config, name)? {
                self = self.with(name, token);
            }
        }
        Ok(self)
    }

    /// Parses `source`, which errors say is in `file`.
    ///
    /// # Errors
    /// [`FileError::Template`].
    pub fn new(source: &str, file: &Path) -> Result<Self, FileError> {
        let program = Program::parse(source).map_err(|problem| template_error(file, problem))?;
        // transformers passes None for these without tools or documents, and templates test for that.
        let variables = ["tools", "documents"].map(|name| (name.to_string(), Ok(Json::Null)));
        Ok(Self { program, variables: variables.into(), file: file.into() })
    }

    /// Adds a variable that the template reads, such as `enable_thinking`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), input::json(value));
        self
    }

    /// The variable `name`, if the template is given one.
    pub fn variable(&self, name: &str) -> Option<&Json> {
        self.variables.get(name)?.as_ref().ok()
    }

    /// Whether `text` stands in the template's source: how models spell reasoning and calls, their templates show.
    pub fn mentions(&self, text: &str) -> bool {
        self.program.mentions(text)
    }

    /// The text of `messages` ([`Message`]s, or whatever serialises to objects with more fields). With
    /// `add_generation_prompt` it ends with the start of the assistant's next message.
    ///
    /// # Errors
    /// [`FileError::Template`] with what the template itself says when it refuses the messages (roles that do not
    /// alternate, say).
    pub fn render<M: Serialize>(
        &self,
        messages: &[M],
        add_generation_prompt: bool,
    ) -> Result<String, FileError> {
        let refuse = |problem| template_error(&self.file, problem);
        let mut variables = BTreeMap::new();
        for (name, value) in &self.variables {
            let value = value
                .as_ref()
                .map_err(|problem| refuse(format!("variable {}: {problem}", crate::shown(name))))?;
            variables.insert(name.clone(), value.clone());
        }
        let mut messages = input::json(messages).map_err(|problem| refuse(format!("messages: {problem}")))?;
        messages.as_array_mut().into_iter().flatten().for_each(name_reasoning);
        variables.insert("messages".into(), messages);
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        self.program.render(&variables).map_err(refuse)
    }
}

/// Reasoning has had several names; as in transformers, templates find it under the usual one and gpt-oss's.
fn name_reasoning(message: &mut Json) {
    let Some(message) = message.as_object_mut() else { return };
    let names = ["reasoning_content", "thinking", "reasoning"];
    let found = names.iter().find_map(|name| message.get(*name).filter(|value| !value.is_null()));
    let Some(reasoning) = found.cloned() else { return };
    // In front of all others, as a message that is printed whole shows.
    let thinking = message.shift_remove("thinking").unwrap_or_else(|| reasoning.clone());
    message.shift_insert(0, "thinking".into(), thinking);
    message.insert("reasoning_content".into(), reasoning);
}

const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

fn from_directory(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>, FileError> {
    let config = checkpoint.json("tokenizer_config.json")?;
    let file = checkpoint.path().join("chat_template.jinja");
    let template = if file.exists() {
        ChatTemplate::read(&file)?
    } else {
        let Some((file, config)) = &config else { return Ok(None) };
        match config_template(file, config)? {
            Some(source) => ChatTemplate::new(source, file)?,
            None => return Ok(None),
        }
    };
    match &config {
        Some((file, config)) => template.with_special_tokens(file, config).map(Some),
        None => Ok(Some(template)),
    }
}

/// `chat_template` is a template, or a list of named ones.
fn config_template<'a>(file: &Path, config: &'a Json) -> Result<Option<&'a str>, FileError> {
    let key = "chat_template";
    let Some(value) = config.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let default = || {
        let named = value.as_array()?.iter().find(|named| named["name"] == "default")?;
        named.get("template")?.as_str()
    };
    let want = "a template, or a list with one called default";
    let source = value.as_str().or_else(default);
    source.map(Some).ok_or_else(|| crate::checkpoint::mismatch(file, key, want, value))
}

fn template_error(file: &Path, problem: String) -> FileError {
    FileError::Template { file: file.into(), problem }
}
