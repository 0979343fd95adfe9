use super::reference::Operands;
use super::*;
use crate::ops::testing::{FLOATS, assert_close, device, devices, tensor};
use lowbit_formats::{DType, FloatType};
use numcheck::Random;

/// One call's sizes; all that differ do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub query_heads: usize,
    pub heads: usize,
    pub capacity: usize,
    pub width: usize,
    pub value_width: usize,
    pub window: Option<usize>,
    /// Standard deviation of q.
    pub spread: f32,
    /// True if heads have sinks.
    pub sinks: bool,
    pub softcap: Option<f32>,
    pub look_ahead: usize,
}

pub(super) const CASE: Case = Case {
    query_heads: 6,
    heads: 2,
    capacity: 150,
    width: 20,
    value_width: 13,
    window: None,
    spread: 1.5,
    sinks: false,
    softcap: None,
    look_ahead: 0,
};

/// A cache of these values on the host's memory or a GPU's, and the values that it has.
pub(super) fn cached(
    values: &[f32],
    shape: &[usize],
    cache: CacheType,
    device: &Device,
) -> (Tensor, Vec<f32>) {
    let CacheType::Float(float) = cache else {
        let host = crate::ops::testing::device();
        let x = Tensor::new(values, shape, &host).unwrap();
        let x = crate::ops::cache_rows::encoded(CHECK, ("x", &x), cache).unwrap();
        let values = crate::ops::expand_cache(&x, DType::F32).unwrap().as_slice().unwrap().to_vec();
        return (x.to_device(device).unwrap(), values);
    };
    tensor(values, shape, float, device)
}

