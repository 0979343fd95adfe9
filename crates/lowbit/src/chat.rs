use crate::history::aligned;
use crate::reply::{Asked, Progress, answer};
use crate::{Error, Reply, ReplyOptions, Syntax, respelled};
use lowbit_files::{ChatTemplate, Message, Tokenizer};
use lowbit_models::{Model, ModelError, Session, Speculation};
use std::ops::ControlFlow;

/// A conversation: its messages, and the [`Session`] that has read them. Each turn runs only new
/// tokens. The model's answers stay as the tokens that it sampled; where the template rewrites
/// earlier turns (most drop earlier reasoning), the session goes back to the longest common start.
///
/// A model without a chat template continues what the user says as plain text.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// use lowbit::{GenerationOptions, LanguageModel};
/// use std::ops::ControlFlow::Continue;
///
/// let model = LanguageModel::open("models/demo-4bit")?;
/// let mut chat = model.chat();
/// let options = GenerationOptions::default().with_max_tokens(8).into();
/// for message in ["A vector is", " and a slice is"] {
///     let reply = chat.say(message, &options, |_| Continue(()))?;
///     println!("{message}{}", reply.text);
/// }
/// assert_eq!(chat.messages().len(), 4);
/// assert_eq!(chat.undo().as_deref(), Some(" and a slice is"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Chat<'m> {
    tokenizer: &'m Tokenizer,
    template: Option<&'m ChatTemplate>,
    syntax: Syntax,
    messages: Vec<Message>,
    /// For each of the model's messages its sampled tokens, the one that ended it included; empty
    /// for other messages.
    drawn: Vec<Vec<u32>>,
    session: Session<'m>,
}

impl<'m> Chat<'m> {
    /// An empty conversation.
    pub fn new(model: &'m Model, tokenizer: &'m Tokenizer, template: Option<&'m ChatTemplate>) -> Self {
        let syntax = template.map_or_else(Syntax::plain, |template| Syntax::new(template, Some(tokenizer)));
        let session = Session::new(model);
        Self { tokenizer, template, syntax, messages: vec![], drawn: vec![], session }
    }

    /// With a message in front that gets no answer, such as the system's: see [`Self::push`].
    #[must_use]
    pub fn with_message(mut self, message: Message) -> Self {
        self.push(message);
        self
    }

