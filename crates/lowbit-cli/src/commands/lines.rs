//! The lines that a user types, or that a program pipes in.

use crate::interrupt::{Doing, Interrupts};
use crate::{Failure, out};
use lowbit_files::shown_path;
use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult};
use rustyline::{Cmd, Config, Context, Editor, KeyCode, KeyEvent, Modifiers};
use std::cell::Cell;
use std::io::{BufRead, IsTerminal, Read};
use std::path::PathBuf;

const PROMPT: &str = "> ";

/// Lines that are kept for later sessions.
const REMEMBERED: usize = 1000;

/// Bytes of a line: more than any context takes.
const LONGEST: u64 = 64 << 20;

/// A result of reading.
pub enum Line {
    Text(String),
    /// Ctrl-C, and whether it was pressed on an empty line.
    Interrupted {
        empty: bool,
    },
    End,
}

/// The source of lines.
pub struct Lines {
    /// Present on a terminal that supports line editing.
    editor: Option<Editor<Watch, FileHistory>>,
    /// The lines that were typed in earlier sessions, and will be in later ones.
    history: Option<PathBuf>,
    is_terminal: bool,
}

impl Lines {
    /// Reads from standard input.
    pub fn new() -> Result<Self, Failure> {
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let is_terminal = std::io::stdin().is_terminal();
        if is_dumb || !is_terminal {
            return Ok(Self { editor: None, history: None, is_terminal });
        }
        // The line being typed is shown on the terminal even where the replies go to a file.
        let behavior = match out::is_terminal() {
            true => Behavior::Stdio,
            false => Behavior::PreferTerm,
        };
        let config = Config::builder().behavior(behavior).max_history_size(REMEMBERED)?.build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Watch::default()));
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), Cmd::Newline);
        let history = history_file();
        if let Some(path) = &history
            && let Err(error) = editor.load_history(path)
            && path.exists()
        {
            out::note!("note: {}: {error}", shown_path(path));
        }
        Ok(Self { editor: Some(editor), history, is_terminal })
    }

    /// True if a user types in a terminal.
    pub fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// The next line, without its end. In a terminal it may be several, which a \ at their ends
    /// joined.
    pub fn next(&mut self, interrupts: &Interrupts) -> Result<Line, Failure> {
        let Some(editor) = &mut self.editor else {
            interrupts.enter(Doing::Work);
            return if self.is_terminal { joined() } else { plain() };
        };
        interrupts.enter(Doing::Editing);
        match editor.readline(PROMPT) {
            Ok(line) => {
                let line = line.replace("\\\n", "\n");
                // A line that the history refuses still goes to the chat.
                let is_new = editor.add_history_entry(&line).unwrap_or(false);
                if let Some(path) = self.history.as_ref().filter(|_| is_new) {
                    _ = editor.append_history(path);
                }
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

/// The file of the history, in a folder that exists; `None` where the environment names no folder,
/// or a file cannot be there.
fn history_file() -> Option<PathBuf> {
    let folder = crate::cache::Environment::of_process().state()?;
    std::fs::create_dir_all(&folder).ok()?;
    let path = folder.join("chat-history");
    // Nothing that hangs, or that belongs elsewhere.
    let is_ours = std::fs::symlink_metadata(&path).map_or(true, |found| found.is_file());
    is_ours.then_some(path)
}

/// Lines of a terminal without an editor, up to one that does not end in a \.
fn joined() -> Result<Line, Failure> {
    let mut text = String::new();
    loop {
        match plain()? {
            Line::Text(line) => match line.strip_suffix('\\') {
                Some(start) => text.extend([start, "\n"]),
                None => return Ok(Line::Text(text + &line)),
            },
            Line::End if !text.is_empty() => return Ok(Line::Text(text)),
            end => return Ok(end),
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
impl rustyline::validate::Validator for Watch {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match context.input().ends_with('\\') {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}
impl rustyline::Helper for Watch {}
