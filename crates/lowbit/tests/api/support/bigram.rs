//! A llama of one layer that does nothing: its embedding is one-hot and its head a table, so that a
//! token alone decides which one follows. Its tokenizer has a token for each byte, and what a test
//! adds.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::write;
use std::path::Path;

/// The parts of a bigram model. Tokens are named by their text.
#[derive(Default)]
pub struct Bigram<'a> {
    /// Added tokens; those whose names start with `+` are no special ones, and are spelled without
    /// it.
    pub added: &'a [&'a str],
    /// Tokens of two bytes that the tokenizer merges.
    pub merged: &'a [&'a str],
    /// Pairs of a token and the one that follows it; the first of [`Self::added`], which ends
    /// texts, follows all others.
    pub next: &'a [(&'a str, &'a str)],
    /// The chat template.
    pub template: &'a str,
}

impl Bigram<'_> {
    /// Writes the checkpoint to `folder`.
    pub fn write(&self, folder: &Path) {
        let tokens = self.tokens();
        let eos = 256 + self.merged.len();
        let hidden = tokens.len().next_multiple_of(32);
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-12, "rope_theta": 10000.0,
            "vocab_size": tokens.len(), "hidden_size": hidden, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": hidden / 32, "tie_word_embeddings": false, "torch_dtype": "float32",
            "eos_token_id": eos,
        });
        write(folder.join("config.json"), config.to_string()).unwrap();
        write(folder.join("tokenizer.json"), self.tokenizer(&tokens).to_string()).unwrap();
        let names = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[eos], "chat_template": self.template,
        });
        write(folder.join("tokenizer_config.json"), names.to_string()).unwrap();
        write(folder.join("model.safetensors"), self.weights(&tokens, hidden, eos)).unwrap();
    }

    /// All tokens' texts, but for the bytes of characters that take several.
    fn tokens(&self) -> Vec<String> {
        let bytes = (0..=255u8).map(|byte| char::from(byte).to_string());
        let added = self.added.iter().map(|token| token.strip_prefix('+').unwrap_or(token));
        let others = self.merged.iter().copied().chain(added).map(str::to_string);
        bytes.chain(others).collect()
    }

    fn tokenizer(&self, tokens: &[String]) -> Value {
        // GPT-2's alphabet: bytes that are no visible characters are spelled by others.
        let is_visible = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut hidden = (256u32..).map(|code| char::from_u32(code).unwrap());
        let alphabet: Vec<char> = (0..=255u8)
            .map(|byte| if is_visible(byte) { char::from(byte) } else { hidden.next().unwrap() })
            .collect();
        let spelled = |text: &str| text.bytes().map(|byte| alphabet[usize::from(byte)]).collect::<String>();
        let mut vocab: BTreeMap<String, usize> =
            alphabet.iter().enumerate().map(|(id, c)| (c.to_string(), id)).collect();
        let mut merges = vec![];
        for (index, text) in self.merged.iter().enumerate() {
            vocab.insert(spelled(text), 256 + index);
            merges.push([spelled(&text[..1]), spelled(&text[1..])]);
        }
        let first = 256 + self.merged.len();
        let added = self.added.iter().enumerate().map(|(index, token)| {
            json!({
                "id": first + index, "content": tokens[first + index], "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": !token.starts_with('+'),
            })
        });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": null, "post_processor": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges,
            },
        })
    }

    /// The safetensors file.
    fn weights(&self, tokens: &[String], hidden: usize, eos: usize) -> Vec<u8> {
        let id = |text: &str| {
            tokens.iter().rposition(|token| token == text).unwrap_or_else(|| panic!("no token {text:?}"))
        };
        let one_hot = |at: &dyn Fn(usize) -> Vec<usize>| {
            let mut values = vec![0.0; tokens.len() * hidden];
            for row in 0..tokens.len() {
                at(row).into_iter().for_each(|column| values[row * hidden + column] = 8.0);
            }
            values
        };
        let mut next = vec![eos; tokens.len()];
        self.next.iter().for_each(|(token, follower)| next[id(token)] = id(follower));
        let embedding = one_hot(&|row| vec![row]);
        let head = one_hot(&|row| (0..tokens.len()).filter(|&token| next[token] == row).collect());
        let layer = |name: &str| format!("model.layers.0.{name}.weight");
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_string(), vec![tokens.len(), hidden], embedding),
            ("lm_head.weight".into(), vec![tokens.len(), hidden], head),
            ("model.norm.weight".into(), vec![hidden], vec![1.0; hidden]),
        ];
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            tensors.push((layer(norm), vec![hidden], vec![1.0; hidden]));
        }
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            let name = layer(&format!("self_attn.{projection}"));
            tensors.push((name, vec![hidden, hidden], vec![0.0; hidden * hidden]));
        }
        for (projection, shape) in
            [("gate_proj", [32, hidden]), ("up_proj", [32, hidden]), ("down_proj", [hidden, 32])]
        {
            tensors.push((layer(&format!("mlp.{projection}")), shape.into(), vec![0.0; 32 * hidden]));
        }
        let (mut header, mut data) = (BTreeMap::new(), vec![]);
        for (name, shape, values) in tensors {
            let start = data.len();
            values.iter().for_each(|value: &f32| data.extend(value.to_le_bytes()));
            header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]}));
        }
        let mut header = json!(header).to_string();
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    }
}
