//! A directory's declarations of tokens outside tokenizer.json: more tokens, and the tokens with
//! names such as `bos_token`.
//!
//! If tokenizer_config.json has `added_tokens_decoder`, no other file is read. Without it,
//! special_tokens_map.json goes before tokenizer_config.json, and added_tokens.json has further
//! tokens. Tokens that tokenizer.json lacks get the next free ids, in the order of the ids that
//! these files give them; named tokens come next, then special ones without a name. Only
//! tokenizer.json decides if bos comes before a text: `add_bos_token` in tokenizer_config.json does
//! nothing beside it.
//!
//! Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained` and
//! `TokenizersBackend.__init__`.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use tokenizers::AddedToken;

use super::limit;
use super::steps::Inner;
use crate::checkpoint::mismatch;
use crate::{Checkpoint, FileError, shown};

/// The named tokens of all models. A model may have more, such as `image_token`.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokens that the files declare.
#[derive(Debug, Default)]
pub(crate) struct Declared {
    /// Tokens by id.
    tokens: BTreeMap<i64, AddedToken>,
    /// True if they include tokenizer.json's own tokens.
    with_own: bool,
    named: Vec<(String, AddedToken)>,
    unnamed: Vec<AddedToken>,
}

impl Declared {
    /// Reads the files of `checkpoint`, a directory.
    ///
    /// # Errors
    /// [`FileError::Json`] and [`FileError::Value`]; [`FileError::Tokenizer`] for more tokens than
    /// are supported.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self, FileError> {
        let config = checkpoint.tokenizer_config()?;
        let decoder = config.and_then(|(file, config)| Some((file, config.get("added_tokens_decoder")?)));
        let mut sources: Vec<&(PathBuf, Json)> = config.into_iter().collect();
        let (map, added) = match decoder {
            Some(_) => (None, None),
            None => (checkpoint.json("special_tokens_map.json")?, checkpoint.json("added_tokens.json")?),
        };
        sources.extend(&map);
        let mut special = Special::default();
        for (file, json) in sources {
            special.take(file, json)?;
        }
        let mut declared = Self { with_own: decoder.is_none(), ..special.into_declared() };
        if let Some((file, decoder)) = decoder {
            declared.tokens = by_id(file, decoder)?;
        } else if let Some((file, added)) = &added {
            declared.tokens = declared.ids(file, added)?;
        }
        declared.check(checkpoint.path())?;
        Ok(declared)
    }

    /// The spelling of the special token `name`, such as `bos_token`.
    pub(crate) fn special(&self, name: &str) -> Option<&str> {
        self.special_tokens().find(|(known, _)| *known == name).map(|(_, token)| token)
    }

    /// The names and spellings of all special tokens that have a name.
    pub(crate) fn special_tokens(&self) -> impl Iterator<Item = (&str, &str)> {
        self.named.iter().map(|(name, token)| (name.as_str(), token.content.as_str()))
    }

    /// Adds the tokens to a tokenizer that has those of tokenizer.json.
    pub(super) fn add_to(&self, inner: &mut Inner) -> tokenizers::Result<()> {
        let own = inner.get_added_vocabulary().get_added_tokens_decoder();
        let mut tokens = self.tokens.clone();
        if self.with_own {
            tokens.extend(own.iter().map(|(&id, token)| (id.into(), token.clone())));
        }
        let mut known: HashSet<&str> =
            own.values().chain(tokens.values()).map(|token| token.content.as_str()).collect();
        let mut added: Vec<AddedToken> = tokens.values().cloned().collect();
        let special = self.named.iter().map(|(_, token)| token).chain(&self.unnamed);
        added.extend(special.filter(|token| known.insert(&token.content)).cloned());
        let named: HashSet<&str> = self.special_tokens().map(|(_, token)| token).collect();
        for token in &mut added {
            token.special |= named.contains(token.content.as_str());
        }
        // To add again what is there takes time and changes nothing.
        let own: HashSet<&AddedToken> = own.values().collect();
        added.retain(|token| !own.contains(token));
        if !added.is_empty() {
            inner.add_tokens(added)?;
        }
        Ok(())
    }

    /// The tokens of added_tokens.json, an object of tokens and their ids.
    fn ids(&self, file: &Path, json: &Json) -> Result<BTreeMap<i64, AddedToken>, FileError> {
        let named = self.named.iter().map(|(_, token)| token);
        let special: HashSet<&str> = named.chain(&self.unnamed).map(|token| token.content.as_str()).collect();
        let token = |(content, id): (&String, &Json)| {
            let id = id.as_i64().ok_or_else(|| mismatch(file, content, "a token's id", id))?;
            Ok((id, AddedToken::from(content, special.contains(content.as_str()))))
        };
        let tokens = json.as_object().ok_or_else(|| mismatch(file, "the whole", "an object", json))?;
        tokens.iter().map(token).collect()
    }

    fn check(&self, directory: &Path) -> Result<(), FileError> {
        let named = self.named.iter().map(|(_, token)| token);
        let tokens: Vec<&AddedToken> = self.tokens.values().chain(named).chain(&self.unnamed).collect();
        let refuse = |problem| Err(FileError::tokenizer(&directory.join("tokenizer_config.json"), problem));
        if let Some(token) = tokens.iter().find(|token| token.content.len() > limit::TOKEN) {
            let (token, bytes, most) = (shown(&token.content), token.content.len(), limit::TOKEN);
            return refuse(format!("added token {token} has {bytes} bytes; at most {most} are supported"));
        }
        let (count, bytes) = (tokens.len(), tokens.iter().map(|token| token.content.len()).sum::<usize>());
        if count > limit::ADDED || bytes > limit::ADDED_BYTES {
            let most = format!("at most {} of {} bytes are supported", limit::ADDED, limit::ADDED_BYTES);
            return refuse(format!("it and the files beside it add {count} tokens of {bytes} bytes; {most}"));
        }
        Ok(())
    }
}

