//! What people who come from llama.cpp and mlx-lm type: understood as they mean it, or answered with what to type here.

mod table;

use crate::{Failure, out};
use clap::{ArgAction, Command};
use lowbit_files::read::limit;
use lowbit_files::{FileError, shown};
use std::collections::HashSet;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

/// How a flag or command of another program is translated.
#[derive(Clone, Copy, Debug)]
pub enum Instead {
    /// The same under another name.
    Is(&'static str),
    /// Nothing, for this reason; the flag has this many values.
    Nothing(usize, &'static str),
    /// As [`Self::Nothing`], for a flag that may have one of a switch's values.
    Switch(&'static str),
    /// What to do here.
    Say(&'static str),
}
use Instead::{Is, Nothing, Say, Switch};

/// The values of a flag that switches something.
const SWITCH: [&str; 12] =
    ["on", "off", "auto", "always", "never", "1", "0", "true", "false", "True", "False", "T"];

/// The arguments (with the program's name before them) as `program` takes them.
///
/// # Errors
/// What to type instead.
pub fn translate(
    program: &Command,
    arguments: impl Iterator<Item = OsString>,
) -> Result<Vec<OsString>, Failure> {
    let mut arguments: Vec<OsString> = arguments.collect();
    if let Some(command) = command(program, arguments.get(1..).unwrap_or_default())? {
        let replaces = !command.inserted;
        arguments.splice(1..1 + usize::from(replaces), [command.name.into()]);
    }
    let Some(command) = arguments.get(1).and_then(|name| program.find_subcommand(name)) else {
        return Ok(arguments);
    };
    let rest = arguments.split_off(2);
    arguments.extend(flags(command, rest)?);
    Ok(arguments)
}

/// clap's error, or what to type where a model was given as a positional argument.
pub fn explain(error: clap::Error, arguments: &[OsString]) -> Failure {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let word = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if error.kind() == ErrorKind::UnknownArgument => word,
        _ => return error.into(),
    };
    match arguments.get(1).and_then(|command| command.to_str()) {
        Some(command) if !word.starts_with('-') && is_model(word) => {
            format!("a model has its flag: lowbit {command} --model {}", shown(word)).into()
        }
        _ => error.into(),
    }
}

/// The command that is meant where none was typed.
struct Meant {
    name: &'static str,
    /// Before the first argument, not in its place.
    inserted: bool,
}

fn command(program: &Command, arguments: &[OsString]) -> Result<Option<Meant>, Failure> {
    let Some(first) = arguments.first().and_then(|first| first.to_str()) else { return Ok(None) };
    if ["-h", "--help", "-V", "--version", "help"].contains(&first)
        || program.find_subcommand(first).is_some()
    {
        return Ok(None);
    }
    if first.starts_with('-') {
        let given =
            |flags: &[&str]| arguments.iter().any(|argument| flags.iter().any(|flag| argument == flag));
        let asks_once = given(&["-p", "--prompt", "-f", "--file", "-no-cnv", "-st", "--single-turn"]);
        let name = if asks_once && !given(&["-cnv", "--conversation"]) { "generate" } else { "chat" };
        return Ok(Some(Meant { name, inserted: true }));
    }
    match table::COMMANDS.iter().find(|(names, _)| names.contains(&first)) {
        Some((_, Is(name))) => {
            out::note!("note: `lowbit {first}` is `lowbit {name}`");
            Ok(Some(Meant { name, inserted: false }))
        }
        Some((_, Say(answer) | Nothing(_, answer) | Switch(answer))) => {
            Err(format!("there is no `lowbit {first}`: {answer}").into())
        }
        None if is_model(first) => {
            let model = shown(first);
            Err(format!("a command comes first: `lowbit chat --model {model}`, or generate, inspect, ...")
                .into())
        }
        None => Ok(None),
    }
}

/// Whether someone who typed `word` meant a model.
fn is_model(word: &str) -> bool {
    word.contains('/')
        || word.ends_with(".gguf")
        || word.ends_with(".safetensors")
        || Path::new(word).is_dir()
}

/// The flags of `command`, each as it is called here.
fn flags(command: &Command, arguments: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    let with_value = flags_with_value(command);
    let (mut translated, mut arguments) = (vec![], arguments.into_iter().peekable());
    while let Some(argument) = arguments.next() {
        let Some(text) = argument.to_str().filter(|text| text.starts_with('-') && text.len() > 1) else {
            translated.push(argument);
            continue;
        };
        if text == "--" {
            translated.push(argument);
            translated.extend(arguments);
            break;
        }
        let (flag, value) = match text.split_once('=').filter(|_| text.starts_with("--")) {
            Some((flag, value)) => (flag, Some(value.to_string())),
            None => (text, None),
        };
        // As in llama.cpp, words may be joined by `-` or `_`.
        let dashed = if flag.starts_with("--") { flag.replace('_', "-") } else { flag.to_string() };
        let flag = match instead(command.get_name(), &dashed) {
            None => dashed,
            Some(Is(name)) => name.to_string(),
            Some(Say(answer)) => return Err(format!("{flag}: {answer}").into()),
            Some(Nothing(values, why)) => {
                out::note!("note: {flag} is of no effect: {why}");
                let values = if value.is_some() { 0 } else { values };
                arguments.by_ref().take(values).for_each(drop);
                continue;
            }
            Some(Switch(why)) => {
                out::note!("note: {flag} is of no effect: {why}");
                arguments.next_if(|next| value.is_none() && SWITCH.iter().any(|value| next == value));
                continue;
            }
        };
        let takes_value = with_value.contains(&flag);
        let next = if takes_value && value.is_none() { arguments.next_if(is_value) } else { None };
        if flag == "-m" {
            check_model_flag(next.as_ref())?;
        }
        match (value, next) {
            (Some(value), _) => translated.push(format!("{flag}={value}").into()),
            // Values that begin with a dash need `--name=value`, which short names do not offer.
            (None, Some(next)) if next.to_string_lossy().starts_with('-') => {
                translated.push(joined(&long_name(command, &flag), &next));
            }
            (None, next) => {
                translated.push(flag.into());
                translated.extend(next);
            }
        }
    }
    Ok(translated)
}

/// What stands for `flag` of `command`.
fn instead(command: &str, flag: &str) -> Option<Instead> {
    let mut entries = table::FLAGS
        .iter()
        .filter(|(of, names, _)| of.is_none_or(|of| of == command) && names.contains(&flag));
    entries.next().map(|(_, _, instead)| *instead)
}

/// All names of the command's flags that take a value.
fn flags_with_value(command: &Command) -> HashSet<String> {
    let flags = command
        .get_arguments()
        .filter(|arg| matches!(arg.get_action(), ArgAction::Set | ArgAction::Append) && !arg.is_positional());
    let names = flags.flat_map(|arg| {
        let longs = arg.get_long_and_visible_aliases().unwrap_or_default();
        let shorts = arg.get_short_and_visible_aliases().unwrap_or_default();
        let longs = longs.into_iter().map(|name| format!("--{name}"));
        longs.chain(shorts.into_iter().map(|name| format!("-{name}"))).collect::<Vec<_>>()
    });
    names.collect()
}

/// Whether this argument is the value of the flag before it: it does not look like a flag itself.
fn is_value(argument: &OsString) -> bool {
    let Some(text) = argument.to_str() else { return true };
    let Some(rest) = text.strip_prefix('-') else { return true };
    let name = rest.strip_prefix('-').unwrap_or(rest);
    let name = name.split_once('=').map_or(name, |(name, _)| name);
    let is_flag = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    !is_flag && text != "--"
}

/// The long name of a short flag.
fn long_name(command: &Command, flag: &str) -> String {
    let short = flag.strip_prefix('-').filter(|rest| rest.len() == 1).and_then(|rest| rest.chars().next());
    let arg = command.get_arguments().find(|arg| short.is_some() && arg.get_short() == short);
    arg.and_then(|arg| arg.get_long()).map_or_else(|| flag.to_string(), |long| format!("--{long}"))
}

fn joined(flag: &str, value: &OsString) -> OsString {
    let mut joined = OsString::from(format!("{flag}="));
    joined.push(value);
    joined
}

/// mlx-lm's `-m` is the number of tokens.
fn check_model_flag(value: Option<&OsString>) -> Result<(), Failure> {
    let number = value.and_then(|value| value.to_str()).and_then(|value| value.parse::<u64>().ok());
    match number.filter(|number| !Path::new(&number.to_string()).exists()) {
        Some(number) => Err(format!("-m names the model here; -n {number} is the number of tokens").into()),
        None => Ok(()),
    }
}

/// `-n`: -1 goes on until the model ends the text or its context is full; so does llama.cpp's -2.
pub fn token_count(text: &str) -> Result<usize, String> {
    match text {
        "-1" | "-2" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "a number of tokens, or -1 for no limit, is wanted".into()),
    }
}

/// `--seed`: -1 is a different seed on each run.
pub fn seed(text: &str) -> Result<Option<u64>, String> {
    match text {
        "-1" => Ok(None),
        _ => {
            text.parse().map(Some).map_err(|_| "a number, or -1 for another seed each run, is wanted".into())
        }
    }
}

/// `-ngl`: how many layers a GPU gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GpuLayers {
    None,
    /// Those that fit.
    Auto,
    All,
}

impl GpuLayers {
    /// Reads llama.cpp's values.
    pub fn parse(text: &str) -> Result<Self, String> {
        match (text, text.parse::<i64>()) {
            ("auto", _) | (_, Ok(-1)) => Ok(Self::Auto),
            (_, Ok(0)) => Ok(Self::None),
            ("all", _) | (_, Ok(1..) | Ok(-2)) => Ok(Self::All),
            _ => Err("a number of layers, auto or all is wanted".into()),
        }
    }
}

/// A text whose `\n`, `\t`, `\r`, `\\`, `\'`, `\"` and `\x41` stand for characters, as with llama.cpp's `--escape`; other
/// backslashes stay.
pub fn unescape(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let hex = rest.strip_prefix('x').and_then(|rest| rest.get(..2));
        let code = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(u8::is_ascii);
        let (character, length) = match (rest.chars().next(), code) {
            (_, Some(code)) => (char::from(code), 3),
            (Some('n'), _) => ('\n', 1),
            (Some('t'), _) => ('\t', 1),
            (Some('r'), _) => ('\r', 1),
            (Some(quoted @ ('\\' | '\'' | '"')), _) => (quoted, 1),
            _ => ('\\', 0),
        };
        out.push(character);
        rest = &rest[length..];
    }
    out + rest
}

