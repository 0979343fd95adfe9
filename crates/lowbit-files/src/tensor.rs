use std::path::{Path, PathBuf};
use std::sync::Arc;

use lowbit_formats::{Component, DType, Format, FormatError};

use crate::{Contents, FileError};

/// The type of a tensor's bytes according to its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// One little-endian element per value: everything in safetensors, and GGUF's floats and
    /// integers.
    Plain(DType),
    /// GGML blocks along the innermost dimension. [`Format::Fp4`], which is NVFP4 times a float per
    /// matrix, has its components one after the other.
    Blocks(Format),
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain(dtype) => dtype.fmt(f),
            Self::Blocks(format) => format.fmt(f),
        }
    }
}

/// A tensor in a mapped file. It has exactly the number of bytes of [`Self::stored`] and
/// [`Self::shape`].
#[derive(Clone)]
pub struct TensorView {
    /// As the file spells it.
    pub name: String,
    /// The type of the bytes.
    pub stored: Stored,
    /// Outermost first, as safetensors has it (GGUF's dimensions, reversed). Empty for a scalar.
    pub shape: Vec<usize>,
    /// The tensor's bytes. In a map, safetensors promises no alignment beyond a byte's, GGUF
    /// promises `general.alignment`.
    pub bytes: Contents,
    /// The file that it is in, for errors.
    pub file: Arc<Path>,
}

impl TensorView {
    /// Values in the tensor. (The product cannot overflow: it was checked when the file was read.)
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The components of a weight in `format`, which [`Self::stored`] says.
    ///
    /// # Errors
    /// Those of [`Format::components`].
    pub fn components(&self, format: Format) -> Result<Vec<Contents>, FormatError> {
        let (&k, rows) = self.shape.split_last().unwrap_or((&1, &[]));
        let rows: usize = rows.iter().product();
        let mut start = 0;
        let part = |component: Component| {
            let range = start..start + rows * component.row_bytes();
            start = range.end;
            self.bytes.slice(range)
        };
        Ok(format.components(k)?.into_iter().map(part).collect())
    }

    /// Gives the memory of the bytes back to the system, which reads them from the file again when
    /// they are needed.
    pub fn release(&self) {
        self.bytes.release();
    }
}

impl std::fmt::Debug for TensorView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, stored, shape, bytes, file } = self;
        write!(f, "{name} {stored} {shape:?} ({} bytes of {})", bytes.len(), file.display())
    }
}

/// The tensors of a whole checkpoint, sorted by name.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    sorted: Vec<TensorView>,
}

impl Tensors {
    /// Sorts `views`.
    ///
    /// # Errors
    /// [`FileError::DuplicateTensor`].
    pub fn new(mut views: Vec<TensorView>) -> Result<Self, FileError> {
        views.sort_by(|a, b| a.name.cmp(&b.name));
        for pair in views.windows(2) {
            if pair[0].name == pair[1].name {
                let [first, second] = [0, 1].map(|i| PathBuf::from(&*pair[i].file));
                return Err(FileError::DuplicateTensor { tensor: pair[0].name.clone(), first, second });
            }
        }
        Ok(Self { sorted: views })
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&TensorView> {
        let index = self.sorted.binary_search_by(|view| view.name.as_str().cmp(name)).ok()?;
        Some(&self.sorted[index])
    }

    /// All of them, by name.
    pub fn iter(&self) -> std::slice::Iter<'_, TensorView> {
        self.sorted.iter()
    }

    /// Their names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sorted.iter().map(|view| view.name.as_str())
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// True if there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }
}

impl<'a> IntoIterator for &'a Tensors {
    type Item = &'a TensorView;
    type IntoIter = std::slice::Iter<'a, TensorView>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The number of elements of `shape`, and the bytes that they take at `element_bytes` each. A size
/// of 0 does not make the others fit: whoever multiplies some of a tensor's sizes cannot overflow.
pub(crate) fn elements_and_bytes(shape: &[usize], element_bytes: usize) -> Option<(usize, usize)> {
    shape.iter().try_fold(element_bytes.max(1), |product, &dim| product.checked_mul(dim.max(1)))?;
    let elements: usize = shape.iter().product();
    Some((elements, elements * element_bytes))
}

/// The bytes that a tensor takes; `None` when they overflow.
pub(crate) fn bytes_of(stored: Stored, shape: &[usize]) -> Result<Option<usize>, FormatError> {
    let format = match stored {
        Stored::Plain(dtype) => return Ok(elements_and_bytes(shape, dtype.size()).map(|(_, bytes)| bytes)),
        Stored::Blocks(format) => format,
    };
    let (&k, rows) = shape.split_last().unwrap_or((&1, &[]));
    // No block is larger than its values in f64, so a row whose length passes here has an
    // addressable size.
    if elements_and_bytes(shape, 8).is_none() {
        return Ok(None);
    }
    let row: usize = format.components(k)?.iter().map(|component| component.row_bytes()).sum();
    Ok(elements_and_bytes(rows, row).map(|(_, bytes)| bytes))
}
