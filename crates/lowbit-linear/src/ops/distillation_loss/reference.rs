//! The loss and its gradient in f64, and how far f32 may be from each.
//!
//! In units of `u = 2^-24`: a logit divided by the temperature rounds twice, its difference to the
//! greatest once, and an exponential makes a relative error of that error and adds 2; a sum is of
//! 1024 terms at a time, and both sums' errors join. So a probability is within
//! `rho = 2 (6 span + 8) + 1024` units, where `span` is the greatest magnitude of a logit over the
//! temperature. A logarithm of a sum is off by as much, absolutely.

use crate::gamma::gamma;

/// One token's loss, and its bound.
pub(super) type Loss = (f64, f64);

const CHUNK: usize = 1024;

/// `(kl, dlogits with the bound of each)`; each logit of the student is off by `error`, absolutely.
pub(super) fn distillation_loss(
    student: &[f64],
    teacher: &[f64],
    dkl: f64,
    temperature: f64,
    error: &dyn Fn(usize) -> f64,
) -> (Loss, Vec<Loss>) {
    let scaled = |x: &[f64]| x.iter().map(|x| x / temperature).collect::<Vec<_>>();
    let (z, u) = (scaled(student), scaled(teacher));
    let max = |x: &[f64]| x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let softmax = |x: &[f64]| {
        let most = max(x);
        let sum: f64 = x.iter().map(|x| (x - most).exp()).sum();
        (x.iter().map(|x| (x - most).exp() / sum).collect::<Vec<_>>(), most, sum.ln())
    };
    let ((q, max_z, ln_z), (p, max_u, ln_u)) = (softmax(&z), softmax(&u));
    let finite = |x: &[f64]| x.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
    let span = finite(&z).max(finite(&u)).ceil() as usize;
    let off = (0..z.len()).map(|v| error(v) / temperature).fold(0.0, f64::max);
    let rho = gamma(2 * (6 * span + 8) + CHUNK) + 2.0 * off;
    let (mut kl, mut kl_bound) = (0.0, f64::from(f32::MIN_POSITIVE) * z.len() as f64);
    for v in (0..z.len()).filter(|&v| p[v] > 0.0) {
        let (teachers, students) = (u[v] - max_u - ln_u, z[v] - max_z - ln_z);
        kl += p[v] * (teachers - students);
        let magnitude = teachers.abs() + students.abs() + ln_u + ln_z;
        kl_bound += p[v] * (magnitude * (rho + gamma(CHUNK + 8)) + 3.0 * rho);
    }
    let dlogits = q.iter().zip(&p).map(|(q, p)| {
        let bound = (dkl / temperature).abs() * (q + p) * (rho + gamma(5)) + f64::from(f32::MIN_POSITIVE);
        (dkl / temperature * (q - p), bound)
    });
    ((kl, kl_bound), dlogits.collect())
}
