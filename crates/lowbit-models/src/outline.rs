use crate::layers::{DecoderConfig, DecoderSpec, Multipliers};
use crate::{Config, ModelError, Target, Weights, arch};
use lowbit_files::Checkpoint;
use lowbit_kernels::Device;

/// The parameters of a model besides its weights: sizes, frequencies, windows. Two checkpoints with
/// the same weights and the same outline compute the same.
#[derive(Clone, Debug)]
pub struct Outline {
    spec: DecoderSpec,
    settings: Vec<(String, Setting)>,
}

/// A value of a [`Outline`].
#[derive(Clone, Debug, PartialEq)]
enum Setting {
    Word(String),
    /// In f32.
    Numbers(Vec<f32>),
}

/// The setting with a number for each pair of a head.
pub(crate) const FREQUENCIES: &str = "rotary frequencies";

/// The tolerance between the frequencies of two spellings: f32 rounding does not make it a
/// different computation.
const TOLERANCE: f32 = 2e-6;

impl Setting {
    fn is_like(&self, other: &Self, close: impl Fn(f32, f32) -> bool) -> bool {
        match (self, other) {
            (Self::Numbers(one), Self::Numbers(another)) => {
                one.len() == another.len() && one.iter().zip(another).all(|(&a, &b)| a == b || close(a, b))
            }
            _ => self == other,
        }
    }
}

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Word(word) => f.write_str(word),
            Self::Numbers(numbers) if numbers.len() == 1 => write!(f, "{}", numbers[0]),
            Self::Numbers(numbers) => write!(f, "{numbers:?}"),
        }
    }
}

/// The first setting in which two checkpoints differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its name in `config.json`, with its layer.
    pub setting: String,
    /// Its value in the one.
    pub one: String,
    /// Its value in the other.
    pub other: String,
}

impl Outline {
    /// The outline of `checkpoint`. All tensors are looked up and their types and shapes checked as
    /// in loading, but no weights are read.
    ///
    /// # Errors
    /// As [`Model::load`](crate::Model::load).
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let target = Target::outline(&Device::cpu(Some(1))?)?;
        let (checked, weights) = (Config::new(checkpoint)?, Weights::new(checkpoint, &target));
        let (spec, decoder) = arch::load(&checked, &weights)?;
        let mut outline = Self { spec, settings: vec![] };
        let DecoderConfig { hidden_size, num_hidden_layers, vocab_size, rms_norm_eps, .. } =
            outline.spec.config;
        outline.word("hidden_size", hidden_size);
        outline.word("num_hidden_layers", num_hidden_layers);
        outline.word("vocab_size", vocab_size);
        outline.word("max_position_embeddings", outline.spec.config.max_position_embeddings);
        outline.numbers("rms_norm_eps", &[rms_norm_eps]);
        let Multipliers { embedding, residual, logits, softcap, .. } = outline.spec.multipliers;
        outline.numbers("multipliers of embedding, layers and logits", &[embedding, residual, logits]);
        outline.numbers("softcap of logits", softcap.as_slice());
        for (index, block) in decoder.blocks().iter().enumerate() {
            let before = outline.settings.len();
            block.outline(&mut outline);
            for (name, _) in &mut outline.settings[before..] {
                *name = format!("layer {index}'s {name}");
            }
        }
        Ok(outline)
    }

    /// Sizes.
    pub fn config(&self) -> &DecoderConfig {
        &self.spec.config
    }

    /// The layers.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The first setting that differs in `other`, which is made from this one. (`other` may rotate
    /// pairs that this one does not.)
    pub fn difference(&self, other: &Self) -> Option<Difference> {
        let find = |outline: &Self, name: &str| {
            outline.settings.iter().find(|(own, _)| own == name).map(|(_, setting)| setting.clone())
        };
        let none = || Setting::Word("none".into());
        let names = self.settings.iter().chain(&other.settings).map(|(name, _)| name);
        for name in names {
            let one = find(self, name).unwrap_or_else(none);
            let another = find(other, name).unwrap_or_else(none);
            let is_rotary = name.ends_with(FREQUENCIES);
            let close = |a: f32, b: f32| {
                // Pairs that a GGUF file's sections leave where they are, transformers and mlx-lm
                // rotate.
                is_rotary && a == 0.0 || (a - b).abs() <= TOLERANCE * b.abs()
            };
            if !one.is_like(&another, close) {
                let (one, other) = (one.to_string(), another.to_string());
                return Some(Difference { setting: name.clone(), one, other });
            }
        }
        None
    }

    /// The same with these rotary frequencies in all layers.
    #[must_use]
    pub fn with_frequencies(&self, frequencies: &[f32]) -> Self {
        let mut other = self.clone();
        for (name, setting) in &mut other.settings {
            if name.ends_with(FREQUENCIES) {
                *setting = Setting::Numbers(frequencies.into());
            }
        }
        other
    }

    /// True if layers attend to fewer tokens than the context has.
    pub fn has_windows(&self) -> bool {
        let none = Setting::Word("none".into());
        self.settings.iter().any(|(name, setting)| name.ends_with("sliding_window") && *setting != none)
    }

    /// Notes a setting of the current layer.
    pub(crate) fn word(&mut self, name: &str, value: impl ToString) {
        self.settings.push((name.into(), Setting::Word(value.to_string())));
    }

    /// Notes numbers.
    pub(crate) fn numbers(&mut self, name: &str, values: &[f32]) {
        self.settings.push((name.into(), Setting::Numbers(values.into())));
    }
}
