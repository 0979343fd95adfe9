//! SentencePiece BPE: of all adjacent pairs that join to a token, the one of the highest score is
//! joined first. Spaces are spelled `▁`, and characters without a token are spelled byte by byte.

pub(super) mod write;

use serde_json::{Value as Json, json};
use tokenizers::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;

use super::description::Description;
use super::{Defaults, Kind, Vocabulary};
use crate::tokenizer::steps::{Inner, Normalize};
use crate::{FileError, shown};

/// The longest token that is cut into pairs, in bytes; published ones have up to a hundred. Looking
/// at all cuts of a token takes the square of its length.
const LONGEST: usize = 1024;

pub(super) const SPACE: &str = "\u{2581}";

const EOS: u32 = 2;

pub(super) fn build(vocabulary: &Vocabulary<'_>, defaults: &mut Defaults) -> Result<Inner, FileError> {
    *defaults = Defaults { bos: Some(1), eos: Some(EOS), add_bos: true };
    let unknown = unknown(vocabulary)?;
    for byte in 0..=u8::MAX {
        let token = format!("<0x{byte:02X}>");
        match vocabulary.id(&token).map(|id| vocabulary.kinds[id as usize]) {
            Some(Kind::Byte) => {}
            _ => return Err(vocabulary.error(format!("{token} is no token of type byte"))),
        }
    }
    if vocabulary.tokens.len() <= unknown as usize || vocabulary.tokens.len() <= 2 {
        return Err(vocabulary.error(format!("{} tokens are too few", vocabulary.tokens.len())));
    }
    let unknown = vocabulary.tokens[unknown as usize].clone();
    let builder = BPE::builder().unk_token(unknown).fuse_unk(true).byte_fallback(true);
    let mut inner = vocabulary.model(builder, merges(vocabulary)?)?;
    let prefix = adds_space(vocabulary)?;
    let spaces = |from, to| Replace::new(from, to).map_err(|error| vocabulary.error(error));
    let mut normalizers: Vec<Normalize> = vec![spaces(" ", SPACE)?.into()];
    let mut decoders: Vec<DecoderWrapper> =
        vec![spaces(SPACE, " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if prefix {
        normalizers.insert(0, Prepend::new(SPACE.into()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    let normalizer = Normalize::Sequence(normalizers);
    inner.with_normalizer(Some(normalizer)).map_err(|error| vocabulary.error(error))?;
    inner.with_decoder(Some(Sequence::new(decoders)));
    Ok(inner)
}

/// The same in tokenizer.json.
pub(super) fn describe(vocabulary: &Vocabulary<'_>) -> Result<Description, FileError> {
    let spaces =
        |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let mut normalizers = vec![spaces(" ", SPACE)];
    let mut decoders = vec![spaces(SPACE, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if adds_space(vocabulary)? {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = &vocabulary.tokens[unknown(vocabulary)? as usize];
    Ok(Description {
        normalizer: json!({ "type": "Sequence", "normalizers": normalizers }),
        pre_tokenizer: Json::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: json!({ "unk_token": unknown, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false }),
        merges: merges(vocabulary)?,
    })
}

/// The token at the end of a text where the metadata names none; `None` for other kinds of
/// tokenizers.
pub(super) fn default_eos(vocabulary: &Vocabulary<'_>) -> Result<Option<u32>, FileError> {
    let is_own = vocabulary.metadata.find::<&str>("tokenizer.ggml.model")? == Some("llama");
    Ok(Some(EOS).filter(|_| is_own && vocabulary.tokens.len() > EOS as usize))
}

/// The token for what has none.
pub(super) fn unknown(vocabulary: &Vocabulary<'_>) -> Result<u32, FileError> {
    Ok(vocabulary.special_id("unknown")?.unwrap_or(0))
}

/// True if a space is put before a text.
fn adds_space(vocabulary: &Vocabulary<'_>) -> Result<bool, FileError> {
    Ok(vocabulary.metadata.find("tokenizer.ggml.add_space_prefix")?.unwrap_or(true))
}

/// Every way to cut a token into two tokens, in the order in which joining them is preferred: by
/// the token's score, then by the parts' ids.
fn merges(vocabulary: &Vocabulary<'_>) -> Result<Vec<(String, String)>, FileError> {
    let key = "tokenizer.ggml.scores";
    let scores = vocabulary.metadata.get::<&[f32]>(key)?;
    if scores.len() != vocabulary.tokens.len() {
        let (got, want) = (scores.len(), vocabulary.tokens.len());
        return Err(vocabulary.error(format!("{key} has {got} entries for {want} tokens")));
    }
    if let Some(id) = scores.iter().position(|score| score.is_nan()) {
        return Err(vocabulary.error(format!("{key}: the score of token {id} is NaN")));
    }
    let mut merges = Vec::new();
    for (token, &score) in vocabulary.tokens.iter().zip(scores) {
        if token.len() > LONGEST {
            return Err(vocabulary.error(too_long(token)));
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(left_id), Some(right_id)) = (vocabulary.id(left), vocabulary.id(right)) {
                merges.push((score, left_id, right_id));
            }
        }
    }
    merges.sort_by(|(a, a_left, a_right), (b, b_left, b_right)| {
        b.total_cmp(a).then_with(|| (a_left, a_right).cmp(&(b_left, b_right)))
    });
    let token = |id: u32| vocabulary.tokens[id as usize].clone();
    Ok(merges.into_iter().map(|(_, left, right)| (token(left), token(right))).collect())
}

fn too_long(token: &str) -> String {
    format!("a token of {} bytes: {}; at most {LONGEST} are supported", token.len(), shown(token))
}
