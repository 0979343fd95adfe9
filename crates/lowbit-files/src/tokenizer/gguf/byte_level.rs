//! GPT-2's byte-level BPE. `tokenizer.ggml.pre` names the pattern that cuts a text into words
//! before merging.

use serde_json::{Value as Json, json};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::description::Description;
use super::{Defaults, Vocabulary};
use crate::tokenizer::steps::{Inner, Matcher, PreTokenize, split_by};
use crate::{FileError, shown};

/// The pre-tokenizer of a family: it cuts text into words.
struct Pre {
    /// The values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Applied in order, each to what the ones before it left apart.
    patterns: &'static [&'static str],
    /// Words that are tokens stay whole, even if no merges lead to them.
    whole_words: bool,
    /// True if a text starts with bos where the metadata does not say.
    add_bos: bool,
}

/// Also what the tokenizers crate's ByteLevel cuts by.
pub(in crate::tokenizer) const GPT_2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As in Mistral's tokenizer.json; llama.cpp approximates the classes of upper and lower case with
/// ASCII's.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// As in GPT-4o's and Llama 4's tokenizer.json; llama.cpp approximates the classes here, too.
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Letters that have a case, as DeepSeek-LLM's tokenizer.json lists them.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
/// Chinese, Korean, and what is between them, as DeepSeek's tokenizer.json have it.
const DEEPSEEK_CJK: &str = r"[一-龥ࠀ-一가-퟿]+";
const DEEPSEEK_3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const JAIS_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const SPARK_2_5: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
/// Korean, Chinese punctuation, Bopomofo, and Chinese with Japanese, each apart.
const YOUTU_SCRIPTS: &str = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

impl Pre {
    /// Merges alone make the tokens, and bos is not wanted.
    const fn new(names: &'static [&'static str], patterns: &'static [&'static str]) -> Self {
        Self { names, patterns, whole_words: false, add_bos: false }
    }

    const fn whole_words(self) -> Self {
        Self { whole_words: true, ..self }
    }

    const fn add_bos(self) -> Self {
        Self { add_bos: true, ..self }
    }
}

/// Those whose rules llama.cpp and the models' tokenizer.json agree on. Encoders' are left out
/// (`jina-*`, `roberta-bpe`, `modern-bert`, `whitespace`, `granite-embed-*`), and those that need
/// more than patterns on bytes (`kimi-k2`, `afmoe`, `chameleon`, `superbpe`, `sarvam-moe`).
const PRES: [Pre; 26] = [
    Pre::new(
        &[
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT_2],
    ),
    Pre::new(
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        &[LLAMA_3],
    )
    .whole_words()
    .add_bos(),
    Pre::new(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA_3]),
    Pre::new(&["glm4", "glm5"], &[LLAMA_3]).whole_words(),
    Pre::new(&["minicpm5"], &[r"\p{N}{1,3}", MINICPM_5]).whole_words(),
    Pre::new(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[QWEN_2],
    ),
    Pre::new(&["ufakzeka"], &[UFAKZEKA]),
    Pre::new(&["seed-coder"], &[SEED_CODER]),
    Pre::new(&["qwen35"], &[QWEN_3_5]),
    Pre::new(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT_2],
    ),
    Pre::new(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]"]),
    Pre::new(
        &["deepseek-llm"],
        &[r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_PUNCTUATION, r"\s+$", DEEPSEEK_CJK, r"\p{N}+"],
    ),
    Pre::new(&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"]),
    Pre::new(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_3],
    ),
    Pre::new(&["tekken"], &[TEKKEN]).whole_words().add_bos(),
    Pre::new(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT_4O]),
    Pre::new(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    Pre::new(&["viking"], &[BLOOM, r"\p{N}"]),
    Pre::new(&["jais-2"], &[JAIS_2]),
    Pre::new(&["spark2_5"], &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", SPARK_2_5, r"\p{N}"]),
    Pre::new(&["exaone-moe"], &[EXAONE_MOE]),
    Pre::new(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    Pre::new(&["laguna"], &[r"[^\n]+|[\n]+", QWEN_2]),
    Pre::new(&["tiny_aya", "cohere2moe"], &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O]),
    Pre::new(&["youtu"], &[YOUTU_SCRIPTS, YOUTU]).whole_words(),
    Pre::new(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"]),
];

pub(super) fn build(vocabulary: &Vocabulary<'_>, defaults: &mut Defaults) -> Result<Inner, FileError> {
    let pre = pre(vocabulary)?;
    let mut inner = vocabulary.model(BPE::builder().ignore_merges(pre.whole_words), merges(vocabulary)?)?;
    inner.with_pre_tokenizer(Some(pre_tokenizer(pre).map_err(|error| vocabulary.error(error))?));
    inner.with_decoder(Some(ByteLevel::default()));
    defaults.add_bos = pre.add_bos;
    Ok(inner)
}

/// The same in tokenizer.json.
pub(super) fn describe(vocabulary: &Vocabulary<'_>) -> Result<Description, FileError> {
    let pre = pre(vocabulary)?;
    let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let byte_level = |add_prefix_space: bool, trim_offsets: bool, use_regex: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets, "use_regex": use_regex,
        })
    };
    let mut steps: Vec<_> = pre.patterns.iter().map(split).collect();
    steps.push(byte_level(false, true, false));
    Ok(Description {
        normalizer: Json::Null,
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": steps }),
        decoder: byte_level(true, true, true),
        model: json!({
            "unk_token": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": pre.whole_words,
        }),
        merges: merges(vocabulary)?,
    })
}

