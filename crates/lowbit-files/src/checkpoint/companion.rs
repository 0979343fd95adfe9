//! A directory's files besides config.json and weights, read whole and checked, to be written
//! beside new weights.

use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;

use super::embedding::{self, MODULES, PROMPTS, TRANSFORMERS};
use super::{Checkpoint, GenerationConfig};
use crate::chat::named;
use crate::gguf::Metadata;
use crate::names::{CONFIG, SINGLE};
use crate::read::{limit, read};
use crate::{Companion, FileError, Tokenizer};

/// The kind of content that a file must have.
#[derive(Clone, Copy)]
enum Content {
    Object,
    /// A list or an object.
    Json,
    Text,
    /// SentencePiece's and tiktoken's models: their content is not checked.
    Bytes,
}

/// The files from which this crate, transformers and mlx-lm make tokens and chats. Code (`*.py`) is
/// left behind: nothing here needs it, and a checkpoint's code should not spread.
const COMPANIONS: &[(&str, Content, u64)] = &[
    ("tokenizer.json", Content::Object, limit::TOKENIZER),
    ("tokenizer_config.json", Content::Object, limit::CONFIG),
    ("special_tokens_map.json", Content::Object, limit::CONFIG),
    ("added_tokens.json", Content::Object, limit::CONFIG),
    ("generation_config.json", Content::Object, limit::CONFIG),
    ("chat_template.jinja", Content::Text, limit::TEMPLATE),
    ("chat_template.json", Content::Object, limit::CONFIG),
    ("tokenizer.model", Content::Bytes, limit::CONFIG),
    ("vocab.json", Content::Object, limit::TOKENIZER),
    ("merges.txt", Content::Text, limit::TOKENIZER),
    (MODULES, Content::Json, limit::CONFIG),
    (PROMPTS, Content::Object, limit::CONFIG),
];

impl Checkpoint {
    /// Tokenizer, chat template and generation settings, for a copy of this checkpoint. Each is of
    /// the kind that its name says, and lies in the checkpoint's directory (in the hub's cache also
    /// in the blobs of the same repository): a link to any other file, such as one with passwords,
    /// is refused, and so is such a link in place of config.json. A GGUF file's companions are made
    /// from its metadata.
    ///
    /// # Errors
    /// [`FileError::Outside`]; [`FileError::TooLarge`]; [`FileError::Json`]; [`FileError::Io`]; for
    /// GGUF those of [`Tokenizer::companions`] and [`Self::generation_config`].
    pub fn companions(&self) -> Result<Vec<Companion>, FileError> {
        if let Some(metadata) = self.metadata() {
            return from_gguf(self, metadata);
        }
        own_file(self.path(), CONFIG)?;
        let named = COMPANIONS.iter().map(|&(name, content, limit)| (name.to_string(), content, limit));
        let templates = named::additional(self.path())?.into_iter();
        let templates = templates.map(|name| (named::path_of(&name), Content::Text, limit::TEMPLATE));
        let listed: Vec<_> = self.modules()?.into_iter().filter(|module| !module.folder.is_empty()).collect();
        let modules = listed.iter().map(|module| format!("{}/{CONFIG}", module.folder));
        let modules =
            modules.chain(TRANSFORMERS.map(String::from)).map(|name| (name, Content::Object, limit::CONFIG));
        // Linear layers have weights of their own.
        let weights = listed.iter().filter(|module| module.class == "Dense");
        let weights = weights.map(|module| format!("{}/{SINGLE}", module.folder));
        let modules = modules.chain(weights.map(|name| (name, Content::Bytes, limit::MODULE)));
        let mut companions = vec![];
        for (name, content, limit) in named.chain(templates).chain(modules) {
            if let Some(path) = own_file(self.path(), &name)? {
                let bytes = read(&path, limit)?;
                content.check(&bytes, &self.path().join(&name))?;
                companions.push(Companion { name, bytes });
            }
        }
        // Other modules with weights of their own would be lost: they are refused.
        self.embedding_config()?;
        Ok(companions)
    }
}

