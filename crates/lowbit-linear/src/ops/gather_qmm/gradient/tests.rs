use super::*;
use crate::ops::quantized_matmul::gradient::reference as sums;
use crate::ops::quantized_matmul::reference::decoded;
use crate::ops::testing::{
    FLOATS, assert_close, assert_derivatives, coarse, device, devices, fetched, host, normal, values,
};
use crate::ops::{gather_qmm, quantized_matmul_backward_scales, quantized_matmul_backward_weight};
use crate::{Device, inputs};
use lowbit_formats::{FloatType, Format};
use numcheck::{Random, assert_bits, gamma};

const TOP_K: usize = 3;

/// `[products,] experts, n, k` of a weight, and who chose what; expert 1 stays without pairs.
fn operands(device: &Device, products: Option<usize>, tokens: usize) -> (QuantizedTensor, Tensor) {
    let shape: Vec<usize> = products.into_iter().chain([5, 23, 64]).collect();
    let weight = inputs::weight(Format::Q4_1, &shape, 6, &host(device)).unwrap();
    let weight = if let Device::Gpu(_) = device { weight.to_device(device).unwrap() } else { weight };
    let mut random = Random::new(tokens as u64);
    let ids: Vec<u32> = (0..tokens * TOP_K).map(|_| [0, 2, 3, 4][random.below(4)]).collect();
    (weight, Tensor::new(&ids, &[tokens, TOP_K], device).unwrap())
}

/// dx in f64, and the magnitude of its terms.
fn reference(dy: &[f32], weight: &QuantizedTensor, ids: &[u32], slots: usize) -> (Vec<f64>, Vec<f64>) {
    let (n, k, pairs) = (weight.n(), weight.k(), ids.len());
    let share = if slots == 1 { TOP_K } else { 1 };
    let values = decoded(weight, weight.rows()).unwrap();
    let mut dx = (vec![0.0; pairs / share * k], vec![0.0; pairs / share * k]);
    for row in 0..dy.len() / n {
        let expert = row / pairs * 5 + ids[row % pairs] as usize;
        for (i, column) in (0..n).flat_map(|i| (0..k).map(move |column| (i, column))) {
            let term = f64::from(dy[row * n + i]) * f64::from(values[(expert * n + i) * k + column]);
            dx.0[row % pairs / share * k + column] += term;
            dx.1[row % pairs / share * k + column] += term.abs();
        }
    }
    dx
}

/// The op in f64 is linear in x.
#[test]
fn formulas_are_the_derivatives_of_the_forward_formula() {
    let host = device();
    let (weight, ids) = operands(&host, Some(2), 2);
    let (ids, decoded) = (ids.as_slice::<u32>().unwrap(), decoded(&weight, weight.rows()).unwrap());
    let (n, k, pairs) = (weight.n(), weight.k(), ids.len());
    let mut random = Random::new(1);
    let dy = coarse(&mut random, 2 * pairs * n);
    for slots in [1, TOP_K] {
        let share = TOP_K / slots;
        let x = coarse(&mut random, pairs / share * k);
        let want = reference(&dy, &weight, ids, slots).0;
        // A tenth of the elements, since each takes all products six times.
        let some: Vec<usize> = (0..x.len()).step_by(11).collect();
        let start: Vec<f32> = some.iter().map(|&i| x[i]).collect();
        let want: Vec<f64> = some.iter().map(|&i| want[i]).collect();
        assert_derivatives("dx", &start, &want, |moved| {
            let mut x = x.clone();
            some.iter().zip(moved).for_each(|(&i, &moved)| x[i] = moved);
            let y = |at: usize| {
                let (row, i) = (at / n, at % n);
                let expert = row / pairs * 5 + ids[row % pairs] as usize;
                let (x, w) = (&x[row % pairs / share * k..][..k], &decoded[(expert * n + i) * k..][..k]);
                x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>()
            };
            (0..dy.len()).map(|at| y(at) * f64::from(dy[at])).sum()
        });
    }
}

#[test]
fn agrees_with_f64_and_with_each_experts_product() {
    agrees_with_f64_and_with_each_experts_product_on(&devices());
}

