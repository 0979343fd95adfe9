//! `lowbit rerank`: texts in, ranks out.

use crate::reranker::{case, make, peer};
use crate::support::{json, lowbit, refusal, root};

#[test]
fn texts_are_ranked() {
    let (peer, folder) = (peer(), tempfile::tempdir().unwrap());
    make(folder.path(), &case(&peer, "flat")["files"]);
    let model = folder.path().to_str().unwrap();
    let documents: Vec<&str> =
        peer["documents"].as_array().unwrap().iter().map(|document| document.as_str().unwrap()).collect();
    let of = ["rerank", "-m", model, "-q", peer["query"].as_str().unwrap(), "--device", "cpu", "--exact"];
    let run = |more: &[&str]| lowbit(&[&of[..], more, &documents].concat()).output().unwrap();
    let output = run(&["--json"]);
    assert!(output.status.success(), "{output:?}");
    let printed = json(&output);
    assert_eq!(printed["schema"], "lowbit.rerank/1");
    let order = |printed: &serde_json::Value| -> Vec<u64> {
        printed["results"].as_array().unwrap().iter().map(|text| text["index"].as_u64().unwrap()).collect()
    };
    assert_eq!(order(&printed), [3, 0, 1, 2, 4]);
    assert_eq!(printed["results"][0]["text"], documents[3]);
    assert_eq!(order(&json(&run(&["--json", "--top-n", "2"]))), [3, 0]);
    let text = String::from_utf8(run(&["--top-n", "1"]).stdout).unwrap();
    assert!(text.starts_with("0.6726") && text.contains("3  Hello, W\u{f6}rld!"), "{text}");
    assert_eq!(text.lines().count(), 1);
}

#[test]
fn models_that_do_not_score_are_refused_at_once() {
    let model = root().join("tests/vectors/models/qwen3");
    let output = lowbit(&["rerank", "-m", model.to_str().unwrap(), "-q", "a", "b"]).output().unwrap();
    let message = refusal(output);
    assert!(message.contains("--true-token yes --false-token no"), "{message}");
}
