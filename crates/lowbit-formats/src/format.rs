use crate::{Codec, Component, FloatType, Format, FormatError, MAX_RUN, PackBlock, Parts, Scheme, Unpacked};

impl Format {
    /// The group sizes of [`Format::Affine`]. All are powers of two and multiples of 32.
    pub(crate) const AFFINE_GROUP_SIZES: [usize; 3] = [32, 64, 128];
    /// The group sizes of [`Format::Fp8`]: that of most blocks in checkpoints, and one for others.
    const FP8_GROUP_SIZES: [usize; 2] = [32, 128];

    /// MLX affine at `bits` bits per code, with `group_size` values per scale and bias.
    ///
    /// # Errors
    /// [`FormatError::Affine`] for bits or a group size that affine does not have; its message
    /// lists those that it has.
    pub fn affine(bits: usize, group_size: usize, scales: FloatType) -> Result<Self, FormatError> {
        let width = Self::AFFINE_BITS.iter().find(|&&width| usize::from(width) == bits);
        match width {
            Some(&bits) if Self::AFFINE_GROUP_SIZES.contains(&group_size) => {
                Ok(Self::Affine { bits, group_size: group_size as u8, scales })
            }
            _ => Err(FormatError::Affine { bits, group_size }),
        }
    }

    /// Codes of e4m3 with an f32 scale per `group_size` values: 32 or 128.
    pub fn fp8(group_size: usize) -> Option<Self> {
        let known = Self::FP8_GROUP_SIZES.contains(&group_size);
        known.then_some(Self::Fp8 { group_size: group_size as u8 })
    }

    /// The format of an MLX checkpoint's `quantization: {mode, bits, group_size}`. `scales` is the
    /// type of its `scales` tensor: affine formats store scales in any float, the other modes in
    /// one type.
    ///
    /// # Errors
    /// [`FormatError::Mode`] for an unknown mode, [`FormatError::Affine`] or
    /// [`FormatError::ModeNumbers`] for bits or a group size that the mode does not have.
    pub fn from_mlx(
        mode: &str,
        bits: usize,
        group_size: usize,
        scales: FloatType,
    ) -> Result<Self, FormatError> {
        if mode == "affine" {
            return Self::affine(bits, group_size, scales);
        }
        let format = Self::from_mlx_mode(mode)?;
        let (want_bits, want_group_size) = (format.scheme().bits, format.block());
        if (bits, group_size) != (want_bits, want_group_size) {
            return Err(FormatError::ModeNumbers { format, want_bits, want_group_size, bits, group_size });
        }
        Ok(format)
    }

    /// The format of `mx.quantize` in `mode` with its default bits and group size; affine has f32
    /// scales.
    ///
    /// # Errors
    /// [`FormatError::Mode`] for an unknown mode.
    pub fn from_mlx_mode(mode: &str) -> Result<Self, FormatError> {
        if mode == "affine" {
            return Self::affine(4, 64, FloatType::F32);
        }
        let format = Self::MLX_MODES.iter().find(|format| format.to_string() == mode);
        format.copied().ok_or_else(|| FormatError::Mode(mode.into()))
    }

    /// The format with this number in GGUF files (`enum ggml_type`).
    ///
    /// # Errors
    /// [`FormatError::GgmlType`] for a number that is not supported.
    pub fn from_ggml_type(number: u32) -> Result<Self, FormatError> {
        let mut formats = Self::all();
        formats.find(|format| format.ggml_type() == Some(number)).ok_or(FormatError::GgmlType(number))
    }

    /// The format's number in GGUF files, if it has one.
    pub fn ggml_type(self) -> Option<u32> {
        with_codec!(self, codec => codec.ggml_type())
    }

