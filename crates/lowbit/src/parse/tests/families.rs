//! Replies of each family as its models spell them.

use super::*;

/// A family's markers, how its prompts end, and replies with what they are.
struct Family {
    mentions: &'static str,
    /// Those of them that are tokens in its tokenizers.
    tokens: &'static [&'static str],
    prompt: &'static str,
    replies: &'static [(&'static str, &'static str)],
}

#[track_caller]
fn check(family: &Family) {
    let Family { mentions, tokens, prompt, replies } = family;
    let tokenizer = tokenizer(tokens);
    for (reply, want) in *replies {
        // These are with tools whose schemas say what arguments are.
        let (reply, template) = match reply.strip_prefix("[tools]") {
            Some(reply) => (reply, template(mentions).with("tools", tools())),
            None => (*reply, template(mentions)),
        };
        for (kind, added) in [("text", &[][..]), ("tokens", *tokens)] {
            let syntax = Syntax::new(&template, (kind == "tokens").then_some(&tokenizer));
            // A token that is part of no marker is text.
            let told = pieces(reply, added).into_iter().map(|piece| match piece {
                Piece::Token(id) if syntax.marker(id).is_none() => Piece::Text(tokenizer.token(id).unwrap()),
                piece => piece,
            });
            let told: Vec<Piece> = told.collect();
            let whole = parts(&syntax, prompt, told.iter().cloned());
            assert_eq!(show(&whole), *want, "{kind}: {reply}");
            if kind == "text" {
                for cut in (0..=reply.len()).filter(|&cut| reply.is_char_boundary(cut)) {
                    let cut = [&reply[..cut], &reply[cut..]].map(|text| Piece::Text(text.into()));
                    assert_eq!(parts(&syntax, prompt, cut.clone()), whole, "{cut:?}");
                }
            }
        }
    }
}

#[test]
fn hermes_and_qwen3() {
    check(&Family {
        mentions: "<think></think><tool_call></tool_call>",
        tokens: &["<think>", "</think>", "<tool_call>", "</tool_call>"],
        prompt: "<|im_start|>assistant\n",
        replies: &[
            ("Hello  \n", "Hello  \n"),
            ("", ""),
            (" \n", " \n"),
            ("<think>\nHm.\n\nYes.\n</think>\n\nHello", "(Hm.\n\nYes.)|Hello"),
            ("<think>\n\n</think>\n\nHello", "Hello"),
            ("\n<think>Hm", "(Hm)"),
            ("<think>Hm</think>", "(Hm)"),
            ("<think>a</think>\n</think>\nb", "(a)|b"),
            ("</think>b", "b"),
            ("a <think>b</think>", "a <think>b</think>"),
            ("a < b, <thin", "a < b, <thin"),
            (
                "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"é\", \"n\": 1.50}}\n</tool_call>",
                "<f {\"s\": \"é\", \"n\": 1.50}>",
            ),
            (
                "<think>a</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"f\"}\n</tool_call>\n<tool_call>\n{\"name\": \
                 \"g\", \"arguments\": \"{\\\"x\\\": 1}\"}\n</tool_call>",
                "(a)|Let me see.|<f {}>|<g {\"x\": 1}>",
            ),
            ("<tool_call>{\"name\": \"f\"}", "<f {}>"),
            ("<tool_call>{\"name\": \"f\"}</tool_call> done ", "<f {}>|done "),
            ("<tool_call>{\"name\": \"f\", </tool_call>x", "<tool_call>{\"name\": \"f\", </tool_call>x"),
            ("a <tool_call>\nno\n</tool_call> b", "a <tool_call>\nno\n</tool_call> b"),
            ("<tool_call>{\"name\": \"f\", \"argu", "<tool_call>{\"name\": \"f\", \"argu"),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
                "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
            ),
            ("<tool_call>{\"name\": \"f\"}</tool_call><think>b</think>c", "<f {}>|(b)|c"),
            ("<think>a<tool_call>b</think>c", "(a<tool_call>b)|c"),
        ],
    });
}

