use super::lines::{Line, Lines};
use super::reply::{Asked, ReplyOptions, reply};
use crate::interrupt::{Interrupted, Interrupts};
use crate::options::{Loaded, ModelOptions, SamplingOptions};
use crate::template::TemplateOptions;
use crate::{Failure, out};
use lowbit::{ChatTemplate, Finish, Message, Session};

/// Flags of `chat`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// A system message.
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    system_prompt: Option<String>,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    reply: ReplyOptions,
    #[command(flatten)]
    template: TemplateOptions,
    /// Print one JSON object a reply.
    #[arg(long)]
    json: bool,
}

/// Reads messages until the end of input. Ctrl-C stops a reply and keeps the session; at the prompt it clears the line,
/// and pressed twice on an empty one it ends the chat.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.sampling.generation(vec![]).sampling.validate()?;
    let interrupts = Interrupts::listen()?;
    let loaded = arguments.model.load()?;
    arguments.reply.check(&loaded);
    let template = arguments.template.load(&loaded.checkpoint)?;
    if template.is_none() {
        if arguments.system_prompt.is_some() {
            return Err("--system-prompt needs a model with a chat template".into());
        }
        out::note!("this checkpoint has no chat template: the model continues what you type as plain text");
    }
    let mut lines = Lines::new()?;
    let mut chat = Chat::new(arguments, &loaded, template);
    let mut asked_to_end = false;
    loop {
        match lines.next(&interrupts)? {
            Line::End => return Ok(()),
            Line::Text(line) if lines.is_terminal() && ["/exit", "/quit", "/bye"].contains(&line.trim()) => {
                return Ok(());
            }
            Line::Text(line) if line.trim().is_empty() => {}
            Line::Text(line) => chat.turn(line, &interrupts)?,
            Line::Interrupted { empty: true } if asked_to_end => return Err(Interrupted.into()),
            Line::Interrupted { empty: true } => {
                out::note!("Ctrl-C again, Ctrl-D or /exit ends the chat");
                asked_to_end = true;
                continue;
            }
            Line::Interrupted { empty: false } => {}
        }
        asked_to_end = false;
    }
}

/// The conversation: its messages, and the session that has read them.
struct Chat<'m> {
    arguments: &'m Arguments,
    loaded: &'m Loaded,
    template: Option<ChatTemplate>,
    messages: Vec<Message>,
    session: Session<'m>,
}

impl<'m> Chat<'m> {
    fn new(arguments: &'m Arguments, loaded: &'m Loaded, template: Option<ChatTemplate>) -> Self {
        let system = arguments.system_prompt.iter().map(|text| Message::new("system", text));
        Self { arguments, loaded, template, messages: system.collect(), session: Session::new(&loaded.model) }
    }

    fn turn(&mut self, line: String, interrupts: &Interrupts) -> Result<(), Failure> {
        let Loaded { tokenizer, .. } = self.loaded;
        let prompt = self.prompt(&line)?;
        let asked = Asked {
            prompt: &prompt,
            generation: self.arguments.sampling.generation(tokenizer.eos_ids().to_vec()),
            options: &self.arguments.reply,
            stream: !self.arguments.json,
            interrupts,
            in_session: true,
        };
        let reply = match reply(&mut self.session, self.loaded, asked) {
            Ok(reply) => reply,
            // A message that does not fit is refused; the conversation goes on without it.
            Err(failure) if failure.downcast_ref::<lowbit_models::ModelError>().is_some() => {
                out::note!("error: {failure}");
                self.messages.pop();
                if !matches!(failure.downcast_ref(), Some(lowbit_models::ModelError::ContextLength { .. })) {
                    self.session.clear()?;
                }
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        if self.arguments.json {
            out::line!("{}", serde_json::to_string(&reply)?)?;
        } else {
            out::line!("{}", if reply.finish == Finish::Interrupted { " [stopped]" } else { "" })?;
            reply.print_figures();
        }
        if reply.finish == Finish::Interrupted && reply.tokens.is_empty() {
            // The message was not read to its end, so it is not part of the conversation.
            self.messages.pop();
            return Ok(());
        }
        self.messages.push(Message::new("assistant", &reply.text));
        Ok(())
    }

    /// The tokens to run for this message. What the session has already read, up to the id that ended the last reply, is
    /// not run again, unless the template rewrote it (some drop earlier reasoning): then the session starts over.
    fn prompt(&mut self, line: &str) -> Result<Vec<u32>, Failure> {
        self.messages.push(Message::new("user", line));
        let tokenizer = &self.loaded.tokenizer;
        let Some(template) = &self.template else {
            return Ok(tokenizer.encode(line, self.session.tokens().is_empty())?);
        };
        let tokens = tokenizer.encode(&template.render(&self.messages, true)?, false)?;
        match tokens.strip_prefix(self.session.tokens()) {
            Some(rest) if !rest.is_empty() => Ok(rest.to_vec()),
            _ => {
                self.session.clear()?;
                Ok(tokens)
            }
        }
    }
}
