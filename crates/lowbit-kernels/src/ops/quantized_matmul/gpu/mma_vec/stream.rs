//! One row of x as a stream, from Hopper on: one cube a multiprocessor, some planes of which copy the weight into a ring of
//! stages in shared memory, as soon as there is room, from before the launch before this one has ended until its last
//! rows. The others multiply what has come. So loads are always under way, whatever the multiplying planes wait for, and
//! rows that end do not hold up those that begin.

use super::super::super::{CHECK, Input, policy};
use super::super::integers::ONES;
use super::super::share::{Chunk, Planes, Rows, Staged, stage};
use super::products::{Step, multiply_spans, scale_products};
use super::shape::{RUNS, SPAN, Shape};
use super::share::{Elements, elements, staged};
use super::source::{self, Inputs, Making, Norm, Operands, Source};
use crate::gpu::compile::{Target, buffer, overlap};
use crate::gpu::float::{narrow, with_storage};
use crate::gpu::layout::{Layout, RUN, with_planes};
use crate::gpu::ptx::{self, address};
use crate::gpu::{Dispatch, Gpu};
use crate::{Device, KernelError, QuantizedTensor, Tensor};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
#[cfg(test)]
use lowbit_formats::Format;
use lowbit_formats::{DType, FloatType};

/// Everything that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream {
    /// Of [`PLANES`] planes, one row of x, one tile of 16 rows of the weight a plane, all spans of x in one chunk.
    pub shape: Shape,
    pub source: Source,
    /// Tiles of 16 rows of the weight a stage: each has as many planes.
    pub tiles: usize,
    /// Stages that shared memory holds.
    pub stages: usize,
}

/// Planes that multiply.
pub(super) const PLANES: usize = 16;
/// Planes that copy: one alone is slower than the memory.
const COPIERS: usize = 2;
/// Stages at the most. More only make x, and the launch before this one, wait behind the weight.
const STAGES: usize = 3;
/// Stages that are copied before x has come.
const EARLY: u32 = 2;
/// Groups of tiles whose sums wait to be added up together.
const SLOTS: usize = 8;
/// Where the planes that multiply meet: 0 is for all.
pub(super) const MEETING: u32 = 1;

impl Stream {
    /// For rows of `runs` runs, if rows and stages are whole steps and whole 16 bytes of each of the weight's planes, and
    /// there is memory for two stages at least.
    fn new(
        target: &Target,
        layout: Layout,
        source: Source,
        [dtype, result]: [FloatType; 2],
        runs: usize,
    ) -> Option<Self> {
        if !target.overlaps() || !super::supports(target, layout, dtype) || runs == 0 {
            return None;
        }
        let spans = runs / RUNS;
        // As few tiles as give every plane something to multiply.
        let tiles = (4 * PLANES / spans.max(1)).next_power_of_two().clamp(1, PLANES);
        let shape = Shape {
            layout,
            dtype,
            result,
            columns: 1,
            tiles: 1,
            planes: PLANES,
            chunk: spans.next_multiple_of(4),
            scaled: 4 * PLANES / tiles,
            made: 0,
            overlaps: true,
        };
        let (scale, bias) = layout.scale_sizes();
        let aligned = [runs, runs % (RUNS * shape.scaled)].into_iter().all(|runs| {
            let (scales, biases) = layout.elements(runs);
            runs % 8 == 0 && scales * scale % 16 == 0 && biases * bias % 16 == 0
        });
        let stream = Self { shape, source, tiles, stages: 0 };
        let x = stream.making().shared() + shape.x_vectors() * 16 + shape.x_sums() * shape.chunk * 4;
        let fixed = x + SLOTS * PLANES * 16 * 4 + 16;
        let stages = target.shared_memory().checked_sub(fixed)? / stream.stage_bytes();
        (aligned && stages >= 2).then_some(Self { stages: stages.min(STAGES), ..stream })
    }

    fn making(self) -> Making {
        Making::new(self.source, self.shape.dtype, self.shape.chunk * SPAN, 32 * PLANES)
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

    /// Words of codes from one row of a stage to the next: more than there are, so that units read different banks.
    fn words(self) -> usize {
        let bits = self.shape.layout.bits;
        self.shape.scaled * RUNS * bits + if bits == 2 { 16 } else { 4 }
    }

    fn stage_bytes(self) -> usize {
        let (scales, biases) = self.shape.element_rows();
        let (scale, bias) = self.shape.layout.scale_sizes();
        self.rows() * (self.words() * 4 + scales * scale + biases * bias) + 16
    }
}

/// What stages hold: rows of the weight, and what scales them.
#[derive(CubeType)]
struct Stages<S: Int, B: Int, V: Size> {
    codes: Shared<[Vector<u32, V>]>,
    scaling: Elements<S, B>,
}

/// A ring of stages, and how far a plane is in it.
#[derive(CubeType)]
struct Ring {
    /// Addresses in shared memory: the codes, scales and biases of all stages; of each stage a barrier for when it is full
    /// and one for when it is empty, and after those one for when x is there.
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

