use super::{gated_experts, gather_qmm, streams_experts};
use crate::{
    Device, QuantizedTensor, Tensor,
    bench::Expected,
    inputs,
    ops::{
        Gate, Input, glu,
        quantized_matmul::{
            reference::{self, Rounded},
            tests::{assert_expected, formats, layouts},
        },
        testing::{devices, values},
    },
};
use lowbit_formats::{FloatType, Format};
use numcheck::Random;

pub(super) struct Case {
    pub x: Tensor,
    pub weight: QuantizedTensor,
    pub ids: Tensor,
}

impl Case {
    pub fn new(device: &Device, format: Format, tokens: usize, slots: usize, dtype: FloatType) -> Self {
        let (experts, top_k, n, k) = (5, 3, 23, 256);
        let mut random = Random::new(tokens as u64);
        let ids: Vec<u32> = (0..tokens * top_k).map(|_| random.below(experts) as u32).collect();
        Self {
            x: inputs::activations(&[tokens, slots, k], dtype, 5, device).unwrap(),
            weight: inputs::weight(format, &[experts, n, k], 6, device).unwrap(),
            ids: Tensor::new(&ids, &[tokens, top_k], device).unwrap(),
        }
    }

    pub fn want(&self) -> Vec<Expected> {
        self.bounded(Rounded::Nothing)
    }

    /// The expected values where `rounded` may be rounded first.
    pub fn bounded(&self, rounded: Rounded) -> Vec<Expected> {
        let (n, k, top_k, slots) = (self.weight.n(), self.weight.k(), self.ids.dim(1), self.x.dim(1));
        let weight = reference::decoded(&self.weight, self.weight.rows()).unwrap();
        let x = values(&self.x);
        let dtype = FloatType::from_dtype(self.x.dtype()).unwrap();
        let ids = self.ids.as_slice::<u32>().unwrap();
        let pair = |pair: usize| {
            let row = pair / top_k * slots + if slots == 1 { 0 } else { pair % top_k };
            let expert = &weight[ids[pair] as usize * n * k..][..n * k];
            reference::matmul_bounded(&x[row * k..][..k], expert, k, dtype, rounded)
        };
        (0..ids.len()).flat_map(pair).collect()
    }
}

#[test]
fn few_and_many_tokens_agree_with_the_reference() {
    for device in devices() {
        for format in [Format::Q4_0, Format::affine(3, 64, FloatType::BF16).unwrap()] {
            for tokens in [1, 2, 7, 41, 100] {
                for slots in [1, 3] {
                    let case = Case::new(&device, format, tokens, slots, FloatType::F32);
                    for weight in layouts(&case.weight) {
                        let y = gather_qmm(&case.x, &weight, &case.ids).unwrap();
                        assert_eq!(y.shape(), [tokens, 3, 23]);
                        let want = case.bounded(Rounded::of_any_m(&weight));
                        assert_expected(&format!("{format} T={tokens} slots {slots}"), &y, &want);
                    }
                }
            }
        }
    }
}

#[test]
fn products_of_one_x_are_each_their_own() {
    products_of_one_x_are_each_their_own_on(&devices());
}

pub(super) fn products_of_one_x_are_each_their_own_on(devices: &[Device]) {
    for device in devices {
        let host = device.host().unwrap();
        for (format, tokens, slots) in [(Format::Q4_0, 1, 1), (Format::Q4_0, 2, 3), (Format::Q6_K, 70, 1)] {
            let case = Case::new(&host, format, tokens, slots, FloatType::F16);
            let stacks =
                [6, 8, 9].map(|seed| inputs::weight(format, case.weight.shape(), seed, &host).unwrap());
            let all = QuantizedTensor::concat(&stacks.each_ref()).unwrap().reshape(&[3, 5, 23, 256]).unwrap();
            let [x, ids] = [&case.x, &case.ids].map(|x| x.to_device(device).unwrap());
            let product =
                |weight: &QuantizedTensor| gather_qmm(&x, &weight.to_device(device).unwrap(), &ids).unwrap();
            let y = product(&all);
            assert_eq!(y.shape(), [3, tokens, 3, 23]);
            let want: Vec<f32> = stacks.iter().flat_map(|weight| values(&product(weight))).collect();
            assert_eq!(values(&y), want, "{format} T={tokens} slots {slots} on {device}");
        }
    }
}

