use super::*;
use lowbit_formats::{E4M3, Minifloat};

/// Every operation once, on distinct lanes, so that a swapped operand or lane shows.
struct Operations;

impl Kernel for Operations {
    type Output = Vec<Vec<f32>>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vec<Vec<f32>> {
        let a: Vec<f32> = (0..S::LANES).map(|i| i as f32 * 3.0 - 7.0).collect();
        let b: Vec<f32> = (0..S::LANES).map(|i| (i * i) as f32 - 11.0).collect();
        let (va, vb, vc) = (simd.load(&a), simd.load(&b), simd.splat(0.5));
        let vectors = [
            simd.add(va, vb),
            simd.mul(va, vb),
            simd.mul_add(va, vb, vc),
            simd.max(va, vb),
            simd.splat(simd.sum(vb)),
            simd.sub(va, vb),
            simd.div(va, vb),
            simd.min(va, vb),
            simd.select_lt(va, vb, vc, va),
            simd.scale_exp2(vb, va),
            simd.splat(simd.max_lane(va)),
            simd.load_partial(&a[..S::LANES.min(3)], 0.5),
        ];
        let wanted: [fn(f32, f32, f32) -> f32; 12] = [
            |a, b, _| a + b,
            |a, b, _| a * b,
            |a, b, _| a * b + 0.5,
            |a, b, _| a.max(b),
            |_, _, sum| sum,
            |a, b, _| a - b,
            |a, b, _| a / b,
            |a, b, _| a.min(b),
            |a, b, _| if a < b { 0.5 } else { a },
            |a, b, _| b * a.exp2(),
            |_, _, _| S::LANES as f32 * 3.0 - 10.0,
            |a, _, _| if a < 0.0 { a } else { 0.5 },
        ];
        let sum = b.iter().sum();
        for (v, want) in vectors.iter().zip(wanted) {
            let mut got = vec![f32::NAN; S::LANES];
            simd.store(*v, &mut got);
            let want: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| want(a, b, sum)).collect();
            assert_eq!(got, want, "{} lanes", S::LANES);
        }
        vec![a, b]
    }
}

#[test]
fn every_instruction_set_computes_the_same() {
    let all = Isa::all();
    assert!(!all.is_empty());
    for isa in all {
        isa.dispatch(Operations);
    }
    Operations.run::<Scalar>(Lanes);
}

/// NaN and the subnormals: what the lanes above do not reach.
struct Edges;

impl Kernel for Edges {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let lane = |v: S::V| {
            let mut lanes = [f32::NAN; 3];
            simd.store_partial(v, &mut lanes);
            lanes[2]
        };
        let (nan, one) = (simd.splat(f32::NAN), simd.splat(1.0));
        assert!(lane(simd.max(one, nan)).is_nan() && lane(simd.min(one, nan)).is_nan());
        assert_eq!((lane(simd.max(nan, one)), lane(simd.min(nan, one))), (1.0, 1.0));
        assert_eq!(lane(simd.select_lt(nan, one, nan, one)), 1.0);
        assert!(lane(simd.scale_exp2(nan, nan)).is_nan());
        let tiny = f32::from_bits(1);
        for (n, want) in
            [(-149.0, tiny), (-151.0, 0.0), (-252.0, 0.0), (127.0, 2f32.powi(127)), (128.0, f32::INFINITY)]
        {
            assert_eq!(lane(simd.scale_exp2(one, simd.splat(n))), want, "2^{n}");
        }
        assert_eq!(lane(simd.scale_exp2(simd.splat(tiny), simd.splat(149.0))), 1.0);
        assert_eq!(lane(simd.scale_exp2(simd.splat(tiny), simd.splat(254.0))), 2f32.powi(105));
    }
}

#[test]
fn every_instruction_set_agrees_at_the_edges() {
    for isa in Isa::all() {
        isa.dispatch(Edges);
    }
}

/// Loads that widen, and many sums at once.
struct Widening;

