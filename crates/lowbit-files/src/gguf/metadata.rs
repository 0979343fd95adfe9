use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::{FromValue, GgufError, Value};
use crate::FileError;

/// The metadata of one file, in the file's order.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Arc<Path>,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// Without entries; errors will name `file`.
    pub fn new(file: Arc<Path>) -> Self {
        Self { file, entries: Vec::new(), index: HashMap::new() }
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// [`GgufError::DuplicateKey`].
    pub fn insert(&mut self, key: String, value: Value) -> Result<(), GgufError> {
        if self.index.insert(key.clone(), self.entries.len()).is_some() {
            return Err(GgufError::DuplicateKey(key));
        }
        self.entries.push((key, value));
        Ok(())
    }

    /// The value of `key` as a `T`: `metadata.get::<usize>("qwen3.block_count")?`.
    ///
    /// # Errors
    /// [`FileError::Gguf`] when there is no such key or its value is not a `T`; both types are
    /// named.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, FileError> {
        let missing = || FileError::gguf(&self.file)(GgufError::MissingKey(key.into()));
        self.find(key)?.ok_or_else(missing)
    }

    /// The value of `key` as a `T`, or `None` when there is no such key.
    ///
    /// # Errors
    /// [`FileError::Gguf`] when its value is not a `T`.
    pub fn find<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, FileError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        T::convert(key, value).map(Some).map_err(FileError::gguf(&self.file))
    }

    /// The value of `key`, as the file has it.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// All entries, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The file that errors name.
    pub fn file(&self) -> &Path {
        &self.file
    }
}
