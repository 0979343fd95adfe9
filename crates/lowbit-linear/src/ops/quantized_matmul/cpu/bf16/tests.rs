use super::super::{
    Group,
    panels::{self, Size},
};
use super::*;
use crate::panels::Unpack;
use crate::{
    Device, QuantizedTensor, inputs,
    ops::quantized_matmul::{
        reference::{self, Rounded},
        tests::formats,
    },
    ops::testing::{devices, values},
    simd::tiles::Model,
};
use lowbit_formats::{FloatType, Format};

fn multiply<U: TileUnit>(
    cpu: &Arc<Cpu>,
    method: Bf16<U>,
    (weight, epilogue): (Unpack<'_>, Epilogue),
    n: usize,
    group: Group<'_>,
) {
    panels::run(cpu, &method, vec![panels::Product { weight, epilogue, n, groups: vec![group] }]);
}

/// The product by the model of a unit, and by the device's own unit if it has one.
fn products(device: &Device, x: &[f32], weight: &QuantizedTensor, m: usize) -> Vec<Vec<f32>> {
    let (cpu, n) = (device.as_cpu("test").unwrap(), weight.n());
    let mut y = vec![vec![f32::NAN; m * n]];
    let panels = (weight.panels().unwrap(), Epilogue::Store);
    multiply(cpu, Bf16(Model), panels, n, Group { weight_row: 0, x, y: &mut y[0] });
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = cpu.isa().tiles() {
        y.push(vec![f32::NAN; m * n]);
        multiply(cpu, Bf16(amx), panels, n, Group { weight_row: 0, x, y: &mut y[1] });
    }
    y
}

fn check(device: &Device, format: Format, (m, n, k): (usize, usize, usize)) {
    let weight = inputs::weight(format, &[n, k], 7, device).unwrap();
    let x = values(&inputs::activations(&[m, k], FloatType::F32, 8, device).unwrap());
    let decoded = reference::decoded(&weight, n).unwrap();
    let want = reference::matmul_bounded(&x, &decoded, k, FloatType::F32, Rounded::Bf16);
    for y in products(device, &x, &weight.to_panels().unwrap(), m) {
        for (got, want) in y.iter().zip(&want) {
            let error = (f64::from(*got) - want.value).abs();
            // Not `error > bound`: a NaN must fail.
            assert!(error <= want.bound, "{format} M={m} N={n} K={k}: got {got}, {want:?}, error {error:e}");
        }
    }
}

#[test]
fn every_format_agrees_with_the_reference() {
    let in_panels =
        formats().into_iter().filter(|format| !matches!(format, Format::Float(_))).collect::<Vec<_>>();
    for device in devices() {
        for &format in &in_panels {
            check(&device, format, (19, 41, 768));
        }
    }
}

#[test]
fn sizes_around_every_tile() {
    let device = Device::cpu(Some(2)).unwrap();
    let q4 = Format::affine(4, 32, FloatType::BF16).unwrap();
    for m in [1, 15, 16, 17, 31, 32, 33, 65, 513] {
        check(&device, q4, (m, 43, 96));
    }
    for n in [1, 15, 16, 17, 31, 32, 33, 63, 65, 250] {
        check(&device, q4, (37, n, 160));
    }
    for k in [32, 64, 480, 512, 544, 1024, 1056] {
        check(&device, q4, (37, 43, k));
    }
    // A row ends in the middle of a step.
    for k in [16, 48, 272, 528] {
        check(&device, Format::Nvfp4, (18, 33, k));
    }
    // x no longer stays in the cache: a task keeps the sums of many weight rows.
    check(&device, Format::Q4_0, (260, 150, 1600));
}

/// `y = glu(x up^T, x gate^T) down^T`, all at once and by the products after each other.
fn check_gated_mlp<U: TileUnit>(
    device: &Device,
    unit: U,
    format: Format,
    ([m, k, inner, n], by): ([usize; 4], Gate),
) {
    let cpu = device.as_cpu("test").unwrap();
    let weight = |n: usize, k: usize, seed| {
        inputs::weight(format, &[n, k], seed, device).unwrap().to_panels().unwrap()
    };
    let (gate, up, down) = (weight(inner, k, 1), weight(inner, k, 2), weight(n, inner, 3));
    let x = values(&inputs::activations(&[m, k], FloatType::F32, 4, device).unwrap());
    let gate_up = gate.panels_in_turn(&up).unwrap();
    let product = |weight, x: &[f32], n| {
        let mut y = vec![f32::NAN; m * n];
        multiply(cpu, Bf16(unit), weight, n, Group { weight_row: 0, x, y: &mut y });
        y
    };
    let down = down.panels().unwrap();
    let hidden = product((gate_up, Epilogue::Glu(by)), &x, inner);
    let want = product((down, Epilogue::Store), &hidden, n);
    let mut y = vec![f32::NAN; m * n];
    Bf16(unit).gated_mlp(cpu, (&x, m), ([gate_up, down], by), &mut y);
    numcheck::assert_bits(&format!("{format} M={m} K={k} I={inner} N={n} on {device:?}"), &y, &want);
}

#[test]
fn what_down_multiplies_is_written_in_tiles() {
    let q4 = Format::affine(4, 32, FloatType::BF16).unwrap();
    for threads in [1, 3] {
        let device = Device::cpu(Some(threads)).unwrap();
        let mut all = vec![(Format::Nvfp4, [50, 48, 1040, 19])];
        all.extend([1, 16, 33, 64, 530].map(|m| (q4, [m, 96, 160, 35])));
        all.extend([32, 96, 512, 544, 1600].map(|inner| (Format::Q8_0, [50, 64, inner, 33])));
        // x does not stay in the cache.
        all.push((Format::Q4_0, [260, 1600, 1120, 40]));
        for (i, (format, sizes)) in all.into_iter().enumerate() {
            let sizes = (sizes, Gate::ALL[i % 4]);
            check_gated_mlp(&device, Model, format, sizes);
            #[cfg(target_arch = "x86_64")]
            if let Some(amx) = device.as_cpu("test").unwrap().isa().tiles() {
                check_gated_mlp(&device, amx, format, sizes);
            }
        }
    }
}

#[test]
fn tasks_are_cut_at_tiles() {
    for (m, block) in [(1, 32), (32, 32), (33, 64), (512, 512), (513, 288), (1100, 384)] {
        let size = Size { m, n: 4096, k: 4096, rows: 1 };
        assert_eq!(size.block::<Bf16<Model>>(), block, "M={m}");
        for threads in [1, 3, 16] {
            assert!(size.strip::<Bf16<Model>>(1, threads).is_multiple_of(WIDTH));
        }
    }
    assert_eq!(Size { m: 512, n: 4096, k: 4096, rows: 1 }.strip::<Bf16<Model>>(1, 1), 4096);
    assert_eq!([(64, 4096), (512, 4096), (512, 512)].map(|(m, k)| side_by_side(m, k)), [1, 16, 1]);
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let device = Device::cpu(Some(1)).unwrap();
    let weight = inputs::weight(Format::Q4_0, &[35, 96], 1, &device).unwrap().to_panels().unwrap();
    // The last is finite, but not in bf16.
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff), f32::MAX]
    {
        let mut x = values(&inputs::activations(&[20, 96], FloatType::F32, 2, &device).unwrap());
        x[17 * 96 + 5] = bad;
        for y in products(&device, &x, &weight, 20) {
            for (i, y) in y.iter().enumerate() {
                assert_eq!(!y.is_finite(), i / 35 == 17, "{bad} [{i}] {y}");
            }
        }
    }
}

#[test]
fn nothing_is_summed_to_zero() {
    let device = Device::cpu(Some(1)).unwrap();
    let weight = inputs::weight(Format::Q4_0, &[35, 0], 1, &device).unwrap().to_panels().unwrap();
    for y in products(&device, &[], &weight, 20) {
        assert_eq!(y, vec![0.0; 20 * 35]);
    }
}
