use std::fmt::{self, Display, Formatter, Write};
use std::path::Path;

/// Characters of a value that a message prints.
const VALUE: usize = 200;

/// Characters of what a library says is wrong, and of a path.
pub(crate) const LONG: usize = 1000;

/// A value from a file, a server or the command line in the form that messages print: control
/// characters, invisible ones and those that change a terminal's direction are escaped, and longer
/// values are cut at 200 characters.
///
/// Every message that prints untrusted text goes through here: a terminal obeys escape sequences.
pub fn shown<T: Display>(value: T) -> Shown<T> {
    Shown { value, limit: VALUE, keep_lines: false }
}

/// A whole message for a terminal: as [`shown()`], but with its line breaks and up to `limit`
/// characters.
pub fn shown_message<T: Display>(message: T, limit: usize) -> Shown<T> {
    Shown { value: message, limit, keep_lines: true }
}

/// A path in a message: as [`shown()`], but up to 1000 characters.
pub fn shown_path(path: &Path) -> Shown<impl Display> {
    Shown { value: path.display(), limit: LONG, keep_lines: false }
}

/// See [`shown()`] and [`shown_message()`].
#[derive(Clone, Copy, Debug)]
pub struct Shown<T> {
    value: T,
    limit: usize,
    keep_lines: bool,
}

impl<T: Display> Display for Shown<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut out = Cut { out: f, left: self.limit, keep_lines: self.keep_lines, cut: false };
        // An error here is the cut: what is left of the value is not formatted at all.
        let result = write!(out, "{}", self.value);
        match out.cut {
            true => f.write_str(" [...]"),
            false => result,
        }
    }
}

/// Passes on `left` characters, escaped.
struct Cut<'f, 'b> {
    out: &'f mut Formatter<'b>,
    left: usize,
    keep_lines: bool,
    cut: bool,
}

impl Write for Cut<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            let Some(left) = self.left.checked_sub(1) else {
                self.cut = true;
                return Err(fmt::Error);
            };
            self.left = left;
            match character {
                '"' | '\'' | '\\' => self.out.write_char(character)?,
                '\n' if self.keep_lines => self.out.write_char(character)?,
                // Characters that Unicode calls printable stay as they are.
                _ => write!(self.out, "{}", character.escape_debug())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_stays_as_it_is() {
        assert_eq!(shown("q_proj \"é 漢字\" C:\\").to_string(), "q_proj \"é 漢字\" C:\\");
        assert_eq!(shown(12).to_string(), "12");
    }

    #[test]
    fn what_a_terminal_obeys_is_escaped() {
        assert_eq!(shown("a\x1b[2Jb\r\n\u{9b}\u{202e}").to_string(), r"a\u{1b}[2Jb\r\n\u{9b}\u{202e}");
        assert_eq!(shown_message("a\n\x07b", 10).to_string(), "a\n\\u{7}b");
    }

    #[test]
    fn long_values_are_cut_and_not_formatted_to_their_end() {
        struct Endless;
        impl Display for Endless {
            fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
                loop {
                    f.write_str("xy")?;
                }
            }
        }
        assert_eq!(shown(Endless).to_string(), "xy".repeat(VALUE / 2) + " [...]");
        assert_eq!(shown("x".repeat(VALUE)).to_string(), "x".repeat(VALUE));
        assert_eq!(shown_message(Endless, 3).to_string(), "xyx [...]");
    }
}