impl Case {
    /// Compares with the reference. Keys and values that no query sees are NaN.
    pub(super) fn check(
        &self,
        positions: &[u32],
        dtype: FloatType,
        cache: impl Into<CacheType>,
        device: &Device,
    ) {
        let cache = cache.into();
        let rounded: Option<FloatType> = match device {
            Device::Cpu(cpu) => {
                cpu::rounded(cpu, cache, positions.len() * self.query_heads / self.heads, &self.params())
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                let sizes = [self.query_heads, self.heads, self.capacity, self.width, self.value_width];
                match cache {
                    CacheType::Float(cache) => {
                        gpu::rounded(gpu, [dtype, cache], sizes, positions.len(), &self.params())
                    }
                    CacheType::Int8 => {
                        let [query_heads, heads, rest @ ..] = sizes;
                        let rows = positions.len() * query_heads / heads;
                        let sizes = [rows, heads, rest[0], rest[1], rest[2]];
                        gpu::rounded_int8(gpu, dtype, sizes, &self.params())
                    }
                }
            }
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        self.check_each(positions, (dtype, cache), device, |[q, k, v, at], sinks| {
            vec![(attention(q, k, v, at, sinks, &self.params()).unwrap(), rounded)]
        });
    }

    pub(super) fn params(&self) -> AttentionParams {
        let Self { window: sliding_window, softcap, look_ahead, .. } = *self;
        AttentionParams { sliding_window, softcap, look_ahead, ..AttentionParams::causal(0.3) }
    }

    /// Compares all that `run` makes of q, k, v, positions and sinks with the reference, each with
    /// the type that weights are rounded to.
    pub(super) fn check_each(
        &self,
        positions: &[u32],
        (dtype, cache_type): (FloatType, CacheType),
        device: &Device,
        run: impl Fn([&Tensor; 4], Option<&Tensor>) -> Vec<(Tensor, Option<FloatType>)>,
    ) {
        let host = &if let Device::Cpu(_) = device { device.clone() } else { crate::ops::testing::device() };
        let mut random = Random::new(positions.len() as u64 + self.width as u64);
        let mut numbers = |shape: &[usize], spread| random.normal(shape.iter().product(), spread);
        let params = self.params();
        let seen: Vec<bool> = (0..self.capacity)
            .map(|j| positions.iter().any(|&position| params.visible(position, self.capacity).contains(&j)))
            .collect();
        let q_shape = [positions.len(), self.query_heads, self.width];
        let (q, qs) = tensor(&numbers(&q_shape, self.spread), &q_shape, dtype, host);
        let mut cache = |width: usize| {
            let shape = [self.heads, self.capacity, width];
            let mut values = numbers(&shape, 1.5);
            for (i, x) in values.iter_mut().enumerate() {
                *x = if seen[i / width % self.capacity] { *x } else { f32::NAN };
            }
            cached(&values, &shape, cache_type, host)
        };
        let ((k, ks), (v, vs)) = (cache(self.width), cache(self.value_width));
        let at = Tensor::new(positions, &[positions.len()], device).unwrap();
        // Far below the scores, among them and above them.
        let sinks: Vec<f32> = (0..self.query_heads).map(|head| (head % 5) as f32 * 4.0 - 8.0).collect();
        let sinks = if self.sinks { sinks } else { vec![] };
        let on_device = self.sinks.then(|| Tensor::new(&sinks, &[sinks.len()], device).unwrap());
        let [q, k, v] = [q, k, v].map(|x| x.to_device(device).unwrap());
        let sizes = [self.query_heads, self.heads, self.capacity, self.width, self.value_width];
        let operands = Operands { q: &qs, k: &ks, v: &vs, positions, sinks: &sinks, sizes };
        let answer = operands.attention(&params);
        let shape = [positions.len(), self.query_heads, self.value_width];
        for (y, rounded) in run([&q, &k, &v, &at], on_device.as_ref()) {
            let bound = |i| match device {
                Device::Cpu(_) => answer.cpu_bound(i, rounded),
                #[cfg(feature = "gpu")]
                // Keys and values of 8 bits are rounded besides, in bf16 their scales too.
                Device::Gpu(_) if cache_type == CacheType::Int8 => {
                    answer.gpu_bound(i, rounded) + rounded.map_or(0.0, |_| 2.0 * answer.cpu_bound(i, rounded))
                }
                #[cfg(feature = "gpu")]
                Device::Gpu(_) => answer.gpu_bound(i, rounded),
                #[cfg(not(feature = "gpu"))]
                Device::Gpu(gpu) => match *gpu {},
            };
            assert_close(&y.to_device(host).unwrap(), &shape, dtype, &answer.y, bound);
        }
    }
}

#[test]
fn every_type_and_a_prefill_that_crosses_blocks() {
    for device in devices() {
        for dtype in FLOATS {
            for cache in FLOATS {
                let positions: Vec<u32> = (11..11 + 37).collect();
                CASE.check(&positions, dtype, cache, &device);
                CASE.check(&[70], dtype, cache, &device);
            }
        }
    }
}

#[test]
fn exact_attention_is_in_f32_on_every_cpu() {
    for device in devices().into_iter().filter(|device| matches!(device, Device::Cpu(_))) {
        let positions: Vec<u32> = (11..11 + 37).collect();
        for case in [CASE, Case { sinks: true, ..CASE }] {
            let types = (FloatType::F32, FloatType::F16.into());
            case.check_each(&positions, types, &device, |[q, k, v, at], sinks| {
                let params = AttentionParams { exact: true, ..case.params() };
                vec![(attention(q, k, v, at, sinks, &params).unwrap(), None)]
            });
        }
    }
}

#[test]
fn head_sizes_around_the_lanes() {
    for device in devices() {
        for (width, value_width) in
            [(1, 8), (7, 16), (8, 17), (15, 1), (16, 9), (17, 15), (33, 40), (65, 7), (512, 512)]
        {
            let case = Case { width, value_width, ..CASE };
            case.check(&(0..35).collect::<Vec<_>>(), FloatType::F32, FloatType::F32, &device);
            case.check(&[90, 91], FloatType::F32, FloatType::F16, &device);
        }
    }
}

#[test]
fn groups_of_heads() {
    for device in devices() {
        for (query_heads, heads) in [(1, 1), (3, 3), (4, 1), (5, 1), (9, 3), (14, 2), (16, 1)] {
            let case = Case { query_heads, heads, ..CASE };
            case.check(&[120], FloatType::F32, FloatType::F32, &device);
            case.check(&(40..61).collect::<Vec<_>>(), FloatType::F32, FloatType::F32, &device);
        }
    }
}

#[test]
fn windows_and_positions_in_any_order() {
    for device in devices() {
        for window in [1, 2, 15, 16, 33, 64, 500] {
            let case = Case { window: Some(window), ..CASE };
            case.check(&(60..99).collect::<Vec<_>>(), FloatType::F32, FloatType::F32, &device);
            case.check(&[149], FloatType::F32, FloatType::F32, &device);
        }
        CASE.check(&[99, 3, 50, 3, 0, 149], FloatType::F32, FloatType::F32, &device);
        let case = Case { window: Some(20), ..CASE };
        case.check(&[99, 3, 50, 3, 0, 149], FloatType::F32, FloatType::F32, &device);
    }
}

/// One token whose heads are whole vectors: keys and values are streamed.
#[test]
fn decode_steps_of_whole_vectors() {
    for device in devices() {
        // Vectors below, at and above a tile of four, of 8 lanes and of 16; a tile's heads and what
        // they leave over.
        for (width, value_width) in [(16, 32), (32, 16), (64, 80), (80, 64), (128, 96), (48, 144)] {
            let case = Case { query_heads: 12, heads: 2, width, value_width, ..CASE };
            // Keys below, at and above the four places that they are read from, and above a tile of
            // 64.
            for position in [0, 1, 2, 3, 4, 62, 63, 64, 65, 67, 130] {
                case.check(&[position], FloatType::F32, FloatType::F16, &device);
            }
            for (dtype, cache) in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| (dtype, cache))) {
                case.check(&[149], dtype, cache, &device);
            }
            let window = Case { window: Some(70), ..case };
            window.check(&[140], FloatType::F32, FloatType::BF16, &device);
        }
        for query_heads in [1, 2, 3, 4, 5, 7, 8, 9, 16] {
            let case = Case { query_heads, heads: 1, width: 64, value_width: 32, ..CASE };
            case.check(&[99], FloatType::F32, FloatType::F32, &device);
        }
        // Cut for two threads, with an odd number of key heads too.
        let long = Case { capacity: 2100, query_heads: 6, heads: 3, width: 32, value_width: 16, ..CASE };
        long.check(&[2077], FloatType::F32, FloatType::F16, &device);
        let spread = Case { spread: 1000.0, ..long };
        spread.check(&[2000], FloatType::F32, FloatType::F16, &device);
    }
}

