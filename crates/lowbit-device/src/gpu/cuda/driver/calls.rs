//! Calls of the driver, for drivers older than those that cudarc is made for.

use super::super::toolkit::split;
use crate::KernelError;
use cudarc::driver::{CudaEvent, DriverError, sys};

/// CUDA's text for an error.
pub(super) fn describe(error: DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("{error:?}"))
}

/// Milliseconds between two events that have happened. cudarc calls a function that drivers have
/// from CUDA 12.8 on; this one all drivers have.
#[allow(unsafe_code)]
pub(super) fn elapsed(start: &CudaEvent, end: &CudaEvent) -> Result<f32, DriverError> {
    type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
    let mut milliseconds = 0.0;
    // SAFETY: the function has this type in every driver; the events are of one context, and the
    // number is a variable.
    unsafe {
        let function = sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0");
        let function = function.map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED))?;
        function(&raw mut milliseconds, start.cu_event(), end.cu_event()).result()?;
    }
    Ok(milliseconds)
}

/// The newest CUDA that NVIDIA's driver knows, major and minor; `None` where there is no driver.
///
/// # Errors
/// [`KernelError::Gpu`] when it does not answer.
#[allow(unsafe_code)]
pub fn cuda_driver_version() -> Result<Option<(u32, u32)>, KernelError> {
    // SAFETY: asks the loader for a library; cudarc would panic where there is none.
    if !unsafe { sys::is_culib_present() } {
        return Ok(None);
    }
    let mut version = 0;
    // SAFETY: writes to a variable of that type, without a context.
    let done = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    done.map_err(|error| KernelError::Gpu { device: "cuda".into(), problem: describe(error) })?;
    Ok(Some(split(version.max(0) as u32)))
}
