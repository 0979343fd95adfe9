//! The schemas of `/openapi.json`: each field that a handler reads, with its type. A test compares
//! them with what the handlers take.

use crate::options::{LOGPROBS, REPLIES, STOPS, TOOLS};
use crate::{anthropic, embeddings, ollama, openai, rerank, responses};
use serde_json::{Map, Value, json};

/// Names and schemas of an object's fields.
type Properties = Vec<(&'static str, Value)>;

fn string() -> Value {
    json!({"type": "string"})
}

fn flag() -> Value {
    json!({"type": "boolean"})
}

fn number(least: f64, most: f64) -> Value {
    json!({"type": "number", "minimum": least, "maximum": most})
}

fn whole(least: i64) -> Value {
    json!({"type": "integer", "minimum": least, "maximum": i64::MAX})
}

/// A number of tokens, or -1 for as many as the context holds.
fn tokens(least: i64) -> Value {
    either(&[whole(least), json!({"const": -1})])
}

fn list(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

fn at_least_one(of: Value) -> Value {
    json!({"type": "array", "items": of, "minItems": 1})
}

fn either(of: &[Value]) -> Value {
    json!({"anyOf": of})
}

fn one_of(texts: &[&str]) -> Value {
    json!({"enum": texts})
}

fn any_object() -> Value {
    json!({"type": "object"})
}

fn ids() -> Value {
    list(json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}))
}

/// An object with these fields, of which the `required` must be there.
fn object(required: &[&str], properties: Properties) -> Value {
    let properties: Map<String, Value> = properties.into_iter().map(|(name, of)| (name.into(), of)).collect();
    json!({"type": "object", "properties": properties, "required": required})
}

/// Fields that clients send and that change nothing here.
fn idle(names: &[&'static str]) -> Properties {
    names.iter().map(|name| (*name, json!({"description": "Without effect"}))).collect()
}

pub(super) fn schemas() -> Value {
    let error = object(&["message", "type"], vec![("message", string()), ("type", string())]);
    let of_anthropic = vec![("type", json!({"const": "error"})), ("error", error.clone())];
    let mut all = json!({
        "Error": object(&["error"], vec![("error", error)]),
        "AnthropicError": object(&["type", "error"], of_anthropic),
        "OllamaError": object(&["error"], vec![("error", string())]),
        "Health": any_object(),
        "Chat": chat(),
        "Completion": completion(),
        "Responses": of_responses(),
        "InputTokens": object(&["input"], [
            of_input(),
            vec![("model", string())],
            idle(&responses::COUNT_WITHOUT_EFFECT),
        ].concat()),
        "Messages": messages(),
        "Count": object(&["messages"], [turns(), vec![("model", string())]].concat()),
        "Conversation": object(&["messages"], [conversation(), vec![("model", string())]].concat()),
    });
    for (name, schema) in texts().into_iter().chain(of_ollama()) {
        all[name] = schema;
    }
    all
}

/// The fields that say which tokens are chosen.
fn sampling() -> Properties {
    let penalty = json!({"type": "number", "exclusiveMinimum": 0, "maximum": 10});
    vec![
        ("temperature", number(0.0, 100.0)),
        ("top_p", number(0.0, 1.0)),
        ("top_k", whole(-1)),
        ("min_p", number(0.0, 1.0)),
        ("presence_penalty", number(-2.0, 2.0)),
        ("frequency_penalty", number(-2.0, 2.0)),
        ("repetition_penalty", penalty.clone()),
        ("repeat_penalty", penalty),
        ("repetition_context", whole(0)),
        ("repeat_last_n", whole(-1)),
        ("seed", json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX})),
        ("logit_bias", json!({"type": "object", "additionalProperties": number(-100.0, 100.0)})),
        ("ignore_eos", flag()),
    ]
}

/// The fields that all requests for a reply have.
fn reply() -> Properties {
    [sampling(), vec![("model", string()), ("stream", flag())]].concat()
}

fn stops() -> Value {
    either(&[string(), json!({"type": "array", "items": string(), "maxItems": STOPS})])
}

