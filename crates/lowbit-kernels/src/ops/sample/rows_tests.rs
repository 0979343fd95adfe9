use super::tests::{PARAMS, settings};
use super::*;
use crate::ops::concat_rows;
use crate::ops::testing::{FLOATS, device, devices, fetched, rounded};
use lowbit_formats::FloatType;
use numcheck::Random;

/// The longest window of the batches.
const WINDOW: usize = 9;

/// A row of a batch, and the sequence that it is alone.
struct Sequence {
    text: Vec<u32>,
    params: SampleParams,
    window: usize,
    alone: DecodeState,
}

/// Sequences with filters and penalties of every kind, also none, and of different lengths, over a
/// vocabulary of `count`.
fn sequences(count: usize, device: &Device) -> Vec<Sequence> {
    let greedy = SampleParams::default();
    let penalised = SampleParams { repetition_penalty: 1.2, frequency_penalty: 0.3, ..greedy };
    // Temperature 0 takes the greatest whatever the filters are.
    let filtered = SampleParams { top_k: 5, top_p: 0.5, min_p: 0.1, ..greedy };
    let all = settings().into_iter().chain([greedy, penalised, filtered]).enumerate();
    all.map(|(row, params)| {
        let params = SampleParams { seed: (u64::MAX / 7).wrapping_mul(row as u64), ..params };
        let text: Vec<u32> = (0..=row).map(|at| (at * at * 31 + row) as u32 % count as u32).collect();
        let window = row % (WINDOW + 1);
        let alone = DecodeState::new(&text, window, device).unwrap();
        Sequence { text, params, window, alone }
    })
    .collect()
}

fn words(tensor: &Tensor) -> Vec<u32> {
    fetched(tensor).as_slice::<u32>().unwrap().to_vec()
}

fn tokens(batch: &DecodeBatch, rows: std::ops::Range<usize>) -> Vec<u32> {
    let drawn = batch.drawn(rows).unwrap().wait().unwrap();
    drawn.into_iter().map(|token| token.unwrap()).collect()
}

/// Logits of `rows` rows that end in ties.
fn logits(rows: usize, count: usize, dtype: FloatType, seed: u64, device: &Device) -> Tensor {
    let mut values = Random::new(seed).normal(rows * count, 3.0);
    for row in values.chunks_mut(count) {
        row[count / 2..].iter_mut().for_each(|logit| *logit = logit.round());
    }
    rounded(&values, &[rows, count], dtype, device)
}

/// Rows that are set at once, from the tokens that count alone, are those that are set one by one.
#[test]
fn rows_set_together_are_those_set_alone() {
    for on in devices() {
        let all = sequences(1000, &on);
        let [mut each, mut together] =
            [(); 2].map(|()| DecodeBatch::new(all.len() + 2, WINDOW, &on).unwrap());
        for (row, of) in all.iter().enumerate() {
            each.set_row(1 + row, &of.text, 3, &of.params, of.window).unwrap();
        }
        let mut texts = vec![];
        for Sequence { text, params, window, .. } in &all {
            let tokens = &text[text.len().saturating_sub((*window).max(1))..];
            texts.push(RowText { tokens, length: text.len(), step: 3, params, window: *window });
        }
        together.set_rows(1, &texts).unwrap();
        assert_eq!(each.kind(0..all.len() + 2), together.kind(0..all.len() + 2));
        let logits = logits(all.len() + 2, 1000, FloatType::F32, 1, &on);
        for batch in [&mut each, &mut together] {
            let kind = batch.kind(0..all.len() + 2);
            sample_rows(&logits, batch, kind).unwrap();
        }
        for (each, together) in each.tensors().into_iter().zip(together.tensors()).take(3) {
            assert_eq!(words(each), words(together), "{on}");
        }
        let few = RowText { tokens: &[1, 2], length: 5, step: 0, params: &PARAMS, window: 3 };
        assert_eq!(
            together.set_rows(0, &[few]).unwrap_err().to_string(),
            "decode state: tokens is 2 tokens, but 3 to 5 last tokens are wanted"
        );
    }
}

