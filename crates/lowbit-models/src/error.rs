use lowbit_files::{FileError, shown, shown_path};
use lowbit_formats::FormatError;
use lowbit_kernels::KernelError;
use std::path::{Path, PathBuf};

/// An error that stops a checkpoint from becoming a model, or a model from answering.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum ModelError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("{path}: architecture \"{found}\" is not supported; supported are {supported}", path = shown_path(.path), found = shown(.found))]
    Architecture { path: PathBuf, found: String, supported: String },
    #[error("{path}: {key} is missing from the configuration", path = shown_path(.path), key = shown(.key))]
    ConfigMissing { path: PathBuf, key: String },
    #[error("{path}: {key} is {got}, but {want}", path = shown_path(.path), key = shown(.key), got = shown(.got), want = shown(.want))]
    Config { path: PathBuf, key: String, got: String, want: String },
    #[error("{path}: tensor {name} is missing{others}", path = shown_path(.path), name = shown(.name))]
    Missing {
        path: PathBuf,
        name: String,
        /// Empty, or what is there instead.
        others: String,
    },
    #[error("{path}: {count} tensors are not part of this architecture, the first of them {name}", path = shown_path(.path), name = shown(.name))]
    Surplus { path: PathBuf, name: String, count: usize },
    #[error("{path}: tensor {name} is {got}, but the configuration wants {want}", path = shown_path(.path), name = shown(.name), got = shown(.got), want = shown(.want))]
    Tensor { path: PathBuf, name: String, got: String, want: String },
    #[error("{path}: tensor {name}: {error}", path = shown_path(.path), name = shown(.name))]
    Weight { path: PathBuf, name: String, error: Box<KernelError> },
    #[error("{tokens} tokens do not fit the model's context of {limit}")]
    ContextLength { tokens: usize, limit: usize },
    #[error("token {index} is {id}, but the vocabulary has {vocab_size}")]
    Token { index: usize, id: u32, vocab_size: usize },
    #[error("after {tokens} tokens: {error}")]
    Draw { tokens: usize, error: KernelError },
    /// A text cannot go on in the form that it must have.
    #[error("the grammar: {0}")]
    Grammar(String),
    #[error(
        "after {position} tokens: the logit of token {token} is {got}, but every one is to be finite, or -inf beside finite ones"
    )]
    Logits { position: usize, token: usize, got: String },
    #[error("token {index}, {id}, has a logit of -inf: its perplexity is infinite")]
    Impossible { index: usize, id: u32 },
    #[error("sequence {sequence} of the batch: {error}")]
    InSequence { sequence: usize, error: Box<Self> },
    #[error("teacher: {0}")]
    Teacher(Box<ModelError>),
    #[error("the model has {model} layers, but the teacher has {teacher}")]
    Layers { model: usize, teacher: usize },
    #[error("the model's vocabulary has {model} tokens, but the teacher's has {teacher}")]
    Vocabulary { model: usize, teacher: usize },
    #[error(
        "after {position} tokens: the model gives token {token} a logit of -inf, but the teacher a probability of \
         {probability:e}: their divergence is infinite"
    )]
    Divergence { position: usize, token: usize, probability: f64 },
    #[error("there are no tokens to start from")]
    NoTokens,
    #[error("the pool has no page or no slot left for the sequence: room is made before its tokens run")]
    PoolIsFull,
    #[error(
        "the {architecture} model has no output layer (lm_head), so that it writes no text: its states make embeddings, see lowbit embed", architecture = shown(.architecture)
    )]
    Headless { architecture: String },
    #[error(
        "{path}: there is no layer that predicts further tokens (mtp.fc, or eh_proj behind the other layers)",
        path = shown_path(.path)
    )]
    NoPredictor { path: PathBuf },
    #[error(
        "the tokens of the {architecture} model see those after them, so that it writes no text: its states make embeddings, see lowbit embed", architecture = shown(.architecture)
    )]
    NotCausal { architecture: String },
    #[error("element {element} of the pooled states is {got}, but every one must be finite")]
    Pooled { element: usize, got: String },
    #[error(
        "a context of {0} is too small: a window scores all its tokens but the first, so it takes at least 2"
    )]
    Window(usize),
    #[error("{tokens} tokens are too few: windows of {context} scored by their second half take {want}", want = .context.saturating_mul(2))]
    TooShort { tokens: usize, context: usize },
}

impl ModelError {
    /// That the tensor `name` is missing, with those of `names` that are most like it.
    pub fn missing_tensor<'n>(path: &Path, name: &str, names: impl Iterator<Item = &'n str>) -> Self {
        /// Names in the message.
        const NAMES: usize = 3;
        let parts: Vec<&str> = name.split('.').collect();
        let likeness = |other: &str| other.split('.').filter(|part| parts.contains(part)).count();
        let mut names: Vec<&str> = names.collect();
        // Stable: of several that are as like, the first ones.
        names.sort_by_key(|other| std::cmp::Reverse(likeness(other)));
        let first =
            names.iter().take(NAMES).map(|name| shown(name).to_string()).collect::<Vec<_>>().join(", ");
        let others = match names.len().checked_sub(NAMES) {
            _ if names.is_empty() => "; there are no tensors at all".into(),
            None | Some(0) => format!("; there are {first}"),
            Some(more) => format!("; there are {first} and {more} more"),
        };
        Self::Missing { path: path.into(), name: name.into(), others }
    }
}
