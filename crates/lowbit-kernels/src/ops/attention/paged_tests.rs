//! Attention over pages against the reference, and each sequence and token against itself alone.

use super::reference::Operands;
use super::{AttentionParams, attention_paged};
use crate::ops::cache_rows::CacheType;
use crate::ops::pages::{PAGE_TOKENS, Pages};
use crate::ops::testing::{FLOATS, assert_close, device, devices, fetched, tensor};
use crate::{Device, Tensor};
use lowbit_formats::{DType, FloatType};
use numcheck::Random;

const F32: FloatType = FloatType::F32;

#[derive(Clone, Copy, Debug)]
struct Case {
    query_heads: usize,
    heads: usize,
    width: usize,
    value_width: usize,
    window: Option<usize>,
    sinks: bool,
    softcap: Option<f32>,
    /// Of q and of the pages.
    dtypes: (FloatType, CacheType),
}

const CASE: Case = Case {
    query_heads: 6,
    heads: 2,
    width: 20,
    value_width: 13,
    window: None,
    sinks: false,
    softcap: None,
    dtypes: (F32, CacheType::Float(F32)),
};

/// One sequence: its keys and values in f32, of `[Hkv, capacity, width]`, NaN past its last
/// position; its queries; and the positions of its tokens.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    positions: Vec<u32>,
    pages: usize,
}

impl Case {
    fn params(&self) -> AttentionParams {
        let Self { window: sliding_window, softcap, .. } = *self;
        AttentionParams { sliding_window, softcap, exact: true, ..AttentionParams::causal(0.3) }
    }

    fn sequence(&self, random: &mut Random, positions: &[u32]) -> Sequence {
        let last = positions.iter().max().map_or(0, |&position| position as usize);
        let pages = last / PAGE_TOKENS + 1;
        let capacity = pages * PAGE_TOKENS;
        let (dtype, cache) = self.dtypes;
        let mut numbers = |count: usize| random.normal(count, 1.5);
        let q = numbers(positions.len() * self.query_heads * self.width);
        let q = q.into_iter().map(|x| dtype.round(x)).collect();
        let mut cached = |width: usize| {
            let x = numbers(self.heads * capacity * width);
            let mut x = super::tests::cached(
                &x,
                &[self.heads, capacity, width],
                cache,
                &crate::ops::testing::device(),
            )
            .1;
            for (i, x) in x.iter_mut().enumerate() {
                if i / width % capacity > last {
                    *x = f32::NAN;
                }
            }
            x
        };
        let (k, v) = (cached(self.width), cached(self.value_width));
        Sequence { q, k, v, positions: positions.to_vec(), pages }
    }