/// Every row of a batch against the same row alone, for some steps. Row 2 is nobody's; the last
/// `idle` rows take no part.
fn compare(count: usize, dtype: FloatType, idle: usize, widen: fn(SampleKind) -> SampleKind, on: &Device) {
    let mut alone = sequences(count, on);
    let (all, rows) = (alone.len(), alone.len() - idle);
    let mut batch = DecodeBatch::new(all, WINDOW, on).unwrap();
    for (row, of) in alone.iter().enumerate().rev() {
        batch.set_row(row, &of.text, 0, &of.params, of.window).unwrap();
    }
    batch.clear_row(2).unwrap();
    let kind = widen(batch.kind(0..rows));
    for step in 0..3 {
        let logits = logits(rows, count, dtype, step, on);
        sample_rows(&logits, &mut batch, kind).unwrap();
        let (tokens, positions) = (tokens(&batch, 0..all), words(batch.positions()));
        assert_eq!(tokens, words(batch.tokens()));
        for (row, of) in alone.iter_mut().enumerate() {
            let context = format!("V={count} {dtype:?} {kind} step {step} row {row} {:?} on {on}", of.params);
            let (want, position) = match row {
                2 => (0, 0),
                _ if row >= rows => (of.text[of.text.len() - 1], of.text.len() as u32 - 1),
                _ => {
                    let own = logits.rows(row, row + 1).unwrap();
                    sample_next(&own, &mut of.alone, &of.params).unwrap();
                    (of.alone.drawn().unwrap().wait().unwrap(), words(of.alone.position())[0])
                }
            };
            assert_eq!((tokens[row], positions[row]), (want, position), "{context}");
        }
    }
}

#[test]
fn rows_draw_what_each_draws_alone() {
    for on in devices() {
        for (count, dtype) in [1, 17, 300].into_iter().zip(FLOATS) {
            compare(count, dtype, 0, |kind| kind, &on);
        }
        compare(200, FloatType::F32, 5, |_| SampleKind::ALL, &on);
    }
}

#[cfg(feature = "gpu")]
#[test]
fn rows_draw_on_a_gpu_what_each_draws_alone() {
    let gpu = crate::ops::testing::gpu();
    for (count, dtype) in [1, 17, 300, 5000].into_iter().zip(FLOATS.into_iter().cycle()) {
        compare(count, dtype, 0, |kind| kind, &gpu);
    }
    compare(1000, FloatType::F32, 5, |_| SampleKind::ALL, &gpu);
}

/// Rows drawn with one setting alone, by the launches for it and by those for more.
fn compare_kinds(on: &Device) {
    let (rows, count) = (4, 700);
    for params in settings().into_iter().chain([SampleParams::default()]) {
        let kind = SampleKind::of(&params);
        let drawn = [kind, kind.coarse(), SampleKind::ALL].map(|kind| {
            let mut batch = DecodeBatch::new(rows, WINDOW, on).unwrap();
            for row in 0..rows {
                batch.set_row(row, &[row as u32, 5, 3], row as u32, &params, WINDOW).unwrap();
            }
            let draw = |seed| {
                sample_rows(&logits(rows, count, FloatType::F32, seed, on), &mut batch, kind).unwrap();
                tokens(&batch, 0..rows)
            };
            (0..3).map(draw).collect::<Vec<_>>()
        });
        assert_eq!(drawn[0], drawn[1], "{params:?} on {on}");
        assert_eq!(drawn[0], drawn[2], "{params:?} on {on}");
    }
}

#[test]
fn a_kind_of_more_draws_the_same() {
    compare_kinds(&device());
}

#[cfg(feature = "gpu")]
#[test]
fn a_kind_of_more_draws_the_same_on_a_gpu() {
    compare_kinds(&crate::ops::testing::gpu());
}

