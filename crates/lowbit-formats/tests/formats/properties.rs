use crate::peer::{FLOATS, assert_same, parts};
use lowbit_formats::{FloatType, Format, FormatError};
use proptest::prelude::*;

/// Every format; affine with each type of scales.
fn formats() -> Vec<Format> {
    let affine = |format: &Format| matches!(format, Format::Affine { .. });
    let others = Format::all().filter(|format| !affine(format));
    others
        .chain(FLOATS.iter().flat_map(|&f| Format::all().filter(affine).map(move |a| a.with_float(f))))
        .collect()
}

fn format() -> impl Strategy<Value = Format> {
    prop::sample::select(formats())
}

/// Those that are not only read.
fn written() -> impl Iterator<Item = Format> {
    formats().into_iter().filter(|format| format.encodes())
}

fn written_format() -> impl Strategy<Value = Format> {
    prop::sample::select(written().collect::<Vec<_>>())
}

/// Rows of 256 values of one magnitude, which leaves f16 scales room to be normal numbers.
fn row() -> impl Strategy<Value = Vec<f32>> {
    (-4..8i32, prop::collection::vec(-1.0f32..1.0, 256))
        .prop_map(|(exponent, values)| values.iter().map(|value| value * 2f32.powi(exponent)).collect())
}

fn decode(format: Format, components: &[Vec<u8>], k: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; k];
    format.decode(&parts(components), 1, k, &mut out).unwrap();
    out
}

