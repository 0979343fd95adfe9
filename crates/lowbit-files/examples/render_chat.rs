//! Renders chats for `tools/compare_templates.py`: a line of standard input is a JSON object with
//! `template`, `messages`, `add_generation_prompt` and `variables`; a line of standard output has
//! its `text` or its `error`.

use std::io::{BufRead, Write};
use std::path::Path;

use lowbit_files::{ChatTemplate, FileError};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match render(&serde_json::from_str(&line?)?) {
            Ok(text) => json!({ "text": text }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn render(case: &Value) -> Result<String, FileError> {
    let mut template = ChatTemplate::new(case["template"].as_str().unwrap_or(""), Path::new("template"))?;
    for (name, value) in case["variables"].as_object().into_iter().flatten() {
        template = template.with(name, value);
    }
    let messages = case["messages"].as_array().map_or(&[][..], Vec::as_slice);
    template.render(messages, case["add_generation_prompt"] == true)
}
