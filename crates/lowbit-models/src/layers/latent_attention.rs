use super::{Linear, MergedLinear, PartInput, RmsNorm, Step, latent_scale, rope_params, wrong_cache};
use crate::cache::{KvCache, LayerCache};
use crate::names::{
    EMBED_Q, KV_A_NORM, KV_A_PROJ, KV_B_PROJ, Name, O_PROJ, Q_A_NORM, Q_A_PROJ, Q_B_PROJ, Q_PROJ, UNEMBED_OUT,
};
use crate::outline::FREQUENCIES;
use crate::tape::ops;
use crate::tape::{Inventory, Named, Var, latent_attention, latent_attention_in_pool, shapes};
use crate::{Config, ModelError, Outline, Weights};
use lowbit_formats::{DType, FloatType, Format};
use lowbit_kernels::ops::{CacheType, Gate, LatentAttentionParams, Rope, RopeLayout, dequant_gather};
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use std::sync::Arc;

/// An architecture's layers of multi-head latent attention, as `config.json` names its sizes.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct LatentAttentionConfig {
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    /// None where queries are not compressed.
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    /// The factor of scores.
    pub scale: f32,
    /// None where nothing is rotated.
    pub rope: Option<Arc<Rope>>,
    /// The eps of the norms of compressed queries and of latents.
    pub norm_eps: f32,
    /// The projection of a gate for each head, whose sigmoid its result is multiplied by, if there
    /// is one.
    pub gate: Option<Name<'static>>,
    /// The projection of the heads' results.
    pub o_proj: Name<'static>,
}

impl LatentAttentionConfig {
    /// Reads the sizes. Pairs of the rotary embedding are neighbours, unless `rope_interleave` is
    /// false.
    ///
    /// # Errors
    /// As [`Config::size`] and [`rope_params`]; [`ModelError::Config`] for fewer key heads than
    /// query heads, and in GGUF for sizes that do not go together.
    pub fn new(config: &Config<'_>, weights: &Weights<'_>, hidden_size: usize) -> Result<Self, ModelError> {
        let plain = Self::without_positions(config, weights, hidden_size)?;
        let rotated = plain.qk_rope_head_dim;
        let interleaved = !config.computes("rope_interleave") || config.is_mlx() || config.is_gguf();
        let layout = match interleaved || config.flag("rope_interleave", true)? {
            true => RopeLayout::Interleaved,
            false => RopeLayout::HalfSplit,
        };
        let rope = rope_params(config, weights, rotated, layout)?;
        let scale = latent_scale(config, &rope, plain.qk_nope_head_dim + rotated)?;
        Ok(Self { scale, rope: Some(Arc::new(Rope::new(&rope)?)), ..plain })
    }

    /// As [`Self::new`], where the part of keys that others rotate is taken as it is.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn without_positions(
        config: &Config<'_>,
        weights: &Weights<'_>,
        hidden_size: usize,
    ) -> Result<Self, ModelError> {
        let heads = config.size("num_attention_heads", "attention.head_count")?;
        let kv_lora_rank = config.size("kv_lora_rank", "attention.kv_lora_rank")?;
        let rotated = config.size("qk_rope_head_dim", "rope.dimension_count")?;
        let (plain, values) = match config.is_gguf() {
            true => gguf_widths(config, rotated)?,
            false => (config.size("qk_nope_head_dim", "")?, config.size("v_head_dim", "")?),
        };
        // Sums and tables are made of them before the projections are asked for.
        for (key, size) in [
            ("kv_lora_rank", kv_lora_rank),
            ("qk_rope_head_dim", rotated),
            ("qk_nope_head_dim", plain),
            ("v_head_dim", values),
        ] {
            weights.check_size(key, size)?;
        }
        check_key_heads(config, heads)?;
        let eps = config.norm_eps()?;
        let latents = config.found().and_then(|architecture| architecture.conversion.latents);
        Ok(Self {
            hidden_size,
            num_attention_heads: heads,
            q_lora_rank: config.optional_size("q_lora_rank", "attention.q_lora_rank")?,
            kv_lora_rank,
            qk_nope_head_dim: plain,
            qk_rope_head_dim: rotated,
            v_head_dim: values,
            scale: (1.0 / ((plain + rotated) as f64).sqrt()) as f32,
            rope: None,
            norm_eps: latents.map_or(eps, |latents| latents.norm_eps(weights.layout(), eps)),
            gate: None,
            o_proj: O_PROJ,
        })
    }

    /// Elements of a cached token.
    pub fn width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

