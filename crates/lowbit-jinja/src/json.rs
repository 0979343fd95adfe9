//! The `tojson` filter: Python's `json.dumps`, which separates with spaces and escapes no HTML.

use super::meter::{Fallible, Fault};
use super::run::{Passed, Run};
use super::text::float;
use super::value::{Key, Value};

struct Options {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Run<'_> {
    pub(super) fn to_json(&self, value: &Value, passed: Passed) -> Fallible<Value> {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let [ascii, indent, separators, sort] = passed.bind("tojson", names)?;
        let indent = match indent {
            None | Some(Value::None) => None,
            Some(Value::Text(text)) => Some(text.to_string()),
            Some(value) => {
                let width = super::strings::int(&value, "tojson's indent")?.max(0);
                let width = usize::try_from(width).unwrap_or(usize::MAX);
                self.meter.take(width)?;
                Some(" ".repeat(width))
            }
        };
        let (item, key) = match separators {
            None | Some(Value::None) => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
            Some(pair) => match &pair.elements(&self.meter)?.items[..] {
                [Value::Text(item), Value::Text(key)] => (item.to_string(), key.to_string()),
                _ => return Err(Fault::new("tojson: separators should be two strings")),
            },
        };
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let options = Options { indent, item, key, ascii: is_true(ascii), sort: is_true(sort) };
        let mut out = String::new();
        self.write_json(value, &options, 0, &mut out)?;
        Ok(Value::text(out))
    }

    fn write_json(&self, value: &Value, options: &Options, depth: usize, out: &mut String) -> Fallible<()> {
        let _level = self.meter.deeper()?;
        match value {
            Value::None => self.push(out, "null"),
            Value::Bool(true) => self.push(out, "true"),
            Value::Bool(false) => self.push(out, "false"),
            Value::Int(value) => self.push(out, &value.to_string()),
            Value::Float(value) => self.push(out, &json_float(*value)),
            Value::Text(text) | Value::Markup(text) => self.write_json_text(text, options.ascii, out),
            Value::List(list) | Value::Tuple(list) => {
                self.push(out, "[")?;
                for (index, item) in list.items.iter().enumerate() {
                    self.separate(index, options, depth + 1, out)?;
                    self.write_json(item, options, depth + 1, out)?;
                }
                self.close("]", list.items.is_empty(), options, depth, out)
            }
            Value::Dict(dict) => {
                self.push(out, "{")?;
                self.meter.take_elements(dict.map.len())?;
                let mut pairs: Vec<_> =
                    dict.map.iter().map(|(key, value)| (key.value(), (key, value))).collect();
                if options.sort {
                    pairs = self.sort(pairs, false)?;
                }
                for (index, (_, (key, value))) in pairs.into_iter().enumerate() {
                    self.separate(index, options, depth + 1, out)?;
                    self.write_json_text(&key_text(key), options.ascii, out)?;
                    self.push(out, &options.key)?;
                    self.write_json(value, options, depth + 1, out)?;
                }
                self.close("}", dict.map.is_empty(), options, depth, out)
            }
            _ => Err(Fault::new(format!("Object of type {} is not JSON serializable", value.kind().name()))),
        }
    }

    fn separate(&self, index: usize, options: &Options, depth: usize, out: &mut String) -> Fallible<()> {
        if index > 0 {
            self.push(out, &options.item)?;
        }
        self.new_line(options, depth, out)
    }

    fn close(
        &self,
        bracket: &str,
        empty: bool,
        options: &Options,
        depth: usize,
        out: &mut String,
    ) -> Fallible<()> {
        if !empty {
            self.new_line(options, depth, out)?;
        }
        self.push(out, bracket)
    }

    fn new_line(&self, options: &Options, depth: usize, out: &mut String) -> Fallible<()> {
        let Some(indent) = &options.indent else { return Ok(()) };
        self.push(out, "\n")?;
        (0..depth).try_for_each(|_| self.push(out, indent))
    }

    fn write_json_text(&self, text: &str, ascii: bool, out: &mut String) -> Fallible<()> {
        // At most `\u0000` for one byte.
        self.meter.take(text.len().saturating_mul(if ascii { 6 } else { 2 }))?;
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                c if c < ' ' || (ascii && (c > '~')) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
        Ok(())
    }
}

fn json_float(value: f64) -> String {
    match float(value).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        text => text.into(),
    }
}

fn key_text(key: &Key) -> std::sync::Arc<str> {
    match key {
        Key::None => "null".into(),
        Key::Bool(true) => "true".into(),
        Key::Bool(false) => "false".into(),
        Key::Int(value) => value.to_string().into(),
        Key::Float(value) => json_float(*value).into(),
        Key::Text(text) => text.clone(),
    }
}