    /// Every format; affine with bf16 scales.
    pub fn all() -> impl Iterator<Item = Self> {
        let floats = [FloatType::F32, FloatType::F16, FloatType::BF16].map(Self::Float);
        let affine = Self::AFFINE_BITS.iter().flat_map(|&bits| {
            let scales = FloatType::BF16;
            Self::AFFINE_GROUP_SIZES.map(|size| Self::Affine { bits, group_size: size as u8, scales })
        });
        let blocks = [Self::MLX_MODES, Self::GGML_BLOCKS].into_iter().flatten().copied();
        let fp8 = Self::FP8_GROUP_SIZES.map(|size| Self::Fp8 { group_size: size as u8 });
        floats.into_iter().chain(affine).chain(fp8).chain([Self::Fp4]).chain(blocks)
    }

    /// The same format for weights of type `float`: affine with scales of that type, plain floats
    /// as that type; the others do not depend on it.
    pub fn with_float(self, float: FloatType) -> Self {
        match self {
            Self::Float(_) => Self::Float(float),
            Self::Affine { bits, group_size, .. } => Self::Affine { bits, group_size, scales: float },
            other => other,
        }
    }

    /// Values that share one block: a row's length is a multiple of it.
    pub fn block(self) -> usize {
        with_codec!(self, codec => codec.block())
    }

    /// The meaning of codes and scales.
    pub fn scheme(self) -> Scheme {
        with_codec!(self, codec => codec.scheme())
    }

    /// The function that unpacks one block; `None` for formats whose components are codes, scales
    /// and biases already (see [`Codec::UNPACK`]). It panics unless it is given exactly one block.
    pub fn unpack(self) -> Option<fn(&[u8], &mut Unpacked)> {
        fn of<C: Codec>(_: C) -> Option<fn(&[u8], &mut Unpacked)> {
            C::UNPACK
        }
        with_codec!(self, codec => of(codec))
    }

    /// False for a format that is only read: IQ1, IQ2 and IQ3, whose codes llama.cpp chooses with
    /// an importance matrix.
    pub fn encodes(self) -> bool {
        fn of<C: Codec>(_: C) -> bool {
            C::ENCODES
        }
        with_codec!(self, codec => of(codec))
    }

    /// The inverse of [`Self::unpack`]: appends the block with these codes, one byte each, and
    /// scales; `None` too where the format does not [encode](Self::encodes). Codes and integers out
    /// of the format's range are not checked: the block then holds other values. It panics unless
    /// it is given exactly one block's codes.
    pub fn pack(self) -> Option<PackBlock> {
        fn of<C: Codec>(_: C) -> Option<PackBlock> {
            C::PACK
        }
        with_codec!(self, codec => of(codec))
    }

    /// The least and the greatest integer of [`sub_scales`](crate::BlockScales::sub_scales) and
    /// [`sub_minima`](crate::BlockScales::sub_minima).
    pub fn sub_scales(self) -> [i8; 2] {
        fn of<C: Codec>(_: C) -> [i8; 2] {
            C::SUB_SCALES
        }
        with_codec!(self, codec => of(codec))
    }

    /// Unpacks the codes of some rows into `codes`, `[rows, k]`, one byte per code; `first` holds
    /// the rows' bytes of the first component. [`Scheme::code_values`] gives the codes' values.
    ///
    /// # Errors
    /// As [`Self::components`]; [`FormatError::Codes`] for plain floats.
    ///
    /// # Panics
    /// Unless both hold the same number of whole rows.
    pub fn codes(self, first: &[u8], k: usize, codes: &mut [u8]) -> Result<(), FormatError> {
        let row_bytes = self.components(k)?[0].row_bytes();
        if let Self::Float(_) = self {
            return Err(FormatError::Codes(self));
        }
        if k == 0 {
            return Ok(());
        }
        assert!(
            first.len().is_multiple_of(row_bytes) && first.len() / row_bytes * k == codes.len(),
            "whole rows"
        );
        let Some(unpack) = self.unpack() else {
            let scheme = self.scheme();
            let rows = first.chunks_exact(row_bytes).zip(codes.chunks_exact_mut(k));
            rows.for_each(|(stream, codes)| scheme.unpack_stream(stream, codes));
            return Ok(());
        };
        let (values, mut block) = (self.block(), Unpacked::default());
        for (bytes, codes) in first.chunks_exact(row_bytes / (k / values)).zip(codes.chunks_exact_mut(values))
        {
            unpack(bytes, &mut block);
            codes.copy_from_slice(&block.codes[..values]);
        }
        Ok(())
    }

