//! Many sequences in one pool, on the CPU and, in builds that have one, on a GPU: each gets the
//! tokens that it gets alone.

use crate::support::{load, load_with_cache, root};
use lowbit_files::Checkpoint;
use lowbit_formats::FloatType;
use lowbit_kernels::ops::{self, CacheType, DecodeState, SampleParams};
use lowbit_kernels::{Device, Tensor};
use lowbit_models::{
    BatchDrawn, BatchRow, BatchSteps, CachePool, FirstRow, GenerationOptions, LogitRules, Logits, Model,
    MtpRow, PoolCache, PoolSequence, Predictor, Session, TokenLogprobs, Verified,
};
use std::ops::ControlFlow::Continue;

/// Tokens of the models' contexts that tests use.
const CONTEXT: usize = 320;

/// Small models: attention, delta nets, Mamba-2, experts, windows with sinks, capped scores, norms
/// in all places, latents, caches that layers share, caches of 8 bits. On a GPU all of them, or on
/// software that stands for one those with caches of a kind of their own.
fn models() -> Vec<Model> {
    let host = Device::cpu(Some(2)).unwrap();
    let path = |name: &str| root().join("tests/vectors/models").join(name);
    let small = |name: &str, device: &Device| load(&path(name), device, FloatType::F32);
    let experts = "qwen3_5_moe-mlx-4bit";
    let caches = ["qwen3_5", "granite_hybrid", "deepseek_v3", "gemma4_small", "kimi_linear"];
    let others =
        ["qwen3", experts, "gpt_oss", "gemma2", "gemma3", "gemma4", "gemma4_moe", "olmo3", "hunyuan"];
    let names = [&others[..], &caches].concat();
    #[cfg_attr(not(any(feature = "cuda", feature = "vulkan", feature = "metal")), allow(unused_mut))]
    let with_8_bits = |name: &str, device: &Device| load_with_cache(&path(name), device, CacheType::Int8);
    let int8 = ["qwen3_5", "olmo3"];
    let mut models: Vec<_> = names.iter().map(|name| small(name, &host)).collect();
    models.extend(int8.map(|name| with_8_bits(name, &host)));
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    {
        let device = crate::support::gpu();
        let is_taken = |name: &&&str| !crate::support::is_software(&device) || caches.contains(name);
        models.extend(names.iter().filter(is_taken).map(|name| small(name, &device)));
        models.extend(int8.map(|name| with_8_bits(name, &device)));
    }
    models
}

/// A prompt of its own for each `seed`.
fn prompt(model: &Model, seed: u32, length: usize) -> Vec<u32> {
    let size = model.config().vocab_size as u32;
    (0..length as u32)
        .map(|i| ((i + 7).wrapping_mul(2_654_435_761) ^ (seed * 977)).rotate_left(9) % size)
        .collect()
}

/// Greedy, drawn, drawn from filtered and penalised logits.
fn options(seed: u64) -> GenerationOptions {
    let sampling = match seed % 3 {
        0 => SampleParams::default(),
        1 => SampleParams { temperature: 1.1, seed, ..Default::default() },
        _ => SampleParams {
            temperature: 0.7,
            top_k: 30,
            top_p: 0.9,
            repetition_penalty: 1.2,
            frequency_penalty: 0.1,
            seed,
            ..Default::default()
        },
    };
    GenerationOptions::default().with_sampling(sampling).with_max_tokens(12).with_repetition_context(16)
}

fn alone(model: &Model, prompt: &[u32], options: &GenerationOptions) -> Vec<u32> {
    let mut session = Session::new(model);
    let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
    session.generate(logits, options, |_| Continue(())).unwrap().tokens
}

/// A sequence that is written.
struct Text {
    id: u64,
    options: GenerationOptions,
    prompt: usize,
    text: Vec<u32>,
    cache: PoolCache,
}

impl Text {
    /// Reads all of the prompt but its last token, in passes of 64 or less, as the first step runs
    /// that one.
    fn start(model: &Model, pool: &mut CachePool, id: u64, prompt: Vec<u32>) -> Self {
        let mut cache = pool.cache().unwrap().expect("a free slot");
        assert!(pool.make_room(&mut cache, prompt.len() + 12));
        for part in prompt[..prompt.len() - 1].chunks(64) {
            assert!(model.forward_in(pool, &mut cache, part, Logits::None).unwrap().is_none());
        }
        Self { id, options: options(id), prompt: prompt.len(), text: prompt, cache }
    }

