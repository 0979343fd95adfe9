//! The choice of a product's kernel on a GPU: the one place that decides, for `quantized_matmul`
//! and `gather_qmm` alike.
//!
//! [`KERNELS`] is tried in order, and the first kernel that fits is taken. A kernel's `fit` says
//! which sizes and types it takes, and how it is cut for a device; from which size on it is worth
//! it, and what was measured, stands in the list. Figures are of an H200, in microseconds, for 4
//! bits and a weight of 4096 to 14336, where nothing else is said.

use super::cuda::{
    mma_rows, mma_tile, mma_vec, stream, stream_experts, stream_rows, tiles, vendor_blas, wgmma,
};
use super::gpu::{cmma_tile, mat_vec, tile};
use super::problem::Problem;
use crate::gpu::caps::Caps;

/// The plan of a product's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// True if x is made first, by the op that it comes from. Else x is there, or the kernel makes
    /// it.
    pub make_x: bool,
    /// True if all is done in f32, and the result rounded after that.
    pub widen: bool,
    pub kernel: Kernel,
    /// Of the kernel in the list: its name, and why it stands there.
    name: &'static str,
    reason: &'static str,
}

/// A kernel, and how it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Stream(stream::Launch),
    StreamRows(stream_rows::Launch),
    StreamExperts(stream_experts::Launch),
    ExpertRows(mma_rows::MmaRows),
    ExpertTiles(wgmma::Wgmma),
    ExpertMmaTiles(mma_tile::MmaTile),
    ExpertCmmaTiles(cmma_tile::CmmaTile),
    MmaRows(mma_rows::MmaRows),
    MmaTile(mma_tile::MmaTile),
    MmaVec(mma_vec::MmaVec),
    MatVec(mat_vec::MatVec),
    VendorBlas(vendor_blas::Weight),
    Wgmma(wgmma::Wgmma),
    CmmaTile(cmma_tile::CmmaTile),
    Tile(tile::Tile),
}

/// A kernel of the list.
struct Candidate {
    name: &'static str,
    /// The size from which on it is the fastest, as far as its `fit` does not say it, and the
    /// measurements.
    reason: &'static str,
    /// True if it is for [few rows](few_rows) of x alone.
    few_rows: bool,
    fit: fn(&Caps, &Problem) -> Option<Kernel>,
}

