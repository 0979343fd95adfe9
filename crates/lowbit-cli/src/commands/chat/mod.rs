mod command;
mod saved;

use super::lines::{Line, Lines};
use super::reply::{Reply, ReplyOptions, Watch};
use crate::form::{Form, FormOptions};
use crate::interrupt::{Interrupted, Interrupts};
use crate::options::{Loaded, ModelOptions};
use crate::sampling::{Sampling, SamplingOptions};
use crate::speculation::SpeculationOptions;
use crate::template::TemplateOptions;
use crate::{Failure, habits, json, out};
use command::Command;
use lowbit::{ChatTemplate, Finish, Message, ModelError, dry_chat};
use lowbit_files::shown;

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
    speculation: SpeculationOptions,
    #[command(flatten)]
    reply: ReplyOptions,
    #[command(flatten)]
    form: FormOptions,
    #[command(flatten)]
    template: TemplateOptions,
    /// Action when the context has no room for a message.
    #[arg(long, value_enum, default_value = "stop", help_heading = "Text")]
    context_overflow: Overflow,
    /// Print one JSON object per reply.
    #[arg(long)]
    json: bool,
}

/// The policy for a message that the context has no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Overflow {
    /// It is not answered.
    Stop,
    /// The oldest turns are forgotten until it fits.
    Drop,
}