#[test]
fn a_marker_that_an_argument_spells_is_part_of_it() {
    const REPLY: &str = "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call>\"}}</tool_call>";
    const CALL: &str = "<f {\"s\": \"</tool_call>\"}>";
    check(&Family { mentions: "<tool_call>", tokens: &[], prompt: "", replies: &[(REPLY, CALL)] });
    // As a token it is the marker.
    let tokenizer = tokenizer(&["<tool_call>", "</tool_call>"]);
    let syntax = Syntax::new(&template(""), Some(&tokenizer));
    let [open, close] = [Piece::Token(1), Piece::Token(2)];
    let body = Piece::Text("{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call>\"}}".into());
    assert_eq!(show(&parts(&syntax, "", [open.clone(), body, close.clone()])), CALL);
    let cut = Piece::Text("{\"name\": \"f\", ".into());
    assert_eq!(
        show(&parts(&syntax, "", [open, cut, close, Piece::Text("x".into())])),
        "<tool_call>{\"name\": \"f\", </tool_call>x"
    );
    // In text, it is none.
    assert_eq!(show(&parts(&syntax, "", [Piece::Text(REPLY.into())])), REPLY);
}

#[test]
fn a_prompt_that_opens_the_reasoning() {
    let family = |prompt, replies| Family {
        mentions: "<think></think>",
        tokens: &["<think>", "</think>"],
        prompt,
        replies,
    };
    check(&family(
        "<|im_start|>assistant\n<think>\n",
        &[
            ("Hm.\n</think>\n\nHello", "(Hm.)|Hello"),
            ("never closed ", "(never closed)"),
            ("</think>\n\nHello", "Hello"),
            ("<think>\na</think>b", "(a)|b"),
            ("a <think> b</think>c", "(a <think> b)|c"),
        ],
    ));
    check(&family(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        &[("Hello", "Hello"), ("<think>a</think>b", "(a)|b")],
    ));
}

#[test]
fn qwen3_coder_and_qwen3_5() {
    check(&Family {
        mentions: "<think></think><tool_call>\n<function=",
        tokens: &["<think>", "</think>", "<tool_call>", "</tool_call>"],
        prompt: "<|im_start|>assistant\n<think>\n",
        replies: &[
            (
                "a\n</think>\n\nok\n\n<tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=y>\ntwo\nlines\n\
                 </parameter>\n</function>\n</tool_call>",
                "(a)|ok|<f {\"s\":5,\"y\":\"two\\nlines\"}>",
            ),
            (
                "[tools]</think><tool_call>\n<function=f>\n<parameter=s>\n5\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n\
                 </function>\n</tool_call>",
                "<f {\"s\":\"5\",\"b\":true}>",
            ),
            ("</think><tool_call>\n<function=g>\n</function>\n</tool_call>", "<g {}>"),
            (
                "</think><tool_call><function=f><parameter=q>a</parameter> b</parameter></function></tool_call>",
                "<f {\"q\":\"a</parameter> b\"}>",
            ),
            (
                "</think><tool_call>\n<function=f>\n<parameter=s>\n5",
                "<tool_call>\n<function=f>\n<parameter=s>\n5",
            ),
        ],
    });
}

