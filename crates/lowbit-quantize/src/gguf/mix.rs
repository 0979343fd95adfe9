//! The types of file that `llama-quantize` makes, and the types of the tensors in each.
//!
//! Source: `llama_ftype`, `llama_tensor_get_type_impl` and `tensor_type_fallback`, llama.cpp
//! (llama-cpp-python 0.3.36) `src/llama-quant.cpp`, without an importance matrix, for the
//! architectures that lowbit has.

use lowbit_formats::{FloatType, Format};

/// A type of file, by the name that `llama-quantize` gives it.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    name: &'static str,
    /// `general.file_type`.
    pub(super) file_type: u32,
    /// The type of all tensors without a rule.
    pub(super) base: Format,
    rules: &'static [Rule],
}

/// The first rule that holds for a tensor says its type.
#[derive(Clone, Copy, Debug)]
struct Rule {
    part: Part,
    when: When,
    format: Format,
}

/// The tensors for which mixes have rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// `attn_v`, and `attn_qkv`, which contains it.
    Value,
    Key,
    AttentionOutput,
    /// `ffn_down`, of experts too.
    Down,
    Embedding,
    Output,
    Other,
}

impl Part {
    /// The part that a tensor is, by its name.
    pub(super) fn of(name: &str) -> Self {
        const BY_NAME: [(&str, Part); 5] = [
            ("attn_qkv.weight", Part::Value),
            ("attn_v.weight", Part::Value),
            ("attn_k.weight", Part::Key),
            ("attn_output.weight", Part::AttentionOutput),
            ("ffn_down", Part::Down),
        ];
        match name {
            "output.weight" => Self::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => Self::Embedding,
            _ => BY_NAME.iter().find(|(part, _)| name.contains(part)).map_or(Self::Other, |(_, part)| *part),
        }
    }
}

/// When a rule holds.
#[derive(Clone, Copy, Debug)]
enum When {
    Always,
    /// For this many tensors of the part, from the first on.
    First(usize),
    /// For the first 1/N of the layers.
    FirstFraction(usize),
    /// For the first and last eighth of the layers, and every third one between them.
    Spread,
    /// If at least four query heads share a key head.
    SharedKeys,
    /// If a layer has eight experts.
    EightExperts,
}

/// The properties of the model that the choice of types depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub layers: usize,
    pub experts: usize,
    /// Query heads per key head.
    pub heads_per_key: usize,
    /// Tensors that are [`Part::Value`].
    pub values: usize,
    /// True if the embedding is the output layer, too.
    pub tied: bool,
    /// Llama 2 or 3 of 70 billion parameters: 80 layers, and keys that query heads share.
    pub is_70b: bool,
}

/// The position of a tensor among those of its part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub part: Part,
    /// The number of tensors of its part before it, or its layer.
    pub index: usize,
    /// True if it is a stack of matrices.
    pub stacked: bool,
    /// The length of its rows.
    pub k: usize,
}

impl When {
    fn holds(self, place: Place, facts: &Facts) -> bool {
        let (i, n) = match place.part {
            Part::Value => (place.index, facts.values),
            _ => (place.index, facts.layers),
        };
        match self {
            Self::Always => true,
            Self::First(count) => i < count,
            Self::FirstFraction(fraction) => i < n / fraction,
            Self::Spread => i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2,
            Self::SharedKeys => facts.heads_per_key >= 4,
            Self::EightExperts => facts.experts == 8,
        }
    }
}

const fn rule(part: Part, when: When, format: Format) -> Rule {
    Rule { part, when, format }
}

