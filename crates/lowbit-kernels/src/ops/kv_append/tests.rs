use super::*;
use crate::ops::testing::{FLOATS, devices, normal};
use lowbit_formats::{DType, FloatType};
use numcheck::Random;

#[test]
fn rows_go_to_their_positions_and_nowhere_else() {
    let (heads, capacity, width, tokens) = (3, 70, 37, 5);
    let positions = [69u32, 0, 12, 13, 12];
    for device in devices() {
        for (dtype, from) in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|from| (dtype, from))) {
            let mut cache = Tensor::empty(&[heads, capacity, width], dtype.dtype(), &device);
            let (x, xs) = normal(&mut Random::new(1), &[tokens, heads, width], from, &device);
            let at = Tensor::new(&positions, &[tokens], &device).unwrap();
            kv_append(&mut cache, &x, &at).unwrap();
            let mut want = vec![f32::NAN; heads * capacity * width];
            for (i, &x) in xs.iter().enumerate() {
                let (t, h, d) = (i / width / heads, i / width % heads, i % width);
                want[(h * capacity + positions[t] as usize) * width + d] = dtype.round(x);
            }
            let got = cache.cast(lowbit_formats::DType::F32).unwrap();
            for (i, (got, want)) in got.as_slice::<f32>().unwrap().iter().zip(&want).enumerate() {
                assert!(
                    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                    "[{i}] {got} {want}"
                );
            }
        }
    }
}

#[test]
fn a_forked_cache_keeps_what_it_had() {
    for device in devices() {
        let mut cache = Tensor::zeros(&[1, 2, 1], lowbit_formats::DType::F32, &device);
        let fork = cache.clone();
        let x = Tensor::new(&[5f32], &[1, 1, 1], &device).unwrap();
        kv_append(&mut cache, &x, &Tensor::new(&[1u32], &[1], &device).unwrap()).unwrap();
        assert_eq!(cache.as_slice::<f32>().unwrap(), [0.0, 5.0]);
        assert_eq!(fork.as_slice::<f32>().unwrap(), [0.0, 0.0]);
        kv_append(&mut cache, &x.rows(0, 0).unwrap(), &Tensor::new::<u32>(&[], &[0], &device).unwrap())
            .unwrap();
    }
}

#[test]
fn refusals_leave_the_cache_alone() {
    let device = crate::ops::testing::device();
    let mut cache = Tensor::zeros(&[2, 4, 3], lowbit_formats::DType::F32, &device);
    let f = |shape: &[usize]| Tensor::new(&vec![1f32; shape.iter().product()], shape, &device).unwrap();
    let at = |ids: &[u32]| Tensor::new(ids, &[ids.len()], &device).unwrap();
    let mut refused = |x: &Tensor, at: &Tensor| kv_append(&mut cache, x, at).unwrap_err().to_string();
    assert_eq!(
        refused(&f(&[2, 2, 3]), &at(&[3, 4])),
        "kv_append: positions[1] is 4, but there are 4 rows to choose from"
    );
    assert_eq!(
        refused(&f(&[2, 3, 2]), &at(&[0, 1])),
        "kv_append: x is [2, 3, 2], but cache [2, 4, 3] wants [2, 2, 3]"
    );
    assert_eq!(refused(&f(&[2, 2, 3]), &at(&[0])), "kv_append: positions is [1], but x [2, 2, 3] wants [2]");
    refused(&f(&[2, 6]), &at(&[0, 1]));
    refused(&f(&[1, 2, 3]), &f(&[1]));
    refused(&Tensor::new(&[0u32; 6], &[1, 2, 3], &device).unwrap(), &at(&[0]));
    assert!(cache.as_slice::<f32>().unwrap().iter().all(|&x| x == 0.0));
    let mut ids = Tensor::zeros(&[2, 4, 3], lowbit_formats::DType::U32, &device);
    assert!(kv_append(&mut ids, &f(&[1, 2, 3]), &at(&[0])).is_err());
}

#[test]
fn rows_go_to_pages() {
    for device in devices() {
        let ids = |ids: &[u32], shape: &[usize]| Tensor::new(ids, shape, &device).unwrap();
        let table = ids(&[2, 0, 1, 9], &[2, 2]);
        let mut pages = Tensor::zeros(&[3, 2, 64, 1], DType::F32, &device);
        let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &[2, 2, 1], &device).unwrap();
        // A token of each sequence.
        kv_append_paged(&mut pages, &table, &x, &ids(&[70, 5], &[2])).unwrap();
        let mut want = vec![0.0; 3 * 2 * 64];
        for (page, place, [first, second]) in [(0, 6, [1.0, 2.0]), (1, 5, [3.0, 4.0])] {
            want[page * 128 + place] = first;
            want[page * 128 + 64 + place] = second;
        }
        assert_eq!(pages.as_slice::<f32>().unwrap(), want);
        let mut refused = |x: &Tensor, at: &[u32]| {
            kv_append_paged(&mut pages, &table, x, &ids(at, &[at.len()])).unwrap_err().to_string()
        };
        assert_eq!(
            refused(&x, &[0, 64]),
            "kv_append_paged: table[3] is 9, but there are 3 rows to choose from"
        );
        assert!(refused(&x, &[128, 0]).contains("positions[0] is 128"));
        assert!(refused(&x, &[0]).contains("each of the 2 sequences"));
        assert!(refused(&x.reshape(&[4, 1, 1]).unwrap(), &[0, 0]).contains("the pool [3, 2, 64, 1] wants"));
        assert_eq!(pages.as_slice::<f32>().unwrap(), want);
    }
}

#[test]
fn what_a_cache_cannot_hold_is_refused() {
    for device in devices() {
        let [greatest, beyond] = [0x7f7f_0000, 0x7f7f_8000].map(f32::from_bits);
        for (dtype, greatest, beyond) in
            [(FloatType::F16, 65504.0, 65520.0), (FloatType::BF16, greatest, beyond)]
        {
            let mut cache = Tensor::zeros(&[1, 4, 20], dtype.dtype(), &device);
            let at = Tensor::new(&[2u32], &[1], &device).unwrap();
            let mut append = |x: [f32; 3]| {
                let x = [&x[..], &[0.0; 17]].concat();
                let result = kv_append(&mut cache, &Tensor::new(&x, &[1, 1, 20], &device).unwrap(), &at);
                let stored = cache.cast(DType::F32).unwrap().as_slice::<f32>().unwrap()[40..43].to_vec();
                result.map(|()| stored.clone()).map_err(|error| (error.to_string(), stored))
            };
            let stored = append([1.0, -beyond.next_down(), beyond.next_down()]).unwrap();
            assert_eq!(stored, [1.0, -greatest, greatest]);
            for x in [beyond, -beyond, f32::MAX] {
                let (error, stored) = append([5.0, f32::INFINITY, x]).unwrap_err();
                let name = dtype.dtype();
                assert_eq!(
                    error,
                    format!("kv_append: x is {x}, but {name}, the cache's type, ends at {beyond}")
                );
                assert_eq!(stored, [1.0, -greatest, greatest], "the cache is unchanged");
            }
            // Numbers that are infinite or NaN already were reported, or will be.
            let stored = append([f32::INFINITY, f32::NEG_INFINITY, f32::NAN]).unwrap();
            assert!(stored[..2] == [f32::INFINITY, f32::NEG_INFINITY] && stored[2].is_nan());
        }
    }
}