#[test]
fn a_streamed_nan_reaches_its_own_head_only() {
    for device in devices() {
        let (mut q, mut k) = (vec![1f32; 4 * 16], vec![1f32; 2 * 80 * 16]);
        let mut v = k.clone();
        q[16] = f32::NAN;
        // Beyond the position; and seen by the second key head alone.
        k[79 * 16] = f32::NAN;
        v[79 * 16] = f32::NAN;
        v[(80 + 70) * 16 + 3] = f32::NAN;
        let tensor = |x: &[f32], shape: &[usize]| Tensor::new(x, shape, &device).unwrap();
        let (q, k, v) = (tensor(&q, &[1, 4, 16]), tensor(&k, &[2, 80, 16]), tensor(&v, &[2, 80, 16]));
        let at = Tensor::new(&[78u32], &[1], &device).unwrap();
        let params = AttentionParams::causal(1.0);
        let y = attention(&q, &k, &v, &at, None, &params).unwrap();
        for (i, y) in y.as_slice::<f32>().unwrap().iter().enumerate() {
            let nan = i / 16 == 1 || i / 16 >= 2 && i % 16 == 3;
            assert!(if nan { y.is_nan() } else { (y - 1.0).abs() < 1e-6 }, "{i}: {y}");
        }
    }
}

#[test]
fn long_contexts_are_split() {
    for device in devices() {
        let case = Case { capacity: 5000, query_heads: 3, heads: 1, ..CASE };
        case.check(&[4321], FloatType::F32, FloatType::BF16, &device);
        case.check(&[4321, 4322], FloatType::F32, FloatType::F32, &device);
    }
}

#[test]
fn large_scores_do_not_overflow() {
    for device in devices() {
        // Scores reach thousands: without the maximum taken off, exp overflows.
        let case = Case { spread: 1000.0, ..CASE };
        case.check(&(0..70).collect::<Vec<_>>(), FloatType::F32, FloatType::F32, &device);
    }
}

