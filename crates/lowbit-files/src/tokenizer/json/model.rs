//! `model`: the vocabulary and how words become its tokens.

use std::fmt;
use std::marker::PhantomData;

use ahash::AHashMap;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use tokenizers::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::models::wordpiece::WordPiece;

use crate::shown;
use crate::tokenizer::limit;

/// All that the four kinds of models have.
#[derive(Deserialize)]
pub(super) struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: Vocabulary,
    merges: Option<Merges>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    max_input_chars_per_word: Option<usize>,
    unk_id: Option<usize>,
}

impl Model {
    pub(super) fn build(self) -> tokenizers::Result<ModelWrapper> {
        // Files from before 2021 do not name their type.
        let kind = self.kind.as_deref().unwrap_or(match &self.vocab {
            Vocabulary::Scores(_) => "Unigram",
            Vocabulary::Ids(_) if self.merges.is_some() => "BPE",
            Vocabulary::Ids(_) if self.max_input_chars_per_word.is_some() => "WordPiece",
            Vocabulary::Ids(_) => "WordLevel",
        });
        match kind {
            "BPE" => self.bpe(),
            "Unigram" => self.unigram(),
            "WordPiece" => self.word_piece(),
            "WordLevel" => {
                let unknown = self.unk_token.ok_or("model.unk_token is missing")?;
                let model = WordLevel::builder().vocab(self.vocab.ids()?).unk_token(unknown);
                Ok(model.build()?.into())
            }
            other => Err(format!("model.type {other:?} is not BPE, Unigram, WordPiece or WordLevel").into()),
        }
    }

    fn bpe(self) -> tokenizers::Result<ModelWrapper> {
        let vocabulary = self.vocab.ids()?;
        let merges = self.merges.ok_or("model.merges is missing")?.0;
        check_merges(&vocabulary, &merges, self.continuing_subword_prefix.as_deref().unwrap_or(""))?;
        // The crate keeps these words for as long as the thread lives.
        let cached = vocabulary.len().min(10_000);
        let mut builder = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .cache_capacity(cached)
            .fuse_unk(self.fuse_unk.unwrap_or(false))
            .byte_fallback(self.byte_fallback.unwrap_or(false))
            .ignore_merges(self.ignore_merges.unwrap_or(false));
        if let Some(dropout) = self.dropout {
            builder = builder.dropout(dropout);
        }
        if let Some(unknown) = self.unk_token {
            builder = builder.unk_token(unknown);
        }
        if let Some(prefix) = self.continuing_subword_prefix {
            builder = builder.continuing_subword_prefix(prefix);
        }
        if let Some(suffix) = self.end_of_word_suffix {
            builder = builder.end_of_word_suffix(suffix);
        }
        Ok(builder.build()?.into())
    }

    fn unigram(self) -> tokenizers::Result<ModelWrapper> {
        let Vocabulary::Scores(pieces) = self.vocab else {
            return Err("model.vocab of a Unigram model should be a list of tokens with scores".into());
        };
        check_trie(&pieces)?;
        if let Some((piece, score)) = pieces.iter().find(|(_, score)| !score.is_finite()) {
            return Err(format!("the score of token {piece:?} is {score}").into());
        }
        if let Some(unknown) = self.unk_id.filter(|unknown| *unknown >= pieces.len()) {
            return Err(format!("model.unk_id is {unknown}, but there are {} tokens", pieces.len()).into());
        }
        Ok(Unigram::from(pieces, self.unk_id, self.byte_fallback.unwrap_or(false))?.into())
    }

    fn word_piece(self) -> tokenizers::Result<ModelWrapper> {
        let longest = self.max_input_chars_per_word.unwrap_or(100);
        if longest > limit::WORD {
            let most = limit::WORD;
            return Err(
                format!("model.max_input_chars_per_word is {longest}; at most {most} are supported").into()
            );
        }
        let mut builder = WordPiece::builder().vocab(self.vocab.ids()?).max_input_chars_per_word(longest);
        if let Some(unknown) = self.unk_token {
            builder = builder.unk_token(unknown);
        }
        if let Some(prefix) = self.continuing_subword_prefix {
            builder = builder.continuing_subword_prefix(prefix);
        }
        Ok(builder.build()?.into())
    }
}

/// Checks what the crate assumes: the parts of a merge, and what they join to, are tokens. (That
/// both parts are is left to the crate, which looks them up anyway.)
pub(in crate::tokenizer) fn check_merges(
    vocabulary: &AHashMap<String, u32>,
    merges: &[(String, String)],
    prefix: &str,
) -> tokenizers::Result<()> {
    let longest = vocabulary.keys().map(String::len).max().unwrap_or(0);
    for (left, right) in merges {
        // The prefix of the right part is dropped, whatever it is.
        let rest = right.get(prefix.len()..);
        if rest.is_none_or(|rest| left.len() + rest.len() > longest) {
            let (left, right) = (shown(left), shown(right));
            return Err(format!(
                "model.merges joins {left} and {right}, but that is no token of the vocabulary"
            )
            .into());
        }
    }
    Ok(())
}