/// The widths of a head's keys that are not rotated and of its values, in GGUF: files from before
/// the keys for latent attention have them as those of any attention.
fn gguf_widths(config: &Config<'_>, rotated: usize) -> Result<(usize, usize), ModelError> {
    let (key, keys) = match config.optional_size("", "attention.key_length_mla")? {
        Some(keys) => ("attention.key_length_mla", keys),
        None => ("attention.key_length", config.size("", "attention.key_length")?),
    };
    let values = match config.optional_size("", "attention.value_length_mla")? {
        Some(values) => values,
        None => config.size("", "attention.value_length")?,
    };
    match keys.checked_sub(rotated).filter(|&plain| plain > 0 && values > 0) {
        Some(plain) => Ok((plain, values)),
        None => {
            let want = format!("{rotated} elements of a key are rotated, and some are not");
            Err(config.refuse(key, &keys.to_string(), &want))
        }
    }
}

/// Every query head has a key of its own, which GGUF counts as one head that all share.
fn check_key_heads(config: &Config<'_>, heads: usize) -> Result<(), ModelError> {
    if config.is_mlx() {
        return Ok(());
    }
    match config.key_heads()? {
        Some(keys) if keys != heads && !(config.is_gguf() && keys == 1) => {
            let want = format!("each of the {heads} query heads has a key head");
            Err(config.refuse("num_key_value_heads", &keys.to_string(), &want))
        }
        _ => Ok(()),
    }
}

/// Multi-head latent attention in its absorbed form: keys and values of all heads are projections
/// of one latent per token, and these are applied to queries and results instead.
#[derive(Clone, Debug)]
pub struct LatentAttention {
    config: LatentAttentionConfig,
    /// Queries, or compressed ones; latents, and the part of keys that is rotated.
    input_proj: MergedLinear<2>,
    /// The norm of compressed queries, and the projection to queries.
    q_b: Option<(RmsNorm, Linear)>,
    kv_norm: RmsNorm,
    /// `[heads, kv_lora_rank, qk_nope_head_dim]`.
    embed_q: Named<QuantizedTensor>,
    /// `[heads, v_head_dim, kv_lora_rank]`.
    unembed_out: Named<QuantizedTensor>,
    /// True if the two are parts of one weight of the checkpoint.
    made: bool,
    gate: Option<Linear>,
    o_proj: Linear,
    /// u32 `[MOST_ROWS, heads]`: the number of each head, for as many tokens.
    heads: Tensor,
    exact: bool,
}

/// Rows of a pass that a captured one may have.
const MOST_ROWS: usize = 256;

impl LatentAttention {
    /// A layer's projections and norms.
    ///
    /// # Errors
    /// As [`Weights::linear`].
    pub fn load(weights: &Weights<'_>, config: &LatentAttentionConfig) -> Result<Self, ModelError> {
        if weights.cache() == CacheType::Int8 {
            let want = "latents take f32, f16 and bf16".into();
            let (op, operand) = ("latent_attention", "the type of cache");
            return Err(KernelError::Value { op, operand, got: CacheType::Int8.name().into(), want }.into());
        }
        let LatentAttentionConfig { hidden_size: hidden, num_attention_heads: heads, .. } = *config;
        let (rank, v_dim) = (config.kv_lora_rank, config.v_head_dim);
        let key = config.qk_nope_head_dim + config.qk_rope_head_dim;
        let queries = weights.product(["num_attention_heads", "qk_head_dim"], [heads, key])?;
        let values = weights.product(["num_attention_heads", "v_head_dim"], [heads, v_dim])?;
        let norm = |name, len| RmsNorm::load(weights, name, len, config.norm_eps);
        let latents = (KV_A_PROJ, config.width());
        let (input_proj, q_b) = match config.q_lora_rank {
            None => (weights.merged([(Q_PROJ, queries), latents], hidden)?, None),
            Some(compressed) => (
                weights.merged([(Q_A_PROJ, compressed), latents], hidden)?,
                Some((norm(Q_A_NORM, compressed)?, weights.linear(Q_B_PROJ, queries, compressed)?)),
            ),
        };
        let made = !weights.has_module(EMBED_Q);
        let [embed_q, unembed_out] = match made {
            true => of_one(weights, config)?,
            false => [
                weights.matrix(EMBED_Q, &[heads, rank, config.qk_nope_head_dim])?,
                weights.matrix(UNEMBED_OUT, &[heads, v_dim, rank])?,
            ],
        };
        Ok(Self {
            input_proj,
            q_b,
            kv_norm: norm(KV_A_NORM, rank)?,
            embed_q,
            unembed_out,
            made,
            gate: config.gate.map(|name| weights.linear(name, heads, hidden)).transpose()?,
            o_proj: weights.linear(config.o_proj, hidden, values)?,
            heads: head_numbers(MOST_ROWS, heads, weights.device())?,
            exact: weights.is_exact(),
            config: config.clone(),
        })
    }

