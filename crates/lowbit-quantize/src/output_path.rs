//! Checks output paths, and gives written outputs their names.

use crate::QuantizeError;
use lowbit_files::Checkpoint;
use lowbit_files::staging::{Content, Existing, Staged, resolved};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;

/// Checks that `output` is neither the checkpoint nor inside it nor, if it may be replaced, a
/// folder that contains it.
///
/// # Errors
/// [`QuantizeError::Output`].
fn check(checkpoint: &Path, output: &Path, replace: bool) -> Result<(), QuantizeError> {
    let (Some(from), Some(to)) = (checkpoint.canonicalize().ok(), resolved(output)) else { return Ok(()) };
    let relation = match () {
        () if from == to => "is",
        () if to.starts_with(&from) => "lies in",
        () if replace && from.starts_with(&to) => "holds",
        () => return Ok(()),
    };
    Err(QuantizeError::Output { output: output.into(), relation, checkpoint: checkpoint.into() })
}

/// [`check`] for `checkpoint` and the files of its tensors.
///
/// # Errors
/// [`QuantizeError::Output`].
pub fn check_all(checkpoint: &Checkpoint, output: &Path, replace: bool) -> Result<(), QuantizeError> {
    check(checkpoint.path(), output, replace)?;
    let files: BTreeSet<_> = checkpoint.tensors().iter().map(|view| &view.file).collect();
    files.into_iter().try_for_each(|file| check(file, output, replace))
}

/// The policy for an existing checkpoint of the same kind at the output's path.
pub fn existing(replace: bool, content: Content) -> Existing {
    if replace { Existing::Replace(content) } else { Existing::Refuse }
}

/// Gives a checkpoint of so many tensors its name, once it is on the disk and `progress` has been
/// told so.
///
/// # Errors
/// [`QuantizeError::Interrupted`]; those of [`Staged`].
pub fn commit(
    staged: Staged,
    tensors: usize,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<(), QuantizeError> {
    staged.sync()?;
    if progress(tensors, tensors).is_break() {
        return Err(QuantizeError::Interrupted);
    }
    Ok(staged.commit()?)
}
