//! A template's source to tokens, with `trim_blocks` and `lstrip_blocks`.

use super::meter::{Fallible, Fault};
use super::show::shown;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'s> {
    /// Text between tags.
    Data(&'s str),
    BlockBegin,
    BlockEnd,
    PrintBegin,
    PrintEnd,
    Name(&'s str),
    Text(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

/// Longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// As Python's `str.isspace` and `\s`.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Line ends as `\n`, and without the last one: Jinja2 drops it.
pub(super) fn normalize(source: &str) -> String {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    source
}

/// The tokens of a [normalized](normalize) source, with their lines.
pub(super) fn tokens(source: &str) -> Fallible<Vec<(Token<'_>, u32)>> {
    let mut lexer = Lexer { source, at: 0, line: 1, line_start: true, tokens: vec![] };
    while lexer.root()? {}
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// True if the last token ended a line.
    line_start: bool,
    tokens: Vec<(Token<'s>, u32)>,
}

impl<'s> Lexer<'s> {
    fn push(&mut self, token: Token<'s>) {
        self.tokens.push((token, self.line));
    }

    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn fault(&self, message: impl Into<String>) -> Fault {
        Fault::new(message).at(self.line)
    }

    fn advance(&mut self, bytes: usize) {
        let passed = &self.source[self.at..self.at + bytes];
        self.line += passed.bytes().filter(|&b| b == b'\n').count() as u32;
        if !passed.is_empty() {
            self.line_start = passed.ends_with('\n');
        }
        self.at += bytes;
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.advance(rest.len() - rest.trim_start_matches(is_space).len());
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.advance(text.len());
        }
        found
    }

    /// The end of a block, a comment or `endraw`, which eats a line end (`trim_blocks`).
    fn tag_end(&mut self, end: &str) -> bool {
        let rest = self.rest();
        if let Some(signed) = rest.strip_prefix(['-', '+']) {
            if !signed.starts_with(end) {
                return false;
            }
            self.advance(1 + end.len());
            if rest.starts_with('-') {
                self.skip_space();
            }
            return true;
        }
        let found = self.eat(end);
        if found {
            self.eat("\n");
        }
        found
    }

    /// Text before a tag, as far as the tag leaves it: `-` strips all space, and without `+` a
    /// block strips its line's.
    fn data(&mut self, end: usize, sign: Option<u8>, strip_line: bool) {
        let mut text = &self.source[self.at..end];
        if sign == Some(b'-') {
            text = text.trim_end_matches(is_space);
        } else if sign != Some(b'+') && strip_line {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            let indent = &text[line..];
            if (line > 0 || self.line_start) && !indent.is_empty() && indent.chars().all(is_space) {
                text = &text[..line];
            }
        }
        if !text.is_empty() {
            self.push(Token::Data(text));
        }
        self.advance(end - self.at);
    }

    /// Text, and the tag after it; false at the end.
    fn root(&mut self) -> Fallible<bool> {
        let rest = self.rest();
        let tag = |at: &usize| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
        let Some(begin) = memchr(b'{', rest.as_bytes()).find(tag) else {
            if !rest.is_empty() {
                self.push(Token::Data(rest));
            }
            self.advance(rest.len());
            return Ok(false);
        };
        let sign = rest.as_bytes().get(begin + 2).copied().filter(|sign| matches!(sign, b'-' | b'+'));
        let kind = rest.as_bytes()[begin + 1];
        self.data(self.at + begin, sign, kind != b'{');
        self.advance(2 + usize::from(sign.is_some()));
        match kind {
            b'#' => self.comment()?,
            b'%' if self.raw()? => {}
            b'%' => {
                self.push(Token::BlockBegin);
                self.inside(true)?;
            }
            _ => {
                self.push(Token::PrintBegin);
                self.inside(false)?;
            }
        }
        Ok(true)
    }

    fn comment(&mut self) -> Fallible<()> {
        let rest = self.rest();
        let end = rest.find("#}").ok_or_else(|| self.fault("Missing end of comment tag"))?;
        let signed = rest[..end].ends_with(['-', '+']);
        self.advance(end - usize::from(signed));
        self.tag_end("#}");
        Ok(())
    }

    /// `{% raw %}`, behind its `{%`: all up to `{% endraw %}` is text.
    fn raw(&mut self) -> Fallible<bool> {
        let Some(after) = self.rest().trim_start_matches(is_space).strip_prefix("raw") else {
            return Ok(false);
        };
        let after = after.trim_start_matches(is_space);
        let strip = after.starts_with("-%}");
        if !strip && !after.starts_with("%}") {
            return Ok(false);
        }
        self.advance(self.rest().len() - after.len() + 2 + usize::from(strip));
        if strip {
            self.skip_space();
        }
        let rest = self.rest();
        let mut from = 0;
        while let Some(begin) = rest[from..].find("{%").map(|at| from + at) {
            let sign = rest.as_bytes().get(begin + 2).copied().filter(|sign| matches!(sign, b'-' | b'+'));
            let inner = &rest[begin + 2 + usize::from(sign.is_some())..];
            let name = inner.trim_start_matches(is_space);
            if let Some(after) = name.strip_prefix("endraw") {
                let end = after.trim_start_matches(is_space);
                if ["%}", "-%}", "+%}"].iter().any(|tag| end.starts_with(tag)) {
                    let length = rest.len() - end.len();
                    self.data(self.at + begin, sign, true);
                    self.advance(length - begin);
                    self.tag_end("%}");
                    return Ok(true);
                }
            }
            from = begin + 2;
        }
        Err(self.fault("Missing end of raw directive"))
    }

    /// The tokens of a block or a print, up to its end.
    fn inside(&mut self, block: bool) -> Fallible<()> {
        let mut open = vec![];
        loop {
            self.skip_space();
            if open.is_empty() && self.inside_end(block) {
                return Ok(());
            }
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return Err(self.fault("unexpected end of template inside a tag"));
            };
            match first {
                '0'..='9' => self.number()?,
                '\'' | '"' => self.text(first)?,
                c if c == '_' || c.is_alphanumeric() => {
                    let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
                    self.push(Token::Name(&rest[..end]));
                    self.advance(end);
                }
                _ => {
                    let Some(operator) = OPERATORS.iter().find(|operator| rest.starts_with(**operator))
                    else {
                        return Err(self.fault(format!("unexpected char {}", shown(format!("{first:?}")))));
                    };
                    self.balance(operator, &mut open)?;
                    self.push(Token::Operator(operator));
                    self.advance(operator.len());
                }
            }
        }
    }

    fn inside_end(&mut self, block: bool) -> bool {
        if block {
            let found = self.tag_end("%}");
            if found {
                self.push(Token::BlockEnd);
            }
            return found;
        }
        let strip = self.rest().starts_with("-}}");
        let found = strip || self.rest().starts_with("}}");
        if found {
            self.advance(2 + usize::from(strip));
            self.push(Token::PrintEnd);
            if strip {
                self.skip_space();
            }
        }
        found
    }

    fn balance(&self, operator: &str, open: &mut Vec<&'static str>) -> Fallible<()> {
        match operator {
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" => match open.pop() {
                Some(want) if want == operator => {}
                Some(want) => return Err(self.fault(format!("unexpected '{operator}', expected '{want}'"))),
                None => return Err(self.fault(format!("unexpected '{operator}'"))),
            },
            _ => {}
        }
        Ok(())
    }

    fn number(&mut self) -> Fallible<()> {
        let rest = self.rest();
        let after_dot = self.source[..self.at].ends_with('.');
        if !after_dot && let Some(length) = float_length(rest.as_bytes()) {
            let text = rest[..length].replace('_', "");
            self.push(Token::Float(text.parse().map_err(|_| self.fault("not a number"))?));
            self.advance(length);
            return Ok(());
        }
        let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)];
        let lower = rest.get(..2).unwrap_or("").to_ascii_lowercase();
        if let Some((_, base)) = prefixed.iter().find(|(prefix, _)| *prefix == lower) {
            let length = digits_length(rest[2..].trim_start_matches('_').as_bytes(), *base);
            if length > 0 {
                let skipped = rest[2..].len() - rest[2..].trim_start_matches('_').len();
                return self.integer(2 + skipped + length, 2, *base);
            }
        }
        let length = match rest.starts_with('0') {
            true => rest.bytes().take_while(|b| *b == b'0').count(),
            false => digits_length(rest.as_bytes(), 10),
        };
        self.integer(length, 0, 10)
    }

    fn integer(&mut self, length: usize, prefix: usize, base: u32) -> Fallible<()> {
        let text = self.rest()[prefix..length].replace('_', "");
        let value = i128::from_str_radix(&text, base);
        self.push(Token::Int(value.map_err(|_| self.fault("an integer has more than 127 bits"))?));
        self.advance(length);
        Ok(())
    }

    fn text(&mut self, quote: char) -> Fallible<()> {
        let rest = self.rest();
        let mut bytes = rest.bytes().enumerate().skip(1);
        let end = loop {
            match bytes.next() {
                None => return Err(self.fault(format!("a string has no closing {quote}"))),
                Some((_, b'\\')) => _ = bytes.next(),
                Some((at, byte)) if byte == quote as u8 => break at,
                Some(_) => {}
            }
        };
        let text = unescape(&rest[1..end]).map_err(|problem| self.fault(problem))?;
        self.push(Token::Text(text));
        self.advance(end + 1);
        Ok(())
    }
}

