//! Replies as clients get them, whole and streamed, in OpenAI's and Anthropic's form. The names
//! begin with the numbers of the acceptance tests.

use crate::support::client::{Said, anthropic, anthropic_stream, openai, openai_stream};
use crate::support::{QWEN, Running, Script, Scripted};
use lowbit_engine::Finish;
use serde_json::{Value, json};

/// A function `f`, with a text and a number.
fn tool() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    json!({"type": "object", "properties": properties})
}

fn with_tools(further: Value) -> Value {
    let mut body = json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": tool()}}]});
    further.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
    body
}

/// The message that OpenAI's client makes of the answer to one request and of its stream: they are
/// the same.
#[track_caller]
fn both(server: &Running, further: &Value) -> Said {
    let whole = openai(&server.chat(further).ok());
    let mut streamed = further.clone();
    streamed["stream"] = true.into();
    assert_eq!(openai_stream(&server.chat(&streamed).events()), whole);
    whole
}

/// The same of Anthropic's.
#[track_caller]
fn both_of_anthropic(server: &Running, further: &Value) -> Said {
    let whole = anthropic(&server.message(further).ok());
    let mut streamed = further.clone();
    streamed["stream"] = true.into();
    assert_eq!(anthropic_stream(&server.message(&streamed).events()), whole);
    whole
}

#[test]
fn t14_characters_that_span_tokens_come_whole() {
    let server = Running::new(Scripted::new(vec![]));
    let text = "Grüße 👩‍👩‍👧 und 日本語のテスト, 한국어 🇩🇪.";
    server.says(text);
    let answer = server.chat(&json!({"stream": true}));
    assert!(!answer.text().contains('\u{fffd}') && !answer.text().contains("\\ufffd"));
    assert_eq!(openai_stream(&answer.events()).content, text);
    assert!(answer.events().len() > 10, "it comes in pieces");
    let answer = server.message(&json!({"stream": true}));
    assert!(!answer.text().contains('\u{fffd}'));
    assert_eq!(anthropic_stream(&answer.events()).content, text);
    // Stop texts that begin and end inside tokens.
    for (stop, want) in [("本語の", "Grüße 👩‍👩‍👧 und 日"), ("👩‍👧", "Grüße 👩‍"), ("ße 👩", "Grü")]
    {
        let said = both(&server, &json!({"stop": [stop, "never"]}));
        assert_eq!((said.content.as_str(), said.finish.as_str()), (want.trim_end(), "stop"), "{stop}");
        let answer = server.message(&json!({"stop_sequences": [stop]})).ok();
        assert_eq!(
            (&answer["stop_reason"], &answer["stop_sequence"]),
            (&json!("stop_sequence"), &json!(stop))
        );
        assert_eq!(answer["content"][0]["text"], want.trim_end());
    }
}

