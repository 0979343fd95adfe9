//! Attention's products by four planes together (`wgmma`, Hopper), as PTX. Scores, weights and sums
//! of values are registers that one statement declares and others name: as operands they would be
//! copied in and out of each, and the assembler would no longer see which of them a product in
//! flight still uses.
//!
//! Four planes have 64 query rows, 16 each. Unit `l` of a plane has, of each 8 columns, columns
//! `2 (l % 4)` and the next of rows `l / 4` and `l / 4 + 8`: registers `4n` and `4n + 1` are of the
//! first row, `4n + 2` and `4n + 3` of the second.
//!
//! Matrices in shared memory are panels of 64 columns. A panel's rows have 128 bytes, of which
//! vector (16 bytes) `c` of row `r` lies at `c ^ (r % 8)`: the swizzle of 128 bytes. Panels start
//! at multiples of 1024 bytes.

use super::{name, register};
use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use lowbit_formats::FloatType;

/// Sizes of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Products {
    pub dtype: FloatType,
    /// Query rows in shared memory.
    pub rows: usize,
    /// Keys of a tile, a multiple of 16.
    pub keys: usize,
    /// D and Dv, multiples of 64.
    pub width: usize,
    pub value_width: usize,
}

/// Bytes of a panel's rows: 64 columns.
pub const PANEL_ROW: usize = 128;

/// The upper half of a matrix's description: the swizzle, and 1024 bytes from 8 rows to the next 8.
const UPPER: u32 = 0x4000_0040;

/// The lower half: the address, and `apart` bytes from a panel to the next, for matrices whose rows
/// are what is summed over.
#[cube]
fn lower(at: u32, #[comptime] apart: usize) -> u32 {
    register(((at & 0x3ffffu32) >> 4u32) | comptime!((apart as u32 / 16) << 16))
}

impl Products {
    fn scores(self) -> usize {
        self.keys / 2
    }

    fn values(self) -> usize {
        self.value_width / 2
    }

    fn weights(self) -> usize {
        self.keys / 4
    }

    fn declarations(self) -> String {
        let (scores, values, weights) = (self.scores(), self.values(), self.weights());
        let zeros = (0..values).map(|i| format!(" mov.f32 value{i}, 0f00000000;")).collect::<String>();
        format!(".reg .f32 score<{scores}>; .reg .f32 value<{values}>; .reg .b32 weight<{weights}>;{zeros}")
    }

    /// Scores of all keys, from descriptions `q` and `k`, where `no` is false.
    fn multiply_keys(self) -> String {
        let ty = name(self.dtype);
        let scores = list("score", 0..self.scores());
        let steps = (0..self.width / 16).map(|step| {
            let (panel, within) = (step / 4, step % 4 * 32);
            let [q, k] = [self.rows, self.keys].map(|rows| (panel * rows * PANEL_ROW + within) / 16);
            let add = if step == 0 { "no" } else { "yes" };
            format!(
                "add.s64 a, q, {q}; add.s64 b, k, {k}; \
                 wgmma.mma_async.sync.aligned.m64n{}k16.f32.{ty}.{ty} {{{scores}}}, a, b, {add}, 1, 1, 0, 0; ",
                self.keys
            )
        });
        steps.collect()
    }

    /// Adds weights times the values of description `v`.
    fn multiply_values(self) -> String {
        let ty = name(self.dtype);
        let values = list("value", 0..self.values());
        let steps = (0..self.keys / 16).map(|step| {
            let weights = list("weight", 4 * step..4 * step + 4);
            format!(
                "add.s64 b, v, {}; wgmma.mma_async.sync.aligned.m64n{}k16.f32.{ty}.{ty} {{{values}}}, {{{weights}}}, b, \
                 yes, 1, 1, 1; ",
                16 * step * PANEL_ROW / 16,
                self.value_width
            )
        });
        steps.collect()
    }

    /// The greatest score of each row into `a0` and `a1`.
    fn greatest(self) -> String {
        let mut text = String::new();
        for i in 0..self.scores() {
            // Two chains per row.
            let chain = format!("{}{}", ["a", "b"][i % 2], i / 2 % 2);
            text += &match i {
                0..4 => format!("mov.f32 {chain}, score{i}; "),
                _ => format!("max.f32 {chain}, {chain}, score{i}; "),
            };
        }
        text
    }

    /// Scores to weights `2^(score scale - shift)`, and their sums into `a0` and `a1`, in two
    /// chains per row.
    fn weigh(self) -> String {
        let mut text = String::new();
        for i in 0..self.scores() {
            let row = i / 2 % 2;
            let chain = format!("{}{row}", ["a", "b"][i % 2]);
            let score = format!("score{i}");
            text += &format!(
                "fma.rn.f32 {score}, {score}, scale, shift{row}; ex2.approx.ftz.f32 {score}, {score}; "
            );
            text += &match i {
                0..4 => format!("mov.f32 {chain}, {score}; "),
                _ => format!("add.rn.f32 {chain}, {chain}, {score}; "),
            };
        }
        text
    }

    /// Rounds the weights in pairs.
    fn round(self) -> String {
        let ty = name(self.dtype);
        let pairs = (0..self.weights())
            .map(|i| format!("cvt.rn.{ty}x2.f32 weight{i}, score{}, score{}; ", 2 * i + 1, 2 * i));
        pairs.collect()
    }

