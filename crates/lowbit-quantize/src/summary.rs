//! The result of quantising, for people.

use crate::tensor::Loss;
use lowbit_formats::Format;

/// The result of quantising.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Values in all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// The tensors by kind.
    pub kinds: Vec<KindSummary>,
    /// Tensors that got another format than was asked for, because its groups or blocks do not
    /// divide their rows.
    pub fallbacks: Vec<Fallback>,
    /// Settings and tensors of the source that the output does not have, a sentence each.
    pub warnings: Vec<String>,
}

/// The tensors of one kind.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KindSummary {
    /// The kind.
    pub kind: Kind,
    /// Their formats, and how many tensors have each.
    pub formats: Vec<(String, usize)>,
    /// The number of their values.
    pub parameters: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The sums of squares of the errors and of the values, over the encoded tensors.
    loss: Loss,
}

impl KindSummary {
    /// The number of tensors.
    pub fn tensors(&self) -> usize {
        self.formats.iter().map(|(_, count)| count).sum()
    }

    /// The RMS of the rounding error divided by the RMS of the values:
    /// `sqrt(sum (y - x)^2 / sum x^2)`, where y are the decoded values.
    pub fn relative_error(&self) -> f64 {
        if self.loss.errors == 0.0 { 0.0 } else { (self.loss.errors / self.loss.values).sqrt() }
    }
}

/// A tensor that got another format than was asked for.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Fallback {
    /// Its name.
    pub tensor: String,
    /// The length of its rows.
    pub k: usize,
    /// The format that was asked for.
    pub wanted: Format,
    /// The format that it got.
    pub taken: Format,
}

/// The part of a model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum Kind {
    Embedding,
    Attention,
    DeltaNet,
    ShortConv,
    Router,
    Experts,
    SharedExpert,
    Mlp,
    Norm,
    Output,
    Other,
}

/// Parts of names, MLX's and GGUF's; the first that is found says the kind.
const KINDS: [(&str, Kind); 53] = [
    ("norm", Kind::Norm),
    ("embed_tokens", Kind::Embedding),
    ("token_embd", Kind::Embedding),
    ("lm_head", Kind::Output),
    ("linear_attn.", Kind::DeltaNet),
    (".ssm_", Kind::DeltaNet),
    (".mamba.", Kind::DeltaNet),
    // Those of Kimi Delta Attention that attention does not have.
    ("_conv1d.", Kind::DeltaNet),
    ("_conv.conv.", Kind::DeltaNet),
    ("self_attn.f_a_proj", Kind::DeltaNet),
    ("self_attn.f_b_proj", Kind::DeltaNet),
    ("self_attn.g_a_proj", Kind::DeltaNet),
    ("self_attn.g_b_proj", Kind::DeltaNet),
    ("attention.f_proj", Kind::DeltaNet),
    (".b_proj", Kind::DeltaNet),
    (".A_log", Kind::DeltaNet),
    (".dt_bias", Kind::DeltaNet),
    ("word_embeddings", Kind::Embedding),
    (".attention.", Kind::Attention),
    (".attn_qkv.", Kind::DeltaNet),
    (".attn_gate.", Kind::DeltaNet),
    ("self_attn.", Kind::Attention),
    (".attn_", Kind::Attention),
    ("mixer.q_proj", Kind::Attention),
    ("mixer.k_proj", Kind::Attention),
    ("mixer.v_proj", Kind::Attention),
    ("mixer.o_proj", Kind::Attention),
    ("mixer.gate.", Kind::Router),
    ("mlp.gate.", Kind::Router),
    ("mlp.router.", Kind::Router),
    ("feed_forward.gate.", Kind::Router),
    ("feed_forward.expert_bias", Kind::Router),
    ("exp_probs_b", Kind::Router),
    ("block_sparse_moe.gate.", Kind::Router),
    ("block_sparse_moe.router.", Kind::Router),
    ("shared_expert_gate.", Kind::Router),
    ("ffn_gate_inp", Kind::Router),
    ("switch_mlp.", Kind::Experts),
    ("mlp.experts.", Kind::Experts),
    ("feed_forward.experts.", Kind::Experts),
    ("_exps.", Kind::Experts),
    ("shared_expert.", Kind::SharedExpert),
    ("shared_experts.", Kind::SharedExpert),
    ("shared_mlp.", Kind::SharedExpert),
    ("_shexp.", Kind::SharedExpert),
    ("mlp.", Kind::Mlp),
    ("mixer.up_proj", Kind::Mlp),
    ("mixer.down_proj", Kind::Mlp),
    ("feed_forward.", Kind::Mlp),
    ("shortconv.", Kind::ShortConv),
    (".conv.", Kind::ShortConv),
    ("ffn_", Kind::Mlp),
    // After `attn_output`.
    ("output.", Kind::Output),
];

