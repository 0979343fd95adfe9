use crate::options::{Loaded, ModelOptions, at_least_one};
use crate::texts::Texts;
use crate::{Failure, json, out, progress};
use lowbit::{Checkpoint, GenerationOptions, Prompt, RerankOptions, Reranker, Score, dry_generation};
use lowbit_files::shown;
use serde::Serialize;

/// Flags of `rerank`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    texts: Texts,
    /// The query that texts are ranked for.
    #[arg(long, short, value_name = "TEXT", help_heading = "Ranking")]
    query: String,
    /// The system's message, which says what makes a text good
    /// [default: the checkpoint's prompt, if it has one].
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_name", help_heading = "Ranking")]
    instruction: Option<String>,
    /// The checkpoint's prompt of this name as the system's message.
    #[arg(long, value_name = "NAME", help_heading = "Ranking")]
    prompt_name: Option<String>,
    /// The token whose logit speaks for a text, such as yes, or its id
    /// [default: as the checkpoint says].
    #[arg(long, value_name = "TOKEN", help_heading = "Ranking")]
    true_token: Option<String>,
    /// The token whose logit is subtracted, such as no.
    #[arg(long, value_name = "TOKEN", requires = "true_token", help_heading = "Ranking")]
    false_token: Option<String>,
    /// Print the best N texts alone.
    #[arg(long, value_name = "N", value_parser = at_least_one(), help_heading = "Ranking")]
    top_n: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A text with its score, as `--json` prints it.
#[derive(Serialize)]
struct Ranked<'a> {
    index: usize,
    score: f32,
    tokens: usize,
    cut_tokens: usize,
    text: &'a str,
}

/// Ranks texts.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let texts = arguments.texts.read("rerank -q QUERY")?;
    let opened = arguments.model.open_with_tokenizer()?;
    let options = arguments.options();
    check(&opened.checkpoint, &options)?;
    let compiled = GenerationOptions::default();
    let loaded = opened.load(|model| dry_generation(model, &[64, 128, 256, 512], &compiled))?;
    let Loaded { checkpoint, tokenizer, model, .. } = &loaded;
    let mut reranker = Reranker::new(checkpoint, (model, tokenizer), &options)?;
    let bar = progress::bar("scoring", "texts", texts.len());
    let mut ranked = vec![];
    for (index, text) in texts.iter().enumerate() {
        for Score { score, tokens, cut, .. } in reranker.score(&arguments.query, &[text])? {
            ranked.push(Ranked { index, score, tokens, cut_tokens: cut, text });
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let cut = ranked.iter().filter(|text| text.cut_tokens > 0).count();
    if cut > 0 {
        let texts = if cut == 1 { "1 text was".into() } else { format!("{cut} texts were") };
        out::note!("note: {texts} longer than the model reads, and cut");
    }
    // Equal scores stay in the texts' order.
    ranked.sort_by(|one, other| other.score.total_cmp(&one.score));
    ranked.truncate(arguments.top_n.unwrap_or(usize::MAX));
    if arguments.json {
        return json::print("rerank", &serde_json::json!({ "query": arguments.query, "results": ranked }));
    }
    ranked.iter().try_for_each(|text| {
        out::line!("{:.6}  {:>4}  {}", text.score, text.index, shown(text.text)).map_err(Failure::from)
    })
}

/// Refuses a model that says nothing of scores before its weights are loaded.
fn check(checkpoint: &Checkpoint, options: &RerankOptions) -> Result<(), Failure> {
    if options.tokens.is_none() && checkpoint.scoring_config()?.is_none() {
        let path = checkpoint.path().into();
        let error = lowbit::Error::NoScore { path };
        return Err(format!("{error} (--true-token yes --false-token no)").into());
    }
    Ok(())
}

impl Arguments {
    fn options(&self) -> RerankOptions {
        let options =
            RerankOptions::default().with_instruction(match (&self.instruction, &self.prompt_name) {
                (Some(text), _) => Prompt::Text(text.clone()),
                (None, Some(name)) => Prompt::Named(name.clone()),
                (None, None) => Prompt::Default,
            });
        match &self.true_token {
            Some(token) => options.with_tokens(token, self.false_token.clone()),
            None => options,
        }
    }
}
