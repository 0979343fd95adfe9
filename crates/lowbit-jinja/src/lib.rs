//! Chat templates: Jinja2's language, in the environment that transformers gives them, for
//! untrusted sources.
//!
//! A model's chat template is a program that comes with its weights. [`Template`] renders it as
//! transformers does, in bounded work: the source, steps, memory, output, nesting and time have
//! limits, and beyond them rendering is an [`Error`]. Nothing that a template or a variable says
//! makes this crate panic, overflow the stack, or reach files or the network; `strftime_now` reads
//! the clock and its time zone.
//!
//! ```
//! use lowbit_jinja::Template;
//! use serde_json::json;
//!
//! let source = "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}\n{% endfor %}";
//! let template = Template::parse(source)?;
//! let messages = json!([{"role": "user", "content": " Hi "}]);
//! assert_eq!(template.render(&[("messages".to_string(), messages)].into())?, "<|user|>Hi\n");
//! # Ok::<(), lowbit_jinja::Error>(())
//! ```
//!
//! # Language
//!
//! All statements but those that load other templates: `for` (also recursive, with `break` and
//! `continue`), `if`, `set` (also as a block), `macro`, `call`, `filter`, `with`, `block`, `raw`,
//! and transformers' `generation`. Jinja2's filters and tests, and the methods of Python's strings,
//! lists and dictionaries. Blocks are trimmed (`trim_blocks`, `lstrip_blocks`), and `range`,
//! `dict`, `namespace`, `raise_exception`, `strftime_now` and transformers' `tojson` are there.
//! Values print and compare as Python's do. Integers have 127 bits.
//!
//! Source: Jinja2 3.1 `ImmutableSandboxedEnvironment`; transformers 5.24 `render_jinja_template`.
//!
//! # Limits
//!
//! | of | at most |
//! |---|---|
//! | source | [`MAX_SOURCE`]: 1 MB |
//! | steps (evaluated nodes, visited elements, each 64 bytes of text looked at) | 10 million |
//! | memory that is allocated, freed or not | 256 MB |
//! | rendered text | 64 MB |
//! | nested evaluations, calls and loops; nested lists and dictionaries of a value | 2000; 200 |
//! | time | 4 seconds |
//!
//! Fuel that counts instructions bounds none of it, since one `~`, `*`, `==` or filter may take all
//! memory, any time, or the stack. Here every operation counts what it costs before it is done, and
//! nothing recurses beyond a known depth: not the parser, the evaluation, a value or its drop.

// `lexer` and `parser` (with `expressions`) make `ast`; `run` executes statements and `eval`
// expressions, over the values of `value`; `meter` counts; the rest are operators, methods and
// filters.
mod ast;
mod error;
mod eval;
mod expressions;
mod filters;
mod format;
mod json;
mod lexer;
mod meter;
mod methods;
mod operators;
mod parser;
mod run;
mod sequences;
mod show;
mod strings;
#[cfg(test)]
mod tests;
mod text;
mod time;
mod value;

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value as Json;

use ast::{Body, Symbol};
pub use error::Error;
use meter::{Fallible, Fault};
use run::{Run, Scope};
use value::{Function, Value};

/// Of the thread that parses and renders: thousands of nested evaluations.
const STACK: usize = 64 << 20;

/// Bytes of the longest source.
pub const MAX_SOURCE: usize = 1 << 20;

/// A parsed template.
pub struct Template {
    source: Box<str>,
    body: Body,
    /// The names of symbols.
    names: Vec<Arc<str>>,
    loop_symbol: Option<Symbol>,
    /// `caller`, `varargs` and `kwargs`.
    special_symbols: [Option<Symbol>; 3],
}

impl Debug for Template {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Template({} statements)", self.body.len())
    }
}

impl Template {
    /// Parses a template, on a thread of its own, since the caller's stack may be small.
    ///
    /// # Errors
    /// A source that is no Jinja, is nested too deeply, or is longer than [`MAX_SOURCE`]; the error
    /// has its line.
    pub fn parse(source: &str) -> Result<Self, Error> {
        if source.len() > MAX_SOURCE {
            let problem = format!("the source has {} bytes; at most {MAX_SOURCE} are read", source.len());
            return Err(Fault::new(problem).into());
        }
        on_own_stack(|| {
            let source = lexer::normalize(source);
            let (body, names) = parser::Parser::new(lexer::tokens(&source)?).parse()?;
            let find = |name: &str| names.iter().position(|known| **known == *name).map(|at| at as Symbol);
            let (loop_symbol, special_symbols) = (find("loop"), parser::SPECIAL.map(find));
            Ok(Self { source: source.into(), body, names, loop_symbol, special_symbols })
        })
    }

    /// The source, with its line breaks as `\n`.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The template's text with these variables, on a thread of its own. Those that the source does
    /// not name are not looked at.
    ///
    /// # Errors
    /// An error that Jinja2 raises, too (in words of this crate's own, but for
    /// `raise_exception`'s), or the limit that is exceeded.
    pub fn render(&self, variables: &BTreeMap<String, Json>) -> Result<String, Error> {
        on_own_stack(|| {
            let run = Run::new(self);
            let globals = Rc::new(Scope::default());
            for (symbol, name) in self.names.iter().enumerate() {
                let value = match variables.get(&**name) {
                    Some(value) => Value::from_json(value).map_err(|fault| named(name, &fault))?,
                    None => match &**name {
                        "range" => Value::Function(Function::Range),
                        "dict" => Value::Function(Function::Dict),
                        "namespace" => Value::Function(Function::Namespace),
                        "raise_exception" => Value::Function(Function::RaiseException),
                        "strftime_now" => Value::Function(Function::StrftimeNow),
                        _ => continue,
                    },
                };
                globals.set(symbol as Symbol, value);
            }
            let mut out = String::new();
            run.exec(&self.body, &Scope::inside(&globals), &mut out)?;
            Ok(out)
        })
    }
}

fn named(name: &str, fault: &Fault) -> Fault {
    Fault::new(format!("variable {}: {}", show::shown(name), fault.message()))
}

/// Runs `work` on a thread with a large stack: the caller's may be small, and its end could not be
/// reported.
fn on_own_stack<T: Send>(work: impl FnOnce() -> Fallible<T> + Send) -> Result<T, Error> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let work = || work().map_err(Error::from);
        let thread = builder.spawn_scoped(scope, work);
        let thread = thread.map_err(|error| Fault::new(format!("no thread for it: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(Fault::new("the template's interpreter failed").into()))
    })
}

/// The README's examples are tests, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
