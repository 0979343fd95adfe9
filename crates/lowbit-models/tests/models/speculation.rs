//! Texts do not depend on guesses: those that are right, wrong and missing give the same tokens,
//! and on a CPU the same bits behind the last norm, as steps without any.

use crate::sessions::options;
use crate::support::{PROMPT, root};
use crate::thirds::Thirds;
use lowbit_files::Checkpoint;
use lowbit_formats::FloatType;
use lowbit_kernels::ops::SampleParams;
use lowbit_kernels::{Device, Tensor};
use lowbit_models::{
    DraftModel, Drafter, Finish, Generation, GenerationOptions, Model, ModelError, Mtp, Ngrams, Predictor,
    Script, Session, Speculation, Target,
};
use numcheck::Vectors;
use std::collections::BTreeMap;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::{Arc, Mutex};

/// The model as a program loads it: products of quantised weights are in integers on a CPU.
fn load(name: &str, device: &Device) -> Model {
    load_for(name, Target::new(device, Some(FloatType::F32)).unwrap())
}

fn load_for(name: &str, target: Target) -> Model {
    Model::load_for(&checkpoint(name), target).unwrap()
}

fn checkpoint(name: &str) -> Checkpoint {
    let folder = match name.starts_with("demo") {
        true => root().join("models").join(name),
        false => root().join("tests/vectors/models").join(name),
    };
    let file = folder.join("model.gguf");
    Checkpoint::open(if file.exists() { &file } else { &folder }).unwrap()
}

fn cpu() -> Device {
    Device::cpu(Some(2)).unwrap()
}

/// Small quantised models: attention, delta nets, experts.
const QUANTISED: [&str; 8] = [
    "qwen3_5-mlx-8bit",
    "qwen3_5_moe-mlx-4bit",
    "mistral-mlx-fp",
    "qwen3_next-mlx-4bit",
    "qwen3-mlx-4bit",
    "qwen3-Q4_0",
    "qwen3_moe-mlx-4bit",
    "llama3-mlx-mixed",
];

/// Of kinds of caches, windows and mixers besides, with float weights, all or some.
const FLOAT: [&str; 11] = [
    "qwen3_5_moe-gguf-Q8_0",
    "granite_hybrid",
    "nemotron_h",
    "lfm2",
    "deepseek_v3",
    "kimi_linear",
    "gemma4_small",
    "gemma3",
    "gpt_oss",
    "glm4_moe",
    "qwen3_next",
];

/// A prompt for a vocabulary.
fn prompt(model: &Model, length: usize) -> Vec<u32> {
    let size = model.config().vocab_size as u32;
    PROMPT.iter().cycle().take(length).map(|id| id % size).collect()
}

/// Greedy; drawn; drawn from filtered and penalised logits.
fn samplings() -> [SampleParams; 3] {
    let drawn = SampleParams { temperature: 1.1, seed: 5, ..Default::default() };
    let penalised = SampleParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.3,
        frequency_penalty: 0.2,
        seed: 7,
        ..Default::default()
    };
    [SampleParams::default(), drawn, penalised]
}

fn reply(session: &mut Session<'_>, prompt: &[u32], options: &GenerationOptions) -> Generation {
    let logits = session.prefill(prompt, |_| Continue(())).unwrap().unwrap();
    session.generate(logits, options, |_| Continue(())).unwrap()
}

/// The states of each place, as bits.
type States = Arc<Mutex<BTreeMap<usize, Vec<u32>>>>;

/// A script that keeps the states that it sees.
#[derive(Debug)]
struct Watching {
    script: Script,
    host: Device,
    states: States,
}

impl Drafter for Watching {
    fn draft(&mut self, text: &[u32], most: usize) -> Result<Vec<u32>, ModelError> {
        self.script.draft(text, most)
    }

    fn wants_states(&self) -> bool {
        true
    }

    fn see(&mut self, position: usize, tokens: &[u32], states: &Tensor) -> Result<(), ModelError> {
        assert_eq!(states.dim(0), tokens.len());
        let states = states.to_device(&self.host)?;
        let rows = states.as_slice::<f32>()?.chunks(states.dim(1));
        let rows = rows.map(|row| row.iter().map(|value| value.to_bits()).collect());
        self.states.lock().unwrap().extend((position..).zip(rows));
        Ok(())
    }
}

