//! Blocks put together, and scales rounded to what a block can say.

use lowbit_formats::{BlockScales, Codes, Format, Scales, Unpacked};
use numcheck::Random;

fn blocks() -> impl Iterator<Item = Format> {
    Format::all().filter(|format| format.unpack().is_some())
}

/// A block of random bytes, and what it unpacks to.
fn random(format: Format, random: &mut Random) -> (Vec<u8>, Unpacked) {
    let length = format.components(format.block()).unwrap()[0].row_bytes();
    let bytes: Vec<u8> = (0..length).map(|_| random.bits() as u8).collect();
    let mut block = Unpacked::default();
    format.unpack().unwrap()(&bytes, &mut block);
    (bytes, block)
}

#[test]
fn packing_is_the_inverse_of_unpacking_whatever_the_bytes() {
    let mut rng = Random::new(1);
    assert_eq!(blocks().filter(|format| format.pack().is_some()).count(), 18);
    for format in blocks().filter(|format| format.pack().is_some()) {
        let mut seen = [i8::MAX, i8::MIN];
        let groups = format.block() / format.scheme().group_size().unwrap();
        for _ in 0..300 {
            let (bytes, block) = random(format, &mut rng);
            let mut packed = vec![7];
            format.pack().unwrap()(&block.codes[..format.block()], &block.scales, &mut packed);
            if format == Format::TQ1_0 {
                // A byte has 256 values, of which 243 are used.
                let mut again = Unpacked::default();
                format.unpack().unwrap()(&packed[1..], &mut again);
                assert_eq!((again.codes, again.scales), (block.codes, block.scales));
            } else if format == Format::NVFP4 {
                // A scale's sign counts for nothing, and 127 is 0.
                let scales = bytes[..4].iter().map(|&scale| if scale == 127 { 0 } else { scale & 127 });
                assert_eq!(packed[1..5], scales.collect::<Vec<_>>());
                assert_eq!(packed[5..], bytes[4..]);
            } else {
                assert_eq!(packed, [&[7], &bytes[..]].concat(), "{format}");
            }
            let BlockScales { sub_scales, sub_minima, .. } = block.scales;
            let minima = if format.scheme().biased() { groups } else { 0 };
            for &integer in sub_scales[..groups].iter().chain(&sub_minima[..minima]) {
                seen = [seen[0].min(integer), seen[1].max(integer)];
            }
        }
        // Random bytes have all integers that a format can have.
        assert_eq!(seen, format.sub_scales(), "{format}");
    }
    let packs = |format: Format| format.unpack().is_some() && format.encodes();
    assert!(Format::all().all(|format| format.pack().is_some() == packs(format)));
}

#[test]
fn products_are_what_decoding_multiplies_and_adds() {
    let mut rng = Random::new(2);
    for format in blocks() {
        let (scheme, n) = (format.scheme(), format.block());
        let (values, size) = (scheme.code_values().unwrap(), scheme.group_size().unwrap());
        let mut compared = 0;
        for _ in 0..100 {
            let (bytes, block) = random(format, &mut rng);
            let mut decoded = vec![0.0; n];
            format.decode(&[&bytes, &[], &[]], 1, n, &mut decoded).unwrap();
            let products = scheme.products(&block.scales);
            for (i, decoded) in decoded.into_iter().enumerate().filter(|(_, y)| y.is_finite()) {
                let [scale, bias] = [products.scales[i / size], products.biases[i / size]];
                if scale.is_finite() {
                    assert_eq!(values[usize::from(block.codes[i])] * scale + bias, decoded, "{format}");
                    compared += 1;
                }
            }
        }
        assert!(compared > 50 * n, "{format}");
    }
}

/// A block as encoders make them: its f16s are of the size of weights' scales, and not below 0
/// where integers have no sign.
fn plausible(format: Format, rng: &mut Random) -> BlockScales {
    let (_, Unpacked { mut scales, .. }) = random(format, rng);
    let signed = format.sub_scales()[0] < 0 || matches!(format.scheme().scales, Scales::Group { .. });
    let of = |bits: u64| BlockScales::of((bits % 1000 + 1) as f32 * 1e-4, 0.0).scale;
    if let Scales::E8M0 { .. } = format.scheme().scales {
        scales.scale %= 255;
        return scales;
    }
    if let Scales::E4M3 = format.scheme().scales {
        // 127 is NaN.
        scales.sub_scales = scales.sub_scales.map(|code| code % 127);
        return scales;
    }
    scales.scale = of(rng.bits()) | if signed { rng.bits() as u16 & 0x8000 } else { 0 };
    if format.scheme().biased() {
        scales.min = of(rng.bits());
    }
    scales
}