    fn row(&mut self) -> BatchRow<'_> {
        BatchRow {
            id: self.id,
            sampled: (self.text.len() - self.prompt) as u32,
            text: &self.text,
            cache: &mut self.cache,
            options: &self.options,
            rules: None,
            draws: true,
            logprobs: self.id.is_multiple_of(4).then_some(3),
        }
    }
}

fn step(model: &Model, pool: &mut CachePool, steps: &mut BatchSteps, texts: &mut [Text]) {
    let mut rows: Vec<_> = texts.iter_mut().map(Text::row).collect();
    let drawn = steps.step(model, pool, &mut rows).unwrap();
    drop(rows);
    assert_eq!(drawn.len(), texts.len());
    for (text, drawn) in texts.iter_mut().zip(drawn) {
        let id = drawn.id.unwrap();
        assert_eq!(drawn.logprobs.is_some(), text.id.is_multiple_of(4));
        if let Some(TokenLogprobs { token, top }) = drawn.logprobs {
            assert_eq!((token.id, top.len()), (id, 3));
            assert!(text.id % 3 != 0 || token == top[0], "it is the row's own");
        }
        text.text.push(id);
    }
}

#[test]
fn sequences_that_come_and_go_are_written_as_alone() {
    for model in models() {
        let mut pool = CachePool::new(&model, 24, 6, 0).unwrap();
        let mut steps = BatchSteps::new(&model, 6, CONTEXT, 16).unwrap();
        let lengths = [1, 63, 64, 65, 130, 5, 200, 17];
        let (mut coming, mut texts, mut done) = (lengths.iter().enumerate(), vec![], 0);
        for round in 0.. {
            // Now and then one comes, and goes when its reply is whole.
            if round % 3 == 0
                && let Some((seed, &length)) = coming.next()
            {
                let prompt = prompt(&model, seed as u32, length);
                texts.push(Text::start(&model, &mut pool, seed as u64, prompt));
            }
            step(&model, &mut pool, &mut steps, &mut texts);
            texts.retain(|text| {
                let (prompt, reply) = text.text.split_at(text.prompt);
                let ends = reply.len() == 12;
                if ends {
                    assert_eq!(
                        reply,
                        alone(&model, prompt, &text.options),
                        "{} {}",
                        model.architecture(),
                        text.id
                    );
                    done += 1;
                }
                !ends
            });
            if texts.is_empty() && coming.len() == 0 {
                break;
            }
        }
        assert_eq!((done, pool.free_pages()), (lengths.len(), 24));
    }
}

