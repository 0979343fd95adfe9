//! `lowbit perplexity --compare TEACHER`: models beside the one that they were made from.

use super::scored;
use crate::commands::inspect::bits_per_weight;
use crate::options::ModelOptions;
use crate::plot::{Chart, Series};
use crate::{Failure, out, progress};
use lowbit::{
    Checkpoint, ComparedToken, Model, Scoring, Statistics, Target, Tokenizer, compare, compare_layers,
    dry_perplexity,
};
use lowbit_files::staging::Content;
use lowbit_files::{shown, shown_path};
use lowbit_models::{Estimate, Quantiles};
use serde_json::{Value, json};
use std::ops::ControlFlow::Continue;

/// A comparison of models with their teacher.
pub struct Comparison<'a> {
    pub text: &'a str,
    pub context: usize,
    /// True if the second halves of windows alone are scored.
    pub second_half: bool,
    pub target: Target,
    /// True if divergences by layer are wanted.
    pub by_layer: bool,
}

/// A model that is compared.
pub struct Student {
    name: String,
    checkpoint: Checkpoint,
    bits_per_weight: f64,
}

impl Student {
    /// `checkpoint`, under the name that the tables give it.
    pub fn new(checkpoint: Checkpoint) -> Result<Self, Failure> {
        let name = shown_path(checkpoint.path()).to_string();
        Ok(Self { name, bits_per_weight: bits_per_weight(&checkpoint)?, checkpoint })
    }
}

/// A model's result.
pub struct Outcome {
    pub name: String,
    pub bits_per_weight: f64,
    pub tokens: Vec<ComparedToken>,
    pub statistics: Statistics,
    /// The mean divergence of the first window's tokens after each layer, if it was wanted.
    pub layers: Vec<f64>,
}

impl Comparison<'_> {
    /// Compares each of `students` with the teacher. All are opened, and their token ids compared,
    /// before any model runs.
    pub fn run(&self, teacher: &Checkpoint, students: &[Student]) -> Result<Vec<Outcome>, Failure> {
        let tokenizer = Tokenizer::from_checkpoint(teacher)?;
        let scoring = if self.second_half { Scoring::SecondHalf } else { Scoring::All };
        let (tokens, bos) = scored(&tokenizer, self.text, scoring)?;
        for student in students {
            let other = Tokenizer::from_checkpoint(&student.checkpoint)?;
            let (other, _) = scored(&other, self.text, scoring)?;
            check_ids(&student.name, &other, &tokens)?;
        }
        let scoring = (scoring, bos);
        // A type of cache is the students' alone: what it costs is a part of their divergence.
        let usual = self.target.clone().with_usual_cache();
        let teacher = self.load(teacher, &usual, tokens.len(), scoring.0)?;
        students.iter().map(|student| self.one(student, &teacher, &tokens, scoring)).collect()
    }

    fn load(
        &self,
        checkpoint: &Checkpoint,
        target: &Target,
        tokens: usize,
        scoring: Scoring,
    ) -> Result<Model, Failure> {
        let work = |model: &Model| dry_perplexity(model, tokens, self.context, scoring);
        ModelOptions::load_opened(checkpoint, target, work)
    }

    fn one(
        &self,
        student: &Student,
        teacher: &Model,
        tokens: &[u32],
        scoring: (Scoring, Option<u32>),
    ) -> Result<Outcome, Failure> {
        let model = self.load(&student.checkpoint, &self.target, tokens.len(), scoring.0)?;
        let bar = progress::bar("comparing", "tokens", tokens.len());
        let compared = compare(&model, teacher, tokens, self.context, scoring, |done| {
            bar.set_position(done as u64);
            Continue(())
        });
        bar.finish_and_clear();
        let failed = |error| format!("{}: {error}", student.name);
        let layers = match self.by_layer && Self::has_layers_of(&model, teacher, &student.name) {
            true => {
                compare_layers(&model, teacher, &tokens[..tokens.len().min(self.context)]).map_err(failed)?
            }
            false => vec![],
        };
        let tokens = compared.map_err(failed)?;
        let statistics = Statistics::new(&tokens).ok_or("no token was scored")?;
        Ok(Outcome {
            name: student.name.clone(),
            bits_per_weight: student.bits_per_weight,
            tokens,
            statistics,
            layers,
        })
    }
}