/// On a CPU the gradients of each expert are bits that its own product's are; a GPU sums these in
/// another order.
fn agrees_with_f64_and_with_each_experts_product_on(devices: &[Device]) {
    for device in devices {
        for (products, tokens, slots) in
            [(None, 1, 1), (None, 37, TOP_K), (Some(2), 9, 1), (Some(2), 137, TOP_K)]
        {
            let ((weight, ids), count) = (operands(device, products, tokens), products.unwrap_or(1));
            let (of_host, _) = operands(&host(device), products, tokens);
            let mut random = Random::new(7);
            let (x, _) = normal(&mut random, &[tokens, slots, 64], FLOATS[0], device);
            let y = gather_qmm(&x, &weight, &ids).unwrap();
            let (dy, dys) = normal(&mut random, y.shape(), FLOATS[0], device);
            let on_host = fetched(&ids);
            let chosen = on_host.as_slice::<u32>().unwrap();
            let dx = gather_qmm_backward_x(&dy, &weight, &ids, slots).unwrap();
            let (want, most) = reference(&dys, &of_host, chosen, slots);
            let terms = 23 * count * TOP_K / slots;
            assert_close(&dx, x.shape(), FLOATS[0], &want, |i| gamma(terms) * most[i]);
            let got = gather_qmm_backward_scales(&x, &weight, &ids, &dy).unwrap();
            assert_eq!(got.dscales.shape(), [&weight.shape()[..weight.shape().len() - 1], &[2]].concat());
            let dweight = gather_qmm_backward_weight(&x, &weight, &ids, &dy).unwrap();
            assert_eq!(dweight.shape(), weight.shape());
            let all = of_host.reshape(&[count * 5, 23, 64]).unwrap();
            let (xs, pairs) = (values(&x), chosen.len());
            for matrix in 0..all.shape()[0] {
                let mine: Vec<usize> =
                    (0..pairs).filter(|&pair| chosen[pair] as usize == matrix % 5).collect();
                let rows = |values: &[f32], width: usize, row: &dyn Fn(&usize) -> usize| {
                    let values = mine.iter().flat_map(|pair| &values[row(pair) * width..][..width]);
                    let values = values.copied().collect::<Vec<f32>>();
                    Tensor::new(&values, &[mine.len(), width], &host(device)).unwrap()
                };
                let x = rows(&xs, 64, &|pair| pair / (TOP_K / slots));
                let dy = rows(&dys, 23, &|pair| matrix / 5 * pairs + pair);
                let one = all.slice(matrix, matrix + 1).unwrap().reshape(&[23, 64]).unwrap();
                let same = |what: &str, got: &Tensor, want: &Tensor, most: &[f64], terms: usize| {
                    let (got, want) = (values(got), values(want));
                    let got = &got[matrix * want.len()..][..want.len()];
                    if let Device::Cpu(_) = device {
                        return assert_bits(what, got, &want);
                    }
                    let want: Vec<f64> = want.iter().map(|&x| x.into()).collect();
                    numcheck::assert_within(got, &want, |i| 2.0 * gamma(terms) * most[i]);
                };
                let sums = sums::backward_weight(&values(&x), &values(&dy), (23, 64));
                let most = sums.magnitudes;
                let want = quantized_matmul_backward_weight(&x, &dy, &[23, 64]).unwrap();
                same("dweight", &dweight, &want, &most, mine.len());
                let want = quantized_matmul_backward_scales(&x, &one, &dy).unwrap();
                let groups = |most_code: f64| {
                    most.chunks(32).map(|most| most_code * most.iter().sum::<f64>()).collect::<Vec<_>>()
                };
                let terms = mine.len() + 33;
                same("dscales", &got.dscales, &want.dscales, &groups(15.0), terms);
                let biases = [&got.dbiases, &want.dbiases].map(|biases| biases.as_ref().unwrap());
                same("dbiases", biases[0], biases[1], &groups(1.0), terms);
            }
        }
    }
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::gpu;

    #[test]
    fn agrees_with_f64_and_with_each_experts_product() {
        agrees_with_f64_and_with_each_experts_product_on(&[gpu()]);
    }

    /// More pairs than are sorted together, tiles that are not full, and ids that are no expert's.
    #[test]
    fn many_pairs_and_wrong_ids() {
        let (device, host, [tokens, n, k]) = (gpu(), device(), [301, 70, 96]);
        let weight = inputs::weight(Format::Q8_0, &[3, n, k], 5, &host).unwrap();
        let mut random = Random::new(9);
        let ids: Vec<u32> = (0..tokens * TOP_K).map(|_| random.below(4) as u32).collect();
        let (x, xs) = normal(&mut random, &[tokens, 1, k], FLOATS[0], &device);
        let (dy, dys) = normal(&mut random, &[tokens, TOP_K, n], FLOATS[0], &device);
        let (on_gpu, at) = (weight.to_device(&device).unwrap(), Tensor::new(&ids, &[tokens, TOP_K], &device));
        let dweight = gather_qmm_backward_weight(&x, &on_gpu, &at.unwrap(), &dy).unwrap();
        let dweight = values(&dweight);
        for expert in 0..3 {
            let mine = (0..ids.len()).filter(|&pair| ids[pair] == expert as u32);
            let (of_x, of_dy): (Vec<_>, Vec<_>) =
                mine.map(|pair| (&xs[pair / TOP_K * k..][..k], &dys[pair * n..][..n])).unzip();
            let want = sums::backward_weight(&of_x.concat(), &of_dy.concat(), (n, k));
            let got = &dweight[expert * n * k..][..n * k];
            numcheck::assert_within(got, &want.values, |i| gamma(of_x.len()) * want.magnitudes[i]);
        }
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let (weight, ids) = operands(&device, None, 2);
    let float = |shape: &[usize]| inputs::activations(shape, FloatType::F32, 2, &device).unwrap();
    let error = gather_qmm_backward_x(&float(&[2, 3, 22]), &weight, &ids, 1).unwrap_err().to_string();
    assert_eq!(
        error,
        "gather_qmm_backward_x: dy is [2, 3, 22], but ids [2, 3] with these operands wants [2, 3, 23]"
    );
    let error = gather_qmm_backward_x(&float(&[2, 3, 23]), &weight, &ids, 2).unwrap_err().to_string();
    assert_eq!(error, "gather_qmm_backward_x: x is [2, 2, 64], but ids are [2, 3] and weight is [5, 23, 64]");
    let floats = inputs::weight(Format::Float(FloatType::F32), &[5, 23, 64], 1, &device).unwrap();
    let x = float(&[2, 1, 64]);
    let error = gather_qmm_backward_scales(&x, &floats, &ids, &float(&[2, 3, 23])).unwrap_err().to_string();
    assert_eq!(error, "f32 has no codes, but codes of 8 bits or fewer are wanted");
}