/// Reads messages until the end of input. Ctrl-C stops a reply and keeps the session; at the prompt
/// it clears the line, and pressed twice on an empty one it ends the chat.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    arguments.sampling.check()?;
    arguments.speculation.check()?;
    let form = arguments.form.read()?;
    let interrupts = Interrupts::listen()?;
    let opened = arguments.model.open_to_chat()?;
    let sampling = arguments.sampling.resolve(&opened.checkpoint)?;
    let loaded = opened.with_context(arguments.reply.limit()).load(|model| {
        dry_chat(model, sampling.first())?;
        arguments.speculation.compile(model, &[24, 96], sampling.first())
    })?;
    let context = arguments.reply.context(&loaded)?;
    let guesses = arguments.speculation.load(&arguments.model, &loaded)?;
    let template = arguments.template.load(&loaded.checkpoint)?;
    if template.is_none() {
        if arguments.system_prompt.is_some() {
            return Err("--system-prompt needs a model with a chat template".into());
        }
        out::note!("this checkpoint has no chat template: the model continues what you type as plain text");
    }
    sampling.say();
    let mut lines = Lines::new()?;
    if lines.is_terminal() {
        out::note!("/help lists the commands; Ctrl-D ends the chat");
    }
    let mut chat = Chat::new(arguments, &loaded, template.as_ref(), (sampling, context));
    chat.form = form.map(|form| Form::new(form, &loaded, chat.said.syntax())).transpose()?;
    chat.is_typed = lines.is_terminal();
    chat.said.speculate(guesses.as_ref().map(|guesses| guesses.speculation(&loaded.model)).transpose()?);
    let mut asked_to_end = false;
    loop {
        match lines.next(&interrupts)? {
            Line::End if chat.refused > 0 && !lines.is_terminal() => {
                return Err(
                    format!("{} of {} messages were not answered", chat.refused, chat.messages).into()
                );
            }
            Line::End => return Ok(()),
            Line::Text(line) if line.trim().is_empty() => {}
            Line::Text(line) => match Command::parse(&line).filter(|_| lines.is_terminal()) {
                Some(Ok(Command::Exit)) => return Ok(()),
                Some(Ok(command)) => {
                    if let Err(failure) = chat.obey(command, &interrupts) {
                        chat.tell(failure)?;
                    }
                }
                Some(Err(problem)) => out::note!("{problem}"),
                None => chat.turn(&line, &interrupts)?,
            },
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
    has_template: bool,
    /// That of every reply.
    form: Option<Form>,
    /// True if a user types the messages, and may give commands.
    is_typed: bool,
    sampling: Sampling,
    /// Tokens that it may have.
    context: usize,
    /// Replies that were begun.
    replies: u64,
    messages: usize,
    /// Messages that were not answered.
    refused: usize,
    /// The text that `/read` has read, for the next message.
    read: String,
}

impl<'m> Chat<'m> {
    fn new(
        arguments: &'m Arguments,
        loaded: &'m Loaded,
        template: Option<&'m ChatTemplate>,
        (sampling, context): (Sampling, usize),
    ) -> Self {
        let mut said = lowbit::Chat::new(&loaded.model, &loaded.tokenizer, template);
        if let Some(text) = &arguments.system_prompt {
            said = said.with_message(Message::new("system", text));
        }
        let has_template = template.is_some();
        Self {
            arguments,
            loaded,
            said,
            has_template,
            form: None,
            is_typed: false,
            sampling,
            context,
            replies: 0,
            messages: 0,
            refused: 0,
            read: String::new(),
        }
    }

    /// Answers a message. One that is refused stays out of the conversation, which goes on.
    fn turn(&mut self, line: &str, interrupts: &Interrupts) -> Result<(), Failure> {
        self.messages += 1;
        let message = format!("{}{line}", self.read);
        // A message that only just fits would have no room for its answer.
        if self.said.session().tokens().len() > self.context - (self.context / 4).min(ANSWER) {
            self.makes_room();
        }
        loop {
            let reply = self.reply(interrupts, |said, options, watch| {
                said.say(&message, options, |progress| watch.see(progress)).map(Some)
            });
            match reply {
                Ok(()) => {
                    self.read.clear();
                    return Ok(());
                }
                Err(failure) if is_full(&failure) && self.makes_room() => {}
                Err(failure) => {
                    self.refused += 1;
                    return self.tell(failure);
                }
            }
        }
    }

    /// Forgets the oldest turn, if that was asked for and there is one.
    fn makes_room(&mut self) -> bool {
        if self.arguments.context_overflow == Overflow::Stop {
            return false;
        }
        // The next message is not among those that were said, so that the last of them can go, too.
        let before = self.said.messages().len();
        if !self.said.drop_oldest() {
            self.said.clear();
        }
        let has_room = self.said.messages().len() < before;
        if has_room {
            out::note!("[the context of {} tokens is full: the oldest turn is forgotten]", self.context);
        }
        has_room
    }

    /// Says why something was not done, unless the program cannot go on.
    fn tell(&self, failure: Failure) -> Result<(), Failure> {
        if failure.is::<out::Unwritable>() {
            return Err(failure);
        }
        out::note!("error: {}", lowbit_files::shown_message(&failure, LONGEST_ERROR));
        if is_full(&failure) {
            out::note!(
                "{}--context-overflow drop makes room by itself, --ctx-size takes another context",
                if self.is_typed && self.has_turns() { "/clear or /undo makes room; " } else { "" }
            );
        }
        Ok(())
    }

    fn has_turns(&self) -> bool {
        self.said.messages().iter().any(|message| message.role == "user")
    }

    /// Writes a reply, which `ask` begins.
    fn reply(
        &mut self,
        interrupts: &Interrupts,
        ask: impl FnOnce(
            &mut lowbit::Chat<'m>,
            &lowbit::ReplyOptions,
            &mut Watch<'_>,
        ) -> Result<Option<lowbit::Reply>, lowbit::Error>,
    ) -> Result<(), Failure> {
        let generation = self.sampling.after(self.replies);
        let (most, sampling) = (generation.max_tokens, generation.sampling);
        let options = self.arguments.reply.library(generation, self.context);
        let options = Form::hold(self.form.as_ref(), options);
        let screen = (!self.arguments.json).then(|| self.arguments.reply.screen());
        let mut watch = Watch::in_session(interrupts, screen);
        let reply = ask(&mut self.said, &options, &mut watch);
        watch.end()?;
        let Some(reply) = reply? else { return Err("there is no answer yet".into()) };
        self.replies += 1;
        let reply = Reply::new(reply, self.said.session().tokens(), self.loaded, &self.arguments.reply)?;
        let reply = reply.with_seed(&sampling).with_guesses(self.arguments.speculation.is_on());
        if self.arguments.json {
            return json::print("chat", &reply);
        }
        out::line!("{}", if reply.finish == Finish::Interrupted { " [stopped]" } else { "" })?;
        if let Some(cut) = reply.cut(self.context, most) {
            out::note!("{cut}");
        }
        reply.print_figures();
        Ok(())
    }

    /// Does what a command says.
    fn obey(&mut self, command: Command<'_>, interrupts: &Interrupts) -> Result<(), Failure> {
        match command {
            Command::Help | Command::Exit => out::note!("{}", command::HELP),
            Command::Clear => {
                self.said.clear();
                self.read.clear();
                out::note!("the conversation is forgotten");
            }
            Command::Regenerate => {
                if self.sampling.first().sampling.temperature == 0.0 {
                    out::note!("note: greedily the answer is the same; --temp draws another");
                }
                return self.reply(interrupts, |said, options, watch| {
                    said.regenerate(options, |progress| watch.see(progress))
                });
            }
            Command::Undo => match self.said.undo() {
                Some(text) => out::note!("taken back: {}", shown(text.trim())),
                None => out::note!("nothing was said yet"),
            },
            Command::ShowSystem => match self.said.system() {
                Some(text) => out::note!("{}", lowbit_files::shown_message(text, LONGEST_ERROR)),
                None => out::note!("there is no system message"),
            },
            Command::System(_) if !self.has_template => {
                return Err("a system message needs a model with a chat template".into());
            }
            Command::System(text) => {
                self.said.set_system(text);
                out::note!("the system message is {}", if text.is_some() { "set" } else { "removed" });
            }
            Command::Read(path) => {
                let text = habits::read_text(&habits::expand_home(path))?;
                out::note!("{}: {} characters go before the next message", shown(path), text.chars().count());
                self.read.push_str(&text);
                self.read.push('\n');
            }
            Command::Save(path) => {
                saved::save(path, self.said.messages())?;
                out::note!("{}: {} messages are saved", shown(path), self.said.messages().len());
            }
            Command::Load(path) => {
                self.said.set_messages(saved::load(path)?);
                out::note!("{}: {} messages are loaded", shown(path), self.said.messages().len());
            }
        }
        Ok(())
    }
}

/// Tokens that an answer has room for where the oldest turns are forgotten.
const ANSWER: usize = 1024;

/// Characters of a message that are printed.
const LONGEST_ERROR: usize = 8000;

/// True if the context had no room.
fn is_full(failure: &Failure) -> bool {
    matches!(failure.downcast_ref(), Some(lowbit::Error::Model(ModelError::ContextLength { .. })))
}
