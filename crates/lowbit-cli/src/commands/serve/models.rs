//! Several models for a server: the file that `--models` names.

use super::{Arguments, Prepared};
use crate::{Failure, habits, out};
use lowbit_files::{shown, shown_path};
use lowbit_serve::{Loaded, Offer};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The most models that are loaded at a time.
    #[serde(default = "one")]
    max_loaded: usize,
    model: Vec<Entry>,
}

fn one() -> usize {
    1
}

/// A model of the file.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Its name for clients.
    name: String,
    /// Further names.
    #[serde(default)]
    alias: Vec<String>,
    /// As --model has it; a path is taken from the file's folder.
    path: String,
    /// As --device has it.
    device: Option<String>,
    /// As --ctx-size has it.
    context: Option<usize>,
}

/// The models of a file, and the most that are loaded at a time.
pub fn read(path: &Path, arguments: &Arc<Arguments>) -> Result<(Vec<Offer>, usize), Failure> {
    let wrong = |problem: String| Failure::from(format!("{}: {problem}", shown_path(path)));
    let text = habits::read_text(path)?;
    let file: File = toml::from_str(&text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        wrong(format!("line {line}: {}", shown(error.message())))
    })?;
    if file.model.is_empty() {
        return Err(wrong("has no [[model]]".into()));
    }
    if file.max_loaded == 0 {
        return Err(wrong("max_loaded: is 0, but at least 1 is wanted".into()));
    }
    let mut names: Vec<&String> =
        file.model.iter().flat_map(|of| of.alias.iter().chain([&of.name])).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(wrong(format!("two models are named {}", shown(pair[0]))));
    }
    let most = file.max_loaded.min(file.model.len());
    let offer = |entry: &Entry| -> Result<Offer, Failure> {
        let (arguments, entry) = (arguments.clone(), entry.within(path));
        // Wrong devices are said at the start.
        let model = arguments
            .model
            .named(&entry.path, entry.device.as_deref())
            .map_err(|problem| wrong(format!("{}: device: {problem}", shown(&entry.name))))?;
        let (name, aliases) = (entry.name.clone(), entry.alias.clone());
        let load = move || -> Result<Loaded, String> {
            let asked = entry.context.or(arguments.engine.ctx_size);
            let names = [std::slice::from_ref(&entry.name), &entry.alias[..]].concat();
            let prepared = Prepared::load(&arguments, (&model, asked), names, (most, None));
            let prepared = prepared.map_err(|failure| failure.to_string())?;
            out::note!("{}", prepared.ready());
            Ok(prepared.loaded())
        };
        Ok(Offer::new(name, Box::new(load)).with_aliases(aliases))
    };
    Ok((file.model.iter().map(offer).collect::<Result<_, Failure>>()?, most))
}

impl Entry {
    /// With a path that does not depend on where the program runs, if it is one.
    fn within(&self, file: &Path) -> Self {
        let path = habits::expand_home(&self.path);
        let beside = file.parent().unwrap_or_else(|| Path::new("")).join(path);
        let path = if beside.exists() { beside.to_string_lossy().into_owned() } else { self.path.clone() };
        Self { path, ..self.clone() }
    }
}