fn from_gguf(checkpoint: &Checkpoint, metadata: &Metadata) -> Result<Vec<Companion>, FileError> {
    let architecture = metadata.get::<&str>("general.architecture")?;
    let length = metadata.find(&format!("{architecture}.context_length"))?;
    let mut companions = Tokenizer::companions(metadata, length)?;
    // The ids that end a text as running the file has them: its own and well-known ones.
    let eos_token_ids = Tokenizer::from_gguf(metadata)?.eos_ids().to_vec();
    let generation = GenerationConfig { eos_token_ids, ..checkpoint.generation_config()? };
    if let Some(json) = generation.to_json(metadata.file())? {
        companions.push(Companion { name: "generation_config.json".into(), bytes: json.into_bytes() });
    }
    let config = checkpoint.embedding_config()?;
    if let Some(dense) = config.dense.first() {
        let want = "missing: layers behind pooling are not written to a directory";
        let (file, key) = (metadata.file().into(), format!("{}.weight", dense.name));
        return Err(FileError::Value { file, key, want, got: "there".into() });
    }
    if let Some(pooling) = config.pooling {
        companions.extend(embedding::companions(pooling));
    }
    Ok(companions)
}

impl Content {
    fn check(self, bytes: &[u8], path: &Path) -> Result<(), FileError> {
        match self {
            Self::Object => serde_json::from_slice::<std::collections::HashMap<String, IgnoredAny>>(bytes)
                .map(|_| ())
                .map_err(FileError::json(path)),
            Self::Json => {
                serde_json::from_slice::<IgnoredAny>(bytes).map(|_| ()).map_err(FileError::json(path))
            }
            Self::Text => std::str::from_utf8(bytes)
                .map(|_| ())
                .map_err(|error| FileError::io(path)(Error::new(ErrorKind::InvalidData, error))),
            Self::Bytes => Ok(()),
        }
    }
}

/// The real path of the file `name` of the checkpoint in `directory`; `None` if there is none.
fn own_file(directory: &Path, name: &str) -> Result<Option<PathBuf>, FileError> {
    let path = directory.join(name);
    match std::fs::symlink_metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(FileError::io(&path)(error)),
        Ok(_) => {}
    }
    let directory = directory.canonicalize().map_err(FileError::io(directory))?;
    let target = path.canonicalize().map_err(FileError::io(&path))?;
    match target.starts_with(&directory) || is_blob_of(&target, &directory) {
        true => Ok(Some(target)),
        false => Err(FileError::Outside { file: path, target }),
    }
}

