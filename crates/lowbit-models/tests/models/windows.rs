//! Caches of layers with a window forget, and nobody notices: neither logits nor replies.

use crate::tiny::Tiny;
use lowbit_formats::FloatType;
use lowbit_kernels::Device;
use lowbit_kernels::ops::CacheType;
use lowbit_models::{Cache, GenerationOptions, Logits, Model, Sequence, Session, Target, WINDOW_ROLLBACK};
use std::ops::ControlFlow::Continue;

/// Every tiny model whose layers, all or some, have windows of 19 to 23 tokens.
const MODELS: [&str; 8] =
    ["gemma3", "gemma4", "gemma4_moe", "gemma4_small", "gpt_oss", "exaone4", "olmo3", "mistral"];
/// Rows that these windows' buffers have: 64 that are kept, and room for 256.
const CAPACITY: usize = 320;
/// Tokens by which they move on.
const STRIDE: usize = 256;

/// The model, made for texts of several times what its windows keep.
fn long(name: &str, device: &Device, cache: impl Into<CacheType>) -> Model {
    let mut tiny = Tiny::open(name);
    tiny.text().insert("max_position_embeddings".into(), 2048.into());
    let (checkpoint, _folder) = tiny.checkpoint();
    let mut target = Target::new(device, Some(FloatType::F32)).unwrap().with_exact(true);
    target.cache = cache.into();
    Model::load_for(&checkpoint.unwrap(), target).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn cpu(name: &str) -> Model {
    cpu_with(name, FloatType::F32.into())
}

fn cpu_with(name: &str, cache: CacheType) -> Model {
    long(name, &Device::cpu(Some(2)).unwrap(), cache)
}

fn text(model: &Model, length: usize) -> Vec<u32> {
    let size = model.config().vocab_size as u32;
    (0..length as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % size).collect()
}

fn run(model: &Model, cache: &mut Cache, tokens: &[u32]) -> Vec<f32> {
    let logits = model.forward(tokens, cache, Logits::All).unwrap().unwrap();
    logits.to_device(model.host()).unwrap().as_slice::<f32>().unwrap().to_vec()
}

/// Passes of so many tokens: they fill the buffers, cross their ends by more tokens than those keep
/// beside the window and by fewer, and are longer than the buffers.
fn passes() -> Vec<usize> {
    let steps = [1; 8];
    [&[300, 40][..], &steps, &[220, 5], &steps, &[700], &steps, &[17, 60, 3]].concat()
}

/// On a CPU bit for bit: the stretches of keys that are summed are those of positions.
#[test]
fn logits_are_those_of_caches_that_keep_all() {
    // Rows of 8 bits move with their scales.
    let with_8_bits = ("olmo3", CacheType::Int8);
    for (name, cached) in MODELS.map(|name| (name, FloatType::F32.into())).into_iter().chain([with_8_bits]) {
        let model = cpu_with(name, cached);
        let (mut cache, mut whole) = (model.cache(), model.cache_that_keeps_all());
        let passes = passes();
        let all = text(&model, passes.iter().sum());
        assert!(all.len() > 4 * CAPACITY);
        let (mut rest, size) = (&all[..], model.cache_size().unwrap());
        for count in passes {
            let (tokens, after) = rest.split_at(count);
            rest = after;
            let (got, want) = (run(&model, &mut cache, tokens), run(&model, &mut whole, tokens));
            let same = got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits());
            assert!(same, "{name}: {count} tokens up to {}", cache.position());
        }
        assert_eq!(size.window, CAPACITY, "{name}");
        assert!(size.windowed > 0, "{name}");
        // 2,048 tokens are the next capacity of the other layers.
        let full = cache.size_bytes() - size.windowed * CAPACITY;
        assert!(full == size.per_token * 2048 || size.per_token == 0 && full == 0, "{name}: {full}");
        assert_eq!(whole.size_bytes(), size.whole_per_token() * 2048, "{name}");
    }
}

