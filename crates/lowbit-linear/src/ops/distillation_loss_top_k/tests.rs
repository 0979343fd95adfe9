use super::*;
use crate::ops::distillation_loss::{
    DistillationTarget, LogitFunction, OutputDistillation, distillation_loss, output_distillation,
};
use crate::ops::testing::{
    FLOATS, WIDTHS, assert_close, assert_derivatives, coarse, device, devices, normal, rounded, values,
};
use crate::ops::{quantized_matmul_backward_x, quantized_matmul_to};
use lowbit_formats::{FloatType, Format};
use numcheck::Random;
use reference::Known;
use std::ops::Range;

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

/// The targets of random teachers: `k` random tokens of each row, rising, which need not be its
/// most likely.
struct Teacher {
    ids: Vec<u32>,
    ln_p: Vec<f32>,
    ln_rest: Vec<f32>,
    k: usize,
}

impl Teacher {
    fn new(random: &mut Random, rows: usize, vocabulary: usize, k: usize) -> Self {
        let mut teacher = Self { ids: vec![], ln_p: vec![], ln_rest: vec![], k };
        for _ in 0..rows {
            let mut order: Vec<(f32, u32)> = random.normal(vocabulary, 1.0).into_iter().zip(0..).collect();
            order.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut ids: Vec<u32> = order[..k].iter().map(|&(_, id)| id).collect();
            ids.sort_unstable();
            let rest = if k == vocabulary { 0.0 } else { 1.5 };
            let weights: Vec<f64> = random.normal(k, 2.0).iter().map(|&x| f64::from(x).exp()).collect();
            let sum: f64 = weights.iter().sum::<f64>() + rest;
            teacher.ids.extend(ids);
            teacher.ln_p.extend(weights.iter().map(|weight| (weight / sum).ln() as f32));
            teacher.ln_rest.push((rest / sum).ln() as f32);
        }
        teacher
    }

    fn on(&self, device: &Device) -> TopKTargets {
        let (rows, k) = (self.ln_rest.len(), self.k);
        let ids = Tensor::new(&self.ids, &[rows, k], &crate::ops::testing::host(device)).unwrap();
        TopKTargets {
            ids: ids.to_device(device).unwrap(),
            ln_p: rounded(&self.ln_p, &[rows, k], FloatType::F32, device),
            ln_rest: rounded(&self.ln_rest, &[rows], FloatType::F32, device),
        }
    }

    /// The loss and dlogits of all tokens.
    fn reference(&self, student: &[f32], dkl: &[f32], temperature: f32) -> [(Vec<f64>, Vec<f64>); 2] {
        let (ln_p, vocabulary) = (wide(&self.ln_p), student.len() / dkl.len());
        let all = student.chunks(vocabulary).zip(dkl).enumerate().map(|(row, (student, &dkl))| {
            let at = row * self.k..(row + 1) * self.k;
            let ln_rest = self.ln_rest[row].into();
            let known = Known { ids: &self.ids[at.clone()], ln_p: &ln_p[at], ln_rest };
            let (student, temperature) = (wide(student), temperature.into());
            reference::distillation_loss_top_k(&student, &known, dkl.into(), temperature, &|_| 0.0)
        });
        let (kl, dlogits): (Vec<_>, Vec<_>) = all.unzip();
        [kl.into_iter().unzip(), dlogits.into_iter().flatten().unzip()]
    }
}

#[test]
fn dlogits_are_the_derivatives_of_the_reference() {
    let mut random = Random::new(1);
    for k in [0, 1, 3, 6, 7] {
        let teacher = Teacher::new(&mut random, 2, 7, k);
        let (student, dkl) = (coarse(&mut random, 2 * 7), [0.5, -1.25]);
        let of = |student: &[f32]| {
            let ids = (0..2).map(|row| &teacher.ids[row * k..(row + 1) * k]);
            let all = student.chunks(7).zip(ids).zip(dkl).map(|((student, ids), dkl)| {
                // Halves of halves, so that they sum to 1 in f64: the derivatives are those for
                // such probabilities.
                let mut ln_p: Vec<f64> = (1..=k as i32).map(|i| f64::from(-i) * 2f64.ln()).collect();
                // Of all tokens: the last two are equally likely, and nothing is left.
                let mut ln_rest = -(k as f64) * 2f64.ln();
                if k == 7 {
                    ln_p[6] = ln_p[5];
                    ln_rest = f64::NEG_INFINITY;
                }
                let known = Known { ids, ln_p: &ln_p, ln_rest };
                reference::distillation_loss_top_k(&wide(student), &known, dkl, 2.0, &|_| 0.0)
            });
            all.unzip::<_, _, Vec<_>, Vec<_>>()
        };
        let want: Vec<f64> = of(&student).1.into_iter().flatten().map(|(dlogit, _)| dlogit).collect();
        assert_derivatives(&format!("dlogits at {k}"), &student, &want, |student| {
            of(student).0.iter().zip(dkl).map(|((kl, _), dkl)| kl * dkl).sum()
        });
    }
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
            for k in [0, 1, vocabulary / 3, vocabulary - 1, vocabulary] {
                let (student, students) = normal(&mut random, &shape, FLOATS[vocabulary % 3], device);
                let teacher = Teacher::new(&mut random, 3, vocabulary, k);
                let (dkl, dkls) = normal(&mut random, &[3], FLOATS[0], device);
                let [kl, want] = teacher.reference(&students, &dkls, temperature);
                let got = distillation_loss_top_k(&student, &teacher.on(device), &dkl, temperature).unwrap();
                assert_close(&got.kl, &[3], FLOATS[0], &kl.0, |i| kl.1[i]);
                assert_close(&got.dlogits, &shape, FLOATS[0], &want.0, |i| want.1[i]);
            }
        }
    }
}

