//! `--json`: each object says its schema, and docs/json.md has every field that is printed.

use crate::support::{json, lowbit, root, with_input, with_template};
use serde_json::Value;
use std::collections::BTreeSet;

const TINY: &str = "tests/vectors/models/qwen3";
/// It does not say how it pools.
const EMBED: [&str; 8] = ["embed", "-m", TINY, "--pooling", "mean", "a", "--device", "cpu"];
const TINY_4BIT: &str = "tests/vectors/models/qwen3-mlx-4bit";

/// The fields that docs/json.md lists under the heading of this schema, with those of the schema
/// that it refers to.
fn documented(schema: &str) -> BTreeSet<String> {
    let page = std::fs::read_to_string(root().join("docs/json.md")).unwrap();
    let begin = page.find(&format!("\n## {schema}\n")).unwrap_or_else(|| panic!("{schema} has no heading"));
    let section = page[begin + 4..].split("\n## ").next().unwrap();
    let mut fields = BTreeSet::from(["schema".to_string()]);
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let cell = line.split('|').nth(1).unwrap();
        let names: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
        fields.insert(names[0].to_string());
        // `a.value`, `.error`
        let stem = names[0].rsplit_once('.').map_or("", |(stem, _)| stem);
        fields.extend(names[1..].iter().map(|end| format!("{stem}{end}")));
        // An array without elements.
        fields.extend(names[0].split_once("[]").map(|(array, _)| array.to_string()));
    }
    if schema == "lowbit.chat/1" {
        fields.extend(documented("lowbit.generate/1"));
    }
    fields
}

/// The paths of all fields; below `formats`, names are anybody's.
fn fields(value: &Value, path: &str, all: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let key = if path.ends_with("formats") { "NAME" } else { key };
                let path = if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
                fields(value, &path, all);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| fields(item, &format!("{path}[]"), all));
        }
        _ => {
            all.insert(path.to_string());
        }
    }
}

/// Checks an object, and returns it.
#[track_caller]
fn checked(schema: &str, object: Value) -> Value {
    assert_eq!(object["schema"], schema);
    let (mut printed, known) = (BTreeSet::new(), documented(schema));
    fields(&object, "", &mut printed);
    let unknown: Vec<_> = printed.difference(&known).collect();
    assert!(unknown.is_empty(), "docs/json.md does not have {unknown:?} of {schema}");
    object
}

#[track_caller]
fn run(schema: &str, arguments: &[&str]) -> Value {
    checked(schema, json(&lowbit(&[arguments, &["--json"]].concat()).output().unwrap()))
}

#[test]
fn guesses_are_documented() {
    let demo = ["generate", "-m", "models/demo-4bit", "--device", "cpu", "-p", "x", "-n", "4"];
    let object = run("lowbit.generate/1", &[&demo[..], &["--speculate", "ngram"]].concat());
    assert!(object["drafted_tokens"].is_number() && object["accepted_tokens"].is_number());
}

#[test]
fn embeddings_are_documented() {
    let object = run("lowbit.embed/1", &EMBED);
    assert_eq!(object["embedding"].as_array().unwrap().len(), 64);
    let similarity = run("lowbit.similarity/1", &[&EMBED[..], &["--similarity"]].concat());
    assert_eq!(similarity["similarity"].as_array().unwrap().len(), 1);
}

#[test]
fn replies_are_documented() {
    run("lowbit.generate/1", &["generate", "-m", TINY, "-p", "7 and", "-n", "3", "--temp", "0"]);
    let logprobs = ["generate", "-m", TINY, "-p", "7 and", "-n", "3", "--temp", "0", "--logprobs", "2"];
    run("lowbit.generate/1", &logprobs);
    let folder = tempfile::tempdir().unwrap();
    with_template(folder.path());
    let model = folder.path().to_str().unwrap();
    let output =
        with_input(lowbit(&["chat", "-m", model, "-n", "3", "--temp", "0", "--json"]), b"one\ntwo\n");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 2, "{}", String::from_utf8_lossy(&output.stderr));
    text.lines().for_each(|line| drop(checked("lowbit.chat/1", serde_json::from_str(line).unwrap())));
}

