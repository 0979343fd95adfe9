//! A reply on standard output while it is written. A terminal shows its parts: reasoning in grey,
//! calls of tools by name. A file or a pipe gets the text as the model writes it.

use crate::out::{self, Unwritable};
use lowbit::{Call, Event, Progress};
use std::mem::discriminant;

/// The display of a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Reasoning {
    Show,
    Hide,
}

/// Writes one reply.
pub struct Screen {
    hides: bool,
    /// True if the reply is written in its parts.
    in_parts: bool,
    /// The part before: nothing is between parts of the same kind.
    last: Option<Event>,
}

impl Screen {
    /// `special`: with special tokens as they are spelled, which parts do not have.
    pub fn new(reasoning: Reasoning, special: bool) -> Self {
        let hides = reasoning == Reasoning::Hide;
        Self { hides, in_parts: hides || (out::is_terminal() && !special), last: None }
    }

    /// Writes what there is to write about it.
    pub fn see(&mut self, progress: Progress<'_>) -> Result<(), Unwritable> {
        match progress {
            Progress::Text(text) if !self.in_parts => out::from_model(text),
            Progress::Event(Event::Reasoning(_)) if self.hides => Ok(()),
            Progress::Event(event) if self.in_parts => self.part(event),
            _ => Ok(()),
        }
    }

    fn part(&mut self, event: &Event) -> Result<(), Unwritable> {
        let goes_on =
            |last: &Event| discriminant(last) == discriminant(event) && !matches!(event, Event::Call(_));
        if self.last.as_ref().is_none_or(|last| !goes_on(last)) {
            out::grey(matches!(event, Event::Reasoning(_)))?;
            if self.last.is_some() {
                out::print(format_args!("\n\n"))?;
            }
            self.last = Some(event.clone());
        }
        match event {
            Event::Reasoning(text) | Event::Content(text) => out::from_model(text),
            Event::Call(call) => out::from_model(&shown(call)),
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs no colour.
        _ = out::grey(false);
    }
}

fn shown(call: &Call) -> String {
    format!("[calls {} {}]", call.name, call.arguments)
}
