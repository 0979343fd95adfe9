//! One request to a server that speaks OpenAI's completions, and its times.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};
use ureq::Agent;

/// A server, and the model that it is asked for.
pub struct Client {
    agent: Agent,
    /// Without a slash at its end, and with `/v1`.
    base: String,
    key: Option<String>,
    pub model: String,
}

/// The content of a request.
#[derive(Clone, Debug)]
pub struct Asked {
    pub prompt: String,
    pub tokens: usize,
    /// Closes the connection after so many pieces of the reply.
    pub leave_after: Option<usize>,
}

/// A request's end.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Complete,
    /// This side closed the connection.
    Left,
    /// Status 429 or 503: the server had no room.
    Refused,
    Failed(String),
}

/// The outcome of a request.
#[derive(Clone, Debug)]
pub struct Reply {
    pub end: End,
    /// Until the first piece of text.
    pub first: Option<Duration>,
    /// Between pieces.
    pub gaps: Vec<Duration>,
    pub total: Duration,
    /// As the server counts them; 0 where it does not say.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub tokens: u64,
}

impl Client {
    /// Of the server at `url`, which may end in `/v1`. Without a name the first model that the
    /// server lists is asked for.
    ///
    /// # Errors
    /// Text for the user, when the server does not answer or has no model.
    pub fn new(url: &str, key: Option<String>, model: Option<String>) -> Result<Self, String> {
        let trimmed = url.trim_end_matches('/');
        let base = format!("{}/v1", trimmed.strip_suffix("/v1").unwrap_or(trimmed));
        let base = if base.contains("://") { base } else { format!("http://{base}") };
        let agent = Agent::new_with_config(Agent::config_builder().http_status_as_error(false).build());
        let mut client = Self { agent, base, key, model: model.clone().unwrap_or_default() };
        if model.is_none() {
            let models = client.get("models")?;
            let first = models["data"][0]["id"].as_str();
            client.model = first.ok_or(format!("{}/models lists no model", client.base))?.into();
        }
        Ok(client)
    }

    fn header(&self) -> String {
        self.key.as_ref().map(|key| format!("Bearer {key}")).unwrap_or_default()
    }

    fn get(&self, path: &str) -> Result<Value, String> {
        let url = format!("{}/{path}", self.base);
        let answer = self.agent.get(&url).header("Authorization", self.header()).call();
        let answer = answer.map_err(|error| format!("{url}: {error}"))?;
        parsed(&url, answer)
    }

    /// The prompt's tokens, as the server counts them.
    ///
    /// # Errors
    /// Text for the user.
    pub fn count(&self, prompt: &str) -> Result<u64, String> {
        let body = json!({ "model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0 });
        let url = format!("{}/completions", self.base);
        let answer = self.post(&url, &body).map_err(|error| format!("{url}: {error}"))?;
        let answer = parsed(&url, answer)?;
        let count = answer["usage"]["prompt_tokens"].as_u64();
        count.ok_or_else(|| format!("{url}: the answer has no usage.prompt_tokens"))
    }

    fn post(&self, url: &str, body: &Value) -> Result<ureq::http::Response<ureq::Body>, ureq::Error> {
        let request = self.agent.post(url).header("Authorization", self.header());
        request.header("Content-Type", "application/json").send(body.to_string())
    }

    /// Sends a request and reads its stream to the end.
    pub fn ask(&self, asked: &Asked) -> Reply {
        let start = Instant::now();
        let mut reply = Reply {
            end: End::Complete,
            first: None,
            gaps: vec![],
            total: Duration::ZERO,
            prompt_tokens: 0,
            cached_tokens: 0,
            tokens: 0,
        };
        reply.end = self.stream(asked, start, &mut reply).unwrap_or_else(End::Failed);
        reply.total = start.elapsed();
        reply
    }

    fn stream(&self, asked: &Asked, start: Instant, reply: &mut Reply) -> Result<End, String> {
        let body = json!({
            "model": self.model, "prompt": asked.prompt, "max_tokens": asked.tokens, "temperature": 0,
            "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true },
        });
        let answer = self.post(&format!("{}/completions", self.base), &body);
        let answer = answer.map_err(|error| error.to_string())?;
        match answer.status().as_u16() {
            200 => {}
            429 | 503 => return Ok(End::Refused),
            _ => return Err(problem(answer)),
        }
        let (mut last, mut pieces, mut ended) = (start, 0, false);
        for line in BufReader::new(answer.into_body().into_reader()).lines() {
            let line = line.map_err(|error| error.to_string())?;
            let Some(data) = line.strip_prefix("data:") else { continue };
            if data.trim() == "[DONE]" {
                return Ok(End::Complete);
            }
            let event: Value = serde_json::from_str(data).map_err(|error| format!("{error} in {data}"))?;
            if let Some(error) = event.get("error") {
                return Err(error["message"].as_str().unwrap_or(data).into());
            }
            let usage = &event["usage"];
            if usage.is_object() {
                let count = |value: &Value| value.as_u64().unwrap_or_default();
                reply.prompt_tokens = count(&usage["prompt_tokens"]);
                reply.tokens = count(&usage["completion_tokens"]);
                reply.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
            }
            let choice = &event["choices"][0];
            ended |= choice["finish_reason"].is_string();
            if choice["text"].as_str().is_none_or(str::is_empty) {
                continue;
            }
            let now = Instant::now();
            match reply.first {
                None => reply.first = Some(now - start),
                Some(_) => reply.gaps.push(now - last),
            }
            (last, pieces) = (now, pieces + 1);
            if asked.leave_after == Some(pieces) {
                return Ok(End::Left);
            }
        }
        // Some servers end a stream without [DONE].
        if ended { Ok(End::Complete) } else { Err("the stream broke off".into()) }
    }
}

fn parsed(url: &str, answer: ureq::http::Response<ureq::Body>) -> Result<Value, String> {
    if answer.status() != 200 {
        return Err(format!("{url}: {}", problem(answer)));
    }
    let text = answer.into_body().read_to_string().map_err(|error| format!("{url}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{url}: {error}"))
}

/// The status of an answer, and the message in it.
fn problem(answer: ureq::http::Response<ureq::Body>) -> String {
    let status = answer.status();
    let text = answer.into_body().read_to_string().unwrap_or_default();
    let body = serde_json::from_str::<Value>(&text).unwrap_or_default();
    match body["error"]["message"].as_str() {
        Some(message) => format!("{status}: {message}"),
        None => status.to_string(),
    }
}
