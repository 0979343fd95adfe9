//! `strftime_now`, as Python's `strftime` in the C locale.

use super::meter::{Fallible, Fault};

/// The most bytes of a format, more than any date takes.
const FORMAT: usize = 1000;

pub(super) fn strftime(format: &str, time: &jiff::Zoned) -> Fallible<String> {
    if format.len() > FORMAT {
        return Err(Fault::new(format!("strftime_now: a format is longer than {FORMAT} bytes")));
    }
    // `%1000000Y` is a year padded to a million digits.
    let long = format.split('%').skip(1).any(|directive| {
        let width = directive.trim_start_matches(['-', '_', '^', '#', ':']);
        width.bytes().take_while(u8::is_ascii_digit).count() > 3
    });
    if long {
        return Err(Fault::new("strftime_now: a width has more than 3 digits"));
    }
    let text = jiff::fmt::strtime::format(format, time);
    text.map_err(|error| Fault::new(format!("strftime_now: {error}")))
}