    /// An empty cache for this layer.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, dtype: DType, device: &Device) -> Result<KvCache, KernelError> {
        KvCache::of_latents(self.config.width(), dtype, device)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.input_proj.list(all);
        if let Some((norm, proj)) = &self.q_b {
            norm.list(all);
            proj.list(all);
        }
        self.kv_norm.list(all);
        if !self.made {
            all.weights.extend([self.embed_q.clone(), self.unembed_out.clone()]);
        }
        self.gate.iter().for_each(|gate| gate.list(all));
        self.o_proj.list(all);
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        let LatentAttentionConfig { num_attention_heads, q_lora_rank, kv_lora_rank, .. } = self.config;
        outline.word("mixer", "latent attention");
        outline.word("num_attention_heads", num_attention_heads);
        outline.word("q_lora_rank", q_lora_rank.map_or("none".into(), |rank| rank.to_string()));
        outline.word("kv_lora_rank", kv_lora_rank);
        outline.word("qk_nope_head_dim", self.config.qk_nope_head_dim);
        outline.word("qk_rope_head_dim", self.config.qk_rope_head_dim);
        outline.word("v_head_dim", self.config.v_head_dim);
        outline.word("heads have gates", self.gate.is_some());
        if let Some(rope) = &self.config.rope {
            outline.word("rotated pairs", format!("{:?}", rope.layout()));
            outline.numbers(FREQUENCIES, rope.inv_freq());
            outline.numbers("rotary attention factor", &[rope.attention_factor()]);
        }
        outline.numbers("attention scale", &[self.config.scale]);
    }

    /// The attention of T tokens, whose input is a sum or the norm of one, `[T, hidden_size]`.
    /// Returns that sum and the result, of the same shape. Latents are appended to each sequence's
    /// cache.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache of another kind of layer.
    pub fn forward(
        &self,
        x: PartInput<'_>,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<(Var, Var), KernelError> {
        let LatentAttentionConfig { num_attention_heads: heads, kv_lora_rank: rank, .. } = self.config;
        let (plain, rotated) = (self.config.qk_nope_head_dim, self.config.qk_rope_head_dim);
        let tokens = x.update().dim(0);
        let (sum, [q, latents], gate) = match &self.gate {
            None => {
                let (sum, parts) = self.input_proj.forward_sum(x)?;
                (sum, parts, None)
            }
            Some(gate) => {
                let (sum, x) = x.make()?;
                (sum, self.input_proj.forward(&x)?, Some(gate.forward(&x)?))
            }
        };
        let q = match &self.q_b {
            None => q,
            Some((norm, proj)) => proj.forward(&norm.forward(&q)?)?,
        };
        let q = shapes::reshape(&q, &[tokens * heads, plain + rotated])?;
        let [q_plain, q_rotated] = shapes::split_columns(&q, [plain, rotated])?;
        let [latents, k_rotated] = shapes::split_columns(&latents, [rank, rotated])?;
        let latents = shapes::reshape(&self.kv_norm.forward(&latents)?, &[tokens, 1, rank])?;
        let ids = match tokens <= MOST_ROWS {
            true => self.heads.rows(0, tokens)?,
            false => head_numbers(tokens, heads, q.tensor().device())?,
        };
        let q_plain = shapes::reshape(&q_plain, &[tokens, heads, plain])?;
        let q_plain = ops::gather_qmm((&q_plain).into(), &self.embed_q, &ids)?;
        let q_rotated = shapes::reshape(&q_rotated, &[tokens, heads, rotated])?;
        let k_rotated = shapes::reshape(&k_rotated, &[tokens, 1, rotated])?;
        let params = LatentAttentionParams { rank, scale: self.config.scale, exact: self.exact };
        let xs = [&q_plain, &q_rotated, &latents, &k_rotated];
        let y = match (&step.pool, &mut *caches) {
            (Some(rows), [LayerCache::Attention(cache)]) => {
                let [q, new] = self.rotated(xs, &rows.positions)?;
                latent_attention_in_pool(cache, [&q, &new], rows, &params)?
            }
            (Some(_), _) => return Err(wrong_cache()),
            (None, _) => step.each(xs, caches, |xs, span, cache| match cache {
                LayerCache::Attention(cache) => {
                    let [q, new] = self.rotated(xs, &span.positions)?;
                    latent_attention(cache, [&q, &new], &span.positions, &params)
                }
                LayerCache::DeltaNet(_) => Err(wrong_cache()),
            })?,
        };
        let mut y = ops::gather_qmm((&y).into(), &self.unembed_out, &ids)?;
        if let Some(gate) = gate {
            y = ops::glu(&y, &shapes::reshape(&gate, &[tokens, heads, 1])?, Gate::Sigmoid)?;
        }
        let y = shapes::reshape(&y, &[tokens, heads * self.config.v_head_dim])?;
        Ok((sum, self.o_proj.forward(&y)?))
    }

    /// Queries and latents with their rotated parts behind them.
    fn rotated(
        &self,
        [q_plain, q_rotated, latents, k_rotated]: [&Var; 4],
        positions: &Tensor,
    ) -> Result<[Var; 2], KernelError> {
        let rope = |x: &Var| match &self.config.rope {
            Some(rope) => ops::rope(x, positions, rope),
            None => Ok(x.clone()),
        };
        Ok([shapes::concat([q_plain, &rope(q_rotated)?])?, shapes::concat([latents, &rope(k_rotated)?])?])
    }
}