/// The places of `byte`.
fn memchr(byte: u8, bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes.iter().enumerate().filter(move |(_, b)| **b == byte).map(|(at, _)| at)
}

/// Digits with single underscores between them.
fn digits_length(bytes: &[u8], base: u32) -> usize {
    let digit = |at: usize| bytes.get(at).is_some_and(|b| (*b as char).is_digit(base));
    let mut at = 0;
    while digit(at) || (at > 0 && bytes.get(at) == Some(&b'_') && digit(at + 1)) {
        at += 1;
    }
    at
}

/// `None` where the digits have neither a fraction nor an exponent.
fn float_length(bytes: &[u8]) -> Option<usize> {
    let whole = digits_length(bytes, 10);
    let fraction = match bytes.get(whole) {
        Some(b'.') => match digits_length(&bytes[whole + 1..], 10) {
            0 => 0,
            digits => 1 + digits,
        },
        _ => 0,
    };
    let end = whole + fraction;
    let exponent = match bytes.get(end) {
        Some(b'e' | b'E') => {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            match digits_length(&bytes[end + 1 + sign..], 10) {
                0 => 0,
                digits => 1 + sign + digits,
            }
        }
        _ => 0,
    };
    (fraction + exponent > 0).then_some(end + exponent)
}

/// Python's escapes.
fn unescape(text: &str) -> Result<String, &'static str> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let Some(escape) = after.chars().next() else {
            return Err("a string ends in a backslash");
        };
        rest = &after[escape.len_utf8()..];
        let mut hex = |digits: usize| {
            let code = rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok());
            rest = rest.get(digits..).unwrap_or("");
            code.and_then(char::from_u32).ok_or("a string has a malformed escape")
        };
        let c = match escape {
            '\n' => continue,
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            '\\' | '\'' | '"' => escape,
            'x' => hex(2)?,
            'u' => hex(4)?,
            'U' => hex(8)?,
            '0'..='7' => {
                let digits = after.bytes().take(3).take_while(|b| (b'0'..=b'7').contains(b)).count();
                rest = &after[digits..];
                char::from_u32(u32::from_str_radix(&after[..digits], 8).unwrap_or(0)).unwrap_or('\0')
            }
            other => {
                out.push('\\');
                other
            }
        };
        out.push(c);
    }
    Ok(out + rest)
}