    /// Adds a message without an answer, such as a tool's; [`Self::answer`] answers it. A model
    /// without a chat template does not see it.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
        self.drawn.push(vec![]);
    }

    /// The messages so far. They serialise, so that a conversation can be kept in a file.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Replaces all messages. The start that the session has read already is not read again.
    pub fn set_messages(&mut self, messages: Vec<Message>) {
        self.drawn = vec![vec![]; messages.len()];
        self.messages = messages;
    }

    /// The system's message, if the conversation has one.
    pub fn system(&self) -> Option<&str> {
        self.messages.first().filter(|message| message.role == SYSTEM).map(|message| message.content.as_str())
    }

    /// Sets the system's message, or removes it; the rest of the conversation stays.
    pub fn set_system(&mut self, text: Option<&str>) {
        if self.system().is_some() {
            self.messages.remove(0);
            self.drawn.remove(0);
        }
        if let Some(text) = text {
            self.messages.insert(0, Message::new(SYSTEM, text));
            self.drawn.insert(0, vec![]);
        }
    }

    /// Removes all messages from the first user's on.
    pub fn clear(&mut self) {
        let start = self.first_turn();
        self.messages.truncate(start);
        self.drawn.truncate(start);
    }

    /// Removes the last turn, which is the user's last message and all after it, and returns that
    /// message.
    pub fn undo(&mut self) -> Option<String> {
        let last = self.messages.iter().rposition(|message| message.role == USER)?;
        self.drawn.truncate(last);
        self.messages.drain(last..).next().map(|message| message.content)
    }

    /// Removes the oldest turn, for when a context is full, unless it is the only one. Returns true
    /// if a turn was removed.
    pub fn drop_oldest(&mut self) -> bool {
        let users = self.messages.iter().enumerate().filter(|(_, message)| message.role == USER);
        let Some(next) = users.map(|(index, _)| index).nth(1) else { return false };
        let turn = self.first_turn()..next;
        self.messages.drain(turn.clone());
        self.drawn.drain(turn);
        true
    }

    fn first_turn(&self) -> usize {
        self.messages.iter().position(|message| message.role == USER).unwrap_or(self.messages.len())
    }

    /// The session, with all that the model has read.
    pub fn session(&self) -> &Session<'m> {
        &self.session
    }

    /// Guesses tokens from now on, or stops to do so: see [`Session::speculate`].
    pub fn speculate(&mut self, speculation: Option<Speculation<'m>>) {
        self.session.speculate(speculation);
    }

    /// The model's spelling of reasoning and calls.
    pub fn syntax(&self) -> &Syntax {
        &self.syntax
    }

    /// One turn: the user says `text`, the model answers. `each` is called with what happens, and
    /// ends the answer by returning `Break`. After an error, or if the message was not read to its
    /// end ([`Reply::is_unread`]), the conversation is as it was before the turn.
    ///
    /// # Errors
    /// [`Error::Model`] when the message does not fit the context; [`Error::File`] when the chat
    /// template or the tokenizer refuses it; [`Error::Kernel`] when a GPU fails, or for sampling
    /// options that make no sense.
    pub fn say(
        &mut self,
        text: &str,
        options: &ReplyOptions,
        each: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Reply, Error> {
        self.push(Message::new(USER, text));
        let reply = self.answer(options, each);
        if reply.as_ref().map_or(true, Reply::is_unread) {
            self.messages.pop();
            self.drawn.pop();
        }
        reply
    }

    /// Answers the last message again, in place of its earlier answer, which stays if this one
    /// fails or does not begin. `None` if there is no answer yet.
    ///
    /// # Errors
    /// As [`Self::say`].
    pub fn regenerate(
        &mut self,
        options: &ReplyOptions,
        each: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Option<Reply>, Error> {
        if self.messages.last().is_none_or(|message| message.role != ASSISTANT) {
            return Ok(None);
        }
        let before = self.messages.pop().zip(self.drawn.pop());
        let reply = self.answer(options, each);
        if reply.as_ref().map_or(true, Reply::is_unread)
            && let Some((message, drawn)) = before
        {
            self.messages.push(message);
            self.drawn.push(drawn);
        }
        reply.map(Some)
    }

    /// Answers the messages so far, whose last may be a tool's. After an error, or if they were not
    /// read to the end, nothing is added.
    ///
    /// # Errors
    /// As [`Self::say`].
    pub fn answer(
        &mut self,
        options: &ReplyOptions,
        each: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Reply, Error> {
        let (prompt, mark) = self.prompt()?;
        let asked = Asked {
            tokenizer: self.tokenizer,
            syntax: &self.syntax,
            prompt: &prompt,
            mark,
            calls: self.messages.iter().map(|message| message.tool_calls.len()).sum(),
        };
        let start = self.session.tokens().len() + prompt.len();
        let reply = match answer(&mut self.session, &asked, options, each) {
            Ok(reply) => reply,
            Err(error) => {
                // Input that is refused before it ran leaves the session as it was.
                let is_refused = matches!(
                    error,
                    Error::Form { .. }
                        | Error::Model(ModelError::ContextLength { .. } | ModelError::NoTokens)
                );
                if !is_refused {
                    self.session.clear()?;
                }
                return Err(error);
            }
        };
        if !reply.is_unread() {
            let mut message = Message::new(ASSISTANT, &reply.content);
            message.reasoning_content = (!reply.reasoning.is_empty()).then(|| reply.reasoning.clone());
            message.tool_calls = reply.tool_calls.iter().map(crate::Call::to_message).collect();
            self.messages.push(message);
            self.drawn.push(self.session.tokens().get(start..).unwrap_or_default().to_vec());
        }
        Ok(reply)
    }

    /// Goes back to the longest common start of the session's tokens and the conversation's.
    /// Returns the tokens to run from there, and the number of them after which the session marks
    /// its place.
    fn prompt(&mut self) -> Result<(Vec<u32>, Option<usize>), Error> {
        let all = match self.template {
            Some(template) => self.rendered(template, &self.messages)?,
            None => self.plain()?,
        };
        let Some(last) = all.len().checked_sub(1) else { return Ok((all, None)) };
        // At least one token runs: the reply's first token is sampled from its logits.
        let same = aligned(self.tokenizer, self.session.tokens(), &all, last)?;
        let mut wanted = same.within(usize::MAX);
        let start = loop {
            let reached = self.session.go_back(wanted.read)?;
            if reached == wanted.read {
                break wanted.all;
            }
            wanted = same.within(reached);
        };
        let mark = match self.session.goes_back_anywhere()? {
            true => None,
            false => self.kept(&all)?.min(last).checked_sub(start),
        };
        Ok((all[start..].to_vec(), mark))
    }

    fn rendered(&self, template: &ChatTemplate, messages: &[Message]) -> Result<Vec<u32>, Error> {
        let text = respelled::render(template, messages)?;
        Ok(self.tokenizer.encode_chat(&text)?)
    }

    /// The conversation without a template: the users' texts, and the tokens sampled after them.
    fn plain(&self) -> Result<Vec<u32>, Error> {
        let mut all = vec![];
        for (message, drawn) in self.messages.iter().zip(&self.drawn) {
            if !drawn.is_empty() {
                all.extend(drawn);
            } else if [USER, ASSISTANT].contains(&message.role.as_str()) {
                all.extend(self.tokenizer.encode(&message.content, all.is_empty())?);
            }
        }
        Ok(all)
    }

    /// The number of the conversation's tokens `all` that the next turn will have, too: a template
    /// that writes the start of an answer (`<think>`) may leave it out of earlier answers.
    fn kept(&self, all: &[u32]) -> Result<usize, Error> {
        let Some(template) = self.template else { return Ok(all.len()) };
        let next = [Message::new(ASSISTANT, "x"), Message::new(USER, "x")];
        let messages = [&self.messages[..], &next].concat();
        // A template that refuses this may still take what is said.
        let Ok(next) = self.rendered(template, &messages) else { return Ok(all.len()) };
        Ok(all.iter().zip(&next).take_while(|(a, b)| a == b).count())
    }
}

const SYSTEM: &str = "system";
const USER: &str = "user";
const ASSISTANT: &str = "assistant";
