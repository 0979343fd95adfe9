use super::*;
use crate::Device;
use crate::ops::quantized_matmul::tests::formats;
#[cfg(feature = "gpu")]
use crate::ops::quantized_matmul::tests::gpu_formats;
#[cfg(feature = "gpu")]
use crate::ops::testing::gpu;
use crate::ops::testing::{FLOATS, assert_close, device, devices, host, normal, values};
use crate::{inputs, ops::quantized_matmul_backward_scales};
use lowbit_formats::FloatType;
use numcheck::{Random, assert_bits, gamma};

const COUNT: usize = 9;
const K: usize = 256;

/// A gather is the product with rows of ones and zeros, whose gradient is tested alone: against
/// that, with the bound of both.
#[test]
fn is_the_gradient_of_a_product_with_rows_of_ones_and_zeros() {
    is_that_of_a_product_on(&devices(), &formats());
}

#[cfg(feature = "gpu")]
#[test]
fn gpu_is_the_gradient_of_a_product_with_rows_of_ones_and_zeros() {
    is_that_of_a_product_on(&[gpu()], &gpu_formats());
}

fn is_that_of_a_product_on(devices: &[Device], formats: &[Format]) {
    let ids = [4u32, 0, 4, 8, 3, 4, 0];
    let mut random = Random::new(1);
    for device in devices {
        for &format in formats {
            let table = inputs::weight(format, &[COUNT, K], 3, &host(device)).unwrap();
            let table = if let Device::Gpu(_) = device { table.to_device(device).unwrap() } else { table };
            let at = Tensor::new(&ids, &[ids.len()], device).unwrap();
            let (dy, dys) = normal(&mut random, &[ids.len(), K], FLOATS[1], device);
            let mut dvalues = vec![0f32; COUNT * K];
            for (i, dy) in dys.iter().enumerate() {
                dvalues[ids[i / K] as usize * K + i % K] += dy;
            }
            let got = dequant_gather_backward_values(&table, &at, &dy).unwrap();
            assert_bits("dvalues", &values(&got), &dvalues);
            let got = dequant_gather_backward_scales(&table, &at, &dy);
            let Some(group) = format.scheme().group_size() else {
                let error = got.unwrap_err().to_string();
                assert_eq!(error, format!("{format} has no codes, but codes of 8 bits or fewer are wanted"));
                continue;
            };
            let ScalesGradient { dscales, dbiases } = got.unwrap();
            // y = one_hot table, so that the table's gradient is one_hot^T dy: x is dy, and dy is
            // one_hot.
            let mut one_hot = vec![0f32; ids.len() * COUNT];
            ids.iter().enumerate().for_each(|(i, &id)| one_hot[i * COUNT + id as usize] = 1.0);
            let one_hot = Tensor::new(&one_hot, &[ids.len(), COUNT], device).unwrap();
            let want = quantized_matmul_backward_scales(&dy, &table, &one_hot).unwrap();
            let dys = &dys[..];
            let most = |bias: bool| {
                let code =
                    format.scheme().code_values().unwrap().iter().fold(1.0, |m: f32, x| m.max(x.abs()));
                let of = move |at: usize| {
                    let rows = ids
                        .iter()
                        .zip(dys.chunks(K))
                        .filter(move |(id, _)| **id as usize == at / (K / group));
                    rows.flat_map(move |(_, dy)| &dy[at % (K / group) * group..][..group])
                        .map(|dy| f64::from(dy.abs()))
                        .sum::<f64>()
                };
                (0..COUNT * K / group)
                    .map(|at| of(at) * if bias { 1.0 } else { f64::from(code) })
                    .collect::<Vec<_>>()
            };
            let bound = 2.0 * gamma(ids.len() + group + 1);
            let close = |got: &Tensor, want: &Tensor, most: Vec<f64>| {
                let wanted: Vec<f64> = values(want).iter().map(|&x| x.into()).collect();
                assert_close(got, want.shape(), FLOATS[0], &wanted, |i| bound * most[i]);
            };
            close(&dscales, &want.dscales, most(false));
            assert_eq!(dbiases.is_some(), want.dbiases.is_some());
            if let (Some(got), Some(want)) = (dbiases, want.dbiases) {
                close(&got, &want, most(true));
            }
        }
    }
}

#[test]
fn the_same_for_every_number_of_threads_and_refusals() {
    let of = |threads| {
        let device = Device::cpu(Some(threads)).unwrap();
        let table = inputs::weight(Format::Q4_K, &[COUNT, K], 3, &device).unwrap();
        let ids = Tensor::new(&[1u32, 7, 1, 0, 1, 1], &[2, 3], &device).unwrap();
        let dy = inputs::activations(&[2, 3, K], FloatType::F32, 4, &device).unwrap();
        values(&dequant_gather_backward_scales(&table, &ids, &dy).unwrap().dscales)
    };
    assert_bits("threads", &of(3), &of(1));
    let device = device();
    let table = inputs::weight(Format::Q4_0, &[COUNT, K], 3, &device).unwrap();
    let ids = Tensor::new(&[9u32], &[1], &device).unwrap();
    let dy = inputs::activations(&[1, K], FloatType::F32, 4, &device).unwrap();
    let refuse = |ids: &Tensor| dequant_gather_backward_scales(&table, ids, &dy).unwrap_err().to_string();
    assert_eq!(
        refuse(&ids),
        "dequant_gather_backward_scales: ids[0] is 9, but there are 9 rows to choose from"
    );
    let two = Tensor::new(&[0u32, 1], &[2], &device).unwrap();
    assert_eq!(refuse(&two), "dequant_gather_backward_scales: dy is [1, 256], but ids [2] wants [2, 256]");
}
