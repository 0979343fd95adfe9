//! The parser's half for expressions: Jinja2's grammar and precedence.

use std::sync::Arc;

use super::ast::{Arguments, Comparison, Expression, Node, Operator};
use super::lexer::Token;
use super::meter::{Fallible, Fault};
use super::parser::Parser;

/// Nodes on a way down an expression, whether they nest in the source or stand in a row.
const EXPRESSION_DEPTH: u16 = 500;

impl<'s> Parser<'s> {
    fn node(&self, line: u32, expression: Expression) -> Fallible<Node> {
        let depth = expression.depth();
        if depth > EXPRESSION_DEPTH {
            return Err(Fault::new("an expression nests too deeply").at(line));
        }
        Ok(Node { expression, line, depth })
    }

    /// An expression; without `conditions` an `if` after it belongs to the caller.
    pub(super) fn expression(&mut self, conditions: bool) -> Fallible<Node> {
        self.deeper(|parser| if conditions { parser.condition() } else { parser.or() })
    }

    /// An expression, or a tuple without parentheses: `a, b`.
    pub(super) fn tuple(&mut self, conditions: bool, ends: &[&str]) -> Fallible<Node> {
        self.tuple_inside(conditions, ends, false)
    }

    fn tuple_inside(&mut self, conditions: bool, ends: &[&str], parentheses: bool) -> Fallible<Node> {
        let line = self.line();
        let mut nodes = vec![];
        let mut comma = false;
        loop {
            if !nodes.is_empty() && !comma {
                break;
            }
            if self.tuple_ends(ends) {
                break;
            }
            nodes.push(self.expression(conditions)?);
            comma = self.eat(",");
        }
        if !comma && nodes.len() == 1 {
            return Ok(nodes.remove(0));
        }
        if nodes.is_empty() && !parentheses {
            return Err(self.unexpected("an expression"));
        }
        self.node(line, Expression::Tuple(nodes))
    }

    fn tuple_ends(&self, ends: &[&str]) -> bool {
        let end = matches!(self.peek(), Token::PrintEnd | Token::BlockEnd | Token::Operator(")"));
        end || ends.iter().any(|name| self.is_name(name))
    }

    fn condition(&mut self) -> Fallible<Node> {
        let line = self.line();
        let mut node = self.or()?;
        while self.eat_name("if") {
            let condition = self.or()?;
            let other = match self.eat_name("else") {
                true => Some(Box::new(self.deeper(Self::condition)?)),
                false => None,
            };
            node = self.node(line, Expression::Condition(Box::new((node, condition)), other))?;
        }
        Ok(node)
    }

    /// Operands with `name` between them.
    fn chain(
        &mut self,
        name: &str,
        operand: fn(&mut Self) -> Fallible<Node>,
        expression: fn(Vec<Node>) -> Expression,
    ) -> Fallible<Node> {
        let line = self.line();
        let first = operand(self)?;
        if !self.is_name(name) {
            return Ok(first);
        }
        let mut nodes = vec![first];
        while self.eat_name(name) {
            nodes.push(operand(self)?);
        }
        self.node(line, expression(nodes))
    }

    fn or(&mut self) -> Fallible<Node> {
        self.chain("or", Self::and, Expression::Or)
    }

    fn and(&mut self) -> Fallible<Node> {
        self.chain("and", Self::not, Expression::And)
    }

    fn not(&mut self) -> Fallible<Node> {
        let line = self.line();
        if self.eat_name("not") {
            let operand = self.deeper(Self::not)?;
            return self.node(line, Expression::Not(Box::new(operand)));
        }
        self.compare()
    }

    fn compare(&mut self) -> Fallible<Node> {
        let line = self.line();
        let first = self.sum()?;
        let mut others = vec![];
        while let Some(comparison) = self.comparison() {
            others.push((comparison, self.sum()?));
        }
        if others.is_empty() {
            return Ok(first);
        }
        self.node(line, Expression::Compare(Box::new(first), others))
    }

    fn comparison(&mut self) -> Option<Comparison> {
        let symbols = [
            ("==", Comparison::Eq),
            ("!=", Comparison::Ne),
            ("<", Comparison::Lt),
            ("<=", Comparison::Le),
            (">", Comparison::Gt),
            (">=", Comparison::Ge),
        ];
        if let Some((_, comparison)) = symbols.iter().find(|(symbol, _)| self.eat(symbol)) {
            return Some(*comparison);
        }
        if self.eat_name("in") {
            return Some(Comparison::In);
        }
        let not_in = self.is_name("not") && *self.peek_after() == Token::Name("in");
        if not_in {
            self.next();
            self.next();
        }
        not_in.then_some(Comparison::NotIn)
    }

