use super::narrow;
use super::tests::one_row_is_viewed_where_vectors_begin_on;
use crate::testing::{fetched, gpu, patterns};

#[test]
fn copies_what_the_cpu_copies() {
    for (width, start, len) in
        [(37, 0, 5), (37, 5, 32), (37, 36, 1), (37, 37, 0), (64, 16, 32), (64, 32, 32), (38, 2, 4)]
    {
        for x in patterns(211 * width) {
            let x = x.reshape(&[1, 211, width]).unwrap();
            let want = narrow(&x, start, len).unwrap();
            let y = narrow(&x.to_device(&gpu()).unwrap(), start, len).unwrap();
            assert_eq!((y.shape(), y.dtype()), (want.shape(), want.dtype()));
            assert_eq!(fetched(&y).bytes(), want.bytes(), "{width} {start} {len} {}", x.dtype());
        }
    }
    // A view that starts anywhere.
    let x = patterns(96).swap_remove(0).reshape(&[8, 12]).unwrap();
    let y = narrow(&x.to_device(&gpu()).unwrap().rows(3, 8).unwrap(), 4, 8).unwrap();
    assert_eq!(fetched(&y).bytes(), narrow(&x.rows(3, 8).unwrap(), 4, 8).unwrap().bytes());
}

#[test]
fn one_row_is_viewed_where_vectors_begin() {
    one_row_is_viewed_where_vectors_begin_on(&gpu());
}
