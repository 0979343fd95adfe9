//! Whole models against transformers in f32: tiny random checkpoints of every architecture, every
//! dimension different, and the demo model. `tests/vectors/models/<name>/` holds a checkpoint as a
//! directory, as a GGUF file, or both, and what transformers made of its weights.

use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_models::{GenerationOptions, Logits, Model, Sequence, Session, Target};
use numcheck::Vectors;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

/// The largest error of a logit against transformers in f32.
const PEER: f32 = 1e-3;
/// The largest difference between ways of cutting the same prompt.
const PIECES: f32 = 1e-4;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The checkpoints in a folder of vectors.
fn checkpoints(folder: &Path) -> Vec<PathBuf> {
    let directory = folder.join("config.json").is_file().then(|| folder.to_path_buf());
    let gguf = Some(folder.join("model.gguf")).filter(|path| path.is_file());
    directory.into_iter().chain(gguf).collect()
}

fn load(path: &Path, device: &Device) -> Model {
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"));
    let target = Target::new(device, None).unwrap().with_exact(true);
    Model::load_for(&checkpoint, target).unwrap_or_else(|error| panic!("{error}"))
}

/// All logits of `tokens`, run through an empty cache in pieces of the given sizes (the last one
/// again and again).
fn logits(model: &Model, tokens: &[u32], pieces: &[usize]) -> Vec<f32> {
    let (mut cache, mut rest, mut all) = (model.cache(), tokens, vec![]);
    let mut sizes = pieces.iter().copied();
    let mut size = tokens.len();
    while !rest.is_empty() {
        size = sizes.next().unwrap_or(size).min(rest.len());
        let piece = model.forward(&rest[..size], &mut cache, Logits::All).unwrap().unwrap();
        all.extend_from_slice(piece.as_slice::<f32>().unwrap());
        rest = &rest[size..];
    }
    assert_eq!(cache.position(), tokens.len());
    all
}

/// The logits of `tokens` as one of three sequences, which come in pieces of different sizes.
fn batched(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let other: Vec<u32> = tokens.iter().rev().copied().collect();
    let mut caches = [model.cache(), model.cache(), model.cache()];
    let (vocab_size, mut all) = (model.config().vocab_size, vec![]);
    let texts = [&other[..], tokens, &other[1..]];
    for (first, size) in [(0, 5), (5, 1), (6, tokens.len() - 6)] {
        // The first text is shorter, and ends with its second piece.
        let of = |(i, text): (usize, &'_ [u32])| match i {
            0 => text[first.min(6)..(first + size).min(6)].to_vec(),
            2 => text[first..(first + size).min(text.len())].to_vec(),
            _ => text[first..first + size].to_vec(),
        };
        let pieces: Vec<Vec<u32>> = texts.into_iter().enumerate().map(of).collect();
        let batch = pieces.iter().zip(&mut caches).filter(|(tokens, _)| !tokens.is_empty());
        let mut batch: Vec<_> = batch.map(|(tokens, cache)| Sequence { tokens, cache }).collect();
        let before = if batch.len() == 3 { pieces[0].len() } else { 0 };
        let got = model.forward_batch(&mut batch, Logits::All).unwrap().unwrap();
        let got = &got.as_slice::<f32>().unwrap()[before * vocab_size..][..pieces[1].len() * vocab_size];
        all.extend_from_slice(got);
    }
    assert_eq!(caches.map(|cache| cache.position()), [6, tokens.len(), tokens.len() - 1]);
    all
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], want: &[f32], bound: f32) -> f32 {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
        // Not `error > bound`: a NaN must fail.
        assert!(error <= bound, "{what} [{i}]: got {got} want {want}");
        worst = f32::max(worst, error);
    }
    worst
}

fn greedy(model: &Model, prompt: &[u32], count: usize) -> Vec<u32> {
    let options = GenerationOptions::default().with_max_tokens(count);
    let mut session = Session::new(model);
    let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
    session.generate(logits, &options, |_| Continue(())).unwrap().tokens
}

#[test]
fn every_architecture_agrees_with_transformers() {
    let mut folders: Vec<_> =
        root().join("tests/vectors/models").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let mut failures = vec![];
    let mut checked = 0;
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let vectors = Vectors::open(&format!("models/{name}/expected"));
        let [tokens, want, text] = ["tokens", "logits", "greedy"].map(|key| vectors.get(key));
        let (tokens, want, text) = (tokens.u32s(), want.f32s(), text.u32s());
        for path in checkpoints(&folder) {
            let what = format!("{name}/{}", path.file_name().unwrap().to_str().unwrap());
            let result = std::panic::catch_unwind(|| {
                let model = load(&path, &Device::cpu(Some(2)).unwrap());
                let whole = logits(&model, &tokens, &[]);
                let worst = assert_close("one piece", &whole, &want, PEER);
                assert_close("ragged pieces", &logits(&model, &tokens, &[3, 1, 17, 2, 31]), &whole, PIECES);
                assert_close("token by token", &logits(&model, &tokens, &[1]), &whole, PIECES);
                assert_close("in a batch", &batched(&model, &tokens), &whole, PIECES);
                assert_eq!(greedy(&model, &tokens, text.len()), text, "greedy tokens");
                worst
            });
            checked += 1;
            match result {
                Ok(worst) => println!("{what}: largest error {worst:e}"),
                Err(_) => failures.push(what),
            }
        }
    }
    assert!(failures.is_empty(), "of {checked} checkpoints these failed: {failures:?}");
    assert!(checked >= 20, "only {checked} checkpoints were found");
}

