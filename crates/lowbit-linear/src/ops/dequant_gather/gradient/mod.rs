//! The gradients of [`dequant_gather()`](super::dequant_gather()).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(test)]
mod tests;

use super::check_table;
#[cfg(feature = "gpu")]
use crate::ops::quantized_matmul::gradient::gpu::group_sums;
use crate::ops::{Check, ScalesGradient};
use crate::simd::{Kernel, Simd, slices};
use crate::{Cpu, Device, KernelError, QuantizedTensor, Tensor};
use lowbit_formats::{DType, Format, FormatError};

/// The gradients of a table's scales and biases, with its codes as constants: over the k of group g
/// and the places i where `ids[i] = v`,
///
/// ```text
/// dscales[v, g] = sum over k, i of dy[i, k] * value(code[v, k])
/// dbiases[v, g] = sum over k, i of dy[i, k]
/// ```
/// and 0 for rows that no id names. As in
/// [`quantized_matmul_backward_scales`](crate::ops::quantized_matmul_backward_scales), which says
/// the rest.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | `table` | `[V, K]` | any format with codes, not repacked |
/// | `ids` | `[..]` | u32 |
/// | `dy` | `[.., K]` | f32, f16, bf16 |
/// | `dscales`, `dbiases` | `[V, K / group]` | f32 |
///
/// # Errors
/// As [`dequant_gather()`](super::dequant_gather()); [`KernelError::Shape`] for a dy that does not
/// fit; [`KernelError::Format`] for a table of plain floats, which has no scales;
/// [`KernelError::Unsupported`] for a repacked table. On a GPU an id that is none of the table's is
/// no error, and left out.
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
    let dy = check.widened("dy", dy)?;
    match table.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let dvalues = gpu::backward_values(gpu, ids, &dy, [count, k])?;
            group_sums(gpu, table, &dvalues)
        }
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(cpu) => {
            let shape = [count, k / group];
            let new = || Tensor::allocate_zeros(&shape, DType::F32, table.device());
            let (mut dscales, mut dbiases) = (new()?, scheme.biased().then(new).transpose()?);
            if !ids.is_empty() && k > 0 {
                let of_table =
                    Table { format: table.format(), bytes: table.parts()[0], count, k, values: &values };
                let biases = dbiases.as_mut().map(|dbiases| dbiases.as_mut_slice()).transpose()?;
                of_table.sums(cpu, (ids.as_slice()?, dy.as_slice()?), (dscales.as_mut_slice()?, biases));
            }
            Ok(ScalesGradient { dscales, dbiases })
        }
    }
}

/// The gradient of all of a table's values, `[V, K]`:
/// `dvalues[v, k] = sum over the places i where ids[i] = v of dy[i, k]`. Operands are
/// [`dequant_gather_backward_scales`]'s, with a table of any format.
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
    let shape = check_table(check, table, ids)?;
    check_dy(check, dy, (table, ids))?;
    let dy = check.widened("dy", dy)?;
    match table.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_values(gpu, ids, &dy, shape),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => {
            let mut dvalues = Tensor::allocate_zeros(table.shape(), DType::F32, table.device())?;
            let (sums, k) = (dvalues.as_mut_slice::<f32>()?, shape[1]);
            for (&id, dy) in ids.as_slice::<u32>()?.iter().zip(dy.as_slice::<f32>()?.chunks_exact(k.max(1))) {
                sums[id as usize * k..][..k].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            }
            Ok(dvalues)
        }
    }
}

fn check_dy(check: Check, dy: &Tensor, (table, ids): (&QuantizedTensor, &Tensor)) -> Result<(), KernelError> {
    check.shape("dy", dy, &[ids.shape(), &[table.k()]].concat(), || format!("ids {:?}", ids.shape()))?;
    check.float("dy", dy)?;
    check.same_device("dy", dy.device(), table.device())
}

/// A table in the host's memory: the codes of `count` rows of k, and the value of each code.
struct Table<'a> {
    format: Format,
    bytes: &'a [u8],
    count: usize,
    k: usize,
    values: &'a [f32; 256],
}

impl Table<'_> {
    /// Writes the gradients of the rows that an id names.
    fn sums(
        &self,
        cpu: &Cpu,
        (ids, dy): (&[u32], &[f32]),
        (dscales, dbiases): (&mut [f32], Option<&mut [f32]>),
    ) {
        let Self { format, bytes, count, k, values } = *self;
        let (row_bytes, groups) = (bytes.len() / count, dscales.len() / count);
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_unstable_by_key(|&i| (ids[i], i));
        let mut results: Vec<(&[usize], Vec<f32>)> =
            order.chunk_by(|&a, &b| ids[a] == ids[b]).map(|places| (places, vec![0.0; 2 * groups])).collect();
        cpu.for_each(results.iter_mut().collect(), |(places, sums): &mut (&[usize], Vec<f32>)| {
            let row = &bytes[ids[places[0]] as usize * row_bytes..][..row_bytes];
            let (dscales, dbiases) = sums.split_at_mut(groups);
            cpu.isa().dispatch(Row { format, row, values, places, dy, k, dscales, dbiases });
        });
        let mut dbiases = dbiases;
        for (places, sums) in results {
            let row = ids[places[0]] as usize * groups;
            dscales[row..row + groups].copy_from_slice(&sums[..groups]);
            if let Some(dbiases) = &mut dbiases {
                dbiases[row..row + groups].copy_from_slice(&sums[groups..]);
            }
        }
    }
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
