//! The fields of a request's JSON object, taken one by one.

use crate::error::ApiError;
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// An object of a request. Fields that are null count as absent, as OpenAI's clients mean them.
#[derive(Debug)]
pub(crate) struct Fields {
    map: Map<String, Value>,
    /// The path to it, with a dot behind, for errors.
    path: String,
}

impl Fields {
    /// A body, which must be a JSON object.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let wrong = |problem: String| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", problem);
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map, path: String::new() }),
            Ok(other) => Err(wrong(format!("the body must be a JSON object, but is {}", kind(&other)))),
            Err(error) => Err(wrong(format!("the body is no JSON: {error}"))),
        }
    }

    /// The object `value` at `path`.
    pub(crate) fn of(value: Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: format!("{path}.") }),
            other => Err(ApiError::field(path, format!("must be an object, but is {}", kind(&other)))),
        }
    }

    /// A field's name with its path.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Takes a field of any type.
    pub(crate) fn value(&mut self, name: &str) -> Option<Value> {
        self.map.shift_remove(name).filter(|value| !value.is_null())
    }

    /// A field that is a string, which stays.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.map.get(name).and_then(Value::as_str)
    }

    /// Puts a field back.
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.into(), value);
    }

    /// Takes a field.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let found = kind(&value);
        let wrong = |error| ApiError::field(&self.path(name), format!("{error} (it is {found})"));
        serde_json::from_value(value).map(Some).map_err(wrong)
    }

    /// Takes a field that must be there.
    pub(crate) fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        let path = self.path(name);
        self.take(name)?.ok_or_else(|| ApiError::field(&path, "is missing"))
    }

    /// Takes a field that is an object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let path = self.path(name);
        self.value(name).map(|value| Self::of(value, &path)).transpose()
    }

    /// Takes a field that is a list.
    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        let path = self.path(name);
        match self.value(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(ApiError::field(&path, format!("must be a list, but is {}", kind(&other)))),
        }
    }

    /// A whole number between these, both included.
    pub(crate) fn count(&mut self, name: &str, least: u64, most: u64) -> Result<Option<usize>, ApiError> {
        let Some(number) = self.take::<i64>(name)? else { return Ok(None) };
        let count = u64::try_from(number).ok().filter(|count| (least..=most).contains(count));
        let count = count.and_then(|count| usize::try_from(count).ok());
        let wrong = || {
            let problem = format!("is {number}, but {least} to {most} is wanted");
            ApiError::field(&self.path(name), problem)
        };
        count.map(Some).ok_or_else(wrong)
    }

    /// Drops fields that change nothing here.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.map.shift_remove(*name);
        }
    }

    /// Refuses fields whose effect the client would miss, unless they ask for nothing: false, 0, or
    /// empty.
    pub(crate) fn refuse(&mut self, names: &[&str], why: &str) -> Result<(), ApiError> {
        for name in names {
            let asks = match self.value(name) {
                None | Some(Value::Bool(false)) => false,
                Some(Value::Array(list)) => !list.is_empty(),
                Some(Value::Object(map)) => !map.is_empty(),
                Some(Value::String(text)) => !text.is_empty(),
                Some(Value::Number(number)) => number.as_f64() != Some(0.0),
                Some(_) => true,
            };
            if asks {
                return Err(ApiError::unsupported(&self.path(name), why));
            }
        }
        Ok(())
    }

    /// The names of the fields that nobody took.
    pub(crate) fn unknown(&self) -> impl Iterator<Item = String> {
        let given = self.map.iter().filter(|(_, value)| !value.is_null());
        given.map(|(name, _)| self.path(name))
    }
}

/// A JSON value's type, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
