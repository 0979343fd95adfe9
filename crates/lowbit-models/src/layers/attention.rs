use super::{Linear, MergedLinear, PartInput, RmsNorm, Step, rope_params, wrong_cache};
use crate::cache::{KvCache, LayerCache};
use crate::names::{FUSED_QKV, K_NORM, K_PROJ, O_PROJ, Q_NORM, Q_PROJ, SINKS, V_PROJ};
use crate::outline::FREQUENCIES;
use crate::tape::ops::{self, Input};
use crate::tape::{
    Heads, Inventory, Named, Var, attention, attention_in_pool, attention_to_cached, attention_to_pool,
    shapes,
};
use crate::{Config, ModelError, Outline, Weights};
use lowbit_kernels::ops::{
    AttentionParams, CacheType, Gate, Rope, RopeLayout, RopeParams, RopeScaling, kv_gather,
};
use lowbit_kernels::{Device, KernelError, Tensor};
use std::sync::Arc;

/// An architecture's attention layers.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct AttentionConfig {
    pub hidden_size: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// The factor of scores.
    pub scale: f32,
    /// True if there is no projection of values: those of keys are values, too, before their norm.
    pub keys_are_values: bool,
    /// The earlier layer whose keys and values are this one's, if there is one: it has no
    /// projections of them.
    pub kv_of: Option<usize>,
    /// True if each head of the values is divided by its own size, as [`Self::head_norm`] says,
    /// without a weight.
    pub value_norm: bool,
    pub rope: Arc<Rope>,
    pub sliding_window: Option<usize>,
    /// Keys after its own that a query sees at most: 0 in causal attention.
    pub look_ahead: usize,
    /// The bound that scores are bent towards, if there is one.
    pub softcap: Option<f32>,
    /// The eps of RMSNorms of queries and keys, where there are some.
    pub head_norm: Option<f32>,
    /// The heads that such norms are of.
    pub norms_of: HeadNorms,
    /// True if the query projection also gives each head's output gate, `[query | gate]` per head.
    pub gated: bool,
    /// True if the checkpoint has q's rows, k's and v's in one matrix.
    pub fused: bool,
    /// The factor of queries by position, if there is one.
    pub query_scale: Option<QueryScale>,
    /// True if each query head has a sink: a learned logit that is one more term of its softmax's
    /// denominator.
    pub sinks: bool,
}

/// The values that an RMSNorm of queries or keys divides by their own size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNorms {
    /// Each head before it is rotated.
    Heads,
    /// All heads of a token together before they are rotated.
    AllHeads,
    /// Each head after it was rotated.
    RotatedHeads,
}

/// Queries at position p are multiplied by `1 + beta ln(1 + floor(p / original))`, so that
/// attention stays as sharp over more tokens than the original training had.
///
/// Source: transformers 5.24 `get_llama_4_attn_scale`; llama.cpp's `f_attn_temp_scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// The slope.
    pub beta: f32,
    /// The context of the original training.
    pub original: usize,
    /// The longest sequence.
    pub positions: usize,
}

impl QueryScale {
    /// The factor of each position, f32 `[1, positions, 1]`; `None` where all are 1.
    fn table(&self, device: &Device) -> Result<Option<Tensor>, KernelError> {
        if self.positions <= self.original {
            return Ok(None);
        }
        let factor = |position: usize| 1.0 + self.beta * (1.0 + (position / self.original) as f32).ln();
        let factors: Vec<f32> = (0..self.positions).map(factor).collect();
        Tensor::new(&factors, &[1, self.positions, 1], device).map(Some)
    }
}

impl AttentionConfig {
    /// Plain attention: full, without norms of the heads, not gated. Reads the sizes, which have
    /// the same keys in all architectures.
    ///
    /// # Errors
    /// As [`Config::size`] and [`rope_params`]; [`ModelError::Config`] when query heads are no
    /// multiple of key heads.
    pub fn new(
        config: &Config<'_>,
        weights: &Weights<'_>,
        hidden_size: usize,
        layout: RopeLayout,
    ) -> Result<Self, ModelError> {
        let rope = |head_dim| rope_params(config, weights, head_dim, layout);
        Self::with_rope(config, weights, hidden_size, rope)
    }

