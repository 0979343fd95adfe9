//! Learning on tiny checkpoints with random weights: what it takes to show that all parts work
//! together, not how much it wins back.

use crate::support::{checkpoint, data, files, to_3_bits};
use lowbit_kernels::Device;
use lowbit_quantize::{Found, Learn, LearnOptions, LearnReport, Learning, Progress, QuantizeError, Saving};
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};

fn options(learn: Learn) -> LearnOptions {
    let mut options = LearnOptions::new(learn);
    (options.steps, options.batch, options.validate_every) = (96, 4, 12);
    options
}

fn learn(
    name: &str,
    output: &Path,
    threads: usize,
    options: &LearnOptions,
) -> Result<LearnReport, QuantizeError> {
    let (data, device) = (data(2000, 32), Device::cpu(Some(threads)).unwrap());
    let learning = Learning { data: &data, options, device: &device, saving: None };
    to_3_bits()
        .with_learning(learning)
        .run(&checkpoint(name), output, |_| Continue(()))
        .map(|made| made.learned.unwrap())
}

#[test]
fn every_architecture_learns_scales_and_codes() {
    for name in ["qwen3", "qwen3_next", "qwen3_5_moe"] {
        let folder = tempfile::tempdir().unwrap();
        let rounded = folder.path().join("rounded");
        to_3_bits().run(&checkpoint(name), &rounded, |_| Continue(())).unwrap();
        let mut last = f64::INFINITY;
        for what in [Learn::Scales, Learn::Codes] {
            let output = folder.path().join(format!("{what:?}"));
            let report = learn(name, &output, 2, &options(what)).unwrap();
            println!("{name} {what:?}: {report:?}");
            assert!(report.after < 0.9 * report.before, "{name} {what:?}: {report:?}");
            assert!(report.best_step > 0 && report.weights > 5 && report.went_back == 0);
            assert!(report.after < last, "codes learn more than scales");
            last = report.after;
            // The same files of the same sizes, of which only the weights differ.
            let (rounded, learned) = (files(&rounded), files(&output));
            let sizes = |files: &[(PathBuf, Vec<u8>)]| -> Vec<(PathBuf, usize)> {
                files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect()
            };
            assert_eq!(sizes(&rounded), sizes(&learned));
            for ((name, rounded), (_, learned)) in rounded.iter().zip(&learned) {
                let is_weights = name.extension().is_some_and(|end| end == "safetensors");
                assert_eq!(rounded != learned, is_weights, "{}", name.display());
            }
        }
    }
}

/// The teacher is what the quantised source stands for, and so are the values that codes begin
/// with.
#[test]
fn quantised_checkpoints_teach() {
    for (name, what) in [("qwen3_5-mlx-8bit", Learn::Scales), ("qwen3_next-mlx-4bit", Learn::Codes)] {
        let folder = tempfile::tempdir().unwrap();
        let report = learn(name, &folder.path().join("new"), 2, &options(what)).unwrap();
        println!("{name} {what:?}: {report:?}");
        assert!(report.after < 0.9 * report.before && report.went_back == 0, "{name} {what:?}: {report:?}");
    }
}

#[test]
fn the_same_bytes_for_every_number_of_threads_and_other_ones_for_another_seed() {
    let folder = tempfile::tempdir().unwrap();
    let mut some = options(Learn::Codes);
    some.steps = 4;
    let mut of = |name: &str, threads, seed| {
        some.seed = seed;
        let output = folder.path().join(name);
        learn("qwen3_5_moe", &output, threads, &some).unwrap();
        files(&output)
    };
    let one = of("one", 1, 0);
    assert!(one == of("three", 3, 0));
    assert!(one != of("seed", 1, 1));
}

#[test]
fn a_rate_that_diverges_goes_back_and_never_ends_worse_than_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(Learn::Scales);
    options.rate = Some(3.0);
    let output = folder.path().join("output");
    let report = learn("qwen3", &output, 2, &options).unwrap();
    assert!(report.went_back > 0 && report.after <= report.before, "{report:?}");
    if report.best_step == 0 {
        let rounded = folder.path().join("rounded");
        to_3_bits().run(&checkpoint("qwen3"), &rounded, |_| Continue(())).unwrap();
        assert!(files(&rounded) == files(&output));
    }
}

