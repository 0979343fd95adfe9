//! Tensors over memory that is not lowbit's, so that another engine can call an op on its own data.
//!
//! | memory | how | copied |
//! |---|---|---|
//! | of the host, that can be handed over or counted (a `Vec`, an `Arc`, a memory map) | [`Tensor::from_owner`] | no |
//! | of the host, that outlives the tensor by other means | [`Tensor::from_host_ptr`] | no |
//! | of a file, as [`Bytes`] | [`Tensor::mapped`] | no |
//! | of a CUDA device | `Tensor::from_cuda_ptr` (feature `cuda`), on a `Device::cuda_on_stream` | no |
//!
//! On a GPU the first three are copied to its memory. On the CPU a weight is a
//! [`QuantizedTensor`](crate::QuantizedTensor) of such tensors; `QuantizedTensor::to_device`
//! repacks it for a GPU.

use crate::{Device, Element, KernelError, Tensor};
use bytes::Bytes;
use lowbit_formats::DType;
use std::marker::PhantomData;

/// Elements as the bytes that they are.
struct Owner<T, O> {
    owner: O,
    element: PhantomData<fn() -> T>,
}

impl<T: Element, O: AsRef<[T]>> AsRef<[u8]> for Owner<T, O> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self.owner.as_ref())
    }
}

impl Tensor {
    /// A tensor over the elements of `owner`, which is dropped with the last tensor over them. On
    /// the CPU nothing is copied, and the elements are never written: an op that writes in place
    /// makes a copy first. On a GPU it is a copy in its memory.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when `owner` has another number of elements than `shape`;
    /// [`KernelError::Gpu`] when a GPU has too little memory left.
    pub fn from_owner<T: Element>(
        owner: impl AsRef<[T]> + Send + 'static,
        shape: &[usize],
        device: &Device,
    ) -> Result<Self, KernelError> {
        let bytes = Bytes::from_owner(Owner { owner, element: PhantomData });
        Self::mapped(bytes, shape, T::DTYPE, device)
    }

    /// A tensor of `shape` and `dtype` over the host's memory at `start`, which lowbit neither
    /// frees nor writes: an op that writes in place makes a copy first. On a GPU it is a copy in
    /// its memory.
    ///
    /// # Errors
    /// [`KernelError::Value`] for a null pointer, or one that is not a multiple of `dtype`'s size;
    /// [`KernelError::TooLarge`] when the bytes of `shape` overflow; [`KernelError::Gpu`] when a
    /// GPU has too little memory left.
    ///
    /// # Safety
    /// The bytes of `shape` from `start` on must be initialised, readable and unchanged until the
    /// last tensor over them is dropped: this one, its clones, and tensors that share its storage
    /// ([`Tensor::rows`], [`Tensor::reshape`], a cast to the same type, an op's result that is
    /// documented as a view).
    #[allow(unsafe_code)]
    pub unsafe fn from_host_ptr(
        start: *const u8,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Self, KernelError> {
        check_address(start.addr() as u64, dtype)?;
        let len = crate::tensor::size(shape, dtype)?;
        // SAFETY: the caller promises as many bytes for as long as there is a tensor, and `Bytes`
        // is in no other place.
        let bytes: &'static [u8] = unsafe { std::slice::from_raw_parts(start, len) };
        Self::mapped(Bytes::from_static(bytes), shape, dtype, device)
    }
}

/// That memory at `address` can hold elements of `dtype`.
pub fn check_address(address: u64, dtype: DType) -> Result<(), KernelError> {
    if address == 0 || !address.is_multiple_of(dtype.size() as u64) {
        return Err(KernelError::Value {
            op: "tensor",
            operand: "address",
            got: format!("{address:#x}"),
            want: format!("{dtype} wants a multiple of {} that is not null", dtype.size()),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn cpu() -> Device {
        Device::cpu(Some(1)).unwrap()
    }

    /// Elements of another engine, and whether it has them back.
    struct Engine(Vec<f32>, Arc<AtomicBool>);

    impl AsRef<[f32]> for Engine {
        fn as_ref(&self) -> &[f32] {
            &self.0
        }
    }

    impl Drop for Engine {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_owner_is_not_copied_and_dropped_with_the_last_tensor() {
        let dropped = Arc::new(AtomicBool::new(false));
        let engine = Engine(vec![3.0, 4.0, 0.5, -1.0, 2.0, 8.0], dropped.clone());
        let address = engine.0.as_ptr();
        let x = Tensor::from_owner(engine, &[2, 3], &cpu()).unwrap();
        assert_eq!((x.as_slice::<f32>().unwrap().as_ptr(), x.dtype()), (address, DType::F32));
        let row = x.rows(1, 2).unwrap();
        drop(x);
        assert!(!dropped.load(Ordering::Relaxed), "a view sees it");
        assert_eq!(row.as_slice::<f32>().unwrap(), [-1.0, 2.0, 8.0]);
        drop(row);
        assert!(dropped.load(Ordering::Relaxed));
    }

    #[test]
    fn what_is_written_is_a_copy() {
        let values = Arc::new([1.0f32, 2.0]);
        struct Shared(Arc<[f32; 2]>);
        impl AsRef<[f32]> for Shared {
            fn as_ref(&self) -> &[f32] {
                &self.0[..]
            }
        }
        let mut x = Tensor::from_owner(Shared(values.clone()), &[2], &cpu()).unwrap();
        x.as_mut_slice::<f32>().unwrap()[0] = 7.0;
        assert_eq!((x.as_slice::<f32>().unwrap(), values.as_slice()), (&[7.0, 2.0][..], &[1.0, 2.0][..]));
        let mut x = Tensor::from_owner(Shared(values.clone()), &[2], &cpu()).unwrap();
        x.write(&[5.0f32, 6.0]).unwrap();
        x.clear().unwrap();
        assert_eq!((x.as_slice::<f32>().unwrap(), values.as_slice()), (&[0.0; 2][..], &[1.0, 2.0][..]));
    }

    #[test]
    fn refusals_name_both_sides() {
        let error = Tensor::from_owner(vec![1.0f32; 5], &[2, 3], &cpu()).unwrap_err();
        assert_eq!(error.to_string(), "tensor: shape is [2, 3], but 20 bytes of f32 were given");
        let words = [0u32; 4];
        let at = |start: *const u8, shape: &[usize]| {
            // SAFETY: an address that is refused is not read.
            #[allow(unsafe_code)]
            unsafe { Tensor::from_host_ptr(start, shape, DType::F32, &cpu()) }.unwrap_err().to_string()
        };
        assert_eq!(
            at(std::ptr::null(), &[1]),
            "tensor: address is 0x0, but f32 wants a multiple of 4 that is not null"
        );
        let misaligned = words.as_ptr().cast::<u8>().wrapping_add(1);
        assert!(at(misaligned, &[1]).ends_with("but f32 wants a multiple of 4 that is not null"));
        assert!(at(words.as_ptr().cast(), &[usize::MAX, 2]).contains("more than memory can hold"));
    }
}