/// A reply whose guesses are those of `script`, a second one after it, and all states.
fn watched(
    model: &Model,
    script: Script,
    (prompt, options): (&[u32], &GenerationOptions),
) -> ([Vec<u32>; 2], BTreeMap<usize, Vec<u32>>) {
    let states = States::default();
    let watching = Watching { script, host: model.host().clone(), states: states.clone() };
    let mut session = Session::new(model);
    session.speculate(Some(Speculation::new(watching).with_most(7).with_fixed_pace()));
    let replies = [prompt, &prompt[..5]].map(|prompt| reply(&mut session, prompt, options).tokens);
    let states = std::mem::take(&mut *states.lock().unwrap());
    (replies, states)
}

/// The text of two replies without speculation, prompts included.
fn plain(model: &Model, prompt: &[u32], options: &GenerationOptions) -> (Vec<u32>, [Vec<u32>; 2]) {
    let mut session = Session::new(model);
    let replies = [prompt, &prompt[..5]].map(|prompt| reply(&mut session, prompt, options).tokens);
    (session.tokens().to_vec(), replies)
}

#[test]
fn every_guess_leaves_the_bits_of_steps_on_a_cpu() {
    for name in QUANTISED.into_iter().chain(["demo-4bit"]) {
        let model = load(name, &cpu());
        let prompt = prompt(&model, 40);
        for sampling in samplings() {
            let options = options(sampling, 14);
            let (text, want) = plain(&model, &prompt, &options);
            let (tokens, bits) = watched(&model, Script::new(vec![], 0.0), (&prompt, &options));
            assert_eq!(tokens, want, "{name} without guesses");
            for share in [1.0, 0.5] {
                let (tokens, got) = watched(&model, Script::new(text.clone(), share), (&prompt, &options));
                assert_eq!(tokens, want, "{name} with {share} of the guesses right");
                assert_same(&got, &bits, &format!("{name} with {share}"));
            }
        }
    }
}

/// Products of floats add up in another order for several rows.
#[test]
fn every_guess_leaves_the_text_of_steps() {
    for name in FLOAT {
        let model = load_for(name, Target::new(&cpu(), Some(FloatType::F32)).unwrap().with_exact(true));
        let prompt = prompt(&model, 40);
        for sampling in samplings() {
            let options = options(sampling, 14);
            let (text, want) = plain(&model, &prompt, &options);
            let (_, steps) = watched(&model, Script::new(vec![], 0.0), (&prompt, &options));
            let (tokens, got) = watched(&model, Script::new(text, 0.7), (&prompt, &options));
            assert_eq!(tokens, want, "{name}");
            assert_near(&steps, &got, name);
        }
    }
}

/// That all states have the same bits.
fn assert_same(got: &BTreeMap<usize, Vec<u32>>, want: &BTreeMap<usize, Vec<u32>>, what: &str) {
    let place = want.iter().zip(got).find(|(a, b)| a != b).map(|((place, _), _)| place);
    assert!(place.is_none() && got.len() == want.len(), "{what}: {place:?}");
}

/// That all states are the same but for rounding.
fn assert_near(a: &BTreeMap<usize, Vec<u32>>, b: &BTreeMap<usize, Vec<u32>>, name: &str) {
    assert_eq!(a.len(), b.len());
    for ((place, a), b) in a.iter().zip(b.values()) {
        let [a, b] = [a, b].map(|row| row.iter().map(|&bits| f32::from_bits(bits)));
        let (worst, largest) = a
            .zip(b)
            .fold((0f32, 0f32), |(worst, largest), (a, b)| (worst.max((a - b).abs()), largest.max(a.abs())));
        assert!(worst <= 1e-3 * largest, "{name}, place {place}: {worst} of {largest}");
    }
}

/// On a GPU all passes have as many rows, so that guesses change no bit; those of steps of one row
/// may be others.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
#[test]
fn every_guess_leaves_the_bits_of_any_other_on_a_gpu() {
    let device = crate::support::gpu();
    let names: &[&str] = match crate::support::is_software(&device) {
        true => &["qwen3_5_moe-mlx-4bit", "granite_hybrid"],
        false => &["qwen3_5-mlx-8bit", "qwen3_5_moe-mlx-4bit", "granite_hybrid", "deepseek_v3", "demo-4bit"],
    };
    for name in names {
        let model = load(name, &device);
        // The cache of 256 tokens grows on the way.
        let prompt = prompt(&model, 228);
        let samplings = samplings();
        for sampling in if crate::support::is_software(&device) { &samplings[2..] } else { &samplings[..] } {
            let options = options(*sampling, 14);
            let (text, _) = plain(&model, &prompt, &options);
            let (want, bits) = watched(&model, Script::new(vec![], 0.0), (&prompt, &options));
            // The text that is verified is this one.
            let text = [&prompt[..], &want[0], &text[prompt.len() + want[0].len()..]].concat();
            for share in [1.0, 0.5] {
                let (tokens, got) = watched(&model, Script::new(text.clone(), share), (&prompt, &options));
                assert_eq!(tokens, want, "{name} with {share} of the guesses right");
                assert_same(&got, &bits, &format!("{name} with {share}"));
            }
        }
    }
}

