//! Dense products by NVIDIA's cuBLASLt, loaded when first used.

use crate::gpu::encoder::{Dense, Form};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, cublasLtReductionScheme_t, cudaDataType,
    is_culib_present,
};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use lowbit_formats::FloatType;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Bytes that the library may use beside the operands: what NVIDIA advises on Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;
/// Bytes that operands are aligned to.
pub(super) const ALIGNMENT: usize = 16;

/// True if the library is installed.
#[allow(unsafe_code)]
pub(super) fn is_installed() -> bool {
    // SAFETY: asks the loader for a library; cudarc would panic where there is none.
    unsafe { is_culib_present() }
}

/// The key of the library's choice: the operands' layouts; the number of products; `m`, `n`, `k`;
/// the types of the operands and of the result.
type Kind = (Form, usize, [usize; 3], [FloatType; 2]);

/// The library in one context.
#[derive(Debug)]
pub(super) struct Cublas {
    handle: Handle,
    /// The library's choices.
    chosen: Mutex<HashMap<Kind, cublasLtMatmulAlgo_t>>,
}

#[derive(Debug)]
struct Handle(cublasLtHandle_t);

// SAFETY: NVIDIA says that the handle may be used by several threads.
#[allow(unsafe_code)]
unsafe impl Send for Handle {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Handle {}

impl Drop for Handle {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

/// The descriptions of a product, freed together.
struct Plan {
    product: cublasLtMatmulDesc_t,
    weight: cublasLtMatrixLayout_t,
    x: cublasLtMatrixLayout_t,
    y: cublasLtMatrixLayout_t,
}

impl Plan {
    /// The library counts columns first: `y^T = weight x^T`, where a matrix of rows is transposed
    /// as it lies.
    fn new((form, count, [m, n, k], dtypes): Kind) -> Result<Self, CublasError> {
        let [operands, y] = dtypes.map(|dtype| match dtype {
            FloatType::F32 => cudaDataType::CUDA_R_32F,
            FloatType::F16 => cudaDataType::CUDA_R_16F,
            FloatType::BF16 => cudaDataType::CUDA_R_16BF,
        });
        let layout = |ty, rows: usize, columns: usize, pitch: usize| {
            result::create_matrix_layout(ty, rows as u64, columns as u64, pitch as i64)
        };
        let f32 = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let (weight, x) = match form {
            Form::Rows => ([k, n, k], [k, m, k]),
            Form::Columns => ([n, k, n], [k, m, k]),
            Form::Outer(pitch) => ([n, k, n], [m, k, pitch]),
        };
        let of = |[rows, columns, pitch]: [usize; 3]| layout(operands, rows, columns, pitch);
        let product = result::create_matmul_desc(f32, cudaDataType::CUDA_R_32F)?;
        let plan = Self { product, weight: of(weight)?, x: of(x)?, y: layout(y, n, m, n)? };
        match form {
            Form::Rows => plan.transpose(cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA)?,
            Form::Columns => {}
            Form::Outer(_) => plan.transpose(cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB)?,
        }
        if count > 1 {
            for (layout, [_, columns, pitch]) in [(plan.weight, weight), (plan.x, x), (plan.y, [n, m, n])] {
                Self::repeat(layout, count, columns * pitch)?;
            }
        }
        Ok(plan)
    }

    /// A layout of so many matrices, with so many elements from one to the next.
    #[allow(unsafe_code)]
    fn repeat(layout: cublasLtMatrixLayout_t, count: usize, stride: usize) -> Result<(), CublasError> {
        use cublasLtMatrixLayoutAttribute_t as Attribute;
        let (count, stride) = (count as i32, stride as i64);
        let (of_count, of_stride) = ((&raw const count).cast(), (&raw const stride).cast());
        // SAFETY: the layout is valid; the first attribute is an i32, the second an i64.
        unsafe {
            result::set_matrix_layout_attribute(
                layout,
                Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                of_count,
                size_of::<i32>(),
            )?;
            result::set_matrix_layout_attribute(
                layout,
                Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                of_stride,
                size_of::<i64>(),
            )
        }
    }

    #[allow(unsafe_code)]
    fn transpose(&self, attribute: cublasLtMatmulDescAttributes_t) -> Result<(), CublasError> {
        let yes = 1i32;
        // SAFETY: the description is valid, and the attribute an i32.
        unsafe {
            result::set_matmul_desc_attribute(
                self.product,
                attribute,
                (&raw const yes).cast(),
                size_of::<i32>(),
            )
        }
    }
}

impl Drop for Plan {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the library has copied what a running product
        // needs.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in [self.weight, self.x, self.y] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// The constraints of the library's choice.
struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    #[allow(unsafe_code)]
    fn new() -> Result<Self, CublasError> {
        use cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref()?);
        let (bytes, alignment) = (WORKSPACE, ALIGNMENT as u32);
        // Partial sums stay f32.
        let reduction = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        // SAFETY: the preference is valid; the first attribute is a size, the others are u32.
        unsafe {
            let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(
                preference.0,
                workspace,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            )?;
            let scheme = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            result::set_matmul_pref_attribute(
                preference.0,
                scheme,
                (&raw const reduction).cast(),
                size_of::<u32>(),
            )?;
            for attribute in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                result::set_matmul_pref_attribute(
                    preference.0,
                    attribute,
                    (&raw const alignment).cast(),
                    size_of::<u32>(),
                )?;
            }
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Cublas {
    /// The library in the context that is bound to this thread.
    pub fn new() -> Result<Self, CublasError> {
        Ok(Self { handle: Handle(result::create_handle()?), chosen: Mutex::default() })
    }

    /// Records a product; `workspace` has [`WORKSPACE`] bytes.
    ///
    /// # Safety
    /// The addresses are the operands' of `product`, in memory of the bound context, aligned to
    /// [`ALIGNMENT`].
    #[allow(unsafe_code)]
    pub unsafe fn multiply(
        &self,
        product: &Dense<'_>,
        [x, weight, y]: [CUdeviceptr; 3],
        workspace: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CublasError> {
        let key = (product.form, product.count, product.sizes, product.dtypes);
        let plan = Plan::new(key)?;
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let algorithm = match chosen.get(&key) {
            Some(&algorithm) => algorithm,
            None => {
                let preference = Preference::new()?;
                let Plan { product, weight, x, y } = plan;
                // SAFETY: all descriptions are valid.
                let found = unsafe {
                    result::get_matmul_algo_heuristic(self.handle.0, product, weight, x, y, y, preference.0)
                }?;
                chosen.insert(key, found.algo);
                found.algo
            }
        };
        let (one, zero) = (1.0f32, 0.0f32);
        let address = |address: CUdeviceptr| address as *const c_void;
        // SAFETY: the caller's, and the descriptions are valid; the scalars are read before the
        // call returns.
        unsafe {
            result::matmul(
                self.handle.0,
                plan.product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                address(weight),
                plan.weight,
                address(x),
                plan.x,
                address(y),
                plan.y,
                y as *mut c_void,
                plan.y,
                &algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        }
    }
}