/// Guesses of all kinds: none, right ones, and wrong ones in every place.
#[test]
fn guesses_leave_what_is_written_alone() {
    for model in models() {
        let mut pool = CachePool::new(&model, 24, 6, 0).unwrap();
        let mut steps = BatchSteps::new(&model, 6, CONTEXT, 16).unwrap();
        let (mut texts, mut want) = (vec![], vec![]);
        for (seed, length) in (0..).zip([1, 62, 130, 17, 64]) {
            let mut text = Text::start(&model, &mut pool, seed, prompt(&model, seed as u32, length));
            if seed == 1 {
                text.options = text.options.with_logit_bias(vec![(3, 2.0), (4, -2.0)]);
            }
            let reply = alone(&model, &text.text, &text.options);
            want.push([&text.text[..], &reply].concat());
            texts.push((LogitRules::new(&text.options, &model).unwrap(), text));
        }
        let (mut passes, mut accepted) = (0, 0);
        while !texts.is_empty() {
            let guesses = |(_, text): &(LogitRules, Text)| {
                let (place, all) = (text.text.len(), &want[text.id as usize]);
                let count = ((text.id as usize + passes) % 4).min(all.len() - place - 1);
                let mut guesses = all[place..][..count].to_vec();
                let wrong = (passes + place) % 5;
                guesses.iter_mut().skip(wrong).take(1).for_each(|id| *id = id.wrapping_sub(1).min(*id / 2));
                guesses
            };
            let drafts: Vec<Vec<u32>> = texts.iter().map(guesses).collect();
            let mut rows = vec![];
            for (rules, text) in &mut texts {
                rows.push(BatchRow { rules: Some(rules), ..text.row() });
            }
            let verified = steps.verify(&model, &mut pool, (&mut rows, &drafts), passes % 2 == 0).unwrap();
            let count = rows.len() + drafts.iter().map(Vec::len).sum::<usize>();
            assert_eq!(verified.states.is_some(), passes % 2 == 0);
            assert!(verified.states.is_none_or(|states| states.dim(0) >= count));
            drop(rows);
            for ((_, text), drawn) in texts.iter_mut().zip(verified.drawn) {
                assert!(
                    drawn.iter().all(|drawn| drawn.logprobs.is_some() == (text.id % 4 == 0) && !drawn.ends)
                );
                accepted += drawn.len() - 1;
                for Verified { id, logprobs, .. } in drawn {
                    let id = id.unwrap();
                    // With rules beside them, and without.
                    if let (Some(TokenLogprobs { token, .. }), 1 | 5) = (logprobs, passes) {
                        let want = TokenLogprobs::new(&logits_alone(&model, &text.text), id, 3).token;
                        assert!(token.id == id && (token.logprob - want.logprob).abs() < 2e-3, "{token:?}");
                    }
                    text.text.push(id);
                }
                let want = &want[text.id as usize][..text.text.len()];
                assert_eq!(text.text, want, "{} {}", model.architecture(), text.id);
                assert_eq!(text.cache.position() + 1, text.text.len());
            }
            passes += 1;
            // Between them a step without guesses.
            texts.retain(|(_, text)| text.text.len() < text.prompt + 12);
            if passes == 3 {
                let mut plain: Vec<_> = texts.iter_mut().filter(|(_, text)| text.id != 1).collect();
                let mut rows: Vec<_> = plain.iter_mut().map(|(_, text)| text.row()).collect();
                let drawn = steps.step(&model, &mut pool, &mut rows).unwrap();
                drop(rows);
                for ((_, text), drawn) in plain.into_iter().zip(drawn) {
                    text.text.push(drawn.id.unwrap());
                    assert_eq!(text.text, want[text.id as usize][..text.text.len()]);
                }
                texts.retain(|(_, text)| text.text.len() < text.prompt + 12);
            }
        }
        assert!(accepted > 15 && passes < 12, "{accepted} in {passes}");
        assert_eq!(pool.free_pages(), 24);
    }
}

