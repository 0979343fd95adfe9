//! Chat templates by name, as llama.cpp's `--chat-template NAME` has them: written here as Jinja,
//! after the formats that the models' makers describe, and compared with what llama.cpp makes of
//! conversations.

use Shape::{Each, Program, Roles};

/// The frames that a template puts around messages.
enum Shape {
    /// All roles alike: what stands before a message, in which `@` is its role, and after it; what
    /// an answer begins with.
    Each { before: &'static str, after: &'static str, answer: &'static str },
    /// The text before and after the messages of each role; what an answer begins with.
    Roles { system: Frame, user: Frame, assistant: Frame, answer: &'static str },
    /// A Jinja program.
    Program(&'static str),
}

/// The text before and after a message; `None` drops the message.
type Frame = Option<(&'static str, &'static str)>;

/// True if the white space around messages is trimmed.
type Trims = bool;

/// The template of this name, as Jinja. It begins with the text's first token, which a model need
/// not have.
pub fn find(name: &str) -> Option<String> {
    let (_, start, trims, shape) = TEMPLATES.iter().find(|(names, ..)| names.contains(&name))?;
    let content = if *trims { "m.content | trim" } else { "m.content" };
    let framed =
        |(before, after): (&str, &str)| format!("{}{{{{ {content} }}}}{}", text(before), text(after));
    let (body, answer) = match shape {
        Each { before, after, answer } => (framed((before, after)), *answer),
        Roles { system, user, assistant, answer } => {
            let of = |frame: &Frame| frame.map(framed).unwrap_or_default();
            let (system, user, assistant) = (of(system), of(user), of(assistant));
            let body = format!(
                "{{% if m.role == 'system' %}}{system}{{% elif m.role == 'assistant' %}}{assistant}\
                 {{% else %}}{user}{{% endif %}}"
            );
            (body, *answer)
        }
        Program(program) => return Some(format!("{{{{ bos_token }}}}{program}")),
    };
    Some(format!(
        "{{{{ bos_token }}}}{}{{% for m in messages %}}{body}{{% endfor %}}\
         {{% if add_generation_prompt %}}{}{{% endif %}}",
        text(start),
        text(answer)
    ))
}

/// All names.
pub fn names() -> impl Iterator<Item = &'static str> {
    TEMPLATES.iter().flat_map(|(names, ..)| names.iter().copied())
}

/// The Jinja source that prints `plain`, in which `@` is a message's role.
fn text(plain: &str) -> String {
    let literal = |part: &str| {
        let escaped = part.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n");
        if part.is_empty() { String::new() } else { format!("{{{{ '{escaped}' }}}}") }
    };
    plain.split('@').map(literal).collect::<Vec<_>>().join("{{ m.role }}")
}

/// Names, what a text begins with, whether messages are trimmed, and how they are framed.
const TEMPLATES: &[(&[&str], &str, Trims, Shape)] = &[
    (
        &["chatml"],
        "",
        false,
        Each { before: "<|im_start|>@\n", after: "<|im_end|>\n", answer: "<|im_start|>assistant\n" },
    ),
    (&["phi3"], "", false, Each { before: "<|@|>\n", after: "<|end|>\n", answer: "<|assistant|>\n" }),
    (
        &["phi4"],
        "",
        false,
        Each {
            before: "<|im_start|>@<|im_sep|>",
            after: "<|im_end|>",
            answer: "<|im_start|>assistant<|im_sep|>",
        },
    ),
    (&["falcon3"], "", false, Each { before: "<|@|>\n", after: "\n", answer: "<|assistant|>\n" }),
    (&["zephyr"], "", false, Each { before: "<|@|>\n", after: "<|endoftext|>\n", answer: "<|assistant|>\n" }),
    (
        &["llama3"],
        "",
        true,
        Each {
            before: "<|start_header_id|>@<|end_header_id|>\n\n",
            after: "<|eot_id|>",
            answer: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        },
    ),
    (
        &["llama4"],
        "",
        true,
        Each {
            before: "<|header_start|>@<|header_end|>\n\n",
            after: "<|eot|>",
            answer: "<|header_start|>assistant<|header_end|>\n\n",
        },
    ),
    (&["chatglm3"], "[gMASK]sop", false, Each { before: "<|@|>\n ", after: "", answer: "<|assistant|>" }),
    (&["chatglm4"], "[gMASK]<sop>", false, Each { before: "<|@|>\n", after: "", answer: "<|assistant|>\n" }),
    (&["glmedge"], "", false, Each { before: "<|@|>\n", after: "", answer: "<|assistant|>" }),
    (
        &["granite", "granite-4.0", "granite-4.1"],
        "",
        false,
        Each {
            before: "<|start_of_role|>@<|end_of_role|>",
            after: "<|end_of_text|>\n",
            answer: "<|start_of_role|>assistant<|end_of_role|>",
        },
    ),
    (
        &["megrez"],
        "",
        false,
        Each {
            before: "<|role_start|>@<|role_end|>",
            after: "<|turn_end|>",
            answer: "<|role_start|>assistant<|role_end|>",
        },
    ),
    (
        &["solar-open"],
        "",
        false,
        Each { before: "<|begin|>@<|content|>", after: "<|end|>", answer: "<|begin|>assistant" },
    ),
    (
        &["mistral-v7"],
        "",
        false,
        Roles {
            system: Some(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]")),
            user: Some(("[INST] ", "[/INST]")),
            assistant: Some((" ", "</s>")),
            answer: "",
        },
    ),
    (
        &["mistral-v7-tekken"],
        "",
        false,
        Roles {
            system: Some(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
            user: Some(("[INST]", "[/INST]")),
            assistant: Some(("", "</s>")),
            answer: "",
        },
    ),
    (
        &["openchat"],
        "",
        false,
        Roles {
            system: Some(("", "<|end_of_turn|>")),
            user: Some(("GPT4 Correct User: ", "<|end_of_turn|>")),
            assistant: Some(("GPT4 Correct Assistant: ", "<|end_of_turn|>")),
            answer: "GPT4 Correct Assistant:",
        },
    ),
    (
        &["vicuna"],
        "",
        false,
        Roles {
            system: Some(("", "\n\n")),
            user: Some(("USER: ", "\n")),
            assistant: Some(("ASSISTANT: ", "</s>\n")),
            answer: "ASSISTANT:",
        },
    ),
    (
        &["vicuna-orca"],
        "",
        false,
        Roles {
            system: Some(("SYSTEM: ", "\n")),
            user: Some(("USER: ", "\n")),
            assistant: Some(("ASSISTANT: ", "</s>\n")),
            answer: "ASSISTANT:",
        },
    ),
    (
        &["deepseek"],
        "",
        false,
        Roles {
            system: Some(("", "")),
            user: Some(("### Instruction:\n", "\n")),
            assistant: Some(("### Response:\n", "\n<|EOT|>\n")),
            answer: "### Response:\n",
        },
    ),
    (
        &["deepseek2"],
        "",
        false,
        Roles {
            system: Some(("", "\n\n")),
            user: Some(("User: ", "\n\n")),
            assistant: Some(("Assistant: ", "<｜end▁of▁sentence｜>")),
            answer: "Assistant:",
        },
    ),
    (
        &["deepseek3"],
        "",
        false,
        Roles {
            system: Some(("", "\n\n")),
            user: Some(("<｜User｜>", "")),
            assistant: Some(("<｜Assistant｜>", "<｜end▁of▁sentence｜>")),
            answer: "<｜Assistant｜>",
        },
    ),
    (
        &["command-r"],
        "",
        true,
        Roles {
            system: Some(("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>")),
            user: Some(("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>")),
            assistant: Some(("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>")),
            answer: "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        },
    ),
    (
        &["minicpm"],
        "",
        true,
        Roles {
            system: Some(("", "")),
            user: Some(("<用户>", "<AI>")),
            assistant: Some(("", "")),
            answer: "",
        },
    ),
    (
        &["exaone3", "exaone4"],
        "",
        true,
        Roles {
            system: Some(("[|system|]", "[|endofturn|]\n")),
            user: Some(("[|user|]", "\n")),
            assistant: Some(("[|assistant|]", "[|endofturn|]\n")),
            answer: "[|assistant|]",
        },
    ),
    (
        &["exaone-moe"],
        "",
        true,
        Each { before: "<|@|>\n", after: "<|endofturn|>\n", answer: "<|assistant|>\n" },
    ),
    (
        &["yandex"],
        "",
        false,
        Roles {
            system: None,
            user: Some((" Пользователь: ", "\n\n")),
            assistant: Some((" Ассистент: ", "\n\n")),
            answer: " Ассистент:[SEP]",
        },
    ),
    (
        &["smolvlm"],
        "<|im_start|>",
        false,
        Roles {
            system: Some(("", "\n\n")),
            user: Some(("User: ", "<end_of_utterance>\n")),
            assistant: Some(("Assistant: ", "<end_of_utterance>\n")),
            answer: "Assistant:",
        },
    ),
    (
        &["hunyuan-moe"],
        "",
        false,
        Roles {
            system: Some(("<|startoftext|>", "<|extra_4|>")),
            user: Some(("<|startoftext|>", "<|extra_0|>")),
            assistant: Some(("", "<|eos|>")),
            answer: "",
        },
    ),
    (
        &["hunyuan-dense"],
        "",
        false,
        Roles {
            system: Some(("", "<｜hy_place▁holder▁no▁3｜>")),
            user: Some(("<｜hy_User｜>", "<｜hy_Assistant｜>")),
            assistant: Some(("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>")),
            answer: "",
        },
    ),
    (
        &["kimi-k2"],
        "",
        false,
        Roles {
            system: Some(("<|im_system|>system<|im_middle|>", "<|im_end|>")),
            user: Some(("<|im_user|>user<|im_middle|>", "<|im_end|>")),
            assistant: Some(("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>")),
            answer: "<|im_assistant|>assistant<|im_middle|>",
        },
    ),
    (
        &["gpt-oss"],
        "",
        false,
        Roles {
            system: Some(("<|start|>system<|message|>", "<|end|>")),
            user: Some(("<|start|>user<|message|>", "<|end|>")),
            assistant: Some(("<|start|>assistant<|message|>", "<|return|>")),
            answer: "<|start|>assistant",
        },
    ),
    (
        &["bailing"],
        "",
        false,
        Roles {
            system: Some(("<role>SYSTEM</role>", "")),
            user: Some(("<role>HUMAN</role>", "")),
            assistant: Some(("<role>ASSISTANT</role>", "")),
            answer: "<role>ASSISTANT</role>",
        },
    ),
    (
        &["bailing-think"],
        "",
        false,
        Roles {
            system: Some(("<role>SYSTEM</role>", "")),
            user: Some(("<role>HUMAN</role>", "")),
            assistant: Some(("<role>ASSISTANT</role>", "")),
            answer: "<role>ASSISTANT</role><think>",
        },
    ),
    (&["deepseek-ocr"], "", false, Each { before: "", after: "", answer: "" }),
    // Formats with a state from message to message.
    (&["mistral-v1"], "", false, Program(MISTRAL_V1)),
    (&["mistral-v3"], "", false, Program(MISTRAL_V3)),
    (&["mistral-v3-tekken"], "", false, Program(MISTRAL_V3_TEKKEN)),
    (&["llama2"], "", false, Program(LLAMA_2)),
    (&["llama2-sys"], "", false, Program(LLAMA_2_SYS)),
    (&["llama2-sys-bos"], "", false, Program(LLAMA_2_SYS_BOS)),
    (&["llama2-sys-strip"], "", false, Program(LLAMA_2_SYS_STRIP)),
    (&["monarch"], "", false, Program(MONARCH)),
    (&["gemma"], "", false, Program(GEMMA)),
    (&["seed_oss"], "", false, Program(SEED_OSS)),
    (&["grok-2"], "", false, Program(GROK_2)),
    (&["orion"], "", false, Program(ORION)),
    (&["gigachat"], "", false, Program(GIGACHAT)),
    (&["bailing2"], "", false, Program(BAILING_2)),
    (&["hunyuan-vl"], "", false, Program(HUNYUAN_VL)),
    (&["pangu-embedded"], "", false, Program(PANGU_EMBEDDED)),
    (&["rwkv-world"], "", false, Program(RWKV_WORLD)),
];

// In Mistral's and Llama 2's formats an instruction is open from its first message, be it the
// system's, to the user's.
const MISTRAL_V1: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ ' [INST] ' }}{% set s.open = true %}{% endif %}\
    {% if m.role == 'system' %}{{ m.content + '\\n\\n' }}{% elif m.role == 'user' %}{{ m.content + ' [/INST]' }}\
    {% else %}{{ ' ' + m.content + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const MISTRAL_V3: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ '[INST] ' }}{% set s.open = true %}{% endif %}\
    {% if m.role == 'system' %}{{ m.content + '\\n\\n' }}{% elif m.role == 'user' %}{{ m.content + '[/INST]' }}\
    {% else %}{{ ' ' + m.content | trim + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const MISTRAL_V3_TEKKEN: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ '[INST]' }}{% set s.open = true %}{% endif %}\
    {% if m.role == 'system' %}{{ m.content + '\\n\\n' }}{% elif m.role == 'user' %}{{ m.content + '[/INST]' }}\
    {% else %}{{ m.content + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const LLAMA_2: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ '[INST] ' }}{% set s.open = true %}{% endif %}\
    {% if m.role == 'system' %}{{ m.content + '\\n' }}{% elif m.role == 'user' %}{{ m.content + ' [/INST]' }}\
    {% else %}{{ m.content + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const LLAMA_2_SYS: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ '[INST] ' }}{% set s.open = true %}{% endif %}\
    {% if m.role == 'system' %}{{ '<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n' }}\
    {% elif m.role == 'user' %}{{ m.content + ' [/INST]' }}\
    {% else %}{{ m.content + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const LLAMA_2_SYS_BOS: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ '[INST] ' if loop.first else '<s>[INST] ' }}{% set s.open = true %}{% endif %}\
    {% if m.role == 'system' %}{{ '<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n' }}\
    {% elif m.role == 'user' %}{{ m.content + ' [/INST]' }}\
    {% else %}{{ m.content + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const LLAMA_2_SYS_STRIP: &str = "{% set s = namespace(open=false) %}{% for m in messages %}\
    {% if not s.open %}{{ '[INST] ' }}{% set s.open = true %}{% endif %}{% set text = m.content | trim %}\
    {% if m.role == 'system' %}{{ '<<SYS>>\\n' + text + '\\n<</SYS>>\\n\\n' }}\
    {% elif m.role == 'user' %}{{ text + ' [/INST]' }}\
    {% else %}{{ text + '</s>' }}{% set s.open = false %}{% endif %}{% endfor %}";
const MONARCH: &str = "{% for m in messages %}{{ ('' if loop.first else '<s>') + m.role + '\\n' + m.content + '</s>\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}";
// Gemma has no system message: what it says comes before the next message of the user's.
const GEMMA: &str = "{% set s = namespace(system='') %}{% for m in messages %}\
    {% if m.role == 'system' %}{% set s.system = s.system + m.content | trim %}\
    {% elif m.role == 'assistant' %}{{ '<start_of_turn>model\\n' + m.content | trim + '<end_of_turn>\\n' }}\
    {% else %}{{ '<start_of_turn>' + m.role + '\\n' }}{% if s.system %}{{ s.system + '\\n\\n' }}{% set s.system = '' %}{% endif %}\
    {{ m.content | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";
const SEED_OSS: &str = "{% for m in messages %}{{ '<seed:bos>' + m.role + '\\n' }}\
    {{ m.content | trim if m.role == 'assistant' else m.content }}{{ '<seed:eos>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<seed:bos>assistant\\n' }}{% endif %}";
const GROK_2: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ 'System: ' + m.content | trim }}\
    {% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content }}{% else %}{{ 'Human: ' + m.content | trim }}{% endif %}\
    {{ '<|separator|>\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";
// Orion has no system message either, and no text with which an answer begins.
const ORION: &str = "{% set s = namespace(system='') %}{% for m in messages %}\
    {% if m.role == 'system' %}{% set s.system = s.system + m.content %}\
    {% elif m.role == 'assistant' %}{{ m.content + '</s>' }}\
    {% else %}{{ 'Human: ' }}{% if s.system %}{{ s.system + '\\n\\n' }}{% set s.system = '' %}{% endif %}\
    {{ m.content + '\\n\\nAssistant: </s>' }}{% endif %}{% endfor %}";
// GigaChat and Hunyuan write the first token themselves: it is there once.
const GIGACHAT: &str = "{{ '' if bos_token == '<s>' else '<s>' }}{% for m in messages %}\
    {% if m.role == 'system' %}{% if loop.first %}{{ m.content + '<|message_sep|>' }}{% endif %}\
    {% elif m.role == 'assistant' %}{{ 'assistant<|role_sep|>' + m.content + '<|message_sep|>' }}\
    {% else %}{{ 'user<|role_sep|>' + m.content + '<|message_sep|>available functions<|role_sep|>[]<|message_sep|>' }}\
    {% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant<|role_sep|>' }}{% endif %}";
const BAILING_2: &str = "{% if messages and messages[0].role != 'system' %}\
    {{ '<role>SYSTEM</role>detailed thinking off<|role_end|>' }}{% endif %}{% for m in messages %}\
    {{ '<role>' + ('HUMAN' if m.role == 'user' else m.role | upper) + '</role>' + m.content + '<|role_end|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}";
const HUNYUAN_VL: &str = "{{ '' if bos_token == '<｜hy_begin▁of▁sentence｜>' else '<｜hy_begin▁of▁sentence｜>' }}\
    {% for m in messages %}{% if m.role == 'system' %}\
    {% if loop.first %}{{ m.content + '<｜hy_place▁holder▁no▁3｜>' }}{% endif %}\
    {% elif m.role == 'assistant' %}{{ m.content + '<｜hy_Assistant｜>' }}{% else %}{{ m.content + '<｜hy_User｜>' }}\
    {% endif %}{% endfor %}";
const PANGU_EMBEDDED: &str = "{% for m in messages %}\
    {% if loop.first and m.role != 'system' %}{{ '[unused9]系统：[unused10]' }}{% endif %}\
    {{ '[unused9]' + {'system': '系统', 'assistant': '助手', 'tool': '工具'}.get(m.role, '用户') + '：' + m.content }}\
    {{ '[unused10]' }}{% endfor %}{% if add_generation_prompt %}{{ '[unused9]助手：' }}{% endif %}";
// An answer begins behind a user's message alone.
const RWKV_WORLD: &str = "{% for m in messages %}\
    {% if m.role == 'system' %}{{ 'System: ' + m.content | trim + '\\n\\n' }}\
    {% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content | trim + '\\n\\n' }}\
    {% else %}{{ 'User: ' + m.content | trim + '\\n\\n' }}{% if loop.last %}{{ 'Assistant:' }}{% endif %}{% endif %}\
    {% endfor %}";

#[cfg(test)]
mod tests {
    use super::*;
    use lowbit::{ChatTemplate, Message};
    use serde_json::Value;
    use std::path::Path;

    #[test]
    fn texts_are_those_of_llama_cpp() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/vectors/cases/chat-templates/llama_cpp.json");
        let vectors: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let conversations = vectors["conversations"].as_array().unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_string();
        for (name, want) in vectors["rendered"].as_object().unwrap() {
            let source = find(name).unwrap();
            let template = ChatTemplate::new(&source, Path::new("built in")).unwrap();
            for (conversation, want) in conversations.iter().zip(want.as_array().unwrap()) {
                let messages = conversation.as_array().unwrap().iter();
                let messages: Vec<_> = messages.map(|m| Message::new(text(&m[0]), text(&m[1]))).collect();
                // llama.cpp adds the first token when it makes tokens.
                let got = template.render(&messages, true).unwrap();
                assert_eq!(got, text(want), "{name}");
            }
            let with_bos =
                template.with("bos_token", "<bos>").render(&[Message::new("user", "hi")], true).unwrap();
            assert_eq!(with_bos, format!("<bos>{}", text(&want[0])), "{name}");
        }
        assert!(names().all(|name| vectors["rendered"].get(name).is_some()));
        let once = ChatTemplate::new(&find("gigachat").unwrap(), Path::new("built in")).unwrap();
        let once = once.with("bos_token", "<s>").render(&[Message::new("user", "hi")], false).unwrap();
        assert!(once.starts_with("<s>user"), "{once}");
    }

    #[test]
    fn plain_text_is_printed_as_it_is() {
        let source = text("it's {{ no }} \\n @\n");
        let source = format!("{{% for m in messages %}}{source}{{% endfor %}}");
        let template = ChatTemplate::new(&source, Path::new("built in")).unwrap();
        let got = template.render(&[Message::new("user", "hi")], false).unwrap();
        assert_eq!(got, "it's {{ no }} \\n user\n");
    }
}
