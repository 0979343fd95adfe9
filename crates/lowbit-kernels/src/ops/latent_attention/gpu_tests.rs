//! The op on a GPU against the reference.

use super::tests::{CASE, Case, PUBLISHED};
use crate::ops::testing::{FLOATS, gpu};

#[test]
fn every_type_of_a_step_and_of_a_prompt() {
    for dtypes in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| [dtype, cache])) {
        CASE.check(&(11..48).collect::<Vec<_>>(), dtypes, &gpu());
        CASE.check_paged(&[3, 100], dtypes, &gpu());
    }
    Case { rank: 1, ..CASE }.check(&[70, 5], [FLOATS[0]; 2], &gpu());
}

/// In one type: these kernels are large, and software takes long to compile them.
#[test]
fn published_widths() {
    PUBLISHED.check(&[69], [FLOATS[1]; 2], &gpu());
    PUBLISHED.check_paged(&[64], [FLOATS[1]; 2], &gpu());
}
