use crate::reply::{Progress, Reply, ReplyOptions, reply};
use crate::{Chat, EmbedOptions, Embedder, Error, RerankOptions, Reranker, Syntax};
use lowbit_files::{ChatTemplate, Checkpoint, Message, Tokenizer};
use lowbit_kernels::Device;
use lowbit_models::{GenerationOptions, Model, Session, Target, dry_chat};
use std::ops::ControlFlow::{self, Continue};
use std::path::PathBuf;

/// Continues `prompt` with the model at `model`, on the CPU: greedily, up to 256 tokens. A model
/// with a chat template gets the prompt as a user's message and answers it; a base model continues
/// the text.
///
/// `model` is a checkpoint's directory, a .gguf file, or `org/name` on the Hugging Face hub, which
/// is downloaded unless huggingface_hub's cache has it. For more than one prompt open a
/// [`LanguageModel`].
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// let text = lowbit::generate("models/demo-4bit", "A vector is")?;
/// println!("A vector is{text}");
/// # assert!(text.len() > 20, "{text}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`LanguageModel::open`] and [`LanguageModel::generate`].
pub fn generate(model: &str, prompt: &str) -> Result<String, Error> {
    LanguageModel::open(model)?.generate(prompt)
}

/// The path of the files of `model`.
#[cfg(feature = "hub")]
fn find(model: &str) -> Result<PathBuf, Error> {
    Ok(lowbit_hub::resolve(model)?)
}

/// Without the hub every model is a path.
#[cfg(not(feature = "hub"))]
fn find(model: &str) -> Result<PathBuf, Error> {
    Ok(model.into())
}

/// A model with its tokenizer and chat template, ready to answer.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
/// use lowbit::{GenerationOptions, LanguageModel};
/// use std::ops::ControlFlow::Continue;
///
/// let model = LanguageModel::open("models/demo-4bit")?;
/// let options = GenerationOptions::default().with_max_tokens(20);
/// let reply = model.stream("A vector is", &options, |piece| {
///     print!("{piece}");
///     Continue(())
/// })?;
/// assert_eq!(reply.tokens.len(), 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LanguageModel {
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    syntax: Syntax,
    model: Model,
}

impl LanguageModel {
    /// Opens `model` on the CPU, one thread per core. [`generate`] says what `model` can be.
    ///
    /// # Errors
    /// `Error::Hub` when there is no such model ([`Error::File`] without the feature `hub`);
    /// [`Error::File`] when its files are damaged; [`Error::Model`] for one that lowbit does not
    /// compute.
    pub fn open(model: &str) -> Result<Self, Error> {
        Self::open_on(model, &Device::cpu(None)?)
    }

    /// As [`Self::open`], on `device`.
    ///
    /// # Errors
    /// Those of [`Self::open`]; [`Error::Kernel`] when a GPU has too little memory or fails.
    pub fn open_on(model: &str, device: &Device) -> Result<Self, Error> {
        Self::from_checkpoint(Checkpoint::open(&find(model)?)?, device)
    }

    /// As [`Self::open_on`], for a checkpoint that is open already.
    ///
    /// # Errors
    /// As [`Self::open_on`].
    pub fn from_checkpoint(checkpoint: Checkpoint, device: &Device) -> Result<Self, Error> {
        let work = |model: &Model| dry_chat(model, &GenerationOptions::default());
        let model = Model::load_compiled(&checkpoint, Target::new(device, None)?, work, |_, _| ())?;
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        let template = ChatTemplate::from_checkpoint(&checkpoint)?;
        let syntax = |template| Syntax::new(template, Some(&tokenizer));
        let syntax = template.as_ref().map_or_else(Syntax::plain, syntax);
        Ok(Self { checkpoint, tokenizer, template, syntax, model })
    }

