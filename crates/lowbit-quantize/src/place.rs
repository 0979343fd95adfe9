//! Where a new checkpoint may lie.

use crate::QuantizeError;
use std::path::{Component, Path, PathBuf};

/// That `output` is not the checkpoint itself, nor in it, nor, if it may be replaced, a folder that holds it.
///
/// # Errors
/// [`QuantizeError::Place`].
pub fn check(checkpoint: &Path, output: &Path, replace: bool) -> Result<(), QuantizeError> {
    let (Some(from), Some(to)) = (checkpoint.canonicalize().ok(), resolve(output)) else { return Ok(()) };
    let relation = match () {
        () if from == to => "is",
        () if to.starts_with(&from) => "lies in",
        () if replace && from.starts_with(&to) => "holds",
        () => return Ok(()),
    };
    Err(QuantizeError::Place { output: output.into(), relation, checkpoint: checkpoint.into() })
}

/// The path without links, of what need not exist yet: what exists of it is resolved, the rest appended.
fn resolve(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let (existing, resolved) =
        path.ancestors().find_map(|ancestor| Some((ancestor, ancestor.canonicalize().ok()?)))?;
    let rest = path.strip_prefix(existing).ok()?;
    rest.components().try_fold(resolved, |mut resolved, component| match component {
        Component::Normal(name) => {
            resolved.push(name);
            Some(resolved)
        }
        Component::ParentDir => {
            resolved.pop();
            Some(resolved)
        }
        _ => Some(resolved),
    })
}
