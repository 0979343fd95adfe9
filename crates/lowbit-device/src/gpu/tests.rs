//! The tests of NVIDIA's compiler.

use super::compile;
use super::cuda::nvrtc::{self, Architecture, Compiler};
use crate::testing::kernels::{cuda_options, program};

/// Sources that are the same program, and sources that are not.
#[test]
fn programs_are_the_same_whatever_their_variables_are_called() {
    let wait = format!("asm volatile(\"{}\" :  :  : \"memory\");", compile::OVERLAP);
    let of = |first: &str, second: &str, wait: &str| {
        program(&format!("(float const* const {first}) {{\n{wait}info_{second} = {first}[{second}_store];"))
    };
    assert_eq!(of("v0", "v12", ""), of("v3", "v1", &wait));
    assert_ne!(of("v0", "v12", ""), of("v3", "v3", ""));
    assert_ne!(program("asm(\"ld.v2\");"), program("asm(\"ld.v4\");"));
    assert_ne!(program("uv1 = v1"), program("uv2 = v1"));
    assert_eq!(program("float const* const v5"), program("float * const v6"));
    assert_ne!(program("v1 = v2; asm(\"a;\");"), program("v1 = v2;"));
}

/// Compiles with NVRTC as this machine has it, which says why it refuses: with headers that lack
/// `nv/target`, for which ours stands in, and for drivers and devices that it does not serve.
#[test]
fn a_compiler_is_chosen_by_driver_and_device() {
    use std::fs;
    const SOURCE: &str = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\nextern \"C\" __global__ void add(__half *x, \
                          __nv_bfloat16 *y) { *x = __hadd(*x, *x); *y = __hadd(*y, *y); }\n";
    let compiled = |places: &[std::path::PathBuf], capability, driver| {
        Compiler::new(places, Architecture { capability, driver, own_instructions: true })
            .unwrap()
            .compile("add", SOURCE)
    };
    let places = cuda_options().places;
    let code = compiled(&places, 80, (u32::MAX, 0)).unwrap();
    // The libraries that the loader brings tell their version when they are loaded.
    let message = match Compiler::new(
        &places,
        Architecture { capability: 80, driver: (11, 8), own_instructions: true },
    ) {
        Ok(compiler) => compiler.compile("add", SOURCE).unwrap_err().to_string(),
        Err(message) => message,
    };
    assert!(message.contains("is too new for this driver, which knows 11.8"), "{message}");
    assert!(message.contains("`lowbit setup cuda`"), "{message}");
    let message = compiled(&places, 79, (u32::MAX, 0)).unwrap_err().to_string();
    assert!(message.contains("does not know sm_79"), "{message}");

    // The same files without `nv`.
    let folder = std::env::temp_dir().join(format!("lowbit-targets-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    let found = nvrtc::files(&places);
    fs::create_dir_all(folder.join("include")).unwrap();
    fs::create_dir_all(folder.join("lib")).unwrap();
    for (from, to) in [(found.0.parent().unwrap(), "lib"), (&found.1, "include")] {
        for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
            if entry.path().is_file() {
                std::os::unix::fs::symlink(entry.path(), folder.join(to).join(entry.file_name())).unwrap();
            }
        }
    }
    let without = compiled(std::slice::from_ref(&folder), 80, (u32::MAX, 0));
    fs::remove_dir_all(folder).unwrap();
    assert!(without.unwrap() == code, "our nv/target chooses other code than NVIDIA's");
}
