//! A client of HTTP/1.1 and of streams of events, and the accumulators of OpenAI's and Anthropic's
//! clients.

use super::Running;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// An answer, whole.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The value of an answer that must be 200.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The data of a stream's events, comments left out.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        let text = self.text();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

impl Running {
    /// Sends bytes and returns the open connection.
    pub fn open(&self, bytes: &[u8]) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(bytes).unwrap();
        BufReader::new(stream)
    }

    /// Sends a request whole, without waiting for its answer.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> BufReader<TcpStream> {
        let mut text =
            format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            text += &format!("host: {}\r\n", self.address);
        }
        headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
        self.open(&[text.as_bytes(), b"\r\n", body].concat())
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        read(&mut self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, &[], body.to_string().as_bytes())
    }

    /// A chat of one message, with these further fields.
    pub fn chat(&self, further: &Value) -> Answer {
        self.post("/v1/chat/completions", &chat(further))
    }

    pub fn message(&self, further: &Value) -> Answer {
        self.post("/v1/messages", &message(further))
    }
}

fn with(mut body: Value, further: &Value) -> Value {
    further.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

pub fn chat(further: &Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}]}), further)
}

pub fn message(further: &Value) -> Value {
    with(json!({"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}), further)
}

/// A header's lines, with the status.
pub fn read_head(reader: &mut BufReader<TcpStream>) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status: {line:?}")).parse().unwrap();
    let mut headers = vec![];
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.into(), value.into())),
            None => return (status, headers),
        }
    }
}

/// The next chunk of a body; empty at its end.
pub fn read_chunk(reader: &mut BufReader<TcpStream>) -> Vec<u8> {
    let mut size = String::new();
    reader.read_line(&mut size).unwrap();
    let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
    let mut chunk = vec![0; size + 2];
    _ = reader.read_exact(&mut chunk);
    chunk.truncate(size);
    chunk
}

/// An answer, to its end.
pub fn read(reader: &mut BufReader<TcpStream>) -> Answer {
    let (status, headers) = read_head(reader);
    let mut answer = Answer { status, headers, body: vec![] };
    if answer.header("transfer-encoding") == Some("chunked") {
        loop {
            let chunk = read_chunk(reader);
            if chunk.is_empty() {
                return answer;
            }
            answer.body.extend(chunk);
        }
    }
    let length = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
    answer.body = vec![0; length];
    reader.read_exact(&mut answer.body).unwrap();
    answer
}

/// A reply as a client puts it together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    pub reasoning: String,
    pub content: String,
    /// Ids, names and arguments.
    pub calls: Vec<(String, String, Value)>,
    pub finish: String,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().into()
}

fn arguments(value: &str) -> Value {
    serde_json::from_str(value).unwrap_or_else(|_| value.into())
}

/// As OpenAI's client reads an answer.
pub fn openai(answer: &Value) -> Said {
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let function = &call["function"];
        (text(&call["id"]), text(&function["name"]), arguments(function["arguments"].as_str().unwrap()))
    });
    Said {
        reasoning: text(&message["reasoning_content"]),
        content: text(&message["content"]),
        calls: calls.collect(),
        finish: text(&choice["finish_reason"]),
    }
}

/// As OpenAI's client adds up the chunks of a stream.
pub fn openai_stream(events: &[Value]) -> Said {
    let (mut said, mut calls): (Said, Vec<[String; 3]>) = Default::default();
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    for choice in choices.filter(|choice| choice["index"] == 0) {
        assert_eq!(said.finish, "", "nothing follows the end");
        let delta = &choice["delta"];
        said.reasoning += &text(&delta["reasoning_content"]);
        said.content += &text(&delta["content"]);
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            assert!(index <= calls.len());
            calls.resize(calls.len().max(index + 1), Default::default());
            calls[index][0] += &text(&call["id"]);
            calls[index][1] += &text(&call["function"]["name"]);
            calls[index][2] += &text(&call["function"]["arguments"]);
        }
        said.finish = text(&choice["finish_reason"]);
    }
    let calls = calls.into_iter().map(|[id, name, text]| (id, name, arguments(&text)));
    Said { calls: calls.collect(), ..said }
}

/// As Anthropic's client reads a message.
pub fn anthropic(message: &Value) -> Said {
    let mut said = Said { finish: text(&message["stop_reason"]), ..Said::default() };
    for block in message["content"].as_array().unwrap() {
        match block["type"].as_str().unwrap() {
            "thinking" => said.reasoning += block["thinking"].as_str().unwrap(),
            "text" => said.content += block["text"].as_str().unwrap(),
            "tool_use" => said.calls.push((text(&block["id"]), text(&block["name"]), block["input"].clone())),
            other => panic!("{other}"),
        }
    }
    said
}

/// As Anthropic's client adds up the events of a stream, whose order it checks.
pub fn anthropic_stream(events: &[Value]) -> Said {
    let events: Vec<&Value> = events.iter().filter(|event| event["type"] != "ping").collect();
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let mut message = events[0]["message"].clone();
    let (mut open, mut json) = (false, String::new());
    for event in &events[1..events.len() - 1] {
        let content = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!open && event["index"] == content.len());
                content.push(event["content_block"].clone());
                (open, json) = (true, String::new());
            }
            "content_block_delta" => {
                assert!(open && event["index"] == content.len() - 1);
                let (block, delta) = (content.last_mut().unwrap(), &event["delta"]);
                let mut add = |name: &str| block[name] = (text(&block[name]) + &text(&delta[name])).into();
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add("text"),
                    "thinking_delta" => add("thinking"),
                    "signature_delta" => add("signature"),
                    "input_json_delta" => {
                        json += delta["partial_json"].as_str().unwrap();
                        block["input"] = arguments(&json);
                    }
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                assert!(std::mem::take(&mut open) && event["index"] == content.len() - 1);
            }
            "message_delta" => {
                assert!(!open);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            other => panic!("{other}"),
        }
    }
    anthropic(&message)
}
