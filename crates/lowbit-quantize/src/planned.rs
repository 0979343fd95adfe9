//! New checkpoints of any layout, before they are written.

use crate::{QuantizeError, Rule, Summary};
use lowbit_files::staging::Staged;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The parts of a recipe that any plan takes.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub rules: Vec<Rule>,
    pub replace: bool,
}

/// Learned components of a module's weight, if it has some.
pub(crate) type Learned<'l> = &'l dyn Fn(&str) -> Option<Vec<Vec<u8>>>;

/// Called with the number of tensors written, and of all.
pub(crate) type Written<'p> = &'p mut dyn FnMut(usize, usize) -> ControlFlow<()>;

/// A new checkpoint, checked and not yet written.
pub(crate) trait Planned {
    /// The number of its tensors.
    fn tensors(&self) -> usize;

    /// The summary without rounding errors.
    fn summary(&self) -> Result<Summary, QuantizeError>;

    /// Checks that the output may be written.
    fn check_place(&self, output: &Path) -> Result<(), QuantizeError>;

    /// The place where it is written before it gets its name.
    fn stage(&self, output: &Path) -> Result<Staged, QuantizeError>;

    /// The values of a module's weight, before they are rounded.
    fn values(&self, module: &str) -> Result<Vec<f32>, QuantizeError>;

    /// Writes the rounded checkpoint, from which the student is loaded, into `staged`.
    fn write_student(&self, staged: &mut Staged, progress: Written<'_>) -> Result<Student, QuantizeError>;

    /// Writes all of it: each weight rounded to nearest, unless `learned` has its components.
    fn write(
        &self,
        staged: &mut Staged,
        learned: Learned<'_>,
        progress: Written<'_>,
    ) -> Result<Summary, QuantizeError>;
}

/// The rounded checkpoint while its weights learn.
pub(crate) enum Student {
    /// The output's file, which is written again.
    File(PathBuf),
    /// A folder of its own in the output's directory.
    Folder(PathBuf),
}

impl Student {
    /// The checkpoint's path.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(path) | Self::Folder(path) => path,
        }
    }

    /// Removes it, unless the output is written in its place.
    ///
    /// # Errors
    /// [`QuantizeError::Io`].
    pub fn remove(self) -> Result<(), QuantizeError> {
        match self {
            Self::File(_) => Ok(()),
            Self::Folder(path) => {
                std::fs::remove_dir_all(&path).map_err(|error| QuantizeError::Io { path, error })
            }
        }
    }
}
