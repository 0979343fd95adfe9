//! A checkpoint's chat templates by name: what runs, and what is written in other formats.
//!
//! Of a directory, chat_template.jinja and the files in additional_chat_templates/ stand for all
//! that tokenizer_config.json has, and that for chat_template.json. In GGUF they are
//! `tokenizer.chat_template` and `tokenizer.chat_template.NAME`.
//!
//! Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`; llama.cpp's
//! `llama_model_chat_template`.

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::template_error;
use crate::checkpoint::mismatch;
use crate::gguf::{Metadata, Value};
use crate::read::{limit, read};
use crate::{Checkpoint, FileError, shown};

/// The template for chats without tools, and for those that no other one is for.
pub(crate) const DEFAULT: &str = "default";
/// The template for chats with tools.
pub(crate) const TOOL_USE: &str = "tool_use";

/// The folder of a directory's further templates.
pub(crate) const FOLDER: &str = "additional_chat_templates";

const FILE: &str = "chat_template.jinja";
const KEY: &str = "tokenizer.chat_template";

/// Templates of a checkpoint. Published ones have up to three.
const MOST: usize = 64;
/// Bytes of a name.
const NAME: usize = 64;

/// A template's source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub name: String,
    pub source: String,
    /// The file that holds it.
    pub file: PathBuf,
}

/// All templates of `checkpoint`; the default is the first, if there is one, and no two have the
/// same name.
///
/// # Errors
/// [`FileError`] when a file or a key that has one is malformed.
pub(crate) fn all(checkpoint: &Checkpoint) -> Result<Vec<Named>, FileError> {
    match checkpoint.metadata() {
        Some(metadata) => of_gguf(metadata),
        None => of_directory(checkpoint),
    }
}

/// The templates in GGUF's metadata.
///
/// # Errors
/// As [`all`].
pub(crate) fn of_gguf(metadata: &Metadata) -> Result<Vec<Named>, FileError> {
    let mut templates = Templates::new(metadata.file());
    for (key, value) in metadata.iter() {
        let Some(rest) = key.strip_prefix(KEY) else { continue };
        let name = if rest.is_empty() { Some(DEFAULT) } else { rest.strip_prefix('.') };
        let Some(name) = name else { continue };
        let Value::String(source) = value else {
            let problem = format!("{} is {}, but a string is wanted", shown(key), value.describe());
            return Err(FileError::tokenizer(metadata.file(), problem));
        };
        templates.put(name, source)?;
    }
    Ok(templates.sorted())
}

fn of_directory(checkpoint: &Checkpoint) -> Result<Vec<Named>, FileError> {
    let files = of_files(checkpoint.path())?;
    if !files.is_empty() {
        return Ok(files);
    }
    fn template(json: &Json) -> Option<&Json> {
        json.get("chat_template").filter(|value| !value.is_null())
    }
    let own = checkpoint.tokenizer_config()?;
    if let Some((file, value)) = own.and_then(|(file, json)| Some((file, template(json)?))) {
        return of_json(file, value);
    }
    match checkpoint.json("chat_template.json")? {
        Some((file, json)) => template(&json).map_or(Ok(vec![]), |value| of_json(&file, value)),
        None => Ok(vec![]),
    }
}

/// chat_template.jinja and additional_chat_templates/NAME.jinja.
fn of_files(directory: &Path) -> Result<Vec<Named>, FileError> {
    let names = additional(directory)?;
    let mut templates = vec![];
    let file = directory.join(FILE);
    // As transformers has it, a file in the folder goes before it.
    if file.exists() && !names.iter().any(|name| name == DEFAULT) {
        templates.push(of_file(DEFAULT, &file)?);
    }
    for name in names {
        templates.push(of_file(&name, &directory.join(path_of(&name)))?);
    }
    templates.sort_by_key(|template| template.name != DEFAULT);
    Ok(templates)
}

