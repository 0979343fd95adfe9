//! The context of a run where no flag sets it: the tokens that memory holds, at most those that the
//! model was made for. A declared context of 262,144 tokens would fill a small machine before it is
//! full.

use crate::options::Loaded;
use crate::{Failure, memory};
use lowbit::Device;
use lowbit_models::CacheSize;

/// The smallest context that is taken without being asked for, in tokens.
const LEAST: usize = 512;

/// The context of a run in tokens, and what is to be said about it. `asked` is --ctx-size; 0 is the
/// model's.
pub fn context(loaded: &Loaded, asked: Option<usize>) -> Result<(usize, Option<String>), Failure> {
    let own = loaded.model.config().max_position_embeddings;
    match asked {
        Some(0) => return Ok((own, None)),
        Some(asked) if asked > own => {
            let note = format!("note: --ctx-size {asked} is more than the model's context of {own}");
            return Ok((own, Some(note)));
        }
        Some(asked) => return Ok((asked, None)),
        None => {}
    }
    let Some(free) = free(loaded) else { return Ok((own, None)) };
    let held = held(free, loaded.model.cache_size()?);
    if held >= own {
        return Ok((own, None));
    }
    let note = format!(
        "note: the context is {held} of the model's {own} tokens: keys and values of more may not fit into the {:.1} GB of memory \
         that are free (--ctx-size chooses another)",
        free as f64 / 1e9
    );
    Ok((held, Some(note)))
}

/// Bytes that a cache may take.
fn free(loaded: &Loaded) -> Option<u64> {
    match loaded.model.device() {
        Device::Cpu(_) => Some(memory::available_bytes()?.saturating_sub(memory::mapped_bytes())),
        Device::Gpu(gpu) => {
            // A tenth is for activations and others.
            let total = gpu.total_memory()? as u64 / 10 * 9;
            let weights = loaded.checkpoint.tensors().iter().map(|tensor| tensor.bytes.len() as u64).sum();
            Some(total.saturating_sub(weights))
        }
    }
}

/// Tokens for which there is room in four fifths of `free` bytes, in steps of [`LEAST`].
fn held(free: u64, size: CacheSize) -> usize {
    let windows = size.windowed.saturating_mul(size.window) as u64;
    let room = (free / 5 * 4).saturating_sub(size.fixed as u64).saturating_sub(windows);
    // A cache that is full is replaced by one of twice its size.
    let tokens = room.checked_div(2 * size.per_token as u64).unwrap_or(u64::MAX);
    let steps = usize::try_from(tokens).unwrap_or(usize::MAX) / LEAST;
    steps.max(1).saturating_mul(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_memory_holds_while_the_cache_grows() {
        let mut size = CacheSize::default();
        size.per_token = 32 << 10;
        // 2 GB of keys and values, and as many again while they are copied: 4/5 of 5 GiB.
        assert_eq!(held(5 << 30, size), 1 << 16);
        size.fixed = 1 << 30;
        assert_eq!(held(5 << 30, size), 48 << 10);
        (size.windowed, size.window) = (1 << 20, 512);
        assert_eq!(held(5 << 30, size), 40 << 10);
        assert_eq!(held(0, size), LEAST);
        assert_eq!(held(1 << 30, CacheSize::default()), usize::MAX / LEAST * LEAST);
    }
}
