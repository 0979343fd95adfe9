//! The fuzzing corpus, and seeded mutations of it, on stable Rust.

use std::path::{Path, PathBuf};

use lowbit_fuzz::TARGETS;
use numcheck::Random;

/// The files of a target's corpus, in the order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// Runs `target`, naming the input when it panics.
fn run(target: fn(&[u8]), data: &[u8], name: &dyn Fn() -> String) {
    if let Err(panic) = std::panic::catch_unwind(|| target(data)) {
        eprintln!("on {}: {} bytes: {:02x?}", name(), data.len(), &data[..data.len().min(4096)]);
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn the_corpus_is_handled() {
    for &(name, target) in TARGETS {
        let files = corpus(name);
        assert!(files.len() >= 5, "{name}: {} files", files.len());
        for (path, data) in files {
            run(target, &data, &|| path.display().to_string());
        }
    }
}

#[test]
fn gguf_mutations_are_handled() {
    mutate("gguf", 300);
}

#[test]
fn safetensors_mutations_are_handled() {
    mutate("safetensors", 2000);
}

#[test]
fn config_json_mutations_are_handled() {
    mutate("config_json", 20);
}

#[test]
fn block_decoders_mutations_are_handled() {
    mutate("block_decoders", 500);
}

#[test]
fn hub_mutations_are_handled() {
    mutate("hub", 100);
}

#[test]
fn tokenizer_json_mutations_are_handled() {
    mutate("tokenizer_json", 1000);
}

#[test]
fn chat_template_mutations_are_handled() {
    mutate("chat_template", 20);
}

#[test]
fn model_mutations_are_handled() {
    mutate("model", 60);
}

#[test]
fn gguf_model_mutations_are_handled() {
    mutate("gguf_model", 40);
}

/// Runs the target on `count` mutations of each file of its corpus.
fn mutate(name: &str, count: usize) {
    let (_, target) = TARGETS.iter().find(|(target, _)| *target == name).expect("a target of that name");
    let files = corpus(name);
    let mut random = Random::new(7);
    for (path, data) in &files {
        for round in 0..count {
            let (_, other) = &files[random.below(files.len())];
            let mutated = mutation(data, other, &mut random);
            run(*target, &mutated, &|| format!("mutation {round} of {}", path.display()));
        }
    }
}

/// One to four changes: flipped bits, hostile numbers, cuts, and pieces of another file.
fn mutation(data: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut data = data.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(data.len().max(1));
        match random.below(6) {
            0 if !data.is_empty() => data[at] ^= 1 << random.below(8),
            1 if !data.is_empty() => data[at] = random.bits() as u8,
            2 => data.truncate(at),
            3 => {
                let hostile = [0, 1, u64::MAX, i64::MAX as u64, 1 << 32, random.bits() >> random.below(64)];
                let number = hostile[random.below(hostile.len())].to_le_bytes();
                let width = [4, 8][random.below(2)].min(data.len() - at.min(data.len()));
                data[at..at + width].copy_from_slice(&number[..width]);
            }
            4 if !other.is_empty() => {
                let from = random.below(other.len());
                let piece = &other[from..(from + 1 + random.below(64)).min(other.len())];
                data.splice(at.min(data.len())..at.min(data.len()), piece.iter().copied());
            }
            _ if !data.is_empty() => {
                data.drain(at..(at + 1 + random.below(16)).min(data.len()));
            }
            _ => {}
        }
    }
    data
}
