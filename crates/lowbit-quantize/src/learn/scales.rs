//! The scales and biases of a quantised weight's groups while they are learned.

use super::adam::Learned;
use lowbit_formats::{BlockScales, Format, Scales, Unpacked};
use lowbit_kernels::ops::AdamStep;

/// A number in f32 for what multiplies a group's codes, all factors together, and one for what is
/// added, if the format has that; and what the format makes of them, which is what a model computes
/// with. Rounding is straight through: the gradients are those of what it makes.
///
/// Floats are rounded by themselves. In K-quants an f16 per superblock times an integer per group
/// is the scale, and so are minimums: both factors are chosen anew in each step
/// ([`Format::nearest_scales`]), which depends on the ones before.
#[derive(Clone, Debug)]
pub struct GroupScales {
    format: Format,
    scales: Learned,
    biases: Option<Learned>,
    /// Scale and bias of each group, as the format has them.
    used: Vec<[f32; 2]>,
    /// Those of each superblock, in K-quants.
    blocks: Vec<BlockScales>,
}

impl GroupScales {
    /// Of a weight with these components, in a format that has scales to learn.
    pub fn new(format: Format, components: &[&[u8]]) -> Self {
        let none = || Learned::new(vec![]);
        let biases = format.scheme().biased().then(none);
        let mut new = Self { format, scales: none(), biases, used: vec![], blocks: vec![] };
        new.set(components);
        let of = |used: &[[f32; 2]], i: usize| Learned::new(used.iter().map(|group| group[i]).collect());
        new.scales = of(&new.used, 0);
        new.biases = new.biases.map(|_| of(&new.used, 1));
        new
    }

    /// Takes the used scales from a weight's components. The learned ones stay.
    pub fn set(&mut self, components: &[&[u8]]) {
        let scheme = self.format.scheme();
        if let (Scales::Group { float, .. }, &[_, scales, biases]) = (scheme.scales, components) {
            let groups = 0..scales.len() / float.size();
            self.used = groups.map(|group| [float.get(scales, group), float.get(biases, group)]).collect();
            return;
        }
        let unpack = self.format.unpack().expect("what is not in three components is in blocks");
        let values = self.format.block();
        let bytes = self.format.components(values).expect("a block is one")[0].row_bytes();
        let (groups, keeps) = (values / scheme.group_size().unwrap_or(values), !self.is_float());
        (self.used, self.blocks) = (vec![], vec![]);
        let mut block = Unpacked::default();
        for bytes in components[0].chunks_exact(bytes) {
            unpack(bytes, &mut block);
            let products = scheme.products(&block.scales);
            self.used.extend((0..groups).map(|s| [products.scales[s], products.biases[s]]));
            if keeps {
                self.blocks.push(block.scales);
            }
        }
    }

    /// The components of a weight with these codes, one byte per code, in rows of `k`.
    pub fn pack(&self, codes: &[u8], k: usize) -> Vec<Vec<u8>> {
        let scheme = self.format.scheme();
        let mut weight = Vec::with_capacity(codes.len() * scheme.bits / 8);
        if let Some(pack) = self.format.pack() {
            for (i, codes) in codes.chunks_exact(self.format.block()).enumerate() {
                let scales = self.blocks.get(i).copied();
                pack(
                    codes,
                    &scales.unwrap_or_else(|| BlockScales::of(self.used[i][0], self.used[i][1])),
                    &mut weight,
                );
            }
            return vec![weight];
        }
        codes.chunks_exact(k.max(1)).for_each(|codes| scheme.pack_stream(codes, &mut weight));
        let scales = self.pack_floats().expect("K-quants are in blocks");
        [vec![weight], scales].concat()
    }

    /// The components but for the codes, if these are a component of their own.
    pub fn pack_floats(&self) -> Option<Vec<Vec<u8>>> {
        let Scales::Group { float, .. } = self.format.scheme().scales else { return None };
        if !self.are_apart() {
            return None;
        }
        let floats = |part: usize| {
            let mut bytes = Vec::with_capacity(self.used.len() * float.size());
            self.used.iter().for_each(|group| float.push(group[part], &mut bytes));
            bytes
        };
        Some(vec![floats(0), floats(1)])
    }

    /// True if they are floats in components of their own.
    pub fn are_apart(&self) -> bool {
        self.is_float() && self.format.pack().is_none()
    }

    /// The learned numbers: scales, and biases if the format has them.
    pub fn learned(&self) -> impl Iterator<Item = &Learned> {
        [&self.scales].into_iter().chain(&self.biases)
    }

    /// The same, to be changed.
    pub fn learned_mut(&mut self) -> impl Iterator<Item = &mut Learned> {
        [&mut self.scales].into_iter().chain(&mut self.biases)
    }

    /// Scale and bias of each group, as a model computes with them.
    pub fn used(&self) -> &[[f32; 2]] {
        &self.used
    }

    /// Takes a step against the gradients by group, and rounds anew. Those of biases count where
    /// the format has them.
    pub fn step(&mut self, dscales: &[f32], dbiases: Option<&[f32]>, step: AdamStep) {
        self.scales.step(dscales, step);
        if let (Some(biases), Some(dbiases)) = (&mut self.biases, dbiases) {
            biases.step(dbiases, step);
        }
        self.round();
    }

    /// True if scales are floats by themselves.
    fn is_float(&self) -> bool {
        matches!(self.format.scheme().scales, Scales::Group { .. })
    }

    /// Makes of the learned numbers what is used.
    pub fn round(&mut self) {
        let scheme = self.format.scheme();
        if let Scales::Group { float, .. } = scheme.scales {
            for (i, used) in self.used.iter_mut().enumerate() {
                let bias = self.biases.as_ref().map_or(0.0, |biases| biases.values[i]);
                *used = [self.scales.values[i], bias].map(|x| float.round(x));
            }
            return;
        }
        if let (Scales::SuperWithMinima { .. }, Some(biases)) = (scheme.scales, &mut self.biases) {
            // Numbers without a sign in the format do not drift below 0.
            self.scales.values.iter_mut().for_each(|scale| *scale = scale.max(0.0));
            biases.values.iter_mut().for_each(|bias| *bias = bias.min(0.0));
        }
        let groups = self.format.block() / scheme.group_size().unwrap_or(1);
        for (i, (block, used)) in self.blocks.iter_mut().zip(self.used.chunks_exact_mut(groups)).enumerate() {
            let wanted = i * groups..(i + 1) * groups;
            let biases = self.biases.as_ref().map_or(&[][..], |biases| &biases.values[wanted.clone()]);
            *block = self.format.nearest_scales(&self.scales.values[wanted], biases, block);
            let products = scheme.products(block);
            let pairs = products.scales.into_iter().zip(products.biases);
            used.iter_mut().zip(pairs).for_each(|(used, (scale, bias))| *used = [scale, bias]);
        }
    }
}