    /// Left-associative binary operators.
    fn binary(
        &mut self,
        operators: &[(&str, Operator)],
        operand: fn(&mut Self) -> Fallible<Node>,
    ) -> Fallible<Node> {
        let line = self.line();
        let mut left = operand(self)?;
        while let Some((_, operator)) = operators.iter().find(|(symbol, _)| self.eat(symbol)) {
            let right = operand(self)?;
            left = self.node(line, Expression::Binary(*operator, Box::new((left, right))))?;
        }
        Ok(left)
    }

    fn sum(&mut self) -> Fallible<Node> {
        self.binary(&[("+", Operator::Add), ("-", Operator::Sub)], Self::concat)
    }

    fn concat(&mut self) -> Fallible<Node> {
        let line = self.line();
        let first = self.product()?;
        if *self.peek() != Token::Operator("~") {
            return Ok(first);
        }
        let mut nodes = vec![first];
        while self.eat("~") {
            nodes.push(self.product()?);
        }
        self.node(line, Expression::Concat(nodes))
    }

    fn product(&mut self) -> Fallible<Node> {
        let operators =
            [("*", Operator::Mul), ("/", Operator::Div), ("//", Operator::FloorDiv), ("%", Operator::Mod)];
        self.binary(&operators, |parser| parser.binary(&[("**", Operator::Pow)], |parser| parser.unary(true)))
    }

    fn unary(&mut self, filters: bool) -> Fallible<Node> {
        let line = self.line();
        let mut node = if self.eat("-") {
            let operand = self.deeper(|parser| parser.unary(false))?;
            self.node(line, Expression::Negative(Box::new(operand)))?
        } else if self.eat("+") {
            let operand = self.deeper(|parser| parser.unary(false))?;
            self.node(line, Expression::Positive(Box::new(operand)))?
        } else {
            self.primary()?
        };
        node = self.postfix(node)?;
        if filters {
            node = self.filters(node)?;
        }
        Ok(node)
    }

    fn primary(&mut self) -> Fallible<Node> {
        let line = self.line();
        let expression = match self.next() {
            Token::Name("true" | "True") => Expression::Bool(true),
            Token::Name("false" | "False") => Expression::Bool(false),
            Token::Name("none" | "None") => Expression::None,
            Token::Name(name) => Expression::Name(self.symbol(name).map_err(|fault| fault.at(line))?),
            Token::Int(value) => Expression::Int(value),
            Token::Float(value) => Expression::Float(value),
            Token::Text(mut text) => {
                while let Token::Text(more) = self.peek() {
                    text.push_str(more);
                    self.next();
                }
                Expression::Text(text.into())
            }
            Token::Operator("(") => {
                let node = self.tuple_inside(true, &[], true)?;
                self.expect(")")?;
                return Ok(node);
            }
            Token::Operator("[") => Expression::List(self.list()?),
            Token::Operator("{") => Expression::Dict(self.dict()?),
            other => return Err(self.unexpected_token(&other, "an expression").at(line)),
        };
        self.node(line, expression)
    }

    fn list(&mut self) -> Fallible<Vec<Node>> {
        let mut nodes = vec![];
        while !self.eat("]") {
            if !nodes.is_empty() {
                self.expect(",")?;
                if self.eat("]") {
                    break;
                }
            }
            nodes.push(self.expression(true)?);
        }
        Ok(nodes)
    }

    fn dict(&mut self) -> Fallible<Vec<(Node, Node)>> {
        let mut pairs = vec![];
        while !self.eat("}") {
            if !pairs.is_empty() {
                self.expect(",")?;
                if self.eat("}") {
                    break;
                }
            }
            let key = self.expression(true)?;
            self.expect(":")?;
            pairs.push((key, self.expression(true)?));
        }
        Ok(pairs)
    }

    /// Attributes, items and calls.
    pub(super) fn postfix(&mut self, mut node: Node) -> Fallible<Node> {
        loop {
            node = match self.peek() {
                Token::Operator("." | "[") => self.subscript(node)?,
                Token::Operator("(") => self.call(node)?,
                _ => return Ok(node),
            };
        }
    }

    /// Filters, tests, and calls of what they give.
    fn filters(&mut self, mut node: Node) -> Fallible<Node> {
        loop {
            node = match self.peek() {
                Token::Operator("|") => self.filter(node)?,
                Token::Name("is") => self.test(node)?,
                Token::Operator("(") => self.call(node)?,
                _ => return Ok(node),
            };
        }
    }

