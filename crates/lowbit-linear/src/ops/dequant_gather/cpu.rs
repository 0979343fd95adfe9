use crate::{
    Cpu, QuantizedTensor,
    panels::{Chunk, ROWS, Unpack},
    simd::{Kernel, Simd},
};
use lowbit_formats::{Codec, Parts, with_codec};

/// `y[i] = table[ids[i]]`, `y [ids, K]`.
pub(super) fn dequant_gather(cpu: &Cpu, table: &QuantizedTensor, ids: &[u32], y: &mut [f32]) {
    let k = table.k();
    if let Some(panels) = table.panels() {
        return cpu.for_each_rows(y, k, k * ROWS, |first, y| {
            cpu.isa().dispatch(DecodePanels { panels, ids: &ids[first..], y });
        });
    }
    let parts = table.parts();
    with_codec!(table.format(), codec => cpu.for_each_rows(y, k, k, |first, y| {
        cpu.isa().dispatch(Decode { codec, parts, k, ids: &ids[first..], y });
    }));
}

struct Decode<'a, C> {
    codec: C,
    parts: Parts<'a>,
    k: usize,
    ids: &'a [u32],
    y: &'a mut [f32],
}

impl<C: Codec> Kernel for Decode<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (&id, y) in self.ids.iter().zip(self.y.chunks_exact_mut(self.k)) {
            let row = self.codec.row(&self.parts, id as usize, self.k);
            for (run, y) in y.chunks_mut(C::RUN).enumerate() {
                self.codec.decode(row, run, y);
            }
        }
    }
}

struct DecodePanels<'a> {
    panels: Unpack<'a>,
    ids: &'a [u32],
    y: &'a mut [f32],
}

impl Kernel for DecodePanels<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut chunk = Chunk::new();
        for (&id, y) in self.ids.iter().zip(self.y.chunks_exact_mut(self.panels.layout.k())) {
            let id = id as usize;
            self.panels.row(simd, (id / ROWS, id % ROWS), &mut chunk, y);
        }
    }
}