#[test]
fn the_size_of_a_cache_is_known_before_there_is_one() {
    for name in ["mistral", "gemma4"] {
        let model = cpu(name);
        let size = model.cache_size().unwrap();
        for tokens in [1, 300, 400, 1000] {
            let (mut cache, mut roomy) = (model.cache(), model.cache());
            run(&model, &mut cache, &text(&model, tokens));
            model.make_room(&mut roomy, tokens).unwrap();
            assert_eq!([&cache, &roomy].map(Cache::size_bytes), [size.bytes(tokens); 2], "{name}: {tokens}");
            assert!(cache.has_room(size.granule - tokens % size.granule));
        }
    }
}

/// Drafts are refused wherever a buffer stands; further back is a mark, or an error that says so.
#[test]
fn caches_go_back_as_far_as_they_say() {
    for name in ["mistral", "gemma4", "gemma4_small"] {
        let model = cpu(name);
        let all = text(&model, 800);
        let mut cache = model.cache();
        assert!(cache.go_back_to(0));
        run(&model, &mut cache, &all[..CAPACITY - 3]);
        assert!(cache.go_back_to(7) && cache.position() == 7, "{name}: nothing is forgotten yet");
        run(&model, &mut cache, &all[7..CAPACITY - 3]);
        let next = |cache: &mut Cache, at: usize| run(&model, cache, &all[at..at + 1]);
        let mut whole = model.cache_that_keeps_all();
        run(&model, &mut whole, &all[..CAPACITY - 3]);
        for at in CAPACITY - 3..CAPACITY + 20 {
            // As many drafts as there may be, all but the first of which are refused.
            run(&model, &mut cache.clone(), &all[at..at + 1]);
            run(&model, &mut cache, &all[at..=at + WINDOW_ROLLBACK]);
            assert!(cache.go_back_to(at), "{name}: {WINDOW_ROLLBACK} tokens before {}", cache.position());
            assert_eq!(next(&mut cache, at), next(&mut whole, at), "{name}: {at}");
        }
        // The buffer begins at 256; 20 tokens or more before a place it has what that sees.
        assert!(!cache.go_back_to(STRIDE + 10), "{name}");
        assert_eq!(cache.position(), CAPACITY + 20, "nothing changed");
        let mark = cache.mark().unwrap();
        let mut gone = cache.clone();
        for count in [1, 30, 300] {
            let at = cache.position();
            run(&model, &mut cache, &all[at..at + count]);
            cache.go_back(&mark).unwrap();
            let got = run(&model, &mut cache, &all[at..at + 50]);
            let want = run(&model, &mut gone.clone(), &all[at..at + 50]);
            assert_eq!(got, want, "{name}: {count} tokens after a mark");
            cache.go_back(&mark).unwrap();
        }
        let at = gone.position();
        assert_eq!(next(&mut gone, at), next(&mut cache, at), "{name}");
        assert!(whole.go_back_to(1), "a cache that keeps all");
    }
}

#[test]
fn clones_go_on_apart() {
    let model = cpu("gemma4_small");
    let all = text(&model, 900);
    let mut first = model.cache();
    run(&model, &mut first, &all[..310]);
    let (mut second, mut third) = (first.clone(), model.fork(&first, 600).unwrap());
    let mut batch = [
        Sequence { tokens: &all[310..330], cache: &mut first },
        Sequence { tokens: &all[400..700], cache: &mut second },
    ];
    model.forward_batch(&mut batch, Logits::None).unwrap();
    let want = |texts: &[&[u32]]| {
        let mut cache = model.cache_that_keeps_all();
        texts.iter().fold(vec![], |_, tokens| run(&model, &mut cache, tokens))
    };
    let last = &all[800..860];
    assert_eq!(run(&model, &mut first, last), want(&[&all[..310], &all[310..330], last]));
    assert_eq!(run(&model, &mut second, last), want(&[&all[..310], &all[400..700], last]));
    assert_eq!(run(&model, &mut third, last), want(&[&all[..310], last]));
}

