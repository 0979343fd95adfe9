//! Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (Parallel Random
//! Numbers: As Easy as 1, 2, 3, SC'11): a step's random number needs no state from the steps
//! before.

/// Four random words.
pub(crate) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let (p, q) = (u64::from(a) * 0xd251_1f53, u64::from(c) * 0xcd9e_8d57);
        [a, b, c, d] = [(q >> 32) as u32 ^ b ^ k0, q as u32, (p >> 32) as u32 ^ d ^ k1, p as u32];
        (k0, k1) = (k0.wrapping_add(0x9e37_79b9), k1.wrapping_add(0xbb67_ae85));
    }
    [a, b, c, d]
}

/// The random word of a step: uniform below 2^64.
pub(crate) fn word(step: u64, seed: u64) -> u64 {
    let [high, low, ..] =
        philox([step as u32, (step >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    u64::from(high) << 32 | u64::from(low)
}

/// [`word`] as a number in `[0, 1)`, a multiple of 2^-53.
pub(crate) fn uniform(step: u64, seed: u64) -> f64 {
    (word(step, seed) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_uses_both_words_of_step_and_seed() {
        let all =
            [(0, 0), (1, 0), (1 << 32, 0), (0, 1), (0, 1 << 32)].map(|(step, seed)| uniform(step, seed));
        for (i, x) in all.iter().enumerate() {
            assert!((0.0..1.0).contains(x) && !all[..i].contains(x), "{all:?}");
        }
    }
}
