//! Replies in a form, of every API: a model that wants to write something else is held to it.

use crate::support::client::{anthropic, anthropic_stream, chat, openai, openai_stream};
use crate::support::{QWEN, Running, Scripted};
use serde::Deserialize;
use serde_json::{Value, json};

/// The text that the model would write.
const WANTED: &str = "I would rather not. {\"id\": \"none\"}";

/// A model without reasoning: one that draws at random would not end it.
fn server() -> Running {
    let template = QWEN.replace("<think>\n", "").replace("</think>", "");
    let server = Running::with(&template, Scripted::new(vec![]), |_| {});
    server.says(WANTED);
    server
}

fn order() -> Value {
    json!({
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1, "maximum": 99},
            "kind": {"type": "string", "enum": ["buy", "sell"]},
            "notes": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        },
        "required": ["id", "kind"],
        "additionalProperties": false,
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    id: u8,
    kind: Kind,
    #[serde(default)]
    notes: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Buy,
    Sell,
}

#[track_caller]
fn assert_order(text: &str) {
    let order: Order = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!((1..=99).contains(&order.id) && matches!(order.kind, Kind::Buy | Kind::Sell), "{text}");
    assert!(order.notes.len() <= 2 && order.notes.iter().all(|note| note.chars().count() <= 6), "{text}");
}

fn of_schema(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "order", "strict": true, "schema": schema}}})
}

/// A share of T19's thousand (`tools/check_forms` asks a real model for all): each is whole, or it
/// says that it was cut; with and without reasoning before it.
#[test]
fn t19_replies_are_valid_or_say_that_they_were_cut() {
    let server = Running::new(Scripted::new(vec![]));
    let (mut whole, mut cut) = (0, 0);
    for seed in 0..60 {
        let thinks = seed % 2 == 1;
        server.says(if thinks { "Is {\"id\": 0} right?</think>\n\nNo." } else { WANTED });
        let mut body = of_schema(&order());
        body["seed"] = seed.into();
        body["max_tokens"] = if seed % 5 == 4 { json!(24) } else { json!(300) };
        body["chat_template_kwargs"] = json!({"enable_thinking": thinks});
        let stream = seed % 3 == 0;
        body["stream"] = stream.into();
        let answer = server.chat(&body);
        let said = if stream { openai_stream(&answer.events()) } else { openai(&answer.ok()) };
        assert!(said.calls.is_empty());
        match said.finish.as_str() {
            "stop" => {
                assert_order(&said.content);
                assert_eq!(said.reasoning, if thinks { "Is {\"id\": 0} right?" } else { "" });
                whole += 1;
            }
            "length" => cut += 1,
            other => panic!("{other}: {said:?}"),
        }
    }
    assert!(whole >= 40 && cut >= 1, "{whole} whole, {cut} cut");
}

/// T20: 400 that names the part of the schema.
#[test]
fn t20_a_schema_that_cannot_be_enforced_is_named_by_its_path() {
    let server = server();
    let mut unique = order();
    unique["properties"]["notes"]["uniqueItems"] = true.into();
    let problem = "Unimplemented keys: [\"uniqueItems\"]";
    let tool = |parameters: &Value| json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}});
    let format = json!({"type": "json_schema", "schema": unique, "name": "x"});
    for (path, body, want) in [
        ("/v1/chat/completions", of_schema(&unique), "response_format.json_schema.schema.properties.notes"),
        ("/v1/chat/completions", json!({"json_schema": unique}), "json_schema.properties.notes"),
        ("/v1/chat/completions", json!({"guided_json": unique.to_string()}), "guided_json.properties.notes"),
        ("/v1/chat/completions", json!({"tools": [tool(&unique)]}), "tools.f.parameters.properties.notes"),
        (
            "/v1/responses",
            json!({"input": "hi", "text": {"format": format}}),
            "text.format.schema.properties.notes",
        ),
        (
            "/v1/messages",
            json!({"output_config": {"format": format}}),
            "output_config.format.schema.properties.notes",
        ),
        ("/api/chat", json!({"model": "test", "format": unique}), "format.properties.notes"),
    ] {
        let mut whole = chat(&body);
        whole["max_tokens"] = 50.into();
        let answer = server.post(path, &whole);
        let error = answer.json()["error"].clone();
        let message = error["message"].as_str().or(error.as_str()).unwrap();
        assert_eq!((answer.status, message), (400, format!("{want}: {problem}").as_str()), "{path}");
    }
    assert_eq!(server.engine.requests.lock().unwrap().len(), 0);
    // A tool that is not strict is called with any object.
    let mut lax = json!({"tools": [tool(&unique)], "tool_choice": "required", "parallel_tool_calls": false});
    lax["tools"][0]["function"]["strict"] = false.into();
    server.says("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"any\": [1, 1]}}\n</tool_call>");
    let said = openai(&server.chat(&lax).ok());
    assert_eq!((said.finish.as_str(), &said.calls[0].2), ("tool_calls", &json!({"any": [1, 1]})));
}

