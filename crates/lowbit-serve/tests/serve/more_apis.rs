//! Ollama's API, and OpenAI's `/v1/responses`.

use crate::support::{Running, Script, Scripted};
use lowbit_engine::Finish;
use serde_json::{Value, json};

const REPLY: &str =
    "<think>Hm.</think>One moment.\n<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 2}}</tool_call>";

fn server() -> Running {
    let server = Running::new(Scripted::new(vec![]));
    server.says(REPLY);
    server
}

fn lines(server: &Running, path: &str, body: &Value) -> Vec<Value> {
    let answer = server.post(path, body);
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("application/x-ndjson")),
        "{}",
        answer.text()
    );
    answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn ollamas_chats_are_lines() {
    let server = server();
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let mut body = json!({
        "model": "test:latest",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "thinking": "so", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "one"},
        ],
        "tools": [tool],
        "options": {"temperature": 0.5, "num_predict": 200, "num_ctx": 4096, "stop": ["###"], "seed": 3},
        "keep_alive": "5m",
    });
    let streamed = lines(&server, "/api/chat", &body);
    let (last, others) = streamed.split_last().unwrap();
    let join =
        |name: &str| -> String { others.iter().filter_map(|line| line["message"][name].as_str()).collect() };
    assert_eq!((join("thinking").as_str(), join("content").as_str()), ("Hm.", "One moment."));
    let calls: Vec<&Value> =
        others.iter().filter_map(|line| line["message"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(calls, [&json!({"function": {"name": "f", "arguments": {"x": 2}}})]);
    assert!(others.iter().all(|line| line["done"] == false && line["model"] == "test:latest"));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!(last["eval_count"], server.ids(REPLY).len());
    body["stream"] = false.into();
    let answer = server.post("/api/chat", &body);
    assert_eq!(answer.header("warning"), None);
    let whole = answer.ok();
    let message =
        json!({"role": "assistant", "content": "One moment.", "tool_calls": [calls[0]], "thinking": "Hm."});
    assert_eq!(
        (&whole["message"], &whole["done"], &whole["eval_count"]),
        (&message, &json!(true), &last["eval_count"])
    );
    let requests = server.engine.requests.lock().unwrap();
    assert_eq!(
        (
            requests[0].options.sampling.temperature,
            requests[0].options.sampling.seed,
            requests[0].options.max_tokens
        ),
        (0.5, 3, 200)
    );
    let text = server.tokenizer.decode(&requests[0].prompt).unwrap();
    assert!(text.contains("\"arguments\": {\"x\": 1}") && text.contains("tool\none"), "{text}");
}

#[test]
fn ollamas_texts_models_and_errors() {
    let server = server();
    server.says("Well, yes.");
    let streamed =
        lines(&server, "/api/generate", &json!({"model": "test", "prompt": "hi", "system": "Be brief."}));
    let text: String = streamed.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(text, "Well, yes.");
    server
        .post("/api/generate", &json!({"model": "test", "prompt": "hi", "raw": true, "stream": false}))
        .ok();
    let prompts: Vec<String> = {
        let requests = server.engine.requests.lock().unwrap();
        requests.iter().map(|of| server.tokenizer.decode(&of.prompt).unwrap()).collect()
    };
    assert!(prompts[0].contains("Be brief.") && prompts[0].ends_with("<|im_start|>assistant\n"));
    assert_eq!(prompts[1], "hi");
    let names: Vec<Value> = server.get("/api/tags").ok()["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|of| of["name"].clone())
        .collect();
    assert_eq!(names, ["test", "other/name"]);
    let shown = server.post("/api/show", &json!({"model": "test"})).ok();
    assert_eq!(
        (&shown["capabilities"], &shown["model_info"]["general.context_length"]),
        (&json!(["completion", "tools", "thinking"]), &json!(1000))
    );
    assert!(server.get("/api/version").ok()["version"].is_string());
    for (body, status, want) in [
        (
            json!({"model": "llama9"}),
            404,
            "model llama9 is not served here, but test; --alias gives it further names",
        ),
        (json!({"messages": []}), 400, "model: is missing"),
        (json!({"model": "test", "messages": []}), 400, "messages: is empty"),
        (
            json!({"model": "test", "messages": [{"role": "user", "content": "", "images": ["x"]}]}),
            400,
            "messages.images: lowbit reads text alone",
        ),
        (json!({"model": "test", "format": "xml"}), 400, "format: must be \"json\" or a JSON schema"),
        (
            json!({"model": "test", "options": {"num_predict": -7}}),
            400,
            "options.num_predict: is -7, but at least 1 is wanted, or -1 for no limit",
        ),
    ] {
        let answer = server.post("/api/chat", &body);
        assert_eq!((answer.status, answer.json()), (status, json!({"error": want})));
    }
}

/// The response that a stream's events make, whose places and order are checked.
fn added_up(events: &[Value]) -> Value {
    assert!(events.iter().enumerate().all(|(index, event)| event["sequence_number"] == index));
    assert_eq!(
        (&events[0]["type"], &events[1]["type"]),
        (&json!("response.created"), &json!("response.in_progress"))
    );
    let mut items: Vec<Value> = vec![];
    let mut texts: Vec<String> = vec![];
    for event in &events[2..events.len() - 1] {
        let place = event["output_index"].as_u64().unwrap() as usize;
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(place, items.len());
                items.push(event["item"].clone());
                texts.push(String::new());
            }
            "response.output_text.delta"
            | "response.reasoning_text.delta"
            | "response.function_call_arguments.delta" => {
                assert_eq!(event["item_id"], items[place]["id"]);
                texts[place] += event["delta"].as_str().unwrap();
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], texts[place])
            }
            "response.function_call_arguments.done" => assert_eq!(event["arguments"], texts[place]),
            "response.content_part.added" => assert_eq!(event["part"]["text"], ""),
            "response.content_part.done" => assert_eq!(event["part"]["text"], texts[place]),
            "response.output_item.done" => items[place] = event["item"].clone(),
            other => panic!("{other}"),
        }
    }
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"], json!(items));
    last.clone()
}

