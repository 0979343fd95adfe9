//! Python's methods of text.

use std::sync::Arc;

use super::lexer::is_space;
use super::meter::{Fallible, Fault};
use super::run::{Passed, Run};
use super::text::is_printable;
use super::value::{Value, chars};

/// The most that a change of case lengthens a text, as a factor: `ΐ` becomes three letters.
const CASE: usize = 3;

impl Run<'_> {
    pub(super) fn text_method(&self, text: &Arc<str>, name: &str, passed: Passed) -> Fallible<Value> {
        self.meter.scan(text.len())?;
        match name {
            "upper" | "lower" | "casefold" | "capitalize" | "title" | "swapcase" => {
                let [] = passed.bind(name, [])?;
                self.changed_case(text, name)
            }
            "strip" | "lstrip" | "rstrip" => {
                let [chars] = passed.bind(name, ["chars"])?;
                self.strip(text, name, chars.as_ref())
            }
            "split" | "rsplit" => {
                let [separator, most] = passed.bind(name, ["sep", "maxsplit"])?;
                self.split(text, name == "rsplit", separator.as_ref(), most.as_ref())
            }
            "splitlines" => {
                let [keep] = passed.bind(name, ["keepends"])?;
                self.split_lines(text, keep.is_some_and(|keep| keep.is_true()))
            }
            "startswith" | "endswith" => {
                let [affix, start, end] = passed.bind(name, ["prefix", "start", "end"])?;
                let part = self.part(text, start.as_ref(), end.as_ref())?.1;
                let is_affix = |affix: &Value| match (affix.as_text(), name) {
                    (Some(affix), "startswith") => Ok(part.starts_with(affix)),
                    (Some(affix), _) => Ok(part.ends_with(affix)),
                    (None, _) => Err(Fault::new(format!(
                        "{name} first arg must be str or a tuple of str, not {}",
                        affix.kind().name()
                    ))),
                };
                match affix {
                    Some(Value::Tuple(list)) => {
                        self.meter.step(list.items.len())?;
                        let found = list.items.iter().map(is_affix).collect::<Fallible<Vec<_>>>()?;
                        Ok(Value::Bool(found.contains(&true)))
                    }
                    affix => is_affix(&affix.unwrap_or(Value::None)).map(Value::Bool),
                }
            }
            "replace" => {
                let [old, new, count] = passed.bind(name, ["old", "new", "count"])?;
                let count = count.as_ref().map(|count| int(count, "replace")).transpose()?;
                self.replace(text, want(&old, "replace")?, want(&new, "replace")?, count).map(Value::text)
            }
            "find" | "rfind" | "index" | "rindex" | "count" => {
                let [part, start, end] = passed.bind(name, ["sub", "start", "end"])?;
                self.find(text, name, want(&part, name)?, (start.as_ref(), end.as_ref()))
            }
            "join" => {
                let [items] = passed.bind(name, ["iterable"])?;
                let items = items.unwrap_or(Value::None).elements(&self.meter)?;
                let mut out = String::new();
                for (index, item) in items.items.iter().enumerate() {
                    if index > 0 {
                        self.push(&mut out, text)?;
                    }
                    let Some(item) = item.as_text() else {
                        let kind = item.kind().name();
                        return Err(Fault::new(format!(
                            "sequence item {index}: expected str instance, {kind} found"
                        )));
                    };
                    self.push(&mut out, item)?;
                }
                Ok(Value::text(out))
            }
            "format" => self.str_format(text, &passed).map(Value::text),
            "format_map" => {
                let [Some(Value::Dict(dict))] = passed.bind(name, ["mapping"])? else {
                    return Err(Fault::new("format_map takes a mapping"));
                };
                self.meter.take_elements(2 * dict.map.len())?;
                let keyword = dict.map.iter().filter_map(|(key, value)| match key {
                    super::value::Key::Text(name) => Some((name.clone(), value.clone())),
                    _ => None,
                });
                let passed = Passed { positional: vec![], keyword: keyword.collect() };
                self.str_format(text, &passed).map(Value::text)
            }
            "removeprefix" | "removesuffix" => {
                let [affix] = passed.bind(name, ["affix"])?;
                let affix = want(&affix, name)?;
                let rest = match name {
                    "removeprefix" => text.strip_prefix(affix),
                    _ => text.strip_suffix(affix),
                };
                self.part_of(text, rest.unwrap_or(text))
            }
            "partition" | "rpartition" => {
                let [separator] = passed.bind(name, ["sep"])?;
                let separator = want(&separator, name)?;
                if separator.is_empty() {
                    return Err(Fault::new("empty separator"));
                }
                self.meter.take(text.len())?;
                let parts = match name {
                    "partition" => text.split_once(separator).map(|(a, b)| [a, separator, b]),
                    _ => text.rsplit_once(separator).map(|(a, b)| [a, separator, b]),
                };
                let whole = if name == "partition" { [&**text, "", ""] } else { ["", "", &**text] };
                Value::tuple(parts.unwrap_or(whole).map(Value::text).into())
            }
            "ljust" | "rjust" | "center" | "zfill" => {
                let [width, fill] = passed.bind(name, ["width", "fillchar"])?;
                let width = int(&width.unwrap_or(Value::None), name)?;
                let fill = fill.map_or_else(|| Ok(Arc::from(" ")), |fill| self.str(&fill))?;
                self.justify(text, name, width, &fill)
            }
            "expandtabs" => {
                let [size] = passed.bind(name, ["tabsize"])?;
                let size = size.map_or(Ok(8), |size| int(&size, name))?.max(0);
                let size = usize::try_from(size).unwrap_or(usize::MAX);
                self.meter.take(text.len().saturating_mul(size.max(1)))?;
                Ok(Value::text(expand_tabs(text, size)))
            }
            "encode" | "translate" | "maketrans" => Err(Fault::new(format!("str.{name} is not supported"))),
            _ => {
                let [] = passed.bind(name, [])?;
                Ok(Value::Bool(is(text, name)))
            }
        }
    }

    /// A part of `text`, which need not be copied where it is all.
    fn part_of(&self, text: &Arc<str>, part: &str) -> Fallible<Value> {
        if part.len() == text.len() {
            return Ok(Value::Text(text.clone()));
        }
        self.meter.take(part.len())?;
        Ok(Value::text(part))
    }

    pub(super) fn changed_case(&self, text: &Arc<str>, name: &str) -> Fallible<Value> {
        self.meter.take(text.len().saturating_mul(CASE))?;
        let mut out = String::with_capacity(text.len());
        match name {
            "upper" => out = text.to_uppercase(),
            "lower" | "casefold" => out = text.to_lowercase(),
            "swapcase" => {
                for c in text.chars() {
                    match c.is_uppercase() {
                        true => out.extend(c.to_lowercase()),
                        false => out.extend(c.to_uppercase()),
                    }
                }
            }
            _ => {
                let mut inside = false;
                for c in text.chars() {
                    match inside {
                        true => out.extend(c.to_lowercase()),
                        false => out.extend(c.to_uppercase()),
                    }
                    inside = if name == "title" { c.is_alphabetic() } else { true };
                }
            }
        }
        Ok(Value::text(out))
    }

    pub(super) fn strip(&self, text: &Arc<str>, name: &str, set: Option<&Value>) -> Fallible<Value> {
        let set = match set {
            None | Some(Value::None) => None,
            Some(Value::Text(set)) => {
                // Each character of the text may be compared with all.
                self.meter.scan(text.len().saturating_mul(1 + set.len()))?;
                Some(set)
            }
            Some(other) => {
                return Err(Fault::new(format!(
                    "{name} arg must be None or str, not {}",
                    other.kind().name()
                )));
            }
        };
        let strips = |c: char| set.map_or_else(|| is_space(c), |set| set.contains(c));
        let part = match name {
            "lstrip" => text.trim_start_matches(strips),
            "rstrip" => text.trim_end_matches(strips),
            _ => text.trim_matches(strips),
        };
        self.part_of(text, part)
    }

    fn split(&self, text: &str, reverse: bool, by: Option<&Value>, most: Option<&Value>) -> Fallible<Value> {
        let most = most.map(|most| int(most, "split")).transpose()?;
        let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1);
        let mut parts: Vec<&str> = vec![];
        match by {
            None | Some(Value::None) => {
                let mut rest = text.trim_matches(is_space);
                while !rest.is_empty() {
                    self.meter.take_elements(1)?;
                    let found = match (parts.len() < most, reverse) {
                        (false, _) => None,
                        (true, false) => rest
                            .split_once(is_space)
                            .map(|(part, rest)| (part, rest.trim_start_matches(is_space))),
                        (true, true) => rest
                            .rsplit_once(is_space)
                            .map(|(rest, part)| (part, rest.trim_end_matches(is_space))),
                    };
                    let (part, after) = found.unwrap_or((rest, ""));
                    parts.push(part);
                    rest = after;
                }
            }
            Some(by) => {
                let by = by
                    .as_text()
                    .ok_or_else(|| Fault::new(format!("must be str or None, not {}", by.kind().name())))?;
                if by.is_empty() {
                    return Err(Fault::new("empty separator"));
                }
                let mut add = |part| {
                    self.meter.take_elements(1)?;
                    parts.push(part);
                    Ok::<_, Fault>(())
                };
                match reverse {
                    true => text.rsplitn(most + 1, by).try_for_each(&mut add)?,
                    false => text.splitn(most + 1, by).try_for_each(&mut add)?,
                }
            }
        }
        if reverse {
            parts.reverse();
        }
        self.meter.take(text.len())?;
        self.texts(&parts)
    }

    fn texts(&self, parts: &[&str]) -> Fallible<Value> {
        self.meter.take_elements(parts.len())?;
        Value::list(parts.iter().map(|part| Value::text(*part)).collect())
    }

    fn split_lines(&self, text: &str, keep: bool) -> Fallible<Value> {
        let ends = |c: char| {
            matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
        };
        let mut parts = vec![];
        let mut rest = text;
        while !rest.is_empty() {
            self.meter.take_elements(1)?;
            let (line, with_end) = match rest.find(ends) {
                None => (rest.len(), rest.len()),
                Some(at) if rest[at..].starts_with("\r\n") => (at, at + 2),
                Some(at) => (at, at + rest[at..].chars().next().map_or(0, char::len_utf8)),
            };
            parts.push(&rest[..if keep { with_end } else { line }]);
            rest = &rest[with_end..];
        }
        self.meter.take(text.len())?;
        self.texts(&parts)
    }

    /// The part of `text` between two places that count characters, and the characters before it.
    fn part<'t>(
        &self,
        text: &'t str,
        start: Option<&Value>,
        end: Option<&Value>,
    ) -> Fallible<(usize, &'t str)> {
        let bound = |bound: Option<&Value>| match bound {
            None | Some(Value::None) => Ok(None),
            Some(bound) => int(bound, "slice indices").map(Some),
        };
        let (start, end) = (bound(start)?, bound(end)?);
        if start.is_none() && end.is_none() {
            return Ok((0, text));
        }
        let length = chars(text, &self.meter)? as i128;
        let place = |at: i128| (if at < 0 { (at + length).max(0) } else { at.min(length) }) as usize;
        let (start, end) = (place(start.unwrap_or(0)), place(end.unwrap_or(length)));
        let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
        Ok((start, text.get(byte(start)..byte(end)).unwrap_or("")))
    }

    fn find(
        &self,
        text: &str,
        name: &str,
        part: &str,
        ends: (Option<&Value>, Option<&Value>),
    ) -> Fallible<Value> {
        let (before, text) = self.part(text, ends.0, ends.1)?;
        self.meter.scan(text.len() + part.len())?;
        if name == "count" {
            let count = if part.is_empty() { text.chars().count() + 1 } else { text.matches(part).count() };
            return Ok(Value::Int(count as i128));
        }
        let found = if name.starts_with('r') { text.rfind(part) } else { text.find(part) };
        match found {
            Some(at) => Ok(Value::Int((before + text[..at].chars().count()) as i128)),
            None if name.ends_with("index") => Err(Fault::new("substring not found")),
            None => Ok(Value::Int(-1)),
        }
    }

    pub(super) fn replace(&self, text: &str, old: &str, new: &str, count: Option<i128>) -> Fallible<String> {
        let most = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
        self.meter.scan(text.len() + old.len())?;
        let found = match old.is_empty() {
            true => text.chars().count() + 1,
            false => text.matches(old).take(most).count(),
        };
        self.meter.take(text.len().saturating_add(found.min(most).saturating_mul(new.len())))?;
        Ok(text.replacen(old, new, most))
    }

    pub(super) fn justify(&self, text: &str, name: &str, width: i128, fill: &str) -> Fallible<Value> {
        if fill.chars().count() != 1 {
            return Err(Fault::new("The fill character must be exactly one character long"));
        }
        let length = chars(text, &self.meter)?;
        let missing = usize::try_from(width.max(0)).unwrap_or(usize::MAX).saturating_sub(length);
        let fill = if name == "zfill" { "0" } else { fill };
        self.meter.take(missing.saturating_mul(fill.len()).saturating_add(text.len()))?;
        let left = match name {
            "ljust" => 0,
            // Python's rule for what does not come out even.
            "center" => missing / 2 + (missing & width.max(0) as usize & 1),
            _ => missing,
        };
        let (sign, digits) = match text.strip_prefix(['+', '-']) {
            Some(digits) if name == "zfill" => (&text[..1], digits),
            _ => ("", text),
        };
        Ok(Value::text([sign, &fill.repeat(left), digits, &fill.repeat(missing - left)].concat()))
    }
}

fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            _ => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

fn is(text: &str, name: &str) -> bool {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "isidentifier" => !text.starts_with(char::is_numeric) && all(|c| c == '_' || c.is_alphanumeric()),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(is_printable),
        _ => {
            // `istitle`: capitals at words' starts and nowhere else.
            let mut inside = false;
            let mut found = false;
            for c in text.chars() {
                if (c.is_uppercase() && inside) || (c.is_lowercase() && !inside) {
                    return false;
                }
                inside = c.is_alphabetic();
                found |= c.is_uppercase();
            }
            found
        }
    }
}

fn want<'v>(value: &'v Option<Value>, what: &str) -> Fallible<&'v str> {
    match value {
        Some(Value::Text(text)) => Ok(text),
        Some(other) => Err(Fault::new(format!("{what}: a str is required, not {}", other.kind().name()))),
        None => Err(Fault::new(format!("{what}: an argument is missing"))),
    }
}

pub(super) fn int(value: &Value, what: &str) -> Fallible<i128> {
    let kind = value.kind().name();
    value.as_int().ok_or_else(|| Fault::new(format!("{what}: an integer is required, not {kind}")))
}
