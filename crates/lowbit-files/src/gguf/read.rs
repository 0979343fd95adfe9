use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::{
    ALIGNMENT_KEY, Array, DEFAULT_ALIGNMENT, GgufError, MAGIC, MAX_RANK, Metadata, Value, ValueType,
    alignment, types,
};
use crate::map::map;
use crate::tensor::bytes_of;
use crate::{FileError, Stored, TensorView};

/// The most metadata entries: a hundred times as many as any published model has.
const MAX_ENTRIES: usize = 1 << 16;

/// A parsed file.
#[derive(Debug)]
pub struct Gguf {
    /// The typed key-value pairs.
    pub metadata: Metadata,
    /// The tensors, in the order of their descriptions.
    pub tensors: Vec<TensorView>,
}

/// Maps and parses the file at `path`.
///
/// # Errors
/// [`FileError::Io`] or [`FileError::Gguf`].
pub fn read(path: &Path) -> Result<Gguf, FileError> {
    parse(&map(path)?, &path.into()).map_err(FileError::gguf(path))
}

/// Parses `bytes`, the content of `file` in errors and views.
///
/// # Errors
/// [`GgufError`] for data that is truncated, of an unknown type, named twice, misaligned, past the
/// end or overlapping.
pub fn parse(bytes: &Bytes, file: &Arc<Path>) -> Result<Gguf, GgufError> {
    let mut reader = Reader { bytes, offset: 0 };
    let (tensor_count, entry_count) = reader.header()?;
    let metadata = reader.metadata(entry_count, file)?;
    let alignment = metadata.value(ALIGNMENT_KEY).map_or(Ok(DEFAULT_ALIGNMENT), alignment)?;
    let descriptions = reader.descriptions(tensor_count)?;
    let start = reader
        .offset
        .checked_next_multiple_of(alignment as usize)
        .map_or(bytes.len(), |at| at.min(bytes.len()));
    let data = bytes.slice(start..);
    let tensors = descriptions
        .into_iter()
        .map(|description| description.view(&data, alignment, file))
        .collect::<Result<Vec<_>, _>>()?;
    check_overlaps(&tensors, &data)?;
    Ok(Gguf { metadata, tensors })
}

fn check_overlaps(tensors: &[TensorView], data: &Bytes) -> Result<(), GgufError> {
    let offset = |view: &TensorView| view.bytes.get().as_ptr() as usize - data.as_ptr() as usize;
    let mut order: Vec<_> = tensors.iter().filter(|view| !view.bytes.is_empty()).collect();
    order.sort_by_key(|view| offset(view));
    for pair in order.windows(2) {
        let end = offset(pair[0]) + pair[0].bytes.len();
        if offset(pair[1]) < end {
            return Err(GgufError::Overlap {
                tensor: pair[1].name.clone(),
                offset: offset(pair[1]),
                before: pair[0].name.clone(),
                end,
            });
        }
    }
    Ok(())
}

/// A tensor's description, as far as it can be trusted without the data.
struct Description {
    name: String,
    stored: Stored,
    dims: Vec<u64>,
    offset: u64,
}

impl Description {
    fn view(self, data: &Bytes, alignment: u32, file: &Arc<Path>) -> Result<TensorView, GgufError> {
        let Self { name: tensor, stored, dims, offset } = self;
        if !offset.is_multiple_of(u64::from(alignment)) {
            return Err(GgufError::Misaligned { tensor, offset, alignment });
        }
        let shape: Option<Vec<usize>> = dims.iter().rev().map(|&dim| dim.try_into().ok()).collect();
        let overflow = || GgufError::Overflow { tensor: tensor.clone(), stored: stored.to_string(), dims };
        let Some(shape) = shape else { return Err(overflow()) };
        let want = match bytes_of(stored, &shape) {
            Ok(Some(want)) => want,
            Ok(None) => return Err(overflow()),
            Err(source) => return Err(GgufError::Blocks { tensor, source }),
        };
        let range = usize::try_from(offset).ok().and_then(|from| Some(from..from.checked_add(want)?));
        match range.filter(|range| range.end <= data.len()) {
            Some(range) => Ok(TensorView {
                name: tensor,
                stored,
                shape,
                bytes: data.slice(range).into(),
                file: file.clone(),
            }),
            None => {
                let stored = stored.to_string();
                Err(GgufError::PastEnd { tensor, stored, shape, want, offset, data: data.len() })
            }
        }
    }
}

