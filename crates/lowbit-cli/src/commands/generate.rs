use super::prompts::{self, Batch};
use super::reply::{Reply, ReplyOptions, Watch};
use crate::form::{Form, FormOptions};
use crate::interrupt::{Interrupted, Interrupts};
use crate::options::{ModelOptions, Opened, note_embedding_model};
use crate::sampling::SamplingOptions;
use crate::speculation::SpeculationOptions;
use crate::template::TemplateOptions;
use crate::{Failure, habits, json, out};
use lowbit::{Finish, Message, ReplyForm, Session, Syntax, dry_generation};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Flags of `generate`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    prompts: Prompts,
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
    /// Do not end at the model's end-of-text tokens.
    #[arg(long, help_heading = "Text", conflicts_with_all = ["json_schema", "grammar", "regex"])]
    ignore_eos: bool,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    json: bool,
}

/// The prompt and how it is read.
#[derive(clap::Args)]
#[command(next_help_heading = "Prompt")]
struct Prompts {
    /// The prompt, as --prompt gives it.
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "file"], help_heading = "Prompt")]
    text: Option<String>,
    /// The prompt; `-` reads it from standard input [default: standard input].
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the prompt; one line break at its end is dropped.
    #[arg(long, short, conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// A file with many prompts, {"prompt": ".."} on each line, which are answered side by side:
    /// with --json, an object per prompt, in their order.
    #[arg(long, value_name = "JSONL", conflicts_with_all = ["text", "prompt", "file", "special", "speculate", "draft_model"], requires = "json")]
    prompts: Option<PathBuf>,
    /// Interpret \n, \t, \\ and other escapes in --prompt.
    #[arg(long, short)]
    escape: bool,
    /// A system message for models with a chat template.
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Take the prompt as plain text even if the model has a chat template.
    #[arg(long)]
    ignore_chat_template: bool,
}

/// Writes text from a prompt.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let interrupts = Interrupts::listen()?;
    arguments.sampling.check()?;
    arguments.speculation.check()?;
    let form = arguments.form.read()?;
    if let Some(file) = &arguments.prompts.prompts {
        return arguments.side_by_side(&interrupts, file, form);
    }
    let prompt = arguments.prompts.text()?;
    let opened = arguments.model.open_with_tokenizer()?;
    note_embedding_model(&opened.checkpoint);
    let (prompt, syntax) = arguments.tokens(&opened, &prompt)?;
    let sampling = arguments.sampling.resolve(&opened.checkpoint)?;
    let loaded = opened.with_context(arguments.reply.limit()).load(|model| {
        dry_generation(model, &[prompt.len()], sampling.first())?;
        arguments.speculation.compile(model, &[prompt.len()], sampling.first())
    })?;
    let context = arguments.reply.context(&loaded)?;
    let guesses = arguments.speculation.load(&arguments.model, &loaded)?;
    let form = form.map(|form| Form::new(form, &loaded, &syntax)).transpose()?;
    let options =
        arguments.reply.library(sampling.first().clone(), context).with_ignore_eos(arguments.ignore_eos);
    let options = Form::hold(form.as_ref(), options);
    let screen = (!arguments.json).then(|| arguments.reply.screen());
    let (mut session, mut watch) = (Session::new(&loaded.model), Watch::once(&interrupts, screen));
    session.speculate(guesses.as_ref().map(|guesses| guesses.speculation(&loaded.model)).transpose()?);
    // Said when the prompt is known to fit.
    let mut unsaid = Some(&sampling);
    let see = |progress: lowbit::Progress<'_>| {
        if let Some(sampling) = unsaid.take_if(|_| !matches!(progress, lowbit::Progress::Prompt(_, 0))) {
            sampling.say();
        }
        watch.see(progress)
    };
    let reply = lowbit::reply(&mut session, (&loaded.tokenizer, &syntax), &prompt, &options, see);
    watch.end()?;
    let reply = Reply::new(reply?, session.tokens(), &loaded, &arguments.reply)?;
    let reply = reply.with_seed(&sampling.first().sampling).with_guesses(guesses.is_some());
    if arguments.json {
        json::print("generate", &reply)?;
    } else {
        out::line!()?;
        if let Some(cut) = reply.cut(context, sampling.first().max_tokens) {
            out::note!("{cut}");
        }
        reply.print_figures();
    }
    match reply.finish {
        Finish::Interrupted => Err(Interrupted.into()),
        Finish::Stop | Finish::Length => Ok(()),
    }
}

impl Prompts {
    fn text(&self) -> Result<String, Failure> {
        if let Some(file) = &self.file {
            let text = habits::read_marked_text(file)?;
            let line = text.strip_suffix('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
            return Ok(line.map(str::to_string).unwrap_or(text));
        }
        match self.prompt.as_ref().or(self.text.as_ref()) {
            Some(prompt) if prompt != "-" => {
                Ok(if self.escape { habits::unescape(prompt) } else { prompt.clone() })
            }
            None if std::io::stdin().is_terminal() => {
                Err("give a prompt: --prompt TEXT, --file FILE, or on standard input".into())
            }
            _ => habits::read_marked_text("-".as_ref()),
        }
    }
}

impl Arguments {
    /// Answers the prompts of a file.
    fn side_by_side(
        &self,
        interrupts: &Interrupts,
        file: &Path,
        form: Option<ReplyForm>,
    ) -> Result<(), Failure> {
        let texts = prompts::read(file)?;
        let opened = self.model.open_with_tokenizer()?;
        note_embedding_model(&opened.checkpoint);
        let prompts: Vec<_> =
            texts.iter().map(|text| self.tokens(&opened, text)).collect::<Result<_, _>>()?;
        let sampling = self.sampling.resolve(&opened.checkpoint)?;
        let lengths: Vec<usize> = prompts.iter().map(|(tokens, _)| tokens.len()).collect();
        let loaded = opened
            .with_context(self.reply.limit())
            .load(|model| dry_generation(model, &lengths, sampling.first()))?;
        let context = self.reply.context(&loaded)?;
        let options = self.reply.library(sampling.first().clone(), context).with_ignore_eos(self.ignore_eos);
        // All prompts have one template.
        let syntax = prompts.first().map(|(_, syntax)| syntax.clone()).unwrap_or_default();
        let form = form.map(|form| Form::new(form, &loaded, &syntax)).transpose()?;
        let options = Form::hold(form.as_ref(), options);
        let batch = Batch { loaded: &loaded, options: &options, logprobs: self.reply.logprobs };
        batch.answer(interrupts, &prompts, || sampling.say())
    }

    /// The prompt's tokens, and how the model spells what a reply to it is made of.
    fn tokens(&self, opened: &Opened, prompt: &str) -> Result<(Vec<u32>, Syntax), Failure> {
        let template = match self.prompts.ignore_chat_template {
            true => {
                self.template.unused("does nothing with --ignore-chat-template")?;
                None
            }
            false => self.template.load(&opened.checkpoint)?,
        };
        let Some(template) = template else {
            if self.prompts.system_prompt.is_some() {
                return Err("--system-prompt needs a model with a chat template".into());
            }
            return Ok((opened.tokenizer.encode(prompt, true)?, Syntax::plain()));
        };
        let system = self.prompts.system_prompt.iter().map(|text| Message::new("system", text));
        let messages: Vec<_> = system.chain([Message::new("user", prompt)]).collect();
        let tokens = opened.tokenizer.encode_chat(&template.render(&messages, true)?)?;
        Ok((tokens, Syntax::new(&template, Some(&opened.tokenizer))))
    }
}
