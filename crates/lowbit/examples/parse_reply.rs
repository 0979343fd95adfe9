//! Takes replies apart for `tools/compare_calls.py`: a line of standard input is a JSON object with
//! `template`, `tools`, the text of the `prompt` and of the `reply`; a line of standard output has
//! its `reasoning`, `content` and `calls`.

use lowbit::{ChatTemplate, Event, FileError, Syntax};
use serde_json::{Value, json};
use std::io::{BufRead, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        writeln!(out, "{}", parts(&serde_json::from_str(&line?)?)?)?;
    }
    Ok(())
}

fn parts(case: &Value) -> Result<Value, FileError> {
    let text = |key: &str| case[key].as_str().unwrap_or_default();
    let template = ChatTemplate::new(text("template"), "template".as_ref())?.with("tools", &case["tools"]);
    let syntax = Syntax::new(&template, None);
    let mut parser = syntax.parser(text("prompt"), 0);
    // Character by character, as a model might write it.
    let mut events: Vec<Event> =
        text("reply").chars().flat_map(|c| parser.text(c.encode_utf8(&mut [0; 4]))).collect();
    events.extend(parser.finish());
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), vec![]);
    for event in events {
        match event {
            Event::Reasoning(text) => reasoning += &text,
            Event::Content(text) => content += &text,
            Event::Call(call) => calls.push(json!({ "name": call.name, "arguments": call.arguments })),
        }
    }
    Ok(json!({ "reasoning": reasoning, "content": content, "calls": calls }))
}
