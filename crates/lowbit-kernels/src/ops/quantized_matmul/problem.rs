//! A product as the choice of its kernel sees it: sizes and types, nothing of a device or of memory.

use super::input::{AddRmsNorm, CHECK, Input};
use crate::gpu::layout::{Layout, RUN};
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;

/// Bytes that operands must be aligned to for kernels that load whole vectors, copy in bulk, or call the vendor BLAS.
pub(super) const ALIGNMENT: usize = 16;

/// `y[b, m, n] = sum over k of x[b, m, k] * weight[b, n, k]`, or a product with routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Rows of x per batch; 1 with `routing`.
    pub m: usize,
    /// Outputs: rows of a batch of the weight.
    pub n: usize,
    pub k: usize,
    /// Batches of the weight; with `routing` rows of y, each of which takes the batch that its id says.
    pub batches: usize,
    pub routing: Option<Routing>,
    pub layout: Layout,
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// What x is made of.
    pub source: Source,
    /// Whether x, or all that it is made of, lies in whole vectors that kernels can load.
    pub vectors: bool,
    /// Whether the weight's first component is aligned as the vendor BLAS wants it.
    pub aligned_weight: bool,
}

/// `y[p, t, n] = sum over k of x[t / share, k] * weight[p, ids[t], n, k]`: each of `pairs` pairs of a token and an expert is
/// a row of y, in each product p.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Routing {
    pub experts: usize,
    pub pairs: usize,
    /// Pairs that have the same row of x: all of a token's, or 1.
    pub share: usize,
}

impl Routing {
    /// Whether bringing the pairs of an expert together takes less than reading its weights again for each.
    pub fn has_many_pairs(self) -> bool {
        self.pairs >= 128
    }

    /// The most tiles of `rows` rows that the pairs take, sorted by expert: each expert that has pairs, and the ids that are no
    /// expert's, may leave a tile part empty.
    pub fn most_tiles(self, rows: usize) -> usize {
        self.pairs / rows + self.pairs.min(self.experts + 1)
    }

    /// How many such tiles there are likely to be.
    pub fn likely_tiles(self, rows: usize) -> usize {
        let mean = self.pairs.div_ceil(self.experts.max(1));
        // The last of an expert's tiles is half full.
        (self.experts * (2 * mean / rows + 1).max(2)).div_ceil(2)
    }
}

/// What x is, where `other` and `norm` are operands beside it. A vector has 8 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Tensor,
    /// `silu(x) * other`.
    SiluMul,
    /// `rms_norm(x, norm) * silu(other)` of heads of so many vectors.
    GatedRmsNorm {
        vectors: usize,
    },
    /// `x * sigmoid(other)` of heads of so many vectors, which are the last of the gate's.
    SigmoidMul {
        vectors: usize,
        gates: usize,
    },
    /// `rms_norm(other + x, norm)`, where `other` is of type `h`; the sum is stored, too.
    AddRmsNorm {
        h: FloatType,
    },
}

/// Values of a vector of [`Source`].
pub(crate) const VECTOR: usize = 8;

/// The tensors of a product's x.
#[derive(Clone, Copy)]
pub(crate) struct XOperands<'a> {
    pub source: Source,
    pub x: &'a Tensor,
    pub other: Option<&'a Tensor>,
    pub norm: Option<&'a Tensor>,
    pub eps: f32,
}

/// All tensors of a product.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub x: XOperands<'a>,
    pub weight: &'a QuantizedTensor,
    /// The expert of each pair, where the problem has a [`Routing`].
    pub ids: Option<&'a Tensor>,
    pub y: &'a Tensor,
    /// For the sum that x is the norm of.
    pub sum: Option<&'a Tensor>,
}

impl<'a> XOperands<'a> {
    /// The tensor that x is.
    pub fn tensor(x: &'a Tensor) -> Self {
        Self { source: Source::Tensor, x, other: None, norm: None, eps: 0.0 }
    }

    /// # Errors
    /// [`KernelError::Value`] when an operand is no float.
    pub fn new(input: &Input<'a>) -> Result<Self, KernelError> {
        Ok(match *input {
            Input::Tensor(x) => Self::tensor(x),
            Input::SiluMul { gate, up } => {
                Self { source: Source::SiluMul, x: gate, other: Some(up), norm: None, eps: 0.0 }
            }
            Input::GatedRmsNorm { x, gate, weight, eps } => {
                let source = Source::GatedRmsNorm { vectors: weight.len() / VECTOR };
                Self { source, x, other: Some(gate), norm: Some(weight), eps }
            }
            Input::SigmoidMul { x, gate } => {
                let [vectors, gates] = [x, gate].map(|x| x.dim(-1) / VECTOR);
                Self {
                    source: Source::SigmoidMul { vectors, gates },
                    x,
                    other: Some(gate),
                    norm: None,
                    eps: 0.0,
                }
            }
            Input::AddRmsNorm(AddRmsNorm { h, x, weight, eps }) => {
                let source = Source::AddRmsNorm { h: CHECK.float("h", h)? };
                Self { source, x, other: Some(h), norm: Some(weight), eps }
            }
        })
    }