/// A JSON schema, or its text.
fn schema() -> Value {
    json!({"type": ["object", "string"]})
}

/// A reply's form, as `response_format` and its kin spell it.
fn format() -> Value {
    let inner = vec![("schema", schema()), ("name", string()), ("description", string()), ("strict", flag())];
    let of = ["text", "json_object", "json_schema", "regex", "grammar"];
    object(
        &["type"],
        vec![
            ("type", one_of(&of)),
            ("json_schema", object(&["schema"], inner.clone())),
            ("pattern", string()),
            ("grammar", string()),
        ]
        .into_iter()
        .chain(inner)
        .collect(),
    )
}

/// The fields that ask for a form, of which a request may have one.
fn forms() -> Properties {
    let choice = || at_least_one(string());
    let outputs = vec![
        ("json", schema()),
        ("regex", string()),
        ("choice", choice()),
        ("grammar", string()),
        ("json_object", flag()),
    ];
    vec![
        ("response_format", format()),
        ("grammar", string()),
        ("json_schema", schema()),
        ("guided_json", schema()),
        ("guided_regex", string()),
        ("guided_choice", choice()),
        ("guided_grammar", string()),
        ("structured_outputs", object(&[], outputs)),
    ]
}

fn text_part() -> Value {
    let text = vec![("type", one_of(&["text", "input_text", "output_text"])), ("text", string())];
    let refusal = vec![("type", json!({"const": "refusal"})), ("refusal", string())];
    either(&[object(&["type", "text"], text), object(&["type", "refusal"], refusal)])
}

/// A text, or parts of text.
fn content() -> Value {
    either(&[string(), list(text_part())])
}

/// A call of an earlier reply.
fn tool_call() -> Value {
    let arguments = either(&[string(), any_object()]);
    let function = object(&["name"], vec![("name", string()), ("arguments", arguments)]);
    object(&["function"], vec![("id", string()), ("function", function)])
}

/// OpenAI's tools, and those of `/v1/responses`, which have no object for the function.
fn tools() -> Value {
    let function = || {
        vec![("name", string()), ("description", string()), ("parameters", any_object()), ("strict", flag())]
    };
    let of = ("type", json!({"const": "function"}));
    let nested = object(&["function"], vec![of.clone(), ("function", object(&["name"], function()))]);
    let flat = object(&["type", "name"], [vec![of], function()].concat());
    json!({"type": "array", "items": either(&[nested, flat]), "maxItems": TOOLS})
}

fn tool_choice() -> Value {
    let of = ("type", json!({"const": "function"}));
    let name = || vec![("name", string())];
    either(&[
        one_of(&["auto", "none", "required"]),
        object(&["type", "function"], vec![of.clone(), ("function", object(&["name"], name()))]),
        object(&["type", "name"], [vec![of], name()].concat()),
    ])
}

fn effort() -> Value {
    object(&[], vec![("effort", string())])
}

/// The fields of a conversation in OpenAI's form.
fn conversation() -> Properties {
    let message = object(
        &["role"],
        vec![
            ("role", one_of(&["system", "developer", "user", "assistant", "tool"])),
            ("content", content()),
            ("reasoning_content", string()),
            ("reasoning", string()),
            ("name", string()),
            ("tool_call_id", string()),
            ("tool_calls", list(tool_call())),
        ],
    );
    vec![
        ("messages", at_least_one(message)),
        ("tools", tools()),
        ("tool_choice", tool_choice()),
        ("chat_template_kwargs", any_object()),
        ("reasoning", effort()),
        ("reasoning_effort", string()),
    ]
}

fn replies() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": REPLIES})
}

fn stream_options() -> Value {
    object(&[], vec![("include_usage", flag())])
}

fn logprobs() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": LOGPROBS})
}