impl Comparison<'_> {
    /// True if layers can be compared one by one; if not, this is said.
    fn has_layers_of(model: &Model, teacher: &Model, name: &str) -> bool {
        let [mine, other] = [model, teacher].map(|model| model.config().num_hidden_layers);
        if mine != other {
            out::note!(
                "note: {} has {mine} layers and the teacher {other}: its divergence by layer is left out",
                shown(name)
            );
        }
        mine == other
    }
}

/// Checks that a model and its teacher read the same tokens.
fn check_ids(name: &str, ids: &[u32], teacher: &[u32]) -> Result<(), Failure> {
    if ids == teacher {
        return Ok(());
    }
    let index = ids.iter().zip(teacher).take_while(|(a, b)| a == b).count();
    let of = |ids: &[u32]| ids.get(index).map_or("the end".to_string(), |id| id.to_string());
    Err(format!(
        "{} and the teacher encode the text differently: token {index} is {} of {} tokens here, but {} of {} there",
        shown(name),
        of(ids),
        ids.len(),
        of(teacher),
        teacher.len()
    )
    .into())
}

/// One model's figures as llama-perplexity prints them, line by line; of several models a row each.
pub fn print(outcomes: &[Outcome]) -> Result<(), Failure> {
    match outcomes {
        [one] => print_one(&one.statistics),
        many => print_rows(many),
    }
}

fn print_one(of: &Statistics) -> Result<(), Failure> {
    out::line!("====== Perplexity statistics ======")?;
    let line = |label: &str, of: Estimate| out::line!("{label:<30}: {:>10.6} ± {:>10.6}", of.value, of.error);
    line("Mean PPL(Q)", of.perplexity)?;
    line("Mean PPL(base)", of.teacher_perplexity)?;
    out::line!("{:<30}: {:>6.2}%", "Cor(ln(PPL(Q)), ln(PPL(base)))", 100.0 * of.correlation)?;
    line("Mean ln(PPL(Q)/PPL(base))", of.log_ratio)?;
    line("Mean PPL(Q)/PPL(base)", of.ratio)?;
    line("Mean PPL(Q)-PPL(base)", of.difference)?;

    out::line!("\n====== KL divergence statistics ======")?;
    out::line!("Mean    KLD: {:>10.6} ± {:>10.6}", of.kl.value, of.kl.error)?;
    for percent in [100.0, 99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1, 0.0] {
        out::line!("{:<8}KLD: {:>10.6}", quantile(percent), of.kls.at(percent / 100.0))?;
    }

    out::line!("\n====== Token probability statistics ======")?;
    let share = |label: &str, of: Estimate| {
        out::line!("{label}: {:>6.3} ± {:>5.3} %", 100.0 * of.value, 100.0 * of.error)
    };
    share("Mean    Δp", of.probability_difference)?;
    for percent in [100.0, 99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1, 0.0] {
        let value = of.probability_differences.at(percent / 100.0);
        out::line!("{:<8}Δp: {:>6.3}%", quantile(percent), 100.0 * value)?;
    }
    share("RMS Δp    ", of.probability_rms)?;
    share("Same top p", of.same_top)?;
    Ok(())
}

/// A percentile as llama-perplexity defines it.
fn quantile(percent: f64) -> String {
    match percent {
        0.0 => "Minimum".into(),
        50.0 => "Median".into(),
        100.0 => "Maximum".into(),
        _ => format!("{percent:>4.1}%"),
    }
}

