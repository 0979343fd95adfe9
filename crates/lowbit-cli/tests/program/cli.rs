//! The program as its users run it.

use crate::support::{json, lowbit, refusal, root, with_input, with_template};
use serde_json::Value;

#[test]
fn generate_prints_one_object() {
    let arguments = ["generate", "--prompt", "A vector is", "--max-tokens", "20", "--json"];
    let reply = json(&lowbit(&arguments).output().unwrap());
    let keys: Vec<_> = reply.as_object().unwrap().keys().cloned().collect();
    let want = [
        "schema",
        "prompt_tokens",
        "cached_tokens",
        "tokens",
        "text",
        "reasoning",
        "content",
        "tool_calls",
        "finish_reason",
        "seed",
        "prompt_tps",
        "generation_tps",
        "load_seconds",
        "peak_memory_bytes",
    ];
    assert_eq!(keys, want);
    assert_eq!(reply["finish_reason"], "length");
    assert_eq!(reply["tokens"].as_array().unwrap().len(), 20);
    assert!(!reply["prompt_tokens"].as_array().unwrap().is_empty());
    assert!(reply["text"].as_str().unwrap().len() > 20);
    for key in ["prompt_tps", "generation_tps", "load_seconds", "peak_memory_bytes"] {
        assert!(reply[key].as_f64().unwrap() > 0.0, "{key}");
    }
}

#[test]
fn the_demo_is_found_from_within_and_the_prompt_read_from_standard_input() {
    let mut inside = lowbit(&["generate", "--max-tokens", "8", "--json"]);
    inside.current_dir(root().join("crates/lowbit/src"));
    let piped = json(&with_input(inside, b"A vector is"));
    let given =
        json(&lowbit(&["generate", "--prompt", "A vector is", "-n", "8", "--json"]).output().unwrap());
    assert_eq!(piped["tokens"], given["tokens"]);

    let folder = tempfile::tempdir().unwrap();
    let mut outside = lowbit(&["generate", "--prompt", "x"]);
    outside.current_dir(folder.path());
    assert!(refusal(outside.output().unwrap()).contains("--model"));
}

#[test]
fn text_is_streamed_and_figures_follow() {
    let output = lowbit(&["generate", "--prompt", "A vector is", "--max-tokens", "12"]).output().unwrap();
    let reply =
        json(&lowbit(&["generate", "--prompt", "A vector is", "-n", "12", "--json"]).output().unwrap());
    assert_eq!(
        String::from_utf8(output.stdout).unwrap().trim_end_matches('\n'),
        reply["text"].as_str().unwrap()
    );
    let figures = String::from_utf8(output.stderr).unwrap();
    for word in ["prompt: ", "generation: 12 tokens", "tokens/s", "peak memory: "] {
        assert!(figures.contains(word), "{figures}");
    }
}