/// True if `target` is `models--org--name/blobs/..`, for the `models--org--name/snapshots/..` of
/// the hub's cache.
fn is_blob_of(target: &Path, directory: &Path) -> bool {
    let Some(snapshots) = directory.parent().filter(|parent| parent.ends_with("snapshots")) else {
        return false;
    };
    let blobs = snapshots.parent().map(|repository| repository.join("blobs"));
    blobs.is_some() && target.parent() == blobs.as_deref()
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A checkpoint without tensors in `folder`.
    fn checkpoint(folder: &Path) -> Checkpoint {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(CONFIG), "{}").unwrap();
        std::fs::write(folder.join("model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
        Checkpoint::open(folder).unwrap()
    }

    fn names(checkpoint: &Checkpoint) -> Vec<String> {
        checkpoint.companions().unwrap().into_iter().map(|companion| companion.name).collect()
    }

    #[test]
    fn files_are_what_their_names_say() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(folder.path());
        assert_eq!(names(&checkpoint), [""; 0]);
        for (name, good, bad) in [
            ("tokenizer.json", "{\"a\": [1]}", "[]"),
            ("tokenizer_config.json", "{}", "root:x:0:0"),
            ("generation_config.json", "{}", "{\"a\": "),
            ("chat_template.jinja", "{{ x }}", "\u{80}"),
        ] {
            let path = folder.path().join(name);
            // Half of a character of two bytes is no UTF-8.
            let cut = if name.ends_with(".jinja") { &bad.as_bytes()[..1] } else { bad.as_bytes() };
            std::fs::write(&path, cut).unwrap();
            let message = checkpoint.companions().unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
            std::fs::write(&path, good).unwrap();
            let found = checkpoint.companions().unwrap();
            assert!(found.contains(&Companion { name: name.into(), bytes: good.into() }), "{found:?}");
        }
        std::fs::write(folder.path().join("chat_template.jinja"), vec![b' '; (1 << 20) + 1]).unwrap();
        assert!(matches!(checkpoint.companions(), Err(FileError::TooLarge { .. })));
    }

    #[test]
    fn links_do_not_lead_out_of_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("model");
        let checkpoint = checkpoint(&directory);
        let secret = folder.path().join("secret.json");
        std::fs::write(&secret, "{\"auths\": {}}").unwrap();
        std::fs::create_dir(folder.path().join("blobs")).unwrap();
        std::fs::write(folder.path().join("blobs/x"), "{}").unwrap();
        let link = directory.join("tokenizer_config.json");
        for target in
            [&secret, Path::new("../secret.json"), Path::new("../blobs/x"), Path::new("/etc/passwd")]
        {
            symlink(target, &link).unwrap();
            let error = checkpoint.companions().unwrap_err();
            assert!(matches!(error, FileError::Outside { .. }), "{error}");
            std::fs::remove_file(&link).unwrap();
        }
        symlink("nothing", &link).unwrap();
        let message = checkpoint.companions().unwrap_err().to_string();
        assert!(message.contains("tokenizer_config.json"), "{message}");
        std::fs::remove_file(&link).unwrap();
        std::fs::write(directory.join("other.json"), "{}").unwrap();
        symlink("other.json", &link).unwrap();
        assert_eq!(names(&checkpoint), ["tokenizer_config.json"]);
        // A link to a link that leads out.
        symlink(&secret, directory.join("third.json")).unwrap();
        std::fs::remove_file(&link).unwrap();
        symlink("third.json", &link).unwrap();
        assert!(matches!(checkpoint.companions(), Err(FileError::Outside { .. })));
        std::fs::remove_file(&link).unwrap();
        std::fs::rename(directory.join(CONFIG), folder.path().join(CONFIG)).unwrap();
        symlink("../config.json", directory.join(CONFIG)).unwrap();
        assert!(
            matches!(checkpoint.companions(), Err(FileError::Outside { .. })),
            "config.json is copied, too"
        );
    }

    #[test]
    fn the_hubs_cache_keeps_its_files_in_blobs() {
        let folder = tempfile::tempdir().unwrap();
        let repository = folder.path().join("models--org--name");
        let snapshot = repository.join("snapshots/0123abcd");
        checkpoint(&snapshot);
        std::fs::create_dir(repository.join("blobs")).unwrap();
        std::fs::rename(snapshot.join(CONFIG), repository.join("blobs/config")).unwrap();
        symlink("../../blobs/config", snapshot.join(CONFIG)).unwrap();
        std::fs::write(repository.join("blobs/tokenizer"), "{}").unwrap();
        symlink("../../blobs/tokenizer", snapshot.join("tokenizer.json")).unwrap();
        let checkpoint = Checkpoint::open(&snapshot).unwrap();
        assert_eq!(names(&checkpoint), ["tokenizer.json"]);
        // Another repository's blobs are not its own.
        let other = folder.path().join("models--org--other/blobs");
        std::fs::create_dir_all(&other).unwrap();
        std::fs::write(other.join("x"), "{}").unwrap();
        symlink("../../../models--org--other/blobs/x", snapshot.join("vocab.json")).unwrap();
        assert!(matches!(checkpoint.companions(), Err(FileError::Outside { .. })));
    }
}
