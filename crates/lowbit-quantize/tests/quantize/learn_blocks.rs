//! Learning block by block, on tiny checkpoints with random weights.

use crate::support::{checkpoint, data, files, to_3_bits};
use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_models::Model;
use lowbit_quantize::{
    Found, Learn, LearnOptions, LearnReport, Learning, Mix, Progress, QuantizeError, Recipe, Saving,
};
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;

fn options(steps: u32) -> LearnOptions {
    let mut options = LearnOptions::new(Learn::Codes);
    options.by_block = true;
    (options.steps, options.batch, options.block_batch) = (steps, 4, 4);
    options.validate_every = steps.div_ceil(4);
    options
}

/// Step, block and tokens so far.
type Seen = (u32, Option<(usize, usize)>, u64);

/// Learns until `stop`, which sees every step, into GGUF where the output's name ends so.
fn learn(
    name: &str,
    output: &Path,
    options: &LearnOptions,
    saving: Option<Saving<'_>>,
    mut stop: impl FnMut(Seen) -> bool,
) -> Result<LearnReport, QuantizeError> {
    let (data, device) = (data(2000, 32), Device::cpu(Some(2)).unwrap());
    let learning = Learning { data: &data, options, device: &device, saving };
    let progress = |progress: Progress<'_>| match progress {
        Progress::Learning(done) if stop((done.step, done.block, done.tokens)) => Break(()),
        _ => Continue(()),
    };
    let result = match output.extension().is_some_and(|end| end == "gguf") {
        true => {
            let q4_0 = Recipe::new(Mix::from_name("Q4_0").unwrap());
            q4_0.with_learning(learning).run(&checkpoint(name), output, progress)
        }
        false => to_3_bits().with_learning(learning).run(&checkpoint(name), output, progress),
    };
    result.map(|made| made.learned.unwrap())
}

/// Attention and delta nets, dense layers and experts, in MLX's layout and in GGUF.
#[test]
fn every_block_of_every_architecture_learns() {
    let folder = tempfile::tempdir().unwrap();
    for (name, output) in [
        ("qwen3", "a"),
        ("qwen3_next", "b"),
        ("qwen3_5_moe", "c"),
        ("llama3", "d.gguf"),
        ("qwen3_next", "e.gguf"),
        ("qwen3_5_moe", "f.gguf"),
    ] {
        let (output, mut options) = (folder.path().join(output), options(24));
        // Few steps: longer ones than by default.
        options.block_rate = Some(if output.extension().is_some() { 1e-4 } else { 3e-4 });
        let mut seen = vec![];
        let report = learn(name, &output, &options, None, |step| {
            seen.push(step);
            false
        });
        let report = report.unwrap();
        println!("{name} {}: {report:?}", output.display());
        let model = Model::load(&Checkpoint::open(&output).unwrap(), &Device::cpu(Some(1)).unwrap()).unwrap();
        let blocks = model.config().num_hidden_layers;
        assert_eq!(report.blocks.len(), blocks);
        for block in &report.blocks {
            assert!(block.before > 0.0 && block.after < block.before, "{name}: {report:?}");
            assert!(block.best_step > 0 && block.went_back == 0, "{name}: {report:?}");
        }
        // Behind others a block's own error is a small part of what it carries on.
        assert!(report.blocks[0].after < 0.85 * report.blocks[0].before, "{name}: {report:?}");
        let learned = report.after_blocks.unwrap();
        assert!(learned < 0.95 * report.before && report.after < learned, "{name}: {report:?}");
        // Each block's steps, then those of the whole model.
        for (index, (step, block, tokens)) in seen.iter().enumerate() {
            let phase = index / 24;
            assert_eq!(*step as usize, index + 1);
            assert_eq!(*block, (phase < blocks).then_some((phase + 1, blocks)));
            assert!(*tokens > 0 && (index == 0 || *tokens > seen[index - 1].2));
        }
        assert_eq!(seen.len(), 24 * (blocks + 1));
    }
}

/// A name for what a run is interrupted in, the run's last step, and the step after the one that
/// was saved.
type Interruption = (&'static str, u32, u32);

#[test]
fn a_run_that_is_resumed_gives_what_an_uninterrupted_one_gives() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    // Four blocks; each phase is validated after steps 2, 4, 6 and 7.
    let (name, options) = ("qwen3_next", options(7));
    let saving = Some(Saving { path: &state, found: Found::Resume });
    for end in ["", ".gguf"] {
        let whole = folder.path().join(format!("whole{end}"));
        let want = learn(name, &whole, &options, None, |_| false).unwrap();
        let blocks = want.blocks.len() as u32;
        assert!(blocks > 1);
        let written = |path: &Path| {
            if end.is_empty() { files(path) } else { vec![("".into(), std::fs::read(path).unwrap())] }
        };
        let same = |output: &Path, report: &LearnReport, what: &str| {
            assert_eq!(format!("{report:?}"), format!("{want:?}"), "{what}");
            assert!(written(output) == written(&whole) && !state.exists(), "{what}");
        };

        // Stopped again and again: in the first block, at a block's last step, in the middle of
        // one, and while the whole model learns.
        let stopped = folder.path().join(format!("stopped{end}"));
        for last in [3, 7, 9, 7 * blocks, 7 * blocks + 3] {
            let error = learn(name, &stopped, &options, saving, |(step, ..)| step == last).unwrap_err();
            assert!(matches!(error, QuantizeError::Interrupted), "{error}");
            assert!(state.exists() && !stopped.exists());
        }
        let mut first = None;
        let report = learn(name, &stopped, &options, saving, |(step, ..)| {
            first.get_or_insert(step);
            false
        });
        assert_eq!(first, Some(7 * blocks + 4));
        same(&stopped, &report.unwrap(), "stopped");

        // Killed: what is on the disk is of the last block that was finished, or of the whole
        // model's last validation.
        let killed: [Interruption; 2] =
            [("in a block", 13, 8), ("in the whole model", 7 * blocks + 5, 7 * blocks + 5)];
        for (what, last, next) in killed {
            let (output, kept) = (folder.path().join(format!("{what}{end}")), folder.path().join("kept"));
            let stop = |(step, ..): Seen| {
                if step == last {
                    std::fs::copy(&state, &kept).unwrap();
                }
                step == last
            };
            assert!(learn(name, &output, &options, saving, stop).is_err());
            std::fs::rename(&kept, &state).unwrap();
            let mut first = None;
            let report = learn(name, &output, &options, saving, |(step, ..)| {
                first.get_or_insert(step);
                false
            });
            assert_eq!(first, Some(next), "{what}");
            same(&output, &report.unwrap(), what);
        }
    }
}

