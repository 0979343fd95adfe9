//! The product of panels and one row of x. It is bound by memory: what is read is multiplied at once, half a span after half a
//! span, so that memory never waits for a chunk to be multiplied. All that a format decides is decided outside of the loop
//! over spans.
//!
//! Floor of 4 bits in groups of 32: a span of 512 codes is read as 4 vectors and takes 8 masks, 4 shifts, 8 dot products and 2
//! fused operations, 2 codes per byte and some 20 codes per vector operation.

use super::super::panels::{Epilogue, STRIPS, Strips, by_strips};
use super::activations::Tile;
use super::tile;
use crate::panels::{CHUNK, PanelScales, SPAN, Unpack, ask_ahead, half_span, with_bits};
use crate::simd::{Kernel, Simd};

/// Quads of half a span.
const HALF: usize = SPAN / 8;

/// A row of x, all of it, and the panels that it multiplies, from `panel` on.
pub(super) struct Row<'a> {
    pub weight: Unpack<'a>,
    pub panel: usize,
    pub x: Tile<'a>,
}

/// The product for one kind of format: bits per code, what codes are looked up in, groups per span, and whether groups have biases.
struct Product<'a, const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool> {
    row: &'a Row<'a>,
    y: &'a mut [f32],
}

/// Codes are numbers.
const NO_TABLE: u8 = 0;
/// They are looked up, and what is found is below 128.
const NARROW_TABLE: u8 = 1;
/// What is found may be any byte.
const WIDE_TABLE: u8 = 2;

impl Row<'_> {
    /// `y[n] = sum over k of x[k] * weight[n, k]`.
    #[inline(always)]
    pub fn multiply<S: Simd>(&self, simd: S, y: &mut [f32]) {
        let layout = &self.weight.layout;
        match (layout.table(), layout.narrow()) {
            (None, _) => with_bits!(layout, BITS => self.by_groups::<S, BITS, NO_TABLE>(simd, y)),
            (Some(_), true) => self.by_groups::<S, 4, NARROW_TABLE>(simd, y),
            (Some(_), false) => self.by_groups::<S, 4, WIDE_TABLE>(simd, y),
        }
    }

    #[inline(always)]
    fn by_groups<S: Simd, const BITS: usize, const TABLE: u8>(&self, simd: S, y: &mut [f32]) {
        let layout = &self.weight.layout;
        match (SPAN / layout.group(), layout.biased()) {
            (1, false) => simd.call(Product::<BITS, TABLE, 1, false> { row: self, y }),
            (1, true) => simd.call(Product::<BITS, TABLE, 1, true> { row: self, y }),
            (_, false) => simd.call(Product::<BITS, TABLE, 2, false> { row: self, y }),
            (_, true) => simd.call(Product::<BITS, TABLE, 2, true> { row: self, y }),
        }
    }
}

impl<const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool> Kernel
    for Product<'_, BITS, TABLE, GROUPS, BIASED>
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        debug_assert_eq!(Self::SHORT > 0, self.row.weight.layout.narrow());
        let scales = Box::new([const { PanelScales::new() }; STRIPS]);
        let panels = Panels::<BITS, TABLE, GROUPS, BIASED> { row: self.row, scales };
        by_strips(simd, panels, Epilogue::of(&self.row.weight), self.y);
    }
}

/// A [`Product`]'s weight, and where its scales are unpacked.
struct Panels<'a, const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool> {
    row: &'a Row<'a>,
    scales: Box<[PanelScales; STRIPS]>,
}

impl<const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool> Strips
    for Panels<'_, BITS, TABLE, GROUPS, BIASED>
{
    #[inline(always)]
    fn sums<S: Simd, const PARTS: usize>(
        &mut self,
        simd: S,
        panels: [usize; STRIPS],
    ) -> [[S::V; PARTS]; STRIPS] {
        let Self { row, scales } = self;
        let weight = &row.weight;
        let table = weight.layout.table().unwrap_or(&[0; 16]);
        let mut totals = [[simd.splat(0.0); PARTS]; STRIPS];
        for k in (0..weight.layout.k()).step_by(CHUNK) {
            let spans = weight.spans(k);
            let count = spans.len();
            for (scales, panel) in scales.iter_mut().zip(panels) {
                weight.unpack_scales(simd, row.panel + panel, k, scales);
                if weight.layout.long_scales() {
                    scales.cut();
                }
            }
            // Written out: `map` of an array is not inlined, and costs as much as a span.
            let packed = [
                &weight.packed::<BITS>(row.panel + panels[0], spans.clone())[..count],
                &weight.packed::<BITS>(row.panel + panels[1], spans)[..count],
            ];
            let x = row.x.chunk(k, weight.layout.group());
            let quads = &x.codes.as_chunks::<HALF>().0.as_chunks::<2>().0[..count];
            let groups = Groups {
                starts: &x.starts.as_chunks().0[..count],
                scales: &x.scales.as_chunks().0[..count],
                sums: &x.sums.as_chunks().0[..count],
            };
            for span in 0..count {
                // Written out: in a loop the sums would live in memory.
                let [first, second] = &mut totals;
                let x = (&quads[span], &groups);
                type Of<'a, const B: usize, const T: u8, const G: usize, const D: bool> =
                    Product<'a, B, T, G, D>;
                Of::<BITS, TABLE, GROUPS, BIASED>::span(
                    simd,
                    span,
                    (&packed[0][span], table, &scales[0]),
                    x,
                    first,
                );
                Of::<BITS, TABLE, GROUPS, BIASED>::span(
                    simd,
                    span,
                    (&packed[1][span], table, &scales[1]),
                    x,
                    second,
                );
            }
        }
        totals
    }
}

