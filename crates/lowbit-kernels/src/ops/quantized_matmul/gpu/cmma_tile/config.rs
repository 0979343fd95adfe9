//! What the kernel is compiled for, and how a product is cut.

use super::super::super::problem::{Problem, Source};
use crate::gpu::CUBES;
use crate::gpu::caps::{Caps, Matrices};
use crate::gpu::layout::{Codes, Layout, RUN};
use lowbit_formats::FloatType;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CmmaTile {
    pub layout: Layout,
    /// The type of x, which decoded weights are rounded to.
    pub x_type: FloatType,
    pub y_type: FloatType,
    /// What the device multiplies at once.
    pub matrices: Matrices,
    /// Units of the largest plane that may run: where planes are smaller there are more of them, and some only load.
    pub plane: usize,
    /// Whether the last step has fewer runs than the others.
    pub ends_early: bool,
    pub cut: Cut,
}

/// How cubes share a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    /// Rows of x, and of the weight, per cube.
    pub m_tile: usize,
    pub n_tile: usize,
    /// Planes that share the rows of x, and those that share the rows of the weight.
    pub m_planes: usize,
    pub n_planes: usize,
    /// Values of K that are in shared memory at a time: a run or two.
    pub step: usize,
    /// Steps that shared memory has room for, 1 or 2: with 2, one is filled while the other is multiplied.
    pub stages: usize,
}

const fn cut([m_tile, n_tile]: [usize; 2], [m_planes, n_planes]: [usize; 2]) -> Cut {
    Cut { m_tile, n_tile, m_planes, n_planes, step: 2 * RUN, stages: 2 }
}

/// All cuts. At most two runs of a step fall to a unit, and 64 sums to a unit of a plane of 32: more leave too few registers.
/// None of it was measured yet.
const CUTS: [Cut; 6] = [
    cut([128, 128], [4, 2]),
    cut([128, 64], [4, 2]),
    cut([64, 64], [2, 2]),
    cut([32, 64], [2, 2]),
    cut([32, 32], [2, 1]),
    cut([16, 64], [1, 4]),
];

/// What a tile costs beside its products, as products per value of K: decoding a row of the weight, and loading a row of x.
const DECODE: usize = 48;
const LOAD: usize = 16;
/// How much faster a multiprocessor is with several cubes, of which one loads while another multiplies.
const ALONE: usize = 2;

/// Elements between the rows of shared memory: 16 bytes, so that the same columns of 8 rows are in different banks.
const PADDING: usize = 8;
/// Elements of a vector of shared memory.
pub(super) const VECTOR: usize = 4;

impl Cut {
    /// What the cubes of a product that share a multiprocessor cost, in products per value of K.
    fn cost(self, caps: &Caps, problem: &Problem) -> usize {
        let Self { m_tile, n_tile, .. } = self;
        let cubes = problem.batches * problem.m.div_ceil(m_tile) * problem.n.div_ceil(n_tile);
        let cube = m_tile * n_tile + DECODE * n_tile + LOAD * m_tile;
        (cubes * cube / caps.multiprocessors).max(ALONE * cube)
    }
}

impl CmmaTile {
    /// How the product is cut, where the device has matrices of x's type and takes so many cubes.
    pub fn new(caps: &Caps, problem: &Problem) -> Option<Self> {
        let cuts = Self::all(caps, problem);
        cuts.into_iter().min_by_key(|config| config.cut.cost(caps, problem))
    }

    /// Every way to cut the product that the device has shared memory and units for.
    pub fn all(caps: &Caps, problem: &Problem) -> Vec<Self> {
        let Problem { layout, x_type, y_type, .. } = *problem;
        let of_x = !matches!(layout.codes, Codes::Float(float) if float != x_type);
        let takes =
            problem.source == Source::Tensor && problem.routing.is_none() && problem.n >= NARROW && of_x;
        let Some(matrices) = caps.matrices(x_type).filter(|_| takes) else { return Vec::new() };
        let config = |cut: Cut| {
            let ends_early = !problem.runs().is_multiple_of(cut.step / RUN);
            Self { layout, x_type, y_type, matrices, plane: caps.largest_plane, ends_early, cut }
        };
        let fits = |config: &Self| {
            let cubes = problem.batches * problem.m.div_ceil(config.cut.m_tile);
            config.shared() <= caps.shared_memory && config.units() <= caps.units && cubes <= CUBES
        };
        // With the most of K at a time that there is shared memory for.
        let largest = |cut: Cut| {
            let once = Cut { stages: 1, ..cut };
            [cut, once, Cut { step: RUN, ..once }].map(config).into_iter().find(fits)
        };
        CUTS.into_iter().filter_map(largest).collect()
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        self.planes() * self.plane
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
        let rows = self.cut.stages * (self.cut.m_tile + self.cut.n_tile);
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
            ([32, 14336, 4096], [32, 32]),
            ([64, 14336, 4096], [64, 64]),
            ([64, 4096, 14336], [32, 32]),
            ([512, 14336, 4096], [128, 128]),
            ([512, 4096, 4096], [128, 64]),
            ([4096, 14336, 4096], [128, 128]),
        ];
        for (sizes, want) in table {
            let config = of(&nvidia(), [FloatType::F16; 2], sizes).unwrap();
            assert_eq!([config.cut.m_tile, config.cut.n_tile], want, "{sizes:?}");
        }
    }

    /// Whole matrices for each plane, in what a device has of shared memory and units, on devices of every kind.
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
                assert!(config.runs() <= 2, "{config:?}");
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
