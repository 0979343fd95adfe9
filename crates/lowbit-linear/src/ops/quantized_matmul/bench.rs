use super::{
    policy, quantized_matmul,
    reference::{self, Rounded},
};
use crate::{
    Device, KernelError, QuantizedTensor, Tensor,
    bench::{Arithmetic, Case, Cases, Expected, GpuCases, Prepared, Run, ScalingCases},
    inputs,
};
use lowbit_formats::{DType, FloatType, Format};

inventory::submit!(Cases(cases));
inventory::submit!(GpuCases(gpu_cases));
inventory::submit!(ScalingCases(scaling_cases));

fn multiply(x: &Tensor, weight: &QuantizedTensor) -> Result<Tensor, KernelError> {
    quantized_matmul(x, weight)
}

/// (K, N) of layers that models have: Llama-3-8B's and Qwen3.5-9B's attention and feed-forward
/// projections.
const LAYERS: [(usize, usize); 3] = [(4096, 4096), (4096, 14336), (14336, 4096)];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in formats() {
        for m in [1, 8, 64, 512] {
            for &(k, n) in if m == 1 { &LAYERS[..] } else { &LAYERS[..1] } {
                cases.push(product(format, FloatType::F32, (m, n, k)).case(multiply));
            }
        }
    }
    cases.push(product(Format::Q4_K, FloatType::BF16, (1, 4096, 4096)).case(multiply));
    cases
}

fn gpu_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for format in formats() {
        for (k, n) in [(4096, 14336), (14336, 4096), (8192, 28672)] {
            cases.push(product(format, FloatType::F16, (1, n, k)).case(multiply));
        }
        for m in [8, 16] {
            cases.push(product(format, FloatType::F16, (m, 14336, 4096)).case(multiply));
        }
        for m in [8, 16, 32, 64, 512, 4096] {
            cases.push(product(format, FloatType::BF16, (m, 14336, 4096)).case(multiply));
        }
        // The products of a step of several sequences, of Qwen3.5-9B's layers.
        if matches!(format, Format::Affine { bits: 4, .. }) {
            for (k, n) in [(4096, 12352), (4096, 24576), (12288, 4096), (4096, 4096)] {
                for m in [1, 2, 4, 8, 16, 32, 64] {
                    cases.push(product(format, FloatType::F16, (m, n, k)).case(multiply));
                }
            }
        }
        // The default type of activations on matrix units, which need not have bf16.
        if matches!(format, Format::Affine { bits: 4, .. } | Format::Q4_K) {
            for m in [64, 512, 4096] {
                cases.push(product(format, FloatType::F16, (m, 14336, 4096)).case(multiply));
            }
        }
    }
    cases
}

/// Rows of x around every tile, then K and N at one row.
fn scaling_cases() -> Vec<Case> {
    const ROWS: [usize; 27] = [
        1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 48, 64, 96, 128, 192, 256, 257, 384, 512, 1024,
        2048, 4096,
    ];
    const SIZES: [usize; 7] = [256, 512, 1024, 2048, 4096, 8192, 16384];
    let mut cases = Vec::new();
    let names = ["affine4g64", "Q4_0", "Q4_K", "Q6_K", "Q8_0"];
    for format in formats().filter(|format| names.contains(&format.to_string().as_str())) {
        let shapes = ROWS.map(|m| (m, 4096, 4096)).into_iter();
        let shapes = shapes.chain(SIZES.map(|k| (1, 4096, k))).chain(SIZES.map(|n| (1, n, 4096)));
        cases.extend(shapes.map(|shape| product(format, FloatType::F32, shape).case(multiply)));
    }
    cases
}

fn product(format: Format, dtype: FloatType, (m, n, k): (usize, usize, usize)) -> Product {
    Product { op: "quantized_matmul", format, dtype, m, n, k }
}

/// Every format of few bits, affine in groups of 64 as MLX's converter chooses.
fn formats() -> impl Iterator<Item = Format> {
    Format::all().filter(|format| match format {
        Format::Float(_) => false,
        Format::Affine { group_size, .. } => *group_size == 64,
        _ => true,
    })
}

/// `x [m, k]` times a weight `[n, k]`.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub op: &'static str,
    pub format: Format,
    pub dtype: FloatType,
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Product {
    /// A case that is computed by `run`.
    pub fn case(self, run: fn(&Tensor, &QuantizedTensor) -> Result<Tensor, KernelError>) -> Case {
        let Self { op, format, dtype, m, n, k } = self;
        let row: usize = format.components(k).map_or(0, |all| all.iter().map(|c| c.row_bytes()).sum());
        Case {
            op,
            shape: format!("M={m} K={k} N={n}"),
            format: format.to_string(),
            dtype,
            bytes: n * row + (m * k + m * n) * dtype.size(),
            flops: 2 * m * n * k,
            arithmetic: arithmetic(format, m),
            cold_bytes: n * row,
            prepare: Box::new(move |device, copies| {
                let host = device.host()?;
                let x = inputs::activations(&[m, k], dtype, 1, &host)?;
                let weight = inputs::weight(format, &[n, k], 2, &host)?;
                let expected = self.expected(&x, &weight, device)?;
                let x = x.to_device(device)?;
                let bind = |weight| -> Run {
                    let x = x.clone();
                    Box::new(move || run(&x, &weight))
                };
                let copies = inputs::copies(&weight, copies)?;
                let weights = copies.iter().map(|weight| on_device(weight, device));
                let runs = weights.map(|weight| Ok(bind(weight?))).collect::<Result<_, KernelError>>()?;
                Ok(Prepared { runs, expected })
            }),
        }
    }

    /// All columns of some rows of the result.
    fn expected(
        self,
        x: &Tensor,
        weight: &QuantizedTensor,
        device: &Device,
    ) -> Result<Vec<Expected>, KernelError> {
        let Self { m, n, k, dtype, .. } = self;
        let rounded = Rounded::on(device, dtype, || Ok(Rounded::on_cpu(&on_device(weight, device)?, m)))?;
        let x = x.cast(DType::F32)?;
        let distinct = reference::decoded(weight, n.min(inputs::DISTINCT))?;
        let mut all = Vec::new();
        for row in sampled(m) {
            let of_row =
                reference::matmul_bounded(&x.as_slice()?[row * k..][..k], &distinct, k, dtype, rounded);
            all.extend((0..n).map(|n_| Expected { index: row * n + n_, ..of_row[n_ % of_row.len()] }));
        }
        Ok(all)
    }
}

/// The arithmetic of products of `m` rows of x with weights of `format` if the device is a CPU.
pub(crate) fn arithmetic(format: Format, m: usize) -> Arithmetic {
    match crate::panels::Layout::of(format, 1, format.block()) {
        Some(_) if m >= policy::TILES_FROM => Arithmetic::Tiles,
        Some(layout) if layout.minifloat() => Arithmetic::F32,
        Some(_) => Arithmetic::Int8,
        None => Arithmetic::F32,
    }
}

/// The weight as a loaded model has it: on the device, on a CPU in panels.
pub(crate) fn on_device(weight: &QuantizedTensor, device: &Device) -> Result<QuantizedTensor, KernelError> {
    weight.to_device(device)?.to_panels()
}

/// The rows of `m` that are compared with the reference, the first and the last among them: f64
/// products take long.
pub(crate) fn sampled(m: usize) -> impl Iterator<Item = usize> {
    (0..m).step_by(m.div_ceil(9)).chain([m - 1])
}
