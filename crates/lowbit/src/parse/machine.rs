use super::bodies::{self, Parsed};
use super::families::harmony;
use super::json_end::{JsonEnd, Step};
use super::symbols::{Found, Marker, Symbol, find};
use super::{Call, Event, Syntax};

/// Takes a reply piece by piece and returns its parts: see [`Syntax`]. Text that may be the start
/// of a marker is held back until it is clear that it is not. The events do not depend on how the
/// reply is cut into pieces.
///
/// Reasoning opens only at the start of a reply; later its markers are text. Text that looks like a
/// call but cannot be read stays content, markers included.
#[derive(Debug)]
pub struct ReplyParser<'s> {
    syntax: &'s Syntax,
    state: State,
    /// Symbols that may be the start of a marker.
    pending: Vec<Symbol>,
    /// The index of the markers around the answer, while it is open.
    answer: Option<usize>,
    out: Out,
}

/// The part of a reply that a marker within content begins.
#[derive(Debug)]
enum Next {
    /// Nothing: it closes what is not open.
    Nothing,
    /// The answer between markers, or the end of it.
    Answer(Option<usize>),
    State(State),
}

/// The machine's place in a reply.
#[derive(Debug)]
enum State {
    Content,
    /// By the index of its markers.
    Reasoning(usize),
    Calls(Raw),
    /// A header of harmony so far, with its markers as they are spelled.
    Header(String),
    Message(Channel),
}

/// Calls so far: all of the text, to be content if it is no call.
#[derive(Debug)]
struct Raw {
    /// Of the markers.
    index: usize,
    text: String,
    /// The offset of the body in `text`.
    body: usize,
    json: JsonEnd,
}

/// The kind of a harmony message, by its header.
#[derive(Debug)]
enum Channel {
    Reasoning,
    Content,
    /// With its header, to be content if it is no call.
    Call {
        recipient: String,
        header: String,
        body: String,
    },
}

impl<'s> ReplyParser<'s> {
    pub(super) fn new(syntax: &'s Syntax, prompt: &str, calls: usize) -> Self {
        let prompt = prompt.trim_end();
        let opened = syntax.reasoning.iter().position(|markers| prompt.ends_with(markers.spelling));
        let state = match (&syntax.harmony, opened) {
            (Some(_), _) => harmony_start(prompt),
            (None, Some(index)) => State::Reasoning(index),
            (None, None) => State::Content,
        };
        Self { syntax, state, pending: vec![], answer: None, out: Out::new(calls) }
    }

    /// Takes text that is not a marker's token.
    pub fn text(&mut self, text: &str) -> Vec<Event> {
        self.pending.extend(text.chars().map(Symbol::Char));
        self.go_on()
    }

    /// Takes the token `id`, which is part of a marker ([`Syntax::marker`]).
    pub fn token(&mut self, id: u32) -> Vec<Event> {
        self.pending.push(Symbol::Token(id));
        self.go_on()
    }

