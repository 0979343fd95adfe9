//! Embeddings: OpenAI's `/v1/embeddings`, Ollama's `/api/embed` and `/api/embeddings`.

use crate::app::{App, Host};
use crate::body;
use crate::error::ApiError;
use crate::fields::{Fields, kind};
use crate::ollama;
use crate::openai::{Warnings, answer};
use crate::prompt::check;
use crate::sampling::model;
use crate::served::Texts;
use crate::turns::Turns;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lowbit::{EmbedOptions, Embedder, Error, Prompt};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Texts of a request, as OpenAI has it.
const INPUTS: usize = 2048;

/// Fields that say nothing of the embeddings.
pub(crate) const WITHOUT_EFFECT: [&str; 3] = ["user", "input_type", "add_special_tokens"];

/// Those of Ollama's requests.
pub(crate) const OLLAMA_WITHOUT_EFFECT: [&str; 2] = ["keep_alive", "options"];

/// The texts that are to be embedded.
struct Asked {
    model: String,
    /// The tokens of each text.
    texts: Vec<Vec<u32>>,
    options: EmbedOptions,
    base64: bool,
    warnings: Warnings,
}

/// An embedding in the form that was asked for.
#[derive(Serialize)]
#[serde(untagged)]
enum Form {
    Numbers(Vec<f32>),
    /// Little-endian f32 in base64.
    Text(String),
}

#[derive(Serialize)]
struct One {
    object: &'static str,
    index: usize,
    embedding: Form,
}

#[derive(Serialize)]
struct All {
    object: &'static str,
    data: Vec<One>,
    model: String,
    usage: Value,
}

/// OpenAI's embeddings.
pub(crate) async fn embeddings(
    State(host): State<Arc<Host>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, Asked::read).await?;
    let (tokens, warnings) = (asked.tokens(), asked.warnings.clone());
    let all = app.in_turns(move |app, turns| {
        let (model, base64) = (asked.model.clone(), asked.base64);
        let form = |embedding: Vec<f32>| match base64 {
            true => {
                let bytes: Vec<u8> = embedding.iter().flat_map(|value| value.to_le_bytes()).collect();
                Form::Text(STANDARD.encode(bytes))
            }
            false => Form::Numbers(embedding),
        };
        let made = asked.embed(app, turns)?.into_iter().enumerate();
        let data = made.map(|(index, of)| One { object: "embedding", index, embedding: form(of) });
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        Ok(All { object: "list", data: data.collect(), model, usage })
    });
    Ok(warnings.on(answer(&all.await?)))
}

/// Ollama's answer.
#[derive(Serialize)]
struct OfOllama {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// In nanoseconds.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// `/api/embed`.
pub(crate) async fn ollama(State(host): State<Arc<Host>>, body: Body) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let start = Instant::now();
    let (app, asked) = body::worked(&host, body, |app, fields| Asked::ollama(app, fields, "input")).await?;
    let (model, tokens, warnings) = (asked.model.clone(), asked.tokens(), asked.warnings.clone());
    let embeddings = app.in_turns(move |app, turns| asked.embed(app, turns)).await?;
    let total_duration = start.elapsed().as_nanos() as u64;
    let of = OfOllama { model, embeddings, total_duration, load_duration: 0, prompt_eval_count: tokens };
    Ok(warnings.on(answer(&of)))
}

/// `/api/embeddings`, the older form for one text.
pub(crate) async fn ollama_one(
    State(host): State<Arc<Host>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    #[derive(Serialize)]
    struct Answer {
        embedding: Vec<f32>,
    }
    host.admit()?;
    let (app, asked) = body::worked(&host, body, |app, fields| Asked::ollama(app, fields, "prompt")).await?;
    let warnings = asked.warnings.clone();
    let mut made = app.in_turns(move |app, turns| asked.embed(app, turns)).await?;
    Ok(warnings.on(answer(&Answer { embedding: made.pop().ok_or_else(ApiError::internal)? })))
}