    /// As [`Self::new`], with the rotary embedding that `rope` gives for heads of so many elements.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_rope(
        config: &Config<'_>,
        weights: &Weights<'_>,
        hidden_size: usize,
        rope: impl FnOnce(usize) -> Result<RopeParams, ModelError>,
    ) -> Result<Self, ModelError> {
        let heads = config.size("num_attention_heads", "attention.head_count")?;
        let kv_heads = config.key_heads()?.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let want = format!("the {heads} query heads are no multiple of it");
            return Err(config.refuse("num_key_value_heads", &kv_heads.to_string(), &want));
        }
        let head_dim =
            config.optional_size("head_dim", "attention.key_length")?.unwrap_or(hidden_size / heads);
        // The rotary embedding's table is made before the projections are asked for.
        weights.check_size(if config.is_gguf() { "attention.key_length" } else { "head_dim" }, head_dim)?;
        if config.is_gguf() {
            let value_length = config.optional_size("", "attention.value_length")?;
            if let Some(other) = value_length.filter(|&length| length != head_dim) {
                let want = format!("attention.key_length is {head_dim}");
                return Err(config.refuse("attention.value_length", &other.to_string(), &want));
            }
        }
        let rope = Arc::new(Rope::new(&rope(head_dim)?)?);
        Ok(Self::plain(hidden_size, [heads, kv_heads, head_dim], rope))
    }

    /// Plain attention of so many query heads and key heads, of so many elements each.
    pub fn plain(hidden_size: usize, [heads, kv_heads, head_dim]: [usize; 3], rope: Arc<Rope>) -> Self {
        Self {
            hidden_size,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            keys_are_values: false,
            value_norm: false,
            kv_of: None,
            rope,
            sliding_window: None,
            look_ahead: 0,
            softcap: None,
            head_norm: None,
            norms_of: HeadNorms::Heads,
            gated: false,
            fused: false,
            query_scale: None,
            sinks: false,
        }
    }

    /// True if queries and keys have positions.
    pub fn rotates(&self) -> bool {
        self.rope.inv_freq().iter().any(|&frequency| frequency != 0.0)
    }

    /// The same, whose queries and keys have no positions.
    ///
    /// # Errors
    /// As [`Rope::new`].
    pub fn without_rope(&self) -> Result<Self, ModelError> {
        let rotary_dim = self.rope.rotary_dim();
        let params = RopeParams {
            theta: 1.0,
            rotary_dim,
            layout: self.rope.layout(),
            scaling: RopeScaling::None,
            // Angles of zero.
            freq_factors: Some(vec![f32::INFINITY; rotary_dim / 2]),
        };
        Ok(Self { rope: Arc::new(Rope::new(&params)?), ..self.clone() })
    }
}

/// Grouped-query attention with rotary positions.
#[derive(Clone, Debug)]
pub struct Attention {
    config: AttentionConfig,
    qkv_proj: Projections,
    o_proj: Linear,
    /// Of queries and keys.
    norms: Option<[RmsNorm; 2]>,
    /// Of values, whose weight is 1.
    value_norm: Option<RmsNorm>,
    /// The rotary embedding that leaves heads as they are, if their norms follow the rotation.
    still: Option<Arc<Rope>>,
    /// [`QueryScale::table`].
    query_scales: Option<Tensor>,
    /// f32 `[num_attention_heads]`.
    sinks: Option<Named<Tensor>>,
    /// [`AttentionParams::exact`].
    exact: bool,
}

/// The projections of a layer's input.
#[derive(Clone, Debug)]
enum Projections {
    /// To queries, keys and values.
    Qkv(MergedLinear<3>),
    /// To queries, and to what is keys and values.
    Qk(MergedLinear<2>),
    /// To queries alone.
    Q(MergedLinear<1>),
}

impl Projections {
    fn list(&self, all: &mut Inventory) {
        match self {
            Self::Qkv(all_three) => all_three.list(all),
            Self::Qk(both) => both.list(all),
            Self::Q(queries) => queries.list(all),
        }
    }