/// The most that the decoded value may differ from `value`, in a block of the given extremes.
/// `None` where sub-blocks' scales are codes themselves and there is no simple bound.
fn bound(format: Format, value: f32, min: f32, max: f32) -> Option<f32> {
    let largest = min.abs().max(max.abs());
    // Half a step; a whole one where the largest code may be one too small. f16 rounds scales by up
    // to 2^-11.
    let symmetric = |half: f32, steps: f32| largest / half * (steps + 2.0 * half / 2048.0);
    let ranged = |codes: f32| (max - min) / codes * (0.5 + codes / 2048.0) + min.abs() / 2048.0;
    let bound = match format {
        Format::Float(FloatType::F32) => 0.0,
        Format::Float(FloatType::F16) => value.abs() / 2048.0 + 2f32.powi(-25),
        Format::Float(FloatType::BF16) => value.abs() / 256.0,
        Format::Affine { bits, scales, .. } => {
            let rounding = match scales {
                FloatType::F32 => 2f32.powi(-24),
                FloatType::F16 => 2f32.powi(-11),
                FloatType::BF16 => 2f32.powi(-8),
            };
            // The scale is stretched so that the larger end is a whole number of steps; the other
            // may be cut by one.
            (max - min) / (2f32.powi(bits.into()) - 1.0) + 4.0 * rounding * largest + 2f32.powi(-24)
        }
        // e2m1 has 1 mantissa bit and its subnormals end at 1/2, a power-of-two scale is below
        // `largest` / 3.
        Format::Mxfp4 | Format::Nvfp4 | Format::MXFP4 | Format::NVFP4 | Format::Fp4 => {
            (value.abs() / 4.0).max(largest / 12.0)
        }
        // e4m3 has 3 and its subnormals 2^-9.
        Format::Mxfp8 | Format::Fp8 { .. } => (value.abs() / 16.0).max(largest / 224.0 / 1024.0),
        Format::TQ1_0 | Format::TQ2_0 | Format::Q2_0 => symmetric(1.0, 0.5),
        // Every value becomes the mean magnitude.
        Format::Q1_0 => 2.0 * largest,
        Format::Q4_0 => symmetric(8.0, 1.0),
        Format::Q5_0 => symmetric(16.0, 1.0),
        Format::Q8_0 => symmetric(127.0, 0.5),
        Format::Q4_1 => ranged(15.0),
        Format::Q5_1 => ranged(31.0),
        _ => return None,
    };
    // The f32 arithmetic of the codes and of the decoded value.
    Some(bound + largest * 2f32.powi(-20))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A fuzzer's inputs: lengths that fit and lengths that do not, never a panic.
    #[test]
    fn any_bytes_decode_or_are_refused(
        format in format(),
        n in 0..4usize,
        k in 0..600usize,
        lengths in prop::collection::vec(0..3000usize, 3),
        fit in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut random = numcheck::Random::new(seed);
        let k = if fit { k / format.block() * format.block() } else { k };
        let lengths = match format.components(k) {
            Ok(components) if fit => components.iter().map(|c| n * c.row_bytes()).collect(),
            _ => lengths,
        };
        let bytes: Vec<Vec<u8>> =
            lengths.iter().map(|&length| (0..length).map(|_| random.bits() as u8).collect()).collect();
        let mut out = vec![0.0; n * k];
        let result = format.decode(&parts(&bytes), n, k, &mut out);
        prop_assert_eq!(&result, &format.check(&parts(&bytes), n, k));
        prop_assert!(!fit || result.is_ok());
        for float in FLOATS {
            prop_assert_eq!(format.decode_as(float, &parts(&bytes), n, k, &mut out).is_ok(), result.is_ok());
        }
    }

    #[test]
    fn values_decode_to_within_their_bound(format in written_format(), values in row()) {
        let decoded = decode(format, &format.encode(&values, 256).unwrap(), 256);
        let block = format.block();
        for (values, decoded) in values.chunks(block).zip(decoded.chunks(block)) {
            let min = values.iter().copied().fold(f32::INFINITY, f32::min);
            let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for (value, decoded) in values.iter().zip(decoded) {
                if let Some(bound) = bound(format, *value, min, max) {
                    let error = (value - decoded).abs();
                    prop_assert!(error <= bound, "{format}: {value} became {decoded}: {error} over {bound}");
                }
            }
        }
    }

    /// Formats whose scale is a function of the extremes find it again in what they decoded to.
    #[test]
    fn decoded_values_are_encoded_exactly(values in row()) {
        let floats = FLOATS.map(Format::Float);
        let blocks = [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0, Format::MXFP4];
        for format in floats.into_iter().chain(blocks).chain([Format::Mxfp4, Format::Mxfp8]) {
            let once = decode(format, &format.encode(&values, 256).unwrap(), 256);
            let twice = decode(format, &format.encode(&once, 256).unwrap(), 256);
            assert_same(&format.to_string(), &twice, &once);
        }
    }

    /// A row is encoded by itself.
    #[test]
    fn rows_do_not_meet(format in written_format(), a in row(), b in row()) {
        let both = format.encode(&[a.clone(), b.clone()].concat(), 256).unwrap();
        let (a, b) = (format.encode(&a, 256).unwrap(), format.encode(&b, 256).unwrap());
        for (both, (a, b)) in both.iter().zip(a.iter().zip(&b)) {
            prop_assert_eq!(both, &[&a[..], b].concat());
        }
    }
}

#[test]
fn zeros_decode_to_zeros() {
    for format in written() {
        let decoded = decode(format, &format.encode(&[0.0; 512], 512).unwrap(), 512);
        assert!(decoded.iter().all(|&value| value == 0.0), "{format}");
    }
}

/// The peers' scale bytes wrap around (see the encoders); ours end at 2^-127.
#[test]
fn subnormal_values_stay_small() {
    let values: Vec<f32> = (0..256).map(|i| (i as f32 - 128.0) * 1e-41).collect();
    for format in written() {
        // Affine has 1e-7 for its least scale, of which f16 makes 2^-23.
        let least = if matches!(format, Format::Affine { .. }) { 2f32.powi(-23) } else { 2f32.powi(-127) };
        let decoded = decode(format, &format.encode(&values, 256).unwrap(), 256);
        for (value, decoded) in values.iter().zip(decoded) {
            assert!((value - decoded).abs() <= least, "{format}: {value:e} became {decoded:e}");
        }
    }
}

#[test]
fn what_is_no_number_is_refused() {
    for format in written() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [0.5; 512];
            values[300] = value;
            match format.encode(&values, 256) {
                Err(FormatError::NotFinite { format: named, index: 300, value }) => {
                    assert!(named == format && !value.is_finite());
                }
                other => panic!("{format}: {other:?}"),
            }
        }
    }
}