#[test]
fn guesses_that_are_right_save_passes() {
    let model = load("qwen3_5-mlx-8bit", &cpu());
    let (prompt, options) = (prompt(&model, 40), options(SampleParams::default(), 25));
    let (text, want) = plain(&model, &prompt, &options);
    let speculate = |share| {
        let mut session = Session::new(&model);
        let script = Script::new(text.clone(), share);
        session.speculate(Some(Speculation::new(script).with_most(3).with_fixed_pace()));
        let Generation { tokens, speculated, .. } = reply(&mut session, &prompt, &options);
        assert_eq!(tokens, want[0]);
        (speculated.passes, speculated.drafted, speculated.accepted)
    };
    // The first token is the prompt's; each pass adds what was guessed and one more.
    assert_eq!(speculate(1.0), (6, 18, 18));
    let (passes, drafted, accepted) = speculate(0.0);
    assert_eq!((passes, accepted), (24, 0));
    assert!(drafted >= 24 * 2);
}

#[test]
fn texts_end_where_they_end_without_guesses() {
    let model = load("qwen3_5_moe-mlx-4bit", &cpu());
    let (prompt, options) = (prompt(&model, 40), options(samplings()[1], 12));
    let (text, want) = plain(&model, &prompt, &options);
    let whole = &want[0];
    let speculating = || {
        let mut session = Session::new(&model);
        session.speculate(Some(Speculation::new(Script::new(text.clone(), 1.0)).with_fixed_pace()));
        session
    };
    // Ids that end the text, in every place of a pass.
    for end in 0..whole.len() {
        let id = whole[end];
        let first = whole.iter().position(|&other| other == id).unwrap();
        let options = options.clone().with_stop_ids(vec![id]);
        let mut session = speculating();
        let Generation { tokens, finish, .. } = reply(&mut session, &prompt, &options);
        assert_eq!((&tokens[..], finish), (&whole[..first], Finish::Stop));
        assert_eq!(session.tokens().last(), Some(&id), "it is part of the text");
        // The text goes on as without guesses.
        let mut plain = Session::new(&model);
        reply(&mut plain, &prompt, &options);
        assert_eq!(
            reply(&mut session, &[3, 4], &options).tokens,
            reply(&mut plain, &[3, 4], &options).tokens
        );
    }
    // The caller's word, and limits.
    let mut session = speculating();
    let logits = session.prefill(&prompt, |_| Continue(())).unwrap().unwrap();
    let mut left = 5;
    let stop = |_| {
        left -= 1;
        if left == 0 { Break(()) } else { Continue(()) }
    };
    let Generation { tokens, finish, .. } = session.generate(logits, &options, stop).unwrap();
    assert_eq!((&tokens[..], finish), (&whole[..5], Finish::Interrupted));
    assert_eq!(session.tokens(), [&prompt[..], &whole[..5]].concat());
    for most in 0..6 {
        let options = options.clone().with_max_tokens(most);
        let Generation { tokens, finish, .. } = reply(&mut speculating(), &prompt, &options);
        assert_eq!((&tokens[..], finish), (&whole[..most], Finish::Length));
    }
}

#[test]
fn a_full_context_ends_the_text() {
    let model = load("qwen3-mlx-4bit", &cpu());
    let limit = model.config().max_position_embeddings;
    let (prompt, options) = (prompt(&model, limit - 5), options(SampleParams::default(), 100));
    let mut session = Session::new(&model);
    let want = reply(&mut session, &prompt, &options);
    assert_eq!((want.tokens.len(), want.finish), (6, Finish::Length));
    let script = Script::new([session.tokens(), &[1; 20]].concat(), 1.0);
    let mut session = Session::new(&model);
    session.speculate(Some(Speculation::new(script).with_fixed_pace()));
    let got = reply(&mut session, &prompt, &options);
    assert_eq!((got.tokens, got.finish), (want.tokens, want.finish));
}

