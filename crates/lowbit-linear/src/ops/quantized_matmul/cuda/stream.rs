//! One row of x as a stream, from Hopper on: one cube a multiprocessor, some planes of which copy
//! the weight into a ring of stages in shared memory, as soon as there is room, from before the
//! launch before this one has ended until its last rows. The others multiply what has come. So
//! loads are always under way, whatever the multiplying planes wait for, and rows that end do not
//! hold up those that begin.

#![allow(unsafe_code)] // Launches.

use super::super::gpu::cube_rows::check_indices;
use super::super::input::CHECK;
use super::super::problem::{Operands, Problem, Source};
use super::mma_vec::config::{MmaVec, RUNS, SPAN};
use super::mma_vec::make_x::{self, Inputs, MEETING, Norm, PLANES, XConfig};
use super::mma_vec::products::{Step, XPlaces, multiply_spans, scale_products, x_places, x_places_count};
use super::mma_vec::scales::{Elements, elements, staged};
use super::mma_vec::supports;
use super::numbers::ONES;
use super::staging::{Chunk, Rows, Staged, stage};
use crate::KernelError;
use crate::gpu::Gpu;
use crate::gpu::caps::Caps;
use crate::gpu::compile::{Target, overlap};
use crate::gpu::components::{Components, ComponentsArgs};
use crate::gpu::cuda::ptx::{self, address, shared_words};
use crate::gpu::float::{narrow, with_storage};
use crate::gpu::launch::{Kernel, LaunchArgs, kernel};
use crate::gpu::layout::{Codes, with_components};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::DType;
#[cfg(test)]
use {
    crate::ops::glu::Gate,
    lowbit_formats::{FloatType, Format},
};

/// The compile-time configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream {
    /// Of [`PLANES`] planes, one row of x, 16 rows of the weight per plane, all spans of x in one
    /// chunk.
    pub vec: MmaVec,
    pub source: Option<Source>,
    /// Tiles of 16 rows of the weight a stage: each has as many planes.
    pub tiles: usize,
    /// Stages that shared memory holds.
    pub stages: usize,
}

/// Planes that copy: one alone is slower than the memory.
const COPIERS: usize = 2;
/// The longest x, in runs, that comes so soon that fewer stages need be under way until then.
const SHORT: usize = 256;
/// Groups of tiles whose sums wait to be added up together.
const SLOTS: usize = 8;
/// A stream, and the cubes that share its product: one per multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub stream: Stream,
    pub cubes: usize,
}

/// The configuration for the product: for one row of x, if rows and stages are whole steps and
/// whole 16 bytes of each of the weight's components, there is memory for two stages at least, and
/// work for most multiprocessors.
pub(in super::super) fn fit(caps: &Caps, problem: &Problem) -> Option<Launch> {
    let one_row = problem.m == 1 && problem.batches == 1 && problem.routing.is_none();
    if !one_row || !problem.vectors || !problem.whole_runs() {
        return None;
    }
    let stream = Stream::new(caps, problem)?;
    let groups = stream.groups(problem.n);
    let busy = groups >= caps.multiprocessors * 3 / 4;
    busy.then_some(Launch { stream, cubes: groups.min(caps.multiprocessors) })
}