#[test]
fn every_field_for_a_form_is_taken() {
    let server = server();
    let digits = "root ::= [0-9]{3}";
    let is_digits = |text: &str| text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    for body in [
        json!({"grammar": digits}),
        json!({"grammar": "start: /[0-9]{3}/"}),
        json!({"guided_regex": "[0-9]{3}"}),
        json!({"guided_grammar": digits}),
        json!({"guided_choice": ["123", "456"]}),
        json!({"structured_outputs": {"regex": "^[0-9]{3}$"}}),
        json!({"response_format": {"type": "regex", "pattern": "[0-9]{3}"}}),
        json!({"response_format": {"type": "grammar", "grammar": digits}}),
    ] {
        let said = openai(&server.chat(&body).ok());
        assert!(is_digits(&said.content) && said.finish == "stop", "{body}: {said:?}");
        let mut text = body.clone();
        (text["prompt"], text["max_tokens"]) = ("hi".into(), 50.into());
        let text = server.post("/v1/completions", &text).ok();
        assert!(is_digits(text["choices"][0]["text"].as_str().unwrap()), "{body}: {text}");
    }
    let object =
        openai(&server.chat(&json!({"response_format": {"type": "json_object"}, "max_tokens": 900})).ok());
    assert!(object.finish == "length" || serde_json::from_str::<Value>(&object.content).unwrap().is_object());
    let both = server.chat(&json!({"grammar": digits, "guided_regex": "a"}));
    let message = both.json()["error"]["message"].clone();
    assert_eq!(message, "guided_regex: is asked for beside grammar, but a reply has one form");
    let endless = server.chat(&json!({"grammar": digits, "ignore_eos": true}));
    let message = endless.json()["error"]["message"].clone();
    assert_eq!(message, "ignore_eos: cannot be true beside grammar, whose end is the reply's");
    // None of them means any text.
    let free = openai(
        &server.chat(&json!({"grammar": "", "json_schema": {}, "response_format": {"type": "text"}})).ok(),
    );
    assert_eq!(free.content, WANTED);
}

#[test]
fn the_other_apis_have_forms() {
    let server = server();
    let format = json!({"type": "json_schema", "name": "order", "schema": order(), "strict": true});
    let body = json!({"input": "hi", "text": {"format": format}, "max_output_tokens": 300});
    let response = server.post("/v1/responses", &body).ok();
    assert_order(response["output"][0]["content"][0]["text"].as_str().unwrap());
    assert_eq!(response["text"]["format"], format);
    for field in ["output_format", "output_config"] {
        let value = if field == "output_config" {
            json!({"format": format, "effort": "low"})
        } else {
            format.clone()
        };
        assert_order(&anthropic(&server.message(&json!({field: value})).ok()).content);
        assert_order(
            &anthropic_stream(&server.message(&json!({field: value, "stream": true})).events()).content,
        );
    }
    let ollama =
        server.post("/api/chat", &chat(&json!({"model": "test", "format": order(), "stream": false}))).ok();
    assert_order(ollama["message"]["content"].as_str().unwrap());
    let ollama = json!({"model": "test", "prompt": "hi", "format": order(), "stream": false});
    assert_order(server.post("/api/generate", &ollama).ok()["response"].as_str().unwrap());
}

fn tools(strict: bool) -> Value {
    let function = |name: &str| json!({"name": name, "strict": strict, "parameters": order()});
    json!([{"type": "function", "function": function("place")}, {"type": "function", "function": function("cancel")}])
}

#[test]
fn calls_are_required_and_named() {
    let server = server();
    for seed in 0..6 {
        let body = json!({"tools": tools(true), "tool_choice": "required", "parallel_tool_calls": false, "seed": seed});
        let said = openai(&server.chat(&body).ok());
        assert_eq!((said.calls.len(), said.finish.as_str(), said.content.as_str()), (1, "tool_calls", ""));
        assert!(["place", "cancel"].contains(&said.calls[0].1.as_str()));
        assert_order(&said.calls[0].2.to_string());
        let named = json!({"type": "function", "function": {"name": "cancel"}});
        let body = json!({"tools": tools(false), "tool_choice": named, "stream": true, "seed": seed});
        let said = openai_stream(&server.chat(&body).events());
        assert_eq!((said.calls.len(), said.calls[0].1.as_str()), (1, "cancel"));
        assert_order(&said.calls[0].2.to_string());
    }
    let list = json!([{"name": "place", "input_schema": order(), "strict": true}]);
    let said = anthropic(
        &server.message(&json!({"tools": list, "tool_choice": {"type": "tool", "name": "place"}})).ok(),
    );
    assert_eq!((said.finish.as_str(), said.calls[0].1.as_str()), ("tool_use", "place"));
    assert_order(&said.calls[0].2.to_string());
    let missing =
        json!({"tools": tools(false), "tool_choice": {"type": "function", "function": {"name": "buy"}}});
    let message = server.chat(&missing).json()["error"]["message"].clone();
    assert_eq!(message, "tool_choice: names buy, which is none of the tools");
}

/// A form beside tools: the reply is of it, or calls.
#[test]
fn a_form_beside_tools_leaves_calls_possible() {
    let server = server();
    let mut body = of_schema(&order());
    body["tools"] = tools(false);
    server.says(
        "<tool_call>\n{\"name\": \"place\", \"arguments\": {\"id\": 7, \"kind\": \"buy\"}}\n</tool_call>",
    );
    let said = openai(&server.chat(&body).ok());
    assert_eq!((said.calls[0].1.as_str(), &said.calls[0].2), ("place", &json!({"id": 7, "kind": "buy"})));
    server.says("{\"id\": 8, \"kind\": \"sell\"}");
    assert_order(&openai(&server.chat(&body).ok()).content);
}