fn chat() -> Value {
    let own = vec![
        ("max_completion_tokens", tokens(1)),
        ("max_tokens", tokens(1)),
        ("n", replies()),
        ("stop", stops()),
        ("logprobs", flag()),
        ("top_logprobs", logprobs()),
        ("parallel_tool_calls", flag()),
        ("stream_options", stream_options()),
        ("return_token_ids", flag()),
        ("modalities", list(json!({"const": "text"}))),
    ];
    let idle = idle(&openai::chat::WITHOUT_EFFECT);
    object(&["messages"], [conversation(), own, forms(), reply(), idle].concat())
}

fn completion() -> Value {
    let prompt = either(&[string(), ids(), list(either(&[string(), ids()]))]);
    let own = vec![
        ("prompt", prompt),
        ("max_tokens", tokens(0)),
        ("n", replies()),
        ("best_of", whole(1)),
        ("stop", stops()),
        ("logprobs", logprobs()),
        ("echo", flag()),
        ("return_token_ids", flag()),
        ("stream_options", stream_options()),
    ];
    let idle = idle(&openai::completions::WITHOUT_EFFECT);
    object(&["prompt"], [own, forms(), reply(), idle].concat())
}

/// The fields of a conversation in the form of `/v1/responses`.
fn of_input() -> Properties {
    let of = |name: &str| ("type", json!({"const": name}));
    let role = one_of(&["user", "assistant", "system", "developer"]);
    let thought = vec![("type", json!({"const": "reasoning_text"})), ("text", string())];
    let thoughts = list(either(&[object(&["type", "text"], thought), text_part()]));
    let call = vec![of("function_call"), ("call_id", string()), ("name", string()), ("arguments", string())];
    let output = vec![of("function_call_output"), ("call_id", string()), ("output", content())];
    let item = either(&[
        object(&["role"], vec![of("message"), ("role", role), ("content", content())]),
        object(&["type"], vec![of("reasoning"), ("content", thoughts)]),
        object(&["type", "call_id", "name"], call),
        object(&["type", "call_id"], output),
    ]);
    vec![
        ("input", either(&[string(), list(item)])),
        ("instructions", string()),
        ("tools", tools()),
        ("tool_choice", tool_choice()),
        ("chat_template_kwargs", any_object()),
        ("reasoning", effort()),
    ]
}

fn of_responses() -> Value {
    let own = vec![
        ("max_output_tokens", tokens(1)),
        ("text", object(&[], vec![("format", format())])),
        ("parallel_tool_calls", flag()),
    ];
    object(&["input"], [of_input(), own, reply(), idle(&responses::WITHOUT_EFFECT)].concat())
}

/// The fields of a conversation in Anthropic's form.
fn turns() -> Properties {
    let of = |name: &str| ("type", json!({"const": name}));
    let text = || object(&["type", "text"], vec![of("text"), ("text", string())]);
    let texts = || either(&[string(), list(text())]);
    let result = vec![of("tool_result"), ("tool_use_id", string()), ("content", texts())];
    let call = vec![of("tool_use"), ("id", string()), ("name", string()), ("input", any_object())];
    let block = either(&[
        text(),
        object(&["type", "tool_use_id"], result),
        object(&["type", "id", "name"], call),
        object(&["type", "thinking"], vec![of("thinking"), ("thinking", string())]),
        object(&["type"], vec![of("redacted_thinking")]),
    ]);
    let role = one_of(&["user", "assistant", "system"]);
    let content = either(&[string(), list(block)]);
    let turn = object(&["role", "content"], vec![("role", role), ("content", content)]);
    let tool = vec![
        ("type", string()),
        ("name", string()),
        ("input_schema", any_object()),
        ("description", string()),
        ("strict", flag()),
    ];
    let tools = json!({"type": "array", "items": object(&["name"], tool), "maxItems": TOOLS});
    let choice = vec![
        ("type", one_of(&["auto", "any", "tool", "none"])),
        ("name", string()),
        ("disable_parallel_tool_use", flag()),
    ];
    let thinking = one_of(&["enabled", "adaptive", "disabled"]);
    let thinking = vec![("type", thinking), ("budget_tokens", whole(0))];
    vec![
        ("messages", at_least_one(turn)),
        ("system", texts()),
        ("tools", tools),
        ("tool_choice", object(&["type"], choice)),
        ("thinking", object(&["type"], thinking)),
        ("output_config", object(&[], vec![("effort", string()), ("format", format())])),
        ("chat_template_kwargs", any_object()),
    ]
}

