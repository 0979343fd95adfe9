//! Fields of requests: what they do, and what is said of those that do nothing.

use crate::support::{QWEN, Running, Script, Scripted, tokenizer};
use lowbit::ChatTemplate;
use lowbit_engine::Finish;
use lowbit_serve::Served;
use serde_json::{Value, json};

fn server() -> Running {
    let server = Running::new(Scripted::new(vec![]));
    server.says("Well, yes.");
    server
}

#[track_caller]
fn refused(server: &Running, path: &str, body: &Value) -> (String, Value) {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 400, "{body}: {}", answer.text());
    let error = answer.json()["error"].clone();
    (error["message"].as_str().unwrap().into(), error["code"].clone())
}

#[test]
fn sampling_reaches_the_engine() {
    let server = server();
    let body = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.25, "frequency_penalty": 0.5,
        "repetition_penalty": 1.25, "seed": 7, "logit_bias": {"3": -100, "5": 1.5}, "max_completion_tokens": 9, "n": 2,
        "logprobs": true, "top_logprobs": 2,
    });
    let answer = server.chat(&body).ok();
    let requests = server.engine.requests.lock().unwrap();
    let options = &requests[0].options;
    let sampling = options.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.5, 0.9, 40, 0.1));
    assert_eq!(
        (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty),
        (0.25, 0.5, 1.25)
    );
    assert_eq!((sampling.seed, requests[1].options.sampling.seed, options.max_tokens), (7, 8, 9));
    assert_eq!(options.logit_bias, [(3, -100.0), (5, 1.5)]);
    assert_eq!(options.stop_ids, server.tokenizer.eos_ids());
    assert_eq!(requests[0].logprobs, Some(2));
    let logprobs = answer["choices"][1]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(logprobs.len(), server.ids("Well, yes.").len());
    assert_eq!(logprobs[0]["logprob"], -0.5);
    assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let token = logprobs[0]["token"].as_str().unwrap();
    assert!("Well, yes.".starts_with(token));
    assert_eq!(logprobs[0]["bytes"], json!(token.as_bytes()));
}

#[test]
fn what_no_request_names_is_the_publishers() {
    let server = server();
    server.chat(&json!({})).ok();
    server.chat(&json!({"temperature": null, "seed": -1})).ok();
    let requests = server.engine.requests.lock().unwrap();
    let [first, second] = [&requests[0].options, &requests[1].options];
    // The last token need not fit.
    let room = 1000 - requests[0].prompt.len() + 1;
    assert_eq!((first.sampling.temperature, first.max_tokens), (0.0, room));
    assert_ne!(first.sampling.seed, second.sampling.seed, "a seed of its own");
}

#[test]
fn log_probabilities_of_a_stream_are_those_of_the_answer() {
    let server = server();
    let body = json!({"logprobs": true, "top_logprobs": 1});
    let whole = server.chat(&body).ok()["choices"][0]["logprobs"]["content"].clone();
    let events = server.chat(&json!({"logprobs": true, "top_logprobs": 1, "stream": true})).events();
    let lists = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(lists.flatten().cloned().collect::<Vec<_>>(), *whole.as_array().unwrap());
}