    /// Room for the sum that x is the norm of, a result beside the product's, if it is one.
    pub fn sum(&self) -> Result<Option<Tensor>, KernelError> {
        match (self.source, self.other) {
            (Source::AddRmsNorm { .. }, Some(h)) => {
                Tensor::allocate(h.shape(), h.dtype(), h.device()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// See [`Problem::vectors`].
    fn vectors(&self) -> bool {
        let alike = self.other.is_none_or(|other| other.dtype() == self.x.dtype());
        let whole = |x: &Tensor| x.dim(-1).is_multiple_of(VECTOR);
        let known = match self.source {
            Source::Tensor | Source::AddRmsNorm { .. } => true,
            Source::SiluMul => alike,
            Source::GatedRmsNorm { vectors } => {
                alike && whole(self.x) && vectors.is_power_of_two() && vectors <= 32
            }
            Source::SigmoidMul { vectors, .. } => {
                alike && vectors > 0 && whole(self.x) && self.other.is_some_and(whole)
            }
        };
        let aligned = |x: &Tensor| x.is_aligned(ALIGNMENT);
        known && aligned(self.x) && self.other.is_none_or(aligned) && self.norm.is_none_or(aligned)
    }
}

impl Operands<'_> {
    /// Calls `launch` with the ids and the operands of each product that a weight `[.., E, N, K]` of experts stands for, one
    /// after the other.
    pub fn for_each_product(
        &self,
        problem: &Problem,
        launch: impl Fn(&Tensor, &Operands<'_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let (Some(ids), Some(routing)) = (self.ids, problem.routing) else { return Ok(()) };
        let (experts, n, k) = (routing.experts, problem.n, problem.k);
        let products = self.weight.rows() / (experts * n);
        let weights = self.weight.reshape(&[products, experts, n, k])?;
        let ys = self.y.reshape(&[products, self.y.len() / products])?;
        (0..products).try_for_each(|i| {
            let weight = weights.slice(i, i + 1)?.reshape(&[experts, n, k])?;
            launch(ids, &Operands { weight: &weight, y: &ys.rows(i, i + 1)?, ..*self })
        })
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { m, n, k, batches, layout, x_type, y_type, .. } = self;
        write!(f, "m={m} n={n} k={k} batches={batches} {layout:?} {x_type:?} to {y_type:?}")?;
        if let Some(routing) = self.routing {
            write!(f, " {routing:?}")?;
        }
        match self.source {
            Source::Tensor => Ok(()),
            source => write!(f, " x={source:?}"),
        }
    }
}

impl Problem {
    /// The product of `x` and `weight`, neither empty, whose result has `rows` rows.
    ///
    /// # Errors
    /// [`KernelError::Value`] when x is no float.
    pub fn new(
        x: &XOperands<'_>,
        weight: &QuantizedTensor,
        rows: usize,
        routing: Option<Routing>,
        y_type: FloatType,
    ) -> Result<Self, KernelError> {
        let batches = if routing.is_some() { rows } else { weight.rows() / weight.n() };
        Ok(Self {
            m: rows / batches,
            n: weight.n(),
            k: weight.k(),
            batches,
            routing,
            layout: Layout::of(weight.format()),
            x_type: CHECK.float("x", x.x)?,
            y_type,
            source: x.source,
            vectors: x.vectors(),
            aligned_weight: weight.components()[0].is_aligned(ALIGNMENT),
        })
    }

    /// Runs of a row of the weight; the last may be a part of one.
    pub fn runs(&self) -> usize {
        self.k.div_ceil(RUN)
    }

    /// Checks that kernels can count every element of x, y and the components of `weight`.
    ///
    /// # Errors
    /// [`KernelError::Value`] when one has more than 32 bits count.
    pub fn check_indices(&self, weight: &QuantizedTensor) -> Result<(), KernelError> {
        CHECK.index(self.batches * self.m * self.n.max(self.runs() * RUN))?;
        CHECK.index(weight.rows() * self.runs() * self.layout.bits)?;
        Ok(())
    }

    /// Whether rows are whole runs.
    pub fn whole_runs(&self) -> bool {
        self.k.is_multiple_of(RUN)
    }

    /// The same with an x that is there: if need be another op has made it, in memory of its own.
    pub fn of_tensor(self) -> Self {
        match self.source {
            Source::Tensor => self,
            _ => Self { source: Source::Tensor, vectors: true, ..self },
        }
    }

    /// One of the products of routed experts.
    pub fn one_product(self) -> Self {
        Self { batches: self.routing.map_or(self.batches, |routing| routing.pairs), ..self }
    }

    /// The same in f32, to be rounded later. Widening is exact, and f32 is what is computed in.
    pub fn widened(self) -> Self {
        Self { x_type: FloatType::F32, y_type: FloatType::F32, ..self }
    }

    /// A product `[m, n, k]` with `batches` of 1 and an aligned x, for tests.
    #[cfg(test)]
    pub fn example(
        format: lowbit_formats::Format,
        [x_type, y_type]: [FloatType; 2],
        [m, n, k]: [usize; 3],
    ) -> Self {
        Self {
            m,
            n,
            k,
            batches: 1,
            routing: None,
            layout: Layout::of(format),
            x_type,
            y_type,
            source: Source::Tensor,
            vectors: true,
            aligned_weight: true,
        }
    }
}
