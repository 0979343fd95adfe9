use super::*;
use crate::ops::testing::{FLOATS, devices, fetched};
use crate::ops::{PAGE_TOKENS, gather_pages, kv_append, kv_append_paged, kv_gather};
use half::f16;
use numcheck::Random;

/// The values of rows of bytes, as the format says.
fn decoded(bytes: &[u8], width: usize) -> Vec<f64> {
    let group = CacheType::group(width);
    let rows = bytes.chunks_exact(CacheType::Int8.row(width));
    let value = |row: &[u8], at: usize| {
        let scale = &row[width + 2 * (at / group)..][..2];
        let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f64();
        f64::from(row[at] as i8) / 128.0 * scale
    };
    rows.flat_map(|row| (0..width).map(move |at| value(row, at))).collect()
}

/// Asserts that each value of `bytes` is within half a step of `x`: of 1/120 of the group's
/// greatest magnitude at most, of which the scale has an error of 2^-11, or 2^-25 at least; and
/// that no other code of the greatest magnitude gives a group a smaller error.
fn assert_encoded(bytes: &[u8], x: &[f32], width: usize) {
    let group = CacheType::group(width);
    let all = decoded(bytes, width);
    assert_eq!(all.len(), x.len());
    for (x, y) in x.chunks(width).zip(all.chunks(width)) {
        for (x, y) in x.chunks(group).zip(y.chunks(group)) {
            let greatest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
            let step = f64::from(greatest) / 120.0 * (1.0 + 2f64.powi(-10)) + 2f64.powi(-31);
            for (&x, &y) in x.iter().zip(y) {
                let bound = step * 0.5 + f64::from(greatest) * 2f64.powi(-11) + 2f64.powi(-25);
                assert!((f64::from(x) - y).abs() <= bound, "{x} became {y}, of a step of {step}");
            }
            let error: f64 = x.iter().zip(y).map(|(&x, y)| (f64::from(x) - y).powi(2)).sum();
            let least =
                (120..=127).map(|code| squared_error(x, f16::from_f32(greatest * (128.0 / code as f32))));
            let least = least.fold(f64::INFINITY, f64::min);
            // Errors that are compared are sums of f32, of differences with an error of their own.
            let rounded = 2f64.powi(-22) * f64::from(greatest);
            let slack = 4.0 * rounded * (group as f64 * error).sqrt() + group as f64 * rounded * rounded;
            assert!(error <= least * (1.0 + 2f64.powi(-18)) + slack, "{error:e} of {x:?}, not {least:e}");
        }
    }
}

/// The squared error of a group that is rounded with this scale.
fn squared_error(x: &[f32], scale: f16) -> f64 {
    let unit = scale.to_f64() / 128.0;
    let error = |&x: &f32| {
        let x = f64::from(x);
        let code = if unit == 0.0 { 0.0 } else { (x / unit).clamp(-127.0, 127.0).round_ties_even() };
        (x - code * unit).powi(2)
    };
    x.iter().map(error).sum()
}

#[test]
fn rows_and_widths_agree() {
    for width in (16..=512).step_by(16) {
        let row = CacheType::Int8.row(width);
        assert!(CacheType::Int8.takes(width) && row.is_multiple_of(16));
        assert_eq!(CacheType::Int8.width(row), width);
        assert!(width + 2 * width.div_ceil(CacheType::group(width)) <= row);
        assert!(CacheType::Float(FloatType::F16).takes(width + 1));
    }
    assert!(!CacheType::Int8.takes(20) && !CacheType::Int8.takes(0) && !CacheType::Int8.takes(576));
}

