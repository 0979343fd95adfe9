//! Callers' values for templates, as JSON.

use std::io::{Error, Result as IoResult, Write};

use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{CompactFormatter, Formatter};

/// Nested arrays and objects: what serde_json reads, too.
const DEPTH: usize = 120;
/// A message, all messages, or all tools.
const BYTES: usize = 256 << 20;

/// The value as JSON. It is written and read again because a writer can be stopped: a value that
/// nests endlessly would overflow the stack first.
pub(super) fn json(value: impl Serialize) -> Result<Json, String> {
    let mut serializer = serde_json::Serializer::with_formatter(Limited(vec![]), Shallow(0));
    value.serialize(&mut serializer).map_err(|error| error.to_string())?;
    serde_json::from_slice(&serializer.into_inner().0).map_err(|error| error.to_string())
}

struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> IoResult<usize> {
        if self.0.len() + bytes.len() > BYTES {
            return Err(Error::other(format!("is longer than {} MB", BYTES >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> IoResult<()> {
        Ok(())
    }
}

/// Compact, and no deeper than [`DEPTH`].
struct Shallow(usize);

impl Shallow {
    fn deeper(&mut self) -> IoResult<()> {
        self.0 += 1;
        match self.0 <= DEPTH {
            true => Ok(()),
            false => Err(Error::other(format!("nests deeper than {DEPTH} arrays and objects"))),
        }
    }
}

impl Formatter for Shallow {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.deeper()?;
        CompactFormatter.begin_array(out)
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.0 -= 1;
        CompactFormatter.end_array(out)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.deeper()?;
        CompactFormatter.begin_object(out)
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> IoResult<()> {
        self.0 -= 1;
        CompactFormatter.end_object(out)
    }
}
