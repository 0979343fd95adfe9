//! The gradients of [`delta_gates()`](super::delta_gates()).

use super::softplus;
use crate::ops::check::Check;
use crate::simd::math;
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// Heads of a task.
const HEADS: usize = 8;

/// The gradients of [`delta_gates()`](super::delta_gates()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DeltaGatesGradient {
    pub da: Tensor,
    pub db: Tensor,
    pub da_log: Tensor,
    pub ddt_bias: Tensor,
}

/// With `rate[h] = exp(a_log[h])`:
///
/// ```text
/// da[t, h]    = -rate[h] * sigmoid(a[t, h] + dt_bias[h]) * dlog_decay[t, h]
/// ddt_bias[h] = sum over t of da[t, h]
/// da_log[h]   = sum over t of -rate[h] * softplus(a[t, h] + dt_bias[h]) * dlog_decay[t, h]
/// db[t, h]    = sigmoid(b[t, h]) * (1 - sigmoid(b[t, h])) * dbeta[t, h]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `a`, `b` | `[T, Hv]` | f32, f16 or bf16 |
/// | `a_log`, `dt_bias` | `[Hv]` | f32, f16 or bf16 |
/// | `dlog_decay`, `dbeta` | `[T, Hv]` | f32 |
/// | `da`, `db` | `[T, Hv]` | f32 |
/// | `da_log`, `ddt_bias` | `[Hv]` | f32 |
///
/// All arithmetic is f32; sums over tokens go from the first to the last, 64 at a time.
///
/// # Errors
/// As [`delta_gates()`](super::delta_gates()); [`KernelError::Shape`] and [`KernelError::DType`] for gradients that do not fit;
/// [`KernelError::Unsupported`] on a GPU.
pub fn delta_gates_backward(
    [a, b]: [&Tensor; 2],
    [a_log, dt_bias]: [&Tensor; 2],
    [dlog_decay, dbeta]: [&Tensor; 2],
) -> Result<DeltaGatesGradient, KernelError> {
    let check = Check("delta_gates_backward");
    let heads = super::check(check, [a, b], [a_log, dt_bias])?;
    for (name, x) in [("dlog_decay", dlog_decay), ("dbeta", dbeta)] {
        check.shape(name, x, a.shape(), || format!("a {:?}", a.shape()))?;
        check.dtype(name, x, DType::F32)?;
        check.same_device(name, x.device(), a.device())?;
    }
    let cpu = a.device().as_cpu(check.0)?;
    let wide = [("a", a), ("b", b), ("a_log", a_log), ("dt_bias", dt_bias)].map(|(n, x)| check.widened(n, x));
    let [a, b, a_log, dt_bias] = wide;
    let (a, mut db, a_log, dt_bias) = (a?, b?, a_log?, dt_bias?);
    let new = |shape: &[usize]| Tensor::allocate_zeros(shape, DType::F32, a.device());
    let (mut da, mut da_log, mut ddt_bias) = (new(a.shape())?, new(&[heads])?, new(&[heads])?);
    let dbetas = dbeta.as_slice::<f32>()?;
    cpu.for_each_rows(db.as_mut_slice::<f32>()?, 1, super::COST, |first, b| {
        for (b, dbeta) in b.iter_mut().zip(&dbetas[first..]) {
            // 1 - sigmoid(b) is sigmoid(-b), which keeps its digits.
            *b = math::sigmoid(*b) * math::sigmoid(-*b) * dbeta;
        }
    });
    let (a, dlog_decay) = (a.as_slice::<f32>()?, dlog_decay.as_slice::<f32>()?);
    let (a_log, dt_bias) = (a_log.as_slice::<f32>()?, dt_bias.as_slice::<f32>()?);
    // Of a head each: da's are strided, so they are made in a column of their own.
    let of_heads = da_log
        .as_mut_slice::<f32>()?
        .chunks_mut(HEADS)
        .zip(ddt_bias.as_mut_slice::<f32>()?.chunks_mut(HEADS));
    let mut tasks: Vec<_> = of_heads.map(|sums| (sums, vec![])).collect();
    cpu.for_each(tasks.iter_mut().enumerate().collect(), |(task, ((da_log, ddt_bias), columns))| {
        for (i, (da_log, ddt_bias)) in da_log.iter_mut().zip(ddt_bias.iter_mut()).enumerate() {
            let head = task * HEADS + i;
            let gates = a.iter().skip(head).step_by(heads).zip(dlog_decay.iter().skip(head).step_by(heads));
            let one = |(a, dlog_decay): (&f32, &f32)| {
                let (x, dx) = (a + dt_bias[head], -a_log[head].exp() * dlog_decay);
                (math::sigmoid(x) * dx, softplus(x) * dx)
            };
            let (column, of_rate): (Vec<f32>, Vec<f32>) = gates.map(one).unzip();
            (*ddt_bias, *da_log) = (sum(&column), sum(&of_rate));
            columns.push(column);
        }
    });
    let columns = tasks.into_iter().flat_map(|(_, columns)| columns);
    let da_values = da.as_mut_slice::<f32>()?;
    for (head, column) in columns.enumerate() {
        da_values.iter_mut().skip(head).step_by(heads).zip(column).for_each(|(da, x)| *da = x);
    }
    Ok(DeltaGatesGradient { da, db, da_log, ddt_bias })
}