impl Kernel for Widening {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut got = vec![f32::NAN; S::LANES];
        // Every f16 and bf16, subnormals, infinities and NaN among them; one element more than is
        // loaded.
        for bits in (0..=u16::MAX).step_by(S::LANES) {
            let all = (0..=S::LANES as u16).map(|i| bits.wrapping_add(i));
            let halves: Vec<f16> = all.clone().map(f16::from_bits).collect();
            let brains: Vec<bf16> = all.map(bf16::from_bits).collect();
            simd.store(simd.load_f16(&halves), &mut got);
            for (got, want) in got.iter().zip(&halves) {
                let want = want.to_f32();
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{got} {want}");
            }
            simd.store(simd.load_bf16(&brains), &mut got);
            for (got, want) in got.iter().zip(&brains) {
                assert_eq!(got.to_bits(), u32::from(want.to_bits()) << 16);
            }
        }
        for first in (0..=u8::MAX).step_by(S::LANES) {
            let bytes: Vec<u8> = (0..=S::LANES as u8).map(|i| first.wrapping_add(i)).collect();
            simd.store(simd.load_u8(&bytes), &mut got);
            assert!(got.iter().zip(&bytes).all(|(&got, &want)| got == f32::from(want)), "{got:?} {bytes:?}");
            simd.store(simd.load_i8(&bytes), &mut got);
            assert!(
                got.iter().zip(&bytes).all(|(&got, &want)| got == f32::from(want as i8)),
                "{got:?} {bytes:?}"
            );
            simd.store(simd.load_e8m0(&bytes), &mut got);
            let power = |byte: u8| if byte == 255 { f32::INFINITY } else { 2f32.powi(i32::from(byte) - 127) };
            assert!(got.iter().zip(&bytes).all(|(&got, &want)| got == power(want)), "{got:?} {bytes:?}");
        }
        // Whole numbers that tell lanes and vectors apart: their sums are exact.
        let rows: Vec<Vec<f32>> =
            (0..S::LANES).map(|i| (0..S::LANES).map(|j| ((i + 1) * (j * j + 3)) as f32).collect()).collect();
        let mut vectors = [simd.splat(0.0); MAX_LANES];
        for (vector, row) in vectors.iter_mut().zip(&rows) {
            *vector = simd.load(row);
        }
        simd.store(simd.sum_each(&vectors[..S::LANES]), &mut got);
        let want: Vec<f32> = rows.iter().map(|row| row.iter().sum()).collect();
        assert_eq!(got, want, "{} lanes", S::LANES);
    }
}

#[test]
fn every_instruction_set_widens_and_sums_the_same() {
    for isa in Isa::all() {
        isa.dispatch(Widening);
    }
    Widening.run::<Scalar>(Lanes);
}

/// Rounding to bf16.
struct Rounding;

impl Kernel for Rounding {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut random = crate::random::Random::new(1);
        for turn in 0..20_000 {
            let mut values = || -> Vec<f32> {
                // Every second turn halfway between two bf16, or next to it.
                let near = |bits: u32| (bits & 0xffff_0000) + 0x7fff + (bits & 3);
                let bits = || random.bits() as u32;
                let values = std::iter::repeat_with(bits).take(S::LANES);
                values.map(|bits| f32::from_bits(if turn % 2 == 0 { bits } else { near(bits) })).collect()
            };
            let (first, second) = (values(), values());
            let mut pairs = vec![[bf16::ZERO; 2]; S::LANES + 1];
            simd.store_bf16_pairs(simd.load(&first), simd.load(&second), &mut pairs);
            let mut singles = vec![bf16::ZERO; S::LANES + 1];
            simd.store_bf16(simd.load(&first), &mut singles);
            for (single, pair) in singles.iter().zip(&pairs) {
                let same = single.to_bits() == pair[0].to_bits() || single.is_nan() && pair[0].is_nan();
                assert!(same, "{} lanes: {single} {}", S::LANES, pair[0]);
            }
            for (pair, values) in pairs.iter().zip(first.iter().zip(&second)) {
                for (got, &value) in pair.iter().zip([values.0, values.1]) {
                    let want = bf16::from_f32(value);
                    let lost = value.abs() <= f32::MIN_POSITIVE && got.to_f32().abs() <= f32::MIN_POSITIVE;
                    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                    assert!(same || lost, "{} lanes: {got} of {value:e}", S::LANES);
                }
            }
            assert_eq!(pairs[S::LANES], [bf16::ZERO; 2]);
        }
    }
}

#[test]
fn every_instruction_set_rounds_to_bf16_the_same() {
    for isa in Isa::all() {
        isa.dispatch(Rounding);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = Avx512::<true>::detect() {
        simd.run(Rounding);
    }
}

/// Bytes in pairs, and lanes twice.
struct Pairing;

impl Kernel for Pairing {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut random = crate::random::Random::new(3);
        for _ in 0..100 {
            let bytes: Vec<u8> = std::iter::repeat_with(|| random.bits() as u8).take(4 * S::LANES).collect();
            let narrow: Vec<u8> = bytes.iter().map(|byte| byte & 127).collect();
            let lanes: Vec<f32> = bytes.iter().take(S::LANES).map(|&byte| f32::from(byte) / 3.0).collect();
            let got = stored(simd, simd.twice(simd.load(&lanes)));
            assert!(got.iter().enumerate().all(|(i, &got)| got == lanes[i / 2]), "{got:?} {lanes:?}");
            let [all, below] = [&bytes, &narrow].map(|bytes| simd.load_bytes(bytes));
            for (first, pairs, fractions) in [
                (0, simd.byte_pairs::<0>(all), simd.byte_fractions::<0>(below)),
                (1, simd.byte_pairs::<1>(all), simd.byte_fractions::<1>(below)),
                (2, simd.byte_pairs::<2>(all), simd.byte_fractions::<2>(below)),
            ] {
                let (pairs, fractions) = (stored(simd, pairs), stored(simd, fractions));
                for i in 0..2 * S::LANES {
                    let from = i / 2 * 4 + first + i % 2;
                    assert_eq!(pairs[i], f32::from(bytes[from]), "{} lanes, byte {first}", S::LANES);
                    assert_eq!(fractions[i], f32::from(128 + narrow[from]) / 256.0);
                }
            }
            let mut rounded = vec![bf16::ZERO; 2 * S::LANES + 1];
            let pairs = simd.twice(simd.load(&lanes));
            simd.store_two_bf16(pairs, &mut rounded);
            let want = stored(simd, pairs).into_iter().map(bf16::from_f32).chain([bf16::ZERO]);
            assert_eq!(rounded, want.collect::<Vec<_>>());
        }
    }
}

