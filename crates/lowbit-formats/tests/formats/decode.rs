use crate::peer::{FLOATS, affine, assert_same, components, ggml_blocks, mlx_modes, parts, vectors};
use lowbit_formats::{FloatType, Format};
use numcheck::Vectors;

/// Decodes `components` and compares with the peer's values, `[n, k]`.
#[track_caller]
fn assert_decodes(what: &str, format: Format, components: &[Vec<u8>], want: &numcheck::Vector) {
    let (n, k) = (want.shape[0], want.shape[1]);
    let mut out = vec![-7.0; n * k];
    format.decode(&parts(components), n, k, &mut out).unwrap();
    let mut want = want.f32s();
    if format == Format::NVFP4 {
        nan_where_scales_are_none(&components[0], &mut want);
    }
    assert_same(what, &out, &want);
}

/// Of NVFP4's 256 scales ggml reads one, 255, as 480 times 1; in e4m3 it is NaN.
fn nan_where_scales_are_none(blocks: &[u8], want: &mut [f32]) {
    let (blocks, values) = (blocks.chunks_exact(36), want.chunks_exact_mut(64));
    for (block, values) in blocks.zip(values) {
        let groups = block[..4].iter().zip(values.chunks_exact_mut(16));
        groups.filter(|(scale, _)| **scale == 255).for_each(|(_, values)| values.fill(f32::NAN));
    }
}

#[track_caller]
fn assert_decodes_as(
    what: &str,
    format: Format,
    float: FloatType,
    components: &[Vec<u8>],
    want: &numcheck::Vector,
) {
    let (n, k) = (want.shape[0], want.shape[1]);
    let mut out = vec![-7.0; n * k];
    format.decode_as(float, &parts(components), n, k, &mut out).unwrap();
    assert_same(what, &out, &want.f32s());
}

#[test]
fn ggml_blocks_decode_as_ggml_does() {
    for format in ggml_blocks() {
        let vectors = vectors(format);
        // Blocks that ggml encoded, and random bytes.
        for prefix in ["", "random."].into_iter().skip(usize::from(!format.encodes())) {
            let components = components(&vectors, format, prefix, prefix);
            let want = vectors.get(&format!("{prefix}decoded"));
            assert_decodes(&format!("{format} {prefix}"), format, &components, &want);
        }
    }
}

#[test]
fn mlx_modes_decode_as_mlx_does() {
    for format in mlx_modes() {
        let vectors = vectors(format);
        let components = components(&vectors, format, "random.", "random.");
        for float in FLOATS {
            let want = vectors.get(&format!("random.{}.decoded", float.dtype()));
            assert_decodes_as(&format!("{format} {}", float.dtype()), format, float, &components, &want);
        }
        assert_decodes(&format.to_string(), format, &components, &vectors.get("random.f32.decoded"));
    }
}

#[test]
fn affine_decodes_as_mlx_does() {
    let vectors = Vectors::open("formats/affine");
    for (bits, group_size) in affine() {
        let floats = if group_size == 64 { &FLOATS[..] } else { &FLOATS[..1] };
        for &float in floats {
            let format = Format::affine(bits, group_size, float).unwrap();
            let weight = format!("random.{bits}.{group_size}.");
            let scales = format!("{weight}{}.", float.dtype());
            let components = components(&vectors, format, &weight, &scales);
            let want = vectors.get(&format!("{scales}decoded"));
            assert_decodes_as(&format!("{format} {}", float.dtype()), format, float, &components, &want);
        }
    }
}

/// f32 scales are the case in which `decode` itself, which computes in f32, is what `mx.dequantize`
/// computes.
#[test]
fn affine_with_f32_scales_decodes_as_mlx_does() {
    let vectors = Vectors::open("formats/affine");
    let decoded = |name: &String| name.ends_with("f32.decoded");
    let mut seen = 0;
    for name in vectors.names().iter().filter(|name| decoded(name)) {
        let scales = name.strip_suffix("decoded").unwrap();
        let random = name.strip_prefix("random.");
        let weight = if random.is_some() { scales.strip_suffix("f32.").unwrap() } else { scales };
        let mut numbers = random.unwrap_or(name).split('.').map(|number| number.parse().unwrap_or(0));
        let (bits, group_size) = (numbers.next().unwrap(), numbers.next().unwrap());
        let format = Format::affine(bits, group_size, FloatType::F32).unwrap();
        assert_decodes(name, format, &components(&vectors, format, weight, scales), &vectors.get(name));
        seen += 1;
    }
    // All widths and groups of random codes, and encoded values.
    assert!(seen > affine().len(), "{seen}");
}

/// Compute decodes 16-bit scales in f32: the products and sums of the widened numbers, not rounded
/// to 16 bits.
#[test]
fn affine_with_16_bit_scales_decodes_in_f32() {
    for float in [FloatType::F16, FloatType::BF16] {
        for (bits, _) in affine().into_iter().filter(|&(_, group_size)| group_size == 32) {
            let format = Format::affine(bits, 32, float).unwrap();
            let codes: Vec<u8> = (0..bits as u8 * 4).map(|i| i.wrapping_mul(151)).collect();
            let (mut scales, mut biases) = (vec![], vec![]);
            float.push(0.0123, &mut scales);
            float.push(-0.77, &mut biases);
            let mut out = [0.0; 32];
            format.decode(&[&codes, &scales, &biases], 1, 32, &mut out).unwrap();
            let (scale, bias) = (float.round(0.0123), float.round(-0.77));
            let stream: Vec<bool> = codes.iter().flat_map(|b| (0..8).map(move |i| b >> i & 1 == 1)).collect();
            for (y, code) in out.iter().zip(stream.chunks(bits)) {
                let code: u32 = code.iter().enumerate().map(|(i, &bit)| u32::from(bit) << i).sum();
                assert_eq!(*y, code as f32 * scale + bias);
            }
        }
    }
}

#[test]
fn floats_decode_to_themselves() {
    let values = [0.0, -0.0, 1.5, -2.0, f32::INFINITY, f32::MIN_POSITIVE, 6.1e-5];
    for float in FLOATS {
        let mut bytes = vec![];
        values.iter().for_each(|&value| float.push(value, &mut bytes));
        let want: Vec<f32> = values.iter().map(|&value| float.round(value)).collect();
        let mut out = [f32::NAN; 7];
        Format::Float(float).decode(&[&bytes, &[], &[]], 1, 7, &mut out).unwrap();
        assert_same(float.dtype().name(), &out, &want);
    }
}
