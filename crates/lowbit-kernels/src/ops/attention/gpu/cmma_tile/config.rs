//! The compile-time configuration of the kernel on cooperative matrices, and sizes that follow from
//! it.

use crate::gpu::caps::{Caps, Matrices};
use crate::gpu::matrices::VECTOR;
use crate::ops::attention::gpu::operands::Softcap;
use lowbit_formats::FloatType;

/// The kernel's compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CmmaTile {
    /// The type of q, k, v and y: f16 or bf16.
    pub dtype: FloatType,
    /// D, a multiple of 16.
    pub width: usize,
    /// Dv, a multiple of 16.
    pub value_width: usize,
    /// The size of the device's matrices.
    pub matrices: Matrices,
    /// Units of the largest plane that may run: where planes are smaller there are more of them,
    /// and some only load.
    pub plane: usize,
    /// Units that every plane has: these share the softmax of a plane's rows.
    pub lanes: usize,
    pub cut: Cut,
    /// True if several cubes share the keys of a row: then y holds parts, which `combine.rs`
    /// combines.
    pub split: bool,
    /// The cap of scores, if there is one.
    pub softcap: Option<Softcap>,
}

/// A cube's cut of rows and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cut {
    /// Query rows of a plane.
    pub rows: usize,
    /// Planes that multiply.
    pub planes: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// True if a tile of values has shared memory of its own, so that it can be stored while others
    /// still read the keys.
    pub apart: bool,
}

const fn cut(rows: usize, planes: usize, keys: usize, apart: bool) -> Cut {
    Cut { rows, planes, keys, apart }
}

/// All cuts. The first is taken that the device has shared memory and registers for. Keys that
/// share their memory with the values cost two more barriers per tile. None of it was measured yet.
const CUTS: [Cut; 9] = [
    cut(16, 4, 64, true),
    cut(16, 4, 64, false),
    cut(16, 4, 32, true),
    cut(16, 4, 48, false),
    cut(16, 4, 32, false),
    cut(8, 4, 64, true),
    cut(8, 4, 32, true),
    cut(8, 4, 32, false),
    cut(8, 4, 16, false),
];

/// Elements between the rows of shared memory: 16 bytes of keys, so that the same columns of 8 rows
/// are in different banks.
const PADDING: usize = 8;
/// Elements of a vector of q, k and v in global memory.
pub(super) const WIDE: usize = 8;
/// Vectors that a unit loads before it stores the first, where a tile is not loaded ahead.
pub(super) const CHUNK: usize = 8;

impl CmmaTile {
    /// Every way in which the device can compute it, the one to take first. `lanes` are the units
    /// of the smallest plane that may run.
    pub fn all(dtype: FloatType, [width, value_width]: [usize; 2], lanes: usize, caps: &Caps) -> Vec<Self> {
        let fit = [width, value_width].iter().all(|&it| it.is_multiple_of(16) && (16..=256).contains(&it));
        let Some(matrices) = caps.matrices(dtype).filter(|_| fit) else { return Vec::new() };
        let plane = caps.largest_plane;
        let config = |cut: Cut| {
            let (split, softcap) = (false, None);
            Self { dtype, width, value_width, matrices, plane, lanes, cut, split, softcap }
        };
        let fits = |it: &Self| {
            let Cut { rows, keys, .. } = it.cut;
            let whole = rows.is_multiple_of(matrices.m)
                && keys.is_multiple_of(matrices.n)
                && keys.is_multiple_of(matrices.k);
            whole && it.shared_memory() <= caps.shared_memory && it.units() <= caps.units
        };
        let mut all: Vec<_> = CUTS.into_iter().map(config).filter(fits).collect();
        let first = all.iter().position(|it| it.registers() <= it.registers_of_unit());
        // If no cut leaves enough, the one that takes the fewest.
        let first = first.or_else(|| (0..all.len()).min_by_key(|&i| all[i].registers()));
        if let Some(first) = first {
            all[..=first].rotate_right(1);
        }
        all
    }

    /// Query rows of a cube.
    pub fn rows(self) -> usize {
        self.cut.rows * self.cut.planes
    }

    /// Units of a cube.
    pub fn units(self) -> usize {
        self.plane * self.cut.planes
    }

    /// Elements from a row of k or v in shared memory to the next.
    pub fn pitch(self, width: usize) -> usize {
        width + PADDING
    }

    /// Elements from a row of scores or weights in shared memory to the next.
    pub fn score_pitch(self) -> usize {
        self.cut.keys + PADDING
    }

    /// Vectors of a tile of keys in shared memory.
    fn keys_tile(self) -> usize {
        self.cut.keys * self.pitch(self.width) / VECTOR
    }

    /// The vector of shared memory that the values begin at.
    pub fn values_at(self) -> usize {
        if self.cut.apart { self.keys_tile() } else { 0 }
    }

    /// Vectors of shared memory of keys and values.
    pub fn tiles(self) -> usize {
        let values = self.values_at() + self.cut.keys * self.pitch(self.value_width) / VECTOR;
        values.max(self.keys_tile())
    }

    /// Vectors of a plane's scores in shared memory, and of its weights.
    pub fn plane_scores(self) -> usize {
        self.cut.rows * self.score_pitch() / VECTOR
    }

    /// Bytes of shared memory: tiles, scores in f32 and weights, and a word for each key.
    pub fn shared_memory(self) -> usize {
        let scores = self.cut.planes * self.plane_scores() * VECTOR;
        self.tiles() * VECTOR * self.dtype.size() + scores * (4 + self.dtype.size()) + self.cut.keys * 4
    }

    /// Vectors of a tile of k or v that a unit loads.
    pub fn loads(self, width: usize) -> usize {
        (self.cut.keys * width / WIDE).div_ceil(self.units())
    }

    /// The same of the wider one.
    pub fn most_loads(self) -> usize {
        self.loads(self.width).max(self.loads(self.value_width))
    }

    /// Registers that a unit keeps a tile long: sums, q and scores.
    fn registers(self) -> usize {
        self.cut.rows * (self.value_width + self.width / 2 + self.cut.keys) / self.lanes
    }

    /// Registers of a unit for that: NVIDIA's and AMD's have 256, Apple's 128, which multiply
    /// matrices of 8 rows.
    fn registers_of_unit(self) -> usize {
        if self.matrices.m == 8 { 88 } else { 216 }
    }

    /// True if there are registers to load a tile while the one before is used.
    pub fn ahead(self) -> bool {
        let most = if self.matrices.m == 8 { 104 } else { 176 };
        self.registers() + self.most_loads() * 4 <= most
    }

    /// True if all planes have the same number of units.
    pub fn planes_alike(self) -> bool {
        self.plane == self.lanes
    }

    /// Lanes that share a row.
    pub fn lanes_of_row(self) -> usize {
        (self.lanes / self.cut.rows).max(1)
    }

    /// Rows of a lane.
    pub fn rows_of_lane(self) -> usize {
        self.cut.rows.div_ceil(self.lanes)
    }

    /// Vectors of a row of `columns` that fall to a lane.
    pub fn vectors_of_lane(self, columns: usize) -> usize {
        (columns / VECTOR).div_ceil(self.lanes_of_row())
    }

    /// Matrices of a plane's rows, and of a tile's keys.
    pub fn matrices_of_scores(self) -> (usize, usize) {
        (self.cut.rows / self.matrices.m, self.cut.keys / self.matrices.n)
    }
}