    /// The text that answers `prompt`, or continues it: see [`generate`]. Reasoning and tool calls
    /// are part of it.
    ///
    /// # Errors
    /// [`Error::Model`] when the prompt is empty or does not fit the model's context;
    /// [`Error::File`] when the chat template or the tokenizer refuses it; [`Error::Kernel`] when a
    /// GPU fails.
    pub fn generate(&self, prompt: &str) -> Result<String, Error> {
        Ok(self.stream(prompt, &GenerationOptions::default(), |_| Continue(()))?.text)
    }

    /// As [`Self::generate`], with options. `each` is called with every piece of text as it comes,
    /// and ends the reply by returning `Break`.
    ///
    /// # Errors
    /// Those of [`Self::generate`]; [`Error::Kernel`] for sampling options that make no sense.
    pub fn stream(
        &self,
        prompt: &str,
        options: &GenerationOptions,
        mut each: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Reply, Error> {
        self.reply(prompt, &options.clone().into(), |progress| match progress {
            Progress::Text(text) => each(text),
            _ => Continue(()),
        })
    }

    /// As [`Self::stream`], with every option of a reply, stop texts among them. `each` also gets
    /// the parts of the reply: reasoning, content and tool calls.
    ///
    /// # Errors
    /// Those of [`Self::stream`].
    pub fn reply(
        &self,
        prompt: &str,
        options: &ReplyOptions,
        each: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Reply, Error> {
        let tokens = self.prompt(prompt)?;
        let syntax = (&self.tokenizer, &self.syntax);
        reply(&mut Session::new(&self.model), syntax, &tokens, options, each)
    }

    /// The sampling that the checkpoint's publisher recommends, with seed 0. The program `lowbit`
    /// takes it by default; [`Self::generate`] is greedy.
    ///
    /// # Errors
    /// [`Error::File`] when the recommendation cannot be read.
    pub fn recommended(&self) -> Result<GenerationOptions, Error> {
        Ok(GenerationOptions::recommended(&self.checkpoint.generation_config()?))
    }

    /// The token ids of `prompt`: as a user's message in the chat template if there is one, else as
    /// plain text.
    ///
    /// # Errors
    /// [`Error::File`] when the chat template or the tokenizer refuses it.
    pub fn prompt(&self, prompt: &str) -> Result<Vec<u32>, Error> {
        Ok(match &self.template {
            Some(template) => {
                self.tokenizer.encode_chat(&template.render(&[Message::new("user", prompt)], true)?)?
            }
            None => self.tokenizer.encode(prompt, true)?,
        })
    }

    /// A new conversation.
    pub fn chat(&self) -> Chat<'_> {
        Chat::new(&self.model, &self.tokenizer, self.template.as_ref())
    }

    /// Makes embeddings.
    ///
    /// # Errors
    /// Those of [`Embedder::new`].
    pub fn embedder(&self, options: &EmbedOptions) -> Result<Embedder<'_>, Error> {
        Embedder::new(&self.checkpoint, (&self.model, &self.tokenizer), options)
    }

    /// Scores documents for a query.
    ///
    /// # Errors
    /// Those of [`Reranker::new`].
    pub fn reranker(&self, options: &RerankOptions) -> Result<Reranker<'_>, Error> {
        Reranker::new(&self.checkpoint, (&self.model, &self.tokenizer), options)
    }

    /// Compiles the forms of replies, for
    /// [`GenerationOptions::with_grammar`](lowbit_models::GenerationOptions::with_grammar). Keep it
    /// for further ones.
    ///
    /// # Errors
    /// Those of [`Grammars::new`](crate::Grammars::new).
    #[cfg(feature = "grammar")]
    pub fn grammars(&self) -> Result<crate::Grammars, Error> {
        let vocab_size = self.model.config().vocab_size;
        crate::Grammars::new(&self.tokenizer, &self.syntax, vocab_size, self.tokenizer.eos_ids())
    }

    /// The checkpoint's files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template; `None` for a base model.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// The model itself, for sessions, logits or perplexity.
    pub fn model(&self) -> &Model {
        &self.model
    }
}