/// The heads' numbers, for each of `tokens` tokens.
fn head_numbers(tokens: usize, heads: usize, device: &Device) -> Result<Tensor, KernelError> {
    let numbers: Vec<u32> = (0..tokens).flat_map(|_| 0..heads as u32).collect();
    Tensor::new(&numbers, &[tokens, heads], device)
}

/// The projections per head from one weight that has a head's keys before its values: a quantised
/// one is decoded, since its rows are the other's columns.
fn of_one(
    weights: &Weights<'_>,
    config: &LatentAttentionConfig,
) -> Result<[Named<QuantizedTensor>; 2], ModelError> {
    let LatentAttentionConfig { num_attention_heads: heads, kv_lora_rank: rank, .. } = *config;
    let (plain, values) = (config.qk_nope_head_dim, config.v_head_dim);
    let rows =
        weights.product(["num_attention_heads", "qk_nope_head_dim + v_head_dim"], [heads, plain + values])?;
    let (activations, looks_only) = (weights.activations(), weights.looks_only());
    weights.parts(KV_B_PROJ, &[rows, rank], [EMBED_Q, UNEMBED_OUT], |weight| {
        let float = match weight.format() {
            Format::Float(float) => float,
            _ => activations,
        };
        let shapes = [[heads, rank, plain], [heads, values, rank]];
        let tensors = match looks_only {
            true => shapes.map(|shape| Tensor::allocate_zeros(&shape, float.dtype(), weight.device())),
            false => {
                let part = |rows| of_heads(weight, [heads, plain + values], rows, float);
                [part(0..plain).and_then(|keys| transposed(&keys)), part(plain..plain + values)]
            }
        };
        let tensors = shapes::each(tensors)?;
        let made = shapes.iter().zip(tensors);
        made.map(|(shape, x)| QuantizedTensor::new(Format::Float(float), shape, vec![x])).collect()
    })
}

/// Some rows of each of `heads` heads of a weight, `[heads, rows, K]`.
fn of_heads(
    weight: &QuantizedTensor,
    [heads, rows]: [usize; 2],
    part: std::ops::Range<usize>,
    float: FloatType,
) -> Result<Tensor, KernelError> {
    let ids: Vec<u32> =
        (0..heads).flat_map(|head| part.clone().map(move |row| (head * rows + row) as u32)).collect();
    dequant_gather(weight, &Tensor::new(&ids, &[heads, part.len()], weight.device())?, float)
}

/// `[H, N, K]` as `[H, K, N]`, on the host.
fn transposed(x: &Tensor) -> Result<Tensor, KernelError> {
    let [heads, n, k] = [0, 1, 2].map(|i| x.dim(i));
    let mut y = Tensor::allocate_zeros(&[heads, k, n], x.dtype(), x.device())?;
    match x.dtype().size() {
        2 => turn(x.bytes().as_chunks::<2>().0, y.bytes_mut().as_chunks_mut::<2>().0, [n, k]),
        _ => turn(x.bytes().as_chunks::<4>().0, y.bytes_mut().as_chunks_mut::<4>().0, [n, k]),
    }
    Ok(y)
}

/// Matrices `[n, k]` one after the other, each to `[k, n]`.
fn turn<T: Copy>(x: &[T], y: &mut [T], [n, k]: [usize; 2]) {
    for (x, y) in x.chunks_exact(n * k).zip(y.chunks_exact_mut(n * k)) {
        for (i, row) in x.chunks_exact(k).enumerate() {
            row.iter().enumerate().for_each(|(j, &value)| y[j * n + i] = value);
        }
    }
}