/// Special tokens, as the files before have them.
#[derive(Default)]
struct Special {
    /// The last file that names one counts, even if it names none (null).
    named: Vec<(String, Option<AddedToken>)>,
    extra: Vec<AddedToken>,
    /// The name of `extra` in older files.
    additional: Option<Vec<AddedToken>>,
}

impl Special {
    fn take(&mut self, file: &Path, json: &Json) -> Result<(), FileError> {
        let entries = json.as_object().ok_or_else(|| mismatch(file, "the whole", "an object", json))?;
        for (key, value) in entries {
            let is_token = value.is_string() || value["content"].is_string();
            match (key.as_str(), value) {
                ("extra_special_tokens", Json::Object(tokens)) => {
                    for (name, value) in tokens {
                        self.set(name, Some(token(file, name, value)?));
                    }
                }
                ("extra_special_tokens", value) => self.extra.extend(list(file, key, value)?),
                ("additional_special_tokens", value) => {
                    let tokens = list(file, key, value)?;
                    self.additional.get_or_insert(tokens);
                }
                (name, Json::Null) if NAMED.contains(&name) => self.set(name, None),
                // Flags such as add_bos_token end alike.
                (name, value) if NAMED.contains(&name) || name.ends_with("_token") && is_token => {
                    self.set(name, Some(token(file, name, value)?));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn set(&mut self, name: &str, token: Option<AddedToken>) {
        match self.named.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = token,
            None => self.named.push((name.into(), token)),
        }
    }

    /// Tokens that files do not know get ids in this order: the usual names, then a model's own.
    fn into_declared(self) -> Declared {
        let place = |name: &str| NAMED.iter().position(|known| *known == name).unwrap_or(NAMED.len());
        let mut named: Vec<(String, AddedToken)> =
            self.named.into_iter().filter_map(|(name, token)| Some((name, token?))).collect();
        named.sort_by_key(|(name, _)| place(name));
        let unnamed = if self.extra.is_empty() { self.additional.unwrap_or_default() } else { self.extra };
        Declared { named, unnamed, ..Default::default() }
    }
}

/// `added_tokens_decoder`: an object of ids and tokens.
fn by_id(file: &Path, json: &Json) -> Result<BTreeMap<i64, AddedToken>, FileError> {
    let want = "an object of ids and tokens";
    let tokens = json.as_object().ok_or_else(|| mismatch(file, "added_tokens_decoder", want, json))?;
    let token = |(id, value): (&String, &Json)| {
        let number = id.parse().ok();
        let number = number
            .ok_or_else(|| mismatch(file, "added_tokens_decoder", "ids as keys", &id.as_str().into()))?;
        // transformers takes no text here.
        match value.is_object() {
            true => Ok((number, self::token(file, id, value)?)),
            false => Err(mismatch(file, id, "an object with a token's content", value)),
        }
    };
    tokens.iter().map(token).collect()
}

fn list(file: &Path, key: &str, value: &Json) -> Result<Vec<AddedToken>, FileError> {
    match value {
        Json::Null => Ok(vec![]),
        Json::Array(tokens) => tokens.iter().map(|value| token(file, key, value)).collect(),
        other => Err(mismatch(file, key, "a list of tokens", other)),
    }
}

/// A token: its text, which is special then, or an object with `content` and flags.
fn token(file: &Path, key: &str, value: &Json) -> Result<AddedToken, FileError> {
    if let Some(content) = value.as_str() {
        return Ok(AddedToken::from(content, true));
    }
    let content = value["content"].as_str().ok_or_else(|| mismatch(file, key, "a token", value))?;
    let flag = |name: &str| match &value[name] {
        Json::Null => Ok(None),
        Json::Bool(flag) => Ok(Some(*flag)),
        other => Err(mismatch(file, &format!("{name} of {}", shown(content)), "a bool", other)),
    };
    let special = flag("special")?.unwrap_or(false);
    Ok(AddedToken::from(content, special)
        .normalized(flag("normalized")?.unwrap_or(!special))
        .single_word(flag("single_word")?.unwrap_or(false))
        .lstrip(flag("lstrip")?.unwrap_or(false))
        .rstrip(flag("rstrip")?.unwrap_or(false)))
}
