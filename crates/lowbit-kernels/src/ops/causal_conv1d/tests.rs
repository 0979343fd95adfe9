use super::*;
use crate::ops::testing::{self, FLOATS, devices, rounded, rounding, values};
use lowbit_formats::FloatType;
use numcheck::{Random, assert_within};

/// The parts of a case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes<'a> {
    pub lengths: &'a [usize],
    pub channels: usize,
    pub width: usize,
}

pub(super) struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    state: Vec<f32>,
}

impl Case {
    /// Values of bf16, which every float type holds but for f16's exponents, which they stay
    /// within.
    pub(super) fn new(shape: Sizes, dtype: FloatType) -> Self {
        let mut random = Random::new(shape.channels as u64);
        let Sizes { lengths, channels, width } = shape;
        let mut some =
            |n: usize| -> Vec<f32> { random.normal(n, 1.0).iter().map(|&x| dtype.round(x)).collect() };
        let tokens: usize = lengths.iter().sum();
        Self {
            x: some(tokens * channels),
            weight: some(channels * width),
            bias: some(channels),
            state: some(lengths.len() * channels * (width - 1)),
        }
    }

    #[track_caller]
    fn check(&self, shape: Sizes, dtype: FloatType, biased: bool, activation: Option<Activation>) {
        self.check_on(&devices(), shape, dtype, (biased, activation));
    }

    #[track_caller]
    pub(super) fn check_on(
        &self,
        devices: &[Device],
        shape: Sizes,
        dtype: FloatType,
        (biased, activation): (bool, Option<Activation>),
    ) {
        let Sizes { lengths, channels, width } = shape;
        let tokens: usize = lengths.iter().sum();
        let (mut y, mut magnitudes, mut last) = (vec![], vec![], vec![]);
        let mut rest = self.x.as_slice();
        for (s, &length) in lengths.iter().enumerate() {
            let x = rest.split_off(..length * channels).unwrap();
            let per = channels * (width - 1);
            let state = &self.state[s * per..(s + 1) * per];
            let bias = biased.then_some(self.bias.as_slice());
            let (values, sizes) =
                reference::causal_conv1d(x, &self.weight, bias, state, channels, activation);
            y.extend(values);
            magnitudes.extend(sizes);
            for c in 0..channels {
                let old = state[c * (width - 1)..(c + 1) * (width - 1)].iter();
                let all: Vec<f32> = old.chain(x.iter().skip(c).step_by(channels)).copied().collect();
                last.extend(&all[length..]);
            }
        }
        let offsets: Vec<u32> =
            (0..=lengths.len()).map(|s| lengths[..s].iter().sum::<usize>() as u32).collect();
        let host = testing::device();
        let on = |x: Tensor, device: &Device| x.to_device(device).unwrap();
        for device in devices {
            let of = |values: &[f32], shape: &[usize]| on(rounded(values, shape, dtype, &host), device);
            let x = of(&self.x, &[tokens, channels]);
            let weight = of(&self.weight, &[channels, width]);
            let bias = of(&self.bias, &[channels]);
            let cu_seqlens = Tensor::new(&offsets, &[offsets.len()], device).unwrap();
            let mut state = Tensor::new(&self.state, &[lengths.len(), channels, width - 1], device).unwrap();
            let bias = biased.then_some(&bias);
            let got = causal_conv1d(&x, &weight, bias, &mut state, &cu_seqlens, activation).unwrap();
            assert_eq!((got.dtype(), got.shape()), (dtype.dtype(), x.shape()));
            assert_within(&values(&on(got, &host)), &y, |i| {
                let bound = reference::bound(y[i], magnitudes[i], width, activation);
                bound + rounding(dtype, y[i].abs() + bound)
            });
            numcheck::assert_bits("state", &values(&on(state, &host)), &last);
        }
    }
}

#[test]
fn agrees_with_the_reference_at_every_width() {
    for width in 1..=8 {
        let shape = Sizes { lengths: &[5, 0, 1, 2, 13, 3], channels: 37, width };
        for (biased, activation) in
            [(true, None), (false, Some(Activation::Silu)), (true, Some(Activation::Silu))]
        {
            Case::new(shape, FloatType::F32).check(shape, FloatType::F32, biased, activation);
        }
    }
}

#[test]
fn channels_below_at_and_above_each_block_and_every_type() {
    for channels in [1, 15, 16, 511, 512, 513, 1030] {
        let shape = Sizes { lengths: &[1, 6, 1], channels, width: 4 };
        for dtype in FLOATS {
            Case::new(shape, dtype).check(shape, dtype, false, Some(Activation::Silu));
        }
    }
}

