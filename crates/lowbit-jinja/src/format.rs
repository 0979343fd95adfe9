//! `%` and `str.format`.

use super::meter::{Fallible, Fault};
use super::run::{Passed, Run};
use super::show::shown;
use super::text::float;
use super::value::{Kind, Value};

/// Widths and precisions: nothing that prints a chat needs more.
const WIDTH: usize = 1000;

/// A format of one value: `[[fill]align][sign][#][0][width][,][.precision][type]`.
#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    comma: bool,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Run<'_> {
    /// `format % values`
    pub(super) fn printf(&self, format: &str, values: &Value) -> Fallible<String> {
        let several;
        let arguments: &[Value] = match values {
            Value::Tuple(list) => &list.items,
            value => {
                several = [value.clone()];
                &several
            }
        };
        let mut arguments = arguments.iter();
        let mut next =
            || arguments.next().ok_or_else(|| Fault::new("not enough arguments for format string"));
        let mut out = String::new();
        let mut rest = format;
        let mut named = false;
        while let Some((before, after)) = rest.split_once('%') {
            self.push(&mut out, before)?;
            let mut value = None;
            rest = after;
            if let Some(name) = after.strip_prefix('(') {
                let (name, after) =
                    name.split_once(')').ok_or_else(|| Fault::new("incomplete format key"))?;
                let Value::Dict(dict) = values else { return Err(Fault::new("format requires a mapping")) };
                let found = dict.get(name).cloned();
                value = Some(found.ok_or_else(|| Fault::new(format!("'{}'", shown(name))))?);
                named = true;
                rest = after;
            }
            let mut spec = Spec::default();
            while let Some(flag) = rest.chars().next().filter(|c| "-+ #0".contains(*c)) {
                match flag {
                    '-' => spec.align = Some('<'),
                    '#' => spec.alternate = true,
                    '0' => spec.zero = true,
                    '+' => spec.sign = Some('+'),
                    _ => spec.sign = spec.sign.or(Some(' ')),
                }
                rest = &rest[1..];
            }
            let mut number = |rest: &mut &str| match rest.strip_prefix('*') {
                Some(after) => {
                    *rest = after;
                    let width = next()?.as_int().ok_or_else(|| Fault::new("* wants int"))?;
                    small(usize::try_from(width).unwrap_or(usize::MAX)).map(Some)
                }
                None => digits(rest),
            };
            spec.width = number(&mut rest)?.unwrap_or(0);
            if let Some(after) = rest.strip_prefix('.') {
                rest = after;
                spec.precision = Some(number(&mut rest)?.unwrap_or(0));
            }
            rest = rest.trim_start_matches(['h', 'l', 'L']);
            let kind = rest.chars().next().ok_or_else(|| Fault::new("incomplete format"))?;
            rest = &rest[kind.len_utf8()..];
            if kind == '%' {
                self.push(&mut out, "%")?;
                continue;
            }
            let value = match value {
                Some(value) => value,
                None => next()?.clone(),
            };
            self.printf_value(&value, kind, spec, &mut out)?;
        }
        self.push(&mut out, rest)?;
        if arguments.next().is_some() && !named && !matches!(values, Value::Dict(_)) {
            return Err(Fault::new("not all arguments converted during string formatting"));
        }
        Ok(out)
    }

    fn printf_value(&self, value: &Value, kind: char, mut spec: Spec, out: &mut String) -> Fallible<()> {
        let text = match kind {
            's' => self.str(value)?.to_string(),
            'r' | 'a' => self.repr(value)?,
            'c' => match value {
                Value::Text(text) if text.chars().count() == 1 => text.to_string(),
                _ => {
                    let code =
                        value.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32);
                    code.ok_or_else(|| Fault::new("%c requires int or char"))?.to_string()
                }
            },
            _ => {
                spec.align.get_or_insert('>');
                spec.kind = Some(if matches!(kind, 'i' | 'u') { 'd' } else { kind });
                let number = match (kind, value) {
                    ('d' | 'i' | 'u', Value::Float(float)) => Value::Int(float.trunc() as i128),
                    _ => value.clone(),
                };
                if number.as_float().is_none() {
                    let name = value.kind().name();
                    return Err(Fault::new(format!(
                        "%{} format: a number is required, not {name}",
                        shown(kind)
                    )));
                }
                if spec.align == Some('<') {
                    spec.zero = false;
                } else if spec.zero {
                    spec.align = None;
                }
                // An integer's precision is its least number of digits.
                if let (Some(precision), Some(value)) = (spec.precision, number.as_int())
                    && matches!(spec.kind, Some('d' | 'x' | 'X' | 'o'))
                {
                    let digits = radix(value.unsigned_abs(), spec.kind);
                    let sign = if value < 0 { "-" } else { "" };
                    let text = format!("{sign}{digits:0>precision$}");
                    return self.padded(&text, &spec, '>', out);
                }
                return self.number(&number, &spec, out);
            }
        };
        let cut = cut(&text, spec.precision);
        self.padded(cut, &spec, '>', out)
    }

    pub(super) fn repr(&self, value: &Value) -> Fallible<String> {
        let mut out = String::new();
        self.write_repr(value, &mut out)?;
        Ok(out)
    }

    /// `format.format(arguments)`
    pub(super) fn str_format(&self, format: &str, passed: &Passed) -> Fallible<String> {
        let mut out = String::new();
        let mut rest = format;
        let mut automatic = 0;
        while let Some(at) = rest.find(['{', '}']) {
            self.push(&mut out, &rest[..at])?;
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                self.push(&mut out, brace)?;
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(Fault::new("Single '}' encountered in format string"));
            }
            let (field, after) =
                rest.split_once('}').ok_or_else(|| Fault::new("expected '}' before end of string"))?;
            if field.contains('{') {
                return Err(Fault::new("nested fields in a format are not supported"));
            }
            rest = after;
            let (field, spec) = field.split_once(':').unwrap_or((field, ""));
            let (field, conversion) = field.split_once('!').unwrap_or((field, ""));
            let value = self.field(field, passed, &mut automatic)?;
            let value = match conversion {
                "" => value,
                "r" | "a" => Value::text(self.repr(&value)?),
                "s" => Value::Text(self.str(&value)?),
                _ => return Err(Fault::new("Unknown conversion specifier")),
            };
            self.format_value(&value, spec, &mut out)?;
        }
        self.push(&mut out, rest)?;
        Ok(out)
    }

    /// `name`, `0`, or nothing, and attributes and items of it.
    fn field(&self, field: &str, passed: &Passed, automatic: &mut usize) -> Fallible<Value> {
        let end = field.find(['.', '[']).unwrap_or(field.len());
        let (name, mut path) = field.split_at(end);
        let index = if name.is_empty() { Some(*automatic) } else { name.parse().ok() };
        *automatic += usize::from(name.is_empty());
        let found = match index {
            Some(index) => passed.positional.get(index),
            None => passed.keyword.iter().find(|(key, _)| **key == *name).map(|(_, value)| value),
        };
        let missing = || Fault::new(format!("format: there is no argument {}", shown(field)));
        let mut value = found.ok_or_else(missing)?.clone();
        while !path.is_empty() {
            self.meter.step(1)?;
            let key;
            if let Some(after) = path.strip_prefix('[') {
                (key, path) = after.split_once(']').ok_or_else(missing)?;
                let key = key.parse().map_or_else(|_| Value::text(key), Value::Int);
                value = self.item(&value, &key)?;
            } else {
                let after = path.strip_prefix('.').ok_or_else(missing)?;
                (key, path) = after.split_at(after.find(['.', '[']).unwrap_or(after.len()));
                value = self.attribute(&value, &key.into())?;
            }
        }
        Ok(value)
    }

    fn format_value(&self, value: &Value, spec: &str, out: &mut String) -> Fallible<()> {
        if spec.is_empty() {
            return self.write_str(value, out);
        }
        let spec = parse(spec)?;
        match value.kind() {
            Kind::Int | Kind::Float => self.number(value, &spec, out),
            Kind::Bool if spec.kind.is_some() => self.number(value, &spec, out),
            Kind::Bool | Kind::Text if matches!(spec.kind, None | Some('s')) => {
                let text = self.str(value)?;
                self.padded(cut(&text, spec.precision), &spec, '<', out)
            }
            kind => {
                Err(Fault::new(format!("unsupported format string passed to {}.__format__", kind.name())))
            }
        }
    }

    fn number(&self, value: &Value, spec: &Spec, out: &mut String) -> Fallible<()> {
        let (negative, mut digits) = magnitude(value, spec)?;
        if spec.comma {
            digits = with_commas(&digits);
        }
        let prefix = match spec.kind {
            Some(kind @ ('x' | 'X' | 'o' | 'b')) if spec.alternate => format!("0{kind}"),
            _ => String::new(),
        };
        let sign = match (negative, spec.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        let length = sign.len() + prefix.len() + digits.len();
        if spec.align == Some('=') || (spec.zero && spec.align.is_none()) {
            let fill = spec
                .fill
                .unwrap_or(if spec.zero { '0' } else { ' ' })
                .to_string()
                .repeat(spec.width.saturating_sub(length));
            return self.push(out, &[sign, &prefix, &fill, &digits].concat());
        }
        self.padded(&[sign, &prefix, &digits].concat(), spec, '>', out)
    }

    fn padded(&self, text: &str, spec: &Spec, align: char, out: &mut String) -> Fallible<()> {
        let missing = spec.width.saturating_sub(super::value::chars(text, &self.meter)?);
        let left = match spec.align.unwrap_or(align) {
            '<' => 0,
            '^' => missing / 2,
            _ => missing,
        };
        let fill = spec.fill.unwrap_or(if spec.zero && spec.align.is_none() { '0' } else { ' ' }).to_string();
        self.push(out, &fill.repeat(left))?;
        self.push(out, text)?;
        self.push(out, &fill.repeat(missing - left))
    }
}

