//! T15 of the server's acceptance tests: replies of nine families, made here in every combination
//! of their parts and read in every cut, never leave markup in their content.

use lowbit::{ChatTemplate, Event, Syntax};
use serde_json::{Value, json};

/// A family's spelling.
struct Family {
    name: &'static str,
    /// The names that its chat templates mention.
    mentions: &'static str,
    /// The end of its prompts.
    prompt: &'static str,
    reasoning: fn(&str) -> String,
    content: fn(&str) -> String,
    /// Calls of `f` with the argument `s`.
    calls: fn(&[&str]) -> String,
}

/// A text in JSON.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

fn each(texts: &[&str], one: impl Fn(&str) -> String) -> String {
    texts.iter().map(|text| one(text)).collect()
}

fn think(text: &str) -> String {
    format!("<think>\n{text}\n</think>\n\n")
}

const FAMILIES: [Family; 9] = [
    Family {
        name: "Hermes",
        mentions: "<think></think><tool_call></tool_call>",
        prompt: "<|im_start|>assistant\n",
        reasoning: think,
        content: str::to_owned,
        calls: |texts| {
            let call =
                |text: &str| format!("{{\"name\": \"f\", \"arguments\": {{\"s\": {}}}}}", quoted(text));
            each(texts, |text| format!("\n<tool_call>\n{}\n</tool_call>", call(text)))
        },
    },
    Family {
        name: "Qwen3-Coder",
        mentions: "<think></think><tool_call>\n<function=",
        prompt: "<|im_start|>assistant\n",
        reasoning: think,
        content: str::to_owned,
        calls: |texts| {
            let call = |text: &str| format!("<function=f>\n<parameter=s>\n{text}\n</parameter>\n</function>");
            each(texts, |text| format!("\n<tool_call>\n{}\n</tool_call>", call(text)))
        },
    },
    Family {
        name: "GLM",
        mentions: "<think></think><tool_call><arg_key>",
        prompt: "<|assistant|>",
        reasoning: think,
        content: str::to_owned,
        calls: |texts| {
            let value = |text: &str| format!("<arg_key>s</arg_key>\n<arg_value>{text}</arg_value>");
            each(texts, |text| format!("\n<tool_call>f\n{}\n</tool_call>", value(text)))
        },
    },
    Family {
        name: "Mistral",
        mentions: "[TOOL_CALLS][THINK][/THINK]",
        prompt: "[/INST]",
        reasoning: |text| format!("[THINK]{text}[/THINK]"),
        content: str::to_owned,
        calls: |texts| each(texts, |text| format!("[TOOL_CALLS]f[ARGS]{{\"s\": {}}}", quoted(text))),
    },
    Family {
        name: "Llama",
        mentions: "<|python_tag|>",
        prompt: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        // It does not reason.
        reasoning: |_| String::new(),
        content: str::to_owned,
        calls: |texts| {
            let call =
                |text: &str| format!("{{\"name\": \"f\", \"parameters\": {{\"s\": {}}}}}", quoted(text));
            each(texts, |text| format!("<|python_tag|>{}", call(text)))
        },
    },
    Family {
        name: "gpt-oss",
        mentions: "<|channel|><|message|>",
        prompt: "<|end|><|start|>assistant",
        reasoning: |text| format!("<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"),
        content: |text| match text {
            "" => String::new(),
            _ => format!("<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"),
        },
        calls: |texts| {
            let head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
            let call = |text: &str| format!("{head}{{\"s\": {}}}<|call|>", quoted(text));
            texts.iter().map(|text| call(text)).collect::<Vec<_>>().join("<|start|>assistant")
        },
    },
    Family {
        name: "Gemma 4",
        mentions: "<|tool_call><|channel>thought<channel|>",
        prompt: "<|turn>model\n",
        reasoning: |text| format!("<|channel>thought\n{text}<channel|>"),
        content: str::to_owned,
        calls: |texts| each(texts, |text| format!("<|tool_call>call:f{{s:<|\"|>{text}<|\"|>}}<tool_call|>")),
    },
    Family {
        name: "LFM2",
        mentions: "<think></think><|tool_call_start|>",
        prompt: "<|im_start|>assistant\n",
        reasoning: think,
        content: str::to_owned,
        calls: |texts| {
            let call = |text: &&str| format!("f(s={})", quoted(text));
            let calls: Vec<String> = texts.iter().map(call).collect();
            if calls.is_empty() {
                String::new()
            } else {
                format!("<|tool_call_start|>[{}]<|tool_call_end|>", calls.join(", "))
            }
        },
    },
    Family {
        name: "Olmo 3",
        mentions: "<think></think><function_calls></function_calls>",
        prompt: "<|im_start|>assistant\n",
        reasoning: think,
        content: str::to_owned,
        calls: |texts| match texts {
            [] => String::new(),
            texts => {
                let calls = each(texts, |text| format!("f(s={})\n", quoted(text)));
                format!("<function_calls>\n{calls}</function_calls>")
            }
        },
    },
];