#[test]
fn rules_hold_row_by_row() {
    let model = load("qwen3_5_moe-mlx-4bit", &cpu());
    let prompt = prompt(&model, 40);
    for sampling in samplings() {
        let biased = options(sampling, 14).with_logit_bias(vec![(3, 4.0), (5, -4.0)]);
        let formed = biased
            .clone()
            .with_grammar(Arc::new(Thirds { vocab_size: model.config().vocab_size, length: 10 }));
        for (options, has_form) in [(biased, false), (formed, true)] {
            let (text, want) = plain(&model, &prompt, &options);
            assert!(!has_form || Thirds::fit(&want[0]), "{want:?}");
            for share in [1.0, 0.6] {
                let (tokens, _) = watched(&model, Script::new(text.clone(), share), (&prompt, &options));
                assert_eq!(tokens, want, "{share} of the guesses right");
            }
        }
    }
}

#[test]
fn drafters_guess_and_change_nothing() {
    let model = load("qwen3_5_moe-mlx-4bit", &cpu());
    let (small, attention) = (load("qwen3_5_moe-mlx-4bit", &cpu()), load("qwen3_moe-mlx-4bit", &cpu()));
    let repeated: Vec<u32> = prompt(&model, 12).repeat(4);
    for sampling in samplings() {
        let options = options(sampling, 20);
        let (_, want) = plain(&model, &repeated, &options);
        let draft = |draft| DraftModel::new(draft, &model).unwrap();
        let all = [
            Speculation::new(Ngrams::new(1, 4)),
            Speculation::new(draft(&small)).with_most(4),
            Speculation::new(draft(&attention)).with_most(4),
        ];
        for (index, speculation) in all.into_iter().enumerate() {
            let mut session = Session::new(&model);
            session.speculate(Some(speculation));
            let mut accepted = 0;
            for (prompt, want) in [&repeated[..], &repeated[..5]].iter().zip(&want) {
                let Generation { tokens, speculated, .. } = reply(&mut session, prompt, &options);
                assert_eq!(tokens, *want, "drafter {index}");
                assert!(speculated.accepted <= speculated.drafted);
                assert!(index != 1 || speculated.drafted > 0);
                accepted += speculated.accepted;
            }
            // The very model, where it is as greedy as its drafts.
            let is_same = index == 1 && sampling.temperature == 0.0;
            assert!(!is_same || accepted >= 30, "{accepted} of drafter {index}");
        }
    }
}

/// Checkpoints with a layer that predicts further tokens: below `mtp.`, and behind the others.
const PREDICTING: [&str; 3] = ["qwen3_5", "glm4_moe", "deepseek_v3"];

fn predictor(name: &str, model: &Model) -> Predictor {
    Predictor::load(&checkpoint(name), model).unwrap()
}

#[test]
fn a_models_own_guesses_change_nothing() {
    for name in PREDICTING {
        let model = load_for(name, Target::new(&cpu(), Some(FloatType::F32)).unwrap().with_exact(true));
        let predictor = predictor(name, &model);
        let prompt = prompt(&model, 40);
        for sampling in samplings() {
            let options = options(sampling, 20);
            let (_, want) = plain(&model, &prompt, &options);
            let mut session = Session::new(&model);
            session.speculate(Some(Speculation::new(Mtp::new(&model, &predictor)).with_fixed_pace()));
            for (prompt, want) in [&prompt[..], &prompt[..5]].iter().zip(&want) {
                let Generation { tokens, speculated, .. } = reply(&mut session, prompt, &options);
                assert_eq!(tokens, *want, "{name}");
                assert!(speculated.drafted > 0, "{name}");
            }
        }
    }
}

/// A peer's guesses after texts of each length.
type Guesses = Vec<(usize, Vec<u32>)>;

/// The peer's text, its states, and its guesses after the first tokens of the text, four for each
/// length.
fn peer(name: &str, model: &Model) -> (Vec<u32>, Tensor, Guesses) {
    let vectors = Vectors::open(&format!("mtp/{name}"));
    let [ids, guesses] = ["ids", "guesses"].map(|key| vectors.get(key).u32s());
    let states = vectors.get("states").f32s();
    let states = Tensor::new(&states, &[ids.len(), states.len() / ids.len()], model.device()).unwrap();
    let first = ids.len() - guesses.len() / 4;
    let guesses = (first..).zip(guesses.chunks(4).map(<[u32]>::to_vec)).collect();
    (ids, states, guesses)
}

/// The guesses of the peer's own layers, after texts of each length.
#[test]
fn a_predictor_guesses_what_the_peer_does() {
    for name in PREDICTING {
        let model = load_for(name, Target::new(&cpu(), Some(FloatType::F32)).unwrap().with_exact(true));
        let predictor = predictor(name, &model);
        let (ids, states, guesses) = peer(name, &model);
        for (length, want) in guesses {
            let mut drafter = Mtp::new(&model, &predictor);
            let seen = states.rows(0, length - 1).unwrap();
            drafter.see(0, &ids[..length - 1], &seen).unwrap();
            assert_eq!(drafter.draft(&ids[..length], 4).unwrap(), want, "{name} after {length}");
        }
    }
}

