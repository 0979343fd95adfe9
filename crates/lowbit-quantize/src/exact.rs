//! Blocks of GGML's types that hold exactly what groups of a quantised weight hold: with the
//! source's codes and scales. Rounding anew may choose others, and then loses what need not be
//! lost.

use lowbit_formats::{BlockScales, Codes, FloatType, Format, Scales};

/// Values of a block.
const BLOCK: usize = 32;

/// Rows of `k` values of a quantised weight: their components, and what these decode to.
pub struct Rows<'a> {
    pub format: Format,
    pub components: &'a [Vec<u8>],
    pub k: usize,
    pub values: &'a [f32],
}

/// True if blocks of `target` may hold the values of groups of `source`.
pub fn may_hold(target: Format, source: Format) -> bool {
    let is_block = target.pack().is_some() && target.block() == BLOCK;
    is_block && matches!(source, Format::Affine { .. } | Format::Mxfp4)
}

impl Rows<'_> {
    /// The same values in blocks of `target`; `None` if one of them does not hold its values
    /// exactly.
    pub fn in_blocks(&self, target: Format) -> Option<Vec<u8>> {
        let Self { format, components, k, values } = self;
        let pack = target.pack().filter(|_| may_hold(target, *format))?;
        let mut codes = vec![0; values.len()];
        format.codes(components.first()?, *k, &mut codes).ok()?;
        let mut blocks = vec![];
        for (index, values) in values.chunks_exact(BLOCK).enumerate() {
            let own = &codes[index * BLOCK..][..BLOCK];
            let (codes, scales) = self.block(target, index, (own, values))?;
            let start = blocks.len();
            pack(&codes, &scales, &mut blocks);
            let mut decoded = [0.0; BLOCK];
            target.decode(&[&blocks[start..], &[], &[]], 1, BLOCK, &mut decoded).ok()?;
            if decoded != values {
                return None;
            }
        }
        Some(blocks)
    }

    /// The codes and scales that block `index` would have.
    fn block(
        &self,
        target: Format,
        index: usize,
        (own, values): (&[u8], &[f32]),
    ) -> Option<([u8; BLOCK], BlockScales)> {
        let Self { format, components, .. } = self;
        let scheme = target.scheme();
        let mut codes: [u8; BLOCK] = own.try_into().ok()?;
        let Format::Affine { group_size, scales, .. } = format else {
            let scale = u16::from(*components[1].get(index)?);
            let same = scheme.codes == Codes::E2M1 && matches!(scheme.scales, Scales::E8M0 { .. });
            return same.then_some((codes, BlockScales { scale, ..BlockScales::default() }));
        };
        let group = index * BLOCK / usize::from(*group_size);
        let [scale, bias] = [1, 2].map(|part| scales.get(&components[part], group));
        let (Codes::Integer { zero }, Scales::Group { biased, .. }) = (scheme.codes, scheme.scales) else {
            return None;
        };
        if FloatType::F16.round(scale) != scale {
            return None;
        }
        let greatest = ((1u32 << scheme.bits) - 1) as f32;
        if !biased && scale != 0.0 {
            for (code, value) in codes.iter_mut().zip(values) {
                let moved = (value / scale).round() + zero as f32;
                *code = (0.0..=greatest).contains(&moved).then_some(moved as u8)?;
            }
        } else if !biased {
            codes = [zero as u8; BLOCK];
        } else if codes.iter().any(|&code| f32::from(code) > greatest) {
            return None;
        }
        Some((codes, BlockScales::of(scale, if biased { bias } else { 0.0 })))
    }
}
