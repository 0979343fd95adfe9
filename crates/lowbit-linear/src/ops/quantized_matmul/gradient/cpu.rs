//! Both products go through `gemm.rs`. That of dy and the weight decodes as many rows of the weight
//! as a product sums at a time, for a block of rows of dy. That of dy's transpose and x makes a
//! strip of the weight's gradient, which is either the result or is summed up by group at once.

use crate::gemm::{DEPTH, Extent, Onto, Packed, Transposed, product};
use crate::ops::quantized_matmul::Group;
use crate::ops::quantized_matmul::cpu::{
    cut,
    rows::{self, KC, STEP, WeightRows},
};
use crate::simd::{Isa, Kernel, Simd, slices};
use crate::{Cpu, KernelError, QuantizedTensor};
use lowbit_formats::{Format, with_codec};
use std::borrow::Cow;

/// Rows of dy that share a decoded block: enough to make little of decoding, and their sums stay in
/// the second-level cache.
const BLOCK: usize = 128;

/// Rows of a matrix, `[m, width]`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Rows<'a> {
    pub values: &'a [f32],
    pub width: usize,
}

impl<'a> Rows<'a> {
    /// `values` cut into equal numbers of rows for each of `count` matrices.
    pub fn of_each(values: &'a [f32], count: usize, width: usize) -> Vec<Self> {
        let each = values.len() / count.max(1);
        (0..count).map(|i| Self { values: &values[i * each..][..each], width }).collect()
    }

    fn iter(self) -> std::slice::ChunksExact<'a, f32> {
        self.values.chunks_exact(self.width)
    }
}

/// `dx[m, k] = sum over n of dy[m, n] * weight[n, k]` for each matrix of the weight; `dx` has their
/// results one after the other.
pub(super) fn backward_x(cpu: &Cpu, weight: &QuantizedTensor, dy: &[Rows<'_>], dx: &mut [f32]) {
    let each = dx.len() / dy.len().max(1);
    let mut rest = dx;
    let groups = dy.iter().enumerate().map(|(i, dy)| {
        let y = rest.split_off_mut(..each).unwrap_or_default();
        Group { weight_row: i * weight.n(), x: dy.values, y }
    });
    backward_x_groups(cpu, weight, groups.collect());
}

/// As [`backward_x`] for groups of rows of dy (their `x`) and of dx (their `y`) and the matrices
/// that they meet.
pub(in crate::ops) fn backward_x_groups(cpu: &Cpu, weight: &QuantizedTensor, groups: Vec<Group<'_>>) {
    let (n, k) = (weight.n(), weight.k());
    if n == 0 || k == 0 {
        return groups.into_iter().for_each(|group| group.y.fill(0.0));
    }
    let mut tasks = Vec::new();
    for Group { weight_row, x: dy, y: dx } in groups {
        let block = (dx.len() / k).div_ceil(cpu.threads()).next_multiple_of(8).clamp(8, BLOCK);
        cut(dx, k, block, KC, |m, first, mut dx| {
            tasks.push((&dy[m * n..][..dx.each().len() * n], weight_row, first, dx));
        });
    }
    with_codec!(weight.format(), codec => {
        let rows = WeightRows { codec, parts: weight.parts(), rows: weight.rows(), k };
        cpu.for_each(tasks, |(dy, weight_row, first, mut dx)| {
            let dy = Rows { values: dy, width: n };
            cpu.isa().dispatch(BackwardX { isa: cpu.isa(), weight: &rows, weight_row, first, dy, dx: dx.each() });
        });
    });
}

/// Some rows of dx, columns `first..` of each.
struct BackwardX<'a, 'y> {
    isa: Isa,
    weight: &'a dyn rows::Rows,
    weight_row: usize,
    first: usize,
    dy: Rows<'a>,
    dx: &'a mut [&'y mut [f32]],
}

