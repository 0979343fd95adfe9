//! Names, numbers, layouts, and what must be refused.

use lowbit_formats::{Codec, Component, DType, FloatType, Format, FormatError, MAX_RUN, with_codec};

#[test]
fn names_are_the_peers() {
    let names: Vec<_> = Format::all().map(|format| format.to_string()).collect();
    for name in ["f32", "f16", "bf16", "affine4g64", "affine8g128", "mxfp4", "mxfp8", "nvfp4", "Q4_0", "Q4_K"]
        .into_iter()
        .chain(["Q2_K", "Q3_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"])
    {
        assert!(names.iter().any(|n| n == name), "{name}");
    }
    for format in Format::all() {
        assert_eq!(format.to_string().parse(), Ok(format));
    }
    let error = "Q4_2".parse::<Format>().unwrap_err();
    assert!(error.to_string().contains("Q4_2") && error.to_string().contains("IQ4_XS"), "{error}");
}

#[test]
fn ggml_numbers_are_ggmls() {
    let numbers = [(0, "f32"), (1, "f16"), (2, "Q4_0"), (3, "Q4_1"), (6, "Q5_0"), (7, "Q5_1"), (8, "Q8_0")]
        .into_iter()
        .chain([(10, "Q2_K"), (11, "Q3_K"), (12, "Q4_K"), (13, "Q5_K"), (14, "Q6_K"), (20, "IQ4_NL")])
        .chain([
            (23, "IQ4_XS"),
            (30, "bf16"),
            (39, "MXFP4"),
            (16, "IQ2_XXS"),
            (17, "IQ2_XS"),
            (18, "IQ3_XXS"),
        ])
        .chain([(19, "IQ1_S"), (21, "IQ3_S"), (22, "IQ2_S"), (29, "IQ1_M"), (34, "TQ1_0"), (35, "TQ2_0")])
        .chain([(40, "NVFP4"), (41, "Q1_0"), (42, "Q2_0")]);
    for (number, name) in numbers {
        let format = Format::from_ggml_type(number).unwrap();
        assert_eq!((format.to_string().as_str(), format.ggml_type()), (name, Some(number)));
    }
    assert_eq!(Format::from_ggml_type(36), Err(FormatError::GgmlType(36)));
    assert_eq!(Format::Mxfp4.ggml_type(), None);
    assert_eq!(Format::affine(4, 64, FloatType::F16).unwrap().ggml_type(), None);
}

#[test]
fn mlx_quantization_names_a_format() {
    let mlx = |mode, bits, group_size| Format::from_mlx(mode, bits, group_size, FloatType::F16);
    assert_eq!(mlx("affine", 4, 64), Format::affine(4, 64, FloatType::F16));
    assert_eq!(mlx("mxfp4", 4, 32), Ok(Format::Mxfp4));
    assert_eq!(mlx("mxfp8", 8, 32), Ok(Format::Mxfp8));
    assert_eq!(mlx("nvfp4", 4, 16), Ok(Format::Nvfp4));
    assert_eq!(mlx("affine", 9, 64), Err(FormatError::Affine { bits: 9, group_size: 64 }));
    assert_eq!(mlx("affine", 4, 16), Err(FormatError::Affine { bits: 4, group_size: 16 }));
    assert_eq!(mlx("affine", 260, 64), Err(FormatError::Affine { bits: 260, group_size: 64 }));
    assert_eq!(mlx("Q4_0", 4, 32), Err(FormatError::Mode("Q4_0".into())));
    let error = mlx("nvfp4", 4, 32).unwrap_err();
    assert_eq!(
        error.to_string(),
        "nvfp4 has 4 bits and groups of 16, but 4 bits and groups of 32 were asked for"
    );
}

#[test]
fn with_float_sets_what_depends_on_the_weights() {
    let affine = Format::affine(3, 32, FloatType::BF16).unwrap();
    assert_eq!(affine.with_float(FloatType::F32), Format::affine(3, 32, FloatType::F32).unwrap());
    assert_eq!(Format::Float(FloatType::F16).with_float(FloatType::BF16), Format::Float(FloatType::BF16));
    assert_eq!(Format::Q6_K.with_float(FloatType::BF16), Format::Q6_K);
}

