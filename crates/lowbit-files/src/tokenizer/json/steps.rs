//! `normalizer`, `pre_tokenizer`, `post_processor` and `decoder`: each a step, or a sequence of
//! them.

use serde_json::Value;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Result, SplitDelimiterBehavior};

use super::charsmap;
use crate::shown;
use crate::tokenizer::gguf::GPT_2;
use crate::tokenizer::limit;
use crate::tokenizer::steps::{Matcher, Normalize, PreTokenize, split_by};

const NORMALIZERS: &[&str] = &[
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Replace",
    "Sequence",
    "Strip",
    "StripAccents",
];
const PRE_TOKENIZERS: &[&str] = &[
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Metaspace",
    "Punctuation",
    "Sequence",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
];
const POST_PROCESSORS: &[&str] =
    &["BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"];
const DECODERS: &[&str] = &[
    "BPEDecoder",
    "ByteFallback",
    "ByteLevel",
    "CTC",
    "Fuse",
    "Metaspace",
    "Replace",
    "Sequence",
    "Strip",
    "WordPiece",
];

/// The count and the growth of the steps so far.
pub(super) struct Steps {
    count: usize,
    /// The most that they may lengthen a text, as a factor.
    growth: usize,
}

impl Default for Steps {
    fn default() -> Self {
        Self { count: 0, growth: 1 }
    }
}

impl Steps {
    pub(super) fn normalizer(&mut self, step: Value) -> Result<Normalize> {
        self.normalizer_at("normalizer", step, 0)
    }

    pub(super) fn pre_tokenizer(&mut self, step: Value) -> Result<PreTokenize> {
        self.pre_tokenizer_at("pre_tokenizer", step, 0)
    }

    /// `is_token`: whether the vocabulary has an id.
    pub(super) fn post_processor(
        &mut self,
        step: Value,
        is_token: impl Fn(u32) -> bool,
    ) -> Result<PostProcessorWrapper> {
        let mut templates = 0;
        self.check_post_processor(&step, &is_token, &mut templates, 0)?;
        // A template may use its sequence several times, but takes one sequence only.
        if templates > 1 {
            return Err("post_processor has more than one step that adds tokens".into());
        }
        parse("post_processor", step)
    }

    pub(super) fn decoder(&mut self, step: Value) -> Result<DecoderWrapper> {
        self.check_decoder(&step, 0)?;
        parse("decoder", step)
    }

    fn normalizer_at(&mut self, at: &str, mut step: Value, depth: usize) -> Result<Normalize> {
        match self.enter(at, &step, NORMALIZERS, depth)? {
            "Sequence" => {
                let steps = list(at, &mut step, "normalizers")?.into_iter();
                let steps = steps.map(|step| self.normalizer_at(at, step, depth + 1));
                Ok(Normalize::Sequence(steps.collect::<Result<_>>()?))
            }
            "Replace" => {
                let (pattern, content) = self.replacement(at, &step)?;
                match pattern {
                    Some(pattern) => Ok(Normalize::Replace(matcher(at, &pattern)?, content)),
                    None => Ok(Normalize::Other(parse(at, step)?)),
                }
            }
            "Prepend" => {
                self.grow(at, 1 + text(at, &step, "prepend")?.len())?;
                Ok(Normalize::Other(parse(at, step)?))
            }
            "ByteLevel" => {
                self.grow(at, 2)?;
                Ok(Normalize::Other(parse(at, step)?))
            }
            "Precompiled" => self.precompiled(at, step),
            _ => Ok(Normalize::Other(parse(at, step)?)),
        }
    }

    /// A charsmap: a table of what to write for which text, in SentencePiece's own format.
    fn precompiled(&mut self, at: &str, step: Value) -> Result<Normalize> {
        let map = step.get("precompiled_charsmap").and_then(Value::as_str);
        let map = map.ok_or_else(|| format!("{at}: precompiled_charsmap is no text"))?;
        self.grow(
            at,
            charsmap::check(map).map_err(|problem| format!("{at}: precompiled_charsmap: {problem}"))?,
        )?;
        // The crate assumes that it can be parsed, and needs the text as a slice of its input.
        let precompiled: tokenizers::normalizers::Precompiled = serde_json::from_str(&step.to_string())?;
        Ok(Normalize::Other(NormalizerWrapper::Precompiled(precompiled)))
    }

    fn pre_tokenizer_at(&mut self, at: &str, mut step: Value, depth: usize) -> Result<PreTokenize> {
        match self.enter(at, &step, PRE_TOKENIZERS, depth)? {
            "Sequence" => {
                let steps = list(at, &mut step, "pretokenizers")?.into_iter();
                let steps = steps.map(|step| self.pre_tokenizer_at(at, step, depth + 1));
                Ok(PreTokenize::Sequence(steps.collect::<Result<_>>()?))
            }
            "Split" => split(at, step),
            "ByteLevel" => {
                self.grow(at, 2)?;
                byte_level(at, step)
            }
            "Metaspace" => {
                self.grow(at, text(at, &step, "replacement")?.len().max(1))?;
                other(at, step)
            }
            "FixedLength" if step.get("length").is_some_and(|length| length.as_u64() == Some(0)) => {
                Err(format!("{at}: a FixedLength of 0").into())
            }
            _ => other(at, step),
        }
    }

