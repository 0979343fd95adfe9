//! The gradients of [`dequant_gather()`](super::dequant_gather()).

use super::check_table;
use crate::ops::{Check, ScalesGradient};
use crate::simd::{Kernel, Simd, slices};
use crate::{KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{DType, Format, FormatError};

/// The gradients of a table's scales and biases, with its codes as constants: over the k of group g and the places i where
/// `ids[i] = v`,
///
/// ```text
/// dscales[v, g] = sum over k, i of dy[i, k] * value(code[v, k])
/// dbiases[v, g] = sum over k, i of dy[i, k]
/// ```
/// and 0 for rows that no id names. As in
/// [`quantized_matmul_backward_scales`](crate::ops::quantized_matmul_backward_scales), which says the rest.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `table` | `[V, K]` | any format with codes, not repacked |
/// | `ids` | `[..]` | u32 |
/// | `dy` | `[.., K]` | f32, f16, bf16 |
/// | `dscales`, `dbiases` | `[V, K / group]` | f32 |
///
/// # Errors
/// As [`dequant_gather()`](super::dequant_gather()); [`KernelError::Shape`] for a dy that does not fit; [`KernelError::Format`] for a
/// table of plain floats, which has no scales; [`KernelError::Unsupported`] on a GPU and for a repacked table.
pub fn dequant_gather_backward_scales(
    table: &QuantizedTensor,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<ScalesGradient, KernelError> {
    let check = Check("dequant_gather_backward_scales");
    table.by_rows(check.0)?;
    let [count, k] = check_table(check, table, ids)?;
    let scheme = table.format().scheme();
    let (Some(group), Some(values)) = (scheme.group_size(), scheme.code_values()) else {
        return Err(FormatError::Codes(table.format()).into());
    };
    check_dy(check, dy, (table, ids))?;
    let cpu = table.device().as_cpu(check.0)?;
    let dy = check.widened("dy", dy)?;
    let shape = [count, k / group];
    let new = || Tensor::allocate_zeros(&shape, DType::F32, table.device());
    let (mut dscales, mut dbiases) = (new()?, scheme.biased().then(new).transpose()?);
    if k == 0 || ids.is_empty() {
        return Ok(ScalesGradient { dscales, dbiases });
    }
    let (ids, bytes) = (ids.as_slice::<u32>()?, table.parts()[0]);
    let row_bytes = bytes.len() / count;
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_unstable_by_key(|&i| (ids[i], i));
    let groups = k / group;
    let mut results: Vec<(&[usize], Vec<f32>)> =
        order.chunk_by(|&a, &b| ids[a] == ids[b]).map(|places| (places, vec![0.0; 2 * groups])).collect();
    let dy = dy.as_slice::<f32>()?;
    cpu.for_each(results.iter_mut().collect(), |(places, sums): &mut (&[usize], Vec<f32>)| {
        let row = &bytes[ids[places[0]] as usize * row_bytes..][..row_bytes];
        let (dscales, dbiases) = sums.split_at_mut(groups);
        cpu.isa().dispatch(Row {
            format: table.format(),
            row,
            values: &values,
            places,
            dy,
            k,
            dscales,
            dbiases,
        });
    });
    for (places, sums) in results {
        let row = ids[places[0]] as usize * groups;
        dscales.as_mut_slice::<f32>()?[row..row + groups].copy_from_slice(&sums[..groups]);
        if let Some(dbiases) = &mut dbiases {
            dbiases.as_mut_slice::<f32>()?[row..row + groups].copy_from_slice(&sums[groups..]);
        }
    }
    Ok(ScalesGradient { dscales, dbiases })
}

/// The gradient of all of a table's values, `[V, K]`: `dvalues[v, k] = sum over the places i where ids[i] = v of dy[i, k]`. Operands
/// are [`dequant_gather_backward_scales`]'s, with a table of any format.
///
/// # Errors
/// As [`dequant_gather_backward_scales`], which says the rest.
pub fn dequant_gather_backward_values(
    table: &QuantizedTensor,
    ids: &Tensor,
    dy: &Tensor,
) -> Result<Tensor, KernelError> {
    let check = Check("dequant_gather_backward_values");
    table.by_rows(check.0)?;
    let [_, k] = check_table(check, table, ids)?;
    check_dy(check, dy, (table, ids))?;
    table.device().as_cpu(check.0)?;
    let dy = check.widened("dy", dy)?;
    let mut dvalues = Tensor::allocate_zeros(table.shape(), DType::F32, table.device())?;
    let sums = dvalues.as_mut_slice::<f32>()?;
    for (&id, dy) in ids.as_slice::<u32>()?.iter().zip(dy.as_slice::<f32>()?.chunks_exact(k.max(1))) {
        sums[id as usize * k..][..k].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
    }
    Ok(dvalues)
}

fn check_dy(check: Check, dy: &Tensor, (table, ids): (&QuantizedTensor, &Tensor)) -> Result<(), KernelError> {
    check.shape("dy", dy, &[ids.shape(), &[table.k()]].concat(), || format!("ids {:?}", ids.shape()))?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), table.device())
}

