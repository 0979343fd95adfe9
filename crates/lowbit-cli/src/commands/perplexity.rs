use crate::options::{Loaded, ModelOptions};
use crate::{Failure, habits, out, progress};
use clap::ValueEnum;
use lowbit::{Scoring, perplexity};
use std::ops::ControlFlow::Continue;
use std::path::PathBuf;

/// Flags of `perplexity`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    /// The text to score.
    #[arg(long, short)]
    file: PathBuf,
    /// Tokens per window; windows do not overlap.
    #[arg(long, short, visible_alias = "ctx-size", default_value_t = 512)]
    context: usize,
    /// Which tokens of a window are scored.
    #[arg(long, value_enum, default_value_t = Score::All)]
    score: Score,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Score {
    /// Every token but a window's first.
    All,
    /// The second half of whole windows, as llama-perplexity does.
    SecondHalf,
}

/// Scores a file.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let text = habits::read_text(&arguments.file)?;
    let Loaded { tokenizer, model, .. } = arguments.model.load()?;
    let tokens = tokenizer.encode(&text, true)?;
    let scoring = match arguments.score {
        Score::All => (Scoring::All, None),
        Score::SecondHalf => {
            (Scoring::SecondHalf, tokenizer.special().bos.filter(|bos| tokens.first() == Some(bos)))
        }
    };
    let bar = progress::bar("tokens", tokens.len());
    let result = perplexity(&model, &tokens, arguments.context, scoring, |done| {
        bar.set_position(done as u64);
        Continue(())
    })?;
    bar.finish_and_clear();
    if arguments.json {
        let json = serde_json::json!({
            "tokens": result.tokens, "nll": result.nll, "perplexity": result.perplexity(),
        });
        out::line!("{json}")?;
    } else {
        out::line!("tokens {}  nll {:.6}  perplexity {:.5}", result.tokens, result.nll, result.perplexity())?;
    }
    Ok(())
}
