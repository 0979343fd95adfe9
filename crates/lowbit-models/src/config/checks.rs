//! All keys of a configuration beside what is computed.

use super::{Config, Source};
use crate::keys::{self, Role};
use crate::{ModelError, arch};
use lowbit_files::{gguf, shown};
use serde_json::Value;

/// Takes a key, its role and its value.
type Visit<'v> = dyn FnMut(&str, Option<Role>, Found<'_>) -> Result<(), ModelError> + 'v;

/// A value that [`Config::each`] came to.
enum Found<'a> {
    Json(&'a Value),
    Gguf(&'a gguf::Metadata),
}

impl Config<'_> {
    /// Refuses values that the peers compute with and lowbit does not.
    ///
    /// # Errors
    /// [`ModelError::Config`], which names the key, its value and the supported values.
    pub fn check(&self) -> Result<(), ModelError> {
        self.each(&mut |key, role, value| {
            let Some(Role::Only(values)) = role else { return Ok(()) };
            let accepted = match value {
                Found::Json(value) => value.is_null() || values.iter().any(|fixed| fixed.is(value)),
                Found::Gguf(metadata) => {
                    let matches = values.iter().map(|fixed| fixed.is_in(metadata, key));
                    matches.collect::<Result<Vec<_>, _>>()?.contains(&true)
                }
            };
            let got = || match value {
                Found::Json(value) => value.to_string(),
                Found::Gguf(metadata) => {
                    metadata.value(key).map_or(String::new(), |value| format!("{value:?}"))
                }
            };
            let want = || format!("only {} is supported", keys::listed(values));
            if accepted { Ok(()) } else { Err(self.refuse(key, &got(), &want())) }
        })?;
        self.check_text_type()
    }

    /// Refuses the text part of one architecture inside another one's wrapper.
    fn check_text_type(&self) -> Result<(), ModelError> {
        let Source::Json { text, wrapper: Some(_), model_type: Some(outer), .. } = &self.source else {
            return Ok(());
        };
        let Some(inner) = text.get("model_type").filter(|inner| !inner.is_null()) else { return Ok(()) };
        let architecture = |name: &str| {
            arch::model_type(name, None, arch::JsonFacts::default())
                .map(|(found, _)| std::ptr::from_ref(found))
        };
        let inner_name = inner.as_str();
        if inner_name.and_then(architecture) == architecture(outer)
            || self.found.is_some_and(|found| found.has_text_type(inner_name))
        {
            return Ok(());
        }
        let want = format!("model_type is {outer}");
        Err(self.refuse("text_config.model_type", &inner.to_string(), &want))
    }

    /// The keys that are in no table, in the spelling of errors: lowbit does not know what they
    /// change. None for an unknown architecture.
    pub fn unknown_keys(&self) -> Vec<String> {
        let mut unknown = vec![];
        let collected = self.each(&mut |key, role, value| {
            if role.is_none() && !matches!(value, Found::Json(Value::Null)) {
                unknown.push(shown(key).to_string());
            }
            Ok(())
        });
        debug_assert!(collected.is_ok());
        unknown
    }

    /// Calls `visit` for each key at the top, in `text_config` and in the objects whose keys are
    /// looked at.
    fn each(&self, visit: &mut Visit<'_>) -> Result<(), ModelError> {
        match &self.source {
            Source::Gguf { tables: [], .. } | Source::Json { tables: [], .. } => Ok(()),
            Source::Gguf { metadata, architecture, tables } => {
                let below = format!("{architecture}.");
                for (key, _) in metadata.iter() {
                    if let Some(name) = key.strip_prefix(&below) {
                        visit(key, keys::role(tables, name), Found::Gguf(metadata))?;
                    }
                }
                Ok(())
            }
            Source::Json { text, tables, wrapper, .. } => {
                for (key, value) in wrapper.iter().copied().flatten() {
                    visit(key, keys::role(&[keys::WRAPPER, keys::BASE], key), Found::Json(value))?;
                }
                let below = if wrapper.is_some() { "text_config." } else { "" };
                for (key, value) in *text {
                    visit(&format!("{below}{key}"), keys::role(tables, key), Found::Json(value))?;
                    let Some(tables) = keys::of_object(key) else { continue };
                    // Some architectures have one for each kind of layer.
                    let windows = self.found.and_then(|architecture| architecture.conversion.windows);
                    let kinds = windows.is_some_and(|windows| windows.ropes);
                    for (inner, value) in value.as_object().into_iter().flatten() {
                        let name = format!("{below}{key}.{inner}");
                        match value.as_object().filter(|_| kinds) {
                            None => visit(&name, keys::role(tables, inner), Found::Json(value))?,
                            Some(nested) => {
                                for (inner, value) in nested {
                                    let name = format!("{name}.{inner}");
                                    visit(&name, keys::role(tables, inner), Found::Json(value))?;
                                }
                            }
                        }
                    }
                }
                Ok(())
            }
        }
    }
}
