//! Answers in Anthropic's form, whole and streamed.

use crate::error::{ApiError, Dialect};
use crate::run::{End, Step, Tokens, Whole};
use crate::stream::Writer;
use lowbit::{Call, Event as Part, Piece};
use serde_json::{Value, json};

fn stop_reason(end: &End) -> (&'static str, Option<&str>) {
    match end {
        End::Stop => ("end_turn", None),
        End::StopText(text) => ("stop_sequence", Some(text)),
        End::Calls => ("tool_use", None),
        End::Length => ("max_tokens", None),
    }
}

/// Tokens that were cached do not count as input.
fn usage(tokens: &Tokens) -> Value {
    json!({
        "input_tokens": tokens.prompt - tokens.cached.min(tokens.prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.written,
    })
}

fn message(id: &str, model: &str, content: Vec<Value>, tokens: &Tokens) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(tokens),
    })
}

/// The arguments of a call, which are an object wherever the model wrote one.
fn input(call: &Call) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()))
}

/// The answer, whole.
pub(super) fn whole_message(id: &str, model: &str, whole: &Whole) -> Value {
    let mut content = vec![];
    if !whole.reasoning.is_empty() {
        content.push(json!({"type": "thinking", "thinking": whole.reasoning, "signature": ""}));
    }
    if !whole.content.is_empty() {
        content.push(json!({"type": "text", "text": whole.content}));
    }
    for call in &whole.calls {
        content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input(call)}));
    }
    let mut message = message(id, model, content, &whole.tokens);
    if let Some(end) = &whole.end {
        let (reason, text) = stop_reason(end);
        message["stop_reason"] = reason.into();
        message["stop_sequence"] = text.into();
    }
    message
}

/// The stream of an answer.
pub(super) struct MessageStream {
    id: String,
    model: String,
    /// Blocks that have begun.
    blocks: usize,
    open: Option<Block>,
}

/// The kind of the block that is written.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Thinking,
    Text,
}

fn event(name: &str, mut data: Value) -> String {
    data["type"] = name.into();
    format!("event: {name}\ndata: {data}\n\n")
}

impl MessageStream {
    pub(super) fn new(id: String, model: String) -> Self {
        Self { id, model, blocks: 0, open: None }
    }

    fn begin(&mut self, block: Value, out: &mut String) {
        self.close(out);
        out.push_str(&event("content_block_start", json!({"index": self.blocks, "content_block": block})));
        self.blocks += 1;
    }

    fn delta(&self, delta: Value, out: &mut String) {
        out.push_str(&event("content_block_delta", json!({"index": self.blocks - 1, "delta": delta})));
    }

    fn close(&mut self, out: &mut String) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            // Clients send it back with the thinking; nothing is signed here.
            self.delta(json!({"type": "signature_delta", "signature": ""}), out);
        }
        self.stop(out);
    }

    fn stop(&self, out: &mut String) {
        out.push_str(&event("content_block_stop", json!({"index": self.blocks - 1})));
    }

    fn text(&mut self, block: Block, text: &str, out: &mut String) {
        if self.open != Some(block) {
            let begin = match block {
                Block::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
                Block::Text => json!({"type": "text", "text": ""}),
            };
            self.begin(begin, out);
            self.open = Some(block);
        }
        let delta = match block {
            Block::Thinking => json!({"type": "thinking_delta", "thinking": text}),
            Block::Text => json!({"type": "text_delta", "text": text}),
        };
        self.delta(delta, out);
    }

    fn parts(&mut self, piece: Piece, out: &mut String) {
        for part in piece.events {
            match part {
                Part::Reasoning(text) => self.text(Block::Thinking, &text, out),
                Part::Content(text) => self.text(Block::Text, &text, out),
                Part::Call(call) => {
                    let begin = json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}});
                    self.begin(begin, out);
                    self.delta(json!({"type": "input_json_delta", "partial_json": call.arguments}), out);
                    self.stop(out);
                }
            }
        }
    }
}

impl Writer for MessageStream {
    fn step(&mut self, _: usize, step: Step, out: &mut String) {
        match step {
            Step::Started(tokens) => {
                let message = message(&self.id, &self.model, vec![], &tokens);
                out.push_str(&event("message_start", json!({"message": message})));
            }
            Step::Token { piece, .. } => self.parts(piece, out),
            Step::Ended { piece, end, tokens, .. } => {
                self.parts(piece, out);
                self.close(out);
                let (reason, text) = stop_reason(&end);
                let delta = json!({"stop_reason": reason, "stop_sequence": text});
                out.push_str(&event("message_delta", json!({"delta": delta, "usage": usage(&tokens)})));
                out.push_str(&event("message_stop", json!({})));
            }
            Step::Failed(error) => self.failed(&error, out),
        }
    }

    fn done(&mut self, _: &mut String) {}

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        out.push_str(&event("error", error.body(Dialect::Anthropic)));
    }

    fn ping(&self) -> String {
        "event: ping\ndata: {\"type\": \"ping\"}\n\n".into()
    }
}
