//! From a format's own components to panels.

use super::{Layout, QUADS, ROWS, SPAN, bits};
use crate::Cpu;
use crate::simd::{Kernel, Simd};
use lowbit_formats::{BlockScales, Format, Parts, Scales, Scheme, Unpacked};
use std::sync::atomic::{AtomicBool, Ordering};

/// Fills the components of all panels of a weight. False if its scales are too large for products
/// in panels, or codes are NaN.
pub fn pack(cpu: &Cpu, layout: &Layout, format: Format, parts: &Parts<'_>, out: [&mut [u8]; 3]) -> bool {
    let [code_bytes, scale_bytes, bias_bytes] = layout.bytes();
    if code_bytes == 0 {
        return true;
    }
    let is_sound = AtomicBool::new(true);
    let source = Source::new(format, layout);
    let count = out[0].len() / code_bytes;
    let [codes, scales, biases] = out;
    let codes = codes.chunks_exact_mut(code_bytes);
    let out = codes.zip(pieces(scales, scale_bytes, count)).zip(pieces(biases, bias_bytes, count));
    let mut out = out.enumerate();
    let per_task = count.div_ceil(cpu.threads() * 8);
    let tasks = (0..count).step_by(per_task.max(1)).map(|_| out.by_ref().take(per_task).collect::<Vec<_>>());
    cpu.for_each(tasks.collect(), |panels| {
        let sound = cpu.isa().dispatch(Task { source: &source, layout, parts, panels });
        if !sound {
            is_sound.store(false, Ordering::Relaxed);
        }
    });
    is_sound.into_inner()
}

/// The destination of a panel's codes, scales and biases.
type Out<'a> = ((&'a mut [u8], &'a mut [u8]), &'a mut [u8]);

/// Panels that one thread fills. It is compiled for the processor's widest vectors, but for taking
/// a GGML block apart, which gains nothing by them.
struct Task<'a, 'p> {
    source: &'a Source,
    layout: &'a Layout,
    parts: &'a Parts<'a>,
    panels: Vec<(usize, Out<'p>)>,
}

impl Kernel for Task<'_, '_> {
    /// True if all scales are small enough for products in panels, and no code is NaN.
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> bool {
        let Self { source, layout, parts, panels } = self;
        let mut values = vec![[0; SPAN]; ROWS * layout.spans()];
        let mut sound = true;
        for (panel, ((codes, scales), biases)) in panels {
            let first = panel % layout.panels() * ROWS;
            let row = panel / layout.panels() * layout.n + first;
            scales.fill(0);
            biases.fill(0);
            let mut panel = Panel { layout, values: &mut values, scales, biases };
            for lane in 0..ROWS.min(layout.n - first) {
                source.take_row(parts, row + lane, lane, &mut panel);
            }
            for lane in layout.n - first..ROWS {
                panel.row(lane).fill([0; SPAN]);
            }
            sound &= layout.are_small(panel.scales) && !layout.has_nan(panel.values.as_flattened());
            join_spans(panel.values, layout.spans(), layout.scheme.bits, codes);
        }
        sound
    }
}

/// `count` pieces of `bytes` bytes, of nothing in a format without such a component.
fn pieces(all: &mut [u8], bytes: usize, count: usize) -> Vec<&mut [u8]> {
    match bytes {
        0 => (0..count).map(|_| <&mut [u8]>::default()).collect(),
        _ => all.chunks_exact_mut(bytes).collect(),
    }
}

/// A panel that is being filled.
struct Panel<'a> {
    layout: &'a Layout,
    /// One byte per code, `[row][span]`.
    values: &'a mut [[u8; SPAN]],
    scales: &'a mut [u8],
    biases: &'a mut [u8],
}

impl Panel<'_> {
    #[inline(always)]
    fn row(&mut self, lane: usize) -> &mut [[u8; SPAN]] {
        let spans = self.layout.spans();
        &mut self.values[lane * spans..][..spans]
    }

    /// The scales of GGML block `index` of a row, which has `count` groups.
    #[inline(always)]
    fn put_scales(&mut self, lane: usize, (index, count): (usize, usize), block: &BlockScales) {
        let BlockScales { scale, min, sub_scales, sub_minima } = block;
        let Self { scales, biases, .. } = self;
        match self.layout.scheme.scales {
            Scales::Group { biased, .. } => {
                put(scales, index * ROWS + lane, scale.to_le_bytes());
                if biased {
                    put(biases, index * ROWS + lane, min.to_le_bytes());
                }
            }
            Scales::E8M0 { .. } => put(scales, index * ROWS + lane, [*scale as u8]),
            Scales::E4M3 => {
                for (i, &scale) in sub_scales[..count].iter().enumerate() {
                    put(scales, (index * count + i) * ROWS + lane, [scale as u8]);
                }
            }
            Scales::Super { .. } => {
                for (i, &scale) in sub_scales[..count].iter().enumerate() {
                    put(scales, (index * count + i) * ROWS + lane, [scale as u8]);
                }
                put(biases, index * ROWS + lane, scale.to_le_bytes());
            }
            Scales::SuperWithMinima { size } => {
                for (i, (&scale, &min)) in sub_scales.iter().zip(sub_minima).take(count).enumerate() {
                    let (group, scale, min) = (index * count + i, scale as u8, min as u8);
                    if size == 16 {
                        put(scales, group * ROWS + lane, [scale | min << 4]);
                    } else {
                        put(scales, 2 * group * ROWS + lane, [scale]);
                        put(scales, (2 * group + 1) * ROWS + lane, [min]);
                    }
                }
                put(biases, 2 * index * ROWS + lane, scale.to_le_bytes());
                put(biases, (2 * index + 1) * ROWS + lane, min.to_le_bytes());
            }
            Scales::One => unreachable!("no format has blocks with such scales"),
        }
    }
}