/// All kernels, in the order in which they are tried.
const KERNELS: [Candidate; 15] = [
    Candidate {
        name: "stream",
        reason: "one row of x: with loads in registers a mat-vec was no faster with its weight in the cache than without, \
                 since each cube waited for x, loads and sums in turn",
        few_rows: false,
        fit: |caps, problem| stream::fit(caps, problem).map(Kernel::Stream),
    },
    Candidate {
        name: "stream_rows",
        reason: "2 to 32 rows of x, and more where wide tiles are few or do not store the type: on an H100 12 for 2 rows of 4096 to 12352, 13 for 8, \
                 17 for 16 and 27 for 32, a copy 9; 64 rows of 12288 to 4096 take 41, and 72 in wide tiles on an H200",
        few_rows: false,
        fit: |caps, problem| stream_rows::fit(caps, problem).map(Kernel::StreamRows),
    },
    Candidate {
        name: "stream_experts",
        reason: "steps of several tokens, 16 pairs to 10 per expert: on an H100 53 for 128 pairs of 256 experts of 2048 to 1024 \
                 and 108 for 512, where the weights that they chose take 40 and 85",
        few_rows: false,
        fit: |caps, problem| stream_experts::fit(caps, problem).map(Kernel::StreamExperts),
    },
    Candidate {
        name: "expert_rows",
        reason: "from 128 pairs on, about 4 per expert: 53 for 512 pairs and 256 experts, where sorting them takes 76",
        few_rows: false,
        fit: |caps, problem| mma_rows::fit_experts(caps, problem).map(Kernel::ExpertRows),
    },
    Candidate {
        name: "expert_tiles",
        reason: "more pairs: sorted by expert, a tile of rows reads its expert's weight once",
        few_rows: false,
        fit: |caps, problem| wgmma::fit_experts(caps, problem).map(Kernel::ExpertTiles),
    },
    Candidate {
        name: "expert_mma_tiles",
        reason: "the same where there is no wgmma",
        few_rows: false,
        fit: |caps, problem| mma_tile::fit_experts(caps, problem).map(Kernel::ExpertMmaTiles),
    },
    Candidate {
        name: "expert_cmma_tiles",
        reason: "the same on cooperative matrices, which Vulkan and Metal have",
        few_rows: false,
        fit: |caps, problem| cmma_tile::fit_experts(caps, problem).map(Kernel::ExpertCmmaTiles),
    },
    Candidate {
        name: "mma_rows",
        reason: "6 to 16 rows of x where they do not stream: 14 for 8 and 19 for 16, where the smallest tile of wgmma takes 26",
        few_rows: true,
        fit: |caps, problem| mma_rows::fit(caps, problem).map(Kernel::MmaRows),
    },
    Candidate {
        name: "mma_vec",
        reason: "up to 5 rows of x where they do not stream, and each pair of a token and an expert",
        few_rows: true,
        fit: |caps, problem| mma_vec::fit(caps, problem).map(Kernel::MmaVec),
    },
    Candidate {
        name: "mat_vec",
        reason: "few rows of x, any format and device",
        few_rows: true,
        fit: |caps, problem| mat_vec::fit(caps, problem).map(Kernel::MatVec),
    },
    Candidate {
        name: "vendor_blas",
        reason: "dense weights; others from 4096 rows of x on, where writing the decoded weight and reading it again pays",
        few_rows: false,
        fit: |caps, problem| vendor_blas_fit(caps, problem).map(Kernel::VendorBlas),
    },
    Candidate {
        name: "wgmma",
        reason: "many rows of x on Hopper: weights are decoded in registers and rounded to x's type",
        few_rows: false,
        fit: |caps, problem| wgmma::fit(caps, problem).map(Kernel::Wgmma),
    },
    Candidate {
        name: "mma_tile",
        reason: "many rows of x on other tensor cores, from Ampere on: the same by mma.sync",
        few_rows: false,
        fit: |caps, problem| mma_tile::fit(caps, problem).map(Kernel::MmaTile),
    },
    Candidate {
        name: "cmma_tile",
        reason: "many rows of f16 (or bf16) on cooperative matrices, which Vulkan and Metal have: 64 for 16 rows through Vulkan, \
                 78 for 64, 339 for 512",
        few_rows: false,
        fit: |caps, problem| cmma_tile::fit(caps, problem).map(Kernel::CmmaTile),
    },
    Candidate {
        name: "tile",
        reason: "many rows of x on any device, in f32",
        few_rows: false,
        fit: |caps, problem| tile::fit(caps, problem).map(Kernel::Tile),
    },
];

/// The plan for a product, which is not empty.
///
/// # Panics
/// Never: [`mat_vec`] takes what no kernel for many rows takes.
pub(crate) fn plan(caps: &Caps, problem: &Problem) -> Plan {
    // Kernels for many rows store the type that they multiply in, except the vendor BLAS and
    // cooperative matrices.
    let widen = problem.x_type != problem.y_type
        && !few_rows(caps, problem)
        && stream_rows::fit(caps, &problem.of_tensor()).is_none()
        && !vendor_blas::stores_sums(caps, problem)
        && cmma_tile::fit(caps, &problem.of_tensor()).is_none();
    let problem = if widen { problem.widened() } else { *problem };
    let few_rows = few_rows(caps, &problem);
    let fit = |candidate: &Candidate| {
        let &Candidate { name, reason, fit, .. } = candidate;
        let plan = |make_x| move |kernel| Plan { make_x, widen, kernel, name, reason };
        let made = || fit(caps, &problem.of_tensor()).filter(|_| problem.source.is_some());
        fit(caps, &problem).map(plan(false)).or_else(|| made().map(plan(true)))
    };
    let mut candidates = KERNELS.iter().filter(|candidate| few_rows || !candidate.few_rows);
    candidates.find_map(fit).expect("a product without many rows is a mat-vec's")
}