#[test]
fn the_same_bytes_for_every_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let (data, options) = (data(2000, 32), options(3));
    let of = |threads: usize| {
        let device = Device::cpu(Some(threads)).unwrap();
        let learning = Learning { data: &data, options: &options, device: &device, saving: None };
        let (source, output) = (checkpoint("qwen3_5_moe"), folder.path().join(threads.to_string()));
        to_3_bits().with_learning(learning).run(&source, &output, |_| Continue(())).unwrap();
        files(&output)
    };
    assert!(of(1) == of(3));
}

#[test]
fn nothing_ends_worse_than_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(8);
    (options.rate, options.block_rate) = (Some(3.0), Some(3.0));
    let output = folder.path().join("output");
    let report = learn("qwen3", &output, &options, None, |_| false).unwrap();
    println!("{report:?}");
    assert!(report.blocks.iter().all(|block| block.after <= block.before), "{report:?}");
    assert!(report.blocks.iter().any(|block| block.went_back > 0), "{report:?}");
    assert!(report.after <= report.before, "{report:?}");
    if report.after == report.before {
        let rounded = folder.path().join("rounded");
        to_3_bits().run(&checkpoint("qwen3"), &rounded, |_| Continue(())).unwrap();
        assert!(files(&rounded) == files(&output));
    }
}

#[test]
fn a_block_without_anything_to_learn_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let (data, device) = (data(2000, 32), Device::cpu(Some(2)).unwrap());
    let options = options(4);
    let learning = Learning { data: &data, options: &options, device: &device, saving: None };
    let some = to_3_bits().with_rules(vec!["layers.1.=none".parse().unwrap()]);
    let mut seen = vec![];
    let progress = |progress: Progress<'_>| {
        if let Progress::Learning(done) = progress {
            seen.extend(done.block);
        }
        Continue(())
    };
    let output = folder.path().join("output");
    let made = some.with_learning(learning).run(&checkpoint("qwen3"), &output, progress).unwrap();
    let report = made.learned.unwrap();
    seen.dedup();
    assert_eq!(seen, [(1, 3), (3, 3)]);
    let [first, second, third] = report.blocks[..] else { panic!("{report:?}") };
    assert!(first.after < first.before && third.after < third.before, "{report:?}");
    assert!(second.after == second.before && second.best_step == 0, "{report:?}");
}

#[test]
fn a_block_learns_from_as_many_windows_as_the_whole_model() {
    let mut options = LearnOptions::new(Learn::Codes);
    (options.block_rate, options.block_batch) = (Some(0.5), 3);
    let blocks = options.for_blocks();
    assert_eq!((blocks.steps, blocks.batch, blocks.validate_every), (1334, 3, 133));
    assert_eq!((blocks.rate, blocks.seed), (Some(0.5), options.seed));
    (options.steps, options.batch, options.block_batch, options.validate_every) = (1, 1, 5, 9);
    let blocks = options.for_blocks();
    assert_eq!((blocks.steps, blocks.validate_every), (1, 9));
}

#[test]
fn runs_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (output, state) = (folder.path().join("output"), folder.path().join("state"));
    let mut scales = options(4);
    scales.learn = Learn::Scales;
    let error = learn("qwen3", &output, &scales, None, |_| false).unwrap_err().to_string();
    assert_eq!(error, "learning: codes learn block by block, scales alone do not");
    let mut wrong = options(4);
    wrong.block_rate = Some(-1.0);
    let error = learn("qwen3", &output, &wrong, None, |_| false).unwrap_err().to_string();
    assert_eq!(error, "learning: block_rate is -1, but a finite number above 0 is wanted");
    wrong.block_batch = 0;
    let error = learn("qwen3", &output, &wrong, None, |_| false).unwrap_err().to_string();
    assert_eq!(error, "learning: block_batch is 0, but 1 or more is wanted");
    let saving = Some(Saving { path: &state, found: Found::Resume });
    learn("qwen3", &output, &options(4), saving, |(step, ..)| step == 6).unwrap_err();
    let mut whole = options(4);
    whole.by_block = false;
    let error = learn("qwen3", &output, &whole, saving, |_| false).unwrap_err().to_string();
    let want = "is of another run: by_block was true, and is false";
    assert_eq!(error, format!("learning: {} {want}", state.display()));
    assert!(!output.exists());
}
