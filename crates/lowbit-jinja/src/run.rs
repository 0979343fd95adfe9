//! Runs statements: scopes, loops and macros.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use indexmap::IndexMap;

use super::Template;
use super::ast::{Action, Body, For, Macro, Node, Statement, Symbol, Target};
use super::meter::{Fallible, Fault, Meter, OUTPUT};
use super::show::shown;
use super::value::{Key, List, Loop, Value};

/// One rendering. All that changes lies here, so that values cannot hold each other in a circle.
pub(super) struct Run<'p> {
    pub(super) template: &'p Template,
    pub(super) meter: Meter,
    pub(super) namespaces: RefCell<Vec<IndexMap<Key, Value>>>,
    pub(super) macros: RefCell<Vec<(&'p Macro, Rc<Scope>)>>,
    /// The recursive loops that run.
    loops: RefCell<HashMap<usize, (&'p For, Rc<Scope>)>>,
    next_loop: Cell<usize>,
    /// The last arguments of `loop.changed`.
    pub(super) changed: RefCell<HashMap<usize, Value>>,
    pub(super) captured: RefCell<Vec<Value>>,
}

/// Variables of a block, a loop's round or a macro's call.
#[derive(Default)]
pub(super) struct Scope {
    variables: RefCell<Vec<(Symbol, Value)>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub(super) fn inside(parent: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::default(), parent: Some(parent.clone()) })
    }

    pub(super) fn set(&self, symbol: Symbol, value: Value) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(name, _)| *name == symbol) {
            Some(variable) => variable.1 = value,
            None => variables.push((symbol, value)),
        }
    }
}

/// A call's arguments.
#[derive(Default)]
pub(super) struct Passed {
    pub(super) positional: Vec<Value>,
    pub(super) keyword: Vec<(Arc<str>, Value)>,
}

impl Passed {
    /// Without marks: only macros see them.
    pub(super) fn plain(mut self) -> Self {
        let keyword = self.keyword.iter_mut().map(|(_, value)| value);
        for value in self.positional.iter_mut().chain(keyword).filter(|value| value.is_markup()) {
            *value = value.plain();
        }
        self
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.keyword.iter().position(|(key, _)| **key == *name)?;
        Some(self.keyword.remove(at).1)
    }

