use super::*;
use crate::ops::testing::{FLOATS, device, devices, fetched, normal};
use numcheck::Random;

/// Bit for bit what a loop takes.
fn gathers_what_a_loop_takes_on(devices: &[Device]) {
    for device in devices {
        for (heads, width, table) in [(3, 37, &[4u32, 0, 2][..]), (2, 16, &[1, 1]), (1, 4, &[])] {
            for dtype in FLOATS {
                let shape = [6, heads, PAGE_TOKENS, width];
                // A view that starts within its memory.
                let pages = normal(&mut Random::new(1), &shape, dtype, device).0.rows(1, 6).unwrap();
                let table_on_device = Tensor::new(table, &[table.len()], device).unwrap();
                let y = gather_pages(&pages, &table_on_device).unwrap();
                assert_eq!(y.shape(), [heads, table.len() * PAGE_TOKENS, width]);
                assert_eq!(y.dtype(), dtype.dtype());
                let (pages, page) = (fetched(&pages), PAGE_TOKENS * width * dtype.size());
                let at = |head: usize, column: usize| (table[column] as usize * heads + head) * page;
                let all = (0..heads).flat_map(|head| (0..table.len()).map(move |column| at(head, column)));
                let want: Vec<u8> = all.flat_map(|at| pages.bytes()[at..at + page].to_vec()).collect();
                assert_eq!(fetched(&y).bytes(), want, "{heads} heads of {width} {dtype:?}, pages {table:?}");
            }
        }
    }
}

#[test]
fn gathers_what_a_loop_takes() {
    gathers_what_a_loop_takes_on(&devices());
}

#[cfg(feature = "gpu")]
#[test]
fn gathers_what_a_loop_takes_on_a_gpu() {
    let gpu = crate::ops::testing::gpu();
    gathers_what_a_loop_takes_on(std::slice::from_ref(&gpu));
    let pages = Tensor::zeros(&[2, 3, PAGE_TOKENS, 4], DType::F16, &gpu);
    let y = gather_pages(&pages, &Tensor::new(&[1u32, 2, u32::MAX, 0], &[4], &gpu).unwrap()).unwrap();
    for (i, y) in crate::ops::testing::values(&y).iter().enumerate() {
        let column = i / 4 / PAGE_TOKENS % 4;
        assert!(if [1, 2].contains(&column) { y.is_nan() } else { *y == 0.0 }, "page {column}: {y}");
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let ids = |ids: &[u32], shape: &[usize]| Tensor::new(ids, shape, &device).unwrap();
    let refused = |keys: &Tensor, values: &Tensor, table: &Tensor, at: &[u32]| {
        let at = ids(at, &[at.len()]);
        Pages { keys, values, table }.check(Check("op"), &at).unwrap_err().to_string()
    };
    let (keys, values) = (zeros(&[4, 2, 64, 8]), zeros(&[4, 2, 64, 5]));
    let table = ids(&[0, 3, 9, 2, 1, 4], &[2, 3]);
    let shape =
        Pages { keys: &keys, values: &values, table: &table }.check(Check("op"), &ids(&[70, 3], &[2]));
    let want = PoolShape { pages: 4, heads: 2, widths: [8, 5], columns: 3, tokens: 1 };
    assert_eq!(shape.unwrap(), want);
    assert_eq!(
        refused(&zeros(&[4, 2, 32, 8]), &values, &table, &[0, 0]),
        "op: keys is [4, 2, 32, 8], but [P, Hkv, 64, D] with no size of 0 is wanted"
    );
    assert_eq!(
        refused(&keys, &zeros(&[4, 3, 64, 5]), &table, &[0, 0]),
        "op: values is [4, 3, 64, 5], but keys [4, 2, 64, 8] wants [4, 2, 64, 5]"
    );
    assert_eq!(
        refused(&keys, &values, &table, &[0, 0, 0]),
        "op: positions is [3], but each of the 2 sequences of the table has as many tokens"
    );
    assert_eq!(
        refused(&keys, &values, &table, &[0, 192]),
        "op: positions[1] is 192, but there are 192 rows to choose from"
    );
    // Pages that a token only looks back at count too; what is behind it does not.
    assert_eq!(
        refused(&keys, &values, &table, &[128, 0]),
        "op: table[2] is 9, but there are 4 rows to choose from"
    );
    assert_eq!(
        refused(&keys, &values, &table, &[0, 130]),
        "op: table[5] is 4, but there are 4 rows to choose from"
    );
    let half = Tensor::zeros(&[4, 2, 64, 5], DType::F16, &device);
    assert_eq!(refused(&keys, &half, &table, &[0, 0]), "op: values is f16, but f32 is wanted");
    assert_eq!(refused(&keys, &values, &zeros(&[2, 3]), &[0, 0]), "op: table is f32, but u32 is wanted");
    let gathered = |table: &[u32]| gather_pages(&keys, &ids(table, &[table.len()])).unwrap_err().to_string();
    assert_eq!(gathered(&[1, 4]), "gather_pages: table[1] is 4, but there are 4 rows to choose from");
}
