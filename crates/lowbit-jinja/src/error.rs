use std::fmt::{Display, Formatter, Result};

use crate::meter::Fault;
use crate::show::shown_message;

/// Characters of a message.
const LONG: usize = 2000;

/// Why a template cannot be parsed or rendered.
///
/// The message is fit for a terminal: control characters of the template and its variables are
/// escaped, and what is longer than 2000 characters is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    message: Box<str>,
    line: Option<u32>,
}

impl Error {
    /// The problem, without its line.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The line of the template, from 1, if the problem has one.
    pub fn line(&self) -> Option<u32> {
        self.line
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self.line {
            Some(line) => write!(f, "{} (line {line})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self { message: shown_message(fault.message(), LONG).into(), line: fault.line() }
    }
}
