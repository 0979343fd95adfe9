//! Weights on the model's device while they learn, so that neither codes that are constants nor
//! gradients go to the host and back in each step.

use super::{LearnedWeight, Weights};
use lowbit_formats::DType;
use lowbit_kernels::ops::{Adam, AdamStep, ScalesGradient, WeightGradient, adam};
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use lowbit_models::Model;
use lowbit_models::tape::Named;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Weights by name.
#[derive(Default)]
pub(super) struct OnDevice(RefCell<HashMap<Arc<str>, There>>);

/// A weight on the model's device, and the codes that it has there.
struct There {
    codes: Arc<[u8]>,
    weight: QuantizedTensor,
    /// Scales, and biases where the format has them, once they have learned there: newer than those
    /// of the host, until they are fetched.
    learned: Vec<Adam>,
}

impl OnDevice {
    /// `there` are on the device already, with the codes of the `weights` of the same names.
    pub fn new(weights: &Weights, there: Vec<Named<QuantizedTensor>>) -> Self {
        let known = there.into_iter().filter_map(|Named { name, value }| {
            let codes = weights.get(&name)?.codes().clone();
            Some((name, There { codes, weight: value, learned: vec![] }))
        });
        Self(RefCell::new(known.collect()))
    }

    /// One with this weight's codes, and any scales.
    pub fn with_codes(
        &self,
        name: &Arc<str>,
        weight: &LearnedWeight,
        model: &Model,
    ) -> Result<QuantizedTensor, KernelError> {
        let codes = weight.codes();
        if let Some(there) = self.0.borrow().get(name).filter(|there| Arc::ptr_eq(&there.codes, codes)) {
            return Ok(there.weight.clone());
        }
        let there = weight.quantized(model.host())?.to_device(model.device())?;
        let entry = There { codes: codes.clone(), weight: there.clone(), learned: vec![] };
        self.0.borrow_mut().insert(name.clone(), entry);
        Ok(there)
    }

    /// A weight as it is now, if it has learned here.
    pub fn learned(&self, name: &str) -> Result<Option<QuantizedTensor>, KernelError> {
        let all = self.0.borrow();
        let Some(there) = all.get(name).filter(|there| !there.learned.is_empty()) else { return Ok(None) };
        let components = there.weight.format().components(there.weight.k())?;
        let rounded = there.learned.iter().zip(&components[1..]);
        let rounded = rounded.map(|(learned, component)| learned.value.cast(component.dtype));
        there.weight.with_scale_tensors(&rounded.collect::<Result<Vec<_>, _>>()?).map(Some)
    }

    /// Takes a step of a weight here, if that is where it learns: on a GPU, scales that are floats
    /// in a component of their own.
    pub fn step(
        &self,
        name: &str,
        weight: &LearnedWeight,
        gradient: &WeightGradient,
        step: AdamStep,
    ) -> Result<bool, KernelError> {
        let mut all = self.0.borrow_mut();
        let (Some(there), WeightGradient::Scales(gradient)) = (all.get_mut(name), gradient) else {
            return Ok(false);
        };
        let device = there.weight.device();
        let is_here = matches!(device, Device::Gpu(_)) && there.weight.has_plain_rows();
        if !(is_here && weight.has_floats_alone() && Arc::ptr_eq(&there.codes, weight.codes())) {
            return Ok(false);
        }
        if there.learned.is_empty() {
            let new = |values: &[f32]| Tensor::new(values, &[values.len()], device);
            let each = weight.learned().map(|learned| {
                let [value, mean, square] = [&learned.values, &learned.mean, &learned.square].map(|x| new(x));
                Ok(Adam { value: value?, mean: mean?, square: square? })
            });
            there.learned = each.collect::<Result<_, KernelError>>()?;
        }
        let ScalesGradient { dscales, dbiases } = gradient;
        for (state, gradient) in there.learned.iter_mut().zip([dscales].into_iter().chain(dbiases)) {
            adam(state, &gradient.reshape(&[gradient.len()])?, step)?;
        }
        Ok(true)
    }

    /// Brings `weights` up to date.
    pub fn fetch(&self, weights: &mut Weights) -> Result<(), KernelError> {
        for (name, there) in self.0.borrow().iter() {
            let Some(weight) = weights.get_mut(name).filter(|_| !there.learned.is_empty()) else { continue };
            for (state, learned) in there.learned.iter().zip(weight.learned_mut()) {
                let host = there.weight.device().host()?;
                let of = [(&state.value, &mut learned.values), (&state.mean, &mut learned.mean)];
                for (from, to) in of.into_iter().chain([(&state.square, &mut learned.square)]) {
                    debug_assert_eq!(from.dtype(), DType::F32);
                    to.copy_from_slice(from.to_device(&host)?.as_slice()?);
                }
            }
            weight.round_scales();
        }
        Ok(())
    }

    /// Lets the host's scales count again: they were put back.
    pub fn forget(&self) {
        self.0.borrow_mut().values_mut().for_each(|there| there.learned.clear());
    }
}