impl Stream {
    fn new(caps: &Caps, problem: &Problem) -> Option<Self> {
        let (runs, layout, source) = (problem.runs(), problem.layout, problem.source);
        if !caps.overlaps || !supports(caps, layout, problem.x_type) || runs == 0 {
            return None;
        }
        let spans = runs / RUNS;
        // As few tiles as give every plane something to multiply.
        let tiles = (4 * PLANES / spans.max(1)).next_power_of_two().clamp(1, PLANES);
        let vec = MmaVec {
            layout,
            x_type: problem.x_type,
            y_type: problem.y_type,
            m_tile: 1,
            n_tiles: 1,
            planes: PLANES,
            chunk: spans.next_multiple_of(4),
            scaled: 4 * PLANES / tiles,
            made: None,
            overlaps: true,
        };
        let (scale, bias) = layout.scale_sizes();
        let aligned = [runs, runs % (RUNS * vec.scaled)].into_iter().all(|runs| {
            let (scales, biases) = layout.elements(runs);
            runs % 8 == 0 && scales * scale % 16 == 0 && biases * bias % 16 == 0
        });
        let stream = Self { vec, source, tiles, stages: 0 };
        let x = stream.x_config().shared() + vec.x_vectors() * 16 + vec.x_sums() * vec.chunk * 4;
        let fixed = x + SLOTS * PLANES * 16 * 4 + 16;
        let stages = caps.shared_memory.checked_sub(fixed)? / stream.stage_bytes();
        // More only make x wait behind the weight. That pays where the memory would have nothing to
        // do until x has come, and where codes are then multiplied sooner than others come: those
        // of 4 bits, which need no shift.
        let quick = matches!(layout.codes, Codes::Integer { .. }) && layout.bits == 4;
        let most = if quick && runs > SHORT { 4 } else { 3 };
        (aligned && stages >= 2).then_some(Self { stages: stages.min(most), ..stream })
    }

    /// Stages that are copied before x has come.
    fn early(self) -> u32 {
        self.stages.saturating_sub(1).max(2) as u32
    }

    fn x_config(self) -> XConfig {
        XConfig::new(self.source, self.vec.x_type, self.vec.chunk * SPAN, 32 * PLANES)
    }

    /// Groups of tiles of a weight of `n` rows.
    fn groups(self, n: usize) -> usize {
        n.div_ceil(self.rows())
    }

    /// Rows of the weight a stage.
    fn rows(self) -> usize {
        16 * self.tiles
    }

    /// Planes that a tile has.
    fn planes(self) -> usize {
        PLANES / self.tiles
    }

    /// Planes of a tile that have something to multiply in a row's last stage, if not all have.
    /// Other planes have it in the next group.
    fn left_over(self) -> usize {
        self.vec.chunk % self.vec.scaled / 4
    }

    /// Words of codes from one row of a stage to the next: more than there are, so that units read
    /// different banks.
    fn words(self) -> usize {
        let bits = self.vec.layout.bits;
        self.vec.scaled * RUNS * bits + if bits == 2 { 16 } else { 4 }
    }

    /// Bytes of a span's codes.
    fn span_bytes(self) -> u32 {
        (4 * RUNS * self.vec.layout.bits) as u32
    }

    fn stage_bytes(self) -> usize {
        let (scales, biases) = self.vec.element_rows();
        let (scale, bias) = self.vec.layout.scale_sizes();
        self.rows() * (self.words() * 4 + scales * scale + biases * bias) + 16
    }
}

/// The content of stages: rows of the weight, and their scales and biases.
#[derive(CubeType)]
struct Stages<S: Int, B: Int, V: Size> {
    codes: Shared<[Vector<u32, V>]>,
    scaling: Elements<S, B>,
}

/// A ring of stages, and how far a plane is in it.
#[derive(CubeType)]
struct Ring {
    /// Addresses in shared memory: the codes, scales and biases of all stages; of each stage a
    /// barrier for when it is full and one for when it is empty, and after those one for when x is
    /// there.
    codes: u32,
    scales: u32,
    biases: u32,
    barriers: u32,
    stage: u32,
    phase: u32,
}

#[cube]
impl Ring {
    fn full(&self) -> u32 {
        self.barriers + self.stage * 16u32
    }

    fn empty(&self) -> u32 {
        self.barriers + self.stage * 16u32 + 8u32
    }

    fn x_ready(&self, #[comptime] stages: usize) -> u32 {
        self.barriers + comptime!(stages as u32 * 16)
    }

    /// Makes the barriers.
    fn begin(&self, #[comptime] stages: usize) {
        #[unroll]
        for i in 0..comptime!(stages as u32) {
            ptx::barrier(self.barriers + comptime!(i * 16), 1usize);
            ptx::barrier(self.barriers + comptime!(i * 16 + 8), PLANES);
        }
        ptx::barrier(self.x_ready(stages), PLANES);
        ptx::publish();
    }

    fn advance(&mut self, #[comptime] stages: usize) {
        self.stage += 1u32;
        if self.stage == comptime!(stages as u32) {
            self.stage = 0u32;
            self.phase ^= 1u32;
        }
    }
}

