//! Chat templates: Jinja, in the environment that transformers gives them.

mod input;
mod message;
pub(crate) mod named;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use lowbit_jinja::Template;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::gguf::Metadata;
use crate::read::{limit, read};
use crate::tokenizer::Declared;
use crate::{Checkpoint, FileError};
pub use message::{Message, ToolCall};
use named::Named;

/// Renders a chat in the form that the model was trained on.
///
/// Templates see `messages`, `add_generation_prompt`, `tools` and `documents` (none), the special
/// tokens (`bos_token`, `eos_token` and all others that the checkpoint names) and the variables of
/// [`Self::with`]. They may call Python's string and list methods, `raise_exception`,
/// `strftime_now` and `tojson`, and use `break`, `continue` and `generation` blocks. A template is
/// an untrusted program: its source, steps, memory, text, depth and time are limited, and exceeding
/// a limit is an error.
///
/// A checkpoint may have several templates: the one named `tool_use` renders chats with tools
/// (`tools` is not null), the one named `default` all others.
///
/// A clone shares the programs, and has variables of its own.
///
/// Source: transformers 5.24 `render_jinja_template` and `get_chat_template`.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    default: Option<Arc<Parsed>>,
    tool_use: Option<Arc<Parsed>>,
    /// Those that are for no kind of chat.
    others: Vec<String>,
    /// Each is an error, where it could not be turned into JSON.
    variables: BTreeMap<String, Result<Json, String>>,
    /// The template's source file, for errors.
    file: Arc<Path>,
}

/// A template, and the file that it stands in.
#[derive(Debug)]
struct Parsed {
    /// One that chats do not need may be no valid Jinja.
    program: Result<Template, lowbit_jinja::Error>,
    file: Arc<Path>,
}

impl Parsed {
    fn new(source: &str, file: &Path) -> Arc<Self> {
        Arc::new(Self { program: Template::parse(source), file: file.into() })
    }
}

