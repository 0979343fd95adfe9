use super::*;
use crate::ops::quantized_matmul::reference::decoded;
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, host, normal, values,
};
use crate::{Device, gamma::gamma, inputs};
use lowbit_formats::Format;
use numcheck::Random;

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

/// The loss and dlogits of all tokens; the student's logits are exact.
fn reference(student: &[f32], teacher: &[f32], dkl: &[f32], temperature: f32) -> [(Vec<f64>, Vec<f64>); 2] {
    let vocabulary = student.len() / dkl.len();
    let rows = student.chunks(vocabulary).zip(teacher.chunks(vocabulary)).zip(dkl);
    let all = rows.map(|((student, teacher), &dkl)| {
        reference::distillation_loss(&wide(student), &wide(teacher), dkl.into(), temperature.into(), &|_| 0.0)
    });
    let (kl, dlogits): (Vec<_>, Vec<_>) = all.unzip();
    [kl.into_iter().unzip(), dlogits.into_iter().flatten().unzip()]
}

#[test]
fn dlogits_are_the_derivatives_of_the_reference() {
    let mut random = Random::new(1);
    let (student, teacher, dkl) = (coarse(&mut random, 2 * 5), coarse(&mut random, 2 * 5), [0.5, -1.25]);
    let [_, dlogits] = reference(&student, &teacher, &dkl, 2.0);
    assert_derivatives("dlogits", &student, &dlogits.0, |student| {
        let [kl, _] = reference(student, &teacher, &dkl, 2.0);
        kl.0.iter().zip(&dkl).map(|(kl, &dkl)| kl * f64::from(dkl)).sum()
    });
}

#[test]
fn agrees_with_f64() {
    agrees_with_f64_on(&devices());
}

fn agrees_with_f64_on(devices: &[Device]) {
    let mut random = Random::new(2);
    for device in devices {
        for vocabulary in WIDTHS.into_iter().chain([1023, 1025, 5000]) {
            let (shape, temperature) = ([3, vocabulary], if vocabulary % 2 == 0 { 2.0 } else { 0.75 });
            let (student, students) = normal(&mut random, &shape, FLOATS[vocabulary % 3], device);
            let (teacher, teachers) = normal(&mut random, &shape, FLOATS[(vocabulary + 1) % 3], device);
            let (dkl, dkls) = normal(&mut random, &[3], FLOATS[0], device);
            let [kl, want] = reference(&students, &teachers, &dkls, temperature);
            let got = distillation_loss(&student, &teacher, &dkl, temperature).unwrap();
            assert_close(&got.kl, &[3], FLOATS[0], &kl.0, |i| kl.1[i]);
            assert_close(&got.dlogits, &shape, FLOATS[0], &want.0, |i| want.1[i]);
        }
    }
}

#[test]
fn impossible_tokens_and_equal_models() {
    impossible_tokens_and_equal_models_on(&devices());
}

fn impossible_tokens_and_equal_models_on(devices: &[Device]) {
    for device in devices {
        let tensor = |values: &[f32]| Tensor::new(values, &[1, 4], device).unwrap();
        let dkl = Tensor::new(&[1f32], &[1], device).unwrap();
        let never = f32::NEG_INFINITY;
        let of = |student: &[f32], teacher: &[f32]| {
            let loss = distillation_loss(&tensor(student), &tensor(teacher), &dkl, 1.0).unwrap();
            (values(&loss.kl)[0], values(&loss.dlogits))
        };
        // ln 2: the teacher has two of the student's four.
        let (kl, dlogits) = of(&[0.0; 4], &[5.0, never, 5.0, never]);
        assert!((kl - 2f32.ln()).abs() < 1e-6, "{kl}");
        let want = [-0.25, 0.25, -0.25, 0.25];
        // A GPU's divisions may be off by some units of the last place.
        let off = if let Device::Gpu(_) = device { 1e-7 } else { 0.0 };
        assert!(dlogits.iter().zip(want).all(|(got, want)| (got - want).abs() <= off), "{dlogits:?}");
        let same = [1.0, -2.0, never, 30.0];
        assert_eq!(of(&same, &same), (0.0, vec![0.0; 4]));
        assert_eq!(of(&[0.0, 0.0, never, 0.0], &[0.0; 4]).0, f32::INFINITY);
        assert!(of(&[0.0, f32::NAN, 0.0, 0.0], &[0.0; 4]).0.is_nan());
        assert!(of(&[0.0; 4], &[0.0, f32::NAN, 0.0, 0.0]).0.is_nan());
    }
}