    fn check_post_processor(
        &mut self,
        step: &Value,
        is_token: &impl Fn(u32) -> bool,
        templates: &mut usize,
        depth: usize,
    ) -> Result<()> {
        let at = "post_processor";
        match self.enter(at, step, POST_PROCESSORS, depth)? {
            "Sequence" => {
                for step in items(at, step, "processors")? {
                    self.check_post_processor(step, is_token, templates, depth + 1)?;
                }
            }
            "TemplateProcessing" => {
                *templates += 1;
                check_template(step, is_token)?;
            }
            "BertProcessing" | "RobertaProcessing" => {
                *templates += 1;
                for key in ["sep", "cls"] {
                    let id = step.get(key).and_then(|pair| pair.get(1));
                    check_id(key, id.unwrap_or(&Value::Null), is_token)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn check_decoder(&mut self, step: &Value, depth: usize) -> Result<()> {
        let at = "decoder";
        match self.enter(at, step, DECODERS, depth)? {
            "Sequence" => {
                items(at, step, "decoders")?.iter().try_for_each(|step| self.check_decoder(step, depth + 1))
            }
            "Replace" => self.replacement(at, step).map(drop),
            "BPEDecoder" => self.grow(at, 1 + usize::from(text(at, step, "suffix")?.is_empty())),
            "WordPiece" | "CTC" => self.grow(at, 2),
            "Strip" => match ["start", "stop"]
                .iter()
                .find(|key| step.get(**key).and_then(Value::as_u64).is_none_or(|n| n > 1 << 16))
            {
                Some(key) => Err(format!("{at}: Strip has no {key} of at most 65536").into()),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Counts a step, and returns its type, which is one of `known`.
    fn enter(
        &mut self,
        at: &str,
        step: &Value,
        known: &'static [&'static str],
        depth: usize,
    ) -> Result<&'static str> {
        self.count += 1;
        if self.count > limit::STEPS || depth > limit::NESTED {
            let (most, nested) = (limit::STEPS, limit::NESTED);
            return Err(
                format!("{at} has more than {most} steps, or nests them more than {nested} times").into()
            );
        }
        let kind = step.get("type").and_then(Value::as_str);
        let kind = kind.ok_or_else(|| format!("{at} has a step without a type"))?;
        let found = known.iter().find(|name| **name == kind);
        let found =
            found.ok_or_else(|| format!("{at}: type {} is none of {}", shown(kind), known.join(", ")))?;
        let entries = step.as_object().into_iter().flatten();
        for (key, value) in entries.filter(|(key, _)| *key != "precompiled_charsmap") {
            if value.as_str().is_some_and(|text| text.len() > limit::STRING) {
                let (key, most) = (shown(key), limit::STRING);
                return Err(format!("{at}: {kind}: {key} has more than {most} bytes").into());
            }
        }
        Ok(found)
    }

    fn grow(&mut self, at: &str, times: usize) -> Result<()> {
        self.growth = self.growth.saturating_mul(times.max(1));
        match self.growth > limit::GROWTH {
            true => {
                let (growth, most) = (self.growth, limit::GROWTH);
                Err(format!("{at}: the steps up to here can make a text {growth} times longer; at most {most} are supported").into())
            }
            false => Ok(()),
        }
    }

    /// The regular expression, if it is one, and the content of a Replace.
    fn replacement(&mut self, at: &str, step: &Value) -> Result<(Option<String>, String)> {
        let content = text(at, step, "content")?.to_string();
        let (plain, regex) = pattern(at, step)?;
        let shortest = match (&plain, &regex) {
            (Some(plain), _) => plain.len(),
            (None, Some(regex)) => shortest_match(regex),
            (None, None) => 0,
        };
        // A pattern that matches the empty string matches before each byte.
        let times = match shortest {
            0 => 1 + content.len(),
            shortest => content.len().div_ceil(shortest),
        };
        self.grow(at, times)?;
        Ok((regex, content))
    }
}

/// A lower bound of a match's length in bytes.
fn shortest_match(pattern: &str) -> usize {
    let syntax = regex_automata::util::syntax::parse(pattern).ok();
    syntax.and_then(|syntax| syntax.properties().minimum_len()).unwrap_or(0)
}

fn other(at: &str, step: Value) -> Result<PreTokenize> {
    Ok(PreTokenize::Other(parse::<PreTokenizerWrapper>(at, step)?))
}

/// Its pattern is cut out of the crate's step: there, a failure would be taken for the end of the
/// text.
fn byte_level(at: &str, step: Value) -> Result<PreTokenize> {
    let flag =
        |key: &str| step.get(key).map(|value| value.as_bool().ok_or(format!("{at}: {key} is no bool")));
    let space =
        flag("add_prefix_space").ok_or_else(|| format!("{at}: ByteLevel has no add_prefix_space"))??;
    let cut = flag("use_regex").transpose()?.unwrap_or(true);
    let mut steps = Vec::new();
    if space {
        steps.push(PreTokenize::Space);
    }
    if cut {
        steps.push(split_by(matcher(at, GPT_2)?));
    }
    steps.push(ByteLevel::new(false, true, false).into());
    Ok(PreTokenize::Sequence(steps))
}

fn split(at: &str, step: Value) -> Result<PreTokenize> {
    let (plain, regex) = pattern(at, &step)?;
    if plain.is_some() {
        return other(at, step);
    }
    let behavior: SplitDelimiterBehavior = parse(at, step.get("behavior").cloned().unwrap_or_default())?;
    let invert = step.get("invert").and_then(Value::as_bool);
    let invert = invert.ok_or_else(|| format!("{at}: Split has no invert"))?;
    Ok(PreTokenize::Split { matcher: matcher(at, &regex.unwrap_or_default())?, behavior, invert })
}

/// `pattern` of a step: plain text, or a regular expression.
fn pattern(at: &str, step: &Value) -> Result<(Option<String>, Option<String>)> {
    let pattern = step.get("pattern").and_then(Value::as_object).filter(|pattern| pattern.len() == 1);
    let get = |kind: &str| {
        let text = pattern.and_then(|pattern| pattern.get(kind)).and_then(Value::as_str);
        text.filter(|text| text.len() <= limit::STRING).map(str::to_string)
    };
    match (get("String"), get("Regex")) {
        (None, None) => {
            Err(format!("{at}: pattern is neither a String nor a Regex of at most {} bytes", limit::STRING)
                .into())
        }
        found => Ok(found),
    }
}

fn matcher(at: &str, pattern: &str) -> Result<Matcher> {
    Matcher::new(pattern).map_err(|error| format!("{at}: pattern {}: {error}", shown(pattern)).into())
}

fn check_template(step: &Value, is_token: &impl Fn(u32) -> bool) -> Result<()> {
    let at = "post_processor: TemplateProcessing";
    let single = items(at, step, "single")?;
    let pieces = single.iter().chain(items(at, step, "pair")?);
    let tokens = step.get("special_tokens").and_then(Value::as_object);
    let tokens = tokens.ok_or_else(|| format!("{at}: special_tokens is no object"))?;
    if single.len() > limit::STEPS || tokens.len() > limit::STEPS {
        return Err(format!("{at} has more than {} pieces or special tokens", limit::STEPS).into());
    }
    for (name, token) in tokens {
        let ids = items(at, token, "ids")?;
        if ids.len() > limit::STEPS || ids.len() != items(at, token, "tokens")?.len() {
            return Err(format!("{at}: {} has {} ids", shown(name), ids.len()).into());
        }
        ids.iter().try_for_each(|id| check_id(name, id, is_token))?;
    }
    for piece in pieces {
        if let Some(name) = piece.get("SpecialToken") {
            let name = text(at, name, "id")?;
            if !tokens.contains_key(name) {
                return Err(format!("{at}: {} is not in special_tokens", shown(name)).into());
            }
        }
    }
    let sequences: Vec<_> = single.iter().filter_map(|piece| piece.get("Sequence")).collect();
    if sequences.len() != 1 || sequences[0].get("id").and_then(Value::as_str) != Some("A") {
        return Err(format!("{at}: single has not the one Sequence A").into());
    }
    Ok(())
}

fn check_id(name: &str, id: &Value, is_token: &impl Fn(u32) -> bool) -> Result<()> {
    let known = id.as_u64().and_then(|id| u32::try_from(id).ok()).is_some_and(is_token);
    match known {
        true => Ok(()),
        false => {
            Err(format!("post_processor: {} has id {}, which is no token's", shown(name), shown(id)).into())
        }
    }
}

fn text<'v>(at: &str, step: &'v Value, key: &str) -> Result<&'v str> {
    step.get(key).and_then(Value::as_str).ok_or_else(|| format!("{at}: {key} is no text").into())
}

fn items<'v>(at: &str, step: &'v Value, key: &str) -> Result<&'v [Value]> {
    let items = step.get(key).and_then(Value::as_array);
    items.map(Vec::as_slice).ok_or_else(|| format!("{at}: {key} is no list").into())
}

fn list(at: &str, step: &mut Value, key: &str) -> Result<Vec<Value>> {
    match step.get_mut(key).map(Value::take) {
        Some(Value::Array(items)) => Ok(items),
        _ => Err(format!("{at}: {key} is no list").into()),
    }
}

fn parse<T: serde::de::DeserializeOwned>(at: &str, step: Value) -> Result<T> {
    serde_json::from_value(step).map_err(|error| format!("{at}: {error}").into())
}
