use crate::{Device, KernelError, Tensor};
use lowbit_formats::{Format, Parts};

/// A weight `[.., N, K]` in some [`Format`]: the format's component tensors, each row after row.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    format: Format,
    shape: Vec<usize>,
    components: Vec<Tensor>,
}

impl QuantizedTensor {
    /// Puts `components` (see [`Format::components`]) together to a weight of `shape`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for fewer than two dimensions or a wrong number of components;
    /// [`KernelError::Format`] for components of a wrong type or size.
    pub fn new(format: Format, shape: &[usize], components: Vec<Tensor>) -> Result<Self, KernelError> {
        let refuse =
            |want: String| KernelError::Shape { op: "weight", operand: "shape", got: shape.to_vec(), want };
        let Some((&k, rows)) = shape.split_last().filter(|(_, rows)| !rows.is_empty()) else {
            return Err(refuse("a weight is [.., N, K]".into()));
        };
        let n = rows.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        let n = n.ok_or_else(|| refuse("that is more than memory can hold".into()))?;
        let wanted = format.components(k)?;
        if wanted.len() != components.len() {
            return Err(refuse(format!(
                "{format} has {} components and {} were given",
                wanted.len(),
                components.len()
            )));
        }
        for (want, got) in wanted.iter().zip(&components) {
            if want.dtype.size() != got.dtype().size() {
                let component = want.name;
                let error = lowbit_formats::FormatError::Type {
                    format,
                    component,
                    want: want.dtype,
                    got: got.dtype(),
                };
                return Err(error.into());
            }
        }
        let weight = Self { format, shape: shape.to_vec(), components };
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = weight.device().clone() {
            return weight.laid_out(&gpu, n);
        }
        format.check(&weight.parts(), n, k)?;
        Ok(weight)
    }

    /// Floats in whole runs lie on a GPU as anywhere; other formats do not, see [`Self::to_device`].
    #[cfg(feature = "gpu")]
    fn laid_out(self, gpu: &crate::gpu::Gpu, n: usize) -> Result<Self, KernelError> {
        let Format::Float(_) = self.format else {
            return Err(KernelError::Unsupported { op: "a weight's own layout", device: gpu.to_string() });
        };
        if n * self.k() != self.components[0].len() {
            let want = format!("its values are {:?}", self.components[0].shape());
            return Err(KernelError::Shape { op: "weight", operand: "shape", got: self.shape, want });
        }
        match self.k().is_multiple_of(crate::gpu::layout::RUN) {
            true => Ok(self),
            false => self.components[0].to_device(&Device::cpu(Some(1))?).and_then(|values| {
                Self::new(self.format, &self.shape, vec![values])?.to_device(&Device::Gpu(gpu.clone()))
            }),
        }
    }

    /// The same weight on another device. A GPU has it in a layout of its own, which does not come back.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has no such memory left or fails; [`KernelError::Unsupported`] from a GPU.
    pub fn to_device(&self, device: &Device) -> Result<Self, KernelError> {
        if self.device().is(device) {
            return Ok(self.clone());
        }
        #[cfg(feature = "gpu")]
        if let (Device::Cpu(_), Device::Gpu(_)) = (self.device(), device) {
            let planes = crate::gpu::layout::planes(self.format, &self.parts(), self.rows(), self.k());
            let upload = |plane: &std::borrow::Cow<'_, [u8]>| Tensor::new(plane, &[plane.len()], device);
            let components = planes.iter().filter(|plane| !plane.is_empty()).map(upload);
            let mut components = components.collect::<Result<Vec<_>, _>>()?;
            if components.is_empty() {
                components.push(Tensor::new::<u8>(&[], &[0], device)?);
            }
            return Ok(Self { format: self.format, shape: self.shape.clone(), components });
        }
        Err(KernelError::Unsupported { op: "moving a weight", device: self.device().to_string() })
    }

