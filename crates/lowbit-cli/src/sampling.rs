//! Sampling of tokens: as the checkpoint recommends, unless a flag says otherwise.

use crate::{Failure, habits, out};
use lowbit::{Checkpoint, GenerationOptions, SampleParams};
use lowbit_files::{GenerationConfig, shown, shown_path};
use std::hash::{BuildHasher, Hasher, RandomState};

/// None for a different seed on each run. A type of its own: clap would take a plain `Option` for a
/// flag that may be absent.
type Seed = Option<u64>;

/// Flags of sampling. Those that are absent are as the checkpoint recommends.
#[derive(clap::Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingOptions {
    /// Tokens to write at most; -1 writes until the model ends the text or its context is full.
    #[arg(long, short = 'n', visible_alias = "n-predict", default_value = "-1", value_parser = habits::token_count)]
    max_tokens: usize,
    /// Temperature; 0 takes the likeliest token [default: the model's recommendation, else 0].
    #[arg(long, visible_alias = "temperature")]
    temp: Option<f32>,
    /// Keep the likeliest tokens whose probabilities reach this sum; 1 keeps all, 0 the likeliest
    /// alone [default: the model's recommendation, else 1].
    #[arg(long)]
    top_p: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 keeps all
    /// [default: the model's recommendation, else 0].
    #[arg(long)]
    top_k: Option<usize>,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all
    /// [default: the model's recommendation, else 0].
    #[arg(long)]
    min_p: Option<f32>,
    /// Divide the logits of tokens already written (multiply those below zero); 1 leaves them
    /// [default: the model's recommendation, else 1].
    #[arg(long, visible_alias = "repeat-penalty")]
    repetition_penalty: Option<f32>,
    /// Subtract this from the logits of tokens already written.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtract this from the logits of tokens already written, as often as they are there.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// The penalties look at this many last tokens [default: the model's recommendation, else 64].
    #[arg(long, visible_alias = "repeat-last-n")]
    repetition_context: Option<usize>,
    /// Add to the logit of a token: 15043+1, 15043-1, 15043-inf (never written), or as JSON
    /// {"15043": 1}; may be given several times.
    #[arg(long, short = 'l', value_name = "ID+BIAS", value_parser = Biases::parse)]
    logit_bias: Vec<Biases>,
    /// Seed of the random choices; -1 takes a different one on each run, and says which.
    #[arg(long, short, default_value = "-1", value_parser = habits::seed)]
    seed: Seed,
}

/// Token ids and what is added to their logits.
#[derive(Clone, Debug, PartialEq)]
struct Biases(Vec<(u32, f32)>);

impl Biases {
    /// llama.cpp's `ID+BIAS`, or mlx-lm's JSON object.
    fn parse(text: &str) -> Result<Self, String> {
        let biases =
            if text.trim_start().starts_with('{') { Self::of_json(text) } else { Self::of_pair(text) };
        let biases = biases.ok_or("ID+BIAS, ID-BIAS or a JSON object such as {\"15043\": 1} is wanted")?;
        match biases.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY) {
            Some((id, bias)) => {
                Err(format!("the bias of token {id} is {bias}: a finite number or -inf is wanted"))
            }
            None => Ok(Self(biases)),
        }
    }

    fn of_pair(text: &str) -> Option<Vec<(u32, f32)>> {
        let (id, bias) = text.split_at(text.find(['+', '-'])?);
        // One sign is enough.
        let is_number =
            bias[1..].starts_with(|first: char| first.is_ascii_digit() || ".iInN".contains(first));
        Some(vec![(id.trim().parse().ok()?, is_number.then(|| bias.parse().ok())??)])
    }

    fn of_json(text: &str) -> Option<Vec<(u32, f32)>> {
        let biases: std::collections::BTreeMap<String, f32> = serde_json::from_str(text).ok()?;
        biases.iter().map(|(id, &bias)| Some((id.trim().parse().ok()?, bias))).collect()
    }
}

/// A run's sampling settings.
pub struct Sampling {
    options: GenerationOptions,
    /// Lines about it.
    notes: Vec<String>,
}

impl SamplingOptions {
    /// The seed, if a flag names one.
    #[cfg(feature = "serve")]
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// That the flags make sense, before a model is opened.
    pub fn check(&self) -> Result<(), Failure> {
        Ok(self.over(GenerationOptions::default(), 0).sampling.validate()?)
    }

