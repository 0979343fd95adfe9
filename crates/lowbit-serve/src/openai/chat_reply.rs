//! Answers to chats, whole and streamed.

use super::{Head, answer_usage, event, finish_reason, logprob};
use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::run::{End, Step, Tokens, Whole};
use crate::stream::Writer;
use lowbit::{Call, Event as Part, Piece, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The parts of an answer beside its text that a request asks for.
#[derive(Clone, Debug, Default)]
pub(super) struct Extras {
    pub(super) logprobs: bool,
    /// The prompt's ids, where ids are asked for.
    pub(super) prompt: Option<Arc<[u32]>>,
}

/// The answer to a chat.
pub(super) fn whole_chat(tokenizer: &Tokenizer, head: &Head, replies: &[Whole], extras: &Extras) -> Value {
    let choices = replies.iter().enumerate().map(|(index, whole)| {
        let mut message = json!({"role": "assistant", "content": whole.content});
        if !whole.reasoning.is_empty() {
            message["reasoning_content"] = whole.reasoning.clone().into();
        }
        if !whole.calls.is_empty() {
            message["tool_calls"] = whole.calls.iter().map(|call| json!(call)).collect();
            // As OpenAI has it, an answer of calls alone has no content.
            if whole.content.is_empty() {
                message["content"] = Value::Null;
            }
        }
        let logprobs = extras.logprobs.then(|| {
            let content: Vec<Value> = whole.logprobs.iter().map(|token| logprob(tokenizer, token)).collect();
            json!({"content": content, "refusal": null})
        });
        let end = whole.end.as_ref().map(finish_reason);
        let mut choice =
            json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": end});
        if extras.prompt.is_some() {
            choice["token_ids"] = json!(whole.ids);
        }
        choice
    });
    let mut value = head.object("chat.completion", choices.collect());
    if let Some(prompt) = &extras.prompt {
        value["prompt_token_ids"] = json!(prompt[..]);
    }
    let tokens: Vec<Tokens> = replies.iter().map(|whole| whole.tokens).collect();
    value["usage"] = super::usage(&tokens, tokens.len());
    value
}

/// A chat's stream.
pub(super) struct ChatStream {
    app: Arc<App>,
    head: Head,
    extras: Extras,
    include_usage: bool,
    choices: Vec<Choice>,
}

/// One of the replies.
#[derive(Default)]
struct Choice {
    /// Calls so far.
    calls: usize,
    /// Log-probabilities of tokens whose text is held back, and their ids.
    logprobs: Vec<Value>,
    ids: Vec<u32>,
    tokens: Tokens,
}

impl ChatStream {
    pub(super) fn new(
        app: Arc<App>,
        head: Head,
        (count, extras): (usize, Extras),
        include_usage: bool,
    ) -> Self {
        let choices = (0..count).map(|_| Choice::default()).collect();
        Self { app, head, extras, include_usage, choices }
    }

    /// A chunk, with the log-probabilities and the ids of the tokens since the last one.
    fn chunk(&mut self, index: usize, delta: Value, end: Option<&End>) -> String {
        event(&self.object(index, delta, end))
    }

    /// The same, as an object.
    fn object(&mut self, index: usize, delta: Value, end: Option<&End>) -> Value {
        let Choice { logprobs, ids, .. } = &mut self.choices[index];
        let (list, ids) = (std::mem::take(logprobs), std::mem::take(ids));
        let logprobs = (!list.is_empty()).then(|| json!({"content": list, "refusal": null}));
        let mut choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": end.map(finish_reason),
        });
        if self.extras.prompt.is_some() {
            choice["token_ids"] = json!(ids);
        }
        let mut chunk = self.head.object("chat.completion.chunk", vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The first chunk of a reply; the first of all has the prompt's ids.
    fn begun(&mut self, index: usize) -> String {
        let prompt = self.extras.prompt.clone().filter(|_| index == 0);
        let mut chunk = self.object(index, json!({"role": "assistant", "content": ""}), None);
        if let Some(prompt) = prompt {
            chunk["prompt_token_ids"] = json!(prompt[..]);
        }
        event(&chunk)
    }

    /// A chunk for each part of a piece.
    fn parts(&mut self, index: usize, piece: Piece, out: &mut String) {
        for part in piece.events {
            let delta = match part {
                Part::Reasoning(text) => json!({"reasoning_content": text}),
                Part::Content(text) => json!({"content": text}),
                Part::Call(call) => {
                    let place = self.choices[index].calls;
                    self.choices[index].calls += 1;
                    json!({"tool_calls": [numbered(&call, place)]})
                }
            };
            out.push_str(&self.chunk(index, delta, None));
        }
    }
}

/// A call with its place among the reply's.
fn numbered(call: &Call, place: usize) -> Value {
    let mut numbered = Map::from_iter([("index".to_string(), json!(place))]);
    if let Value::Object(call) = json!(call) {
        numbered.extend(call);
    }
    Value::Object(numbered)
}

impl Writer for ChatStream {
    fn step(&mut self, index: usize, step: Step, out: &mut String) {
        match step {
            Step::Started(_) => {
                out.push_str(&self.begun(index));
            }
            Step::Token { id, piece, logprobs } => {
                self.choices[index].ids.push(id);
                if let Some(token) = logprobs {
                    self.choices[index].logprobs.push(logprob(&self.app.served.tokenizer, &token));
                }
                self.parts(index, piece, out);
            }
            Step::Ended { id, piece, end, tokens } => {
                self.choices[index].tokens = tokens;
                self.choices[index].ids.extend(id);
                self.parts(index, piece, out);
                out.push_str(&self.chunk(index, json!({}), Some(&end)));
            }
            Step::Failed(error) => self.failed(&error, out),
        }
    }

    fn done(&mut self, out: &mut String) {
        if self.include_usage {
            let tokens: Vec<Tokens> = self.choices.iter().map(|choice| choice.tokens).collect();
            out.push_str(&answer_usage(&self.head, "chat.completion.chunk", &tokens, tokens.len()));
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        out.push_str(&event(&error.body(Dialect::OpenAi)));
    }
}
