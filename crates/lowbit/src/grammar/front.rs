//! The part of a reply that stands before its form: reasoning, and the headers of messages.

use crate::parse::{CallMarker, Syntax};

/// An expression in Lark, and the rules that it names; both may be empty.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Front {
    pub(crate) expression: String,
    pub(crate) rules: String,
}

/// The white space between reasoning and the form: models write a blank line.
const SPACE: &str = r"/[ \r\n]{1,4}/?";

impl Front {
    pub(super) fn is_empty(&self) -> bool {
        self.expression.is_empty()
    }
}

impl Syntax {
    /// The front of a reply to a prompt that ends with `prompt`.
    pub(crate) fn front(&self, prompt: &str) -> Front {
        if self.harmony_markers().is_some() {
            return self.harmony_front(prompt);
        }
        let mut rules = String::new();
        let mut thoughts = vec![];
        for (index, (open, close, is_open)) in self.reasoning_markers(prompt).into_iter().enumerate() {
            // Text alone has no special tokens in it.
            let text = match close.is_token() {
                true => format!("/(?s:.*)/ {}", close.lark()),
                false => {
                    let close = super::literal(&close.spelled());
                    rules += &format!("thought{index}[suffix={close}]: /(?s:.*)/\n");
                    format!("thought{index}")
                }
            };
            if is_open {
                return Front { expression: format!("{text} {SPACE}"), rules };
            }
            thoughts.push(format!("({} {text} {SPACE})", open.lark()));
        }
        let expression = match thoughts.is_empty() {
            true => String::new(),
            false => format!("({})?", thoughts.join(" | ")),
        };
        Front { expression, rules }
    }

    /// Harmony's messages of reasoning, and the header of the answer; nothing where the prompt has
    /// written a header.
    pub(super) fn harmony_front(&self, prompt: &str) -> Front {
        let Some(markers) = self.harmony_markers() else { return Front::default() };
        let [start, _, _, message, _] = markers.map(CallMarker::spelled);
        let last = prompt.rfind(&start).map_or("", |start| &prompt[start..]);
        if last.contains(&message) {
            return Front::default();
        }
        let [start, channel, constrain, message, end] = markers.map(CallMarker::lark);
        let rules = format!(
            "analysis: {channel} \"analysis\" {message} /(?s:.*)/ {end} {start} \"assistant\"\n\
             header: {channel} \"final\" (\" \"? {constrain} \"json\")? {message}\n"
        );
        Front { expression: "analysis* header".into(), rules }
    }
}