    /// The flags over what the checkpoint recommends.
    pub fn resolve(&self, checkpoint: &Checkpoint) -> Result<Sampling, Failure> {
        let config = checkpoint.generation_config()?;
        let source = checkpoint.generation_config_source();
        let seed = self.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 32);
        let options = self.over(GenerationOptions::recommended(&config), seed);
        options.sampling.validate().map_err(|error| {
            let path = shown_path(checkpoint.path());
            format!("{path}: {source} recommends what cannot be computed: {error}; a flag can say otherwise")
        })?;
        let mut notes = vec![self.line(&config, source, &options)];
        if !config.unused.is_empty() {
            let names = shown(&config.unused.join(", ")).to_string();
            notes.push(format!("note: {source} also recommends {names}: lowbit leaves that out"));
        }
        Ok(Sampling { options, notes })
    }

    fn over(&self, recommended: GenerationOptions, seed: u64) -> GenerationOptions {
        let theirs = recommended.sampling;
        let sampling = SampleParams {
            temperature: self.temp.unwrap_or(theirs.temperature),
            top_k: self.top_k.unwrap_or(theirs.top_k),
            top_p: self.top_p.unwrap_or(theirs.top_p),
            min_p: self.min_p.unwrap_or(theirs.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(theirs.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed,
        };
        let context = self.repetition_context.unwrap_or(recommended.repetition_context);
        recommended
            .with_sampling(sampling)
            .with_max_tokens(self.max_tokens)
            .with_repetition_context(context)
            .with_logit_bias(self.logit_bias.iter().flat_map(|biases| biases.0.clone()).collect())
    }

    /// All that has an effect: first what is recommended, then the flags.
    fn line(&self, config: &GenerationConfig, source: &str, options: &GenerationOptions) -> String {
        let is_recommended = config.recommended_temperature().is_some();
        let is_flag = |setting: &Setting| match setting {
            Setting::Greedy => self.temp.is_some() || !is_recommended,
            Setting::Temperature => self.temp.is_some(),
            Setting::TopK => self.top_k.is_some(),
            Setting::TopP => self.top_p.is_some(),
            Setting::MinP => self.min_p.is_some(),
            Setting::RepetitionPenalty => self.repetition_penalty.is_some(),
            Setting::Own => true,
        };
        let (own, theirs): (Vec<_>, Vec<_>) =
            effects(options).into_iter().partition(|(setting, _)| is_flag(setting));
        let [own, theirs] =
            [own, theirs].map(|parts| parts.into_iter().map(|(_, text)| text).collect::<Vec<_>>());
        let theirs = (!theirs.is_empty()).then(|| format!("{} ({source})", theirs.join(", ")));
        let parts: Vec<String> = theirs.into_iter().chain(own).collect();
        format!("sampling: {}", parts.join(", "))
    }
}

/// A setting of how tokens are chosen.
enum Setting {
    Greedy,
    Temperature,
    TopK,
    TopP,
    MinP,
    RepetitionPenalty,
    /// One that no checkpoint recommends.
    Own,
}

/// The sampling that a checkpoint recommends, in words.
pub fn recommended(config: &GenerationConfig) -> String {
    let is_own = |setting: &Setting| matches!(setting, Setting::Own);
    let effects = effects(&GenerationOptions::recommended(config)).into_iter();
    let texts: Vec<String> = effects.filter(|(setting, _)| !is_own(setting)).map(|(_, text)| text).collect();
    texts.join(", ")
}

/// All settings that have an effect, in words.
fn effects(options: &GenerationOptions) -> Vec<(Setting, String)> {
    let (sampling, context) = (&options.sampling, options.repetition_context);
    let mut effects = vec![];
    let mut say = |is_so: bool, setting: Setting, text: String| {
        if is_so {
            effects.push((setting, text));
        }
    };
    let samples = sampling.temperature > 0.0;
    say(!samples, Setting::Greedy, "greedy".into());
    say(samples, Setting::Temperature, format!("temperature {}", sampling.temperature));
    say(samples && sampling.top_k > 0, Setting::TopK, format!("top-k {}", sampling.top_k));
    say(samples && sampling.top_p < 1.0, Setting::TopP, format!("top-p {}", sampling.top_p));
    say(samples && sampling.min_p > 0.0, Setting::MinP, format!("min-p {}", sampling.min_p));
    for (setting, name, penalty, neutral) in [
        (Setting::RepetitionPenalty, "repetition", sampling.repetition_penalty, 1.0),
        (Setting::Own, "presence", sampling.presence_penalty, 0.0),
        (Setting::Own, "frequency", sampling.frequency_penalty, 0.0),
    ] {
        let text = format!("{name} penalty {penalty} over {context} tokens");
        say(penalty != neutral && context > 0, setting, text);
    }
    let biases = options.logit_bias.len();
    say(biases > 0, Setting::Own, format!("{biases} logit biases"));
    say(samples, Setting::Own, format!("seed {}", sampling.seed));
    effects
}

impl Sampling {
    /// Says on standard error how tokens are chosen.
    pub fn say(&self) {
        for note in &self.notes {
            out::note!("{note}");
        }
    }

    /// The same of replies whose seeds are chosen one by one.
    #[cfg(feature = "serve")]
    pub fn say_without_seed(&self) {
        let seed = format!(", seed {}", self.options.sampling.seed);
        for note in &self.notes {
            out::note!("{}", note.strip_suffix(&seed).unwrap_or(note));
        }
    }

    /// The options of the first reply, as the library takes them.
    pub fn first(&self) -> &GenerationOptions {
        &self.options
    }

    /// The options of a reply after `replies` others. Each has a seed of its own: with that of the
    /// first, another answer to the same message would be the same answer.
    pub fn after(&self, replies: u64) -> GenerationOptions {
        let mut options = self.options.clone();
        options.sampling.seed = options.sampling.seed.wrapping_add(replies);
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_are_read_as_both_peers_write_them() {
        let read = |text: &str| Biases::parse(text).map(|biases| biases.0);
        assert_eq!(read("15043+1"), Ok(vec![(15043, 1.0)]));
        assert_eq!(read("15043-2.5"), Ok(vec![(15043, -2.5)]));
        assert_eq!(read("7-inf"), Ok(vec![(7, f32::NEG_INFINITY)]));
        assert_eq!(read(r#"{"12": 1.5, "3": -2}"#), Ok(vec![(12, 1.5), (3, -2.0)]));
        assert_eq!(read("{}"), Ok(vec![]));
        for text in
            ["", "7", "7+", "+1", "-1", "7+x", "7+-1", "x+1", "7 1", "{7: 1}", r#"{"a": 1}"#, "4294967296+1"]
        {
            assert!(read(text).unwrap_err().contains("is wanted"), "{text}");
        }
        for text in ["7+inf", "7+nan"] {
            assert!(read(text).unwrap_err().starts_with("the bias of token 7 is"), "{text}");
        }
    }
}
