use crate::{BlockScales, Component, FloatType, Scheme, Unpacked};

/// The bytes of a weight's component tensors (see [`crate::Format::components`]), borrowed. Unused
/// ones are empty.
pub type Parts<'a> = [&'a [u8]; 3];

/// Appends a block that is made of codes, one byte each, and of scales.
pub type PackBlock = fn(&[u8], &BlockScales, &mut Vec<u8>);

/// A format as a type. Everything is known at compile time, except for what a checkpoint may choose
/// (affine's group size and its scales' type).
///
/// Decoding is written as plain loops over fixed-size arrays and marked `#[inline(always)]`, so
/// that a caller compiled for a wider instruction set vectorises it with that set.
pub trait Codec: Copy + Send + Sync + 'static {
    /// Values per call of `decode`. Rows are whole numbers of runs; only rows of [`crate::Float`],
    /// whose blocks are single values, may end in a shorter run.
    const RUN: usize;

    /// Unpacks one block, in formats that store codes and scales together in blocks. `None` in
    /// formats whose components are codes, scales and biases already; their rows of codes are
    /// streams of bits, least significant first.
    const UNPACK: Option<fn(&[u8], &mut Unpacked)> = None;

    /// The inverse of [`Codec::UNPACK`]: appends a block with the given codes and scales, which
    /// must be in the format's range. `None` too in formats that are only read.
    const PACK: Option<PackBlock> = None;

    /// False for a format that is only read; [`Codec::encode`] then panics.
    const ENCODES: bool = true;

    /// The least and the greatest integer of a sub-block's scale, in formats that have sub-blocks;
    /// minima have the same range.
    const SUB_SCALES: [i8; 2] = [0, 0];

    /// One row of weights.
    type Row<'a>: Copy;

    /// The format's name, as its peer spells it.
    fn name(&self) -> String;

    /// Values that share one block: a row's length is a multiple of it.
    fn block(&self) -> usize;

    /// The tensors that hold rows of `k` values, `k` a multiple of [`Codec::block`], in the order
    /// of [`Parts`].
    fn components(&self, k: usize) -> Vec<Component>;

    /// The meaning of codes and scales.
    fn scheme(&self) -> Scheme;

    /// The type's number in GGUF files, where the format has one.
    fn ggml_type(&self) -> Option<u32> {
        None
    }

    /// Borrows row `index` of `k` values. `parts` have passed [`crate::Format::check`].
    fn row<'a>(&self, parts: &Parts<'a>, index: usize, k: usize) -> Self::Row<'a>;

    /// Decodes run `index` of `row` into `out`, `[RUN]` (or what is left of the row), in f32.
    fn decode(&self, row: Self::Row<'_>, index: usize, out: &mut [f32]);

    /// As [`Codec::decode`], with the peer's roundings when it decodes to `float`.
    fn decode_as(&self, row: Self::Row<'_>, index: usize, float: FloatType, out: &mut [f32]) {
        self.decode(row, index, out);
        out.iter_mut().for_each(|y| *y = float.round(*y));
    }

    /// Encodes one row of finite values, which were stored as `source`, and appends it to the
    /// components. This is the peer's encoder, bit for bit.
    fn encode(&self, values: &[f32], source: FloatType, components: &mut [Vec<u8>; 3]);
}

/// Keeps LLVM from vectorising across runs, with scattered stores, where it should vectorise each
/// run: decoding becomes two to five times as fast. It emits no instruction.
#[inline(always)]
pub(crate) fn vectorise_within_runs() {
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
}
