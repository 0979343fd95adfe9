//! Learning from a teacher's targets on the disk.

use crate::support::{checkpoint, data, files, to_3_bits};
use lowbit_kernels::Device;
use lowbit_quantize::{
    Data, Found, Learn, LearnOptions, LearnReport, Learning, Progress, QuantizeError, Saving, Targets,
};
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// More than the tiny checkpoints' vocabularies.
const ALL: usize = 1 << 20;

/// The data of learning: 63 windows of 32 tokens, of which 3 are held out.
fn texts() -> Data {
    data(2000, 32)
}

/// Of 24 windows, which are fewer than all: the seed chooses them.
fn options(targets: Option<(&Path, usize)>) -> LearnOptions {
    let mut options = LearnOptions::new(Learn::Scales);
    (options.steps, options.batch, options.validate_every) = (6, 4, 2);
    options.targets = targets.map(|(path, top_k)| {
        let mut targets = Targets::new(path);
        targets.top_k = top_k;
        targets
    });
    options
}

/// The reports of a run.
#[derive(Debug, Default)]
struct Said {
    targets: Vec<(usize, usize)>,
    losses: Vec<f64>,
}

/// Learns until `stop` says so of the windows of targets, or of the steps, that are done.
fn learn(
    name: &str,
    output: &Path,
    (data, options): (&Data, &LearnOptions),
    saving: Option<Saving<'_>>,
    stop: impl Fn(&Said) -> bool,
) -> (Result<LearnReport, QuantizeError>, Said) {
    let device = Device::cpu(Some(2)).unwrap();
    let learning = Learning { data, options, device: &device, saving };
    let mut said = Said::default();
    let progress = |progress: Progress<'_>| {
        match progress {
            Progress::Targets(done, all) => said.targets.push((done, all)),
            Progress::Learning(done) => said.losses.push(done.loss),
            _ => {}
        }
        if stop(&said) { Break(()) } else { Continue(()) }
    };
    let result = to_3_bits().with_learning(learning).run(&checkpoint(name), output, progress);
    (result.map(|made| made.learned.unwrap()), said)
}

/// A file of targets in a folder of its own.
fn made(top_k: usize) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("targets");
    let output = folder.path().join("made");
    let (result, said) = learn("qwen3", &output, (&texts(), &options(Some((&path, top_k)))), None, |_| false);
    result.unwrap();
    assert_eq!(said.targets, [(0, 27), (16, 27), (27, 27)]);
    (folder, path)
}

#[test]
fn targets_of_the_whole_vocabulary_teach_as_the_teacher_and_fewer_nearly_so() {
    let (folder, text) = (tempfile::tempdir().unwrap(), texts());
    let run = |name: &str, targets: Option<(&Path, usize)>| {
        let (result, said) =
            learn("qwen3", &folder.path().join(name), (&text, &options(targets)), None, |_| false);
        (result.unwrap(), said)
    };
    let (want, asked) = run("asked", None);
    assert!(asked.targets.is_empty());
    for (top_k, file, most) in [(ALL, "all", 1e-3), (128, "128", 0.3)] {
        let path = folder.path().join(file);
        let (got, said) = run(&format!("{file}-made"), Some((&path, top_k)));
        assert_eq!(said.losses.len(), 6);
        for (got, want) in said.losses.iter().zip(&asked.losses) {
            println!("{file}: loss {got}, {want} of the teacher itself");
            assert!((got - want).abs() < most * want && (top_k == ALL || got < want), "{file}: {got} {want}");
        }
        for (got, want) in [(got.before, want.before), (got.after, want.after)] {
            println!("{file}: held out {got}, {want} of the teacher itself");
            assert!((got - want).abs() < most * want, "{file}: {got} {want}");
        }
        assert!(got.after < got.before && got.best_step == want.best_step);
        // The file is used again, and what is learned from it is the same.
        let (again, said) = run(&format!("{file}-again"), Some((&path, top_k)));
        assert!(said.targets.is_empty());
        assert_eq!(format!("{again:?}"), format!("{got:?}"));
        let of = |end: &str| files(&folder.path().join(format!("{file}-{end}")));
        assert!(of("made") == of("again"));
    }
}