#[test]
fn what_would_change_the_reply_is_refused_by_name() {
    let server = server();
    let tool = || json!({"type": "function", "function": {"name": "f"}});
    for (field, value, want) in [
        ("messages", json!(null), "messages: is missing"),
        ("messages", json!([]), "messages: is empty"),
        ("messages", json!("hi"), "messages: must be a list, but is a string"),
        (
            "messages",
            json!([{"role": "robot"}]),
            "messages[0].role: is robot, but system, developer, user, assistant or tool is wanted",
        ),
        (
            "messages",
            json!([{"role": "user", "content": 5}]),
            "messages[0].content: must be a string or a list of parts, but is a number",
        ),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0]: is of type image_url: lowbit reads text alone",
        ),
        (
            "temperature",
            json!("hot"),
            "temperature: invalid type: string \"hot\", expected f32 (it is a string)",
        ),
        ("n", json!(9), "n: is 9, but 1 to 8 is wanted"),
        ("max_tokens", json!(0), "max_tokens: is 0, but at least 1 is wanted, or -1 for no limit"),
        ("stop", json!(vec!["a"; 17]), "stop: has 17 texts, but 16 may be"),
        ("stop", json!("a".repeat(257)), "stop: has a text of 257 bytes, but 256 may be"),
        ("logit_bias", json!({"99999": 1}), "logit_bias.99999: is no token: ids are 0 to 8191"),
        ("top_logprobs", json!(3), "top_logprobs: needs logprobs to be true"),
        ("tool_choice", json!("required"), "tool_choice: requires a call, but there are no tools"),
        (
            "tool_choice",
            json!("sometimes"),
            "tool_choice: is sometimes, but auto, none, required or a function is wanted",
        ),
        ("tool_choice", json!({"type": "custom"}), "tool_choice.type: is custom: a function can be named"),
        ("tools", json!(vec![tool(); 257]), "tools: are 257, but 256 may be"),
        (
            "response_format",
            json!({"type": "xml"}),
            "response_format.type: is xml, but text, json_object, json_schema, regex or grammar is wanted",
        ),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "x"}}),
            "response_format.json_schema.schema: is missing",
        ),
        ("functions", json!([{"name": "f"}]), "functions: is the old name: tools and tool_choice are taken"),
        ("grammar", json!("root ::= x"), "grammar: there is no rule x"),
        ("modalities", json!(["text", "audio"]), "modalities: lowbit writes text alone"),
        (
            "chat_template_kwargs",
            json!({"messages": 1}),
            "chat_template_kwargs: messages comes from the request itself",
        ),
    ] {
        let (message, _) =
            refused(&server, "/v1/chat/completions", &crate::support::client::chat(&json!({field: value})));
        assert_eq!(message, want);
    }
    let (message, _) =
        refused(&server, "/v1/chat/completions", &crate::support::client::chat(&json!({"temperature": -1})));
    assert!(message.starts_with("sampling: ") && message.contains("temperature"), "{message}");
    for (field, value, want) in [
        ("max_tokens", json!(null), "max_tokens: is missing"),
        (
            "tool_choice",
            json!({"type": "some"}),
            "tool_choice.type: is some, but auto, any, tool or none is wanted",
        ),
        (
            "messages",
            json!([{"role": "assistant", "content": "I"}]),
            "messages: end with the assistant's: an answer cannot be begun by the client yet",
        ),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image"}]}]),
            "messages[0].content[0]: is of type image: lowbit reads text alone",
        ),
    ] {
        let answer = server.message(&json!({field: value}));
        assert_eq!((answer.status, answer.json()["type"].as_str()), (400, Some("error")));
        assert_eq!(answer.json()["error"]["message"], want);
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    assert_eq!(server.engine.requests.lock().unwrap().len(), 0);
}

#[test]
fn what_changes_nothing_is_taken_and_what_is_unknown_is_said() {
    let server = server();
    let known = json!({"user": "me", "store": false, "metadata": {"a": "b"}, "tools": [], "functions": null, "stream": false});
    let answer = server.chat(&known);
    assert_eq!((answer.status, answer.header("warning")), (200, None));
    let tools = json!([{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}]);
    let answer = server.chat(&json!({"tools": tools, "tempurature": 1, "reasoning": {"effort": "high"}}));
    let want =
        "299 lowbit \"tools[0]: a tool of type web_search is left out; tempurature: unknown field, ignored\"";
    assert_eq!((answer.status, answer.header("warning")), (200, Some(want)));
    let answer =
        server.message(&json!({"tools": [{"type": "bash_20250124", "name": "bash"}], "stream": true}));
    assert_eq!(
        answer.header("warning"),
        Some("299 lowbit \"tools[0]: a tool of type bash_20250124 is left out\"")
    );
}

#[test]
fn t34_a_prompt_beyond_the_context_is_400_with_both_numbers() {
    let mut engine = Scripted::new(vec![]);
    engine.context = 20;
    let server = Running::with(QWEN, engine, |_| {});
    server.says("x");
    let long = json!([{"role": "user", "content": "word ".repeat(100)}]);
    let body = json!({"messages": long, "max_tokens": 5});
    let count = server.post("/tokenize", &body).ok()["count"].as_u64().unwrap();
    let want = format!("the prompt has {count} tokens, but the context is 20 tokens: nothing is cut");
    for stream in [false, true] {
        let (message, code) =
            refused(&server, "/v1/chat/completions", &json!({"messages": long, "stream": stream}));
        assert_eq!((message, code), (want.clone(), json!("context_length_exceeded")));
        let (message, _) =
            refused(&server, "/v1/messages", &json!({"messages": long, "max_tokens": 5, "stream": stream}));
        assert_eq!(message, want);
    }
    let (_, code) = refused(&server, "/v1/completions", &json!({"prompt": "word ".repeat(100)}));
    assert_eq!(code, "context_length_exceeded");
}