    /// Copies weights of one format and shape `[N, K]` into one `[E, N, K]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for none, or for weights that differ.
    pub fn stack(weights: &[Self]) -> Result<Self, KernelError> {
        let refuse = |got: &[usize], want: String| KernelError::Shape {
            op: "stack",
            operand: "weight",
            got: got.to_vec(),
            want,
        };
        let Some(first) = weights.first() else { return Err(refuse(&[], "there is none to stack".into())) };
        if let Some(other) = weights.iter().find(|w| w.shape != first.shape || w.format != first.format) {
            let want =
                format!("the first is {:?} in {} and this is in {}", first.shape, first.format, other.format);
            return Err(refuse(&other.shape, want));
        }
        let components = joined(&weights.iter().collect::<Vec<_>>(), Tensor::stack)?;
        Self::new(first.format, &[&[weights.len()], &first.shape[..]].concat(), components)
    }

    /// Copies the rows of weights `[N, K]` of one format, one after the other, into one weight. On the CPU.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for none, and for weights that differ in format or K; [`KernelError::Unsupported`] on a
    /// GPU.
    pub fn concat(weights: &[&Self]) -> Result<Self, KernelError> {
        let refuse = |got: &[usize], want: String| KernelError::Shape {
            op: "concat",
            operand: "weight",
            got: got.to_vec(),
            want,
        };
        let Some(first) = weights.first() else { return Err(refuse(&[], "there is none".into())) };
        first.device().as_cpu("concat")?;
        let differs = |w: &&&Self| w.shape.len() != 2 || w.k() != first.k() || w.format != first.format;
        if let Some(other) = weights.iter().find(differs) {
            let want = format!("[N, {}] in {} is wanted, as the first is", first.k(), first.format);
            return Err(refuse(&other.shape, format!("{want}; this is in {}", other.format)));
        }
        let rows: usize = weights.iter().map(|weight| weight.n()).sum();
        Self::new(first.format, &[rows, first.k()], joined(weights, Tensor::concat_rows)?)
    }

    /// Rows `start..end` of a weight `[N, K]`, sharing storage.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when they are not there, or for more dimensions.
    pub fn slice(&self, start: usize, end: usize) -> Result<Self, KernelError> {
        let &[n, k] = &self.shape[..] else {
            let want = "[N, K] is wanted".into();
            return Err(KernelError::Shape { op: "slice", operand: "weight", got: self.shape.clone(), want });
        };
        let part = |component: &Tensor| match component.len() {
            0 => Ok(component.clone()),
            len => component.reshape(&[n, len / n.max(1)])?.rows(start, end),
        };
        let components = self.components.iter().map(part).collect::<Result<_, _>>()?;
        Ok(Self { format: self.format, shape: vec![end - start, k], components })
    }

    /// How the values are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Logical sizes, `[.., N, K]`.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Outputs: the last dimension but one.
    pub fn n(&self) -> usize {
        self.shape[self.shape.len() - 2]
    }

    /// Inputs: the last dimension.
    pub fn k(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Rows of all leading dimensions together.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Where it lives.
    pub fn device(&self) -> &Device {
        self.components[0].device()
    }

    /// The component tensors, in the format's order; on a GPU in its own layout.
    pub fn components(&self) -> &[Tensor] {
        &self.components
    }

    /// The components' bytes.
    ///
    /// # Panics
    /// When they are on a GPU.
    pub fn parts(&self) -> Parts<'_> {
        std::array::from_fn(|i| self.components.get(i).map_or(&[][..], Tensor::bytes))
    }

    /// Bytes of all components.
    pub fn size_bytes(&self) -> usize {
        self.components.iter().map(Tensor::size_bytes).sum()
    }
}

/// Each component of weights of one format, put together by `join`.
fn joined(
    weights: &[&QuantizedTensor],
    join: impl Fn(&[&Tensor]) -> Result<Tensor, KernelError>,
) -> Result<Vec<Tensor>, KernelError> {
    let component = |index: usize| {
        let parts: Vec<&Tensor> = weights.iter().map(|weight| &weight.components[index]).collect();
        join(&parts)
    };
    (0..weights.first().map_or(0, |first| first.components.len())).map(component).collect()
}
