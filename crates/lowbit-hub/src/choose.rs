//! The choice of a repository's files that make up the requested model.

use std::collections::HashSet;

use lowbit_files::names::{CONFIG, INDEX, Part, SINGLE};
use lowbit_files::read::limit;
use lowbit_files::shown;

use super::names::FileName;

/// llama.cpp's choice without a tag.
const DEFAULT_TAG: &str = "Q4_K_M";

/// The most models that a message names.
const NAMED: usize = 30;

/// The files of a checkpoint that are read beside the tensors, and chat templates and modules in
/// their folders.
const FILES: [&str; 18] = [
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
    INDEX,
    CONFIG,
];

/// Those of `files` that are read beside the tensors.
pub(super) fn small(files: &[FileName]) -> Vec<String> {
    let in_folders = files.iter().filter(|file| file.is_template() || file.is_module()).map(FileName::as_str);
    let has = |name: &&str| files.iter().any(|file| file.as_str() == *name);
    in_folders.chain(FILES.into_iter().filter(has)).map(String::from).collect()
}

/// The most bytes that `name` may have if it is not weights.
pub(super) fn limit(name: &str) -> Option<u64> {
    Some(match name {
        INDEX => limit::INDEX,
        "tokenizer.json" => limit::TOKENIZER,
        _ if name.ends_with(".jinja") => limit::TEMPLATE,
        _ if name.ends_with(".json") => limit::CONFIG,
        _ => return None,
    })
}

/// The files with the tensors of a repository without an index.
///
/// # Errors
/// The file that is missing.
pub(super) fn shards(names: &[String], most: usize) -> Result<Vec<String>, String> {
    if names.iter().any(|name| name == SINGLE) {
        return Ok(vec![SINGLE.into()]);
    }
    let of_model = |name: &&String| {
        name.ends_with(".safetensors") && Part::parse(name).is_some_and(|part| part.prefix == "model")
    };
    match names.iter().find(of_model) {
        Some(part) => all_parts(part, names, most),
        None => Err(format!("it has {CONFIG}, but neither {SINGLE} nor {INDEX}")),
    }
}

/// The files among `names` of the model that `tag` names (`Q4_K_M`, any case, or a file's name);
/// without a tag, of the only one or of the one that is `Q4_K_M`.
///
/// # Errors
/// The models to choose from, or the file that is missing.
pub(super) fn gguf(names: &[String], tag: Option<&str>, most: usize) -> Result<Vec<String>, String> {
    // Files in folders are left alone, as are the vision towers that some repositories have beside
    // the model.
    let is_model =
        |name: &&String| name.ends_with(".gguf") && !name.contains('/') && !name.starts_with("mmproj");
    let mut models: Vec<&String> = names.iter().filter(is_model).collect();
    models.sort();
    let mut stems: Vec<_> = models.iter().map(|name| stem(name)).collect();
    stems.dedup();
    let tagged = |tag: &str| {
        let whole = stems.iter().find(|it| **it == stem(tag));
        whole.or_else(|| stems.iter().find(|stem| has_tag(stem, tag)))
    };
    let chosen = match (tag, stems.as_slice()) {
        (_, []) => return Err(without_models(names)),
        (Some(tag), _) => tagged(tag),
        (None, [only]) => Some(only),
        (None, _) => tagged(DEFAULT_TAG),
    };
    let Some(chosen) = chosen else {
        let wanted = tag.unwrap_or(DEFAULT_TAG);
        let more = if stems.len() > NAMED { ", ..." } else { "" };
        let some: Vec<_> = stems.iter().take(NAMED).map(|stem| shown(stem).to_string()).collect();
        return Err(format!("none of its GGUF models is {wanted}: {}{more}", some.join(", ")));
    };
    let first = models.into_iter().find(|name| stem(name) == *chosen).expect("a stem is a model's");
    all_parts(first, names, most)
}

/// All parts of the model that `part` is of.
fn all_parts(part: &str, names: &[String], most: usize) -> Result<Vec<String>, String> {
    let Some(parsed) = Part::parse(part) else { return Ok(vec![part.into()]) };
    if parsed.count > most as u64 {
        return Err(format!("{part} is one of {} parts; at most {most} are downloaded", parsed.count));
    }
    let parts: Vec<String> = parsed.names().collect();
    let names: HashSet<&String> = names.iter().collect();
    match parts.iter().find(|part| !names.contains(part)) {
        Some(missing) => Err(format!("its part {missing} is missing")),
        None => Ok(parts),
    }
}

fn without_models(names: &[String]) -> String {
    let pickled = |name: &&String| [".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end));
    let also = names
        .iter()
        .find(pickled)
        .map(|name| format!("; {} is a PyTorch file, which is not read", shown(name)));
    format!("it has neither {CONFIG} with safetensors nor GGUF files{}", also.unwrap_or_default())
}

/// A file's name without its extension and its number among parts.
fn stem(name: &str) -> &str {
    Part::parse(name).map_or(name.strip_suffix(".gguf").unwrap_or(name), |part| part.prefix)
}

/// True if `tag` is one of the stem's words, or several that follow each other (`UD-Q4_K_XL`).
fn has_tag(stem: &str, tag: &str) -> bool {
    let (stem, tag) = (stem.to_ascii_lowercase(), tag.to_ascii_lowercase());
    let is_border = |c: Option<char>| c.is_none_or(|c| matches!(c, '-' | '.'));
    stem.match_indices(&tag).any(|(at, _)| {
        is_border(stem[..at].chars().next_back()) && is_border(stem[at + tag.len()..].chars().next())
    })
}

/// The plain names among an index' shards.
///
/// # Errors
/// A name that is not plain, or too many.
pub(super) fn plain(names: &[String], most: usize) -> Result<Vec<FileName>, String> {
    if names.len() > most {
        return Err(format!("it is in {} files; at most {most} are downloaded", names.len()));
    }
    let parse =
        |name: &String| FileName::parse(name).ok_or_else(|| format!("{} is no plain name", shown(name)));
    names.iter().map(parse).collect()
}