    /// The rows of all sequences, in a pool whose pages are in the order of `seed`.
    fn run(&self, sequences: &[&Sequence], seed: u64, device: &Device) -> Tensor {
        let mut random = Random::new(seed);
        let used: usize = sequences.iter().map(|sequence| sequence.pages).sum();
        let count = used + 1 + random.below(4);
        let columns = sequences.iter().map(|sequence| sequence.pages).max().unwrap_or(0) + random.below(3);
        let mut free: Vec<u32> = (0..count as u32).collect();
        // Entries behind a sequence's pages are not read.
        let mut table = vec![u32::MAX; sequences.len() * columns];
        let mut pools = [self.width, self.value_width]
            .map(|width| (width, vec![f32::NAN; count * self.heads * PAGE_TOKENS * width]));
        for (s, sequence) in sequences.iter().enumerate() {
            for column in 0..sequence.pages {
                let page = free.swap_remove(random.below(free.len()));
                table[s * columns + column] = page;
                for ((width, pool), x) in pools.iter_mut().zip([&sequence.k, &sequence.v]) {
                    let size = PAGE_TOKENS * *width;
                    for head in 0..self.heads {
                        let from = (head * sequence.pages + column) * size;
                        let to = (page as usize * self.heads + head) * size;
                        pool[to..to + size].copy_from_slice(&x[from..from + size]);
                    }
                }
            }
        }
        let (dtype, cache) = self.dtypes;
        let [keys, values] = pools.map(|(width, pool)| {
            super::tests::cached(&pool, &[count, self.heads, PAGE_TOKENS, width], cache, device).0
        });
        let table = Tensor::new(&table, &[sequences.len(), columns], device).unwrap();
        let positions: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.positions.clone()).collect();
        let q: Vec<f32> = sequences.iter().flat_map(|sequence| sequence.q.clone()).collect();
        let q = tensor(&q, &[positions.len(), self.query_heads, self.width], dtype, device).0;
        let at = Tensor::new(&positions, &[positions.len()], device).unwrap();
        let sinks = self.sinks.then(|| Tensor::new(&self.sinks(), &[self.query_heads], device).unwrap());
        let pages = Pages { keys: &keys, values: &values, table: &table };
        fetched(&attention_paged(&q, pages, &at, sinks.as_ref(), &self.params()).unwrap())
    }

    /// Far below the scores, among them and above them.
    fn sinks(&self) -> Vec<f32> {
        let all = (0..self.query_heads).map(|head| (head % 5) as f32 * 4.0 - 8.0);
        if self.sinks { all.collect() } else { vec![] }
    }

    /// The type that weights are rounded to on a GPU.
    #[cfg(feature = "gpu")]
    fn rounded(&self, tokens: usize, gpu: &crate::gpu::Gpu) -> Option<FloatType> {
        let Self { query_heads, heads, width, value_width, .. } = *self;
        let sizes = [query_heads / heads, heads, tokens, width, value_width];
        super::gpu::rounded_paged(gpu, self.dtypes, sizes, &self.params())
    }

    /// Each sequence has tokens at some positions: all together, each sequence alone and each token
    /// alone.
    fn check(&self, positions: &[&[u32]], device: &Device) {
        let mut random = Random::new(self.width as u64 + positions.len() as u64);
        let sequences: Vec<_> = positions.iter().map(|at| self.sequence(&mut random, at)).collect();
        let y = self.run(&sequences.iter().collect::<Vec<_>>(), 1, device);
        let mut first = 0;
        for (s, sequence) in sequences.iter().enumerate() {
            let Sequence { q, k, v, positions, pages } = sequence;
            let sizes = [self.query_heads, self.heads, pages * PAGE_TOKENS, self.width, self.value_width];
            let sinks = self.sinks();
            let answer = Operands { q, k, v, positions, sinks: &sinks, sizes }.attention(&self.params());
            let rows = y.rows(first, first + positions.len()).unwrap();
            let bound = |i| match device {
                Device::Cpu(_) => answer.cpu_bound(i, None),
                #[cfg(feature = "gpu")]
                Device::Gpu(gpu) => {
                    let rounded = self.rounded(y.dim(0), gpu);
                    // Keys and values of 8 bits are rounded besides, in bf16 their scales too.
                    let twice = rounded.filter(|_| self.dtypes.1 == CacheType::Int8);
                    answer.gpu_bound(i, rounded) + twice.map_or(0.0, |_| 2.0 * answer.cpu_bound(i, twice))
                }
                #[cfg(not(feature = "gpu"))]
                Device::Gpu(gpu) => match *gpu {},
            };
            let shape = [positions.len(), self.query_heads, self.value_width];
            assert_close(&rows, &shape, self.dtypes.0, &answer.y, bound);
            let alone = self.run(&[sequence], 2 + s as u64, device);
            assert_eq!(alone.bytes(), rows.bytes(), "{self:?}: sequence {s} of {positions:?} alone");
            if let (Device::Gpu(_), 2..) = (device, positions.len()) {
                for (t, &position) in positions.iter().enumerate() {
                    let row = self.query_heads * self.width;
                    let q = q[t * row..][..row].to_vec();
                    let (k, v, pages) = (k.clone(), v.clone(), *pages);
                    let token = Sequence { q, k, v, positions: vec![position], pages };
                    let alone = self.run(&[&token], 3, device);
                    let row = rows.rows(t, t + 1).unwrap();
                    assert_eq!(alone.bytes(), row.bytes(), "{self:?}: position {position} alone");
                }
            }
            first += positions.len();
        }
    }
}

/// Steps of sequences of every length around pages and parts, in every pair of types.
fn steps_on(device: &Device) {
    for dtypes in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| (dtype, cache.into()))) {
        let case = Case { dtypes, ..CASE };
        case.check(&[&[0], &[62], &[63], &[64], &[300]], device);
        Case { width: 32, value_width: 16, ..case }.check(&[&[127], &[128]], device);
    }
    CASE.check(&[&[999], &[5]], device);
    CASE.check(&[&[63]], device);
    for (dtype, width) in FLOATS.into_iter().zip([48, 64, 256]) {
        let case = Case { dtypes: (dtype, CacheType::Int8), width, value_width: width, ..CASE };
        case.check(&[&[0], &[62], &[64], &[300]], device);
        Case { window: Some(70), sinks: true, ..case }.check(&[&[127, 128], &[200, 201]], device);
    }
}