/// The operands of x, as [`Source`] says: those that it does not name are not read.
#[derive(CubeType, CubeLaunch, LaunchArgs)]
struct XInputs {
    x: Box<[Vector<u32, Const<4>>]>,
    other: Box<[Vector<u32, Const<4>>]>,
}

#[derive(Clone, Copy, CubeType, CubeLaunch, LaunchArgs)]
struct Sizes {
    n: u32,
    /// Runs of a row of the weight.
    runs: u32,
    /// Of the norm, as bits.
    eps: u32,
}

/// `y[n] = sum over k of x[k] * weight[n, k]`; the sum that x is the norm of goes to `sum`.
#[kernel(waits)]
fn quantized_matmul_stream<S: Int, B: Int, Y: Int, V: Size>(
    #[early] weight: &Components<S, B, V>,
    #[early] norm: &[Vector<u32, Const<4>>],
    x: &XInputs,
    y: &mut [Y],
    sum: &mut [Vector<u32, Const<4>>],
    sizes: Sizes,
    ones: u32,
    #[comptime] stream: Stream,
) {
    let (n, runs) = (sizes.n, sizes.runs);
    let stages = stages::<S, B, V>(stream);
    let mut ring = ring(&stages, stream);
    if UNIT_POS_X == comptime!(32 * PLANES as u32) {
        ring.begin(stream.stages);
    }
    sync_cube();
    let groups = n.div_ceil(comptime!(stream.rows() as u32));
    if UNIT_POS_X >= comptime!(32 * PLANES as u32) {
        copy_weight(weight, n, runs, &mut ring, stream);
    } else {
        let count = runs as usize * 4;
        let norm = make_x::norm(norm, f32::reinterpret(sizes.eps), count, stream.x_config());
        overlap();
        let from = Inputs::new(&x.x, &x.other, 0usize.runtime(), count);
        let xs = share_x(&from, &norm, sum, runs as usize, stream);
        ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
        arrive(ring.x_ready(stream.stages));
        let mut partial = Shared::<[f32]>::new_slice(SLOTS * PLANES * 16);
        let places = Places::new(&stages, xs, stream);
        let mut group = CUBE_POS_X;
        let mut slots = 0usize;
        let mut turned = 0usize;
        while group < groups {
            let sums = multiply_group(&stages, &places, &mut ring, runs as usize, turned, ones, stream);
            turned += comptime!(stream.left_over());
            keep(&sums, slots, &mut partial, stream.vec);
            slots += 1;
            let next = group + CUBE_COUNT_X;
            if slots == SLOTS || next >= groups {
                ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
                store::<Y>(&partial, y, n, group, slots, stream);
                ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
                slots = 0;
            }
            group = next;
        }
    }
}

/// Room for all stages.
#[cube]
fn stages<S: Int, B: Int, V: Size>(#[comptime] stream: Stream) -> Stages<S, B, V> {
    let vec = comptime!(stream.vec);
    let rows = comptime!(stream.stages * stream.rows());
    let codes = Shared::new_aligned_slice(comptime!(rows * stream.words() / vec.layout.vector()), 128usize);
    Stages::<S, B, V> { codes, scaling: elements::<S, B>(rows, 128usize, vec) }
}

/// The ring of these stages, at its begin.
#[cube]
fn ring<S: Int, B: Int, V: Size>(stages: &Stages<S, B, V>, #[comptime] stream: Stream) -> Ring {
    let barriers =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(stream.stages + 1), 128usize);
    Ring {
        codes: address(&stages.codes),
        scales: address(&stages.scaling.scales),
        biases: address(&stages.scaling.biases),
        barriers: address(&barriers),
        stage: 0u32.runtime(),
        phase: 0u32.runtime(),
    }
}