#[test]
fn responses_are_the_same_streamed() {
    let server = server();
    let tool = json!({"type": "function", "name": "f", "strict": false, "parameters": {"type": "object"}});
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "call00001", "name": "f", "arguments": "{\"x\": 1}"},
        {"type": "function_call_output", "call_id": "call00001", "output": "one"},
        {"type": "web_search_call", "id": "x"},
    ]);
    let mut body = json!({"input": input, "instructions": "Be brief.", "tools": [tool, {"type": "web_search"}], "store": true, "include": []});
    let answer = server.post("/v1/responses", &body);
    let want = "299 lowbit \"input[5]: an item of type web_search_call is left out; tools[1]: a tool of type web_search is left out\"";
    assert_eq!(answer.header("warning"), Some(want));
    let whole = answer.ok();
    let kinds: Vec<&str> =
        whole["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(whole["output"][0]["content"][0]["text"], "Hm.");
    assert_eq!(whole["output"][1]["content"][0]["text"], "One moment.");
    assert_eq!(
        (&whole["output"][2]["name"], &whole["output"][2]["arguments"]),
        (&json!("f"), &json!("{\"x\": 2}"))
    );
    assert_eq!(
        (&whole["status"], &whole["usage"]["output_tokens"]),
        (&json!("completed"), &json!(server.ids(REPLY).len()))
    );
    body["stream"] = true.into();
    let mut streamed = added_up(&server.post("/v1/responses", &body).events());
    // Ids and times are each answer's own.
    streamed["id"] = whole["id"].clone();
    streamed["created_at"] = whole["created_at"].clone();
    let id = |response: &Value, place: usize| response["output"][place]["id"].clone();
    (0..3).for_each(|place| streamed["output"][place]["id"] = id(&whole, place));
    assert_eq!(streamed, whole);
    {
        let requests = server.engine.requests.lock().unwrap();
        let text = server.tokenizer.decode(&requests[0].prompt).unwrap();
        assert!(
            text.contains("assistant\nWait.<tool_call>")
                && text.contains("tool\none")
                && text.contains("system\nBe brief."),
            "{text}"
        );
    }
    let ids = server.ids("and so");
    server.engine.script(vec![Script { finish: Finish::Length, ..Script::new(ids) }]);
    let cut = server.post("/v1/responses", &json!({"input": "hi", "max_output_tokens": 1})).ok();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    for (body, want) in [
        (json!({}), "input: is missing"),
        (
            json!({"input": "a", "previous_response_id": "resp_1"}),
            "previous_response_id: nothing is stored here: send the whole conversation as input",
        ),
        (
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            "input[0]: nothing is stored here: send the item itself",
        ),
        (
            json!({"input": "a", "text": {"format": {"type": "json_schema"}}}),
            "text.format.schema: is missing",
        ),
    ] {
        let answer = server.post("/v1/responses", &body);
        assert_eq!((answer.status, &answer.json()["error"]["message"]), (400, &json!(want)));
    }
}
