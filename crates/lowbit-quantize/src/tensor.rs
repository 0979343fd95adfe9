//! A tensor of the new checkpoint: where its values come from, and what is done to them before they
//! are encoded.

use crate::exact::{self, Rows};
use crate::nvfp4::{self, Divisors};
use crate::source::Source;
use crate::{QuantizeError, threads};
use lowbit_formats::{FloatType, Format, FormatError};
use std::ops::Range;

/// A tensor of the new checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub source: Source,
    pub change: Change,
}

/// The changes to the source's values, in this order.
#[derive(Clone, Debug)]
pub struct Change {
    /// The source's row for each row; `None` for the same order.
    pub rows: Option<Vec<usize>>,
    /// The place in the source's row for each value; `None` for the same order.
    pub columns: Option<Vec<usize>>,
    /// Rows are columns of the source's rows; the two above are `None` then.
    pub turned: Option<Turned>,
    /// Further rows come from another source; the three above are `None` then.
    pub joined: Option<Joined>,
    /// 1 is added, for a norm that is stored as `w - 1`. The sum is rounded to [`Self::sum`].
    pub add_one: bool,
    /// The type that sums with 1 are rounded to.
    pub sum: FloatType,
    /// The function of values.
    pub function: Function,
    /// Each matrix is divided by a number before it is encoded, which is stored beside it.
    pub divisors: Option<Divisors>,
    /// The type that values are rounded to in the end.
    pub rounded: FloatType,
}

/// Transposed blocks of rows: of each `stride` rows of the source the first `rows`, whose columns
/// are the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turned {
    pub rows: usize,
    pub stride: usize,
}

impl Turned {
    /// The values of the rows from `first` on, of as many values each as a block has rows.
    fn values(self, source: &Source, first: usize, out: &mut [f32]) -> Result<(), FormatError> {
        let columns = source.k();
        let mut block = vec![0.0; self.rows * columns];
        let mut decoded = None;
        for (row, out) in (first..).zip(out.chunks_exact_mut(self.rows)) {
            let (head, column) = (row / columns, row % columns);
            if decoded.replace(head) != Some(head) {
                source.decode(head * self.stride, &mut block)?;
            }
            let values = block.iter().skip(column).step_by(columns);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
        }
        Ok(())
    }
}

/// Rows between those of the source: before each `rows` of these the columns of a block of rows of
/// another one.
#[derive(Clone, Debug)]
pub struct Joined {
    pub rows: usize,
    /// Blocks of as many rows as a row here has values.
    pub turned: Source,
}

impl Joined {
    /// The values of the rows from `first` on, which are of `k` values each.
    fn values(
        &self,
        source: &Source,
        (first, k): (usize, usize),
        out: &mut [f32],
    ) -> Result<(), FormatError> {
        let columns = self.turned.k();
        let mut block = vec![0.0; k * columns];
        let mut decoded = None;
        for (row, out) in (first..).zip(out.chunks_exact_mut(k)) {
            let (head, place) = (row / (columns + self.rows), row % (columns + self.rows));
            if let Some(row) = place.checked_sub(columns) {
                source.decode(head * self.rows + row, out)?;
                continue;
            }
            if decoded.replace(head) != Some(head) {
                self.turned.decode(head * k, &mut block)?;
            }
            let values = block.iter().skip(place).step_by(columns);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = *value);
        }
        Ok(())
    }
}

/// A function of a value. It is computed in f64, so that the result is the nearest f32 however a
/// library computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Itself.
    Same,
    /// `-exp(value)`.
    NegativeExp,
    /// `ln(-value)`, the inverse of that.
    LogOfNegative,
    /// `exp(value)`.
    Exp,
    /// `ln(value)`, the inverse of that.
    Log,
    /// `value - 1`, of a norm that is stored so.
    LessOne,
}

impl Function {
    fn of(self, value: f32) -> f32 {
        match self {
            Self::Same => value,
            Self::NegativeExp => -f64::from(value).exp() as f32,
            Self::LogOfNegative => f64::from(-value).ln() as f32,
            Self::Exp => f64::from(value).exp() as f32,
            Self::Log => f64::from(value).ln() as f32,
            Self::LessOne => (f64::from(value) - 1.0) as f32,
        }
    }
}

