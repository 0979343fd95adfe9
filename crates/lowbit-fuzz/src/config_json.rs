use std::path::Path;

use lowbit_files::{ChatTemplate, Checkpoint};
use lowbit_formats::DType;
use tempfile::TempDir;

use crate::split;

const NAMES: [&str; 4] =
    ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"];

thread_local! {
    /// One folder a thread: making a new one takes longer than reading it.
    static DIRECTORY: TempDir = {
        let directory = TempDir::new().expect("a temporary folder");
        std::fs::write(directory.path().join("model.safetensors"), model()).expect("a file");
        directory
    };
}

/// config.json, generation_config.json, tokenizer_config.json and the index, with a line `---`
/// between them. Those that do not occur are not there.
pub fn config_json(data: &[u8]) {
    DIRECTORY.with(|directory| {
        let mut files = split(data, b"\n---\n");
        for name in NAMES {
            let path = directory.path().join(name);
            match files.next() {
                Some(json) => std::fs::write(path, json).expect("a file"),
                None => _ = std::fs::remove_file(path),
            }
        }
        open(directory.path());
    });
}

fn open(directory: &Path) {
    let Ok(checkpoint) = Checkpoint::open(directory) else { return };
    _ = checkpoint.generation_config();
    _ = ChatTemplate::from_checkpoint(&checkpoint);
    _ = checkpoint.surplus_quantization();
    for path in ["q", "p", "", "bits"] {
        if let Ok(Some(quantization)) = checkpoint.quantization(path) {
            // Affine's scales are floats, all others bytes.
            let formats = [DType::F16, DType::U8].map(|scales| quantization.format(scales).is_ok());
            assert_ne!(formats[0], formats[1], "settings that were accepted have a format");
        }
    }
}

/// A model with a quantised module `q` and a plain one `p`.
fn model() -> Vec<u8> {
    let entry = |name: &str, from: usize| {
        format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{from},{}]}}"#, from + 4)
    };
    let header = format!("{{{},{},{}}}", entry("p.weight", 0), entry("q.scales", 4), entry("q.weight", 8));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 12]].concat()
}
