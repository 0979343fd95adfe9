//! A product as the choice of its kernel sees it: sizes and types, nothing of a device or of
//! memory.

use super::input::{AddRmsNorm, CHECK, Input, Norm, Operand};
use crate::gpu::layout::{Layout, RUN};
use crate::ops::glu::Gate;
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::FloatType;

/// Bytes that operands must be aligned to for kernels that load whole vectors, copy in bulk, or
/// call the vendor BLAS.
pub(super) const ALIGNMENT: usize = 16;

/// `y[b, m, n] = sum over k of x[b, m, k] * weight[b, n, k]`, or a product with routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Rows of x per batch; 1 with `routing`.
    pub m: usize,
    /// Outputs: rows of a batch of the weight.
    pub n: usize,
    pub k: usize,
    /// Batches of the weight; with `routing` rows of y, each of which takes the batch that its id
    /// says.
    pub batches: usize,
    pub routing: Option<Routing>,
    pub layout: Layout,
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// The op that makes x; `None` where x is there.
    pub source: Option<Source>,
    /// True if x, or all that it is made of, lies in whole vectors that kernels can load.
    pub vectors: bool,
    /// True if the weight's first component is aligned as the vendor BLAS wants it.
    pub aligned_weight: bool,
}

/// `y[p, t, n] = sum over k of x[t / share, k] * weight[p, ids[t], n, k]`: each of `pairs` pairs of
/// a token and an expert is a row of y, in each product p.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Routing {
    pub experts: usize,
    pub pairs: usize,
    /// Pairs that have the same row of x: all of a token's, or 1.
    pub share: usize,
}

impl Routing {
    /// True if bringing the pairs of an expert together takes less than reading its weights again
    /// for each.
    pub fn has_many_pairs(self) -> bool {
        self.pairs >= 128
    }

    /// The most tiles of `rows` rows that the pairs take, sorted by expert: each expert that has
    /// pairs, and the ids that are no expert's, may leave a tile part empty.
    pub fn most_tiles(self, rows: usize) -> usize {
        self.pairs / rows + self.pairs.min(self.experts + 1)
    }

    /// The likely number of such tiles.
    pub fn likely_tiles(self, rows: usize) -> usize {
        let mean = self.pairs.div_ceil(self.experts.max(1));
        // The last of an expert's tiles is half full.
        (self.experts * (2 * mean / rows + 1).max(2)).div_ceil(2)
    }
}

/// An op that makes x of the operands `x`, `other` and `norm`. A vector has 8 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// `glu(other, x)`: the gate is first.
    Glu(Gate),
    /// `glu(x, other)` of heads of so many vectors, by the last vectors of each head's gates.
    HeadsGlu { by: Gate, vectors: usize, gates: usize },
    /// `rms_norm(x, norm) * silu(other)` of heads of so many vectors.
    GatedRmsNorm { vectors: usize },
    /// `rms_norm(other + x, norm)`, where `other` is of type `h`; the sum is stored, too.
    AddRmsNorm { h: FloatType },
}

/// Values of a vector of [`Source`].
pub(crate) const VECTOR: usize = 8;

/// The tensors of a product's x, in the order in which kernels read them.
#[derive(Clone, Copy)]
pub(crate) struct XOperands<'a> {
    pub source: Option<Source>,
    pub x: &'a Tensor,
    pub other: Option<&'a Tensor>,
    pub norm: Option<&'a Tensor>,
    pub eps: f32,
    /// The type of what is made.
    dtype: FloatType,
    /// True if kernels can load whole vectors of all.
    vectors: bool,
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
    /// The widths of parts of y's columns, each a matrix of its own; empty where they are one. Few
    /// kernels know parts.
    pub widths: &'a [usize],
}

