//! A checkpoint to be damaged.
#![allow(dead_code)] // Each test uses its part.

use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_models::{Logits, Model, ModelError};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub fn vectors(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models").join(name)
}

/// The logits of a few tokens, as one number.
pub fn logits(model: &Model) -> u64 {
    let tokens: Vec<u32> = (1..40).map(|i| i * 7 % 200).collect();
    let logits = model.forward(&tokens, &mut model.cache(), Logits::All).unwrap().unwrap();
    let mut hash = DefaultHasher::new();
    logits.as_slice::<f32>().unwrap().iter().for_each(|value| value.to_bits().hash(&mut hash));
    hash.finish()
}

/// A tiny checkpoint in memory, to be changed and written again.
pub struct Tiny {
    pub config: Value,
    /// The `format` in the file's metadata.
    pub format: Option<String>,
    /// Other files beside the weights.
    pub files: Vec<(&'static str, String)>,
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Tiny {
    pub fn open(name: &str) -> Self {
        let config = std::fs::read_to_string(vectors(name).join("config.json")).unwrap();
        let (mut tensors, mut format) = (BTreeMap::new(), None);
        for entry in vectors(name).read_dir().unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap().to_str().unwrap();
            if !(file.starts_with("model") && file.ends_with(".safetensors")) {
                continue;
            }
            let bytes = std::fs::read(&path).unwrap();
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            format = header.metadata().as_ref().and_then(|metadata| metadata.get("format").cloned());
            let file = SafeTensors::deserialize(&bytes).unwrap();
            tensors.extend(file.iter().map(|(name, view)| {
                (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
            }));
        }
        Self { config: serde_json::from_str(&config).unwrap(), format, files: vec![], tensors }
    }

    /// The part of the configuration that describes the text model.
    pub fn text(&mut self) -> &mut serde_json::Map<String, Value> {
        let config = self.config.as_object_mut().unwrap();
        let name = "text_config";
        match config.contains_key(name) {
            true => config[name].as_object_mut().unwrap(),
            false => config,
        }
    }

    pub fn tensor(&mut self, name: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn load(&self) -> Result<Model, ModelError> {
        let (checkpoint, _folder) = self.checkpoint();
        Model::load(&checkpoint?, &Device::cpu(Some(1)).unwrap())
    }

    /// Written to a folder, which lasts as long as what comes with it.
    pub fn checkpoint(&self) -> (Result<Checkpoint, ModelError>, TempDir) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let view =
            |(dtype, shape, bytes): &'_ (Dtype, Vec<usize>, Vec<u8>)| (*dtype, shape.clone(), bytes.clone());
        let owned: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name, view(tensor))).collect();
        let views = owned.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let metadata = self.format.clone().map(|format| [("format".to_string(), format)].into());
        let bytes = safetensors::serialize(views, metadata).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        for (name, text) in &self.files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        (Checkpoint::open(folder.path()).map_err(ModelError::from), folder)
    }

    /// Loads the folder that [`Self::checkpoint`] gave with this configuration.
    pub fn reload(&self, folder: &TempDir) -> Result<Model, ModelError> {
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        Model::load(&Checkpoint::open(folder.path())?, &Device::cpu(Some(1)).unwrap())
    }

    #[track_caller]
    pub fn refused(&self) -> String {
        self.load().map(drop).expect_err("a damaged checkpoint was loaded").to_string()
    }
}