/// Tokens in blocks of every size, each against f64 from the hidden states on.
#[test]
fn fused_with_the_product_it_agrees_with_f64() {
    fused_with_the_product_it_agrees_with_f64_on(&[1, 2].map(|threads| Device::cpu(Some(threads)).unwrap()));
}

fn fused_with_the_product_it_agrees_with_f64_on(devices: &[Device]) {
    let (tokens, vocabulary, hidden, temperature) = (7, 45, 64, 2.0);
    let mut random = Random::new(3);
    // Each with what makes logits of products: nothing, a factor, a factor and a cap.
    let formats = [
        (Format::Q4_1, 1.0, None),
        (Format::Q8_0, 0.3, None),
        (Format::Float(FloatType::F32), 0.7, Some(5.0)),
    ];
    for (device, (format, factor, cap)) in
        devices.iter().flat_map(|device| formats.map(|case| (device, case)))
    {
        let of_host = inputs::weight(format, &[vocabulary, hidden], 4, &host(device)).unwrap();
        let weight =
            if let Device::Gpu(_) = device { of_host.to_device(device).unwrap() } else { of_host.clone() };
        let (x, xs) = normal(&mut random, &[tokens, hidden], FLOATS[0], device);
        let (teacher, teachers) = normal(&mut random, &[tokens, vocabulary], FLOATS[0], device);
        let (dkl, dkls) = normal(&mut random, &[tokens], FLOATS[0], device);
        let rows = wide(&decoded(&of_host, vocabulary).unwrap());
        let (mut kl, mut dlogits) = (vec![], vec![]);
        for (t, x) in xs.chunks(hidden).enumerate() {
            let products = |v: usize| x.iter().zip(&rows[v * hidden..]).map(|(&x, w)| f64::from(x) * w);
            let scaled = |v: usize| products(v).sum::<f64>() * f64::from(factor);
            let bent = |x: f64| cap.map_or(x, |cap: f32| f64::from(cap) * (x / f64::from(cap)).tanh());
            let slope = |x: f64| cap.map_or(1.0, |cap| (x / f64::from(cap)).cosh().powi(-2));
            let logits: Vec<f64> = (0..vocabulary).map(|v| bent(scaled(v))).collect();
            // A cap's own roundings are some 20, and no slope is steeper than 1.
            let error = |v: usize| gamma(hidden + 24) * products(v).map(f64::abs).sum::<f64>();
            let teacher = wide(&teachers[t * vocabulary..(t + 1) * vocabulary]);
            let of_token =
                reference::distillation_loss(&logits, &teacher, dkls[t].into(), temperature, &error);
            kl.push(of_token.0);
            dlogits.extend(of_token.1.into_iter().enumerate().map(|(v, (d, off))| {
                let by = f64::from(factor) * slope(scaled(v));
                // By the slope's change where its argument is off, at most 2 / cap of it.
                let moved = cap.map_or(0.0, |cap| 2.0 * error(v) / f64::from(cap) + gamma(40));
                (d * by, (off + d.abs() * gamma(2)) * by + d.abs() * moved * f64::from(factor))
            }));
        }
        let row = |value: f32| Tensor::new(&vec![value; vocabulary], &[vocabulary], device).unwrap();
        let function = LogitFunction { factors: (factor != 1.0).then(|| row(factor)), caps: cap.map(row) };
        let dlogit = |t: usize, v: usize| dlogits[t * vocabulary + v];
        // A sum of `count` products of dlogits with known factors, and its bound.
        let sum = |terms: &mut dyn Iterator<Item = ((f64, f64), f64)>, count: usize| {
            terms.fold((0.0, 0.0), |(value, bound), ((d, off), factor)| {
                (value + d * factor, bound + factor.abs() * (off + gamma(count + 1) * (d.abs() + off)))
            })
        };
        let dx: (Vec<_>, Vec<_>) = (0..tokens * hidden)
            .map(|at| {
                let (t, h) = (at / hidden, at % hidden);
                sum(&mut (0..vocabulary).map(|v| (dlogit(t, v), rows[v * hidden + h])), vocabulary)
            })
            .unzip();
        let dvalues: (Vec<_>, Vec<_>) = (0..vocabulary * hidden)
            .map(|at| {
                let (v, h) = (at / hidden, at % hidden);
                sum(&mut (0..tokens).map(|t| (dlogit(t, v), xs[t * hidden + h].into())), tokens)
            })
            .unzip();
        for block in [1, 2, 3, 7, 100] {
            let part = format.scheme().group_size().map_or(WeightPart::Values, |_| WeightPart::Scales);
            let temperature = temperature as f32;
            let params = OutputDistillation { logits: &function, temperature, block, dweight: Some(part) };
            let mut asked = vec![];
            let logits = |tokens: Range<usize>| {
                asked.push(tokens.clone());
                teacher.rows(tokens.start, tokens.end).map(DistillationTarget::Logits)
            };
            let got = output_distillation(&x, &weight, &dkl, logits, &params).unwrap();
            assert!(asked.iter().all(|tokens| tokens.len() <= block));
            assert_close(&got.kl, &[tokens], FLOATS[0], &kl.iter().map(|kl| kl.0).collect::<Vec<_>>(), |t| {
                kl[t].1
            });
            assert_close(&got.dx, &[tokens, hidden], FLOATS[0], &dx.0, |i| dx.1[i]);
            match got.dweight.unwrap() {
                WeightGradient::Values(dweight) => {
                    assert_close(&dweight, weight.shape(), FLOATS[0], &dvalues.0, |i| dvalues.1[i]);
                }
                // dscales are tested with the product's gradients; dbiases are sums of the values'
                // gradients.
                WeightGradient::Scales(scales) => {
                    assert_eq!(scales.dbiases.is_some(), format.scheme().biased());
                    let Some(dbiases) = scales.dbiases else { continue };
                    let group = |x: &[f64]| x.chunks(32).map(|x| x.iter().sum()).collect::<Vec<f64>>();
                    let (want, bound) = (group(&dvalues.0), group(&dvalues.1));
                    let magnitude = group(&dvalues.0.iter().map(|x| x.abs()).collect::<Vec<_>>());
                    assert_close(&dbiases, &[vocabulary, hidden / 32], FLOATS[0], &want, |i| {
                        bound[i] + gamma(32 + tokens) * (magnitude[i] + bound[i])
                    });
                }
            }
        }
    }
}

