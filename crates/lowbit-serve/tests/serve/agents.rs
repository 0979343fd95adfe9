//! Requests in the form that coding agents send them.

use crate::support::{Running, Scripted};
use serde_json::{Value, json};

/// A function's schema, with the keywords that agents' generators of schemas write.
fn schema(fields: &[(&str, Value)], required: &[&str]) -> Value {
    let properties: serde_json::Map<String, Value> =
        fields.iter().map(|(name, of)| ((*name).to_string(), of.clone())).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn text(about: &str) -> Value {
    json!({"type": "string", "description": about})
}

/// The prompt of the last request, as the model reads it.
fn prompt(server: &Running) -> String {
    let requests = server.engine.requests.lock().unwrap();
    server.tokenizer.decode(&requests.last().unwrap().prompt).unwrap()
}

/// A request in the form of OpenAI's Codex: `/v1/responses` with functions in its flat form, beside
/// kinds of tools that only OpenAI's models know.
fn of_codex() -> Value {
    let command =
        json!({"type": "array", "items": {"type": "string"}, "description": "The words of the command"});
    let step = schema(
        &[("step", json!({"type": "string"})), ("status", json!({"enum": ["pending", "completed"]}))],
        &["step", "status"],
    );
    let plan = json!({"type": "array", "items": step});
    let grammar = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"*** Begin Patch\""});
    let function = |name: &str, parameters: Value| json!({"type": "function", "name": name, "description": "Does it.", "strict": false, "parameters": parameters});
    json!({
        "model": "test",
        "instructions": "You work on a repository.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you push."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run the tests."}]},
            {"type": "reasoning", "summary": [], "content": null, "encrypted_content": "gAAAA"},
            {"type": "function_call", "name": "shell", "arguments": "{\"command\":[\"ls\"]}", "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "Cargo.toml"},
        ],
        "tools": [
            function("shell", schema(&[("command", command), ("workdir", text("Where")), ("timeout_ms", json!({"type": "number"}))], &["command"])),
            function("update_plan", schema(&[("explanation", text("Why")), ("plan", plan)], &["plan"])),
            {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar},
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": false},
            {"type": "image_generation", "output_format": "png"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": false,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": false,
        "stream": true,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198",
        "text": {"verbosity": "medium"},
    })
}

/// A request in the form of Anthropic's Claude Code: blocks with marks of the cache, schemas with
/// their dialect, and tools that only Anthropic's servers run.
fn of_claude_code() -> Value {
    let mark = json!({"type": "ephemeral"});
    let function = |name: &str, mut parameters: Value| {
        parameters["$schema"] = "http://json-schema.org/draft-07/schema#".into();
        json!({"name": name, "description": "Does it.", "input_schema": parameters})
    };
    let mut last = function("Read", schema(&[("file_path", text("The file"))], &["file_path"]));
    last["cache_control"] = mark.clone();
    let mut custom = function("mcp__files__search", schema(&[("pattern", text("What"))], &["pattern"]));
    custom["type"] = "custom".into();
    let text_block = |text: &str| json!({"type": "text", "text": text, "cache_control": mark});
    json!({
        "model": "test",
        "max_tokens": 100,
        "system": [text_block("You work on a repository.")],
        "messages": [
            {"role": "user", "content": [text_block("Run the tests.")]},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Cargo.toml"}],
                    "is_error": false, "cache_control": mark},
            ]},
        ],
        "tools": [
            function("Bash", schema(&[("command", text("The command")), ("timeout", json!({"type": "number", "maximum": 600_000}))], &["command"])),
            custom,
            last,
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "a_kind_of_next_year", "name": "unheard_of"},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "disabled"},
        "stream": true,
    })
}

#[test]
fn t23_tools_of_codex_are_taken_and_unknown_kinds_are_skipped_with_a_warning() {
    let server = Running::new(Scripted::new(vec![]));
    // With an effort the prompt opens the reasoning.
    server.says(
        r#"I run them.</think><tool_call>{"name": "shell", "arguments": {"command": ["cargo", "test"]}}</tool_call>"#,
    );
    let answer = server.post("/v1/responses", &of_codex());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let warning = answer.header("warning").unwrap().to_string();
    for (index, kind) in [(2, "custom"), (3, "local_shell"), (4, "web_search"), (5, "image_generation")] {
        let want = format!("tools[{index}]: a tool of type {kind} is left out");
        assert!(warning.contains(&want), "{warning}");
    }
    assert!(!warning.contains("unknown field"), "{warning}");
    let events = answer.events();
    let done = events.iter().find(|event| event["type"] == "response.completed").unwrap();
    let [thought, output] = &done["response"]["output"].as_array().unwrap()[..] else { panic!("{done}") };
    assert_eq!((&thought["type"], &output["type"]), (&json!("reasoning"), &json!("function_call")));
    assert_eq!(output["name"], "shell");
    let arguments: Value = serde_json::from_str(output["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"command": ["cargo", "test"]}));
    let text = prompt(&server);
    for known in
        ["\"shell\"", "\"update_plan\"", "You work on a repository.", "Ask before you push.", "Cargo.toml"]
    {
        assert!(text.contains(known), "{known}: {text}");
    }
    for skipped in ["apply_patch", "web_search", "gAAAA"] {
        assert!(!text.contains(skipped), "{skipped}: {text}");
    }
}

#[test]
fn t23_tools_of_claude_code_are_taken_and_unknown_kinds_are_skipped_with_a_warning() {
    let server = Running::new(Scripted::new(vec![]));
    server.says(r#"<tool_call>{"name": "Bash", "arguments": {"command": "cargo test"}}</tool_call>"#);
    let answer = server.post("/v1/messages", &of_claude_code());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let warning = answer.header("warning").unwrap().to_string();
    for (index, kind) in [(3, "web_search_20250305"), (4, "text_editor_20250728"), (5, "a_kind_of_next_year")]
    {
        let want = format!("tools[{index}]: a tool of type {kind} is left out");
        assert!(warning.contains(&want), "{warning}");
    }
    assert!(!warning.contains("unknown field"), "{warning}");
    let said = crate::support::client::anthropic_stream(&answer.events());
    let [(_, name, input)] = &said.calls[..] else { panic!("{said:?}") };
    assert_eq!((name.as_str(), input), ("Bash", &json!({"command": "cargo test"})));
    let text = prompt(&server);
    for known in ["\"Bash\"", "\"mcp__files__search\"", "\"Read\"", "You work on a repository.", "Cargo.toml"]
    {
        assert!(text.contains(known), "{known}: {text}");
    }
    for skipped in ["web_search", "str_replace_based_edit_tool", "unheard_of"] {
        assert!(!text.contains(skipped), "{skipped}: {text}");
    }
}
