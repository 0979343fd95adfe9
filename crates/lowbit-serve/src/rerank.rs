//! Scores of documents for a query: `/v1/rerank` in the form of Jina, Cohere, vLLM and
//! llama-server.

use crate::app::{App, Host};
use crate::body;
use crate::embeddings::failed;
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::openai::{Warnings, answer};
use crate::sampling::model;
use crate::served::Texts;
use crate::turns::Turns;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use lowbit::{Error, Prompt, RerankOptions, Reranker, Score};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Documents of a request.
const DOCUMENTS: usize = 2048;

/// Fields that say nothing of the scores.
pub(crate) const WITHOUT_EFFECT: [&str; 1] = ["user"];

/// The documents that are to be scored.
struct Asked {
    model: String,
    query: String,
    documents: Vec<String>,
    /// The most results.
    top: usize,
    with_documents: bool,
    cuts: bool,
    options: RerankOptions,
    warnings: Warnings,
}

#[derive(Serialize)]
struct Ranked {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Value>,
}

#[derive(Serialize)]
struct All {
    id: String,
    object: &'static str,
    model: String,
    results: Vec<Ranked>,
    usage: Value,
}

/// Ranks documents.
pub(crate) async fn rerank(State(host): State<Arc<Host>>, body: Body) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, Asked::read).await?;
    let warnings = asked.warnings.clone();
    let all = app.in_turns(move |app, turns| {
        let scores = asked.score(app, turns)?;
        Ok(asked.ranked(app, &scores))
    });
    Ok(warnings.on(answer(&all.await?)))
}

impl Asked {
    fn read(app: &App, mut fields: Fields) -> Result<Self, ApiError> {
        let model = model(&mut fields, &app.served)?;
        let of = app.served.texts_of_scores()?;
        let query: String = fields.need("query")?;
        let Some(list) = fields.list("documents")? else {
            return Err(ApiError::field("documents", "is missing"));
        };
        if list.is_empty() || list.len() > DOCUMENTS {
            let problem = format!("has {} texts, but 1 to {DOCUMENTS} may be", list.len());
            return Err(ApiError::field("documents", problem));
        }
        let one = |(index, value)| document(value, &format!("documents[{index}]"));
        let documents: Vec<String> = list.into_iter().enumerate().map(one).collect::<Result<_, _>>()?;
        let top = fields.count("top_n", 1, u64::MAX >> 1)?.unwrap_or(usize::MAX);
        let with_documents = fields.take("return_documents")?.unwrap_or(false);
        let cuts = fields.take("truncation")?.unwrap_or(false);
        let mut options = RerankOptions::default();
        if let Some(instruction) = fields.take("instruction")? {
            options.instruction = Prompt::Text(instruction);
        }
        fields.ignore(&WITHOUT_EFFECT);
        let mut warnings = Warnings::default();
        warnings.unknown(&fields);
        // Whatever is wrong with the model is known before the request waits.
        reranker(app, of, &options)?;
        Ok(Self { model, query, documents, top, with_documents, cuts, options, warnings })
    }

    /// The documents' scores, in their order.
    fn score(&self, app: &App, turns: &mut Turns<'_>) -> Result<Vec<Score>, ApiError> {
        let mut reranker = reranker(app, app.served.texts_of_scores()?, &self.options)?;
        if turns.next().is_break() {
            return Err(turns.why());
        }
        let mut scores = vec![];
        for (index, document) in self.documents.iter().enumerate() {
            let scored = reranker.score_in_passes(&self.query, document, || turns.next());
            let scored = scored.map_err(|error| match error {
                // The tokenizer or the template refuses the text.
                Error::File(error) => ApiError::field(&format!("documents[{index}]"), error),
                other => failed(app, &other),
            });
            let score = scored?.ok_or_else(|| turns.why())?;
            if score.cut > 0 && !self.cuts {
                return Err(ApiError::context(score.tokens + score.cut, score.tokens));
            }
            scores.push(score);
        }
        Ok(scores)
    }

    /// The answer, the best document first; those of equal scores in the request's order.
    fn ranked(self, app: &App, scores: &[Score]) -> All {
        let tokens: usize = scores.iter().map(|score| score.tokens).sum();
        let document = |text: String| self.with_documents.then(|| json!({"text": text}));
        let ranked = scores.iter().zip(self.documents).enumerate();
        let ranked = ranked.map(|(index, (score, text))| Ranked {
            index,
            relevance_score: score.score,
            document: document(text),
        });
        let mut results: Vec<Ranked> = ranked.collect();
        results.sort_by(|one, other| other.relevance_score.total_cmp(&one.relevance_score));
        results.truncate(self.top);
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        All { id: app.id("rerank-"), object: "list", model: self.model, results, usage }
    }
}

/// A text, or an object that has one.
fn document(value: Value, path: &str) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Object(_) => Fields::of(value, path)?.need("text"),
        other => {
            let problem = format!("must be a string or an object with a text, but is {}", kind(&other));
            Err(ApiError::field(path, problem))
        }
    }
}

fn reranker<'a>(app: &'a App, of: &'a Texts, options: &RerankOptions) -> Result<Reranker<'a>, ApiError> {
    let made = Reranker::new(&of.checkpoint, (&of.model, &app.served.tokenizer), options);
    made.map_err(|error| failed(app, &error))
}
