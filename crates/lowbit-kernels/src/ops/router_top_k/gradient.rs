//! The gradients of [`router_top_k()`](super::router_top_k()).

use super::RouterParams;
use crate::ops::Check;
use crate::simd::math;
use crate::{KernelError, Tensor};
use lowbit_formats::DType;

/// The gradients of [`router_top_k()`](super::router_top_k()).
#[derive(Clone, Debug)]
pub struct RouterTopKGradient {
    /// `[T, E]`.
    pub dlogits: Tensor,
    /// `[T, 1]`, where there is a shared expert.
    pub dshared: Option<Tensor>,
}

/// The gradients by the logits, for the experts that were chosen: the choice itself is a constant. With `p` the softmax over all
/// experts, or over the chosen ones when `normalize`, and `dp[e]` the dweights of expert e, 0 where it was not chosen:
///
/// ```text
/// dlogits[t, e] = p[e] * (dp[e] - sum over f of p[f] * dp[f])
/// dshared[t]    = sigmoid(shared[t]) * (1 - sigmoid(shared[t])) * dweights[t, top_k]
/// ```
/// | operand | shape | dtype |
/// |---|---|---|
/// | `logits`, `shared`, `ids` | as in [`router_top_k()`](super::router_top_k()) | |
/// | `dweights` | as `ids` | f32 |
/// | `dlogits`, `dshared` | `[T, E]`, `[T, 1]` | f32 |
///
/// # Errors
/// [`KernelError::Shape`], [`KernelError::DType`] and [`KernelError::Value`] for operands that do not fit; [`KernelError::Id`] for an id that
/// is no expert's; [`KernelError::Unsupported`] on a GPU.
pub fn router_top_k_backward(
    logits: &Tensor,
    shared: Option<&Tensor>,
    params: RouterParams,
    ids: &Tensor,
    dweights: &Tensor,
) -> Result<RouterTopKGradient, KernelError> {
    let check = Check("router_top_k_backward");
    let [tokens, experts] = super::check(check, logits, shared, params)?;
    let slots = params.top_k + usize::from(shared.is_some());
    check.shape("ids", ids, &[tokens, slots], || format!("logits {:?} with {params:?}", logits.shape()))?;
    check.shape("dweights", dweights, ids.shape(), || "ids".into())?;
    check.dtype("dweights", dweights, DType::F32)?;
    for (name, operand) in [("ids", ids), ("dweights", dweights)] {
        check.same_device(name, operand.device(), logits.device())?;
    }
    let cpu = logits.device().as_cpu(check.0)?;
    // The shared expert's is behind the others.
    check.ids("ids", ids, experts + usize::from(shared.is_some()))?;
    let wide = check.widened("logits", logits)?;
    let mut dlogits = Tensor::allocate_zeros(logits.shape(), DType::F32, logits.device())?;
    let (logits, ids, dweights) =
        (wide.as_slice::<f32>()?, ids.as_slice::<u32>()?, dweights.as_slice::<f32>()?);
    if let Some(index) = ids.chunks(slots).position(|ids| ids[..params.top_k].contains(&(experts as u32))) {
        return Err(check.value(
            "ids",
            format!("{experts} in row {index}"),
            "that is the shared expert's, which comes last",
        ));
    }
    cpu.for_each_rows(dlogits.as_mut_slice()?, experts, 16 * experts, |first, rows| {
        for (t, row) in (first..).zip(rows.chunks_exact_mut(experts)) {
            let chosen = ids[t * slots..].iter().take(params.top_k).map(|&id| id as usize);
            let chosen: Vec<(usize, f32)> = chosen.zip(dweights[t * slots..].iter().copied()).collect();
            token(&logits[t * experts..(t + 1) * experts], &chosen, params.normalize, row);
        }
    });
    let dshared = shared.map(|shared| {
        let mut dshared = check.widened("shared", shared)?;
        for (t, x) in dshared.as_mut_slice::<f32>()?.iter_mut().enumerate() {
            // 1 - sigmoid(x) is sigmoid(-x), which keeps its digits.
            *x = math::sigmoid(*x) * math::sigmoid(-*x) * dweights[t * slots + params.top_k];
        }
        Ok::<_, KernelError>(dshared)
    });
    Ok(RouterTopKGradient { dlogits, dshared: dshared.transpose()? })
}