impl Asked {
    fn read(app: &App, mut fields: Fields) -> Result<Self, ApiError> {
        let model = model(&mut fields, &app.served)?;
        let base64 = match fields.take::<String>("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let problem = format!("is {other}, but float or base64 is wanted");
                return Err(ApiError::field("encoding_format", problem));
            }
        };
        // vLLM's: -1 is what the model reads.
        let cuts = match fields.take::<i64>("truncate_prompt_tokens")? {
            None => false,
            Some(-1) => true,
            Some(_) => {
                let problem = "-1 alone is taken, which cuts texts to what the model reads";
                return Err(ApiError::unsupported("truncate_prompt_tokens", problem));
            }
        };
        fields.ignore(&WITHOUT_EFFECT);
        Self::rest(app, fields, (model, "input"), cuts, base64)
    }

    fn ollama(app: &App, mut fields: Fields, name: &str) -> Result<Self, ApiError> {
        let model = ollama::name(&mut fields, &app.served)?;
        // As Ollama has it.
        let cuts = fields.take("truncate")?.unwrap_or(true);
        fields.ignore(&OLLAMA_WITHOUT_EFFECT);
        Self::rest(app, fields, (model, name), cuts, false)
    }

    fn rest(
        app: &App,
        mut fields: Fields,
        (model, name): (String, &str),
        cuts: bool,
        base64: bool,
    ) -> Result<Self, ApiError> {
        let of = app.served.texts_of_embeddings()?;
        let mut options = EmbedOptions::default();
        options.dimensions = fields.count("dimensions", 1, u64::MAX >> 1)?;
        if let Some(prompt) = fields.take("prompt_name")? {
            options.prompt = Prompt::Named(prompt);
        }
        let inputs = inputs(fields.value(name), name)?;
        let mut warnings = Warnings::default();
        warnings.unknown(&fields);
        // A request of ids says all that the model is to read.
        if matches!(inputs.first(), Some(Input::Ids(_))) {
            options.prompt = Prompt::Text(String::new());
        }
        let embedder = embedder(app, of, &options)?;
        let one = |(index, input)| tokens(app, &embedder, input, (&format!("{name}[{index}]"), cuts));
        let texts = inputs.into_iter().enumerate().map(one).collect::<Result<_, _>>()?;
        Ok(Self { model, texts, options, base64, warnings })
    }

    fn tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// The embeddings, in the order of the texts.
    fn embed(&self, app: &App, turns: &mut Turns<'_>) -> Result<Vec<Vec<f32>>, ApiError> {
        let embedder = embedder(app, app.served.texts_of_embeddings()?, &self.options)?;
        if turns.next().is_break() {
            return Err(turns.why());
        }
        let made = embedder.embed_in_passes(&self.texts, || turns.next());
        made.map_err(|error| failed(app, &error))?.ok_or_else(|| turns.why())
    }
}

fn embedder<'a>(app: &'a App, of: &'a Texts, options: &EmbedOptions) -> Result<Embedder<'a>, ApiError> {
    let made = Embedder::new(&of.checkpoint, (&of.model, &app.served.tokenizer), options);
    made.map_err(|error| match error {
        Error::Dimensions { got, hidden_size } => {
            let problem = format!(
                "is {got}, but the model's embeddings have {hidden_size}: 1 to {hidden_size} can be kept"
            );
            ApiError::field("dimensions", problem)
        }
        Error::Prompt { name, known, .. } => {
            ApiError::field("prompt_name", format!("is {name}, but the model has {known}"))
        }
        other => failed(app, &other),
    })
}

/// An error of the model or its files.
pub(crate) fn failed(app: &App, error: &Error) -> ApiError {
    (app.log)(&format!("error: {error}"));
    ApiError::internal()
}

/// A text, or its ids.
enum Input {
    Text(String),
    Ids(Vec<u32>),
}

/// The tokens that the model reads.
fn tokens(
    app: &App,
    embedder: &Embedder<'_>,
    input: Input,
    (path, cuts): (&str, bool),
) -> Result<Vec<u32>, ApiError> {
    let ids = match input {
        Input::Text(text) => {
            let read = embedder.tokens(&text).map_err(|error| ApiError::field(path, error))?;
            if read.cut > 0 && !cuts {
                return Err(ApiError::context(read.ids.len() + read.cut, read.ids.len()));
            }
            read.ids
        }
        Input::Ids(ids) => {
            check(&app.served, &ids, path)?;
            let limit = embedder.most_tokens();
            if ids.len() > limit {
                return Err(ApiError::context(ids.len(), limit));
            }
            ids
        }
    };
    if ids.is_empty() { Err(ApiError::field(path, "has no tokens")) } else { Ok(ids) }
}

/// The inputs: a text, ids, or a list of either.
fn inputs(value: Option<Value>, name: &str) -> Result<Vec<Input>, ApiError> {
    let list = match value {
        None => return Err(ApiError::field(name, "is missing")),
        Some(Value::Array(list)) if list.iter().all(Value::is_number) && !list.is_empty() => {
            vec![Value::Array(list)]
        }
        Some(Value::Array(list)) => list,
        Some(other) => vec![other],
    };
    if list.is_empty() || list.len() > INPUTS {
        let problem = format!("has {} texts, but 1 to {INPUTS} may be", list.len());
        return Err(ApiError::field(name, problem));
    }
    let one = |(index, value): (usize, Value)| match value {
        Value::String(text) => Ok(Input::Text(text)),
        Value::Array(_) => serde_json::from_value(value).map(Input::Ids).map_err(|_| {
            ApiError::field(&format!("{name}[{index}]"), "must be a string or a list of token ids")
        }),
        other => {
            let problem =
                format!("must be a string, token ids, or a list of either, but is {}", kind(&other));
            Err(ApiError::field(name, problem))
        }
    };
    let inputs: Vec<Input> = list.into_iter().enumerate().map(one).collect::<Result<_, _>>()?;
    let ids = inputs.iter().filter(|input| matches!(input, Input::Ids(_))).count();
    match ids == 0 || ids == inputs.len() {
        true => Ok(inputs),
        false => Err(ApiError::field(name, "has texts and ids: one or the other is wanted")),
    }
}
