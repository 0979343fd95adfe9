//! Ops that move values without changing them.

use super::Var;
use lowbit_formats::DType;
use lowbit_kernels::{KernelError, Tensor, ops};
use std::ops::Range;

type Result<T> = std::result::Result<T, KernelError>;

/// [`Tensor::reshape`].
pub(crate) fn reshape(x: &Var, shape: &[usize]) -> Result<Var> {
    let y = x.tensor.reshape(shape)?;
    let Some(tape) = x.tape() else { return Ok(y.into()) };
    let (slot, shape) = (x.slot(), x.tensor.shape().to_vec());
    Ok(tape.record_one(y, move |dy, gradients| gradients.add(slot, dy.reshape(&shape)?)))
}

/// Columns next to each other, `widths` wide: all of x's columns.
pub(crate) fn split_columns<const N: usize>(x: &Var, widths: [usize; N]) -> Result<[Var; N]> {
    let mut start = 0;
    let parts = widths.map(|width| {
        let part = ops::narrow(&x.tensor, start, width);
        start += width;
        part
    });
    let parts = each(parts)?;
    let Some(tape) = x.tape() else { return Ok(parts.map(Var::from)) };
    let (slot, kept) = (x.slot(), parts.clone());
    Ok(tape.record(parts, move |dys, gradients| {
        let mut known = Vec::with_capacity(N);
        for (dy, part) in dys.into_iter().zip(&kept) {
            known.push(or_zeros(dy, part)?);
        }
        gradients.add(slot, ops::concat(&known.iter().collect::<Vec<_>>())?)
    }))
}

/// [`ops::concat()`]: columns after each other.
pub(crate) fn concat<const N: usize>(xs: [&Var; N]) -> Result<Var> {
    let y = ops::concat(&xs.map(|x| &x.tensor))?;
    let Some(tape) = xs.iter().find_map(|x| x.tape()) else { return Ok(y.into()) };
    let parts = xs.map(|x| (x.slot(), x.dim(-1)));
    Ok(tape.record_one(y, move |dy, gradients| {
        let mut start = 0;
        for (slot, width) in parts {
            gradients.add(slot, ops::narrow(dy, start, width)?)?;
            start += width;
        }
        Ok(())
    }))
}

/// The rows of each range; ranges are next to each other, and all of x's rows.
pub(crate) fn split_rows(x: &Var, ranges: &[Range<usize>]) -> Result<Vec<Var>> {
    let parts = ranges.iter().map(|rows| x.tensor.rows(rows.start, rows.end));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let Some(tape) = x.tape() else { return Ok(parts.into_iter().map(Var::from).collect()) };
    let (slot, kept) = (x.slot(), parts.clone());
    Ok(tape.record_all(parts, move |dys, gradients| {
        let known = dys.into_iter().zip(&kept).map(|(dy, part)| or_zeros(dy, part));
        gradients.add(slot, rows_joined(&known.collect::<Result<Vec<_>>>()?)?)
    }))
}

/// Rows after each other.
pub(crate) fn join_rows(xs: &[Var]) -> Result<Var> {
    let tensors: Vec<Tensor> = xs.iter().map(|x| x.tensor.clone()).collect();
    let y = rows_joined(&tensors)?;
    let Some(tape) = xs.iter().find_map(Var::tape) else { return Ok(y.into()) };
    let parts: Vec<_> = xs.iter().map(|x| (x.slot(), x.dim(0))).collect();
    Ok(tape.record_one(y, move |dy, gradients| {
        let mut start = 0;
        for (slot, rows) in parts {
            gradients.add(slot, dy.rows(start, start + rows)?)?;
            start += rows;
        }
        Ok(())
    }))
}

/// Rows after each other are columns after each other of one long row.
pub(crate) fn rows_joined(xs: &[Tensor]) -> Result<Tensor> {
    let Some(first) = xs.first() else { return ops::concat(&[]) };
    let flat = xs.iter().map(|x| x.reshape(&[1, x.len()])).collect::<Result<Vec<_>>>()?;
    let rows: usize = xs.iter().map(|x| x.dim(0)).sum();
    ops::concat(&flat.iter().collect::<Vec<_>>())?.reshape(&[&[rows], &first.shape()[1..]].concat())
}

/// A gradient that nothing added to is zero.
pub(super) fn or_zeros(gradient: Option<Tensor>, like: &Tensor) -> Result<Tensor> {
    gradient.map_or_else(|| Tensor::allocate_zeros(like.shape(), DType::F32, like.device()), Ok)
}

/// The results, if all are well.
pub(crate) fn each<T, const N: usize>(results: [Result<T>; N]) -> Result<[T; N]> {
    let all = results.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(all.try_into().unwrap_or_else(|_| unreachable!("one for each")))
}
