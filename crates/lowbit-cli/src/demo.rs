//! The default where no model is named: a demo of the repository, or a message that says what to
//! type first.

use crate::{Failure, memory};
use std::path::{Path, PathBuf};

/// The bundled checkpoint that a command takes.
#[derive(Clone, Copy, Debug)]
pub enum Demo {
    /// For a command that continues or scores text.
    Text,
    /// For a conversation: it was taught to answer.
    Chat,
}

impl Demo {
    /// Its folder in the repository.
    fn folder(self) -> &'static str {
        match self {
            Self::Text => "models/demo-4bit",
            Self::Chat => "models/demo-chat",
        }
    }

    /// The checkpoint of the repository that `from` is in.
    ///
    /// # Errors
    /// Outside the repository: which models to name, of those that fit into `gpu_bytes` or this
    /// machine's memory.
    pub fn find(self, from: &Path, gpu_bytes: impl FnOnce() -> Option<u64>) -> Result<PathBuf, Failure> {
        let mut folders = from.ancestors().map(|folder| folder.join(self.folder()));
        let found = folders.find(|path| path.join("config.json").is_file());
        found.ok_or_else(|| {
            let bytes = gpu_bytes().or_else(memory::available_bytes);
            let (here, demo) = (lowbit_files::shown_path(from), self.folder());
            format!("no --model was given, and {here} is in no folder that holds {demo}. {}", first(bytes))
                .into()
        })
    }
}

/// Published checkpoints in 4 bits that lowbit runs, the smallest first, with the bytes of their
/// weights.
const PUBLISHED: [(&str, u64); 10] = [
    ("mlx-community/Qwen3-0.6B-4bit", 335_000_000),
    ("mlx-community/Llama-3.2-1B-Instruct-4bit", 695_000_000),
    ("mlx-community/Qwen3-1.7B-4bit", 968_000_000),
    ("mlx-community/Llama-3.2-3B-Instruct-4bit", 1_807_000_000),
    ("mlx-community/Qwen3-4B-4bit", 2_263_000_000),
    ("mlx-community/Qwen3-8B-4bit", 4_608_000_000),
    ("mlx-community/Qwen3-14B-4bit", 8_309_000_000),
    ("mlx-community/Qwen3-30B-A3B-4bit", 17_181_000_000),
    ("mlx-community/Llama-3.3-70B-Instruct-4bit", 39_689_000_000),
    ("mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", 44_832_000_000),
];

/// Up to three published models that fit into `bytes` of memory: a small one, one between, and the
/// largest.
fn fitting(bytes: u64) -> Vec<(&'static str, u64)> {
    // Beside the weights there are caches, activations, and pages of the file that are read.
    let fits = |weights: u64| weights + weights / 5 + (1 << 29) <= bytes;
    let all: Vec<_> = PUBLISHED.into_iter().filter(|(_, weights)| fits(*weights)).collect();
    match all.len() {
        0..=3 => all,
        count => vec![all[0], all[count / 2], all[count - 1]],
    }
}

/// The message that says what to type first.
fn first(bytes: Option<u64>) -> String {
    let models = bytes.map(fitting).unwrap_or_default();
    let (fit, models) = match (bytes, models.is_empty()) {
        (Some(bytes), false) => {
            (format!("one of these, which fit into {:.1} GB of memory", bytes as f64 / 1e9), models)
        }
        (Some(bytes), true) => (
            format!("the smallest of these (there are {:.1} GB of free memory)", bytes as f64 / 1e9),
            vec![PUBLISHED[0]],
        ),
        (None, _) => ("a small one".into(), PUBLISHED[..3].to_vec()),
    };
    let lines =
        models.iter().map(|(name, weights)| format!("\n  -m {name:<48}{:>5.1} GB", *weights as f64 / 1e9));
    let lines: String = lines.collect();
    format!(
        "Name a model first, which is downloaded once, such as {fit}:{lines}\nor a checkpoint's directory, or a .gguf file: -m PATH"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_fit_are_named() {
        let names = |gigabytes: f64| -> Vec<_> {
            fitting((gigabytes * 1e9) as u64)
                .into_iter()
                .map(|(name, _)| name.split_once('/').unwrap().1)
                .collect()
        };
        assert_eq!(names(0.5), [""; 0]);
        assert_eq!(names(1.5), ["Qwen3-0.6B-4bit", "Llama-3.2-1B-Instruct-4bit"]);
        assert_eq!(names(8.0), ["Qwen3-0.6B-4bit", "Llama-3.2-3B-Instruct-4bit", "Qwen3-8B-4bit"]);
        assert_eq!(names(80.0), ["Qwen3-0.6B-4bit", "Qwen3-8B-4bit", "Qwen3-Next-80B-A3B-Instruct-4bit"]);
        assert!(PUBLISHED.is_sorted_by_key(|(_, weights)| *weights));
    }

    #[test]
    fn what_to_type_first_is_said() {
        let text = first(Some(8_000_000_000));
        assert!(
            text.contains("which fit into 8.0 GB of memory:\n  -m mlx-community/Qwen3-0.6B-4bit "),
            "{text}"
        );
        assert!(text.ends_with("  4.6 GB\nor a checkpoint's directory, or a .gguf file: -m PATH"), "{text}");
        assert!(
            first(Some(1)).contains("(there are 0.0 GB of free memory):\n  -m mlx-community/Qwen3-0.6B-4bit")
        );
        assert!(first(None).contains("a small one:\n"));
    }
}
