//! Scores against those of sentence-transformers' cross-encoders (tools/peer_vectors/rerank.py).

use crate::reranker::{case, make, peer, with};
use lowbit::{Checkpoint, Device, Error, Model, Prompt, RerankOptions, Reranker, Target, Tokenizer};
use serde_json::{Value, json};
use std::path::Path;

/// As for embeddings: the error of sums in another order, as a share of the value.
const BOUND: f32 = 21.0 * 160.0 * f32::EPSILON / 2.0;

fn scores(
    folder: &Path,
    options: &RerankOptions,
    (query, documents): (&str, &[&str]),
) -> Result<Vec<(f32, usize)>, Error> {
    let checkpoint = Checkpoint::open(folder)?;
    let target = Target::new(&Device::cpu(Some(2))?, None)?.with_exact(true);
    let (model, tokenizer) =
        (Model::load_for(&checkpoint, target)?, Tokenizer::from_checkpoint(&checkpoint)?);
    let mut reranker = Reranker::new(&checkpoint, (&model, &tokenizer), options)?;
    Ok(reranker.score(query, documents)?.iter().map(|score| (score.score, score.cut)).collect())
}

fn texts(peer: &Value) -> (&str, Vec<&str>) {
    let documents = peer["documents"].as_array().unwrap();
    (peer["query"].as_str().unwrap(), documents.iter().map(|document| document.as_str().unwrap()).collect())
}

#[test]
fn scores_are_those_of_sentence_transformers() {
    let peer = peer();
    let (query, documents) = texts(&peer);
    for case in peer["cases"].as_array().unwrap() {
        let (folder, name) = (tempfile::tempdir().unwrap(), &case["name"]);
        make(folder.path(), &case["files"]);
        let mut options = RerankOptions::default();
        if let Some(prompt) = case["arguments"]["prompt"].as_str() {
            options = options.with_instruction(Prompt::Text(prompt.into()));
        }
        let got = scores(folder.path(), &options, (query, &documents)).unwrap();
        for (index, ((got, cut), want)) in got.iter().zip(case["scores"].as_array().unwrap()).enumerate() {
            let want = want.as_f64().unwrap() as f32;
            let error = (got - want).abs();
            // Not `error > bound`: a NaN must fail.
            assert!(error <= BOUND * (1.0 + want.abs()), "{name}, document {index}: {got} for {want}");
            assert_eq!(*cut > 0, name == "cut" && documents[index].len() > 50, "{name}, {index}: {cut}");
        }
    }
}

#[test]
fn tokens_can_be_named() {
    let (peer, folder) = (peer(), tempfile::tempdir().unwrap());
    let (query, documents) = texts(&peer);
    let flat = case(&peer, "flat");
    make(folder.path(), &flat["files"]);
    let score = |options: &RerankOptions| scores(folder.path(), options, (query, &documents));
    let said = score(&RerankOptions::default()).unwrap();
    let ids = RerankOptions::default().with_tokens("97", Some("98".into()));
    assert_eq!(score(&ids).unwrap(), said);
    let other = score(&RerankOptions::default().with_tokens("98", Some("97".into()))).unwrap();
    assert!(said.iter().zip(&other).all(|(one, other)| (one.0 + other.0 - 1.0).abs() < 1e-5));
    // Nothing says how it scores, and the flag does.
    std::fs::remove_file(folder.path().join("modules.json")).unwrap();
    assert!(matches!(score(&RerankOptions::default()), Err(Error::NoScore { .. })));
    assert_eq!(score(&ids).unwrap(), said);
    let unknown = score(&RerankOptions::default().with_tokens("two words", None)).unwrap_err();
    assert!(matches!(unknown, Error::NoToken { .. }), "{unknown}");
}

#[test]
fn settings_that_are_not_computed_are_refused() {
    let peer = peer();
    let texts = texts(&peer);
    let flat = case(&peer, "flat")["files"].clone();
    let refusal = |files: &Value| {
        let folder = tempfile::tempdir().unwrap();
        make(folder.path(), files);
        scores(folder.path(), &RerankOptions::default(), (texts.0, &texts.1)).unwrap_err().to_string()
    };
    let score = "1_LogitScore/config.json";
    let transformer = "sentence_bert_config.json";
    for (file, key, value, want) in [
        (score, "true_token_id", json!(null), "config.json: true_token_id is missing"),
        (score, "true_token_id", json!(275), "275: no token of the model"),
        (score, "false_token_id", json!(-1), "false_token_id should be a token's id, but is -1"),
        (score, "module_input_name", json!("logits"), "module_input_name should be causal_logits"),
        (transformer, "processing_kwargs", json!({"text": {"stride": 3}}), "processing_kwargs.text.stride"),
        (
            "config.json",
            "sentence_transformers",
            json!({"activation_fn": "torch.nn.modules.activation.Tanh"}),
            "activation_fn should be torch's Sigmoid or Identity",
        ),
        ("tokenizer_config.json", "chat_template", json!("no place"), "leaves out the messages"),
    ] {
        let message = refusal(&with(&flat, file, key, value));
        assert!(message.contains(want), "{message}");
    }
}
