use super::reply::reply;
use crate::Failure;
use crate::options::{Loaded, ModelOptions, SamplingOptions};
use crate::template::TemplateOptions;
use lowbit::{ChatTemplate, Finish, Message, Session};
use rustyline::error::ReadlineError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flags of `chat`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    template: TemplateOptions,
    /// A system message.
    #[arg(long)]
    system_prompt: Option<String>,
    /// Print one JSON object a reply.
    #[arg(long)]
    json: bool,
}

/// Reads messages until the end of input; Ctrl-C stops a reply and keeps the session.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let loaded = arguments.model.load()?;
    let template = arguments.template.load(&loaded.checkpoint)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))?;
    if template.is_none() {
        if arguments.system_prompt.is_some() {
            return Err("--system-prompt needs a model with a chat template".into());
        }
        eprintln!("this checkpoint has no chat template: the model continues what you type as plain text");
    }
    let mut editor = rustyline::DefaultEditor::new()?;
    let mut chat = Chat::new(arguments, &loaded, template);
    loop {
        let line = match editor.readline("> ") {
            Ok(line) if line.trim().is_empty() => continue,
            Ok(line) => line,
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        editor.add_history_entry(&line)?;
        interrupted.store(false, Ordering::Relaxed);
        chat.turn(line, &interrupted)?;
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

    fn turn(&mut self, line: String, interrupted: &AtomicBool) -> Result<(), Failure> {
        let Loaded { tokenizer, .. } = self.loaded;
        let prompt = self.prompt(&line)?;
        let options = self.arguments.sampling.generation(tokenizer.eos_ids().to_vec());
        let output = (!self.arguments.json, interrupted);
        let mut reply = match reply(&mut self.session, tokenizer, &prompt, &options, output) {
            Ok(reply) => reply,
            // A message that does not fit is refused; the conversation goes on without it.
            Err(failure) if failure.downcast_ref::<lowbit_models::ModelError>().is_some() => {
                eprintln!("error: {failure}");
                self.messages.pop();
                if !matches!(failure.downcast_ref(), Some(lowbit_models::ModelError::ContextLength { .. })) {
                    self.session.clear()?;
                }
                return Ok(());
            }
            Err(failure) => return Err(failure),
        };
        reply.load_seconds = self.loaded.seconds;
        if self.arguments.json {
            println!("{}", serde_json::to_string(&reply)?);
        } else {
            println!("{}", if reply.finish == Finish::Interrupted { " [stopped]" } else { "" });
            reply.print_figures();
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
