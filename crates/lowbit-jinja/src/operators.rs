//! Arithmetic and comparison, as Python's types have them.

use std::cmp::Ordering;
use std::rc::Rc;

use super::ast::{Comparison, Operator};
use super::eval::undefined;
use super::meter::{Fallible, Fault};
use super::run::Run;
use super::value::{Dict, Key, List, Value, View};

impl Run<'_> {
    pub(super) fn binary(&self, operator: Operator, left: &Value, right: &Value) -> Fallible<Value> {
        for operand in [left, right] {
            if operand.is_undefined() {
                return Err(undefined(operand));
            }
        }
        if left.is_markup() || right.is_markup() {
            return self.binary_markup(operator, left, right);
        }
        if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
            return integers(operator, a, b);
        }
        if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
            return floats(operator, a, b);
        }
        match (operator, left, right) {
            (Operator::Add, Value::Text(a), Value::Text(b)) => {
                self.meter.take(a.len() + b.len())?;
                Ok(Value::text([&**a, &**b].concat()))
            }
            (Operator::Add, Value::List(a), Value::List(b)) => Value::list(self.joined(a, b)?),
            (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => Value::tuple(self.joined(a, b)?),
            (Operator::Mul, many, times) | (Operator::Mul, times, many)
                if times.as_int().is_some()
                    && matches!(many, Value::Text(_) | Value::List(_) | Value::Tuple(_)) =>
            {
                self.repeat(many, times.as_int().unwrap_or(0))
            }
            (Operator::Mod, Value::Text(format), values) => self.printf(format, values).map(Value::text),
            _ => {
                let symbol = match operator {
                    Operator::Add => "+",
                    Operator::Sub => "-",
                    Operator::Mul => "*",
                    Operator::Div => "/",
                    Operator::FloorDiv => "//",
                    Operator::Mod => "%",
                    Operator::Pow => "** or pow()",
                };
                let (a, b) = (left.kind().name(), right.kind().name());
                Err(Fault::new(format!("unsupported operand type(s) for {symbol}: '{a}' and '{b}'")))
            }
        }
    }

    /// Marked text stays so, and escapes what comes to it.
    fn binary_markup(&self, operator: Operator, left: &Value, right: &Value) -> Fallible<Value> {
        let escaped = |value: &Value| match value {
            Value::Text(text) => self.escape(text),
            value => Ok(value.plain()),
        };
        let marked = left.is_markup() || operator != Operator::Mod;
        let (left, right) = match (operator, right) {
            (Operator::Add, _) => (escaped(left)?, escaped(right)?),
            (Operator::Mod, Value::Tuple(list)) if marked => {
                let items = list.items.iter().map(escaped).collect::<Fallible<_>>()?;
                (left.plain(), Value::tuple(items)?)
            }
            (Operator::Mod, _) if marked => (left.plain(), escaped(right)?),
            _ => (left.plain(), right.plain()),
        };
        let value = self.binary(operator, &left, &right)?;
        Ok(if marked { value.marked() } else { value })
    }

    fn joined(&self, a: &Rc<List>, b: &Rc<List>) -> Fallible<Vec<Value>> {
        self.meter.take_elements(a.items.len() + b.items.len())?;
        Ok(a.items.iter().chain(&b.items).cloned().collect())
    }

    fn repeat(&self, many: &Value, times: i128) -> Fallible<Value> {
        let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
        match many {
            Value::Text(text) => {
                self.meter.take(text.len().saturating_mul(times))?;
                Ok(Value::text(if text.is_empty() { String::new() } else { text.repeat(times) }))
            }
            Value::List(list) | Value::Tuple(list) => {
                let length = list.items.len().saturating_mul(times);
                self.meter.take_elements(length)?;
                let items = list.items.iter().cycle().take(length).cloned().collect();
                if matches!(many, Value::List(_)) { Value::list(items) } else { Value::tuple(items) }
            }
            _ => Err(Fault::new("only text and lists can be repeated")),
        }
    }

    pub(super) fn negative(&self, value: &Value) -> Fallible<Value> {
        match value {
            Value::Float(value) => Ok(Value::Float(-value)),
            Value::Undefined(..) => Err(undefined(value)),
            _ => match value.as_int() {
                Some(value) => value.checked_neg().map(Value::Int).ok_or_else(too_large),
                None => Err(Fault::new(format!("bad operand type for unary -: '{}'", value.kind().name()))),
            },
        }
    }

    pub(super) fn positive(&self, value: Value) -> Fallible<Value> {
        match (&value, value.as_int()) {
            (Value::Float(_), _) => Ok(value),
            (_, Some(value)) => Ok(Value::Int(value)),
            (Value::Undefined(..), _) => Err(undefined(&value)),
            _ => Err(Fault::new(format!("bad operand type for unary +: '{}'", value.kind().name()))),
        }
    }

    pub(super) fn compare(&self, comparison: Comparison, left: &Value, right: &Value) -> Fallible<bool> {
        Ok(match comparison {
            Comparison::Eq => self.equal(left, right)?,
            Comparison::Ne => !self.equal(left, right)?,
            Comparison::In => self.contains(right, left)?,
            Comparison::NotIn => !self.contains(right, left)?,
            Comparison::Lt => self.order(left, right, "<")? == Some(Ordering::Less),
            Comparison::Gt => self.order(left, right, ">")? == Some(Ordering::Greater),
            Comparison::Le => self.order(left, right, "<=")?.is_some_and(Ordering::is_le),
            Comparison::Ge => self.order(left, right, ">=")?.is_some_and(Ordering::is_ge),
        })
    }

    /// `==`
    pub(super) fn equal(&self, left: &Value, right: &Value) -> Fallible<bool> {
        self.meter.step(1)?;
        if left.is_markup() || right.is_markup() {
            return self.equal(&left.plain(), &right.plain());
        }
        if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
            return Ok(a == b);
        }
        if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
            return Ok(a == b);
        }
        Ok(match (left, right) {
            (Value::Undefined(..), Value::Undefined(..)) | (Value::None, Value::None) => true,
            (Value::Text(a), Value::Text(b)) => {
                self.meter.scan(a.len().min(b.len()))?;
                a == b
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                self.equal_items(a, b)?
            }
            (Value::Dict(a), Value::Dict(b)) => self.equal_dicts(a, b)?,
            (Value::View(View::Keys, a), Value::View(View::Keys, b)) => {
                self.meter.step(a.map.len())?;
                a.map.len() == b.map.len() && a.map.keys().all(|key| b.map.contains_key(key))
            }
            (Value::View(View::Items, a), Value::View(View::Items, b)) => self.equal_dicts(a, b)?,
            (Value::Range(_, 0, _), Value::Range(_, 0, _)) => true,
            (Value::Range(a, m, i), Value::Range(b, n, j)) => a == b && m == n && (i == j || *m == 1),
            (Value::Namespace(a), Value::Namespace(b)) | (Value::Macro(a), Value::Macro(b)) => a == b,
            (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
            (Value::Generator(a), Value::Generator(b)) => Rc::ptr_eq(a, b),
            (Value::Function(a), Value::Function(b)) => a == b,
            _ => false,
        })
    }

    fn equal_items(&self, a: &Rc<List>, b: &Rc<List>) -> Fallible<bool> {
        let _level = self.meter.deeper()?;
        if a.items.len() != b.items.len() {
            return Ok(false);
        }
        for (a, b) in a.items.iter().zip(&b.items) {
            if !self.equal(a, b)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn equal_dicts(&self, a: &Rc<Dict>, b: &Rc<Dict>) -> Fallible<bool> {
        let _level = self.meter.deeper()?;
        if a.map.len() != b.map.len() {
            return Ok(false);
        }
        for (key, value) in &a.map {
            match b.map.get(key) {
                Some(other) if self.equal(value, other)? => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The order of two values; `None` where one is NaN.
    pub(super) fn order(&self, left: &Value, right: &Value, symbol: &str) -> Fallible<Option<Ordering>> {
        self.meter.step(1)?;
        if left.is_markup() || right.is_markup() {
            return self.order(&left.plain(), &right.plain(), symbol);
        }
        if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
            return Ok(Some(a.cmp(&b)));
        }
        if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
            return Ok(a.partial_cmp(&b));
        }
        match (left, right) {
            (Value::Text(a), Value::Text(b)) => {
                self.meter.scan(a.len().min(b.len()))?;
                Ok(Some(a.cmp(b)))
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                let _level = self.meter.deeper()?;
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !self.equal(a, b)? {
                        return self.order(a, b, symbol);
                    }
                }
                Ok(Some(a.items.len().cmp(&b.items.len())))
            }
            (Value::Undefined(..), _) => Err(undefined(left)),
            (_, Value::Undefined(..)) => Err(undefined(right)),
            _ => {
                let (a, b) = (left.kind().name(), right.kind().name());
                Err(Fault::new(format!("'{symbol}' not supported between instances of '{a}' and '{b}'")))
            }
        }
    }

    /// `item in container`
    pub(super) fn contains(&self, container: &Value, item: &Value) -> Fallible<bool> {
        if container.is_markup() || item.is_markup() {
            return self.contains(&container.plain(), &item.plain());
        }
        match (container, item) {
            (Value::Text(text), Value::Text(part)) => {
                self.meter.scan(text.len() + part.len())?;
                Ok(text.contains(&**part))
            }
            (Value::Text(_), _) => Err(Fault::new(format!(
                "'in <string>' requires string as left operand, not {}",
                item.kind().name()
            ))),
            (Value::Dict(dict) | Value::View(View::Keys, dict), item) => match item {
                Value::Undefined(..) => Ok(false),
                _ => Ok(dict.map.contains_key(&Key::new(item)?)),
            },
            _ => {
                let items = match container.elements(&self.meter) {
                    Ok(items) => items,
                    Err(_) if !iterable(container) => {
                        let name = container.kind().name();
                        return Err(Fault::new(format!("argument of type '{name}' is not iterable")));
                    }
                    Err(fault) => return Err(fault),
                };
                for other in &items.items {
                    if self.equal(other, item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    /// Sorts by the first of each pair, stably. A comparison may fail, which the standard library's
    /// sorts do not allow.
    pub(super) fn sort<T>(&self, mut items: Vec<(Value, T)>, reverse: bool) -> Fallible<Vec<(Value, T)>> {
        if items.len() < 2 {
            return Ok(items);
        }
        self.meter.take_elements(items.len())?;
        let right = self.sort(items.split_off(items.len() / 2), reverse)?;
        let left = self.sort(items, reverse)?;
        let mut sorted = Vec::with_capacity(left.len() + right.len());
        let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            // Equal elements stay in their order, reversed or not.
            let (a, b) = if reverse { (&a.0, &b.0) } else { (&b.0, &a.0) };
            let later = self.order(a, b, "<")? == Some(Ordering::Less);
            sorted.extend(if later { right.next() } else { left.next() });
        }
        sorted.extend(left);
        sorted.extend(right);
        Ok(sorted)
    }
}

pub(super) fn iterable(value: &Value) -> bool {
    value.len().is_some() || matches!(value, Value::Generator(_))
}

fn too_large() -> Fault {
    Fault::new("an integer has more than 127 bits")
}

fn integers(operator: Operator, a: i128, b: i128) -> Fallible<Value> {
    let value = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Sub => a.checked_sub(b),
        Operator::Mul => a.checked_mul(b),
        Operator::Div | Operator::FloorDiv | Operator::Mod if b == 0 => {
            let what = if operator == Operator::Div { "division" } else { "integer division or modulo" };
            return Err(Fault::new(format!("{what} by zero")));
        }
        Operator::Div => return Ok(Value::Float(a as f64 / b as f64)),
        Operator::FloorDiv => a.checked_div(b).map(|q| q - i128::from(q * b != a && (a < 0) != (b < 0))),
        Operator::Mod => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
        Operator::Pow if b < 0 => return floats(operator, a as f64, b as f64),
        Operator::Pow => match a {
            0 | 1 => Some(if b == 0 { 1 } else { a }),
            -1 => Some(if b % 2 == 0 { 1 } else { -1 }),
            _ => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
        },
    };
    value.map(Value::Int).ok_or_else(too_large)
}

fn floats(operator: Operator, a: f64, b: f64) -> Fallible<Value> {
    if b == 0.0 && matches!(operator, Operator::Div | Operator::FloorDiv | Operator::Mod) {
        return Err(Fault::new("float division by zero"));
    }
    // The remainder has the divisor's sign.
    let remainder = || {
        let r = a % b;
        if r != 0.0 && (r < 0.0) != (b < 0.0) {
            r + b
        } else {
            r.abs().copysign(if r == 0.0 { b } else { r })
        }
    };
    Ok(Value::Float(match operator {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mul => a * b,
        Operator::Div => a / b,
        Operator::FloorDiv => {
            let quotient = (a - remainder()) / b;
            let floor = quotient.floor();
            if quotient - floor > 0.5 { floor + 1.0 } else { floor }
        }
        Operator::Mod => remainder(),
        Operator::Pow => match a.powf(b) {
            _ if a == 0.0 && b < 0.0 => return Err(Fault::new("0.0 cannot be raised to a negative power")),
            value if value.is_nan() && !a.is_nan() && !b.is_nan() => {
                return Err(Fault::new("a power is no real number"));
            }
            value if value.is_infinite() && a.is_finite() && b.is_finite() => {
                return Err(Fault::new("Numerical result out of range"));
            }
            value => value,
        },
    }))
}