/// Replies with reasoning, content and calls, in the spelling of several families, and a template
/// that mentions it.
const FAMILIES: [(&str, &str, &str); 6] = [
    (
        "hermes",
        "<tool_call></tool_call><think></think>",
        "<think>Let me see.</think>\nOne moment.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Köln\", \"days\": 2}}\n</tool_call>",
    ),
    (
        "qwen3-coder",
        "<tool_call><function=</function></tool_call>",
        "One moment.\n<tool_call>\n<function=f>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "mistral",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"city\": \"Köln\", \"days\": 2}}]",
    ),
    (
        "llama",
        "<|python_tag|>",
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"city\": \"Köln\", \"days\": 2}}",
    ),
    (
        "harmony",
        "<|channel|><|message|><|start|>",
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
         <|constrain|>json<|message|>{\"city\": \"Köln\", \"days\": 2}<|call|>",
    ),
    (
        "glm",
        "<tool_call><arg_key></arg_key><arg_value></arg_value></tool_call><think></think>",
        "<think>Let me see.</think>\n<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
];

/// A template of this family: it mentions the markers, and writes messages plainly.
fn template(mentions: &str) -> String {
    format!(
        "{{# {mentions} #}}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% endfor %}}<assistant>"
    )
}

#[test]
fn t15_t17_a_reply_cut_anywhere_is_the_same_in_both_apis() {
    for (family, mentions, reply) in FAMILIES {
        let server = Running::with(&template(mentions), Scripted::new(vec![]), |_| {});
        let want = vec![("f".to_string(), json!({"city": "Köln", "days": 2}))];
        let cuts: Vec<usize> = reply.char_indices().map(|(index, _)| index).collect();
        for cut in cuts {
            let ids = [server.ids(&reply[..cut]), server.ids(&reply[cut..])].concat();
            server.engine.script(vec![Script::new(ids)]);
            let said = both(&server, &with_tools(json!({})));
            let calls: Vec<_> =
                said.calls.iter().map(|(_, name, input)| (name.clone(), input.clone())).collect();
            assert_eq!((calls, said.finish.as_str()), (want.clone(), "tool_calls"), "{family} cut at {cut}");
            let markup = ["<", "[TOOL", "|>", "{"];
            assert!(!markup.iter().any(|markup| said.content.contains(markup)), "{family}: {}", said.content);
            if reply.contains("Let me see.") {
                assert_eq!(said.reasoning, "Let me see.", "{family} cut at {cut}");
            }
            // The other API, for some cuts: the machine is the same.
            if cut % 8 == 0 {
                let tools = json!({"tools": [{"name": "f", "input_schema": tool()}]});
                let other = both_of_anthropic(&server, &tools);
                assert_eq!(other.finish, "tool_use");
                assert_eq!(Said { finish: "tool_calls".into(), ..other }, said);
            }
        }
    }
}

#[test]
fn t16_a_reply_that_is_cut_off_says_so_and_keeps_its_text() {
    let server = Running::new(Scripted::new(vec![]));
    let cut = |text: &str, finish| {
        let ids = server.ids(text);
        server.engine.script(vec![Script { finish, ..Script::new(ids) }]);
    };
    cut("<think>I was about to", Finish::Length);
    let said = both(&server, &json!({}));
    assert_eq!(
        (said.reasoning.as_str(), said.content.as_str(), said.finish.as_str()),
        ("I was about to", "", "length")
    );
    let said = both_of_anthropic(&server, &json!({}));
    assert_eq!((said.reasoning.as_str(), said.finish.as_str()), ("I was about to", "max_tokens"));
    // The envelope of a call that is never closed is text: nothing is lost.
    cut("Well. <tool_call>{\"name\": \"f\", \"argum", Finish::Length);
    let said = both(&server, &with_tools(json!({})));
    assert_eq!(said.content, "Well. <tool_call>{\"name\": \"f\", \"argum");
    assert_eq!((said.calls.len(), said.finish.as_str()), (0, "length"));
    cut("<think>and that is", Finish::Stop);
    assert_eq!(both(&server, &json!({})).finish, "stop");
}

#[test]
fn t18_reasoning_that_the_prompt_opens() {
    let server = Running::new(Scripted::new(vec![]));
    let thinks = json!({"chat_template_kwargs": {"enable_thinking": true}});
    for (reply, reasoning, content) in [
        ("Hm.</think>\n\nYes.", "Hm.", "Yes."),
        ("Hm, it goes on", "Hm, it goes on", ""),
        ("Hm.</think>Yes.</think> Or no.", "Hm.", "Yes.</think> Or no."),
        ("Hm.</think>It is spelled <think> there.", "Hm.", "It is spelled <think> there."),
    ] {
        server.says(reply);
        let said = both(&server, &thinks);
        assert_eq!((said.reasoning.as_str(), said.content.as_str()), (reasoning, content), "{reply}");
        let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": 100}});
        let other = both_of_anthropic(&server, &thinking);
        assert_eq!((other.reasoning.as_str(), other.content.as_str()), (reasoning, content), "{reply}");
    }
    server.says("Hm.</think>Yes.");
    let effort = both(&server, &json!({"reasoning_effort": "low"}));
    assert_eq!((effort.reasoning.as_str(), effort.content.as_str()), ("Hm.", "Yes."));
    let prompts = server.engine.requests.lock().unwrap();
    let text = server.tokenizer.decode(&prompts.last().unwrap().prompt).unwrap();
    assert!(text.ends_with("<|im_start|>assistant\n<think>\n"), "{text}");
}

#[test]
fn calls_of_earlier_turns_and_their_results_reach_the_template() {
    let server = Running::new(Scripted::new(vec![]));
    server.says("2 degrees.");
    let call = json!({"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{\"city\": \"Bonn\"}"}});
    let messages = json!([
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "2 °C"},
    ]);
    server.chat(&with_tools(json!({"messages": messages}))).ok();
    let blocks = json!([
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call00001", "name": "f", "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "2 °C"}]}]},
    ]);
    let tools = json!([{"name": "f", "input_schema": tool()}]);
    let system = json!([{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}}]);
    server.message(&json!({"system": system, "messages": blocks, "tools": tools})).ok();
    let prompts = server.engine.requests.lock().unwrap();
    let texts: Vec<String> = prompts.iter().map(|of| server.tokenizer.decode(&of.prompt).unwrap()).collect();
    assert_eq!(texts[0], texts[1], "both APIs write the same prompt");
    assert!(texts[0].contains("\"arguments\": {\"city\": \"Bonn\"}"), "{}", texts[0]);
    assert!(
        texts[0].contains("Be\nbrief.")
            && texts[0].contains("tool\n2 °C")
            && texts[0].starts_with("<|im_start|>system\n[{")
    );
}