#[test]
fn a_file_that_is_not_finished_is_gone_on_with() {
    let (folder, whole) = made(7);
    let (text, path) = (texts(), folder.path().join("other"));
    let partial = folder.path().join("other.lowbit-partial");
    let output = folder.path().join("output");
    let run = |stop: usize| {
        let stop = |said: &Said| said.targets.last().is_some_and(|(done, _)| *done == stop);
        let (result, said) = learn("qwen3", &output, (&text, &options(Some((&path, 7)))), None, stop);
        (result.map_err(|error| error.to_string()), said)
    };
    let (result, _) = run(0);
    assert_eq!(result.unwrap_err(), "interrupted");
    let header = std::fs::read(&partial).unwrap();
    assert!(header.ends_with(b"\n"), "the header alone");
    let (result, said) = run(16);
    assert_eq!((result.unwrap_err().as_str(), &said.targets[..]), ("interrupted", &[(0, 27), (16, 27)][..]));
    assert!(!path.exists() && !output.exists());
    let chunk = std::fs::read(&partial).unwrap();
    let want = std::fs::read(&whole).unwrap();
    assert!(want.starts_with(&chunk) && chunk.starts_with(&header) && chunk.len() < want.len());
    // Killed in the middle of the second chunk, between two, in the header, and before it.
    let lengths = [want.len() - 1, chunk.len() + 1, chunk.len(), chunk.len() - 1, header.len() - 1, 5, 0];
    for length in lengths {
        std::fs::write(&partial, &want[..length]).unwrap();
        let (result, said) = run(usize::MAX);
        result.unwrap();
        let done = if length < chunk.len() { 0 } else { 16 };
        assert_eq!(said.targets[0], (done, 27), "{length}");
        assert!(std::fs::read(&path).unwrap() == want && !partial.exists(), "{length}");
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_dir_all(&output).unwrap();
    }
    // Damaged targets are not silently made again.
    let mut damaged = want[..want.len() - 1].to_vec();
    damaged[chunk.len() - 40] ^= 1;
    std::fs::write(&partial, damaged).unwrap();
    let want = format!("learning: {} is damaged: the checksum of chunk 1 of 2 is wrong", partial.display());
    assert_eq!(run(usize::MAX).0.unwrap_err(), want);
}

#[test]
fn targets_of_something_else_are_refused() {
    let (folder, path) = made(7);
    let output = folder.path().join("output");
    let refused = |name: &str, data: &Data, change: &dyn Fn(&mut LearnOptions)| {
        let mut options = options(Some((&path, 7)));
        change(&mut options);
        let (result, _) = learn(name, &output, (data, &options), None, |_| false);
        let error = result.unwrap_err().to_string();
        assert!(!output.exists());
        let begin = format!("learning: {} has the targets of another run: ", path.display());
        error.strip_prefix(&begin).unwrap_or_else(|| panic!("{error}")).to_owned()
    };
    let text = texts();
    let same = |_: &mut LearnOptions| {};
    let of = |change: &dyn Fn(&mut LearnOptions)| refused("qwen3", &text, change);
    assert_eq!(of(&|options| options.temperature = 1.0), "temperature was \"2\", and is \"1\"");
    assert_eq!(of(&|options| options.seed = 3), "seed was 0, and is 3");
    assert_eq!(of(&|options| options.steps = 7), "windows was 27, and is 31");
    let top_k = of(&|options| options.targets.as_mut().unwrap().top_k = 8);
    assert_eq!(top_k, "top_k was 7, and is 8");
    assert_eq!(refused("qwen3", &data(1000, 16), &same), "longest_window was 32, and is 16");
    let other = Data::new(&[(0..2000).map(|i| (i * i + 5 * i) % 199).collect()], 32).unwrap();
    assert!(refused("qwen3", &other, &same).starts_with("data was \""));
    assert!(refused("qwen3-yarn", &text, &same).starts_with("teacher was \""));
    assert!(refused("qwen3_next", &text, &same).starts_with("teacher was \""));
    // The seed of the order alone does not matter: all windows are drawn.
    let all = folder.path().join("all");
    let mut options = options(Some((&all, 7)));
    options.batch = 10;
    for seed in [0, 1] {
        options.seed = seed;
        let output = folder.path().join(format!("seed-{seed}"));
        let (result, said) = learn("qwen3", &output, (&text, &options), None, |_| false);
        result.unwrap();
        assert_eq!(said.targets.is_empty(), seed == 1);
    }
}

#[test]
fn damaged_files_are_refused() {
    let (folder, path) = made(7);
    let (text, output) = (texts(), folder.path().join("output"));
    let options = options(Some((&path, 7)));
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let (result, _) = learn("qwen3", &output, (&text, &options), None, |_| false);
        assert!(!output.exists());
        let error = result.unwrap_err().to_string();
        let begin = format!("learning: {} ", path.display());
        error.strip_prefix(&begin).unwrap_or_else(|| panic!("{error}")).to_owned()
    };
    let header = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(1).unwrap().0 + 1;
    // 16 windows of 32 tokens: 7 ids and logarithms in two bytes each, and 4 bytes.
    let chunk = 16 * 32 * (7 * 4 + 4) + 32;
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        bytes
    };
    let of = |chunk| format!("is damaged: the checksum of chunk {chunk} of 2 is wrong");
    for (at, number) in [(header, 1), (header + chunk - 1, 1), (header + chunk, 2), (whole.len() - 1, 2)] {
        assert_eq!(refused(&flipped(at)), of(number));
    }
    for length in [whole.len() - 1, header + chunk, header] {
        let want = format!("is damaged: it has {length} bytes, and should have {}", whole.len());
        assert_eq!(refused(&whole[..length]), want);
    }
    assert!(refused(&[&whole[..], b"more"].concat()).starts_with("is damaged: it has "));
    let foreign = "is no file of a teacher's targets, or of another version of lowbit";
    for bytes in [&b"GGUF and so on"[..], b"lowbit targets 2\n{}\n", b"lowbit targets 1\n{}\n", &flipped(3)] {
        assert_eq!(refused(bytes), foreign);
    }
    for length in [header - 1, 20, 3, 0] {
        assert_eq!(refused(&whole[..length]), "is no file of a teacher's targets");
    }
    assert_eq!(refused(&[&whole[..17], &[b' '; 5000]].concat()), foreign);
}