/// Brings x, of `runs` runs, to where the planes that multiply share it.
#[cube]
fn share_x(
    from: &Inputs<'_>,
    norm: &Norm,
    sum: &mut [Vector<u32, Const<4>>],
    runs: usize,
    #[comptime] stream: Stream,
) -> Staged {
    let (vec, x_config) = comptime!((stream.vec, stream.x_config()));
    let mut xs = staged(vec);
    let all = Chunk { first: 0usize.runtime(), runs };
    let one =
        Rows { count: 1usize.runtime(), run: 0usize.runtime(), y: 0usize.runtime(), list: 0u32.runtime() };
    if comptime!(x_config.source.is_none()) {
        stage(from.x, &one, &all, &mut xs, vec.staging());
    } else {
        let mut made =
            Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(x_config.vectors()), 16usize);
        make_x::make(from, norm, sum, &mut made, x_config);
        ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
        stage(made.as_slice(), &one, &all, &mut xs, vec.staging());
    }
    xs
}

/// The places of a unit's operands in every step. The compiler would compute them again in each.
#[derive(CubeType)]
struct Places {
    /// The address of the unit's first codes in the ring's first stage, if its plane had the
    /// stage's first spans.
    codes: u32,
    x: XPlaces,
    x_sums: Shared<[f32]>,
    /// The first of the plane's rows in a stage.
    row: u32,
    plane: u32,
}

#[cube]
impl Places {
    fn new<S: Int, B: Int, V: Size>(
        stages: &Stages<S, B, V>,
        xs: Staged,
        #[comptime] stream: Stream,
    ) -> Places {
        let (unit, plane) = (UNIT_POS_X % 32u32, UNIT_POS_X / 32u32);
        let row = ptx::kept(plane / comptime!(stream.planes() as u32) * 16u32);
        let of_row = (row + unit / 4u32) * comptime!(4 * stream.words() as u32);
        let codes = address(&stages.codes) + of_row + unit % 4u32 * comptime!(stream.span_bytes());
        let mut x = x_places(address(&xs.values), stream.vec);
        #[unroll]
        for f in 0..comptime!(x_places_count(stream.vec)) {
            x.begins[f] = ptx::kept(x.begins[f]);
            x.steps[f] = ptx::kept(x.steps[f]);
        }
        Places { codes: ptx::kept(codes), x, x_sums: xs.sums, row, plane: ptx::kept(plane) }
    }
}

/// A unit's sums of the group of tiles that comes next in the ring, of the rows of its plane's
/// tile. The planes of a tile take their turns in a stage's spans from the `turned`-th on.
#[cube]
fn multiply_group<S: Int, B: Int, V: Size>(
    stages: &Stages<S, B, V>,
    places: &Places,
    ring: &mut Ring,
    runs: usize,
    turned: usize,
    ones: u32,
    #[comptime] stream: Stream,
) -> Array<f32> {
    let vec = comptime!(stream.vec);
    let mut sums = Array::<f32>::new(2usize);
    sums[0] = 0.0;
    sums[1] = 0.0;
    let mut span = places.plane as usize % comptime!(stream.planes()) * 4;
    if comptime!(stream.left_over() > 0) {
        span = (places.plane as usize + turned) % comptime!(stream.planes()) * 4;
    }
    let mut first = 0usize;
    while first * RUNS < runs {
        ptx::wait(ring.full(), ring.phase);
        if (first + span) * RUNS < runs {
            let codes = places.codes
                + ring.stage * comptime!((4 * stream.rows() * stream.words()) as u32)
                + span as u32 * comptime!(stream.span_bytes());
            let words = read(codes, stream);
            let products = multiply_spans(&words, &places.x, first + span, ones, vec);
            let row = (ring.stage * comptime!(stream.rows() as u32) + places.row) as usize;
            let step = Step { first: first + span, row, span };
            scale_products(&products, &places.x_sums, &stages.scaling, &step, &mut sums, vec);
        }
        arrive(ring.empty());
        ring.advance(stream.stages);
        first += comptime!(vec.scaled);
    }
    sums
}

/// All of a plane's units have come to a barrier of planes.
#[allow(clippy::manual_is_multiple_of)] // CubeCL has no such method.
#[cube]
fn arrive(barrier: u32) {
    sync_plane();
    if UNIT_POS_X % 32u32 == 0u32 {
        ptx::arrive(barrier);
    }
}