/// The layer for multi-token prediction guesses for each text as if it were alone, whatever the
/// others have unseen and want; on a GPU in passes that are captured, and in replays.
#[test]
fn a_layer_guesses_for_each_text_as_alone() {
    let host = Device::cpu(Some(2)).unwrap();
    #[cfg_attr(not(any(feature = "cuda", feature = "vulkan", feature = "metal")), allow(unused_mut))]
    let mut cases = vec![("qwen3_5", host.clone()), ("glm4_moe", host.clone()), ("deepseek_v3", host)];
    #[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
    cases.push(("qwen3_5", crate::support::gpu()));
    for (name, device) in cases {
        let path = root().join("tests/vectors/models").join(name);
        let model = load(&path, &device, FloatType::F32);
        let predictor = Predictor::load(&Checkpoint::open(&path).unwrap(), &model).unwrap();
        let pool = || CachePool::new(&model, 24, 6, 0).unwrap().with_predictor(&model, &predictor).unwrap();
        let steps = || BatchSteps::new(&model, 6, CONTEXT, 0).unwrap();
        let room = |pool: &mut CachePool, tokens: usize| {
            let mut cache = pool.cache().unwrap().unwrap();
            assert!(pool.make_room(&mut cache, tokens));
            cache
        };
        let (mut shared, mut texts, mut want) = (pool(), vec![], vec![]);
        // The text's length, its last tokens that the layer has not seen, and the wanted guesses.
        let sizes = [(9, 3, 1), (70, 1, 3), (64, 5, 3), (130, 2, 0), (65, 4, 2)];
        for (seed, (length, unseen, most)) in (0..).zip(sizes) {
            let (text, hidden) = (prompt(&model, seed, length), model.config().hidden_size);
            let state = |i: u32| (i.wrapping_mul(2_654_435_761) ^ seed) as i32 as f32 / i32::MAX as f32;
            let states: Vec<f32> = (0..(unseen * hidden) as u32).map(state).collect();
            let states = Tensor::new(&states, &[unseen, hidden], &device).unwrap();
            let (mut own, tokens) = (pool(), length + 3);
            let alone = MtpRow { cache: &room(&mut own, tokens), text: &text, states: states.clone(), most };
            want.extend(steps().guess((&model, &predictor), &mut own, &[alone]).unwrap());
            assert_eq!(want[want.len() - 1].len(), most);
            texts.push((text, states, room(&mut shared, tokens)));
        }
        let mut steps = steps();
        for order in [&[0, 1, 2, 3, 4][..], &[0, 1, 2, 3, 4], &[4, 1], &[3, 2, 4, 0]] {
            let row = |&place: &usize| {
                let (text, states, cache) = &texts[place];
                MtpRow { cache, text, states: states.clone(), most: want[place].len() }
            };
            let rows: Vec<_> = order.iter().map(row).collect();
            let got = steps.guess((&model, &predictor), &mut shared, &rows).unwrap();
            let want: Vec<_> = order.iter().map(|&place| want[place].clone()).collect();
            assert_eq!(got, want, "{name} on {device:?}");
        }
        // Keys and values of tokens that it has seen stay.
        let (text, states, cache) = &texts[2];
        for (seen, most) in [(4, 2), (5, 3)] {
            let (text, states) = (&text[..59 + seen], states.rows(seen / 5 * 4, seen).unwrap());
            let rows = [MtpRow { cache, text, states, most }];
            let got = steps.guess((&model, &predictor), &mut shared, &rows).unwrap();
            assert!(seen == 4 || got[0] == want[2], "{name} on {device:?}: {got:?}");
        }
        assert_eq!(steps.captures() > 0, matches!(device, Device::Gpu(_)));
    }
}

#[test]
fn first_tokens_are_drawn_together_as_alone() {
    for model in models() {
        let mut steps = BatchSteps::new(&model, 6, CONTEXT, 16).unwrap();
        let texts: Vec<_> =
            (0..5).map(|seed| (prompt(&model, seed, 20 + 9 * seed as usize), options(seed.into()))).collect();
        let all: Vec<Vec<f32>> = texts.iter().map(|(text, _)| logits_alone(&model, text)).collect();
        let logits = Tensor::new(&all.concat(), &[5, all[0].len()], model.device()).unwrap();
        // All of them, and some in another order, of which one has rules of its own.
        for rows in [&[0, 1, 2, 3, 4][..], &[3, 1]] {
            let forbids =
                GenerationOptions::default().with_logit_bias((0..40).map(|id| (id, -100.0)).collect());
            let mut rules = LogitRules::new(&forbids, &model).unwrap();
            let mut rules = Some(&mut rules);
            let mut firsts = vec![];
            for &row in rows {
                let (text, options) = &texts[row];
                let rules = if row == 3 { rules.take() } else { None };
                let logprobs = (row % 2 == 1).then_some(row);
                firsts.push(FirstRow { row, text, options, rules, logprobs });
            }
            let drawn = steps.first(logits.clone(), &mut firsts).unwrap();
            assert_eq!(drawn.len(), rows.len());
            for (&row, BatchDrawn { id, logprobs }) in rows.iter().zip(drawn) {
                let (text, options) = &texts[row];
                let mut state = DecodeState::new(text, options.repetition_context, model.device()).unwrap();
                let mut own = Tensor::new(&all[row], &[1, all[row].len()], model.device()).unwrap();
                if row == 3 {
                    own = LogitRules::new(&forbids, &model).unwrap().apply(&own).unwrap();
                }
                ops::sample_next(&own, &mut state, &options.sampling).unwrap();
                let want = state.drawn().unwrap().wait().unwrap();
                assert_eq!(id.unwrap(), want, "{} row {row} of {rows:?}", model.architecture());
                let expected = (row % 2 == 1).then(|| TokenLogprobs::new(&all[row], want, row));
                assert_logprobs(model.device(), logprobs, expected);
            }
        }
    }
}

