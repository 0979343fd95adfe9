#![allow(unsafe_code)] // Inline assembly; the value is the proof.
//! Intel AMX: eight tiles of 16 rows of 64 bytes, and their product in bf16.

use super::{Ahead, Block, Pairs, Start, TileKernel, TileUnit, Tiles, steps};
use crate::simd::avx512::Avx512;
use crate::simd::{Isa, Kernel, Simd};
use std::arch::{asm, x86_64::__cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// AMX-TILE and AMX-BF16, with AVX-512 and AVX512-BF16, which every processor with AMX has.
#[derive(Clone, Copy, Debug)]
pub struct Amx(Avx512<true>);

impl Amx {
    /// `None` when this processor lacks any of them, or when the system does not let this process
    /// use tiles.
    pub fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        let simd = Avx512::<true>::detect()?;
        FOUND.get_or_init(|| has_tiles() && saves_tiles() && permits_tiles()).then_some(Self(simd))
    }

    /// The vectors that come with it.
    pub(in crate::simd) fn simd(self) -> Avx512<true> {
        self.0
    }
}

/// True if the processor has the instructions: AMX-BF16 and AMX-TILE are bits 22 and 24.
fn has_tiles() -> bool {
    let bits = 1 << 22 | 1 << 24;
    __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & bits == bits
}

/// True if the system saves tiles and their configuration when it switches threads: bits 17 and 18
/// of XCR0.
fn saves_tiles() -> bool {
    /// # Safety
    /// The processor must have XGETBV.
    #[target_feature(enable = "xsave")]
    unsafe fn xcr0() -> u64 {
        // SAFETY: XCR0 is there wherever the instruction is, as the caller promises.
        unsafe { std::arch::x86_64::_xgetbv(0) }
    }
    let bits = 1 << 17 | 1 << 18;
    // SAFETY: AVX-512 is found only where XGETBV says that its registers are saved.
    is_x86_feature_detected!("xsave") && unsafe { xcr0() } & bits == bits
}

/// Asks Linux for the tiles' state: threads do not have room for it before.
#[cfg(target_os = "linux")]
fn permits_tiles() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let status: i64;
    // SAFETY: this call of the system reads and writes no memory of the process; the clobbered
    // registers are named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => status,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    status == 0
}

/// Other systems' ways to ask are unknown here.
#[cfg(not(target_os = "linux"))]
fn permits_tiles() -> bool {
    false
}

impl TileUnit for Amx {
    fn dispatch<K: TileKernel>(self, _: Isa, kernel: K) -> K::Output {
        struct Configured<K>(Amx, K);
        impl<K: TileKernel> Kernel for Configured<K> {
            type Output = K::Output;
            #[inline(always)]
            fn run<S: Simd>(self, simd: S) -> K::Output {
                self.1.run(simd, &mut Registers::configure(self.0))
            }
        }
        self.0.run(Configured(self, kernel))
    }
}

/// The memory that LDTILECFG reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes per row, and rows, of each tile.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles in full size.
static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// This thread's tiles, configured as long as this lives. It stays on its thread.
struct Registers(PhantomData<*const ()>);

