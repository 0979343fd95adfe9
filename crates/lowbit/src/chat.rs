use crate::Error;
use crate::reply::{Reply, reply};
use lowbit_files::{ChatTemplate, Message, Tokenizer};
use lowbit_models::{GenerationOptions, Model, ModelError, Session};
use std::ops::ControlFlow;

/// A conversation: its messages, and the [`Session`] that has read them. Each turn runs only what is new, unless the
/// template rewrites what was said before (some drop earlier reasoning): then the session starts over.
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
/// let options = GenerationOptions::default().with_max_tokens(8);
/// for message in ["A vector is", " and a slice is"] {
///     let reply = chat.say(message, &options, |_| Continue(()))?;
///     println!("{message}{}", reply.text);
/// }
/// assert_eq!(chat.messages().len(), 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Chat<'m> {
    tokenizer: &'m Tokenizer,
    template: Option<&'m ChatTemplate>,
    messages: Vec<Message>,
    session: Session<'m>,
}

impl<'m> Chat<'m> {
    /// A conversation in which nothing was said yet.
    pub fn new(model: &'m Model, tokenizer: &'m Tokenizer, template: Option<&'m ChatTemplate>) -> Self {
        Self { tokenizer, template, messages: vec![], session: Session::new(model) }
    }

    /// Puts a message in front that no turn answers, such as the system's. A model without a chat template does not see
    /// it.
    #[must_use]
    pub fn with_message(mut self, message: Message) -> Self {
        self.messages.push(message);
        self
    }

    /// What was said so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// What the model has read.
    pub fn session(&mut self) -> &mut Session<'m> {
        &mut self.session
    }

    /// One turn: the user says `text`, the model answers. `each` is called with every piece of text as it comes, and can
    /// end the answer. After an error the conversation is as it was before the turn.
    ///
    /// # Errors
    /// [`Error::Model`] when the message does not fit the model's context; [`Error::File`] when the chat template or the
    /// tokenizer refuses it; [`Error::Kernel`] when a GPU fails, or for options of sampling that make no sense.
    pub fn say(
        &mut self,
        text: &str,
        options: &GenerationOptions,
        each: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Reply, Error> {
        let prompt = self.ask(text)?;
        match reply(&mut self.session, self.tokenizer, &prompt, options, each) {
            Ok(reply) => {
                self.answered(&reply.text);
                Ok(reply)
            }
            Err(error) => {
                self.refused(&error)?;
                Err(error)
            }
        }
    }

    /// Adds the user's message, and gives the tokens for [`Self::session`] to run: for those who answer it themselves.
    /// [`Self::answered`] or [`Self::take_back`] is next.
    ///
    /// # Errors
    /// [`Error::File`] when the chat template or the tokenizer refuses the message, which is not added then;
    /// [`Error::Kernel`] when a GPU fails.
    pub fn ask(&mut self, text: &str) -> Result<Vec<u32>, Error> {
        self.messages.push(Message::new("user", text));
        self.tokens(text).inspect_err(|_| self.take_back())
    }

    fn tokens(&mut self, text: &str) -> Result<Vec<u32>, Error> {
        let Some(template) = self.template else {
            return Ok(self.tokenizer.encode(text, self.session.tokens().is_empty())?);
        };
        let tokens = self.tokenizer.encode(&template.render(&self.messages, true)?, false)?;
        match tokens.strip_prefix(self.session.tokens()) {
            Some(rest) if !rest.is_empty() => Ok(rest.to_vec()),
            _ => {
                self.session.clear()?;
                Ok(tokens)
            }
        }
    }

    /// Adds the model's answer.
    pub fn answered(&mut self, text: &str) {
        self.messages.push(Message::new("assistant", text));
    }

    /// Removes the user's message that was not answered.
    pub fn take_back(&mut self) {
        self.messages.pop();
    }

    /// As [`Self::take_back`], after `error` of the session: unless that refused the message before it ran any of it, it
    /// starts over with the next turn.
    ///
    /// # Errors
    /// [`Error::Kernel`] when a GPU fails.
    pub fn refused(&mut self, error: &Error) -> Result<(), Error> {
        self.take_back();
        if !matches!(error, Error::Model(ModelError::ContextLength { .. })) {
            self.session.clear()?;
        }
        Ok(())
    }
}
