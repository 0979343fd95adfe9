//! Python's methods of lists, dictionaries, numbers and loops; text has its own file.

use std::sync::Arc;

use super::meter::{Fallible, Fault};
use super::run::{Passed, Run};
use super::value::{Key, Value, View};

const TEXT: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const LIST: &[&str] =
    &["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"];
const DICT: &[&str] = &[
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];
/// Methods that change their object: the sandbox that transformers uses refuses them.
const UNSAFE: &[&str] = &[
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];

/// The methods of the value's type.
pub(super) fn names(value: &Value) -> &'static [&'static str] {
    match value {
        Value::Text(_) | Value::Markup(_) => TEXT,
        Value::List(_) => LIST,
        Value::Tuple(_) | Value::Range(..) => &["count", "index"],
        Value::Dict(_) => DICT,
        Value::Float(_) => &["is_integer"],
        Value::Loop(_) => &["changed", "cycle"],
        Value::Function(super::value::Function::Dict) => &["fromkeys"],
        _ => &[],
    }
}

/// True if the method would change its object.
pub(super) fn is_unsafe(object: &Value, name: &str) -> bool {
    matches!(object, Value::List(_) | Value::Dict(_)) && UNSAFE.contains(&name)
}

impl Run<'_> {
    pub(super) fn method(&self, object: &Value, name: &Arc<str>, passed: Passed) -> Fallible<Value> {
        let passed = passed.plain();
        if object.is_markup() {
            return Ok(self.method(&object.plain(), name, passed)?.marked());
        }
        if is_unsafe(object, name) {
            let kind = object.kind().name();
            return Err(Fault::new(format!("access to attribute '{name}' of '{kind}' object is unsafe.")));
        }
        match object {
            Value::Text(text) => self.text_method(text, name, passed),
            Value::Dict(dict) => match &**name {
                "get" => {
                    let [key, default] = passed.bind("get", ["key", "default"])?;
                    let key =
                        Key::new(&key.ok_or_else(|| Fault::new("get expected at least 1 argument, got 0"))?)?;
                    Ok(dict.map.get(&key).cloned().or(default).unwrap_or(Value::None))
                }
                "items" | "keys" | "values" => {
                    let [] = passed.bind(name, [])?;
                    let view = match &**name {
                        "items" => View::Items,
                        "keys" => View::Keys,
                        _ => View::Values,
                    };
                    Ok(Value::View(view, dict.clone()))
                }
                "copy" => Ok(object.clone()),
                _ => self.keys_to(passed),
            },
            Value::List(_) | Value::Tuple(_) | Value::Range(..) => match &**name {
                "copy" => Ok(object.clone()),
                "count" => {
                    let [item] = passed.bind("count", ["value"])?;
                    let places = self.places(object, item, usize::MAX)?;
                    Ok(Value::Int(places.len() as i128))
                }
                _ => {
                    let [item] = passed.bind("index", ["value"])?;
                    let places = self.places(object, item, 1)?;
                    let first = places.first().ok_or_else(|| Fault::new("the value is not in the list"))?;
                    Ok(Value::Int(*first as i128))
                }
            },
            Value::Float(value) => Ok(Value::Bool(value.fract() == 0.0)),
            Value::Function(_) => self.keys_to(passed),
            Value::Loop(state) if &**name == "cycle" => {
                let count = passed.positional.len();
                let at = state.index.get().checked_rem(count);
                Ok(at.ok_or_else(|| Fault::new("no items for cycling given"))?)
                    .map(|at| passed.positional[at].clone())
            }
            Value::Loop(state) => {
                let value = Value::tuple(passed.positional)?;
                let last = self.changed.borrow().get(&state.id).cloned();
                let same = last.map_or(Ok(false), |last| self.equal(&last, &value))?;
                self.changed.borrow_mut().insert(state.id, value);
                Ok(Value::Bool(!same))
            }
            _ => Err(Fault::new(format!("'{}' object has no method '{name}'", object.kind().name()))),
        }
    }

    /// The indices of the item in the sequence, at most `limit` of them.
    fn places(&self, sequence: &Value, item: Option<Value>, limit: usize) -> Fallible<Vec<usize>> {
        let item = item.ok_or_else(|| Fault::new("a value to look for is missing"))?;
        let mut places = vec![];
        for (index, other) in sequence.elements(&self.meter)?.items.iter().enumerate() {
            if self.equal(other, &item)? {
                self.meter.take(8)?;
                places.push(index);
                if places.len() == limit {
                    break;
                }
            }
        }
        Ok(places)
    }

    fn keys_to(&self, passed: Passed) -> Fallible<Value> {
        let [keys, value] = passed.bind("fromkeys", ["iterable", "value"])?;
        let keys = keys.ok_or_else(|| Fault::new("fromkeys expected at least 1 argument"))?;
        let keys = keys.elements(&self.meter)?;
        self.meter.take_elements(2 * keys.items.len())?;
        let value = value.unwrap_or(Value::None);
        Value::dict(
            keys.items.iter().map(|key| Ok((Key::new(key)?, value.clone()))).collect::<Fallible<_>>()?,
        )
    }
}