/// Rules that all mixes share are in [`Mix::format`].
const MIXES: [Mix; 21] = {
    use Format::{IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    use Part::{AttentionOutput, Down, Value};
    use When::{Always, EightExperts, First, FirstFraction, SharedKeys, Spread};
    const fn mix(name: &'static str, file_type: u32, base: Format, rules: &'static [Rule]) -> Mix {
        Mix { name, file_type, base, rules }
    }
    const MORE_OUTPUT: Rule = rule(AttentionOutput, EightExperts, Q5_K);
    const IQ4: &[Rule] = &[rule(Value, SharedKeys, Q5_K), rule(Down, FirstFraction(8), Q5_K), MORE_OUTPUT];
    [
        mix("F32", 0, Format::Float(FloatType::F32), &[]),
        mix("F16", 1, Format::Float(FloatType::F16), &[]),
        mix("BF16", 32, Format::Float(FloatType::BF16), &[]),
        mix("Q8_0", 7, Q8_0, &[]),
        mix("Q4_0", 2, Q4_0, &[]),
        mix("Q4_1", 3, Q4_1, &[]),
        mix("Q5_0", 8, Q5_0, &[]),
        mix("Q5_1", 9, Q5_1, &[]),
        mix(
            "Q2_K",
            10,
            Q2_K,
            &[
                rule(Value, SharedKeys, Q4_K),
                rule(Value, Always, Q3_K),
                rule(Down, Always, Q3_K),
                MORE_OUTPUT,
                rule(AttentionOutput, Always, Q3_K),
            ],
        ),
        mix("Q3_K_S", 11, Q3_K, &[MORE_OUTPUT]),
        mix(
            "Q3_K_M",
            12,
            Q3_K,
            &[
                rule(Value, First(2), Q5_K),
                rule(Value, Always, Q4_K),
                rule(Down, FirstFraction(16), Q5_K),
                rule(Down, Always, Q4_K),
                MORE_OUTPUT,
                rule(AttentionOutput, Always, Q4_K),
            ],
        ),
        mix(
            "Q3_K_L",
            13,
            Q3_K,
            &[
                rule(Value, Always, Q5_K),
                rule(Down, Always, Q5_K),
                rule(AttentionOutput, EightExperts, Q3_K),
                rule(AttentionOutput, Always, Q5_K),
            ],
        ),
        mix(
            "Q4_K_S",
            14,
            Q4_K,
            &[rule(Value, First(4), Q5_K), rule(Down, FirstFraction(8), Q5_K), MORE_OUTPUT],
        ),
        mix("Q4_K_M", 15, Q4_K, &[rule(Value, Spread, Q6_K), rule(Down, Spread, Q6_K), MORE_OUTPUT]),
        mix("Q5_K_S", 16, Q5_K, &[]),
        mix("Q5_K_M", 17, Q5_K, &[rule(Value, Spread, Q6_K), rule(Down, Spread, Q6_K)]),
        mix("Q6_K", 18, Q6_K, &[]),
        mix("IQ4_NL", 25, IQ4_NL, IQ4),
        mix("IQ4_XS", 30, IQ4_XS, IQ4),
        mix("MXFP4_MOE", 38, MXFP4, &[]),
        // Of llama.cpp's converter; its types depend on the source, see `nvfp4`.
        mix("NVFP4", 39, NVFP4, &[]),
    ]
};

impl Mix {
    /// The mix that `llama-quantize` calls `name`, in upper or lower case; NVFP4, which it does not
    /// have, is that of a converted NVFP4 checkpoint.
    pub fn from_name(name: &str) -> Option<Self> {
        MIXES.iter().find(|mix| mix.name.eq_ignore_ascii_case(name)).copied()
    }

    /// All names.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MIXES.iter().map(|mix| mix.name)
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The type of a tensor that is quantised, whose rows may have any length.
    pub(super) fn format(&self, place: Place, facts: &Facts) -> Format {
        let Self { base, .. } = *self;
        if let Format::Float(_) = base {
            return base;
        }
        let is_moe_mix = base == Format::MXFP4;
        if place.part == Part::Output || place.part == Part::Embedding && facts.tied {
            return match () {
                () if is_moe_mix || !place.k.is_multiple_of(base.block()) || base == Format::Q8_0 => {
                    Format::Q8_0
                }
                () => Format::Q6_K,
            };
        }
        if is_moe_mix {
            return if place.stacked { Format::MXFP4 } else { Format::Q8_0 };
        }
        if facts.experts == 8 && matches!(place.part, Part::Value | Part::Key) {
            return Format::Q8_0;
        }
        let holds = |rule: &&Rule| rule.part == place.part && rule.when.holds(place, facts);
        let format = self.rules.iter().find(holds).map_or(base, |rule| rule.format);
        match (place.part, format) {
            // A matrix that eight query heads share is small.
            (Part::Value, Format::Q3_K | Format::Q4_K) if facts.is_70b => Format::Q5_K,
            _ => format,
        }
    }
}

/// The type in the mix NVFP4 of a tensor with or without a float per matrix beside it.
pub(super) fn nvfp4(has_float: bool) -> Format {
    if has_float { Format::NVFP4 } else { Format::Q8_0 }
}

/// `format`, or its replacement if its blocks do not divide rows of `k` values.
pub(super) fn fitting(format: Format, k: usize) -> Format {
    let fits = |format: &Format| k.is_multiple_of(format.block());
    let smaller = match format {
        Format::IQ4_XS => Format::IQ4_NL,
        Format::Q2_K | Format::Q3_K => Format::Q4_0,
        Format::Q4_K => Format::Q5_0,
        Format::Q5_K => Format::Q5_1,
        Format::Q6_K | Format::NVFP4 => Format::Q8_0,
        other => other,
    };
    [format, smaller].into_iter().find(fits).unwrap_or(Format::Float(FloatType::F16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_occur_once() {
        for (i, mix) in MIXES.iter().enumerate() {
            assert_eq!(Mix::from_name(&mix.name.to_lowercase()).unwrap().file_type, mix.file_type);
            assert!(MIXES[..i].iter().all(|other| other.file_type != mix.file_type), "{}", mix.name);
        }
        assert!(Mix::from_name("Q4_K").is_none());
    }

    #[test]
    fn rows_that_are_no_whole_blocks_take_smaller_ones() {
        let float = Format::Float(FloatType::F16);
        for (format, k, want) in [
            (Format::Q4_K, 512, Format::Q4_K),
            (Format::Q4_K, 96, Format::Q5_0),
            (Format::Q6_K, 96, Format::Q8_0),
            (Format::IQ4_XS, 32, Format::IQ4_NL),
            (Format::Q3_K, 40, float),
            (Format::Q8_0, 40, float),
            (Format::Float(FloatType::BF16), 40, Format::Float(FloatType::BF16)),
        ] {
            assert_eq!(fitting(format, k), want, "{format} {k}");
        }
    }
}