fn print_rows(outcomes: &[Outcome]) -> Result<(), Failure> {
    let width = outcomes.iter().map(|outcome| outcome.name.chars().count()).max().unwrap_or(0);
    out::line!(
        "{:<width$}{:>17}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "model",
        "bits per weight",
        "PPL(Q)",
        "mean KLD",
        "99.0% KLD",
        "99.9% KLD",
        "same top p"
    )?;
    for Outcome { name, bits_per_weight, statistics: of, .. } in outcomes {
        out::line!(
            "{name:<width$}{bits_per_weight:>17.3}{:>12.5}{:>12.6}{:>12.6}{:>12.6}{:>11.3}%",
            of.perplexity.value,
            of.kl.value,
            of.kls.at(0.99),
            of.kls.at(0.999),
            100.0 * of.same_top.value
        )?;
    }
    if let Some(first) = outcomes.first() {
        out::line!(
            "PPL(base) {:.5}, {} tokens",
            first.statistics.teacher_perplexity.value,
            first.statistics.tokens
        )?;
    }
    Ok(())
}

/// The same as one object. Divergences are in nats, differences of probabilities and shares in
/// parts of 1.
pub fn to_json(outcomes: &[Outcome], of: &Comparison<'_>) -> Value {
    let (device, context) = (of.target.device.to_string(), of.context);
    let pair = |of: Estimate| json!({ "value": of.value, "error": of.error });
    let model = |outcome: &Outcome| {
        let of = &outcome.statistics;
        json!({
            "model": outcome.name,
            "bits_per_weight": outcome.bits_per_weight,
            "tokens": of.tokens,
            "perplexity": pair(of.perplexity),
            "teacher_perplexity": pair(of.teacher_perplexity),
            "correlation": of.correlation,
            "log_ratio": pair(of.log_ratio),
            "kl": pair(of.kl),
            "kl_max": of.kls.at(1.0),
            "kl_99.9": of.kls.at(0.999),
            "kl_99": of.kls.at(0.99),
            "kl_median": of.kls.at(0.5),
            "probability_difference": pair(of.probability_difference),
            "probability_rms": pair(of.probability_rms),
            "same_top": pair(of.same_top),
        })
    };
    json!({
        "device": device, "exact": of.target.is_exact(), "context": context,
        "models": outcomes.iter().map(model).collect::<Vec<_>>(),
    })
}

/// The file that [`to_csv`] makes.
pub const CSV: Content = Content { name: "a table of lowbit perplexity's", begins: CSV_HEADER.as_bytes() };
const CSV_HEADER: &str = "model,by,index,tokens,kl,kl_median,kl_99,nll,teacher_nll,same_top";

/// Divergences by position in the window, of all windows together, and by layer, of the first
/// window, a line each. Columns that a layer does not have are empty.
pub fn to_csv(outcomes: &[Outcome]) -> String {
    let mut csv = format!("{CSV_HEADER}\n");
    for Outcome { name, tokens, layers, .. } in outcomes {
        let name = format!("\"{}\"", name.replace('"', "\"\""));
        let mut by_position = std::collections::BTreeMap::<usize, Vec<&ComparedToken>>::new();
        tokens.iter().for_each(|token| by_position.entry(token.position).or_default().push(token));
        for (position, tokens) in by_position {
            let mean = |value: &dyn Fn(&ComparedToken) -> f64| {
                tokens.iter().map(|token| value(token)).sum::<f64>() / tokens.len() as f64
            };
            let kls = Quantiles::new(tokens.iter().map(|token| token.kl).collect());
            let quantile = |share| kls.as_ref().map(|kls| kls.at(share).to_string()).unwrap_or_default();
            let (kl, nll, teacher_nll) =
                (mean(&|token| token.kl), mean(&|token| token.nll), mean(&|token| token.teacher_nll));
            let same_top = mean(&|token| f64::from(u8::from(token.same_top)));
            let (count, median, high) = (tokens.len(), quantile(0.5), quantile(0.99));
            csv += &format!(
                "{name},position,{position},{count},{kl},{median},{high},{nll},{teacher_nll},{same_top}\n"
            );
        }
        for (layer, kl) in (1..).zip(layers) {
            csv += &format!("{name},layer,{layer},,{kl},,,,,\n");
        }
    }
    csv
}

/// Points of a line of the chart by position.
const BINS: usize = 64;

