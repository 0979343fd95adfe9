//! The lines that a user types, or that a program pipes in.

use crate::interrupt::{Doing, Interrupts};
use crate::{Failure, out};
use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{Config, Context, Editor};
use std::cell::Cell;
use std::io::{BufRead, IsTerminal, Read};

const PROMPT: &str = "> ";

/// Bytes of a line: more than any context takes.
const LONGEST: u64 = 64 << 20;

/// What was read.
pub enum Line {
    Text(String),
    /// Ctrl-C, and whether it was pressed on an empty line.
    Interrupted {
        empty: bool,
    },
    End,
}

/// Where lines come from.
pub struct Lines {
    /// Present on a terminal that supports line editing.
    editor: Option<Editor<Watch, DefaultHistory>>,
}

impl Lines {
    /// Reads from standard input.
    pub fn new() -> Result<Self, Failure> {
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if is_dumb || !std::io::stdin().is_terminal() {
            return Ok(Self { editor: None });
        }
        // The line being typed is shown on the terminal even where the replies go to a file.
        let behavior = match std::io::stdout().is_terminal() {
            true => Behavior::Stdio,
            false => Behavior::PreferTerm,
        };
        let mut editor = Editor::with_config(Config::builder().behavior(behavior).build())?;
        editor.set_helper(Some(Watch::default()));
        Ok(Self { editor: Some(editor) })
    }

    /// Whether a user types in a terminal.
    pub fn is_terminal(&self) -> bool {
        self.editor.is_some()
    }

    /// The next line, without its end.
    pub fn next(&mut self, interrupts: &Interrupts) -> Result<Line, Failure> {
        let Some(editor) = &mut self.editor else {
            interrupts.enter(Doing::Work);
            return plain();
        };
        interrupts.enter(Doing::Editing);
        match editor.readline(PROMPT) {
            Ok(line) => {
                editor.add_history_entry(&line)?;
                Ok(Line::Text(line))
            }
            Err(ReadlineError::Interrupted) => {
                Ok(Line::Interrupted { empty: editor.helper().is_none_or(|watch| watch.empty.get()) })
            }
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(format!("the terminal: {error}").into()),
        }
    }
}

/// A line of piped input, or of a terminal without an editor.
fn plain() -> Result<Line, Failure> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        out::print(format_args!("{PROMPT}"))?;
    }
    let failed = |error: &dyn std::fmt::Display| -> Failure { format!("standard input: {error}").into() };
    let mut bytes = vec![];
    stdin.lock().take(LONGEST + 1).read_until(b'\n', &mut bytes).map_err(|error| failed(&error))?;
    if bytes.is_empty() {
        return Ok(Line::End);
    }
    if bytes.len() as u64 > LONGEST {
        return Err(failed(&format_args!("a line has more than {LONGEST} bytes")));
    }
    let line = String::from_utf8(bytes).map_err(|error| failed(&error))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(Line::Text(line.strip_suffix('\r').unwrap_or(line).to_string()))
}

/// Remembers whether the line is empty, which the editor does not say when it is interrupted.
struct Watch {
    empty: Cell<bool>,
}

impl Default for Watch {
    fn default() -> Self {
        Self { empty: Cell::new(true) }
    }
}

impl rustyline::hint::Hinter for Watch {
    type Hint = String;

    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.empty.set(line.is_empty());
        None
    }
}

impl rustyline::completion::Completer for Watch {
    type Candidate = String;
}
impl rustyline::highlight::Highlighter for Watch {}
impl rustyline::validate::Validator for Watch {}
impl rustyline::Helper for Watch {}