/// The plan on a device of these abilities that is asked for the vendor BLAS only where that
/// decides: to open cuBLASLt takes 80 ms.
pub(crate) fn plan_asking(caps: &Caps, problem: &Problem, vendor_blas: impl FnOnce() -> bool) -> Plan {
    let [without, with] = [false, true].map(|vendor_blas| plan(&Caps { vendor_blas, ..*caps }, problem));
    let differs = (with.name, with.widen, with.make_x) != (without.name, without.widen, without.make_x);
    if differs && vendor_blas() { with } else { without }
}

/// True if a product is for kernels that decode the weight for each few rows of x: it has few, or
/// nothing for many rows takes it (a weight of one row, say).
fn few_rows(caps: &Caps, problem: &Problem) -> bool {
    problem.routing.is_some()
        || problem.m < many_rows(caps, problem)
        || !tensor_core_tiles(caps, problem)
            && vendor_blas::fit(caps, &problem.of_tensor()).is_none()
            && tile::fit(caps, &problem.of_tensor()).is_none()
}

/// Rows of x from which on a weight is decoded once for many of them.
fn many_rows(caps: &Caps, problem: &Problem) -> usize {
    /// Without matrix units: on CPUs that stand for GPUs, and on GPUs through Vulkan.
    const ANYWHERE: usize = 33;
    /// With cooperative matrices: a mat-vec decodes the weight for 4 rows at a time. Through Vulkan
    /// on an H200 it takes 96 for 8 rows, and matrices 64 for 16.
    const MATRICES: usize = 5;
    if tensor_core_tiles(caps, problem) {
        tile_rows(caps, problem)
    } else if cmma_tile::fit(caps, &problem.of_tensor()).is_some() {
        MATRICES
    } else {
        ANYWHERE
    }
}

/// True if tensor cores multiply a product's rows in tiles, the weight rounded to x's type.
fn tensor_core_tiles(caps: &Caps, problem: &Problem) -> bool {
    caps.tensor_cores && tiles::fits(&problem.of_tensor())
}

/// Rows of x from which on such tiles are faster than few rows at a time. On an H200 the smallest
/// of wgmma takes 26: more than 16 rows in `mma_rows`, which is exact, and than 5 in `mma_vec`.
fn tile_rows(caps: &Caps, problem: &Problem) -> usize {
    if mma_rows::supports(caps, problem.layout, problem.x_type) { 17 } else { mma_rows::FROM }
}

/// The vendor BLAS, where it is faster than tiles.
fn vendor_blas_fit(caps: &Caps, problem: &Problem) -> Option<vendor_blas::Weight> {
    /// Rows of x that pay for decoding the weight to memory.
    const MANY_ROWS: usize = 4096;
    vendor_blas::fit(caps, problem).filter(|weight| {
        *weight == vendor_blas::Weight::Dense
            || problem.m >= MANY_ROWS
            || problem.y_type != problem.x_type
            || !tensor_core_tiles(caps, problem)
    })
}

impl Plan {
    /// The plan in words: its steps, the kernel with how it is cut, and why it is this one.
    pub fn explain(&self) -> String {
        let steps = [(self.make_x, "x made first; "), (self.widen, "in f32; ")];
        let steps: String = steps.iter().filter(|(taken, _)| *taken).map(|(_, step)| *step).collect();
        format!("{steps}{} {}: {}", self.name, self.kernel.cut(), self.reason)
    }
}