/// Element `index` of `bytes`.
#[inline(always)]
fn put<const SIZE: usize>(bytes: &mut [u8], index: usize, value: [u8; SIZE]) {
    bytes[index * SIZE..][..SIZE].copy_from_slice(&value);
}

/// A reader of rows.
struct Source {
    unpack: Option<fn(&[u8], &mut Unpacked)>,
    scheme: Scheme,
    /// Values per block.
    block: usize,
    /// Bytes of a row, and of an element, per component.
    rows: [usize; 3],
    elements: [usize; 3],
}

impl Source {
    fn new(format: Format, layout: &Layout) -> Self {
        let components = format.components(layout.k).expect("the weight was checked");
        let of = |f: fn(&lowbit_formats::Component) -> usize| {
            std::array::from_fn(|i| components.get(i).map_or(0, f))
        };
        let rows = of(lowbit_formats::Component::row_bytes);
        let elements = of(|component| component.dtype.size());
        Self { unpack: format.unpack(), scheme: layout.scheme, block: format.block(), rows, elements }
    }

    /// Row `row` of a weight becomes row `lane` of the panel.
    #[inline(always)]
    fn take_row(&self, parts: &Parts<'_>, row: usize, lane: usize, panel: &mut Panel<'_>) {
        let part = |i: usize| &parts[i][row * self.rows[i]..][..self.rows[i]];
        let Some(unpack) = self.unpack else {
            self.take_codes(part(0), panel.row(lane));
            for (i, out) in [&mut *panel.scales, &mut *panel.biases].into_iter().enumerate() {
                match self.elements[i + 1] {
                    4 => put_elements::<4>(part(i + 1), lane, out),
                    2 => put_elements::<2>(part(i + 1), lane, out),
                    _ => put_elements::<1>(part(i + 1), lane, out),
                }
            }
            return;
        };
        let bytes = self.rows[0] / (panel.layout.k / self.block);
        let (spans, mut block) = (self.block / SPAN, Unpacked::default());
        let groups = self.block / panel.layout.scale_group();
        for (index, bytes) in part(0).chunks_exact(bytes).enumerate() {
            unpack(bytes, &mut block);
            let codes = block.codes.as_chunks().0;
            panel.row(lane)[index * spans..][..spans].copy_from_slice(&codes[..spans]);
            panel.put_scales(lane, (index, groups), &block.scales);
        }
    }

    /// Codes from one stream of bits, least significant first.
    #[inline(always)]
    fn take_codes(&self, stream: &[u8], out: &mut [[u8; SPAN]]) {
        self.scheme.unpack_stream(stream, out.as_flattened_mut());
        // nvfp4's rows may end within a span.
        let written = stream.len() / self.scheme.bits * 8;
        out.as_flattened_mut()[written..].fill(0);
    }
}

/// One row's elements of a component, to where the panel has those of row `lane`.
#[inline(always)]
fn put_elements<const SIZE: usize>(row: &[u8], lane: usize, out: &mut [u8]) {
    let groups = out.as_chunks_mut::<SIZE>().0.as_chunks_mut::<ROWS>().0;
    for (group, element) in groups.iter_mut().zip(row.as_chunks().0) {
        group[lane] = *element;
    }
}

/// Puts together the codes of a panel, `[row][span]`, as [`bits`](super::bits) says.
#[inline(always)]
fn join_spans(values: &[[u8; SPAN]], spans: usize, bits: usize, out: &mut [u8]) {
    let pieces = bits::pieces(bits);
    for (span, out) in out.chunks_exact_mut(bits * 64).enumerate() {
        let mut quads = [[0u8; 64]; QUADS];
        for row in 0..ROWS {
            for (quad, values) in quads.iter_mut().zip(values[row * spans + span].as_chunks::<4>().0) {
                quad[4 * row..][..4].copy_from_slice(values);
            }
        }
        out.fill(0);
        let vectors = out.as_chunks_mut::<64>().0;
        for (quad, pieces) in quads.iter().zip(&pieces) {
            for piece in pieces.iter().filter(|piece| piece.width > 0) {
                for (out, &code) in vectors[piece.vector].iter_mut().zip(quad) {
                    *out |= (code >> piece.to & piece.mask()) << piece.at;
                }
            }
        }
    }
}