    /// The tensors that hold rows of `k` values, in the order of [`Parts`].
    ///
    /// # Errors
    /// [`FormatError::Block`] when `k` is not a multiple of [`Self::block`],
    /// [`FormatError::TooLarge`] when a row's bytes overflow.
    pub fn components(self, k: usize) -> Result<Vec<Component>, FormatError> {
        if !k.is_multiple_of(self.block()) {
            return Err(FormatError::Block { format: self, block: self.block(), k });
        }
        // No format takes 8 bytes per value, so nothing below overflows.
        if k > usize::MAX / 8 {
            return Err(FormatError::TooLarge { n: 1, k });
        }
        Ok(with_codec!(self, codec => codec.components(k)))
    }

    /// Checks that `parts` hold exactly `n` rows of `k` values.
    ///
    /// # Errors
    /// [`FormatError::Block`], [`FormatError::Bytes`] or [`FormatError::TooLarge`].
    pub fn check(self, parts: &Parts<'_>, n: usize, k: usize) -> Result<(), FormatError> {
        let components = self.components(k)?;
        for (i, part) in parts.iter().enumerate() {
            let row = components.get(i).map_or(0, Component::row_bytes);
            let want = n.checked_mul(row).ok_or(FormatError::TooLarge { n, k })?;
            if part.len() != want {
                let component = components.get(i).map_or("a surplus component", |c| c.name);
                return Err(FormatError::Bytes { format: self, component, n, k, want, got: part.len() });
            }
        }
        Ok(())
    }

    /// Decodes `n` rows of `k` values into `out`, `[n, k]`, in f32. Any bytes of the right lengths
    /// decode; where a scale is not finite, its values are not finite either.
    ///
    /// # Errors
    /// As [`Self::check`].
    ///
    /// # Panics
    /// When `out` does not hold `n * k` values.
    pub fn decode(self, parts: &Parts<'_>, n: usize, k: usize, out: &mut [f32]) -> Result<(), FormatError> {
        self.check(parts, n, k)?;
        assert_eq!(out.len(), n * k, "output length");
        with_codec!(self, codec => decode_rows(codec, parts, k, out, |row, run, out| codec.decode(row, run, out)));
        Ok(())
    }

    /// As [`Self::decode`], with the peer's roundings when it decodes to `float`. MLX computes
    /// affine in the scales' type and its other modes in `float` (`mx.dequantize(.., dtype)`, mlx
    /// 0.32); ggml computes in f32.
    ///
    /// # Errors
    /// As [`Self::check`].
    ///
    /// # Panics
    /// When `out` does not hold `n * k` values.
    pub fn decode_as(
        self,
        float: FloatType,
        parts: &Parts<'_>,
        n: usize,
        k: usize,
        out: &mut [f32],
    ) -> Result<(), FormatError> {
        self.check(parts, n, k)?;
        assert_eq!(out.len(), n * k, "output length");
        with_codec!(self, codec => decode_rows(codec, parts, k, out, |row, run, out| {
            codec.decode_as(row, run, float, out);
        }));
        Ok(())
    }

    /// Encodes `values`, `[n, k]`, into the format's components, bit for bit as the peer does from
    /// f32 weights: `mx.quantize` on its CPU backend (mlx 0.32), ggml's `quantize_*` without an
    /// importance matrix (ggml 0.25).
    ///
    /// # Errors
    /// [`FormatError::Block`] when `k` is not a multiple of [`Self::block`], [`FormatError::Rows`]
    /// when the values are not whole rows, [`FormatError::OnlyRead`] for a format that does not
    /// [encode](Self::encodes). [`FormatError::NotFinite`] for NaN or an infinity among
    /// them, and for a block whose greatest value would decode to NaN, to an infinity, or to less
    /// than half of itself: where sums overflow, the peers' encoders write zeros or their largest
    /// scale.
    pub fn encode(self, values: &[f32], k: usize) -> Result<Vec<Vec<u8>>, FormatError> {
        self.encode_from(FloatType::F32, values, k)
    }

