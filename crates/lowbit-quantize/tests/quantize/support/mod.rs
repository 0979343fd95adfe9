//! Helpers that the tests of learning share, and those of layouts.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod layouts;

use lowbit_files::Checkpoint;
use lowbit_quantize::{Data, MlxFormat, Recipe};
use std::path::{Path, PathBuf};

/// One of the tiny checkpoints with random weights.
pub fn checkpoint(name: &str) -> Checkpoint {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
    Checkpoint::open(&models.join(name)).unwrap()
}

/// A text of so many tokens of their vocabularies, in windows of `length`.
pub fn data(tokens: u32, length: usize) -> Data {
    Data::new(&[(0..tokens).map(|i| (i * i + 7 * i) % 199).collect()], length).unwrap()
}

pub fn to_3_bits() -> Recipe<'static> {
    Recipe::new(MlxFormat::for_mode("affine").with_bits(3).with_group_size(32))
}

/// The name and the content of each file in a folder, by name.
pub fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.map(|path| (path.file_name().unwrap().into(), std::fs::read(path).unwrap())).collect();
    files.sort();
    files
}
