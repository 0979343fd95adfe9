//! `/v1/completions`: a text that goes on.

use super::chat::{refuse_others, streaming};
use super::{Head, Warnings, answer_usage, event, finish_reason, finite, spelled, usage};
use crate::app::{App, Host, Record};
use crate::body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, kind};
use crate::form::{hold, wanted};
use crate::options::{LOGPROBS, PROMPTS, REPLIES};
use crate::prompt::{check, encode};
use crate::run::{End, Job, Replies, Step, Tokens, Whole};
use crate::sampling::{max_tokens, model, options, stops};
use crate::stream::{Writer, stream};
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use lowbit::Tokenizer;
use lowbit_engine::TokenLogprobs;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// OpenAI's number of tokens where a request names none.
const MAX_TOKENS: usize = 16;

/// Fields that say nothing of the reply.
pub(crate) const WITHOUT_EFFECT: [&str; 5] = ["user", "store", "metadata", "cache_prompt", "cache_key"];

struct Asked {
    jobs: Vec<Job>,
    /// The texts before the replies, where the client wants them back.
    echo: Option<Vec<String>>,
    /// Replies per prompt.
    n: usize,
    model: String,
    stream: bool,
    include_usage: bool,
    logprobs: bool,
    /// True if the prompts' and replies' ids are asked for.
    ids: bool,
    warnings: Warnings,
}

/// Goes on with a text, or several.
pub(crate) async fn completions(
    State(host): State<Arc<Host>>,
    Extension(record): Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, Asked::read).await?;
    let texts = Texts::new(&asked);
    let head = Head::new(&app, "cmpl-", asked.model);
    if asked.stream {
        let (include_usage, n) = (asked.include_usage, asked.n);
        let writer = TextStream { app: app.clone(), head, texts, include_usage, n };
        return Ok(asked.warnings.on(stream(app, record, asked.jobs, writer).await?));
    }
    let whole = Whole::all(Replies::submit(&app, &record, &asked.jobs)?).await?;
    let tokens: Vec<Tokens> = whole.iter().map(|whole| whole.tokens).collect();
    let mut texts = texts;
    let choices = whole.into_iter().enumerate().map(|(index, whole)| {
        texts.logprobs(&app.served.tokenizer, index, &whole.logprobs);
        texts.choices[index].ids = whole.ids;
        texts.choice(index, &whole.text, whole.end.as_ref())
    });
    let mut value = head.object("text_completion", choices.collect());
    value["usage"] = usage(&tokens, asked.n);
    Ok(asked.warnings.on(super::answer(&value)))
}

impl Asked {
    fn read(app: &App, mut fields: Fields) -> Result<Self, ApiError> {
        let served = &app.served;
        let mut warnings = Warnings::default();
        let model = model(&mut fields, served)?;
        let prompts = prompts(app, fields.value("prompt"))?;
        let n = fields.count("n", 1, REPLIES)?.unwrap_or(1);
        if fields.count("best_of", 1, u64::MAX >> 1)?.is_some_and(|best_of| best_of > n) {
            return Err(ApiError::unsupported(
                "best_of",
                format!("is more than n ({n}): all replies are sent"),
            ));
        }
        let mut options = options(&mut fields, served, app.random())?;
        options.max_tokens = max_tokens(&mut fields, &["max_tokens"], 0)?.unwrap_or(MAX_TOKENS);
        let stops = stops(&mut fields, "stop")?;
        let logprobs = fields.count("logprobs", 0, LOGPROBS)?;
        let (stream, include_usage) = streaming(&mut fields)?;
        let echo = fields.take("echo")?.unwrap_or(false);
        let ids = fields.take("return_token_ids")?.unwrap_or(false);
        if echo && logprobs.is_some() {
            return Err(ApiError::unsupported("echo", "a prompt's log-probabilities are not computed here"));
        }
        fields.refuse(&["suffix"], "texts are not filled in here")?;
        hold(served, &mut options, wanted(&mut fields)?.as_ref(), None)?;
        refuse_others(&mut fields)?;
        fields.ignore(&WITHOUT_EFFECT);
        warnings.unknown(&fields);
        let each = |ids: &Arc<[u32]>, index: usize| {
            let mut options = options.clone();
            options.sampling.seed = options.sampling.seed.wrapping_add(index as u64);
            Job {
                prompt: ids.clone(),
                options,
                logprobs,
                checkpoints: vec![],
                syntax: served.plain.clone(),
                stops: stops.clone(),
                calls: 0,
                one_call: false,
            }
        };
        let jobs = prompts.iter().flat_map(|(ids, _)| (0..n).map(|index| each(ids, index))).collect();
        let echo = echo.then(|| prompts.iter().flat_map(|(_, text)| vec![text.clone(); n]).collect());
        let logprobs = logprobs.is_some();
        Ok(Self { jobs, echo, n, model, stream, include_usage, logprobs, ids, warnings })
    }
}

/// A prompt's ids, and its text.
type Prompt = (Arc<[u32]>, String);

/// The prompts: a text, ids, or a list of either.
fn prompts(app: &App, value: Option<Value>) -> Result<Vec<Prompt>, ApiError> {
    let prompts = match value {
        None => return Err(ApiError::field("prompt", "is missing")),
        Some(Value::Array(list)) if list.iter().all(Value::is_number) => vec![Value::Array(list)],
        Some(Value::Array(list)) => list,
        Some(other) => vec![other],
    };
    if prompts.len() > PROMPTS {
        return Err(ApiError::field(
            "prompt",
            format!("has {} prompts, but {PROMPTS} may be", prompts.len()),
        ));
    }
    prompts.into_iter().map(|prompt| one_prompt(app, prompt)).collect()
}

