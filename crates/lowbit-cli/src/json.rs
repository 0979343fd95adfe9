//! `--json`: one object per line, whose `schema` says what it is. docs/json.md has the fields.

use crate::{Failure, out};
use serde::Serialize;

#[derive(Serialize)]
struct Versioned<'a, T> {
    schema: String,
    #[serde(flatten)]
    value: &'a T,
}

/// The version of all schemas: it grows when a field goes or means something else, not when one is
/// added.
const VERSION: u32 = 1;

/// Prints an object of the schema `lowbit.NAME/VERSION`.
///
/// # Errors
/// Standard output cannot be written to.
pub fn print<T: Serialize>(name: &str, value: &T) -> Result<(), Failure> {
    let schema = format!("lowbit.{name}/{VERSION}");
    Ok(out::line!("{}", escaped(serde_json::to_string(&Versioned { schema, value })?))?)
}

/// With escapes for the control characters that JSON leaves as they are, and a terminal obeys. They
/// mean the same.
fn escaped(json: String) -> String {
    if !json.contains(char::is_control) {
        return json;
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for character in json.chars() {
        match character.is_control() {
            true => escaped += &format!("\\u{:04x}", u32::from(character)),
            false => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_is_left() {
        let text = "a\u{1b}\n\u{7f}\u{9b}\u{e9}";
        let json = escaped(serde_json::to_string(text).unwrap());
        assert_eq!(json, "\"a\\u001b\\n\\u007f\\u009b\u{e9}\"");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }
}
