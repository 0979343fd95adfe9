use serde_json::Value as Json;

/// What a kind of tokenizer has in tokenizer.json, without what all have.
pub(super) struct Description {
    pub normalizer: Json,
    pub pre_tokenizer: Json,
    pub decoder: Json,
    /// `unk_token` and flags.
    pub model: Json,
    pub merges: Vec<(String, String)>,
}
