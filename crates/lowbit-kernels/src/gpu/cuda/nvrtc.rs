//! CUDA C++ to machine code, through NVIDIA's run-time compiler.

use crate::KernelError;
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};
use std::path::Path;

/// Machine code of `source` for `architecture`, such as `sm_90a`. `headers` has CUDA's `cuda_fp16.h`.
#[allow(unsafe_code)]
pub(crate) fn compile(
    name: &str,
    source: &str,
    architecture: &str,
    headers: &Path,
) -> Result<Vec<u8>, KernelError> {
    let refuse = |problem: String| KernelError::Kernel { name: name.into(), problem };
    // SAFETY: asks the loader for a library; cudarc would panic where there is none.
    if !unsafe { sys::is_culib_present() } {
        return Err(refuse(
            "NVRTC is not installed: install the CUDA toolkit 13.0 or newer, or NVIDIA's nvidia-cuda-nvrtc package \
             with its lib folder on the loader's path"
                .into(),
        ));
    }
    let text = CString::new(source).map_err(|error| refuse(error.to_string()))?;
    let options = [
        format!("--gpu-architecture={architecture}"),
        format!("--include-path={}", headers.display()),
        format!("--include-path={}", headers.join("cccl").display()),
    ];
    let program = result::create_program(&text, None).map_err(|error| refuse(format!("{error:?}")))?;
    // SAFETY: the program was created above, is used by this thread alone and destroyed once.
    unsafe {
        let code = machine_code(program, &options);
        let log = result::get_program_log(program);
        let _ = result::destroy_program(program);
        code.map_err(|error| {
            let log = log.map(|log| CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned());
            refuse(format!("{error:?}\n{}", log.unwrap_or_default()))
        })
    }
}

/// # Safety
/// `program` is one of NVRTC's.
#[allow(unsafe_code)]
unsafe fn machine_code(
    program: sys::nvrtcProgram,
    options: &[String],
) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the program is valid, and the buffer as long as NVRTC says.
    unsafe {
        result::compile_program(program, options)?;
        sys::nvrtcGetCUBINSize(program, &mut size).result()?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
        Ok(code)
    }
}