impl Default for Change {
    /// None.
    fn default() -> Self {
        let (rows, columns, sum, rounded) = (None, None, FloatType::F32, FloatType::F32);
        Self {
            rows,
            columns,
            turned: None,
            joined: None,
            add_one: false,
            sum,
            function: Function::Same,
            divisors: None,
            rounded,
        }
    }
}

/// A tensor's bytes and what encoding lost.
#[derive(Debug)]
pub struct Encoded {
    /// Of each component of the format.
    pub components: Vec<Vec<u8>>,
    pub loss: Loss,
}

/// Sums of squares, of errors and of values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    pub errors: f64,
    pub values: f64,
}

impl std::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Self) {
        self.errors += other.errors;
        self.values += other.values;
    }
}

/// Values that a thread encodes at a time: enough to keep the others from waiting for the counter.
const CHUNK: usize = 1 << 16;

impl Tensor {
    /// The length of a row.
    pub fn k(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.iter().product::<usize>().checked_div(self.k()).unwrap_or(0)
    }

    /// Matrices.
    pub fn matrices(&self) -> usize {
        self.shape.iter().rev().skip(2).product()
    }

    /// The numbers by which matrices are divided, if they are.
    ///
    /// # Errors
    /// [`QuantizeError::Encode`] with those of [`Format::decode`].
    pub fn divisors(&self) -> Result<&[f32], QuantizeError> {
        let Some(divisors) = &self.change.divisors else { return Ok(&[]) };
        divisors.get_or(|| {
            let each = self.rows().checked_div(self.matrices()).unwrap_or(0);
            let matrices = (0..self.matrices()).map(|matrix| matrix * each).collect();
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            threads::try_map(cores, matrices, |first| {
                self.divisor(first..first + each).map_err(|error| self.failed(error))
            })
        })
    }

    /// The number for the matrix of these rows.
    fn divisor(&self, rows: Range<usize>) -> Result<f32, FormatError> {
        let known = self.nvfp4().filter(|rows| rows.source.format == Format::Fp4);
        if let Some(float) = known.map_or(Ok(None), |known| known.float(rows.clone()))? {
            return Ok(float);
        }
        let (mut values, mut largest) = (vec![0.0; self.k()], 0.0f32);
        for row in rows {
            self.values(row, &mut values)?;
            largest = values.iter().fold(largest, |largest, value| largest.max(value.abs()));
        }
        Ok(nvfp4::float_for(largest))
    }

