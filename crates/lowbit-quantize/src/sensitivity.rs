//! Gives weights bits by what their rounding costs.
//!
//! To second order, rounding the values w of a weight to w + d costs `1/2 sum of F[i] d[i]^2` nats
//! per token, where F is the diagonal of the Fisher information: the mean over tokens of the
//! squared gradient of `ln p(token)`. It is estimated from the gradients of whole windows, since
//! gradients of different tokens hardly correlate at the model's own weights. They are taken at the
//! weights rounded to 8 bits, which have the names under which weights are quantised.
//!
//! Source: LeCun, Denker, Solla, "Optimal Brain Damage" (1990), for the cost; mlx-lm 0.32
//! `quant/dynamic_quant.py` for choosing bits by sensitivity.

use crate::learn::Data;
use crate::planned::{Asked, Planned};
use crate::round::{Job, MlxFormat, Plan, is_router};
use crate::{QuantizeError, Rule};
use lowbit_files::Checkpoint;
use lowbit_formats::{Format, FormatError};
use lowbit_kernels::Device;
use lowbit_kernels::ops::{WeightGradient, WeightPart};
use lowbit_models::tape::{Parameter, Parameters};
use lowbit_models::{Model, Target, likelihood_gradients};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;

/// Windows whose gradients are taken.
const WINDOWS: usize = 32;
/// The numbers of bits that codes may have.
const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// The number of bits to share out, and the data by which they are.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Budget<'a> {
    /// Bits per weight over everything that is quantised, scales and biases included.
    pub bits_per_weight: f64,
    pub data: &'a Data,
    pub device: &'a Device,
}

/// A way to store a weight: its rule, its bits in all, and its cost per token, in nats.
#[derive(Clone, Debug)]
struct Choice {
    bits: usize,
    size: f64,
    cost: f64,
}

/// Rules for a checkpoint in `format`, which is affine: a number of bits for each weight that has
/// no rule of its own and is not a router. All weights together have at most
/// [`Budget::bits_per_weight`], and rounding costs as little as possible, to second order. The
/// rules that were asked for come first. `progress` is called with the number of windows done and
/// of all windows, also while weights are rounded. A checkpoint of 8 bits is written below
/// `output`'s temporary name for this, and removed in the end.
///
/// # Errors
/// [`QuantizeError::Learn`] for another mode than `affine`, and for fewer bits per weight than
/// 2-bit codes have; [`QuantizeError::Interrupted`]; those of rounding and of
/// [`likelihood_gradients`].
pub(crate) fn allocate_bits(
    checkpoint: &Checkpoint,
    output: &Path,
    (format, asked): (&MlxFormat, &Asked),
    budget: Budget<'_>,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Vec<Rule>, QuantizeError> {
    if format.mode != "affine" {
        let problem =
            format!("bits are shared out in affine formats; {} has one number of bits", format.mode);
        return Err(QuantizeError::Learn(problem));
    }
    let plan = Plan::new(checkpoint, output, format, asked)?;
    let fine = format.clone().with_bits(BITS[BITS.len() - 1]);
    let fine = Plan::new(checkpoint, output, &fine, &Asked { rules: vec![], ..*asked })?;
    let mut staged = fine.stage(output)?;
    let windows = windows(budget.data);
    fine.write(&mut staged, &|_| None, &mut |_, _| progress(0, windows.len()))?;
    let fisher = fisher(&Checkpoint::open(staged.path())?, budget.device, &windows, &mut progress)?;
    drop(staged);
    let (mut size, mut values, mut free) = (0.0, 0.0, vec![]);
    for job in plan.jobs().iter().filter(|job| job.is_quantised()) {
        values += (job.rows() * job.k()) as f64;
        match fisher.get(job.module()) {
            Some(fisher)
                if matches!(job.format(), Format::Affine { .. })
                    && !is_router(job.module())
                    && Rule::find(&asked.rules, job.module()).is_none() =>
            {
                free.push((job.module(), choices(job, fisher)?));
                if progress(windows.len(), windows.len()).is_break() {
                    return Err(QuantizeError::Interrupted);
                }
            }
            _ => size += bits(job.format(), job)?,
        }
    }
    let chosen = share_out(&free, budget.bits_per_weight * values - size).ok_or_else(|| {
        let least: f64 = free.iter().map(|(_, choices)| choices[0].size).sum();
        let (wanted, least) = (budget.bits_per_weight, (least + size) / values);
        QuantizeError::Learn(format!(
            "{wanted} bits per weight are too few: {} bits everywhere are {least:.3}, with scales and with what has a rule",
            BITS[0]
        ))
    })?;
    let chosen = free.iter().zip(chosen).map(|((module, choices), i)| Rule::exactly(module, choices[i].bits));
    Ok(asked.rules.iter().cloned().chain(chosen).collect())
}

/// The windows whose gradients are taken: evenly from all that there are.
fn windows(data: &Data) -> Vec<&[u32]> {
    let train = data.train();
    train.iter().step_by(train.len().div_ceil(WINDOWS)).map(Vec::as_slice).collect()
}