#[test]
fn an_interruption_and_bad_options_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    let (data, device) = (data(2000, 32), Device::cpu(Some(2)).unwrap());
    let run = |options: &LearnOptions, steps: u32| {
        let learning = Learning { data: &data, options, device: &device, saving: None };
        let progress = |progress: Progress<'_>| match progress {
            Progress::Learning(done) if done.step == steps => Break(()),
            _ => Continue(()),
        };
        let error = to_3_bits().with_learning(learning).run(&checkpoint("qwen3"), &output, progress);
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        error.unwrap_err().to_string()
    };
    assert_eq!(run(&options(Learn::Scales), 3), "interrupted");
    let with = |change: &dyn Fn(&mut LearnOptions)| {
        let mut options = options(Learn::Scales);
        change(&mut options);
        run(&options, 0)
    };
    assert_eq!(with(&|options| options.steps = 0), "learning: steps is 0, but 1 or more is wanted");
    assert_eq!(with(&|options| options.batch = 0), "learning: batch is 0, but 1 or more is wanted");
    let rate = with(&|options| options.rate = Some(f32::NAN));
    assert_eq!(rate, "learning: rate is NaN, but a finite number above 0 is wanted");
    let temperature = with(&|options| options.temperature = 0.0);
    assert_eq!(temperature, "learning: temperature is 0, but a finite number above 0 is wanted");
}

/// Learns until `each`, which sees the number of every step, says to stop.
fn learn_saving(
    output: &Path,
    saving: Saving<'_>,
    options: &LearnOptions,
    mut each: impl FnMut(u32) -> bool,
) -> Result<LearnReport, QuantizeError> {
    let (data, device) = (data(2000, 32), Device::cpu(Some(2)).unwrap());
    let learning = Learning { data: &data, options, device: &device, saving: Some(saving) };
    let progress = |progress: Progress<'_>| match progress {
        Progress::Learning(done) if each(done.step) => Break(()),
        _ => Continue(()),
    };
    to_3_bits()
        .with_learning(learning)
        .run(&checkpoint("qwen3_next"), output, progress)
        .map(|made| made.learned.unwrap())
}

#[test]
fn a_run_that_is_resumed_gives_what_an_uninterrupted_one_gives() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, state) = (folder.path().join("whole"), folder.path().join("state"));
    // Validated after steps 4, 8 and 12 of 14: enough to go through the windows more than once.
    let mut options = options(Learn::Codes);
    (options.steps, options.batch, options.validate_every) = (14, 20, 4);
    let device = Device::cpu(Some(2)).unwrap();
    let text = data(2000, 32);
    let learning = Learning { data: &text, options: &options, device: &device, saving: None };
    let want =
        to_3_bits().with_learning(learning).run(&checkpoint("qwen3_next"), &whole, |_| Continue(())).unwrap();
    let want = want.learned.unwrap();
    let resume = Saving { path: &state, found: Found::Resume };

    // Stopped, in the middle of an interval and at the end of one.
    let stopped = folder.path().join("stopped");
    for last in [3, 8] {
        let error = learn_saving(&stopped, resume, &options, |step| step == last).unwrap_err();
        assert!(matches!(error, QuantizeError::Interrupted), "{error}");
        assert!(state.exists() && !stopped.exists());
    }
    let mut seen = vec![];
    let report = learn_saving(&stopped, resume, &options, |step| {
        seen.push(step);
        false
    });
    assert_eq!(seen, (9..=14).collect::<Vec<_>>());
    assert_eq!(format!("{:?}", report.unwrap()), format!("{want:?}"));
    assert!(files(&stopped) == files(&whole) && !state.exists());

    // Killed after step 7: what is on the disk is of step 4.
    let (killed, kept) = (folder.path().join("killed"), folder.path().join("kept"));
    let error = learn_saving(&killed, resume, &options, |step| {
        if step == 7 {
            std::fs::copy(&state, &kept).unwrap();
        }
        step == 7
    });
    assert!(error.is_err());
    std::fs::rename(&kept, &state).unwrap();
    let mut first = None;
    let report = learn_saving(&killed, resume, &options, |step| {
        first.get_or_insert(step);
        false
    });
    assert_eq!((first, format!("{:?}", report.unwrap())), (Some(5), format!("{want:?}")));
    assert!(files(&killed) == files(&whole));
}

