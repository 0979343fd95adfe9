//! Chooses attention's kernel on a GPU, and its cut into cubes.

use super::cuda::{MAX_SCALE, StepConfig, TileConfig, WGMMA_ROWS, WgmmaConfig};
use super::gpu::operands::Softcap;
use super::gpu::parts::PARTS;
use super::gpu::{CmmaTile, CombineConfig, StreamConfig};
use crate::gpu::CUBES;
use crate::gpu::caps::Caps;
use crate::gpu::compile::Target;
use crate::ops::cache_rows::CacheType;
use crate::ops::pages::PAGE_TOKENS;
use lowbit_formats::FloatType;

/// Units of the smallest plane there is: what is assumed where planes differ in size.
const SMALLEST_PLANE: usize = 4;
/// Planes of a cube on devices that share memory within one.
const PLANES: usize = 4;
/// Elements of a row per unit, unless that takes more than [`MAX_LANES`] units.
const SLOTS: usize = 8;
/// The most units that share a key: more of them would spend their time adding up.
const MAX_LANES: usize = 16;
/// Elements of a row per unit, from which even so many units share a key: registers do not hold
/// more.
const MAX_SLOTS: usize = 16;
/// Cubes per multiprocessor that keep it busy.
const FULL: usize = 2;

/// A kernel over keys, and how it is cut.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
    Step(StepConfig),
    Tile(TileConfig),
    Wgmma(WgmmaConfig),
    CmmaTile(CmmaTile),
    Stream(StreamConfig),
}

impl Choice {
    /// The same kernel, which writes parts in any case.
    pub(super) fn in_parts(mut self) -> Self {
        let split = match &mut self {
            Self::Step(config) => &mut config.split,
            Self::Tile(config) => &mut config.split,
            Self::Wgmma(config) => &mut config.split,
            Self::CmmaTile(config) => &mut config.split,
            Self::Stream(config) => &mut config.split,
        };
        *split = true;
        self
    }

    /// The same kernel, whose scores have this cap.
    pub(super) fn with_softcap(mut self, softcap: Option<Softcap>) -> Self {
        let own = match &mut self {
            Self::Step(config) => &mut config.softcap,
            Self::Tile(config) => &mut config.softcap,
            Self::Wgmma(config) => &mut config.softcap,
            Self::CmmaTile(config) => &mut config.softcap,
            Self::Stream(config) => &mut config.softcap,
        };
        *own = softcap;
        self
    }
}

/// The kernel for query rows of `sizes` (rows per key head, key heads, capacity, D and Dv), and how
/// many cubes share the keys of a row. The types are q's and k's; `scale` includes the factor
/// log2(e).
pub(super) fn choose(
    dtypes: [FloatType; 2],
    sizes: [usize; 5],
    scale: f32,
    target: &Target,
) -> (Choice, usize) {
    let all = tensor_core_choices(dtypes, sizes, scale, target);
    let pays = |(choice, _): &(Choice, usize)| match choice {
        Choice::Step(_) => sizes[0] <= STEP_UP_TO,
        Choice::Wgmma(_) => sizes[0] >= WGMMA_FROM,
        _ => true,
    };
    if let Some(choice) = all.into_iter().find(pays) {
        return choice;
    }
    if let Some((config, splits)) = cmma_tile(dtypes, sizes, target) {
        return (Choice::CmmaTile(config), splits);
    }
    let (config, splits) = stream_config(dtypes, sizes, target.caps());
    (Choice::Stream(config), splits)
}

/// As [`choose`] for a cache of 8 bits and queries of `dtype`: none where a kernel that multiplies
/// matrices of floats takes so many rows, for which the cache is expanded.
pub(super) fn choose_int8(
    dtype: FloatType,
    sizes: [usize; 5],
    scale: f32,
    target: &Target,
) -> Option<(Choice, usize)> {
    if takes_tensor_cores([dtype; 2], scale, target)
        && sizes[0] <= STEP_UP_TO
        && let Some((config, splits)) = step_config(dtype, true, sizes, target.caps())
    {
        return Some((Choice::Step(config), splits));
    }
    if !matches!(choose([dtype; 2], sizes, scale, target).0, Choice::Stream(_)) {
        return None;
    }
    let (config, splits) = stream_config_of(dtype, CacheType::Int8, sizes, target.caps());
    Some((Choice::Stream(config), splits))
}