/// The lanes of two vectors.
#[inline(always)]
fn stored<S: Simd>(simd: S, [first, second]: [S::V; 2]) -> Vec<f32> {
    let mut lanes = vec![0.0; 2 * S::LANES];
    simd.store(first, &mut lanes);
    simd.store(second, &mut lanes[S::LANES..]);
    lanes
}

#[test]
fn every_instruction_set_pairs_bytes() {
    for isa in Isa::all() {
        isa.dispatch(Pairing);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = Avx512::<true>::detect() {
        simd.run(Pairing);
    }
}

/// A transposition.
struct Transpose;

impl Kernel for Transpose {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // Signalling NaNs among them.
        let bits = |i: usize, j: usize| 0x7f80_0000 + (16 * i + j) as u32 * 0x1_0001;
        let mut tile = std::array::from_fn(|i| std::array::from_fn(|j| bits(i, j)));
        simd.transpose(&mut tile);
        assert_eq!(tile, std::array::from_fn(|i| std::array::from_fn(|j| bits(j, i))));
    }
}

#[test]
fn every_instruction_set_transposes_the_same() {
    for isa in Isa::all() {
        isa.dispatch(Transpose);
    }
}

/// Dot products of bytes below 64, and short sums of those below 16, against plain integers.
#[inline(always)]
fn sums_of_small_codes<S: Simd>(simd: S) {
    // Operands of eight products of a short sum: all at their greatest first, and at their least.
    for shift in 0..20usize {
        let signed = |step: usize, i: usize| match shift {
            0 => 127,
            1 => -127,
            _ => ((step * 53 + i * 29 + shift * 7) % 255) as i32 - 127,
        };
        let unsigned = |step: usize, i: usize, most: usize| match shift {
            0 | 1 => most as u8,
            _ => ((step * 31 + i * 37 + shift * 11) % (most + 1)) as u8,
        };
        let operands = |step: usize, most: usize| {
            let u: [u8; 64] = std::array::from_fn(|i| unsigned(step, i, most));
            let s: [u8; 64] = std::array::from_fn(|i| signed(step, i) as i8 as u8);
            (simd.load_bytes(&u), simd.load_bytes(&s))
        };
        let check = |got: S::I, steps: usize, most: usize| {
            let mut bits = vec![0.0; S::LANES];
            simd.store(simd.f32_from_bits(got), &mut bits);
            for (lane, bits) in bits.iter().enumerate() {
                let products = (0..steps).flat_map(|step| {
                    (4 * lane..4 * lane + 4)
                        .map(move |i| i32::from(unsigned(step, i, most)) * signed(step, i))
                });
                let want = 0x4b40_0000 + products.sum::<i32>();
                assert_eq!(bits.to_bits() as i32, want, "{} lanes, lane {lane}, codes to {most}", S::LANES);
            }
        };
        let start = simd.splat_i32(0x4b40_0000);
        let mut short = simd.begin_short_sum(start);
        for step in 0..8 {
            let (u, s) = operands(step, 15);
            short = simd.short_dot4(short, u, s);
        }
        check(simd.end_short_sum(start, short), 8, 15);
        let [(first, x), (second, y)] = [operands(0, 63), operands(1, 63)];
        let sum = simd.short_dot4(simd.begin_short_sum(start), first, x);
        check(simd.end_short_sum(start, simd.short_dot4(sum, second, y)), 2, 63);
    }
}

/// Dot products of bytes and tables, against plain integers.
struct Bytes;

