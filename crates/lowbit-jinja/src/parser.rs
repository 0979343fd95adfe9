//! Tokens to statements: Jinja2's blocks, with `break`, `continue` and transformers' `generation`.

use std::collections::HashMap;
use std::sync::Arc;

use super::ast::{Action, Body, Expression, For, Macro, Node, Statement, Symbol, Target};
use super::lexer::Token;
use super::meter::{Fallible, Fault};
use super::show::shown;

/// Nested blocks, parentheses, lists and prefix operators. CPython takes 200 parentheses and 20
/// blocks.
const SOURCE_DEPTH: usize = 120;

pub(super) struct Parser<'s> {
    tokens: Vec<(Token<'s>, u32)>,
    at: usize,
    depth: usize,
    symbols: HashMap<&'s str, Symbol>,
    names: Vec<Arc<str>>,
    /// The number of times that each of [`SPECIAL`] was read.
    seen: [usize; 3],
}

/// Arguments that a macro may be given without having them as parameters.
pub(super) const SPECIAL: [&str; 3] = ["caller", "varargs", "kwargs"];

impl<'s> Parser<'s> {
    pub(super) fn new(tokens: Vec<(Token<'s>, u32)>) -> Self {
        Self { tokens, at: 0, depth: 0, symbols: HashMap::new(), names: vec![], seen: [0; 3] }
    }

    /// The whole template, and the names in it.
    pub(super) fn parse(mut self) -> Fallible<(Body, Vec<Arc<str>>)> {
        let body = self.statements(&[])?;
        Ok((body, self.names))
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    pub(super) fn peek(&self) -> &Token<'s> {
        &self.tokens[self.at].0
    }

    pub(super) fn peek_after(&self) -> &Token<'s> {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].0
    }

