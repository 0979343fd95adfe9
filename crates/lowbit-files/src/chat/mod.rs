//! Chat templates: Jinja, in the environment that transformers gives them.

mod json;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::Serialize;

use crate::gguf::Metadata;
use crate::read::{limit, read};
use crate::tokenizer::special_token;
use crate::{Checkpoint, FileError};

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// Steps that a template may take: far more than any chat needs, so that a hostile one ends.
const FUEL: u64 = 10_000_000;

/// Turns a chat into the text that the model was trained on.
///
/// Templates see `messages`, `add_generation_prompt`, `tools` and `documents` (none), the special tokens (`bos_token`,
/// `eos_token`, `pad_token`, `unk_token`, where the checkpoint has them) and what [`Self::with`] adds; they may call
/// Python's string and list methods, `raise_exception`, `strftime_now` and `tojson`, and use `break`, `continue` and
/// `generation` blocks.
///
/// Source: transformers 5.23 `render_jinja_template`.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    variables: BTreeMap<String, Value>,
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

    /// The template in `tokenizer.chat_template`, if there is one.
    ///
    /// # Errors
    /// [`FileError::Gguf`] and [`FileError::Template`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Self>, FileError> {
        let Some(source) = metadata.find::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        let mut template = Self::new(source, metadata.file())?;
        let tokens: &[String] = metadata.find("tokenizer.ggml.tokens")?.unwrap_or_default();
        for (name, key) in SPECIAL_TOKENS.iter().zip(["bos", "eos", "padding", "unknown"]) {
            let id = metadata.find::<usize>(&format!("tokenizer.ggml.{key}_token_id"))?;
            if let Some(token) = id.and_then(|id| tokens.get(id)) {
                template = template.with(name, token);
            }
        }
        Ok(Some(template))
    }

    /// Compiles `source`, which errors say is in `file`.
    ///
    /// # Errors
    /// [`FileError::Template`].
    pub fn new(source: &str, file: &Path) -> Result<Self, FileError> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().expect("the default delimiters"));
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: &str| strftime(format, &jiff::Zoned::now()));
        let template = environment.add_template_owned(NAME, without_generation_blocks(source));
        template.map_err(|error| template_error(file, &error))?;
        // As transformers passes them where there are none: templates ask whether they are none.
        let variables = ["tools", "documents"].map(|name| (name.to_string(), Value::from(())));
        Ok(Self { environment, variables: variables.into(), file: file.into() })
    }

    /// Adds a variable that the template reads, such as `enable_thinking`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), Value::from(Serde(value)));
        self
    }

    /// The text of `messages` ([`Message`]s, or whatever serialises to objects with more fields). With
    /// `add_generation_prompt` it ends in what begins the assistant's next message.
    ///
    /// # Errors
    /// [`FileError::Template`] with what the template itself says when it refuses the messages (roles that do not
    /// alternate, say).
    pub fn render<M: Serialize>(
        &self,
        messages: &[M],
        add_generation_prompt: bool,
    ) -> Result<String, FileError> {
        let mut variables = self.variables.clone();
        variables.insert("messages".into(), Value::from(Serde(messages)));
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        let template = self.environment.get_template(NAME);
        template
            .and_then(|template| template.render(variables))
            .map_err(|error| template_error(&self.file, &error))
    }
}

const NAME: &str = "chat_template";
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

fn from_directory(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>, FileError> {
    let config = checkpoint.json("tokenizer_config.json")?;
    let file = checkpoint.path().join("chat_template.jinja");
    let mut template = if file.exists() {
        let source = read(&file, limit::TEMPLATE)?;
        let source = String::from_utf8(source)
            .map_err(|error| FileError::Template { file: file.clone(), problem: error.to_string() })?;
        ChatTemplate::new(&source, &file)?
    } else {
        let Some((file, config)) = &config else { return Ok(None) };
        match config_template(file, config)? {
            Some(source) => ChatTemplate::new(source, file)?,
            None => return Ok(None),
        }
    };
    if let Some((file, config)) = &config {
        for name in SPECIAL_TOKENS {
            if let Some(token) = special_token(file, config, name)? {
                template = template.with(name, token);
            }
        }
    }
    Ok(Some(template))
}

/// `chat_template` is a template, or a list of named ones.
fn config_template<'a>(file: &Path, config: &'a serde_json::Value) -> Result<Option<&'a str>, FileError> {
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

fn template_error(file: &Path, error: &Error) -> FileError {
    FileError::Template { file: file.into(), problem: error.to_string() }
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

/// As Python's `strftime`, in the C locale.
fn strftime(format: &str, time: &jiff::Zoned) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, time)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// `{% generation %}` marks what the assistant wrote, for training. It renders its body, as `{% if true %}` does.
fn without_generation_blocks(source: &str) -> String {
    let mut rest = source;
    let mut out = String::with_capacity(source.len());
    while let Some((before, after)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        let Some((tag, after)) = after.split_once("%}") else {
            rest = after;
            continue;
        };
        let name = tag.trim_matches(|c: char| matches!(c, '-' | '+') || c.is_whitespace());
        match name {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = after;
    }
    out + rest
}
