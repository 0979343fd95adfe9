use crate::Cpu;
use crate::ops::sum_rows::{ROWS, cpu::sum_blocks};
use crate::simd::{Kernel, Simd, math, slices};

/// The norm's operands, and the gradient of its result.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub eps: f32,
    pub dy: &'a [f32],
}

impl Norm<'_> {
    /// Fills all gradients; `gates` are the gate and its gradient.
    pub fn backward(
        &self,
        cpu: &Cpu,
        dx: &mut [f32],
        gates: Option<(&[f32], &mut [f32])>,
        dweight: &mut [f32],
    ) {
        let width = self.weight.len();
        let (gate, dgate) = gates.unzip();
        let dgate = dgate.unwrap_or_default();
        let mut dgates = dgate.chunks_mut((ROWS * width).max(1));
        let mut tasks = vec![];
        for dx in dx.chunks_mut((ROWS * width).max(1)) {
            tasks.push((dx, dgates.next()));
        }
        sum_blocks(cpu, tasks, dweight, |block, (dx, dgate), dweight| {
            let range = block * ROWS * width..block * ROWS * width + dx.len();
            let (x, dy) = (&self.x[range.clone()], &self.dy[range.clone()]);
            let gates = gate.zip(dgate).map(|(gate, dgate)| (&gate[range], dgate));
            cpu.isa().dispatch(Rows { norm: Norm { x, dy, ..*self }, dx, gates, dweight });
        });
    }
}

/// Some whole rows.
struct Rows<'a> {
    norm: Norm<'a>,
    dx: &'a mut [f32],
    gates: Option<(&'a [f32], &'a mut [f32])>,
    dweight: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Norm { x, weight, eps, dy } = self.norm;
        let width = weight.len();
        // The gradient of the norm before its weight: weight * dy, times silu(gate).
        let mut dz = vec![0.0; width];
        let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
        for (row, ((x, dy), dx)) in rows.zip(self.dx.chunks_exact_mut(width)).enumerate() {
            let r = slices::reciprocal((slices::dot(simd, x, x) / width as f32 + eps).sqrt());
            dx.copy_from_slice(dy);
            if let Some((gate, dgate)) = &mut self.gates {
                let range = row * width..(row + 1) * width;
                let gates = gate[range.clone()].iter().zip(&mut dgate[range]);
                for (((dx, &dy), (&gate, dgate)), (x, weight)) in
                    dx.iter_mut().zip(dy).zip(gates).zip(x.iter().zip(weight))
                {
                    // 1 - s is sigmoid(-gate), which keeps its digits.
                    let s = math::sigmoid(gate);
                    *dgate = dy * (x * r * weight) * (s * (1.0 + gate * math::sigmoid(-gate)));
                    *dx = dy * math::silu(gate);
                }
            }
            let normalised = x.iter().map(|x| x * r);
            self.dweight.iter_mut().zip(dx.iter().zip(normalised)).for_each(|(sum, (dy, x))| *sum += dy * x);
            dz.iter_mut().zip(weight.iter().zip(dx.iter())).for_each(|(dz, (w, dy))| *dz = w * dy);
            let along = slices::dot(simd, x, &dz) / width as f32 * r * r;
            dx.iter_mut().zip(x.iter().zip(&dz)).for_each(|(dx, (x, dz))| *dx = r * (dz - x * along));
        }
    }
}
