//! Token ids of texts and chats, for `tools/compare_tokenizers.py`.
//!
//! `tokens MODEL`: a GGUF file or a checkpoint's folder. A line of standard input is a JSON object:
//! `text` and `add_special`, or `messages`, `tools` and `add_generation_prompt`. A line of standard
//! output has `ids`, of a chat also the rendered `text`; or `error`.

use std::io::{BufRead, Write};
use std::path::Path;

use lowbit_files::{ChatTemplate, Checkpoint, FileError, Tokenizer};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model] = arguments.as_slice() else { return Err("tokens MODEL".into()) };
    let checkpoint = Checkpoint::open(Path::new(model))?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
    let mut template = ChatTemplate::from_checkpoint(&checkpoint)?;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let case: Value = serde_json::from_str(&line?)?;
        template = template.map(|template| template.with("tools", &case["tools"]));
        let answer = answer(&tokenizer, template.as_ref(), &case);
        let answer = answer.unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn answer(tokenizer: &Tokenizer, template: Option<&ChatTemplate>, case: &Value) -> Result<Value, FileError> {
    if let Some(text) = case["text"].as_str() {
        return Ok(json!({ "ids": tokenizer.encode(text, case["add_special"] == true)? }));
    }
    let Some(template) = template else { return Ok(json!({ "error": "no chat template" })) };
    let messages = case["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let text = template.render(messages, case["add_generation_prompt"] == true)?;
    Ok(json!({ "ids": tokenizer.encode_chat(&text)?, "text": text }))
}