/// A row in the middle of a sequence draws what the sequence would have drawn.
fn resume(on: &Device) {
    let params = SampleParams { top_p: 0.9, repetition_penalty: 1.3, frequency_penalty: 0.2, ..PARAMS };
    let logits = |step| logits(1, 400, FloatType::F32, step, on);
    let mut alone = DecodeState::new(&[7, 8], 4, on).unwrap();
    let mut text = vec![7, 8];
    for step in 0..6 {
        sample_next(&logits(step), &mut alone, &params).unwrap();
        text.push(alone.drawn().unwrap().wait().unwrap());
    }
    // With another text first, whose traces are gone then.
    let mut batch = DecodeBatch::new(3, 6, on).unwrap();
    batch.set_row(1, &[9; 20], 11, &PARAMS, 6).unwrap();
    batch.set_row(1, &text[..5], 3, &params, 4).unwrap();
    for step in 3..6 {
        // Row 0 is nobody's, whatever its logits are.
        let rows = concat_rows(&[logits(9), logits(step)]).unwrap();
        let kind = batch.kind(0..2);
        sample_rows(&rows, &mut batch, kind).unwrap();
    }
    assert_eq!((tokens(&batch, 0..3), words(batch.positions())), (vec![0, text[7], 0], vec![0, 7, 0]));
    batch.clear_row(1).unwrap();
    assert_eq!((tokens(&batch, 0..3), words(batch.positions())), (vec![0; 3], vec![0; 3]));
}

#[test]
fn a_row_goes_on_where_a_sequence_was() {
    devices().iter().for_each(resume);
}

#[cfg(feature = "gpu")]
#[test]
fn a_row_goes_on_on_a_gpu_where_a_sequence_was() {
    resume(&crate::ops::testing::gpu());
}

