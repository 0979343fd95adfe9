//! Hostile values, chosen by the fuzzer's bytes: it need not find numbers such as 2^62 by itself.

use serde_json::{Value, json};

/// The fuzzer's bytes, read as choices. After their end all are 0.
pub(crate) struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls `step` up to 12 times, while there are choices left.
    pub fn spend(&mut self, mut step: impl FnMut(&mut Self)) {
        for _ in 0..12 {
            if self.is_empty() {
                break;
            }
            step(self);
        }
    }

    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&byte, rest)) => {
                self.0 = rest;
                byte
            }
            None => 0,
        }
    }

    /// Up to `n - 1`.
    pub fn below(&mut self, n: usize) -> usize {
        let two = usize::from(self.byte()) | if n > 256 { usize::from(self.byte()) << 8 } else { 0 };
        two % n.max(1)
    }

    pub fn of<'t, T>(&mut self, all: &'t [T]) -> &'t T {
        &all[self.below(all.len())]
    }

    /// A size: plausible, at some edge, or absurd.
    pub fn number(&mut self) -> u64 {
        const NUMBERS: [u64; 24] = [
            0,
            1,
            2,
            3,
            16,
            32,
            33,
            48,
            64,
            255,
            1 << 16,
            1 << 24,
            (1 << 31) - 1,
            1 << 31,
            1 << 32,
            1 << 40,
            1_000_000_000,
            1_000_000_000_000,
            (1 << 62) + 64,
            1 << 62,
            1 << 63,
            (1 << 63) - 1,
            u64::MAX,
            u64::MAX - 1,
        ];
        match self.byte() {
            255 => u64::from_le_bytes(std::array::from_fn(|_| self.byte())) >> (self.byte() % 64),
            at @ 128..255 => u64::from(at - 128),
            at => NUMBERS[usize::from(at) % NUMBERS.len()],
        }
    }

    pub fn float(&mut self) -> f64 {
        const FLOATS: [f64; 14] = [
            0.0,
            -0.0,
            0.25,
            0.5,
            1.0,
            1.5,
            -1.0,
            1e-45,
            1e-300,
            1e38,
            1e300,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ];
        *self.of(&FLOATS)
    }

    /// Characters that a terminal obeys, text that takes long to print, and the words of
    /// configurations.
    pub fn string(&mut self) -> String {
        const WORDS: [&str; 20] = [
            "",
            "silu",
            "gelu",
            "gelu_pytorch_tanh",
            "relu",
            "default",
            "linear",
            "llama3",
            "yarn",
            "longrope",
            "full_attention",
            "linear_attention",
            "sliding_attention",
            "affine",
            "mxfp4",
            "nvfp4",
            "none",
            "bpe",
            "llama",
            "gpt2",
        ];
        match self.byte() {
            250 => "\u{1b}[2J\u{7}\u{202e}\u{9b}31m\r".into(),
            251 => "x".repeat(100_000),
            252 => "\u{1b}".repeat(10_000),
            at => WORDS[usize::from(at) % WORDS.len()].into(),
        }
    }

    pub fn json(&mut self) -> Value {
        match self.byte() % 12 {
            0..=3 => self.number().into(),
            4 => json!(-(self.below(300) as i64)),
            5 | 6 => json!(self.float()),
            7 => self.string().into(),
            8 => json!(self.byte().is_multiple_of(2)),
            9 => Value::Null,
            10 => {
                let length = [0, 1, 2, 3, 2000][self.below(5)];
                let value =
                    if self.byte().is_multiple_of(2) { self.string().into() } else { json!(self.number()) };
                if length > 3 && value.as_str().is_some_and(|text| text.len() > 100) {
                    return json!([value]);
                }
                Value::Array(vec![value; length])
            }
            _ => json!({
                "rope_type": self.string(), "factor": self.float(), "rope_theta": self.float(),
                "partial_rotary_factor": self.float(), "original_max_position_embeddings": self.number(),
                "low_freq_factor": 1.0, "high_freq_factor": self.float(), "beta_fast": self.float(),
            }),
        }
    }
}
