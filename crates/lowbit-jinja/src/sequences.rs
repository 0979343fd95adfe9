//! Jinja2's filters of sequences.

use std::rc::Rc;
use std::sync::Arc;

use super::ast::Operator;
use super::filters::not;
use super::meter::{Fallible, Fault};
use super::run::{Passed, Run};
use super::show::shown;
use super::strings::int;
use super::value::{Key, List, Value};

impl Run<'_> {
    pub(super) fn sequence_filter(&self, name: &str, input: Value, passed: Passed) -> Fallible<Value> {
        match name {
            "list" => {
                let [] = passed.bind(name, [])?;
                match input {
                    Value::List(_) => Ok(input),
                    input => Ok(Value::List(input.elements(&self.meter)?)),
                }
            }
            "first" | "last" => {
                let [] = passed.bind(name, [])?;
                if name == "last" && matches!(input, Value::Generator(_)) {
                    return Err(Fault::new("'generator' object is not reversible"));
                }
                let items = input.elements(&self.meter)?;
                let item = if name == "first" { items.items.first() } else { items.items.last() };
                Ok(item.cloned().unwrap_or_else(|| Value::Undefined(format!("the {name} item").into(), None)))
            }
            "join" => self.join(&input, passed),
            "items" => {
                let [] = passed.bind(name, [])?;
                match &input {
                    Value::Undefined(..) => Value::generator(vec![]),
                    Value::Dict(dict) => {
                        self.meter.take_elements(2 * dict.map.len())?;
                        Value::generator(dict.pairs()?)
                    }
                    _ => Err(Fault::new("Can only get item pairs from a mapping.")),
                }
            }
            "reverse" => self.reverse(&input),
            "map" => self.map(&input, passed),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, &input, passed),
            "sort" | "min" | "max" | "unique" => self.ordered(name, &input, passed),
            "dictsort" => self.dict_sort(&input, passed),
            "groupby" => self.group_by(&input, passed),
            "sum" => {
                let [attribute, start] = passed.bind(name, ["attribute", "start"])?;
                let mut sum = start.unwrap_or(Value::Int(0));
                for item in &input.elements(&self.meter)?.items {
                    let item = self.path(item, attribute.as_ref(), None)?;
                    sum = self.binary(Operator::Add, &sum, &item)?;
                }
                Ok(sum)
            }
            "batch" | "slice" => self.chunks(name, &input, passed),
            _ => Err(Fault::new(format!("No filter named '{}'.", shown(name)))),
        }
    }

    fn join(&self, input: &Value, passed: Passed) -> Fallible<Value> {
        let [separator, attribute] = passed.bind("join", ["d", "attribute"])?;
        let separator = separator.map_or_else(|| Ok(Arc::from("")), |separator| self.str(&separator))?;
        let mut out = String::new();
        for (index, item) in input.elements(&self.meter)?.items.iter().enumerate() {
            if index > 0 {
                self.push(&mut out, &separator)?;
            }
            self.write_str(&self.path(item, attribute.as_ref(), None)?, &mut out)?;
        }
        Ok(Value::text(out))
    }

    fn reverse(&self, input: &Value) -> Fallible<Value> {
        if let Value::Text(text) = input {
            self.meter.take(text.len())?;
            return Ok(Value::text(text.chars().rev().collect::<String>()));
        }
        let items = input.elements(&self.meter)?;
        self.meter.take_elements(items.items.len())?;
        let items = items.items.iter().rev().cloned().collect();
        // Jinja2 tries Python's iterator first, and a list for what has none.
        match input {
            Value::Generator(_) => Value::list(items),
            _ => Value::generator(items),
        }
    }

    /// `attribute`, with dots and indices, of an item; the item itself without one.
    fn path(&self, item: &Value, attribute: Option<&Value>, default: Option<&Value>) -> Fallible<Value> {
        let mut value = item.clone();
        match attribute {
            None | Some(Value::None) => {}
            Some(Value::Text(path)) => {
                for part in path.split('.') {
                    self.meter.step(1)?;
                    let key = match part.parse::<u32>() {
                        Ok(index) => Value::Int(index.into()),
                        Err(_) => Value::text(part),
                    };
                    value = self.item(&value, &key)?;
                    if let (Value::Undefined(..), Some(default)) = (&value, default) {
                        value = default.clone();
                    }
                }
            }
            Some(key) => value = self.item(&value, key)?,
        }
        Ok(value)
    }

    fn map(&self, input: &Value, mut passed: Passed) -> Fallible<Value> {
        // As in Jinja2, which does not look at what is false: none, too, has no items here.
        if !input.is_true() {
            return Value::generator(vec![]);
        }
        let items = input.elements(&self.meter)?;
        self.meter.take_elements(items.items.len())?;
        if passed.positional.is_empty() && passed.keyword.iter().any(|(name, _)| &**name == "attribute") {
            let [attribute, default] = passed.bind("map", ["attribute", "default"])?;
            let mapped = items.items.iter().map(|item| self.path(item, attribute.as_ref(), default.as_ref()));
            return Value::generator(mapped.collect::<Fallible<_>>()?);
        }
        if passed.positional.is_empty() {
            return Err(Fault::new("map requires a filter argument"));
        }
        let name = self.str(&passed.positional.remove(0))?;
        let mut mapped = vec![];
        for item in &items.items {
            let _level = self.meter.deeper()?;
            self.meter.take_elements(1 + passed.positional.len() + 2 * passed.keyword.len())?;
            let passed = Passed { positional: passed.positional.clone(), keyword: passed.keyword.clone() };
            mapped.push(self.filter(&name, item.clone(), passed)?);
        }
        Value::generator(mapped)
    }

    fn select(&self, filter: &str, input: &Value, mut passed: Passed) -> Fallible<Value> {
        let by_attribute = filter.ends_with("attr");
        let wanted = filter.starts_with("select");
        if by_attribute && passed.positional.is_empty() {
            return Err(Fault::new("Missing parameter for attribute name"));
        }
        let attribute = by_attribute.then(|| passed.positional.remove(0));
        let test = match passed.positional.is_empty() {
            true => None,
            false => Some(self.str(&passed.positional.remove(0))?),
        };
        let mut kept = vec![];
        if !input.is_true() {
            return Value::generator(kept);
        }
        for item in &input.elements(&self.meter)?.items {
            self.meter.take_elements(1 + passed.positional.len())?;
            let value = self.path(item, attribute.as_ref(), None)?;
            let found = match &test {
                None => value.is_true(),
                Some(test) => self.test(test, &value, passed.positional.clone())?,
            };
            if found == wanted {
                kept.push(item.clone());
            }
        }
        Value::generator(kept)
    }

    /// The key by which items are ordered; text without its case, unless that counts.
    fn key(&self, item: &Value, attribute: Option<&Value>, case: bool) -> Fallible<Value> {
        let key = self.path(item, attribute, None)?.plain();
        match &key {
            Value::Text(text) if !case => self.changed_case(text, "lower"),
            _ => Ok(key),
        }
    }

    fn ordered(&self, name: &str, input: &Value, passed: Passed) -> Fallible<Value> {
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let (reverse, case, attribute) = if name == "sort" {
            let [reverse, case, attribute] = passed.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            (is_true(reverse), is_true(case), attribute)
        } else {
            let [case, attribute] = passed.bind(name, ["case_sensitive", "attribute"])?;
            (false, is_true(case), attribute)
        };
        let items = input.elements(&self.meter)?;
        let mut keyed = vec![];
        for item in &items.items {
            self.meter.take_elements(2)?;
            // `sort` takes several attributes with commas.
            let key = match attribute.as_ref().and_then(Value::as_text) {
                Some(several) if name == "sort" && several.contains(',') => {
                    let parts = several.split(',').map(|part| self.key(item, Some(&Value::text(part)), case));
                    Value::list(parts.collect::<Fallible<_>>()?)?
                }
                _ => self.key(item, attribute.as_ref(), case)?,
            };
            keyed.push((key, item.clone()));
        }
        match name {
            "sort" => Value::list(self.sort(keyed, reverse)?.into_iter().map(|(_, item)| item).collect()),
            "unique" => Value::generator(self.unique(keyed)?),
            _ => {
                // The first of equal ones.
                let sorted = self.sort(keyed, name == "max")?;
                let none = || Value::Undefined("No aggregated item, sequence was empty.".into(), None);
                Ok(sorted.into_iter().next().map_or_else(none, |(_, item)| item))
            }
        }
    }

    fn unique(&self, keyed: Vec<(Value, Value)>) -> Fallible<Vec<Value>> {
        let mut seen = indexmap::IndexSet::new();
        let mut kept = vec![];
        for (key, item) in keyed {
            if seen.insert(Key::new(&key)?) {
                kept.push(item);
            }
        }
        Ok(kept)
    }

    fn dict_sort(&self, input: &Value, passed: Passed) -> Fallible<Value> {
        let [case, by, reverse] = passed.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let by = match by.as_ref().map_or(Some("key"), Value::as_text) {
            Some("key") => 0,
            Some("value") => 1,
            _ => return Err(Fault::new("You can only sort by either \"key\" or \"value\"")),
        };
        let (case, reverse) = (is_true(case), is_true(reverse));
        let Value::Dict(dict) = input else { return Err(not(input, "dictsort", "a mapping")) };
        self.meter.take_elements(4 * dict.map.len())?;
        let mut keyed = vec![];
        for pair in dict.pairs()? {
            keyed.push((self.key(&pair, Some(&Value::Int(by)), case)?, pair));
        }
        Value::list(self.sort(keyed, reverse)?.into_iter().map(|(_, pair)| pair).collect())
    }

    fn group_by(&self, input: &Value, passed: Passed) -> Fallible<Value> {
        let [attribute, default, case] =
            passed.bind("groupby", ["attribute", "default", "case_sensitive"])?;
        let case = case.is_some_and(|case| case.is_true());
        let mut keyed = vec![];
        for item in &input.elements(&self.meter)?.items {
            self.meter.take_elements(4)?;
            let value = self.path(item, attribute.as_ref(), default.as_ref())?;
            keyed.push((self.key(&value, None, case)?, (value, item.clone())));
        }
        let mut groups: Vec<(Value, Value, Vec<Value>)> = vec![];
        for (key, (value, item)) in self.sort(keyed, false)? {
            match groups.last_mut() {
                Some((last, _, items)) if self.equal(last, &key)? => items.push(item),
                _ => groups.push((key, value, vec![item])),
            }
        }
        let group = |(_, value, items)| List::group([value, Value::list(items)?]);
        Value::list(groups.into_iter().map(group).collect::<Fallible<_>>()?)
    }

    /// `batch`: lists of `n` items each; `slice`: `n` lists.
    fn chunks(&self, name: &str, input: &Value, passed: Passed) -> Fallible<Value> {
        let parameter = if name == "batch" { "linecount" } else { "slices" };
        let [count, fill] = passed.bind(name, [parameter, "fill_with"])?;
        let count = int(&count.unwrap_or(Value::None), name)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| Fault::new(format!("{name} takes a positive number")))?;
        let fill = fill.filter(|fill| !matches!(fill, Value::None));
        let items: Rc<List> = input.elements(&self.meter)?;
        let items = &items.items;
        self.meter.take_elements(items.len())?;
        let mut lists = vec![];
        if name == "batch" {
            for chunk in items.chunks(count) {
                let mut list = chunk.to_vec();
                if let Some(fill) = &fill {
                    self.meter.take_elements(count - chunk.len())?;
                    list.resize(count, fill.clone());
                }
                lists.push(list);
            }
        } else {
            self.meter.take_elements(count.saturating_mul(2))?;
            let (short, longer) = (items.len() / count, items.len() % count);
            let mut rest = &items[..];
            for index in 0..count {
                let (list, after) = rest.split_at(short + usize::from(index < longer));
                rest = after;
                let filled = fill.iter().filter(|_| longer > 0 && index >= longer).cloned();
                lists.push(list.iter().cloned().chain(filled).collect());
            }
        }
        Value::generator(lists.into_iter().map(Value::list).collect::<Fallible<_>>()?)
    }
}
