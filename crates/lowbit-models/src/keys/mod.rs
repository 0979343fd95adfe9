//! The role of every key that a configuration may have. The tables drive reading ([`Config`]'s
//! getters), refusals ([`Config::check`]) and warnings ([`Config::unknown_keys`]), so that no key
//! is ignored silently. Each architecture's file has its own table; this folder has the shared
//! ones.
//!
//! Source: the configuration classes of transformers 5.23; `tests/vectors/config_keys` lists their
//! keys, and a test compares. For GGUF the keys that llama.cpp reads.
//!
//! [`Config`]: crate::Config
//! [`Config::check`]: crate::Config::check
//! [`Config::unknown_keys`]: crate::Config::unknown_keys

mod gguf;
mod json;
#[cfg(test)]
mod tests;

pub use gguf::{GGUF, GGUF_DENSE, GGUF_EXPERTS, GGUF_HYBRID, GGUF_KIMI_DELTA, GGUF_MAMBA, GGUF_SIGMOIDS};
pub use json::{BASE, DECODER, EXPERTS, HYBRID, LINEAR_ATTN, ROPE, WRAPPER};

use lowbit_files::{FileError, gguf::Metadata};
use serde_json::Value;

/// Lists of keys, one after the other.
pub type Tables = &'static [&'static [Key]];

/// A key and its role.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// As the file spells it; in GGUF, what follows the architecture's name.
    pub name: &'static str,
    /// Its role.
    pub role: Role,
}

/// The role of a key.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    /// lowbit computes with the value, or checks it where it is read.
    Computed(Absent),
    /// Another name of a computed key, which it overrides.
    Alias(&'static str),
    /// Only these values are computed; all others are refused. A missing key means one of them.
    Only(&'static [Fixed]),
    /// The peers compute the same for every value: training, outputs, other parts of a multimodal
    /// model.
    NoEffect,
}

/// The meaning of a missing key.
#[derive(Clone, Copy, Debug)]
pub enum Absent {
    /// An error. (transformers has defaults for sizes, but a file that relies on them is cut or
    /// damaged.)
    Required,
    /// Nothing, or what other keys imply.
    Nothing,
    /// transformers' default.
    Is(Fixed),
    /// transformers' default; mlx-lm has another, so an MLX checkpoint must have the key.
    Disputed(Fixed),
}

/// A value in a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fixed {
    /// `true` or `false`.
    Flag(bool),
    /// A whole number.
    Int(usize),
    /// A number.
    Float(f64),
    /// A string.
    Text(&'static str),
    /// An empty list or object.
    Empty,
}

impl Fixed {
    /// The same in JSON.
    pub fn value(self) -> Value {
        match self {
            Self::Flag(flag) => flag.into(),
            Self::Int(size) => size.into(),
            Self::Float(float) => float.into(),
            Self::Text(text) => text.into(),
            Self::Empty => Value::Array(vec![]),
        }
    }

    /// True if `value` is this one, whatever form a number has.
    pub fn is(self, value: &Value) -> bool {
        match self {
            Self::Flag(flag) => value.as_bool() == Some(flag),
            Self::Int(size) => value.as_f64() == Some(size as f64),
            Self::Float(float) => value.as_f64() == Some(float),
            Self::Text(text) => value.as_str() == Some(text),
            Self::Empty => {
                value.as_array().is_some_and(Vec::is_empty)
                    || value.as_object().is_some_and(serde_json::Map::is_empty)
            }
        }
    }

    /// True if `key` of GGUF's metadata has this value.
    ///
    /// # Errors
    /// [`FileError::Gguf`] when it is of another type.
    pub fn is_in(self, metadata: &Metadata, key: &str) -> Result<bool, FileError> {
        Ok(match self {
            Self::Flag(flag) => metadata.find::<bool>(key)? == Some(flag),
            Self::Int(size) => metadata.find::<usize>(key)? == Some(size),
            Self::Float(float) => metadata.find::<f64>(key)? == Some(float),
            Self::Text(text) => metadata.find::<&str>(key)? == Some(text),
            Self::Empty => false,
        })
    }
}

impl std::fmt::Display for Fixed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.value().fmt(f)
    }
}

impl Key {
    const fn computed(name: &'static str, absent: Absent) -> Self {
        Self { name, role: Role::Computed(absent) }
    }

    /// Computed; a missing one is an error.
    pub const fn required(name: &'static str) -> Self {
        Self::computed(name, Absent::Required)
    }

    /// Computed; a missing one means nothing, or what other keys imply.
    pub const fn optional(name: &'static str) -> Self {
        Self::computed(name, Absent::Nothing)
    }

    /// Computed; transformers' default for a missing one.
    pub const fn or(name: &'static str, default: Fixed) -> Self {
        Self::computed(name, Absent::Is(default))
    }

    /// As [`Self::or`], for a whole number.
    pub const fn size(name: &'static str, default: usize) -> Self {
        Self::or(name, Fixed::Int(default))
    }

    /// As [`Self::or`], for a flag.
    pub const fn flag(name: &'static str, default: bool) -> Self {
        Self::or(name, Fixed::Flag(default))
    }

    /// Computed; transformers' default for a missing one, which mlx-lm does not share.
    pub const fn disputed(name: &'static str, default: Fixed) -> Self {
        Self::computed(name, Absent::Disputed(default))
    }

    /// Refused unless it is one of `values`.
    pub const fn only(name: &'static str, values: &'static [Fixed]) -> Self {
        Self { name, role: Role::Only(values) }
    }

    /// Known, and without effect.
    pub const fn no_effect(name: &'static str) -> Self {
        Self { name, role: Role::NoEffect }
    }
}

/// The role of `name`, in the first table that has it.
pub fn role(tables: Tables, name: &str) -> Option<Role> {
    tables.iter().copied().flatten().find(|key| key.name == name).map(|key| key.role)
}

/// The table of the object that `key` of `config.json` has, if its keys are looked at.
pub fn of_object(key: &str) -> Option<Tables> {
    match key {
        "rope_parameters" | "rope_scaling" => Some(&[ROPE]),
        "linear_attn_config" => Some(&[LINEAR_ATTN]),
        _ => None,
    }
}

/// The values that a key may have, for a message.
pub fn listed(values: &[Fixed]) -> String {
    match values {
        [] => "no value".into(),
        values => values.iter().map(Fixed::to_string).collect::<Vec<_>>().join(" or "),
    }
}