#[test]
fn scales_that_have_not_moved_are_the_previous_ones() {
    let mut rng = Random::new(3);
    for format in blocks() {
        for _ in 0..200 {
            let previous = plausible(format, &mut rng);
            let products = format.scheme().products(&previous);
            let nearest = format.nearest_scales(&products.scales, &products.biases, &previous);
            assert_eq!(nearest, previous, "{format}");
        }
    }
}

/// The allowed mean error of products, in steps between two integers. The wanted ones are up to 0.2
/// steps away from some that the format has, and the search finds other factors than those.
const ALLOWED: f32 = 0.35;

#[test]
fn scales_that_have_moved_are_near_to_what_was_wanted() {
    let mut rng = Random::new(4);
    let is_learned = |format: &Format| matches!(format.scheme().codes, Codes::Integer { .. });
    for format in blocks().filter(is_learned) {
        let (scheme, groups) = (format.scheme(), format.block() / format.scheme().group_size().unwrap());
        for _ in 0..200 {
            let (previous, aim) = (plausible(format, &mut rng), plausible(format, &mut rng));
            let mut wanted = scheme.products(&aim);
            let step = |wanted: &[f32; 16]| {
                let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let integers = f32::from(format.sub_scales()[1]);
                // Without integers there is an f16's rounding alone.
                if integers == 0.0 { largest / 2048.0 / ALLOWED } else { largest / integers }
            };
            let steps = [step(&wanted.scales), step(&wanted.biases)];
            for s in 0..groups {
                wanted.scales[s] += 0.2 * steps[0] * rng.uniform();
                wanted.biases[s] += 0.2 * steps[1] * rng.uniform();
            }
            let nearest = format.nearest_scales(&wanted.scales, &wanted.biases, &previous);
            let got = scheme.products(&nearest);
            let [least, most] = format.sub_scales();
            let minima = if scheme.biased() { groups } else { 0 };
            let mut all = nearest.sub_scales[..groups].iter().chain(&nearest.sub_minima[..minima]);
            assert!(all.all(|integer| (least..=most).contains(integer)), "{format}");
            let error = |got: &[f32; 16], wanted: &[f32; 16]| {
                (0..groups).map(|s| (got[s] - wanted[s]).powi(2)).sum::<f32>().sqrt() / (groups as f32).sqrt()
            };
            assert!(error(&got.scales, &wanted.scales) <= ALLOWED * steps[0], "{format}: {wanted:?} {got:?}");
            if scheme.biased() {
                assert!(
                    error(&got.biases, &wanted.biases) <= ALLOWED * steps[1],
                    "{format}: {wanted:?} {got:?}"
                );
            }
        }
    }
}

#[test]
fn what_no_block_can_say_is_the_nearest_that_it_can() {
    let zero = BlockScales::default();
    // Q4_K's scales are not below 0, and its biases not above.
    let (mut scales, mut biases) = ([0.5; 8], [-0.25; 8]);
    (scales[3], biases[5]) = (-1.0, 0.75);
    let products = Format::Q4_K.scheme().products(&Format::Q4_K.nearest_scales(&scales, &biases, &zero));
    for s in 0..8 {
        let near = |got: f32, want: f32| assert!((got - want).abs() <= 1e-3, "{s}: {got} {want}");
        near(products.scales[s], scales[s].max(0.0));
        near(products.biases[s], biases[s].min(0.0));
    }
    // All below 0, and what is no number: the previous block's.
    let previous = BlockScales { scale: 0x2000, ..zero };
    assert_eq!(Format::Q4_K.nearest_scales(&[-1.0; 8], &[1.0; 8], &previous), previous);
    assert_eq!(Format::Q6_K.nearest_scales(&[f32::NAN; 16], &[], &previous), previous);
    // Of either sign in Q6_K, to the greatest integers of it.
    let wanted: [f32; 16] = std::array::from_fn(|s| s as f32 - 9.0);
    let got = Format::Q6_K.scheme().products(&Format::Q6_K.nearest_scales(&wanted, &[], &zero)).scales;
    assert!(got.iter().zip(wanted).all(|(got, want)| (got - want).abs() < 0.04), "{got:?}");
}