/// Copies all that this cube multiplies, stage by stage.
#[cube]
fn copy_weight<S: Int, B: Int, V: Size>(
    weight: &Components<S, B, V>,
    n: u32,
    runs: u32,
    ring: &mut Ring,
    #[comptime] stream: Stream,
) {
    let vec = comptime!(stream.vec);
    let (scale, bias) = comptime!(vec.layout.scale_sizes());
    let (scale_row, bias_row) = comptime!(vec.element_rows());
    // Of 8 runs, of which rows and stages have a whole number.
    let code_bytes = comptime!(8 * 4 * vec.layout.bits as u32);
    let scale_bytes = comptime!((vec.layout.elements(8).0 * scale) as u32);
    let bias_bytes = comptime!((vec.layout.elements(8).1 * bias) as u32);
    let (rows, a_stage) = comptime!((stream.rows() as u32, (RUNS * vec.scaled) as u32));
    let groups = n.div_ceil(rows);
    // The compiler, too, must see that it is the same for all units of a plane.
    let copier = plane_broadcast(UNIT_POS_X / 32u32, 0u32) - comptime!(PLANES as u32);
    let mut filled = 0u32;
    let mut group = CUBE_POS_X;
    while group < groups {
        let mut first = 0u32;
        while first < runs {
            if filled == comptime!(stream.early()) {
                ptx::wait(ring.x_ready(stream.stages), 0u32.runtime());
            }
            filled += 1u32;
            // The first time round, all stages are empty.
            ptx::wait(ring.empty(), ring.phase ^ 1u32);
            let count = min(runs - first, a_stage) / 8u32;
            if copier == 0u32 {
                ptx::expect(ring.full(), count * comptime!((code_bytes + scale_bytes + bias_bytes) * rows));
            }
            #[unroll]
            for i in 0..comptime!(rows / COPIERS as u32) {
                let r = copier + comptime!(i * COPIERS as u32);
                // Rows past the last are computed and not stored.
                let from = min(group * rows + r, n - 1u32) * (runs / 8u32) + first / 8u32;
                let at = ring.stage * rows + r;
                let to = ring.codes + at * comptime!(stream.words() as u32 * 4);
                ptx::copy(&weight.codes, from, code_bytes, to, count * code_bytes, ring.full());
                if comptime!(scale_bytes > 0) {
                    let to = ring.scales + at * comptime!((scale_row * scale) as u32);
                    ptx::copy(&weight.scales, from, scale_bytes, to, count * scale_bytes, ring.full());
                }
                if comptime!(bias_bytes > 0) {
                    let to = ring.biases + at * comptime!((bias_row * bias) as u32);
                    ptx::copy(&weight.biases, from, bias_bytes, to, count * bias_bytes, ring.full());
                }
            }
            ring.advance(stream.stages);
            first += a_stage;
        }
        group += CUBE_COUNT_X;
    }
}

/// A unit's words of a step, those of its first row from address `at` on.
#[cube]
fn read(at: u32, #[comptime] stream: Stream) -> Array<u32> {
    let (bits, vector) = comptime!((stream.vec.layout.bits, stream.vec.layout.vector()));
    let at = ptx::register(at);
    let mut words = Array::<u32>::new(comptime!(stream.vec.fetched()));
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for v in 0..comptime!(RUNS * bits / vector) {
            let loaded = shared_words(at, comptime!(4 * (r * 8 * stream.words() + v * vector)), vector);
            #[unroll]
            for i in 0..vector {
                words[comptime!((r * RUNS * bits) + v * vector + i)] = loaded[i];
            }
        }
    }
    words
}

/// Puts a plane's sums of its 16 rows where they wait.
#[cube]
fn keep(sums: &Array<f32>, slot: usize, partial: &mut Shared<[f32]>, #[comptime] vec: MmaVec) {
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    #[unroll]
    for r in 0..2usize {
        let mut sum = sums[r];
        sum += plane_shuffle_xor(sum, 1u32);
        if comptime!(vec.runs_apart()) {
            sum += plane_shuffle_xor(sum, 2u32);
        }
        if unit % 4 == 0 {
            partial[(slot * PLANES + plane) * 16 + unit / 4 + comptime!(8 * r)] = sum;
        }
    }
}

