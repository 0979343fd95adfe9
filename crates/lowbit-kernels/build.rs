//! Names this build of the kernels, so that compiled ones from another build are not taken from the
//! disk cache.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::{env, fs, io, path::Path};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    let mut hasher = DefaultHasher::new();
    hash(Path::new("src"), &mut hasher)?;
    env::var("CARGO_PKG_VERSION").unwrap_or_default().hash(&mut hasher);
    println!("cargo::rustc-env=LOWBIT_KERNELS={:016x}", hasher.finish());
    Ok(())
}

fn hash(folder: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    let mut paths: Vec<_> =
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
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
