use crate::codec::vectorise_within_runs;
use crate::{Codec, Codes, Component, FloatType, Parts, Scales, Scheme};

/// Plain floats as a [`Codec`]: little-endian, row after row, any `k`.
#[derive(Clone, Copy, Debug)]
pub struct Float(pub FloatType);

impl Codec for Float {
    const RUN: usize = 32;
    type Row<'a> = &'a [u8];

    fn name(&self) -> String {
        self.0.dtype().to_string()
    }

    fn block(&self) -> usize {
        1
    }

    fn components(&self, k: usize) -> Vec<Component> {
        vec![Component { name: "weight", dtype: self.0.dtype(), columns: k }]
    }

    fn scheme(&self) -> Scheme {
        Scheme { bits: 8 * self.0.size(), codes: Codes::Float(self.0), scales: Scales::One }
    }

    fn ggml_type(&self) -> Option<u32> {
        Some(match self.0 {
            FloatType::F32 => 0,
            FloatType::F16 => 1,
            FloatType::BF16 => 30,
        })
    }

    #[inline(always)]
    fn row<'a>(&self, parts: &Parts<'a>, index: usize, k: usize) -> &'a [u8] {
        let bytes = k * self.0.size();
        &parts[0][index * bytes..][..bytes]
    }

    #[inline(always)]
    fn decode(&self, row: &[u8], index: usize, out: &mut [f32]) {
        vectorise_within_runs();
        self.0.widen(&row[index * Self::RUN * self.0.size()..], out);
    }

    fn encode(&self, values: &[f32], _: FloatType, [weight, ..]: &mut [Vec<u8>; 3]) {
        values.iter().for_each(|&value| self.0.push(value, weight));
    }
}