impl Kind {
    /// The kind of a tensor by its name in MLX's checkpoints or in GGUF.
    pub fn of(tensor: &str) -> Self {
        KINDS.iter().find(|(part, _)| tensor.contains(part)).map_or(Self::Other, |(_, kind)| *kind)
    }

    /// The kind in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::DeltaNet => "recurrent layer",
            Self::ShortConv => "short convolution",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::SharedExpert => "shared expert",
            Self::Mlp => "MLP",
            Self::Norm => "norms",
            Self::Output => "output",
            Self::Other => "other",
        }
    }
}

impl Summary {
    /// Counts a tensor that was written.
    pub(crate) fn add(&mut self, tensor: &str, format: String, parameters: u64, bytes: u64, loss: Loss) {
        self.parameters += parameters;
        self.bytes += bytes;
        let kind = Kind::of(tensor);
        let index = self.kinds.binary_search_by_key(&kind, |summary| summary.kind).unwrap_or_else(|index| {
            let new = KindSummary { kind, formats: vec![], parameters: 0, bytes: 0, loss: Loss::default() };
            self.kinds.insert(index, new);
            index
        });
        let summary = &mut self.kinds[index];
        summary.parameters += parameters;
        summary.bytes += bytes;
        summary.loss += loss;
        match summary.formats.iter_mut().find(|(name, _)| *name == format) {
            Some((_, count)) => *count += 1,
            None => summary.formats.push((format, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_by_either_name() {
        for (kind, names) in [
            (Kind::Embedding, ["token_embd.weight", "model.embed_tokens.scales"]),
            (Kind::Attention, ["blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"]),
            (Kind::Attention, ["blk.3.attn_output.weight", "model.layers.3.self_attn.o_proj.weight"]),
            (Kind::DeltaNet, ["blk.0.attn_qkv.weight", "model.layers.0.linear_attn.in_proj_qkv.weight"]),
            (Kind::DeltaNet, ["blk.0.ssm_a", "model.layers.0.linear_attn.A_log"]),
            (Kind::DeltaNet, ["blk.0.ssm_in.weight", "model.layers.0.mamba.in_proj.weight"]),
            (Kind::DeltaNet, ["blk.0.ssm_f_a.weight", "model.layers.0.self_attn.f_a_proj.weight"]),
            (Kind::DeltaNet, ["blk.0.ssm_conv1d_q.weight", "model.layers.0.self_attn.q_conv.conv.weight"]),
            (Kind::Norm, ["blk.0.ssm_norm.weight", "model.layers.0.linear_attn.norm.weight"]),
            (Kind::Norm, ["blk.0.attn_k_norm.weight", "model.layers.0.input_layernorm.weight"]),
            (
                Kind::Router,
                ["blk.0.ffn_gate_inp_shexp.weight", "model.layers.0.mlp.shared_expert_gate.weight"],
            ),
            (Kind::Experts, ["blk.0.ffn_gate_exps.weight", "model.layers.0.mlp.switch_mlp.gate_proj.weight"]),
            (
                Kind::SharedExpert,
                ["blk.0.ffn_up_shexp.weight", "model.layers.0.mlp.shared_expert.up_proj.weight"],
            ),
            (Kind::Mlp, ["blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"]),
            (Kind::Output, ["output.weight", "lm_head.weight"]),
            (Kind::Other, ["rope_freqs.weight", "model.layers.0.else.weight"]),
        ] {
            for name in names {
                assert_eq!(Kind::of(name), kind, "{name}");
            }
        }
    }
}