fn one_prompt(app: &App, prompt: Value) -> Result<Prompt, ApiError> {
    let tokenizer = &app.served.tokenizer;
    let (ids, text) = match prompt {
        Value::String(text) => (encode(|| tokenizer.encode(&text, true))?, text),
        Value::Array(_) => {
            let ids: Vec<u32> = serde_json::from_value(prompt)
                .map_err(|_| ApiError::field("prompt", "must be a list of token ids"))?;
            check(&app.served, &ids, "prompt")?;
            let text = tokenizer.decode(&ids).unwrap_or_default();
            (ids, text)
        }
        other => {
            let problem =
                format!("must be a string, token ids, or a list of either, but is {}", kind(&other));
            return Err(ApiError::field("prompt", problem));
        }
    };
    match ids.is_empty() {
        true => Err(ApiError::field("prompt", "has no tokens")),
        false => Ok((ids.into(), text)),
    }
}

/// The choices' texts so far.
struct Texts {
    choices: Vec<Text>,
    logprobs: bool,
    ids: bool,
}

#[derive(Default)]
struct Text {
    /// The prompt, until it was sent.
    echo: String,
    /// The prompt's ids, until they were sent, where they are asked for.
    prompt: Option<Arc<[u32]>>,
    /// Tokens that were not sent.
    ids: Vec<u32>,
    /// Characters of the tokens so far.
    offset: usize,
    logprobs: Logprobs,
    tokens: Tokens,
}

/// Log-probabilities of tokens that were not sent.
#[derive(Default)]
struct Logprobs {
    tokens: Vec<Value>,
    of_tokens: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
}

impl Texts {
    fn new(asked: &Asked) -> Self {
        let mut choices: Vec<Text> = asked.jobs.iter().map(|_| Text::default()).collect();
        for (choice, text) in choices.iter_mut().zip(asked.echo.iter().flatten()) {
            choice.echo.clone_from(text);
        }
        for (choice, job) in choices.iter_mut().zip(&asked.jobs).filter(|_| asked.ids) {
            choice.prompt = Some(job.prompt.clone());
        }
        Self { choices, logprobs: asked.logprobs, ids: asked.ids }
    }

    fn logprobs(&mut self, tokenizer: &Tokenizer, index: usize, tokens: &[TokenLogprobs]) {
        let Text { offset, logprobs, .. } = &mut self.choices[index];
        for token in tokens {
            let text = spelled(tokenizer, token.token.id);
            logprobs.offsets.push((*offset).into());
            *offset += text.chars().count();
            logprobs.tokens.push(text.into());
            logprobs.of_tokens.push(finite(token.token.logprob).into());
            let top = token.top.iter().map(|of| (spelled(tokenizer, of.id), finite(of.logprob).into()));
            logprobs.top.push(Value::Object(Map::from_iter(top)));
        }
    }

    fn choice(&mut self, index: usize, text: &str, end: Option<&End>) -> Value {
        let choice = &mut self.choices[index];
        let text = std::mem::take(&mut choice.echo) + text;
        let logprobs = self.logprobs.then(|| std::mem::take(&mut choice.logprobs)).map(|logprobs| {
            json!({
                "tokens": logprobs.tokens,
                "token_logprobs": logprobs.of_tokens,
                "top_logprobs": logprobs.top,
                "text_offset": logprobs.offsets,
            })
        });
        let end = end.map(finish_reason);
        let mut value = json!({"text": text, "index": index, "logprobs": logprobs, "finish_reason": end});
        if self.ids {
            value["token_ids"] = json!(std::mem::take(&mut choice.ids));
            if let Some(prompt) = choice.prompt.take() {
                value["prompt_token_ids"] = json!(prompt[..]);
            }
        }
        value
    }
}

struct TextStream {
    app: Arc<App>,
    head: Head,
    texts: Texts,
    include_usage: bool,
    n: usize,
}

impl TextStream {
    fn chunk(&mut self, index: usize, text: &str, end: Option<&End>) -> String {
        let choice = self.texts.choice(index, text, end);
        let mut chunk = self.head.object("text_completion", vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        event(&chunk)
    }
}

impl Writer for TextStream {
    fn step(&mut self, index: usize, step: Step, out: &mut String) {
        match step {
            Step::Started(_) => {}
            Step::Token { id, piece, logprobs } => {
                self.texts.choices[index].ids.push(id);
                let tokens: Vec<_> = logprobs.into_iter().collect();
                self.texts.logprobs(&self.app.served.tokenizer, index, &tokens);
                if !piece.text.is_empty() {
                    out.push_str(&self.chunk(index, &piece.text, None));
                }
            }
            Step::Ended { id, piece, end, tokens } => {
                self.texts.choices[index].tokens = tokens;
                self.texts.choices[index].ids.extend(id);
                out.push_str(&self.chunk(index, &piece.text, Some(&end)));
            }
            Step::Failed(error) => self.failed(&error, out),
        }
    }

    fn done(&mut self, out: &mut String) {
        if self.include_usage {
            let tokens: Vec<Tokens> = self.texts.choices.iter().map(|choice| choice.tokens).collect();
            out.push_str(&answer_usage(&self.head, "text_completion", &tokens, self.n));
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        out.push_str(&event(&error.body(Dialect::OpenAi)));
    }
}
