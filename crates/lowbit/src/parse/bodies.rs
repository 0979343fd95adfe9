//! Parsers of the text between the markers of calls.

use super::tools::Tools;
use super::{Call, pythonic as python};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Deserializer, Map, Value};
use std::collections::BTreeMap;

/// Reads a body.
pub(super) type Body = fn(&str, &Tools) -> Parsed;

/// The result of reading a body.
#[derive(Debug, PartialEq)]
pub(super) enum Parsed {
    Calls(Vec<Call>),
    /// The start of calls: what looked like their end was part of an argument.
    Incomplete,
    Malformed,
}

impl Parsed {
    fn of(calls: Vec<Call>) -> Self {
        if calls.is_empty() { Self::Malformed } else { Self::Calls(calls) }
    }
}

/// A call in JSON, under any of its names.
#[derive(Deserialize)]
struct JsonCall<'a> {
    #[serde(alias = "function", alias = "tool_name")]
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    #[serde(default, alias = "tool_call_id")]
    id: Option<String>,
}

impl JsonCall<'_> {
    fn call(self) -> Option<Call> {
        let arguments = self.arguments.or(self.parameters).map_or("{}", RawValue::get);
        // Some templates render arguments as a string that holds JSON.
        let text = serde_json::from_str::<String>(arguments);
        let arguments = text.unwrap_or_else(|_| arguments.into());
        is_object(&arguments).then_some(Call { id: self.id, name: self.name, arguments })
    }
}

fn is_object(text: &str) -> bool {
    serde_json::from_str::<Map<String, Value>>(text).is_ok()
}

/// An object, several after one another, or a list of them: `{"name": "f", "arguments": {..}}`.
pub(super) fn json(body: &str, _: &Tools) -> Parsed {
    let mut rest = body.trim();
    let mut calls = vec![];
    while !rest.is_empty() {
        let found = if rest.starts_with('[') {
            next::<Vec<JsonCall<'_>>>(rest)
        } else {
            next::<JsonCall<'_>>(rest).map(|(call, end)| (vec![call], end))
        };
        match found {
            Ok((found, end)) => {
                let Some(found) = found.into_iter().map(JsonCall::call).collect::<Option<Vec<_>>>() else {
                    return Parsed::Malformed;
                };
                calls.extend(found);
                rest = rest[end..].trim_start_matches(|c: char| c.is_whitespace() || [';', ','].contains(&c));
            }
            Err(error) if error.is_eof() => return Parsed::Incomplete,
            Err(_) => return Parsed::Malformed,
        }
    }
    Parsed::of(calls)
}

/// A list of objects whose only key is the call's name: Apertus'.
pub(super) fn by_name(body: &str, _: &Tools) -> Parsed {
    let calls = match serde_json::from_str::<Vec<BTreeMap<String, &RawValue>>>(body.trim()) {
        Ok(calls) => calls,
        Err(error) if error.is_eof() => return Parsed::Incomplete,
        Err(_) => return Parsed::Malformed,
    };
    let is_call = |(name, arguments): &(String, &RawValue)| is_name(name) && is_object(arguments.get());
    let each = calls.iter().map(|call| call.len()).all(|keys| keys == 1);
    let all: Vec<_> = calls.into_iter().flatten().collect();
    if !each || !all.iter().all(is_call) {
        return Parsed::Malformed;
    }
    let call =
        |(name, arguments): (String, &RawValue)| Call { id: None, name, arguments: arguments.get().into() };
    Parsed::of(all.into_iter().map(call).collect())
}

/// As [`json`], of the tools that were given: other objects are a reply of their own.
pub(super) fn bare_json(body: &str, tools: &Tools) -> Parsed {
    match json(body, tools) {
        Parsed::Calls(calls) if calls.iter().any(|call| !tools.has(&call.name)) => Parsed::Malformed,
        parsed => parsed,
    }
}

/// The value that `text` starts with, and where it ends.
fn next<'a, T: Deserialize<'a>>(text: &'a str) -> serde_json::Result<(T, usize)> {
    let mut values = Deserializer::from_str(text).into_iter::<T>();
    match values.next() {
        Some(value) => Ok((value?, values.byte_offset())),
        None => Err(serde::de::Error::custom("no value")),
    }
}