    /// Ends the reply and returns the held-back parts.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut events = self.go_on();
        let rest = std::mem::take(&mut self.pending);
        let rest = self.spelled(&rest);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Content => self.out.content(&rest),
            State::Reasoning(_) | State::Message(Channel::Reasoning) => self.out.reasoning(&rest),
            State::Message(Channel::Content) => self.out.content(&rest),
            State::Calls(mut raw) => {
                raw.text.push_str(&rest);
                self.calls(&raw);
            }
            State::Header(header) => {
                let header = header + &rest;
                // A model that does not write headers.
                let is_header = ["<", "to="].iter().any(|start| header.trim_start().starts_with(start));
                if !is_header {
                    self.out.content(&header);
                }
            }
            State::Message(Channel::Call { recipient, header, body }) => {
                self.message_call(&recipient, &header, &(body + &rest));
            }
        }
        self.out.end();
        events.append(&mut self.out.events);
        events
    }

    fn go_on(&mut self) -> Vec<Event> {
        while self.step() {}
        std::mem::take(&mut self.out.events)
    }

    /// Takes what is clear; whether a state ended, so that there may be more.
    fn step(&mut self) -> bool {
        match &mut self.state {
            State::Content => self.content(),
            State::Reasoning(index) => {
                let index = *index;
                self.reasoning(index)
            }
            State::Calls(_) => self.body(),
            State::Header(_) => self.header(),
            State::Message(_) => self.message(),
        }
    }

    fn content(&mut self) -> bool {
        let syntax = self.syntax;
        let blank = self.out.is_blank;
        let reasoning = syntax.reasoning.iter().enumerate().filter(|_| blank);
        let reasoning = reasoning.flat_map(|(index, markers)| {
            // A close where nothing is open ends reasoning that there was none of.
            [(&markers.open, Next::State(State::Reasoning(index))), (&markers.close, Next::Nothing)]
        });
        let calls = syntax.calls.iter().enumerate().filter(|(_, markers)| blank || !markers.at_start);
        let calls = calls.map(|(index, markers)| {
            let raw = Raw { index, text: String::new(), body: 0, json: JsonEnd::default() };
            (&markers.open, Next::State(State::Calls(raw)))
        });
        let answers = syntax.answers.iter().enumerate();
        let answers = answers.filter_map(|(index, [open, close])| match self.answer {
            None => blank.then_some((open, Next::Answer(Some(index)))),
            Some(opened) => (opened == index).then_some((close, Next::Answer(None))),
        });
        let (markers, mut next): (Vec<&Marker>, Vec<_>) = reasoning.chain(calls).chain(answers).unzip();
        let Some((before, index)) = self.until(&markers, Out::content) else { return false };
        let open = markers[index].symbols();
        let next = next.swap_remove(index);
        let may_follow = match &next {
            Next::State(State::Calls(raw)) => !syntax.calls[raw.index].at_start,
            Next::Answer(opened) => opened.is_none(),
            _ => false,
        };
        // Text that came with the marker may have begun the content.
        if !may_follow && !before.trim().is_empty() {
            let spelled = self.spelled(open);
            self.out.content(&spelled);
            return true;
        }
        match next {
            Next::Nothing => self.out.after_marker(),
            Next::Answer(opened) => {
                self.answer = opened;
                self.out.after_marker();
            }
            Next::State(State::Calls(mut raw)) => {
                if syntax.calls[raw.index].markers_are_body {
                    self.pending.splice(0..0, open.iter().copied());
                } else {
                    raw.text = self.spelled(open);
                    raw.body = raw.text.len();
                }
                self.state = State::Calls(raw);
            }
            Next::State(state) => {
                self.out.after_marker();
                self.out.next_thought();
                self.state = state;
            }
        }
        true
    }

    fn reasoning(&mut self, index: usize) -> bool {
        let markers = &self.syntax.reasoning[index];
        // A model opens again what its prompt opened.
        let again = (!self.out.thought).then_some(&markers.open);
        let markers: Vec<&Marker> = [&markers.close].into_iter().chain(again).collect();
        match self.until(&markers, Out::reasoning) {
            Some((_, 0)) => {
                self.out.end_of_reasoning();
                self.state = State::Content;
                true
            }
            Some((before, _)) => {
                if !before.trim().is_empty() {
                    let spelled = self.spelled(markers[1].symbols());
                    self.out.reasoning(&spelled);
                }
                true
            }
            None => false,
        }
    }

    fn body(&mut self) -> bool {
        let State::Calls(mut raw) = std::mem::replace(&mut self.state, State::Content) else { return false };
        let markers = &self.syntax.calls[raw.index];
        let Some(close) = &markers.close else { return self.json_body(raw) };
        let (end, found) = match find(&self.pending, &[close]) {
            Found::Marker { start, .. } => (start, true),
            Found::Open(start) => (start, false),
        };
        let text: Vec<Symbol> = self.pending.drain(..end).collect();
        raw.text.push_str(&self.spelled(&text));
        if !found {
            self.state = State::Calls(raw);
            return false;
        }
        self.pending.drain(..close.len());
        let is_token = close.symbols().iter().all(|symbol| matches!(symbol, Symbol::Token(_)));
        let close = self.spelled(close.symbols());
        let end = raw.text.len();
        raw.text.push_str(&close);
        let end = if markers.markers_are_body { raw.text.len() } else { end };
        match (markers.body)(&raw.text[raw.body..end], &self.syntax.tools) {
            Parsed::Calls(calls) => self.out.calls(calls),
            // The marker is spelled in an argument.
            Parsed::Incomplete if !is_token => self.state = State::Calls(raw),
            Parsed::Incomplete | Parsed::Malformed => self.out.content(&raw.text),
        }
        true
    }

    /// A body that ends with its JSON value.
    fn json_body(&mut self, mut raw: Raw) -> bool {
        let mut taken = 0;
        for symbol in &self.pending {
            let spelled = self.spelled(&[*symbol]);
            let last = spelled.chars().map(|c| raw.json.step(c)).find(|step| *step != Step::Part);
            let last = last.unwrap_or(Step::Part);
            if last != Step::Alien {
                raw.text.push_str(&spelled);
                taken += 1;
            }
            if last != Step::Part {
                self.pending.drain(..taken);
                self.calls(&raw);
                return true;
            }
        }
        self.pending.clear();
        self.state = State::Calls(raw);
        false
    }

    /// The calls that `raw` is, or content.
    fn calls(&mut self, raw: &Raw) {
        match (self.syntax.calls[raw.index].body)(&raw.text[raw.body..], &self.syntax.tools) {
            Parsed::Calls(calls) => self.out.calls(calls),
            Parsed::Incomplete | Parsed::Malformed => self.out.content(&raw.text),
        }
    }

    fn header(&mut self) -> bool {
        let (Some(harmony), State::Header(header)) = (&self.syntax.harmony, &self.state) else {
            return false;
        };
        let mut header = header.clone();
        match find(&self.pending, &[&harmony.message]) {
            Found::Marker { start, .. } => {
                let text: Vec<Symbol> = self.pending.drain(..start).collect();
                header.push_str(&self.spelled(&text));
                self.pending.drain(..harmony.message.len());
                self.state = State::Message(self.channel(header));
                true
            }
            Found::Open(start) => {
                let text: Vec<Symbol> = self.pending.drain(..start).collect();
                header.push_str(&self.spelled(&text));
                self.state = State::Header(header);
                false
            }
        }
    }

    /// The kind of the message after `header`.
    fn channel(&mut self, header: String) -> Channel {
        let channel = channel(header);
        match channel {
            Channel::Reasoning => self.out.next_thought(),
            Channel::Content => self.out.next_content(),
            Channel::Call { .. } => {}
        }
        channel
    }

    fn message(&mut self) -> bool {
        let Some(harmony) = &self.syntax.harmony else { return false };
        let markers: Vec<&Marker> = harmony.ends.iter().chain([&harmony.start, &harmony.channel]).collect();
        let found = find(&self.pending, &markers);
        let (end, marker) = match found {
            Found::Marker { index, start } => (start, Some(markers[index])),
            Found::Open(start) => (start, None),
        };
        let text: Vec<Symbol> = self.pending.drain(..end).collect();
        let text = self.spelled(&text);
        match &mut self.state {
            State::Message(Channel::Reasoning) => self.out.reasoning(&text),
            State::Message(Channel::Content) => self.out.content(&text),
            State::Message(Channel::Call { body, .. }) => body.push_str(&text),
            _ => {}
        }
        let Some(marker) = marker else { return false };
        self.pending.drain(..marker.len());
        // The next header, with what it starts with where this message has no end.
        let is_end = harmony.ends.contains(marker);
        let header = if is_end { String::new() } else { self.spelled(marker.symbols()) };
        match std::mem::replace(&mut self.state, State::Header(header)) {
            State::Message(Channel::Call { recipient, header, body }) => {
                self.message_call(&recipient, &header, &body);
            }
            State::Message(Channel::Reasoning) => self.out.end_of_reasoning(),
            _ => {}
        }
        true
    }

    fn message_call(&mut self, recipient: &str, header: &str, body: &str) {
        match bodies::harmony(recipient, body) {
            Some(call) => self.out.calls(vec![call]),
            None => self.out.content(&format!("{header}{}{body}", harmony::MESSAGE)),
        }
    }

    /// Gives `out` what is before the first of `markers`, and what cannot be part of one. The text
    /// before a marker that was found, and its index.
    fn until(&mut self, markers: &[&Marker], out: fn(&mut Out, &str)) -> Option<(String, usize)> {
        let (end, found) = match find(&self.pending, markers) {
            Found::Marker { index, start } => (start, Some(index)),
            Found::Open(start) => (start, None),
        };
        let text: Vec<Symbol> = self.pending.drain(..end).collect();
        let text = self.spelled(&text);
        out(&mut self.out, &text);
        let index = found?;
        self.pending.drain(..markers[index].len());
        Some((text, index))
    }

    fn spelled(&self, symbols: &[Symbol]) -> String {
        let mut text = String::new();
        for symbol in symbols {
            match symbol {
                Symbol::Char(c) => text.push(*c),
                Symbol::Token(id) => text.push_str(self.syntax.marker(*id).unwrap_or_default()),
            }
        }
        text
    }
}