fn small(number: usize) -> Fallible<usize> {
    match number <= WIDTH {
        true => Ok(number),
        false => {
            Err(Fault::new(format!("a format's width or precision is at most {WIDTH}, but is {number}")))
        }
    }
}

/// A number at the start of `rest`.
fn digits(rest: &mut &str) -> Fallible<Option<usize>> {
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(end);
    *rest = after;
    match digits.is_empty() {
        true => Ok(None),
        false => small(digits.parse().unwrap_or(usize::MAX)).map(Some),
    }
}

fn cut(text: &str, characters: Option<usize>) -> &str {
    let end = characters.and_then(|characters| text.char_indices().nth(characters));
    end.map_or(text, |(end, _)| &text[..end])
}

fn parse(text: &str) -> Fallible<Spec> {
    let mut spec = Spec::default();
    let mut rest = text;
    let is_align = |c: &char| "<>^=".contains(*c);
    let mut chars = rest.chars();
    let (first, second) = (chars.next(), chars.next());
    if let Some(align) = second.filter(is_align) {
        (spec.fill, spec.align) = (first, Some(align));
        rest = chars.as_str();
    } else if let Some(align) = first.filter(is_align) {
        spec.align = Some(align);
        rest = &rest[1..];
    }
    let mut flag = |flags: &str| {
        let found = rest.chars().next().filter(|c| flags.contains(*c));
        rest = &rest[found.map_or(0, char::len_utf8)..];
        found
    };
    spec.sign = flag("+- ");
    spec.alternate = flag("#").is_some();
    spec.zero = flag("0").is_some();
    spec.width = digits(&mut rest)?.unwrap_or(0);
    if let Some(after) = rest.strip_prefix(',') {
        spec.comma = true;
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        spec.precision =
            Some(digits(&mut rest)?.ok_or_else(|| Fault::new("Format specifier missing precision"))?);
    }
    spec.kind = rest.chars().next();
    match rest.chars().count() {
        0 | 1 => Ok(spec),
        _ => Err(Fault::new(format!("Invalid format specifier '{}'", shown(text)))),
    }
}