/// `<tool_call>`'s bodies, which differ by family.
pub(super) fn tool_call(body: &str, tools: &Tools) -> Parsed {
    let body = body.trim();
    if body.starts_with(['{', '[']) {
        json(body, tools)
    } else if body.starts_with("<function=") {
        tagged(body, tools, &FUNCTION)
    } else {
        arg_keys(body, tools)
    }
}

/// `NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, with white space between:
/// GLM's.
fn arg_keys(body: &str, tools: &Tools) -> Parsed {
    let (name, pairs) = body.split_at(body.find("<arg_key>").unwrap_or(body.len()));
    let tags = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"];
    key_values(name.trim(), pairs, tools, tags)
}

/// The call of `name` with these pairs of a key and a value.
fn key_values(name: &str, mut rest: &str, tools: &Tools, tags: [&str; 4]) -> Parsed {
    if !is_name(name) || (rest.is_empty() && !tools.has(name)) {
        return Parsed::Malformed;
    }
    let [key_start, key_end, value_start, value_end] = tags;
    let mut arguments = Map::new();
    while !rest.trim_start().is_empty() {
        let Some(pair) = rest.trim_start().strip_prefix(key_start) else { return Parsed::Malformed };
        let Some((key, value)) = pair.split_once(key_end) else { return Parsed::Incomplete };
        let Some(value) = value.trim_start().strip_prefix(value_start) else { return Parsed::Malformed };
        let Some((value, after)) = value.split_once(value_end) else { return Parsed::Incomplete };
        arguments.insert(key.trim().into(), tools.value(name, key.trim(), value));
        rest = after;
    }
    Parsed::Calls(vec![Call::new(name, arguments)])
}

/// Hunyuan 3's: GLM's calls with a tag behind the name, each between tags of its own.
pub(super) fn hunyuan(body: &str, tools: &Tools) -> Parsed {
    const START: &str = "<tool_call:opensource>";
    const TAGS: [&str; 4] = [
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
    ];
    let mut calls = vec![];
    let mut rest = body.trim();
    while !rest.is_empty() {
        let Some(call) = rest.strip_prefix(START) else { return Parsed::Malformed };
        let Some((call, after)) = call.split_once("</tool_call:opensource>") else {
            return Parsed::Incomplete;
        };
        let Some((name, pairs)) = call.split_once("<tool_sep:opensource>") else { return Parsed::Malformed };
        match key_values(name.trim(), pairs.trim(), tools, TAGS) {
            Parsed::Calls(found) => calls.extend(found),
            other => return other,
        }
        rest = after.trim_start();
    }
    Parsed::of(calls)
}

/// `<function=NAME>{..}</function>`: Functionary's.
pub(super) fn function_and_json(body: &str, _: &Tools) -> Parsed {
    let [start, _, end] = FUNCTION.call;
    let call = body.strip_prefix(start).and_then(|call| call.strip_suffix(end));
    let Some((name, arguments)) = call.and_then(|call| call.split_once('>')) else {
        return Parsed::Malformed;
    };
    match serde_json::from_str::<Map<String, Value>>(arguments) {
        Ok(_) if is_name(name) => {
            Parsed::Calls(vec![Call { id: None, name: name.into(), arguments: arguments.trim().into() }])
        }
        Err(error) if error.is_eof() => Parsed::Incomplete,
        _ => Parsed::Malformed,
    }
}

fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_alphanumeric() || ['_', '-', '.', ':', '/'].contains(&c);
    !text.is_empty() && text.chars().all(allowed)
}