const REASONINGS: [&str; 3] = ["", "Hm. Yes.", "a < b && c {\"x\": [1]} \u{6f22}\u{5b57}"];

/// Texts that begin like markup, and are none.
const CONTENTS: [&str; 10] = [
    "",
    "Let me look.",
    "a < b, and 1 <tool",
    "[1] is [TOOL",
    "<|",
    "\u{1f642} caf\u{e9} \u{6f22}\u{5b57}",
    "{\"name\": 5} is JSON",
    "`<|tool` or `<think` or </too",
    "two\n\nlines",
    "<",
];

/// Arguments, one list per reply.
const CALLS: [&[&str]; 17] = [
    &[],
    &["a b"],
    &["caf\u{e9} \u{1f642}"],
    &["x < y"],
    &["[1, 2] {3}"],
    &["two\nlines"],
    &["<tool"],
    &["a: b, c"],
    &["'s"],
    &["a", "b"],
    &["x < y", "x > y"],
    &["\u{6f22}\u{5b57}", "z"],
    &["a b", "c d"],
    &["one\ntwo", "q"],
    &["[", "]"],
    &["{", "}"],
    &["-", "_"],
];

/// The parts of a reply: reasoning, content, and the calls' arguments.
#[derive(Debug, Default, PartialEq)]
struct Parts {
    reasoning: String,
    content: String,
    calls: Vec<Value>,
}

fn parts<'a>(syntax: &Syntax, prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> Parts {
    let (mut parser, mut parts) = (syntax.parser(prompt, 0), Parts::default());
    let mut take = |events: Vec<Event>| {
        for event in events {
            match event {
                Event::Reasoning(text) => parts.reasoning.push_str(&text),
                Event::Content(text) => parts.content.push_str(&text),
                Event::Call(call) => {
                    assert_eq!(call.name, "f");
                    parts.calls.push(serde_json::from_str(&call.arguments).unwrap());
                }
            }
        }
    };
    pieces.into_iter().for_each(|piece| take(parser.text(piece)));
    take(parser.finish());
    parts
}

/// Schemas that say that the argument is a text.
fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"s": {"type": "string"}}});
    json!([{"type": "function", "function": {"name": "f", "parameters": schema}}])
}

#[test]
fn t15_no_cut_of_500_replies_of_each_family_shows_markup() {
    for family in &FAMILIES {
        let source = format!("{{% raw %}}{}{{% endraw %}}", family.mentions);
        let template = ChatTemplate::new(&source, "template".as_ref()).unwrap().with("tools", tools());
        let syntax = Syntax::new(&template, None);
        let mut replies = 0;
        for (reasoning, content, calls) in REASONINGS
            .iter()
            .flat_map(|r| CONTENTS.iter().flat_map(move |c| CALLS.iter().map(move |calls| (r, c, calls))))
        {
            let start = if reasoning.is_empty() { String::new() } else { (family.reasoning)(reasoning) };
            let reply = start.clone() + &(family.content)(content) + &(family.calls)(calls);
            let want = Parts {
                reasoning: if start.is_empty() { String::new() } else { reasoning.to_string() },
                content: content.to_string(),
                calls: calls.iter().map(|text| json!({"s": text})).collect(),
            };
            let name = family.name;
            let whole = parts(&syntax, family.prompt, [reply.as_str()]);
            assert_eq!(whole, want, "{name}: {reply:?}");
            for cut in (1..reply.len()).filter(|&cut| reply.is_char_boundary(cut)) {
                let (one, other) = reply.split_at(cut);
                assert_eq!(parts(&syntax, family.prompt, [one, other]), want, "{name}: {one:?} {other:?}");
            }
            let mut buffer = vec![];
            buffer.extend(reply.char_indices().map(|(at, c)| &reply[at..at + c.len_utf8()]));
            assert_eq!(parts(&syntax, family.prompt, buffer), want, "{name}: {reply:?} by characters");
            replies += 1;
        }
        assert!(replies >= 500);
    }
}
