//! Metal's limits are kept, and what Metal leaves undefined is refused.

use super::*;
use crate::gpu::compile::Source;
use crate::gpu::launch::kernel;
use cubecl_core as cubecl;
use cubecl_core::prelude::*;

/// A kernel as CubeCL writes it, with these parameters and this body.
fn source(threads: u32, parameters: &str, body: &str) -> Source {
    let text = format!(
        "\n#include <metal_stdlib>\nusing namespace metal;\n\n[[max_total_threads_per_threadgroup({threads})]] [[kernel]] void \
         msl_test({parameters}) {{\n{body}\n}}\n"
    );
    Source { text, entry: "msl_test".into(), shared: 0 }
}

/// `device uint` buffers of that many words.
fn buffers(count: usize) -> String {
    let buffer = |i| format!("device uint*  const b{i} [[buffer({i})]]");
    (0..count).map(buffer).collect::<Vec<_>>().join(", ")
}

fn refusal(source: &Source) -> String {
    library::entry(source).unwrap_err()
}

/// Runs a kernel of one buffer, of ones, in one cube; the buffer's words after that, or what went
/// wrong.
fn run(source: &Source, units: u32, words: usize) -> Result<Vec<u32>, String> {
    let (thread, shared) = library::entry(source)?;
    // SAFETY: it is the type of the entry that the translation writes.
    let thread = unsafe { std::mem::transmute::<*mut c_void, Thread>(thread) };
    let gpu = Gpu::msl();
    let memory = gpu.allocate(4 * words).unwrap();
    let code = Code { thread, units: [units, 1, 1], shared: shared as u32 };
    let buffers = vec![(memory.keep(), 0)];
    let launch = Launch { name: "msl_test".into(), code, cubes: [1; 3], buffers, info: Vec::new() };
    launch.run().map_err(|error| error.to_string())?;
    let mut bytes = vec![0; 4 * words];
    gpu.download(&memory, 0, &mut bytes).unwrap();
    Ok(bytemuck::pod_collect_to_vec(&bytes))
}

const UNIT: &str = "uint3 const unit [[thread_position_in_threadgroup]]";

#[test]
fn gpu_msl_refuses_what_breaks_a_limit() {
    let memory = |bytes: usize| format!("alignas(16) threadgroup char memory_0[{bytes}];\n");
    let shared =
        |sizes: &[usize]| source(64, &buffers(1), &sizes.iter().map(|&n| memory(n)).collect::<String>());
    assert_eq!(refusal(&shared(&[33 << 10])), "33792 bytes of threadgroup memory, and Metal has 32768");
    assert_eq!(refusal(&shared(&[20, 32740])), "32772 bytes of threadgroup memory, and Metal has 32768");
    assert!(library::entry(&shared(&[32 << 10])).is_ok());
    let units = |threads| source(threads, &buffers(1), "");
    assert_eq!(refusal(&units(1025)), "1025 threads per threadgroup, and Metal has at most 1024");
    assert!(library::entry(&units(1024)).is_ok());
    let bound = |count| source(64, &buffers(count), "");
    assert_eq!(refusal(&bound(30)), "30 buffers, and wgpu binds at most 29 on Metal");
    assert!(library::entry(&bound(29)).is_ok());
    assert_eq!(refusal(&source(64, &buffers(1), "double x = 1;")), "Metal has no double");
    let unknown = refusal(&source(64, &buffers(1), "threadgroup float x[4];"));
    assert_eq!(unknown, "threadgroup memory is declared in an unknown way: threadgroup float x[4];");
}

#[test]
fn gpu_msl_refuses_what_metal_does_not_compile() {
    let refused = |body: &str, what: &str| {
        let source = source(64, &buffers(1), body);
        for error in [refusal(&source), library::check(&source).unwrap_err()] {
            assert!(error.contains(what), "{error}");
        }
    };
    refused("bfloat x = 1.0f;", "no viable conversion");
    refused("uint x = min(1, 2u);", "ambiguous");
    refused("bfloat x = simd_sum(bfloat(1.0f));", "Metal has no such overload");
    refused("float x = exp(1.0f) + nothing;", "undeclared identifier 'nothing'");
}

#[test]
fn gpu_msl_finds_threads_that_part() {
    let run = |body| run(&source(64, &format!("{}, {UNIT}", buffers(1)), body), 64, 64);
    let sum =
        "b0[unit.x] = unit.x; threadgroup_barrier(mem_flags::mem_device); b0[unit.x ^ 33] += simd_sum(1u);";
    let want: Vec<u32> = (0..64).map(|i| i + 32).collect();
    assert_eq!(run(sum).unwrap(), want);
    let error = run(
        "if (unit.x < 40)\nthreadgroup_barrier(mem_flags::mem_device);\nelse\nthreadgroup_barrier(mem_flags::mem_device);",
    );
    assert!(error.as_ref().unwrap_err().contains("threads part: threadgroup_barrier, line "), "{error:?}");
    let error = run("if (unit.x < 40) threadgroup_barrier(mem_flags::mem_device);").unwrap_err();
    assert!(error.contains("ends, and others wait in threadgroup_barrier"), "{error}");
    let error =
        run("if (unit.x < 20) simd_sum(1u); threadgroup_barrier(mem_flags::mem_device);").unwrap_err();
    assert!(error.contains("waits for ever in simd_sum, line"), "{error}");
    // Threads that have ended take no part in a simdgroup function.
    let half = run("if (unit.x % 32 < 20) b0[unit.x] = simd_sum(1u);").unwrap();
    assert_eq!(half[..20], [20; 20]);
    assert_eq!(half[20], u32::MAX);
}

