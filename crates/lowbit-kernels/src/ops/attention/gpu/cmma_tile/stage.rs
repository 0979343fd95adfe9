//! Brings q, keys and values to the matrices: through shared memory, since rows past the last and
//! values that are not finite need care. Keys and values are loaded to registers first, a tile
//! ahead where there are registers for it.

use super::Memory;
use super::config::{CHUNK, CmmaTile, WIDE};
use crate::gpu::matrices::{VECTOR, put};
use crate::ops::attention::gpu::operands::{Sizes, row_index};
use cubecl_core as cubecl;
use cubecl_core::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// A vector of q, k or v.
pub(super) type Wide = Vector<u32, Const<4>>;

/// A cube's keys.
#[derive(Clone, Copy, CubeType)]
pub(super) struct KeyRange {
    /// The row of the head's first key.
    pub base: u32,
    /// The end of the cube's keys.
    pub end: u32,
}

/// Some of the vectors of rows of k or v that a unit brings to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Part {
    /// Elements of a row.
    width: usize,
    /// The first vector and how many.
    first: usize,
    count: usize,
}

impl Part {
    /// All of a unit's vectors.
    fn all(width: usize, config: CmmaTile) -> Self {
        Self { width, first: 0, count: config.loads(width) }
    }

    /// As many as are loaded at a time.
    fn chunk(width: usize, chunk: usize, config: CmmaTile) -> Self {
        let first = chunk * CHUNK;
        Self { width, first, count: CHUNK.min(config.loads(width) - first) }
    }

    /// Vectors of a row.
    fn row(self) -> usize {
        self.width / WIDE
    }

    /// True if no unit is past the last key.
    fn whole(self, config: CmmaTile) -> bool {
        (config.cut.keys * self.row()).is_multiple_of(config.units())
    }
}

/// Loads the unit's part of the tile of keys from `first` on. For keys past the end it loads the
/// last one.
#[cube]
fn fetch(
    x: &[Wide],
    to: &mut Array<Wide>,
    keys: &KeyRange,
    first: u32,
    #[comptime] part: Part,
    #[comptime] config: CmmaTile,
) {
    let row = comptime!(part.row() as u32);
    #[unroll]
    for i in 0..comptime!(part.count) {
        let vector = UNIT_POS_X + comptime!(((part.first + i) * config.units()) as u32);
        let key = keys.base + min(first + vector / row, keys.end - 1u32);
        to[i] = x[(key * row + vector % row) as usize];
    }
}

/// Puts what was loaded to shared memory, `at` vectors from its start. With `clean`, zeros take the
/// place of vectors with a value that is not finite.
#[cube]
fn stage<E: Float>(
    from: &Array<Wide>,
    tiles: &mut Shared<[Vector<E, Const<4>>]>,
    clean: bool,
    #[comptime] at: usize,
    #[comptime] part: Part,
    #[comptime] config: CmmaTile,
) {
    let row = comptime!(part.row() as u32);
    let pitch = comptime!((config.pitch(part.width) / VECTOR) as u32);
    #[unroll]
    for i in 0..comptime!(part.count) {
        let vector = UNIT_POS_X + comptime!(((part.first + i) * config.units()) as u32);
        let key = vector / row;
        let mut values = from[i];
        if clean && !is_finite(values, config.dtype) {
            values = Wide::new(0u32);
        }
        if comptime!(part.whole(config)).runtime() || key < comptime!(config.cut.keys as u32) {
            let to = (key * pitch + vector % row * 2u32) as usize;
            put::<E>(values, tiles, comptime!(at).runtime() + to, true.runtime());
        }
    }
}

/// Begins to load the tile of keys or values from key `first` on, if there are registers for it.
#[cube]
pub(super) fn fetch_ahead(
    x: &[Wide],
    to: &mut Array<Wide>,
    keys: &KeyRange,
    first: u32,
    #[comptime] width: usize,
    #[comptime] config: CmmaTile,
) {
    if comptime!(config.ahead()) {
        fetch(x, to, keys, first, comptime!(Part::all(width, config)), config);
    }
}

/// Brings a tile to shared memory: what was loaded ahead, or else some vectors at a time. `tile` is
/// its first key and whether values that are not finite become zeros, `of` the elements of a row
/// and the vector of shared memory that the tile begins at.
#[cube]
pub(super) fn bring<E: Float>(
    x: &[Wide],
    memory: &mut Memory<E>,
    keys: &KeyRange,
    tile: (u32, bool),
    #[comptime] of: (usize, usize),
    #[comptime] config: CmmaTile,
) {
    let (first, clean) = tile;
    let (width, at) = comptime!(of);
    if comptime!(config.ahead()) {
        let part = comptime!(Part::all(width, config));
        stage::<E>(&memory.fetched, &mut memory.tiles, clean, at, part, config);
    } else {
        #[unroll]
        for chunk in 0..comptime!(config.loads(width).div_ceil(CHUNK)) {
            let part = comptime!(Part::chunk(width, chunk, config));
            let mut fetched = Array::<Wide>::new(CHUNK);
            fetch(x, &mut fetched, keys, first, part, config);
            stage::<E>(&fetched, &mut memory.tiles, clean, at, part, config);
        }
    }
}

