//! Which of a repository's GGUF files make up the model that was asked for.

use crate::checkpoint::Part;

/// What llama.cpp takes where nothing is said.
const DEFAULT_TAG: &str = "Q4_K_M";

/// The files among `names` of the model that `tag` names (`Q4_K_M`, any case); without a tag, of the only one or of
/// the one that is `Q4_K_M`.
///
/// # Errors
/// What there is to choose from.
pub(super) fn gguf(names: &[String], tag: Option<&str>) -> Result<Vec<String>, String> {
    // Files in folders are left alone, as are the vision towers that some repositories have beside the model.
    let is_model =
        |name: &&String| name.ends_with(".gguf") && !name.contains('/') && !name.starts_with("mmproj");
    let mut models: Vec<&String> = names.iter().filter(is_model).collect();
    models.sort();
    let mut stems: Vec<_> = models.iter().map(|name| stem(name)).collect();
    stems.dedup();
    let tagged = |tag: &str| stems.iter().find(|stem| has_tag(stem, tag));
    let chosen = match (tag, stems.as_slice()) {
        (_, []) => return Err("it has neither config.json with safetensors nor GGUF files".into()),
        (Some(tag), _) => tagged(tag),
        (None, [only]) => Some(only),
        (None, _) => tagged(DEFAULT_TAG),
    };
    let Some(chosen) = chosen else {
        let wanted = tag.unwrap_or(DEFAULT_TAG);
        return Err(format!("none of its GGUF models is {wanted}: {}", stems.join(", ")));
    };
    Ok(models.into_iter().filter(|name| stem(name) == *chosen).cloned().collect())
}

/// All the files that there must be if there are `parts`.
pub(super) fn expected(parts: &[String]) -> Vec<String> {
    match parts.first().and_then(|first| Part::parse(first)) {
        Some(part) => part.names().collect(),
        None => parts.to_vec(),
    }
}

/// A file's name without its extension and its number among parts.
fn stem(name: &str) -> &str {
    Part::parse(name).map_or(name.trim_end_matches(".gguf"), |part| part.prefix)
}

/// Whether one of the stem's words is `tag`.
fn has_tag(stem: &str, tag: &str) -> bool {
    stem.split(['-', '.']).any(|word| word.eq_ignore_ascii_case(tag))
}