fn windows_sinks_and_caps_on(device: &Device) {
    for window in [1, 40, 64, 150] {
        let case = Case { window: Some(window), ..CASE };
        case.check(&[&[0], &[63], &[64], &[200], &[400]], device);
        Case { sinks: true, ..case }.check(&[&[127], &[191], &[1]], device);
    }
    Case { sinks: true, ..CASE }.check(&[&[3], &[700]], device);
    for softcap in [Some(50.0), Some(3.0)] {
        Case { softcap, ..CASE }.check(&[&[3], &[64], &[700]], device);
        Case { softcap, window: Some(40), sinks: true, ..CASE }.check(&[&[200], &[63]], device);
    }
}

/// As drafts are verified: tokens after each other, and in any order.
fn several_tokens_of_each_on(device: &Device) {
    CASE.check(&[&[61, 62, 63, 64], &[0, 1, 2, 3], &[258, 255, 256, 257]], device);
    Case { window: Some(70), ..CASE }.check(&[&[133, 134, 135], &[68, 69, 70]], device);
}

fn groups_of_heads_on(device: &Device) {
    for (query_heads, heads) in [(1, 1), (3, 3), (8, 1), (9, 1), (14, 2), (17, 1)] {
        Case { query_heads, heads, ..CASE }.check(&[&[70], &[200]], device);
    }
}

#[test]
fn on_the_cpu() {
    for device in devices() {
        CASE.check(&[&[0], &[62], &[63], &[64], &[300]], &device);
        Case { dtypes: (F32, FloatType::F16.into()), width: 32, value_width: 16, ..CASE }
            .check(&[&[127], &[999]], &device);
    }
    let device = device();
    steps_on(&device);
    windows_sinks_and_caps_on(&device);
    several_tokens_of_each_on(&device);
    groups_of_heads_on(&device);
}

#[cfg(feature = "gpu")]
mod on_a_gpu {
    use super::*;
    use crate::ops::testing::{gpu, host, values};

    #[test]
    fn steps() {
        steps_on(&gpu());
    }

    #[test]
    fn windows_sinks_and_caps() {
        windows_sinks_and_caps_on(&gpu());
    }

    #[test]
    fn several_tokens_of_each() {
        several_tokens_of_each_on(&gpu());
    }

    #[test]
    fn groups_of_heads() {
        groups_of_heads_on(&gpu());
    }

    /// More keys than parts of the least length have.
    #[test]
    fn long_texts() {
        CASE.check(&[&[4999], &[4095], &[4096]], &gpu());
        Case { window: Some(4500), ..CASE }.check(&[&[9000]], &gpu());
    }

    /// The kernel for steps on tensor cores: heads that it takes, groups up to 16, rows whose parts
    /// several cubes and one cube take, and windows.
    #[test]
    fn steps_on_tensor_cores() {
        let device = gpu();
        let Device::Gpu(queue) = &device else { unreachable!() };
        if !queue.target().tensor_cores() {
            return;
        }
        for (query_heads, heads, width, value_width) in [
            (4, 2, 256, 256),
            (16, 4, 128, 128),
            (14, 2, 64, 64),
            (16, 1, 256, 64),
            (12, 1, 64, 128),
            (18, 1, 64, 64),
            (16, 2, 512, 512),
        ] {
            let dtype = if query_heads == 14 { FloatType::BF16 } else { FloatType::F16 };
            let case = Case { query_heads, heads, width, value_width, dtypes: (dtype, dtype.into()), ..CASE };
            assert_eq!(case.rounded(2, queue).is_some(), query_heads / heads <= 16);
            case.check(&[&[0], &[15], &[63], &[64], &[127], &[128], &[1000], &[4097]], &device);
            case.check(&[&[61, 62, 63, 64], &[254, 255, 256, 257]], &device);
            Case { window: Some(100), ..case }.check(&[&[99], &[100], &[3000], &[255]], &device);
            Case { sinks: true, ..case }.check(&[&[5], &[700]], &device);
            Case { softcap: Some(4.0), ..case }.check(&[&[5], &[64], &[700]], &device);
            // As many tokens as leave a cube several parts each.
            let many: Vec<[u32; 1]> = (0..24).map(|i| [i * i * 2]).collect();
            case.check(&many.iter().map(|at| &at[..]).collect::<Vec<_>>(), &device);
        }
        let case = Case { query_heads: 4, heads: 1, width: 256, value_width: 256, ..CASE };
        Case { dtypes: (FloatType::F16, FloatType::F16.into()), ..case }
            .check(&[&[39_999], &[9000]], &device);
    }

