//! The order in which GGUF has the rows and columns of heads that MLX has in another one: said
//! once, for both ways.
//!
//! Source: llama.cpp (llama-cpp-python 0.3.36) `conversion/{llama,qwen}.py`.

use crate::QuantizeError;
use crate::tensor::Tensor;
use lowbit_kernels::ops::HeadMap;
use lowbit_models::Config;
use lowbit_models::arch::Architecture;
use lowbit_models::layers::DeltaNetConfig;
use lowbit_models::names::{
    A_LOG, CONV1D, DT_BIAS, IN_PROJ_A, IN_PROJ_B, IN_PROJ_QKV, IN_PROJ_Z, K_PROJ, Name, OUT_PROJ, Q_PROJ,
};

/// The sizes by which rows are reordered.
pub struct Heads {
    /// Query heads and key heads whose rows are permuted: Llama's, because GGUF rotates neighbours
    /// together.
    permuted: Option<[usize; 2]>,
    pub delta_net: Option<DeltaNet>,
}

/// The heads of gated delta nets.
#[derive(Clone, Copy)]
pub struct DeltaNet {
    key_heads: usize,
    /// Value heads per key head.
    ratio: usize,
    key_dim: usize,
    value_dim: usize,
    /// True if GGUF has value heads in another order: those of one key head are not neighbours, but
    /// `key_heads` apart.
    tiled: bool,
}

/// For each row or column in GGUF, which one it is in MLX's layout.
pub enum Order {
    Rows(Vec<usize>),
    Columns(Vec<usize>),
}

/// The heads do not make up a tensor's rows.
pub struct Unfit;

/// The text of [`Unfit`] in messages.
pub const UNFIT: &str = "the configuration's heads do not make up its rows";

impl Heads {
    /// # Errors
    /// [`QuantizeError::Model`] for sizes that are missing or do not go together.
    pub fn new(config: &Config<'_>, architecture: &Architecture) -> Result<Self, QuantizeError> {
        let permuted = match architecture.conversion.like_llama {
            true => {
                let heads = config.size("num_attention_heads", "attention.head_count")?;
                Some([heads, config.key_heads()?.unwrap_or(heads)])
            }
            false => None,
        };
        let delta_net = match architecture.gguf_name(A_LOG.0).is_some() {
            true => Some(DeltaNet::new(config, architecture)?),
            false => None,
        };
        Ok(Self { permuted, delta_net })
    }

    /// The order of the tensor that MLX calls `name` in its layer, of `n` rows (or values) and rows
    /// of `k` values; `None` where both have the same.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn order(&self, name: &str, n: usize, k: usize) -> Result<Option<Order>, Unfit> {
        let module = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")).unwrap_or(name);
        let is = |other: Name<'_>| other.0 == module || other.0 == name;
        if let Some(heads) = self.permuted {
            let heads = [(Q_PROJ, heads[0]), (K_PROJ, heads[1])].into_iter().find(|(name, _)| is(*name));
            return heads.map(|(_, heads)| interleaved_halves(n, heads).map(Order::Rows)).transpose();
        }
        let Some(delta_net) = self.delta_net.filter(|delta_net| delta_net.tiled) else { return Ok(None) };
        let dim = delta_net.value_dim;
        Ok(Some(match () {
            () if is(IN_PROJ_QKV) || is(CONV1D) => {
                let keys = 2 * delta_net.key_heads * delta_net.key_dim;
                let values = delta_net.tiled_values(n.checked_sub(keys).ok_or(Unfit)?, dim)?;
                Order::Rows((0..keys).chain(values.into_iter().map(|value| keys + value)).collect())
            }
            () if is(IN_PROJ_Z) => Order::Rows(delta_net.tiled_values(n, dim)?),
            () if is(IN_PROJ_A) || is(IN_PROJ_B) || is(A_LOG) || is(DT_BIAS) => {
                Order::Rows(delta_net.tiled_values(n, 1)?)
            }
            () if is(OUT_PROJ) => Order::Columns(delta_net.tiled_values(k, dim)?),
            () => return Ok(None),
        }))
    }
}