impl Registers {
    fn configure(_: Amx) -> Self {
        // SAFETY: `Amx` proves the instruction and the system's permission; the configuration is
        // valid and 64 bytes long.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(readonly, nostack, preserves_flags))
        };
        Self(PhantomData)
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: there are tiles, or there would be no value. Released, they cost a switch of
        // threads nothing.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

impl Tiles for Registers {
    /// Tiles 0 to 3 are sums, 4 and 5 are of a, 6 and 7 of b. Loads stand between products, so that
    /// they are done while the unit multiplies. Operands that are loaded once per call, a and the
    /// sums, come by TILELOADDT1, which leaves b in the first-level cache: measured a fifth faster.
    #[inline(always)]
    fn multiply<const M: usize, const N: usize>(
        &mut self,
        a: [&[Pairs]; M],
        b: [&[Pairs]; N],
        c: &mut Block,
        start: Start,
        ahead: Ahead<'_>,
    ) {
        const { assert!((M == 1 || M == 2) && (N == 1 || N == 2)) };
        let steps = steps(&a, &b);
        if steps == 0 {
            if start == Start::Zero {
                c.as_flattened_mut().fill(bytemuck::Zeroable::zeroed());
            }
            return;
        }
        const { assert!(Ahead::SUMS == 4 * 64 && Ahead::OPERAND == 2 * 64) };
        // Asking for memory that is at hand costs nothing.
        let sums = ahead.sums.map_or(c.as_ptr(), |sums| sums.as_ptr());
        let operand = ahead.operand.map_or(a[0].as_ptr(), std::ptr::from_ref);
        // SAFETY: tiles are configured in full size; each operand has `steps` tiles, which is not
        // 0, of 1024 bytes each, and the sums are four tiles, [i][j]. The assembly reads and writes
        // nothing else; asking for memory reads none.
        unsafe {
            asm!(
                "test {zero:e}, {zero:e}",
                "jnz 3f",
                "tileloaddt1 tmm0, [{c} + {row}]",
                ".if {n} > 1",
                "tileloaddt1 tmm1, [{c} + {row} + 1024]",
                ".endif",
                ".if {m} > 1",
                "tileloaddt1 tmm2, [{c} + {row} + 2048]",
                ".if {n} > 1",
                "tileloaddt1 tmm3, [{c} + {row} + 3072]",
                ".endif",
                ".endif",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloaddt1 tmm4, [{a0} + {row}]",
                "tileloadd tmm6, [{b0} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                ".if {n} > 1",
                "tileloadd tmm7, [{b1} + {row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                ".endif",
                ".if {m} > 1",
                "tileloaddt1 tmm5, [{a1} + {row}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                ".if {n} > 1",
                "tdpbf16ps tmm3, tmm5, tmm7",
                ".endif",
                ".endif",
                "prefetchw [{sums}]",
                "prefetchw [{sums} + 64]",
                "prefetchw [{sums} + 128]",
                "prefetchw [{sums} + 192]",
                "prefetcht1 [{operand}]",
                "prefetcht1 [{operand} + 64]",
                "add {sums}, 256",
                "add {operand}, 128",
                "add {a0}, 1024",
                "add {a1}, 1024",
                "add {b0}, 1024",
                "add {b1}, 1024",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {row}], tmm0",
                ".if {n} > 1",
                "tilestored [{c} + {row} + 1024], tmm1",
                ".endif",
                ".if {m} > 1",
                "tilestored [{c} + {row} + 2048], tmm2",
                ".if {n} > 1",
                "tilestored [{c} + {row} + 3072], tmm3",
                ".endif",
                ".endif",
                m = const M,
                n = const N,
                zero = in(reg) u32::from(start == Start::Zero),
                steps = inout(reg) steps => _,
                row = in(reg) 64usize,
                a0 = inout(reg) a[0].as_ptr() => _,
                a1 = inout(reg) a[M - 1].as_ptr() => _,
                b0 = inout(reg) b[0].as_ptr() => _,
                b1 = inout(reg) b[N - 1].as_ptr() => _,
                c = in(reg) c.as_mut_ptr(),
                sums = inout(reg) sums => _,
                operand = inout(reg) operand => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Turns of [`operations_per_second`]'s loop.
const TURNS: u64 = 100_000;

/// Operations per second of one thread's products of tiles that stay in registers.
pub(in crate::simd) fn operations_per_second(amx: Amx) -> f64 {
    let tiles = Registers::configure(amx);
    let start = std::time::Instant::now();
    // SAFETY: tiles are configured; nothing else is touched.
    unsafe {
        asm!(
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {turns}",
            "jnz 2b",
            turns = inout(reg) TURNS => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nomem, nostack),
        );
    }
    let seconds = start.elapsed().as_secs_f64();
    drop(tiles);
    (TURNS * 4 * 2 * 16 * 16 * 32) as f64 / seconds
}
