use crate::options::{Loaded, ModelOptions, at_least_one};
use crate::texts::Texts;
use crate::{Failure, json, out, progress};
use clap::ValueEnum;
use indicatif::ProgressBar;
use lowbit::{EmbedOptions, Embedder, Pooling, Prompt, cosine, dry_pooled};
use serde::Serialize;

/// Flags of `embed`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    texts: Texts,
    /// Put the checkpoint's prompt of this name (such as query) before each text
    /// [default: the checkpoint's default prompt, if any].
    #[arg(long, value_name = "NAME", help_heading = "Embedding")]
    prompt_name: Option<String>,
    /// Put this text before each text, in place of a prompt of the checkpoint's; "" for nothing.
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_name", help_heading = "Embedding")]
    prefix: Option<String>,
    /// The pooling, which makes one vector of the states of a text's tokens
    /// [default: as the checkpoint says].
    #[arg(long, value_enum, ignore_case = true, help_heading = "Embedding")]
    pooling: Option<PoolingName>,
    /// Divide embeddings by their length [default: as the checkpoint says].
    #[arg(long, overrides_with = "no_normalize", help_heading = "Embedding")]
    normalize: bool,
    /// Leave embeddings as long as they come.
    #[arg(long, overrides_with = "normalize", help_heading = "Embedding")]
    no_normalize: bool,
    /// Keep the first N elements, for a model that was trained for it (Matryoshka); they are
    /// normalised again.
    #[arg(long, value_name = "N", value_parser = at_least_one(), help_heading = "Embedding")]
    dimensions: Option<usize>,
    /// Print the cosine of the angle between each two texts, a row per text, instead of the
    /// embeddings.
    #[arg(long)]
    similarity: bool,
    /// Numbers with spaces between them, a line per text, or one JSON array of arrays.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Print a JSON object per text.
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum PoolingName {
    /// The last token's.
    #[value(alias = "lasttoken")]
    Last,
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Array,
}

/// Texts that are embedded before their embeddings are printed.
const TEXTS: usize = 64;

/// An embedding, as `--json` prints it.
#[derive(Serialize)]
struct Embedding<'a> {
    index: usize,
    tokens: usize,
    cut_tokens: usize,
    embedding: &'a [f32],
}

/// Embeds texts.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let texts = arguments.texts.read("embed")?;
    let opened = arguments.model.open_with_tokenizer()?;
    let options = arguments.options();
    let pooling = options.pooling.or(opened.checkpoint.embedding_config()?.pooling);
    let loaded = opened.load(|model| pooling.map_or(Ok(()), |pooling| dry_pooled(model, pooling)))?;
    let Loaded { checkpoint, tokenizer, model, .. } = &loaded;
    let embedder = Embedder::new(checkpoint, (model, tokenizer), &options)?;
    let bar = progress::bar("embedding", "texts", texts.len());
    let mut printed = Printed { arguments, kept: vec![], cut: 0, count: 0 };
    if arguments.is_array() {
        out::print(format_args!("["))?;
    }
    for group in texts.chunks(TEXTS) {
        printed.group(&embedder, group, &bar)?;
    }
    bar.finish_and_clear();
    if arguments.is_array() {
        out::line!("]")?;
    }
    if arguments.similarity {
        arguments.print_similarity(&printed.kept)?;
    }
    if printed.cut > 0 {
        let texts =
            if printed.cut == 1 { "1 text was".into() } else { format!("{} texts were", printed.cut) };
        out::note!("note: {texts} longer than the model reads, and cut");
    }
    Ok(())
}

impl Arguments {
    fn options(&self) -> EmbedOptions {
        let mut options = EmbedOptions::default();
        options.prompt = match (&self.prefix, &self.prompt_name) {
            (Some(text), _) => Prompt::Text(text.clone()),
            (None, Some(name)) => Prompt::Named(name.clone()),
            (None, None) => Prompt::Default,
        };
        options.pooling = self.pooling.map(|name| match name {
            PoolingName::Last => Pooling::Last,
            PoolingName::Mean => Pooling::Mean,
            PoolingName::Cls => Pooling::Cls,
        });
        options.normalize = match (self.normalize, self.no_normalize) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        };
        options.dimensions = self.dimensions;
        options
    }

    /// True if embeddings are printed as one array.
    fn is_array(&self) -> bool {
        self.format == Format::Array && !self.similarity && !self.json
    }

    fn print_similarity(&self, embeddings: &[Vec<f32>]) -> Result<(), Failure> {
        let row = |one: &Vec<f32>| embeddings.iter().map(|other| cosine(one, other)).collect::<Vec<f32>>();
        let rows: Vec<Vec<f32>> = embeddings.iter().map(row).collect();
        if self.json {
            return json::print("similarity", &serde_json::json!({ "similarity": rows }));
        }
        match self.format {
            Format::Array => out::line!("{}", serde_json::to_string(&rows)?)?,
            Format::Text => rows.iter().try_for_each(|row| out::line!("{}", spaced(row)))?,
        }
        Ok(())
    }
}

/// The embeddings that were made so far.
struct Printed<'a> {
    arguments: &'a Arguments,
    /// Those that are to be compared.
    kept: Vec<Vec<f32>>,
    /// Texts that were cut.
    cut: usize,
    count: usize,
}

impl Printed<'_> {
    fn group(&mut self, embedder: &Embedder<'_>, texts: &[String], bar: &ProgressBar) -> Result<(), Failure> {
        let fitted = texts.iter().map(|text| embedder.tokens(text)).collect::<Result<Vec<_>, _>>()?;
        if let Some(index) = fitted.iter().position(|text| text.ids.is_empty()) {
            let index = self.count + index;
            return Err(format!("text {index} is empty, and the tokenizer puts no token around it").into());
        }
        self.cut += fitted.iter().filter(|text| text.cut > 0).count();
        let embeddings = embedder.embed_tokens(&fitted.iter().map(|text| &text.ids).collect::<Vec<_>>())?;
        for (text, embedding) in fitted.iter().zip(&embeddings) {
            let index = self.count;
            self.count += 1;
            if self.arguments.similarity {
                continue;
            }
            if self.arguments.json {
                let (tokens, cut_tokens) = (text.ids.len(), text.cut);
                json::print("embed", &Embedding { index, tokens, cut_tokens, embedding })?;
            } else if self.arguments.is_array() {
                let comma = if index == 0 { "" } else { ",\n" };
                out::print(format_args!("{comma}{}", serde_json::to_string(embedding)?))?;
            } else {
                out::line!("{}", spaced(embedding))?;
            }
        }
        bar.set_position(self.count as u64);
        if self.arguments.similarity {
            self.kept.extend(embeddings);
        }
        Ok(())
    }
}

/// Numbers as f32 is read back exactly.
fn spaced(values: &[f32]) -> String {
    values.iter().map(f32::to_string).collect::<Vec<_>>().join(" ")
}
