//! `--json`: one object per line, whose `schema` says what it is. docs/json.md has the fields.

use crate::{Failure, out};
use serde::Serialize;

#[derive(Serialize)]
struct Versioned<'a, T> {
    schema: String,
    #[serde(flatten)]
    value: &'a T,
}

/// The version of all schemas: it grows when a field goes or means something else, not when one is added.
const VERSION: u32 = 1;

/// Prints an object of the schema `lowbit.NAME/VERSION`.
///
/// # Errors
/// Standard output cannot be written to.
pub fn print<T: Serialize>(name: &str, value: &T) -> Result<(), Failure> {
    let schema = format!("lowbit.{name}/{VERSION}");
    Ok(out::line!("{}", serde_json::to_string(&Versioned { schema, value })?)?)
}
