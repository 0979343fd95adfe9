//! The names of a checkpoint's files.

use std::path::{Path, PathBuf};

use crate::FileError;

/// A directory's configuration.
pub const CONFIG: &str = "config.json";
/// A directory's tensors in one file.
pub const SINGLE: &str = "model.safetensors";
/// The list of a directory's files of tensors.
pub const INDEX: &str = "model.safetensors.index.json";

/// The file name of one part of several: `prefix-00002-of-00004.gguf`.
#[derive(Debug, PartialEq)]
pub struct Part<'a> {
    /// The name up to the number, without the hyphen.
    pub prefix: &'a str,
    /// From 1.
    pub number: u64,
    /// The number of parts.
    pub count: u64,
    /// With its dot.
    extension: &'a str,
}

impl<'a> Part<'a> {
    /// `None` when `name` is not of this form.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (stem, extension) = name.split_at(name.rfind('.')?);
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = stem.rsplit_once('-')?;
        let digits = |text: &str| match text.len() {
            5 if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
            _ => None,
        };
        let (number, count) = (digits(number)?, digits(count)?);
        (1..=count).contains(&number).then_some(Self { prefix, number, count, extension })
    }

    fn name(&self, number: u64) -> String {
        let Self { prefix, count, extension, .. } = self;
        format!("{prefix}-{number:05}-of-{count:05}{extension}")
    }

    /// The names of all parts.
    pub fn names(&self) -> impl Iterator<Item = String> {
        (1..=self.count).map(|number| self.name(number))
    }

    /// The paths of all parts.
    ///
    /// # Errors
    /// [`FileError::MissingPart`].
    pub(crate) fn paths(&self, directory: &Path) -> Result<Vec<PathBuf>, FileError> {
        let path = |number| directory.join(self.name(number));
        let existing = |number| match path(number) {
            part if part.exists() => Ok(part),
            part => Err(FileError::MissingPart { first: path(1), part, number, count: self.count }),
        };
        (1..=self.count).map(existing).collect()
    }
}

/// The names in `directory` that end in `extension` (with its dot), sorted.
pub(crate) fn file_names(directory: &Path, extension: &str) -> Result<Vec<String>, FileError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(FileError::io(directory))? {
        let name = entry.map_err(FileError::io(directory))?.file_name();
        // A checkpoint's files have UTF-8 names.
        if let Some(name) = name.to_str().filter(|name| name.ends_with(extension)) {
            names.push(name.to_string());
        }
    }
    names.sort_unstable();
    Ok(names)
}