/// On a GPU guesses after the first are replays.
#[cfg(any(feature = "cuda", feature = "vulkan", feature = "metal"))]
#[test]
fn a_predictor_guesses_what_the_peer_does_on_a_gpu() {
    let name = "qwen3_5";
    let model = load(name, &crate::support::gpu());
    let predictor = predictor(name, &model);
    let (ids, states, guesses) = peer(name, &model);
    let (mut drafter, mut seen) = (Mtp::new(&model, &predictor), 0);
    for (length, want) in guesses.into_iter().step_by(4).take(3) {
        let rows = states.rows(seen, length - 1).unwrap();
        drafter.see(seen, &ids[seen..length - 1], &rows).unwrap();
        seen = length - 1;
        assert_eq!(drafter.draft(&ids[..length], 4).unwrap(), want, "after {length}");
    }
}

/// Its guesses do not depend on how it came to the text: from its start, behind each pass, or back
/// from elsewhere.
#[test]
fn a_predictor_guesses_alike_however_it_has_read() {
    for name in PREDICTING {
        let model = load_for(name, Target::new(&cpu(), Some(FloatType::F32)).unwrap().with_exact(true));
        let predictor = predictor(name, &model);
        let text = prompt(&model, 40);
        let states = watched_states(&model, &text);
        let read = |drafter: &mut Mtp, parts: &[[usize; 2]]| {
            for &[start, end] in parts {
                drafter.see(start, &text[start..end], &states.rows(start, end).unwrap()).unwrap();
            }
        };
        let guess = |drafter: &mut Mtp| drafter.draft(&text[..31], 4).unwrap();
        let mut whole = Mtp::new(&model, &predictor);
        read(&mut whole, &[[0, 30]]);
        let want = guess(&mut whole);
        assert_eq!(want.len(), 4);
        assert_eq!(guess(&mut whole), want, "{name} again");
        let mut parts = Mtp::new(&model, &predictor);
        read(&mut parts, &[[0, 1], [1, 3], [3, 4], [4, 22], [22, 30]]);
        assert_eq!(guess(&mut parts), want, "{name} in parts");
        let mut back = Mtp::new(&model, &predictor);
        read(&mut back, &[[0, 24]]);
        back.draft(&text[..25], 3).unwrap();
        read(&mut back, &[[24, 40], [24, 30]]);
        // Its keys of place 23 were made of the token that followed.
        assert_eq!(guess(&mut back), want, "{name} back from elsewhere");
        let mut late = Mtp::new(&model, &predictor);
        read(&mut late, &[[20, 30]]);
        assert_eq!(guess(&mut late).len(), 4, "{name} without the start");
        assert!(late.draft(&text[..36], 4).unwrap().is_empty(), "{name}: the last state is unknown");
    }
}

/// The states of a text that is read in one pass.
fn watched_states(model: &Model, text: &[u32]) -> Tensor {
    let states = States::default();
    let (script, host) = (Script::new(vec![], 0.0), model.host().clone());
    let mut session = Session::new(model);
    session.speculate(Some(Speculation::new(Watching { script, host, states: states.clone() })));
    session.prefill(text, |_| Continue(())).unwrap();
    let states = states.lock().unwrap();
    let values: Vec<f32> = states.values().flatten().map(|&bits| f32::from_bits(bits)).collect();
    Tensor::new(&values, &[text.len(), values.len() / text.len()], model.device()).unwrap()
}

#[test]
fn a_checkpoint_without_a_predictor_is_refused() {
    let model = load("qwen3-mlx-4bit", &cpu());
    let error = Predictor::load(&checkpoint("qwen3-mlx-4bit"), &model).unwrap_err().to_string();
    let want = "qwen3-mlx-4bit: there is no layer that predicts further tokens (mtp.fc, or eh_proj behind the \
                other layers)";
    assert!(error.ends_with(want), "{error}");
}

#[test]
fn a_failed_draw_fails_as_without_guesses() {
    let model = load("qwen3-mlx-4bit", &cpu());
    let prompt = prompt(&model, 40);
    let options = options(SampleParams { top_p: 2.0, ..Default::default() }, 4);
    let mut session = Session::new(&model);
    session.speculate(Some(Speculation::new(Ngrams::default())));
    let logits = session.prefill(&prompt, |_| Continue(())).unwrap().unwrap();
    let error = session.generate(logits, &options, |_| Continue(())).unwrap_err();
    assert!(error.to_string().contains("top_p"), "{error}");
}
