//! The compile-time configuration of the kernel, and the cut of a product.

use super::super::super::problem::{Problem, Routing};
use super::super::sorted;
use crate::gpu::CUBES;
use crate::gpu::caps::{Caps, Matrices};
use crate::gpu::layout::{Codes, Layout, RUN};
use crate::gpu::matrices::VECTOR;
use lowbit_formats::FloatType;

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CmmaTile {
    pub layout: Layout,
    /// The type of x, which decoded weights are rounded to.
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// The matrices that the device multiplies at once.
    pub matrices: Matrices,
    /// Units of the largest plane that may run: where planes are smaller there are more of them,
    /// and some only load.
    pub plane: usize,
    /// True if the last step has fewer runs than the others.
    pub ends_early: bool,
    /// True if a list says which batch of the weight a tile takes, and which rows of y it has.
    pub listed: bool,
    pub cut: Cut,
}

/// The cut of a product among cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    /// Rows of x, and of the weight, per cube.
    pub m_tile: usize,
    pub n_tile: usize,
    /// Planes that share the rows of x, and those that share the rows of the weight.
    pub m_planes: usize,
    pub n_planes: usize,
    /// Values of K that are in shared memory at a time: whole runs.
    pub step: usize,
}

const fn cut([m_tile, n_tile]: [usize; 2], [m_planes, n_planes]: [usize; 2]) -> Cut {
    Cut { m_tile, n_tile, m_planes, n_planes, step: RUN }
}

/// All cuts. At most 64 sums fall to a unit of a plane of 32: more leave too few registers.
/// Measured through Vulkan on an H200 and an H100 (`bench/record/vulkan/`): smaller cubes, and room
/// for two steps at a time, were slower.
const CUTS: [Cut; 5] = [
    cut([128, 128], [4, 2]),
    cut([128, 64], [4, 2]),
    cut([64, 64], [2, 2]),
    cut([32, 64], [2, 2]),
    cut([16, 64], [1, 4]),
];

/// Values of K that may be in shared memory at a time. More were slower on an H100, although fewer
/// barriers part them: 16 rows took 64 us with 256 and 45 with 64, 64 rows 92 with 128 and 69 with
/// 64.
const STEPS: [usize; 2] = [2 * RUN, RUN];
/// Runs of the weight, and vectors of x, that a unit may load per step: what registers hold beside
/// the sums.
const MOST_RUNS: usize = 4;
const MOST_LOADS: usize = 8;

/// The cost of a tile beside its products, as products per value of K: decoding a row of the
/// weight, and loading a row of x.
const DECODE: usize = 48;
const LOAD: usize = 16;
/// The speed-up of a multiprocessor with several cubes, of which one loads while another
/// multiplies.
const ALONE: usize = 2;

/// Elements between the rows of shared memory: 16 bytes, so that the same columns of 8 rows are in
/// different banks.
const PADDING: usize = 8;

impl Cut {
    /// The cost of the cubes of a product that share a multiprocessor, in products per value of K.
    fn cost(self, caps: &Caps, problem: &Problem) -> usize {
        let Self { m_tile, n_tile, .. } = self;
        let m_tiles = m_tiles(problem, m_tile, Routing::likely_tiles);
        let cubes = m_tiles * problem.n.div_ceil(n_tile);
        let cube = m_tile * n_tile + DECODE * n_tile + LOAD * m_tile;
        (cubes * cube / caps.multiprocessors).max(ALONE * cube)
    }
}

/// Tiles of `m_tile` rows of x; `routed` says how many pairs of a token and an expert take.
fn m_tiles(problem: &Problem, m_tile: usize, routed: fn(Routing, usize) -> usize) -> usize {
    match problem.routing {
        Some(routing) => routed(routing, m_tile),
        None => problem.batches * problem.m.div_ceil(m_tile),
    }
}

impl CmmaTile {
    /// The configuration for the product, if the device has matrices of x's type and takes so many
    /// cubes.
    pub fn new(caps: &Caps, problem: &Problem) -> Option<Self> {
        let cuts = Self::all(caps, problem);
        cuts.into_iter().min_by_key(|config| config.cut.cost(caps, problem))
    }

    /// Every way to cut the product that the device has shared memory and units for. Pairs of a
    /// token and an expert are sorted by expert.
    pub fn all(caps: &Caps, problem: &Problem) -> Vec<Self> {
        let Problem { layout, x_type, y_type, .. } = *problem;
        let of_x = !matches!(layout.codes, Codes::Float(float) if float != x_type);
        let listed = problem.routing.is_some();
        let takes = problem.source.is_none()
            && (!listed || sorted::sortable(caps, problem).is_some())
            && problem.n >= NARROW
            && of_x;
        let Some(matrices) = caps.matrices(x_type).filter(|_| takes) else { return Vec::new() };
        let config = |cut: Cut| {
            let ends_early = !problem.runs().is_multiple_of(cut.step / RUN);
            Self { layout, x_type, y_type, matrices, plane: caps.largest_plane, ends_early, listed, cut }
        };
        let fits = |config: &Self| {
            let cubes = m_tiles(problem, config.cut.m_tile, Routing::most_tiles);
            let registers = config.runs() <= MOST_RUNS && config.x_loads() <= MOST_LOADS;
            registers
                && config.shared() <= caps.shared_memory
                && config.units() <= caps.units
                && cubes <= CUBES
        };
        // With the most of K at a time that there is room for.
        let largest = |cut: Cut| STEPS.into_iter().map(|step| config(Cut { step, ..cut })).find(fits);
        CUTS.into_iter().filter_map(largest).collect()
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        self.planes() * self.plane
    }