/// The fewest cubes that take turns with the parts of a row in pages: they even out rows of
/// different lengths.
const LEAST_TURNS: usize = 4;

/// The kernel for keys in pages, for `sizes` (query heads per key head, key heads, tokens, D and
/// Dv), and how many cubes take turns with the parts of a row; see `gpu/parts.rs`. Of these sizes
/// the tokens alone do not decide the kernel, so that a row's bits do not depend on other rows.
pub(super) fn choose_paged(
    (dtype, cache): (FloatType, CacheType),
    [group, heads, tokens, width, value_width]: [usize; 5],
    scale: f32,
    target: &Target,
) -> (Choice, usize) {
    let (caps, int8) = (target.caps(), cache == CacheType::Int8);
    if takes_tensor_cores([dtype, cache.float().unwrap_or(dtype)], scale, target)
        && group <= STEP_UP_TO
        && tokens <= CUBES
    {
        let blocks = group.div_ceil(8);
        let config = StepConfig::paged((dtype, int8), [width, value_width], blocks, caps.shared_memory);
        if let Some(config) = config {
            // Two cubes per multiprocessor at a time, and twice as many for an even end.
            let cubes = 2 * FULL * caps.multiprocessors / (heads * tokens).max(1);
            return (Choice::Step(config), cubes.clamp(LEAST_TURNS, PARTS));
        }
    }
    let sizes = [group, heads, PAGE_TOKENS, width, value_width];
    let (config, _) = stream_config_of(dtype, cache, sizes, caps);
    (Choice::Stream(StreamConfig { split: true, paged: true, ..config }), PARTS)
}

/// Every kernel on NVIDIA's tensor cores that computes it, the one to prefer first.
pub(super) fn tensor_core_choices(
    dtypes: [FloatType; 2],
    sizes: [usize; 5],
    scale: f32,
    target: &Target,
) -> Vec<(Choice, usize)> {
    if !takes_tensor_cores(dtypes, scale, target) {
        return Vec::new();
    }
    let step = step_config(dtypes[0], false, sizes, target.caps());
    let step = step.map(|(config, splits)| (Choice::Step(config), splits));
    let wgmma = wgmma_config(dtypes[0], sizes, target.caps());
    let tile = tile_config(dtypes[0], sizes, target.caps());
    let wgmma = wgmma.map(|(config, splits)| (Choice::Wgmma(config), splits));
    let tile = tile.map(|(config, splits)| (Choice::Tile(config), splits));
    [step, wgmma, tile].into_iter().flatten().collect()
}

/// True if tensor cores compute these types. `scale` includes the factor log2(e).
fn takes_tensor_cores([dtype, cache]: [FloatType; 2], scale: f32, target: &Target) -> bool {
    let supported = dtype == cache && dtype != FloatType::F32 && scale > 0.0 && scale <= MAX_SCALE;
    supported && target.tensor_cores()
}

/// The streaming kernel for query rows of `sizes` (rows per key head, key heads, capacity, D and
/// Dv), and how many cubes share the keys of a row. The types are q's and k's.
pub(super) fn stream_config(
    [dtype, cache]: [FloatType; 2],
    sizes: [usize; 5],
    caps: &Caps,
) -> (StreamConfig, usize) {
    stream_config_of(dtype, CacheType::Float(cache), sizes, caps)
}