/// The state at the start of a reply to `prompt`, in harmony.
fn harmony_start(prompt: &str) -> State {
    let last = prompt.rfind(harmony::START).map_or("", |start| &prompt[start..]);
    match last.split_once(harmony::MESSAGE) {
        Some((header, _)) => State::Message(channel(header.into())),
        None => State::Header(String::new()),
    }
}

/// The kind of the message after `header`.
fn channel(header: String) -> Channel {
    let after = |marker: &str| {
        let rest = header.split_once(marker)?.1.trim_start();
        rest.split(|c: char| c.is_whitespace() || c == '<').next()
    };
    match (after("to="), after(harmony::CHANNEL)) {
        (Some(recipient), _) => Channel::Call { recipient: recipient.into(), header, body: String::new() },
        (None, Some("analysis")) => Channel::Reasoning,
        (None, _) => Channel::Content,
    }
}

/// The parts so far, and the white space that only counts if more of the same part follows.
#[derive(Debug)]
struct Out {
    events: Vec<Event>,
    /// No content was written.
    is_blank: bool,
    /// White space at the start of the content counts only where no marker is before it.
    skip: bool,
    held: String,
    /// Reasoning was written since it opened; and before that.
    thought: bool,
    thought_before: bool,
    held_thought: String,
    /// Calls so far, in the whole conversation.
    calls: usize,
}

