//! Learning on tiny checkpoints with random weights: what it takes to show that all parts work together, not how much it wins back.

use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_quantize::{
    Data, Learn, LearnOptions, LearnReport, Learning, Progress, QuantizeError, QuantizeOptions, quantize,
    quantize_and_learn,
};
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};

fn checkpoint(name: &str) -> Checkpoint {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
    Checkpoint::open(&models.join(name)).unwrap()
}

fn data(length: usize) -> Data {
    Data::new(&[(0..2000u32).map(|i| (i * i + 7 * i) % 199).collect()], length).unwrap()
}

fn options(learn: Learn) -> LearnOptions {
    let mut options = LearnOptions::new(learn);
    (options.steps, options.batch, options.validate_every) = (60, 4, 12);
    options
}

fn to_3_bits() -> QuantizeOptions {
    QuantizeOptions::for_mode("affine").with_bits(3).with_group_size(32)
}

fn learn(
    name: &str,
    output: &Path,
    threads: usize,
    options: &LearnOptions,
) -> Result<LearnReport, QuantizeError> {
    let (data, device) = (data(32), Device::cpu(Some(threads)).unwrap());
    let learning = Learning { data: &data, options, device: &device };
    quantize_and_learn(&checkpoint(name), output, &to_3_bits(), learning, |_| Continue(()))
        .map(|(_, report)| report)
}

fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.map(|path| (path.file_name().unwrap().into(), std::fs::read(path).unwrap())).collect();
    files.sort();
    files
}

#[test]
fn every_architecture_learns_scales_and_codes() {
    for name in ["qwen3", "qwen3_next", "qwen3_5_moe"] {
        let folder = tempfile::tempdir().unwrap();
        let rounded = folder.path().join("rounded");
        quantize(&checkpoint(name), &rounded, &to_3_bits(), |_, _| Continue(())).unwrap();
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
        quantize(&checkpoint("qwen3"), &rounded, &to_3_bits(), |_, _| Continue(())).unwrap();
        assert!(files(&rounded) == files(&output));
    }
}

#[test]
fn an_interruption_and_bad_options_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("output");
    let (data, device) = (data(32), Device::cpu(Some(2)).unwrap());
    let run = |options: &LearnOptions, steps: u32| {
        let learning = Learning { data: &data, options, device: &device };
        let progress = |progress: Progress<'_>| match progress {
            Progress::Learning(done) if done.step == steps => Break(()),
            _ => Continue(()),
        };
        let error = quantize_and_learn(&checkpoint("qwen3"), &output, &to_3_bits(), learning, progress);
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