impl Kernel for BackwardX<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (rows, n, width) = (self.dx.len(), self.dy.width, self.dx[0].len());
        let columns = width.next_multiple_of(STEP);
        let mut panel = vec![[0.0; KC]; DEPTH.min(n)];
        let mut narrow = vec![0.0; if columns < KC { panel.len() * columns } else { 0 }];
        let (mut left, mut sums) = (Packed::default(), vec![0.0; rows * columns]);
        for start in (0..n).step_by(DEPTH) {
            let depth = DEPTH.min(n - start);
            self.weight.decode(self.isa, self.weight_row + start, self.first, &mut panel[..depth]);
            left.pack(self.dy.iter().map(|dy| &dy[start..start + depth]), depth);
            for (narrow, panel) in narrow.chunks_exact_mut(columns).zip(&panel[..depth]) {
                narrow.copy_from_slice(&panel[..columns]);
            }
            let right = if columns < KC { &narrow } else { panel.as_flattened() };
            let extent = Extent { rows, depth, columns };
            product(simd, &left, right, &mut sums, extent, Onto::Scaled(1.0));
        }
        for (dx, sums) in self.dx.iter_mut().zip(sums.chunks_exact(columns)) {
            dx.copy_from_slice(&sums[..width]);
        }
    }
}

/// `dweight[n, k] = sum over m of dy[m, n] * x[m, k]` for each matrix; `pairs` are its rows of x
/// and of dy.
pub(in crate::ops) fn backward_weight(cpu: &Cpu, pairs: &[[Rows<'_>; 2]], dweight: &mut [f32]) {
    let Some([x, dy]) = pairs.first() else { return };
    let ((n, k), operands) = ((dy.width, x.width), padded(cpu, pairs));
    if n == 0 || k == 0 {
        return;
    }
    let mut tasks = Vec::new();
    for (operand, dweight) in operands.iter().zip(dweight.chunks_exact_mut(n * k)) {
        let height = strip(cpu, n);
        tasks.extend(dweight.chunks_mut(height * k).enumerate().map(|(i, out)| (operand, i * height, out)));
    }
    cpu.for_each(tasks, |(operand, first, out)| {
        let sums = cpu.isa().dispatch(Strip { operand, first, rows: out.len() / k });
        for (out, sums) in out.chunks_exact_mut(k).zip(sums.chunks_exact(operand.columns)) {
            out.copy_from_slice(&sums[..k]);
        }
    });
}

/// The gradients of scales and biases, `[matrices, n, k / group]`, of weights that have scales.
pub(in crate::ops) fn backward_scales(
    cpu: &Cpu,
    weight: &QuantizedTensor,
    pairs: &[[Rows<'_>; 2]],
    (dscales, dbiases): (&mut [f32], Option<&mut [f32]>),
) -> Result<(), KernelError> {
    let (n, k, scheme) = (weight.n(), weight.k(), weight.format().scheme());
    let (Some(group), Some(values)) = (scheme.group_size(), scheme.code_values()) else {
        return Err(lowbit_formats::FormatError::Codes(weight.format()).into());
    };
    let codes =
        Codes { format: weight.format(), bytes: weight.parts()[0], rows: weight.rows(), k, group, values };
    let groups = k / group;
    if n == 0 || groups == 0 {
        return Ok(());
    }
    let operands = padded(cpu, pairs);
    let height = strip(cpu, n);
    let mut biases = dbiases.map(|dbiases| strips(dbiases, (n, groups), height));
    let mut tasks = Vec::new();
    for (i, dscales) in strips(dscales, (n, groups), height).enumerate() {
        let (matrix, first) = (i / n.div_ceil(height), i % n.div_ceil(height) * height);
        let dbiases = biases.as_mut().and_then(Iterator::next);
        tasks.push((matrix, first, dscales, dbiases));
    }
    cpu.for_each(tasks, |(matrix, first, dscales, dbiases)| {
        let (operand, rows) = (&operands[matrix], dscales.len() / groups);
        let dweight = cpu.isa().dispatch(Strip { operand, first, rows });
        let columns = operand.columns;
        let sums = Sums { codes: &codes, row: matrix * n + first, dweight, columns, dscales, dbiases };
        cpu.isa().dispatch(sums);
    });
    Ok(())
}

/// Rows of matrices `[n, width]`, `height` at a time.
fn strips(x: &mut [f32], (n, width): (usize, usize), height: usize) -> impl Iterator<Item = &mut [f32]> {
    x.chunks_exact_mut(n * width).flat_map(move |x| x.chunks_mut(height * width))
}

/// Rows of a weight's gradient that a task makes: at most as many as lie side by side in a packed
/// operand.
fn strip(cpu: &Cpu, n: usize) -> usize {
    n.div_ceil(cpu.threads()).next_multiple_of(8).min(DEPTH)
}

/// The operands of one matrix's gradient: x in whole vectors.
struct Operand<'a> {
    x: Cow<'a, [f32]>,
    columns: usize,
    dy: Rows<'a>,
}

fn padded<'a>(cpu: &Cpu, pairs: &[[Rows<'a>; 2]]) -> Vec<Operand<'a>> {
    let operand = |&[x, dy]: &[Rows<'a>; 2]| {
        let columns = x.width.next_multiple_of(cpu.isa().lanes());
        if columns == x.width {
            return Operand { x: Cow::Borrowed(x.values), columns, dy };
        }
        let mut wide = vec![0.0; x.values.len() / x.width * columns];
        for (wide, x) in wide.chunks_exact_mut(columns).zip(x.iter()) {
            wide[..x.len()].copy_from_slice(x);
        }
        Operand { x: Cow::Owned(wide), columns, dy }
    };
    pairs.iter().map(operand).collect()
}

