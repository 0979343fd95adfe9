//! Python's values, as far as templates see them.
//!
//! Containers never change after they were made, and know how deeply they nest; what does change
//! (namespaces, macros' scopes, loops) lies with the interpreter, and values hold its number. So
//! there are no cycles, and no chain of values is dropped recursively beyond a known depth.

use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use indexmap::{Equivalent, IndexMap};
use serde_json::Value as Json;

use super::meter::{Fallible, Fault, Meter, VALUE_DEPTH};

#[derive(Clone)]
pub(super) enum Value {
    /// The name that is not there, and the type of what it was looked up in.
    Undefined(Arc<str>, Option<Kind>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    /// Text that `safe` or `escape` marked: what is added to it is escaped.
    Markup(Arc<str>),
    List(Rc<List>),
    Tuple(Rc<List>),
    Dict(Rc<Dict>),
    /// `dict.keys()`, `.values()` and `.items()`.
    View(View, Rc<Dict>),
    /// Start, length and step.
    Range(i64, u32, i64),
    /// The result of `map`, `select` and their like: it can be iterated once.
    Generator(Rc<Generator>),
    Namespace(usize),
    Macro(usize),
    Loop(Rc<Loop>),
    /// A method and its object, before the call.
    Method(Rc<(Value, Arc<str>)>),
    Function(Function),
}

pub(super) struct List {
    pub(super) items: Vec<Value>,
    depth: u16,
    /// From `groupby`: the elements are called `grouper` and `list`.
    pub(super) group: bool,
}

pub(super) struct Dict {
    pub(super) map: IndexMap<Key, Value>,
    depth: u16,
}

pub(super) struct Generator(Cell<Option<Rc<List>>>, u16);

/// A loop's state, as its variable `loop` shows it.
pub(super) struct Loop {
    /// Names the loop to the interpreter.
    pub(super) id: usize,
    pub(super) items: Rc<List>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Range,
    Dict,
    Namespace,
    RaiseException,
    StrftimeNow,
}

/// A value's type, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Undefined,
    None,
    Bool,
    Int,
    Float,
    Text,
    List,
    Tuple,
    Dict,
    Other(&'static str),
}

impl Kind {
    /// As Python's errors call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Undefined => "Undefined",
            Self::None => "NoneType",
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Float => "float",
            Self::Text => "str",
            Self::List => "list",
            Self::Tuple => "tuple",
            Self::Dict => "dict",
            Self::Other(name) => name,
        }
    }
}

impl Value {
    pub(super) fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Text(text.into())
    }

    pub(super) fn list(items: Vec<Value>) -> Fallible<Self> {
        Ok(Self::List(List::new(items)?))
    }

    pub(super) fn tuple(items: Vec<Value>) -> Fallible<Self> {
        Ok(Self::Tuple(List::new(items)?))
    }

    pub(super) fn dict(map: IndexMap<Key, Value>) -> Fallible<Self> {
        let depth = deeper(map.values())?;
        Ok(Self::Dict(Rc::new(Dict { map, depth })))
    }

    pub(super) fn generator(items: Vec<Value>) -> Fallible<Self> {
        let list = List::new(items)?;
        let depth = list.depth;
        Ok(Self::Generator(Rc::new(Generator(Cell::new(Some(list)), depth))))
    }

    pub(super) fn method(object: &Value, name: &Arc<str>) -> Self {
        Self::Method(Rc::new((object.clone(), name.clone())))
    }

    /// A variable's value; `depth` says how deep it may nest still.
    pub(super) fn from_json(json: &Json) -> Fallible<Self> {
        Ok(match json {
            Json::Null => Self::None,
            Json::Bool(value) => Self::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Self::Int(value.into()),
                (_, Some(value)) => Self::Int(value.into()),
                _ => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::text(text.as_str()),
            Json::Array(items) => Self::list(items.iter().map(Self::from_json).collect::<Result<_, _>>()?)?,
            Json::Object(map) => {
                let pair = |(key, value): (&String, &Json)| {
                    Ok((Key::Text(key.as_str().into()), Self::from_json(value)?))
                };
                Self::dict(map.iter().map(pair).collect::<Result<_, Fault>>()?)?
            }
        })
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Undefined(..) => Kind::Undefined,
            Self::None => Kind::None,
            Self::Bool(_) => Kind::Bool,
            Self::Int(_) => Kind::Int,
            Self::Float(_) => Kind::Float,
            Self::Text(_) | Self::Markup(_) => Kind::Text,
            Self::List(_) => Kind::List,
            Self::Tuple(_) => Kind::Tuple,
            Self::Dict(_) => Kind::Dict,
            Self::View(View::Keys, _) => Kind::Other("dict_keys"),
            Self::View(View::Values, _) => Kind::Other("dict_values"),
            Self::View(View::Items, _) => Kind::Other("dict_items"),
            Self::Range(..) => Kind::Other("range"),
            Self::Generator(_) => Kind::Other("generator"),
            Self::Namespace(_) => Kind::Other("Namespace"),
            Self::Macro(_) => Kind::Other("Macro"),
            Self::Loop(_) => Kind::Other("LoopContext"),
            Self::Method(_) => Kind::Other("builtin_function_or_method"),
            Self::Function(_) => Kind::Other("function"),
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(..))
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn is_markup(&self) -> bool {
        matches!(self, Self::Markup(_))
    }

    /// Without the mark.
    pub(super) fn plain(&self) -> Self {
        match self {
            Self::Markup(text) => Self::Text(text.clone()),
            value => value.clone(),
        }
    }

    /// Text with the mark.
    pub(super) fn marked(self) -> Self {
        match self {
            Self::Text(text) => Self::Markup(text),
            value => value,
        }
    }

    /// Integers and bools.
    pub(super) fn as_int(&self) -> Option<i128> {
        match *self {
            Self::Int(value) => Some(value),
            Self::Bool(value) => Some(value.into()),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match *self {
            Self::Float(value) => Some(value),
            _ => self.as_int().map(|value| value as f64),
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(..) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Loop(_) => true,
            _ => self.len() != Some(0),
        }
    }

    /// The result of `len()` where Python has it, but for text: that takes a scan ([`chars`]).
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Self::Undefined(..) => Some(0),
            Self::Text(text) | Self::Markup(text) => Some(text.len()),
            Self::List(list) | Self::Tuple(list) => Some(list.items.len()),
            Self::Dict(dict) | Self::View(_, dict) => Some(dict.map.len()),
            Self::Range(_, length, _) => Some(*length as usize),
            Self::Loop(state) => Some(state.items.items.len()),
            _ => None,
        }
    }

    fn depth(&self) -> u16 {
        match self {
            Self::List(list) | Self::Tuple(list) => list.depth,
            Self::Dict(dict) | Self::View(_, dict) => dict.depth,
            Self::Generator(generator) => generator.1,
            Self::Loop(state) => state.items.depth,
            Self::Method(method) => method.0.depth(),
            _ => 0,
        }
    }

    /// The elements that a `for` sees.
    pub(super) fn elements(&self, meter: &Meter) -> Fallible<Rc<List>> {
        meter.step(1)?;
        if let Self::List(list) | Self::Tuple(list) = self {
            return Ok(list.clone());
        }
        if let Self::Generator(generator) = self {
            return generator.0.take().map_or_else(|| List::new(vec![]), Ok);
        }
        if let Some(length) = self.len() {
            meter.take_elements(length)?;
        }
        List::new(match self {
            Self::Undefined(..) => vec![],
            Self::Text(text) | Self::Markup(text) => {
                text.chars().map(|c| Self::text(c.encode_utf8(&mut [0; 4]) as &str)).collect()
            }
            Self::Dict(dict) | Self::View(View::Keys, dict) => dict.map.keys().map(Key::value).collect(),
            Self::View(View::Values, dict) => dict.map.values().cloned().collect(),
            Self::View(View::Items, dict) => dict.pairs()?,
            Self::Range(start, length, step) => (0..i128::from(*length))
                .map(|i| Self::Int(i128::from(*start) + i * i128::from(*step)))
                .collect(),
            _ => return Err(Fault::new(format!("'{}' object is not iterable", self.kind().name()))),
        })
    }
}