#[test]
fn mistral() {
    check(&Family {
        mentions: "[TOOL_CALLS][THINK][/THINK]",
        tokens: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
        prompt: "[/INST]",
        replies: &[
            (
                "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"s\": \"]\"}, \"id\": \"abcdefghi\"}]",
                "<f {\"s\": \"]\"}abcdefghi>",
            ),
            ("[TOOL_CALLS] [{\"name\": \"f\"}, {\"name\": \"g\"}]", "<f {}>|<g {}>"),
            ("ok[TOOL_CALLS]f[ARGS]{\"n\": 1}[TOOL_CALLS]g[ARGS]{}", "ok|<f {\"n\": 1}>|<g {}>"),
            ("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{\"n\": 1}", "<f {\"n\": 1}abc123def>"),
            ("[TOOL_CALLS][{}]", "[TOOL_CALLS][{}]"),
            ("[TOOL_CALLS] I will not", "[TOOL_CALLS] I will not"),
            ("[TOOL_CALLS]f[ARGS]{\"n\": ", "[TOOL_CALLS]f[ARGS]{\"n\": "),
            ("[TOOL_CALLS]", "[TOOL_CALLS]"),
            ("[THINK]r[/THINK]A", "(r)|A"),
            ("[1] and [TOOL", "[1] and [TOOL"),
        ],
    });
}

#[test]
fn llama_3() {
    check(&Family {
        mentions: "<|python_tag|>{\"name\": function name, \"parameters\"",
        tokens: &["<|python_tag|>"],
        prompt: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        replies: &[
            ("<|python_tag|>{\"name\": \"f\", \"parameters\": {\"n\": 1}}", "<f {\"n\": 1}>"),
            ("[tools]{\"name\": \"f\", \"parameters\": {\"n\": 1}}", "<f {\"n\": 1}>"),
            ("[tools]{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "<f {}>"),
            ("[tools]\n{\"name\": \"f\", \"parameters\": {}}", "<f {}>"),
            ("[tools]{\"name\": \"Bob\"} is JSON", "{\"name\": \"Bob\"} is JSON"),
            ("[tools]So: {\"name\": \"f\", \"parameters\": {}}", "So: {\"name\": \"f\", \"parameters\": {}}"),
            ("{\"name\": \"f\", \"parameters\": {}}", "{\"name\": \"f\", \"parameters\": {}}"),
            ("[tools]{\"na", "{\"na"),
            ("<|python_tag|>f.call(x=1)", "<|python_tag|>f.call(x=1)"),
        ],
    });
}

#[test]
fn harmony_of_gpt_oss() {
    let channel = "<|channel|>";
    assert!(template(channel).mentions(channel));
    check(&Family {
        mentions: "<|channel|><|message|>",
        tokens: &[
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|constrain|>",
        ],
        prompt: "<|end|><|start|>assistant",
        replies: &[
            (
                "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>final<|message|>Hello\n",
                "(Hm.)|Hello\n",
            ),
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json\
                 <|message|>{\"n\": 1}<|call|>",
                "(a)|<f {\"n\": 1}>",
            ),
            (" to=functions.f<|channel|>commentary json<|message|>{\"n\": 1}", "<f {\"n\": 1}>"),
            (
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary \
                 to=functions.f<|message|>{}<|call|>",
                "I look.|<f {}>",
            ),
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
                "(a\nb)",
            ),
            (
                "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
                "a\nb",
            ),
            ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "(a)|b"),
            ("<|channel|>anal", ""),
            ("Hello", "Hello"),
            (
                "<|channel|>commentary to=functions.f<|message|>{\"n\": <|end|>",
                "<|channel|>commentary to=functions.f<|message|>{\"n\": ",
            ),
        ],
    });
    let told = |prompt| {
        show(&parts(&Syntax::new(&template(channel), None), prompt, [Piece::Text("a<|end|>".into())]))
    };
    assert_eq!(told("<|start|>assistant<|channel|>final<|message|>"), "a");
    assert_eq!(
        told("<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>"),
        "(a)"
    );
}