    /// As [`Self::encode`], with the peer's roundings for weights of type `source`, in which the
    /// values were stored: MLX's modes other than affine compute in that type. (Affine rounds its
    /// scales to it: [`Self::with_float`].)
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_from(
        self,
        source: FloatType,
        values: &[f32],
        k: usize,
    ) -> Result<Vec<Vec<u8>>, FormatError> {
        let count = self.components(k)?.len();
        if !self.encodes() {
            return Err(FormatError::OnlyRead(self));
        }
        if !values.len().is_multiple_of(k) {
            return Err(FormatError::Rows { values: values.len(), k });
        }
        let not_finite = |index: usize| FormatError::NotFinite { format: self, index, value: values[index] };
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(not_finite(index));
        }
        let mut components = <[Vec<u8>; 3]>::default();
        with_codec!(self, codec => encode_rows(codec, source, values, k, &mut components))
            .map_err(not_finite)?;
        Ok(components.into_iter().take(count).collect())
    }
}

/// f16's greatest number. A block with a greater value is refused if that value comes back as less
/// than half of itself. Below it no encoder's sums overflow; f16 scales become 0 for tiny values as
/// in the peers, and `nvfp4` and NVFP4 end at 2688 as in MLX and ggml.
const OUTLIER: f32 = 65504.0;

/// Appends rows of `k` values to `components`. The error is the index of a value that would be
/// lost: the greatest one of a block, if it would not decode to at least half of itself.
fn encode_rows<C: Codec>(
    codec: C,
    source: FloatType,
    values: &[f32],
    k: usize,
    components: &mut [Vec<u8>; 3],
) -> Result<(), usize> {
    let mut decoded = [0.0; MAX_RUN];
    // Plain floats share nothing.
    let block = codec.block().max(C::RUN);
    // With k = 0 there are no values, and so no rows.
    for (n, values) in values.chunks_exact(k.max(1)).enumerate() {
        codec.encode(values, source, components);
        let row = codec.row(&components.each_ref().map(Vec::as_slice), n, k);
        for (b, values) in values.chunks(block).enumerate() {
            let by_magnitude = |&a: &usize, &b: &usize| values[a].abs().total_cmp(&values[b].abs());
            let greatest = (0..values.len()).max_by(by_magnitude).unwrap_or(0);
            for (r, run) in values.chunks(C::RUN).enumerate() {
                let decoded = &mut decoded[..run.len()];
                codec.decode(row, b * (block / C::RUN) + r, decoded);
                let value = values[greatest];
                let of_greatest = (greatest / C::RUN == r).then(|| decoded[greatest % C::RUN]);
                let is_lost = of_greatest.is_some_and(|decoded| (decoded - value).abs() > value.abs() / 2.0);
                if decoded.iter().any(|value| !value.is_finite()) || value.abs() > OUTLIER && is_lost {
                    return Err(n * k + b * block + greatest);
                }
            }
        }
    }
    Ok(())
}

fn decode_rows<'a, C: Codec>(
    codec: C,
    parts: &Parts<'a>,
    k: usize,
    out: &mut [f32],
    decode: impl Fn(C::Row<'a>, usize, &mut [f32]),
) {
    const { assert!(C::RUN <= MAX_RUN) };
    if k == 0 {
        return;
    }
    for (n, out) in out.chunks_exact_mut(k).enumerate() {
        let row = codec.row(parts, n, k);
        for (run, out) in out.chunks_mut(C::RUN).enumerate() {
            decode(row, run, out);
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&with_codec!(*self, codec => codec.name()))
    }
}

impl std::str::FromStr for Format {
    type Err = FormatError;

    /// Parses the text that `Display` writes. It does not name the type of affine's scales: they
    /// become bf16, and [`Format::with_float`] changes that.
    fn from_str(name: &str) -> Result<Self, FormatError> {
        let unknown = || FormatError::Unknown(name.into());
        Self::all().find(|format| format.to_string() == name).ok_or_else(unknown)
    }
}