/// The name of these patterns, for tokens that are whole words or not.
pub(super) fn pre_name(patterns: &[String], whole_words: bool) -> Option<&'static str> {
    let patterns: Vec<String> = patterns.iter().map(|pattern| respelled(pattern)).collect();
    let pre = PRES.iter().find(|pre| pre.patterns == patterns && pre.whole_words == whole_words)?;
    pre.names.first().copied()
}

/// A pattern as it is spelled here: files have line breaks as they are, and quantifiers that change
/// nothing.
fn respelled(pattern: &str) -> String {
    pattern.replace('\r', r"\r").replace('\n', r"\n").replace(r"\p{N}{1}", r"\p{N}")
}

/// True if a text starts with bos when the metadata does not say, for this value of
/// `tokenizer.ggml.pre`.
pub(super) fn adds_bos(name: &str) -> bool {
    PRES.iter().any(|pre| pre.add_bos && pre.names.contains(&name))
}

/// The values of `tokenizer.ggml.pre` that are known.
pub(in crate::tokenizer) fn pre_names() -> impl Iterator<Item = &'static str> {
    PRES.iter().flat_map(|pre| pre.names).copied()
}

fn pre(vocabulary: &Vocabulary<'_>) -> Result<&'static Pre, FileError> {
    let name = vocabulary.metadata.find::<&str>("tokenizer.ggml.pre")?.unwrap_or("default");
    PRES.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
        let known: Vec<_> = pre_names().collect();
        let (name, known) = (shown(name), known.join(", "));
        vocabulary.error(format!(r#"tokenizer.ggml.pre "{name}" is not supported; supported are {known}"#))
    })
}

/// Each merge is two tokens with a space between; a token's own bytes hold none, as a space is
/// spelled `Ġ`, or `▁`.
pub(super) fn merges(vocabulary: &Vocabulary<'_>) -> Result<Vec<(String, String)>, FileError> {
    let key = "tokenizer.ggml.merges";
    let merges = vocabulary.metadata.get::<&[String]>(key)?;
    let split = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) => Ok((left.to_string(), right.to_string())),
        None => Err(vocabulary.error(format!(r#"{key}: "{}" is not two tokens"#, shown(merge)))),
    };
    merges.iter().map(split).collect()
}

fn pre_tokenizer(pre: &Pre) -> tokenizers::Result<PreTokenize> {
    let split = |pattern: &&str| Matcher::new(pattern).map(split_by);
    let mut steps = pre.patterns.iter().map(split).collect::<tokenizers::Result<Vec<_>>>()?;
    steps.push(ByteLevel::new(false, true, false).into());
    Ok(PreTokenize::Sequence(steps))
}
