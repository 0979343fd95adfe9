mod chunked;
mod recurrent;
#[cfg(test)]
mod tests;

use super::{Dims, Form, GatedDeltaRule, policy};
use crate::Cpu;
use crate::scan::Scan;
use crate::simd::math;
#[cfg(target_arch = "x86_64")]
use crate::simd::tiles::TileUnit;
use chunked::Chunked;
use recurrent::Recurrent;
use std::ops::Range;

pub(super) use chunked::CHUNK;

/// With fewer, a thread with one more than the others would make all wait for longer than is saved.
const KEY_HEADS_PER_THREAD: usize = 4;

/// The operands in f32, as the module says.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub decay: Decay<'a>,
    pub beta: &'a [f32],
    pub dims: Dims,
    pub params: &'a GatedDeltaRule,
    pub slots: Option<&'a [u32]>,
}

/// The decays.
#[derive(Clone, Copy)]
pub(super) enum Decay<'a> {
    /// `log_decay`, `[T, Hv]`.
    Heads(&'a [f32]),
    /// `exp(log_decay)`, `[T, Hv, Dk]`.
    Channels(&'a [f32]),
}

impl<'a> Decay<'a> {
    /// `values` are logarithms of decays, or, per channel, decays.
    pub fn new(values: &'a [f32], per_channel: bool) -> Self {
        if per_channel { Self::Channels(values) } else { Self::Heads(values) }
    }
}

/// Makes decays per channel of their logarithms.
pub(super) fn exponentiate(cpu: &Cpu, log_decay: &mut [f32], dims: Dims) {
    /// Simple operations per element.
    const COST: usize = 16;
    let width = dims.value_heads * dims.key_dim;
    cpu.for_each_rows(log_decay, width, COST * width, |_, rows| {
        rows.iter_mut().for_each(|x| *x = math::exp(*x));
    });
}

/// True if sequences of so many tokens are computed in chunks that round what the state is
/// multiplied with, and the state for that, unless decays are per channel.
pub(super) fn rounds(cpu: &Cpu, params: &GatedDeltaRule, tokens: usize) -> bool {
    let chunks = policy::form(params.form, tokens) == Form::Chunked;
    chunks && cpu.isa().has_tiles() && !params.exact
}

/// The operands of a value head's step for one token.
#[derive(Clone, Copy)]
pub(super) struct Token<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// 1 where each channel has its own.
    pub decay: f32,
    /// Those of the channels, if they have their own.
    pub channels: &'a [f32],
    pub beta: f32,
}

impl Problem<'_> {
    /// Computes `y` and the last state.
    pub fn run(&self, cpu: &Cpu, sequences: &[Range<usize>], y: &mut [f32], state: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if let Some(unit) = cpu.isa().tiles().filter(|_| !self.params.exact && !self.per_channel()) {
            return self.run_by(cpu, sequences, (y, state), |chunked| unit.dispatch(cpu.isa(), chunked));
        }
        self.run_by(cpu, sequences, (y, state), |chunked| cpu.isa().dispatch(chunked));
    }

    /// One piece of work is one head of one sequence, or in chunks, which are computed by `chunks`,
    /// the heads that read one key head, where there are enough of these for all threads.
    fn run_by(
        &self,
        cpu: &Cpu,
        sequences: &[Range<usize>],
        (y, state): (&mut [f32], &mut [f32]),
        chunks: impl Fn(Chunked<'_, '_, '_>) + Sync + Send,
    ) {
        let Dims { key_heads, key_dim, value_heads, value_dim } = self.dims;
        let width = value_heads * value_dim;
        let scan = Scan { sequences, width, block: value_dim, state: key_dim, slots: self.slots };
        let GatedDeltaRule { form, head_map, .. } = *self.params;
        let filled = sequences.iter().filter(|tokens| !tokens.is_empty()).count();
        let together = filled * key_heads >= KEY_HEADS_PER_THREAD * cpu.threads();
        let key = |head| if together { self.dims.key_head(head_map, head) } else { head };
        // The state of an output is decayed, read and updated, by fused operations that do not wait
        // for memory.
        scan.run_together(cpu, key_dim * 3 / 4, y, state, key, |heads| {
            match policy::form(form, heads[0].tokens.len()) {
                Form::Chunked => chunks(Chunked { problem: self, heads }),
                _ => {
                    heads.into_iter().for_each(|piece| cpu.isa().dispatch(Recurrent { problem: self, piece }))
                }
            }
        });
    }

    /// True if each channel has a decay of its own.
    pub fn per_channel(&self) -> bool {
        matches!(self.decay, Decay::Channels(_))
    }

    #[inline(always)]
    pub(super) fn token(&self, t: usize, head: usize) -> Token<'_> {
        let Dims { key_heads, key_dim, value_heads, value_dim } = self.dims;
        let key = (t * key_heads + self.dims.key_head(self.params.head_map, head)) * key_dim;
        let gate = t * value_heads + head;
        let (decay, channels) = match self.decay {
            Decay::Heads(log_decay) => (math::exp(log_decay[gate]), &[][..]),
            Decay::Channels(decays) => (1.0, &decays[gate * key_dim..(gate + 1) * key_dim]),
        };
        Token {
            q: &self.q[key..key + key_dim],
            k: &self.k[key..key + key_dim],
            v: &self.v[gate * value_dim..(gate + 1) * value_dim],
            decay,
            channels,
            beta: self.beta[gate],
        }
    }
}