#[test]
fn token_by_token_equals_one_piece() {
    let (tokens, channels, width) = (9, 21, 5);
    let shape = Sizes { lengths: &[tokens], channels, width };
    let case = Case::new(shape, FloatType::F32);
    let device = Device::cpu(Some(1)).unwrap();
    let x = Tensor::new(&case.x, &[tokens, channels], &device).unwrap();
    let weight = Tensor::new(&case.weight, &[channels, width], &device).unwrap();
    let start = Tensor::new(&case.state, &[1, channels, width - 1], &device).unwrap();
    let run = |x: &Tensor, state: &mut Tensor| {
        let cu_seqlens = Tensor::new(&[0, x.dim(0) as u32], &[2], &device).unwrap();
        causal_conv1d(x, &weight, None, state, &cu_seqlens, Some(Activation::Silu)).unwrap()
    };
    let mut whole = start.clone();
    let y = run(&x, &mut whole);
    let mut carried = start.clone();
    let steps: Vec<f32> =
        (0..tokens).flat_map(|t| values(&run(&x.rows(t, t + 1).unwrap(), &mut carried))).collect();
    numcheck::assert_bits("y", &steps, y.as_slice().unwrap());
    assert_eq!(carried.bytes(), whole.bytes());
}

/// Runs sequences whose states are rows of a pool and one after the other, and compares all bits.
pub(super) fn check_pool(device: &Device, dtype: FloatType, lengths: &[usize], slots: &[u32]) {
    let (channels, width, rows) = (37, 4, 9);
    let case = Case::new(Sizes { lengths, channels, width }, dtype);
    let tokens: usize = lengths.iter().sum();
    let host = testing::device();
    let on = |x: &[f32], shape: &[usize]| rounded(x, shape, dtype, &host).to_device(device).unwrap();
    let (x, weight) = (on(&case.x, &[tokens, channels]), on(&case.weight, &[channels, width]));
    let offsets: Vec<u32> = (0..=lengths.len()).map(|s| lengths[..s].iter().sum::<usize>() as u32).collect();
    let cu_seqlens = Tensor::new(&offsets, &[offsets.len()], device).unwrap();
    let run = |state: SlotState<'_>| {
        let y = causal_conv1d(&x, &weight, None, state, &cu_seqlens, Some(Activation::Silu)).unwrap();
        values(&y)
    };
    let per = channels * (width - 1);
    let mut expected = Random::new(7).normal(rows * per, 1.0);
    for (&slot, state) in slots.iter().zip(case.state.chunks_exact(per)) {
        expected[slot as usize * per..][..per].copy_from_slice(state);
    }
    let mut pool = Tensor::new(&expected, &[rows, channels, width - 1], device).unwrap();
    let mut states = Tensor::new(&case.state, &[lengths.len(), channels, width - 1], device).unwrap();
    let ids = Tensor::new(slots, &[slots.len()], device).unwrap();
    let want = run((&mut states).into());
    let got = run(SlotState { state: &mut pool, slots: Some(&ids) });
    numcheck::assert_bits("y", &got, &want);
    for (&slot, state) in slots.iter().zip(values(&states).chunks_exact(per)) {
        expected[slot as usize * per..][..per].copy_from_slice(state);
    }
    numcheck::assert_bits("the pool", &values(&pool), &expected);
}

#[test]
fn a_pool_of_states_gives_the_same_bits() {
    for device in devices() {
        for dtype in FLOATS {
            check_pool(&device, dtype, &[5, 0, 1, 2, 41], &[7, 1, 3, 0, 8]);
            check_pool(&device, dtype, &[1, 1, 1], &[2, 8, 5]);
        }
    }
}

#[test]
fn refusals_of_slots_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
    let run = |slots: &[u32]| {
        let cu_seqlens = Tensor::new(&[0u32, 3, 5], &[3], &device).unwrap();
        let slots = Tensor::new(slots, &[slots.len()], &device).unwrap();
        let mut pool = zeros(&[4, 7, 3]);
        let state = SlotState { state: &mut pool, slots: Some(&slots) };
        causal_conv1d(&zeros(&[5, 7]), &zeros(&[7, 4]), None, state, &cu_seqlens, None)
            .map_err(|error| error.to_string())
    };
    assert!(run(&[3, 0]).is_ok());
    assert_eq!(
        run(&[3, 4]).unwrap_err(),
        "causal_conv1d: slots[1] is 4, but there are 4 rows to choose from"
    );
    assert_eq!(run(&[3]).unwrap_err(), "causal_conv1d: cu_seqlens is [3], but slots [1] wants [2]");
}