fn radix(value: u128, kind: Option<char>) -> String {
    match kind {
        Some('x') => format!("{value:x}"),
        Some('X') => format!("{value:X}"),
        Some('o') => format!("{value:o}"),
        Some('b') => format!("{value:b}"),
        _ => value.to_string(),
    }
}

/// True if the number is negative, and its digits.
fn magnitude(value: &Value, spec: &Spec) -> Fallible<(bool, String)> {
    let unknown = |kind: char| {
        let name = value.kind().name();
        Fault::new(format!("Unknown format code '{}' for object of type '{name}'", shown(kind)))
    };
    if let (Some(int), None | Some('d' | 'n' | 'x' | 'X' | 'o' | 'b')) = (value.as_int(), spec.kind) {
        return Ok((int < 0, radix(int.unsigned_abs(), spec.kind)));
    }
    let number = value.as_float().ok_or_else(|| Fault::new("a number is required"))?;
    let negative = number.is_sign_negative();
    let number = number.abs();
    let precision = spec.precision.unwrap_or(6);
    if !number.is_finite() {
        return Ok((negative && !number.is_nan(), if number.is_nan() { "nan" } else { "inf" }.into()));
    }
    let digits = match spec.kind {
        None if spec.precision.is_none() => float(number),
        Some('f' | 'F') => format!("{number:.precision$}"),
        Some('%') => format!("{:.precision$}%", number * 100.0),
        Some(kind @ ('e' | 'E')) => exponent(&format!("{number:.precision$e}"), kind),
        Some('g' | 'G' | 'n') | None => general(number, precision.max(1), spec),
        Some(kind) => return Err(unknown(kind)),
    };
    Ok((negative, digits))
}

/// `1.5e7` as `1.5e+07`.
fn exponent(text: &str, letter: char) -> String {
    let (digits, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}{letter}{sign}{exponent:0>2}")
}

/// `%g`: `precision` significant digits, without zeros at the end.
fn general(number: f64, precision: usize, spec: &Spec) -> String {
    let scientific = format!("{number:.*e}", precision - 1);
    let power: i32 = scientific.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    // Without a type, `format` switches one digit earlier and keeps one behind the point.
    let limit = precision as i32 - i32::from(spec.kind.is_none());
    let strip = |text: &str| match text.contains('.') && !spec.alternate {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text.to_string(),
    };
    if power < -4 || power >= limit.max(1) {
        let (digits, power) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let letter = if spec.kind == Some('G') { 'E' } else { 'e' };
        return exponent(&format!("{}e{power}", strip(digits)), letter);
    }
    let decimals = (precision as i32 - 1 - power).max(0) as usize;
    let text = strip(&format!("{number:.decimals$}"));
    if spec.kind.is_none() && !text.contains('.') { text + ".0" } else { text }
}

fn with_commas(digits: &str) -> String {
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let mut out = String::new();
    for (index, digit) in digits[..end].chars().enumerate() {
        if index > 0 && (end - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + &digits[end..]
}
