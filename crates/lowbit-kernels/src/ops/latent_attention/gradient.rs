//! The gradients of [`latent_attention()`](super::latent_attention()).

use super::LatentAttentionParams;
use crate::ops::{AttentionGradient, Check, add, attention_backward, concat};
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`latent_attention()`](super::latent_attention()).
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct LatentAttentionGradient {
    pub dq: Tensor,
    pub dlatents: Tensor,
}

/// The gradients of `y[t, h] = sum_j p[t, h, j] c[j, ..rank]`: those of
/// [`attention()`](crate::ops::attention()) with c for keys and values, of which both add to c's.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | q, latents, positions | as in [`latent_attention()`](super::latent_attention()) | |
/// | y | `[T, H, rank]`, the op's result | f32, f16, bf16 |
/// | dy | as y | f32, f16, bf16 |
/// | dq, dlatents | q's and latents'; latents that no query sees have gradient 0 | f32 |
///
/// # Errors
/// As [`latent_attention()`](super::latent_attention()); [`KernelError::Shape`] for a y or dy that
/// does not fit.
pub fn latent_attention_backward(
    q: &Tensor,
    latents: &Tensor,
    positions: &Tensor,
    params: &LatentAttentionParams,
    [y, dy]: [&Tensor; 2],
) -> Result<LatentAttentionGradient, KernelError> {
    let check = Check("latent_attention_backward");
    let [tokens, heads, width] = check.dims("q", q, "[T, H, D]")?;
    params.check(check, latents.dim(-1))?;
    let wanted = [tokens, heads, params.rank];
    // Columns that are left out have no gradient, and only dy . y is read of y.
    let rest = width.saturating_sub(params.rank);
    let zeros = Tensor::allocate_zeros(&[tokens, heads, rest], DType::F32, q.device())?;
    let mut whole = vec![];
    for (name, x) in [("y", y), ("dy", dy)] {
        check.shape(name, x, &wanted, || format!("q {:?} and rank {}", q.shape(), params.rank))?;
        check.float(name, x)?;
        let x = x.cast(DType::F32)?;
        whole.push(if rest == 0 { x } else { concat(&[&x, &zeros])? });
    }
    let AttentionGradient { dq, dk, dv } =
        attention_backward([q, latents, latents], positions, &params.attention(), [&whole[0], &whole[1]])?;
    Ok(LatentAttentionGradient { dq, dlatents: add(&dk, &dv)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::latent_attention;
    use crate::ops::testing::{devices, fetched};
    use numcheck::Random;

    /// The op's own derivatives, by differences.
    #[test]
    fn gradients_are_slopes() {
        let ([tokens, heads, capacity, width], rank) = ([3, 2, 5, 7], 4);
        let params = LatentAttentionParams { rank, scale: 0.4, exact: true };
        let mut random = Random::new(3);
        let [qs, cs] = [tokens * heads * width, capacity * width].map(|count| random.normal(count, 1.0));
        let dys = random.normal(tokens * heads * rank, 1.0);
        for device in devices() {
            let new = |x: &[f32], shape: &[usize]| Tensor::new(x, shape, &device).unwrap();
            let at = Tensor::new(&[4u32, 2, 3], &[tokens], &device).unwrap();
            let run = |qs: &[f32], cs: &[f32]| {
                let (q, c) = (new(qs, &[tokens, heads, width]), new(cs, &[1, capacity, width]));
                (latent_attention(&q, &c, &at, &params).unwrap(), q, c)
            };
            let loss = |qs: &[f32], cs: &[f32]| -> f64 {
                let y = fetched(&run(qs, cs).0);
                let y = y.as_slice::<f32>().unwrap();
                y.iter().zip(&dys).map(|(y, dy)| f64::from(y * dy)).sum()
            };
            let (y, q, c) = run(&qs, &cs);
            let dy = new(&dys, &[tokens, heads, rank]);
            let gradient = latent_attention_backward(&q, &c, &at, &params, [&y, &dy]).unwrap();
            for (of_latents, got) in [(false, gradient.dq), (true, gradient.dlatents)] {
                let got = fetched(&got);
                for (i, &got) in got.as_slice::<f32>().unwrap().iter().enumerate() {
                    let moved = |by: f32| {
                        let (mut qs, mut cs) = (qs.clone(), cs.clone());
                        *(if of_latents { &mut cs[i] } else { &mut qs[i] }) += by;
                        loss(&qs, &cs)
                    };
                    let want = (moved(1e-2) - moved(-1e-2)) / 2e-2;
                    // Rounding of losses of about 10 over the step, and the third derivative's
                    // share.
                    assert!((f64::from(got) - want).abs() < 2e-3, "{of_latents} [{i}]: {got} {want}");
                }
            }
        }
    }
}