    /// Multiplies the sums of values by `by0` and `by1`.
    fn scale_values(self) -> String {
        (0..self.values()).map(|i| format!("mul.rn.f32 value{i}, value{i}, by{}; ", i / 2 % 2)).collect()
    }
}

/// Registers, separated by commas.
fn list(register: &str, range: std::ops::Range<usize>) -> String {
    range.map(|i| format!("{register}{i}")).collect::<Vec<_>>().join(", ")
}

/// Declares the registers, with sums of 0. Once a kernel.
#[cube]
pub fn begin(#[comptime] products: Products) {
    gpu_asm!("{declarations}", declarations = const products.declarations(), options(nomem));
}

/// Begins the products of 64 query rows at `q` with the keys at `k`: their scores are there when it
/// has ended.
#[cube]
pub fn multiply_keys(q: u32, k: u32, #[comptime] products: Products) {
    let (q, k) = (lower(q, 16usize), lower(k, 16usize));
    gpu_asm!(
        "{{ .reg .pred no, yes; .reg .b32 h; .reg .b64 q, k, a, b; setp.ne.b32 no, 0, 0; setp.eq.b32 yes, 0, 0; \
         mov.b32 h, {upper}; mov.b64 q, {{{q}, h}}; mov.b64 k, {{{k}, h}}; wgmma.fence.sync.aligned; {products} \
         wgmma.commit_group.sync.aligned; }}",
        q = in(_) q, k = in(_) k, upper = const UPPER, products = const products.multiply_keys(), options(nomem),
    );
}

/// Begins to add the weights' products with the values at `v` to the sums.
#[cube]
pub fn multiply_values(v: u32, #[comptime] products: Products) {
    let v = lower(v, comptime!(products.keys * PANEL_ROW));
    gpu_asm!(
        "{{ .reg .pred yes; .reg .b32 h; .reg .b64 v, b; setp.eq.b32 yes, 0, 0; mov.b32 h, {upper}; \
         mov.b64 v, {{{v}, h}}; wgmma.fence.sync.aligned; {products} wgmma.commit_group.sync.aligned; }}",
        v = in(_) v, upper = const UPPER, products = const products.multiply_values(), options(nomem),
    );
}

/// Waits until no more than the last `count` products are under way.
#[cube]
pub fn wait_products(#[comptime] count: usize) {
    gpu_asm!("wgmma.wait_group.sync.aligned {count};", count = const count, options(nomem));
}

/// The greatest of this unit's scores in each of its two rows.
#[cube]
pub fn greatest_scores(#[comptime] products: Products) -> Vector<f32, Const<2>> {
    let greatest: Vector<f32, Const<2>>;
    gpu_asm!(
        "{{ .reg .f32 a0, a1, b0, b1; .reg .b64 both; {maxima} max.f32 a0, a0, b0; max.f32 a1, a1, b1; \
         mov.b64 both, {{a0, a1}}; mov.b64 {greatest}, both; }}",
        greatest = out(_) greatest, maxima = const products.greatest(), options(nomem),
    );
    greatest
}

/// Makes the scores weights `2^(score scale - shift)`, not rounded, and gives their sum in each of
/// this unit's rows.
#[cube]
pub fn weigh(scale: f32, shift: (f32, f32), #[comptime] products: Products) -> Vector<f32, Const<2>> {
    let sums: Vector<f32, Const<2>>;
    let (minus0, minus1) = (-shift.0, -shift.1);
    gpu_asm!(
        "{{ .reg .f32 a0, a1, b0, b1, scale, shift0, shift1; .reg .b64 both; mov.f32 scale, {scale}; \
         mov.f32 shift0, {minus0}; mov.f32 shift1, {minus1}; {weights} add.rn.f32 a0, a0, b0; add.rn.f32 a1, a1, b1; \
         mov.b64 both, {{a0, a1}}; mov.b64 {sums}, both; }}",
        sums = out(_) sums, scale = in(_) scale, minus0 = in(_) minus0, minus1 = in(_) minus1,
        weights = const products.weigh(), options(nomem),
    );
    sums
}

/// Rounds the weights, and multiplies the sums of values in this unit's rows by `by`. No product
/// may be under way.
#[cube]
pub fn round_weights(by: (f32, f32), #[comptime] products: Products) {
    let (by0, by1) = by;
    gpu_asm!(
        "{{ .reg .f32 by0, by1; mov.f32 by0, {by0}; mov.f32 by1, {by1}; {round} {scale} }}",
        by0 = in(_) by0, by1 = in(_) by1, round = const products.round(), scale = const products.scale_values(),
        options(nomem),
    );
}

/// Score `i` of this unit.
#[cube]
pub fn score(#[comptime] i: usize) -> f32 {
    let value: f32;
    gpu_asm!("mov.f32 {value}, score{i};", value = out(_) value, i = const i, options(nomem));
    value
}

/// Replaces score `i`.
#[cube]
pub fn set_score(#[comptime] i: usize, value: f32) {
    let bits = register(u32::reinterpret(value));
    gpu_asm!("mov.b32 score{i}, {bits};", bits = in(_) bits, i = const i, options(nomem));
}

/// Sum of values `i` of this unit.
#[cube]
pub fn value(#[comptime] i: usize) -> f32 {
    let value: f32;
    gpu_asm!("mov.f32 {value}, value{i};", value = out(_) value, i = const i, options(nomem));
    value
}