/// A cursor over the file. Nothing is allocated before it is known that the file is long enough for
/// it.
struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.offset
    }

    fn take(&mut self, length: u64, what: &dyn Fn() -> String) -> Result<&'a [u8], GgufError> {
        match usize::try_from(length) {
            Ok(length) if length <= self.left() => {
                let taken = &self.bytes[self.offset..self.offset + length];
                self.offset += length;
                Ok(taken)
            }
            _ => Err(GgufError::Truncated {
                what: what(),
                offset: self.offset,
                want: length,
                left: self.left(),
            }),
        }
    }

    fn array<const N: usize>(&mut self, what: &dyn Fn() -> String) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &dyn Fn() -> String) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &dyn Fn() -> String) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &dyn Fn() -> String) -> Result<String, GgufError> {
        let length = self.u64(what)?;
        let offset = self.offset;
        let bytes = self.take(length, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_string()),
            Err(_) => Err(GgufError::Utf8 { what: what(), offset }),
        }
    }

    /// Checks a count against the bytes that are left, at `each` bytes at least.
    fn count(&self, count: u64, each: usize, what: &dyn Fn() -> String) -> Result<usize, GgufError> {
        match usize::try_from(count) {
            Ok(n) if n <= self.left() / each => Ok(n),
            _ => Err(GgufError::Count { what: what(), count, each, left: self.left() }),
        }
    }

    /// The numbers of tensors and of metadata entries.
    fn header(&mut self) -> Result<(u64, u64), GgufError> {
        if !self.bytes.starts_with(&MAGIC) {
            return Err(GgufError::Magic(self.bytes[..self.bytes.len().min(4)].to_vec()));
        }
        self.offset = MAGIC.len();
        let version = self.u32(&|| "the version".into())?;
        match version {
            2 | 3 => {}
            _ if version.trailing_zeros() >= 16 && version != 0 => return Err(GgufError::BigEndian(version)),
            _ => return Err(GgufError::Version(version)),
        }
        let tensors = self.u64(&|| "the number of tensors".into())?;
        let entries = self.u64(&|| "the number of metadata entries".into())?;
        Ok((tensors, entries))
    }

    fn metadata(&mut self, count: u64, file: &Arc<Path>) -> Result<Metadata, GgufError> {
        // A key's length, a type, and a value of one byte.
        let count = self.count(count, 8 + 4 + 1, &|| "metadata entries".into())?;
        if count > MAX_ENTRIES {
            return Err(GgufError::Entries { count, limit: MAX_ENTRIES });
        }
        let mut metadata = Metadata::new(file.clone());
        for number in 0..count {
            let key = self.string(&|| format!("metadata key {number}"))?;
            let value = self.value(&key)?;
            metadata.insert(key, value)?;
        }
        Ok(metadata)
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufError> {
        let number = self.u32(&|| format!("the type of {key}"))?;
        ValueType::from_number(number).ok_or_else(|| GgufError::ValueType { key: key.into(), got: number })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let what = &|| key.to_string();
        Ok(match self.value_type(key)? {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.array(what)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.array(what)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array(what)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array(what)?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(self.array(what)?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array(what)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array(what)?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(self.array(what)?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array(what)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array(what)?)),
            ValueType::Bool => Value::Bool(boolean(self.array(what)?, key)?),
            ValueType::String => Value::String(self.string(what)?),
            ValueType::Array => Value::Array(self.values(key)?),
        })
    }

    fn values(&mut self, key: &str) -> Result<Array, GgufError> {
        let element = self.value_type(key)?;
        let count = self.u64(&|| format!("the length of {key}"))?;
        let n = self.count(count, element.min_bytes(), &|| format!("elements of {key}"))?;
        Ok(match element {
            ValueType::U8 => Array::U8(self.numbers(n, key, u8::from_le_bytes)?),
            ValueType::I8 => Array::I8(self.numbers(n, key, i8::from_le_bytes)?),
            ValueType::U16 => Array::U16(self.numbers(n, key, u16::from_le_bytes)?),
            ValueType::I16 => Array::I16(self.numbers(n, key, i16::from_le_bytes)?),
            ValueType::U32 => Array::U32(self.numbers(n, key, u32::from_le_bytes)?),
            ValueType::I32 => Array::I32(self.numbers(n, key, i32::from_le_bytes)?),
            ValueType::F32 => Array::F32(self.numbers(n, key, f32::from_le_bytes)?),
            ValueType::U64 => Array::U64(self.numbers(n, key, u64::from_le_bytes)?),
            ValueType::I64 => Array::I64(self.numbers(n, key, i64::from_le_bytes)?),
            ValueType::F64 => Array::F64(self.numbers(n, key, f64::from_le_bytes)?),
            ValueType::Bool => {
                let bytes = self.numbers(n, key, |byte: [u8; 1]| byte)?;
                Array::Bool(bytes.into_iter().map(|byte| boolean(byte, key)).collect::<Result<_, _>>()?)
            }
            ValueType::String => {
                // `count` has checked that each takes 8 bytes at least.
                let mut strings = Vec::with_capacity(n);
                for i in 0..n {
                    strings.push(self.string(&|| format!("element {i} of {key}"))?);
                }
                Array::String(strings)
            }
            ValueType::Array => return Err(GgufError::NestedArray { key: key.into() }),
        })
    }

    fn numbers<const N: usize, T>(
        &mut self,
        n: usize,
        key: &str,
        from_le_bytes: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        // `count` has checked that n * N bytes are left, so the product cannot overflow.
        let bytes = self.take((n * N) as u64, &|| key.to_string())?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|&chunk| from_le_bytes(chunk)).collect())
    }

    fn descriptions(&mut self, count: u64) -> Result<Vec<Description>, GgufError> {
        // A name's length, a rank, a type and an offset.
        let count = self.count(count, 8 + 4 + 4 + 8, &|| "tensors".into())?;
        let mut descriptions = Vec::with_capacity(count);
        let mut seen = HashSet::new();
        for number in 0..count {
            let description = self.description(number)?;
            if !seen.insert(description.name.clone()) {
                return Err(GgufError::DuplicateTensor(description.name));
            }
            descriptions.push(description);
        }
        Ok(descriptions)
    }

    fn description(&mut self, number: usize) -> Result<Description, GgufError> {
        let name = self.string(&|| format!("the name of tensor {number}"))?;
        let what = &|| format!("the description of tensor {name}");
        let rank = self.u32(what)?;
        if rank > MAX_RANK {
            return Err(GgufError::Rank { tensor: name, rank, limit: MAX_RANK });
        }
        let dims = (0..rank).map(|_| self.u64(what)).collect::<Result<_, _>>()?;
        let ggml_type = self.u32(what)?;
        let offset = self.u64(what)?;
        match types::stored(ggml_type) {
            Ok(stored) => Ok(Description { name, stored, dims, offset }),
            Err(got) => Err(GgufError::TensorType { tensor: name, got, supported: types::supported() }),
        }
    }
}

fn boolean([byte]: [u8; 1], key: &str) -> Result<bool, GgufError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        got => Err(GgufError::Bool { key: key.into(), got }),
    }
}