/// The names of a directory's further templates, sorted: those of the files in its folder, without
/// `.jinja`.
///
/// # Errors
/// [`FileError::Io`]; [`FileError::Template`] for a name that is none, or more than any model has.
pub(crate) fn additional(directory: &Path) -> Result<Vec<String>, FileError> {
    let folder = directory.join(FOLDER);
    if !folder.is_dir() {
        return Ok(vec![]);
    }
    let mut names = vec![];
    for entry in folder.read_dir().map_err(FileError::io(&folder))? {
        let name = entry.map_err(FileError::io(&folder))?.file_name();
        let Some(name) = name.to_string_lossy().strip_suffix(".jinja").map(str::to_string) else { continue };
        check_name(&name, &folder)?;
        names.push(name);
        check_count(names.len(), &folder)?;
    }
    names.sort();
    Ok(names)
}

/// The file of a further template, in its directory.
pub(crate) fn path_of(name: &str) -> String {
    format!("{FOLDER}/{name}.jinja")
}

fn of_file(name: &str, file: &Path) -> Result<Named, FileError> {
    let source = String::from_utf8(read(file, limit::TEMPLATE)?);
    let source = source.map_err(|error| template_error(file, error.to_string()))?;
    Ok(Named { name: name.into(), source, file: file.into() })
}

/// `chat_template`: a template, or several by name, as a list or as an object.
fn of_json(file: &Path, value: &Json) -> Result<Vec<Named>, FileError> {
    let refuse = || mismatch(file, "chat_template", "a template, or a list of templates with names", value);
    let mut templates = Templates::new(file);
    match value {
        Json::String(source) => templates.put(DEFAULT, source)?,
        Json::Array(list) => {
            for named in list {
                let [name, source] = ["name", "template"].map(|key| named[key].as_str().ok_or_else(refuse));
                templates.put(name?, source?)?;
            }
        }
        Json::Object(named) => {
            for (name, source) in named {
                templates.put(name, source.as_str().ok_or_else(refuse)?)?;
            }
        }
        _ => return Err(refuse()),
    }
    Ok(templates.sorted())
}

/// Templates that stand in one file.
struct Templates<'a> {
    file: &'a Path,
    named: Vec<Named>,
}

impl<'a> Templates<'a> {
    fn new(file: &'a Path) -> Self {
        Self { file, named: vec![] }
    }

    /// Of two with one name the later one counts.
    fn put(&mut self, name: &str, source: &str) -> Result<(), FileError> {
        check_name(name, self.file)?;
        if source.len() as u64 > limit::TEMPLATE {
            let (bytes, most) = (source.len(), limit::TEMPLATE);
            let problem = format!("template {} has {bytes} bytes; at most {most} are read", shown(name));
            return Err(template_error(self.file, problem));
        }
        self.named.retain(|named| named.name != name);
        self.named.push(Named { name: name.into(), source: source.into(), file: self.file.into() });
        check_count(self.named.len(), self.file)
    }

    fn sorted(mut self) -> Vec<Named> {
        self.named.sort_by_key(|named| named.name != DEFAULT);
        self.named
    }
}

/// A name is to be part of a key in GGUF and of a file's name: no path, and nothing that a terminal
/// obeys.
fn check_name(name: &str, file: &Path) -> Result<(), FileError> {
    let is_plain =
        |c: char| c.is_alphanumeric() && c.escape_debug().len() == 1 || "-_.+=()[],@~#& ".contains(c);
    let is_name =
        !name.is_empty() && name.len() <= NAME && name.chars().all(is_plain) && !name.starts_with('.');
    match is_name {
        true => Ok(()),
        false => {
            let problem = format!(
                "{} is no name of a template: at most {NAME} bytes of letters, digits and -_.+=()[],@~#& are",
                shown(name)
            );
            Err(template_error(file, problem))
        }
    }
}

fn check_count(count: usize, file: &Path) -> Result<(), FileError> {
    match count > MOST {
        true => Err(template_error(file, format!("it has more than {MOST} templates"))),
        false => Ok(()),
    }
}
