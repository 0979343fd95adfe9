use super::*;
use crate::Device;
use crate::ops::attention::reference::{Answer, Operands};
use crate::ops::testing::{FLOATS, assert_close, device, devices, tensor};
use crate::ops::{PAGE_TOKENS, kv_append_paged};
use lowbit_formats::FloatType;
use numcheck::Random;

/// One call's sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub heads: usize,
    pub capacity: usize,
    pub rank: usize,
    /// Elements of a latent.
    pub width: usize,
}

pub(super) const CASE: Case = Case { heads: 6, capacity: 150, rank: 13, width: 20 };
/// The sizes of DeepSeek V2 and V3 and of GLM-4.7-Flash.
pub(super) const PUBLISHED: Case = Case { heads: 20, capacity: 70, rank: 512, width: 576 };

impl Case {
    fn params(&self) -> LatentAttentionParams {
        LatentAttentionParams { rank: self.rank, scale: 0.3, exact: true }
    }

    /// Queries for these positions, and latents: NaN past the last one that is seen.
    fn numbers(&self, positions: &[u32], [dtype, cache]: [FloatType; 2]) -> [Vec<f32>; 2] {
        let mut random = Random::new(positions.len() as u64 + self.width as u64);
        let q = random.normal(positions.len() * self.heads * self.width, 1.5);
        let last = positions.iter().max().map_or(0, |&last| last as usize);
        let latents = random.normal(self.capacity * self.width, 1.5).into_iter().enumerate();
        let latents = latents.map(|(i, x)| if i / self.width <= last { cache.round(x) } else { f32::NAN });
        [q.into_iter().map(|x| dtype.round(x)).collect(), latents.collect()]
    }

    /// The formula in f64: values are columns of the latents.
    fn answer(&self, [q, latents]: &[Vec<f32>; 2], positions: &[u32]) -> Answer {
        let values: Vec<f32> = latents.chunks(self.width).flat_map(|row| row[..self.rank].to_vec()).collect();
        let sizes = [self.heads, 1, self.capacity, self.width, self.rank];
        let operands = Operands { q, k: latents, v: &values, positions, sinks: &[], sizes };
        operands.attention(&self.params().attention())
    }

    fn compare(&self, y: &Tensor, answer: &Answer, tokens: usize, dtypes: [FloatType; 2], on: &Device) {
        let [dtype, cache] = dtypes;
        // Matrices may round weights of 16 bits.
        let rounded = [dtype, cache].into_iter().find(|dtype| *dtype != FloatType::F32);
        let bound = |i| match on {
            Device::Cpu(_) => answer.cpu_bound(i, None),
            #[cfg(feature = "gpu")]
            Device::Gpu(_) => answer.gpu_bound(i, rounded),
            #[cfg(not(feature = "gpu"))]
            Device::Gpu(gpu) => match *gpu {},
        };
        #[cfg(not(feature = "gpu"))]
        let _ = rounded;
        let shape = [tokens, self.heads, self.rank];
        assert_close(&y.to_device(&device()).unwrap(), &shape, dtype, &answer.y, bound);
    }

    pub(super) fn check(&self, positions: &[u32], dtypes: [FloatType; 2], on: &Device) {
        let numbers = self.numbers(positions, dtypes);
        let [dtype, cache] = dtypes;
        let q = tensor(&numbers[0], &[positions.len(), self.heads, self.width], dtype, on).0;
        let latents = tensor(&numbers[1], &[1, self.capacity, self.width], cache, on).0;
        let at = Tensor::new(positions, &[positions.len()], on).unwrap();
        let y = latent_attention(&q, &latents, &at, &self.params()).unwrap();
        self.compare(&y, &self.answer(&numbers, positions), positions.len(), dtypes, on);
    }

    /// Latents are appended to a page at a time, which lie in any order in a pool.
    pub(super) fn check_paged(&self, positions: &[u32], dtypes: [FloatType; 2], on: &Device) {
        let numbers = self.numbers(positions, dtypes);
        let [dtype, cache] = dtypes;
        let columns = self.capacity.div_ceil(PAGE_TOKENS);
        let table: Vec<u32> = (0..columns as u32).rev().map(|page| page + 1).collect();
        let table = Tensor::new(&table, &[1, columns], on).unwrap();
        let nan = vec![f32::NAN; (columns + 2) * PAGE_TOKENS * self.width];
        let mut pages = tensor(&nan, &[columns + 2, 1, PAGE_TOKENS, self.width], cache, on).0;
        let last = positions.iter().max().map_or(0, |&last| last as usize);
        let seen: Vec<u32> = (0..=last as u32).collect();
        let x = tensor(&numbers[1][..seen.len() * self.width], &[seen.len(), 1, self.width], cache, on).0;
        let at = Tensor::new(&seen, &[seen.len()], on).unwrap();
        kv_append_paged(&mut pages, &table, &x, &at).unwrap();
        for (i, &position) in positions.iter().enumerate() {
            let row = self.heads * self.width;
            let q = &numbers[0][i * row..][..row];
            let one = tensor(q, &[1, self.heads, self.width], dtype, on).0;
            let at = Tensor::new(&[position], &[1], on).unwrap();
            let y = latent_attention_paged(&one, (&pages, &table), &at, &self.params()).unwrap();
            let answer = self.answer(&[q.to_vec(), numbers[1].clone()], &[position]);
            self.compare(&y, &answer, 1, dtypes, on);
        }
    }
}

#[test]
fn values_are_the_first_elements_of_latents() {
    for device in devices() {
        for dtypes in FLOATS.into_iter().flat_map(|dtype| FLOATS.map(|cache| [dtype, cache])) {
            CASE.check(&(11..48).collect::<Vec<_>>(), dtypes, &device);
            CASE.check(&[149], dtypes, &device);
            CASE.check_paged(&[3, 100], dtypes, &device);
        }
        // All of a latent is its value, and one element of it.
        for rank in [20, 1] {
            Case { rank, ..CASE }.check(&[70, 5], [FloatType::F32; 2], &device);
        }
    }
}

#[test]
fn published_widths() {
    for device in devices() {
        for dtype in FLOATS {
            PUBLISHED.check(&[69], [dtype; 2], &device);
            PUBLISHED.check(&[3, 4, 69], [dtype; 2], &device);
            PUBLISHED.check_paged(&[64], [dtype; 2], &device);
        }
    }
}

#[test]
fn refusals() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(shape, lowbit_formats::DType::F32, &device);
    let at = Tensor::new(&[0u32], &[1], &device).unwrap();
    let refused = |heads: usize, rank: usize| {
        let params = LatentAttentionParams { rank, scale: 1.0, exact: true };
        let latents = zeros(&[heads, 4, 6]);
        latent_attention(&zeros(&[1, 2, 6]), &latents, &at, &params).unwrap_err().to_string()
    };
    assert_eq!(refused(2, 3), "latent_attention: latents is [2, 4, 6], but one head is wanted");
    for rank in [0, 7] {
        let want = format!("latent_attention: rank is {rank}, but 1 to 6 elements of a latent");
        assert_eq!(refused(1, rank), want);
    }
}