/// One token's dlogits, which are zero; `chosen` are experts and their dweights.
fn token(logits: &[f32], chosen: &[(usize, f32)], normalize: bool, dlogits: &mut [f32]) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    let exp = |e: usize| math::exp(logits[e] - max);
    let sum: f32 = match normalize {
        true => chosen.iter().map(|&(e, _)| exp(e)).sum(),
        false => (0..logits.len()).map(exp).sum(),
    };
    let along: f32 = chosen.iter().map(|&(e, dp)| exp(e) / sum * dp).sum();
    if !normalize {
        dlogits.iter_mut().enumerate().for_each(|(e, dlogit)| *dlogit = -(exp(e) / sum * along));
    }
    for &(e, dp) in chosen {
        dlogits[e] = exp(e) / sum * (dp - along);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::router_top_k;
    use crate::ops::router_top_k::reference;
    use crate::ops::testing::{
        FLOATS, assert_close, assert_derivatives, coarse, device, devices, normal, values,
    };
    use numcheck::{Random, gamma};

    fn sigmoid(x: f32) -> f64 {
        1.0 / (1.0 + (-f64::from(x)).exp())
    }

    /// dlogits of one token in f64, and the magnitude of its terms.
    fn reference(logits: &[f32], ids: &[u32], dweights: &[f32], normalize: bool) -> (Vec<f64>, Vec<f64>) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exp = |e: usize| (f64::from(logits[e]) - f64::from(max)).exp();
        let taken = |e: usize| !normalize || ids.contains(&(e as u32));
        let sum: f64 = (0..logits.len()).filter(|&e| taken(e)).map(exp).sum();
        let p = |e: usize| if taken(e) { exp(e) / sum } else { 0.0 };
        let dp =
            |e: usize| ids.iter().position(|&id| id as usize == e).map_or(0.0, |i| f64::from(dweights[i]));
        let along = |f: fn(f64) -> f64| (0..logits.len()).map(|e| p(e) * f(dp(e))).sum::<f64>();
        let (value, most) = (along(|x| x), along(f64::abs));
        (0..logits.len()).map(|e| (p(e) * (dp(e) - value), p(e) * (dp(e).abs() + most))).unzip()
    }

    #[test]
    fn formulas_are_the_derivatives_of_the_forward_reference() {
        let mut random = Random::new(1);
        // Far enough from each other for the choice to stay.
        let logits: Vec<f32> = [0.5, -1.0, 2.0, 0.0, 1.25].to_vec();
        let dweights = coarse(&mut random, 3);
        for normalize in [false, true] {
            let params = RouterParams { top_k: 3, normalize };
            let ids: Vec<u32> =
                reference::router_top_k(&logits, params).iter().map(|choice| choice.id).collect();
            let want = reference(&logits, &ids, &dweights, normalize).0;
            assert_derivatives("dlogits", &logits, &want, |logits| {
                let choices = reference::router_top_k(logits, params);
                assert!(choices.iter().zip(&ids).all(|(choice, &id)| choice.id == id));
                choices.iter().zip(&dweights).map(|(choice, &d)| choice.weight * f64::from(d)).sum()
            });
        }
    }

    #[test]
    fn agrees_with_f64() {
        let mut random = Random::new(2);
        for device in devices() {
            for (tokens, experts, top_k, normalize) in
                [(1, 4, 2, true), (67, 33, 8, true), (67, 33, 8, false), (5, 3, 3, false), (0, 4, 2, true)]
            {
                let params = RouterParams { top_k, normalize };
                let (logits, all) = normal(&mut random, &[tokens, experts], FLOATS[1], &device);
                let (shared, gates) = normal(&mut random, &[tokens, 1], FLOATS[1], &device);
                for shared in [None, Some(&shared)] {
                    let (ids, _) = router_top_k(&logits, shared, params).unwrap();
                    let (dweights, ds) = normal(&mut random, ids.shape(), FLOATS[0], &device);
                    let got = router_top_k_backward(&logits, shared, params, &ids, &dweights).unwrap();
                    let (slots, ids) = (ids.dim(1), ids.as_slice::<u32>().unwrap());
                    let token = |t: usize| {
                        let at = t * slots..t * slots + top_k;
                        reference(&all[t * experts..(t + 1) * experts], &ids[at.clone()], &ds[at], normalize)
                    };
                    let each: Vec<_> = (0..tokens).map(token).collect();
                    let want: Vec<f64> = each.iter().flat_map(|token| token.0.clone()).collect();
                    let most: Vec<f64> = each.iter().flat_map(|token| token.1.clone()).collect();
                    // Exponentials and their sum come twice; a difference to the greatest is 12 at most here.
                    let gamma_of = gamma(2 * (12 + 3 + experts) + top_k + 6);
                    assert_close(&got.dlogits, &[tokens, experts], FLOATS[0], &want, |i| gamma_of * most[i]);
                    assert_eq!(got.dshared.is_some(), shared.is_some());
                    if let Some(dshared) = got.dshared {
                        let of = |t: usize| {
                            sigmoid(gates[t]) * sigmoid(-gates[t]) * f64::from(ds[t * slots + top_k])
                        };
                        let want: Vec<f64> = (0..tokens).map(of).collect();
                        assert_close(&dshared, &[tokens, 1], FLOATS[0], &want, |i| gamma(13) * want[i].abs());
                    }
                }
            }
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = device();
        let logits = Tensor::new(&[0f32; 6], &[2, 3], &device).unwrap();
        let ids = Tensor::new(&[0u32, 1, 3, 2], &[2, 2], &device).unwrap();
        let dweights = Tensor::new(&[0f32; 4], &[2, 2], &device).unwrap();
        let params = RouterParams { top_k: 2, normalize: true };
        let refuse = |ids: &Tensor, dweights: &Tensor, shared: Option<&Tensor>, params| {
            router_top_k_backward(&logits, shared, params, ids, dweights).unwrap_err().to_string()
        };
        assert_eq!(
            refuse(&ids, &dweights, None, params),
            "router_top_k_backward: ids[2] is 3, but there are 3 rows to choose from"
        );
        assert_eq!(
            refuse(&ids, &logits, None, params),
            "router_top_k_backward: dweights is [2, 3], but ids wants [2, 2]"
        );
        let shared = Tensor::new(&[0f32; 2], &[2, 1], &device).unwrap();
        let params = RouterParams { top_k: 1, normalize: true };
        assert_eq!(
            refuse(&ids, &dweights, Some(&shared), params),
            "router_top_k_backward: ids is 3 in row 1, but that is the shared expert's, which comes last"
        );
        assert!(values(&dweights).iter().all(|&x| x == 0.0));
    }
}
