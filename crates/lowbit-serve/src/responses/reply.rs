//! Answers in the form of `/v1/responses`, whole and streamed.

use crate::error::ApiError;
use crate::run::{End, Step, Tokens, Whole};
use crate::stream::Writer;
use lowbit::{Call, Event as Part, Piece};
use serde_json::{Value, json};

/// The fields of a request that its answer repeats.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) instructions: Option<String>,
    pub(super) tools: Value,
    pub(super) choice: Value,
    /// The form of its text.
    pub(super) format: Value,
    pub(super) one_call: bool,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
}

impl Head {
    fn response(&self, status: &str, output: Vec<Value>, tokens: Option<&Tokens>) -> Value {
        let usage = tokens.map(|tokens| {
            json!({
                "input_tokens": tokens.prompt,
                "input_tokens_details": {"cached_tokens": tokens.cached},
                "output_tokens": tokens.written,
                "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
                "total_tokens": tokens.prompt + tokens.written,
            })
        });
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "model": self.model,
            "instructions": self.instructions,
            "output": output,
            "usage": usage,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": self.tools,
            "tool_choice": self.choice,
            "parallel_tool_calls": !self.one_call,
            "text": {"format": self.format},
            "metadata": {},
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
        })
    }
}

fn status(end: Option<&End>) -> &'static str {
    if end == Some(&End::Length) { "incomplete" } else { "completed" }
}

/// The kinds of items that are written piece by piece.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Reasoning,
    Message,
}

impl Kind {
    fn part(self, text: &str) -> Value {
        match self {
            Self::Reasoning => json!({"type": "reasoning_text", "text": text}),
            Self::Message => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        }
    }

    fn item(self, id: &str, status: &str, text: Option<&str>) -> Value {
        let content: Vec<Value> = text.map(|text| self.part(text)).into_iter().collect();
        match self {
            Self::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            Self::Message => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
        }
    }

    /// The middle of the names of its events.
    fn name(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning_text",
            Self::Message => "output_text",
        }
    }
}

fn call_item(id: &str, status: &str, call: &Call, arguments: &str) -> Value {
    json!({
        "id": id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments,
    })
}

/// The id of the item at this place.
fn item_id(response: &str, place: usize) -> String {
    format!("item_{}_{place}", response.trim_start_matches("resp_"))
}

/// The answer, whole.
pub(super) fn whole_response(head: &Head, whole: &Whole) -> Value {
    let status = status(whole.end.as_ref());
    let mut output = vec![];
    for (kind, text) in [(Kind::Reasoning, &whole.reasoning), (Kind::Message, &whole.content)] {
        if !text.is_empty() {
            output.push(kind.item(&item_id(&head.id, output.len()), status, Some(text)));
        }
    }
    for call in &whole.calls {
        output.push(call_item(&item_id(&head.id, output.len()), "completed", call, &call.arguments));
    }
    head.response(status, output, Some(&whole.tokens))
}

/// The stream of an answer.
pub(super) struct ResponseStream {
    head: Head,
    /// Events so far.
    sequence: usize,
    /// Items that are whole.
    output: Vec<Value>,
    open: Option<(Kind, String)>,
}

impl ResponseStream {
    pub(super) fn new(head: Head) -> Self {
        Self { head, sequence: 0, output: vec![], open: None }
    }

    fn event(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.push_str(&format!("event: {name}\ndata: {data}\n\n"));
    }

    /// An event of the item that is written.
    fn of_item(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["output_index"] = self.output.len().into();
        self.event(name, data, out);
    }

    fn id(&self) -> String {
        item_id(&self.head.id, self.output.len())
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut String) {
        let id = self.id();
        if self.open.as_ref().is_none_or(|(open, _)| *open != kind) {
            self.close("completed", out);
            let id = self.id();
            self.open = Some((kind, String::new()));
            let item = kind.item(&id, "in_progress", None);
            self.of_item("response.output_item.added", json!({"item": item}), out);
            let part = json!({"item_id": id, "content_index": 0, "part": kind.part("")});
            self.of_item("response.content_part.added", part, out);
            return self.text(kind, text, out);
        }
        if let Some((_, written)) = &mut self.open {
            written.push_str(text);
        }
        let mut delta = json!({"item_id": id, "content_index": 0, "delta": text});
        if kind == Kind::Message {
            delta["logprobs"] = json!([]);
        }
        self.of_item(&format!("response.{}.delta", kind.name()), delta, out);
    }

    /// Ends the item that is written.
    fn close(&mut self, status: &str, out: &mut String) {
        let Some((kind, text)) = self.open.take() else { return };
        let id = self.id();
        let mut done = json!({"item_id": id, "content_index": 0, "text": text});
        if kind == Kind::Message {
            done["logprobs"] = json!([]);
        }
        self.of_item(&format!("response.{}.done", kind.name()), done, out);
        let part = json!({"item_id": id, "content_index": 0, "part": kind.part(&text)});
        self.of_item("response.content_part.done", part, out);
        let item = kind.item(&id, status, Some(&text));
        self.of_item("response.output_item.done", json!({"item": item}), out);
        self.output.push(item);
    }

    fn call(&mut self, call: &Call, out: &mut String) {
        self.close("completed", out);
        let id = self.id();
        let begun = call_item(&id, "in_progress", call, "");
        self.of_item("response.output_item.added", json!({"item": begun}), out);
        let delta = json!({"item_id": id, "delta": call.arguments});
        self.of_item("response.function_call_arguments.delta", delta, out);
        let done = json!({"item_id": id, "name": call.name, "arguments": call.arguments});
        self.of_item("response.function_call_arguments.done", done, out);
        let item = call_item(&id, "completed", call, &call.arguments);
        self.of_item("response.output_item.done", json!({"item": item}), out);
        self.output.push(item);
    }

    fn parts(&mut self, piece: Piece, out: &mut String) {
        for part in piece.events {
            match part {
                Part::Reasoning(text) => self.text(Kind::Reasoning, &text, out),
                Part::Content(text) => self.text(Kind::Message, &text, out),
                Part::Call(call) => self.call(&call, out),
            }
        }
    }
}

impl Writer for ResponseStream {
    fn step(&mut self, _: usize, step: Step, out: &mut String) {
        match step {
            Step::Started(_) => {
                let response = self.head.response("in_progress", vec![], None);
                self.event("response.created", json!({"response": response}), out);
                self.event("response.in_progress", json!({"response": response}), out);
            }
            Step::Token { piece, .. } => self.parts(piece, out),
            Step::Ended { piece, end, tokens, .. } => {
                self.parts(piece, out);
                let status = status(Some(&end));
                self.close(status, out);
                let response = self.head.response(status, self.output.clone(), Some(&tokens));
                self.event(&format!("response.{status}"), json!({"response": response}), out);
            }
            Step::Failed(error) => self.failed(&error, out),
        }
    }

    fn done(&mut self, _: &mut String) {}

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        let mut response = self.head.response("failed", self.output.clone(), None);
        response["error"] = json!({"code": error.code, "message": error.message});
        self.event("response.failed", json!({"response": response}), out);
    }
}
