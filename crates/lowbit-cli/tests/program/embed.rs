//! `lowbit embed`: texts in, embeddings out.

use crate::embedding::Embedding;
use crate::support::{lowbit, refusal, with_input};
use std::path::Path;
use std::process::Output;

const TEXTS: [&str; 3] = ["the thing", "in there", "7 and 8"];

fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn embed(model: &Path, arguments: &[&str]) -> Output {
    lowbit(&[&["embed", "-m", model.to_str().unwrap(), "--device", "cpu"], arguments].concat())
        .output()
        .unwrap()
}

fn rows(text: &str) -> Vec<Vec<f32>> {
    text.lines().map(|line| line.split(' ').map(|value| value.parse().unwrap()).collect()).collect()
}

#[test]
fn texts_come_from_arguments_files_and_pipes() {
    let folder = tempfile::tempdir().unwrap();
    Embedding::default().write(folder.path());
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_string()
    };
    let lines = file("texts.txt", "the thing\nin there\r\n7 and 8\n");
    let jsonl = TEXTS.map(|text| format!("{{\"id\": 1, \"text\": \"{text}\"}}")).join("\n");
    let jsonl = file("texts.jsonl", &jsonl);
    let want = stdout(embed(folder.path(), &TEXTS));
    let embeddings = rows(&want);
    assert_eq!((embeddings.len(), embeddings[0].len()), (3, 64));
    for embedding in &embeddings {
        let length: f32 = embedding.iter().map(|value| value * value).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
    assert_eq!(stdout(embed(folder.path(), &["--file", &lines])), want);
    assert_eq!(stdout(embed(folder.path(), &["-f", &jsonl])), want);
    let piped = lowbit(&["embed", "-m", folder.path().to_str().unwrap(), "--device", "cpu"]);
    assert_eq!(stdout(with_input(piped, b"the thing\nin there\n7 and 8")), want);
    // As llama-embedding has it.
    let typed = [
        "llama-embedding",
        "-m",
        folder.path().to_str().unwrap(),
        "-p",
        &TEXTS.join("\n"),
        "--embd-normalize",
        "2",
    ];
    let typed = lowbit(&[&typed[..], &["--pooling", "last", "--device", "cpu"]].concat());
    assert_eq!(stdout({ typed }.output().unwrap()), want);

    let array = stdout(embed(folder.path(), &[&TEXTS[..], &["--embd-output-format", "array"]].concat()));
    let array: Vec<Vec<f32>> = serde_json::from_str(&array).unwrap();
    assert_eq!(array, embeddings);
    let similar = rows(&stdout(embed(folder.path(), &[&TEXTS[..], &["--similarity"]].concat())));
    for (one, row) in embeddings.iter().zip(&similar) {
        for (other, &similar) in embeddings.iter().zip(row) {
            let cosine: f32 = one.iter().zip(other).map(|(a, b)| a * b).sum();
            assert!((cosine - similar).abs() < 1e-5, "{cosine} {similar}");
        }
    }
}

#[test]
fn flags_change_embeddings() {
    let folder = tempfile::tempdir().unwrap();
    Embedding { settings: serde_json::json!({"max_seq_length": 6}), ..Default::default() }
        .write(folder.path());
    let run = |arguments: &[&str]| stdout(embed(folder.path(), &[&["the thing"], arguments].concat()));
    let plain = run(&[]);
    for arguments in [
        &["--prompt-name", "query"][..],
        &["--prefix", "7"],
        &["--pooling", "mean"],
        &["--no-normalize"],
        &["--dimensions", "8"],
    ] {
        assert_ne!(run(arguments), plain, "{arguments:?}");
    }
    assert_eq!(run(&["--prompt-name", "document"]), plain);
    assert_eq!(run(&["--no-normalize", "--normalize"]), plain);
    assert_eq!(run(&["--normalize", "--no-normalize"]), run(&["--no-normalize"]));
    assert_eq!(rows(&run(&["--dimensions", "8"]))[0].len(), 8);
    let output = embed(folder.path(), &["the thing in there", "7"]);
    let note = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(note.contains("note: 1 text was longer than the model reads, and cut"), "{note}");
}

#[test]
fn refusals_say_what_to_type() {
    let folder = tempfile::tempdir().unwrap();
    Embedding::default().write(folder.path());
    let refused = |arguments: &[&str]| refusal(embed(folder.path(), arguments));
    assert!(
        refused(&["a", "--prompt-name", "other"]).contains("has no prompt other; it has query, document")
    );
    assert!(refused(&["a", "--pooling", "none"]).contains("mean, cls or last"));
    assert!(refused(&["a", "--embd-normalize", "0"]).contains("left as they come (-1)"));
    assert!(refused(&["--file", "no-such-file"]).contains("no-such-file"));
    let plain = crate::embedding::vectors().join("models/qwen3");
    assert!(refusal(embed(&plain, &["a"])).contains("name its pooling: last, mean or cls"));
    let empty = refusal(embed(&plain, &["a", "", "--pooling", "mean"]));
    assert!(empty.contains("text 1 is empty, and the tokenizer puts no token around it"), "{empty}");
    // A model that embeds can write, but is said to be made for other things.
    let written =
        lowbit(&["generate", "-m", folder.path().to_str().unwrap(), "-p", "a", "-n", "1"]).output().unwrap();
    let note = String::from_utf8_lossy(&written.stderr).into_owned();
    assert!(written.status.success() && note.contains("this is an embedding model"), "{note}");
}