    /// As [`MergedLinear::forward_sum`]: queries, and keys and values if there are some.
    fn forward_sum(&self, x: PartInput<'_>) -> Result<(Var, Var, Option<[Var; 2]>), KernelError> {
        match self {
            Self::Qkv(all) => {
                let (sum, [q, k, v]) = all.forward_sum(x)?;
                Ok((sum, q, Some([k, v])))
            }
            Self::Qk(both) => {
                let (sum, [q, k]) = both.forward_sum(x)?;
                Ok((sum, q, Some([k.clone(), k])))
            }
            Self::Q(queries) => {
                let (sum, [q]) = queries.forward_sum(x)?;
                Ok((sum, q, None))
            }
        }
    }
}

impl Attention {
    /// A layer's projections and norms.
    ///
    /// # Errors
    /// As [`Weights::linear`]; [`KernelError::Value`] for heads that the type of cache does not
    /// take.
    pub fn load(weights: &Weights<'_>, config: &AttentionConfig) -> Result<Self, ModelError> {
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        check_cache(weights.cache(), dim)?;
        let queries =
            weights.product(["num_attention_heads", "head_dim"], [config.num_attention_heads, dim])?;
        let keys = weights.product(["num_key_value_heads", "head_dim"], [config.num_key_value_heads, dim])?;
        let norms = match config.head_norm {
            None => None,
            Some(eps) => {
                let [of_q, of_k] = match config.norms_of {
                    HeadNorms::AllHeads => [queries, keys],
                    HeadNorms::Heads | HeadNorms::RotatedHeads => [dim; 2],
                };
                let norm = |name, len| RmsNorm::load(weights, name, len, eps);
                let of_queries = norm(Q_NORM, of_q)?;
                let of_keys = match config.kv_of {
                    None => norm(K_NORM, of_k)?,
                    Some(_) => of_queries.clone(),
                };
                Some([of_queries, of_keys])
            }
        };
        let still = match config.norms_of {
            HeadNorms::RotatedHeads => Some(config.without_rope()?.rope),
            HeadNorms::Heads | HeadNorms::AllHeads => None,
        };
        let rows = [if config.gated { 2 * queries } else { queries }, keys, keys];
        let qkv_proj = match (config.fused, config.keys_are_values) {
            _ if config.kv_of.is_some() => {
                // Published files have them, and nobody reads them.
                [K_PROJ, V_PROJ, K_NORM].into_iter().for_each(|name| weights.ignore(name));
                Projections::Q(weights.merged([(Q_PROJ, rows[0])], hidden)?)
            }
            (_, true) => Projections::Qk(weights.merged([(Q_PROJ, rows[0]), (K_PROJ, rows[1])], hidden)?),
            (true, false) => Projections::Qkv(weights.fused(FUSED_QKV, rows, hidden)?),
            (false, false) => {
                let parts = [(Q_PROJ, rows[0]), (K_PROJ, rows[1]), (V_PROJ, rows[2])];
                Projections::Qkv(weights.merged(parts, hidden)?)
            }
        };
        let value_norm = match config.head_norm.filter(|_| config.value_norm) {
            Some(eps) => {
                let ones = Tensor::new(&vec![1f32; dim], &[dim], weights.device())?;
                Some(RmsNorm::constant(ones, eps))
            }
            None => None,
        };
        let scale = config.query_scale.map(|scale| scale.table(weights.device()));
        let sinks = config.sinks.then(|| weights.vector(SINKS, config.num_attention_heads));
        Ok(Self {
            sinks: sinks.transpose()?,
            exact: weights.is_exact(),
            query_scales: scale.transpose()?.flatten(),
            qkv_proj,
            o_proj: weights.linear(O_PROJ, hidden, queries)?,
            norms,
            value_norm,
            still,
            config: config.clone(),
        })
    }

    /// [`AttentionConfig::kv_of`].
    pub(crate) fn kv_of(&self) -> Option<usize> {
        self.config.kv_of
    }

    /// The keys before a query that later tokens need: [`AttentionConfig::sliding_window`], but
    /// none where whole texts are computed at once, which have no cache.
    pub(crate) fn window(&self) -> Option<usize> {
        self.config.sliding_window.filter(|_| self.config.look_ahead == 0)
    }

    /// An empty cache for this layer.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left.
    pub fn cache(&self, cache: CacheType, device: &Device) -> Result<KvCache, KernelError> {
        KvCache::new(self.config.num_key_value_heads, self.config.head_dim, cache, device)
    }

