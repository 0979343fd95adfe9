//! The gradients of [`gather_qmm()`](super::gather_qmm()).

use super::cpu::gathered;
use super::product_shape;
use crate::ops::quantized_matmul::Group;
use crate::ops::quantized_matmul::gradient::cpu::{self, Rows};
use crate::ops::{Check, ScalesGradient};
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{DType, FormatError};

/// `dx[t, slot, k] = sum over p, n of dy[p, t, slot, n] * weight[p, ids[t, slot], n, k]`, summed over the slots where these share x.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `dy` | `[T, top_k, N]`, or `[P, T, top_k, N]` | f32, f16, bf16 |
/// | `weight` | `[E, N, K]`, or `[P, E, N, K]` | any format, not repacked |
/// | `ids` | `[T, top_k]` | u32 |
/// | `slots` | 1 where all slots share x, or top_k | |
/// | result | `[T, slots, K]` | as `dy` |
///
/// As in [`quantized_matmul_backward_x`](crate::ops::quantized_matmul_backward_x), which says the rest.
///
/// # Errors
/// As [`gather_qmm()`](super::gather_qmm()); [`KernelError::Shape`] for a dy that does not fit; [`KernelError::Unsupported`] on a
/// GPU and for a repacked weight.
pub fn gather_qmm_backward_x(
    dy: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    slots: usize,
) -> Result<Tensor, KernelError> {
    let check = Check("gather_qmm_backward_x");
    let experts =
        Experts::new(check, [ids.shape().first().copied().unwrap_or(0), slots, weight.k()], weight, ids)?;
    let cpu = dy.device().as_cpu(check.0)?;
    let dtype = experts.check_dy(dy)?;
    let (n, k, pairs) = (weight.n(), weight.k(), experts.order.len());
    let wide = check.widened("dy", dy)?;
    let mut dx = Tensor::allocate_zeros(&[ids.dim(0), slots, k], DType::F32, dy.device())?;
    let (gathered, mut rows) =
        (experts.gathered_dy(wide.as_slice()?), vec![0.0; experts.products * pairs * k]);
    let (mut dys, mut dxs, mut groups) = (&gathered[..], &mut rows[..], vec![]);
    for product in 0..experts.products {
        for same in experts.of_each() {
            let (x, rest) = dys.split_at(same.len() * n);
            let y = dxs.split_off_mut(..same.len() * k).unwrap_or_default();
            groups.push(Group { weight_row: experts.matrix(product, same[0]) * n, x, y });
            dys = rest;
        }
    }
    cpu::backward_x_groups(cpu, weight, groups);
    let sums = dx.as_mut_slice::<f32>()?;
    for (row, &pair) in rows.chunks_exact(k.max(1)).zip(experts.order.iter().cycle()) {
        let sums = &mut sums[pair / experts.share * k..][..k];
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    }
    dx.cast(dtype)
}

