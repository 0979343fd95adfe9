use crate::peer::{FLOATS, affine, components, ggml_blocks, mlx_modes, values, vectors};
use lowbit_formats::{FloatType, Format};
use numcheck::Vectors;

const K: usize = 256;

/// Encodes rows and compares their bytes with the peer's, but for the blocks that `skip` names by
/// their values.
#[track_caller]
fn assert_encodes(
    what: &str,
    format: Format,
    source: FloatType,
    values: &[f32],
    want: &[Vec<u8>],
    skip: impl Fn(&[f32]) -> bool,
) {
    let values: Vec<f32> = values.iter().map(|&value| source.round(value)).collect();
    let got = format.encode_from(source, &values, K).unwrap();
    let block = format.block();
    let components = format.components(block).unwrap();
    assert_eq!(got.len(), want.len());
    let mut compared = 0;
    for (i, values) in values.chunks(block).enumerate().filter(|(_, values)| !skip(values)) {
        compared += 1;
        for ((got, want), component) in got.iter().zip(want).zip(&components) {
            let bytes = i * component.row_bytes()..(i + 1) * component.row_bytes();
            assert_eq!(
                got[bytes.clone()],
                want[bytes],
                "{what}: {} of block {i}, {values:?}",
                component.name
            );
        }
    }
    assert!(compared > values.len() / block / 2);
}

fn none(_: &[f32]) -> bool {
    false
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

#[test]
fn ggml_blocks_encode_as_ggml_does() {
    for format in ggml_blocks().into_iter().filter(|format| format.encodes()) {
        let vectors = vectors(format);
        let want = components(&vectors, format, "", "");
        let skip: fn(&[f32]) -> bool = match format {
            // ggml lets the scale's byte wrap around.
            Format::MXFP4 => |values| (1e-45..2f32.powi(-125)).contains(&largest(values)),
            _ => none,
        };
        assert_encodes(&format.to_string(), format, FloatType::F32, &values("values"), &want, skip);
    }
}

#[test]
fn mlx_modes_encode_as_mlx_does() {
    for format in mlx_modes() {
        let vectors = vectors(format);
        // MLX lets the scale's byte wrap around.
        let skip: fn(&[f32]) -> bool = match format {
            Format::Mxfp4 => |values| (1e-45..6.0 * 2f32.powi(-127)).contains(&largest(values)),
            Format::Mxfp8 => |values| (1e-45..448.0 * 2f32.powi(-127)).contains(&largest(values)),
            _ => none,
        };
        for float in FLOATS {
            let prefix = format!("{}.", float.dtype());
            let want = components(&vectors, format, &prefix, &prefix);
            let what = format!("{format} {prefix}");
            assert_encodes(&what, format, float, &values("values"), &want, skip);
        }
    }
}

#[test]
fn affine_encodes_as_mlx_does() {
    let vectors = Vectors::open("formats/affine");
    for (bits, group_size) in affine() {
        for float in FLOATS {
            let format = Format::affine(bits, group_size, float).unwrap();
            let prefix = format!("{bits}.{group_size}.{}.", float.dtype());
            let want = components(&vectors, format, &prefix, &prefix);
            assert_encodes(&prefix, format, float, &values("values"), &want, none);
        }
    }
}

/// Rows that f16 cannot hold. (Nor can nvfp4: its scales end at 448.)
#[test]
fn large_values_encode_as_mlx_does() {
    let vectors_of_affine = Vectors::open("formats/affine");
    for (bits, _) in affine().into_iter().filter(|&(_, group_size)| group_size == 64) {
        let format = Format::affine(bits, 64, FloatType::F32).unwrap();
        let prefix = format!("large.{bits}.64.f32.");
        let want = components(&vectors_of_affine, format, &prefix, &prefix);
        assert_encodes(&prefix, format, FloatType::F32, &values("large"), &want, none);
    }
    for format in [Format::Mxfp4, Format::Mxfp8] {
        for float in [FloatType::F32, FloatType::BF16] {
            let prefix = format!("large.{}.", float.dtype());
            let want = components(&vectors(format), format, &prefix, &prefix);
            assert_encodes(&format!("{format} {prefix}"), format, float, &values("large"), &want, none);
        }
    }
}