/// The text of a file, or of standard input for `-`. Pipes such as `<(command)` are read, too.
///
/// # Errors
/// Names the file.
pub fn read_text(file: &Path) -> Result<String, Failure> {
    let is_stdin = file == Path::new("-");
    let name = if is_stdin { "standard input".to_string() } else { shown(file.display()).to_string() };
    let failed = |problem: &dyn std::fmt::Display| -> Failure { format!("{name}: {problem}").into() };
    let source: Box<dyn Read> = match is_stdin {
        true => Box::new(std::io::stdin().lock()),
        false if is_text(file).map_err(|error| failed(&error))? => {
            Box::new(std::fs::File::open(file).map_err(|error| failed(&error))?)
        }
        false => return Err(failed(&"not a regular file")),
    };
    let mut bytes = vec![];
    source.take(limit::TEXT + 1).read_to_end(&mut bytes).map_err(|error| failed(&error))?;
    if bytes.len() as u64 > limit::TEXT {
        return Err(failed(&format_args!("has more than {} bytes", limit::TEXT)));
    }
    String::from_utf8(bytes).map_err(|error| failed(&error))
}

/// Whether `file` is one to read to its end: a regular one, or a pipe such as a shell makes for `<(command)`.
fn is_text(file: &Path) -> std::io::Result<bool> {
    let kind = std::fs::metadata(file)?.file_type();
    #[cfg(unix)]
    if std::os::unix::fs::FileTypeExt::is_fifo(&kind) {
        return Ok(true);
    }
    Ok(kind.is_file())
}