    /// The arguments of `what`, whose parameters are `names`.
    pub(super) fn bind<const N: usize>(self, what: &str, names: [&str; N]) -> Fallible<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        let given = self.positional.len();
        if given > N {
            return Err(Fault::new(format!("{what} takes at most {N} arguments ({given} given)")));
        }
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.keyword {
            let Some(at) = names.iter().position(|known| **known == *name) else {
                return Err(Fault::new(format!(
                    "{what} got an unexpected keyword argument '{}'",
                    shown(name)
                )));
            };
            if bound[at].replace(value).is_some() {
                return Err(Fault::new(format!("{what} got multiple values for argument '{name}'")));
            }
        }
        Ok(bound)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl<'p> Run<'p> {
    pub(super) fn new(template: &'p Template) -> Self {
        Self {
            template,
            meter: Meter::new(),
            namespaces: RefCell::default(),
            macros: RefCell::default(),
            loops: RefCell::default(),
            next_loop: Cell::new(0),
            changed: RefCell::default(),
            captured: RefCell::default(),
        }
    }

    pub(super) fn exec(&self, body: &'p Body, scope: &Rc<Scope>, out: &mut String) -> Fallible<Flow> {
        let _level = self.meter.deeper()?;
        for statement in body {
            self.meter.step(1)?;
            let flow = self.statement(statement, scope, out).map_err(|fault| fault.at(statement.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&self, statement: &'p Statement, scope: &Rc<Scope>, out: &mut String) -> Fallible<Flow> {
        match &statement.action {
            Action::Text(text) => self.push(out, text)?,
            Action::Print(node) => {
                let value = self.eval(node, scope)?;
                self.write_str(&value, out)?;
            }
            Action::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.eval(condition, scope)?.is_true() {
                        return self.exec(body, scope, out);
                    }
                }
                return self.exec(otherwise, scope, out);
            }
            Action::For(node) => {
                let items = self.eval(&node.items, scope)?;
                self.run_for(node, &items, scope, 1, out)?;
            }
            Action::Set(target, node) => {
                let value = self.eval(node, scope)?;
                self.assign(target, value, scope, scope)?;
            }
            Action::SetBlock(target, filters, body) => {
                let value = self.capture(body, &Scope::inside(scope), filters.as_ref(), scope)?;
                self.assign(target, value, scope, scope)?;
            }
            Action::Macro(node) => {
                let value = self.define(node, scope)?;
                scope.set(node.symbol, value);
            }
            Action::Call(node, call) => {
                let caller = self.define(node, scope)?;
                let text = self.eval_call(call, scope, Some(caller))?;
                self.write_str(&text, out)?;
            }
            Action::Filter(filters, body) => {
                let value = self.capture(body, &Scope::inside(scope), Some(filters), scope)?;
                self.write_str(&value, out)?;
            }
            Action::With(variables, body) => {
                let inside = self.scope(scope)?;
                for (target, node) in variables {
                    let value = self.eval(node, scope)?;
                    self.assign(target, value, &inside, scope)?;
                }
                return self.exec(body, &inside, out);
            }
            Action::Scope(body) => return self.exec(body, &self.scope(scope)?, out),
            Action::Break => return Ok(Flow::Break),
            Action::Continue => return Ok(Flow::Continue),
        }
        if out.len() > OUTPUT {
            return Err(Fault::new(format!("the text is longer than {} MB", OUTPUT >> 20)));
        }
        Ok(Flow::Next)
    }

    fn scope(&self, parent: &Rc<Scope>) -> Fallible<Rc<Scope>> {
        self.meter.step(1)?;
        Ok(Scope::inside(parent))
    }

    /// The output of a body, after `filters`.
    fn capture(
        &self,
        body: &'p Body,
        inside: &Rc<Scope>,
        filters: Option<&'p Node>,
        scope: &Rc<Scope>,
    ) -> Fallible<Value> {
        let mut text = String::new();
        self.exec(body, inside, &mut text)?;
        let Some(filters) = filters else { return Ok(Value::text(text)) };
        self.captured.borrow_mut().push(Value::text(text));
        let value = self.eval(filters, scope);
        self.captured.borrow_mut().pop();
        value
    }

    /// The variable's value; the scopes on the way count.
    pub(super) fn lookup(&self, symbol: Symbol, scope: &Rc<Scope>) -> Fallible<Value> {
        let mut scope = Some(scope);
        while let Some(here) = scope {
            let variables = here.variables.borrow();
            self.meter.step(variables.len() / 16)?;
            if let Some((_, value)) = variables.iter().find(|(name, _)| *name == symbol) {
                return Ok(value.clone());
            }
            scope = here.parent.as_ref();
        }
        Ok(Value::Undefined(self.template.names[symbol as usize].clone(), None))
    }

    /// Assigns in `scope`; a namespace is looked up in `from`.
    fn assign(&self, target: &Target, value: Value, scope: &Rc<Scope>, from: &Rc<Scope>) -> Fallible<()> {
        match target {
            Target::Name(symbol) => {
                self.meter.step(1 + scope.variables.borrow().len() / 16)?;
                scope.set(*symbol, value);
                Ok(())
            }
            Target::Attribute(symbol, name) => {
                let Value::Namespace(id) = self.lookup(*symbol, from)? else {
                    return Err(Fault::new("cannot assign attribute on non-namespace object"));
                };
                check_attribute(name)?;
                self.meter.take(64)?;
                self.namespaces.borrow_mut()[id].insert(Key::Text(name.clone()), value);
                Ok(())
            }
            Target::Tuple(targets) => {
                let items = value.elements(&self.meter)?;
                let (want, got) = (targets.len(), items.items.len());
                if got != want {
                    return Err(Fault::new(match got < want {
                        true => format!("not enough values to unpack (expected {want}, got {got})"),
                        false => format!("too many values to unpack (expected {want}, got {got})"),
                    }));
                }
                for (target, value) in targets.iter().zip(&items.items) {
                    self.assign(target, value.clone(), scope, from)?;
                }
                Ok(())
            }
        }
    }

    fn run_for(
        &self,
        node: &'p For,
        items: &Value,
        scope: &Rc<Scope>,
        depth: usize,
        out: &mut String,
    ) -> Fallible<()> {
        let mut items = items.elements(&self.meter)?;
        if let Some(condition) = &node.condition {
            let mut kept = vec![];
            for item in &items.items {
                let inside = self.scope(scope)?;
                self.assign(&node.target, item.clone(), &inside, scope)?;
                if self.eval(condition, &inside)?.is_true() {
                    self.meter.take_elements(1)?;
                    kept.push(item.clone());
                }
            }
            items = List::new(kept)?;
        }
        if items.items.is_empty() {
            self.exec(&node.otherwise, &self.scope(scope)?, out)?;
            return Ok(());
        }
        let id = self.next_loop.replace(self.next_loop.get() + 1);
        let state = Rc::new(Loop { id, items, index: Cell::new(0), depth });
        if node.recursive {
            self.loops.borrow_mut().insert(id, (node, scope.clone()));
        }
        for (index, item) in state.items.items.iter().enumerate() {
            state.index.set(index);
            let inside = self.scope(scope)?;
            if let Some(symbol) = self.template.loop_symbol {
                inside.set(symbol, Value::Loop(state.clone()));
            }
            self.assign(&node.target, item.clone(), &inside, scope)?;
            if self.exec(&node.body, &inside, out)? == Flow::Break {
                break;
            }
        }
        self.loops.borrow_mut().remove(&id);
        self.changed.borrow_mut().remove(&id);
        Ok(())
    }

    /// `loop(items)`: the same loop over other items.
    pub(super) fn recurse(&self, state: &Loop, passed: Passed) -> Fallible<Value> {
        let _level = self.meter.deeper()?;
        let [items] = passed.bind("loop", ["iterable"])?;
        let found = self.loops.borrow().get(&state.id).map(|(node, scope)| (*node, scope.clone()));
        let (Some((node, scope)), Some(items)) = (found, items) else {
            return Err(Fault::new("loop() takes one iterable, inside of a loop that says 'recursive'"));
        };
        let mut text = String::new();
        self.run_for(node, &items, &scope, state.depth + 1, &mut text)?;
        Ok(Value::text(text))
    }

    /// The macro as a value: it sees this scope, whenever it is called.
    fn define(&self, node: &'p Macro, scope: &Rc<Scope>) -> Fallible<Value> {
        self.meter.take(64)?;
        let mut macros = self.macros.borrow_mut();
        macros.push((node, scope.clone()));
        Ok(Value::Macro(macros.len() - 1))
    }

    pub(super) fn call_macro(&self, id: usize, mut passed: Passed) -> Fallible<Value> {
        let _level = self.meter.deeper()?;
        let (node, scope) = self.macros.borrow()[id].clone();
        let inside = self.scope(&scope)?;
        let name = shown(&node.name);
        let caller = passed.take("caller");
        let given = passed.positional.len().min(node.parameters.len());
        let rest = passed.positional.split_off(given);
        let mut positional = passed.positional.drain(..);
        let first_default = node.parameters.len() - node.defaults.len();
        for (index, symbol) in node.parameters.iter().enumerate() {
            let parameter = &self.template.names[*symbol as usize];
            let value = match positional.next() {
                Some(value) => Some(value),
                None => passed
                    .keyword
                    .iter()
                    .position(|(key, _)| key == parameter)
                    .map(|at| passed.keyword.remove(at).1),
            };
            let value = match (value, index.checked_sub(first_default)) {
                (Some(value), _) => value,
                (None, Some(default)) => self.eval(&node.defaults[default], &inside)?,
                (None, None) => Value::Undefined(parameter.clone(), None),
            };
            inside.set(*symbol, value);
        }
        drop(positional);
        let [uses_caller, uses_varargs, uses_kwargs] = node.uses;
        if caller.is_some() && !uses_caller {
            return Err(Fault::new(format!(
                "macro '{name}' was invoked with two values for the special caller argument or takes none"
            )));
        }
        if !rest.is_empty() && !uses_varargs {
            let most = node.parameters.len();
            return Err(Fault::new(format!("macro '{name}' takes not more than {most} argument(s)")));
        }
        if let Some((key, _)) = passed.keyword.first().filter(|_| !uses_kwargs) {
            let key = shown(key);
            return Err(Fault::new(format!("macro '{name}' takes no keyword argument '{key}'")));
        }
        let kwargs = passed.keyword.into_iter().map(|(key, value)| (Key::Text(key), value)).collect();
        let specials = [caller, Some(Value::tuple(rest)?), Some(Value::dict(kwargs)?)];
        for (symbol, value) in self.template.special_symbols.iter().zip(specials) {
            if let (Some(symbol), Some(value)) = (symbol, value) {
                // A parameter of that name has its own value.
                if !node.parameters.contains(symbol) {
                    inside.set(*symbol, value);
                }
            }
        }
        let mut text = String::new();
        self.exec(&node.body, &inside, &mut text)?;
        Ok(Value::text(text))
    }

    /// A new namespace.
    pub(super) fn namespace(&self, map: IndexMap<Key, Value>) -> Fallible<Value> {
        for key in map.keys() {
            if let Key::Text(name) = key {
                check_attribute(name)?;
            }
        }
        self.meter.take(128)?;
        let mut namespaces = self.namespaces.borrow_mut();
        namespaces.push(map);
        Ok(Value::Namespace(namespaces.len() - 1))
    }
}

/// transformers refuses these names.
fn check_attribute(name: &str) -> Fallible<()> {
    match name.starts_with('_') {
        true => Err(Fault::new(format!(
            "a namespace's attribute may not begin with an underscore: {}",
            shown(name)
        ))),
        false => Ok(()),
    }
}
