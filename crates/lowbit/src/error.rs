use std::path::PathBuf;

use lowbit_files::{FileError, shown, shown_path};
use lowbit_formats::FormatError;
#[cfg(feature = "hub")]
use lowbit_hub::HubError;
use lowbit_kernels::KernelError;
use lowbit_models::ModelError;
use lowbit_quantize::QuantizeError;

/// Any error of lowbit. `?` converts each crate's errors to this one. An error that a crate only
/// passes on has the variant of the crate that it comes from: a missing file is [`Error::File`],
/// whether a checkpoint was opened, loaded or quantised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model's files: missing, damaged, or of another kind.
    #[error(transparent)]
    File(FileError),
    /// No such model, neither on this machine nor on the hub, or it is not downloaded.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(HubError),
    /// A weight format, or data that should be in it.
    #[error(transparent)]
    Format(FormatError),
    /// A device or an op.
    #[error(transparent)]
    Kernel(KernelError),
    /// A checkpoint that cannot become a model, or a model that cannot answer.
    #[error(transparent)]
    Model(ModelError),
    /// A checkpoint that cannot be quantised.
    #[error(transparent)]
    Quantize(QuantizeError),
    /// A checkpoint whose texts are to be embedded, but which does not say how their states are
    /// pooled.
    #[error(
        "{}: nothing says how the states of a text become its embedding (modules.json with its folder, or pooling_type of GGUF): if it is \
         an embedding model, name its pooling: last, mean or cls", shown_path(.path)
    )]
    Pooling {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A reranker whose texts are to be embedded.
    #[error("{}: is a reranker, which scores documents for a query and makes no embeddings", shown_path(.path))]
    Ranks {
        /// The checkpoint.
        path: PathBuf,
    },
    /// The name of a prompt that a checkpoint does not have.
    #[error("{}: has no prompt {}; it has {known}", shown_path(.path), shown(.name))]
    Prompt {
        /// The checkpoint.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// The names of those that it has.
        known: String,
    },
    /// A model that does not say how it scores.
    #[error(
        "{}: no module of it scores (modules.json has no LogitScore): name the tokens of its answers, such as yes and no",
        lowbit_files::shown_path(.path)
    )]
    NoScore {
        /// The checkpoint.
        path: PathBuf,
    },
    /// A token by which a model is to score, and that it does not have.
    #[error("{token}: no token of the model is spelled so, or has this id")]
    NoToken {
        /// Its spelling or id.
        token: String,
    },
    /// A chat template that leaves out the query or the document.
    #[error(
        "{}: the chat template leaves out the messages of the roles query and document, or gives the same text for any: \
         a reranker's has a place for both",
        lowbit_files::shown_path(.path)
    )]
    NoPair {
        /// The checkpoint.
        path: PathBuf,
    },
    /// The form of a reply that is malformed, or that cannot be enforced.
    #[error("{path}: {problem}")]
    Form {
        /// The part that is wrong: `schema.properties.name`, `grammar`, ..
        path: String,
        /// Why.
        problem: String,
    },
    /// A number of dimensions that an embedding does not have.
    #[error(
        "embeddings of {got} dimensions are asked for, but the model's have {hidden_size}: 1 to {hidden_size} can be kept"
    )]
    Dimensions {
        /// The number that was asked for.
        got: usize,
        /// The model's.
        hidden_size: usize,
    },
}

impl Error {
    #[cfg(feature = "grammar")]
    pub(crate) fn form(path: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self::Form { path: path.into(), problem: problem.to_string() }
    }
}

impl From<FileError> for Error {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

#[cfg(feature = "hub")]
impl From<HubError> for Error {
    fn from(error: HubError) -> Self {
        match error {
            HubError::File(error) => error.into(),
            error => Self::Hub(error),
        }
    }
}

impl From<FormatError> for Error {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

impl From<KernelError> for Error {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Format(error) => error.into(),
            error => Self::Kernel(error),
        }
    }
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::File(error) => error.into(),
            ModelError::Kernel(error) => error.into(),
            ModelError::Format(error) => error.into(),
            error => Self::Model(error),
        }
    }
}

impl From<QuantizeError> for Error {
    fn from(error: QuantizeError) -> Self {
        match error {
            QuantizeError::File(error) => error.into(),
            QuantizeError::Format(error) => error.into(),
            error => Self::Quantize(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_stands_under_the_crate_that_it_comes_from() {
        let format = FormatError::GgmlType(99);
        for error in [
            Error::from(format.clone()),
            KernelError::from(format.clone()).into(),
            ModelError::from(format.clone()).into(),
            ModelError::from(KernelError::from(format.clone())).into(),
            QuantizeError::from(format.clone()).into(),
        ] {
            assert!(matches!(&error, Error::Format(inner) if *inner == format), "{error:?}");
            assert_eq!(error.to_string(), format.to_string());
        }
        let missing = || lowbit_files::Checkpoint::open("no/such/folder".as_ref()).unwrap_err();
        for error in [Error::from(missing()), ModelError::from(missing()).into()] {
            assert!(matches!(error, Error::File(_)), "{error:?}");
        }
        #[cfg(feature = "hub")]
        {
            assert!(matches!(Error::from(HubError::from(missing())), Error::File(_)));
            assert!(matches!(crate::LanguageModel::open("no such model").unwrap_err(), Error::Hub(_)));
        }
        assert!(matches!(Error::from(ModelError::NoTokens), Error::Model(ModelError::NoTokens)));
    }
}