#[test]
fn deepseek() {
    const SECTION: [&str; 2] = [
        "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>",
        "<\u{ff5c}tool\u{2581}calls\u{2581}end\u{ff5c}>",
    ];
    check(&Family {
        mentions: "</think><\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>\u{ff5c}DSML\u{ff5c}",
        tokens: &["<think>", "</think>", SECTION[0], SECTION[1], "<\u{ff5c}tool\u{2581}sep\u{ff5c}>"],
        prompt: "<\u{ff5c}Assistant\u{ff5c}><think>\n",
        replies: &[
            (
                "a</think>ok<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}><\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>f\
                 <\u{ff5c}tool\u{2581}sep\u{ff5c}>{\"n\": 1}<\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}>\
                 <\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>g<\u{ff5c}tool\u{2581}sep\u{ff5c}>{}\
                 <\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}><\u{ff5c}tool\u{2581}calls\u{2581}end\u{ff5c}>",
                "(a)|ok|<f {\"n\": 1}>|<g {}>",
            ),
            (
                "</think><\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}><\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>function\
                 <\u{ff5c}tool\u{2581}sep\u{ff5c}>f\n```json\n{\"n\": 1}\n```<\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}>",
                "<f {\"n\": 1}>",
            ),
            (
                "</think><\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>x",
                "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>x",
            ),
            (
                "</think><\u{ff5c}DSML\u{ff5c}function_calls>\n<\u{ff5c}DSML\u{ff5c}invoke name=\"f\">\n\
                 <\u{ff5c}DSML\u{ff5c}parameter name=\"s\" string=\"true\">5</\u{ff5c}DSML\u{ff5c}parameter>\n\
                 <\u{ff5c}DSML\u{ff5c}parameter name=\"n\" string=\"false\">5</\u{ff5c}DSML\u{ff5c}parameter>\n\
                 </\u{ff5c}DSML\u{ff5c}invoke>\n</\u{ff5c}DSML\u{ff5c}function_calls>",
                "<f {\"s\":\"5\",\"n\":5}>",
            ),
        ],
    });
}

