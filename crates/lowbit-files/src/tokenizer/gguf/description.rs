use serde_json::Value as Json;

/// The part of tokenizer.json that depends on the kind of tokenizer.
pub(super) struct Description {
    pub normalizer: Json,
    pub pre_tokenizer: Json,
    pub decoder: Json,
    /// `unk_token` and flags.
    pub model: Json,
    pub merges: Vec<(String, String)>,
}
