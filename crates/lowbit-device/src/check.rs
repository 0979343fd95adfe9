//! The checks that ops make at their entry.

use crate::{Device, KernelError, Tensor};
use lowbit_formats::{DType, FloatType};
use std::ops::Range;

/// Checks whose errors name an op.
#[derive(Clone, Copy, Debug)]
pub struct Check(pub &'static str);

impl Check {
    /// The element type of an activation or a parameter.
    pub fn float(self, operand: &'static str, x: &Tensor) -> Result<FloatType, KernelError> {
        FloatType::from_dtype(x.dtype()).ok_or_else(|| KernelError::Value {
            op: self.0,
            operand,
            got: x.dtype().to_string(),
            want: "f32, f16 or bf16 is wanted".into(),
        })
    }

    /// The error of an op that has no kernel for a device.
    pub fn unsupported(self, device: &impl ToString) -> KernelError {
        KernelError::Unsupported { op: self.0, device: device.to_string() }
    }

    /// Checks that an operand is on the same device as `x`.
    pub fn same_device(self, operand: &'static str, got: &Device, x: &Device) -> Result<(), KernelError> {
        if got.is(x) {
            return Ok(());
        }
        Err(KernelError::Device { op: self.0, operand, got: got.to_string(), want: x.to_string() })
    }

    /// A size as a kernel's argument: kernels index with 32 bits.
    #[cfg(feature = "gpu")]
    pub fn index(self, value: usize) -> Result<u32, KernelError> {
        let want = "kernels count up to 4294967295";
        u32::try_from(value).map_err(|_| self.value("size", value, want))
    }

    /// `x` as f32: the tensor itself if it is f32.
    pub fn widened(self, operand: &'static str, x: &Tensor) -> Result<Tensor, KernelError> {
        self.float(operand, x)?;
        x.cast(DType::F32)
    }

    /// x and dy as a product's gradient multiplies them: on a GPU as they are, if they are of one
    /// type, and else in f32.
    pub fn of_one_type(self, x: &Tensor, dy: &Tensor) -> Result<[Tensor; 2], KernelError> {
        self.float("x", x)?;
        self.float("dy", dy)?;
        if matches!(x.device(), Device::Gpu(_)) && x.dtype() == dy.dtype() {
            return Ok([x.clone(), dy.clone()]);
        }
        Ok([x.cast(DType::F32)?, dy.cast(DType::F32)?])
    }

    /// Checks that `x` has this element type.
    pub fn dtype(self, operand: &'static str, x: &Tensor, want: DType) -> Result<(), KernelError> {
        if x.dtype() == want {
            return Ok(());
        }
        Err(KernelError::DType { op: self.0, operand, got: x.dtype(), want })
    }

    /// Checks that `x` has the shape that another operand implies; `why` names that operand.
    pub fn shape(
        self,
        operand: &'static str,
        x: &Tensor,
        want: &[usize],
        why: impl FnOnce() -> String,
    ) -> Result<(), KernelError> {
        if x.shape() == want {
            return Ok(());
        }
        Err(self.shape_error(operand, x, format!("{} wants {want:?}", why())))
    }

    /// Checks that `ids` are u32 and less than `count`. Ids on a GPU are not read here, since the
    /// host would have to wait for them: kernels check them, and give NaN for an id that is out of
    /// range.
    pub fn ids(self, operand: &'static str, ids: &Tensor, count: usize) -> Result<(), KernelError> {
        self.dtype(operand, ids, DType::U32)?;
        if let Device::Gpu(_) = ids.device() {
            return Ok(());
        }
        match ids.as_slice::<u32>()?.iter().position(|&id| id as usize >= count) {
            None => Ok(()),
            Some(index) => {
                let id = ids.as_slice::<u32>()?[index];
                Err(KernelError::Id { op: self.0, operand, index, id, count })
            }
        }
    }

    /// The sizes of an operand with `N` dimensions; `names` spells them, as in `[T, C]`.
    pub fn dims<const N: usize>(
        self,
        operand: &'static str,
        x: &Tensor,
        names: &str,
    ) -> Result<[usize; N], KernelError> {
        x.shape().try_into().map_err(|_| self.shape_error(operand, x, format!("{names} is wanted")))
    }

    /// The error for an operand of a wrong shape.
    pub fn shape_error(self, operand: &'static str, x: &Tensor, want: String) -> KernelError {
        KernelError::Shape { op: self.0, operand, got: x.shape().to_vec(), want }
    }

    /// Checks that an epsilon is finite and not negative.
    pub fn eps(self, eps: f32) -> Result<(), KernelError> {
        if eps >= 0.0 && eps.is_finite() {
            return Ok(());
        }
        Err(self.value("eps", eps, "a finite number from 0 is wanted"))
    }

    /// The error for a parameter out of range.
    pub fn value(self, operand: &'static str, got: impl ToString, want: impl Into<String>) -> KernelError {
        KernelError::Value { op: self.0, operand, got: got.to_string(), want: want.into() }
    }

    /// Checks that `cu_seqlens` is u32 `[S + 1]`, where `state` has one row per sequence, or a row
    /// for each of the `slots`, u32 `[S]`.
    pub fn offsets(
        self,
        cu_seqlens: &Tensor,
        state: &Tensor,
        slots: Option<&Tensor>,
    ) -> Result<(), KernelError> {
        self.dtype("cu_seqlens", cu_seqlens, DType::U32)?;
        let rows = state.shape().first().copied().unwrap_or(0);
        let Some(slots) = slots else {
            let why = || format!("state {:?}", state.shape());
            return self.shape("cu_seqlens", cu_seqlens, &[rows + 1], why);
        };
        let [sequences] = self.dims("slots", slots, "[S]")?;
        self.shape("cu_seqlens", cu_seqlens, &[sequences + 1], || format!("slots {:?}", slots.shape()))?;
        self.ids("slots", slots, rows)
    }

    /// The token range of each sequence, from `cu_seqlens` in the host's memory, which
    /// [`Self::offsets`] has checked. The ranges must cover `tokens` tokens.
    pub fn sequences(self, cu_seqlens: &Tensor, tokens: usize) -> Result<Vec<Range<usize>>, KernelError> {
        let offsets = cu_seqlens.as_slice::<u32>()?;
        let rises = offsets.is_sorted() && offsets.first() == Some(&0);
        if !rises || offsets.last().is_none_or(|&end| end as usize != tokens) {
            return Err(KernelError::Value {
                op: self.0,
                operand: "cu_seqlens",
                got: format!("{offsets:?}"),
                want: format!("it rises from 0 to the number of tokens, {tokens}"),
            });
        }
        Ok(offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
    }

    /// An f32 tensor for the op's result; errors name the op.
    pub fn result(self, shape: &[usize], device: &Device) -> Result<Tensor, KernelError> {
        Tensor::allocate(shape, DType::F32, device).map_err(|error| match error {
            KernelError::TooLarge { shape, .. } => KernelError::TooLarge { op: self.0, shape },
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_fit_into_memory() {
        let device = Device::cpu(Some(1)).unwrap();
        let refuse = |shape: &[usize]| Check("op").result(shape, &device).unwrap_err().to_string();
        assert_eq!(
            refuse(&[1 << 40, 1 << 40]),
            "op: [1099511627776, 1099511627776] is more than memory can hold"
        );
        assert!(refuse(&[1 << 61]).starts_with("op: ["));
        assert_eq!(Check("op").result(&[0, 7], &device).unwrap().shape(), [0, 7]);
    }
}
