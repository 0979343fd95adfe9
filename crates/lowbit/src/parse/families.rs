//! The spelling of reasoning and tool calls, by model family. Another family is a line here, and a
//! function in `bodies` if its calls have a form of their own.

use super::bodies::{self, Body};

/// The markers around reasoning.
pub(super) struct Reasoning {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

/// The markers around calls, and what stands between them.
pub(super) struct Calls {
    /// A text that chat templates with such calls contain.
    pub(super) mention: &'static str,
    pub(super) open: &'static str,
    pub(super) end: End,
    pub(super) body: Body,
    /// True if the markers are part of the body.
    pub(super) markers_are_body: bool,
}

/// The end of a body.
pub(super) enum End {
    /// Before this marker.
    Marker(&'static str),
    /// With its JSON value, which a name may precede.
    Json,
}

impl Calls {
    const fn new(open: &'static str, close: &'static str, body: Body) -> Self {
        Self { mention: open, open, end: End::Marker(close), body, markers_are_body: false }
    }

    const fn json(open: &'static str, body: Body) -> Self {
        Self { mention: open, open, end: End::Json, body, markers_are_body: false }
    }
}

/// The form of a call between a model's markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// `{"name": NAME, "arguments": {..}}` on a line of its own.
    Json,
    /// `<function=NAME>`, then `<parameter=KEY>` and a value.
    Parameters,
    /// NAME, then `<arg_key>` and `<arg_value>`.
    ArgKeys,
    /// A list of `{"name": NAME, "arguments": {..}}`.
    List,
    /// NAME`[ARGS]`{..}.
    Args,
    /// `{"name": NAME, "parameters": {..}}`, without markers.
    Bare,
}

/// The style of the calls that begin with `open`, by what the template mentions.
pub(super) fn style(open: &str, mentions: impl Fn(&str) -> bool) -> Option<Style> {
    match open {
        "<tool_call>" | "<seed:tool_call>" if mentions("<function=") => Some(Style::Parameters),
        "<tool_call>" if mentions("<arg_key>") => Some(Style::ArgKeys),
        "<tool_call>" | "<longcat_tool_call>" => Some(Style::Json),
        "[TOOL_CALLS]" if mentions("[CALL_ID]") => None,
        "[TOOL_CALLS]" if mentions("[ARGS]") => Some(Style::Args),
        "[TOOL_CALLS]" => Some(Style::List),
        "{\"name\":" => Some(Style::Bare),
        _ => None,
    }
}

pub(super) const REASONING: &[Reasoning] = &[
    Reasoning { open: "<think>", close: "</think>" },
    // Mistral's.
    Reasoning { open: "[THINK]", close: "[/THINK]" },
    Reasoning { open: "<seed:think>", close: "</seed:think>" },
    Reasoning { open: "<longcat_think>", close: "</longcat_think>" },
    // MiniMax M3's, Hunyuan 3's.
    Reasoning { open: "<mm:think>", close: "</mm:think>" },
    Reasoning { open: "<think:opensource>", close: "</think:opensource>" },
    // Gemma 4's.
    Reasoning { open: "<|channel>thought", close: "<channel|>" },
    // Cohere's.
    Reasoning { open: "<|START_THINKING|>", close: "<|END_THINKING|>" },
];

/// The markers around the answer behind reasoning: Hunyuan's, Granite 3.3's.
pub(super) const ANSWERS: &[(&str, &str)] = &[("<answer>", "</answer>"), ("<response>", "</response>")];

pub(super) const CALLS: &[Calls] = &[
    // Hermes, Qwen 2.5 and 3: JSON. Qwen3-Coder, Qwen 3.5, Nemotron 3: <function=NAME>. GLM: NAME
    // and <arg_key>.
    Calls::new("<tool_call>", "</tool_call>", bodies::tool_call),
    Calls::new("<seed:tool_call>", "</seed:tool_call>", bodies::tool_call),
    Calls::new("<longcat_tool_call>", "</longcat_tool_call>", bodies::tool_call),
    // Nemotron Nano 2, Apriel and MiniMax M1, Cohere, GigaChat: JSON.
    Calls::new("<TOOLCALL>", "</TOOLCALL>", bodies::json),
    Calls::new("<tool_calls>", "</tool_calls>", bodies::json),
    Calls::new("<|START_ACTION|>", "<|END_ACTION|>", bodies::json),
    Calls::json("<|function_call|>", bodies::json),
    // Phi-4-mini; Granite 3, which writes no close.
    Calls::new("<|tool_call|>", "<|/tool_call|>", bodies::json),
    // Apertus: a list of objects whose key is the name.
    Calls::new("<|tools_prefix|>", "<|tools_suffix|>", bodies::by_name),
    // Mistral: a list in JSON, or NAME[ARGS] and an object.
    Calls::json("[TOOL_CALLS]", bodies::mistral),
    // Llama 3: JSON, or code for its interpreter.
    Calls::json("<|python_tag|>", bodies::json),
    Calls {
        mention: "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>",
        open: "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>",
        end: End::Marker("<\u{ff5c}tool\u{2581}calls\u{2581}end\u{ff5c}>"),
        body: bodies::deepseek,
        markers_are_body: false,
    },
    Calls {
        mention: "<|tool_call_begin|>",
        open: "<|tool_calls_section_begin|>",
        end: End::Marker("<|tool_calls_section_end|>"),
        body: bodies::kimi,
        markers_are_body: false,
    },
    // DeepSeek 3.2 and 4; their templates put the tags together.
    Calls {
        mention: "\u{ff5c}DSML\u{ff5c}",
        open: "<\u{ff5c}DSML\u{ff5c}function_calls>",
        end: End::Marker("</\u{ff5c}DSML\u{ff5c}function_calls>"),
        body: bodies::dsml,
        markers_are_body: false,
    },
    Calls {
        mention: "\u{ff5c}DSML\u{ff5c}",
        open: "<\u{ff5c}DSML\u{ff5c}tool_calls>",
        end: End::Marker("</\u{ff5c}DSML\u{ff5c}tool_calls>"),
        body: bodies::dsml,
        markers_are_body: false,
    },
    Calls::new("<minimax:tool_call>", "</minimax:tool_call>", bodies::minimax),
    Calls {
        mention: "<function name=\"",
        open: "<function name=\"",
        end: End::Marker("</function>"),
        body: bodies::minicpm,
        markers_are_body: true,
    },
    // Functionary, and Llama 3.1 with tools of its users: NAME> and an object.
    Calls {
        mention: "<function=example_function_name>{",
        open: "<function=",
        end: End::Marker("</function>"),
        body: bodies::function_and_json,
        markers_are_body: true,
    },
    // Hunyuan 3; its template puts the tags together.
    Calls {
        mention: "<tool_calls{}>",
        open: "<tool_calls:opensource>",
        end: End::Marker("</tool_calls:opensource>"),
        body: bodies::hunyuan,
        markers_are_body: false,
    },
    // Command R+: a list in JSON.
    Calls {
        mention: "Action:\\n```json",
        open: "Action:\n```json",
        end: End::Marker("```"),
        body: bodies::json,
        markers_are_body: false,
    },
    // Gemma 4 and FunctionGemma.
    Calls::new("<|tool_call>", "<tool_call|>", bodies::gemma_4),
    Calls::new("<start_function_call>", "<end_function_call>", bodies::function_gemma),
    // LFM 2: calls as in Python.
    Calls::new("<|tool_call_start|>", "<|tool_call_end|>", bodies::pythonic),
    // Olmo 3: the same, one on each line.
    Calls::new("<function_calls>", "</function_calls>", bodies::pythonic),
];

const fn bare(open: &'static str) -> Calls {
    // Templates of Llama 3 tell the model to write this.
    Calls {
        mention: "{\"name\": function name, \"parameters\"",
        open,
        end: End::Json,
        body: bodies::bare_json,
        markers_are_body: true,
    }
}

/// The starts of Llama 3's replies that are a call without `<|python_tag|>`.
pub(super) const BARE_JSON: &[Calls] = &[
    bare("{\"name\":"),
    bare("{ \"name\":"),
    bare("{\n  \"name\":"),
    bare("{\"type\": \"function\","),
    bare("{\"function\":"),
];

/// gpt-oss's: messages with a header each,
/// `<|start|>assistant<|channel|>CHANNEL to=RECIPIENT<|message|>..<|end|>`.
pub(super) mod harmony {
    pub(crate) const START: &str = "<|start|>";
    pub(crate) const CHANNEL: &str = "<|channel|>";
    pub(crate) const CONSTRAIN: &str = "<|constrain|>";
    pub(crate) const MESSAGE: &str = "<|message|>";
    /// The ends of a message.
    pub(crate) const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];
}