/// Asserts that log-probabilities are those of logits as the model gave them: on a CPU to the bit,
/// on a GPU within the roundings of sums of f32.
fn assert_logprobs(device: &Device, got: Option<TokenLogprobs>, want: Option<TokenLogprobs>) {
    if let (Device::Gpu(_), Some(got), Some(want)) = (device, &got, &want) {
        let all = |of: &TokenLogprobs| [&[of.token][..], &of.top].concat();
        for (got, want) in all(got).iter().zip(&all(want)) {
            assert_eq!(got.id, want.id);
            assert!((got.logprob - want.logprob).abs() < 1e-4, "{got:?} for {want:?}");
        }
        assert_eq!(got.top.len(), want.top.len());
    } else {
        assert_eq!(got, want);
    }
}

/// The logits of a text's last token, computed without a pool.
fn logits_alone(model: &Model, text: &[u32]) -> Vec<f32> {
    let logits = model.forward(text, &mut model.cache(), Logits::Last).unwrap().unwrap();
    logits.to_device(model.host()).unwrap().as_slice::<f32>().unwrap().to_vec()
}

/// Checks the logits of a text's last token.
fn check_logits(model: &Model, text: &[u32], got: &[f32]) {
    let want = logits_alone(model, text);
    let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-3, "{} after {}: {worst}", model.architecture(), text.len());
}

#[test]
fn marks_on_the_way_are_the_states_there() {
    for model in models() {
        let mut pool = CachePool::new(&model, 24, 6, 3).unwrap();
        let texts = [prompt(&model, 1, 200), prompt(&model, 2, 70), prompt(&model, 3, 64)];
        let places = [&[64, 192][..], &[], &[64]];
        let marks =
            places.map(|places| places.iter().map(|&at| pool.mark_at(at).unwrap()).collect::<Vec<_>>());
        let size = model.cache_size().unwrap();
        let marked = size.fixed + size.windowed > 0;
        assert_eq!(pool.mark_at(64).is_err(), marked, "there are three");
        let mut caches = texts.each_ref().map(|text| {
            let mut cache = pool.cache().unwrap().unwrap();
            assert!(pool.make_room(&mut cache, text.len()));
            cache
        });
        let mut batch: Vec<_> = texts
            .iter()
            .zip(&mut caches)
            .zip(&marks)
            .map(|((tokens, cache), marks)| PoolSequence { tokens, cache, marks })
            .collect();
        assert!(model.forward_batch_in(&mut pool, &mut batch, Logits::All).is_err());
        let logits = model.forward_batch_in(&mut pool, &mut batch, Logits::Last).unwrap().unwrap();
        let logits = logits.to_device(model.host()).unwrap();
        for (text, got) in texts.iter().zip(logits.as_slice::<f32>().unwrap().chunks(logits.dim(1))) {
            check_logits(&model, text, got);
        }
        // The text after a mark is read as it was.
        for mark in &marks[0] {
            let at = mark.position();
            let mut fork = pool.fork(&caches[0], (at, Some(mark)), 200).unwrap().unwrap();
            let logits = model.forward_in(&mut pool, &mut fork, &texts[0][at..], Logits::Last).unwrap();
            let logits = logits.unwrap().to_device(model.host()).unwrap();
            check_logits(&model, &texts[0], logits.as_slice::<f32>().unwrap());
        }
        // A mark that the tokens do not reach.
        let mut late = pool.cache().unwrap().unwrap();
        assert!(pool.make_room(&mut late, 64));
        let batch = &mut [PoolSequence { tokens: &[1; 40], cache: &mut late, marks: &marks[2] }];
        let error = model.forward_batch_in(&mut pool, batch, Logits::Last).unwrap_err().to_string();
        assert!(error.contains("marks is 64") && error.contains("a place after 0, up to 40"), "{error}");
        drop((marks, late));
        assert!(pool.mark_at(64).is_ok(), "their places are free again");
    }
}

