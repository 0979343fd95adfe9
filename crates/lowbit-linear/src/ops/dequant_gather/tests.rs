use super::dequant_gather;
use crate::{
    Device, Tensor, inputs,
    ops::{
        quantized_matmul::{
            reference,
            tests::{formats, layouts},
        },
        testing::{FLOATS, devices, values},
    },
};
use lowbit_formats::{FloatType, Format};

#[test]
fn rows_are_the_formats_own_values() {
    for device in devices() {
        for format in formats() {
            let k = 768;
            let table = inputs::weight(format, &[40, k], 9, &device).unwrap();
            let ids = [39u32, 0, 7, 7, 21, 38];
            let decoded = reference::decoded(&table, table.rows()).unwrap();
            let ids_tensor = Tensor::new(&ids, &[2, 3], &device).unwrap();
            for (dtype, table) in
                FLOATS.into_iter().flat_map(|dtype| layouts(&table).into_iter().map(move |t| (dtype, t)))
            {
                let y = dequant_gather(&table, &ids_tensor, dtype).unwrap();
                assert_eq!((y.shape(), y.dtype()), (&[2, 3, k][..], dtype.dtype()));
                let want: Vec<f32> =
                    ids.iter().flat_map(|&id| &decoded[id as usize * k..][..k]).copied().collect();
                let want: Vec<f32> = want.into_iter().map(|x| dtype.round(x)).collect();
                // Codes in panels have no -0.
                let positive = |x: &[f32]| x.iter().map(|x| x + 0.0).collect::<Vec<_>>();
                numcheck::assert_bits(
                    &format!("{format} {dtype:?}"),
                    &positive(&values(&y)),
                    &positive(&want),
                );
            }
        }
    }
}

#[test]
fn ragged_floats_and_empty_sizes() {
    for device in devices() {
        let format = Format::Float(FloatType::BF16);
        let table = inputs::weight(format, &[5, 37], 9, &device).unwrap();
        let ids = Tensor::new(&[4u32, 1], &[2], &device).unwrap();
        let y = dequant_gather(&table, &ids, FloatType::F32).unwrap();
        let decoded = reference::decoded(&table, table.rows()).unwrap();
        let want = [&decoded[4 * 37..][..37], &decoded[37..][..37]].concat();
        numcheck::assert_bits("ragged", y.as_slice().unwrap(), &want);
        let none = Tensor::new::<u32>(&[], &[0], &device).unwrap();
        assert_eq!(dequant_gather(&table, &none, FloatType::F32).unwrap().shape(), [0, 37]);
        let narrow = inputs::weight(format, &[5, 0], 9, &device).unwrap();
        assert_eq!(dequant_gather(&narrow, &ids, FloatType::F32).unwrap().shape(), [2, 0]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let table = inputs::weight(Format::Q4_0, &[5, 32], 9, &device).unwrap();
    let ids = Tensor::new(&[4u32, 5], &[2], &device).unwrap();
    let error = dequant_gather(&table, &ids, FloatType::F32).unwrap_err().to_string();
    assert_eq!(error, "dequant_gather: ids[1] is 5, but there are 5 rows to choose from");
    let stack = inputs::weight(Format::Q4_0, &[5, 2, 32], 9, &device).unwrap();
    let error = dequant_gather(&stack, &ids, FloatType::F32).unwrap_err().to_string();
    assert_eq!(error, "dequant_gather: table is [5, 2, 32], but [V, K] is wanted");
}