    pub(crate) fn list(&self, all: &mut Inventory) {
        self.qkv_proj.list(all);
        let norms = if self.config.kv_of.is_some() { 1 } else { 2 };
        self.norms.iter().flatten().take(norms).for_each(|norm| norm.list(all));
        self.o_proj.list(all);
    }

    pub(crate) fn outline(&self, outline: &mut Outline) {
        let AttentionConfig { num_attention_heads, num_key_value_heads, head_dim, .. } = self.config;
        outline.word("mixer", "attention");
        outline.word("num_attention_heads", num_attention_heads);
        outline.word("num_key_value_heads", num_key_value_heads);
        outline.word("head_dim", head_dim);
        // A window as wide as the context is none.
        let context = outline.config().max_position_embeddings;
        let window = self.config.sliding_window.filter(|&window| window < context);
        outline.word("sliding_window", window.map_or("none".into(), |window| window.to_string()));
        outline.word("later tokens that are seen", self.config.look_ahead);
        outline.word("output gate", self.config.gated);
        outline.word("rotation", self.config.rotates());
        outline.numbers(FREQUENCIES, self.config.rope.inv_freq());
        if let Some(QueryScale { beta, original, .. }) = self.config.query_scale {
            outline.numbers("query scale", &[beta, original as f32]);
        }
        outline.numbers("rotary attention factor", &[self.config.rope.attention_factor()]);
        outline.numbers("attention scale", &[self.config.scale]);
        outline.numbers("softcap of scores", self.config.softcap.as_slice());
        outline.numbers("head norms' eps", self.config.head_norm.as_slice());
        if self.config.head_norm.is_some() {
            outline.word("head norms are of", format!("{:?}", self.config.norms_of));
        }
        outline.word("attention sinks", self.config.sinks);
        outline.word("keys are values", self.config.keys_are_values);
        outline.word("norm of values", self.value_norm.is_some());
        let layer = self.config.kv_of.map_or("its own".into(), |layer| format!("layer {layer}'s"));
        outline.word("keys and values", layer);
    }

    /// The attention of T tokens, whose input is a sum or the norm of one, `[T, hidden_size]`.
    /// Returns that sum and the result, of the same shape. Keys and values are appended to each
    /// sequence's cache.
    ///
    /// # Errors
    /// Those of the ops; [`wrong_cache`] for the cache of another kind of layer.
    pub fn forward(
        &self,
        x: PartInput<'_>,
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<(Var, Var), KernelError> {
        let AttentionConfig { num_attention_heads: heads, head_dim, .. } = self.config;
        let tokens = x.update().dim(0);
        let (sum, q, kv) = self.qkv_proj.forward_sum(x)?;
        let (y, q_gate) = match kv {
            Some(kv) => {
                let (q, kv) = self.normed(q, kv)?;
                // A gated layer has `[query | gate]` here.
                let q_gate = shapes::reshape(&q, &[tokens, heads, q.dim(1) / heads])?;
                (self.to_own(&q_gate, kv, step, caches)?, q_gate)
            }
            None => {
                let q_gate = shapes::reshape(&q, &[tokens, heads, q.dim(1) / heads])?;
                (self.to_others(&q_gate, step, caches)?, q_gate)
            }
        };
        let y = shapes::reshape(&y, &[tokens, y.dim(1) * head_dim])?;
        let y = if self.config.gated {
            self.o_proj.forward(Input::Glu { x: &y, gate: &q_gate, by: Gate::Sigmoid })?
        } else {
            self.o_proj.forward(&y)?
        };
        Ok((sum, y))
    }

    /// The steps of heads, besides what a pass has of its own.
    fn heads(&self) -> Heads<'_> {
        let AttentionConfig { head_dim, scale, sliding_window, look_ahead, softcap, .. } = self.config;
        let exact = self.exact;
        Heads {
            head_dim,
            norms: self.norms.as_ref().filter(|_| self.config.norms_of != HeadNorms::AllHeads),
            rope: self.still.as_ref().unwrap_or(&self.config.rope),
            sinks: self.sinks.as_ref().map(|sinks| &sinks.value),
            params: AttentionParams { scale, sliding_window, look_ahead, softcap, exact },
        }
    }