#[test]
fn completions_take_texts_and_ids() {
    let server = server();
    let ids = server.ids("One two");
    let body = json!({"prompt": ["One two", "Three"], "n": 2, "echo": true});
    let answer = server.post("/v1/completions", &body).ok();
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|of| of["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["One twoWell, yes.", "One twoWell, yes.", "ThreeWell, yes.", "ThreeWell, yes."]);
    let prompts = ids.len() + server.ids("Three").len();
    assert_eq!(answer["usage"]["prompt_tokens"], prompts);
    server.post("/v1/completions", &json!({"prompt": ids, "max_tokens": 3})).ok();
    server.post("/v1/completions", &json!({"prompt": [ids, [1, 2]]})).ok();
    {
        let requests = server.engine.requests.lock().unwrap();
        assert_eq!(requests[0].prompt, requests[4].prompt);
        assert_eq!((requests[0].options.max_tokens, requests[4].options.max_tokens), (16, 3));
        assert_eq!(requests[6].prompt, [1, 2]);
    }
    let body = json!({"prompt": "One two", "logprobs": 1, "stream": true, "stream_options": {"include_usage": true}});
    let events = server.post("/v1/completions", &body).events();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    let lists = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array());
    let tokens: String = lists.flatten().map(|token| token.as_str().unwrap()).collect();
    assert_eq!((text.as_str(), tokens.as_str()), ("Well, yes.", "Well, yes."));
    assert_eq!(events.last().unwrap()["usage"]["prompt_tokens"], ids.len());
    for (body, want) in [
        (json!({}), "prompt: is missing"),
        (json!({"prompt": ""}), "prompt: has no tokens"),
        (json!({"prompt": [99999]}), "prompt: token 99999 is none of the model's 8192"),
        (json!({"prompt": [[-1]]}), "prompt: must be a list of token ids"),
        (json!({"prompt": {}}), "prompt: must be a string, token ids, or a list of either, but is an object"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix: texts are not filled in here"),
        (
            json!({"prompt": "a", "echo": true, "logprobs": 1}),
            "echo: a prompt's log-probabilities are not computed here",
        ),
        (json!({"prompt": "a", "best_of": 2}), "best_of: is more than n (1): all replies are sent"),
    ] {
        assert_eq!(refused(&server, "/v1/completions", &body).0, want);
    }
}

#[test]
fn a_model_has_its_names_alone() {
    let server = server();
    let list = server.get("/v1/models").ok();
    let names: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|of| of["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["test", "other/name"]);
    assert_eq!(server.get("/v1/models/other/name").ok()["max_model_len"], 1000);
    assert_eq!(server.chat(&json!({"model": "other/name"})).ok()["model"], "other/name");
    for answer in [server.chat(&json!({"model": "gpt-9"})), server.get("/v1/models/gpt-9")] {
        let error = &answer.json()["error"];
        assert_eq!(
            (answer.status, &error["code"], &error["param"]),
            (404, &json!("model_not_found"), &json!("model"))
        );
        assert_eq!(
            error["message"],
            "model gpt-9 is not served here, but test; --alias gives it further names"
        );
    }
    let answer = server.message(&json!({"model": "claude-9"}));
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (404, &json!("not_found_error")));
}

#[test]
fn a_star_is_any_name() {
    let template = ChatTemplate::new(QWEN, "template".as_ref()).unwrap();
    let served = |name: &str| Served::new(name, tokenizer(), Some(template.clone()));
    for served in [served("*"), served("test").with_aliases(vec!["*".into()])] {
        let server = Running::of(served, Scripted::new(vec![]), |_| {});
        server.says("Well, yes.");
        assert_eq!(server.chat(&json!({"model": "gpt-9"})).ok()["model"], "gpt-9");
        server.get("/v1/models/gpt-9").ok();
    }
}

#[test]
fn texts_and_ids() {
    let server = server();
    let ids = server.ids("One two");
    let answer = server.post("/tokenize", &json!({"content": "One two", "with_pieces": true})).ok();
    let pieces: String =
        answer["tokens"].as_array().unwrap().iter().map(|of| of["piece"].as_str().unwrap()).collect();
    assert_eq!(
        (pieces.as_str(), &answer["count"], &answer["max_model_len"]),
        ("One two", &json!(ids.len()), &json!(1000))
    );
    assert_eq!(server.post("/tokenize", &json!({"prompt": "One two"})).ok()["tokens"], json!(ids));
    assert_eq!(server.post("/detokenize", &json!({"tokens": ids})).ok()["content"], "One two");
    assert_eq!(server.post("/detokenize", &json!({"tokens": [8192]})).status, 400);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let prompt = server.post("/apply-template", &json!({"messages": messages})).ok()["prompt"].clone();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = server.ids(prompt.as_str().unwrap());
    assert_eq!(server.post("/tokenize", &json!({"messages": messages})).ok()["tokens"], json!(ids));
}

#[test]
fn a_model_without_a_template_writes_on() {
    let server = Running::with("", Scripted::new(vec![]), |_| {});
    server.says("Well, yes.");
    let (message, code) = refused(&server, "/v1/chat/completions", &crate::support::client::chat(&json!({})));
    assert_eq!(
        (message.as_str(), code),
        ("test has no chat template: /v1/completions goes on with a text", json!("no_chat_template"))
    );
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a"})).status, 200);
}

#[test]
fn checkpoints_stand_where_conversations_branch() {
    let server = server();
    let system = "Be brief. ".repeat(60);
    let messages = |last: &str| json!([{"role": "system", "content": system}, {"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": last}]);
    server.chat(&json!({"messages": messages("two")})).ok();
    server.chat(&json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": "other"}]})).ok();
    server.chat(&json!({"messages": messages("three")})).ok();
    server.chat(&json!({})).ok();
    let requests = server.engine.requests.lock().unwrap();
    let common = |a: usize, b: usize| {
        let both = requests[a].prompt.iter().zip(&requests[b].prompt);
        both.take_while(|(a, b)| a == b).count()
    };
    let [system, user] = requests[0].checkpoints[..] else { panic!("{:?}", requests[0].checkpoints) };
    // The starts of the next messages are the same, too.
    assert!(system <= common(0, 1) && common(0, 1) - system < 8, "{system} of {}", common(0, 1));
    assert!(user <= common(0, 2) && common(0, 2) - user < 8, "{user} of {}", common(0, 2));
    assert_eq!(requests[3].checkpoints, Vec::<usize>::new());
}

#[test]
fn an_error_behind_the_first_byte_is_an_event() {
    let server = server();
    let fails = || {
        let error = lowbit_engine::EngineError::Panicked { message: "x".into() };
        Script { fails: Some(error), ..Script::new(server.ids("Well")) }
    };
    server.engine.script(vec![fails()]);
    let want = "the server has made a mistake; its log says more";
    let answer = server.chat(&json!({}));
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (500, &json!(want)));
    let events = server.chat(&json!({"stream": true})).events();
    assert_eq!(events.last().unwrap()["error"]["message"], want);
    let answer = server.message(&json!({"stream": true}));
    assert!(answer.text().contains("event: error\n"), "{}", answer.text());
    assert_eq!(answer.events().last().unwrap()["error"], json!({"type": "api_error", "message": want}));
    assert!(server.lines.lock().unwrap().iter().any(|line| line == "error: the engine panicked: x"));
    let ids = server.ids("a b");
    server.engine.script(vec![Script { finish: Finish::Length, ..Script::new(ids) }]);
    assert_eq!(server.chat(&json!({})).ok()["choices"][0]["finish_reason"], "length");
}

#[test]
fn t7_a_nonce_before_the_system_prompt_is_left_out() {
    let system = |nonce: &str| {
        let line =
            format!("x-anthropic-billing-header: cc_version=2.1.9.{nonce}; cc_entrypoint=cli; cch={nonce};");
        let text = "You are brief.";
        [
            json!([{"type": "text", "text": line}, {"type": "text", "text": text}]),
            json!(format!("{line}\n{text}")),
            json!(format!("{line}{text}")),
        ]
    };
    let prompts = |server: &Running| -> Vec<String> {
        for system in [system("a5145"), system("0aaa9")].into_iter().flatten() {
            server.message(&json!({"system": system})).ok();
        }
        let requests = std::mem::take(&mut *server.engine.requests.lock().unwrap());
        requests.iter().map(|request| server.tokenizer.decode(&request.prompt).unwrap()).collect()
    };
    let without = prompts(&server());
    assert!(without[0].contains("system\nYou are brief."), "{}", without[0]);
    assert!(without.iter().all(|prompt| *prompt == without[0]), "{without:?}");
    let count = |system: Value| {
        let body = json!({"system": system, "messages": [{"role": "user", "content": "hi"}]});
        server().post("/v1/messages/count_tokens", &body).ok()["input_tokens"].clone()
    };
    assert_eq!(count(system("a5145")[1].clone()), count(json!("You are brief.")));
    // It can be switched off.
    let keeps = Running::with(QWEN, Scripted::new(vec![]), |options| options.keep_billing_header = true);
    keeps.says("One moment.");
    let kept = prompts(&keeps);
    assert!(kept[0].contains("cch=a5145;") && kept[3].contains("cch=0aaa9;"), "{kept:?}");
}

/// The ids of tokens of a prompt and a reply, as an answer or a stream's chunks have them.
fn token_ids<'a>(values: impl IntoIterator<Item = &'a Value>) -> Vec<Value> {
    values.into_iter().filter_map(Value::as_array).flatten().cloned().collect()
}