impl Kernel {
    fn cut(&self) -> String {
        match self {
            Self::Stream(launch) => format!("{launch:?}"),
            Self::StreamRows(launch) => format!("{launch:?}"),
            Self::StreamExperts(launch) => format!("{launch:?}"),
            Self::ExpertRows(config) | Self::MmaRows(config) => format!("{config:?}"),
            Self::ExpertTiles(config) | Self::Wgmma(config) => format!("{config:?}"),
            Self::ExpertMmaTiles(config) | Self::MmaTile(config) => format!("{config:?}"),
            Self::MmaVec(config) => format!("{config:?}"),
            Self::MatVec(config) => format!("{config:?}"),
            Self::VendorBlas(weight) => format!("{weight:?}"),
            Self::ExpertCmmaTiles(config) | Self::CmmaTile(config) => format!("{config:?}"),
            Self::Tile(config) => format!("{config:?}"),
        }
    }
}

/// True if a product on matrix units rounds the weight to x's type.
#[cfg(test)]
pub(crate) fn rounds_weight(plan: &Plan) -> bool {
    matches!(
        plan.kernel,
        Kernel::ExpertTiles(_)
            | Kernel::ExpertMmaTiles(_)
            | Kernel::ExpertCmmaTiles(_)
            | Kernel::MmaTile(_)
            | Kernel::Wgmma(_)
            | Kernel::CmmaTile(_)
            | Kernel::VendorBlas(vendor_blas::Weight::Decoded)
    )
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::gpu::compile::{CudaDevice, Target};
    use crate::ops::quantized_matmul::problem::Routing;
    use lowbit_formats::{FloatType, Format};

    /// The kernels of products of rows of x, and of pairs of a token and an expert, on each
    /// generation.
    #[test]
    fn kernels_by_generation() {
        for (capability, one, many, experts) in [
            (75, "mat_vec", "tile", "mat_vec"),
            (80, "mma_vec", "mma_tile", "expert_mma_tiles"),
            (86, "mma_vec", "mma_tile", "expert_mma_tiles"),
            (90, "stream", "wgmma", "expert_tiles"),
            (100, "stream", "mma_tile", "expert_mma_tiles"),
            (120, "stream", "mma_tile", "expert_mma_tiles"),
        ] {
            let target = Target::cuda(CudaDevice::example(capability));
            let of = |m| Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, 14336, 4096]);
            let name = |problem: Problem| plan(target.caps(), &problem).name;
            assert_eq!((name(of(1)), name(of(512))), (one, many), "sm_{capability}");
            let few = match capability {
                90.. => "stream_rows",
                80.. => "mma_rows",
                _ => "mat_vec",
            };
            assert_eq!((name(of(16)), name(of(33))), (few, many), "sm_{capability}");
            // A weight of few rows, and of fewer.
            for (m, n, streams) in
                [(64, 4096, true), (128, 4096, false), (128, 2048, true), (256, 1024, true)]
            {
                let narrow = name(Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, n, 14336]));
                assert_eq!(
                    narrow,
                    if capability < 90 || !streams { many } else { few },
                    "sm_{capability} {m}"
                );
            }
            // Logits of a step.
            let logits = Problem::example(Format::Q4_0, [FloatType::F16, FloatType::F32], [128, 32000, 4096]);
            if capability >= 90 {
                let plan = plan(target.caps(), &logits);
                assert_eq!((plan.name, plan.widen), ("stream_rows", false), "sm_{capability}");
            }
            let routing = Some(Routing { experts: 64, pairs: 4096, share: 8 });
            assert_eq!(name(Problem { batches: 4096, routing, ..of(1) }), experts, "sm_{capability}");
        }
    }

    /// A prompt of ordinary length does not open the vendor BLAS.
    #[test]
    fn the_library_is_asked_for_where_it_decides() {
        let target = Target::cuda(CudaDevice::example(90));
        let of = |m| Problem::example(Format::Q4_0, [FloatType::F16; 2], [m, 14336, 4096]);
        for m in [1, 16, 17, 4095] {
            plan_asking(target.caps(), &of(m), || panic!("{m} rows ask"));
        }
        let name = |there| plan_asking(target.caps(), &of(4096), || there).name;
        assert_eq!((name(true), name(false)), ("vendor_blas", "wgmma"));
    }
}