/// New rows by every type, and their values again, by the bytes and by the op.
fn appends_on(device: &Device) {
    let mut random = Random::new(5);
    let host = crate::ops::testing::device();
    for (width, dtype) in [16, 64, 96, 128, 144, 256, 496, 512].into_iter().zip(FLOATS.into_iter().cycle()) {
        let (tokens, heads) = (3, 2);
        let mut values = random.normal(tokens * heads * width, 1.5);
        // One value above the others, and groups of zeros and of small numbers.
        values[5] = 1000.0;
        values[width..width + 32.min(width)].fill(0.0);
        values[2 * width..3 * width].iter_mut().for_each(|x| *x *= 1e-4);
        let x = Tensor::new(&values, &[tokens, heads, width], &host).unwrap().cast(dtype.dtype()).unwrap();
        let wide = x.cast(DType::F32).unwrap();
        let x = x.to_device(device).unwrap();
        let row = CacheType::Int8.row(width);
        let mut cache = Tensor::allocate_zeros(&[heads, 5, row], DType::I8, device).unwrap();
        let shared = cache.clone();
        let at = Tensor::new(&[4u32, 0, 2], &[tokens], device).unwrap();
        kv_append(&mut cache, &x, &at).unwrap();
        assert!(fetched(&shared).bytes().iter().all(|&byte| byte == 0), "a clone was written");
        let all = fetched(&cache);
        let place = |head: usize, position: usize| (head * 5 + position) * row;
        for (t, position) in [4, 0, 2].into_iter().enumerate() {
            for head in 0..heads {
                let bytes = &all.bytes()[place(head, position)..][..row];
                let want = &wide.as_slice::<f32>().unwrap()[(t * heads + head) * width..][..width];
                assert_encoded(bytes, want, width);
            }
        }
        assert!(all.bytes()[place(1, 1)..][..row].iter().all(|&byte| byte == 0), "a row without a token");
        for dtype in FLOATS {
            let y = fetched(&expand_cache(&cache, dtype.dtype()).unwrap());
            assert_eq!((y.shape(), y.dtype()), (&[heads, 5, width][..], dtype.dtype()));
            let y = y.cast(DType::F32).unwrap();
            for (&y, want) in y.as_slice::<f32>().unwrap().iter().zip(decoded(all.bytes(), width)) {
                assert_eq!(y, dtype.round(want as f32), "{dtype:?} of {want}");
            }
        }
    }
}

/// Rows in pages are those of a contiguous cache.
fn pages_on(device: &Device) {
    let mut random = Random::new(6);
    let (heads, width) = (2, 48);
    let row = CacheType::Int8.row(width);
    let zeros = |shape: &[usize]| Tensor::allocate_zeros(shape, DType::I8, device).unwrap();
    let mut pages = zeros(&[3, heads, PAGE_TOKENS, row]);
    let mut cache = zeros(&[heads, 2 * PAGE_TOKENS, row]);
    let x = random.normal(2 * heads * width, 1.5);
    let x = Tensor::new(&x, &[2, heads, width], device).unwrap();
    let ids = |ids: &[u32], shape: &[usize]| Tensor::new(ids, shape, device).unwrap();
    let at = ids(&[70, 5], &[2]);
    kv_append_paged(&mut pages, &ids(&[2, 0], &[1, 2]), &x, &at).unwrap();
    kv_append(&mut cache, &x, &at).unwrap();
    let gathered = gather_pages(&pages, &ids(&[2, 0], &[2])).unwrap();
    assert_eq!(fetched(&gathered).bytes(), fetched(&cache).bytes());
}

/// Rows that are taken out of a cache are the same in another.
fn rows_move_on(device: &Device) {
    let mut random = Random::new(8);
    let (heads, width) = (3, 48);
    let row = CacheType::Int8.row(width);
    let zeros = |capacity| Tensor::allocate_zeros(&[heads, capacity, row], DType::I8, device).unwrap();
    let ids = |ids: &[u32]| Tensor::new(ids, &[ids.len()], device).unwrap();
    let x = random.normal(4 * heads * width, 1.5);
    let x = Tensor::new(&x, &[4, heads, width], device).unwrap();
    let (mut one, mut other, mut want) = (zeros(9), zeros(7), zeros(7));
    kv_append(&mut one, &x, &ids(&[8, 1, 0, 5])).unwrap();
    let rows = kv_gather(&one, &ids(&[8, 1, 0, 5])).unwrap();
    assert_eq!((rows.shape(), rows.dtype()), (&[4, heads, row][..], DType::I8));
    for (cache, x) in [(&mut other, &rows), (&mut want, &x)] {
        kv_append(cache, x, &ids(&[3, 6, 2, 0])).unwrap();
    }
    let (other, want) = (fetched(&other), fetched(&want));
    assert!(want.bytes().iter().any(|&byte| byte != 0));
    assert_eq!(other.bytes(), want.bytes());
}