#[test]
fn ids_of_prompts_and_replies_are_told_where_they_are_asked_for() {
    let server = server();
    let want = json!(server.ids("Well, yes."));
    let asks = json!({"return_token_ids": true, "n": 2});
    let whole = server.chat(&asks).ok();
    let prompt = json!(server.engine.requests.lock().unwrap()[0].prompt);
    assert_eq!((&whole["prompt_token_ids"], &whole["choices"][1]["token_ids"]), (&prompt, &want));
    let events = server.chat(&json!({"return_token_ids": true, "stream": true})).events();
    let told: Vec<_> = events.iter().filter(|event| event["prompt_token_ids"].is_array()).collect();
    assert_eq!((told.len(), &told[0]["prompt_token_ids"]), (1, &prompt));
    assert_eq!(json!(token_ids(events.iter().map(|event| &event["choices"][0]["token_ids"]))), want);
    // Also of texts that are held back or cut.
    let stopped = json!({"return_token_ids": true, "stop": "yes"});
    let cut = server.chat(&stopped).ok()["choices"][0].clone();
    let ids: Vec<u32> = serde_json::from_value(cut["token_ids"].clone()).unwrap();
    assert!(server.tokenizer.decode(&ids).unwrap().starts_with("Well, yes"), "{cut}");

    let body = json!({"prompt": ["One", "Two"], "max_tokens": 9, "return_token_ids": true});
    let whole = server.post("/v1/completions", &body).ok();
    for (index, text) in ["One", "Two"].into_iter().enumerate() {
        let choice = &whole["choices"][index];
        let prompt = json!(server.tokenizer.encode(text, true).unwrap());
        assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&prompt, &want), "{text}");
    }
    let body = json!({"prompt": "One", "max_tokens": 9, "return_token_ids": true, "stream": true});
    let events = server.post("/v1/completions", &body).events();
    let prompts = token_ids(events.iter().map(|event| &event["choices"][0]["prompt_token_ids"]));
    assert_eq!(json!(prompts), json!(server.tokenizer.encode("One", true).unwrap()));
    assert_eq!(json!(token_ids(events.iter().map(|event| &event["choices"][0]["token_ids"]))), want);

    let silent = server.chat(&json!({})).ok();
    assert!(silent["prompt_token_ids"].is_null() && silent["choices"][0]["token_ids"].is_null(), "{silent}");
}

#[test]
fn a_response_has_as_many_input_tokens_as_were_counted() {
    let server = server();
    let tools =
        json!([{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]);
    let body = json!({"input": [{"role": "user", "content": "weather?"}], "instructions": "Be brief.", "tools": tools});
    let counted = server.post("/v1/responses/input_tokens", &body).ok();
    let response = server.post("/v1/responses", &body).ok();
    let want = response["usage"]["input_tokens"].clone();
    assert_eq!(counted, json!({"object": "response.input_tokens", "input_tokens": want}));
    assert!(want.as_u64().unwrap() > 20, "{want}");
    let (message, _) = refused(
        &server,
        "/v1/responses/input_tokens",
        &json!({"input": "a", "previous_response_id": "resp_1"}),
    );
    assert_eq!(message, "previous_response_id: nothing is stored here: send the whole conversation as input");
}
