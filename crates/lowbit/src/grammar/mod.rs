//! Replies in a form: a JSON schema, a regular expression, a grammar, or calls of tools.
//!
//! The forms become grammars of llguidance, which says token by token what may follow. A model's
//! reasoning stands before the form and is free.

mod calls;
mod front;
mod gbnf;
mod held;
mod schema;
#[cfg(test)]
mod tests;

use crate::{Error, Syntax};
use held::HeldGrammar;
use llguidance::api::{GrammarInit, GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use lowbit_files::Tokenizer;
use lowbit_models::Grammar;
use serde_json::{Value, json};
use std::sync::Arc;

/// The form of a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReplyForm {
    /// A JSON value that this schema takes; properties in the schema's order.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A text that this regular expression matches from its start to its end. It is of the regex
    /// crate, without look-around.
    Regex(String),
    /// A text of a grammar in llguidance's dialect of Lark.
    Lark(String),
    /// A text of a grammar in llama.cpp's GBNF.
    Gbnf(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Calls of tools.
    Calls(CallForm),
}

/// Calls in the form that a model's chat template has for them.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CallForm {
    /// The tools that may be called, as templates take them.
    pub tools: Vec<Value>,
    /// The names of those whose arguments are held to their schemas; others' are held to it where
    /// that can be done, and else are any object.
    pub strict: Vec<String>,
    /// True if the reply is calls; else it may be any text, and calls in it are held to the form.
    pub required: bool,
    /// True for one call at most.
    pub one: bool,
    /// The form of a reply without calls, where they are not required.
    pub otherwise: Option<Box<ReplyForm>>,
}

impl ReplyForm {
    /// A grammar in GBNF, whose rules have `::=`, or in Lark.
    pub fn grammar(text: String) -> Self {
        if text.contains("::=") { Self::Gbnf(text) } else { Self::Lark(text) }
    }
}

impl CallForm {
    /// Calls of these tools, as templates take them; the reply must be calls if they are
    /// `required`.
    pub fn new(tools: Vec<Value>, required: bool) -> Self {
        Self { tools, required, ..Self::default() }
    }

    /// With the tools of these names held to their schemas.
    #[must_use]
    pub fn with_strict(self, strict: Vec<String>) -> Self {
        Self { strict, ..self }
    }

    /// With one call at most, if `one`.
    #[must_use]
    pub fn with_one(self, one: bool) -> Self {
        Self { one, ..self }
    }

    /// With this form of a reply without calls.
    #[must_use]
    pub fn with_otherwise(self, form: Option<ReplyForm>) -> Self {
        Self { otherwise: form.map(Box::new), ..self }
    }
}

/// The most bytes of a schema or grammar.
pub const FORM_BYTES: usize = 256 << 10;

/// The stack on which forms are compiled: they may be nested.
const STACK: usize = 64 << 20;

/// The depth of a grammar's brackets, and the number of its rules, at most: reading one
/// takes stack for both.
const DEPTH: usize = 200;
const RULES: usize = 2000;

/// The longest token that takes part: llguidance's trie is not deeper.
const TOKEN_BYTES: usize = 1000;

/// Compiles forms for the vocabulary of a model.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// use lowbit::{GenerationOptions, LanguageModel, ReplyForm};
/// use std::ops::ControlFlow::Continue;
///
/// let model = LanguageModel::open("models/demo-4bit")?;
/// let schema = serde_json::json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
///     "additionalProperties": false});
/// let grammar = model.grammars()?.compile(&ReplyForm::JsonSchema(schema), Some(&model.prompt("A vector is")?))?;
/// let options = GenerationOptions::default().with_grammar(grammar);
/// let reply = model.stream("A vector is", &options, |_| Continue(()))?;
/// let value: serde_json::Value = serde_json::from_str(&reply.content)?;
/// assert!(value["ok"].is_boolean());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Tokenizer,
    syntax: Syntax,
    words: usize,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}