#[test]
fn prompts_read_in_one_pass_are_read_as_alone() {
    for model in models() {
        let mut pool = CachePool::new(&model, 24, 6, 0).unwrap();
        let texts: Vec<Vec<u32>> =
            [1, 63, 64, 65, 130, 200].iter().zip(0..).map(|(&n, seed)| prompt(&model, seed, n)).collect();
        let mut caches: Vec<PoolCache> = vec![];
        for text in &texts {
            let mut cache = pool.cache().unwrap().expect("a free slot");
            assert!(pool.make_room(&mut cache, text.len()));
            caches.push(cache);
        }
        // Parts of several lengths, and those that follow; each ends at a multiple of 64 or with
        // its text.
        while caches.iter().zip(&texts).any(|(cache, text)| cache.position() < text.len()) {
            let unread = |(cache, text): &(&mut PoolCache, &Vec<u32>)| cache.position() < text.len();
            let reads: Vec<_> = caches.iter_mut().zip(&texts).filter(unread).collect();
            let mut batch = vec![];
            let mut ends = vec![];
            for (index, (cache, text)) in reads.into_iter().enumerate() {
                let start = cache.position();
                let end = (start + 64 * (1 + index % 2)).min(text.len());
                ends.push(&text[..end]);
                batch.push(PoolSequence { tokens: &text[start..end], cache, marks: &[] });
            }
            let logits = model.forward_batch_in(&mut pool, &mut batch, Logits::Last).unwrap().unwrap();
            assert_eq!(logits.shape(), [ends.len(), model.config().vocab_size]);
            let logits = logits.to_device(model.host()).unwrap();
            for (read, got) in ends.iter().zip(logits.as_slice::<f32>().unwrap().chunks(logits.dim(1))) {
                check_logits(&model, read, got);
            }
        }
        // A pass that one of its sequences has no room for changes none.
        let (first, others) = caches.split_first_mut().unwrap();
        let mut batch = [(first, 1), (&mut others[0], 2)].map(|(cache, count)| PoolSequence {
            tokens: &texts[5][..count],
            cache,
            marks: &[],
        });
        assert!(model.forward_batch_in(&mut pool, &mut batch, Logits::None).is_err());
        assert_eq!((caches[0].position(), caches[1].position()), (1, 63));
    }
}

#[test]
fn forks_share_pages_until_one_goes_back() {
    for model in models() {
        let mut pool = CachePool::new(&model, 16, 4, 1).unwrap();
        let mut steps = BatchSteps::new(&model, 4, CONTEXT, 16).unwrap();
        let (common, ends) = (prompt(&model, 1, 128), [prompt(&model, 2, 70), prompt(&model, 3, 30)]);
        let mut first = pool.cache().unwrap().unwrap();
        assert!(pool.make_room(&mut first, 128 + 82));
        let mark = pool.mark_at(128).unwrap();
        let marks = std::slice::from_ref(&mark);
        let batch = &mut [PoolSequence { tokens: &common, cache: &mut first, marks }];
        model.forward_batch_in(&mut pool, batch, Logits::None).unwrap();
        model.forward_in(&mut pool, &mut first, &ends[0], Logits::None).unwrap();
        let fork = pool.fork(&first, (128, Some(&mark)), 128 + 50).unwrap().unwrap();
        // Four pages, and one of the fork's own.
        assert_eq!((fork.position(), pool.free_pages()), (128, 11));
        // The first one parks, and then goes on with the other end, over pages that the fork reads.
        first.park(128 + 64);
        assert_eq!((first.capacity(), pool.free_pages()), (192, 12));
        pool.go_back(&mut first, 128, Some(&mark)).unwrap();
        assert!(pool.make_room(&mut first, 128 + 82));
        let mut texts = vec![];
        for (id, (mut cache, end)) in [(first, &ends[0]), (fork, &ends[1])].into_iter().enumerate() {
            let text = [&common[..], end].concat();
            model.forward_in(&mut pool, &mut cache, &end[..end.len() - 1], Logits::None).unwrap();
            texts.push(Text { id: id as u64, options: options(id as u64), prompt: text.len(), text, cache });
        }
        for _ in 0..12 {
            step(&model, &mut pool, &mut steps, &mut texts);
        }
        for Text { id, options, prompt, text, .. } in texts {
            let (prompt, reply) = text.split_at(prompt);
            assert_eq!(reply, alone(&model, prompt, &options), "{} {id}", model.architecture());
        }
        assert_eq!(pool.free_pages(), 16);
    }
}

