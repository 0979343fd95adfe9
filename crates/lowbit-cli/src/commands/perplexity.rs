use super::compare::{self, Comparison, Student};
use crate::options::{Loaded, ModelOptions, open_named};
use crate::{Failure, habits, out, plot, progress};
use clap::ValueEnum;
use lowbit::{FileError, Model, Scoring, dry_perplexity, perplexity};
use lowbit_files::shown_path;
use lowbit_files::staging::{Existing, Staged};
use std::io::Write;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

/// Flags of `perplexity`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Several models to compare with one teacher, each as --model takes it.
    #[arg(value_name = "MODEL", requires = "compare", conflicts_with_all = ["model", "hf_repo"])]
    models: Vec<String>,
    /// The model that others were made from, as --model takes it: prints what llama-perplexity's --kl-divergence prints, with
    /// both models run side by side and no file of logits.
    #[arg(long, value_name = "TEACHER")]
    compare: Option<String>,
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
    /// Draw the divergences by position in the window, by layer (for models of as many as the teacher), and against bits per weight, into
    /// this SVG file.
    #[arg(long, value_name = "FILE.svg", requires = "compare")]
    plot: Option<PathBuf>,
    /// Replace the plot's file if it exists.
    #[arg(long, requires = "plot")]
    force: bool,
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

impl Arguments {
    /// Compares the models with `teacher` on a text.
    fn compare_with(&self, teacher: &str, text: &str) -> Result<(), Failure> {
        if let Some(plot) = &self.plot {
            // Before any work: a file that may not be replaced, or cannot be written. Dropped, it leaves nothing behind.
            drop(self.stage(plot)?);
        }
        let checkpoints = match &self.models[..] {
            [] => vec![self.model.open()?],
            names => names.iter().map(|name| open_named(name)).collect::<Result<_, _>>()?,
        };
        let students = checkpoints.into_iter().map(Student::new).collect::<Result<Vec<_>, _>>()?;
        let second_half = matches!(self.score, Score::SecondHalf);
        let target = self.model.target()?;
        let by_layer = self.plot.is_some();
        let comparison = Comparison { text, context: self.context, second_half, target, by_layer };
        let outcomes = comparison.run(teacher, &students)?;
        if self.json {
            out::line!("{}", compare::to_json(&outcomes))?;
        } else {
            compare::print(&outcomes)?;
        }
        if let Some(plot) = &self.plot {
            let svg = plot::svg(&compare::charts(&outcomes, self.context));
            let mut staged = self.stage(plot)?;
            let written = staged.file_handle().write_all(svg.as_bytes());
            written.map_err(|error| format!("{}: {error}", shown_path(plot)))?;
            staged.commit()?;
        }
        Ok(())
    }

    fn stage(&self, plot: &Path) -> Result<Staged, FileError> {
        Staged::file(plot, if self.force { Existing::Replace(plot::CONTENT) } else { Existing::Refuse })
    }
}

/// Scores a file.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let text = habits::read_text(&arguments.file)?;
    if let Some(teacher) = &arguments.compare {
        return arguments.compare_with(teacher, &text);
    }
    let opened = arguments.model.open_with_tokenizer()?;
    let (tokens, bos) = (opened.tokenizer.encode(&text, true)?, opened.tokenizer.special().bos);
    let scoring = match arguments.score {
        Score::All => (Scoring::All, None),
        Score::SecondHalf => (Scoring::SecondHalf, bos.filter(|bos| tokens.first() == Some(bos))),
    };
    let work = |model: &Model| dry_perplexity(model, tokens.len(), arguments.context, scoring.0);
    let Loaded { model, .. } = opened.load(work)?;
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