/// Adds up and stores the sums of the last `slots` groups of tiles, of which `group` is the last.
#[cube]
fn store<Y: Int>(
    partial: &Shared<[f32]>,
    y: &mut [Y],
    n: u32,
    group: u32,
    slots: usize,
    #[comptime] stream: Stream,
) {
    let rows = comptime!(stream.rows());
    let mut i = UNIT_POS_X as usize;
    while i < slots * rows {
        let (slot, r) = (i / rows, i % rows);
        let row = (group as usize - (slots - 1 - slot) * CUBE_COUNT_X as usize) * rows + r;
        if row < n as usize {
            let mut sum = 0.0f32;
            #[unroll]
            for plane in 0..comptime!(stream.planes()) {
                let plane = r / 16 * comptime!(stream.planes()) + plane;
                sum += partial[(slot * PLANES + plane) * 16 + r % 16];
            }
            y[row] = Y::cast_from(narrow(sum, stream.vec.y_type));
        }
        i += comptime!(32 * PLANES);
    }
}

/// The kernel for `stream`, its types chosen by what the layout stores.
fn compiled(target: &Target, stream: Stream) -> Kernel<QuantizedMatmulStream<'static>> {
    let MmaVec { layout, y_type, .. } = stream.vec;
    with_components!(layout, S, B => with_storage!(y_type, Y => {
        let units = 32 * (PLANES + COPIERS);
        QuantizedMatmulStream::kernel::<S, B, Y>(target, units, layout.vector(), stream)
    }))
}

/// One of each format and type of x, and of each source.
#[cfg(test)]
pub(in super::super) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut all = Vec::new();
    for (i, &format) in formats.iter().enumerate() {
        let sources = [
            Source::AddRmsNorm { h: F32 },
            Source::Glu(Gate::Silu),
            Source::GatedRmsNorm { vectors: 16 },
            Source::AddRmsNorm { h: F16 },
            Source::HeadsGlu { by: Gate::Sigmoid, vectors: 32, gates: 64 },
        ];
        all.push((format, None, [F16, F16], 448));
        all.push((format, None, [BF16, F32], 64));
        all.push((
            format,
            Some(sources[i % 5]),
            if i % 2 == 0 { [F16, F16] } else { [BF16, F32] },
            128 << (i % 3),
        ));
    }
    all.extend(formats.first().into_iter().flat_map(|&format| {
        let others =
            [Gate::GeluTanh, Gate::SwigluOai].map(|by| (format, Some(Source::Glu(by)), [F16, F16], 128));
        others.into_iter().chain([(format, Some(Source::Glu(Gate::Sigmoid)), [F16, F16], 128)])
    }));
    let stream = |(format, source, types, runs): (Format, _, _, usize)| {
        let problem = Problem::example(format, types, [1, 4096, 32 * runs]);
        Stream::new(target.caps(), &Problem { source, ..problem })
    };
    all.into_iter().filter_map(stream).map(|stream| compiled(target, stream).code()).collect()
}

/// Computes the product.
pub(in super::super) fn launch(
    gpu: &Gpu,
    Launch { stream, cubes }: Launch,
    problem: &Problem,
    operands: &Operands<'_>,
) -> Result<(), KernelError> {
    check_indices(problem, operands)?;
    let x = operands.x;
    let norm = x.norm.map(|norm| norm.cast(DType::F32)).transpose()?;
    let index = |value: usize| CHECK.index(value);
    let weight = operands.weight.buffers()?;
    let y = operands.y.buffer()?;
    let arguments = QuantizedMatmulStream {
        weight,
        norm: norm.as_ref().map_or(Ok(weight.codes), |norm| norm.buffer())?,
        x: XInputsArgs { x: x.x.buffer()?, other: x.other.unwrap_or(x.x).buffer()? },
        y,
        sum: operands.sum.map_or(Ok(y), |sum| sum.buffer())?,
        sizes: Sizes { n: index(problem.n)?, runs: index(problem.runs())?, eps: x.eps.to_bits() },
        ones: ONES,
    };
    // SAFETY: the sizes are the operands'; x's operands have a row of whole vectors each, as `fit`
    // asked for.
    unsafe { gpu.launch(compiled(gpu.target(), stream), [index(cubes)?, 1, 1], arguments) }
}
