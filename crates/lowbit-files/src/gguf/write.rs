use std::io::{self, Write};

use super::value::with_array;
use super::{Array, DEFAULT_ALIGNMENT, GgufError, MAGIC, MAX_RANK, Value, types};
use crate::Stored;
use crate::tensor::bytes_of;

const VERSION: u32 = 3;

/// Writes a GGUF file: all metadata and descriptions first, then the tensors' bytes one after
/// another, so that none needs to be in memory for longer than it takes to write it. The bytes are
/// those that the `gguf` package on PyPI writes for the same content (0.19, `GGUFWriter`).
///
/// ```
/// # use lowbit_files::gguf::{Value, Writer};
/// # use lowbit_files::Stored;
/// # use lowbit_formats::DType;
/// let mut writer = Writer::new();
/// writer.entry("general.architecture", Value::String("llama".into()))?;
/// writer.tensor("output_norm.weight", Stored::Plain(DType::F32), &[2])?;
/// let mut body = writer.begin(Vec::new())?;
/// body.tensor(&[0; 8])?;
/// let file = body.finish()?;
/// # assert_eq!(file.len() % 32, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Writer {
    entries: Vec<(String, Value)>,
    tensors: Vec<Planned>,
    alignment: Option<u32>,
}

#[derive(Debug)]
struct Planned {
    name: String,
    ggml_type: u32,
    shape: Vec<usize>,
    bytes: usize,
}

impl Writer {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a metadata entry. `general.alignment` sets the alignment.
    ///
    /// # Errors
    /// [`GgufError::DuplicateKey`]; [`GgufError::Alignment`] or [`GgufError::Type`] for an
    /// alignment that is not a power of two or not a u32.
    pub fn entry(&mut self, key: &str, value: Value) -> Result<(), GgufError> {
        if self.entries.iter().any(|(known, _)| known == key) {
            return Err(GgufError::DuplicateKey(key.into()));
        }
        if key == super::ALIGNMENT_KEY {
            self.alignment = Some(super::alignment(&value)?);
        }
        self.entries.push((key.into(), value));
        Ok(())
    }

    /// Appends the description of a tensor of `shape`, outermost first, and returns its number of
    /// bytes.
    ///
    /// # Errors
    /// [`GgufError::DuplicateTensor`], [`GgufError::Rank`], [`GgufError::Overflow`],
    /// [`GgufError::Blocks`], and [`GgufError::NoType`] when GGUF has no type for what is stored.
    pub fn tensor(&mut self, name: &str, stored: Stored, shape: &[usize]) -> Result<usize, GgufError> {
        let tensor = name.to_string();
        if self.tensors.iter().any(|planned| planned.name == name) {
            return Err(GgufError::DuplicateTensor(tensor));
        }
        if shape.len() > MAX_RANK as usize {
            return Err(GgufError::Rank { tensor, rank: shape.len() as u32, limit: MAX_RANK });
        }
        let Some(ggml_type) = types::number(stored) else {
            return Err(GgufError::NoType { tensor, stored: stored.to_string() });
        };
        let bytes = bytes_of(stored, shape).map_err(|source| GgufError::Blocks { tensor, source })?;
        let Some(bytes) = bytes else {
            let dims = shape.iter().rev().map(|&dim| dim as u64).collect();
            return Err(GgufError::Overflow { tensor: name.into(), stored: stored.to_string(), dims });
        };
        self.tensors.push(Planned { name: name.into(), ggml_type, shape: shape.into(), bytes });
        Ok(bytes)
    }

    /// Writes everything but the tensors' bytes to `out`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn begin<W: Write>(self, mut out: W) -> io::Result<Body<W>> {
        let alignment = self.alignment.unwrap_or(DEFAULT_ALIGNMENT) as usize;
        let mut head = Vec::new();
        head.extend(MAGIC);
        head.extend(VERSION.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            string(&mut head, key);
            head.extend((value.value_type() as u32).to_le_bytes());
            put(&mut head, value);
        }
        let mut offset = 0u64;
        for planned in &self.tensors {
            string(&mut head, &planned.name);
            head.extend((planned.shape.len() as u32).to_le_bytes());
            head.extend(planned.shape.iter().rev().flat_map(|&dim| (dim as u64).to_le_bytes()));
            head.extend(planned.ggml_type.to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += planned.bytes.next_multiple_of(alignment) as u64;
        }
        head.resize(head.len().next_multiple_of(alignment), 0);
        out.write_all(&head)?;
        Ok(Body { out, alignment, tensors: self.tensors.into_iter() })
    }
}

/// The second half of writing: the tensors' bytes, in the order of their descriptions.
#[derive(Debug)]
pub struct Body<W> {
    out: W,
    alignment: usize,
    tensors: std::vec::IntoIter<Planned>,
}

impl<W: Write> Body<W> {
    /// Writes the bytes of the next tensor.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when there is no next tensor or it has another number of
    /// bytes; the writer's errors.
    pub fn tensor(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(planned) = self.tensors.next() else {
            return Err(invalid(format!("{} bytes after the last tensor", bytes.len())));
        };
        let Planned { name, bytes: want, .. } = planned;
        if bytes.len() != want {
            return Err(invalid(format!("tensor {name} takes {want} bytes, but {} were given", bytes.len())));
        }
        self.out.write_all(bytes)?;
        self.out.write_all(&vec![0; want.next_multiple_of(self.alignment) - want])
    }

    /// Flushes.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when tensors are missing; the writer's errors.
    pub fn finish(mut self) -> io::Result<W> {
        if let Some(planned) = self.tensors.next() {
            return Err(invalid(format!("the bytes of tensor {} are missing", planned.name)));
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value that a file holds in its little-endian bytes.
trait Put {
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! put_number {
    ($($type:ty)*) => {$(
        impl Put for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}
put_number! { u8 i8 u16 i16 u32 i32 f32 u64 i64 f64 }

impl Put for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push((*self).into());
    }
}

impl Put for String {
    fn put(&self, out: &mut Vec<u8>) {
        string(out, self);
    }
}

impl Put for Array {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend((self.element_type() as u32).to_le_bytes());
        out.extend((self.len() as u64).to_le_bytes());
        with_array!(self, values => values.iter().for_each(|value| value.put(out)));
    }
}

fn put(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => v.put(out),
        Value::I8(v) => v.put(out),
        Value::U16(v) => v.put(out),
        Value::I16(v) => v.put(out),
        Value::U32(v) => v.put(out),
        Value::I32(v) => v.put(out),
        Value::F32(v) => v.put(out),
        Value::Bool(v) => v.put(out),
        Value::String(v) => v.put(out),
        Value::Array(v) => v.put(out),
        Value::U64(v) => v.put(out),
        Value::I64(v) => v.put(out),
        Value::F64(v) => v.put(out),
    }
}