#[test]
fn a_seed_decides_what_is_drawn() {
    let draw = |seed: &str| {
        let arguments = [
            "generate", "--prompt", "The", "--temp", "1", "--top-p", "0.95", "--seed", seed, "-n", "30",
            "--json",
        ];
        json(&lowbit(&arguments).output().unwrap())["tokens"].clone()
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
}

#[test]
fn peak_memory_is_the_file_and_a_little() {
    let arguments = ["generate", "--model", "models/demo", "--prompt", "A vector is", "-n", "50", "--json"];
    let reply = json(&lowbit(&arguments).output().unwrap());
    let file = root().join("models/demo/model.safetensors").metadata().unwrap().len();
    let peak = reply["peak_memory_bytes"].as_u64().unwrap();
    // Caches of 54 tokens are under 3 MB: two attention layers of 2 x 64 and six states of 8 x 64 x
    // 64, in f32.
    assert!(peak <= file + 3_000_000 + 100_000_000, "{peak} bytes for a file of {file}");
}

#[test]
fn perplexity_agrees_with_transformers_on_the_first_windows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    let text = std::fs::read_to_string(root().join("models/demo/eval.txt")).unwrap();
    // About four windows of 512 tokens.
    std::fs::write(&path, text.chars().take(6000).collect::<String>()).unwrap();
    let file = path.to_str().unwrap();
    let result = json(&lowbit(&["perplexity", "--file", file, "--json"]).output().unwrap());
    let keys: Vec<_> = result.as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["schema", "tokens", "nll", "perplexity"]);
    let (nll, perplexity) = (result["nll"].as_f64().unwrap(), result["perplexity"].as_f64().unwrap());
    assert!((nll.exp() - perplexity).abs() < 1e-6 * perplexity);
    let half = json(
        &lowbit(&["perplexity", "--file", file, "--score", "second-half", "--context", "256", "--json"])
            .output()
            .unwrap(),
    );
    assert_eq!(half["tokens"].as_u64().unwrap() % 127, 0, "each window of 256 scores its last 127");
    let refused = lowbit(&["perplexity", "--file", file, "--context", "1"]).output().unwrap();
    assert!(refusal(refused).contains("at least 2"));
    let refused =
        lowbit(&["perplexity", "--file", file, "--score", "second-half", "--context", "9000"]).output();
    assert!(refusal(refused.unwrap()).contains("18000"));
}

#[test]
fn inspect_counts_what_is_there() {
    let report = json(&lowbit(&["inspect", "--json"]).output().unwrap());
    assert_eq!(report["architecture"], "qwen3_5_moe");
    assert_eq!(report["layout"], "MLX");
    assert_eq!(report["parameters"], 13_695_968);
    assert!((report["bits_per_weight"].as_f64().unwrap() - 4.528).abs() < 1e-3);
    assert_eq!(report["formats"]["affine8g64"]["tensors"], 16);
    assert_eq!(report["warnings"].as_array().unwrap().len(), 0);
    let gguf = ["inspect", "--model", "tests/vectors/models/qwen3-Q4_0/model.gguf", "--json"];
    let report = json(&lowbit(&gguf).output().unwrap());
    assert_eq!(report["layout"], "GGUF");
    assert!(report["formats"]["Q4_0"]["tensors"].as_u64().unwrap() > 5);
    let plain = lowbit(&["inspect"]).output().unwrap();
    assert!(String::from_utf8(plain.stdout).unwrap().contains("bits per weight"));
}

