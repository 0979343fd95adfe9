//! A task is a key head of a sequence, with the value heads that read it one after the other. A
//! head runs forward once and keeps its state every [`CHUNK`] tokens; then, from the last chunk to
//! the first, it computes the chunk's states anew and goes back through them.

use crate::Cpu;
use crate::ops::gated_delta_rule::Dims;
use crate::ops::gated_delta_rule::cpu::{Problem, Token};
use crate::simd::{Kernel, Simd, slices::dot};
use std::ops::Range;

/// Tokens between two checkpoints: about the root of the length of a training sample, which needs
/// least memory.
pub(super) const CHUNK: usize = 32;

/// The destination of the gradients, as the op says; zero.
pub(super) struct Gradients<'a> {
    pub dq: &'a mut [f32],
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
    pub dlog_decay: &'a mut [f32],
    pub dbeta: &'a mut [f32],
}

/// Fills the gradients of all sequences. `state` is the one before, of each sequence.
pub(super) fn backward(
    cpu: &Cpu,
    problem: &Problem<'_>,
    sequences: &[Range<usize>],
    (state, dy): (&[f32], &[f32]),
    gradients: Gradients<'_>,
) {
    let Dims { key_heads, key_dim, value_heads, value_dim } = problem.dims;
    let mut tasks = vec![];
    for (sequence, tokens) in sequences.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
        for key_head in 0..key_heads {
            let heads =
                (0..value_heads).filter(|&h| problem.dims.key_head(problem.params.head_map, h) == key_head);
            tasks.push(KeyHead::new((sequence, tokens.clone()), key_head, heads, problem.dims));
        }
    }
    let size = key_dim * value_dim;
    cpu.for_each(tasks.iter_mut().collect(), |task: &mut KeyHead| {
        for i in 0..task.heads.len() {
            let first = (task.sequence * value_heads + task.heads[i].head) * size;
            cpu.isa().dispatch(Head { problem, dy, state: &state[first..first + size], task, index: i });
        }
    });
    let Gradients { dq, dk, dv, dlog_decay, dbeta } = gradients;
    for task in tasks {
        for (i, t) in task.tokens.clone().enumerate() {
            let (from, to) = (i * key_dim..(i + 1) * key_dim, (t * key_heads + task.key_head) * key_dim);
            dq[to..to + key_dim].copy_from_slice(&task.dq[from.clone()]);
            dk[to..to + key_dim].copy_from_slice(&task.dk[from]);
            for head in &task.heads {
                let gate = t * value_heads + head.head;
                (dlog_decay[gate], dbeta[gate]) = (head.dlog_decay[i], head.dbeta[i]);
                let from = &head.dv[i * value_dim..(i + 1) * value_dim];
                dv[gate * value_dim..(gate + 1) * value_dim].copy_from_slice(from);
            }
        }
    }
}

/// The gradients of one key head's part of a sequence.
struct KeyHead {
    sequence: usize,
    tokens: Range<usize>,
    key_head: usize,
    dq: Vec<f32>,
    dk: Vec<f32>,
    heads: Vec<ValueHead>,
}

/// Those of a value head that reads it.
struct ValueHead {
    head: usize,
    dv: Vec<f32>,
    dlog_decay: Vec<f32>,
    dbeta: Vec<f32>,
}

impl KeyHead {
    fn new(
        (sequence, tokens): (usize, Range<usize>),
        key_head: usize,
        heads: impl Iterator<Item = usize>,
        dims: Dims,
    ) -> Self {
        let count = tokens.len();
        let zeros = |width: usize| vec![0.0; count * width];
        let value_head =
            |head| ValueHead { head, dv: zeros(dims.value_dim), dlog_decay: zeros(1), dbeta: zeros(1) };
        let heads = heads.map(value_head).collect();
        Self { sequence, tokens, key_head, dq: zeros(dims.key_dim), dk: zeros(dims.key_dim), heads }
    }
}