    /// Its rows if they are in NVFP4 and stay as they are, but for their order.
    fn nvfp4(&self) -> Option<nvfp4::Rows<'_>> {
        let Change { rows, columns, turned, joined, add_one, function, .. } = &self.change;
        let changes = turned.is_some() || joined.is_some() || *add_one || *function != Function::Same;
        let is_read = nvfp4::is_nvfp4(self.source.format) && self.source.is_in(self.source.format);
        let (order, columns) = (rows.as_deref(), columns.as_deref());
        (is_read && !changes).then_some(nvfp4::Rows { source: &self.source, order, columns })
    }

    /// The components in `format` of some rows with the codes and scales that they have, if both
    /// are NVFP4.
    fn kept(
        &self,
        format: Format,
        rows: Range<usize>,
        divisor: impl Fn(usize) -> f32,
    ) -> Result<Option<Vec<Vec<u8>>>, FormatError> {
        let is_target = matches!(format, Format::Nvfp4 | Format::NVFP4);
        let known = self.nvfp4().filter(|_| is_target);
        known.map_or(Ok(None), |known| known.kept(format, rows, divisor))
    }

    /// The first and the second half of a matrix' rows, under these names; `None` for an odd number
    /// of them, and for other shapes.
    pub fn row_halves(&self, names: [String; 2]) -> Option<[Self; 2]> {
        let &[rows, k] = &self.shape[..] else { return None };
        let half = Some(rows / 2).filter(|half| half * 2 == rows)?;
        let [first, second] = names;
        Some([(first, 0), (second, half)].map(|(name, start)| {
            let order = start..start + half;
            let rows = match &self.change.rows {
                None => order.collect(),
                Some(rows) => rows[order].to_vec(),
            };
            let change = Change { rows: Some(rows), ..self.change.clone() };
            Self { name, shape: vec![half, k], source: self.source.clone(), change }
        }))
    }

    /// The values of the rows from `first` on, as many as `out` holds.
    pub fn values(&self, first: usize, out: &mut [f32]) -> Result<(), FormatError> {
        let Change { rows, columns, turned, joined, add_one, sum, function, rounded, .. } = &self.change;
        match (rows, turned, joined) {
            (_, _, Some(joined)) => joined.values(&self.source, (first, self.k()), out)?,
            (None, Some(turned), None) => turned.values(&self.source, first, out)?,
            (None, None, None) => self.source.decode(first, out)?,
            (Some(rows), _, None) => {
                for (row, out) in rows[first..].iter().zip(out.chunks_exact_mut(self.k())) {
                    self.source.decode(*row, out)?;
                }
            }
        }
        if let Some(columns) = columns {
            let mut row = vec![0.0; self.k()];
            for out in out.chunks_exact_mut(self.k()) {
                row.copy_from_slice(out);
                out.iter_mut().zip(columns).for_each(|(value, &column)| *value = row[column]);
            }
        }
        for value in out {
            if *add_one {
                *value = sum.round(*value + 1.0);
            }
            *value = rounded.round(function.of(*value));
        }
        Ok(())
    }

    /// The values of all rows.
    ///
    /// # Errors
    /// [`QuantizeError::Encode`] with those of [`Format::decode`].
    pub fn all_values(&self) -> Result<Vec<f32>, QuantizeError> {
        let mut values = vec![0.0; self.rows() * self.k()];
        self.values(0, &mut values).map_err(|error| self.failed(error))?;
        Ok(values)
    }

    /// The values of all rows as they are stored, before any change.
    ///
    /// # Errors
    /// As [`Self::all_values`].
    pub fn source_values(&self) -> Result<Vec<f32>, QuantizeError> {
        Self { change: Change::default(), ..self.clone() }.all_values()
    }

    /// Encodes all rows on all cores, as values of the type that they are rounded to
    /// ([`Format::encode_from`]). A quantised weight whose format stays keeps its bytes: rounding
    /// again may choose other scales.
    ///
    /// # Errors
    /// Those of [`Format::encode_from`], with the tensor's name; a thread that cannot be had.
    pub fn encode(&self, format: Format) -> Result<Encoded, QuantizeError> {
        let (rows, k) = (self.rows(), self.k());
        let chunk_rows = (CHUNK / k.max(1)).max(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let chunks = (0..rows).step_by(chunk_rows).collect();
        let divisors = self.divisors()?;
        let done = threads::try_map(cores, chunks, |first| {
            let rows = first..rows.min(first + chunk_rows);
            self.encode_rows(format, rows, divisors).map_err(|error| self.failed(error))
        })?;
        let components = format.components(k)?;
        let mut all = Encoded { components: vec![], loss: Loss::default() };
        all.components
            .extend(components.iter().map(|component| Vec::with_capacity(rows * component.row_bytes())));
        for encoded in done {
            all.components.iter_mut().zip(encoded.components).for_each(|(all, bytes)| all.extend(bytes));
            all.loss += encoded.loss;
        }
        Ok(all)
    }

    /// The bytes that it takes in a format.
    ///
    /// # Errors
    /// Those of [`Format::components`], with the tensor's name.
    pub fn size_in(&self, format: Format) -> Result<u64, QuantizeError> {
        let components = format.components(self.k()).map_err(|error| self.failed(error))?;
        let row: usize = components.iter().map(|component| component.row_bytes()).sum();
        Ok(row as u64 * self.rows() as u64)
    }

    /// As [`Self::encode`], of components that are there.
    ///
    /// # Errors
    /// Those of [`Format::decode`], with the tensor's name.
    pub fn encoded(&self, format: Format, components: Vec<Vec<u8>>) -> Result<Encoded, QuantizeError> {
        let mut values = vec![0.0; self.rows() * self.k()];
        let loss =
            self.values(0, &mut values).and_then(|()| lost(format, &values, self.k(), &components, |_| 1.0));
        Ok(Encoded { loss: loss.map_err(|error| self.failed(error))?, components })
    }

    fn failed(&self, error: FormatError) -> QuantizeError {
        QuantizeError::Encode { name: self.name.clone(), error, rule: None }
    }

    /// True if what is stored is quantised in `format` already, and nothing is done to its values.
    fn keeps_bytes(&self, format: Format) -> bool {
        let Change { rows, columns, turned, joined, add_one, function, .. } = &self.change;
        let ordered = rows.is_some() || columns.is_some() || turned.is_some() || joined.is_some();
        let changes = ordered || *add_one || *function != Function::Same;
        !matches!(format, Format::Float(_)) && self.source.is_in(format) && !changes
    }

    /// The rows from `first` on in blocks of `format`, if these hold `values` exactly: with the
    /// codes and scales that the source has.
    fn exactly(&self, format: Format, first: usize, values: &[f32]) -> Result<Option<Vec<u8>>, FormatError> {
        let Self { source, change: Change { rows, columns, turned, joined, add_one, function, .. }, .. } =
            self;
        let changes = columns.is_some()
            || turned.is_some()
            || joined.is_some()
            || *add_one
            || *function != Function::Same;
        if changes || !exact::may_hold(format, source.format) || !source.is_in(source.format) {
            return Ok(None);
        }
        let k = self.k();
        let mut blocks = vec![];
        for (i, values) in values.chunks_exact(k).enumerate() {
            let row = rows.as_ref().map_or(first + i, |rows| rows[first + i]);
            let components = source.encoded(row, 1)?;
            let row = Rows { format: source.format, components: &components, k, values };
            let Some(row) = row.in_blocks(format) else { return Ok(None) };
            blocks.extend(row);
        }
        Ok(Some(blocks))
    }

    /// Encodes some rows, each matrix divided by its number in `divisors`, if there are some.
    fn encode_rows(
        &self,
        format: Format,
        rows: Range<usize>,
        divisors: &[f32],
    ) -> Result<Encoded, FormatError> {
        let (first, k) = (rows.start, self.k());
        let mut values = vec![0.0; rows.len() * k];
        self.values(first, &mut values)?;
        let each = self.rows().checked_div(divisors.len());
        let divisor = |row: usize| each.map_or(1.0, |each| divisors[row / each.max(1)]);
        let components = match self.keeps_bytes(format) && divisors.is_empty() {
            true => match values.iter().position(|value| !value.is_finite()) {
                None => self.source.encoded(first, rows.len()),
                Some(index) => Err(FormatError::NotFinite { format, index, value: values[index] }),
            },
            false => match (self.kept(format, rows, divisor)?, self.exactly(format, first, &values)?) {
                (Some(components), _) => Ok(components),
                (None, Some(blocks)) => Ok(vec![blocks]),
                (None, None) if divisors.is_empty() => format.encode_from(self.change.rounded, &values, k),
                (None, None) => {
                    let divided = values.iter().enumerate().map(|(i, value)| value / divisor(first + i / k));
                    format.encode(&divided.collect::<Vec<_>>(), k)
                }
            },
        };
        let components = components.map_err(|error| match error {
            FormatError::NotFinite { format, index, value } => {
                FormatError::NotFinite { format, index: first * k + index, value }
            }
            error => error,
        })?;
        let loss = lost(format, &values, k, &components, |row| divisor(first + row))?;
        Ok(Encoded { components, loss })
    }
}

/// The loss of a weight's `components` against `values`; row `i` is to be multiplied by
/// `factor(i)`.
fn lost(
    format: Format,
    values: &[f32],
    k: usize,
    components: &[Vec<u8>],
    factor: impl Fn(usize) -> f32,
) -> Result<Loss, FormatError> {
    let mut decoded = vec![0.0; values.len()];
    let parts = std::array::from_fn(|i| components.get(i).map_or(&[][..], Vec::as_slice));
    format.decode(&parts, values.len() / k.max(1), k, &mut decoded)?;
    let square = |value: f64| value * value;
    let rows = values.chunks(k.max(1)).zip(decoded.chunks(k.max(1))).enumerate();
    let errors = rows.flat_map(|(row, (values, decoded))| {
        let factor = f64::from(factor(row));
        let pairs = values.iter().zip(decoded);
        pairs.map(move |(&value, &decoded)| square(f64::from(decoded) * factor - f64::from(value)))
    });
    Ok(Loss { errors: errors.sum(), values: values.iter().map(|&value| square(value.into())).sum() })
}
