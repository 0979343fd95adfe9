//! The macro `sources`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// A hash of the version and of all files under `src` of the crate that is compiled. A change to
/// one of them compiles the crate again, and with it this.
pub fn digest() -> io::Result<String> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut hasher = DefaultHasher::new();
    env::var("CARGO_PKG_VERSION").unwrap_or_default().hash(&mut hasher);
    hash(&root.join("src"), &mut hasher)?;
    Ok(format!("{:016x}", hasher.finish()))
}

fn hash(folder: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths: Vec<_> = entries.collect::<Result<_, _>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            hash(&path, hasher)?;
        } else {
            fs::read(&path)?.hash(hasher);
        }
    }
    Ok(())
}