#[test]
fn nan_reaches_its_own_rows_only() {
    for device in devices() {
        let ones =
            |shape: &[usize]| Tensor::new(&vec![1f32; shape.iter().product()], shape, &device).unwrap();
        let (mut q, k, v) = (ones(&[3, 2, 4]), ones(&[1, 8, 4]), ones(&[1, 8, 5]));
        q.as_mut_slice::<f32>().unwrap()[3 * 4] = f32::NAN;
        let at = Tensor::new(&[2u32, 3, 4], &[3], &device).unwrap();
        let params = AttentionParams::causal(1.0);
        let y = attention(&q, &k, &v, &at, None, &params).unwrap();
        for (row, y) in y.as_slice::<f32>().unwrap().chunks(5).enumerate() {
            assert!(y.iter().all(|y| if row == 3 { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
        }
        // A later token's key and value: rows before it are in the same block, but do not see it.
        let (mut k, mut v) = (k, v);
        k.as_mut_slice::<f32>().unwrap()[4 * 4] = f32::NAN;
        v.as_mut_slice::<f32>().unwrap()[4 * 5] = f32::NAN;
        let y = attention(&ones(&[3, 2, 4]), &k, &v, &at, None, &params).unwrap();
        for (row, y) in y.as_slice::<f32>().unwrap().chunks(5).enumerate() {
            assert!(y.iter().all(|y| if row >= 4 { y.is_nan() } else { *y == 1.0 }), "{row}: {y:?}");
        }
        let at = at.rows(0, 0).unwrap();
        let none = attention(&q.rows(0, 0).unwrap(), &k, &v, &at, None, &params).unwrap();
        assert_eq!(none.shape(), [0, 2, 5]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let f = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let at = |ids: &[u32]| Tensor::new(ids, &[ids.len()], &device).unwrap();
    let params = AttentionParams::causal(1.0);
    let (q, k, v) = (f(&[2, 6, 5]), f(&[3, 7, 5]), f(&[3, 7, 4]));
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, at: &Tensor| {
        attention(q, k, v, at, None, &params).unwrap_err().to_string()
    };
    let two = at(&[0, 1]);
    assert_eq!(
        refused(&q, &k, &v, &at(&[0, 7])),
        "attention: positions[1] is 7, but there are 7 rows to choose from"
    );
    assert_eq!(
        refused(&q, &f(&[3, 7, 6]), &v, &two),
        "attention: k is [3, 7, 6], but q [2, 6, 5] wants [3, 7, 5]"
    );
    assert_eq!(
        refused(&q, &f(&[4, 7, 5]), &v, &two),
        "attention: k is [4, 7, 5], but its heads must divide the 6 of q"
    );
    assert_eq!(
        refused(&q, &k, &f(&[3, 8, 4]), &two),
        "attention: v is [3, 8, 4], but k [3, 7, 5] wants [3, 7, 4]"
    );
    assert_eq!(refused(&q, &k, &v, &at(&[0])), "attention: positions is [1], but q [2, 6, 5] wants [2]");
    let half = Tensor::zeros(&[3, 7, 4], DType::F16, &device);
    assert_eq!(refused(&q, &k, &half, &two), "attention: v is f16, but f32 is wanted");
    refused(&f(&[2, 6, 0]), &f(&[3, 7, 0]), &v, &two);
    refused(&q, &f(&[0, 7, 5]), &v, &two);
    refused(&q, &k, &v, &f(&[2]));
    let error = |params| attention(&q, &k, &v, &two, None, &params).unwrap_err().to_string();
    assert_eq!(
        error(AttentionParams { sliding_window: Some(0), ..params }),
        "attention: sliding_window is 0, but a query sees itself at least"
    );
    assert_eq!(
        error(AttentionParams { scale: f32::NAN, ..params }),
        "attention: scale is NaN, but a finite number is wanted"
    );
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(
            error(AttentionParams { softcap: Some(cap), ..params }),
            format!("attention: softcap is {cap}, but a finite number above 0 is wanted")
        );
    }
    let sinks = |sinks: &Tensor| attention(&q, &k, &v, &two, Some(sinks), &params).unwrap_err().to_string();
    assert_eq!(sinks(&f(&[3])), "attention: sinks is [3], but q [2, 6, 5] wants [6]");
    let half = Tensor::zeros(&[6], DType::F16, &device);
    assert_eq!(sinks(&half), "attention: sinks is f16, but f32 is wanted");
}

/// By every way through the op on a CPU: blocks of tokens and single ones, keys in one stretch and
/// in several.
#[test]
fn sinks_are_in_the_denominator() {
    for device in devices() {
        let case = Case { sinks: true, ..CASE };
        for (dtype, cache) in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| (dtype, cache))) {
            case.check(&(11..48).collect::<Vec<_>>(), dtype, cache, &device);
            case.check(&[70], dtype, cache, &device);
        }
        let case = Case { width: 64, value_width: 64, window: Some(20), ..case };
        case.check(&[99, 3, 50, 3, 0, 149], FloatType::F32, FloatType::BF16, &device);
        case.check(&[149], FloatType::F32, FloatType::BF16, &device);
        let long = Case { capacity: 2100, window: None, ..case };
        long.check(&[2077], FloatType::F32, FloatType::F16, &device);
        long.check(&[2077, 2078], FloatType::F32, FloatType::F32, &device);
    }
}

#[test]
fn a_sink_of_minus_infinity_is_none_and_a_great_one_takes_all() {
    for device in devices() {
        let mut random = Random::new(9);
        let mut float = |shape: &[usize]| {
            Tensor::new(&random.normal(shape.iter().product(), 1.0), shape, &device).unwrap()
        };
        let (q, k, v) = (float(&[3, 4, 16]), float(&[2, 40, 16]), float(&[2, 40, 8]));
        let at = Tensor::new(&[5u32, 6, 39], &[3], &device).unwrap();
        let params = CASE.params();
        let with = |sink: f32| {
            let sinks = Tensor::new(&[sink; 4], &[4], &device).unwrap();
            attention(&q, &k, &v, &at, Some(&sinks), &params).unwrap()
        };
        let none = attention(&q, &k, &v, &at, None, &params).unwrap();
        assert_eq!(with(f32::NEG_INFINITY).as_slice::<f32>().unwrap(), none.as_slice::<f32>().unwrap());
        assert!(with(1e30).as_slice::<f32>().unwrap().iter().all(|&y| y == 0.0));
        assert!(with(f32::NAN).as_slice::<f32>().unwrap().iter().all(|y| y.is_nan()));
    }
}

/// Scores far below the cap, around it and far above; by every way through the op on a CPU.
#[test]
fn scores_are_capped() {
    for device in devices() {
        for (softcap, spread) in [(50.0, 1.5), (4.0, 1.5), (0.5, 1.5), (3.0, 1000.0)] {
            let case = Case { softcap: Some(softcap), spread, ..CASE };
            for cache in FLOATS {
                case.check(&(11..48).collect::<Vec<_>>(), FloatType::F32, cache, &device);
                case.check(&[70], FloatType::F32, cache, &device);
            }
            let case = Case { width: 64, value_width: 64, window: Some(20), sinks: true, ..case };
            case.check(&[99, 3, 50, 3, 0, 149], FloatType::F32, FloatType::BF16, &device);
            case.check(&[149], FloatType::F32, FloatType::BF16, &device);
            let long = Case { capacity: 2100, window: None, sinks: false, ..case };
            long.check(&[2077], FloatType::F32, FloatType::F16, &device);
            long.check(&[2077, 2078], FloatType::F32, FloatType::F32, &device);
        }
    }
}

/// All keys, and a few on both sides: the last ones are beyond k's end.
#[test]
fn queries_see_keys_after_their_own() {
    for device in devices() {
        for (look_ahead, window) in [(1, None), (40, None), (usize::MAX, None), (16, Some(17)), (64, Some(3))]
        {
            let case = Case { look_ahead, window, ..CASE };
            for cache in FLOATS {
                case.check(&(0..150).collect::<Vec<_>>(), FloatType::F32, cache, &device);
                case.check(&[70], FloatType::F32, cache, &device);
            }
            let case = Case { width: 64, value_width: 32, ..case };
            case.check(&[149, 3, 50, 3, 0, 120], FloatType::F32, FloatType::F16, &device);
            case.check(&[3], FloatType::F32, FloatType::F32, &device);
        }
    }
}