/// A row of the table and the places of dy that read it.
struct Row<'a> {
    format: Format,
    row: &'a [u8],
    /// Of each code.
    values: &'a [f32; 256],
    places: &'a [usize],
    dy: &'a [f32],
    k: usize,
    dscales: &'a mut [f32],
    dbiases: &'a mut [f32],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { format, row, values, places, dy, k, dscales, dbiases } = self;
        let (mut codes, mut sum) = (vec![0; k], vec![0.0; k]);
        format.codes(row, k, &mut codes).expect("the table was checked, and has codes");
        for place in places {
            sum.iter_mut().zip(&dy[place * k..][..k]).for_each(|(sum, dy)| *sum += dy);
        }
        let of_codes: Vec<f32> = codes.iter().map(|&code| values[usize::from(code)]).collect();
        let group = k / dscales.len();
        let sums = sum.chunks_exact(group).zip(of_codes.chunks_exact(group));
        for ((sum, codes), (dscale, dbias)) in sums.zip(dscales.iter_mut().zip(dbiases)) {
            (*dscale, *dbias) = (slices::dot(simd, sum, codes), slices::sum(simd, sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::quantized_matmul::tests::formats;
    use crate::ops::testing::{FLOATS, assert_close, device, devices, normal, values};
    use crate::{inputs, ops::quantized_matmul_backward_scales};
    use lowbit_formats::FloatType;
    use numcheck::{Random, assert_bits, gamma};

    const COUNT: usize = 9;
    const K: usize = 256;

    /// A gather is the product with rows of ones and zeros, whose gradient is tested alone: against that, with the bound of both.
    #[test]
    fn is_the_gradient_of_a_product_with_rows_of_ones_and_zeros() {
        let ids = [4u32, 0, 4, 8, 3, 4, 0];
        let mut random = Random::new(1);
        for device in devices() {
            for format in formats() {
                let table = inputs::weight(format, &[COUNT, K], 3, &device).unwrap();
                let at = Tensor::new(&ids, &[ids.len()], &device).unwrap();
                let (dy, dys) = normal(&mut random, &[ids.len(), K], FLOATS[1], &device);
                let mut dvalues = vec![0f32; COUNT * K];
                for (i, dy) in dys.iter().enumerate() {
                    dvalues[ids[i / K] as usize * K + i % K] += dy;
                }
                let got = dequant_gather_backward_values(&table, &at, &dy).unwrap();
                assert_bits("dvalues", &values(&got), &dvalues);
                let got = dequant_gather_backward_scales(&table, &at, &dy);
                let Some(group) = format.scheme().group_size() else {
                    let error = got.unwrap_err().to_string();
                    assert_eq!(
                        error,
                        format!("{format} has no codes, but codes of 8 bits or fewer are wanted")
                    );
                    continue;
                };
                let ScalesGradient { dscales, dbiases } = got.unwrap();
                // y = one_hot table, so that the table's gradient is one_hot^T dy: x is dy, and dy is one_hot.
                let mut one_hot = vec![0f32; ids.len() * COUNT];
                ids.iter().enumerate().for_each(|(i, &id)| one_hot[i * COUNT + id as usize] = 1.0);
                let one_hot = Tensor::new(&one_hot, &[ids.len(), COUNT], &device).unwrap();
                let want = quantized_matmul_backward_scales(&dy, &table, &one_hot).unwrap();
                let dys = &dys[..];
                let most = |bias: bool| {
                    let code =
                        format.scheme().code_values().unwrap().iter().fold(1.0, |m: f32, x| m.max(x.abs()));
                    let of = move |at: usize| {
                        let rows = ids
                            .iter()
                            .zip(dys.chunks(K))
                            .filter(move |(id, _)| **id as usize == at / (K / group));
                        rows.flat_map(move |(_, dy)| &dy[at % (K / group) * group..][..group])
                            .map(|dy| f64::from(dy.abs()))
                            .sum::<f64>()
                    };
                    (0..COUNT * K / group)
                        .map(|at| of(at) * if bias { 1.0 } else { f64::from(code) })
                        .collect::<Vec<_>>()
                };
                let bound = 2.0 * gamma(ids.len() + group + 1);
                let close = |got: &Tensor, want: &Tensor, most: Vec<f64>| {
                    let wanted: Vec<f64> = values(want).iter().map(|&x| x.into()).collect();
                    assert_close(got, want.shape(), FLOATS[0], &wanted, |i| bound * most[i]);
                };
                close(&dscales, &want.dscales, most(false));
                assert_eq!(dbiases.is_some(), want.dbiases.is_some());
                if let (Some(got), Some(want)) = (dbiases, want.dbiases) {
                    close(&got, &want, most(true));
                }
            }
        }
    }

    #[test]
    fn the_same_for_every_number_of_threads_and_refusals() {
        let of = |threads| {
            let device = Device::cpu(Some(threads)).unwrap();
            let table = inputs::weight(Format::Q4_K, &[COUNT, K], 3, &device).unwrap();
            let ids = Tensor::new(&[1u32, 7, 1, 0, 1, 1], &[2, 3], &device).unwrap();
            let dy = inputs::activations(&[2, 3, K], FloatType::F32, 4, &device).unwrap();
            values(&dequant_gather_backward_scales(&table, &ids, &dy).unwrap().dscales)
        };
        assert_bits("threads", &of(3), &of(1));
        let device = device();
        let table = inputs::weight(Format::Q4_0, &[COUNT, K], 3, &device).unwrap();
        let ids = Tensor::new(&[9u32], &[1], &device).unwrap();
        let dy = inputs::activations(&[1, K], FloatType::F32, 4, &device).unwrap();
        let refuse = |ids: &Tensor| dequant_gather_backward_scales(&table, ids, &dy).unwrap_err().to_string();
        assert_eq!(
            refuse(&ids),
            "dequant_gather_backward_scales: ids[0] is 9, but there are 9 rows to choose from"
        );
        let two = Tensor::new(&[0u32, 1], &[2], &device).unwrap();
        assert_eq!(
            refuse(&two),
            "dequant_gather_backward_scales: dy is [1, 256], but ids [2] wants [2, 256]"
        );
    }
}