#[test]
fn glm() {
    check(&Family {
        mentions: "<think></think><tool_call><arg_key>",
        tokens: &[
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        prompt: "<|assistant|>",
        replies: &[
            (
                "\n<think>a</think>\nok\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>b c</arg_value>\n<arg_key>n</arg_key>\n\
                 <arg_value>[1]</arg_value>\n</tool_call>",
                "(a)|ok|<f {\"s\":\"b c\",\"n\":[1]}>",
            ),
            ("[tools]<tool_call>f\n</tool_call>", "<f {}>"),
            ("<tool_call>f\n</tool_call>", "<tool_call>f\n</tool_call>"),
            ("<tool_call>f<arg_key>s</arg_key></tool_call>", "<tool_call>f<arg_key>s</arg_key></tool_call>"),
        ],
    });
}

#[test]
fn functionary_hunyuan_and_command_r() {
    check(&Family {
        mentions: "<function=example_function_name>{\"a\"",
        tokens: &[],
        prompt: "<|start_header_id|>assistant<|end_header_id|>\n\n",
        replies: &[
            (
                "ok<function=f>{\"s\": \"</function>\"}</function><function=g>{}</function>",
                "ok|<f {\"s\": \"</function>\"}>|<g {}>",
            ),
            ("<function=f>[1]</function>", "<function=f>[1]</function>"),
            ("<function=a b>{}</function>", "<function=a b>{}</function>"),
        ],
    });
    check(&Family {
        mentions: "<think{}><tool_calls{}>",
        tokens: &["<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_sep:opensource>"],
        prompt: "",
        replies: &[
            (
                "ok<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>s\
                 </arg_key:opensource>\n<arg_value:opensource>a b</arg_value:opensource>\n</tool_call:opensource>\n\
                 <tool_call:opensource>g<tool_sep:opensource>\n<arg_key:opensource>n</arg_key:opensource>\n\
                 <arg_value:opensource>5</arg_value:opensource></tool_call:opensource></tool_calls:opensource>",
                "ok|<f {\"s\":\"a b\"}>|<g {\"n\":5}>",
            ),
            (
                "<tool_calls:opensource>f</tool_calls:opensource>",
                "<tool_calls:opensource>f</tool_calls:opensource>",
            ),
        ],
    });
    check(&Family {
        mentions: "Action:\\n```json",
        tokens: &[],
        prompt: "<|CHATBOT_TOKEN|>",
        replies: &[
            (
                "ok\nAction:\n```json\n[\n{\"tool_name\": \"f\", \"parameters\": {\"s\": \"```\"}}]```",
                "ok|<f {\"s\": \"```\"}>",
            ),
            ("Action:\n```json\n5```", "Action:\n```json\n5```"),
        ],
    });
}

#[test]
fn kimi_minimax_minicpm_nemotron_and_lfm() {
    check(&Family {
        mentions: "<|tool_call_begin|>",
        tokens: &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"],
        prompt: "<|im_middle|>",
        replies: &[(
            "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"n\": 1}\
             <|tool_call_end|><|tool_calls_section_end|>",
            "ok|<f {\"n\": 1}functions.f:0>",
        )],
    });
    check(&Family {
        mentions: "<minimax:tool_call><function name=\"<TOOLCALL>",
        tokens: &["<minimax:tool_call>"],
        prompt: "",
        replies: &[
            (
                "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">a</parameter>\n</invoke>\n\
                 </minimax:tool_call>",
                "<f {\"s\":\"a\"}>",
            ),
            ("ok <function name=\"f\"><param name=\"n\">1</param></function>", "ok|<f {\"n\":1}>"),
            ("<function name=\"f\">", "<function name=\"f\">"),
            ("<TOOLCALL>[{\"name\": \"f\"}, {\"name\": \"g\"}]</TOOLCALL>", "<f {}>|<g {}>"),
        ],
    });
    check(&Family {
        mentions: "<|tool_call_start|>",
        tokens: &["<|tool_call_start|>", "<|tool_call_end|>"],
        prompt: "",
        replies: &[
            ("<|tool_call_start|>[f(s=\"a\", n=1)]<|tool_call_end|>ok", "<f {\"s\":\"a\",\"n\":1}>|ok"),
            ("<|tool_call_start|>[f(s=]<|tool_call_end|>", "<|tool_call_start|>[f(s=]<|tool_call_end|>"),
        ],
    });
}

#[test]
fn gemma_cohere_and_others_in_json() {
    check(&Family {
        mentions: "<|tool_call><start_function_call>",
        tokens: &["<|tool_call>", "<tool_call|>", "<|\"|>"],
        prompt: "",
        replies: &[
            ("ok<|tool_call>call:f{n:1,s:<|\"|>a b<|\"|>}<tool_call|>", "ok|<f {\"n\":1,\"s\":\"a b\"}>"),
            ("<|tool_call>f<tool_call|>", "<|tool_call>f<tool_call|>"),
            ("<start_function_call>call:f{s:<escape>a<escape>}<end_function_call>", "<f {\"s\":\"a\"}>"),
        ],
    });
    check(&Family {
        mentions: "<tool_calls><|START_ACTION|><|function_call|><|tools_prefix|>",
        tokens: &[
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|function_call|>",
            "<|tools_prefix|>",
            "<|tools_suffix|>",
        ],
        prompt: "",
        replies: &[
            ("<tool_calls>[{\"name\": \"f\", \"arguments\": {}, \"id\": \"abc\"}]</tool_calls>", "<f {}abc>"),
            (
                "<|START_ACTION|>[\n {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"n\": 1}}\n]<|END_ACTION|>",
                "<f {\"n\": 1}0>",
            ),
            ("<|function_call|>{\"name\": \"f\", \"arguments\": {}}", "<f {}>"),
            (
                "ok<|tools_prefix|>[{\"f\": {\"n\": 1}}, {\"g\": {}}]<|tools_suffix|>",
                "ok|<f {\"n\": 1}>|<g {}>",
            ),
            ("<|tools_prefix|>[{\"f\": 1}]<|tools_suffix|>", "<|tools_prefix|>[{\"f\": 1}]<|tools_suffix|>"),
        ],
    });
}

#[test]
fn other_reasoning() {
    check(&Family {
        mentions: "<|channel>thought\n<channel|>",
        tokens: &["<|channel>", "<channel|>"],
        prompt: "<start_of_turn>model\n",
        replies: &[("<|channel>thought\na\n<channel|>b", "(a)|b"), ("<|channel>other", "<|channel>other")],
    });
    check(&Family {
        mentions: "<seed:think>",
        tokens: &["<seed:think>", "</seed:think>"],
        prompt: "",
        replies: &[("<seed:think>a</seed:think>b", "(a)|b")],
    });
}

#[test]
fn granite_3_and_phi_4_mini() {
    check(&Family {
        mentions: "<think></think><response></response><|tool_call|>",
        tokens: &["<|tool_call|>"],
        prompt: "<|start_of_role|>assistant<|end_of_role|>",
        replies: &[
            ("<think>a</think>\n<response>b\nc</response>", "(a)|b\nc"),
            ("<response>\nb <response> c\n</response>\n", "b <response> c"),
            ("<think>a</think>b</response>", "(a)|b</response>"),
            ("<response>never closed </respon", "never closed </respon"),
            ("<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"]\"}}]", "<f {\"s\": \"]\"}>"),
            ("<|tool_call|>[{\"name\": \"f\"}, {\"name\": \"g\"}]<|/tool_call|>", "<f {}>|<g {}>"),
            ("<|tool_call|>[{\"name\": \"f\"", "<|tool_call|>[{\"name\": \"f\""),
        ],
    });
}