    /// True if x is loaded where it is stored to shared memory, not a step ahead: on an H100 that
    /// took 0.89 (512 rows) and 0.93 (4096) of the time with tiles of 128 rows, whose loads of x
    /// take 16 registers of a unit.
    pub fn loads_x_late(self) -> bool {
        self.cut.m_tile >= 128
    }

    /// Planes that multiply.
    pub fn planes(self) -> usize {
        self.cut.m_planes * self.cut.n_planes
    }

    /// Matrices of sums of a plane, along the rows of x and of the weight.
    pub fn sums(self) -> (usize, usize) {
        let Self { cut, matrices, .. } = self;
        (cut.m_tile / cut.m_planes / matrices.m, cut.n_tile / cut.n_planes / matrices.n)
    }

    /// Elements from a row in shared memory to the next.
    pub fn pitch(self) -> usize {
        self.cut.step + PADDING
    }

    /// Vectors of a row in shared memory.
    pub fn row(self) -> usize {
        self.pitch() / VECTOR
    }

    /// Bytes of shared memory: x, the weight, and a matrix of sums of each plane on its way to y.
    fn shared(self) -> usize {
        let rows = self.cut.m_tile + self.cut.n_tile;
        rows * self.pitch() * self.x_type.size() + self.planes() * self.matrices.m * self.matrices.n * 4
    }

    /// Vectors of 16 bytes of x that a unit loads per step.
    pub fn x_loads(self) -> usize {
        (self.cut.m_tile * self.x_row()).div_ceil(self.units())
    }

    /// Such vectors of a row of x per step.
    pub fn x_row(self) -> usize {
        self.cut.step * self.x_type.size() / 16
    }

    /// Runs of the weight that a unit decodes per step.
    pub fn runs(self) -> usize {
        (self.cut.n_tile * self.runs_of_row()).div_ceil(self.units())
    }

    /// Runs of a row of the weight per step.
    pub fn runs_of_row(self) -> usize {
        self.cut.step / RUN
    }
}

/// Rows of a weight below which most of a cube's columns would be empty: gates of one output.
const NARROW: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::compile::Target;
    use lowbit_formats::Format;

    fn nvidia() -> Target {
        Target::offline(32, 4).with_matrices(Matrices { m: 16, n: 16, k: 16 }, &[FloatType::F16])
    }

    fn of(target: &Target, types: [FloatType; 2], sizes: [usize; 3]) -> Option<CmmaTile> {
        CmmaTile::new(target.caps(), &Problem::example(Format::Q4_0, types, sizes))
    }

    /// (m, n, k) -> rows of a cube's tile.
    #[test]
    fn tiles_by_size() {
        let table = [
            ([9, 14336, 4096], [16, 64]),
            ([32, 14336, 4096], [32, 64]),
            ([64, 14336, 4096], [64, 64]),
            ([64, 4096, 14336], [16, 64]),
            ([512, 14336, 4096], [128, 128]),
            ([512, 4096, 4096], [128, 64]),
            ([4096, 14336, 4096], [128, 128]),
        ];
        for (sizes, want) in table {
            let config = of(&nvidia(), [FloatType::F16; 2], sizes).unwrap();
            assert_eq!([config.cut.m_tile, config.cut.n_tile], want, "{sizes:?}");
        }
    }

    /// Whole matrices for each plane, in what a device has of shared memory and units, on devices
    /// of every kind.
    #[test]
    fn cuts_fit_devices() {
        let sizes = [(8, 8, 8), (16, 16, 16), (8, 16, 16), (16, 8, 8)];
        let of_matrices = |plane, (m, n, k)| {
            Target::offline(plane, 4).with_matrices(Matrices { m, n, k }, &[FloatType::F16])
        };
        let targets = [32, 64].into_iter().flat_map(|plane| sizes.map(|sizes| of_matrices(plane, sizes)));
        #[cfg(feature = "metal")]
        let targets = targets.chain([Target::apple()]);
        for target in targets {
            let Matrices { m, n, k } = target.caps().f16_matrices.unwrap();
            let problem = Problem::example(Format::Q4_0, [FloatType::F16; 2], [64, 256, 256]);
            let all = CmmaTile::all(target.caps(), &problem);
            assert_eq!(all.len(), CUTS.len(), "{:?}", target.caps());
            for config in all {
                let Cut { m_tile, n_tile, m_planes, n_planes, step, .. } = config.cut;
                assert!(m_tile.is_multiple_of(m_planes * m) && n_tile.is_multiple_of(n_planes * n));
                assert!(step.is_multiple_of(RUN) && RUN.is_multiple_of(k));
                assert!(config.shared() <= target.caps().shared_memory, "{config:?}");
                assert!(config.units() <= target.units(), "{config:?}");
                assert!(config.runs() <= MOST_RUNS && config.x_loads() <= MOST_LOADS, "{config:?}");
            }
        }
    }

    #[test]
    fn only_what_a_device_reports_and_rounds_right() {
        let sizes = [64, 256, 256];
        let (f32, f16, bf16) = (FloatType::F32, FloatType::F16, FloatType::BF16);
        for (x, y, taken) in [(f16, f16, true), (f16, f32, true), (bf16, bf16, false), (f32, f32, false)] {
            assert_eq!(of(&nvidia(), [x, y], sizes).is_some(), taken, "{x:?} to {y:?}");
        }
        assert_eq!(of(&Target::offline(32, 4), [f16; 2], sizes), None);
        let both = nvidia().with_matrices(Matrices { m: 16, n: 8, k: 16 }, &[bf16]);
        assert_eq!(of(&both, [bf16; 2], sizes).unwrap().matrices.n, 8);
        let weight = |float| {
            CmmaTile::new(nvidia().caps(), &Problem::example(Format::Float(float), [f16; 2], sizes)).is_some()
        };
        assert_eq!([f32, f16, bf16].map(weight), [false, true, false]);
    }
}