#[test]
fn a_product_of_an_input_is_both_ops() {
    for device in devices() {
        let case = Case::new(&device, Format::Q4_0, 7, 3, FloatType::F32);
        let up = inputs::activations(case.x.shape(), FloatType::F32, 9, &device).unwrap();
        for by in Gate::ALL {
            let input = Input::Glu { x: &up, gate: &case.x, by };
            let both = gather_qmm(input, &case.weight, &case.ids).unwrap();
            let x = glu(&up, &case.x, by).unwrap();
            assert_eq!(values(&both), values(&gather_qmm(&x, &case.weight, &case.ids).unwrap()));
        }
    }
}

#[test]
fn gated_experts_are_both_ops() {
    for device in devices() {
        let case = Case::new(&device, Format::Q4_0, 7, 1, FloatType::F32);
        let gate_up = inputs::weight(Format::Q4_0, &[2, 5, 32, 256], 7, &device).unwrap();
        let down = inputs::weight(Format::Q4_0, &[5, 40, 32], 8, &device).unwrap();
        let x = case.x.reshape(&[7, 256]).unwrap();
        let both = gather_qmm(&case.x, &gate_up, &case.ids).unwrap();
        let half = |i: usize| both.rows(i, i + 1).unwrap().reshape(&[7, 3, 32]).unwrap();
        for by in Gate::ALL {
            let want = gather_qmm(&glu(&half(1), &half(0), by).unwrap(), &down, &case.ids).unwrap();
            let y = gated_experts(&x, &gate_up, &down, &case.ids, by).unwrap();
            assert_eq!((y.shape(), values(&y)), (&[7, 3, 40][..], values(&want)), "{by:?}");
        }
        let refused = gated_experts(&x, &down, &down, &case.ids, Gate::Silu).unwrap_err().to_string();
        assert_eq!(refused, "gather_qmm: gate_up is [5, 40, 32], but [2, E, I, K] is wanted");
        assert!(!streams_experts(&x, &gate_up, 3) || matches!(device, Device::Gpu(_)));
    }
}

#[test]
fn every_format() {
    let device = Device::cpu(Some(2)).unwrap();
    for format in formats() {
        let case = Case::new(&device, format, 9, 3, FloatType::F32);
        let y = gather_qmm(&case.x, &case.weight, &case.ids).unwrap();
        assert_expected(&format.to_string(), &y, &case.want());
    }
}

#[test]
fn no_tokens_give_nothing() {
    for slots in [1, 3] {
        let case = Case::new(&Device::cpu(Some(1)).unwrap(), Format::Q4_0, 0, slots, FloatType::F32);
        assert_eq!(gather_qmm(&case.x, &case.weight, &case.ids).unwrap().shape(), [0, 3, 23]);
    }
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let mut case = Case::new(&device, Format::Q4_0, 2, 1, FloatType::F32);
    let refuse = |case: &Case| gather_qmm(&case.x, &case.weight, &case.ids).unwrap_err().to_string();
    case.ids.as_mut_slice::<u32>().unwrap()[4] = 5;
    assert_eq!(refuse(&case), "gather_qmm: ids[4] is 5, but there are 5 rows to choose from");
    case.ids = Tensor::new(&[0i32; 6], &[2, 3], &device).unwrap();
    assert_eq!(refuse(&case), "gather_qmm: ids is i32, but u32 is wanted");
    case.ids = Tensor::new(&[0u32; 6], &[3, 2], &device).unwrap();
    assert_eq!(refuse(&case), "gather_qmm: x is [2, 1, 256], but ids are [3, 2] and weight is [5, 23, 256]");
    case.ids = Tensor::new(&[0u32; 6], &[6], &device).unwrap();
    assert_eq!(refuse(&case), "gather_qmm: ids is [6], but [T, top_k] is wanted");
    case.weight = inputs::weight(Format::Q4_0, &[5, 256], 1, &device).unwrap();
    assert_eq!(
        refuse(&case),
        "gather_qmm: weight is [5, 256], but [E, N, K] or [P, E, N, K] with an expert at least is wanted"
    );
}