#[test]
fn descriptions_are_documented() {
    for model in [TINY, TINY_4BIT, "models/demo-4bit", "tests/vectors/models/qwen3-Q4_0/model.gguf"] {
        run("lowbit.inspect/1", &["inspect", "-m", model]);
        let with = run("lowbit.inspect/1", &["inspect", "-m", model, "--tensors"]);
        assert!(with["tensors"].as_array().unwrap().len() > 10);
    }
}

#[test]
fn measurements_are_documented() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let text = std::fs::read_to_string(root().join("models/demo/eval.txt")).unwrap();
    std::fs::write(&file, text.chars().take(600).collect::<String>()).unwrap();
    let file = file.to_str().unwrap();
    let of = ["perplexity", "-f", file, "-c", "32"];
    run("lowbit.perplexity/1", &[&of[..], &["-m", TINY]].concat());
    let compared = run("lowbit.compare/1", &[&of[..], &["--compare", TINY, TINY_4BIT]].concat());
    assert_eq!(compared["exact"], true);
    let plain = run("lowbit.compare/1", &[&of[..], &["--compare", TINY, TINY_4BIT, "--no-exact"]].concat());
    assert_eq!(plain["exact"], false);
    let op = run("lowbit.bench/1", &["bench", "rms_norm", "M=1", "--threads", "1"]);
    let model = run(
        "lowbit.bench/1",
        &["bench", "--model", TINY, "-p", "4", "-n", "2", "--runs", "2", "--threads", "1"],
    );
    assert!(model["rows"][0]["model"].as_str().unwrap().ends_with("qwen3"));
    let batch = ["--batch", "1,3", "-p", "4", "-n", "2", "--runs", "1", "--threads", "1"];
    let batch = run("lowbit.bench/1", &[&["bench", "--model", TINY][..], &batch].concat());
    assert_eq!(batch["rows"][1]["batch"], 3);
    for row in [&op["rows"][0], &model["rows"][0], &batch["rows"][0]] {
        assert_eq!((&row["threads"], &row["version"]), (&1.into(), &env!("CARGO_PKG_VERSION").into()));
        assert!(row["device"].as_str().unwrap().len() > 2);
    }
    assert!(op["rows"][0]["deviation_us"].as_f64().unwrap() >= 0.0);
    let cases = run("lowbit.bench/1", &["bench", "--list", "rms_norm"]);
    assert!(cases["cases"].as_array().unwrap().iter().any(|case| case["op"] == "rms_norm"));
}

#[test]
fn ranks_are_documented() {
    let folder = tempfile::tempdir().unwrap();
    crate::reranker::make(folder.path(), &crate::reranker::case(&crate::reranker::peer(), "flat")["files"]);
    run("lowbit.rerank/1", &["rerank", "-m", folder.path().to_str().unwrap(), "-q", "a", "b", "c"]);
}

#[test]
fn what_is_made_is_documented() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let text = std::fs::read_to_string(root().join("models/demo/eval.txt")).unwrap();
    std::fs::write(path("data.txt"), text.chars().take(1500).collect::<String>()).unwrap();
    let (output, gguf, data) = (path("new"), path("new.gguf"), path("data.txt"));
    let quantize = ["quantize", "-m", TINY, "--group-size", "32", "-o", &output];
    run("lowbit.quantize/1", &[&quantize[..], &["--dry-run"]].concat());
    let learn =
        ["--learn", "codes", "--by-block", "--data", &data, "--steps", "1", "--windows", "1", "-c", "32"];
    let made = run("lowbit.quantize/1", &[&quantize[..], &learn].concat());
    assert!(made["learning"]["weights"].as_u64().unwrap() > 5);
    run("lowbit.quantize/1", &["quantize", "-m", TINY, "-o", &gguf, "--format", "Q4_K_M"]);
}
