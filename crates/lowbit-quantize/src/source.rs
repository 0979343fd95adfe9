use crate::QuantizeError;
use lowbit_files::{Contents, Stored, TensorView};
use lowbit_formats::{Component, FloatType, Format, FormatError, Parts};
use std::ops::Range;

/// The rows of a tensor, of `k` values each, in the files that they are read from and in any
/// format.
#[derive(Clone, Debug)]
pub struct Source {
    /// That of the first rows. Others have another one where a tensor is put together from several
    /// of a GGUF file.
    pub format: Format,
    pub k: usize,
    pieces: Vec<Piece>,
    views: Vec<TensorView>,
}

/// Rows that lie one after the other: the bytes of each component.
#[derive(Clone, Debug)]
struct Piece {
    format: Format,
    rows: usize,
    components: Vec<Contents>,
}

impl Source {
    /// All of a tensor in a float type or in GGML's blocks.
    ///
    /// # Errors
    /// [`QuantizeError::Type`] for integers, and floats of other sizes.
    pub fn new(view: &TensorView) -> Result<Self, QuantizeError> {
        let refuse = || QuantizeError::Type { name: view.name.clone(), stored: view.stored.to_string() };
        let format = match view.stored {
            Stored::Blocks(format) => format,
            Stored::Plain(dtype) => Format::Float(FloatType::from_dtype(dtype).ok_or_else(refuse)?),
        };
        let k = view.shape.last().copied().unwrap_or(1);
        let rows = view.shape.split_last().map_or(1, |(_, rows)| rows.iter().product());
        let components = view.components(format)?;
        let pieces = vec![Piece { format, rows, components }];
        Ok(Self { format, k, pieces, views: vec![view.clone()] })
    }

    /// One row of values that are computed.
    pub fn values(values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let format = Format::Float(FloatType::F32);
        let pieces = vec![Piece { format, rows: 1, components: vec![bytes.into()] }];
        Self { format, k: values.len(), pieces, views: vec![] }
    }

    /// A weight in MLX's layout: the components of `format`, in rows of `k` values.
    ///
    /// # Errors
    /// [`QuantizeError::Shape`] when the components do not have the same number of whole rows.
    pub fn quantised(format: Format, k: usize, views: &[&TensorView]) -> Result<Self, QuantizeError> {
        let components = format.components(k)?;
        let rows = |(view, row): (&&TensorView, usize)| {
            view.bytes.len().checked_div(row).filter(|rows| rows * row == view.bytes.len())
        };
        let rows: Vec<_> = views.iter().zip(components.iter().map(Component::row_bytes)).map(rows).collect();
        let same =
            rows.len() == components.len() && rows.iter().all(|other| other.is_some() && *other == rows[0]);
        match rows.first() {
            Some(&Some(rows)) if same => {
                let components = views.iter().map(|view| view.bytes.clone()).collect();
                let views = views.iter().map(|&view| view.clone()).collect();
                Ok(Self { format, k, pieces: vec![Piece { format, rows, components }], views })
            }
            _ => {
                let view = views[0];
                let want = "its scales and biases are of other rows";
                Err(QuantizeError::Shape { name: view.name.clone(), shape: view.shape.clone(), want })
            }
        }
    }

    /// The same without rows yet.
    pub fn empty(&self) -> Self {
        Self { pieces: vec![], views: vec![], ..*self }
    }

    /// Some of the rows of a source of one piece.
    ///
    /// # Errors
    /// Those of [`Format::components`].
    ///
    /// # Panics
    /// When there are fewer rows.
    pub fn part(&self, rows: Range<usize>) -> Result<Self, FormatError> {
        let [Piece { format, components, .. }] = &self.pieces[..] else { panic!("one piece") };
        let of = format.components(self.k)?;
        let parts = components.iter().zip(of).map(|(bytes, component)| {
            bytes.slice(rows.start * component.row_bytes()..rows.end * component.row_bytes())
        });
        let pieces = vec![Piece { format: *format, rows: rows.len(), components: parts.collect() }];
        Ok(Self { pieces, views: self.views.clone(), ..*self })
    }

    /// Appends the rows of `other`, which are of the same length.
    pub fn append(&mut self, other: Self) {
        self.pieces.extend(other.pieces);
        self.views.extend(other.views);
    }

    /// The same values in rows of another length. Blocks have a row's length, floats any.
    #[must_use]
    pub fn with_k(self, k: usize) -> Self {
        let Format::Float(_) = self.format else { return self };
        let rows = |piece: &Piece| (piece.rows * self.k).checked_div(k).unwrap_or(0);
        let pieces = self.pieces.iter().map(|piece| Piece { rows: rows(piece), ..piece.clone() }).collect();
        Self { k, pieces, ..self }
    }

    /// True if all rows are in `format`.
    pub fn is_in(&self, format: Format) -> bool {
        self.pieces.iter().all(|piece| piece.format == format)
    }

    /// The length of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.pieces.iter().map(|piece| piece.rows).sum()
    }

    /// The values of the rows from `first` on, as many as `out` holds, in f32.
    ///
    /// # Errors
    /// Those of [`Format::decode`].
    ///
    /// # Panics
    /// When there are fewer rows, or `out` does not hold whole ones.
    pub fn decode(&self, first: usize, out: &mut [f32]) -> Result<(), FormatError> {
        let mut left = &mut out[..];
        let rows = left.len() / self.k.max(1);
        self.each(first, rows, |format, parts, rows| {
            let (now, later) = std::mem::take(&mut left).split_at_mut(rows * self.k);
            left = later;
            format.decode(parts, rows, self.k, now)
        })?;
        assert!(left.is_empty(), "a part of a row");
        Ok(())
    }

    /// The stored bytes of `rows` rows from `first` on, of each component.
    ///
    /// # Errors
    /// Those of [`Format::components`].
    ///
    /// # Panics
    /// When there are fewer rows.
    pub fn encoded(&self, first: usize, rows: usize) -> Result<Vec<Vec<u8>>, FormatError> {
        let mut encoded = vec![vec![]; self.format.components(self.k)?.len()];
        self.each(first, rows, |format, parts, _| {
            assert_eq!(format, self.format, "rows of one format");
            encoded.iter_mut().zip(parts).for_each(|(all, part): (&mut Vec<u8>, _)| all.extend(*part));
            Ok(())
        })?;
        Ok(encoded)
    }

    /// Calls `visit` with the format, the components and the number of rows that lie together,
    /// until it has seen `rows` rows from `first` on.
    fn each(
        &self,
        mut first: usize,
        mut rows: usize,
        mut visit: impl FnMut(Format, &Parts<'_>, usize) -> Result<(), FormatError>,
    ) -> Result<(), FormatError> {
        for piece in &self.pieces {
            if first >= piece.rows {
                first -= piece.rows;
                continue;
            }
            let now = (piece.rows - first).min(rows);
            let components = piece.format.components(self.k)?;
            let bytes: Vec<_> = piece.components.iter().map(Contents::get).collect();
            let parts = std::array::from_fn(|i| match (bytes.get(i), components.get(i)) {
                (Some(bytes), Some(component)) => {
                    &bytes[first * component.row_bytes()..][..now * component.row_bytes()]
                }
                _ => &[],
            });
            visit(piece.format, &parts, now)?;
            (first, rows) = (0, rows - now);
            if rows == 0 {
                return Ok(());
            }
        }
        assert!(rows == 0, "rows beyond the last");
        Ok(())
    }

    /// Says that the bytes are not needed again.
    pub fn release(&self) {
        self.views.iter().for_each(TensorView::release);
    }
}
