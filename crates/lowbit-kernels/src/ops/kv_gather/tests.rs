use super::*;
use crate::ops::kv_append;
use crate::ops::testing::{FLOATS, device, devices, fetched, normal};
use lowbit_formats::DType;
use numcheck::Random;

/// `(heads, capacity, width)` and positions; widths of whole vectors and not, positions twice and
/// in any order.
const CASES: [([usize; 3], &[u32]); 5] = [
    ([3, 70, 37], &[69, 0, 12, 13, 12]),
    ([2, 33, 20], &[32, 0, 7]),
    ([5, 9, 64], &[8]),
    ([1, 1, 1], &[0, 0]),
    ([2, 4, 8], &[]),
];

/// Bit for bit what a loop takes.
fn takes_what_a_loop_takes_on(devices: &[Device]) {
    for device in devices {
        for ([heads, capacity, width], positions) in CASES {
            for dtype in FLOATS {
                let (cache, _) = normal(&mut Random::new(1), &[heads + 1, capacity, width], dtype, device);
                // A view that starts within its memory.
                let cache = cache.rows(1, heads + 1).unwrap();
                let at = Tensor::new(positions, &[positions.len()], device).unwrap();
                let y = kv_gather(&cache, &at).unwrap();
                assert_eq!((y.shape(), y.dtype()), (&[positions.len(), heads, width][..], dtype.dtype()));
                let (cache, y, row) = (fetched(&cache), fetched(&y), width * dtype.size());
                let mut want = vec![];
                for &position in positions {
                    for head in 0..heads {
                        let start = (head * capacity + position as usize) * row;
                        want.extend_from_slice(&cache.bytes()[start..start + row]);
                    }
                }
                assert_eq!(y.bytes(), want, "[{heads}, {capacity}, {width}] {dtype:?} at {positions:?}");
            }
        }
    }
}

#[test]
fn takes_what_a_loop_takes() {
    takes_what_a_loop_takes_on(&devices());
}

/// Appended rows come back.
fn is_the_inverse_of_appending_on(device: &Device) {
    for dtype in FLOATS {
        let (x, _) = normal(&mut Random::new(2), &[4, 3, 10], dtype, device);
        let at = Tensor::new(&[5u32, 2, 6, 0], &[4], device).unwrap();
        let mut cache = Tensor::zeros(&[3, 7, 10], dtype.dtype(), device);
        kv_append(&mut cache, &x, &at).unwrap();
        assert_eq!(fetched(&kv_gather(&cache, &at).unwrap()).bytes(), fetched(&x).bytes());
    }
}

#[test]
fn is_the_inverse_of_appending() {
    is_the_inverse_of_appending_on(&device());
}

#[test]
fn nothing_comes_of_nothing() {
    let device = device();
    let at = Tensor::new(&[1u32, 2], &[2], &device).unwrap();
    for [heads, width] in [[0, 4], [2, 0]] {
        let cache = Tensor::zeros(&[heads, 3, width], DType::F16, &device);
        assert_eq!(kv_gather(&cache, &at).unwrap().shape(), [2, heads, width]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let refuse = |cache: &Tensor, at: &Tensor| kv_gather(cache, at).unwrap_err().to_string();
    let cache = zeros(&[2, 4, 3], DType::F32);
    let beyond = Tensor::new(&[3u32, 4], &[2], &device).unwrap();
    assert_eq!(refuse(&cache, &beyond), "kv_gather: positions[1] is 4, but there are 4 rows to choose from");
    assert_eq!(
        refuse(&zeros(&[4, 3], DType::F32), &beyond),
        "kv_gather: cache is [4, 3], but [Hkv, capacity, D] is wanted"
    );
    assert_eq!(
        refuse(&cache, &zeros(&[1, 1], DType::U32)),
        "kv_gather: positions is [1, 1], but [T] is wanted"
    );
    assert_eq!(refuse(&cache, &zeros(&[1], DType::F32)), "kv_gather: positions is f32, but u32 is wanted");
    assert_eq!(
        refuse(&zeros(&[2, 4, 3], DType::U32), &zeros(&[1], DType::U32)),
        "kv_gather: cache is u32, but f32, f16, bf16 or i8 is wanted"
    );
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::{gpu, values};

    #[test]
    fn takes_what_a_loop_takes() {
        takes_what_a_loop_takes_on(&[gpu()]);
    }

    #[test]
    fn is_the_inverse_of_appending() {
        is_the_inverse_of_appending_on(&gpu());
    }

    #[test]
    fn positions_beyond_the_cache_are_nan() {
        let gpu = gpu();
        for (dtype, width) in FLOATS.into_iter().flat_map(|dtype| [(dtype, 3), (dtype, 4)]) {
            let cache = Tensor::zeros(&[2, 5, width], dtype.dtype(), &gpu);
            let at = Tensor::new(&[4u32, 5, 0, u32::MAX], &[4], &gpu).unwrap();
            let nans: Vec<bool> =
                values(&kv_gather(&cache, &at).unwrap()).iter().map(|x| x.is_nan()).collect();
            let want = [false, true, false, true].map(|nan| vec![nan; 2 * width]);
            assert_eq!(nans, want.concat(), "{dtype:?} {width}");
        }
        // A cache without room has no position at all.
        let (cache, at) =
            (Tensor::zeros(&[2, 0, 3], DType::F32, &gpu), Tensor::zeros(&[1], DType::U32, &gpu));
        assert!(values(&kv_gather(&cache, &at).unwrap()).iter().all(|x| x.is_nan()));
    }
}
