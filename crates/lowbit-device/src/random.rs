/// SplitMix64: reproducible test data, the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that yields the same sequence for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `n` values, roughly normal (the sum of four uniforms), standard deviation `scale`.
    pub fn normal(&mut self, n: usize, scale: f32) -> Vec<f32> {
        let deviation = (4.0f32 / 3.0).sqrt();
        (0..n).map(|_| (0..4).map(|_| self.uniform()).sum::<f32>() * (scale / deviation)).collect()
    }
}