#[test]
fn states_that_cannot_be_gone_on_from() {
    let folder = tempfile::tempdir().unwrap();
    let (output, state) = (folder.path().join("output"), folder.path().join("state"));
    let mut options = options(Learn::Scales);
    (options.steps, options.batch, options.validate_every) = (3, 2, 1);
    let saving = |found| Saving { path: &state, found };
    let run = |found, options: &LearnOptions| {
        learn_saving(&output, saving(found), options, |_| false).unwrap_err().to_string()
    };
    learn_saving(&output, saving(Found::Refuse), &options, |_| true).unwrap_err();
    let whole = std::fs::read(&state).unwrap();
    let refused = |error: String, problem: &str| {
        assert_eq!(error, format!("learning: {} {problem}", state.display()));
        assert!(!output.exists());
    };
    let there = "is the state of a run that was interrupted: resume that one, or replace it";
    refused(run(Found::Refuse, &options), there);
    let mut other = options.clone();
    other.seed = 5;
    refused(run(Found::Resume, &other), "is of another run: seed was 0, and is 5");
    for (at, byte) in [(16, 1), (30, 1), (whole.len() / 2, 1), (whole.len() - 1, 1)] {
        let mut bytes = whole.clone();
        bytes[at] ^= byte;
        std::fs::write(&state, bytes).unwrap();
        refused(run(Found::Resume, &options), "is damaged");
    }
    for length in [0, 16, 31, 32, whole.len() - 1] {
        std::fs::write(&state, &whole[..length]).unwrap();
        refused(run(Found::Resume, &options), "is damaged");
    }
    // A file that is not a state stays, whatever is asked for.
    for found in [Found::Refuse, Found::Resume, Found::Replace] {
        std::fs::write(&state, "a letter").unwrap();
        let want = format!("{}: is not the state of learning, and is not replaced", state.display());
        assert_eq!(run(found, &options), want);
        assert_eq!(std::fs::read(&state).unwrap(), b"a letter");
        std::fs::remove_file(&state).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&state).status().unwrap().success());
        assert_eq!(
            run(found, &options),
            format!("{}: is a FIFO; an output is a regular file", state.display())
        );
        std::fs::remove_file(&state).unwrap();
    }
    // A state whose digest is right, of something else.
    for content in ["", "lowbit learning 3\n", "lowbit learning 3\n{}\n", "lowbit learning 3\nnull\n"] {
        let digest = <sha2::Sha256 as sha2::Digest>::digest(content);
        std::fs::write(&state, [content.as_bytes(), &digest].concat()).unwrap();
        assert!(run(Found::Resume, &options).contains(&state.display().to_string()), "{content}");
    }
    std::fs::write(&state, &whole).unwrap();
    learn_saving(&output, saving(Found::Replace), &options, |_| false).unwrap();
    assert!(output.exists() && !state.exists());
}

/// Whoever writes a state can give it a right digest, so its numbers are compared with the data and
/// the options.
#[test]
fn counts_of_a_state_are_those_of_the_data() {
    let folder = tempfile::tempdir().unwrap();
    let (output, state) = (folder.path().join("output"), folder.path().join("state"));
    let mut options = options(Learn::Scales);
    (options.steps, options.batch, options.validate_every) = (3, 2, 1);
    let saving = |found| Saving { path: &state, found };
    learn_saving(&output, saving(Found::Refuse), &options, |_| true).unwrap_err();
    let whole = std::fs::read(&state).unwrap();
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut lines = whole.splitn(3, |&byte| byte == b'\n');
        let (magic, header, rest) = (lines.next().unwrap(), lines.next().unwrap(), lines.next().unwrap());
        let mut header = serde_json::from_slice(header).unwrap();
        change(&mut header);
        let header = format!("\n{header}\n");
        let content = [magic, header.as_bytes(), &rest[..rest.len() - 32]].concat();
        let digest = <sha2::Sha256 as sha2::Digest>::digest(&content);
        std::fs::write(&state, [&content[..], &digest].concat()).unwrap();
        learn_saving(&output, saving(Found::Resume), &options, |_| true).unwrap_err().to_string()
    };
    // Unchanged, it is gone on from.
    assert_eq!(changed(&|_| {}), "interrupted");
    let windows = data(2000, 32).train().len();
    let refused = |key: &str, value: serde_json::Value, want: &str| {
        let path = format!("/position/{key}");
        let message = changed(&|header| *header.pointer_mut(&path).unwrap() = value.clone());
        assert_eq!(message, format!("learning: {} is damaged: {want}", state.display()), "{key}");
    };
    let of = format!("but the data has {windows} to learn from");
    for count in [0, windows - 1, windows + 1, 1 << 60] {
        refused("order/count", count.into(), &format!("it has an order of {count} windows, {of}"));
    }
    let far = format!("window {windows} is to come, but there are {windows}");
    refused("order/rest", serde_json::json!([0, windows]), &far);
    refused("order/rest", serde_json::json!([1, 2, 1]), "window 1 is to come twice before the others");
    refused("step", 4.into(), "it is at step 4 of 3, was best at step 1, and went back 0 times");
    refused("best_step", 2.into(), "it is at step 1 of 3, was best at step 2, and went back 0 times");
    refused("went_back", 9.into(), "it is at step 1 of 3, was best at step 1, and went back 9 times");
    let factor = |factor: f32| serde_json::json!(factor.to_bits());
    for (value, shown) in [(f32::NAN, "NaN"), (0.0, "0"), (2.0, "2")] {
        let want = format!("its rates are multiplied by {shown}, but a factor above 0 and up to 1 is wanted");
        refused("factor", factor(value), &want);
    }
}