    /// A position beyond the table gives NaN, and so does not touch the others' rows.
    #[test]
    fn a_wrong_position_gives_nan_in_its_rows() {
        let device = gpu();
        for (dtype, width) in [(DType::F32, 4), (DType::F16, 64)] {
            let ones = |shape: &[usize]| {
                let ones = vec![1f32; shape.iter().product()];
                let ones = Tensor::new(&ones, shape, &host(&device)).unwrap().cast(dtype).unwrap();
                ones.to_device(&device).unwrap()
            };
            let (keys, values_) = (ones(&[3, 1, 64, width]), ones(&[3, 1, 64, width]));
            let table = Tensor::new(&[0u32, 1, 2, 0, 1, 2, 9, 9], &[4, 2], &device).unwrap();
            let at = Tensor::new(&[5u32, 128, u32::MAX, 3], &[4], &device).unwrap();
            let params = AttentionParams::causal(1.0);
            let pages = Pages { keys: &keys, values: &values_, table: &table };
            let y = attention_paged(&ones(&[4, 2, width]), pages, &at, None, &params).unwrap();
            for (row, y) in values(&y).chunks(width).enumerate() {
                let wrong = [1, 2].contains(&(row / 2));
                // The last token's page is beyond the pool, and is not read.
                assert!(y.iter().all(|y| if wrong { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
            }
        }
    }

    #[test]
    fn a_replay_follows_positions_and_tables() {
        let device = gpu();
        let Device::Gpu(queue) = &device else { unreachable!() };
        let mut random = Random::new(5);
        let mut operand =
            |shape: &[usize]| tensor(&random.normal(shape.iter().product(), 1.0), shape, F32, &device).0;
        let (q, keys, values_) = (operand(&[2, 4, 16]), operand(&[9, 2, 64, 16]), operand(&[9, 2, 64, 16]));
        let mut table = Tensor::new(&[0u32; 8], &[2, 4], &device).unwrap();
        let mut at = Tensor::new(&[0u32; 2], &[2], &device).unwrap();
        let params = AttentionParams::causal(0.25);
        let mut y = None;
        let pass = queue
            .capture(|| {
                let pages = Pages { keys: &keys, values: &values_, table: &table };
                y = Some(attention_paged(&q, pages, &at, None, &params)?);
                Ok(())
            })
            .unwrap();
        let y = y.unwrap();
        for (positions, pages) in
            [([5u32, 255], [1u32, 2, 3, 4, 5, 6, 7, 8]), ([130, 0], [8, 0, 3, 1, 2, 2, 2, 2])]
        {
            table.write(&pages).unwrap();
            at.write(&positions).unwrap();
            pass.replay().unwrap();
            let pages = Pages { keys: &keys, values: &values_, table: &table };
            let want = attention_paged(&q, pages, &at, None, &params).unwrap();
            assert_eq!(values(&y), values(&want), "{positions:?}");
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let f = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let (keys, values) = (f(&[2, 3, 64, 5]), f(&[2, 3, 64, 4]));
    let table = Tensor::new(&[0u32, 1], &[1, 2], &device).unwrap();
    let params = AttentionParams::causal(1.0);
    let refused = |q: &Tensor, position: u32, sinks: Option<&Tensor>, params: AttentionParams| {
        let at = Tensor::new(&[position], &[1], &device).unwrap();
        let pages = Pages { keys: &keys, values: &values, table: &table };
        attention_paged(q, pages, &at, sinks, &params).unwrap_err().to_string()
    };
    let q = f(&[1, 6, 5]);
    assert_eq!(
        refused(&q, 128, None, params),
        "attention_paged: positions[0] is 128, but there are 128 rows to choose from"
    );
    assert_eq!(
        refused(&f(&[1, 6, 7]), 0, None, params),
        "attention_paged: q is [1, 6, 7], but keys [2, 3, 64, 5] wants heads of 5"
    );
    assert_eq!(
        refused(&f(&[1, 4, 5]), 0, None, params),
        "attention_paged: keys is [2, 3, 64, 5], but its heads must divide the 4 of q"
    );
    assert_eq!(
        refused(&q, 0, Some(&f(&[5])), params),
        "attention_paged: sinks is [5], but q [1, 6, 5] wants [6]"
    );
    assert_eq!(
        refused(&q, 0, None, AttentionParams { sliding_window: Some(0), ..params }),
        "attention_paged: sliding_window is 0, but a query sees itself at least"
    );
    assert_eq!(
        refused(&q, 0, None, AttentionParams { look_ahead: 3, ..params }),
        "attention_paged: look_ahead is 3, but keys in pages are those up to a query's own: 0 is wanted"
    );
    refused(&f(&[2, 6, 5]), 0, None, params);
}
