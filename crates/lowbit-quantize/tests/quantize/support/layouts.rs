//! One model in several layouts.

use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_models::{Logits, Model, Target};
use lowbit_quantize::{MlxFormat, Recipe};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A tiny checkpoint with another configuration, in a folder of its own.
pub fn changed(name: &str, change: impl FnOnce(&mut Value)) -> (TempDir, PathBuf) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models").join(name);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("source");
    std::fs::create_dir(&path).unwrap();
    for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(file), path.join(file)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    (folder, path)
}

/// MLX's layout without quantisation.
pub fn plain() -> Recipe<'static> {
    Recipe::new(MlxFormat::default()).with_rules(vec!["*=none".parse().unwrap()])
}

/// The logits of more tokens than the windows of tiny models have.
pub fn logits(path: &Path) -> Vec<f32> {
    let target = Target::new(&Device::cpu(Some(1)).unwrap(), None).unwrap().with_exact(true);
    let model = Model::load_for(&Checkpoint::open(path).unwrap(), target).unwrap();
    let tokens: Vec<u32> = (0..60).map(|i| i * 7 % 200).collect();
    let logits = model.forward(&tokens, &mut model.cache(), Logits::All).unwrap().unwrap();
    logits.as_slice::<f32>().unwrap().to_vec()
}

/// The largest difference, relative to the largest value.
pub fn apart(one: &[f32], other: &[f32]) -> f32 {
    let most = one.iter().fold(0f32, |most, value| most.max(value.abs()));
    one.iter().zip(other).fold(0f32, |apart, (a, b)| apart.max((a - b).abs())) / most
}