/// Values of all magnitudes that f16 has, most of them small.
fn heavy_tailed() -> impl Strategy<Value = Vec<f32>> {
    (0..16i32, prop::collection::vec((-1.0f32..1.0, 0..12i32), 256)).prop_map(|(exponent, values)| {
        values.iter().map(|(value, power)| value.powi(2 * power + 1) * 2f32.powi(exponent)).collect()
    })
}

proptest! {
    /// The check for lost values has a wide margin over what encoders lose of other values: the
    /// greatest value of a block, whatever its magnitude, comes back as more than half of it.
    /// (`nvfp4` and NVFP4 have scales from 2^-9 to 448, and f16 scales of superblocks end below
    /// 1e-3 at
    /// 0. Q1_0 has the mean magnitude alone.)
    #[test]
    fn greatest_values_are_not_lost(
        format in written_format().prop_filter("a magnitude", |format| *format != Format::Q1_0),
        values in heavy_tailed(),
    ) {
        let decoded = decode(format, &format.encode(&values, 256).unwrap(), 256);
        let block = if matches!(format, Format::Float(_)) { 1 } else { format.block() };
        for (values, decoded) in values.chunks(block).zip(decoded.chunks(block)) {
            let pairs = values.iter().zip(decoded);
            let (value, decoded) = pairs.max_by(|a, b| a.0.abs().total_cmp(&b.0.abs())).unwrap();
            // From half the least scale times the greatest code to the greatest of both.
            let of_nvfp4 = 6.0 / 1024.0..=2688.0;
            let is_held = match format {
                Format::Nvfp4 | Format::NVFP4 => of_nvfp4.contains(&value.abs()),
                _ => value.abs() > 1e-3,
            };
            if is_held {
                prop_assert!((value - decoded).abs() <= value.abs() / 2.0, "{format}: {value:e} became {decoded:e}");
            }
        }
    }
}

/// The greatest value of the block that is lost is named, whatever the peer's encoder makes of it:
/// infinities, zeros, or its largest scale.
#[test]
fn outliers_are_refused_or_stored() {
    let unlimited = |format: &Format| match format {
        Format::Float(float) => *float != FloatType::F16,
        Format::Affine { scales, .. } => *scales != FloatType::F16,
        Format::Mxfp4 | Format::Mxfp8 | Format::MXFP4 | Format::Fp8 { .. } | Format::Fp4 => true,
        _ => false,
    };
    for format in written() {
        for power in [5, 6, 9, 12, 15, 19, 20, 25, 30, 37] {
            let mut values = [-0.0369; 512];
            values[303] = 10f32.powi(power);
            match format.encode(&values, 512) {
                Err(FormatError::NotFinite { index: 303, value, .. }) => assert_eq!(value, values[303]),
                Ok(components) => {
                    let decoded = decode(format, &components, 512)[303];
                    assert!((decoded - values[303]).abs() < values[303] / 2.0, "{format}: {decoded:e}");
                    assert!(power < 9 || unlimited(&format), "{format} has stored 1e{power}");
                }
                other => panic!("{format}: {other:?}"),
            }
        }
    }
}

#[test]
fn values_that_are_no_whole_rows_are_refused() {
    for format in written() {
        assert_eq!(format.encode(&[0.0; 300], 256), Err(FormatError::Rows { values: 300, k: 256 }));
        assert_eq!(format.encode(&[0.0; 4], 0), Err(FormatError::Rows { values: 4, k: 0 }));
        assert!(format.encode(&[], 0).unwrap().iter().all(Vec::is_empty));
    }
}

#[test]
fn formats_that_are_only_read_refuse_to_encode() {
    let only_read: Vec<_> = formats().into_iter().filter(|format| !format.encodes()).collect();
    assert_eq!(only_read.len(), 7);
    for format in only_read {
        assert_eq!(format.encode(&[0.0; 256], 256), Err(FormatError::OnlyRead(format)));
    }
}
