use super::matmul;
use crate::{
    bench::{Case, Cases},
    ops::quantized_matmul::bench::Product,
};
use lowbit_formats::{FloatType, Format};

inventory::submit!(Cases(cases));

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for weight in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        for m in [1, 8, 64, 512] {
            let (format, dtype) = (Format::Float(weight), FloatType::F32);
            let product = Product { op: "matmul", format, dtype, m, n: 4096, k: 4096 };
            cases.push(product.case(|x, weight| matmul(x, &weight.components()[0])));
        }
    }
    cases
}
