use super::copy_rows;
use crate::ops::testing::{device, fetched, gpu, patterns};

#[test]
fn copies_one_row_and_leaves_the_others() {
    // Rows of whole vectors, of odd sizes, and of fewer bytes than a device binds at.
    for row in [1, 3, 16, 129] {
        for x in patterns(7 * row) {
            let (src, dst) = (x.rows(0, 4 * row).unwrap(), x.rows(4 * row, 7 * row).unwrap());
            let (src, mut want) = (src.reshape(&[4, row]).unwrap(), dst.reshape(&[3, row]).unwrap());
            let mut got = want.to_device(&gpu()).unwrap();
            copy_rows(&src, 3, &mut want, 1).unwrap();
            copy_rows(&src.to_device(&gpu()).unwrap(), 3, &mut got, 1).unwrap();
            assert_eq!(fetched(&got).bytes(), want.bytes(), "{row} {}", x.dtype());
        }
    }
}

#[test]
fn a_clone_keeps_its_values() {
    let [x, ..] = &patterns(6)[..] else { unreachable!() };
    let x = x.reshape(&[3, 2]).unwrap();
    let mut dst = x.to_device(&gpu()).unwrap();
    let before = dst.clone();
    copy_rows(&before, 2, &mut dst, 0).unwrap();
    assert_eq!(fetched(&before).bytes(), x.bytes());
    assert_eq!(fetched(&dst).bytes(), [&x.bytes()[16..], &x.bytes()[8..]].concat());
}

#[test]
fn refusals_name_the_device() {
    let [x, ..] = &patterns(6)[..] else { unreachable!() };
    let x = x.reshape(&[3, 2]).unwrap();
    let gpu = gpu();
    let error = copy_rows(&x.to_device(&gpu).unwrap(), 0, &mut x.clone(), 0).unwrap_err().to_string();
    assert_eq!(error, format!("copy_rows: dst is on {}, but x is on {gpu}", device()));
}
