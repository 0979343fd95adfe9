//! Jinja2's language, in the environment that transformers gives chat templates, for untrusted sources.
//!
//! A library's interpreter cannot be bounded from outside: its fuel counts instructions, while one `~`, `*`, `==` or
//! filter may take all memory, any time, or the stack. Here every operation counts what it costs before it is done
//! ([`meter`]), and nothing recurses beyond a known depth: not the parser, the evaluation, a value or its end.
//!
//! `lexer` and `parser` (with `expressions`) make `ast`; `run` executes statements and `eval` expressions, over the
//! values of `value`; the rest are operators, methods and filters.

mod ast;
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
use meter::{Fallible, Fault};
use run::{Run, Scope};
use value::{Function, Value};

/// Of the thread that parses and renders: thousands of nested evaluations.
const STACK: usize = 64 << 20;

/// The longest source.
const SOURCE: usize = crate::read::limit::TEMPLATE as usize;

/// A parsed template.
pub(super) struct Program {
    source: Box<str>,
    body: Body,
    /// What symbols stand for.
    names: Vec<Arc<str>>,
    loop_symbol: Option<Symbol>,
    /// `caller`, `varargs` and `kwargs`.
    special_symbols: [Option<Symbol>; 3],
}

impl Debug for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} statements)", self.body.len())
    }
}

impl Program {
    /// Parses a template; the error says what is wrong with it, and where.
    pub(super) fn parse(source: &str) -> Result<Self, String> {
        if source.len() > SOURCE {
            return Err(format!("the source has {} bytes; at most {SOURCE} are read", source.len()));
        }
        on_own_stack(|| {
            let source = lexer::normalize(source);
            let (body, names) = parser::Parser::new(lexer::tokens(&source)?).parse()?;
            let find = |name: &str| names.iter().position(|known| **known == *name).map(|at| at as Symbol);
            let (loop_symbol, special_symbols) = (find("loop"), parser::SPECIAL.map(find));
            Ok(Self { source: source.into(), body, names, loop_symbol, special_symbols })
        })
    }

    /// True if the source contains `text`.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// The template's text with these variables.
    pub(super) fn render(&self, variables: &BTreeMap<String, Json>) -> Result<String, String> {
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
    Fault::new(format!("variable {name}: {fault}"))
}

/// Runs `work` on a thread with a large stack: the caller's may be small, and its end could not be reported.
fn on_own_stack<T: Send>(work: impl FnOnce() -> Fallible<T> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let work = || work().map_err(|fault| crate::shown_message(fault, 2000).to_string());
        let thread =
            builder.spawn_scoped(scope, work).map_err(|error| format!("no thread for it: {error}"))?;
        thread.join().unwrap_or_else(|_| Err("the template's interpreter failed".into()))
    })
}