#[test]
fn components_have_the_peers_shapes() {
    let component = |name, dtype, columns| Component { name, dtype, columns };
    let affine = Format::affine(6, 128, FloatType::BF16).unwrap();
    let want = [("weight", DType::U32, 72), ("scales", DType::BF16, 3), ("biases", DType::BF16, 3)];
    assert_eq!(affine.components(384), Ok(want.map(|(name, dtype, n)| component(name, dtype, n)).to_vec()));
    let want = vec![component("weight", DType::U32, 6), component("scales", DType::U8, 3)];
    assert_eq!(Format::Nvfp4.components(48), Ok(want));
    for (format, bytes) in [(Format::Q2_K, 84), (Format::Q3_K, 110), (Format::Q4_K, 144), (Format::Q5_K, 176)]
        .into_iter()
        .chain([(Format::Q6_K, 210), (Format::IQ4_XS, 136), (Format::Q4_0, 18 * 8), (Format::Q4_1, 20 * 8)])
        .chain([(Format::Q5_0, 22 * 8), (Format::Q5_1, 24 * 8), (Format::Q8_0, 34 * 8)])
        .chain([(Format::IQ4_NL, 18 * 8), (Format::MXFP4, 17 * 8), (Format::IQ1_S, 50), (Format::IQ1_M, 56)])
        .chain([(Format::IQ2_XXS, 66), (Format::IQ2_XS, 74), (Format::IQ2_S, 82), (Format::IQ3_XXS, 98)])
        .chain([(Format::IQ3_S, 110), (Format::TQ1_0, 54), (Format::TQ2_0, 66), (Format::Q1_0, 18 * 2)])
        .chain([(Format::Q2_0, 18 * 4)])
    {
        assert_eq!(format.components(512), Ok(vec![component("weight", DType::U8, 2 * bytes)]), "{format}");
    }
}

#[test]
fn wrong_lengths_are_refused() {
    for format in Format::all() {
        let (n, k) = (3, 256);
        let components = format.components(k).unwrap();
        let bytes: Vec<_> = components.iter().map(|c| vec![0u8; n * c.row_bytes()]).collect();
        let parts = crate::peer::parts(&bytes);
        assert_eq!(format.check(&parts, n, k), Ok(()));
        for (i, component) in components.iter().enumerate() {
            for length in [bytes[i].len() - 1, bytes[i].len() + 1, 0] {
                let wrong = vec![0; length];
                let mut parts = parts;
                parts[i] = &wrong;
                let (want, got) = (bytes[i].len(), length);
                let error = FormatError::Bytes { format, component: component.name, n, k, want, got };
                assert_eq!(format.check(&parts, n, k), Err(error.clone()));
                assert_eq!(format.decode(&parts, n, k, &mut vec![0.0; n * k]), Err(error));
            }
        }
        if components.len() < 3 {
            let mut parts = parts;
            parts[2] = &[0];
            let error = format.check(&parts, n, k).unwrap_err();
            assert!(error.to_string().contains("surplus"), "{error}");
        }
    }
}

#[test]
fn rows_that_are_no_whole_blocks_are_refused() {
    for format in Format::all().filter(|format| format.block() > 1) {
        let (block, k) = (format.block(), format.block() * 3 + 8);
        let error = FormatError::Block { format, block, k };
        assert_eq!(format.components(k), Err(error.clone()));
        assert_eq!(format.check(&[&[], &[], &[]], 1, k), Err(error));
    }
}

#[test]
fn sizes_that_overflow_are_refused() {
    for format in Format::all() {
        for (n, k) in
            [(usize::MAX, 256), (1 << 40, 1 << 40), (1, usize::MAX / 256 * 256), (usize::MAX / 2, 512)]
        {
            let error = format.check(&[&[], &[], &[]], n, k).unwrap_err();
            assert!(matches!(error, FormatError::TooLarge { .. } | FormatError::Bytes { .. }), "{error}");
        }
    }
}

#[test]
fn empty_weights_decode_to_nothing() {
    for format in Format::all() {
        for (n, k) in [(0, 256), (5, 0), (0, 0)] {
            format.decode(&[&[], &[], &[]], n, k, &mut []).unwrap();
        }
    }
}

#[test]
fn a_codec_is_its_format() {
    fn facts<C: Codec>(codec: C) -> (String, usize, usize) {
        (codec.name(), codec.block(), C::RUN)
    }
    for format in Format::all() {
        let (name, block, run) = with_codec!(format, codec => facts(codec));
        assert_eq!((name, block), (format.to_string(), format.block()));
        assert!(
            run <= MAX_RUN && (block % run == 0 || block == 1),
            "{format}: runs of {run}, blocks of {block}"
        );
    }
}
