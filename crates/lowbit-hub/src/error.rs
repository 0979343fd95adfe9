use lowbit_files::{FileError, shown, shown_message};

/// Characters of what is said to be wrong.
const LONG: usize = 1000;

/// Why a model or a package is not here.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum HubError {
    #[error("{model}: {problem}", model = shown(.model), problem = shown_message(.problem, LONG))]
    NoSuchModel { model: String, problem: String },
    #[error("{model}: there is no such path, and the hub's model cannot be downloaded: {what}: {problem}", model = shown(.model), what = shown(.what), problem = shown_message(.problem, LONG))]
    Download { model: String, what: String, problem: String },
    #[error("{package}: {problem}", package = shown(.package), problem = shown_message(.problem, LONG))]
    Package { package: String, problem: String },
    #[error(transparent)]
    File(#[from] FileError),
}