    fn subscript(&mut self, object: Node) -> Fallible<Node> {
        let line = self.line();
        let object = Box::new(object);
        if self.eat(".") {
            return match self.next() {
                Token::Name(name) => {
                    let name = self.intern(name);
                    self.node(line, Expression::Attribute(object, name))
                }
                Token::Int(index) => {
                    let index = self.node(line, Expression::Int(index))?;
                    self.node(line, Expression::Item(Box::new((*object, index))))
                }
                other => Err(self.unexpected_token(&other, "a name or a number").at(line)),
            };
        }
        self.expect("[")?;
        let mut indices = vec![];
        loop {
            let start = match self.peek() {
                Token::Operator(":") => None,
                _ => Some(self.expression(true)?),
            };
            if *self.peek() == Token::Operator(":") {
                let slice = self.slice(*object, start, line)?;
                self.expect("]")?;
                return Ok(slice);
            }
            indices.extend(start);
            if !self.eat(",") {
                break;
            }
        }
        self.expect("]")?;
        let index = match indices.len() {
            1 => indices.remove(0),
            _ => self.node(line, Expression::Tuple(indices))?,
        };
        self.node(line, Expression::Item(Box::new((*object, index))))
    }

    fn slice(&mut self, object: Node, start: Option<Node>, line: u32) -> Fallible<Node> {
        let mut bounds = [start, None, None];
        for bound in &mut bounds[1..] {
            if self.eat(":") && !matches!(self.peek(), Token::Operator("]" | ":")) {
                *bound = Some(self.expression(true)?);
            }
        }
        self.node(line, Expression::Slice(Box::new((object, bounds))))
    }

    fn call(&mut self, callee: Node) -> Fallible<Node> {
        let line = self.line();
        let arguments = self.arguments()?;
        self.node(line, Expression::Call(Box::new(callee), Box::new(arguments)))
    }

    fn arguments(&mut self) -> Fallible<Arguments> {
        self.expect("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.eat(")") {
            if !first {
                self.expect(",")?;
                if self.eat(")") {
                    break;
                }
            }
            first = false;
            let line = self.line();
            let plain = arguments.list.is_none() && arguments.dict.is_none();
            let keyword = matches!(self.peek(), Token::Name(_)) && *self.peek_after() == Token::Operator("=");
            if plain && self.eat("*") {
                arguments.list = Some(self.expression(true)?);
            } else if arguments.dict.is_none() && self.eat("**") {
                arguments.dict = Some(self.expression(true)?);
            } else if keyword && arguments.dict.is_none() {
                let name = self.name()?;
                self.expect("=")?;
                let value = self.expression(true)?;
                arguments.keyword.push((name, value));
            } else if plain && arguments.keyword.is_empty() {
                arguments.positional.push(self.expression(true)?);
            } else {
                return Err(Fault::new("invalid syntax for function call expression").at(line));
            }
        }
        Ok(arguments)
    }

    /// `|name(arguments)`
    pub(super) fn filter(&mut self, input: Node) -> Fallible<Node> {
        let line = self.line();
        self.expect("|")?;
        self.filter_call(input, line)
    }

    /// A chain of filters without the first `|`: the start of a `filter` block.
    pub(super) fn filter_chain(&mut self) -> Fallible<Node> {
        let line = self.line();
        let captured = self.node(line, Expression::Captured)?;
        let first = self.filter_call(captured, line)?;
        self.more_filters(first)
    }

    /// The filters of `{% set name | filter %}`, if there are some.
    pub(super) fn block_filters(&mut self) -> Fallible<Option<Node>> {
        if *self.peek() != Token::Operator("|") {
            return Ok(None);
        }
        let captured = self.node(self.line(), Expression::Captured)?;
        self.more_filters(captured).map(Some)
    }

    fn more_filters(&mut self, mut node: Node) -> Fallible<Node> {
        while *self.peek() == Token::Operator("|") {
            node = self.filter(node)?;
        }
        Ok(node)
    }

    fn filter_call(&mut self, input: Node, line: u32) -> Fallible<Node> {
        let name = self.dotted_name()?;
        let arguments = match self.peek() {
            Token::Operator("(") => self.arguments()?,
            _ => Arguments::default(),
        };
        self.node(line, Expression::Filter(Box::new(input), name, Box::new(arguments)))
    }

    fn test(&mut self, value: Node) -> Fallible<Node> {
        let line = self.line();
        self.next();
        let negated = self.eat_name("not");
        let name = self.dotted_name()?;
        let mut arguments = Arguments::default();
        match self.peek() {
            Token::Operator("(") => arguments = self.arguments()?,
            Token::Name("is") => {
                return Err(Fault::new("You cannot chain multiple tests with is").at(line));
            }
            Token::Name("else" | "or" | "and") => {}
            Token::Name(_)
            | Token::Text(_)
            | Token::Int(_)
            | Token::Float(_)
            | Token::Operator("[" | "{") => {
                let operand = self.deeper(Self::primary)?;
                arguments.positional.push(self.postfix(operand)?);
            }
            _ => {}
        }
        self.node(line, Expression::Test(Box::new(value), name, Box::new(arguments), negated))
    }

    fn dotted_name(&mut self) -> Fallible<Arc<str>> {
        let mut name = self.name()?;
        while self.eat(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }
}