/// The tags of calls whose arguments have a tag each.
struct Tags {
    call: [&'static str; 3],
    argument: [&'static str; 3],
    /// The text behind the name in an argument's tag: for values that are text, and for JSON.
    kinds: Option<[&'static str; 2]>,
    /// A line break on either side of a value is no part of it.
    lines: bool,
}

const FUNCTION: Tags = Tags {
    call: ["<function=", ">", "</function>"],
    argument: ["<parameter=", ">", "</parameter>"],
    kinds: None,
    lines: true,
};

const MINIMAX: Tags = Tags {
    call: ["<invoke name=\"", "\">", "</invoke>"],
    argument: ["<parameter name=\"", "\">", "</parameter>"],
    kinds: None,
    lines: false,
};

const MINICPM: Tags = Tags {
    call: ["<function name=\"", "\">", "</function>"],
    argument: ["<param name=\"", "\">", "</param>"],
    kinds: None,
    lines: false,
};

const DSML: Tags = Tags {
    call: ["<\u{ff5c}DSML\u{ff5c}invoke name=\"", "\">", "</\u{ff5c}DSML\u{ff5c}invoke>"],
    argument: ["<\u{ff5c}DSML\u{ff5c}parameter name=\"", ">", "</\u{ff5c}DSML\u{ff5c}parameter>"],
    kinds: Some(["\" string=\"true\"", "\" string=\"false\""]),
    lines: false,
};

pub(super) fn minimax(body: &str, tools: &Tools) -> Parsed {
    tagged(body, tools, &MINIMAX)
}

pub(super) fn minicpm(body: &str, tools: &Tools) -> Parsed {
    tagged(body, tools, &MINICPM)
}

pub(super) fn dsml(body: &str, tools: &Tools) -> Parsed {
    tagged(body, tools, &DSML)
}

/// Calls with a tag, in which each argument has one.
fn tagged(body: &str, tools: &Tools, tags: &Tags) -> Parsed {
    let (mut calls, mut rest) = (vec![], body.trim());
    while !rest.is_empty() {
        let [open, named, close] = tags.call;
        let Some(call) = rest.strip_prefix(open) else { return unless_begun(rest, open) };
        let Some((name, mut inside)) = call.split_once(named) else { return Parsed::Incomplete };
        let name = name.trim();
        if !is_name(name) {
            return Parsed::Malformed;
        }
        let mut arguments = Map::new();
        loop {
            inside = inside.trim_start();
            if let Some(after) = inside.strip_prefix(close) {
                rest = after.trim_start();
                break;
            }
            match argument(inside, tags) {
                Ok(found) => {
                    arguments.insert(found.key.into(), found.value(name, tools));
                    inside = found.after;
                }
                Err(parsed) => return parsed,
            }
        }
        calls.push(Call::new(name, arguments));
    }
    Parsed::of(calls)
}

fn unless_begun(text: &str, tag: &str) -> Parsed {
    if tag.starts_with(text) { Parsed::Incomplete } else { Parsed::Malformed }
}

/// One argument's tag.
struct Argument<'a> {
    key: &'a str,
    text: &'a str,
    /// True if the value is text, false if it is JSON; `None` if the tag does not say.
    is_text: Option<bool>,
    after: &'a str,
}

impl Argument<'_> {
    fn value(&self, call: &str, tools: &Tools) -> Value {
        match self.is_text {
            Some(true) => self.text.into(),
            Some(false) => serde_json::from_str(self.text).unwrap_or_else(|_| self.text.into()),
            None => tools.value(call, self.key, self.text),
        }
    }
}

/// The argument that `inside` starts with.
fn argument<'a>(inside: &'a str, tags: &Tags) -> Result<Argument<'a>, Parsed> {
    let ([open, named, close], [_, _, end]) = (tags.argument, tags.call);
    let tag = inside.strip_prefix(open).ok_or_else(|| unless_begun(inside, open))?;
    let (name, value) = tag.split_once(named).ok_or(Parsed::Incomplete)?;
    let kind = tags.kinds.and_then(|kinds| {
        let kind = kinds.iter().position(|kind| name.ends_with(kind))?;
        Some((name.strip_suffix(kinds[kind])?, kind == 0))
    });
    let key = kind.map_or(name, |(key, _)| key).trim().trim_end_matches('"');
    // A value may spell the closing tag: the one that counts has another argument or the call's end
    // behind it.
    let ends = |&at: &usize| {
        let after = value[at + close.len()..].trim_start();
        after.starts_with(open) || after.starts_with(end)
    };
    let at = value.match_indices(close).map(|(at, _)| at).find(ends).ok_or(Parsed::Incomplete)?;
    let mut text = &value[..at];
    if tags.lines {
        text = text.strip_prefix('\n').unwrap_or(text);
        text = text.strip_suffix('\n').unwrap_or(text);
    }
    Ok(Argument { key, text, is_text: kind.map(|(_, is_text)| is_text), after: &value[at + close.len()..] })
}

