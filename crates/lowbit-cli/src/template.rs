//! Flags about chat templates.

mod builtin;

use crate::Failure;
use lowbit::{ChatTemplate, Checkpoint};
use lowbit_files::read::{limit, read};
use lowbit_files::shown;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The chat template, and its variables besides the messages.
#[derive(clap::Args)]
pub struct TemplateOptions {
    /// A chat template to use instead of the checkpoint's: a file, the name of one of llama.cpp's
    /// (chatml, llama3, gemma, ...), or Jinja.
    #[arg(long, value_name = "FILE|NAME", alias = "chat-template-file")]
    chat_template: Option<PathBuf>,
    /// Variables for the chat template, as '{"enable_thinking": false}'.
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<String>,
    /// A JSON file with the list of tools that the model may call.
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
}

/// The template of a file, of llama.cpp's name, or of its own text.
fn named(file: &Path, checkpoint: &Checkpoint) -> Result<ChatTemplate, Failure> {
    let text = file.to_str().filter(|_| !file.exists()).unwrap_or_default();
    let builtin = builtin::find(text);
    if let Some(source) =
        builtin.or_else(|| (text.contains("{{") || text.contains("{%")).then(|| text.into()))
    {
        return Ok(ChatTemplate::from_source(&source, Path::new("--chat-template"), checkpoint)?);
    }
    // A name of a template, not of a file.
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !text.is_empty() && text.chars().all(is_name) && file.extension().is_none() {
        let known = builtin::names().collect::<Vec<_>>().join(", ");
        return Err(format!(
            "--chat-template {text}: there is no such file, and the names that are known are {known}"
        )
        .into());
    }
    Ok(ChatTemplate::from_file(file, checkpoint)?)
}

impl TemplateOptions {
    /// The template, with its variables; `None` for a base model.
    pub fn load(&self, checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>, Failure> {
        let template = match &self.chat_template {
            Some(file) => Some(named(file, checkpoint)?),
            None => ChatTemplate::from_checkpoint(checkpoint)?,
        };
        let Some(mut template) = template else {
            self.unused("needs a model with a chat template")?;
            return Ok(None);
        };
        for (name, value) in self.kwargs()? {
            template = template.with(&name, value);
        }
        if let Some(tools) = self.tools()? {
            template = template.with("tools", tools);
        }
        Ok(Some(template))
    }

    /// True if --tools was given.
    #[cfg(feature = "serve")]
    pub fn has_tools(&self) -> bool {
        self.tools.is_some()
    }

    /// Refuses flags that would do nothing, and says why.
    pub fn unused(&self, why: &str) -> Result<(), Failure> {
        let flags = [
            ("--chat-template", self.chat_template.is_some()),
            ("--chat-template-kwargs", self.chat_template_kwargs.is_some()),
            ("--tools", self.tools.is_some()),
        ];
        match flags.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(format!("{flag} {why}").into()),
            None => Ok(()),
        }
    }

    fn kwargs(&self) -> Result<Map<String, Value>, Failure> {
        let Some(text) = &self.chat_template_kwargs else { return Ok(Map::new()) };
        let want = "--chat-template-kwargs takes a JSON object, such as '{\"enable_thinking\": false}'";
        let kwargs: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("{want}: {}: {error}", shown(text)))?;
        let own = ["messages", "add_generation_prompt"];
        if let Some(name) = own.iter().find(|name| kwargs.contains_key(**name)) {
            return Err(format!("--chat-template-kwargs: {name} comes from the chat itself").into());
        }
        if self.tools.is_some() && kwargs.contains_key("tools") {
            return Err("tools are given twice: in --chat-template-kwargs and in --tools".into());
        }
        Ok(kwargs)
    }

    fn tools(&self) -> Result<Option<Vec<Map<String, Value>>>, Failure> {
        let Some(file) = &self.tools else { return Ok(None) };
        let tools = serde_json::from_slice(&read(file, limit::CONFIG)?);
        let want = "--tools takes a JSON list of objects, each a tool";
        Ok(Some(tools.map_err(|error| format!("{}: {want}: {error}", shown(file.display())))?))
    }
}