/// A sum in stretches, so that its error does not grow with all of its terms.
fn sum(x: &[f32]) -> f32 {
    x.chunks(64).map(|x| x.iter().sum::<f32>()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::delta_gates::reference;
    use crate::ops::testing::{FLOATS, assert_close, assert_derivatives, coarse, device, devices, normal};
    use numcheck::{Random, gamma};

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    /// `[da, db, da_log, ddt_bias]` in f64, and the bound of each: the sum `a + dt_bias` rounds once, which moves softplus and
    /// sigmoid by at most the rounding; exp and `ln_1p` are within 2 units of the last place, sigmoid within 2.5.
    fn reference(of: [&[f32]; 4], [dlog_decay, dbeta]: [&[f32]; 2]) -> [(Vec<f64>, Vec<f64>); 4] {
        let [a, b, a_log, dt_bias] = of;
        let heads = a_log.len();
        let zeros = |n: usize| (vec![0.0; n], vec![0.0; n]);
        let [mut da, mut db, mut da_log, mut ddt_bias] = [a.len(), a.len(), heads, heads].map(zeros);
        // 64 at a time, and these sums.
        let count = 64 + (a.len() / heads).div_ceil(64);
        for i in 0..a.len() {
            let head = i % heads;
            let x = f64::from(a[i]) + f64::from(dt_bias[head]);
            let dx = -f64::from(a_log[head]).exp() * f64::from(dlog_decay[i]);
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            let moved = dx.abs() * gamma(1) * x.abs();
            da.0[i] = sigmoid(x) * dx;
            da.1[i] = gamma(12) * da.0[i].abs() + moved;
            ddt_bias.0[head] += da.0[i];
            ddt_bias.1[head] += da.1[i] + gamma(count) * (da.0[i].abs() + da.1[i]);
            da_log.0[head] += softplus * dx;
            let off = gamma(18) * (softplus * dx).abs() + moved;
            da_log.1[head] += off + gamma(count) * ((softplus * dx).abs() + off);
            let b = f64::from(b[i]);
            db.0[i] = sigmoid(b) * sigmoid(-b) * f64::from(dbeta[i]);
            db.1[i] = gamma(13) * db.0[i].abs();
        }
        [da, db, da_log, ddt_bias]
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let (mut random, heads) = (Random::new(1), 2);
        let mut of = |n: usize| coarse(&mut random, n);
        let (a, b, a_log, dt_bias) = (of(6), of(6), of(heads), of(heads));
        let (dlog_decay, dbeta) = (of(6), of(6));
        let loss = |a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32]| {
            let gate = |i: usize| {
                let [decay, beta] = reference::delta_gates(a[i], b[i], a_log[i % heads], dt_bias[i % heads]);
                decay.0 * f64::from(dlog_decay[i]) + beta.0 * f64::from(dbeta[i])
            };
            (0..6).map(gate).sum()
        };
        let [da, db, da_log, ddt_bias] = reference([&a, &b, &a_log, &dt_bias], [&dlog_decay, &dbeta]);
        assert_derivatives("da", &a, &da.0, |a| loss(a, &b, &a_log, &dt_bias));
        assert_derivatives("db", &b, &db.0, |b| loss(&a, b, &a_log, &dt_bias));
        assert_derivatives("da_log", &a_log, &da_log.0, |a_log| loss(&a, &b, a_log, &dt_bias));
        assert_derivatives("ddt_bias", &dt_bias, &ddt_bias.0, |dt_bias| loss(&a, &b, &a_log, dt_bias));
    }

    #[test]
    fn agrees_with_f64() {
        let mut random = Random::new(2);
        for device in devices() {
            for (tokens, heads) in [(1, 1), (3, 8), (200, 19), (0, 3)] {
                let mut float = |shape: &[usize], dtype| normal(&mut random, shape, dtype, &device);
                let ((a, av), (b, bv)) =
                    (float(&[tokens, heads], FLOATS[1]), float(&[tokens, heads], FLOATS[2]));
                let ((a_log, lv), (dt_bias, tv)) = (float(&[heads], FLOATS[0]), float(&[heads], FLOATS[0]));
                let [dlog_decay, dbeta] = [(); 2].map(|()| float(&[tokens, heads], FLOATS[0]));
                let got =
                    delta_gates_backward([&a, &b], [&a_log, &dt_bias], [&dlog_decay.0, &dbeta.0]).unwrap();
                let want = reference([&av, &bv, &lv, &tv], [&dlog_decay.1, &dbeta.1]);
                let shapes = [&[tokens, heads][..], &[tokens, heads], &[heads], &[heads]];
                let all = [got.da, got.db, got.da_log, got.ddt_bias];
                for ((got, shape), want) in all.iter().zip(shapes).zip(want) {
                    assert_close(got, shape, FLOATS[0], &want.0, |i| want.1[i]);
                }
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = device();
        let x = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
        let head = Tensor::new(&[0f32; 3], &[3], &device).unwrap();
        let error = delta_gates_backward([&x, &x], [&head, &head], [&x, &head]).unwrap_err().to_string();
        assert_eq!(error, "delta_gates_backward: dbeta is [3], but a [2, 3] wants [2, 3]");
    }
}