/// By module, for each value: the sum over windows of the squared gradient, per token.
fn fisher(
    checkpoint: &Checkpoint,
    device: &Device,
    windows: &[&[u32]],
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<HashMap<String, Vec<f32>>, QuantizeError> {
    let model = Model::load_for(checkpoint, Target::for_gradients(device, None)?)?;
    let weights = model.inventory().weights.into_iter();
    let parameters = weights.map(|weight| (weight.name, Parameter::Weight(weight.value, WeightPart::Values)));
    let parameters: Rc<Parameters> = Rc::new(parameters.collect());
    let tokens: usize = windows.iter().map(|window| window.len() - 1).sum();
    let mut fisher = HashMap::<String, Vec<f32>>::new();
    for (done, window) in windows.iter().enumerate() {
        let gradients = likelihood_gradients(&model, &[window], &parameters)?;
        for (name, gradient) in gradients.parameters() {
            let WeightGradient::Values(values) = gradient.to_device(model.host())? else { continue };
            let values = values.as_slice::<f32>()?;
            let sums = fisher.entry(name.to_string()).or_insert_with(|| vec![0.0; values.len()]);
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * value / tokens as f32);
        }
        if progress(done + 1, windows.len()).is_break() {
            return Err(QuantizeError::Interrupted);
        }
    }
    Ok(fisher)
}

/// The bits of a weight in `format`, with scales and biases.
fn bits(format: Format, job: &Job) -> Result<f64, FormatError> {
    let components = format.components(job.k())?;
    let row: usize = components.iter().map(|component| component.row_bytes()).sum();
    Ok((8 * row * job.rows()) as f64)
}

/// A weight with each number of bits, from the fewest on, its groups as the options have them.
fn choices(job: &Job, fisher: &[f32]) -> Result<Vec<Choice>, QuantizeError> {
    let values = job.values()?;
    let mut rounded = vec![0.0; values.len()];
    let mut choices = vec![];
    for bits_per_code in BITS {
        let Format::Affine { group_size, scales, .. } = job.format() else { continue };
        let format = Format::affine(bits_per_code, group_size.into(), scales)?;
        let encoded = job.encode_as(format)?;
        let mut parts = [&[][..]; 3];
        parts.iter_mut().zip(&encoded.components).for_each(|(part, bytes)| *part = bytes);
        format.decode(&parts, job.rows(), job.k(), &mut rounded)?;
        let errors = values.iter().zip(&rounded).map(|(value, rounded)| f64::from(value - rounded));
        let cost = errors.zip(fisher).map(|(error, &fisher)| 0.5 * f64::from(fisher) * error * error).sum();
        choices.push(Choice { bits: bits_per_code, size: bits(format, job)?, cost });
    }
    Ok(choices)
}

/// A choice for each weight, so that all sizes together are at most `size` and the costs are small:
/// starts from the smallest and always takes the change that saves most per bit. `None` if the
/// smallest are too large already.
fn share_out(weights: &[(&str, Vec<Choice>)], size: f64) -> Option<Vec<usize>> {
    let mut chosen = vec![0; weights.len()];
    let mut left = size - weights.iter().map(|(_, choices)| choices[0].size).sum::<f64>();
    if left < 0.0 {
        return None;
    }
    loop {
        let changes = weights.iter().zip(&chosen).enumerate().flat_map(|(weight, ((_, choices), &now))| {
            (now + 1..choices.len()).map(move |then| {
                let size = choices[then].size - choices[now].size;
                ((choices[now].cost - choices[then].cost) / size, size, weight, then)
            })
        });
        let best = changes.filter(|(gain, size, ..)| *gain > 0.0 && *size <= left);
        let Some((_, size, weight, then)) = best.max_by(|a, b| a.0.total_cmp(&b.0)) else {
            return Some(chosen);
        };
        chosen[weight] = then;
        left -= size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(size: f64, cost: f64) -> (&'static str, Vec<Choice>) {
        let choice =
            |bits: usize| Choice { bits, size: size * bits as f64, cost: cost * 0.25f64.powi(bits as i32) };
        ("", [2, 3, 4].map(choice).into())
    }

    #[test]
    fn bits_go_where_they_save_most() {
        // Each bit divides a cost by four, so that a weight 16 times as sensitive gets two bits
        // more.
        let weights = [weight(10.0, 1.0), weight(10.0, 16.0), weight(10.0, 1.0)];
        assert_eq!(share_out(&weights, 80.0).unwrap(), [0, 2, 0]);
        assert_eq!(share_out(&weights, 60.0).unwrap(), [0, 0, 0]);
        assert_eq!(share_out(&weights, 1000.0).unwrap(), [2, 2, 2]);
        assert!(share_out(&weights, 59.0).is_none());
        // A small weight takes what a large one cannot.
        let weights = [weight(100.0, 100.0), weight(1.0, 1e-3)];
        assert_eq!(share_out(&weights, 202.0 + 50.0).unwrap(), [0, 2]);
    }
}
