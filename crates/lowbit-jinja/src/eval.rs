//! Evaluates expressions: names, attributes, items, calls and tests.

use std::rc::Rc;
use std::sync::Arc;

use indexmap::IndexMap;

use super::ast::{Arguments, Expression, Node};
use super::meter::{Fallible, Fault};
use super::run::{Passed, Run, Scope};
use super::show::shown;
use super::value::{Function, Key, Kind, Loop, Value, chars};

/// The longest `range`, as in Jinja2's sandbox.
const RANGE: i128 = 100_000;

impl<'p> Run<'p> {
    pub(super) fn eval(&self, node: &'p Node, scope: &Rc<Scope>) -> Fallible<Value> {
        let _level = self.meter.deeper()?;
        self.meter.step(1)?;
        self.expression(node, scope).map_err(|fault| fault.at(node.line))
    }

    fn expression(&self, node: &'p Node, scope: &Rc<Scope>) -> Fallible<Value> {
        match &node.expression {
            Expression::None => Ok(Value::None),
            Expression::Bool(value) => Ok(Value::Bool(*value)),
            Expression::Int(value) => Ok(Value::Int(*value)),
            Expression::Float(value) => Ok(Value::Float(*value)),
            Expression::Text(text) => Ok(Value::Text(text.clone())),
            Expression::Name(symbol) => self.lookup(*symbol, scope),
            Expression::List(nodes) => Value::list(self.eval_all(nodes, scope)?),
            Expression::Tuple(nodes) => Value::tuple(self.eval_all(nodes, scope)?),
            Expression::Dict(pairs) => {
                self.meter.take_elements(2 * pairs.len())?;
                let mut map = IndexMap::new();
                for (key, value) in pairs {
                    let key = Key::new(&self.eval(key, scope)?)?;
                    map.insert(key, self.eval(value, scope)?);
                }
                Value::dict(map)
            }
            Expression::Attribute(object, name) => self.attribute(&self.eval(object, scope)?, name),
            Expression::Item(pair) => self.item(&self.eval(&pair.0, scope)?, &self.eval(&pair.1, scope)?),
            Expression::Slice(slice) => {
                let object = self.eval(&slice.0, scope)?;
                let [start, stop, step] = &slice.1;
                let bound = |bound: &'p Option<Node>| match bound {
                    Some(node) => self.eval(node, scope),
                    None => Ok(Value::None),
                };
                self.slice(&object, [bound(start)?, bound(stop)?, bound(step)?])
            }
            Expression::Call(..) => self.eval_call(node, scope, None),
            Expression::Filter(input, name, arguments) => {
                let input = self.eval(input, scope)?;
                let passed = self.passed(arguments, scope)?;
                self.filter(name, input, passed)
            }
            Expression::Test(value, name, arguments, negated) => {
                let value = self.eval(value, scope)?;
                let passed = self.passed(arguments, scope)?;
                Ok(Value::Bool(self.test(name, &value, passed.positional)? != *negated))
            }
            Expression::Captured => Ok(self.captured.borrow().last().cloned().unwrap_or(Value::None)),
            Expression::Not(node) => Ok(Value::Bool(!self.eval(node, scope)?.is_true())),
            Expression::Negative(node) => self.negative(&self.eval(node, scope)?),
            Expression::Positive(node) => self.positive(self.eval(node, scope)?),
            Expression::Binary(operator, pair) => {
                let left = self.eval(&pair.0, scope)?;
                self.binary(*operator, &left, &self.eval(&pair.1, scope)?)
            }
            Expression::Concat(nodes) => {
                let mut text = String::new();
                for node in nodes {
                    let value = self.eval(node, scope)?;
                    self.write_str(&value, &mut text)?;
                }
                Ok(Value::text(text))
            }
            Expression::And(nodes) => self.first(nodes, scope, false),
            Expression::Or(nodes) => self.first(nodes, scope, true),
            Expression::Compare(first, others) => {
                let mut left = self.eval(first, scope)?;
                for (comparison, node) in others {
                    let right = self.eval(node, scope)?;
                    if !self.compare(*comparison, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Expression::Condition(pair, other) => match (self.eval(&pair.1, scope)?.is_true(), other) {
                (true, _) => self.eval(&pair.0, scope),
                (false, Some(other)) => self.eval(other, scope),
                (false, None) => Ok(Value::Undefined("".into(), None)),
            },
        }
    }

    fn eval_all(&self, nodes: &'p [Node], scope: &Rc<Scope>) -> Fallible<Vec<Value>> {
        self.meter.take_elements(nodes.len())?;
        nodes.iter().map(|node| self.eval(node, scope)).collect()
    }

    /// The first operand that is `wanted`, or the last.
    fn first(&self, nodes: &'p [Node], scope: &Rc<Scope>, wanted: bool) -> Fallible<Value> {
        let mut value = Value::None;
        for node in nodes {
            value = self.eval(node, scope)?;
            if value.is_true() == wanted {
                break;
            }
        }
        Ok(value)
    }

    fn passed(&self, arguments: &'p Arguments, scope: &Rc<Scope>) -> Fallible<Passed> {
        let mut positional = self.eval_all(&arguments.positional, scope)?;
        let mut keyword = vec![];
        self.meter.take_elements(2 * arguments.keyword.len())?;
        for (name, node) in &arguments.keyword {
            // As many as the source says: compared with each other.
            self.meter.step(keyword.len())?;
            if keyword.iter().any(|(known, _)| known == name) {
                return Err(Fault::new(format!("keyword argument repeated: {}", shown(name))));
            }
            keyword.push((name.clone(), self.eval(node, scope)?));
        }
        if let Some(list) = &arguments.list {
            let list = self.eval(list, scope)?.elements(&self.meter)?;
            self.meter.take_elements(list.items.len())?;
            positional.extend(list.items.iter().cloned());
        }
        if let Some(dict) = &arguments.dict {
            let dict = self.eval(dict, scope)?;
            let Value::Dict(dict) = &dict else {
                return Err(Fault::new(format!(
                    "argument after ** must be a mapping, not {}",
                    dict.kind().name()
                )));
            };
            self.meter.take_elements(2 * dict.map.len())?;
            for (key, value) in &dict.map {
                let Key::Text(name) = key else { return Err(Fault::new("keywords must be strings")) };
                self.meter.step(arguments.keyword.len())?;
                if arguments.keyword.iter().any(|(known, _)| known == name) {
                    let name = shown(name);
                    return Err(Fault::new(format!("got multiple values for keyword argument '{name}'")));
                }
                keyword.push((name.clone(), value.clone()));
            }
        }
        Ok(Passed { positional, keyword })
    }

    /// A call's value; a `call` block brings its `caller`.
    pub(super) fn eval_call(
        &self,
        node: &'p Node,
        scope: &Rc<Scope>,
        caller: Option<Value>,
    ) -> Fallible<Value> {
        let Expression::Call(callee, arguments) = &node.expression else {
            return Err(Fault::new("expected call"));
        };
        // `object.method()` needs no value for the method.
        if let Expression::Attribute(object, name) = &callee.expression {
            let object = self.eval(object, scope)?;
            let mut passed = self.passed(arguments, scope)?;
            if has_method(&object, name) {
                return self.method(&object, name, passed);
            }
            passed.keyword.extend(caller.map(|caller| ("caller".into(), caller)));
            return self.call(&self.attribute(&object, name)?, passed);
        }
        let callee = self.eval(callee, scope)?;
        let mut passed = self.passed(arguments, scope)?;
        passed.keyword.extend(caller.map(|caller| ("caller".into(), caller)));
        self.call(&callee, passed)
    }

    fn call(&self, callee: &Value, passed: Passed) -> Fallible<Value> {
        match callee {
            Value::Macro(id) => self.call_macro(*id, passed),
            Value::Loop(state) => self.recurse(state, passed),
            Value::Method(method) => self.method(&method.0, &method.1, passed),
            Value::Function(function) => self.function(*function, passed),
            Value::Undefined(..) => Err(undefined(callee)),
            _ => Err(Fault::new(format!("'{}' object is not callable", callee.kind().name()))),
        }
    }

    fn function(&self, function: Function, mut passed: Passed) -> Fallible<Value> {
        match function {
            Function::Range => range(passed),
            Function::Dict => Value::dict(self.dict_arguments(passed)?),
            Function::Namespace => self.namespace(self.dict_arguments(passed)?),
            Function::RaiseException => {
                let [message] = passed.bind("raise_exception", ["message"])?;
                let message = message.ok_or_else(|| Fault::new("raise_exception needs a message"))?;
                Err(Fault::new(&*self.str(&message)?))
            }
            Function::StrftimeNow => {
                let format = passed.take("format").or(passed.positional.pop());
                let Some(format) = format.as_ref().and_then(Value::as_text) else {
                    return Err(Fault::new("strftime_now takes a format"));
                };
                super::time::strftime(format, &jiff::Zoned::now()).map(Value::text)
            }
        }
    }

    /// `dict(mapping or pairs, name=value)`
    fn dict_arguments(&self, passed: Passed) -> Fallible<IndexMap<Key, Value>> {
        let mut map = IndexMap::new();
        if passed.positional.len() > 1 {
            return Err(Fault::new("dict expected at most 1 argument"));
        }
        if let Some(first) = passed.positional.first() {
            if let Value::Dict(dict) = first {
                self.meter.take_elements(2 * dict.map.len())?;
                map = dict.map.clone();
            } else {
                for pair in &first.elements(&self.meter)?.items {
                    let pair = pair.elements(&self.meter)?;
                    let [key, value] = &pair.items[..] else {
                        return Err(Fault::new("dict() takes pairs"));
                    };
                    self.meter.take_elements(2)?;
                    map.insert(Key::new(key)?, value.clone());
                }
            }
        }
        self.meter.take_elements(2 * passed.keyword.len())?;
        map.extend(passed.keyword.into_iter().map(|(name, value)| (Key::Text(name), value)));
        Ok(map)
    }

    /// `object.name`
    pub(super) fn attribute(&self, object: &Value, name: &Arc<str>) -> Fallible<Value> {
        if object.is_undefined() {
            return Err(undefined(object));
        }
        if has_method(object, name) {
            // Undefined in the sandbox; a call says why.
            return Ok(match super::methods::is_unsafe(object, name) {
                true => Value::Undefined(name.clone(), Some(object.kind())),
                false => Value::method(object, name),
            });
        }
        let found = match object {
            Value::Dict(dict) => dict.get(name).cloned(),
            Value::Namespace(id) => {
                let key = super::value::TextKey(name);
                self.namespaces.borrow()[*id].get(&key).cloned()
            }
            Value::Loop(state) => loop_attribute(state, name),
            Value::Tuple(list) if list.group && &**name == "grouper" => list.items.first().cloned(),
            Value::Tuple(list) if list.group && &**name == "list" => list.items.get(1).cloned(),
            Value::Macro(id) if &**name == "name" => {
                Some(Value::Text(self.macros.borrow()[*id].0.name.clone()))
            }
            _ => None,
        };
        Ok(found.unwrap_or_else(|| Value::Undefined(name.clone(), Some(object.kind()))))
    }

    /// `object[key]`
    pub(super) fn item(&self, object: &Value, key: &Value) -> Fallible<Value> {
        if object.is_markup() || key.is_markup() {
            return self.item(&object.plain(), &key.plain());
        }
        let found = match (object, key) {
            (Value::Undefined(..), _) => return Err(undefined(object)),
            (Value::Dict(dict), key) => Key::new(key).ok().and_then(|key| dict.map.get(&key).cloned()),
            (Value::Namespace(_), Value::Text(_)) => None,
            (_, Value::Int(_) | Value::Bool(_)) => self.element(object, key.as_int().unwrap_or(0))?,
            _ => None,
        };
        if let Some(value) = found {
            return Ok(value);
        }
        match key {
            Value::Text(name) if !matches!(object, Value::Dict(_)) || has_method(object, name) => {
                self.attribute(object, name)
            }
            Value::Text(name) => Ok(Value::Undefined(name.clone(), Some(object.kind()))),
            _ => {
                let name =
                    key.as_int().map_or_else(|| key.kind().name().to_string(), |index| index.to_string());
                Ok(Value::Undefined(name.into(), Some(object.kind())))
            }
        }
    }

    /// The element at an index, which counts from the end where it is negative.
    fn element(&self, object: &Value, index: i128) -> Fallible<Option<Value>> {
        let place = |length: usize| {
            let index = if index < 0 { index + length as i128 } else { index };
            usize::try_from(index).ok().filter(|index| *index < length)
        };
        Ok(match object {
            Value::List(list) | Value::Tuple(list) => {
                place(list.items.len()).map(|at| list.items[at].clone())
            }
            Value::Range(start, length, step) => place(*length as usize)
                .map(|at| Value::Int(i128::from(*start) + at as i128 * i128::from(*step))),
            Value::Text(text) => place(chars(text, &self.meter)?).and_then(|at| {
                let c = text.chars().nth(at)?;
                Some(Value::text(c.encode_utf8(&mut [0; 4]) as &str))
            }),
            _ => None,
        })
    }

    fn slice(&self, object: &Value, bounds: [Value; 3]) -> Fallible<Value> {
        if object.is_markup() {
            return Ok(self.slice(&object.plain(), bounds)?.marked());
        }
        let list = match object {
            Value::List(list) | Value::Tuple(list) => list.clone(),
            Value::Text(_) | Value::Range(..) => object.elements(&self.meter)?,
            Value::Undefined(..) => return Err(undefined(object)),
            _ => return Ok(Value::Undefined("slice".into(), Some(object.kind()))),
        };
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(&bounds) {
            *number = match bound {
                Value::None => None,
                // Python raises a TypeError, which Jinja2 turns into undefined.
                _ => match bound.as_int() {
                    Some(value) => Some(value.clamp(-(1 << 40), 1 << 40)),
                    None => return Ok(Value::Undefined("slice".into(), Some(object.kind()))),
                },
            };
        }
        let items: Vec<Value> =
            slice_indices(list.items.len(), numbers)?.map(|at| list.items[at].clone()).collect();
        self.meter.take_elements(items.len())?;
        match object {
            Value::Text(_) => Ok(Value::text(items.iter().filter_map(Value::as_text).collect::<String>())),
            Value::Tuple(_) => Value::tuple(items),
            _ => Value::list(items),
        }
    }
}

/// The places that Python's slice takes from a sequence.
fn slice_indices(length: usize, bounds: [Option<i128>; 3]) -> Fallible<impl Iterator<Item = usize>> {
    let length = length as i128;
    let step = bounds[2].unwrap_or(1);
    if step == 0 {
        return Err(Fault::new("slice step cannot be zero"));
    }
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |bound: Option<i128>, default: i128| match bound {
        None => default,
        Some(at) if at < 0 => (at + length).max(low),
        Some(at) => at.min(high),
    };
    let (start, stop) = match step > 0 {
        true => (place(bounds[0], 0), place(bounds[1], length)),
        false => (place(bounds[0], length - 1), place(bounds[1], -1)),
    };
    let mut at = start;
    Ok(std::iter::from_fn(move || {
        let inside = if step > 0 { at < stop } else { at > stop };
        let here = at;
        at += step;
        inside.then_some(here as usize)
    }))
}

fn range(passed: Passed) -> Fallible<Value> {
    let numbers: Option<Vec<i128>> = passed.positional.iter().map(Value::as_int).collect();
    let (start, stop, step) = match numbers.as_deref() {
        Some([stop]) => (0, *stop, 1),
        Some([start, stop]) => (*start, *stop, 1),
        Some([start, stop, step]) => (*start, *stop, *step),
        _ => return Err(Fault::new("range takes one to three integers")),
    };
    if step == 0 {
        return Err(Fault::new("range() arg 3 must not be zero"));
    }
    let small = |value: i128| i64::try_from(value).map_err(|_| Fault::new("range's numbers are too large"));
    let (start, stop, step) = (small(start)?, small(stop)?, small(step)?);
    let (distance, stride) = match step > 0 {
        true => (i128::from(stop) - i128::from(start), i128::from(step)),
        false => (i128::from(start) - i128::from(stop), -i128::from(step)),
    };
    let length = if distance <= 0 { 0 } else { (distance + stride - 1) / stride };
    if length > RANGE {
        return Err(Fault::new(format!(
            "range too big: it has {length} elements, at most {RANGE} are given"
        )));
    }
    Ok(Value::Range(start, length as u32, step))
}

fn loop_attribute(state: &Loop, name: &str) -> Option<Value> {
    let (index, length) = (state.index.get(), state.items.items.len());
    let number = |value: usize| Some(Value::Int(value as i128));
    let neighbour = |at: Option<usize>| at.and_then(|at| state.items.items.get(at).cloned());
    match name {
        "index" => number(index + 1),
        "index0" => number(index),
        "revindex" => number(length - index),
        "revindex0" => number(length - index - 1),
        "first" => Some(Value::Bool(index == 0)),
        "last" => Some(Value::Bool(index + 1 == length)),
        "length" => number(length),
        "depth" => number(state.depth),
        "depth0" => number(state.depth - 1),
        "previtem" => neighbour(index.checked_sub(1)),
        "nextitem" => neighbour(Some(index + 1)),
        _ => None,
    }
}

/// Why an undefined value cannot be used.
pub(super) fn undefined(value: &Value) -> Fault {
    let Value::Undefined(name, of) = value else { return Fault::new("a value is undefined") };
    let name = shown(name);
    Fault::new(match of {
        None => format!("'{name}' is undefined"),
        Some(Kind::None) => format!("'None' has no attribute '{name}'"),
        Some(kind) => format!("'{} object' has no attribute '{name}'", kind.name()),
    })
}

/// True if Python's type has a method of this name: in `object.name` it goes before a dictionary's
/// key.
fn has_method(object: &Value, name: &str) -> bool {
    super::methods::names(object).contains(&name)
}