#[test]
fn inspect_begins_with_what_people_ask() {
    let text = |more: &[&str]| {
        let output = lowbit(&[&["inspect"], more].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let demo = text(&["-m", "models/demo-4bit"]);
    for want in [
        "  model        qwen3_5_moe in MLX layout\n",
        "  layers       8, 2 of them attention and the others gated delta nets; hidden size 256, feed-forward 256\n",
        "  heads        4 of queries, 2 of keys and values, 64 wide\n",
        "  experts      4, of which 2 are used per token\n",
        "  context      32768 tokens\n",
        "  vocabulary   8192 tokens; the output layer is the embedding\n",
        "  templates    no chat template: it continues plain text\n",
        "  licence      not stated\n",
    ] {
        assert!(demo.contains(want), "{want}{demo}");
    }
    let gguf = text(&["-m", "tests/vectors/models/qwen3-Q4_0/model.gguf"]);
    for want in [
        "  model        qwen3 in GGUF layout\n",
        "  heads        4 of queries, 2 of keys and values, 24 wide\n",
        "  context      512 tokens\n",
    ] {
        assert!(gguf.contains(want), "{want}{gguf}");
    }
    // Tensors on request alone.
    assert!(!demo.contains("embed_tokens") && demo.contains("--tensors lists each tensor"), "{demo}");
    assert!(text(&["-m", "models/demo-4bit", "--tensors"]).contains("embed_tokens"));

    let folder = tempfile::tempdir().unwrap();
    crate::support::with_template(folder.path());
    let path = |name: &str| folder.path().join(name);
    let generation = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}"#;
    std::fs::write(path("generation_config.json"), generation).unwrap();
    std::fs::write(path("README.md"), "---\nlicense: apache-2.0\n---\n# Tiny\n").unwrap();
    let model = folder.path().to_str().unwrap();
    let described = text(&["-m", model]);
    for want in [
        "  templates    default\n",
        "  sampling     temperature 0.6, top-k 20, top-p 0.95\n",
        "  licence      apache-2.0 (README.md)\n",
    ] {
        assert!(described.contains(want), "{want}{described}");
    }
    // As a run says it: a penalty alone does not sample.
    std::fs::write(path("generation_config.json"), r#"{"repetition_penalty": 1.5}"#).unwrap();
    let described = text(&["-m", model]);
    let want = "  sampling     greedy, repetition penalty 1.5 over 64 tokens\n";
    assert!(described.contains(want), "{want}{described}");
    std::fs::write(path("generation_config.json"), generation).unwrap();
    // Keys and values in f16, of two heads that are 16 wide in each of the layers.
    let report = json(&lowbit(&["inspect", "-m", model, "--json"]).output().unwrap());
    let number = |key: &str| report[key].as_u64().unwrap();
    let per_token = 2 * 2 * number("num_hidden_layers") * number("num_key_value_heads") * number("head_dim");
    assert_eq!(report["memory"]["cache_bytes_per_token"], per_token);
    let at = report["memory"]["at"].as_array().unwrap();
    let last = &at[at.len() - 1];
    assert_eq!(last["tokens"], report["max_position_embeddings"]);
    let total = last["cache_bytes"].as_u64().unwrap() + number("bytes");
    assert_eq!(last["total_bytes"], total);
}

#[test]
fn inspect_describes_what_it_cannot_run() {
    let folder = tempfile::tempdir().unwrap();
    crate::support::with_template(folder.path());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["model_type"] = "unheard_of".into();
    config["license"] = "mit".into();
    std::fs::write(&path, config.to_string()).unwrap();
    let arguments = ["inspect", "-m", folder.path().to_str().unwrap(), "--json"];
    let report = json(&lowbit(&arguments).output().unwrap());
    assert_eq!(report["num_hidden_layers"], config["num_hidden_layers"]);
    assert_eq!(report["num_attention_heads"], config["num_attention_heads"]);
    assert_eq!((&report["licence"]["name"], &report["memory"]), (&"mit".into(), &Value::Null));
    assert!(report["warnings"][0].as_str().unwrap().contains("cannot be run"));
}

#[test]
fn what_is_not_computed_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let source = root().join("tests/vectors/models/qwen3");
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), folder.path().join(name)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["logit_scale"] = 0.5.into();
    let write =
        |config: &Value| std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write(&config);
    let model = folder.path().to_str().unwrap();
    let generate = ["generate", "--model", model, "--prompt", "hi", "-n", "2", "--json"];
    let output = lowbit(&generate).output().unwrap();
    assert!(output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error.matches("warning: ").count(), 1, "{error}");
    assert!(error.contains("logit_scale"), "{error}");
    let report = json(&lowbit(&["inspect", "--model", model, "--json"]).output().unwrap());
    assert!(report["warnings"][0].as_str().unwrap().contains("logit_scale"));
    config["hidden_act"] = "relu".into();
    write(&config);
    let plain = lowbit(&["inspect", "--model", model]).output().unwrap();
    let text = String::from_utf8(plain.stdout).unwrap();
    assert!(text.contains("cannot be run") && text.contains("hidden_act is \"relu\""), "{text}");
    assert!(refusal(lowbit(&generate).output().unwrap()).contains("only \"silu\" or \"swish\" is supported"));
}

