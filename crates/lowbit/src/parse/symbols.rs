//! Texts in which some tokens stand for themselves: what markers are searched in.

use lowbit_files::Tokenizer;

/// A character of a reply, or a token that is part of a marker.
///
/// If the tokenizer has a token for `<think>`, only that token is the marker: the same characters,
/// spelled by other tokens, are text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbol {
    Char(char),
    Token(u32),
}

/// A marker as a model writes it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Marker {
    symbols: Vec<Symbol>,
    /// The tokens in it, with their spelling.
    tokens: Vec<(u32, String)>,
}

impl Marker {
    /// `spelling`, whose parts in brackets (`<..>` and `[..]`) are tokens where `tokenizer` has
    /// added ones for them.
    pub(crate) fn new(spelling: &str, tokenizer: Option<&Tokenizer>) -> Self {
        let (mut symbols, mut tokens, mut rest) = (vec![], vec![], spelling);
        while let Some(first) = rest.chars().next() {
            let part = bracketed(rest);
            let token = part.and_then(|part| Some((added_token(tokenizer?, part)?, part.to_string())));
            if let Some((id, part)) = token {
                symbols.push(Symbol::Token(id));
                rest = &rest[part.len()..];
                tokens.push((id, part));
            } else {
                symbols.push(Symbol::Char(first));
                rest = &rest[first.len_utf8()..];
            }
        }
        Self { symbols, tokens }
    }

    /// The tokens in it, with their spelling.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.tokens.iter().map(|(id, spelling)| (*id, spelling.as_str()))
    }

    pub(super) fn symbols(&self) -> &[Symbol] {
        &self.symbols
    }

    /// True if it is tokens alone.
    #[cfg(feature = "grammar")]
    pub(crate) fn is_token(&self) -> bool {
        self.symbols.iter().all(|symbol| matches!(symbol, Symbol::Token(_)))
    }

    /// True if no text comes before its first token.
    #[cfg(feature = "grammar")]
    pub(crate) fn starts_with_token(&self) -> bool {
        matches!(self.symbols.first(), Some(Symbol::Token(_)))
    }

    /// Its text, tokens as they are spelled.
    #[cfg(feature = "grammar")]
    pub(crate) fn spelled(&self) -> String {
        let token = |id| self.tokens.iter().find(|(known, _)| *known == id).map(|(_, text)| text.as_str());
        let mut text = String::new();
        for symbol in &self.symbols {
            match symbol {
                Symbol::Char(c) => text.push(*c),
                Symbol::Token(id) => text.push_str(token(*id).unwrap_or_default()),
            }
        }
        text
    }

    /// The marker as an expression of llguidance's Lark.
    #[cfg(feature = "grammar")]
    pub(crate) fn lark(&self) -> String {
        let (mut parts, mut text) = (vec![], String::new());
        let push_text = |text: &mut String, parts: &mut Vec<String>| {
            if !text.is_empty() {
                parts.push(serde_json::Value::from(std::mem::take(text)).to_string());
            }
        };
        for symbol in &self.symbols {
            match symbol {
                Symbol::Char(c) => text.push(*c),
                Symbol::Token(id) => {
                    push_text(&mut text, &mut parts);
                    parts.push(format!("<[{id}]>"));
                }
            }
        }
        push_text(&mut text, &mut parts);
        parts.join(" ")
    }

    pub(super) fn len(&self) -> usize {
        self.symbols.len()
    }
}

/// The id of the added token `spelling`.
pub(super) fn added_token(tokenizer: &Tokenizer, spelling: &str) -> Option<u32> {
    tokenizer.id(spelling).filter(|&id| tokenizer.is_added(id))
}

/// The part in brackets that `text` starts with.
fn bracketed(text: &str) -> Option<&str> {
    let close = match text.as_bytes().first()? {
        b'<' => '>',
        b'[' => ']',
        _ => return None,
    };
    text.find(close).map(|end| &text[..=end])
}

/// The result of a search for markers in symbols that go on.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    /// The marker of this index starts here.
    Marker { index: usize, start: usize },
    /// None is whole; from here on the symbols may be the start of one.
    Open(usize),
}

/// The first of `markers` in `text`; of several that start there, the longest.
pub(super) fn find(text: &[Symbol], markers: &[&Marker]) -> Found {
    for start in 0..text.len() {
        let rest = &text[start..];
        let whole = |(index, marker): (usize, &&Marker)| {
            rest.starts_with(marker.symbols()).then_some((marker.len(), index))
        };
        let longest = markers.iter().enumerate().filter_map(whole).max_by_key(|(length, _)| *length);
        let begun = |marker: &&Marker| marker.len() > rest.len() && marker.symbols().starts_with(rest);
        match longest {
            // A longer one may still come.
            Some((length, _)) if markers.iter().any(|marker| marker.len() > length && begun(marker)) => {
                return Found::Open(start);
            }
            Some((_, index)) => return Found::Marker { index, start },
            None if markers.iter().any(begun) => return Found::Open(start),
            None => {}
        }
    }
    Found::Open(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbols(text: &str) -> Vec<Symbol> {
        text.chars().map(Symbol::Char).collect()
    }

    #[test]
    fn the_first_and_longest_marker_is_found() {
        let markers = ["<a>", "<a><b>", "b>"].map(|spelling| Marker::new(spelling, None));
        let markers: Vec<&Marker> = markers.iter().collect();
        let found = |text: &str| find(&symbols(text), &markers);
        assert_eq!(found("x<a>y"), Found::Marker { index: 0, start: 1 });
        assert_eq!(found("x<a><b>"), Found::Marker { index: 1, start: 1 });
        assert_eq!(found("x<a><"), Found::Open(1));
        assert_eq!(found("xb"), Found::Open(1));
        assert_eq!(found("x<ab>"), Found::Marker { index: 2, start: 3 });
        assert_eq!(found("x<c>"), Found::Open(4));
        assert_eq!(found(""), Found::Open(0));
    }
}