/// `sums[n][k] = sum over m of dy[m, first + n] * x[m, k]` for `rows` n.
struct Strip<'a> {
    operand: &'a Operand<'a>,
    first: usize,
    rows: usize,
}

impl Kernel for Strip<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<f32> {
        let Self { operand: &Operand { ref x, columns, dy }, first, rows } = self;
        let mut left = Packed::default();
        left.pack(dy.iter().map(|dy| &dy[first..first + rows]), rows);
        let mut sums = vec![0.0; rows * columns];
        let extent = Extent { rows, depth: dy.iter().len(), columns };
        product(simd, Transposed(&left), x, &mut sums, extent, Onto::Nothing);
        sums
    }
}

/// The codes of a weight's rows.
struct Codes<'a> {
    format: Format,
    bytes: &'a [u8],
    rows: usize,
    k: usize,
    group: usize,
    /// Of each code.
    values: [f32; 256],
}

/// Sums a strip of a weight's gradient up by group.
struct Sums<'a> {
    codes: &'a Codes<'a>,
    /// The strip's first row, counted over all matrices.
    row: usize,
    /// Rows that are `columns` apart.
    dweight: Vec<f32>,
    columns: usize,
    dscales: &'a mut [f32],
    dbiases: Option<&'a mut [f32]>,
}

impl Kernel for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Codes { format, bytes, rows, k, group, values } = self.codes;
        let row_bytes = bytes.len() / rows;
        let (mut codes, mut row_values) = (vec![0; *k], vec![0.0; *k]);
        let groups = k / group;
        let mut dbiases = self.dbiases;
        for (i, dweight) in self.dweight.chunks_exact(self.columns).enumerate() {
            let row = &bytes[(self.row + i) * row_bytes..][..row_bytes];
            format.codes(row, *k, &mut codes).expect("the weight was checked, and has codes");
            row_values.iter_mut().zip(&codes).for_each(|(value, &code)| *value = values[usize::from(code)]);
            let parts = dweight[..*k].chunks_exact(*group).zip(row_values.chunks_exact(*group));
            for (at, (dweight, values)) in (i * groups..).zip(parts) {
                self.dscales[at] = slices::dot(simd, dweight, values);
                if let Some(dbiases) = &mut dbiases {
                    dbiases[at] = slices::sum(simd, dweight);
                }
            }
        }
    }
}