/// The two replies of a chat, among the lines that it prints.
fn two_replies(printed: Vec<u8>) -> Vec<Value> {
    let text = String::from_utf8(printed).unwrap();
    let objects = text.lines().filter(|line| line.starts_with('{'));
    let replies: Vec<Value> = objects.map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(replies.len(), 2, "{text}");
    replies
}

#[test]
fn chat_goes_on_where_it_was() {
    let arguments = ["chat", "--model", "models/demo-4bit", "--max-tokens", "5", "--json"];
    let output = with_input(lowbit(&arguments), b"A vector is\n and a list is\n");
    assert!(output.status.success());
    let replies = two_replies(output.stdout);
    assert!(replies.iter().all(|reply| reply["tokens"].as_array().unwrap().len() == 5));
    assert!(String::from_utf8(output.stderr).unwrap().contains("no chat template"));
}

/// Without --model, a chat is with the bundled model that was taught to chat. It knows its name,
/// and what it was told.
#[test]
fn the_bundled_demo_chats() {
    let mut chat = lowbit(&["chat", "--temp", "0", "--json"]);
    chat.current_dir(root().join("crates"));
    let output = with_input(chat, b"My name is Anna.\nWhat is your name?\nWhat is my name?\n");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let replies: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(replies.len(), 3, "{text}");
    assert!(replies.iter().all(|reply| reply["finish_reason"] == "stop"), "{text}");
    for (reply, word) in replies.iter().zip(["Anna", "demo-chat", "Anna"]) {
        assert!(reply["text"].as_str().unwrap().contains(word), "{text}");
    }
}

#[test]
fn a_chat_template_frames_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    with_template(folder.path());
    let model = folder.path().to_str().unwrap();
    let prompt = |arguments: &[&str]| {
        let whole =
            [&["generate", "--model", model, "-n", "3", "--ignore-eos", "--json"], arguments].concat();
        json(&lowbit(&whole).output().unwrap())["prompt_tokens"].clone()
    };
    let framed = prompt(&["--prompt", "hi", "--system-prompt", "be brief"]);
    let plain = "<system>be brief</system><user>hi</user><assistant>";
    assert_eq!(framed, prompt(&["--prompt", plain, "--ignore-chat-template"]));
    assert_ne!(framed, prompt(&["--prompt", "hi"]));

    let arguments = ["chat", "--model", model, "--max-tokens", "4", "--json"];
    let output = with_input(lowbit(&arguments), b"hi\nho\n");
    let replies = two_replies(output.stdout);
    assert_eq!(replies[0]["prompt_tokens"], prompt(&["--prompt", "hi"]));
}

