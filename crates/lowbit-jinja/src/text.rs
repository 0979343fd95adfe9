//! Values as text: Python's `str` and `repr`.

use std::fmt::Write;

use super::meter::{Fallible, Fault, Meter};
use super::run::Run;
use super::value::{Function, Key, Value, View};

impl Run<'_> {
    /// `str(value)`, behind what `out` has.
    pub(super) fn write_str(&self, value: &Value, out: &mut String) -> Fallible<()> {
        match value {
            Value::Undefined(..) => Ok(()),
            Value::Text(text) | Value::Markup(text) => self.push(out, text),
            _ => self.write_repr(value, out),
        }
    }

    pub(super) fn str(&self, value: &Value) -> Fallible<std::sync::Arc<str>> {
        if let Value::Text(text) | Value::Markup(text) = value {
            return Ok(text.clone());
        }
        let mut out = String::new();
        self.write_str(value, &mut out)?;
        Ok(out.into())
    }

    /// `repr(value)`, behind what `out` has.
    pub(super) fn write_repr(&self, value: &Value, out: &mut String) -> Fallible<()> {
        let _level = self.meter.deeper()?;
        match value {
            Value::Undefined(..) => self.push(out, "Undefined"),
            Value::None => self.push(out, "None"),
            Value::Bool(true) => self.push(out, "True"),
            Value::Bool(false) => self.push(out, "False"),
            Value::Int(value) => self.push(out, &value.to_string()),
            Value::Float(value) => self.push(out, &float(*value)),
            Value::Text(text) => write_quoted(text, out, &self.meter),
            Value::Markup(text) => {
                self.push(out, "Markup(")?;
                write_quoted(text, out, &self.meter)?;
                self.push(out, ")")
            }
            Value::List(list) => self.write_items(["[", "]"], &list.items, out),
            Value::Tuple(list) if list.group => {
                self.push(out, "(grouper=")?;
                self.write_repr(&list.items[0], out)?;
                self.push(out, ", list=")?;
                self.write_repr(&list.items[1], out)?;
                self.push(out, ")")
            }
            Value::Tuple(list) if list.items.len() == 1 => self.write_items(["(", ",)"], &list.items, out),
            Value::Tuple(list) => self.write_items(["(", ")"], &list.items, out),
            Value::Dict(dict) => self.write_pairs(dict.map.iter(), out),
            Value::View(view, dict) => {
                let name = match view {
                    View::Keys => "dict_keys([",
                    View::Values => "dict_values([",
                    View::Items => "dict_items([",
                };
                let items = match view {
                    View::Keys => dict.map.keys().map(Key::value).collect(),
                    View::Values => dict.map.values().cloned().collect(),
                    View::Items => dict.pairs()?,
                };
                self.meter.take_elements(items.len())?;
                self.write_items([name, "])"], &items, out)
            }
            Value::Range(start, length, step) => {
                let stop = i128::from(*start) + i128::from(*length) * i128::from(*step);
                match step {
                    1 => self.push(out, &format!("range({start}, {stop})")),
                    _ => self.push(out, &format!("range({start}, {stop}, {step})")),
                }
            }
            Value::Namespace(id) => {
                self.push(out, "<Namespace ")?;
                let namespace = self.namespaces.borrow()[*id].clone();
                self.meter.take_elements(namespace.len())?;
                self.write_pairs(namespace.iter(), out)?;
                self.push(out, ">")
            }
            Value::Macro(id) => {
                let name = self.macros.borrow()[*id].0.name.clone();
                self.push(out, &format!("<Macro '{name}'>"))
            }
            Value::Loop(state) => self
                .push(out, &format!("<LoopContext {}/{}>", state.index.get() + 1, state.items.items.len())),
            Value::Function(Function::Namespace | Function::Dict) => self.push(out, "<class>"),
            // Python prints their addresses.
            Value::Generator(_) | Value::Method(_) | Value::Function(_) => {
                Err(Fault::new(format!("a {} has no text", value.kind().name())))
            }
        }
    }

    /// Appends, and counts.
    pub(super) fn push(&self, out: &mut String, text: &str) -> Fallible<()> {
        self.meter.take(text.len())?;
        out.push_str(text);
        Ok(())
    }

    fn write_items(&self, brackets: [&str; 2], items: &[Value], out: &mut String) -> Fallible<()> {
        self.push(out, brackets[0])?;
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.push(out, ", ")?;
            }
            self.write_repr(item, out)?;
        }
        self.push(out, brackets[1])
    }

    fn write_pairs<'v>(
        &self,
        pairs: impl Iterator<Item = (&'v Key, &'v Value)>,
        out: &mut String,
    ) -> Fallible<()> {
        self.push(out, "{")?;
        for (index, (key, value)) in pairs.enumerate() {
            if index > 0 {
                self.push(out, ", ")?;
            }
            self.write_repr(&key.value(), out)?;
            self.push(out, ": ")?;
            self.write_repr(value, out)?;
        }
        self.push(out, "}")
    }
}

/// A string in quotes, with Python's escapes.
fn write_quoted(text: &str, out: &mut String, meter: &Meter) -> Fallible<()> {
    // At most `\U0010ffff` for four bytes, and `\x00` for one.
    meter.take(text.len().saturating_mul(4))?;
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            // Writing to a string does not fail.
            c if (c as u32) < 0x100 => _ = write!(out, "\\x{:02x}", c as u32),
            c if (c as u32) < 0x10000 => _ = write!(out, "\\u{:04x}", c as u32),
            c => _ = write!(out, "\\U{:08x}", c as u32),
        }
    }
    out.push(quote);
    Ok(())
}

/// As Python's `str.isprintable`. Rust's `Debug` has the same rule, but escapes combining
/// characters at a start.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    struct After<'b>(&'b mut [u8; 8], usize);
    impl Write for After<'_> {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            let end = self.1 + text.len();
            self.0.get_mut(self.1..end).ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
            self.1 = end;
            Ok(())
        }
    }
    let mut text = [0; 8];
    text[0] = b'a';
    let length = 1 + c.encode_utf8(&mut text[1..]).len();
    let Ok(plain) = std::str::from_utf8(&text[..length]) else { return false };
    let mut buffer = [0; 8];
    let mut after = After(&mut buffer, 0);
    // An escaped character is longer than the buffer.
    write!(after, "{plain:?}").is_ok() && after.1 == length + 2
}

/// `repr` of a float.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        exponent @ -4..16 => {
            let plain = format!("{value}");
            if plain.contains('.') || exponent < 0 { plain } else { plain + ".0" }
        }
        exponent => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
    }
}