/// Of `heads` heads, of each the rows of its first and its second half in turn.
fn interleaved_halves(rows: usize, heads: usize) -> Result<Vec<usize>, Unfit> {
    let dim = rows.checked_div(heads).filter(|dim| dim * heads == rows && dim.is_multiple_of(2));
    let dim = dim.ok_or(Unfit)?;
    let of = |head: usize| (0..dim).map(move |i| head * dim + i % 2 * (dim / 2) + i / 2);
    Ok((0..heads).flat_map(of).collect())
}

impl DeltaNet {
    fn new(config: &Config<'_>, architecture: &Architecture) -> Result<Self, QuantizeError> {
        let sizes = DeltaNetConfig::new(config, HeadMap::Grouped)?;
        let (key_heads, value_heads) = (sizes.linear_num_key_heads, sizes.linear_num_value_heads);
        let (key_dim, value_dim) = (sizes.linear_key_head_dim, sizes.linear_value_head_dim);
        let ratio = value_heads / key_heads;
        let rows = key_dim.checked_add(ratio.saturating_mul(value_dim));
        if rows.and_then(|rows| rows.checked_mul(2)?.checked_mul(key_heads)).is_none() {
            let got = format!("{value_dim} * {value_heads} heads");
            return Err(config
                .refuse("linear_value_head_dim", &got, "that is more than memory can hold")
                .into());
        }
        let tiled = architecture.conversion.tiled_value_heads && ratio > 1;
        Ok(Self { key_heads, ratio, key_dim, value_dim, tiled })
    }

    /// The `rows` rows of all value heads, of `dim` each, in GGUF's order: new head
    /// `j * key_heads + k` is old head `k * ratio + j`.
    fn tiled_values(&self, rows: usize, dim: usize) -> Result<Vec<usize>, Unfit> {
        if self.ratio * self.key_heads * dim != rows {
            return Err(Unfit);
        }
        let heads = (0..self.ratio).flat_map(|j| (0..self.key_heads).map(move |k| k * self.ratio + j));
        Ok(heads.flat_map(|head| head * dim..(head + 1) * dim).collect())
    }

    /// The rows of q, k and v, and those of z, in `in_proj_qkvz` of `rows` rows, which has them one
    /// key head after another.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn split_qkvz(&self, rows: usize) -> Result<[Vec<usize>; 2], Unfit> {
        let values = self.ratio * self.value_dim;
        let widths = [self.key_dim, self.key_dim, values, values];
        let head: usize = widths.iter().sum();
        if head * self.key_heads != rows {
            return Err(Unfit);
        }
        let part = |part: usize| {
            let start: usize = widths[..part].iter().sum();
            let of = move |k: usize| k * head + start..k * head + start + widths[part];
            (0..self.key_heads).flat_map(of).collect::<Vec<_>>()
        };
        Ok([[part(0), part(1), part(2)].concat(), part(3)])
    }
}

impl Order {
    /// For each row or column in MLX's layout, which one it is in GGUF.
    #[must_use]
    pub fn inverse(self) -> Self {
        let inverse = |order: Vec<usize>| {
            let mut places = vec![0; order.len()];
            order.into_iter().enumerate().for_each(|(to, from)| places[from] = to);
            places
        };
        match self {
            Self::Rows(rows) => Self::Rows(inverse(rows)),
            Self::Columns(columns) => Self::Columns(inverse(columns)),
        }
    }

    /// Reorders a matrix or a vector, whose rows are its values.
    ///
    /// # Errors
    /// [`Unfit`].
    pub fn apply(self, tensor: &mut Tensor) -> Result<(), Unfit> {
        match (self, &tensor.shape[..]) {
            (Self::Rows(rows), &[n, _]) if rows.len() == n => tensor.change.rows = Some(rows),
            (Self::Rows(values), &[n]) if values.len() == n => tensor.change.columns = Some(values),
            (Self::Columns(columns), &[_, k]) if columns.len() == k => tensor.change.columns = Some(columns),
            _ => return Err(Unfit),
        }
        Ok(())
    }
}
