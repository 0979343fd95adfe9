//! Weights of integers in groups, `(code - zero) * scale`, as MLX's affine: `code * scale + bias`,
//! bias = `-zero * scale`.

use std::num::NonZeroUsize;

use bytes::Bytes;
use lowbit_formats::{DType, FloatType, Format};

use super::Adapter;
use crate::{Contents, FileError, Stored, TensorView};

/// The sizes of a weight of integers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Integers {
    /// Bits per code.
    pub bits: usize,
    /// Rows of all matrices.
    pub rows: usize,
    /// Values per row.
    pub k: usize,
    /// Groups per row in the file, which share a scale.
    pub groups: usize,
    /// The type of scales and biases.
    pub float: FloatType,
}

impl Integers {
    /// MLX's format, whose groups are the file's or parts of them.
    fn format(&self) -> Option<Format> {
        let of_file = self.k.checked_div(self.groups).filter(|size| size * self.groups == self.k)?;
        let group_size = [128, 64, 32].into_iter().find(|&size| of_file.is_multiple_of(size))?;
        Format::affine(self.bits, group_size, self.float).ok()
    }
}

impl Adapter<'_> {
    /// The sizes of a weight of which there are `groups` scales per row.
    ///
    /// # Errors
    /// [`FileError::Quantization`] for bits and groups that MLX does not have.
    pub(super) fn check_integers(&self, module: &str, integers: Integers) -> Result<Format, FileError> {
        integers.format().ok_or_else(|| {
            let Integers { bits, k, groups, .. } = integers;
            let module = crate::shown(module);
            self.unsupported(format!("{bits} bits and {groups} groups of rows of {k} values ({module})"))
        })
    }

    /// Adds a weight of integers: codes as MLX has them, in a shape `[.., N]` of rows, and a scale
    /// and a zero for each row and group of the file.
    pub(super) fn push_integers(
        &mut self,
        module: &str,
        of: &TensorView,
        (integers, shape, codes): (Integers, &[usize], Contents),
        scale: impl Fn(usize, usize) -> f32 + Clone + Send + Sync + 'static,
        zero: impl Fn(usize, usize) -> f32 + Send + Sync + 'static,
    ) -> Result<(), FileError> {
        let Integers { bits, rows, k, groups, float } = integers;
        let format = self.check_integers(module, integers)?;
        let made = k / format.block();
        let parts = made / groups;
        let of_groups = |value: Box<dyn Fn(usize, usize) -> f32 + Send + Sync>| {
            Contents::computed(rows * made * float.size(), move || {
                let mut bytes = Vec::with_capacity(rows * made * float.size());
                for row in 0..rows {
                    for group in 0..groups {
                        let value = value(row, group);
                        (0..parts).for_each(|_| float.push(value, &mut bytes));
                    }
                }
                bytes
            })
        };
        let scales = of_groups(Box::new(scale.clone()));
        let biases = of_groups(Box::new(move |row, group| 0.0 - zero(row, group) * scale(row, group)));
        let with = |columns: usize| [shape, &[columns]].concat();
        self.push(module, "weight", of, (DType::U32, with(k / 32 * bits), codes));
        self.push(module, "scales", of, (float.dtype(), with(made), scales));
        self.push(module, "biases", of, (float.dtype(), with(made), biases));
        self.is_in(module, format);
        Ok(())
    }

    /// The floats of scales.
    ///
    /// # Errors
    /// [`FileError::Quantized`] for other types.
    pub(super) fn floats(&self, view: &TensorView) -> Result<FloatType, FileError> {
        match view.stored {
            Stored::Plain(dtype) => FloatType::from_dtype(dtype),
            Stored::Blocks(_) => None,
        }
        .ok_or_else(|| self.misfit(view, "scales are f32, f16 or bf16"))
    }

    /// `[rows, columns]` of `dtype`.
    ///
    /// # Errors
    /// [`FileError::Quantized`] for what is of another type, or no matrix.
    pub(super) fn matrix(&self, view: &TensorView, dtype: DType) -> Result<[usize; 2], FileError> {
        match (view.stored, &view.shape[..]) {
            (Stored::Plain(stored), &[rows, columns]) if stored == dtype && !view.bytes.is_empty() => {
                Ok([rows, columns])
            }
            _ => Err(self.misfit(view, format!("a matrix of {dtype} is wanted"))),
        }
    }
}