#[test]
fn hunyuan_dense_exaone_4_and_olmo_3() {
    check(&Family {
        mentions: "<think></think><answer></answer><tool_calls>",
        tokens: &["<think>", "</think>", "<answer>", "</answer>"],
        prompt: "<hy_Assistant>",
        replies: &[
            ("<think>\na\n</think>\n<answer>\nb\n</answer>", "(a)|b"),
            ("<think>\n\n</think>\n<answer>\nb\n</answer>", "b"),
            (
                "<think>a</think><answer>ok<tool_calls>[{\"name\": \"f\", \"arguments\": {}}]</tool_calls></answer>",
                "(a)|ok|<f {}>",
            ),
            ("say <answer>", "say <answer>"),
        ],
    });
    check(&Family {
        mentions: "<think></think><tool_call>{\"name\"",
        tokens: &["<think>", "</think>", "<tool_call>", "</tool_call>"],
        prompt: "[|assistant|]\n<think>\n",
        replies: &[(
            "a\n</think>\n\n<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</tool_call>",
            "(a)|<f {\"n\": 1}>",
        )],
    });
    check(&Family {
        mentions: "<think><function_calls>",
        tokens: &[],
        prompt: "<|im_start|>assistant\n",
        replies: &[
            (
                "<think>a</think>ok <function_calls>f(s=\"a\", n=1)\ng()</function_calls>",
                "(a)|ok|<f {\"s\":\"a\",\"n\":1}>|<g {}>",
            ),
            ("<function_calls>f(</function_calls>", "<function_calls>f(</function_calls>"),
        ],
    });
}

#[test]
fn glm_4_7_and_nemotron_3() {
    check(&Family {
        mentions: "<think></think><tool_call><arg_key>",
        tokens: &["<think>", "</think>", "<tool_call>", "</tool_call>"],
        prompt: "<|assistant|><think>",
        replies: &[(
            "a</think>ok<tool_call>f<arg_key>s</arg_key><arg_value>b</arg_value></tool_call>",
            "(a)|ok|<f {\"s\":\"b\"}>",
        )],
    });
    check(&Family {
        mentions: "<think></think><tool_call>\n<function=",
        tokens: &["<think>", "</think>"],
        prompt: "<|im_start|>assistant\n<think></think>",
        replies: &[(
            "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
            "<f {\"n\":1}>",
        )],
    });
}
