mod compare;

use crate::options::{Loaded, ModelOptions, open_named};
use crate::paths::Paths;
use crate::{Failure, habits, json, out, plot, progress};
use clap::ValueEnum;
use compare::{Comparison, Student};
use lowbit::{Checkpoint, FileError, Model, Scoring, Tokenizer, dry_perplexity, perplexity};
use lowbit_files::shown_path;
use lowbit_files::staging::{Content, Existing, Staged};
use std::io::Write;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

/// Flags of `perplexity`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Several models to compare with one teacher, each as --model takes it.
    #[arg(value_name = "MODEL", requires = "compare", conflicts_with_all = ["model", "hf_repo"])]
    models: Vec<String>,
    /// The model that others were made from, as --model takes it: prints what llama-perplexity's
    /// --kl-divergence prints, with both models run side by side and no file of logits.
    /// --cache-type is that of the models which are compared, not the teacher's.
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
    /// The tokens of a window that are scored.
    #[arg(long, value_enum, default_value_t = Score::All)]
    score: Score,
    /// With --compare, on the CPU: round activations to 8 bits, as other commands do, instead of
    /// computing as with --exact. It is faster, and its own error adds to the divergences: it about
    /// doubles those of a model in 8 bits.
    #[arg(long, requires = "compare", conflicts_with = "exact")]
    no_exact: bool,
    /// Draw the divergences by position in the window, by layer (for models of as many as the
    /// teacher), and against bits per weight, into this SVG file.
    #[arg(long, value_name = "FILE.svg", requires = "compare")]
    plot: Option<PathBuf>,
    /// Write the divergences by position in the window and by layer into this CSV file.
    #[arg(long, value_name = "FILE.csv", requires = "compare")]
    csv: Option<PathBuf>,
    /// Replace a plot and a CSV file that an earlier run wrote.
    #[arg(long, requires = "compare")]
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
        let checkpoints = match &self.models[..] {
            [] => vec![self.model.open()?],
            names => names.iter().map(|name| open_named(name)).collect::<Result<_, _>>()?,
        };
        let teacher = open_named(teacher)?;
        self.check_outputs(&checkpoints, &teacher)?;
        let students = checkpoints.into_iter().map(Student::new).collect::<Result<Vec<_>, _>>()?;
        let second_half = matches!(self.score, Score::SecondHalf);
        let target = self.model.target()?.with_exact(!self.no_exact).with_context(Some(self.context));
        let by_layer = self.plot.is_some() || self.csv.is_some();
        let comparison = Comparison { text, context: self.context, second_half, target, by_layer };
        let outcomes = comparison.run(&teacher, &students)?;
        if self.json {
            json::print("compare", &compare::to_json(&outcomes, &comparison))?;
        } else {
            compare::print(&outcomes)?;
        }
        if let Some(plot) = &self.plot {
            let svg = plot::svg(&compare::charts(&outcomes, self.context));
            self.write(plot, plot::CONTENT, &svg)?;
        }
        if let Some(csv) = &self.csv {
            self.write(csv, compare::CSV, &compare::to_csv(&outcomes))?;
        }
        Ok(())
    }

    /// Checks before any work that the outputs may be written, and are no file of another argument.
    fn check_outputs(&self, students: &[Checkpoint], teacher: &Checkpoint) -> Result<(), Failure> {
        let mut paths = Paths::default();
        paths.input("--file", &self.file);
        paths.checkpoint("--compare", teacher);
        students.iter().for_each(|student| paths.checkpoint("--model", student));
        let outputs = [("--plot", &self.plot, plot::CONTENT), ("--csv", &self.csv, compare::CSV)];
        let outputs =
            || outputs.iter().filter_map(|(flag, path, content)| Some((flag, path.as_ref()?, content)));
        outputs().for_each(|(flag, path, _)| paths.staged(flag, path));
        paths.check()?;
        // Dropped, it leaves nothing behind.
        outputs().try_for_each(|(_, path, content)| self.stage(path, *content).map(drop))?;
        Ok(())
    }

    fn stage(&self, path: &Path, content: Content) -> Result<Staged, FileError> {
        Staged::file(path, if self.force { Existing::Replace(content) } else { Existing::Refuse })
    }

    fn write(&self, path: &Path, content: Content, text: &str) -> Result<(), Failure> {
        let mut staged = self.stage(path, content)?;
        let written = staged.file_handle().write_all(text.as_bytes());
        written.map_err(|error| format!("{}: {error}", shown_path(path)))?;
        Ok(staged.commit()?)
    }
}

/// The tokens of `text` as they are scored, and the bos that begins each window. By llama.cpp's
/// rule special tokens that are spelled in the text are text, and windows begin as the whole text
/// does.
pub fn scored(
    tokenizer: &Tokenizer,
    text: &str,
    scoring: Scoring,
) -> Result<(Vec<u32>, Option<u32>), FileError> {
    if matches!(scoring, Scoring::All) {
        return Ok((tokenizer.encode(text, true)?, None));
    }
    let tokens = tokenizer.encode_as_text(text, true)?;
    let bos = tokenizer.bos().filter(|bos| tokens.first() == Some(bos));
    Ok((tokens, bos))
}

/// Scores a file.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let text = habits::read_text(&arguments.file)?;
    if let Some(teacher) = &arguments.compare {
        return arguments.compare_with(teacher, &text);
    }
    let opened = arguments.model.open_with_tokenizer()?;
    let scoring = match arguments.score {
        Score::All => Scoring::All,
        Score::SecondHalf => Scoring::SecondHalf,
    };
    let (tokens, bos) = scored(&opened.tokenizer, &text, scoring)?;
    let scoring = (scoring, bos);
    let work = |model: &Model| dry_perplexity(model, tokens.len(), arguments.context, scoring.0);
    let Loaded { model, .. } = opened.with_context(Some(arguments.context)).load(work)?;
    let bar = progress::bar("scoring", "tokens", tokens.len());
    let result = perplexity(&model, &tokens, arguments.context, scoring, |done| {
        bar.set_position(done as u64);
        Continue(())
    })?;
    bar.finish_and_clear();
    if arguments.json {
        let of = serde_json::json!({
            "tokens": result.tokens, "nll": result.nll, "perplexity": result.perplexity(),
        });
        json::print("perplexity", &of)?;
    } else {
        out::line!("tokens {}  nll {:.6}  perplexity {:.5}", result.tokens, result.nll, result.perplexity())?;
    }
    Ok(())
}