/// The gradients of all experts' scales and biases, with their codes as constants; 0 for experts that nobody chose. Shapes of `x`,
/// `weight` and `ids` are [`gather_qmm()`](super::gather_qmm())'s, `dy` is as its result, and the result is
/// `[E, N, K / group]`, or `[P, E, N, K / group]`. As in
/// [`quantized_matmul_backward_scales`](crate::ops::quantized_matmul_backward_scales), which says the rest.
///
/// # Errors
/// As [`gather_qmm_backward_x`]; [`KernelError::Format`] for weights of plain floats, which have no scales.
pub fn gather_qmm_backward_scales(
    x: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<ScalesGradient, KernelError> {
    let check = Check("gather_qmm_backward_scales");
    let scheme = weight.format().scheme();
    let Some(group) = scheme.group_size() else { return Err(FormatError::Codes(weight.format()).into()) };
    let operands = Operands::new(check, x, weight, ids, dy)?;
    let cpu = dy.device().as_cpu(check.0)?;
    let k = weight.k();
    let shape = [&weight.shape()[..weight.shape().len() - 1], &[k / group]].concat();
    let mut dscales = check.result(&shape, dy.device())?;
    let mut dbiases = scheme.biased().then(|| check.result(&shape, dy.device())).transpose()?;
    let biases = dbiases.as_mut().map(|dbiases| dbiases.as_mut_slice::<f32>()).transpose()?;
    cpu::backward_scales(cpu, weight, &operands.pairs(), (dscales.as_mut_slice()?, biases))?;
    Ok(ScalesGradient { dscales, dbiases })
}

/// The gradient of all values of all experts, of weight's shape; 0 for experts that nobody chose. Operands are
/// [`gather_qmm_backward_scales`]'s, with any weight that is not repacked; its values are not read. As in
/// [`quantized_matmul_backward_weight`](crate::ops::quantized_matmul_backward_weight), which says the rest.
///
/// # Errors
/// As [`gather_qmm_backward_x`].
pub fn gather_qmm_backward_weight(
    x: &Tensor,
    weight: &QuantizedTensor,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<Tensor, KernelError> {
    let check = Check("gather_qmm_backward_weight");
    let operands = Operands::new(check, x, weight, ids, dy)?;
    let mut dweight = check.result(weight.shape(), dy.device())?;
    cpu::backward_weight(dy.device().as_cpu(check.0)?, &operands.pairs(), dweight.as_mut_slice()?);
    Ok(dweight)
}

/// The rows of x and of dy, by product and expert.
struct Operands<'a> {
    experts: Experts<'a>,
    xs: Vec<f32>,
    dys: Vec<f32>,
    k: usize,
    n: usize,
}

impl<'a> Operands<'a> {
    fn new(
        check: Check,
        x: &Tensor,
        weight: &QuantizedTensor,
        ids: &'a Tensor,
        dy: &Tensor,
    ) -> Result<Self, KernelError> {
        let shape = check.dims("x", x, "[T, 1, K] or [T, top_k, K]")?;
        let experts = Experts::new(check, shape, weight, ids)?;
        check.same_device("x", x.device(), dy.device())?;
        dy.device().as_cpu(check.0)?;
        experts.check_dy(dy)?;
        let (n, k) = (weight.n(), weight.k());
        let (x, dy) = (check.widened("x", x)?, check.widened("dy", dy)?);
        let x = x.as_slice::<f32>()?;
        let rows = experts.order.iter().map(|pair| &x[pair / experts.share * k..][..k]);
        let (xs, dys) = (gathered(rows, k), experts.gathered_dy(dy.as_slice()?));
        Ok(Self { experts, xs, dys, k, n })
    }

    /// Of each matrix of the weight.
    fn pairs(&self) -> Vec<[Rows<'_>; 2]> {
        let Self { experts, xs, dys, k, n } = self;
        // Experts that nobody chose have no rows.
        let none = || [Rows { values: &[], width: *k }, Rows { values: &[], width: *n }];
        let mut pairs: Vec<_> = (0..experts.products * experts.count).map(|_| none()).collect();
        let mut done = 0;
        for product in 0..experts.products {
            let mut first = 0;
            for same in experts.of_each() {
                let (values, dy) = (&xs[first * k..][..same.len() * k], &dys[done * n..][..same.len() * n]);
                pairs[experts.matrix(product, same[0])] =
                    [Rows { values, width: *k }, Rows { values: dy, width: *n }];
                (first, done) = (first + same.len(), done + same.len());
            }
        }
        pairs
    }
}

/// Which pairs of a token and a slot chose which expert.
struct Experts<'a> {
    check: Check,
    ids: &'a Tensor,
    chosen: &'a [u32],
    /// The pairs, by expert.
    order: Vec<usize>,
    /// Experts per product, and products.
    count: usize,
    products: usize,
    /// How many pairs read one row of x.
    share: usize,
    dy: Vec<usize>,
}

impl<'a> Experts<'a> {
    /// Checks all but dy; `x` is x's shape.
    fn new(
        check: Check,
        x: [usize; 3],
        weight: &QuantizedTensor,
        ids: &'a Tensor,
    ) -> Result<Self, KernelError> {
        weight.by_rows(check.0)?;
        let dy = product_shape(check, &x, weight, ids)?;
        let count = weight.shape()[weight.shape().len() - 3];
        check.ids("ids", ids, count)?;
        check.same_device("weight", weight.device(), ids.device())?;
        check.host(ids)?;
        let chosen = ids.as_slice::<u32>()?;
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_unstable_by_key(|&pair| (chosen[pair], pair));
        let products = if let [products, _, _, _] = *weight.shape() { products } else { 1 };
        let share = if x[1] == 1 { ids.dim(1).max(1) } else { 1 };
        Ok(Self { check, ids, chosen, order, count, products, share, dy })
    }

    fn check_dy(&self, dy: &Tensor) -> Result<DType, KernelError> {
        self.check.shape("dy", dy, &self.dy, || format!("ids {:?} with these operands", self.ids.shape()))?;
        self.check.same_device("ids", self.ids.device(), dy.device())?;
        Ok(self.check.float("dy", dy)?.dtype())
    }

