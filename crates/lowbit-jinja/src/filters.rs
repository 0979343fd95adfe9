//! Jinja2's filters and tests by name. Those of sequences have their own file.

use std::sync::Arc;

use super::ast::Comparison;
use super::eval::undefined;
use super::meter::{Fallible, Fault};
use super::operators::iterable;
use super::run::{Passed, Run};
use super::show::shown;
use super::strings::int;
use super::value::{Kind, Value, chars};

const FILTERS: &[&str] = &[
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
];
const TESTS: &[&str] = &[
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

impl Run<'_> {
    pub(super) fn filter(&self, name: &str, input: Value, passed: Passed) -> Fallible<Value> {
        let passed = passed.plain();
        match name {
            "safe" => Ok(Value::Markup(self.str(&input)?)),
            "escape" | "e" if input.is_markup() => Ok(input),
            "escape" | "e" | "forceescape" => Ok(self.escape(&self.str(&input)?)?.marked()),
            // These keep the mark.
            "string" | "default" | "d" | "upper" | "lower" | "title" | "capitalize" | "trim" | "center"
                if input.is_markup() =>
            {
                Ok(self.plain_filter(name, input.plain(), passed)?.marked())
            }
            _ => self.plain_filter(name, input.plain(), passed),
        }
    }

    fn plain_filter(&self, name: &str, input: Value, passed: Passed) -> Fallible<Value> {
        match name {
            "default" | "d" => {
                let [default, boolean] = passed.bind(name, ["default_value", "boolean"])?;
                let boolean = boolean.is_some_and(|boolean| boolean.is_true());
                let missing = input.is_undefined() || (boolean && !input.is_true());
                Ok(if missing { default.unwrap_or_else(|| Value::text("")) } else { input })
            }
            "tojson" => self.to_json(&input, passed),
            "string" => {
                let [] = passed.bind(name, [])?;
                self.str(&input).map(Value::Text)
            }
            "length" | "count" => {
                let [] = passed.bind(name, [])?;
                self.length(&input)
            }
            "upper" | "lower" | "title" | "capitalize" => {
                let [] = passed.bind(name, [])?;
                let text = self.str(&input)?;
                if name == "title" { self.title(&text) } else { self.changed_case(&text, name) }
            }
            "trim" => {
                let [set] = passed.bind(name, ["chars"])?;
                self.strip(&self.str(&input)?, "strip", set.as_ref())
            }
            "replace" => {
                let [old, new, count] = passed.bind(name, ["old", "new", "count"])?;
                let [old, new] = [old, new].map(|part| part.unwrap_or(Value::None));
                let count = match count {
                    None | Some(Value::None) => None,
                    Some(count) => Some(int(&count, name)?),
                };
                let text = self.str(&input)?;
                self.replace(&text, &self.str(&old)?, &self.str(&new)?, count).map(Value::text)
            }
            "format" => {
                if !passed.positional.is_empty() && !passed.keyword.is_empty() {
                    return Err(Fault::new("can't handle positional and keyword arguments at the same time"));
                }
                let values = match passed.keyword.is_empty() {
                    true => Value::tuple(passed.positional)?,
                    false => {
                        let pair = |(name, value)| (super::value::Key::Text(name), value);
                        Value::dict(passed.keyword.into_iter().map(pair).collect())?
                    }
                };
                self.printf(&self.str(&input)?, &values).map(Value::text)
            }
            "center" => {
                let [width] = passed.bind(name, ["width"])?;
                let width = width.map_or(Ok(80), |width| int(&width, name))?;
                self.justify(&self.str(&input)?, name, width, " ")
            }
            "indent" => self.indent(&input, passed),
            "truncate" => self.truncate(&input, passed),
            "urlencode" => self.url_encode(&self.str(&input)?),
            "wordcount" => {
                let text = self.str(&input)?;
                self.meter.scan(text.len())?;
                let is_word = |c: char| c == '_' || c.is_alphanumeric();
                let words = text.split(|c| !is_word(c)).filter(|word| !word.is_empty()).count();
                Ok(Value::Int(words as i128))
            }
            "attr" => {
                let [attribute] = passed.bind(name, ["name"])?;
                let Some(Value::Text(attribute)) = attribute else {
                    return Err(Fault::new("attr takes an attribute's name"));
                };
                match &input {
                    Value::Dict(_) => Ok(Value::Undefined(attribute, Some(Kind::Dict))),
                    input => self.attribute(input, &attribute),
                }
            }
            "abs" => match (&input, input.as_int()) {
                (_, Some(value)) => Ok(Value::Int(value.checked_abs().unwrap_or(i128::MAX))),
                (Value::Float(value), _) => Ok(Value::Float(value.abs())),
                _ => Err(not(&input, "abs", "a number")),
            },
            "int" | "float" => self.to_number(name, &input, passed),
            "round" => self.round(&input, passed),
            _ => self.sequence_filter(name, input, passed),
        }
    }

    fn length(&self, value: &Value) -> Fallible<Value> {
        let length = match value {
            Value::Text(text) => Some(chars(text, &self.meter)?),
            value => value.len(),
        };
        let name = value.kind().name();
        let length = length.ok_or_else(|| Fault::new(format!("object of type '{name}' has no len()")))?;
        Ok(Value::Int(length as i128))
    }

    /// For the filter, unlike the method, only white space and `-([{<` start a new word.
    fn title(&self, text: &str) -> Fallible<Value> {
        self.meter.take(text.len().saturating_mul(3))?;
        let mut out = String::with_capacity(text.len());
        let mut start = true;
        for c in text.chars() {
            match start {
                true => out.extend(c.to_uppercase()),
                false => out.extend(c.to_lowercase()),
            }
            start = super::lexer::is_space(c) || "-([{<".contains(c);
        }
        Ok(Value::text(out))
    }

    fn indent(&self, input: &Value, passed: Passed) -> Fallible<Value> {
        let [width, first, blank] = passed.bind("indent", ["width", "first", "blank"])?;
        let prefix = match width {
            Some(Value::Text(text)) => text,
            width => {
                let width = width.map_or(Ok(4), |width| int(&width, "indent"))?.max(0);
                let width = usize::try_from(width).unwrap_or(usize::MAX);
                self.meter.take(width)?;
                " ".repeat(width).into()
            }
        };
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let (first, blank) = (is_true(first), is_true(blank));
        if input.is_undefined() {
            return Err(undefined(input));
        }
        let Some(text) = input.as_text() else { return Err(not(input, "indent", "text")) };
        let mut out = String::new();
        self.meter.take(text.len())?;
        // As in Jinja2, which adds a line end before it splits, a last line end stays.
        for (index, line) in text.split('\n').enumerate() {
            if index > 0 {
                out.push('\n');
            }
            let indented = if index == 0 { first } else { blank || !line.is_empty() };
            if indented {
                self.push(&mut out, &prefix)?;
            }
            out.push_str(line);
        }
        Ok(Value::text(out))
    }

    fn truncate(&self, input: &Value, passed: Passed) -> Fallible<Value> {
        let [length, kill, end, leeway] =
            passed.bind("truncate", ["length", "killwords", "end", "leeway"])?;
        let number = |value: Option<Value>, default| match value {
            None | Some(Value::None) => Ok(default),
            Some(value) => {
                int(&value, "truncate").map(|value| usize::try_from(value.max(0)).unwrap_or(usize::MAX))
            }
        };
        let (length, leeway) = (number(length, 255)?, number(leeway, 5)?);
        let end = end.map_or_else(|| Ok(Arc::from("...")), |end| self.str(&end))?;
        let text = self.str(input)?;
        let end_length = chars(&end, &self.meter)?;
        let Some(kept) = length.checked_sub(end_length) else {
            return Err(Fault::new(format!("expected length >= {end_length}, got {length}")));
        };
        if chars(&text, &self.meter)? <= length.saturating_add(leeway) {
            return Ok(Value::Text(text));
        }
        self.meter.take(text.len() + end.len())?;
        let cut: String = text.chars().take(kept).collect();
        let cut = match kill.is_some_and(|kill| kill.is_true()) {
            true => &cut,
            false => cut.rsplit_once(' ').map_or(&*cut, |(before, _)| before),
        };
        Ok(Value::text([cut, &end].concat()))
    }

    /// For HTML.
    pub(super) fn escape(&self, text: &str) -> Fallible<Value> {
        self.meter.take(text.len().saturating_mul(5))?;
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '&' => out.push_str("&amp;"),
                '<' => out.push_str("&lt;"),
                '>' => out.push_str("&gt;"),
                '"' => out.push_str("&#34;"),
                '\'' => out.push_str("&#39;"),
                c => out.push(c),
            }
        }
        Ok(Value::text(out))
    }

    fn url_encode(&self, text: &str) -> Fallible<Value> {
        self.meter.take(text.len().saturating_mul(3))?;
        let mut out = String::with_capacity(text.len());
        for byte in text.bytes() {
            match byte.is_ascii_alphanumeric() || b"/_.-~".contains(&byte) {
                true => out.push(byte as char),
                false => out.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(Value::text(out))
    }

    fn to_number(&self, name: &str, input: &Value, passed: Passed) -> Fallible<Value> {
        if input.is_undefined() {
            return Err(undefined(input));
        }
        let [default, base] = passed.bind(name, ["default", "base"])?;
        if name == "float" {
            let parsed = match input {
                Value::Text(text) => parse_float(text),
                value => value.as_float(),
            };
            return Ok(parsed.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)));
        }
        let base = base.map_or(Ok(10), |base| int(&base, "int"))?;
        let float = |value: f64| (value.is_finite() && value.abs() < 1e38).then_some(value.trunc() as i128);
        let parsed = match input {
            Value::Text(text) => {
                self.meter.scan(text.len())?;
                parse_int(text, base).or_else(|| parse_float(text).and_then(float))
            }
            Value::Float(value) => float(*value),
            value => value.as_int(),
        };
        Ok(parsed.map(Value::Int).or(default).unwrap_or(Value::Int(0)))
    }

    fn round(&self, input: &Value, passed: Passed) -> Fallible<Value> {
        let [precision, method] = passed.bind("round", ["precision", "method"])?;
        let precision = precision.map_or(Ok(0), |precision| int(&precision, "round"))?;
        let precision = precision.clamp(-400, 400) as i32;
        let method = method.map_or_else(|| Ok(Arc::from("common")), |method| self.str(&method))?;
        let value = input.as_float().ok_or_else(|| not(input, "round", "a number"))?;
        let scale = 10f64.powi(precision);
        Ok(match &*method {
            // `round` keeps integers.
            "common" => match input.as_int() {
                Some(value) if precision >= 0 => Value::Int(value),
                Some(value) => {
                    let unit = 10i128.checked_pow(precision.unsigned_abs());
                    Value::Int(unit.map_or(0, |unit| {
                        let (floor, rest) = (value.div_euclid(unit), value.rem_euclid(unit));
                        let up = rest * 2 > unit || (rest * 2 == unit && floor % 2 != 0);
                        floor.saturating_add(up.into()).saturating_mul(unit)
                    }))
                }
                None if !value.is_finite() => Value::Float(value),
                None if precision >= 0 => {
                    // Rust, as Python, rounds the exact value, and ties to even.
                    Value::Float(format!("{value:.*}", precision as usize).parse().unwrap_or(value))
                }
                None => Value::Float((value * scale).round_ties_even() / scale),
            },
            "ceil" => Value::Float((value * scale).ceil() / scale),
            "floor" => Value::Float((value * scale).floor() / scale),
            _ => return Err(Fault::new("method must be common, ceil or floor")),
        })
    }

    /// `value is name(arguments)`
    pub(super) fn test(&self, name: &str, value: &Value, arguments: Vec<Value>) -> Fallible<bool> {
        if value.is_markup() || arguments.iter().any(Value::is_markup) {
            let escaped = name == "escaped" && value.is_markup();
            return Ok(
                escaped || self.test(name, &value.plain(), arguments.iter().map(Value::plain).collect())?
            );
        }
        if !TESTS.contains(&name) {
            return Err(Fault::new(format!("No test named '{}'.", shown(name))));
        }
        let comparison = match name {
            "eq" | "equalto" | "==" => Some(Comparison::Eq),
            "ne" | "!=" => Some(Comparison::Ne),
            "lt" | "lessthan" | "<" => Some(Comparison::Lt),
            "le" | "<=" => Some(Comparison::Le),
            "gt" | "greaterthan" | ">" => Some(Comparison::Gt),
            "ge" | ">=" => Some(Comparison::Ge),
            "in" => Some(Comparison::In),
            _ => None,
        };
        let want = usize::from(comparison.is_some() || matches!(name, "divisibleby" | "sameas"));
        if arguments.len() != want {
            return Err(Fault::new(format!(
                "test '{name}' takes {want} arguments ({} given)",
                arguments.len()
            )));
        }
        if let Some(comparison) = comparison {
            return self.compare(comparison, value, &arguments[0]);
        }
        let remainder = |divisor: &Value| {
            let rest = self.binary(super::ast::Operator::Mod, value, divisor)?;
            rest.as_float().ok_or_else(|| not(value, name, "a number"))
        };
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => value.as_float().is_some(),
            "string" => value.as_text().is_some(),
            "mapping" => matches!(value, Value::Dict(_)),
            "iterable" => iterable(value),
            "sequence" => matches!(
                value,
                Value::Text(_)
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::Range(..)
                    | Value::Undefined(..)
            ),
            "callable" => matches!(
                value,
                Value::Function(_)
                    | Value::Macro(_)
                    | Value::Method(_)
                    | Value::Loop(_)
                    | Value::Undefined(..)
            ),
            "escaped" => false,
            "odd" => remainder(&Value::Int(2))? == 1.0,
            "even" => remainder(&Value::Int(2))? == 0.0,
            "divisibleby" => remainder(&arguments[0])? == 0.0,
            "sameas" => self.same(value, &arguments[0])?,
            "filter" => value.as_text().is_some_and(|name| FILTERS.contains(&name)),
            "test" => value.as_text().is_some_and(|name| TESTS.contains(&name)),
            _ => {
                let text = self.str(value)?;
                self.meter.scan(text.len())?;
                type Is = fn(char) -> bool;
                let (wanted, other): (Is, Is) = match name {
                    "lower" => (char::is_lowercase, char::is_uppercase),
                    _ => (char::is_uppercase, char::is_lowercase),
                };
                text.chars().any(wanted) && !text.chars().any(other)
            }
        })
    }

    /// Python's `is`, as far as values that do not change have it.
    fn same(&self, a: &Value, b: &Value) -> Fallible<bool> {
        Ok(match (a, b) {
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                std::rc::Rc::ptr_eq(a, b)
            }
            (Value::Dict(a), Value::Dict(b)) => std::rc::Rc::ptr_eq(a, b),
            (a, b) => a.kind() == b.kind() && self.equal(a, b)?,
        })
    }
}

/// A filter that the value's type does not have.
pub(super) fn not(value: &Value, filter: &str, want: &str) -> Fault {
    match value {
        Value::Undefined(..) => undefined(value),
        _ => Fault::new(format!("{filter} takes {want}, not {}", value.kind().name())),
    }
}

/// `int(text, base)`
fn parse_int(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(super::lexer::is_space).to_ascii_lowercase();
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(&text)),
    };
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let prefix = match base {
        16 => "0x",
        8 => "0o",
        2 => "0b",
        _ => "",
    };
    let digits = digits.strip_prefix(prefix).unwrap_or(digits);
    let separated = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    if separated || digits.starts_with(['+', '-']) {
        return None;
    }
    i128::from_str_radix(&digits.replace('_', ""), base).ok().map(|value| value * sign)
}

fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(super::lexer::is_space);
    text.parse().ok()
}