/// Checks how much the crate's tree of all tokens' bytes takes: some 400 bytes for each byte that
/// is not part of another token's prefix, and a step of recursion for each byte of the longest.
fn check_trie(pieces: &[(String, f64)]) -> tokenizers::Result<()> {
    if let Some((piece, _)) = pieces.iter().find(|(piece, _)| piece.len() > limit::PIECE) {
        let (bytes, most) = (piece.len(), limit::PIECE);
        let piece = shown(piece);
        return Err(format!("token {piece} has {bytes} bytes; at most {most} are supported").into());
    }
    let mut sorted: Vec<&[u8]> = pieces.iter().map(|(piece, _)| piece.as_bytes()).collect();
    sorted.sort_unstable();
    let mut nodes = 0;
    let mut last: &[u8] = &[];
    for piece in sorted {
        let shared = last.iter().zip(piece).take_while(|(a, b)| a == b).count();
        nodes += piece.len() - shared;
        last = piece;
    }
    if nodes > limit::NODES {
        return Err(format!(
            "the tokens have {nodes} different beginnings; at most {} are supported",
            limit::NODES
        )
        .into());
    }
    Ok(())
}

/// `vocab`: tokens with ids, or with scores where the id is the place in the list.
enum Vocabulary {
    Ids(AHashMap<String, u32>),
    Scores(Vec<(String, f64)>),
}

impl Vocabulary {
    fn ids(self) -> tokenizers::Result<AHashMap<String, u32>> {
        match self {
            Self::Ids(ids) => Ok(ids),
            Self::Scores(_) => Err("model.vocab should be an object of tokens and their ids".into()),
        }
    }
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabularyVisitor)
    }
}

struct VocabularyVisitor;

impl<'de> Visitor<'de> for VocabularyVisitor {
    type Value = Vocabulary;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("model.vocab, an object of tokens and ids or a list of tokens and scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Vocabulary, A::Error> {
        let mut ids = AHashMap::new();
        let mut seen = Seen::default();
        while let Some(token) = access.next_key::<String>()? {
            let id = access.next_value::<u32>()?;
            check_token::<A::Error>(&token, ids.len())?;
            if id >= limit::ID {
                let (token, most) = (shown(&token), limit::ID);
                return Err(A::Error::custom(format_args!(
                    "token {token} has id {id}; ids are below {most}"
                )));
            }
            if seen.insert(id) {
                let other =
                    ids.iter().find(|(_, other)| **other == id).map_or("", |(token, _): (&String, _)| token);
                let (token, other) = (shown(&token), shown(other));
                return Err(A::Error::custom(format_args!(
                    "tokens {other} and {token} have the same id {id}"
                )));
            }
            if let Some((token, first)) = ids.get_key_value(&token) {
                let token = shown(token);
                return Err(A::Error::custom(format_args!("token {token} has two ids, {first} and {id}")));
            }
            ids.insert(token, id);
        }
        Ok(Vocabulary::Ids(ids))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Vocabulary, A::Error> {
        let mut pieces = Vec::new();
        while let Some((piece, score)) = access.next_element::<(String, f64)>()? {
            check_token::<A::Error>(&piece, pieces.len())?;
            pieces.push((piece, score));
        }
        Ok(Vocabulary::Scores(pieces))
    }
}

fn check_token<E: Error>(token: &str, before: usize) -> Result<(), E> {
    if before >= limit::TOKENS {
        return Err(E::custom(format_args!("the vocabulary has more than {} tokens", limit::TOKENS)));
    }
    if token.len() > limit::TOKEN {
        let (bytes, most) = (token.len(), limit::TOKEN);
        let token = shown(token);
        return Err(E::custom(format_args!("token {token} has {bytes} bytes; at most {most} are supported")));
    }
    Ok(())
}

/// A set of ids below [`limit::ID`].
#[derive(Default)]
struct Seen(Vec<u64>);

impl Seen {
    /// Adds `id`; true if it was in already.
    fn insert(&mut self, id: u32) -> bool {
        let (word, bit) = (id as usize / 64, 1 << (id % 64));
        if self.0.len() <= word {
            self.0.resize((word + 1).next_power_of_two(), 0);
        }
        let seen = self.0[word] & bit != 0;
        self.0[word] |= bit;
        seen
    }
}

/// `merges`: pairs of tokens, `["a", "b"]` or `"a b"`.
struct Merges(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let keep = |merge: &Merge| !matches!(merge, Merge::Comment);
        let merges = List::<Merge, { limit::MERGES }>::deserialize(deserializer)?.0;
        let pairs = merges.into_iter().filter(keep).map(|merge| match merge {
            Merge::Pair(left, right) => (left, right),
            Merge::Comment => unreachable!("left out above"),
        });
        Ok(Self(pairs.collect()))
    }
}

enum Merge {
    Pair(String, String),
    /// The first line of merges.txt, which early files have here.
    Comment,
}

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a merge of two tokens")
    }

    fn visit_str<E: Error>(self, line: &str) -> Result<Merge, E> {
        match line.split_once(' ') {
            _ if line.starts_with("#version") => Ok(Merge::Comment),
            Some((left, right)) if !right.contains(' ') => Ok(Merge::Pair(left.into(), right.into())),
            _ => Err(E::custom(format_args!("model.merges: {} is not two tokens", shown(line)))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Merge, A::Error> {
        let mut part =
            || access.next_element::<String>()?.ok_or_else(|| A::Error::invalid_length(1, &"two tokens"));
        let pair = Merge::Pair(part()?, part()?);
        match access.next_element::<serde::de::IgnoredAny>()? {
            None => Ok(pair),
            Some(_) => Err(A::Error::invalid_length(3, &"two tokens")),
        }
    }
}

/// A list of at most `MOST` values.
pub(super) struct List<T, const MOST: usize>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for ListVisitor<T, MOST> {
            type Value = List<T, MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = access.next_element()? {
                    if values.len() == MOST {
                        return Err(A::Error::custom(format_args!("a list has more than {MOST} values")));
                    }
                    values.push(value);
                }
                Ok(List(values))
            }
        }
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}