/// Targets of all tokens are the teacher, and fewer of them say less.
#[test]
fn targets_of_all_tokens_give_the_dense_loss() {
    targets_of_all_tokens_give_the_dense_loss_on(&devices());
}

fn targets_of_all_tokens_give_the_dense_loss_on(devices: &[Device]) {
    let mut random = Random::new(3);
    for device in devices {
        let (shape, vocabulary, temperature) = ([4, 70], 70, 2.0);
        let (student, _) = normal(&mut random, &shape, FLOATS[0], device);
        let (teacher, _) = normal(&mut random, &shape, FLOATS[0], device);
        let (dkl, _) = normal(&mut random, &[4], FLOATS[0], device);
        let dense = distillation_loss(&student, &teacher, &dkl, temperature).unwrap();
        let host = teacher.to_device(&crate::ops::testing::host(device)).unwrap();
        let of = |k: usize| {
            let targets = top_k_targets(&host, k, temperature).unwrap().to_device(device).unwrap();
            distillation_loss_top_k(&student, &targets, &dkl, temperature).unwrap()
        };
        let all = of(vocabulary);
        let close = |a: &Tensor, b: &Tensor, most: f32| {
            values(a).iter().zip(values(b)).all(|(a, b)| (a - b).abs() <= most * (1.0 + b.abs()))
        };
        assert!(close(&all.kl, &dense.kl, 2e-6), "{:?} {:?}", values(&all.kl), values(&dense.kl));
        assert!(close(&all.dlogits, &dense.dlogits, 1e-7));
        let mut last = values(&all.kl);
        for k in [69, 40, 10, 1] {
            let kl = values(&of(k).kl);
            assert!(kl.iter().zip(&last).all(|(less, more)| *less >= 0.0 && *less <= more + 1e-6), "{k}");
            last = kl;
        }
        assert!(last[0] < 0.9 * values(&dense.kl)[0]);
    }
}

/// Each block of tokens gets its own tokens' targets.
#[test]
fn fused_with_the_product_it_is_the_loss_of_the_logits() {
    let (device, [tokens, vocabulary, hidden]) = (device(), [7, 45, 64]);
    let mut random = Random::new(6);
    let weight = crate::inputs::weight(Format::Q8_0, &[vocabulary, hidden], 4, &device).unwrap();
    let (x, _) = normal(&mut random, &[tokens, hidden], FLOATS[0], &device);
    let (dkl, _) = normal(&mut random, &[tokens], FLOATS[0], &device);
    let targets = Teacher::new(&mut random, tokens, vocabulary, 9).on(&device);
    let logits = quantized_matmul_to(&x, &weight, FloatType::F32).unwrap();
    let want = distillation_loss_top_k(&logits, &targets, &dkl, 2.0).unwrap();
    let dx = quantized_matmul_backward_x(&want.dlogits, &weight).unwrap();
    for block in [1, 2, 3, 7, 100] {
        let (logits, temperature) = (&LogitFunction::default(), 2.0);
        let params = OutputDistillation { logits, temperature, block, dweight: None };
        let of = |rows: Range<usize>| targets.rows(rows.start, rows.end).map(DistillationTarget::TopK);
        let got = output_distillation(&x, &weight, &dkl, of, &params).unwrap();
        for (got, want) in [(&got.kl, &want.kl), (&got.dx, &dx)] {
            let want: Vec<f64> = wide(&values(want));
            let most = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            // Products of other numbers of rows may be summed in another order.
            numcheck::assert_within(&values(got), &want, |_| 1e-5 * most);
        }
    }
}

#[test]
fn impossible_tokens_and_equal_models() {
    impossible_tokens_and_equal_models_on(&devices());
}