/// The same for any cache.
fn stream_config_of(
    dtype: FloatType,
    cache: CacheType,
    [rows, heads, capacity, width, value_width]: [usize; 5],
    caps: &Caps,
) -> (StreamConfig, usize) {
    let plane = caps.plane;
    let small = plane.is_some_and(|plane| plane < 32);
    // Planes that differ in size are used as if they were small ones.
    let planes = if small { 1 } else { 32 * PLANES / plane.unwrap_or(SMALLEST_PLANE).max(1) };
    let plane = plane.unwrap_or(SMALLEST_PLANE);
    let widest = width.max(value_width);
    let most_lanes = MAX_LANES.max(widest.div_ceil(MAX_SLOTS).next_power_of_two());
    let lanes = widest.div_ceil(SLOTS).next_power_of_two().min(most_lanes).min(plane);
    let slots = widest.div_ceil(lanes);
    // A small plane is a CPU's, which gains nothing from more rows at once.
    let most = if slots <= SLOTS && !small { 8 } else { 4 };
    let count = rows.min(most);
    let keys = if slots <= SLOTS && !small { 4 } else { 2 };
    let wide = match cache {
        CacheType::Float(cache) => {
            [width, value_width].iter().all(|width| (width * cache.size()).is_multiple_of(16))
        }
        CacheType::Int8 => true,
    };
    let mut config = StreamConfig {
        dtype,
        cache,
        width,
        value_width,
        rows: count,
        lanes,
        keys,
        plane,
        planes,
        wide,
        split: false,
        paged: false,
        softcap: None,
    };
    let steps = capacity.div_ceil(config.step() * planes);
    let splits = (FULL * caps.multiprocessors).div_ceil(rows.div_ceil(count) * heads).min(steps);
    config.split = splits > 1;
    (config, splits)
}

/// The most cubes that share a row's keys on tensor cores: more cost more to combine than they
/// save, except in steps.
const MAX_SPLITS: usize = 33;