#[test]
fn refusals_name_both_sides() {
    let device = Device::cpu(Some(1)).unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device);
    let run = |x: &[usize], weight: &[usize], bias: usize, state: &[usize]| {
        let cu_seqlens = Tensor::new(&[0u32, 3, 5], &[3], &device).unwrap();
        let bias = zeros(&[bias], DType::F32);
        let mut state = zeros(state, DType::F32);
        let (x, weight) = (zeros(x, DType::BF16), zeros(weight, DType::F16));
        causal_conv1d(&x, &weight, Some(&bias), &mut state, &cu_seqlens, None)
            .map_err(|error| error.to_string())
    };
    assert!(run(&[5, 7], &[7, 4], 7, &[2, 7, 3]).is_ok());
    for (x, weight, bias, state, message) in [
        (&[5, 7], &[8, 4], 7, &[2, 7, 3], "weight is [8, 4], but x [5, 7] wants [7, 4]"),
        (&[5, 7], &[7, 0], 7, &[2, 7, 3], "weight is [7, 0], but at least one tap is wanted"),
        (&[5, 7], &[7, 4], 6, &[2, 7, 3], "bias is [6], but x [5, 7] wants [7]"),
        (&[5, 7], &[7, 4], 7, &[2, 7, 4], "state is [2, 7, 4], but weight [7, 4] wants [2, 7, 3]"),
        (&[5, 7], &[7, 4], 7, &[3, 7, 3], "cu_seqlens is [3], but state [3, 7, 3] wants [4]"),
        (
            &[6, 7],
            &[7, 4],
            7,
            &[2, 7, 3],
            "cu_seqlens is [0, 3, 5], but it rises from 0 to the number of tokens, 6",
        ),
    ] {
        assert_eq!(run(x, weight, bias, state).unwrap_err(), format!("causal_conv1d: {message}"));
    }
}

#[test]
fn agrees_with_transformers() {
    let file = numcheck::Vectors::open("delta/causal_conv1d");
    let device = Device::cpu(None).unwrap();
    let load = |name: &str| {
        let vector = file.get(name);
        Tensor::new(&vector.f32s(), &vector.shape, &device).unwrap()
    };
    let (x, weight, bias) = (load("x"), load("weight"), load("bias"));
    let [tokens, channels] = x.shape().try_into().unwrap();
    let cu_seqlens = Tensor::new(&[0, tokens as u32], &[2], &device).unwrap();
    let state = |values: &[f32]| Tensor::new(values, &[1, channels, 3], &device).unwrap();
    let check = |peer: &str, bias: Option<&Tensor>, start: &[f32], activation| {
        let mut last = state(start);
        let y = causal_conv1d(&x, &weight, bias, &mut last, &cu_seqlens, activation).unwrap();
        let (xs, weights, bias) = (values(&x), values(&weight), bias.map(values));
        let (want, sizes) =
            reference::causal_conv1d(&xs, &weights, bias.as_deref(), start, channels, activation);
        let of_peer: Vec<f64> = file.get(peer).f32s().into_iter().map(f64::from).collect();
        // Each is within a bound of the exact value.
        assert_within(&values(&y), &of_peer, |i| 2.0 * reference::bound(want[i], sizes[i], 4, activation));
        values(&last)
    };
    check("whole", Some(&bias), &vec![0.0; channels * 3], Some(Activation::Silu));
    let last = check("update", None, &file.get("state").f32s(), None);
    numcheck::assert_bits("update_state", &last, &file.get("update_state").f32s());
}

/// Parts of the channels are those of the whole, bit for bit; the states are, too.
#[test]
fn parts_of_the_channels() {
    let all = [([32, 16, 21], false), ([32, 16, 21], true), ([3, 5, 2], false), ([3, 5, 2], true)];
    for (device, (widths, biased)) in devices().iter().flat_map(|device| all.map(|case| (device, case))) {
        let channels = widths.iter().sum();
        let shape = Sizes { lengths: &[3, 41], channels, width: 4 };
        let case = Case::new(shape, FloatType::F16);
        let tensor = |values: &[f32], shape: &[usize]| Tensor::new(values, shape, device).unwrap();
        let x = tensor(&case.x, &[44, channels]).cast(DType::F16).unwrap();
        let (weight, offsets) =
            (tensor(&case.weight, &[channels, 4]), Tensor::new(&[0u32, 3, 44], &[3], device));
        let (mut state, offsets) = (tensor(&case.state, &[2, channels, 3]), offsets.unwrap());
        let mut other = state.clone();
        let silu = Some(Activation::Silu);
        let bias = biased.then(|| tensor(&case.weight[..channels], &[channels]));
        let bias = bias.as_ref();
        let whole = causal_conv1d(&x, &weight, bias, &mut state, &offsets, silu).unwrap();
        let taps = (&weight, bias);
        let parts = causal_conv1d_parts(&x, taps, &mut other, &offsets, silu, widths).unwrap();
        let mut start = 0;
        for (part, width) in parts.iter().zip(widths) {
            let want = crate::ops::narrow(&whole, start, width).unwrap();
            assert_eq!(
                (part.shape(), values(part)),
                (want.shape(), values(&want)),
                "{widths:?} from {start}"
            );
            start += width;
        }
        assert_eq!(values(&other), values(&state));
        let error =
            causal_conv1d_parts(&x, taps, &mut other, &offsets, silu, [1; 3]).unwrap_err().to_string();
        assert!(error.contains("[1, 1, 1]"), "{error}");
    }
}