impl<'a> XOperands<'a> {
    /// # Errors
    /// [`KernelError::Value`] when an operand is no float.
    pub fn new<T: Operand>(input: &Input<'a, T>) -> Result<Self, KernelError> {
        let whole = |x: &Tensor| x.dim(-1).is_multiple_of(VECTOR);
        let alike = |x: &Tensor, other: &Tensor| other.dtype() == x.dtype();
        let (source, x, other, norm, known) = match *input {
            Input::Tensor(x) => (None, x, None, None, true),
            Input::Glu { x, gate, by } if x.as_ref().shape() == gate.as_ref().shape() => {
                (Some(Source::Glu(by)), gate, Some(x), None, alike(x.as_ref(), gate.as_ref()))
            }
            Input::Glu { x, gate, by } => {
                let (of_x, of_gate) = (x.as_ref(), gate.as_ref());
                let width = of_x.len() / (of_gate.len() / of_gate.dim(-1).max(1)).max(1);
                let (vectors, gates) = (width / VECTOR, of_gate.dim(-1) / VECTOR);
                let source = Source::HeadsGlu { by, vectors, gates };
                let whole = whole(of_gate) && vectors > 0 && width.is_multiple_of(VECTOR);
                (Some(source), x, Some(gate), None, alike(of_x, of_gate) && whole)
            }
            Input::GatedRmsNorm { x, gate, norm } => {
                let width = norm.weight.as_ref().len();
                let vectors = width / VECTOR;
                let whole = width.is_multiple_of(VECTOR) && vectors.is_power_of_two() && vectors <= 32;
                let known = alike(x.as_ref(), gate.as_ref()) && whole;
                (Some(Source::GatedRmsNorm { vectors }), x, Some(gate), Some(norm), known)
            }
            Input::AddRmsNorm(AddRmsNorm { h, x, norm }) => {
                let source = Source::AddRmsNorm { h: CHECK.float("h", h.as_ref())? };
                (Some(source), x, Some(h), Some(norm), true)
            }
        };
        let (eps, norm) = norm.map_or((0.0, None), |Norm { weight, eps }| (eps, Some(weight.as_ref())));
        let (x, other) = (x.as_ref(), other.map(T::as_ref));
        let vectors = known && [Some(x), other, norm].into_iter().flatten().all(|x| x.is_aligned(ALIGNMENT));
        Ok(Self { source, x, other, norm, eps, dtype: input.dtype(CHECK)?, vectors })
    }

    /// Room for the sum that x is the norm of, a result beside the product's, if it is one.
    pub fn sum(&self) -> Result<Option<Tensor>, KernelError> {
        match (self.source, self.other) {
            (Some(Source::AddRmsNorm { .. }), Some(h)) => {
                Tensor::allocate(h.shape(), h.dtype(), h.device()).map(Some)
            }
            _ => Ok(None),
        }
    }
}

impl Operands<'_> {
    /// Calls `launch` with the ids and the operands of each product that a weight `[.., E, N, K]`
    /// of experts stands for, one after the other.
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
        self.source.map_or(Ok(()), |source| write!(f, " x={source:?}"))
    }
}

impl Problem {
    /// The product of `x` and `weight`, neither empty, whose result has `rows` rows.
    pub fn new(
        x: &XOperands<'_>,
        weight: &QuantizedTensor,
        rows: usize,
        routing: Option<Routing>,
        y_type: FloatType,
    ) -> Self {
        let batches = if routing.is_some() { rows } else { weight.rows() / weight.n() };
        Self {
            m: rows / batches,
            n: weight.n(),
            k: weight.k(),
            batches,
            routing,
            layout: Layout::of(weight.format()),
            x_type: x.dtype,
            y_type,
            source: x.source,
            vectors: x.vectors,
            aligned_weight: weight.components()[0].is_aligned(ALIGNMENT),
        }
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

    /// True if rows are whole runs.
    pub fn whole_runs(&self) -> bool {
        self.k.is_multiple_of(RUN)
    }

    /// The same with an x that is there: if need be another op has made it, in memory of its own.
    pub fn of_tensor(self) -> Self {
        Self { source: None, vectors: self.vectors || self.source.is_some(), ..self }
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
            source: None,
            vectors: true,
            aligned_weight: true,
        }
    }
}