#[test]
fn no_tokens_and_refusals() {
    let device = device();
    let float = |shape: &[usize]| inputs::activations(shape, FloatType::F32, 2, &device).unwrap();
    let weight = inputs::weight(Format::Q4_1, &[5, 32], 1, &device).unwrap();
    let plain = LogitFunction::default();
    let dweight = Some(WeightPart::Scales);
    let params = OutputDistillation { logits: &plain, temperature: 2.0, block: 4, dweight };
    let logits = |shape: &[usize]| Ok(DistillationTarget::Logits(float(shape)));
    let none = |_| logits(&[0, 5]);
    let got = output_distillation(&float(&[0, 32]), &weight, &float(&[0]), none, &params).unwrap();
    assert_eq!((got.kl.shape(), got.dx.shape()), (&[0][..], &[0, 32][..]));
    let Some(WeightGradient::Scales(scales)) = got.dweight else { panic!("{:?}", got.dweight) };
    assert_eq!(values(&scales.dscales), [0.0; 5]);
    let refuse = |x: &[usize], dkl: &[usize], teacher: &[usize], params: &OutputDistillation| {
        let teacher = |_| logits(teacher);
        output_distillation(&float(x), &weight, &float(dkl), teacher, params).unwrap_err().to_string()
    };
    assert_eq!(
        refuse(&[2, 32], &[3], &[2, 5], &params),
        "output_distillation: dkl is [3], but x [2, 32] wants [2]"
    );
    assert_eq!(
        refuse(&[2, 32], &[2], &[2, 6], &params),
        "distillation_loss: teacher is [2, 6], but logits wants [2, 5]"
    );
    assert_eq!(
        refuse(&[2, 32], &[2], &[2, 5], &OutputDistillation { block: 0, ..params }),
        "output_distillation: block is 0, but 1 token or more are wanted"
    );
    for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(
            refuse(&[2, 32], &[2], &[2, 5], &OutputDistillation { temperature, ..params }),
            format!(
                "output_distillation: temperature is {temperature}, but a finite number above 0 is wanted"
            )
        );
    }
    let panels = weight.to_panels().unwrap();
    let error = output_distillation(&float(&[2, 32]), &panels, &float(&[2]), |_| logits(&[2, 5]), &params);
    assert_eq!(error.unwrap_err().to_string(), "output_distillation does not run on a repacked weight");
}

#[cfg(feature = "gpu")]
mod gpu {
    use super::*;
    use crate::ops::testing::gpu;

    #[test]
    fn agrees_with_f64() {
        agrees_with_f64_on(&[gpu()]);
    }

    #[test]
    fn impossible_tokens_and_equal_models() {
        impossible_tokens_and_equal_models_on(&[gpu()]);
    }

    #[test]
    fn fused_with_the_product_it_agrees_with_f64() {
        fused_with_the_product_it_agrees_with_f64_on(&[gpu()]);
    }
}