/// A group with a number that is not finite has none that is, and its neighbours are as they were.
fn not_finite_on(device: &Device) {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![0.5f32; 64];
        x[21] = bad;
        let x = Tensor::new(&x, &[1, 1, 64], device).unwrap();
        let mut cache = Tensor::allocate_zeros(&[1, 1, 80], DType::I8, device).unwrap();
        kv_append(&mut cache, &x, &Tensor::new(&[0u32], &[1], device).unwrap()).unwrap();
        let y = fetched(&expand_cache(&cache, DType::F32).unwrap());
        for (i, y) in y.as_slice::<f32>().unwrap().iter().enumerate() {
            let near = (y - 0.5).abs() < 1e-3;
            assert!(if (16..24).contains(&i) { y.is_nan() } else { near }, "{bad}: {i} is {y}");
        }
    }
}

#[test]
fn on_cpus() {
    for device in devices() {
        appends_on(&device);
        pages_on(&device);
        rows_move_on(&device);
        not_finite_on(&device);
    }
}

#[cfg(feature = "gpu")]
#[test]
fn on_a_gpu() {
    let device = crate::ops::testing::gpu();
    appends_on(&device);
    pages_on(&device);
    rows_move_on(&device);
    not_finite_on(&device);
    // Rows beyond a cache have no numbers.
    let cache = Tensor::allocate_zeros(&[1, 2, 32], DType::I8, &device).unwrap();
    let rows = kv_gather(&cache, &Tensor::new(&[2u32], &[1], &device).unwrap()).unwrap();
    let y = fetched(&expand_cache(&rows, DType::F32).unwrap());
    assert!(y.as_slice::<f32>().unwrap().iter().all(|y| y.is_nan()));
    // Pages beyond the pool have no numbers.
    let pages = Tensor::allocate_zeros(&[1, 1, PAGE_TOKENS, 32], DType::I8, &device).unwrap();
    let y = gather_pages(&pages, &Tensor::new(&[7u32], &[1], &device).unwrap()).unwrap();
    let y = fetched(&expand_cache(&y, DType::F32).unwrap());
    assert!(y.as_slice::<f32>().unwrap().iter().all(|y| y.is_nan()));
}

/// As floats of 16 bits, a number whose scale is infinite is an error that changes nothing.
#[test]
fn numbers_beyond_the_scales_are_refused() {
    for device in devices() {
        let mut cache = Tensor::zeros(&[1, 1, 32], DType::I8, &device);
        let at = Tensor::new(&[0u32], &[1], &device).unwrap();
        let mut append = |beyond: f32| {
            let mut x = vec![1f32; 16];
            x[9] = beyond;
            kv_append(&mut cache, &Tensor::new(&x, &[1, 1, 16], &device).unwrap(), &at)
        };
        append(65000.0).unwrap();
        let error = append(-65100.0).unwrap_err().to_string();
        assert_eq!(error, "kv_append: x is -65100, but q8_0, the cache's type, ends at 65008.125");
        assert!(cache.as_slice::<i8>().unwrap()[..16].contains(&127));
    }
}

#[test]
fn other_tensors_are_refused() {
    let device = crate::ops::testing::device();
    let expand = |shape: &[usize], from, to| {
        expand_cache(&Tensor::zeros(shape, from, &device), to).unwrap_err().to_string()
    };
    assert_eq!(expand(&[2, 32], DType::F16, DType::F32), "expand_cache: cache is f16, but i8 is wanted");
    assert_eq!(
        expand(&[2, 32], DType::I8, DType::U32),
        "expand_cache: dtype is u32, but f32, f16 or bf16 is wanted"
    );
    assert_eq!(
        expand(&[2, 33], DType::I8, DType::F32),
        "expand_cache: cache is [2, 33], but rows of i8 are D codes, a multiple of 16 up to 512, and 16 \
         bytes of scales per 256"
    );
}

/// Rows of integers go to a cache of such alone.
#[test]
fn rows_of_another_type_are_refused() {
    let device = crate::ops::testing::device();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let at = zeros(&[1], DType::U32);
    let refused = |mut cache: Tensor| {
        kv_append(&mut cache, &zeros(&[1, 2, 80], DType::I8), &at).unwrap_err().to_string()
    };
    assert_eq!(refused(zeros(&[2, 3, 80], DType::F16)), "kv_append: x is i8, but f16 is wanted");
    assert_eq!(
        refused(zeros(&[2, 3, 32], DType::I8)),
        "kv_append: x is [1, 2, 80], but cache [2, 3, 32] wants [1, 2, 32]"
    );
}
