//! The tokens of a GGUF vocabulary that end a text or a turn: those that keys name, and those of
//! well-known spellings, since converters leave many out.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `llama-vocab.cpp`, `llama_vocab::impl::load`.

use super::{Kind, Vocabulary};
use crate::FileError;

/// Spellings that end a text or a turn, in every vocabulary that has them.
const ENDS: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// A token with which filling in the middle of a text is asked for: names in keys, and well-known
/// spellings, of which the first that the vocabulary has counts where no key names the token.
struct Fill {
    keys: &'static [&'static str],
    spellings: &'static [&'static str],
    /// True if generation ends with it.
    ends: bool,
}

const FILLS: [Fill; 6] = [
    Fill {
        keys: &["fim_pre", "prefix"],
        spellings: &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
        ends: false,
    },
    Fill {
        keys: &["fim_suf", "suffix"],
        spellings: &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
        ends: false,
    },
    Fill {
        keys: &["fim_mid", "middle"],
        spellings: &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
        ends: false,
    },
    Fill {
        keys: &["fim_pad"],
        spellings: &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
        ends: true,
    },
    Fill {
        keys: &["fim_rep"],
        spellings: &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
        ends: true,
    },
    Fill { keys: &["fim_sep"], spellings: &["<|file_sep|>"], ends: true },
];

/// Tokens of gpt-oss' format, which are shown as text.
const SHOWN: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

impl Vocabulary<'_> {
    /// The tokens that end a text or a turn, `eos` among them. Tokens of well-known spellings
    /// become control tokens, whatever the file says of their types.
    pub(super) fn find_ends(&mut self, eos: Option<u32>) -> Result<Vec<u32>, FileError> {
        let mut ends = vec![];
        for Fill { keys, spellings, ends: is_end } in FILLS {
            let mut named = None;
            for key in keys {
                // One that names no token is ignored there.
                let id = self.metadata.find::<u32>(&format!("tokenizer.ggml.{key}_token_id"))?;
                named = id.filter(|id| (*id as usize) < self.tokens.len()).or(named);
            }
            let id = named.or_else(|| {
                let found = spellings.iter().find_map(|spelling| self.id(spelling))?;
                self.set(found, Kind::Control);
                Some(found)
            });
            ends.extend(id.filter(|_| is_end));
        }
        for end in ENDS {
            if let Some(id) = self.id(end) {
                ends.push(id);
                self.set(id, Kind::Control);
            }
        }
        for token in SHOWN {
            if let Some(id) = self.id(token) {
                self.set(id, Kind::UserDefined);
            }
        }
        ends.extend(eos);
        for name in ["eot", "eom"] {
            ends.extend(self.special_id(name)?);
        }
        self.leave_out(&mut ends);
        Ok(ends)
    }

    /// Formats in which a token of such a spelling is none of the ends.
    fn leave_out(&mut self, ends: &mut Vec<u32>) {
        let has = |ends: &[u32], spelling: &str| self.id(spelling).is_some_and(|id| ends.contains(&id));
        // gpt-oss and Solar: what is called the end is that of a part of a reply.
        let calls = has(ends, "<|call|>") || has(ends, "<|calls|>");
        let parts = calls && (has(ends, "<|return|>") || has(ends, "<|flush|>"));
        // Gemma 4 and PLaMo: plain text.
        let plain = has(ends, "<|tool_response>") || has(ends, "<|plamo:eos|>");
        for (spelling, kind, is_one) in [("<|end|>", Kind::UserDefined, parts), ("</s>", Kind::Normal, plain)]
        {
            if let Some(id) = self.id(spelling).filter(|id| is_one && ends.contains(id)) {
                ends.retain(|end| *end != id);
                self.set(id, kind);
            }
        }
    }

    fn set(&mut self, id: u32, kind: Kind) {
        self.kinds[id as usize] = kind;
    }
}
