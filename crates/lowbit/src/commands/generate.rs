use super::reply::reply;
use crate::Failure;
use crate::options::{Loaded, ModelOptions, SamplingOptions};
use crate::template::TemplateOptions;
use lowbit::{Message, Session};
use std::io::{IsTerminal, Read};
use std::sync::atomic::AtomicBool;

/// Flags of `generate`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    template: TemplateOptions,
    /// The prompt [default: standard input].
    #[arg(long, short)]
    prompt: Option<String>,
    /// A system message for models with a chat template.
    #[arg(long)]
    system_prompt: Option<String>,
    /// Take the prompt as plain text even if the model has a chat template.
    #[arg(long)]
    ignore_chat_template: bool,
    /// Do not end at the model's end-of-text tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    json: bool,
}

/// Writes text from a prompt.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let prompt = arguments.prompt()?;
    let loaded = arguments.model.load()?;
    let prompt = arguments.tokens(&loaded, &prompt)?;
    let stop_ids = if arguments.ignore_eos { vec![] } else { loaded.tokenizer.eos_ids().to_vec() };
    let options = arguments.sampling.generation(stop_ids);
    let mut session = Session::new(&loaded.model);
    let output = (!arguments.json, &AtomicBool::new(false));
    let mut reply = reply(&mut session, &loaded.tokenizer, &prompt, &options, output)?;
    reply.load_seconds = loaded.seconds;
    if arguments.json {
        println!("{}", serde_json::to_string(&reply)?);
    } else {
        println!();
        reply.print_figures();
    }
    Ok(())
}

impl Arguments {
    fn prompt(&self) -> Result<String, Failure> {
        if let Some(prompt) = &self.prompt {
            return Ok(prompt.clone());
        }
        let mut stdin = std::io::stdin();
        if stdin.is_terminal() {
            return Err("give a prompt: --prompt TEXT, or on standard input".into());
        }
        let mut bytes = vec![];
        stdin.read_to_end(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| format!("the prompt on standard input: {error}").into())
    }

    fn tokens(&self, loaded: &Loaded, prompt: &str) -> Result<Vec<u32>, Failure> {
        let template = match self.ignore_chat_template {
            true => {
                self.template.unused("does nothing with --ignore-chat-template")?;
                None
            }
            false => self.template.load(&loaded.checkpoint)?,
        };
        let Some(template) = template else {
            if self.system_prompt.is_some() {
                return Err("--system-prompt needs a model with a chat template".into());
            }
            return Ok(loaded.tokenizer.encode(prompt, true)?);
        };
        let system = self.system_prompt.iter().map(|text| Message::new("system", text));
        let messages: Vec<_> = system.chain([Message::new("user", prompt)]).collect();
        Ok(loaded.tokenizer.encode(&template.render(&messages, true)?, false)?)
    }
}
