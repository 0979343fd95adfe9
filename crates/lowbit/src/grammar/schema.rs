//! JSON schemas: white space that ends, and the part of a schema that cannot be enforced.

use super::{FORM_BYTES, Grammars};
use crate::Error;
use llguidance::api::GrammarWithLexer;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// The white space between parts of a value, at most once: as much as indented JSON needs. Without
/// an end to it, a small model writes nothing else.
const SPACE: &str = r" |\n[ \t]{0,32}";

/// The time to look for the part of a schema that is wrong.
const SEARCH: Duration = Duration::from_secs(1);

/// Keywords whose value is a schema for each name, definitions first: a fault is in them, not in
/// those who refer to them.
const MAPS: [&str; 5] = ["$defs", "definitions", "properties", "patternProperties", "dependentSchemas"];
/// Keywords whose value is a list of schemas.
const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Keywords whose value is a schema.
const SINGLE: [&str; 2] = ["items", "additionalProperties"];

/// The schema with llguidance's options in it.
pub(super) fn spaced(schema: &Value) -> Value {
    let mut spaced = match schema {
        Value::Object(map) => map.clone(),
        Value::Bool(true) => Map::new(),
        other => return other.clone(),
    };
    spaced.insert("x-guidance".into(), json!({"whitespace_pattern": SPACE}));
    spaced.into()
}

impl Grammars {
    /// That a schema is no larger than may be.
    pub(super) fn check_schema(schema: &Value, path: &str) -> Result<(), Error> {
        let bytes = schema.to_string().len();
        match bytes > FORM_BYTES {
            true => Err(Error::form(path, format!("it has {bytes} bytes, but {FORM_BYTES} may be"))),
            false => Ok(()),
        }
    }

    /// llguidance's message for a schema that it does not take.
    pub(super) fn refusal(&self, schema: &Value) -> Option<String> {
        self.matcher(vec![GrammarWithLexer::from_json_schema(spaced(schema))]).err()
    }

    /// The error for a schema at `path` that is refused with `problem`: it names the smallest part
    /// that is refused so by itself.
    pub(super) fn blame(&self, schema: &Value, path: &str, problem: &str) -> Error {
        let end = Instant::now() + SEARCH;
        let (mut path, mut part) = (path.to_string(), schema);
        'deeper: loop {
            for (name, inner) in parts(part) {
                if Instant::now() > end {
                    break 'deeper;
                }
                if self.refusal(&alone(inner, schema)).as_deref() == Some(problem) {
                    (path, part) = (path + &name, inner);
                    continue 'deeper;
                }
            }
            break;
        }
        Error::form(path, problem)
    }
}

/// The schemas in a schema, and their paths from there.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let mut parts = vec![];
    for keyword in MAPS {
        for (name, inner) in schema[keyword].as_object().into_iter().flatten() {
            parts.push((format!(".{keyword}.{name}"), inner));
        }
    }
    for keyword in LISTS {
        for (index, inner) in schema[keyword].as_array().into_iter().flatten().enumerate() {
            parts.push((format!(".{keyword}[{index}]"), inner));
        }
    }
    for keyword in SINGLE {
        if schema[keyword].is_object() {
            parts.push((format!(".{keyword}"), &schema[keyword]));
        }
    }
    parts
}

/// A part of `root` with the definitions that it may refer to.
pub(super) fn alone(part: &Value, root: &Value) -> Value {
    let Value::Object(part) = part else { return part.clone() };
    let mut part = part.clone();
    for keyword in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(keyword) {
            part.entry(keyword).or_insert_with(|| definitions.clone());
        }
    }
    part.into()
}