/// Logits without a right answer are their row's alone.
fn fail_alone(on: &Device) {
    let bad = [[f32::NAN, 1.0], [1.0, f32::INFINITY], [f32::NEG_INFINITY; 2]];
    let values: Vec<f32> = bad.iter().flat_map(|bad| [*bad, [0.0, 1.0]]).flatten().collect();
    let logits = Tensor::new(&values, &[6, 2], on).unwrap();
    let hot = SampleParams { temperature: 1e-3, ..SampleParams::default() };
    for params in [SampleParams::default(), hot, SampleParams { top_k: 1, ..hot }] {
        let mut batch = DecodeBatch::new(6, 2, on).unwrap();
        (0..6).for_each(|row| batch.set_row(row, &[0], 0, &params, 2).unwrap());
        sample_rows(&logits, &mut batch, SampleKind::of(&params)).unwrap();
        let drawn = batch.drawn(0..6).unwrap().wait().unwrap();
        for (row, token) in drawn.into_iter().enumerate() {
            match token {
                Ok(token) => assert!(row % 2 == 1 && token == 1, "row {row}: {token}"),
                Err(error) => {
                    let start = "sample: logits is NaN, infinite, or -inf altogether";
                    assert!(row % 2 == 0 && error.to_string().starts_with(start), "row {row}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_row_without_an_answer_fails_alone() {
    fail_alone(&device());
}

#[cfg(feature = "gpu")]
#[test]
fn a_row_without_an_answer_fails_alone_on_a_gpu() {
    fail_alone(&crate::ops::testing::gpu());
}

/// A captured pass goes on when rows come, go and change.
#[cfg(feature = "gpu")]
#[test]
fn rows_change_in_place_under_a_captured_pass_of_a_gpu() {
    let gpu = crate::ops::testing::gpu();
    let Device::Gpu(queue) = &gpu else { unreachable!() };
    let logits = logits(4, 300, FloatType::F32, 1, &gpu);
    let sets = |batch: &mut DecodeBatch, turn: u32| {
        let params = SampleParams { top_k: 30 + turn as usize, seed: turn.into(), ..PARAMS };
        batch.clear_row(turn as usize % 4).unwrap();
        batch.set_row(turn as usize % 3, &[turn, 4], turn, &params, turn as usize % 4).unwrap();
        if turn % 2 == 1 {
            let penalised = SampleParams { temperature: 0.0, presence_penalty: 0.5, ..params };
            batch.set_params(turn as usize % 3, &penalised).unwrap();
        }
    };
    let [mut captured, mut eager] = [(); 2].map(|()| DecodeBatch::new(4, 3, &gpu).unwrap());
    let pass = queue.capture(|| sample_rows(&logits, &mut captured, SampleKind::ALL)).unwrap();
    for turn in 0..8 {
        sets(&mut captured, turn);
        sets(&mut eager, turn);
        assert!(captured.tensors().iter().all(|tensor| pass.uses(tensor)), "rows are written in place");
        pass.replay().unwrap();
        let drawn = captured.drawn(0..4).unwrap();
        pass.replay().unwrap();
        for want in [drawn, captured.drawn(0..4).unwrap()] {
            sample_rows(&logits, &mut eager, SampleKind::ALL).unwrap();
            let want: Vec<u32> = want.wait().unwrap().into_iter().map(|token| token.unwrap()).collect();
            assert_eq!(tokens(&eager, 0..4), want, "turn {turn}");
        }
    }
}

#[test]
fn kinds_cover_what_they_need() {
    let greedy = SampleKind::default();
    assert_eq!(greedy, SampleKind::of(&SampleParams { top_k: 3, top_p: 0.5, ..Default::default() }));
    let sampled = SampleKind::of(&PARAMS);
    let top_p = SampleKind::of(&SampleParams { top_p: 0.5, ..PARAMS });
    let top_k = SampleKind::of(&SampleParams { top_k: 3, ..PARAMS });
    let penalised = SampleKind::of(&SampleParams { frequency_penalty: 0.5, ..Default::default() });
    for kind in [sampled, top_p, top_k, penalised] {
        assert!(kind.covers(greedy) && !greedy.covers(kind) && SampleKind::ALL.covers(kind));
    }
    assert!(!top_p.covers(top_k) && top_p.coarse().covers(top_k) && top_p.covers(sampled));
    assert_eq!(top_p.union(penalised).union(top_k), SampleKind::ALL);
    assert_eq!([greedy.coarse(), sampled.coarse()], [greedy, sampled]);
    assert_eq!(top_p.union(penalised).to_string(), "sampled with top-p with penalties");
}

#[test]
fn bad_rows_and_kinds() {
    let device = device();
    let mut batch = DecodeBatch::new(2, 3, &device).unwrap();
    let mut set = |row, tokens: &[u32], params: &SampleParams, window| {
        batch.set_row(row, tokens, 0, params, window).unwrap_err().to_string()
    };
    let greedy = SampleParams::default();
    assert_eq!(set(2, &[1], &greedy, 0), "decode state: row is 2, but the batch has 2");
    assert_eq!(set(0, &[], &greedy, 0), "decode state: tokens is empty, but there is a token to go on from");
    assert_eq!(set(0, &[1], &greedy, 4), "decode state: window is 4, but 3 tokens at most are wanted");
    assert!(set(0, &[1], &SampleParams { top_p: 2.0, ..greedy }, 0).starts_with("sample: top_p is 2"));
    assert!(batch.clear_row(2).is_err() && batch.drawn(1..3).is_err());
    let error = batch.set_params(1, &greedy).unwrap_err().to_string();
    assert_eq!(error, "decode state: row is 1, but a row that a sequence uses is wanted");
    batch.set_row(1, &[0], 0, &SampleParams { top_k: 2, ..PARAMS }, 0).unwrap();
    let mut draw = |shape: &[usize], kind| {
        let logits = Tensor::zeros(shape, lowbit_formats::DType::F32, &device);
        sample_rows(&logits, &mut batch, kind).unwrap_err().to_string()
    };
    let sampled = SampleKind::of(&PARAMS);
    let error = draw(&[2, 5], sampled);
    assert_eq!(error, "sample: kind is sampled, but row 1 wants sampled with top-k");
    let error = draw(&[3, 5], SampleKind::ALL);
    assert_eq!(error, "sample: logits is [3, 5], but 1 to 2 rows are wanted");
    assert!(draw(&[2], SampleKind::ALL).contains("[n, V] is wanted"));
    assert!(draw(&[2, 0], SampleKind::ALL).contains("logits is [2, 0]"));
    assert!(DecodeBatch::new(0, 3, &device).is_err() && DecodeBatch::new(1, 1 << 25, &device).is_err());
}
