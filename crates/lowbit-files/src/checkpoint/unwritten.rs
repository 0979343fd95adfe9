//! A checkpoint as readers will see it once it is written.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use super::{Checkpoint, Description, Layout};
use crate::gguf::Metadata;
use crate::tensor::bytes_of;
use crate::{FileError, Stored, TensorView, Tensors};

/// A tensor that is not written yet.
#[derive(Clone, Debug)]
pub struct UnwrittenTensor {
    /// As the file will spell it.
    pub name: String,
    /// The storage type of its bytes.
    pub stored: Stored,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// Its bytes if a reader looks at them; `None` for zeros.
    pub bytes: Option<Vec<u8>>,
}

/// The description that the tensors will have.
#[derive(Clone, Debug)]
pub enum Unwritten {
    /// `config.json` of a directory in MLX's layout.
    Mlx(Value),
    /// The metadata of a GGUF file.
    Gguf(Metadata),
}

impl Checkpoint {
    /// The checkpoint that [`Self::open`] will find at `path`, with zeros as the tensors' values,
    /// which take up no memory.
    ///
    /// # Errors
    /// [`FileError::Io`] when the system has no addresses for the largest tensor,
    /// [`FileError::DuplicateTensor`]; [`FileError::Quantized`] as [`Self::open`] has it.
    pub fn unwritten(
        path: &Path,
        description: Unwritten,
        tensors: Vec<UnwrittenTensor>,
    ) -> Result<Self, FileError> {
        let size =
            |tensor: &UnwrittenTensor| bytes_of(tensor.stored, &tensor.shape).ok().flatten().unwrap_or(0);
        let largest = tensors.iter().map(size).max().unwrap_or(0);
        let zeros = crate::map::zeros(largest).map_err(FileError::io(path))?;
        let file: Arc<Path> = path.into();
        let view = |tensor: UnwrittenTensor| {
            let bytes = zeros.slice(..size(&tensor));
            let UnwrittenTensor { name, stored, shape, bytes: own } = tensor;
            TensorView {
                name,
                stored,
                shape,
                bytes: own.map_or(bytes, Bytes::from).into(),
                file: file.clone(),
            }
        };
        let tensors = Tensors::new(tensors.into_iter().map(view).collect())?;
        let description = match description {
            Unwritten::Mlx(config) => Description::Directory {
                layout: Layout::Mlx,
                config,
                maker: None,
                multiplied: HashSet::new(),
            },
            Unwritten::Gguf(metadata) => Description::Gguf { metadata, without_effect: vec![] },
        };
        Self::new(path, tensors, description).with_products()
    }
}
