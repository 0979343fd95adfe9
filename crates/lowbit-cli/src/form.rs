//! The form of replies: a JSON schema, a grammar, a regular expression.

use crate::options::Loaded;
use crate::{Failure, habits};
use lowbit::{Grammars, ReplyForm, Syntax};
use std::path::Path;
use std::sync::Arc;

/// Flags of a reply's form.
#[derive(clap::Args)]
#[command(next_help_heading = "Form")]
pub struct FormOptions {
    /// Write JSON that this schema takes: a file, or the schema itself; {} is any JSON.
    #[arg(long, value_name = "FILE|JSON")]
    json_schema: Option<String>,
    /// Write a text of this grammar, in llama.cpp's GBNF or in Lark: a file, or the grammar itself.
    #[arg(long, value_name = "FILE|TEXT", conflicts_with = "json_schema")]
    grammar: Option<String>,
    /// Write a text that this regular expression matches as a whole.
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["json_schema", "grammar"])]
    regex: Option<String>,
}

/// A form for a model's replies.
#[derive(Clone)]
pub struct Form(Arc<Grammars>, ReplyForm);

impl FormOptions {
    /// The form that a flag names, before a model is loaded.
    pub fn read(&self) -> Result<Option<ReplyForm>, Failure> {
        if let Some(schema) = &self.json_schema {
            let text = text_of(schema, |text| text.trim_start().starts_with(['{', 't', 'f']))
                .map_err(|error| format!("--json-schema: {error}"))?;
            let schema = serde_json::from_str(&text)
                .map_err(|error| format!("--json-schema: this is no JSON schema: {error}"))?;
            return Ok(Some(ReplyForm::JsonSchema(schema)));
        }
        if let Some(grammar) = &self.grammar {
            let is_grammar = |text: &str| text.contains("::=") || text.contains("start:");
            let text = text_of(grammar, is_grammar).map_err(|error| format!("--grammar: {error}"))?;
            return Ok(Some(ReplyForm::grammar(text)));
        }
        Ok(self.regex.clone().map(ReplyForm::Regex))
    }
}

/// The text of the file `value`, or `value` itself.
fn text_of(value: &str, is_text: impl Fn(&str) -> bool) -> Result<String, Failure> {
    match Path::new(value).is_file() {
        false if is_text(value) => Ok(value.into()),
        _ => habits::read_marked_text(Path::new(value)),
    }
}

impl Form {
    /// The form for replies of a model in this syntax.
    pub fn new(form: ReplyForm, loaded: &Loaded, syntax: &Syntax) -> Result<Self, Failure> {
        let (tokenizer, vocab_size) = (&loaded.tokenizer, loaded.model.config().vocab_size);
        Ok(Self(Arc::new(Grammars::new(tokenizer, syntax, vocab_size, tokenizer.eos_ids())?), form))
    }

    /// The options with the form.
    pub fn hold(form: Option<&Self>, options: lowbit::ReplyOptions) -> lowbit::ReplyOptions {
        match form {
            Some(Self(grammars, form)) => options.with_form(grammars.clone(), form.clone()),
            None => options,
        }
    }
}