/// A template of one's own, its variables and tools; what is wrong with them is named.
#[test]
fn a_template_of_ones_own_sees_variables_and_tools() {
    let folder = tempfile::tempdir().unwrap();
    with_template(folder.path());
    let model = folder.path().to_str().unwrap();
    let [template, tools] = ["own.jinja", "tools.json"].map(|name| folder.path().join(name));
    let source = "{{ messages[0].content }} {{ mood }} {% for tool in tools %}{{ tool.name }}{% endfor %}";
    std::fs::write(&template, source).unwrap();
    std::fs::write(&tools, r#"[{"name": "f"}]"#).unwrap();
    let [template, tools] = [&template, &tools].map(|path| path.to_str().unwrap());
    let run = |arguments: &[&str]| {
        let whole = ["generate", "--model", model, "-n", "1", "--ignore-eos", "--json", "--prompt", "hi"];
        lowbit(&[&whole[..], arguments].concat()).output().unwrap()
    };
    let kwargs = r#"{"mood": "calm"}"#;
    let flags = ["--chat-template", template, "--chat-template-kwargs", kwargs, "--tools", tools];
    let plain = ["generate", "--model", model, "-n", "1", "--ignore-eos", "--json", "--prompt", "hi calm f"];
    let plain = lowbit(&[&plain[..], &["--ignore-chat-template"]].concat()).output().unwrap();
    assert_eq!(json(&run(&flags))["prompt_tokens"], json(&plain)["prompt_tokens"]);
    let spelled = ["--chat-template", source, "--chat-template-kwargs", kwargs, "--tools", tools];
    assert_eq!(json(&run(&spelled))["prompt_tokens"], json(&plain)["prompt_tokens"]);

    for (flags, problem) in [
        (&["--chat-template-kwargs", "[1]"][..], "takes a JSON object"),
        (&["--chat-template-kwargs", r#"{"messages": []}"#][..], "messages comes from the chat itself"),
        (&["--chat-template", "{{ messages"][..], "chat template: "),
        (&["--chat-template", "nothing-of-that-name"][..], "the names that are known are "),
        (&["--tools", template][..], "takes a JSON list of objects"),
        (&["--tools", tools, "--ignore-chat-template"][..], "does nothing with --ignore-chat-template"),
    ] {
        let output = run(flags);
        assert!(!output.status.success());
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(problem), "{flags:?}: {message}");
    }
}

#[test]
fn a_model_is_timed_at_each_depth() {
    let arguments =
        ["bench", "--model", "models/demo-4bit", "-p", "8,16", "-n", "4", "--depth", "0,40", "--runs", "1"];
    let table = String::from_utf8(lowbit(&arguments).output().unwrap().stdout).unwrap();
    let labels: Vec<_> = table.lines().map(|line| line[..24].trim_end()).collect();
    let want = [
        "prompt 8",
        "prompt 16",
        "generate 4",
        "prompt 8 after 40",
        "prompt 16 after 40",
        "generate 4 after 40",
    ];
    assert_eq!(labels, want);
    let figures = json(&lowbit(&[&arguments[..], &["--json"]].concat()).output().unwrap())["rows"].clone();
    let depths: Vec<_> =
        figures.as_array().unwrap().iter().map(|figure| figure["depth"].as_u64().unwrap()).collect();
    assert_eq!(depths, [0, 0, 0, 40, 40, 40]);
    assert_eq!((&figures[3]["case"], &figures[3]["tokens"]), (&Value::from("prompt 8"), &Value::from(8)));
    assert!(figures[5]["tokens_per_second"].as_f64().unwrap() > 0.0);
    // Refused before the first, which would fit, is timed.
    let long = ["bench", "--model", "models/demo-4bit", "-p", "8", "--depth", "0,32760"];
    let output = lowbit(&long).output().unwrap();
    assert!(output.stdout.is_empty());
    assert!(refusal(output).contains("32888 tokens"));
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let run = |arguments: &[&str]| refusal(lowbit(arguments).output().unwrap());
    assert!(run(&["generate", "--prompt", ""]).contains("no tokens"));
    assert!(run(&["generate", "--prompt", "x", "--model", "models/none"]).contains("models/none"));
    assert!(run(&["generate", "--prompt", "x", "--model", "README.md"]).contains("README.md"));
    assert!(run(&["generate", "--prompt", "x", "--threads", "0"]).contains("threads"));
    assert!(run(&["generate", "--prompt", "x", "--temp=-1"]).contains("temperature"));
    assert!(run(&["generate", "--prompt", "x", "--temp", "1", "--top-p", "1.5"]).contains("top_p"));
    assert!(run(&["generate", "--prompt", "x", "--system-prompt", "y"]).contains("chat template"));
    assert!(run(&["perplexity", "--file", "none.txt"]).contains("none.txt"));
    assert!(run(&["bench", "no-such-op"]).contains("no-such-op"));
    assert!(run(&["quantize", "--model", "models/demo", "--output", "models"]).contains("exists"));
    let invalid = with_input(lowbit(&["generate"]), &[b'a', 0xff, b'b']);
    assert!(refusal(invalid).contains("standard input"));
    let long = with_input(lowbit(&["generate"]), &b"vector ".repeat(33_000));
    let message = refusal(long);
    assert!(message.contains("context of 32768"), "{message}");
}
