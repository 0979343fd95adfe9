//! The `tojson` filter: Python's `json.dumps`, which separates with spaces and escapes no HTML.

use std::io::{Result as IoResult, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::Formatter;

pub(super) fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<(String, String)> = match options.get::<Option<Vec<String>>>("separators")? {
        None => None,
        Some(pair) => Some(<[String; 2]>::try_from(pair).map(|[item, key]| (item, key)).map_err(|_| {
            Error::new(ErrorKind::InvalidOperation, "tojson: separators should be two strings")
        })?),
    };
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or_else(|| (item.into(), ": ".into()));
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut json = serde_json::to_value(&value).map_err(failed)?;
    if sort {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    let formatter = Python { indent, item, key, ascii, depth: 0, filled: false };
    json.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(failed)?;
    let text =
        String::from_utf8(out).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from(text))
}

struct Python {
    indent: Option<usize>,
    item: String,
    key: String,
    ascii: bool,
    depth: usize,
    /// Whether the innermost array or object has an element yet: an empty one stays on its line.
    filled: bool,
}

impl Python {
    fn line(&self, out: &mut (impl ?Sized + Write)) -> IoResult<()> {
        match self.indent {
            Some(indent) => write!(out, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }

    fn open(&mut self, out: &mut (impl ?Sized + Write), bracket: &[u8]) -> IoResult<()> {
        self.depth += 1;
        self.filled = false;
        out.write_all(bracket)
    }

    fn element(&mut self, out: &mut (impl ?Sized + Write), first: bool) -> IoResult<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }

    fn close(&mut self, out: &mut (impl ?Sized + Write), bracket: &[u8]) -> IoResult<()> {
        self.depth -= 1;
        if self.filled {
            self.line(out)?;
        }
        self.filled = true;
        out.write_all(bracket)
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.open(out, b"[")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> IoResult<()> {
        self.element(out, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> IoResult<()> {
        self.filled = true;
        Ok(())
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.close(out, b"]")
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.open(out, b"{")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> IoResult<()> {
        self.element(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        out.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> IoResult<()> {
        self.filled = true;
        Ok(())
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.close(out, b"}")
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, out: &mut W, text: &str) -> IoResult<()> {
        if !self.ascii {
            return out.write_all(text.as_bytes());
        }
        for unit in text.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => out.write_all(&[byte])?,
                _ => write!(out, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }
}
