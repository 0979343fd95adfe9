//! GPT-2's byte-level BPE. `tokenizer.ggml.pre` names the pattern that cuts a text into words before merging.

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use super::{Defaults, Vocabulary};
use crate::FileError;

/// How a family of tokenizers cuts text.
struct Pre {
    /// The values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Applied in order, each to what the ones before it left apart.
    patterns: &'static [&'static str],
    /// Words that are tokens stay whole, even if no merges lead to them; and such models want bos.
    whole_words: bool,
}

const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As in Mistral's tokenizer.json; llama.cpp approximates the classes of upper and lower case with ASCII's.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PRES: [Pre; 7] = [
    Pre { names: &["gpt-2"], patterns: &[GPT_2], whole_words: false },
    Pre { names: &["llama-bpe", "llama3", "llama-v3"], patterns: &[LLAMA_3], whole_words: true },
    Pre { names: &["qwen2", "deepseek-r1-qwen"], patterns: &[QWEN_2], whole_words: false },
    Pre { names: &["qwen35"], patterns: &[QWEN_3_5], whole_words: false },
    Pre { names: &["smollm"], patterns: &[r"\p{N}", GPT_2], whole_words: false },
    Pre { names: &["tekken"], patterns: &[TEKKEN], whole_words: true },
    Pre {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"],
        whole_words: false,
    },
];

pub(super) fn build(vocabulary: &Vocabulary<'_>) -> Result<(tokenizers::Tokenizer, Defaults), FileError> {
    let pre = pre(vocabulary)?;
    let model = BPE::builder()
        .vocab_and_merges(
            vocabulary.ids.clone().into_iter().collect::<ahash::AHashMap<_, _>>(),
            merges(vocabulary)?,
        )
        .ignore_merges(pre.whole_words)
        .build()
        .map_err(|error| vocabulary.error(error))?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(pre_tokenizer(pre).map_err(|error| vocabulary.error(error))?));
    inner.with_decoder(Some(ByteLevel::default()));
    Ok((inner, Defaults { bos: None, eos: None, add_bos: pre.whole_words }))
}

fn pre(vocabulary: &Vocabulary<'_>) -> Result<&'static Pre, FileError> {
    let name = vocabulary.metadata.find::<&str>("tokenizer.ggml.pre")?.unwrap_or("default");
    PRES.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
        let known: Vec<_> = PRES.iter().flat_map(|pre| pre.names).copied().collect();
        let known = known.join(", ");
        vocabulary.error(format!("tokenizer.ggml.pre {name:?} is not supported; supported are {known}"))
    })
}

/// Each merge is two tokens with a space between; a token's own bytes hold none, as a space is spelled `Ġ`.
fn merges(vocabulary: &Vocabulary<'_>) -> Result<Vec<(String, String)>, FileError> {
    let key = "tokenizer.ggml.merges";
    let merges = vocabulary.metadata.get::<&[String]>(key)?;
    let split = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) => Ok((left.to_string(), right.to_string())),
        None => Err(vocabulary.error(format!("{key}: {merge:?} is not two tokens"))),
    };
    merges.iter().map(split).collect()
}

fn pre_tokenizer(pre: &Pre) -> tokenizers::Result<PreTokenizerWrapper> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in pre.patterns {
        let pattern = SplitPattern::Regex((*pattern).into());
        steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    Ok(Sequence::new(steps).into())
}