impl Dict {
    /// Tuples of keys and values.
    pub(super) fn pairs(&self) -> Fallible<Vec<Value>> {
        self.map.iter().map(|(key, value)| Value::tuple(vec![key.value(), value.clone()])).collect()
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(&TextKey(key))
    }
}

impl List {
    pub(super) fn new(items: Vec<Value>) -> Fallible<Rc<Self>> {
        let depth = deeper(items.iter())?;
        Ok(Rc::new(Self { items, depth, group: false }))
    }

    pub(super) fn group(items: [Value; 2]) -> Fallible<Value> {
        let depth = deeper(items.iter())?;
        Ok(Value::Tuple(Rc::new(Self { items: items.into(), depth, group: true })))
    }
}

fn deeper<'v>(values: impl Iterator<Item = &'v Value>) -> Fallible<u16> {
    match values.map(Value::depth).max().unwrap_or(0) + 1 {
        depth if depth <= VALUE_DEPTH => Ok(depth),
        _ => Err(Fault::new(format!("a value nests deeper than {VALUE_DEPTH} lists and dictionaries"))),
    }
}

/// A dictionary's key. As in Python 1, 1.0 and True are one.
#[derive(Clone)]
pub(super) enum Key {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
}

#[derive(PartialEq, Eq, Hash)]
enum Canonical<'k> {
    None,
    Int(i128),
    Bits(u64),
    Text(&'k str),
}

impl Key {
    pub(super) fn new(value: &Value) -> Fallible<Self> {
        Ok(match value {
            Value::None => Self::None,
            Value::Bool(value) => Self::Bool(*value),
            Value::Int(value) => Self::Int(*value),
            Value::Float(value) => Self::Float(*value),
            Value::Text(text) | Value::Markup(text) => Self::Text(text.clone()),
            _ => return Err(Fault::new(format!("unhashable type: '{}'", value.kind().name()))),
        })
    }

    pub(super) fn value(&self) -> Value {
        match self {
            Self::None => Value::None,
            Self::Bool(value) => Value::Bool(*value),
            Self::Int(value) => Value::Int(*value),
            Self::Float(value) => Value::Float(*value),
            Self::Text(text) => Value::Text(text.clone()),
        }
    }

    fn canonical(&self) -> Canonical<'_> {
        match self {
            Self::None => Canonical::None,
            Self::Bool(value) => Canonical::Int((*value).into()),
            Self::Int(value) => Canonical::Int(*value),
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 1e30 => {
                Canonical::Int(*value as i128)
            }
            Self::Float(value) => Canonical::Bits(value.to_bits()),
            Self::Text(text) => Canonical::Text(text),
        }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.canonical().hash(state);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.canonical() == other.canonical()
    }
}

impl Eq for Key {}

/// Finds a key without making one.
#[derive(PartialEq, Eq)]
pub(super) struct TextKey<'k>(pub(super) &'k str);

impl Hash for TextKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Canonical::Text(self.0).hash(state);
    }
}

impl Equivalent<Key> for TextKey<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        matches!(key, Key::Text(text) if **text == *self.0)
    }
}

/// Characters of a text, which take a scan.
pub(super) fn chars(text: &str, meter: &Meter) -> Fallible<usize> {
    meter.scan(text.len())?;
    Ok(text.chars().count())
}
