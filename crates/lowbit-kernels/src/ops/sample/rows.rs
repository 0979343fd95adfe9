use super::batch::NONE;
use super::{DecodeBatch, SampleKind, sample};
use crate::ops::Check;
use crate::{Device, KernelError, Tensor};

/// Draws a token for each of the first `n` rows of `batch` and moves them on to it: all on the
/// device, and on a GPU with as many launches as for one row.
///
/// | operand | shape | dtype |
/// |---|---|---|
/// | logits | `[n, V]` | f32, f16, bf16 |
///
/// A row draws what [`sample_next`](super::sample_next) draws with its parameters, history and
/// step, whatever the other rows are. Ids of a history that are none of the logits' count for
/// nothing. Rows that nobody uses stay as they are. Logits without a right answer show in
/// [`DrawnRows::wait`](super::DrawnRows::wait), for their row alone.
///
/// `kind` chooses the launches, which a captured pass keeps: it must cover what rows need until the
/// pass is captured anew ([`DecodeBatch::kind`]).
///
/// # Errors
/// [`KernelError::Shape`] for logits of another shape, no logits, or more rows than there are;
/// [`KernelError::Value`] for another dtype, a kind that does not cover a row's, or more than 2^24
/// logits of a row on a GPU; [`KernelError::Device`] when `batch` is on another device.
pub fn sample_rows(logits: &Tensor, batch: &mut DecodeBatch, kind: SampleKind) -> Result<(), KernelError> {
    let check = Check("sample");
    check.float("logits", logits)?;
    let [n, count] = check.dims("logits", logits, "[n, V]")?;
    if logits.is_empty() || n > batch.rows() {
        return Err(check.shape_error("logits", logits, format!("1 to {} rows are wanted", batch.rows())));
    }
    check.same_device("batch", batch.tokens().device(), logits.device())?;
    for row in 0..n {
        let needed = batch.kind(row..row + 1);
        if !kind.covers(needed) {
            return Err(check.value("kind", kind, format!("row {row} wants {needed}")));
        }
    }
    match logits.device() {
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => super::gpu::sample(check, gpu, logits, batch, kind),
        #[cfg(not(feature = "gpu"))]
        Device::Gpu(gpu) => match *gpu {},
        Device::Cpu(_) => (0..n).try_for_each(|row| {
            let Some(&params) = batch.params(row) else { return Ok(()) };
            let (mut history, step) = batch.draw_of(row)?;
            history.retain(|&id| (id as usize) < count);
            let token = match sample(&logits.rows(row, row + 1)?, &history, &params, step) {
                Ok(token) => token,
                Err(KernelError::Value { operand: "logits", .. }) => NONE,
                Err(error) => return Err(error),
            };
            batch.push(row, token)
        }),
    }
}
