//! Splits a reply into reasoning, content and tool calls while it is written.
//!
//! One machine serves all families. They differ by data (`families`), and by the parser of a call's
//! text (`bodies`).

mod bodies;
mod families;
mod json_end;
mod machine;
mod pythonic;
mod symbols;
#[cfg(test)]
mod tests;
mod tools;

use bodies::Body;
#[cfg(feature = "grammar")]
pub(crate) use families::Style as CallStyle;
use families::{ANSWERS, BARE_JSON, CALLS, Calls, End, REASONING, Style, harmony};
use lowbit_files::{ChatTemplate, Tokenizer, ToolCall};
pub use machine::ReplyParser;
use serde::ser::{Serialize, SerializeStruct, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
#[cfg(feature = "grammar")]
pub(crate) use symbols::Marker as CallMarker;
use symbols::Marker;
use tools::Tools;

/// A part of a reply, without the markers around it. Consecutive parts of one kind are pieces of
/// one text.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The model's reasoning before its answer, without the white space around it.
    Reasoning(String),
    /// The answer. White space next to reasoning and calls is left out.
    Content(String),
    /// A tool call, once it is complete.
    Call(Call),
}

/// A tool call.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Call {
    /// The call's id: the model's own, or one made by lowbit; `None` only before the machine has
    /// numbered it.
    pub id: Option<String>,
    /// The tool's name.
    pub name: String,
    /// A JSON object; as the model wrote it if it wrote JSON.
    pub arguments: String,
}

impl Call {
    fn new(name: &str, arguments: Map<String, Value>) -> Self {
        Self { id: None, name: name.into(), arguments: Value::Object(arguments).to_string() }
    }

    /// The call as a message has it.
    pub fn to_message(&self) -> ToolCall {
        let arguments = serde_json::from_str(&self.arguments);
        let arguments = arguments.unwrap_or_else(|_| Value::String(self.arguments.clone()));
        ToolCall::new(self.id.clone(), &self.name, arguments)
    }
}

/// Serialises as in OpenAI's chat completions, with the arguments as JSON in a string.
impl Serialize for Call {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let function = BTreeMap::from([("name", &self.name), ("arguments", &self.arguments)]);
        let mut call = serializer.serialize_struct("Call", 3)?;
        call.serialize_field("type", "function")?;
        call.serialize_field("id", &self.id)?;
        call.serialize_field("function", &function)?;
        call.end()
    }
}

/// A model's spelling of reasoning and calls: the markers that its chat template mentions or its
/// tokenizer has tokens for.
///
/// ```
/// use lowbit::{Event, Syntax};
///
/// let template = lowbit::ChatTemplate::new("<think></think><tool_call></tool_call>", "template".as_ref())?;
/// let syntax = Syntax::new(&template, None);
/// let mut parser = syntax.parser("", 0);
/// let mut events = vec![];
/// for piece in ["<thi", "nk>Hm.</think>\n\nLet me look.\n<tool_", "call>{\"name\": \"look\"}</tool_call>"] {
///     events.extend(parser.text(piece));
/// }
/// events.extend(parser.finish());
/// assert_eq!(events[0], Event::Reasoning("Hm.".into()));
/// assert_eq!(events[1], Event::Content("Let me look.".into()));
/// let Event::Call(call) = &events[2] else { panic!() };
/// assert_eq!((call.name.as_str(), call.arguments.as_str()), ("look", "{}"));
/// # Ok::<(), lowbit::FileError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Syntax {
    reasoning: Vec<ReasoningMarkers>,
    /// The markers around answers, which are no part of them.
    answers: Vec<[Marker; 2]>,
    calls: Vec<CallMarkers>,
    harmony: Option<Harmony>,
    tools: Tools,
}

#[derive(Clone, Debug)]
struct ReasoningMarkers {
    open: Marker,
    close: Marker,
    /// As a prompt spells it.
    spelling: &'static str,
}

#[derive(Clone, Debug)]
struct CallMarkers {
    open: Marker,
    /// `None` where a body ends with its JSON value.
    close: Option<Marker>,
    body: Body,
    markers_are_body: bool,
    /// True if it only counts where nothing is written before it.
    at_start: bool,
    /// The form of a call that the model writes, where lowbit can say it as a grammar.
    #[cfg_attr(not(feature = "grammar"), allow(dead_code))]
    style: Option<Style>,
}

#[derive(Clone, Debug)]
struct Harmony {
    start: Marker,
    channel: Marker,
    message: Marker,
    ends: Vec<Marker>,
    /// Part of headers alone.
    constrain: Marker,
}