/// `~/models` expanded where the shell has not done it, as after `--model=`.
pub fn expand_home(path: &str) -> PathBuf {
    let home = std::env::var_os("HOME").filter(|_| !Path::new(path).exists());
    match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.into(),
    }
}

/// The error of a model that was not found, with the path that was perhaps meant.
pub fn with_nearest(path: &Path, error: FileError) -> Failure {
    let near = match error {
        FileError::NoSuchModel { .. } | FileError::Download { .. } | FileError::Io { .. } => nearest(path),
        _ => None,
    };
    match near {
        Some(near) => format!("{error}\ndid you mean {}?", shown(near.display())).into(),
        None => error.into(),
    }
}

/// Entries of a directory that are compared.
const ENTRIES: usize = 10_000;

/// The existing path that differs least from `path` in the first name that does not exist.
fn nearest(path: &Path) -> Option<PathBuf> {
    let existing = path.ancestors().skip(1).find(|path| path.as_os_str().is_empty() || path.exists())?;
    let missing = path.strip_prefix(existing).ok()?.components().next()?;
    let missing = missing.as_os_str().to_str()?;
    let folder = if existing.as_os_str().is_empty() { Path::new(".") } else { existing };
    let names = std::fs::read_dir(folder).ok()?.take(ENTRIES).flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let distance = |name: &str| strsim::osa_distance(&missing.to_lowercase(), &name.to_lowercase());
    let (distance, name) = names.map(|name| (distance(&name), name)).min()?;
    (distance <= 1 + missing.chars().count() / 4).then(|| existing.join(name))
}

#[cfg(test)]
#[path = "habits/tests.rs"]
mod tests;