#[test]
fn the_last_logits_of_a_batch_are_those_of_its_sequences() {
    let folder = root().join("tests/vectors/models/qwen3_next");
    let model = load(&folder, &Device::cpu(Some(2)).unwrap());
    let texts: [&[u32]; 3] = [&[1, 2, 3, 4], &[5], &[6, 7]];
    let mut caches = [model.cache(), model.cache(), model.cache()];
    let sequences = texts.into_iter().zip(&mut caches);
    let mut batch: Vec<_> = sequences.map(|(tokens, cache)| Sequence { tokens, cache }).collect();
    let got = model.forward_batch(&mut batch, Logits::Last).unwrap().unwrap();
    assert_eq!(got.shape(), [3, model.config().vocab_size]);
    let alone = texts.map(|tokens| model.forward(tokens, &mut model.cache(), Logits::Last).unwrap().unwrap());
    let alone: Vec<f32> =
        alone.iter().flat_map(|logits| logits.as_slice::<f32>().unwrap()).copied().collect();
    assert_close("last", got.as_slice().unwrap(), &alone, PIECES);

    let refused = |texts: [&[u32]; 2]| {
        let mut caches = [model.cache(), model.cache()];
        let sequences = texts.into_iter().zip(&mut caches);
        let mut batch: Vec<_> = sequences.map(|(tokens, cache)| Sequence { tokens, cache }).collect();
        let error = model.forward_batch(&mut batch, Logits::Last).unwrap_err().to_string();
        assert!(caches.iter().all(|cache| cache.position() == 0));
        error
    };
    let count = model.config().vocab_size;
    assert_eq!(refused([&[1], &[]]), "sequence 1 of the batch: there are no tokens to start from");
    assert_eq!(
        refused([&[1, count as u32], &[1]]),
        format!("sequence 0 of the batch: token 1 is {count}, but the vocabulary has {count}")
    );
    assert!(model.forward_batch(&mut [], Logits::Last).is_err());
}

#[test]
fn the_demo_model_agrees_with_transformers() {
    let device = Device::cpu(Some(2)).unwrap();
    for (vectors, path) in
        [("demo/expected_bf16", "models/demo"), ("demo/expected_mlx_4bit_dequantized", "models/demo-4bit")]
    {
        let vectors = Vectors::open(vectors);
        let [tokens, want, text] = ["tokens", "logits", "greedy"].map(|key| vectors.get(key));
        let (tokens, want) = (tokens.u32s(), want.f32s());
        let model = load(&root().join(path), &device);
        let vocab_size = model.config().vocab_size;
        let got = logits(&model, &tokens, &[]);
        for (&position, want) in vectors.get("positions").u32s().iter().zip(want.chunks_exact(vocab_size)) {
            let got = &got[position as usize * vocab_size..][..vocab_size];
            let worst = assert_close(path, got, want, PEER);
            println!("{path} at {position}: largest error {worst:e}");
        }
        assert_close("ragged pieces", &logits(&model, &tokens, &[7, 64, 1, 20]), &got, PIECES);
        assert_close("token by token", &logits(&model, &tokens, &[1]), &got, PIECES);
        let text = text.u32s();
        assert_eq!(greedy(&model, &tokens, text.len()), text, "{path}: greedy tokens");
    }
}

/// Rounding activations to 8 bits, and keys and values to f16, costs little of what the model says.
/// The error of 8 bits per group: a value is off by up to 1/254 of its group's greatest, some 1 %
/// of a typical one, and a layer adds the errors of many as noise: 1.6 % of the logits and a KL of
/// 0.0004 here. A fault in one tile, format or scale moves them by far more.
#[test]
fn the_default_arithmetic_stays_close_to_the_exact_one() {
    let checkpoint = Checkpoint::open(&root().join("models/demo-4bit")).unwrap();
    let device = Device::cpu(Some(2)).unwrap();
    let target = Target::new(&device, None).unwrap();
    let exact = Model::load_for(&checkpoint, target.clone().with_exact(true)).unwrap();
    let fast = Model::load_for(&checkpoint, target).unwrap();
    let vocab_size = exact.config().vocab_size;
    let tokens = Vectors::open("demo/expected_mlx_4bit_dequantized").get("tokens").u32s();
    let [exact, fast] = [&exact, &fast].map(|model| logits(model, &tokens, &[]));
    let (mut noise, mut signal, mut divergence) = (0.0, 0.0, 0.0);
    for (exact, fast) in exact.chunks_exact(vocab_size).zip(fast.chunks_exact(vocab_size)) {
        let [p, q] = [exact, fast].map(log_softmax);
        let mean = exact.iter().map(|&x| f64::from(x)).sum::<f64>() / vocab_size as f64;
        divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        noise += exact.iter().zip(fast).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>();
        signal += exact.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    }
    let (noise, divergence) = ((noise / signal).sqrt(), divergence / tokens.len() as f64);
    println!("noise {noise:.5} of the logits, KL {divergence:.6}");
    assert!(noise > 0.0, "both computed the same: nothing was repacked");
    assert!(noise < 0.03 && divergence < 3e-3, "noise {noise} of the logits, KL {divergence}");
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - greatest).exp()).sum();
    logits.iter().map(|x| f64::from(x - greatest) - sum.ln()).collect()
}