/// The number of cubes, at most `most`, that share the keys of the same query rows on tensor cores:
/// the one that takes the least time. Each then reads fewer keys, but leaves sums of its own for
/// all rows, which are written, read again and combined. Both costs were measured on an H100
/// (`bench/record/cuda/2026-11-25.md`).
fn splits_of_keys(most: usize, [rows, heads, capacity, width, value_width]: [usize; 5]) -> usize {
    // In ns: a key in a cube that has a multiprocessor to itself, and a part of all rows.
    let key = 0.05 * (width + value_width) as f64;
    let part = 100.0 + 0.012 * (rows * heads * value_width) as f64;
    let time = |splits: usize| {
        let parts = if splits > 1 { splits as f64 * part } else { 0.0 };
        capacity.div_ceil(splits) as f64 * key + parts
    };
    let all = 1..=most.max(1);
    all.min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// True if rows of D and Dv are whole blocks of 16, and registers hold their sums.
fn are_blocks(widths: [usize; 2]) -> bool {
    widths.iter().all(|&width| width.is_multiple_of(16) && (1..=256).contains(&width))
}

/// Query rows per key head up to which the kernel for steps is taken.
const STEP_UP_TO: usize = 16;

/// As [`stream_config`], for the kernel for steps, of a type that tensor cores take.
fn step_config(dtype: FloatType, int8: bool, sizes: [usize; 5], caps: &Caps) -> Option<(StepConfig, usize)> {
    let [rows, heads, capacity, width, value_width] = sizes;
    // Registers hold one block of the widest heads.
    let blocks = if rows <= 8 || width.max(value_width) > 256 { 1 } else { 2 };
    let config = StepConfig::new((dtype, int8), [width, value_width], blocks, caps.shared_memory)?;
    let count = rows.div_ceil(config.rows());
    if count > CUBES {
        return None;
    }
    // One cube per multiprocessor.
    let most = (caps.multiprocessors / (count * heads)).min(capacity.div_ceil(config.keys));
    let splits = splits_of_keys(most.min(2 * MAX_SPLITS), sizes);
    Some((StepConfig { split: splits > 1, ..config }, splits))
}

/// Query rows per key head from which Hopper's kernel is taken: behind long texts it is as fast as
/// the tile kernel there, and faster with more rows.
const WGMMA_FROM: usize = 64;

/// As [`stream_config`], for the kernel for Hopper, of a type that tensor cores take.
fn wgmma_config(dtype: FloatType, sizes: [usize; 5], caps: &Caps) -> Option<(WgmmaConfig, usize)> {
    let [rows, heads, capacity, width, value_width] = sizes;
    let config = WgmmaConfig::new(dtype, width, value_width).filter(|_| caps.warp_groups)?;
    let count = rows.div_ceil(WGMMA_ROWS);
    if config.shared_memory() > caps.shared_memory || count > CUBES {
        return None;
    }
    // One cube per multiprocessor.
    let most = (caps.multiprocessors / (count * heads)).min(capacity.div_ceil(config.keys));
    let splits = splits_of_keys(most.min(MAX_SPLITS), sizes);
    Some((WgmmaConfig { split: splits > 1, ..config }, splits))
}

/// As [`stream_config`], for the kernel on all tensor cores, of a type that these take.
fn tile_config(dtype: FloatType, sizes: [usize; 5], caps: &Caps) -> Option<(TileConfig, usize)> {
    let [rows, heads, capacity, width, value_width] = sizes;
    if !are_blocks([width, value_width]) {
        return None;
    }
    let full = FULL * caps.multiprocessors;
    // Measured on an H200: 32 rows per plane where their sums fit into its registers, unless that
    // leaves multiprocessors without work.
    let large = width.max(value_width) <= 128 && rows.div_ceil(128) * heads > full / 2;
    let (blocks, planes) = if large { (2, 4) } else { (1, rows.div_ceil(16).min(4)) };
    // A decode step waits for memory: its tiles are small, and the next one is loaded meanwhile.
    // With few keys, smaller tiles occupy more cubes.
    let (keys, stages) = match planes {
        1 if capacity <= 16 * MAX_SPLITS => (16, 2),
        1 => (32, 2),
        _ if width.max(value_width) <= 64 => (64, 2),
        _ => (64, 1),
    };
    let (split, softcap) = (false, None);
    let mut config = TileConfig { dtype, width, value_width, blocks, planes, keys, stages, split, softcap };
    while config.shared_memory() > caps.shared_memory {
        if config.keys == 16 {
            return None;
        }
        config.keys /= 2;
    }
    let count = rows.div_ceil(config.rows());
    if count > CUBES {
        return None;
    }
    let mut splits = splits_of_tiles(count * heads, capacity.div_ceil(config.keys), full);
    // Tiles of one plane are for waiting for memory: more cubes wait at the same time.
    if planes > 1 {
        splits = splits_of_keys(splits, sizes);
    }
    config.split = splits > 1;
    Some((config, splits))
}

/// Cubes that share the keys of a block of rows, where `cubes` do without, `full` keep the device
/// busy, and there are this many tiles of keys.
fn splits_of_tiles(cubes: usize, tiles: usize, full: usize) -> usize {
    let splits = if cubes > full * 3 / 8 { 1 } else { full / cubes };
    splits.min(MAX_SPLITS).min(tiles)
}

/// Query rows per key head from which cooperative matrices compute attention: with fewer, most rows
/// of a tile would be empty. Reasoned, not measured: `gpu_times.rs` measures it.
const MATRICES_FROM: usize = 24;

/// As [`stream_config`], for the kernel on cooperative matrices.
fn cmma_tile(dtypes: [FloatType; 2], sizes: [usize; 5], target: &Target) -> Option<(CmmaTile, usize)> {
    let enough = sizes[0] >= MATRICES_FROM;
    enough.then(|| cmma_tiles(dtypes, sizes, target).into_iter().next())?
}

/// Every way in which that kernel can compute it, the one to take first.
pub(super) fn cmma_tiles(
    [dtype, cache]: [FloatType; 2],
    [rows, heads, capacity, width, value_width]: [usize; 5],
    target: &Target,
) -> Vec<(CmmaTile, usize)> {
    if dtype != cache {
        return Vec::new();
    }
    let caps = target.caps();
    let all = CmmaTile::all(dtype, [width, value_width], target.smallest_plane(), caps);
    let launched = all.into_iter().map(|config| {
        let count = rows.div_ceil(config.rows());
        let tiles = capacity.div_ceil(config.cut.keys);
        let splits = splits_of_tiles(count * heads, tiles, FULL * caps.multiprocessors);
        (CmmaTile { split: splits > 1, ..config }, splits, count)
    });
    launched.filter(|(.., count)| *count <= CUBES).map(|(config, splits, _)| (config, splits)).collect()
}

/// The kernel that combines `splits` parts of rows of Dv elements.
pub(super) fn combine_config(
    width: usize,
    dtype: FloatType,
    splits: usize,
    plane: Option<usize>,
) -> CombineConfig {
    CombineConfig::new(width, dtype, splits, plane.unwrap_or(SMALLEST_PLANE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::caps::Matrices;

    /// A CPU's, or a large GPU's.
    fn caps(plane: Option<usize>) -> Caps {
        let multiprocessors = if plane == Some(8) { 4 } else { 132 };
        Caps { plane, multiprocessors, ..*Target::offline(32, 4).caps() }
    }

    #[test]
    fn rows_and_parts_of_streams() {
        // (rows, heads, capacity, D), plane -> rows, lanes, keys and planes of a cube; cubes that
        // share the keys
        let table = [
            ((4, 8, 8192, 128), Some(32), (4, 16, 4, 4), 33),
            ((4, 8, 64, 128), Some(32), (4, 16, 4, 4), 2),
            ((4, 4, 8192, 256), Some(32), (4, 16, 2, 4), 66),
            ((2048, 8, 8192, 128), Some(32), (8, 16, 4, 4), 1),
            ((1, 8, 8192, 64), Some(64), (1, 8, 4, 2), 33),
            ((8, 4, 8192, 512), Some(32), (4, 32, 2, 4), 33),
            ((8, 4, 8192, 512), Some(8), (4, 8, 2, 1), 1),
            ((4, 8, 8192, 128), Some(8), (4, 8, 2, 1), 1),
            ((4, 1, 8192, 128), Some(8), (4, 8, 2, 1), 8),
            ((4, 8, 8192, 20), None, (4, 4, 4, 32), 33),
        ];
        for ((rows, heads, capacity, width), plane, want, splits) in table {
            let sizes = [rows, heads, capacity, width, width];
            let (config, parts) = stream_config([FloatType::F32; 2], sizes, &caps(plane));
            let got = (config.rows, config.lanes, config.keys, config.planes);
            assert_eq!((got, parts), (want, splits), "{sizes:?} in planes of {plane:?}");
            assert_eq!(config.split, splits > 1);
        }
    }

    /// (rows, heads, D) -> the kernel's rows, keys and whether values have memory of their own, or
    /// none; cubes that share the keys
    #[test]
    fn tiles_of_cooperative_matrices() {
        let nvidia = Target::offline(32, 4)
            .with_matrices(Matrices { m: 16, n: 16, k: 16 }, &[FloatType::F16, FloatType::BF16]);
        let table = [
            ((4, 8, 128), None, 0),
            ((24, 8, 128), Some((64, 64, false)), 33),
            ((2048, 8, 128), Some((64, 64, false)), 1),
            ((16384, 8, 64), Some((64, 64, true)), 1),
            ((16384, 4, 256), Some((64, 48, false)), 1),
        ];
        for ((rows, heads, width), want, splits) in table {
            let sizes = [rows, heads, 8192, width, width];
            let tile = cmma_tile([FloatType::F16; 2], sizes, &nvidia);
            let got = tile.map(|(config, _)| (config.rows(), config.cut.keys, config.cut.apart));
            let parts = tile.map_or(0, |(_, splits)| splits);
            assert_eq!((got, parts), (want, splits), "{rows} rows of {heads} heads of {width}");
        }
        let chosen = choose([FloatType::F16; 2], [2048, 8, 8192, 128, 128], 0.1, &nvidia).0;
        assert!(matches!(chosen, Choice::CmmaTile(_)));
        let sizes = [4096, 8, 8192, 128, 128];
        let taken = |dtypes, sizes| cmma_tile(dtypes, sizes, &nvidia).is_some();
        assert!(taken([FloatType::BF16; 2], sizes));
        assert!(!taken([FloatType::F32; 2], sizes) && !taken([FloatType::F16, FloatType::BF16], sizes));
        assert!(!taken([FloatType::F16; 2], [4096, 8, 8192, 72, 128]), "half a block of 16");
        assert!(cmma_tile([FloatType::F16; 2], sizes, &Target::offline(32, 4)).is_none(), "no matrices");
    }

    /// Every device with matrices has a tile for every size of heads, within what it has of shared
    /// memory and units.
    #[test]
    fn tiles_of_cooperative_matrices_fit_devices() {
        let sizes = [(8, 8, 8), (16, 16, 16), (8, 16, 16), (16, 8, 8)];
        let of = |plane, (m, n, k)| {
            Target::offline(plane, 4).with_matrices(Matrices { m, n, k }, &[FloatType::F16])
        };
        let targets = [32, 64].into_iter().flat_map(|plane| sizes.map(|sizes| of(plane, sizes)));
        #[cfg(feature = "metal")]
        let targets = targets.chain([Target::apple()]);
        for target in targets {
            let Matrices { m, n, k } = target.caps().f16_matrices.unwrap();
            for width in (16..=256).step_by(16) {
                let all = cmma_tiles([FloatType::F16; 2], [4096, 4, 4096, width, width], &target);
                assert!(!all.is_empty(), "heads of {width} for {:?}", target.caps());
                for (config, _) in all {
                    let cut = config.cut;
                    assert!(cut.rows.is_multiple_of(m) && cut.keys.is_multiple_of(n));
                    assert!(cut.keys.is_multiple_of(k));
                    assert!(config.shared_memory() <= target.caps().shared_memory, "{config:?}");
                    assert!(config.units() <= target.units(), "{config:?}");
                }
            }
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn tiles_for_tensor_cores() {
        let target = Target::cuda(crate::gpu::compile::CudaDevice::H100);
        let half = FloatType::BF16;
        let tile = |sizes| tile_config(half, sizes, target.caps());
        // (rows, heads, D) -> blocks, planes, keys and stages; cubes that share the keys
        let table = [
            ((4, 8, 128), (1, 1, 32, 2), 33),
            ((4, 4, 256), (1, 1, 32, 2), 33),
            ((33, 8, 128), (1, 3, 64, 1), 14),
            ((2048, 8, 128), (1, 4, 64, 1), 1),
            ((16384, 8, 128), (2, 4, 64, 1), 1),
            ((16384, 8, 64), (2, 4, 64, 2), 1),
            ((16384, 4, 256), (1, 4, 64, 1), 1),
        ];
        for ((rows, heads, width), want, splits) in table {
            let (config, parts) = tile([rows, heads, 8192, width, width]).unwrap();
            let got = (config.blocks, config.planes, config.keys, config.stages);
            assert_eq!((got, parts), (want, splits), "{rows} rows of {heads} heads of {width}");
        }
        for (capacity, keys, splits) in [(256, 16, 16), (528, 16, 33), (544, 32, 17)] {
            let (config, parts) = tile([4, 4, capacity, 256, 256]).unwrap();
            assert_eq!((config.keys, parts), (keys, splits), "a capacity of {capacity}");
        }
        let takes = |dtypes, scale| takes_tensor_cores(dtypes, scale, &target);
        assert!(takes([half; 2], 0.1));
        assert!(!takes([FloatType::F32; 2], 0.1), "f32");
        assert!(!takes([FloatType::F16, half], 0.1), "two types");
        assert!(!takes([half; 2], -0.1) && !takes([half; 2], 0.0), "no scale above 0");
        assert!(tile([4, 8, 8192, 72, 128]).is_none(), "half a block of 16");
        // A device with less shared memory than two cubes need takes tiles of fewer keys.
        let ada = Target::cuda(crate::gpu::compile::CudaDevice::example(89));
        for (width, keys) in [(128, 64), (256, 32)] {
            let (config, _) = tile_config(half, [2048, 8, 8192, width, width], ada.caps()).unwrap();
            assert_eq!(config.keys, keys, "heads of {width}");
            assert!(config.shared_memory() <= ada.caps().shared_memory);
        }
        let shared = |rows, width| tile([rows, 8, 8192, width, width]).unwrap().0.vectors() * 16;
        // Below what a cube may have, and so little that two cubes fit on a multiprocessor.
        assert!(
            [4, 100, 16384]
                .iter()
                .all(|&rows| shared(rows, 256) < 113 << 10 && shared(rows, 128) < 113 << 10)
        );
    }

    /// (rows, heads, capacity, D) -> the kernel, and the cubes that share the keys
    #[cfg(feature = "cuda")]
    #[test]
    fn kernels_for_tensor_cores() {
        let of = |device| Target::cuda(crate::gpu::compile::CudaDevice::example(device));
        let table = [
            ((4, 4, 512, 256), 90, "step of 4 planes with 3 tiles of 16", 9),
            ((16, 4, 131_072, 256), 90, "step of 4 planes with 3 tiles of 16", 33),
            ((8, 2, 131_072, 256), 90, "step of 4 planes with 3 tiles of 16", 66),
            ((4, 8, 131_072, 128), 90, "step of 2 planes with 3 tiles of 32", 16),
            ((4, 4, 131_072, 256), 80, "step of 4 planes with 2 tiles of 16", 33),
            ((4, 4, 131_072, 256), 89, "step of 2 planes with 2 tiles of 16", 33),
            ((4, 4, 131_072, 192), 90, "tile", 33),
            ((8, 4, 131_072, 512), 90, "step of 2 planes with 2 tiles of 16", 33),
            ((8, 4, 131_072, 512), 89, "step of 2 planes with 1 tiles of 16", 33),
            ((16, 4, 131_072, 512), 90, "step of 2 planes with 2 tiles of 16", 16),
            ((24, 4, 131_072, 512), 90, "another", 11),
            ((16384, 4, 131_072, 256), 90, "wgmma of 80", 1),
            ((2048, 4, 131_072, 256), 90, "wgmma of 80", 2),
            ((2048, 4, 1024, 256), 90, "wgmma of 80", 1),
            ((48, 4, 131_072, 256), 90, "tile", 33),
            ((16384, 8, 131_072, 128), 90, "wgmma of 128", 1),
            ((16384, 8, 131_072, 192), 90, "tile", 1),
            ((16384, 4, 131_072, 256), 80, "tile", 1),
        ];
        for ((rows, heads, capacity, width), device, want, splits) in table {
            let sizes = [rows, heads, capacity, width, width];
            let (choice, parts) = choose([FloatType::F16; 2], sizes, 0.1, &of(device));
            let got: String = match choice {
                Choice::Step(config) => {
                    let (planes, stages, keys) = (config.planes, config.stages, config.keys);
                    format!("step of {planes} planes with {stages} tiles of {keys}")
                }
                Choice::Tile(_) => "tile".into(),
                Choice::Wgmma(config) => format!("wgmma of {}", config.keys),
                Choice::CmmaTile(_) | Choice::Stream(_) => "another".into(),
            };
            assert_eq!((got.as_str(), parts), (want, splits), "{sizes:?} on sm_{device}");
        }
    }
}
