//! [`Tensor`]: contiguous arrays on a CPU or a GPU, shared between clones and views until one of
//! them writes.

use crate::{Device, KernelError, buffer::Buffer};
use bytes::Bytes;
use half::{bf16, f16};
use lowbit_formats::DType;
use std::sync::Arc;

/// An n-dimensional array, contiguous, outermost dimension first. Clones share their storage.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    device: Device,
    storage: Storage,
    /// The index of the first element in the storage.
    offset: usize,
}

#[derive(Clone, Debug)]
enum Storage {
    /// Memory of this process, which ops may write.
    Owned(Arc<Buffer>),
    /// A range of a mapped file.
    Mapped(Bytes),
    /// Memory of a GPU.
    #[cfg(feature = "gpu")]
    Gpu(crate::gpu::Memory),
}

/// The Rust types that a tensor's elements can be viewed as.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The same type as a [`DType`].
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty = $dtype:ident),*) => { $(impl Element for $rust { const DTYPE: DType = DType::$dtype; })* };
}
elements!(f64 = F64, f32 = F32, f16 = F16, bf16 = BF16, u32 = U32, i32 = I32, u8 = U8, i8 = I8);

/// The number of elements of `shape`; none if the product of all its nonzero sizes and `bytes` is
/// more than memory can hold. So no product of some of a tensor's sizes overflows. The sizes of all
/// tensors and weights are checked here.
pub fn elements(shape: &[usize], bytes: usize) -> Option<usize> {
    let all = shape.iter().try_fold(bytes, |product, &n| product.checked_mul(n.max(1)))?;
    // Buffers are rounded up to whole cache lines.
    let fits = all <= isize::MAX as usize - 64;
    fits.then(|| if shape.contains(&0) { 0 } else { all / bytes })
}

/// Bytes of `shape`.
pub fn size(shape: &[usize], dtype: DType) -> Result<usize, KernelError> {
    elements(shape, dtype.size()).map(|count| count * dtype.size()).ok_or_else(|| too_large(shape))
}

fn too_large(shape: &[usize]) -> KernelError {
    KernelError::TooLarge { op: "tensor", shape: shape.to_vec() }
}