/// A list in JSON; or `NAME`, `[CALL_ID]ID`, `[ARGS]` and an object.
pub(super) fn mistral(body: &str, tools: &Tools) -> Parsed {
    let body = body.trim();
    if body.starts_with('[') {
        return json(body, tools);
    }
    let (head, arguments) = body.split_at(body.find('{').unwrap_or(body.len()));
    let head = head.trim();
    let head = head.strip_suffix("[ARGS]").unwrap_or(head).trim();
    let (name, id) = head.split_once("[CALL_ID]").map_or((head, None), |(name, id)| (name, Some(id)));
    let is_named = is_name(name) && id.is_none_or(is_name);
    if !is_named || !is_object(arguments) {
        return Parsed::Malformed;
    }
    Parsed::Calls(vec![Call {
        id: id.map(str::to_string),
        name: name.into(),
        arguments: arguments.trim().into(),
    }])
}

/// The bodies between `open` and `close`, and white space alone around them.
fn items<'a>(body: &'a str, [open, close]: [&str; 2]) -> Result<Vec<&'a str>, Parsed> {
    let (mut found, mut rest) = (vec![], body.trim());
    while !rest.is_empty() {
        let item = rest.strip_prefix(open).ok_or_else(|| unless_begun(rest, open))?;
        let (item, after) = item.split_once(close).ok_or(Parsed::Incomplete)?;
        found.push(item);
        rest = after.trim_start();
    }
    Ok(found)
}

fn each_item(body: &str, tags: [&str; 2], call: impl Fn(&str) -> Option<Call>) -> Parsed {
    match items(body, tags) {
        Ok(items) => match items.into_iter().map(call).collect::<Option<Vec<_>>>() {
            Some(calls) => Parsed::of(calls),
            None => Parsed::Malformed,
        },
        Err(parsed) => parsed,
    }
}

/// 3.1: `NAME<sep>{..}`; 3 and R1: `function<sep>NAME`, and the arguments as a block of code.
pub(super) fn deepseek(body: &str, _: &Tools) -> Parsed {
    let tags =
        ["<\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>", "<\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}>"];
    each_item(body, tags, |item| {
        let (kind, rest) = item.split_once("<\u{ff5c}tool\u{2581}sep\u{ff5c}>")?;
        let (name, arguments) = match rest.split_once("```json") {
            Some((name, block)) => (name, block.trim().strip_suffix("```")?),
            None => (kind, rest),
        };
        let (name, arguments) = (name.trim(), arguments.trim());
        let is_call = is_name(name) && is_object(arguments);
        is_call.then(|| Call { id: None, name: name.into(), arguments: arguments.into() })
    })
}

/// `functions.NAME:INDEX` is the call's id, and an object in JSON follows.
pub(super) fn kimi(body: &str, _: &Tools) -> Parsed {
    each_item(body, ["<|tool_call_begin|>", "<|tool_call_end|>"], |item| {
        let (id, arguments) = item.split_once("<|tool_call_argument_begin|>")?;
        let (id, arguments) = (id.trim(), arguments.trim());
        let name = id.strip_prefix("functions.").unwrap_or(id);
        let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
        let is_call = is_name(name) && is_object(arguments);
        is_call.then(|| Call { id: Some(id.into()), name: name.into(), arguments: arguments.into() })
    })
}

/// `[f(x=1), g(y="a")]`, or a call on each line.
pub(super) fn pythonic(body: &str, _: &Tools) -> Parsed {
    match python::calls(body) {
        Some(calls) => {
            Parsed::of(calls.into_iter().map(|(name, arguments)| Call::new(&name, arguments)).collect())
        }
        None => Parsed::Malformed,
    }
}

fn gemma(body: &str, quote: &str) -> Parsed {
    let call = python::gemma(body, quote).map(|(name, arguments)| Call::new(&name, arguments));
    call.map_or(Parsed::Malformed, |call| Parsed::Calls(vec![call]))
}

/// `call:NAME{KEY:VALUE,..}`: Gemma 4's.
pub(super) fn gemma_4(body: &str, _: &Tools) -> Parsed {
    gemma(body, "<|\"|>")
}

/// The same of FunctionGemma, with other quotes.
pub(super) fn function_gemma(body: &str, _: &Tools) -> Parsed {
    gemma(body, "<escape>")
}

/// gpt-oss's: the recipient is the name.
pub(super) fn harmony(recipient: &str, body: &str) -> Option<Call> {
    let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
    let body = if body.trim().is_empty() { "{}" } else { body.trim() };
    let is_call = is_name(name) && is_object(body);
    is_call.then(|| Call { id: None, name: name.into(), arguments: body.into() })
}