/// clang takes floats for finite here, as Metal's compiler does, but in the blocks that kernels
/// open.
#[test]
fn gpu_msl_keeps_nan_where_kernels_ask_for_it() {
    // Buffers start as NaN.
    let compare = "uint const word = b0[unit.x];\nfloat const x = reinterpret_cast<const thread float&>(word);\n\
                   b0[unit.x] = x != x;";
    let parameters = format!("{}, {UNIT}", buffers(1));
    let run = |body: &str| run(&source(64, &parameters, body), 64, 64).unwrap();
    assert_eq!(run(compare), [0; 64]);
    assert_eq!(run(&format!("{{\n#pragma METAL fp math_mode(safe)\n{compare}\n}}")), [1; 64]);
}

/// CubeCL's order of the parameters that say where a thread is, and with it the numbers of
/// variables, is another in each process.
#[test]
fn gpu_msl_text_is_the_same_in_every_process() {
    let text = |unit: u32, plane: u32| {
        let mut parameters = [
            (unit, format!("uint3 const unit_v{unit} [[thread_position_in_threadgroup]]")),
            (plane, format!("uint const plane_v{plane} [[thread_index_in_simdgroup]]")),
        ];
        parameters.sort();
        let parameters = [buffers(1), parameters[0].1.clone(), parameters[1].1.clone()].join(", ");
        let body = format!("uint const v9 = plane_v{plane};\nb0[unit_v{unit}[0]] = v9 + vector0 + v;");
        translate::translate(&source(64, &parameters, &body)).unwrap().text
    };
    assert_eq!(text(12, 13), text(13, 12));
    let sum = "plane_v0;\nb0[unit_v1[0]] = v2 + vector0 + v;";
    assert!(text(12, 13).contains(sum), "{}", text(12, 13));
}

#[kernel]
fn msl_test_count(x: &[u32], y: &mut [u32], add: u32) {
    y[UNIT_POS_X as usize] = x[UNIT_POS_X as usize] + add;
}

#[test]
fn gpu_msl_refuses_what_wgpu_refuses_on_metal() {
    let gpu = Gpu::msl();
    let memory = gpu.upload(bytemuck::cast_slice(&[7u32; 64])).unwrap();
    let launch = |cubes: [u32; 3], start: usize| {
        let kernel = MslTestCount::kernel(gpu.target(), 32).code();
        let buffers = vec![(&memory, start), (&memory, 128)];
        // SAFETY: the kernel reads and writes 128 bytes, and what is refused does not run.
        unsafe { gpu.dispatch(Dispatch { kernel, cubes, buffers, written: 0, scalars: vec![1], early: 0 }) }
    };
    launch([1; 3], 0).unwrap();
    let error = launch([1; 3], 16).unwrap_err().to_string();
    assert!(error.contains("buffer 0 starts at byte 16, and wgpu binds multiples of 32 on Metal"), "{error}");
    let error = launch([1, 65536, 1], 0).unwrap_err().to_string();
    assert!(error.contains("65536 cubes, and wgpu takes at most 65535"), "{error}");
    let error = gpu.capture(|| gpu.download(&memory, 0, &mut [0; 4])).unwrap_err().to_string();
    assert!(error.contains("a read while a pass is captured"), "{error}");
}

/// Operands that start anywhere are copied, and copied back where the kernel writes.
#[test]
fn gpu_msl_binds_tensors_that_start_anywhere() {
    let device = crate::Device::msl();
    let crate::Device::Gpu(gpu) = &device else { unreachable!() };
    let numbers: Vec<u32> = (0..100).collect();
    let x = crate::Tensor::new(&numbers, &[100], &device).unwrap();
    let y = crate::Tensor::new(&[0u32; 100], &[100], &device).unwrap();
    for (from, to) in [(0, 1), (1, 0), (3, 37), (8, 16)] {
        let (from, to) = (x.rows(from, from + 32).unwrap(), y.rows(to, to + 32).unwrap());
        let arguments = MslTestCount { x: from.buffer().unwrap(), y: to.buffer().unwrap(), add: 1000 };
        // SAFETY: both have 32 words.
        unsafe { gpu.launch(MslTestCount::kernel(gpu.target(), 32), [1; 3], arguments).unwrap() };
    }
    let got = crate::testing::fetched(&y);
    let mut want = vec![0; 100];
    for (from, to) in [(0, 1), (1, 0), (3, 37), (8, 16)] {
        (0..32).for_each(|i| want[to + i] = (1000 + from + i) as u32);
    }
    assert_eq!(got.as_slice::<u32>().unwrap(), want);
}
