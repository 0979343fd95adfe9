//! Embeddings and scores: the values of the library, in every API's form.

use crate::embedding::Embedding;
use crate::support::opened::{open, serve};
use crate::support::{Running, Script, Scripted};
use lowbit::{EmbedOptions, Embedder, Prompt, RerankOptions, Reranker};
use serde_json::{Value, json};

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

#[test]
fn embeddings_are_those_of_the_library() {
    let folder = tempfile::tempdir().unwrap();
    Embedding::default().write(folder.path());
    let opened = open(folder.path());
    let texts = ["the thing", "in there", "7 and 8"];
    let embedder = |options: &EmbedOptions| {
        Embedder::new(&opened.checkpoint, (&opened.model, &opened.tokenizer), options).unwrap()
    };
    let plain = embedder(&EmbedOptions::default());
    let want = plain.embed(&texts).unwrap();
    // Sums have another order in a pass of several texts.
    let alone = |index: usize| plain.embed(&texts[index..=index]).unwrap();
    let ids: Vec<Vec<u32>> = texts.iter().map(|text| plain.tokens(text).unwrap().ids).collect();
    let server = serve(folder.path());
    let ask = |body: Value| server.post("/v1/embeddings", &body).ok();
    let got = |answer: &Value| -> Vec<Vec<f32>> {
        answer["data"].as_array().unwrap().iter().map(|one| numbers(&one["embedding"])).collect()
    };
    let answer = ask(json!({"model": "test", "input": texts, "user": "u", "encoding_format": "float"}));
    assert_eq!(got(&answer), want);
    let tokens: usize = ids.iter().map(Vec::len).sum();
    assert_eq!(answer["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    assert_eq!((&answer["object"], &answer["data"][2]["index"]), (&json!("list"), &json!(2)));
    assert!(server.engine.turns() > 0, "it has run in turns");
    // One text; ids; texts' ids.
    assert_eq!(got(&ask(json!({"input": texts[1]}))), alone(1));
    assert_eq!(got(&ask(json!({"input": ids[1]}))), alone(1));
    assert_eq!(got(&ask(json!({"input": ids}))), want);
    // As bytes.
    let answer = ask(json!({"input": texts[0], "encoding_format": "base64"}));
    assert_eq!(answer["data"][0]["embedding"], base64(&alone(0)[0]));
    // Fewer dimensions; a prompt of the checkpoint.
    let short = embedder(&EmbedOptions::default().with_dimensions(24)).embed(&texts[..1]).unwrap();
    assert_eq!(got(&ask(json!({"input": texts[0], "dimensions": 24}))), short);
    let query = EmbedOptions::default().with_prompt(Prompt::Named("query".into()));
    assert_eq!(
        got(&ask(json!({"input": texts[0], "prompt_name": "query"}))),
        embedder(&query).embed(&texts[..1]).unwrap()
    );
    // Ollama's forms.
    let answer = server.post("/api/embed", &json!({"model": "test:latest", "input": texts})).ok();
    let got: Vec<Vec<f32>> = answer["embeddings"].as_array().unwrap().iter().map(numbers).collect();
    assert_eq!((got, &answer["prompt_eval_count"]), (want.clone(), &json!(tokens)));
    let answer = server.post("/api/embeddings", &json!({"model": "test", "prompt": texts[2]})).ok();
    assert_eq!(numbers(&answer["embedding"]), alone(2)[0]);
}

/// Little-endian f32 in base64, with its padding.
fn base64(values: &[f32]) -> String {
    const SIGNS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let group = |group: &[u8]| {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(*group.get(i).unwrap_or(&0)));
        (0..4)
            .map(|i| if i <= group.len() { SIGNS[(bits >> (18 - 6 * i) & 63) as usize].into() } else { '=' })
            .collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

#[test]
fn embeddings_that_cannot_be_made_are_named() {
    let folder = tempfile::tempdir().unwrap();
    Embedding { settings: json!({"max_seq_length": 8}), ..Embedding::default() }.write(folder.path());
    let server = serve(folder.path());
    let long = "the thing in there ".repeat(9);
    for (body, want) in [
        (json!({}), "input: is missing"),
        (json!({"input": []}), "input: has 0 texts, but 1 to 2048 may be"),
        (json!({"input": 7}), "input: must be a string, token ids, or a list of either, but is a number"),
        (json!({"input": ["a", [1]]}), "input: has texts and ids: one or the other is wanted"),
        (json!({"input": [1, 9999]}), "input[0]: token 9999 is none of the model's 275"),
        (
            json!({"input": "a", "dimensions": 65}),
            "dimensions: is 65, but the model's embeddings have 64: 1 to 64 can be kept",
        ),
        (json!({"input": "a", "dimensions": 0}), "dimensions: is 0, but 1 to 9223372036854775807 is wanted"),
        (json!({"input": "a", "prompt_name": "x"}), "prompt_name: is x, but the model has query, document"),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            "encoding_format: is int8, but float or base64 is wanted",
        ),
        (
            json!({"input": "a", "truncate_prompt_tokens": 4}),
            "truncate_prompt_tokens: -1 alone is taken, which cuts texts to what the model reads",
        ),
        (
            json!({"input": "a", "model": "b"}),
            "model b is not served here, but test; --alias gives it further names",
        ),
    ] {
        let answer = server.post("/v1/embeddings", &body);
        assert_eq!(answer.json()["error"]["message"], want, "{body}");
    }
    let answer = server.post("/v1/embeddings", &json!({"input": long}));
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let cut = server.post("/v1/embeddings", &json!({"input": long, "truncate_prompt_tokens": -1})).ok();
    assert_eq!(cut["usage"]["prompt_tokens"], 8);
    server.post("/api/embed", &json!({"model": "test", "input": long})).ok();
    let answer = server.post("/api/embed", &json!({"model": "test", "input": long, "truncate": false}));
    assert_eq!(answer.status, 400);
    // Models that make none.
    let plain = Running::new(Scripted::new(vec![Script::new(vec![])]));
    for (path, body, want) in [
        (
            "/v1/embeddings",
            json!({"input": "a"}),
            "model: test makes no embeddings: its checkpoint does not say how the states of a text are pooled",
        ),
        (
            "/v1/rerank",
            json!({"query": "a", "documents": ["b"]}),
            "model: test scores no documents: its checkpoint names no tokens whose logits make a score",
        ),
    ] {
        let answer = plain.post(path, &body);
        assert_eq!((answer.status, &answer.json()["error"]["message"]), (400, &json!(want)));
    }
}

#[test]
fn documents_are_ranked_as_by_the_library() {
    let (peer, folder) = (crate::reranker::peer(), tempfile::tempdir().unwrap());
    crate::reranker::make(folder.path(), &crate::reranker::case(&peer, "flat")["files"]);
    let (query, documents) = (peer["query"].as_str().unwrap(), peer["documents"].as_array().unwrap());
    let texts: Vec<&str> = documents.iter().map(|text| text.as_str().unwrap()).collect();
    let opened = open(folder.path());
    let parts = (&opened.model, &opened.tokenizer);
    let mut reranker = Reranker::new(&opened.checkpoint, parts, &RerankOptions::default()).unwrap();
    let want: Vec<f32> = reranker.score(query, &texts).unwrap().iter().map(|score| score.score).collect();
    let server = serve(folder.path());
    for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
        let answer =
            server.post(path, &json!({"model": "test", "query": query, "documents": documents})).ok();
        let results = answer["results"].as_array().unwrap();
        let order: Vec<u64> = results.iter().map(|one| one["index"].as_u64().unwrap()).collect();
        assert_eq!(order, [3, 0, 1, 2, 4]);
        for one in results {
            let score = one["relevance_score"].as_f64().unwrap() as f32;
            assert_eq!(score, want[one["index"].as_u64().unwrap() as usize]);
            assert_eq!(one.get("document"), None);
        }
        assert!(answer["usage"]["total_tokens"].as_u64().unwrap() > 0);
    }
    let objects: Vec<Value> = texts.iter().map(|text| json!({"text": text})).collect();
    let body = json!({"query": query, "documents": objects, "top_n": 1, "return_documents": true});
    let answer = server.post("/v1/rerank", &body).ok();
    assert_eq!(answer["results"].as_array().unwrap().len(), 1);
    assert_eq!(answer["results"][0]["document"]["text"], documents[3]);
    for (body, want) in [
        (json!({"documents": ["a"]}), "query: is missing"),
        (json!({"query": "a"}), "documents: is missing"),
        (json!({"query": "a", "documents": []}), "documents: has 0 texts, but 1 to 2048 may be"),
        (
            json!({"query": "a", "documents": [1]}),
            "documents[0]: must be a string or an object with a text, but is a number",
        ),
        (json!({"query": "a", "documents": [{}]}), "documents[0].text: is missing"),
        (
            json!({"query": "a", "documents": ["a"], "top_n": 0}),
            "top_n: is 0, but 1 to 9223372036854775807 is wanted",
        ),
    ] {
        let answer = server.post("/v1/rerank", &body);
        assert_eq!((answer.status, &answer.json()["error"]["message"]), (400, &json!(want)));
    }
    // A model that makes no embeddings says so.
    assert_eq!(server.post("/v1/embeddings", &json!({"input": "a"})).status, 400);
}