    pub(super) fn next(&mut self) -> Token<'s> {
        let last = self.tokens.len() - 1;
        let token = std::mem::replace(&mut self.tokens[self.at].0, Token::End);
        self.at = (self.at + 1).min(last);
        token
    }

    pub(super) fn eat(&mut self, operator: &str) -> bool {
        let found = matches!(self.peek(), Token::Operator(found) if *found == operator);
        if found {
            self.next();
        }
        found
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if *found == name)
    }

    pub(super) fn eat_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.next();
        }
        found
    }

    pub(super) fn expect(&mut self, operator: &str) -> Fallible<()> {
        match self.eat(operator) {
            true => Ok(()),
            false => Err(self.unexpected(&format!("'{operator}'"))),
        }
    }

    pub(super) fn name(&mut self) -> Fallible<Arc<str>> {
        match self.peek() {
            Token::Name(name) => {
                let name = self.intern(name);
                self.next();
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    pub(super) fn unexpected(&self, want: &str) -> Fault {
        self.unexpected_token(self.peek(), want).at(self.line())
    }

    pub(super) fn unexpected_token(&self, token: &Token<'_>, want: &str) -> Fault {
        let got = match token {
            Token::Data(_) => "text".into(),
            Token::BlockBegin => "'{%'".into(),
            Token::BlockEnd => "'%}'".into(),
            Token::PrintBegin => "'{{'".into(),
            Token::PrintEnd => "'}}'".into(),
            Token::Name(name) => format!("'{}'", shown(name)),
            Token::Text(_) => "a string".into(),
            Token::Int(_) | Token::Float(_) => "a number".into(),
            Token::Operator(operator) => format!("'{operator}'"),
            Token::End => "the end of the template".into(),
        };
        Fault::new(format!("expected {want}, got {got}"))
    }

    /// One level of the source down.
    pub(super) fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Fallible<T>) -> Fallible<T> {
        if self.depth == SOURCE_DEPTH {
            return Err(
                Fault::new(format!("the source nests deeper than {SOURCE_DEPTH} levels")).at(self.line())
            );
        }
        self.depth += 1;
        let result = parse(self);
        self.depth -= 1;
        result
    }

    /// A name, shared by all its places.
    pub(super) fn intern(&mut self, name: &'s str) -> Arc<str> {
        let symbol = self.add(name);
        self.names[symbol as usize].clone()
    }

    fn add(&mut self, name: &'s str) -> Symbol {
        *self.symbols.entry(name).or_insert_with(|| {
            self.names.push(name.into());
            self.names.len() as Symbol - 1
        })
    }

    /// A variable's name.
    pub(super) fn symbol(&mut self, name: &'s str) -> Fallible<Symbol> {
        if name.starts_with(|c: char| c.is_numeric()) {
            return Err(Fault::new("a name begins with a digit"));
        }
        if let Some(special) = SPECIAL.iter().position(|special| *special == name) {
            self.seen[special] += 1;
        }
        Ok(self.add(name))
    }

    fn next_symbol(&mut self) -> Fallible<Symbol> {
        match *self.peek() {
            Token::Name(name) => {
                let symbol = self.symbol(name)?;
                self.next();
                Ok(symbol)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    fn block_end(&mut self) -> Fallible<()> {
        match self.peek() {
            Token::BlockEnd => {
                self.next();
                Ok(())
            }
            _ => Err(self.unexpected("'%}'")),
        }
    }

    /// Statements up to `{% end`, where `end` is one of `ends` and is not read.
    fn statements(&mut self, ends: &[&str]) -> Fallible<Body> {
        let mut body = vec![];
        loop {
            let line = self.line();
            let action = match self.peek() {
                Token::Data(text) => {
                    let text = Arc::from(*text);
                    self.next();
                    Action::Text(text)
                }
                Token::PrintBegin => {
                    self.next();
                    let node = self.tuple(true, &[])?;
                    if self.next() != Token::PrintEnd {
                        return Err(Fault::new("expected '}}' at the end of a print").at(line));
                    }
                    Action::Print(node)
                }
                Token::BlockBegin => {
                    self.next();
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(body);
                    }
                    let action = self.deeper(Self::statement)?;
                    self.block_end()?;
                    action
                }
                _ if ends.is_empty() => return Ok(body),
                _ => {
                    let message = format!("unexpected end of template, expected '{}'", ends.join("' or '"));
                    return Err(Fault::new(message).at(line));
                }
            };
            body.push(Statement { action, line });
        }
    }

    /// A body behind its block's head, and the end of its end tag's name.
    fn body(&mut self, end: &str) -> Fallible<Body> {
        self.block_end()?;
        let body = self.statements(&[end])?;
        self.next();
        Ok(body)
    }

    fn statement(&mut self) -> Fallible<Action> {
        let line = self.line();
        let Token::Name(name) = *self.peek() else { return Err(self.unexpected("a tag's name")) };
        self.next();
        Ok(match name {
            "if" => self.condition_block()?,
            "for" => self.for_block()?,
            "set" => self.set()?,
            "macro" => {
                let symbol = self.next_symbol()?;
                Action::Macro(Box::new(self.macro_block(symbol, "endmacro")?))
            }
            "call" => self.call_block()?,
            "filter" => {
                let filters = self.filter_chain()?;
                Action::Filter(filters, self.body("endfilter")?)
            }
            "with" => self.with()?,
            "generation" => Action::Scope(self.body("endgeneration")?),
            "block" => {
                let name = self.name()?;
                self.eat_name("scoped");
                self.eat_name("required");
                let body = self.body("endblock")?;
                self.eat_name(&name);
                Action::Scope(body)
            }
            "break" => Action::Break,
            "continue" => Action::Continue,
            "include" | "import" | "from" | "extends" => {
                return Err(Fault::new(format!("'{name}' has no other template to load")).at(line));
            }
            _ => return Err(Fault::new(format!("Encountered unknown tag '{}'", shown(name))).at(line)),
        })
    }

    fn condition_block(&mut self) -> Fallible<Action> {
        let mut branches = vec![];
        loop {
            let condition = self.tuple(false, &[])?;
            self.block_end()?;
            let body = self.statements(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match self.next() {
                Token::Name("elif") => {}
                Token::Name("else") => return Ok(Action::If(branches, self.body("endif")?)),
                _ => return Ok(Action::If(branches, vec![])),
            }
        }
    }

    fn for_block(&mut self) -> Fallible<Action> {
        let target = self.target(&["in"])?;
        if !self.eat_name("in") {
            return Err(self.unexpected("'in'"));
        }
        let items = self.tuple(false, &["recursive"])?;
        let condition = if self.eat_name("if") { Some(self.expression(true)?) } else { None };
        let recursive = self.eat_name("recursive");
        self.block_end()?;
        let body = self.statements(&["endfor", "else"])?;
        let otherwise = match self.next() {
            Token::Name("else") => self.body("endfor")?,
            _ => vec![],
        };
        Ok(Action::For(Box::new(For { target, items, condition, body, otherwise, recursive })))
    }

    fn set(&mut self) -> Fallible<Action> {
        let target = self.target(&[])?;
        if self.eat("=") {
            return Ok(Action::Set(target, self.tuple(true, &[])?));
        }
        let filters = self.block_filters()?;
        Ok(Action::SetBlock(target, filters, self.body("endset")?))
    }

    /// A name, `namespace.attribute`, or several of them with commas.
    fn target(&mut self, ends: &[&str]) -> Fallible<Target> {
        let mut targets = vec![];
        let mut comma = false;
        loop {
            let ended = matches!(self.peek(), Token::Operator("=" | ")") | Token::BlockEnd)
                || ends.iter().any(|end| self.is_name(end));
            if ended && comma {
                break;
            }
            targets.push(self.single_target()?);
            comma = self.eat(",");
            if !comma {
                break;
            }
        }
        if !comma && targets.len() == 1 {
            return Ok(targets.remove(0));
        }
        Ok(Target::Tuple(targets))
    }

    fn single_target(&mut self) -> Fallible<Target> {
        let line = self.line();
        if self.eat("(") {
            let target = self.deeper(|parser| parser.target(&[]))?;
            self.expect(")")?;
            return Ok(target);
        }
        if ["true", "false", "none", "True", "False", "None"].iter().any(|name| self.is_name(name)) {
            return Err(Fault::new("can't assign to 'const'").at(line));
        }
        let symbol = self.next_symbol()?;
        match self.eat(".") {
            true => Ok(Target::Attribute(symbol, self.name()?)),
            false => Ok(Target::Name(symbol)),
        }
    }

    /// Parameters and body of a macro or a call block.
    fn macro_block(&mut self, symbol: Symbol, end: &str) -> Fallible<Macro> {
        let mut parameters = vec![];
        let mut defaults = vec![];
        if *self.peek() == Token::Operator("(") || end == "endmacro" {
            self.expect("(")?;
            while !self.eat(")") {
                if !parameters.is_empty() {
                    self.expect(",")?;
                }
                parameters.push(self.next_symbol()?);
                if self.eat("=") {
                    defaults.push(self.expression(true)?);
                } else if !defaults.is_empty() {
                    return Err(Fault::new("non-default argument follows default argument").at(self.line()));
                }
            }
        }
        let name = self.names[symbol as usize].clone();
        let macro_ = Macro { name, symbol, parameters, defaults, body: vec![], uses: [false; 3] };
        match end {
            "endmacro" => self.macro_body(macro_, end),
            _ => Ok(macro_),
        }
    }

    fn macro_body(&mut self, mut macro_: Macro, end: &str) -> Fallible<Macro> {
        let before = self.seen;
        macro_.body = self.body(end)?;
        macro_.uses = std::array::from_fn(|special| self.seen[special] > before[special]);
        Ok(macro_)
    }

    fn call_block(&mut self) -> Fallible<Action> {
        let symbol = self.add("caller");
        let head = self.macro_block(symbol, "endcall")?;
        let call = self.expression(true)?;
        if !matches!(call.expression, Expression::Call(..)) {
            return Err(Fault::new("expected call").at(call.line));
        }
        Ok(Action::Call(Box::new(self.macro_body(head, "endcall")?), call))
    }

    fn with(&mut self) -> Fallible<Action> {
        let mut variables: Vec<(Target, Node)> = vec![];
        while *self.peek() != Token::BlockEnd {
            if !variables.is_empty() {
                self.expect(",")?;
            }
            let target = self.single_target()?;
            self.expect("=")?;
            variables.push((target, self.expression(true)?));
        }
        Ok(Action::With(variables, self.body("endwith")?))
    }
}
