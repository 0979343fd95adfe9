//! A reply on its way from the tokens to its parts.

use crate::parse::{Event, ReplyParser, Syntax};
use crate::stop::StopTexts;
use lowbit_files::{FileError, TokenStream, Tokenizer};
use std::collections::VecDeque;
use std::ops::Range;

/// Tokens before a reply that decide how its text starts.
pub(crate) const TAIL: usize = 64;

/// A reply's next piece.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    /// The next piece of the reply's text, special tokens as they are spelled.
    pub text: String,
    /// The next parts of the reply.
    pub events: Vec<Event>,
}

/// Takes a reply's tokens one by one and returns its text, and its reasoning, content and tool
/// calls: what [`reply`](crate::reply()) does with the tokens that it samples, for callers who
/// sample them elsewhere. Characters that span tokens, texts that may be the start of a stop text
/// and those that may be the start of a marker are held back.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// use lowbit::{Checkpoint, Event, ReplyStream, Syntax, Tokenizer};
///
/// let tokenizer = Tokenizer::from_checkpoint(&Checkpoint::open("models/demo-4bit".as_ref())?)?;
/// let syntax = Syntax::plain();
/// let mut reply = ReplyStream::new((&tokenizer, &syntax), &[], vec!["two".into()], 0)?;
/// let mut text = String::new();
/// for id in tokenizer.encode("one two three", false)? {
///     text += &reply.push(id)?.text;
///     if reply.stop().is_some() {
///         break;
///     }
/// }
/// text += &reply.finish()?.text;
/// assert_eq!(text, "one ");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReplyStream<'a> {
    syntax: &'a Syntax,
    tokens: TokenStream<'a>,
    text: Text<'a>,
}

impl<'a> ReplyStream<'a> {
    /// A reply in the syntax of a model after the tokens `before`, of which the last 64 count. It
    /// ends before any of the texts `stops`; empty ones are ignored. Calls without an id of their
    /// own are numbered from `calls` on.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn new(
        (tokenizer, syntax): (&'a Tokenizer, &'a Syntax),
        before: &[u32],
        stops: Vec<String>,
        calls: usize,
    ) -> Result<Self, FileError> {
        let tail = &before[before.len().saturating_sub(TAIL)..];
        let text = Text {
            stops: StopTexts::new(stops),
            seen: 0,
            markers: VecDeque::new(),
            waiting: String::new(),
            parser: syntax.parser(&tokenizer.decode(tail)?, calls),
        };
        Ok(Self { syntax, tokens: tokenizer.stream(tail)?, text })
    }

    /// Takes the next token. After a stop text ([`Self::stop`]) there is nothing more.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<Piece, FileError> {
        let text = self.tokens.push(id)?.unwrap_or_default();
        let marker = self.syntax.marker(id).map(|spelling| (id, spelling.len()));
        let (text, events) = self.text.push(&text, marker);
        Ok(Piece { text, events })
    }

    /// The stop text that ended the reply.
    pub fn stop(&self) -> Option<&str> {
        self.text.stops.found()
    }

    /// Ends the reply and returns what was held back.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(&mut self) -> Result<Piece, FileError> {
        let rest = self.tokens.flush()?;
        let (text, events) = self.text.finish(&rest);
        Ok(Piece { text, events })
    }
}

impl std::fmt::Debug for ReplyStream<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReplyStream").field("stop", &self.stop()).finish_non_exhaustive()
    }
}

/// The text on its way from the tokens through the stop texts to the parser, which sees markers'
/// tokens as such.
struct Text<'a> {
    stops: StopTexts,
    /// Bytes that went into the stop texts.
    seen: usize,
    /// The tokens of markers that the parser did not see yet: their places, counted in bytes from
    /// the start of `waiting`.
    markers: VecDeque<(Range<usize>, u32)>,
    /// Text that came out of the stop texts and that the parser did not see yet.
    waiting: String,
    parser: ReplyParser<'a>,
}

impl Text<'_> {
    /// Takes the text of a token; `marker` is its id and length if it is a marker's, at the end of
    /// the text. Returns the text that cannot be the start of a stop text, and its parts.
    fn push(&mut self, text: &str, marker: Option<(u32, usize)>) -> (String, Vec<Event>) {
        self.seen += text.len();
        // A tokenizer's decoder may change how a token is spelled where it stands.
        if let Some((id, length)) = marker {
            self.markers.push_back((self.seen - length.min(text.len())..self.seen, id));
        }
        let text = self.stops.push(text);
        let events = self.parse(&text);
        (text, events)
    }

    fn parse(&mut self, text: &str) -> Vec<Event> {
        self.waiting.push_str(text);
        let mut events = vec![];
        while let Some((place, id)) = self.markers.front().cloned() {
            if place.end > self.waiting.len() {
                break;
            }
            events.extend(self.parser.text(&self.waiting[..place.start]));
            events.extend(self.parser.token(id));
            self.consume(place.end);
            self.markers.pop_front();
        }
        // A marker of which a part came out waits for the rest.
        let end =
            self.markers.front().map_or(self.waiting.len(), |(place, _)| place.start.min(self.waiting.len()));
        events.extend(self.parser.text(&self.waiting[..end]));
        self.consume(end);
        events
    }

    fn consume(&mut self, length: usize) {
        self.waiting.drain(..length);
        self.seen -= length;
        for (place, _) in &mut self.markers {
            *place = place.start.saturating_sub(length)..place.end.saturating_sub(length);
        }
    }

    /// The end of the text, whose last part is `rest`.
    fn finish(&mut self, rest: &str) -> (String, Vec<Event>) {
        let (mut text, mut events) = self.push(rest, None);
        let held = self.stops.flush();
        events.extend(self.parse(&held));
        text.push_str(&held);
        // A stop text may have cut a marker's token.
        events.extend(self.parser.text(&std::mem::take(&mut self.waiting)));
        events.extend(self.parser.finish());
        (text, events)
    }
}