/// A sequence gives back the pages that its windows have left behind, so that a small pool of them
/// is enough, and is written as alone; its marks keep theirs.
#[test]
fn pages_behind_a_window_are_free_again() {
    for model in models() {
        let size = model.cache_size().unwrap();
        if size.windowed == 0 {
            continue;
        }
        let (kept, pass) = (size.window_pages(), 2);
        assert_eq!(kept, 2, "windows of 19 to 21 tokens, and 16 that may be refused");
        let all = 2 * (kept + 2) + kept + pass;
        let mut pool = CachePool::with_window_pages(&model, [16, 2, 1], all).unwrap();
        let mut steps = BatchSteps::new(&model, 2, 512, 16).unwrap();
        let mark = pool.mark_at(192).unwrap();
        let mut texts = vec![];
        for (id, length) in [(0, 470), (1, 300)] {
            let text = prompt(&model, id as u32, length);
            let mut cache = pool.cache().unwrap().unwrap();
            assert!(pool.make_room(&mut cache, length + 12));
            while cache.position() + 1 < length {
                let range = cache.position()..(cache.position() + 64 * pass).min(length - 1);
                let marks = if id == 0 && range.contains(&191) { std::slice::from_ref(&mark) } else { &[] };
                let batch = &mut [PoolSequence { tokens: &text[range], cache: &mut cache, marks }];
                model.forward_batch_in(&mut pool, batch, Logits::None).unwrap();
            }
            texts.push(Text { id, options: options(id), prompt: text.len(), text, cache });
        }
        let taken = all - pool.free_window_pages().unwrap();
        assert!(taken <= 3 * kept, "{taken} of {all} pages");
        for _ in 0..12 {
            step(&model, &mut pool, &mut steps, &mut texts);
        }
        for Text { id, options, prompt, text, .. } in &texts {
            let (prompt, reply) = text.split_at(*prompt);
            assert_eq!(reply, alone(&model, prompt, options), "{} {id}", model.architecture());
        }
        // A window that was given back is reached by its mark alone.
        let Text { mut cache, text, .. } = texts.remove(0);
        let error = pool.go_back(&mut cache, 128, None).unwrap_err().to_string();
        assert!(error.contains("go_back: tokens is 128, but a mark of this place"), "{error}");
        cache.park(192);
        pool.go_back(&mut cache, 192, Some(&mark)).unwrap();
        assert!(pool.make_room(&mut cache, 250));
        let logits = model.forward_in(&mut pool, &mut cache, &text[192..250], Logits::Last).unwrap().unwrap();
        let logits = logits.to_device(model.host()).unwrap();
        check_logits(&model, &text[..250], logits.as_slice::<f32>().unwrap());
        drop((texts, cache, mark));
        assert_eq!((pool.free_pages(), pool.free_window_pages()), (16, Some(all)));
    }
}

#[test]
fn a_full_pool_refuses_and_stays_as_it_is() {
    let model = &models()[1];
    let mut pool = CachePool::new(model, 3, 2, 1).unwrap();
    let mut cache = pool.cache().unwrap().unwrap();
    assert!(pool.make_room(&mut cache, 100));
    assert!(!pool.make_room(&mut cache, 300) && cache.capacity() == 128 && pool.free_pages() == 1);
    let error = model.forward_in(&mut pool, &mut cache, &[1; 129], Logits::None).unwrap_err().to_string();
    assert_eq!(
        error,
        "the pool has no page or no slot left for the sequence: room is made before its tokens run"
    );
    let other = pool.cache().unwrap().unwrap();
    assert!(pool.cache().unwrap().is_none(), "there are two slots");
    drop(other);
    assert!(pool.fork(&cache, (0, None), 64).unwrap().is_some(), "its slot is free again");
    cache.park(0);
    assert_eq!((cache.capacity(), pool.free_pages()), (0, 3));
    assert!(model.forward_in(&mut pool, &mut cache, &[1], Logits::None).is_err(), "it is parked");
}