impl AsRef<Self> for Tensor {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Tensor {
    /// An uninitialised tensor for an op to fill. In debug builds all its bits are ones (NaN in
    /// every float type, an id out of range), so that tests find elements that were not written.
    ///
    /// # Panics
    /// When memory cannot be allocated; [`Self::allocate`] gives an error instead.
    pub fn empty(shape: &[usize], dtype: DType, device: &Device) -> Self {
        Self::allocate(shape, dtype, device).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Self::empty`].
    ///
    /// # Errors
    /// [`KernelError::TooLarge`] when the size overflows or the system cannot allocate it;
    /// [`KernelError::Gpu`] when a GPU cannot allocate it.
    pub fn allocate(shape: &[usize], dtype: DType, device: &Device) -> Result<Self, KernelError> {
        let bytes = size(shape, dtype)?;
        let storage = match device {
            Device::Cpu(cpu) => {
                Storage::Owned(Arc::new(Buffer::any(bytes, cpu).ok_or_else(|| too_large(shape))?))
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) if cfg!(debug_assertions) => Storage::Gpu(gpu.filled(bytes, 0xff)?),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Storage::Gpu(gpu.allocate(bytes)?),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        Ok(Self { shape: shape.to_vec(), dtype, device: device.clone(), storage, offset: 0 })
    }

    /// A tensor of zeros.
    ///
    /// # Panics
    /// As [`Self::empty`].
    pub fn zeros(shape: &[usize], dtype: DType, device: &Device) -> Self {
        Self::allocate_zeros(shape, dtype, device).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Self::zeros`].
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_zeros(shape: &[usize], dtype: DType, device: &Device) -> Result<Self, KernelError> {
        let bytes = size(shape, dtype)?;
        let storage = match device {
            Device::Cpu(cpu) => {
                Storage::Owned(Arc::new(Buffer::zeros(bytes, cpu).ok_or_else(|| too_large(shape))?))
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Storage::Gpu(gpu.filled(bytes, 0)?),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        Ok(Self { shape: shape.to_vec(), dtype, device: device.clone(), storage, offset: 0 })
    }

    /// The same values on another device; shares memory if the tensor is on that device.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU cannot allocate the memory or fails.
    pub fn to_device(&self, device: &Device) -> Result<Self, KernelError> {
        if self.device.is(device) {
            return Ok(Self { device: device.clone(), ..self.clone() });
        }
        #[cfg(feature = "gpu")]
        {
            let bytes = self.download()?;
            let storage = match device {
                Device::Cpu(_) => {
                    let mut host = Self::allocate(&self.shape, self.dtype, device)?;
                    host.bytes_mut().copy_from_slice(&bytes);
                    return Ok(host);
                }
                Device::Gpu(gpu) => Storage::Gpu(gpu.upload(&bytes)?),
            };
            let (shape, dtype) = (self.shape.clone(), self.dtype);
            Ok(Self { shape, dtype, device: device.clone(), storage, offset: 0 })
        }
        #[cfg(not(feature = "gpu"))]
        unreachable!("there are no two devices without a GPU")
    }

    /// The elements' bytes, copied from a GPU where the tensor is on one.
    #[cfg(feature = "gpu")]
    fn download(&self) -> Result<std::borrow::Cow<'_, [u8]>, KernelError> {
        let (Device::Gpu(gpu), Storage::Gpu(memory)) = (&self.device, &self.storage) else {
            return Ok(self.bytes().into());
        };
        let mut bytes = vec![0; self.size_bytes()];
        gpu.download(memory, self.offset * self.dtype.size(), &mut bytes)?;
        Ok(bytes.into())
    }

    /// The GPU memory that holds the elements, and the byte at which they start.
    #[cfg(feature = "gpu")]
    pub fn memory(&self) -> Result<(&crate::gpu::Memory, usize), KernelError> {
        match &self.storage {
            Storage::Gpu(memory) => Ok((memory, self.offset * self.dtype.size())),
            _ => Err(KernelError::Unsupported { op: "a kernel's operand", device: self.device.to_string() }),
        }
    }

    /// A tensor of the same shape and device that uses other GPU memory.
    #[cfg(feature = "gpu")]
    pub fn over(&self, memory: crate::gpu::Memory, dtype: DType) -> Self {
        Self { dtype, storage: Storage::Gpu(memory), offset: 0, ..self.clone() }
    }

    /// A tensor over memory of `device`, whose first element is its `offset`th.
    #[cfg(feature = "cuda")]
    pub fn on_gpu(
        memory: crate::gpu::Memory,
        offset: usize,
        (shape, dtype): (&[usize], DType),
        device: &Device,
    ) -> Self {
        let (shape, storage) = (shape.to_vec(), Storage::Gpu(memory));
        Self { shape, dtype, device: device.clone(), storage, offset }
    }

    /// True if another tensor sees writes to this one.
    pub fn is_shared(&self) -> bool {
        match &self.storage {
            Storage::Owned(buffer) => Arc::strong_count(buffer) > 1,
            Storage::Mapped(_) => true,
            #[cfg(feature = "gpu")]
            Storage::Gpu(memory) => memory.is_shared(),
        }
    }

    /// Copies the storage of a tensor on a GPU if it is shared. Ops call this before they write in
    /// place.
    #[cfg(feature = "gpu")]
    pub fn unshare(&mut self) -> Result<(), KernelError> {
        if let (Device::Gpu(gpu), true) = (self.device.clone(), self.is_shared()) {
            // Elements are copied as words of their size, whatever their type.
            let word = match self.dtype.size() {
                2 => lowbit_formats::FloatType::F16,
                4 => lowbit_formats::FloatType::F32,
                1 if self.len().is_multiple_of(4) => lowbit_formats::FloatType::F32,
                _ => return Err(KernelError::Unsupported { op: "a copy of bytes", device: gpu.to_string() }),
            };
            *self = self.over(
                gpu.convert(self.buffer()?, self.size_bytes() / word.size(), (word, word))?,
                self.dtype,
            );
        }
        Ok(())
    }

    /// Bytes of all elements.
    pub fn size_bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Copies `values` into a tensor of `shape`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the lengths differ.
    pub fn new<T: Element>(values: &[T], shape: &[usize], device: &Device) -> Result<Self, KernelError> {
        if elements(shape, T::DTYPE.size()) != Some(values.len()) {
            let want = format!("{} values were given", values.len());
            return Err(KernelError::Shape { op: "tensor", operand: "shape", got: shape.to_vec(), want });
        }
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = device {
            let storage = Storage::Gpu(gpu.upload(bytemuck::cast_slice(values))?);
            let shape = shape.to_vec();
            return Ok(Self { shape, dtype: T::DTYPE, device: device.clone(), storage, offset: 0 });
        }
        let mut tensor = Self::allocate(shape, T::DTYPE, device)?;
        tensor.as_mut_slice::<T>()?.copy_from_slice(values);
        Ok(tensor)
    }

    /// Overwrites all elements with `values`, in place: replays of a captured pass that reads this
    /// tensor see them. A tensor that shares its storage gets its own first.
    ///
    /// # Errors
    /// [`KernelError::DType`] and [`KernelError::Shape`] for values of another type or number;
    /// [`KernelError::Gpu`].
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<(), KernelError> {
        self.expect_dtype(T::DTYPE)?;
        if values.len() != self.len() || self.is_shared() {
            *self = Self::new(values, &self.shape, &self.device)?;
            return Ok(());
        }
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = &self.device {
            let (memory, start) = self.memory()?;
            return gpu.write(memory, start, bytemuck::cast_slice(values));
        }
        self.as_mut_slice::<T>()?.copy_from_slice(values);
        Ok(())
    }

    /// Overwrites elements from the `first` on with `values`. On a GPU in place: replays of a
    /// captured pass that reads this tensor see them, and so do tensors that share its storage. On
    /// a CPU a tensor that shares its storage gets its own first.
    ///
    /// # Errors
    /// [`KernelError::DType`] and [`KernelError::Shape`] for values of another type, or more than
    /// there are elements; [`KernelError::Gpu`].
    pub fn write_at<T: Element>(&mut self, first: usize, values: &[T]) -> Result<(), KernelError> {
        self.expect_dtype(T::DTYPE)?;
        let Some(end) = first.checked_add(values.len()).filter(|&end| end <= self.len()) else {
            let want = format!("{} values from element {first} on were given", values.len());
            return Err(KernelError::Shape { op: "write", operand: "x", got: self.shape.clone(), want });
        };
        if values.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = &self.device {
            let (memory, start) = self.memory()?;
            return gpu.write(memory, start + first * T::DTYPE.size(), bytemuck::cast_slice(values));
        }
        self.as_mut_slice::<T>()?[first..end].copy_from_slice(values);
        Ok(())
    }

    /// Sets all elements to zero, in place. A tensor that shares its storage gets its own first.
    ///
    /// # Errors
    /// [`KernelError::Gpu`] when a GPU cannot allocate it.
    pub fn clear(&mut self) -> Result<(), KernelError> {
        if self.is_shared() || self.offset > 0 {
            *self = Self::allocate_zeros(&self.shape, self.dtype, &self.device)?;
            return Ok(());
        }
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = &self.device {
            return gpu.fill(self.memory()?.0, self.size_bytes(), 0);
        }
        self.bytes_mut().fill(0);
        Ok(())
    }

    /// A tensor over a range of a mapped file, without a copy; on a GPU a copy in its memory.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `bytes` are not what `shape` and `dtype` take.
    pub fn mapped(bytes: Bytes, shape: &[usize], dtype: DType, device: &Device) -> Result<Self, KernelError> {
        if size(shape, dtype).ok() != Some(bytes.len()) {
            let want = format!("{} bytes of {dtype} were given", bytes.len());
            return Err(KernelError::Shape { op: "tensor", operand: "shape", got: shape.to_vec(), want });
        }
        let storage = match device {
            Device::Cpu(_) => Storage::Mapped(bytes),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Storage::Gpu(gpu.upload(&bytes)?),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        Ok(Self { shape: shape.to_vec(), dtype, device: device.clone(), storage, offset: 0 })
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Size of dimension `i`; -1 is the last.
    ///
    /// # Panics
    /// When there is no such dimension.
    pub fn dim(&self, i: isize) -> usize {
        self.shape[if i < 0 { self.shape.len().wrapping_add_signed(i) } else { i as usize }]
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device whose memory holds it.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the counts differ.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self, KernelError> {
        if elements(shape, self.dtype.size()) != Some(self.len()) {
            let want = format!("the tensor is {:?}", self.shape);
            return Err(KernelError::Shape { op: "reshape", operand: "shape", got: shape.to_vec(), want });
        }
        Ok(Self { shape: shape.to_vec(), ..self.clone() })
    }

    /// The bytes of its elements on a GPU, u8 `[bytes]`, sharing storage.
    #[cfg(feature = "gpu")]
    pub fn as_bytes(&self) -> Self {
        let (shape, offset) = (vec![self.size_bytes()], self.offset * self.dtype.size());
        Self { shape, dtype: DType::U8, offset, ..self.clone() }
    }

    /// Rows `start..end` of the outermost dimension, sharing storage.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `x` does not have these rows.
    pub fn rows(&self, start: usize, end: usize) -> Result<Self, KernelError> {
        let row: usize = match self.shape.split_first() {
            Some((&rows, row)) if start <= end && end <= rows => row.iter().product(),
            _ => {
                let want = format!("rows {start}..{end} were asked for");
                return Err(KernelError::Shape { op: "rows", operand: "x", got: self.shape.clone(), want });
            }
        };
        let mut view = self.clone();
        view.shape[0] = end - start;
        view.offset += start * row;
        Ok(view)
    }

    /// True if the elements start at a multiple of `bytes` bytes.
    pub fn is_aligned(&self, bytes: usize) -> bool {
        match &self.storage {
            // GPU memory is allocated with a larger alignment than any kernel needs.
            #[cfg(feature = "gpu")]
            Storage::Gpu(_) => (self.offset * self.dtype.size()).is_multiple_of(bytes),
            _ => self.bytes().as_ptr().addr().is_multiple_of(bytes),
        }
    }

    /// The elements' little-endian bytes.
    ///
    /// # Panics
    /// When the tensor is on a GPU: use [`Self::to_device`] first.
    pub fn bytes(&self) -> &[u8] {
        let (start, len) = (self.offset * self.dtype.size(), self.len() * self.dtype.size());
        match &self.storage {
            Storage::Owned(buffer) => &buffer.bytes()[start..start + len],
            Storage::Mapped(bytes) => &bytes[start..start + len],
            #[cfg(feature = "gpu")]
            Storage::Gpu(_) => panic!("bytes: the tensor is on {}", self.device),
        }
    }

    /// The elements.
    ///
    /// # Errors
    /// [`KernelError::DType`] for another element type; [`KernelError::Value`] when they are
    /// misaligned in a mapped file; [`KernelError::Unsupported`] when they are on a GPU.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], KernelError> {
        self.expect_dtype(T::DTYPE)?;
        self.expect_host("as_slice")?;
        bytemuck::try_cast_slice(self.bytes()).map_err(|_| KernelError::Value {
            op: "tensor",
            operand: "address",
            got: format!("{:p}", self.bytes()),
            want: format!("{} wants a multiple of {}", T::DTYPE, align_of::<T>()),
        })
    }

    /// The elements, mutable. A tensor that shares its storage gets its own copy first.
    ///
    /// # Errors
    /// [`KernelError::DType`] for another element type; [`KernelError::Unsupported`] when they are
    /// on a GPU.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], KernelError> {
        self.expect_dtype(T::DTYPE)?;
        self.expect_host("as_mut_slice")?;
        Ok(bytemuck::cast_slice_mut(self.bytes_mut()))
    }

    /// The elements' bytes, mutable. A tensor that shares its storage gets its own copy first.
    ///
    /// # Panics
    /// As [`Self::bytes`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if matches!(self.storage, Storage::Mapped(_)) {
            let mut copy = Self::empty(&self.shape, self.dtype, &self.device);
            copy.bytes_mut().copy_from_slice(self.bytes());
            *self = copy;
        }
        let (start, len) = (self.offset * self.dtype.size(), self.len() * self.dtype.size());
        let Storage::Owned(buffer) = &mut self.storage else {
            unreachable!("a mapped tensor was copied above")
        };
        &mut Arc::make_mut(buffer).bytes_mut()[start..start + len]
    }