impl Out {
    fn new(calls: usize) -> Self {
        let (held, held_thought) = (String::new(), String::new());
        let (thought, thought_before) = (false, false);
        Self {
            events: vec![],
            is_blank: true,
            skip: false,
            held,
            thought,
            thought_before,
            held_thought,
            calls,
        }
    }

    fn content(&mut self, text: &str) {
        let text = if self.skip { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.skip = false;
        let text = std::mem::take(&mut self.held) + text;
        let length = text.trim_end().len();
        self.held = text[length..].into();
        self.push_content(&text[..length]);
    }

    fn push_content(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.is_blank = false;
        match self.events.last_mut() {
            Some(Event::Content(before)) => before.push_str(text),
            _ => self.events.push(Event::Content(text.into())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        let text = if self.thought { text } else { text.trim_start() };
        if text.is_empty() {
            return;
        }
        if !self.thought && self.thought_before {
            self.held_thought = "\n".into();
        }
        self.thought = true;
        let text = std::mem::take(&mut self.held_thought) + text;
        let length = text.trim_end().len();
        self.held_thought = text[length..].into();
        match self.events.last_mut() {
            _ if length == 0 => {}
            Some(Event::Reasoning(before)) => before.push_str(&text[..length]),
            _ => self.events.push(Event::Reasoning(text[..length].into())),
        }
    }

    fn end_of_reasoning(&mut self) {
        self.held_thought.clear();
        self.after_marker();
    }

    /// A marker stands here: white space on either side of it does not count.
    fn after_marker(&mut self) {
        self.held.clear();
        self.skip = true;
    }

    /// Reasoning opens; what was thought before is a line of its own.
    fn next_thought(&mut self) {
        self.thought_before |= self.thought;
        self.thought = false;
    }

    /// Another message of content: a line of its own.
    fn next_content(&mut self) {
        self.after_marker();
        if !self.is_blank {
            self.held = "\n".into();
        }
    }

    fn calls(&mut self, calls: Vec<Call>) {
        self.after_marker();
        for mut call in calls {
            self.calls += 1;
            // Nine characters: Mistral's templates take no other ids.
            call.id.get_or_insert_with(|| format!("call{:05}", self.calls));
            self.events.push(Event::Call(call));
        }
    }

    fn end(&mut self) {
        let held = std::mem::take(&mut self.held);
        self.push_content(&held);
    }
}