/// A file whose checksums are right may still hold what no teacher says.
#[test]
fn targets_that_are_no_probabilities_are_refused() {
    let (folder, path) = made(7);
    let (text, output) = (texts(), folder.path().join("output"));
    let options = options(Some((&path, 7)));
    let whole = std::fs::read(&path).unwrap();
    let header = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(1).unwrap().0 + 1;
    let (window, end) = (32 * (7 * 4 + 4), header + 16 * 32 * (7 * 4 + 4));
    let refused = |at: usize, bytes: &[u8]| {
        let mut file = whole.clone();
        file[header + at..header + at + bytes.len()].copy_from_slice(bytes);
        let of = [&file[..header], &0u64.to_le_bytes(), &file[header..end]].concat();
        let digest = <sha2::Sha256 as sha2::Digest>::digest(&of);
        file[end..end + 32].copy_from_slice(&digest);
        std::fs::write(&path, file).unwrap();
        let (result, _) = learn("qwen3", &output, (&text, &options), None, |_| false);
        assert!(!output.exists());
        let error = result.unwrap_err().to_string();
        let begin = format!("learning: {} is damaged: window ", path.display());
        error.strip_prefix(&begin).unwrap_or_else(|| panic!("{error}")).split_once(": ").unwrap().1.to_owned()
    };
    // The third token of the first window in the file: its ids, its logarithms (NaN, infinity and 1
    // in f16), and the rest's.
    let (ids, ln_p, ln_rest) = (2 * 7 * 2, 32 * 7 * 2 + 2 * 7 * 2, 32 * 7 * 4 + 2 * 4);
    assert!(ln_rest + 4 <= window);
    assert!(refused(ids, &[0xff, 0xff]).starts_with("token id 65535 is in no vocabulary of "));
    assert_eq!(refused(ln_p, &[0x00, 0x7e]), "the probabilities of token 2 sum to NaN");
    assert_eq!(refused(ln_p, &[0x00, 0x7c]), "the probabilities of token 2 sum to inf");
    let sum: f64 = refused(ln_p, &[0x00, 0x3c]).rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!((2.7..3.8).contains(&sum), "{sum}");
    assert_eq!(refused(ln_rest, &f32::NAN.to_le_bytes()), "the probabilities of token 2 sum to NaN");
}

#[test]
fn a_file_of_targets_is_a_regular_one() {
    let folder = tempfile::tempdir().unwrap();
    let (path, output) = (folder.path().join("targets"), folder.path().join("output"));
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let (result, _) = learn("qwen3", &output, (&texts(), &options(Some((&path, 7)))), None, |_| false);
    assert_eq!(result.unwrap_err().to_string(), format!("{}: not a regular file", path.display()));
}

#[test]
fn a_run_that_is_resumed_gives_what_an_uninterrupted_one_gives() {
    let (folder, path) = made(7);
    let (text, state) = (texts(), folder.path().join("state"));
    let saving = Some(Saving { path: &state, found: Found::Resume });
    let with_targets = options(Some((&path, 7)));
    let output = folder.path().join("output");
    let run = |options: &LearnOptions, last: usize| {
        learn("qwen3", &output, (&text, options), saving, |said| said.losses.len() == last)
    };
    let (stopped, _) = run(&with_targets, 3);
    assert!(matches!(stopped, Err(QuantizeError::Interrupted)));
    // A state of other targets, or of the teacher itself, is another run's.
    let (other, _) = run(&options(Some((&folder.path().join("8"), 8))), 3);
    let error = other.unwrap_err().to_string();
    assert!(error.contains("is of another run: targets was \""), "{error}");
    let (asked, _) = run(&options(None), 3);
    let error = asked.unwrap_err().to_string();
    assert!(error.contains("is of another run: targets was \"") && error.ends_with("and is null"), "{error}");
    let (report, said) = run(&with_targets, usize::MAX);
    assert_eq!(said.losses.len(), 3);
    report.unwrap();
    assert!(files(&output) == files(&folder.path().join("made")) && !state.exists());
}

#[test]
fn what_targets_do_not_go_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("targets");
    let refused = |top_k, change: &dyn Fn(&mut LearnOptions)| {
        let mut options = options(Some((&path, top_k)));
        change(&mut options);
        let output = folder.path().join("output");
        let (result, _) = learn("qwen3", &output, (&texts(), &options), None, |_| false);
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        result.unwrap_err().to_string()
    };
    let by_block = refused(7, &|options| (options.learn, options.by_block) = (Learn::Codes, true));
    assert_eq!(
        by_block,
        "learning: a file of targets has the teacher's probabilities; learning block by block takes the states between its blocks, which it does not have"
    );
    let none = refused(0, &|_| {});
    assert_eq!(none, "learning: top_k of the targets is 0, but 1 or more is wanted");
}