fn impossible_tokens_and_equal_models_on(devices: &[Device]) {
    let never = f32::NEG_INFINITY;
    for device in devices {
        let of = |student: &[f32], ids: &[u32], ln_p: &[f32], ln_rest: f32| {
            let teacher =
                Teacher { ids: ids.into(), ln_p: ln_p.into(), ln_rest: vec![ln_rest], k: ids.len() };
            let student = rounded(student, &[1, student.len()], FloatType::F32, device);
            let dkl = rounded(&[1.0], &[1], FloatType::F32, device);
            let loss = distillation_loss_top_k(&student, &teacher.on(device), &dkl, 1.0).unwrap();
            (values(&loss.kl)[0], values(&loss.dlogits))
        };
        let half = 0.5f32.ln();
        // ln 2: the teacher has two of the student's four, and nothing is left.
        let (kl, dlogits) = of(&[0.0; 4], &[0, 2], &[half; 2], never);
        assert!((kl - 2f32.ln()).abs() < 1e-6, "{kl}");
        let near =
            |got: &[f32], want: [f32; 4]| got.iter().zip(want).all(|(got, want)| (got - want).abs() <= 2e-7);
        assert!(near(&dlogits, [-0.25, 0.25, -0.25, 0.25]), "{dlogits:?}");
        // A known token that the teacher never takes.
        let (kl, dlogits) = of(&[0.0; 4], &[0, 2], &[half, never], half);
        assert!((kl - 0.5 * 2f32.ln()).abs() < 1e-6, "{kl}");
        assert!(near(&dlogits, [-0.25, 0.0, 0.25, 0.0]), "{dlogits:?}");
        // The student never takes what the teacher does: a known token, or all of the rest.
        assert_eq!(of(&[0.0, 0.0, never, 0.0], &[0, 2], &[half; 2], never).0, f32::INFINITY);
        let (kl, dlogits) = of(&[0.0, never, 0.0, never], &[0, 2], &[0.25f32.ln(); 2], half);
        assert_eq!((kl, dlogits[1], dlogits[3]), (f32::INFINITY, 0.0, 0.0));
        // Neither takes the rest.
        let (kl, dlogits) = of(&[0.0, never, 0.0, never], &[0, 2], &[half; 2], never);
        assert!(kl.abs() < 1e-6 && near(&dlogits, [0.0; 4]), "{kl} {dlogits:?}");
        // Far from 0: what has no terms, or none that counts, has no greatest logit.
        for (student, ids) in [([-300.0; 4], &[0, 1, 2, 3][..]), ([-300.0, -300.0, never, never], &[0, 1])] {
            let ln_p = vec![-(ids.len() as f32).ln(); ids.len()];
            let (kl, dlogits) = of(&student, ids, &ln_p, never);
            assert!(kl.abs() < 1e-6 && near(&dlogits, [0.0; 4]), "{kl} {dlogits:?}");
        }
        let (kl, dlogits) = of(&[never, -300.0, never, -300.0], &[0, 2], &[never; 2], 0.0);
        assert!(kl.abs() < 1e-6 && near(&dlogits, [0.0; 4]), "{kl} {dlogits:?}");
        // Far apart: the rest is not what is missing to 1.
        let (kl, dlogits) = of(&[60.0, 0.0, 0.0, 0.0], &[0], &[0.0], 1e-30f32.ln());
        assert!(kl.abs() < 1e-24 && dlogits[1..].iter().all(|x| x.abs() < 1e-25), "{kl} {dlogits:?}");
        for at in 0..4 {
            let mut student = [0.0; 4];
            student[at] = f32::NAN;
            assert!(of(&student, &[0, 2], &[half; 2], half).0.is_nan(), "{at}");
        }
        assert!(of(&[0.0; 4], &[0, 2], &[half, f32::NAN], half).0.is_nan());
        assert!(of(&[0.0; 4], &[0, 2], &[half; 2], f32::NAN).0.is_nan());
    }
}