    /// The pairs of each expert that somebody chose.
    fn of_each(&self) -> impl Iterator<Item = &[usize]> {
        self.order.chunk_by(|&a, &b| self.chosen[a] == self.chosen[b])
    }

    /// The matrix that a pair meets, counted over all products.
    fn matrix(&self, product: usize, pair: usize) -> usize {
        product * self.count + self.chosen[pair] as usize
    }

    /// The rows of dy by product and expert.
    fn gathered_dy(&self, dy: &[f32]) -> Vec<f32> {
        let (pairs, n) = (self.order.len(), self.dy[self.dy.len() - 1]);
        let rows = (0..self.products * pairs).map(|i| (i / pairs) * pairs + self.order[i % pairs]);
        gathered(rows.map(|row| &dy[row * n..(row + 1) * n]), n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::quantized_matmul::reference::decoded;
    use crate::ops::testing::{
        FLOATS, assert_close, assert_derivatives, coarse, device, devices, normal, values,
    };
    use crate::ops::{gather_qmm, quantized_matmul_backward_scales, quantized_matmul_backward_weight};
    use crate::{Device, inputs};
    use lowbit_formats::{FloatType, Format};
    use numcheck::{Random, assert_bits, gamma};

    const TOP_K: usize = 3;

    /// `[products,] experts, n, k` of a weight, and who chose what; expert 1 stays without pairs.
    fn operands(device: &Device, products: Option<usize>, tokens: usize) -> (QuantizedTensor, Tensor) {
        let shape: Vec<usize> = products.into_iter().chain([5, 23, 64]).collect();
        let weight = inputs::weight(Format::Q4_1, &shape, 6, device).unwrap();
        let mut random = Random::new(tokens as u64);
        let ids: Vec<u32> = (0..tokens * TOP_K).map(|_| [0, 2, 3, 4][random.below(4)]).collect();
        (weight, Tensor::new(&ids, &[tokens, TOP_K], device).unwrap())
    }

    /// dx in f64, and the magnitude of its terms.
    fn reference(dy: &[f32], weight: &QuantizedTensor, ids: &[u32], slots: usize) -> (Vec<f64>, Vec<f64>) {
        let (n, k, pairs) = (weight.n(), weight.k(), ids.len());
        let share = if slots == 1 { TOP_K } else { 1 };
        let values = decoded(weight, weight.rows()).unwrap();
        let mut dx = (vec![0.0; pairs / share * k], vec![0.0; pairs / share * k]);
        for row in 0..dy.len() / n {
            let expert = row / pairs * 5 + ids[row % pairs] as usize;
            for (i, column) in (0..n).flat_map(|i| (0..k).map(move |column| (i, column))) {
                let term = f64::from(dy[row * n + i]) * f64::from(values[(expert * n + i) * k + column]);
                dx.0[row % pairs / share * k + column] += term;
                dx.1[row % pairs / share * k + column] += term.abs();
            }
        }
        dx
    }

    /// The op in f64 is linear in x.
    #[test]
    fn formulas_are_the_derivatives_of_the_forward_formula() {
        let host = device();
        let (weight, ids) = operands(&host, Some(2), 2);
        let (ids, decoded) = (ids.as_slice::<u32>().unwrap(), decoded(&weight, weight.rows()).unwrap());
        let (n, k, pairs) = (weight.n(), weight.k(), ids.len());
        let mut random = Random::new(1);
        let dy = coarse(&mut random, 2 * pairs * n);
        for slots in [1, TOP_K] {
            let share = TOP_K / slots;
            let x = coarse(&mut random, pairs / share * k);
            let want = reference(&dy, &weight, ids, slots).0;
            // A tenth of the elements, since each takes all products six times.
            let some: Vec<usize> = (0..x.len()).step_by(11).collect();
            let start: Vec<f32> = some.iter().map(|&i| x[i]).collect();
            let want: Vec<f64> = some.iter().map(|&i| want[i]).collect();
            assert_derivatives("dx", &start, &want, |moved| {
                let mut x = x.clone();
                some.iter().zip(moved).for_each(|(&i, &moved)| x[i] = moved);
                let y = |at: usize| {
                    let (row, i) = (at / n, at % n);
                    let expert = row / pairs * 5 + ids[row % pairs] as usize;
                    let (x, w) = (&x[row % pairs / share * k..][..k], &decoded[(expert * n + i) * k..][..k]);
                    x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>()
                };
                (0..dy.len()).map(|at| y(at) * f64::from(dy[at])).sum()
            });
        }
    }

    #[test]
    fn agrees_with_f64_and_with_each_experts_product() {
        for device in devices() {
            for (products, tokens, slots) in
                [(None, 1, 1), (None, 37, TOP_K), (Some(2), 9, 1), (Some(2), 37, TOP_K)]
            {
                let (weight, ids) = operands(&device, products, tokens);
                let mut random = Random::new(7);
                let (x, _) = normal(&mut random, &[tokens, slots, 64], FLOATS[0], &device);
                let y = gather_qmm(&x, &weight, &ids).unwrap();
                let (dy, dys) = normal(&mut random, y.shape(), FLOATS[0], &device);
                let chosen = ids.as_slice::<u32>().unwrap();
                let dx = gather_qmm_backward_x(&dy, &weight, &ids, slots).unwrap();
                let (want, most) = reference(&dys, &weight, chosen, slots);
                let terms = 23 * products.unwrap_or(1) * TOP_K / slots;
                assert_close(&dx, x.shape(), FLOATS[0], &want, |i| gamma(terms) * most[i]);
                let got = gather_qmm_backward_scales(&x, &weight, &ids, &dy).unwrap();
                assert_eq!(got.dscales.shape(), [&weight.shape()[..weight.shape().len() - 1], &[2]].concat());
                let dweight = gather_qmm_backward_weight(&x, &weight, &ids, &dy).unwrap();
                assert_eq!(dweight.shape(), weight.shape());
                let all = weight.reshape(&[products.unwrap_or(1) * 5, 23, 64]).unwrap();
                let (xs, pairs) = (values(&x), chosen.len());
                for matrix in 0..all.shape()[0] {
                    let mine: Vec<usize> =
                        (0..pairs).filter(|&pair| chosen[pair] as usize == matrix % 5).collect();
                    let share = TOP_K / slots;
                    let x: Vec<f32> =
                        mine.iter().flat_map(|pair| &xs[pair / share * 64..][..64]).copied().collect();
                    let dy: Vec<f32> = mine
                        .iter()
                        .flat_map(|pair| &dys[(matrix / 5 * pairs + pair) * 23..][..23])
                        .copied()
                        .collect();
                    let one = all.slice(matrix, matrix + 1).unwrap().reshape(&[23, 64]).unwrap();
                    let [x, dy] = [(x, 64), (dy, 23)]
                        .map(|(x, width)| Tensor::new(&x, &[mine.len(), width], &device).unwrap());
                    let want = quantized_matmul_backward_scales(&x, &one, &dy).unwrap();
                    let part = |x: &Tensor| values(x)[matrix * 46..(matrix + 1) * 46].to_vec();
                    assert_bits("dscales", &part(&got.dscales), &values(&want.dscales));
                    let dbiases = got.dbiases.as_ref().unwrap();
                    assert_bits("dbiases", &part(dbiases), &values(&want.dbiases.unwrap()));
                    let want = quantized_matmul_backward_weight(&x, &dy, &[23, 64]).unwrap();
                    assert_bits("dweight", &values(&dweight)[matrix * 23 * 64..][..23 * 64], &values(&want));
                }
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = device();
        let (weight, ids) = operands(&device, None, 2);
        let float = |shape: &[usize]| inputs::activations(shape, FloatType::F32, 2, &device).unwrap();
        let error = gather_qmm_backward_x(&float(&[2, 3, 22]), &weight, &ids, 1).unwrap_err().to_string();
        assert_eq!(
            error,
            "gather_qmm_backward_x: dy is [2, 3, 22], but ids [2, 3] with these operands wants [2, 3, 23]"
        );
        let error = gather_qmm_backward_x(&float(&[2, 3, 23]), &weight, &ids, 2).unwrap_err().to_string();
        assert_eq!(
            error,
            "gather_qmm_backward_x: x is [2, 2, 64], but ids are [2, 3] and weight is [5, 23, 64]"
        );
        let floats = inputs::weight(Format::Float(FloatType::F32), &[5, 23, 64], 1, &device).unwrap();
        let x = float(&[2, 1, 64]);
        let error =
            gather_qmm_backward_scales(&x, &floats, &ids, &float(&[2, 3, 23])).unwrap_err().to_string();
        assert_eq!(error, "f32 has no codes, but codes of 8 bits or fewer are wanted");
    }
}