    fn ready(&self, #[comptime] stages: usize) -> u32 {
        self.barriers + comptime!(stages as u32 * 16)
    }

    /// Makes the barriers.
    fn begin(&self, #[comptime] stages: usize) {
        #[unroll]
        for i in 0..comptime!(stages as u32) {
            ptx::barrier(self.barriers + comptime!(i * 16), 1usize);
            ptx::barrier(self.barriers + comptime!(i * 16 + 8), PLANES);
        }
        ptx::barrier(self.ready(stages), PLANES);
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

/// What [`mat_vec`](super::super::mat_vec) computes of one row of x and one batch; `norm`, `other`, `sum` and `eps` are
/// what [`Source`] says.
#[cube(launch_unchecked)]
fn stream_vec<S: Int, B: Int, Y: Int, V: Size>(
    codes: &[Vector<u32, V>],
    scales: &[S],
    biases: &[B],
    norm: &[Vector<u32, Const<4>>],
    x: &[Vector<u32, Const<4>>],
    other: &[Vector<u32, Const<4>>],
    y: &mut [Y],
    sum: &mut [Vector<u32, Const<4>>],
    n: u32,
    runs: u32,
    eps: u32,
    ones: u32,
    #[comptime] stream: Stream,
) {
    let stages = stages::<S, B, V>(stream);
    let mut ring = ring(&stages, stream);
    if UNIT_POS_X == comptime!(32 * PLANES as u32) {
        ring.begin(stream.stages);
    }
    sync_cube();
    let groups = n.div_ceil(comptime!(stream.rows() as u32));
    if UNIT_POS_X >= comptime!(32 * PLANES as u32) {
        copy_weight(&Planes::new(codes, scales, biases), n, runs, &mut ring, stream);
    } else {
        let count = runs as usize * 4;
        let norm = source::norm(norm, f32::reinterpret(eps), count, stream.making());
        overlap();
        let from = Inputs::new(x, other, 0usize.runtime(), count);
        let xs = share_x(&from, &norm, sum, runs as usize, stream);
        ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
        arrive(ring.ready(stream.stages));
        let mut partial = Shared::<[f32]>::new_slice(SLOTS * PLANES * 16);
        let mut group = CUBE_POS_X;
        let mut slots = 0usize;
        while group < groups {
            let sums = multiply_group(&stages, &xs, &mut ring, runs as usize, ones, stream);
            keep(&sums, slots, &mut partial);
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
    let shape = comptime!(stream.shape);
    let rows = comptime!(stream.stages * stream.rows());
    let codes = Shared::new_aligned_slice(comptime!(rows * stream.words() / shape.layout.vector()), 128usize);
    Stages::<S, B, V> { codes, scaling: elements::<S, B>(rows, 128usize, shape) }
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
    let (shape, making) = comptime!((stream.shape, stream.making()));
    let mut xs = staged(shape);
    let all = Chunk { first: 0usize.runtime(), runs };
    let one =
        Rows { count: 1usize.runtime(), run: 0usize.runtime(), y: 0usize.runtime(), list: 0u32.runtime() };
    if comptime!(making.source == Source::Tensor) {
        stage(from.x, &one, &all, &mut xs, shape.staging());
    } else {
        let mut made =
            Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(making.vectors()), 16usize);
        source::make(from, norm, sum, &mut made, making);
        ptx::meet(MEETING.runtime(), comptime!(32 * PLANES));
        stage(made.as_slice(), &one, &all, &mut xs, shape.staging());
    }
    xs
}

/// A unit's sums of the group of tiles that comes next in the ring, of the rows of its plane's tile.
#[cube]
fn multiply_group<S: Int, B: Int, V: Size>(
    stages: &Stages<S, B, V>,
    xs: &Staged,
    ring: &mut Ring,
    runs: usize,
    ones: u32,
    #[comptime] stream: Stream,
) -> Array<f32> {
    let shape = comptime!(stream.shape);
    let mut sums = Array::<f32>::new(2usize);
    sums[0] = 0.0;
    sums[1] = 0.0;
    let mut first = 0usize;
    while first * RUNS < runs {
        ptx::wait(ring.full(), ring.phase);
        let plane = UNIT_POS_X as usize / 32;
        let span = plane % comptime!(stream.planes()) * 4;
        if (first + span) * RUNS < runs {
            let row =
                ring.stage as usize * comptime!(stream.rows()) + plane / comptime!(stream.planes()) * 16;
            let words = read::<V>(&stages.codes, row, span, stream);
            let products = multiply_spans(&words, address(&xs.values), first + span, ones, shape);
            let step = Step { first: first + span, row, span };
            scale_products(&products, &xs.sums, &stages.scaling, &step, &mut sums, shape);
        }
        arrive(ring.empty());
        ring.advance(stream.stages);
        first += comptime!(shape.scaled);
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
    planes: &Planes<'_, S, B, V>,
    n: u32,
    runs: u32,
    ring: &mut Ring,
    #[comptime] stream: Stream,
) {
    let shape = comptime!(stream.shape);
    let (scale, bias) = comptime!(shape.layout.scale_sizes());
    let (scale_row, bias_row) = comptime!(shape.element_rows());
    // Of 8 runs, of which rows and stages have a whole number.
    let code_bytes = comptime!(8 * 4 * shape.layout.bits as u32);
    let scale_bytes = comptime!((shape.layout.elements(8).0 * scale) as u32);
    let bias_bytes = comptime!((shape.layout.elements(8).1 * bias) as u32);
    let (rows, a_stage) = comptime!((stream.rows() as u32, (RUNS * shape.scaled) as u32));
    let groups = n.div_ceil(rows);
    // The compiler, too, must see that it is the same for all units of a plane.
    let copier = plane_broadcast(UNIT_POS_X / 32u32, 0u32) - comptime!(PLANES as u32);
    let mut filled = 0u32;
    let mut group = CUBE_POS_X;
    while group < groups {
        let mut first = 0u32;
        while first < runs {
            if filled == EARLY {
                ptx::wait(ring.ready(stream.stages), 0u32.runtime());
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
                ptx::copy(planes.codes, from, code_bytes, to, count * code_bytes, ring.full());
                if comptime!(scale_bytes > 0) {
                    let to = ring.scales + at * comptime!((scale_row * scale) as u32);
                    ptx::copy(planes.scales, from, scale_bytes, to, count * scale_bytes, ring.full());
                }
                if comptime!(bias_bytes > 0) {
                    let to = ring.biases + at * comptime!((bias_row * bias) as u32);
                    ptx::copy(planes.biases, from, bias_bytes, to, count * bias_bytes, ring.full());
                }
            }
            ring.advance(stream.stages);
            first += a_stage;
        }
        group += CUBE_COUNT_X;
    }
}

/// A unit's words of the tile that begins with row `row` of the ring, of the step that begins with span `span` of a
/// stage.
#[cube]
fn read<V: Size>(
    codes: &Shared<[Vector<u32, V>]>,
    row: usize,
    span: usize,
    #[comptime] stream: Stream,
) -> Array<u32> {
    let (bits, vector) = comptime!((stream.shape.layout.bits, stream.shape.layout.vector()));
    let unit = UNIT_POS_X as usize % 32;
    let mut words = Array::<u32>::new(comptime!(stream.shape.fetched()));
    #[unroll]
    for r in 0..2usize {
        let at = (row + unit / 4 + comptime!(8 * r)) * comptime!(stream.words() / vector)
            + (span + unit % 4) * comptime!(RUNS * bits / vector);
        #[unroll]
        for v in 0..comptime!(RUNS * bits / vector) {
            let loaded = codes[at + v];
            #[unroll]
            for i in 0..vector {
                words[comptime!((r * RUNS * bits) + v * vector + i)] = loaded.extract(i);
            }
        }
    }
    words
}

/// Puts a plane's sums of its 16 rows where they wait.
#[cube]
fn keep(sums: &Array<f32>, slot: usize, partial: &mut Shared<[f32]>) {
    let (unit, plane) = (UNIT_POS_X as usize % 32, UNIT_POS_X as usize / 32);
    #[unroll]
    for r in 0..2usize {
        let mut sum = sums[r];
        sum += plane_shuffle_xor(sum, 1u32);
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
            y[row] = Y::cast_from(narrow(sum, stream.shape.result));
        }
        i += comptime!(32 * PLANES);
    }
}

/// The kernel for `stream`, its types chosen by what the layout stores.
fn kernel(target: &Target, stream: Stream) -> Box<dyn CubeKernel> {
    let (settings, properties, registers) = target.start(32 * (PLANES + COPIERS) as u32);
    let [codes, scales, biases, norm] = [buffer(), buffer(), buffer(), buffer()];
    let [x, other, y, sum] = [buffer(), buffer(), buffer(), buffer()];
    let Shape { layout, result, .. } = stream.shape;
    with_planes!(layout, S, B => with_storage!(result, Y => Box::new(stream_vec::StreamVec::<S, B, Y>::new(
        settings, properties, registers, codes, scales, biases, norm, x, other, y, sum, (), (), (), (),
        layout.vector(), stream,
    ))))
}

/// One of each format and type of x, and of each source.
#[cfg(test)]
pub(crate) fn kernels(target: &Target, formats: &[Format]) -> Vec<Box<dyn CubeKernel>> {
    use FloatType::{BF16, F16, F32};
    let mut all = Vec::new();
    for (i, layout) in formats.iter().map(|&format| Layout::of(format)).enumerate() {
        let sources = [
            Source::AddRmsNorm { h: F32 },
            Source::SiluMul,
            Source::GatedRmsNorm { vectors: 16 },
            Source::AddRmsNorm { h: F16 },
            Source::SigmoidMul { vectors: 32, gates: 64 },
        ];
        all.push((layout, Source::Tensor, [F16, F16], 512));
        all.push((layout, Source::Tensor, [BF16, F32], 64));
        all.push((layout, sources[i % 5], if i % 2 == 0 { [F16, F16] } else { [BF16, F32] }, 128 << (i % 3)));
    }
    let stream = |(layout, source, types, runs)| Stream::new(target, layout, source, types, runs);
    all.into_iter().filter_map(stream).map(|stream| kernel(target, stream)).collect()
}

/// The product into a new tensor of shape `shape`, and the sum if x is the norm of one; `None` where the stream does not
/// take it: for several rows, or with too little work for most multiprocessors.
pub(crate) fn multiply(
    gpu: &Gpu,
    x: &Input<'_>,
    weight: &QuantizedTensor,
    shape: &[usize],
    result: FloatType,
) -> Result<Option<(Tensor, Option<Tensor>)>, KernelError> {
    let Some(operands) = Operands::of(x, weight)? else {
        return Ok(None);
    };
    let (layout, types) = (Layout::of(weight.format()), [operands.dtype, result]);
    let stream = Stream::new(gpu.target(), layout, operands.source, types, weight.k() / RUN);
    let Some((stream, cubes)) =
        stream.and_then(|stream| Some((stream, policy::stream(stream.groups(weight.n()))?)))
    else {
        return Ok(None);
    };
    let y = Tensor::allocate(shape, result.dtype(), &Device::Gpu(gpu.clone()))?;
    let sum = match (stream.source, operands.other) {
        (Source::AddRmsNorm { .. }, Some(h)) => Some(Tensor::allocate(h.shape(), h.dtype(), h.device())?),
        _ => None,
    };
    launch(gpu, stream, cubes, &operands, weight, [&y, sum.as_ref().unwrap_or(&y)])?;
    Ok(Some((y, sum)))
}

fn launch(
    gpu: &Gpu,
    stream: Stream,
    cubes: usize,
    operands: &Operands<'_>,
    weight: &QuantizedTensor,
    [y, sum]: [&Tensor; 2],
) -> Result<(), KernelError> {
    let norm = operands.norm.map(|norm| norm.cast(DType::F32)).transpose()?;
    let (layout, runs) = (stream.shape.layout, weight.k() / RUN);
    let index = |value: usize| CHECK.index(value);
    // The planes of scales have two elements a run at most, and codes no less.
    index(weight.rows() * runs * (layout.bits / layout.vector()).max(2))?;
    let planes = weight.components();
    // What there is not is not read, and anything may stand for it.
    let component = |i: usize| planes.get(i).unwrap_or(&planes[0]).memory();
    // The weights of product and norm may be read while the launch before runs.
    gpu.launch_early(
        4,
        Dispatch {
            kernel: kernel(gpu.target(), stream),
            cubes: [index(cubes)?, 1, 1],
            buffers: vec![
                component(0)?,
                component(1)?,
                component(2)?,
                norm.as_ref().unwrap_or(&planes[0]).memory()?,
                operands.x.memory()?,
                operands.other.unwrap_or(operands.x).memory()?,
                y.memory()?,
                sum.memory()?,
            ],
            scalars: vec![index(weight.n())?, index(runs)?, operands.eps.to_bits(), ONES],
        },
    )
}