/// Word `index`.
pub(super) fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..][..4].try_into().expect("four bytes"))
}

/// `bits` bits of a stream of words from bit `start` on.
pub(super) fn bits_at(word: impl Fn(usize) -> u32, start: usize, bits: usize) -> u32 {
    let (index, shift) = (start / 32, start % 32);
    let low = u64::from(word(index)) >> shift;
    let high = if shift + bits > 32 { u64::from(word(index + 1)) << (32 - shift) } else { 0 };
    (low | high) as u32 & ((1 << bits) - 1)
}

/// Makes `rows` rows of words, on all cores where there are many: `make(row, out)` fills row `row`,
/// some rows at a time.
pub(in crate::checkpoint) fn words_by_rows(
    rows: usize,
    columns: usize,
    make: impl Fn(usize, &mut [u8]) + Sync,
) -> Vec<u8> {
    /// Rows that are made together, so that what is read by columns is read by lines of the cache.
    const TOGETHER: usize = 32;
    let mut words = vec![0; rows * columns * 4];
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    // Threads cost more than a small weight.
    let threads = if words.len() < 1 << 20 { 1 } else { cores };
    let each = rows.div_ceil(threads).next_multiple_of(TOGETHER).max(1);
    let chunk = |index: usize, chunk: &mut [u8]| {
        for (i, together) in chunk.chunks_mut(TOGETHER * columns * 4).enumerate() {
            make(index * each + i * TOGETHER, together);
        }
    };
    let chunks = words.chunks_mut((each * columns * 4).max(1)).enumerate();
    if threads == 1 {
        chunks.for_each(|(index, words)| chunk(index, words));
    } else {
        let chunk = &chunk;
        std::thread::scope(|scope| {
            chunks.for_each(|(index, words)| drop(scope.spawn(move || chunk(index, words))))
        });
    }
    words
}

/// The transpose of a matrix of words `[columns, rows]`.
pub(super) fn transposed(words: &Bytes, rows: usize, columns: usize) -> Vec<u8> {
    words_by_rows(rows, columns, |first, out| {
        let count = out.len() / (4 * columns);
        for column in 0..columns {
            let from = &words[4 * (column * rows + first)..][..4 * count];
            for (row, word) in from.as_chunks::<4>().0.iter().enumerate() {
                out[4 * (row * columns + column)..][..4].copy_from_slice(word);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_lie_across_words() {
        let words = [0xdeadbeef_u32, 0x12345678, 0x9abcdef0];
        let all = words.iter().rfold(0u128, |all, &word| all << 32 | u128::from(word));
        for bits in 1..=8 {
            for start in 0..=96 - bits {
                let want = (all >> start) as u32 & ((1 << bits) - 1);
                assert_eq!(bits_at(|i| words.get(i).copied().unwrap_or(0), start, bits), want);
            }
        }
    }

    #[test]
    fn words_are_transposed() {
        for (rows, columns) in [(1, 1), (5, 3), (33, 7), (700, 431)] {
            let word = |row: usize, column: usize| (row * 1009 + column) as u32;
            let from = (0..columns).flat_map(|column| (0..rows).map(move |row| word(row, column)));
            let from: Vec<u8> = from.flat_map(u32::to_le_bytes).collect();
            let got = transposed(&from.into(), rows, columns);
            let want = (0..rows).flat_map(|row| (0..columns).map(move |column| word(row, column)));
            assert!(
                got.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).eq(want),
                "{rows} x {columns}"
            );
        }
    }
}
