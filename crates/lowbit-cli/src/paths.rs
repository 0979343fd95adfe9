//! The files that a command line names: no output may be another argument's file, under whatever
//! name.

use crate::Failure;
use lowbit::Checkpoint;
use lowbit_files::shown_path;
use lowbit_files::staging::{SUFFIX, beside, is_same_file, resolved};
use std::path::{Path, PathBuf};

/// Files by the flags that name them.
#[derive(Default)]
pub struct Paths(Vec<Named>);

struct Named {
    /// The flag, or what the file has to do with it.
    what: String,
    path: PathBuf,
    role: Role,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Input,
    Model,
    Output,
}

impl Paths {
    /// Adds a file that is read.
    pub fn input(&mut self, flag: &str, path: &Path) {
        self.0.push(Named { what: flag.into(), path: path.into(), role: Role::Input });
    }

    /// Adds the files that a checkpoint's tensors are in. They may lie in an output's folder, which
    /// is only replaced if it is a checkpoint without folders.
    pub fn checkpoint(&mut self, flag: &str, checkpoint: &Checkpoint) {
        let files = checkpoint.tensors().iter().map(|view| &*view.file);
        let files: std::collections::BTreeSet<_> = files.chain([checkpoint.path()]).collect();
        let named = |path: &Path| Named { what: flag.into(), path: path.into(), role: Role::Model };
        self.0.extend(files.into_iter().map(named));
    }

    /// Adds a file or directory that is written.
    pub fn output(&mut self, flag: &str, path: &Path) {
        self.0.push(Named { what: flag.into(), path: path.into(), role: Role::Output });
    }

    /// Adds one that is [staged](lowbit_files::staging): the name that it has meanwhile is its own,
    /// too.
    pub fn staged(&mut self, flag: &str, path: &Path) {
        // A path without a name is refused by what stages it.
        if path.file_name().is_none() {
            return;
        }
        self.output(flag, path);
        self.output(&format!("{flag} while it is written"), &beside(path, SUFFIX));
    }

    /// Checks that no output is another argument's file, and that nothing lies in an output: what
    /// is replaced goes with all that it holds.
    ///
    /// # Errors
    /// A message that names the two paths that clash.
    pub fn check(&self) -> Result<(), Failure> {
        for (index, output) in self.0.iter().enumerate().filter(|(_, named)| named.role == Role::Output) {
            for (other_index, other) in self.0.iter().enumerate() {
                if other_index != index {
                    output.check(other)?;
                }
            }
        }
        Ok(())
    }
}

impl Named {
    fn check(&self, other: &Self) -> Result<(), Failure> {
        let (Some(mine), Some(others)) = (resolved(&self.path), resolved(&other.path)) else { return Ok(()) };
        let [path, there] = [&self.path, &other.path].map(|path| shown_path(path).to_string());
        let what = &self.what;
        match () {
            () if mine == others || is_same_file(&self.path, &other.path) => {
                Err(format!("{what} {path} and {} {there} are the same file; name another path", other.what)
                    .into())
            }
            () if others.starts_with(&mine) && other.role != Role::Model => {
                Err(format!("{} {there} lies in {what} {path}; name another path", other.what).into())
            }
            () => Ok(()),
        }
    }
}