impl Syntax {
    /// The syntax of the model with this chat template. `tokenizer` says which markers are tokens;
    /// without it all are text.
    pub fn new(template: &ChatTemplate, tokenizer: Option<&Tokenizer>) -> Self {
        let marker = |spelling| Marker::new(spelling, tokenizer);
        let is_token = |spelling| tokenizer.and_then(|tokenizer| symbols::added_token(tokenizer, spelling));
        let tools = Tools::new(template.variable("tools"));

        let reasons = |known: &&families::Reasoning| {
            let tokens = is_token(known.open).is_some() && is_token(known.close).is_some();
            tokens || template.mentions(known.open) || template.mentions(known.close)
        };
        let reasoning = REASONING.iter().filter(reasons).map(|known| ReasoningMarkers {
            open: marker(known.open),
            close: marker(known.close),
            spelling: known.open,
        });
        let calls = |known: &&Calls| template.mentions(known.mention) || is_token(known.open).is_some();
        let bare = BARE_JSON.iter().filter(|bare| !tools.is_empty() && template.mentions(bare.mention));
        let calls =
            CALLS.iter().filter(calls).map(|known| (known, false)).chain(bare.map(|bare| (bare, true)));
        let calls = calls.map(|(known, at_start)| CallMarkers {
            open: marker(known.open),
            close: match known.end {
                End::Marker(close) => Some(marker(close)),
                End::Json => None,
            },
            body: known.body,
            markers_are_body: known.markers_are_body,
            at_start,
            style: families::style(known.open, |text| template.mentions(text)),
        });
        let harmony = template.mentions(harmony::CHANNEL).then(|| Harmony {
            start: marker(harmony::START),
            channel: marker(harmony::CHANNEL),
            message: marker(harmony::MESSAGE),
            ends: harmony::ENDS.map(marker).into(),
            constrain: marker(harmony::CONSTRAIN),
        });
        let answers =
            ANSWERS.iter().filter(|(open, close)| template.mentions(open) && template.mentions(close));
        let answers = answers.map(|(open, close)| [open, close].map(|&spelling| marker(spelling))).collect();
        Self { reasoning: reasoning.collect(), answers, calls: calls.collect(), harmony, tools }
    }

    /// The syntax of text that has no markers: all of it is content.
    pub fn plain() -> Self {
        Self::default()
    }

    /// The same without calls, whose markup then is content. Harmony's calls are messages of their
    /// own and stay calls.
    #[must_use]
    pub fn without_calls(mut self) -> Self {
        self.calls.clear();
        self
    }

    /// True if replies have nothing but content.
    pub fn is_plain(&self) -> bool {
        let [answers, reasoning] = [self.answers.is_empty(), self.reasoning.is_empty()];
        answers && reasoning && self.calls.is_empty() && self.harmony.is_none()
    }

    /// The parser for one reply to a prompt that ends with the text `prompt`, since some templates
    /// open the reasoning there. Calls without an id of their own are numbered from `calls` on.
    pub fn parser(&self, prompt: &str, calls: usize) -> ReplyParser<'_> {
        ReplyParser::new(self, prompt, calls)
    }

    /// The markers of reasoning, and whether a prompt that ends with `prompt` opens it; none where
    /// it closes it.
    #[cfg(feature = "grammar")]
    pub(crate) fn reasoning_markers(&self, prompt: &str) -> Vec<(&Marker, &Marker, bool)> {
        let prompt = prompt.trim_end();
        if self.reasoning.iter().any(|markers| prompt.ends_with(&markers.close.spelled())) {
            return vec![];
        }
        let all = self.reasoning.iter();
        all.map(|markers| (&markers.open, &markers.close, prompt.ends_with(markers.spelling))).collect()
    }

    /// The markers and style of calls, where the model has any that a grammar can be made of; else
    /// the spelling of those that it has.
    #[cfg(feature = "grammar")]
    pub(crate) fn call_style(&self) -> Result<(&Marker, Option<&Marker>, Style), Option<String>> {
        // A model of Llama's family writes the bare form, whatever token it has.
        let mut calls: Vec<&CallMarkers> = self.calls.iter().collect();
        calls.sort_by_key(|markers| !markers.at_start);
        let known = calls.iter().find_map(|it| Some((&it.open, it.close.as_ref(), it.style?)));
        known.ok_or_else(|| calls.first().map(|markers| markers.open.spelled()))
    }

    /// Harmony's markers `<|start|>`, `<|channel|>`, `<|constrain|>`, `<|message|>` and `<|end|>`.
    #[cfg(feature = "grammar")]
    pub(crate) fn harmony_markers(&self) -> Option<[&Marker; 5]> {
        let Harmony { start, channel, message, ends, constrain } = self.harmony.as_ref()?;
        Some([start, channel, constrain, message, ends.first()?])
    }

    fn markers(&self) -> impl Iterator<Item = &Marker> {
        let reasoning = self.reasoning.iter().flat_map(|markers| [&markers.open, &markers.close]);
        let calls = self.calls.iter().flat_map(|markers| [Some(&markers.open), markers.close.as_ref()]);
        let harmony = self.harmony.iter().flat_map(|markers| {
            let Harmony { start, channel, message, ends, constrain } = markers;
            [start, channel, message, constrain].into_iter().chain(ends)
        });
        reasoning.chain(calls.flatten()).chain(harmony).chain(self.answers.iter().flatten())
    }

    /// The spelling of the token `id`, if it is part of a marker.
    pub fn marker(&self, id: u32) -> Option<&str> {
        self.markers().flat_map(Marker::tokens).find(|(token, _)| *token == id).map(|(_, spelling)| spelling)
    }
}
