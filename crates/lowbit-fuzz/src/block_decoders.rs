use lowbit_formats::{FloatType, Format};

/// A format (first byte), rows (second), blocks per row (third), then the components' bytes:
/// whatever they are, they decode, and parts that are a byte short or long are refused.
pub fn block_decoders(data: &[u8]) {
    let [format, n, blocks, data @ ..] = data else { return };
    let formats: Vec<_> = Format::all().collect();
    let format = formats[usize::from(*format) % formats.len()];
    let (n, k) = (usize::from(*n) % 5, usize::from(*blocks) % 5 * format.block());
    let mut parts = [&[][..]; 3];
    let mut rest = data;
    for (part, component) in parts.iter_mut().zip(format.components(k).expect("whole blocks")) {
        let length = n * component.row_bytes();
        if length > rest.len() {
            assert!(format.check(&[rest, &[], &[]], n, k).is_err(), "{format} {n} x {k}");
            return;
        }
        (*part, rest) = rest.split_at(length);
    }
    let mut values = vec![0.0; n * k];
    format.decode(&parts, n, k, &mut values).expect("bytes of the right lengths");
    for float in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        format.decode_as(float, &parts, n, k, &mut values).expect("bytes of the right lengths");
    }
    if values.iter().all(|value| value.is_finite()) && k > 0 {
        // Values far apart may be more than a scale can say, which is an error.
        _ = format.encode(&values, k);
    }
    let longer = [parts[0], &[0]].concat();
    assert!(format.check(&[&longer, parts[1], parts[2]], n, k).is_err(), "{format} {n} x {k}");
}
