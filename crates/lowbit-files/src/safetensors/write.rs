use std::fs::File;
use std::io::{BufWriter, Error as IoError, ErrorKind, Write};
use std::path::{Path, PathBuf};

use lowbit_formats::DType;
use serde_json::{Map, Value, json};

use super::{METADATA, SafetensorsError, dtype_name};
use crate::FileError;
use crate::names::{INDEX, SINGLE};
use crate::tensor::elements_and_bytes;

/// Writes the tensors of a checkpoint: `model.safetensors`, or shards and an index where one file
/// would be too large. All tensors are planned first, then their bytes are written one after
/// another, so that none needs to be in memory for longer than it takes to write it.
///
/// The bytes of a file are those that the `safetensors` package writes for the same tensors in the
/// same order (0.8); shards are cut as mlx-lm cuts them (0.32, `make_shards`).
#[derive(Debug, Default)]
pub struct Writer {
    metadata: Vec<(String, String)>,
    tensors: Vec<Planned>,
}

#[derive(Clone, Debug)]
struct Planned {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: usize,
}

impl Writer {
    /// Without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry to each file's `__metadata__`: `format` is `mlx` or `pt`.
    pub fn metadata(&mut self, key: &str, value: &str) {
        self.metadata.push((key.into(), value.into()));
    }

    /// Plans the next tensor, and returns its number of bytes.
    ///
    /// # Errors
    /// [`SafetensorsError::Name`] for a name that is taken, [`SafetensorsError::Overflow`].
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<usize, SafetensorsError> {
        if name == METADATA || self.tensors.iter().any(|planned| planned.name == name) {
            return Err(SafetensorsError::Name { tensor: name.into() });
        }
        let Some((_, bytes)) = elements_and_bytes(shape, dtype.size()) else {
            return Err(SafetensorsError::Overflow { tensor: name.into(), dtype, shape: shape.into() });
        };
        self.tensors.push(Planned { name: name.into(), dtype, shape: shape.into(), bytes });
        Ok(bytes)
    }

    /// Starts writing to `directory`, with at most `max_shard_bytes` of tensors per file (a larger
    /// tensor gets its own).
    ///
    /// # Errors
    /// [`FileError::Io`].
    pub fn begin(self, directory: &Path, max_shard_bytes: u64) -> Result<Body, FileError> {
        let shards = shards(self.tensors, max_shard_bytes);
        let single = shards.len() == 1;
        if !single {
            let index = directory.join(INDEX);
            std::fs::write(&index, index_json(&shards)).map_err(FileError::io(&index))?;
        }
        let count = shards.len();
        let name = |i| if single { SINGLE.into() } else { shard_name(i, count) };
        let files: Vec<_> = (0..).map(|i| directory.join(name(i))).zip(shards).collect();
        let mut body = Body { metadata: self.metadata, rest: files.into_iter(), current: None };
        body.next_file()?;
        Ok(body)
    }
}

/// Cuts the tensors, in their order, into runs of at most `max` bytes.
fn shards(tensors: Vec<Planned>, max: u64) -> Vec<Vec<Planned>> {
    let mut shards = vec![Vec::new()];
    let mut size = 0u64;
    for planned in tensors {
        let bytes = planned.bytes as u64;
        if size.saturating_add(bytes) > max && size > 0 && bytes > 0 {
            shards.push(Vec::new());
            size = 0;
        }
        size = size.saturating_add(bytes);
        shards.last_mut().expect("there is one").push(planned);
    }
    shards
}

fn shard_name(index: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", index + 1)
}

fn index_json(shards: &[Vec<Planned>]) -> String {
    let numbered =
        shards.iter().enumerate().flat_map(|(i, shard)| shard.iter().map(move |planned| (i, planned)));
    let mut map: Vec<_> = numbered.map(|(i, planned)| (&planned.name, shard_name(i, shards.len()))).collect();
    map.sort();
    let map: Map<String, Value> = map.into_iter().map(|(name, shard)| (name.clone(), shard.into())).collect();
    let total: u64 = shards.iter().flatten().map(|planned| planned.bytes as u64).sum();
    format!("{:#}\n", json!({ "metadata": { "total_size": total }, "weight_map": map }))
}

/// The second half of writing: the tensors' bytes, in the order in which they were planned.
#[derive(Debug)]
pub struct Body {
    metadata: Vec<(String, String)>,
    rest: std::vec::IntoIter<(PathBuf, Vec<Planned>)>,
    current: Option<Shard>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    out: BufWriter<File>,
    rest: std::vec::IntoIter<Planned>,
}

impl Body {
    /// Finishes the current file, and starts the next one if there is one.
    fn next_file(&mut self) -> Result<(), FileError> {
        if let Some(mut done) = self.current.take() {
            done.out.flush().map_err(FileError::io(&done.path))?;
        }
        let Some((path, tensors)) = self.rest.next() else { return Ok(()) };
        let file = File::create(&path).map_err(FileError::io(&path))?;
        let mut out = BufWriter::new(file);
        out.write_all(&header(&self.metadata, &tensors)).map_err(FileError::io(&path))?;
        self.current = Some(Shard { path, out, rest: tensors.into_iter() });
        Ok(())
    }

    /// Writes the bytes of the next tensor.
    ///
    /// # Errors
    /// [`FileError::Io`], also when there is no next tensor or it takes another number of bytes.
    pub fn tensor(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        while self.current.as_ref().is_some_and(|shard| shard.rest.len() == 0) {
            self.next_file()?;
        }
        let Some(Shard { path, out, rest }) = &mut self.current else {
            let problem = format!("{} bytes after the last tensor", bytes.len());
            return Err(FileError::io(Path::new(SINGLE))(IoError::new(ErrorKind::InvalidInput, problem)));
        };
        let planned = rest.next().expect("a shard with tensors left");
        if bytes.len() != planned.bytes {
            let Planned { name, bytes: want, .. } = planned;
            let problem = format!("tensor {name} takes {want} bytes, but {} were given", bytes.len());
            return Err(FileError::io(path)(IoError::new(ErrorKind::InvalidInput, problem)));
        }
        out.write_all(bytes).map_err(FileError::io(path))
    }

    /// Finishes the last file.
    ///
    /// # Errors
    /// [`FileError::Io`], also when tensors are left.
    pub fn finish(mut self) -> Result<(), FileError> {
        while let Some(shard) = &mut self.current {
            if let Some(planned) = shard.rest.next() {
                let problem = format!("the bytes of tensor {} are missing", planned.name);
                return Err(FileError::io(&shard.path)(IoError::new(ErrorKind::InvalidInput, problem)));
            }
            self.next_file()?;
        }
        Ok(())
    }
}

/// The length and the JSON, padded with spaces so that the tensors start at a multiple of 8.
fn header(metadata: &[(String, String)], tensors: &[Planned]) -> Vec<u8> {
    let mut header = Map::new();
    if !metadata.is_empty() {
        let metadata = metadata.iter().map(|(key, value)| (key.clone(), value.as_str().into()));
        header.insert(METADATA.into(), Value::Object(metadata.collect()));
    }
    let mut offset = 0;
    for Planned { name, dtype, shape, bytes } in tensors {
        let end = offset + bytes;
        let entry = json!({ "dtype": dtype_name(*dtype), "shape": shape, "data_offsets": [offset, end] });
        header.insert(name.clone(), entry);
        offset = end;
    }
    let mut json = Value::Object(header).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}
