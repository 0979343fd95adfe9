use super::lines::{Line, Lines};
use super::reply::{Reply, ReplyOptions, Watch};
use crate::interrupt::{Interrupted, Interrupts};
use crate::options::{Loaded, ModelOptions, SamplingOptions};
use crate::template::TemplateOptions;
use crate::{Failure, json, out};
use lowbit::{ChatTemplate, Finish, Message, dry_chat};

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
    /// Print one JSON object per reply.
    #[arg(long)]
    json: bool,
}

/// Reads messages until the end of input. Ctrl-C stops a reply and keeps the session; at the prompt it clears the line,
/// and pressed twice on an empty one it ends the chat.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.sampling.generation(vec![]).sampling.validate()?;
    let interrupts = Interrupts::listen()?;
    let opened = arguments.model.open_to_chat()?;
    let generation = arguments.sampling.generation(vec![]);
    let loaded = opened.load(|model| dry_chat(model, &generation))?;
    arguments.reply.check(&loaded);
    let template = arguments.template.load(&loaded.checkpoint)?;
    if template.is_none() {
        if arguments.system_prompt.is_some() {
            return Err("--system-prompt needs a model with a chat template".into());
        }
        out::note!("this checkpoint has no chat template: the model continues what you type as plain text");
    }
    let mut lines = Lines::new()?;
    let mut chat = Chat::new(arguments, &loaded, template.as_ref());
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

/// The conversation, and the model and flags that it uses.
struct Chat<'m> {
    arguments: &'m Arguments,
    loaded: &'m Loaded,
    said: lowbit::Chat<'m>,
}

impl<'m> Chat<'m> {
    fn new(arguments: &'m Arguments, loaded: &'m Loaded, template: Option<&'m ChatTemplate>) -> Self {
        let mut said = lowbit::Chat::new(&loaded.model, &loaded.tokenizer, template);
        if let Some(text) = &arguments.system_prompt {
            said = said.with_message(Message::new("system", text));
        }
        Self { arguments, loaded, said }
    }

    fn turn(&mut self, line: String, interrupts: &Interrupts) -> Result<(), Failure> {
        let options = self.arguments.reply.library(self.arguments.sampling.generation(vec![]));
        let mut watch = Watch::in_session(interrupts, !self.arguments.json);
        let reply = self.said.say(&line, &options, |progress| watch.see(progress));
        watch.end()?;
        let reply = match reply {
            Ok(reply) => reply,
            // A message that the model refuses, such as one that does not fit; the conversation goes on without it.
            Err(error @ (lowbit::Error::Model(_) | lowbit::Error::Kernel(_))) => {
                out::note!("error: {error}");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let reply = Reply::new(reply, self.said.session().tokens(), self.loaded, &self.arguments.reply)?;
        if self.arguments.json {
            json::print("chat", &reply)?;
        } else {
            out::line!("{}", if reply.finish == Finish::Interrupted { " [stopped]" } else { "" })?;
            reply.print_figures();
        }
        Ok(())
    }
}