/// Divergences by position in the window, by layer, and against bits per weight.
pub fn charts(outcomes: &[Outcome], context: usize) -> Vec<Chart> {
    let by_position = Chart {
        title: "KL divergence by position in the window".into(),
        x_label: "tokens before",
        y_label: "nats",
        series: outcomes.iter().flat_map(|outcome| lines(outcome, context, outcomes.len() == 1)).collect(),
    };
    let of_layers = |outcome: &Outcome| Series {
        name: outcome.name.clone(),
        points: (1..).zip(&outcome.layers).map(|(layer, &kl)| (f64::from(layer), kl)).collect(),
        joined: true,
    };
    let by_layer = Chart {
        title: "Mean KL divergence if a layer were the last, first window".into(),
        x_label: "layer",
        y_label: "nats",
        series: outcomes.iter().map(of_layers).collect(),
    };
    let dot = |outcome: &Outcome| Series {
        name: outcome.name.clone(),
        points: vec![(outcome.bits_per_weight, outcome.statistics.kl.value)],
        joined: false,
    };
    let against_bits = Chart {
        title: "Mean KL divergence against size".into(),
        x_label: "bits per weight",
        y_label: "nats",
        series: outcomes.iter().map(dot).collect(),
    };
    vec![by_position, by_layer, against_bits]
}

/// A model's mean divergence by position; of a model alone its median and 99th percentile, too.
fn lines(outcome: &Outcome, context: usize, alone: bool) -> Vec<Series> {
    let bins = by_position(&outcome.tokens, context);
    let line = |what: &str, value: &dyn Fn(&[f64]) -> Option<f64>| {
        let point = |(position, kls): &(f64, Vec<f64>)| Some((*position, value(kls)?));
        let points = bins.iter().filter_map(point).collect();
        Series { name: format!("{}: {what}", outcome.name), points, joined: true }
    };
    let quantile = |fraction: f64| {
        move |kls: &[f64]| Quantiles::new(kls.to_vec()).map(|quantiles| quantiles.at(fraction))
    };
    let mut lines = vec![line("mean", &|kls| Some(kls.iter().sum::<f64>() / kls.len() as f64))];
    if alone {
        lines.push(line("median", &quantile(0.5)));
        lines.push(line("99th percentile", &quantile(0.99)));
    }
    lines
}

/// Divergences in at most [`BINS`] bins of equally many positions of a window, each with the mean
/// of the positions that it has; bins without a token are left out.
fn by_position(tokens: &[ComparedToken], context: usize) -> Vec<(f64, Vec<f64>)> {
    let width = context.div_ceil(BINS).max(1);
    // Not by `context`: it may be any number, while positions are those of tokens that were scored.
    let mut bins = std::collections::BTreeMap::<usize, (usize, Vec<f64>)>::new();
    for token in tokens {
        let (sum, kls) = bins.entry(token.position / width).or_default();
        *sum += token.position;
        kls.push(token.kl);
    }
    bins.into_values().map(|(sum, kls)| (sum as f64 / kls.len() as f64, kls)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_hold_every_token_once() {
        let token = |position: usize| ComparedToken {
            position,
            nll: 1.0,
            teacher_nll: 1.0,
            kl: position as f64,
            same_top: true,
        };
        for context in [2, 63, 64, 65, 512] {
            // Two windows and a part of one.
            let positions: Vec<_> = (1..context).chain(1..context).chain(1..context / 2).collect();
            let tokens: Vec<_> = positions.iter().map(|&position| token(position)).collect();
            let bins = by_position(&tokens, context);
            assert!(
                bins.len() <= BINS && bins.len() >= (context / 2).min(BINS / 2),
                "{context}: {}",
                bins.len()
            );
            assert_eq!(bins.iter().map(|(_, kls)| kls.len()).sum::<usize>(), tokens.len());
            for (position, kls) in &bins {
                assert!((kls.iter().sum::<f64>() / kls.len() as f64 - position).abs() < 1e-9);
            }
        }
        assert_eq!(by_position(&[token(3), token(9)], usize::MAX), [(6.0, vec![3.0, 9.0])]);
    }
}
