//! The small floats of the OCP microscaling formats (MX specification 1.0).

/// A float of at most eight bits, as a type.
pub trait Minifloat: Copy + Send + Sync + 'static {
    /// Bits per code.
    const BITS: usize;
    /// The largest finite value.
    const MAX: f32;

    /// A code's value.
    fn decode(code: u8) -> f32;

    /// The code of a value, rounded as MLX rounds it.
    fn encode(value: f32) -> u8;
}

/// Sign, 2 exponent bits, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
#[derive(Clone, Copy, Debug)]
pub struct E2M1;

/// Sign, 4 exponent bits biased by 7, 3 mantissa bits. There is no infinity; 127 is NaN.
#[derive(Clone, Copy, Debug)]
pub struct E4M3;

/// `2^(code - 127)`. 255 is infinite, as MLX decodes it (the specification says NaN).
#[derive(Clone, Copy, Debug)]
pub struct E8M0;

const E2M1_VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

impl Minifloat for E2M1 {
    const BITS: usize = 4;
    const MAX: f32 = 6.0;

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        E2M1_VALUES[usize::from(code & 15)]
    }

    /// Rounds to nearest, ties to the smaller magnitude. Zero is encoded as 0, never as -0.
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        let midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let magnitude: u8 = midpoints.into_iter().map(|midpoint| u8::from(value.abs() > midpoint)).sum();
        if value < 0.0 && magnitude > 0 { magnitude | 8 } else { magnitude }
    }
}

impl Minifloat for E4M3 {
    const BITS: usize = 8;
    const MAX: f32 = 448.0;

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let (magnitude, sign) = (u32::from(code & 0x7f), u32::from(code & 0x80) << 24);
        // Above the subnormals only the exponent's bias changes: 127 - 7 = 120.
        let normal = f32::from_bits((magnitude << 20) + (120 << 23));
        let subnormal = magnitude as f32 / 512.0;
        let value = if magnitude < 8 { subnormal } else { normal };
        let value = if magnitude == 0x7f { f32::NAN } else { value };
        f32::from_bits(value.to_bits() | sign)
    }

    /// Rounds to nearest, ties to even; values beyond 448 become 448.
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        let (magnitude, sign) = (value.abs(), (value.to_bits() >> 24) as u8 & 0x80);
        let code = if magnitude >= Self::MAX {
            0x7e
        } else if magnitude < 1.0 / 64.0 {
            (magnitude * 512.0).round_ties_even() as u8
        } else {
            // Rounds the 20 dropped bits to even, then changes the exponent's bias.
            let bits = magnitude.to_bits();
            ((bits + 0x7ffff + (bits >> 20 & 1) - (120 << 23)) >> 20) as u8
        };
        code | sign
    }
}

impl Minifloat for E8M0 {
    const BITS: usize = 8;
    const MAX: f32 = f32::from_bits(254 << 23);

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        // 2^-127 is subnormal.
        f32::from_bits(if code == 0 { 1 << 22 } else { u32::from(code) << 23 })
    }

    /// Rounds up, to the smallest power of two that is at least `value`; zero becomes 1.
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        match value.to_bits() {
            0 => 127,
            // Up to 2^-127, the smallest scale.
            1..=0x0040_0000 => 0,
            bits => ((bits + 0x007f_ffff) >> 23) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_and_e8m0_follow_their_definitions() {
        for code in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let want = if code < 128 { magnitude } else { -magnitude };
            match code & 127 {
                127 => assert!(E4M3::decode(code).is_nan()),
                _ => assert_eq!(E4M3::decode(code).to_bits(), want.to_bits(), "{code}"),
            }
            assert_eq!(
                f64::from(E8M0::decode(code)),
                if code < 255 { 2f64.powi(i32::from(code) - 127) } else { f64::INFINITY }
            );
        }
    }

    #[test]
    fn encoding_inverts_decoding() {
        for code in 0..=255u8 {
            if code & 0x7f != 0x7f {
                assert_eq!(E4M3::encode(E4M3::decode(code)), code);
            }
            if code < 255 {
                assert_eq!(E8M0::encode(E8M0::decode(code)), code);
            }
        }
        for code in (0..16).filter(|&code| code != 8) {
            assert_eq!(E2M1::encode(E2M1::decode(code)), code);
        }
        assert_eq!(E2M1::encode(-0.0), 0);
    }

    #[test]
    fn rounding_is_as_said() {
        // Ties go to the even code, values beyond the largest to the largest.
        for code in 0..0x7eu8 {
            let middle = (E4M3::decode(code) + E4M3::decode(code + 1)) / 2.0;
            assert_eq!(E4M3::encode(middle), code + (code & 1), "{code}");
            assert_eq!(E4M3::encode(-middle), (code + (code & 1)) | 0x80, "{code}");
            assert_eq!(E4M3::encode(middle.next_down()), code);
            assert_eq!(E4M3::encode(middle.next_up()), code + 1);
        }
        assert_eq!(E4M3::encode(1e9), 0x7e);
        // Scales go up, so that the largest value is not cut off.
        assert_eq!(
            (E8M0::encode(1.0), E8M0::encode(1f32.next_up()), E8M0::encode(1f32.next_down())),
            (127, 128, 127)
        );
        assert_eq!((E8M0::encode(0.0), E8M0::encode(1e-45), E8M0::encode(f32::MIN_POSITIVE)), (127, 0, 1));
    }
}