/// A grammar's text, and the name of what it is.
struct Source {
    grammar: GrammarWithLexer,
    what: &'static str,
}

impl Grammars {
    /// For the model of this tokenizer and syntax whose vocabulary has `vocab_size` rows.
    /// `stop_ids` are those that end its replies. It takes about a second for 250,000 tokens.
    ///
    /// # Errors
    /// [`Error::File`] when the tokenizer cannot spell its tokens; [`Error::Form`].
    pub fn new(
        tokenizer: &Tokenizer,
        syntax: &Syntax,
        vocab_size: usize,
        stop_ids: &[u32],
    ) -> Result<Self, Error> {
        let mut tokens = tokenizer.token_bytes(vocab_size)?;
        for (bytes, id) in tokens.iter_mut().zip(0..) {
            let is_special =
                tokenizer.is_special(id) || syntax.marker(id).is_some() || stop_ids.contains(&id);
            // No text has this byte: it marks special tokens.
            if bytes.len() > TOKEN_BYTES || bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                bytes.clear();
            } else if is_special && !bytes.is_empty() {
                bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        let stop_ids: Vec<u32> = stop_ids.iter().copied().filter(|&id| (id as usize) < vocab_size).collect();
        let end = stop_ids.first().copied().unwrap_or(llguidance::toktrie::INVALID_TOKEN);
        let count = u32::try_from(vocab_size).map_err(|_| Error::form("vocabulary", "it is too large"))?;
        // A panic in it is an error.
        let factory = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let trie = TokTrie::from(&TokRxInfo::new(count, end), &tokens);
            let trie = if stop_ids.is_empty() { trie } else { trie.with_eos_tokens(&stop_ids) };
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
        }));
        let problem =
            |error: &dyn std::fmt::Display| Error::form("vocabulary", first_line(&error.to_string()));
        let mut factory = factory.map_err(|error| problem(&error))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            verbose_errors: false,
            // A kilobyte or two each, for every reply.
            max_lexer_states: 50_000,
            ..ParserLimits::default()
        };
        let words = vocab_size.div_ceil(32);
        Ok(Self { factory, tokenizer: tokenizer.clone(), syntax: syntax.clone(), words })
    }

    /// The grammar of a reply in this form to the prompt `prompt`, of which the last tokens count:
    /// they may open the reasoning. Without a prompt it is of a text that has none.
    ///
    /// # Errors
    /// [`Error::Form`] for a form that is malformed, too large, or cannot be enforced, with the
    /// path of the part of a schema.
    pub fn compile(&self, form: &ReplyForm, prompt: Option<&[u32]>) -> Result<Arc<dyn Grammar>, Error> {
        let tail = |prompt: &[u32]| {
            let tail = &prompt[prompt.len().saturating_sub(crate::reply_stream::TAIL)..];
            self.tokenizer.decode(tail)
        };
        let tail = prompt.map(tail).transpose()?;
        let compile = || self.compile_after(form, tail.as_deref());
        let matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| Error::form("form", error))?;
            thread.join().unwrap_or_else(|_| Err(Error::form("form", "it cannot be compiled")))
        })?;
        Ok(Arc::new(HeldGrammar::new(matcher, self.words)))
    }

    fn compile_after(&self, form: &ReplyForm, prompt: Option<&str>) -> Result<Matcher, Error> {
        if let ReplyForm::Calls(calls) = form {
            return self.compile_calls(calls, prompt.unwrap_or_default());
        }
        let front = prompt.map(|prompt| self.syntax.front(prompt)).unwrap_or_default();
        let Source { grammar, what } = self.source(form)?;
        let grammars = if front.is_empty() {
            vec![grammar]
        } else {
            let start = format!("start: {} @body\n{}", front.expression, front.rules);
            let body = GrammarWithLexer { name: Some("body".into()), ..grammar };
            vec![GrammarWithLexer::from_lark(start), body]
        };
        self.matcher(grammars).map_err(|problem| self.refused(form, what, &problem))
    }

    /// The error for a form that llguidance refuses.
    fn refused(&self, form: &ReplyForm, what: &str, problem: &str) -> Error {
        match form {
            ReplyForm::JsonSchema(schema) => self.blame(schema, what, problem),
            _ => Error::form(what, problem),
        }
    }

    /// The grammar of a form without what stands before it.
    fn source(&self, form: &ReplyForm) -> Result<Source, Error> {
        let lark = |what, text: String| Source { grammar: GrammarWithLexer::from_lark(text), what };
        Ok(match form {
            ReplyForm::JsonSchema(schema) => {
                Self::check_schema(schema, "schema")?;
                Source { grammar: GrammarWithLexer::from_json_schema(schema::spaced(schema)), what: "schema" }
            }
            ReplyForm::JsonObject => {
                let schema = schema::spaced(&json!({"type": "object"}));
                Source { grammar: GrammarWithLexer::from_json_schema(schema), what: "schema" }
            }
            ReplyForm::Regex(regex) => {
                check_grammar("regex", regex)?;
                lark("regex", format!("start: /{}/", regex_to_lark(whole(regex)?, "")))
            }
            ReplyForm::Lark(text) => {
                check_grammar("grammar", text)?;
                lark("grammar", text.clone())
            }
            ReplyForm::Gbnf(text) => {
                check_grammar("grammar", text)?;
                let spelled = |spelling: &str| self.tokenizer.id(spelling);
                let text = gbnf::to_lark(text, &spelled).map_err(|error| Error::form("grammar", error))?;
                lark("grammar", text)
            }
            ReplyForm::Choice(choices) => {
                if choices.is_empty() {
                    return Err(Error::form("choice", "it has no texts to choose from"));
                }
                choices.iter().try_for_each(|choice| check_size("choice", choice))?;
                let choices: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
                lark("choice", format!("start: {}", choices.join(" | ")))
            }
            ReplyForm::Calls(_) => return Err(Error::form("form", "calls are compiled by themselves")),
        })
    }

    /// # Errors
    /// llguidance's own message.
    fn matcher(&self, grammars: Vec<GrammarWithLexer>) -> Result<Matcher, String> {
        let grammar = TopLevelGrammar { grammars, max_tokens: None };
        let parser = self.factory.create_parser_from_init(GrammarInit::Serialized(grammar), 0, 0);
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            Some(error) => Err(first_line(&error)),
            None => Ok(matcher),
        }
    }
}