#[cube]
fn is_finite(values: Wide, #[comptime] dtype: FloatType) -> bool {
    // All bits of the exponents.
    let exponent = comptime!(if dtype == FloatType::F16 { 0x7c00u32 } else { 0x7f80u32 });
    let mut finite = true.runtime();
    #[unroll]
    for j in 0..4usize {
        let low = values.extract(j) & exponent;
        let high = (values.extract(j) >> 16u32) & exponent;
        finite = finite && low != exponent && high != exponent;
    }
    finite
}

/// Marks the keys of the tile from `first` on whose values are not finite: in rows that do not see
/// the key, its weight of 0 times such a value would be NaN. The cube must meet before the marks
/// are read.
#[cube]
pub(super) fn mark_non_finite(
    v: &[Wide],
    marks: &mut Shared<[u32]>,
    keys: &KeyRange,
    first: u32,
    #[comptime] config: CmmaTile,
) {
    let row = comptime!((config.value_width / WIDE) as u32);
    let units = comptime!(config.units() as u32);
    let mut key = UNIT_POS_X;
    while key < comptime!(config.cut.keys as u32) {
        marks[key as usize] = 0u32;
        key += units;
    }
    sync_cube();
    let mut vector = UNIT_POS_X;
    while vector < comptime!(config.cut.keys as u32) * row {
        let key = keys.base + min(first + vector / row, keys.end - 1u32);
        if !is_finite(v[(key * row + vector % row) as usize], config.dtype) {
            marks[(vector / row) as usize] = 1u32;
        }
        vector += units;
    }
}

/// Matrices of zeros for the plane's rows of q: for each step of D, all rows.
#[cube]
pub(super) fn no_queries<E: Float>(#[comptime] config: CmmaTile) -> Sequence<Matrix<E>> {
    let (m, n, k) = comptime!((config.matrices.m, config.matrices.n, config.matrices.k));
    let mut queries = Sequence::<Matrix<E>>::new();
    #[unroll]
    for _ in 0..comptime!(config.width / k * config.matrices_of_scores().0) {
        queries.push(Matrix::<E>::from_value(
            MatrixIdent::A,
            m,
            n,
            k,
            MatrixLayout::RowMajor,
            E::from_int(0),
        ));
    }
    queries
}

/// Loads the plane's rows of q, from row `own` on, by way of the memory of its weights, some
/// columns at a time.
#[cube]
pub(super) fn load_queries<E: Float>(
    q: &[Wide],
    memory: &mut Memory<E>,
    queries: &mut Sequence<Matrix<E>>,
    own: u32,
    sizes: &Sizes,
    #[comptime] config: CmmaTile,
) {
    let (m, k, keys) = comptime!((config.matrices.m, config.matrices.k, config.cut.keys));
    let pitch = comptime!(config.score_pitch() / VECTOR);
    let of_plane = PLANE_POS as usize * comptime!(config.plane_scores());
    let rows = comptime!(config.cut.rows as u32);
    let lane = UNIT_POS_PLANE % comptime!(config.lanes as u32);
    #[unroll]
    for chunk in 0..comptime!(config.width.div_ceil(keys)) {
        let columns = comptime!(keys.min(config.width - chunk * keys));
        let vectors = comptime!((columns / WIDE) as u32);
        #[unroll]
        for i in 0..comptime!((config.cut.rows * columns / WIDE).div_ceil(config.lanes)) {
            let vector = lane + comptime!((i * config.lanes) as u32);
            let row = min(vector / vectors, rows - 1u32);
            // Rows past the last are computed and not stored.
            let from = row_index(min(own + row, sizes.rows - 1u32), sizes.group);
            let from = from * comptime!((config.width / WIDE) as u32)
                + comptime!((chunk * keys / WIDE) as u32)
                + vector % vectors;
            let values = q[from as usize];
            let whole = comptime!((config.cut.rows * columns / WIDE).is_multiple_of(config.lanes));
            if whole.runtime() || vector < rows * vectors {
                let to = row as usize * pitch + (vector % vectors * 2u32) as usize;
                put::<E>(values, &mut memory.weights, of_plane + to, true.runtime());
            }
        }
        sync_plane();
        #[unroll]
        for step in 0..comptime!(columns / k) {
            #[unroll]
            for i in 0..comptime!(config.matrices_of_scores().0) {
                let at = of_plane + comptime!(i * m * pitch + step * k / VECTOR);
                let rows = &memory.weights[at..at + comptime!(m * pitch)];
                let place = comptime!((chunk * keys / k + step) * config.matrices_of_scores().0 + i);
                cmma::load(queries.index_mut(place), rows, comptime!(config.score_pitch() as u32));
            }
        }
        sync_plane();
    }
}