#[test]
fn targets_are_the_greatest_logits() {
    let mut random = Random::new(4);
    for device in devices() {
        for (vocabulary, k) in [(1, 1), (9, 4), (33, 33), (203, 7), (5000, 128)] {
            // Rounded so that many tie.
            let logits: Vec<f32> =
                random.normal(2 * vocabulary, 3.0).iter().map(|x| (x * 4.0).round() / 4.0 + 0.0).collect();
            let x = Tensor::new(&logits, &[2, vocabulary], &device).unwrap();
            let targets = top_k_targets(&x, k, 2.0).unwrap();
            let (ids, ln_p) = (targets.ids.as_slice::<u32>().unwrap(), values(&targets.ln_p));
            let (mut want, mut want_p, mut want_rest) = (vec![], vec![], vec![]);
            for logits in logits.chunks(vocabulary) {
                let mut order: Vec<u32> = (0..vocabulary as u32).collect();
                order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
                let sum: f64 = logits.iter().map(|&x| f64::from(x / 2.0).exp()).sum();
                let p = |id: u32| f64::from(logits[id as usize] / 2.0).exp() / sum;
                want_rest.push(order[k..].iter().map(|&id| p(id)).sum::<f64>().ln());
                order.truncate(k);
                order.sort_unstable();
                want_p.extend(order.iter().map(|&id| p(id).ln()));
                want.extend(order);
            }
            assert_eq!(ids, want);
            numcheck::assert_within(&ln_p, &want_p, |i| 1e-5 * (1.0 + want_p[i].abs()));
            for (got, want) in values(&targets.ln_rest).into_iter().zip(want_rest) {
                let same =
                    f64::from(got) == want || (f64::from(got) - want).abs() < 1e-5 * (1.0 + want.abs());
                assert!(same, "{got} {want}");
            }
        }
        let broken = Tensor::new(&[0.0, f32::NAN, 1.0], &[1, 3], &device).unwrap();
        assert!(values(&top_k_targets(&broken, 2, 1.0).unwrap().ln_p).iter().all(|x| x.is_nan()));
    }
}

#[test]
fn refusals() {
    let device = device();
    let teacher = Teacher::new(&mut Random::new(5), 2, 5, 3);
    let float = |shape: &[usize]| Tensor::allocate_zeros(shape, DType::F32, &device).unwrap();
    let refuse = |logits: &[usize], dkl: &[usize], targets: &TopKTargets, temperature: f32| {
        distillation_loss_top_k(&float(logits), targets, &float(dkl), temperature).unwrap_err().to_string()
    };
    let good = teacher.on(&device);
    let with = |ids: &[u32]| {
        let ids = Tensor::new(ids, &[2, 3], &device).unwrap();
        refuse(&[2, 5], &[2], &TopKTargets { ids, ..good.clone() }, 1.0)
    };
    assert_eq!(
        with(&[0, 1, 2, 3, 4, 5]),
        "distillation_loss_top_k: ids[5] is 5, but there are 5 rows to choose from"
    );
    let order = |token| {
        format!("distillation_loss_top_k: ids is out of order for token {token}, but rising ids are wanted")
    };
    assert_eq!(with(&[0, 1, 1, 2, 3, 4]), order(0));
    assert_eq!(with(&[0, 1, 2, 3, 2, 4]), order(1));
    let shape = |logits: &str, tokens: usize, most: usize| {
        format!(
            "distillation_loss_top_k: ids is [2, 3], but logits {logits} wants [{tokens}, K] with a K of at most {most}"
        )
    };
    assert_eq!(refuse(&[3, 5], &[3], &good, 1.0), shape("[3, 5]", 3, 5));
    assert_eq!(refuse(&[2, 2], &[2], &good, 1.0), shape("[2, 2]", 2, 2));
    assert_eq!(
        refuse(&[2, 5], &[2], &TopKTargets { ln_rest: float(&[3]), ..good.clone() }, 1.0),
        "distillation_loss_top_k: ln_rest is [3], but ids [2, 3] wants [2]"
    );
    assert_eq!(
        refuse(&[2, 5], &[2], &good, 0.0),
        "distillation_loss_top_k: temperature is 0, but a finite number above 0 is wanted"
    );
    let k = |k| top_k_targets(&float(&[2, 5]), k, 1.0).unwrap_err().to_string();
    assert_eq!(k(0), "top_k_targets: k is 0, but 1 to 5, the vocabulary, is wanted");
    assert_eq!(k(6), "top_k_targets: k is 6, but 1 to 5, the vocabulary, is wanted");
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
    fn targets_of_all_tokens_give_the_dense_loss() {
        targets_of_all_tokens_give_the_dense_loss_on(&[gpu()]);
    }

    #[test]
    fn impossible_tokens_and_equal_models() {
        impossible_tokens_and_equal_models_on(&[gpu()]);
    }

    /// The host does not look at a device's ids.
    #[test]
    fn wrong_ids_give_nan() {
        let device = gpu();
        for (ids, bad) in [([0, 1, 2], false), ([0, 1, 1], true), ([2, 1, 3], true), ([0, 1, 5], true)] {
            let teacher = Teacher { ids: ids.into(), ln_p: vec![-2.0; 3], ln_rest: vec![-0.5], k: 3 };
            let logits = rounded(&[0.5; 5], &[1, 5], FloatType::F32, &device);
            let dkl = rounded(&[1.0], &[1], FloatType::F32, &device);
            let loss = distillation_loss_top_k(&logits, &teacher.on(&device), &dkl, 1.0).unwrap();
            assert_eq!(values(&loss.kl)[0].is_nan(), bad, "{ids:?}");
        }
    }
}
