//! The benchmark cases of all crates, which register themselves.

use crate::Device;
use crate::bench::{Case, GpuCases, cases};
use std::collections::HashSet;

#[test]
fn cases_of_all_crates_are_registered_once() {
    let device = Device::cpu(Some(1)).unwrap();
    for op in ["narrow", "quantized_matmul Q4_0 M=1", "attention"] {
        assert!(!cases(op, &device).is_empty(), "{op}");
    }
    assert!(cases("no_such_op", &device).is_empty());
    let of_gpus = inventory::iter::<GpuCases>.into_iter().flat_map(|cases| cases.0());
    let all: Vec<_> = cases("", &device).into_iter().chain(of_gpus).collect();
    let distinct: HashSet<_> = all.iter().map(Case::to_string).collect();
    assert_eq!(distinct.len(), all.len(), "a case is registered twice");
    assert!(all.iter().all(|case| !case.to_string().contains(',')));
}
