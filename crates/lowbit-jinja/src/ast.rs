//! The nodes into which a template's source is parsed.

use std::sync::Arc;

/// A name of the template, as an index into [`super::Template::names`].
pub(super) type Symbol = u32;

pub(super) struct Node {
    pub(super) expression: Expression,
    pub(super) line: u32,
    /// Nodes on the longest way down.
    pub(super) depth: u16,
}

pub(super) enum Expression {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    Name(Symbol),
    List(Vec<Node>),
    Tuple(Vec<Node>),
    Dict(Vec<(Node, Node)>),
    Attribute(Box<Node>, Arc<str>),
    Item(Box<(Node, Node)>),
    /// Start, stop and step.
    Slice(Box<(Node, [Option<Node>; 3])>),
    Call(Box<Node>, Box<Arguments>),
    Filter(Box<Node>, Arc<str>, Box<Arguments>),
    /// A test, and whether `not` precedes its name.
    Test(Box<Node>, Arc<str>, Box<Arguments>, bool),
    /// The text that a `filter` or `set` block has made.
    Captured,
    Not(Box<Node>),
    Negative(Box<Node>),
    Positive(Box<Node>),
    Binary(Operator, Box<(Node, Node)>),
    /// `~`
    Concat(Vec<Node>),
    And(Vec<Node>),
    Or(Vec<Node>),
    Compare(Box<Node>, Vec<(Comparison, Node)>),
    /// `a if condition else b`
    Condition(Box<(Node, Node)>, Option<Box<Node>>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Node>,
    pub(super) keyword: Vec<(Arc<str>, Node)>,
    /// `*list`
    pub(super) list: Option<Node>,
    /// `**dict`
    pub(super) dict: Option<Node>,
}

impl Arguments {
    fn nodes(&self) -> impl Iterator<Item = &Node> {
        let keyword = self.keyword.iter().map(|(_, node)| node);
        self.positional.iter().chain(keyword).chain(&self.list).chain(&self.dict)
    }
}

impl Expression {
    /// The depth of a node with this expression.
    pub(super) fn depth(&self) -> u16 {
        fn most<'n>(nodes: impl IntoIterator<Item = &'n Node>) -> u16 {
            nodes.into_iter().map(|node| node.depth).max().unwrap_or(0)
        }
        let inner = match self {
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Text(_) => 0,
            Self::Name(_) | Self::Captured => 0,
            Self::List(nodes) | Self::Tuple(nodes) => most(nodes),
            Self::Concat(nodes) | Self::And(nodes) | Self::Or(nodes) => most(nodes),
            Self::Dict(pairs) => most(pairs.iter().flat_map(|(key, value)| [key, value])),
            Self::Item(pair) | Self::Binary(_, pair) => pair.0.depth.max(pair.1.depth),
            Self::Slice(slice) => slice.0.depth.max(most(slice.1.iter().flatten())),
            Self::Call(node, arguments) => node.depth.max(most(arguments.nodes())),
            Self::Filter(node, _, arguments) | Self::Test(node, _, arguments, _) => {
                node.depth.max(most(arguments.nodes()))
            }
            Self::Attribute(node, _) | Self::Not(node) | Self::Negative(node) | Self::Positive(node) => {
                node.depth
            }
            Self::Compare(node, others) => node.depth.max(most(others.iter().map(|(_, node)| node))),
            Self::Condition(pair, other) => most([&pair.0, &pair.1].into_iter().chain(other.as_deref())),
        };
        inner.saturating_add(1)
    }
}

pub(super) struct Statement {
    pub(super) action: Action,
    pub(super) line: u32,
}

pub(super) type Body = Vec<Statement>;

pub(super) enum Action {
    Text(Arc<str>),
    Print(Node),
    If(Vec<(Node, Body)>, Body),
    For(Box<For>),
    Set(Target, Node),
    /// `{% set x %}...{% endset %}`, with the filters.
    SetBlock(Target, Option<Node>, Body),
    Macro(Box<Macro>),
    /// `{% call f() %}`: the block as a macro, and the call.
    Call(Box<Macro>, Node),
    Filter(Node, Body),
    With(Vec<(Target, Node)>, Body),
    /// A body with names of its own: `generation` and `block`.
    Scope(Body),
    Break,
    Continue,
}

pub(super) struct For {
    pub(super) target: Target,
    pub(super) items: Node,
    pub(super) condition: Option<Node>,
    pub(super) body: Body,
    pub(super) otherwise: Body,
    pub(super) recursive: bool,
}

pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) symbol: Symbol,
    pub(super) parameters: Vec<Symbol>,
    /// Of the last parameters.
    pub(super) defaults: Vec<Node>,
    pub(super) body: Body,
    /// True for each of `caller`, `varargs` and `kwargs` that the body says: only then it may be
    /// given.
    pub(super) uses: [bool; 3],
}

pub(super) enum Target {
    Name(Symbol),
    /// `namespace.attribute`
    Attribute(Symbol, Arc<str>),
    Tuple(Vec<Target>),
}
