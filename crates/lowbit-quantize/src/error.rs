use lowbit_files::gguf::GgufError;
use lowbit_files::safetensors::SafetensorsError;
use lowbit_files::{FileError, shown, shown_message, shown_path};
use lowbit_formats::FormatError;
use lowbit_kernels::KernelError;
use lowbit_models::{Difference, ModelError};
use std::path::PathBuf;

/// An error that stops a checkpoint from being quantised.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum QuantizeError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("{output} {relation} {from}, the checkpoint that is to be quantised; name a path outside of it", output = shown_path(.output), from = shown_path(.checkpoint))]
    Output { output: PathBuf, relation: &'static str, checkpoint: PathBuf },
    #[error("data: {0}")]
    Data(String),
    #[error("learning: {0}")]
    Learn(String),
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Model(Box<ModelError>),
    #[error(transparent)]
    Gguf(Box<GgufError>),
    #[error("rule {rule} {problem}", rule = shown(.rule), problem = shown_message(.problem, 1000))]
    Rule { rule: String, problem: String },
    #[error("tensor {name} is {stored}, but f32, f16 or bf16 is wanted", name = shown(.name), stored = shown(.stored))]
    Type { name: String, stored: String },
    #[error("tensor {name} is {shape:?}, but {want}", name = shown(.name))]
    Shape { name: String, shape: Vec<usize>, want: &'static str },
    #[error("tensor {name}: value {index} is {value}, but {want}", name = shown(.name))]
    Value { name: String, index: usize, value: f32, want: &'static str },
    #[error("tensor {name} is of expert {expert}, but the configuration has {count}", name = shown(.name))]
    Expert { name: String, expert: usize, count: usize },
    #[error("tensor {name} is missing", name = shown(.name))]
    Missing { name: String },
    #[error("tensor {name}: {error}{way_out}", name = shown(.name), way_out = kept_by(.rule))]
    Encode {
        name: String,
        error: FormatError,
        /// The rule that keeps the tensor in a type that holds its values, if there is one.
        rule: Option<String>,
    },
    #[error("tensor {name}: {error}", name = shown(.name))]
    Write { name: String, error: SafetensorsError },
    #[error("{error}: {kind} cannot say otherwise what this checkpoint computes, so nothing is written")]
    Unreadable { kind: &'static str, error: Box<ModelError> },
    #[error(
        "{checkpoint}: {setting} is {one}, but {kind} made of it would be computed with {other}, so nothing is \
         written{way_out}",
        checkpoint = shown_path(.checkpoint), setting = .difference.setting, one = shown(&.difference.one),
        other = shown(&.difference.other), way_out = within_window(.difference)
    )]
    Otherwise { checkpoint: PathBuf, kind: &'static str, difference: Difference },
    #[error("{path}: {error}", path = shown_path(.path), error = shown(.error))]
    Io { path: PathBuf, error: std::io::Error },
}

/// The way out where a window is lost: no token sees past it in a context that it covers.
fn within_window(Difference { setting, one, other }: &Difference) -> String {
    match setting.ends_with("sliding_window") && other == "none" {
        true => format!(
            "; with a max_position_embeddings of at most {} in config.json no window is needed",
            shown(one)
        ),
        false => String::new(),
    }
}

fn kept_by(rule: &Option<String>) -> String {
    rule.as_ref().map_or(String::new(), |rule| {
        format!("; with the rule (--rule) {} it stays in a type that can", shown(rule))
    })
}

impl QuantizeError {
    /// The same error, with the rule that keeps the tensor where one of its values is too great for
    /// its new type.
    pub(crate) fn with_rule(self, rule: impl FnOnce() -> Option<String>) -> Self {
        match self {
            Self::Encode { name, error: error @ FormatError::NotFinite { value, .. }, .. }
                if value.is_finite() =>
            {
                Self::Encode { name, error, rule: rule() }
            }
            other => other,
        }
    }
}

impl From<ModelError> for QuantizeError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::File(error) => error.into(),
            ModelError::Format(error) => error.into(),
            error => Self::Model(error.into()),
        }
    }
}

impl From<KernelError> for QuantizeError {
    fn from(error: KernelError) -> Self {
        ModelError::from(error).into()
    }
}

impl From<GgufError> for QuantizeError {
    fn from(error: GgufError) -> Self {
        Self::Gguf(error.into())
    }
}