/// One value head of a sequence; dq and dk are added to.
struct Head<'a> {
    problem: &'a Problem<'a>,
    dy: &'a [f32],
    /// `[Dk, Dv]`, before the first token.
    state: &'a [f32],
    task: &'a mut KeyHead,
    index: usize,
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { problem, dy, state, task, index } = self;
        let Dims { key_dim, value_heads, value_dim, .. } = problem.dims;
        let size = key_dim * value_dim;
        if size == 0 {
            return;
        }
        let head = task.heads[index].head;
        let tokens: Vec<Token> = task.tokens.clone().map(|t| problem.token(t, head)).collect();
        // The state before each chunk.
        let mut checkpoints = vec![0.0; tokens.len().div_ceil(CHUNK) * size];
        checkpoints[..size].copy_from_slice(state);
        let mut step = Step { simd, value_dim, scale: problem.params.scale, delta: vec![0.0; value_dim] };
        for (i, chunk) in tokens.chunks(CHUNK).enumerate() {
            let (done, next) = checkpoints.split_at_mut((i + 1) * size);
            if let Some(next) = next.get_mut(..size) {
                next.copy_from_slice(&done[i * size..]);
                chunk.iter().for_each(|token| step.forward(token, next));
            }
        }
        let mut gradient = vec![0.0; size];
        // The state before each token of a chunk, and what is kept of that.
        let mut states = vec![0.0; CHUNK.min(tokens.len()) * size];
        for (i, chunk) in tokens.chunks(CHUNK).enumerate().rev() {
            states[..size].copy_from_slice(&checkpoints[i * size..][..size]);
            for (j, token) in chunk.iter().enumerate() {
                let (done, next) = states.split_at_mut((j + 1) * size);
                if let (true, Some(next)) = (j + 1 < chunk.len(), next.get_mut(..size)) {
                    next.copy_from_slice(&done[j * size..]);
                    step.forward(token, next);
                }
            }
            for (j, token) in chunk.iter().enumerate().rev() {
                let at = i * CHUNK + j;
                let dy_at = ((task.tokens.start + at) * value_heads + head) * value_dim;
                let value_head = &mut task.heads[index];
                let out = Out {
                    dq: &mut task.dq[at * key_dim..(at + 1) * key_dim],
                    dk: &mut task.dk[at * key_dim..(at + 1) * key_dim],
                    dv: &mut value_head.dv[at * value_dim..(at + 1) * value_dim],
                };
                let state = &mut states[j * size..(j + 1) * size];
                let dy = &dy[dy_at..dy_at + value_dim];
                let (dlog_decay, dbeta) = step.backward((token, dy), state, &mut gradient, out);
                (value_head.dlog_decay[at], value_head.dbeta[at]) = (dlog_decay, dbeta);
            }
        }
    }
}

/// The destination of a token's gradients: dq and dk are added to.
struct Out<'a> {
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

/// A token's step, forward and back.
struct Step<S> {
    simd: S,
    value_dim: usize,
    scale: f32,
    delta: Vec<f32>,
}

impl<S: Simd> Step<S> {
    /// Decays the state, and fills `delta` with `v - kept^T k`, where `kept` is the decayed state.
    #[inline(always)]
    fn keep(&mut self, token: &Token<'_>, state: &mut [f32]) {
        self.delta.copy_from_slice(token.v);
        for (row, &k) in state.chunks_exact_mut(self.value_dim).zip(token.k) {
            for (s, delta) in row.iter_mut().zip(&mut self.delta) {
                *s *= token.decay;
                *delta -= *s * k;
            }
        }
    }

    #[inline(always)]
    fn forward(&mut self, token: &Token<'_>, state: &mut [f32]) {
        self.keep(token, state);
        for (row, &k) in state.chunks_exact_mut(self.value_dim).zip(token.k) {
            let k = token.beta * k;
            row.iter_mut().zip(&self.delta).for_each(|(s, delta)| *s += k * delta);
        }
    }

    /// From the state before the token, which is changed, and the gradient of the one after, which
    /// becomes that of the one before. Returns dlog_decay and dbeta.
    #[inline(always)]
    fn backward(
        &mut self,
        (token, dy): (&Token<'_>, &[f32]),
        state: &mut [f32],
        gradient: &mut [f32],
        Out { dq, dk, dv }: Out<'_>,
    ) -> (f32, f32) {
        let (simd, width) = (self.simd, self.value_dim);
        self.keep(token, state);
        // S = kept + k (beta delta)^T, so that S dy = kept dy + k beta (delta . dy).
        let along = token.beta * dot(simd, &self.delta, dy);
        dv.fill(0.0);
        let rows = gradient.chunks_exact_mut(width).zip(state.chunks_exact(width));
        for ((g, s), ((&q, &k), dq)) in rows.zip(token.q.iter().zip(token.k).zip(dq)) {
            *dq += self.scale * (dot(simd, s, dy) + k * along);
            let q = self.scale * q;
            for (g, (dy, dv)) in g.iter_mut().zip(dy.iter().zip(dv.iter_mut())) {
                *g += q * dy;
                *dv += *g * k;
            }
        }
        let dbeta = dot(simd, dv, &self.delta);
        dv.iter_mut().for_each(|dv| *dv *= token.beta);
        let mut dlog_decay = 0.0;
        let rows = gradient.chunks_exact_mut(width).zip(state.chunks_exact(width));
        for ((g, s), (&k, dk)) in rows.zip(token.k.iter().zip(dk)) {
            *dk += token.beta * dot(simd, g, &self.delta) - dot(simd, s, dv);
            g.iter_mut().zip(dv.iter()).for_each(|(g, dv)| *g -= k * dv);
            dlog_decay += dot(simd, g, s);
            g.iter_mut().for_each(|g| *g *= token.decay);
        }
        (dlog_decay, dbeta)
    }
}
