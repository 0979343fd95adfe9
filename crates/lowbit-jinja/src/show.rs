//! Text of templates in messages.

/// Characters of a name.
const NAME: usize = 200;

/// A name as messages print it: on a line, and at most 200 characters of it.
pub(super) fn shown(name: impl ToString) -> String {
    escaped(&name.to_string(), NAME, |_| false)
}

/// A whole message as a terminal may print it, line breaks included.
pub(super) fn shown_message(message: &str, limit: usize) -> String {
    escaped(message, limit, |character| character == '\n')
}

/// `text` with all escaped that a terminal obeys or does not show, and cut after `limit`
/// characters.
fn escaped(text: &str, limit: usize, keeps: impl Fn(char) -> bool) -> String {
    let mut out = String::new();
    let mut characters = text.chars();
    for character in characters.by_ref().take(limit) {
        match character {
            '"' | '\'' | '\\' => out.push(character),
            _ if keeps(character) => out.push(character),
            // Whatever Unicode can print stays as it is.
            _ => out.extend(character.escape_debug()),
        }
    }
    if characters.next().is_some() {
        out.push_str(" [...]");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_a_line_without_escape_sequences() {
        assert_eq!(shown("q \"é 漢字\" C:\\ it's"), "q \"é 漢字\" C:\\ it's");
        assert_eq!(shown("a\x1b[2Jb\r\n\u{9b}\u{202e}"), r"a\u{1b}[2Jb\r\n\u{9b}\u{202e}");
        assert_eq!(shown("x".repeat(NAME)), "x".repeat(NAME));
        assert_eq!(shown("x".repeat(NAME + 1)), "x".repeat(NAME) + " [...]");
        assert_eq!(shown_message("a\n\x07b", 4), "a\n\\u{7}b");
        assert_eq!(shown_message("xyxyx", 3), "xyx [...]");
    }
}
