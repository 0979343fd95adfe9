use crate::tensor::elements;
use crate::{Device, KernelError, Tensor, panels};
use lowbit_formats::{DType, Format, Parts};

/// A weight `[.., N, K]` in some [`Format`]: the format's component tensors, each stored row by
/// row.
#[derive(Clone, Debug)]
pub struct QuantizedTensor {
    format: Format,
    shape: Vec<usize>,
    components: Vec<Tensor>,
    /// The layout of the components, if they are in panels.
    panels: Option<panels::Layout>,
}

impl QuantizedTensor {
    /// The weight of `shape` with these `components` (see [`Format::components`]).
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
        if elements(shape, 1).is_none() {
            return Err(refuse("that is more than memory can hold".into()));
        }
        let n = rows.iter().product();
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
        let weight = Self { format, shape: shape.to_vec(), components, panels: None };
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = weight.device().clone() {
            return weight.laid_out(&gpu, n);
        }
        format.check(&weight.parts(), n, k)?;
        Ok(weight)
    }

    /// Floats in whole runs lie on a GPU as anywhere; other formats do not, see
    /// [`Self::to_device`].
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

    /// A weight of floats on a GPU whose rows are `values`, padded to whole runs as
    /// [`layout`](crate::gpu::layout) says.
    #[cfg(feature = "gpu")]
    pub fn of_runs(float: lowbit_formats::FloatType, shape: &[usize], values: Tensor) -> Self {
        Self { format: Format::Float(float), shape: shape.to_vec(), components: vec![values], panels: None }
    }

    /// The same weight on another device. For a GPU it is repacked, and cannot be copied back.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU has too little memory left or fails;
    /// [`KernelError::Unsupported`] for a weight on a GPU.
    pub fn to_device(&self, device: &Device) -> Result<Self, KernelError> {
        if self.device().is(device) {
            return Ok(self.clone());
        }
        #[cfg(feature = "gpu")]
        if let (Device::Cpu(_), Device::Gpu(gpu), None) = (self.device(), device, self.panels) {
            if gpu.is_dry_run() {
                let lengths = crate::gpu::layout::repacked_bytes(self.format, self.rows(), self.k());
                let used = lengths.into_iter().enumerate().filter(|&(at, length)| at == 0 || length > 0);
                let components = used.map(|(_, length)| Tensor::allocate(&[length], DType::U8, device));
                let components = components.collect::<Result<_, _>>()?;
                return Ok(Self { format: self.format, shape: self.shape.clone(), components, panels: None });
            }
            let components = crate::gpu::layout::repack(self.format, &self.parts(), self.rows(), self.k());
            let upload = |plane: &std::borrow::Cow<'_, [u8]>| Tensor::new(plane, &[plane.len()], device);
            let components = components.iter().filter(|component| !component.is_empty()).map(upload);
            let mut components = components.collect::<Result<Vec<_>, _>>()?;
            if components.is_empty() {
                components.push(Tensor::new::<u8>(&[], &[0], device)?);
            }
            return Ok(Self { format: self.format, shape: self.shape.clone(), components, panels: None });
        }
        Err(KernelError::Unsupported { op: "moving a weight", device: self.device().to_string() })
    }

    /// The same codes with other scales and biases: `components` are the bytes of all components
    /// but the first, which must be the codes alone. The codes' memory is shared.
    ///
    /// # Errors
    /// [`KernelError::Format`] for components of other sizes; [`KernelError::Unsupported`] for a
    /// repacked weight and for a format that stores scales among its codes; [`KernelError::Gpu`].
    pub fn with_scales(&self, components: &[Vec<u8>]) -> Result<Self, KernelError> {
        self.by_rows("other scales")?;
        let (n, k, device) = (self.rows(), self.k(), self.device());
        let wanted = self.format.components(k)?;
        if wanted.len() < 2 || wanted.len() != components.len() + 1 {
            let device = format!("{} with {} components", self.format, components.len());
            return Err(KernelError::Unsupported { op: "other scales", device });
        }
        for (want, got) in wanted[1..].iter().zip(components) {
            if got.len() != n * want.row_bytes() {
                let shape = format!("{} bytes of {} are wanted", n * want.row_bytes(), want.name);
                return Err(KernelError::Shape {
                    op: "with_scales",
                    operand: "scales",
                    got: vec![got.len()],
                    want: shape,
                });
            }
        }
        let mut parts = Parts::default();
        parts[1..].iter_mut().zip(components).for_each(|(part, bytes)| *part = bytes);
        let others = match device {
            Device::Cpu(_) => {
                let tensors = wanted[1..].iter().zip(components).map(|(component, bytes)| {
                    Tensor::mapped(bytes.clone().into(), &[n, component.columns], component.dtype, device)
                });
                tensors.collect::<Result<Vec<_>, _>>()?
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(_) => {
                let planes = crate::gpu::layout::repack(self.format, &parts, n, k);
                let upload = |plane: &std::borrow::Cow<'_, [u8]>| Tensor::new(plane, &[plane.len()], device);
                planes[1..wanted.len()].iter().map(upload).collect::<Result<_, _>>()?
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        let components = [&self.components[..1], &others].concat();
        Ok(Self { format: self.format, shape: self.shape.clone(), components, panels: None })
    }

    /// As [`Self::with_scales`], with tensors on the weight's device in the format's types, which
    /// have `K / group` values per row.
    ///
    /// # Errors
    /// As [`Self::with_scales`]; [`KernelError::Device`]; [`KernelError::Unsupported`] on a GPU for
    /// rows that are not multiples of 32 values, which are padded there.
    pub fn with_scale_tensors(&self, scales: &[Tensor]) -> Result<Self, KernelError> {
        self.by_rows("other scales")?;
        let wanted = self.format.components(self.k())?;
        let unsupported = |what: String| KernelError::Unsupported { op: "other scales", device: what };
        if wanted.len() < 2 || wanted.len() != scales.len() + 1 {
            return Err(unsupported(format!("{} with {} components", self.format, scales.len())));
        }
        let check = crate::Check("with_scale_tensors");
        for (want, got) in wanted[1..].iter().zip(scales) {
            check.same_device("scales", got.device(), self.device())?;
            check.dtype("scales", got, want.dtype)?;
            if got.len() != self.rows() * want.columns {
                let want = format!("{} rows of {} {} are wanted", self.rows(), want.columns, want.name);
                return Err(check.shape_error("scales", got, want));
            }
        }
        let others = scales.iter().zip(&wanted[1..]).map(|(scales, want)| match self.device() {
            Device::Cpu(_) => scales.reshape(&[self.rows(), want.columns]),
            #[cfg(feature = "gpu")]
            Device::Gpu(_) if self.has_plain_rows() => Ok(scales.as_bytes()),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Err(unsupported(format!("{gpu} for rows of {} values", self.k()))),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        });
        let components = self.components[..1].iter().cloned().map(Ok).chain(others);
        Ok(Self { components: components.collect::<Result<_, _>>()?, ..self.clone() })
    }

    /// True if its components' rows lie as the format has them, one after the other. On a GPU they
    /// may be padded, or taken apart.
    pub fn has_plain_rows(&self) -> bool {
        match self.device() {
            Device::Cpu(_) => !self.is_repacked(),
            #[cfg(feature = "gpu")]
            Device::Gpu(_) => {
                self.format.unpack().is_none() && self.k().is_multiple_of(crate::gpu::layout::RUN)
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        }
    }

    /// The same weight repacked into panels, for the CPU's products in integers. These round x to 8
    /// bits per 32 values; with many rows on a processor with AMX, x and the weight are rounded to
    /// bf16 instead. Codes that are small floats (e4m3) are multiplied in f32, which rounds
    /// nothing. Other weights stay as they are: floats, weights with NaN or with scales of 2^100
    /// and more, and weights on a GPU. Products of a weight that is not repacked are in f32.
    ///
    /// # Errors
    /// [`KernelError::TooLarge`] when there is too little memory.
    pub fn to_panels(&self) -> Result<Self, KernelError> {
        let (Device::Cpu(cpu), None) = (self.device(), self.panels) else { return Ok(self.clone()) };
        let Some(layout) = panels::Layout::of(self.format, self.n(), self.k()) else {
            return Ok(self.clone());
        };
        let count = layout.panels() * (self.rows() / self.n().max(1));
        let allocate = |bytes: usize| Tensor::allocate(&[count, bytes], DType::U8, self.device());
        let [codes, scales, biases] = layout.bytes();
        let mut components = [allocate(codes)?, allocate(scales)?, allocate(biases)?];
        let [codes, scales, biases] = components.each_mut().map(|component| component.as_mut_slice::<u8>());
        let out = [codes?, scales?, biases?];
        let packed = panels::pack(cpu, &layout, self.format, &self.parts(), out);
        Ok(match packed {
            true => Self { components: components.into(), panels: Some(layout), ..self.clone() },
            false => self.clone(),
        })
    }

    /// The components of a weight in panels.
    pub fn panels(&self) -> Option<panels::Unpack<'_>> {
        self.panels.map(|layout| panels::Unpack::new(layout, self.parts()))
    }

    /// The components of two weights as one whose panels are those of both in turn; `None` where
    /// either is not in panels, or they lie in different ways.
    pub fn panels_in_turn<'a>(&'a self, other: &'a Self) -> Option<panels::Unpack<'a>> {
        self.panels()?.in_turn(other.panels()?)
    }

    /// True if it is in panels.
    pub fn is_repacked(&self) -> bool {
        self.panels.is_some()
    }

    /// Refuses a weight in panels, which hold rows of one matrix each.
    pub fn by_rows(&self, op: &'static str) -> Result<(), KernelError> {
        match self.panels {
            None => Ok(()),
            Some(_) => Err(KernelError::Unsupported { op, device: "a repacked weight".into() }),
        }
    }

    /// Parts `start..end` of the outermost dimension, sharing storage.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when they do not exist; [`KernelError::Unsupported`] for rows of a
    /// repacked weight.
    pub fn slice(&self, start: usize, end: usize) -> Result<Self, KernelError> {
        if self.shape.len() == 2 {
            self.by_rows("a part of the rows")?;
        }
        let count = self.shape[0];
        if start > end || end > count {
            let want = format!("{start}..{end} of the outermost were asked for");
            return Err(KernelError::Shape { op: "slice", operand: "weight", got: self.shape.clone(), want });
        }
        self.map_components([&[end - start], &self.shape[1..]].concat(), |component| match component.len() {
            0 => Ok(component.clone()),
            len => component.reshape(&[count, len / count])?.rows(start, end),
        })
    }

    /// The same rows as a weight of `shape`, sharing storage.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for another K or another number of rows; [`KernelError::Unsupported`]
    /// for another N of a repacked weight.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self, KernelError> {
        if shape.get(shape.len().wrapping_sub(2)) != Some(&self.n()) {
            self.by_rows("another number of rows")?;
        }
        match shape {
            [_, .., k] if *k == self.k() && elements(shape, 1) == Some(self.rows() * k) => {
                Ok(Self { shape: shape.to_vec(), ..self.clone() })
            }
            _ => {
                let (got, want) = (shape.to_vec(), format!("the weight is {:?}", self.shape));
                Err(KernelError::Shape { op: "reshape", operand: "shape", got, want })
            }
        }
    }

    /// The weight of `shape` that has `of(component)` for each component, in the format's order.
    pub fn map_components(
        &self,
        shape: Vec<usize>,
        of: impl FnMut(&Tensor) -> Result<Tensor, KernelError>,
    ) -> Result<Self, KernelError> {
        let components = self.components.iter().map(of).collect::<Result<_, _>>()?;
        Ok(Self { format: self.format, shape, components, panels: self.panels })
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Logical sizes, `[.., N, K]`.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// N, the outputs: the last dimension but one.
    pub fn n(&self) -> usize {
        self.shape[self.shape.len() - 2]
    }

    /// K, the inputs: the last dimension.
    pub fn k(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Rows of all leading dimensions together.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// The device whose memory holds it.
    pub fn device(&self) -> &Device {
        self.components[0].device()
    }

    /// The component tensors, in the format's order; on a GPU and after [`Self::to_panels`]
    /// repacked.
    pub fn components(&self) -> &[Tensor] {
        &self.components
    }

    /// The components' bytes; in panels of a repacked weight.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs;
    use lowbit_formats::FloatType;

    const Q4: Format = Format::Q4_0;

    fn weight(format: Format, shape: &[usize], seed: u64) -> QuantizedTensor {
        inputs::weight(format, shape, seed, &Device::cpu(Some(1)).unwrap()).unwrap()
    }

    #[test]
    fn parts_of_a_whole() {
        for format in [Q4, Format::affine(3, 64, FloatType::BF16).unwrap()] {
            let [a, b] = [weight(format, &[3, 4, 64], 1), weight(format, &[2, 4, 64], 2)];
            let whole = QuantizedTensor::concat(&[&a, &b]).unwrap();
            assert_eq!(whole.shape(), [5, 4, 64]);
            assert_eq!(whole.slice(0, 3).unwrap().parts(), a.parts());
            assert_eq!(whole.slice(3, 5).unwrap().parts(), b.parts());
            let rows = whole.reshape(&[20, 64]).unwrap();
            let of_each = whole.narrow(1, 2).unwrap();
            assert_eq!(of_each.shape(), [5, 2, 64]);
            for i in 0..5 {
                let want = rows.slice(4 * i + 1, 4 * i + 3).unwrap();
                assert_eq!(of_each.slice(i, i + 1).unwrap().parts(), want.parts());
            }
            let singles: Vec<_> =
                (0..3).map(|i| a.slice(i, i + 1).unwrap().reshape(&[4, 64]).unwrap()).collect();
            let stack = QuantizedTensor::stack(&singles).unwrap();
            assert_eq!((stack.shape(), stack.parts()), (a.shape(), a.parts()));
        }
    }

    #[test]
    fn other_scales_for_the_same_codes() {
        let format = Format::affine(3, 64, FloatType::BF16).unwrap();
        let [a, b] = [weight(format, &[3, 4, 64], 1), weight(format, &[3, 4, 64], 2)];
        let scales: Vec<Vec<u8>> = b.parts()[1..].iter().map(|part| part.to_vec()).collect();
        let mixed = a.with_scales(&scales).unwrap();
        assert_eq!((mixed.shape(), mixed.parts()), (a.shape(), [a.parts()[0], b.parts()[1], b.parts()[2]]));
        let message = |result: Result<QuantizedTensor, KernelError>| result.unwrap_err().to_string();
        assert_eq!(
            message(a.with_scales(&[scales[0].clone(), vec![0; 3]])),
            "with_scales: scales is [3], but 24 bytes of biases are wanted"
        );
        let tensors: Vec<Tensor> = b.components()[1..].to_vec();
        assert_eq!(a.with_scale_tensors(&tensors).unwrap().parts(), mixed.parts());
        let f32s = tensors[0].cast(DType::F32).unwrap();
        let error = message(a.with_scale_tensors(&[f32s, tensors[1].clone()]));
        assert_eq!(error, "with_scale_tensors: scales is f32, but bf16 is wanted");
        let few = tensors[1].reshape(&[12, 1]).unwrap().rows(0, 3).unwrap();
        assert_eq!(
            message(a.with_scale_tensors(&[tensors[0].clone(), few])),
            "with_scale_tensors: scales is [3, 1], but 12 rows of 1 biases are wanted"
        );
        let q4 = weight(Q4, &[4, 64], 1);
        assert_eq!(message(q4.with_scales(&[])), "other scales does not run on Q4_0 with 0 components");
        assert_eq!(
            message(q4.with_scale_tensors(&[])),
            "other scales does not run on Q4_0 with 0 components"
        );
    }

    #[test]
    fn panels_are_cut_between_matrices_alone() {
        let stack = weight(Q4, &[3, 20, 64], 1).to_panels().unwrap();
        assert!(stack.is_repacked() && stack.slice(1, 3).unwrap().is_repacked());
        assert_eq!(stack.slice(1, 3).unwrap().reshape(&[2, 1, 20, 64]).unwrap().shape(), [2, 1, 20, 64]);
        let both = QuantizedTensor::concat(&[&stack, &stack]).unwrap();
        assert_eq!((both.shape(), both.slice(3, 6).unwrap().parts()), (&[6, 20, 64][..], stack.parts()));
        let message = |result: Result<QuantizedTensor, KernelError>| result.unwrap_err().to_string();
        let one = stack.slice(0, 1).unwrap().reshape(&[20, 64]).unwrap();
        assert_eq!(message(one.slice(0, 16)), "a part of the rows does not run on a repacked weight");
        assert_eq!(
            message(stack.reshape(&[60, 64])),
            "another number of rows does not run on a repacked weight"
        );
        assert_eq!(message(stack.narrow(0, 16)), "narrow does not run on a repacked weight");
        assert_eq!(
            message(QuantizedTensor::concat(&[&one, &one])),
            "concat does not run on a repacked weight"
        );
        let plain = weight(Q4, &[3, 20, 64], 1);
        assert_eq!(
            message(QuantizedTensor::concat(&[&stack, &plain])),
            "concat does not run on a repacked weight"
        );
    }

    #[test]
    fn scales_that_products_in_integers_would_overflow_stay() {
        for (format, group) in [(Format::Mxfp4, 32), (Format::affine(4, 64, FloatType::F32).unwrap(), 64)] {
            let device = Device::cpu(Some(1)).unwrap();
            let values: Vec<f32> = (0..4 * group).map(|i| (i as f32 - 50.0) * 1e34).collect();
            let encoded = format.encode(&values, group).unwrap();
            let components = format.components(group).unwrap();
            let tensor = |(bytes, component): (Vec<u8>, &lowbit_formats::Component)| {
                Tensor::mapped(bytes.into(), &[4, component.columns], component.dtype, &device).unwrap()
            };
            let components = encoded.into_iter().zip(&components).map(tensor).collect();
            let weight = QuantizedTensor::new(format, &[4, group], components).unwrap();
            assert!(!weight.to_panels().unwrap().is_repacked(), "{format}");
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let [a, b] = [weight(Q4, &[3, 4, 64], 1), weight(Format::Q8_0, &[3, 4, 64], 2)];
        let message = |result: Result<QuantizedTensor, KernelError>| result.unwrap_err().to_string();
        assert_eq!(
            message(QuantizedTensor::concat(&[&a, &b])),
            "concat: weight is [3, 4, 64], but the first is [3, 4, 64] in Q4_0 and this is in Q8_0"
        );
        assert_eq!(
            message(a.slice(2, 4)),
            "slice: weight is [3, 4, 64], but 2..4 of the outermost were asked for"
        );
        assert_eq!(
            message(a.narrow(3, 2)),
            "narrow: weight is [3, 4, 64], but 2 rows from 3 on were asked for"
        );
        for shape in [&[3, 256][..], &[64], &[3, 5, 64], &[], &[1 << 63, 2, 64], &[12 << 56, 1 << 8, 64]] {
            let want = format!("reshape: shape is {shape:?}, but the weight is [3, 4, 64]");
            assert_eq!(message(a.reshape(shape)), want);
        }
    }
}