    fn expect_host(&self, op: &'static str) -> Result<(), KernelError> {
        match &self.device {
            Device::Cpu(_) => Ok(()),
            Device::Gpu(gpu) => Err(KernelError::Unsupported { op, device: gpu.to_string() }),
        }
    }

    fn expect_dtype(&self, want: DType) -> Result<(), KernelError> {
        if self.dtype == want {
            return Ok(());
        }
        Err(KernelError::DType { op: "tensor", operand: "elements", got: self.dtype, want })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_share_and_writes_separate() {
        let device = Device::cpu(Some(1)).unwrap();
        let whole = Tensor::new(&[0f32, 1., 2., 3., 4., 5.], &[3, 2], &device).unwrap();
        let mut tail = whole.rows(1, 3).unwrap();
        assert_eq!(tail.as_slice::<f32>().unwrap(), [2., 3., 4., 5.]);
        tail.as_mut_slice::<f32>().unwrap()[0] = 9.0;
        assert_eq!(whole.as_slice::<f32>().unwrap()[2], 2.0);
        assert_eq!(tail.reshape(&[4]).unwrap().as_slice::<f32>().unwrap(), [9., 3., 4., 5.]);
    }

    #[test]
    fn writes_in_place_separate_on_the_cpu_and_on_a_gpu() {
        let devices = [Device::cpu(Some(1)).unwrap()];
        #[cfg(feature = "gpu")]
        let devices = [&devices[..], &[crate::testing::gpu()]].concat();
        for device in devices {
            let values = |x: &Tensor| {
                x.to_device(&device.host().unwrap()).unwrap().as_slice::<u32>().unwrap().to_vec()
            };
            let mut x = Tensor::new(&[1u32, 2, 3], &[3], &device).unwrap();
            let fork = x.clone();
            x.write(&[4u32, 5, 6]).unwrap();
            assert_eq!((values(&x), values(&fork)), (vec![4, 5, 6], vec![1, 2, 3]));
            x.write(&[7u32, 8, 9]).unwrap();
            let fork = x.clone();
            x.clear().unwrap();
            assert_eq!((values(&x), values(&fork)), (vec![0; 3], vec![7, 8, 9]));
            drop(fork);
            x.write(&[7u32, 8, 9]).unwrap();
            x.clear().unwrap();
            assert_eq!(values(&x), [0; 3]);
            let mut tail = Tensor::new(&[1u32, 2, 3, 4], &[4], &device).unwrap().rows(1, 3).unwrap();
            tail.write(&[5u32, 6]).unwrap();
            assert_eq!(values(&tail), [5, 6]);
            tail.clear().unwrap();
            assert_eq!(values(&tail), [0; 2]);
            assert!(x.write(&[1u32]).is_err() && x.write(&[1f32; 3]).is_err());
        }
    }

    #[test]
    fn refusals_name_both_sides() {
        let device = Device::cpu(Some(1)).unwrap();
        let x = Tensor::new(&[0f32; 6], &[3, 2], &device).unwrap();
        assert_eq!(x.rows(2, 4).unwrap_err().to_string(), "rows: x is [3, 2], but rows 2..4 were asked for");
        assert_eq!(
            x.reshape(&[4]).unwrap_err().to_string(),
            "reshape: shape is [4], but the tensor is [3, 2]"
        );
        assert_eq!(
            x.as_slice::<u32>().unwrap_err().to_string(),
            "tensor: elements is f32, but u32 is wanted"
        );
        assert!(Tensor::new(&[0f32; 5], &[3, 2], &device).is_err());
        let bytes = Bytes::from_static(&[0; 23]);
        assert!(Tensor::mapped(bytes, &[3, 2], DType::F32, &device).is_err());
    }

    #[test]
    fn sizes_that_overflow_or_that_no_machine_has_are_refused() {
        let device = Device::cpu(Some(1)).unwrap();
        let refused: [&[usize]; 7] = [
            &[1 << 63, 2],
            &[usize::MAX],
            &[1 << 61],
            &[1 << 32, 1 << 32],
            &[0, 1 << 40, 1 << 40],
            &[1 << 40, 1 << 40, 0],
            // This size does not overflow, but no machine has it.
            &[1 << 60],
        ];
        let x = Tensor::new(&[0f32; 6], &[3, 2], &device).unwrap();
        let none = Tensor::new::<f32>(&[], &[0], &device).unwrap();
        for shape in refused {
            let want = format!("tensor: {shape:?} is more than memory can hold");
            for result in [
                Tensor::allocate(shape, DType::F32, &device),
                Tensor::allocate_zeros(shape, DType::F32, &device),
            ] {
                assert_eq!(result.unwrap_err().to_string(), want);
            }
            assert!(Tensor::new::<f32>(&[], shape, &device).is_err());
            assert!(x.reshape(shape).is_err());
        }
        for shape in &refused[..6] {
            assert!(none.reshape(shape).is_err(), "{shape:?}");
            assert!(Tensor::mapped(Bytes::new(), shape, DType::F32, &device).is_err(), "{shape:?}");
        }
        assert_eq!(Tensor::allocate(&[0, 1 << 40], DType::F32, &device).unwrap().len(), 0);
        let scalar = Tensor::new(&[1f32], &[], &device).unwrap();
        assert!(scalar.rows(0, 0).is_err(), "a scalar has no rows");
    }

    #[test]
    fn an_empty_tensor_is_poisoned() {
        let device = Device::cpu(Some(1)).unwrap();
        let x = Tensor::empty(&[2], DType::F32, &device);
        assert!(x.as_slice::<f32>().unwrap().iter().all(|x| x.is_nan()));
    }
}
