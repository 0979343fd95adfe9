//! The loss and its gradient in f64, and how far f32 may be from each.
//!
//! Each sum of exponentials is as in the dense loss: within `rho` of its value, relatively, with
//! `rho` as `distillation_loss/reference.rs` derives it, but that a logit's difference to the
//! greatest of all takes one step more (to the greatest of its own sum, and from there), and the
//! join of both sums 8 operations. A logarithm of a sum is off by as much, absolutely.

use crate::gamma::gamma;

/// A value, and its bound.
pub(super) type Bounded = (f64, f64);

const CHUNK: usize = 1024;

/// A teacher's targets for one token.
pub(super) struct Known<'a> {
    pub ids: &'a [u32],
    pub ln_p: &'a [f64],
    pub ln_rest: f64,
}

/// `(kl, dlogits)`; each logit of the student is off by `error`, absolutely.
pub(super) fn distillation_loss_top_k(
    student: &[f64],
    known: &Known<'_>,
    dkl: f64,
    temperature: f64,
    error: &dyn Fn(usize) -> f64,
) -> (Bounded, Vec<Bounded>) {
    let z: Vec<f64> = student.iter().map(|x| x / temperature).collect();
    let mut places = vec![None; z.len()];
    known.ids.iter().enumerate().for_each(|(i, &id)| places[id as usize] = Some(i));
    let place = |v: usize| places[v];
    let ln_sum = |of: &dyn Fn(usize) -> bool| {
        let of: Vec<f64> = (0..z.len()).filter(|&v| of(v)).map(|v| z[v]).collect();
        let most = of.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if most == f64::NEG_INFINITY {
            return most;
        }
        most + of.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
    };
    let (ln_all, ln_rest) = (ln_sum(&|_| true), ln_sum(&|v| place(v).is_none()));
    let span = z.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs())).ceil() as usize;
    let off = (0..z.len()).map(|v| error(v) / temperature).fold(0.0, f64::max);
    let rho = gamma(2 * (8 * span + 16) + CHUNK) + 2.0 * off;
    let (mut kl, mut kl_bound) = (0.0, f64::from(f32::MIN_POSITIVE) * (known.ids.len() + 1) as f64);
    let mut outcome = |ln_p: f64, ln_q: f64| {
        let p = ln_p.exp();
        if p > 0.0 {
            kl += p * (ln_p - ln_q);
            let magnitude = ln_p.abs() + ln_q.abs() + ln_all.abs() + span as f64;
            // p is e^ln_p: its argument is exact.
            kl_bound += p * (magnitude * (rho + gamma(CHUNK + 8)) + 3.0 * rho);
        }
    };
    for (&id, &ln_p) in known.ids.iter().zip(known.ln_p) {
        outcome(ln_p, z[id as usize] - ln_all);
    }
    outcome(known.ln_rest, ln_rest - ln_all);
    let scale = dkl / temperature;
    let dlogits = (0..z.len()).map(|v| {
        let (q, p) = match place(v) {
            Some(i) => ((z[v] - ln_all).exp(), known.ln_p[i].exp()),
            None if z[v] == f64::NEG_INFINITY => (0.0, 0.0),
            None => {
                let share = (z[v] - ln_rest).exp();
                (share * (ln_rest - ln_all).exp(), share * known.ln_rest.exp())
            }
        };
        let bound = scale.abs() * (q + p) * (2.0 * rho + gamma(8)) + f64::from(f32::MIN_POSITIVE);
        (scale * (q - p), bound)
    });
    ((kl, kl_bound), dlogits.collect())
}