impl Kernel for Bytes {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // Every pair of an extreme and something else; -128 is no operand.
        for (narrow, most) in [(true, 127), (false, 255)] {
            for shift in 0..40usize {
                let unsigned = |i: usize| {
                    if i.is_multiple_of(5) {
                        most
                    } else {
                        ((i * 37 + shift * 11) % (usize::from(most) + 1)) as u8
                    }
                };
                let signed = |i: usize| {
                    if i.is_multiple_of(3) { 127 } else { ((i * 29 + shift * 7) % 255) as i32 - 127 }
                };
                let u: [u8; 64] = std::array::from_fn(unsigned);
                let s: [u8; 64] = std::array::from_fn(|i| signed(i) as i8 as u8);
                let (start, mut bits) = (0x4b40_0000, vec![0.0; S::LANES]);
                let (sum, u_v, s_v) = (simd.splat_i32(start), simd.load_bytes(&u), simd.load_bytes(&s));
                let product =
                    if narrow { simd.dot4::<true>(sum, u_v, s_v) } else { simd.dot4::<false>(sum, u_v, s_v) };
                simd.store(simd.f32_from_bits(product), &mut bits);
                for (lane, bits) in bits.iter().enumerate() {
                    let offset = if narrow { 0 } else { S::DOT4_OFFSET };
                    let products = (4 * lane..4 * lane + 4).map(|i| (i32::from(u[i]) - offset) * signed(i));
                    assert_eq!(
                        bits.to_bits() as i32,
                        start + products.sum::<i32>(),
                        "{} lanes, lane {lane}",
                        S::LANES
                    );
                }
            }
        }
        sums_of_small_codes(simd);
        let words: Vec<f32> =
            (0..MAX_LANES as u32).map(|i| f32::from_bits((i * 0x0123_4567) ^ 0x80ff)).collect();
        let mut low = vec![0xa5; S::LANES + 1];
        simd.store_low_bytes(simd.load(&words), &mut low);
        let want = words[..S::LANES].iter().map(|word| word.to_bits() as u8).chain([0xa5]);
        assert_eq!(low, want.collect::<Vec<_>>(), "{} lanes", S::LANES);
        let bytes: [u8; 64] = std::array::from_fn(|i| (i * 101) as u8);
        let lanes = simd.load_bytes(&bytes);
        let all =
            [simd.byte::<0>(lanes), simd.byte::<1>(lanes), simd.byte::<2>(lanes), simd.byte::<3>(lanes)];
        for (i, v) in all.into_iter().enumerate() {
            let mut got = vec![f32::NAN; S::LANES];
            simd.store(v, &mut got);
            assert!(
                got.iter().zip(bytes.chunks(4)).all(|(&got, bytes)| got == f32::from(bytes[i])),
                "byte {i}"
            );
        }
        let all: [u8; 256] = std::array::from_fn(|code| code as u8);
        for bytes in all.chunks_exact(4 * S::LANES) {
            let lanes = simd.load_bytes(bytes);
            let values =
                [simd.e4m3::<0>(lanes), simd.e4m3::<1>(lanes), simd.e4m3::<2>(lanes), simd.e4m3::<3>(lanes)];
            for (i, v) in values.into_iter().enumerate() {
                let mut got = vec![f32::NAN; S::LANES];
                simd.store(v, &mut got);
                for (got, bytes) in got.into_iter().zip(bytes.chunks_exact(4)) {
                    let want = E4M3::decode(bytes[i]);
                    let got = got * f32::from_bits((127 + 120) << 23);
                    assert!(want.is_nan() || got.to_bits() == want.to_bits(), "e4m3 {}: {got}", bytes[i]);
                }
            }
        }
        let table = std::array::from_fn(|i| (i * i) as u8 ^ 0xa5);
        let both = simd.or(simd.move_bits(lanes, 0, 0x0f), simd.move_bits(lanes, -3, 0x10));
        let moved = [both, simd.move_bits(lanes, 4, 0xf0), simd.move_bits(lanes, -6, 0x03)];
        let mut got = [[0; 64]; 3];
        moved.iter().zip(&mut got).for_each(|(&moved, got)| simd.store_bytes(moved, got));
        for (i, byte) in bytes[..4 * S::LANES].iter().enumerate() {
            let want = [byte & 0x0f | byte >> 3 & 0x10, byte << 4, byte >> 6];
            assert_eq!(got.map(|got| got[i]), want, "byte {i} of {} lanes", S::LANES);
        }
        let codes: [u8; 64] = std::array::from_fn(|i| (i * 7 % 16) as u8);
        let mut found = [0; 64];
        simd.store_bytes(simd.lookup(&table, simd.load_bytes(&codes)), &mut found);
        assert!((0..4 * S::LANES).all(|i| found[i] == table[i * 7 % 16]));
    }
}

#[test]
fn every_instruction_set_multiplies_bytes_exactly() {
    for isa in Isa::all() {
        isa.dispatch(Bytes);
        assert_eq!(Isa::named(isa.name()).map(Isa::name), Some(isa.name()));
    }
    Bytes.run::<Scalar>(Lanes);
    assert!(Isa::named("sse2").is_none());
}