/// A pass that fails half way leaves windows of which some are new and some are old.
#[test]
fn a_cache_that_a_pass_left_is_refused_until_it_begins_anew() {
    let mut tiny = Tiny::open("mistral");
    tiny.text().insert("max_position_embeddings".into(), 2048.into());
    let (dtype, _, bytes) = tiny.tensor("model.layers.2.self_attn.v_proj.weight");
    // Values that f16 does not hold.
    assert_eq!(format!("{dtype:?}"), "BF16");
    bytes.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0x80, 0x47]));
    let (checkpoint, _folder) = tiny.checkpoint();
    let mut target = Target::new(&Device::cpu(Some(1)).unwrap(), Some(FloatType::F32)).unwrap();
    target.cache = FloatType::F16.into();
    let model = Model::load_for(&checkpoint.unwrap(), target).unwrap();
    let (mut cache, tokens) = (model.cache(), text(&model, 400));
    let mut refused = |tokens| model.forward(tokens, &mut cache, Logits::None).unwrap_err().to_string();
    assert!(refused(&tokens).contains("f16, the cache's type"));
    let want = "forward: cache is left by a pass that failed, but one that goes back, or begins anew";
    assert!(refused(&tokens[..1]).starts_with(want), "{}", refused(&tokens[..1]));
    assert!(cache.mark().unwrap_err().to_string().starts_with(want));
}

/// Sessions read again what they cannot go back to, and captured steps go on when buffers move.
fn sessions_go_on(models: &[Model], length: usize) {
    let mut texts = vec![];
    for model in models {
        let all = text(model, 1200);
        let options = GenerationOptions::default().with_max_tokens(24);
        let reply = |session: &mut Session<'_>, prompt: &[u32]| {
            let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
            session.generate(logits, &options, |_| Continue(())).unwrap().tokens
        };
        let fresh = |prompt: &[u32]| reply(&mut Session::new(model), prompt);
        let mut session = Session::new(model);
        assert!(!session.goes_back_anywhere().unwrap());
        session.prefill(&all[..100], |_| Continue(())).unwrap();
        session.mark().unwrap();
        // The buffers move on in the middle of the reply.
        let written = reply(&mut session, &all[100..length]);
        assert_eq!(session.tokens()[..length], all[..length]);
        let first = [&all[..length], &written].concat();
        let again = reply(&mut session, &all[..3]);
        assert_eq!(again, fresh(&[&first[..], &all[..3]].concat()), "{}", model.device());
        // Forgotten rows are read again from the mark before them.
        assert_eq!(session.go_back(150).unwrap(), 100);
        let replaced = reply(&mut session, &all[500..520]);
        assert_eq!(replaced, fresh(&[&all[..100], &all[500..520]].concat()), "{}", model.device());
        texts.push([written, again, replaced]);
    }
    texts.iter().for_each(|other| assert_eq!(other, &texts[0]));
}

#[test]
fn replies_do_not_notice() {
    for name in ["gemma4_small", "mistral", "gpt_oss"] {
        let model = cpu(name);
        sessions_go_on(std::slice::from_ref(&model), CAPACITY - 10);
        let all = text(&model, 700);
        let mut session = Session::new(&model);
        session.prefill(&all, |_| Continue(())).unwrap();
        assert_eq!(session.go_back(all.len() - WINDOW_ROLLBACK).unwrap(), all.len() - WINDOW_ROLLBACK);
        assert_eq!(session.go_back(400).unwrap(), 0, "there is no mark: it begins anew");
        session.clear().unwrap();
        assert_eq!(session.cache().position(), 0);
    }
}

#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
mod gpu {
    use super::*;

    #[test]
    fn replies_do_not_notice() {
        let device = crate::support::gpu();
        for name in ["gemma4_small", "mistral"] {
            let models = [cpu(name), long(name, &device, FloatType::F32)];
            sessions_go_on(&models, CAPACITY - 10);
        }
    }

    /// Sums come in another order where keys stand elsewhere: f32's rounding, over a few layers.
    #[test]
    fn logits_are_close_to_those_of_caches_that_keep_all() {
        let device = crate::support::gpu();
        for name in ["gemma3", "gpt_oss"] {
            let model = long(name, &device, FloatType::F32);
            let (mut cache, mut whole) = (model.cache(), model.cache_that_keeps_all());
            let all = text(&model, 1000);
            let mut at = 0;
            for count in [310, 20, 1, 1, 300, 5, 1] {
                let tokens = &all[at..at + count];
                at += count;
                let (got, want) = (run(&model, &mut cache, tokens), run(&model, &mut whole, tokens));
                let most = want.iter().fold(0f32, |most, x| most.max(x.abs()));
                let error = got.iter().zip(&want).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(error <= 1e-4 * most, "{name}: {error:e} of {most:e} after {at} tokens");
            }
        }
    }
}