#[test]
fn one_call_or_none_where_the_client_wants_it() {
    let server = Running::new(Scripted::new(vec![]));
    let call = |city: &str| {
        format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"city\": \"{city}\"}}}}</tool_call>")
    };
    let two = call("Bonn") + "\n" + &call("Köln");
    server.says(&two);
    assert_eq!(both(&server, &with_tools(json!({}))).calls.len(), 2);
    let one = both(&server, &with_tools(json!({"parallel_tool_calls": false})));
    assert_eq!((one.calls.len(), one.finish.as_str()), (1, "tool_calls"));
    let choice = json!({"type": "auto", "disable_parallel_tool_use": true});
    let tools = json!([{"name": "f", "input_schema": tool()}]);
    assert_eq!(both_of_anthropic(&server, &json!({"tools": tools, "tool_choice": choice})).calls.len(), 1);
    let none = both(&server, &with_tools(json!({"tool_choice": "none"})));
    assert_eq!((none.calls.len(), none.content.as_str(), none.finish.as_str()), (0, two.as_str(), "stop"));
    let prompts = server.engine.requests.lock().unwrap();
    let text = server.tokenizer.decode(&prompts.last().unwrap().prompt).unwrap();
    assert!(!text.contains("days"), "the template sees no tools: {text}");
}

#[test]
fn t33_usage_is_the_same_in_streams() {
    let engine = Scripted::new(vec![]);
    let server = Running::with(QWEN, engine, |_| {});
    let ids = server.ids("<think>Hm.</think>Well, yes.");
    let (thought, count) = (server.ids("<think>Hm.</think>").len(), ids.len());
    server.engine.script(vec![Script { cached: 7, ..Script::new(ids) }]);
    let whole = server.chat(&json!({"n": 2})).ok();
    let prompt = server.engine.requests.lock().unwrap()[0].prompt.len();
    let usage = &whole["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(prompt), &json!(2 * count)));
    assert_eq!(usage["total_tokens"], prompt + 2 * count);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 7);
    let reasoning = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap() as usize;
    assert!((2 * (thought - 1)..=2 * (thought + 1)).contains(&reasoning), "{reasoning} of {}", 2 * thought);
    let body = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
    let events = server.chat(&body).events();
    let (last, others) = events.split_last().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (usage, &json!([])));
    assert!(others.iter().all(|event| event["usage"].is_null() && event.get("usage").is_some()));
    assert!(server.chat(&json!({"stream": true})).events().iter().all(|event| event.get("usage").is_none()));

    let message = server.message(&json!({})).ok();
    let want = json!({
        "input_tokens": prompt - 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 7,
        "output_tokens": count,
    });
    assert_eq!(message["usage"], want);
    let events = server.message(&json!({"stream": true})).events();
    assert_eq!(events[0]["message"]["usage"]["cache_read_input_tokens"], 7);
    let delta = events.iter().find(|event| event["type"] == "message_delta").unwrap();
    assert_eq!(delta["usage"], want);
    let count = server
        .post("/v1/messages/count_tokens", &json!({"messages": [{"role": "user", "content": "hi"}]}))
        .ok();
    assert_eq!(count["input_tokens"], prompt);
}