fn messages() -> Value {
    let own = vec![("max_tokens", tokens(1)), ("stop_sequences", stops()), ("output_format", format())];
    object(&["messages", "max_tokens"], [turns(), own, reply(), idle(&anthropic::WITHOUT_EFFECT)].concat())
}

fn texts() -> Properties {
    let input = either(&[string(), ids(), list(string()), list(ids())]);
    let document = either(&[string(), object(&["text"], vec![("text", string())])]);
    let model = ("model", string());
    let of_embeddings = vec![
        ("input", input),
        ("encoding_format", one_of(&["float", "base64"])),
        ("dimensions", whole(1)),
        ("prompt_name", string()),
        ("truncate_prompt_tokens", json!({"const": -1})),
        model.clone(),
    ];
    let of_rerank = vec![
        ("query", string()),
        ("documents", at_least_one(document)),
        ("top_n", whole(1)),
        ("return_documents", flag()),
        ("truncation", flag()),
        ("instruction", string()),
        model.clone(),
    ];
    let of_tokenize = vec![
        ("content", string()),
        ("prompt", string()),
        ("add_special", flag()),
        ("add_special_tokens", flag()),
        ("with_pieces", flag()),
        model.clone(),
    ];
    let (of_embeddings, of_rerank) = (
        [of_embeddings, idle(&embeddings::WITHOUT_EFFECT)].concat(),
        [of_rerank, idle(&rerank::WITHOUT_EFFECT)].concat(),
    );
    vec![
        ("Embeddings", object(&["input"], of_embeddings)),
        ("Rerank", object(&["query", "documents"], of_rerank)),
        ("Tokenize", object(&[], [of_tokenize, conversation()].concat())),
        ("Detokenize", object(&["tokens"], vec![("tokens", ids()), model])),
    ]
}

/// The fields that both of Ollama's paths for replies have.
fn ollama_reply() -> Properties {
    let own = vec![("num_predict", whole(-2)), ("stop", stops())];
    let options = [sampling(), own, idle(&ollama::OPTIONS_WITHOUT_EFFECT)].concat();
    let of = vec![
        ("model", string()),
        ("stream", flag()),
        ("think", either(&[flag(), string()])),
        ("format", either(&[one_of(&["", "json"]), any_object()])),
        ("options", object(&[], options)),
    ];
    [of, idle(&ollama::WITHOUT_EFFECT)].concat()
}

fn of_ollama() -> Properties {
    let call = object(
        &["function"],
        vec![("function", object(&["name"], vec![("name", string()), ("arguments", any_object())]))],
    );
    let message = object(
        &["role"],
        vec![
            ("role", one_of(&["system", "user", "assistant", "tool"])),
            ("content", string()),
            ("thinking", string()),
            ("tool_name", string()),
            ("tool_calls", list(call)),
        ],
    );
    let chat = vec![("messages", at_least_one(message)), ("tools", tools())];
    let generate = vec![("prompt", string()), ("system", string()), ("raw", flag())];
    let show = [vec![("model", string())], idle(&ollama::SHOW_WITHOUT_EFFECT)].concat();
    let embed = |name: &'static str, input: Value| {
        let own = vec![
            ("model", string()),
            (name, input),
            ("dimensions", whole(1)),
            ("prompt_name", string()),
            ("truncate", flag()),
        ];
        object(&["model", name], [own, idle(&embeddings::OLLAMA_WITHOUT_EFFECT)].concat())
    };
    vec![
        ("OllamaChat", object(&["model", "messages"], [chat, ollama_reply()].concat())),
        ("OllamaGenerate", object(&["model"], [generate, ollama_reply()].concat())),
        ("OllamaEmbed", embed("input", either(&[string(), list(string())]))),
        ("OllamaEmbedding", embed("prompt", string())),
        ("OllamaShow", object(&["model"], show)),
    ]
}