impl<const BITS: usize, const TABLE: u8, const GROUPS: usize, const BIASED: bool>
    Product<'_, BITS, TABLE, GROUPS, BIASED>
{
    /// Dot products whose sum can be a short one, as [`Simd::begin_short_sum`] says.
    const SHORT: usize = match (TABLE, BITS) {
        (NO_TABLE, ..=4) => 8,
        (NO_TABLE, 5) | (NARROW_TABLE, _) => HALF,
        (NO_TABLE, 6) => 2,
        _ => 0,
    };
    /// Whether that is all of a group.
    const WHOLE: bool = Self::SHORT >= 2 * HALF / GROUPS;

    /// Adds to `totals` the products of one panel's span.
    #[inline(always)]
    fn span<S: Simd, const PARTS: usize>(
        simd: S,
        span: usize,
        (packed, table, scales): (&[[u8; 64]; BITS], &[u8; 16], &PanelScales),
        (x, groups): (&[[u32; HALF]; 2], &Groups<'_, GROUPS>),
        totals: &mut [S::V; PARTS],
    ) {
        let mut products = [Self::begin(simd, groups.starts[span][0]); PARTS];
        Self::half::<S, PARTS, 0>(simd, (packed, table), &x[0], &mut products);
        if GROUPS == 2 {
            Self::add(simd, (span, 0), groups, scales, products, totals);
            products = [Self::begin(simd, groups.starts[span][1]); PARTS];
        }
        Self::half::<S, PARTS, HALF>(simd, (packed, table), &x[1], &mut products);
        Self::add(simd, (span, GROUPS - 1), groups, scales, products, totals);
    }

    /// What a group's integer sums begin with.
    #[inline(always)]
    fn begin<S: Simd>(simd: S, start: i32) -> S::I {
        let start = simd.splat_i32(start);
        if Self::WHOLE { simd.begin_short_sum(start) } else { start }
    }

    /// Adds to `products` those of half a span, its quads from `FIRST` on.
    #[inline(always)]
    fn half<S: Simd, const PARTS: usize, const FIRST: usize>(
        simd: S,
        (packed, table): (&[[u8; 64]; BITS], &[u8; 16]),
        x: &[u32; HALF],
        products: &mut [S::I; PARTS],
    ) {
        ask_ahead::<S, BITS>(simd, packed, FIRST..FIRST + HALF);
        for (part, product) in products.iter_mut().enumerate() {
            let table = (TABLE != NO_TABLE).then_some(table);
            let codes = half_span::<S, BITS, FIRST>(simd, table, packed, part * S::LANES);
            if Self::WHOLE {
                for (&codes, &x) in codes.iter().zip(x) {
                    *product = simd.short_dot4(*product, codes, simd.splat_i32(x as i32));
                }
            } else if Self::SHORT > 0 {
                for first in (0..HALF).step_by(Self::SHORT.max(1)) {
                    let mut sum = simd.begin_short_sum(*product);
                    for (&codes, &x) in codes[first..].iter().zip(&x[first..]).take(Self::SHORT) {
                        sum = simd.short_dot4(sum, codes, simd.splat_i32(x as i32));
                    }
                    *product = simd.end_short_sum(*product, sum);
                }
            } else {
                for (&codes, &x) in codes.iter().zip(x) {
                    *product = simd.dot4::<false>(*product, codes, simd.splat_i32(x as i32));
                }
            }
        }
    }

    /// Adds the products of a span's group, scaled.
    #[inline(always)]
    fn add<S: Simd, const PARTS: usize>(
        simd: S,
        (span, group): (usize, usize),
        x: &Groups<'_, GROUPS>,
        weight: &PanelScales,
        products: [S::I; PARTS],
        totals: &mut [S::V; PARTS],
    ) {
        let at = span * GROUPS + group;
        for (part, (total, product)) in totals.iter_mut().zip(products).enumerate() {
            let scale = tile::Scale::new(simd, &weight.scales[at][part * S::LANES..]);
            let start = simd.splat_i32(x.starts[span][group]);
            let product = if Self::WHOLE { simd.end_short_sum(start, product) } else { product };
            *total = scale.add(simd, product, x.scales[span][group], *total);
            if BIASED {
                let bias = simd.load(&weight.biases[at][part * S::LANES..]);
                *total = simd.mul_add(bias, simd.splat(x.sums[span][group]), *total);
            }
        }
    }
}

/// The fields of [`Tile`] of a chunk of a row, `[span][group]`.
struct Groups<'a, const GROUPS: usize> {
    starts: &'a [[i32; GROUPS]],
    scales: &'a [[f32; GROUPS]],
    sums: &'a [[f32; GROUPS]],
}