impl ChatTemplate {
    /// The templates of `checkpoint`: chat_template.jinja and additional_chat_templates/NAME.jinja;
    /// or `chat_template` in tokenizer_config.json, else in chat_template.json (a template, or
    /// several by name); or GGUF's `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.
    /// `None` for a base model.
    ///
    /// # Errors
    /// [`FileError::Template`] when the default is not valid Jinja; [`FileError`] when the files
    /// that hold it are malformed.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>, FileError> {
        Self::of(named::all(checkpoint)?, || special_tokens(checkpoint))
    }

    /// The template in `file`, with the special tokens of `checkpoint`.
    ///
    /// # Errors
    /// [`FileError`] when the file cannot be read, [`FileError::Template`] when it is not valid
    /// Jinja.
    pub fn from_file(file: &Path, checkpoint: &Checkpoint) -> Result<Self, FileError> {
        let source = String::from_utf8(read(file, limit::TEMPLATE)?);
        let source = source.map_err(|error| template_error(file, error.to_string()))?;
        Self::from_source(&source, file, checkpoint)
    }

    /// The template `source`, with the special tokens of `checkpoint`; messages call it `name`.
    ///
    /// # Errors
    /// [`FileError`] when the checkpoint's special tokens cannot be read, [`FileError::Template`]
    /// when the source is not valid Jinja.
    pub fn from_source(source: &str, name: &Path, checkpoint: &Checkpoint) -> Result<Self, FileError> {
        Ok(Self::new(source, name)?.with_all(special_tokens(checkpoint)?))
    }

    /// The templates in `tokenizer.chat_template` and `tokenizer.chat_template.NAME`, if there are
    /// any.
    ///
    /// # Errors
    /// [`FileError::Gguf`] and [`FileError::Template`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Self>, FileError> {
        Self::of(named::of_gguf(metadata)?, || gguf_tokens(metadata))
    }

    /// `None` of no templates.
    fn of(
        templates: Vec<Named>,
        special_tokens: impl FnOnce() -> Result<Vec<(String, String)>, FileError>,
    ) -> Result<Option<Self>, FileError> {
        let Some(first) = templates.first() else { return Ok(None) };
        let mut this = Self::without_programs(&first.file);
        for Named { name, source, file } in &templates {
            match name.as_str() {
                named::DEFAULT => this.default = Some(Parsed::new(source, file)),
                named::TOOL_USE => this.tool_use = Some(Parsed::new(source, file)),
                _ => this.others.push(name.clone()),
            }
        }
        if let Some(Parsed { program: Err(problem), file }) = this.default.as_deref() {
            return Err(template_error(file, problem));
        }
        Ok(Some(this.with_all(special_tokens()?)))
    }

    fn with_all(mut self, variables: Vec<(String, String)>) -> Self {
        self.variables.extend(variables.into_iter().map(|(name, text)| (name, Ok(text.into()))));
        self
    }

    fn without_programs(file: &Path) -> Self {
        // transformers passes None for these without tools or documents, and templates test for
        // that.
        let variables = ["tools", "documents"].map(|name| (name.to_string(), Ok(Json::Null)));
        Self { default: None, tool_use: None, others: vec![], variables: variables.into(), file: file.into() }
    }

    /// Parses `source` as the template for all chats; errors name `file`.
    ///
    /// # Errors
    /// [`FileError::Template`].
    pub fn new(source: &str, file: &Path) -> Result<Self, FileError> {
        let program = Template::parse(source).map_err(|problem| template_error(file, problem))?;
        let default = Some(Arc::new(Parsed { program: Ok(program), file: file.into() }));
        Ok(Self { default, ..Self::without_programs(file) })
    }

    /// Adds a variable that the template reads, such as `enable_thinking`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), input::json(value));
        self
    }

    /// The value of the variable `name`, if it was set.
    pub fn variable(&self, name: &str) -> Option<&Json> {
        self.variables.get(name)?.as_ref().ok()
    }

    /// True if the source of a template for chats contains `text`. Templates show how their models
    /// spell reasoning and calls.
    pub fn mentions(&self, text: &str) -> bool {
        let parsed = [&self.default, &self.tool_use].into_iter().flatten();
        parsed
            .filter_map(|parsed| parsed.program.as_ref().ok())
            .any(|program| program.source().contains(text))
    }

    /// The names of all templates, `default` and `tool_use` first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let default = self.default.iter().map(|_| named::DEFAULT);
        let tool_use = self.tool_use.iter().map(|_| named::TOOL_USE);
        default.chain(tool_use).chain(self.others.iter().map(String::as_str))
    }

    /// The text of `messages` ([`Message`]s, or values that serialise to objects with more fields;
    /// fields that are null do not count, but for the content of a message with calls).
    /// With `add_generation_prompt` it ends with the start of the assistant's next message.
    ///
    /// # Errors
    /// [`FileError::Template`] with the template's own message when it refuses the chat (for roles
    /// that do not alternate, for instance), or when the checkpoint has no template for this chat.
    pub fn render<M: Serialize>(
        &self,
        messages: &[M],
        add_generation_prompt: bool,
    ) -> Result<String, FileError> {
        let (program, file) = self.chosen()?;
        let refuse = |problem: String| template_error(file, problem);
        let mut variables = BTreeMap::new();
        for (name, value) in &self.variables {
            let value = value
                .as_ref()
                .map_err(|problem| refuse(format!("variable {}: {problem}", crate::shown(name))))?;
            variables.insert(name.clone(), value.clone());
        }
        let mut messages = input::json(messages).map_err(|problem| refuse(format!("messages: {problem}")))?;
        for message in messages.as_array_mut().into_iter().flatten().filter_map(Json::as_object_mut) {
            // As in transformers: OpenAI's interface has null for what a message does not have, and
            // templates would print it. DeepSeek's ask for a content that is none beside calls.
            let calls = message.get("tool_calls").is_some_and(|calls| !calls.is_null());
            message.retain(|key, value| !value.is_null() || calls && key == "content");
            name_reasoning(message);
        }
        variables.insert("messages".into(), messages);
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        program.render(&variables).map_err(|error| template_error(file, error))
    }

    /// True if the text rendered for a short chat begins with `text`; `None` if the template
    /// refuses that chat.
    pub(crate) fn begins_with(&self, text: &str) -> Option<bool> {
        let rendered = self.render(&[Message::new("user", "x")], true).ok()?;
        Some(rendered.starts_with(text))
    }

    /// The template for a chat with the variables at hand.
    fn chosen(&self) -> Result<(&Template, &Path), FileError> {
        let has_tools = !matches!(self.variables.get("tools"), None | Some(Ok(Json::Null)));
        let tool_use = self.tool_use.as_deref().filter(|_| has_tools);
        let Some(Parsed { program, file }) = tool_use.or(self.default.as_deref()) else {
            let names: Vec<_> = self.names().map(|name| crate::shown(name).to_string()).collect();
            let problem = format!("there is no template called default, only {}", names.join(", "));
            return Err(template_error(&self.file, problem));
        };
        match program {
            Ok(program) => Ok((program, file)),
            Err(problem) => Err(template_error(file, problem)),
        }
    }
}

/// Reasoning has had several names; as in transformers, templates find it under the usual one and
/// gpt-oss's.
fn name_reasoning(message: &mut Map<String, Json>) {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let found = names.iter().find_map(|name| message.get(*name));
    let Some(reasoning) = found.cloned() else { return };
    // In front of all others, as a message that is printed whole shows.
    let thinking = message.shift_remove("thinking").unwrap_or_else(|| reasoning.clone());
    message.shift_insert(0, "thinking".into(), thinking);
    message.insert("reasoning_content".into(), reasoning);
}

/// The special tokens of `checkpoint`: their names in templates, and their spellings.
fn special_tokens(checkpoint: &Checkpoint) -> Result<Vec<(String, String)>, FileError> {
    match checkpoint.metadata() {
        Some(metadata) => gguf_tokens(metadata),
        None => {
            let declared = Declared::read(checkpoint)?;
            let own = |(name, token): (&str, &str)| (name.to_string(), token.to_string());
            Ok(declared.special_tokens().map(own).collect())
        }
    }
}

fn gguf_tokens(metadata: &Metadata) -> Result<Vec<(String, String)>, FileError> {
    let tokens: &[String] = metadata.find("tokenizer.ggml.tokens")?.unwrap_or_default();
    let mut named = vec![];
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")] {
        let id = metadata.find::<usize>(&format!("tokenizer.ggml.{key}_token_id"))?;
        if let Some(token) = id.and_then(|id| tokens.get(id)) {
            named.push((format!("{name}_token"), token.clone()));
        }
    }
    Ok(named)
}

fn template_error(file: &Path, problem: impl ToString) -> FileError {
    FileError::Template { file: file.into(), problem: problem.to_string() }
}