    /// The attention of queries `[T, H, ..]` to keys and values `[T, H * D]`, which are appended to
    /// the caches, and to those that the caches have.
    fn to_own(
        &self,
        q_gate: &Var,
        [k, v]: [Var; 2],
        step: &Step,
        caches: &mut [&mut LayerCache],
    ) -> Result<Var, KernelError> {
        let AttentionConfig { num_key_value_heads: kv_heads, head_dim, .. } = self.config;
        let [k, v] = [k, v].map(|x| shapes::reshape(&x, &[x.dim(0), kv_heads, head_dim]));
        let (k, v) = (k?, v?);
        let v = self.value_norm.as_ref().map_or(Ok(v.clone()), |norm| norm.forward(&v))?;
        let heads = self.heads();
        let k_of = |k: &Var, positions: &Tensor| self.rotated(k, positions);
        let q_of = |q: &Var, positions: &Tensor| match &self.query_scales {
            None => self.rotated(q, positions),
            Some(scales) => scaled(q, scales, positions),
        };
        match (&step.pool, &mut *caches) {
            (Some(rows), [LayerCache::Attention(cache)]) => {
                let (q, k) = (q_of(q_gate, &rows.positions)?, k_of(&k, &rows.positions)?);
                attention_in_pool(cache, [&q, &k, &v], rows, &heads)
            }
            (Some(_), _) => Err(wrong_cache()),
            (None, _) => step.each([q_gate, &k, &v], caches, |[q_gate, k, v], span, cache| match cache {
                LayerCache::Attention(cache) => {
                    let (q, k) = (q_of(q_gate, &span.positions)?, k_of(k, &span.positions)?);
                    attention(cache, [&q, &k, v], &span.positions, &heads)
                }
                LayerCache::DeltaNet(_) => Err(wrong_cache()),
            }),
        }
    }

    /// The attention of queries `[T, H, D]` to the keys and values of an earlier layer, whose
    /// caches have those of all these tokens.
    fn to_others(&self, q: &Var, step: &Step, caches: &mut [&mut LayerCache]) -> Result<Var, KernelError> {
        let heads = self.heads();
        match (&step.pool, &mut *caches) {
            (Some(rows), [LayerCache::Attention(cache)]) => attention_to_pool(cache, q, rows, &heads),
            (Some(_), _) => Err(wrong_cache()),
            (None, _) => step.each([q], caches, |[q], span, cache| match cache {
                LayerCache::Attention(cache) => attention_to_cached(cache, q, &span.positions, &heads),
                LayerCache::DeltaNet(_) => Err(wrong_cache()),
            }),
        }
    }

    /// Queries, keys and values, `[T, H * D]` each, the first two after the norms of all heads
    /// together, if those are theirs.
    fn normed(&self, q: Var, [k, v]: [Var; 2]) -> Result<(Var, [Var; 2]), KernelError> {
        match &self.norms {
            Some([of_q, of_k]) if self.config.norms_of == HeadNorms::AllHeads => {
                Ok((of_q.forward(&q)?, [of_k.forward(&k)?, v]))
            }
            _ => Ok((q, [k, v])),
        }
    }

    /// Heads `[T, H, D]`, rotated if their norms follow.
    fn rotated(&self, x: &Var, positions: &Tensor) -> Result<Var, KernelError> {
        match self.still {
            Some(_) => ops::rope(x, positions, &self.config.rope),
            None => Ok(x.clone()),
        }
    }
}

/// Refuses a type of cache that does not take heads of `width`.
fn check_cache(cache: CacheType, width: usize) -> Result<(), KernelError> {
    if cache.takes(width) {
        return Ok(());
    }
    let want = format!("heads of {width} take f32, f16 and bf16: 8 bits take multiples of 16 up to 512");
    Err(KernelError::Value { op: "attention", operand: "the type of cache", got: cache.name().into(), want })
}

/// Queries `[T, H, D]` times the factors of their positions.
fn scaled(q: &Var, scales: &Tensor, positions: &Tensor) -> Result<Var, KernelError> {
    let (tokens, heads, dim) = (q.dim(0), q.dim(1), q.dim(2));
    let factors = kv_gather(scales, positions)?.reshape(&[tokens, 1])?;
    let rows = shapes::reshape(q, &[tokens, 1, heads * dim])?;
    shapes::reshape(&ops::combine_experts(&rows, &factors.into())?, &[tokens, heads, dim])
}
