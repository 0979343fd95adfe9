//! Codebooks: the values of codes of four bits.

use super::fit::largest_above_zero;

/// The values that codes of four bits stand for, the lower eight of them negative or 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codebook {
    /// Of IQ4_NL and IQ4_XS (ggml `kvalues_iq4nl`): denser near zero, as weights are.
    Iq4,
    /// Of IQ3_XXS: eight magnitudes and a sign.
    Iq3Xxs,
    /// Of IQ3_S: odd numbers to 15 and a sign.
    Iq3S,
    /// Of IQ2: three magnitudes and a sign.
    Iq2,
    /// Of IQ1: -1, 0 or 1, with an eighth added or subtracted.
    Iq1,
}

const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

impl Codebook {
    /// Every codebook.
    pub const ALL: [Self; 5] = [Self::Iq4, Self::Iq3Xxs, Self::Iq3S, Self::Iq2, Self::Iq1];

    /// The values in units of [`Self::unit`]; 0 for codes that the formats do not have.
    pub const fn entries(self) -> [i8; 16] {
        match self {
            Self::Iq4 => IQ4,
            Self::Iq3Xxs => with_signs([2, 6, 10, 14, 18, 22, 26, 31]),
            Self::Iq3S => with_signs([1, 3, 5, 7, 9, 11, 13, 15]),
            Self::Iq2 => with_signs([8, 25, 43, 0, 0, 0, 0, 0]),
            Self::Iq1 => [-9, -7, -1, 0, 0, 0, 0, 0, 1, 7, 9, 0, 0, 0, 0, 0],
        }
    }

    /// The power of two that entries are multiples of.
    pub const fn unit(self) -> f32 {
        match self {
            Self::Iq4 | Self::Iq3S => 1.0,
            Self::Iq3Xxs => 0.5,
            Self::Iq2 | Self::Iq1 => 0.125,
        }
    }

    /// The greatest magnitude of an entry.
    pub const fn greatest(self) -> u8 {
        let (entries, mut greatest, mut code) = (self.entries(), 0, 0);
        while code < 16 {
            let magnitude = entries[code].unsigned_abs();
            if magnitude > greatest {
                greatest = magnitude;
            }
            code += 1;
        }
        greatest
    }

    /// The codes' values in f32.
    pub const fn values(self) -> [f32; 16] {
        let (entries, mut values, mut code) = (self.entries(), [0.0; 16], 0);
        while code < 16 {
            values[code] = entries[code] as f32 * self.unit();
            code += 1;
        }
        values
    }
}

/// Code i is `-magnitudes[i]`, code 8 + i `magnitudes[i]`.
const fn with_signs(magnitudes: [i8; 8]) -> [i8; 16] {
    let (mut entries, mut i) = ([0; 16], 0);
    while i < 8 {
        entries[i] = -magnitudes[i];
        entries[8 + i] = magnitudes[i];
        i += 1;
    }
    entries
}

/// [`Codebook::Iq4`] in f32.
pub(super) const VALUES: [f32; 16] = Codebook::Iq4.values();
/// The code of the nearest value of IQ4; of two equally near, the larger.
pub(super) fn nearest(value: f32) -> u8 {
    let above = VALUES.partition_point(|&entry| entry <= value).clamp(1, 15);
    let (low, high) = (VALUES[above - 1], VALUES[above]);
    if value - low < high - value { above as u8 - 1 } else { above as u8 }
}

/// The scale of 32 values. Each of 16 grids codes them and solves for the scale of least squares
/// with weights x^2; the solution that takes away most of the error wins. The first grid has the
/// value of largest magnitude at the mirror image of the codebook's first, the other 15 are about
/// the one that has it at the first itself.
pub(super) fn fit(values: &[f32; 32]) -> f32 {
    let Some(largest) = largest_above_zero(values) else { return 0.0 };
    let mirrored = 1.0 / (-largest / VALUES[0]);
    let inverses = (-7i8..=7).map(|step| (f32::from(step) + VALUES[0]) / largest);
    let (mut scale, mut best) = (0.0, 0.0);
    for (grid, inverse) in std::iter::once(mirrored).chain(inverses).enumerate() {
        let (mut xq, mut qq) = (0.0, 0.0);
        for &value in values {
            let (weight, q) = (value * value, VALUES[usize::from(nearest(inverse * value))]);
            xq += weight * q * value;
            qq += weight * q * q;
        }
        // The first is taken even where the square of a small sum is no longer a number above 0.
        if qq > 0.0 && (grid == 0 || xq * xq > best * qq) {
            scale = xq / qq;
            best = scale * xq;
        }
    }
    scale
}
