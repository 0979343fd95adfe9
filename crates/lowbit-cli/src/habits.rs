//! The habits of people who come from llama.cpp and mlx-lm: understood as they mean it, or answered
//! with what to type here.

mod classes;
mod drafts;
mod instead;
mod reasons;
#[cfg(feature = "serve")]
mod server;
mod table;
mod translate;

use crate::Failure;
use lowbit_files::read::limit;
use lowbit_files::shown;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use translate::translate;

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
    /// So many, which may be less than a model has.
    Some(u32),
    All,
}

/// From so many layers on, all are meant: llama.cpp's documentation has 99 for them.
const ALL_LAYERS: i64 = 99;

impl GpuLayers {
    /// Reads llama.cpp's values.
    pub fn parse(text: &str) -> Result<Self, String> {
        match (text, text.parse::<i64>()) {
            ("auto", _) | (_, Ok(-1)) => Ok(Self::Auto),
            (_, Ok(0)) => Ok(Self::None),
            ("all", _) | (_, Ok(ALL_LAYERS.. | -2)) => Ok(Self::All),
            (_, Ok(layers @ 1..)) => Ok(Self::Some(layers as u32)),
            _ => Err("a number of layers, auto or all is wanted".into()),
        }
    }
}

/// A text whose `\n`, `\t`, `\r`, `\\`, `\'`, `\"` and `\x41` stand for characters, as with
/// llama.cpp's `--escape`; other backslashes stay.
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

/// As [`read_text`], without the mark of UTF-8 (U+FEFF) with which some editors begin a file: it is
/// no part of a prompt.
///
/// # Errors
/// As [`read_text`].
pub fn read_marked_text(file: &Path) -> Result<String, Failure> {
    let text = read_text(file)?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
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

/// True if `file` is one to read to its end: a regular one, or a pipe such as a shell makes for
/// `<(command)`.
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
    let home = std::env::home_dir().filter(|_| !Path::new(path).exists());
    match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

/// The error of a model that was not found, with the path that was perhaps meant.
pub fn with_nearest(path: &Path, error: impl Into<Failure>) -> Failure {
    let error = error.into();
    match nearest(path) {
        Some(near) => format!("{error}\ndid you mean {}?", shown(near.display())).into(),
        None => error,
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
mod tests;