/// A message without the state that llguidance appends.
fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().trim_end_matches([':', ';']).into()
}

/// A text as Lark writes it.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression without the anchors that say what is so anyway: that it matches all.
fn whole(regex: &str) -> Result<&str, Error> {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    let inner = regex.strip_suffix('$').filter(|inner| !inner.ends_with('\\')).unwrap_or(regex);
    match inner.is_empty() {
        true => Err(Error::form("regex", "it is empty")),
        false => Ok(inner),
    }
}

fn check_size(what: &str, text: &str) -> Result<(), Error> {
    match text.len() > FORM_BYTES {
        true => Err(Error::form(what, format!("it has {} bytes, but {FORM_BYTES} may be", text.len()))),
        false => Ok(()),
    }
}

/// That reading a grammar takes no more stack than there is.
fn check_grammar(what: &str, text: &str) -> Result<(), Error> {
    check_size(what, text)?;
    let rules = text.matches(':').count();
    if rules > RULES {
        return Err(Error::form(
            what,
            format!("it has {rules} colons, as for so many rules, but {RULES} may be"),
        ));
    }
    let (mut depth, mut deepest) = (0usize, 0);
    for character in text.chars() {
        match character {
            '(' | '[' | '{' | '~' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            '\n' => depth = depth.min(DEPTH / 2),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    match deepest > DEPTH {
        true => Err(Error::form(what, format!("its brackets are nested {deepest} deep, but {DEPTH} may be"))),
        false => Ok(()),
    }
}
