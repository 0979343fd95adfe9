//! Command lines of people who come from llama.cpp and mlx-lm.

use crate::support::{json, lowbit, refusal, root, with_input, with_template};
use serde_json::Value;

#[track_caller]
fn tokens(arguments: &[&str]) -> Value {
    let whole = [arguments, &["--json"]].concat();
    json(&lowbit(&whole).output().unwrap())["tokens"].clone()
}

#[test]
fn a_prompt_is_given_in_any_of_their_ways() {
    let want = tokens(&["generate", "--prompt", "A vector is", "--max-tokens", "6"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "A vector is\n").unwrap();
    let file = file.to_str().unwrap();
    for line in [
        &["generate", "A vector is", "-n", "6"][..],
        &["generate", "-f", file, "-n", "6"],
        &["generate", "-p", "A vector is", "--n_predict", "6", "-ngl", "0", "--mlock"],
        &["-m", "models/demo-4bit", "-p", "A vector is", "-n", "6"],
        &["-m", "models/demo-4bit/model.safetensors", "-p", "A vector is", "-n", "6"],
        &["-m", "models/demo-4bit/config.json", "-p", "A vector is", "-n", "6"],
        &["-p", "A vector is", "-n", "6", "--seed", "-1"],
        &["run", "models/demo-4bit", "A vector is", "-n", "6"],
        &["models/demo-4bit/", "-p", "A vector is", "-n", "1", "-n6"],
        &["generate", "-p", "a", "-e", "-p", "A vector is", "--no-escape", "-n", "6", "-cb", "-fit", "off"],
    ] {
        assert_eq!(tokens(line), want, "{line:?}");
    }
    for line in
        [&["generate", "-p", "-", "-n", "6", "--json"][..], &["generate", "-f", "-", "-n", "6", "--json"]]
    {
        let output = with_input(lowbit(line), b"A vector is");
        assert_eq!(json(&output)["tokens"], want, "{line:?}");
    }
    // A file keeps all but one line break at its end.
    std::fs::write(file, "A vector is\n\n").unwrap();
    let two = lowbit(&["generate", "-f", file, "-n", "1", "--json"]).output().unwrap();
    let one = lowbit(&["generate", "-p", "A vector is\n", "-n", "1", "--json"]).output().unwrap();
    assert_eq!(json(&two)["prompt_tokens"], json(&one)["prompt_tokens"]);
    // Text that begins with a dash is text.
    let dashed = json(&lowbit(&["generate", "-p", "- one", "-n", "1", "--json"]).output().unwrap());
    let joined = json(&lowbit(&["generate", "--prompt=- one", "-n", "1", "--json"]).output().unwrap());
    assert_eq!(dashed["prompt_tokens"], joined["prompt_tokens"]);
}

#[test]
fn a_context_ends_texts_and_refuses_prompts() {
    let reply =
        json(&lowbit(&["generate", "-p", "A vector is", "-c", "10", "-n", "-1", "--json"]).output().unwrap());
    let prompt = reply["prompt_tokens"].as_array().unwrap().len();
    // The last token need not fit.
    assert_eq!(reply["tokens"].as_array().unwrap().len(), 10 - prompt + 1);
    assert_eq!(reply["finish_reason"], "length");
    let refused = refusal(lowbit(&["generate", "-p", "A vector is", "-c", "2"]).output().unwrap());
    assert!(refused.contains("context of 2"), "{refused}");
    let larger = lowbit(&["generate", "-p", "A vector is", "-c", "10000000", "-n", "1"]).output().unwrap();
    assert!(String::from_utf8_lossy(&larger.stderr).contains("the model's context of 32768"));
    // In a chat, the messages count together.
    let messages = b"A vector is\nA vector is\nA vector is\n";
    let output =
        with_input(lowbit(&["chat", "-m", "models/demo-4bit", "-c", "12", "-n", "4", "--json"]), messages);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("context of 12") && errors.contains("of 3 messages were not answered"),
        "{errors}"
    );
    let line =
        ["chat", "-m", "models/demo-4bit", "-c", "12", "-n", "4", "--json", "--context-overflow", "drop"];
    let output = with_input(lowbit(&line), messages);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.contains("the oldest turn is forgotten"), "{errors}");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 3);
}

#[test]
fn stop_texts_end_a_reply_before_them() {
    let free = json(&lowbit(&["generate", "-p", "A vector is", "-n", "30", "--json"]).output().unwrap());
    let text = free["text"].as_str().unwrap();
    let characters: Vec<(usize, char)> = text.char_indices().collect();
    // Any piece of the text, wherever it lies among tokens.
    for (from, to) in [(3, 4), (5, 9), (10, 25), (21, 24)] {
        let stop = &text[characters[from].0..characters[to].0];
        let line =
            ["generate", "-p", "A vector is", "-n", "30", "--stop", "never to be seen", "--stop", stop];
        let reply = json(&lowbit(&[&line[..], &["--json"]].concat()).output().unwrap());
        assert_eq!(reply["text"].as_str().unwrap(), &text[..text.find(stop).unwrap()], "{stop:?}");
        assert_eq!(reply["finish_reason"], "stop");
        let plain = lowbit(&line).output().unwrap();
        assert_eq!(String::from_utf8(plain.stdout).unwrap().strip_suffix('\n'), reply["text"].as_str());
    }
    let empty = ["generate", "-p", "A vector is", "-n", "30", "--json", "--stop", ""];
    assert_eq!(json(&lowbit(&empty).output().unwrap())["text"], free["text"]);
    // The conversation goes on after it.
    let output =
        with_input(lowbit(&["chat", "-n", "20", "--stop", " ", "--json"]), b"A vector is\nand a list\n");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 2);
}

#[test]
fn a_special_token_is_a_stop_text() {
    let folder = tempfile::tempdir().unwrap();
    with_template(folder.path());
    let config = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let special = config["added_tokens"].as_array().unwrap().iter().find(|token| token["special"] == true);
    let special = special.unwrap()["content"].as_str().unwrap();
    let model = folder.path().to_str().unwrap();
    let line = ["generate", "-m", model, "-p", "x", "-n", "2", "--stop", special, "--json"];
    json(&lowbit(&line).output().unwrap());
}

#[test]
fn logprobs_are_of_the_tokens_written() {
    // Exact: in 8 bits a step and a prompt round otherwise where they differ in the last place.
    let line = ["generate", "--exact", "-p", "A vector is", "-n", "40", "--logprobs", "3", "--json"];
    let reply = json(&lowbit(&line).output().unwrap());
    let scored = reply["logprobs"].as_array().unwrap();
    let ids: Vec<_> = scored.iter().map(|token| token["id"].clone()).collect();
    assert_eq!(&ids, reply["tokens"].as_array().unwrap());
    let mut text = String::new();
    for token in scored {
        text += token["token"].as_str().unwrap();
        let top: Vec<f64> = token["top_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["logprob"].as_f64().unwrap())
            .collect();
        assert_eq!(top.len(), 3);
        assert!(top.is_sorted_by(|a, b| a >= b) && top.iter().map(|one| one.exp()).sum::<f64>() < 1.0 + 1e-9);
        // Greedy: the token is the likeliest, but for a near tie that other chunks round otherwise.
        assert!(top[0] - token["logprob"].as_f64().unwrap() < 1e-4, "{token}");
    }
    assert_eq!(text, reply["text"].as_str().unwrap());
    let whole = json(
        &lowbit(&["generate", "-p", "x", "-n", "1", "--logprobs", "999999999", "--json"]).output().unwrap(),
    );
    let all = whole["logprobs"][0]["top_logprobs"].as_array().unwrap();
    let sum: f64 = all.iter().map(|one| one["logprob"].as_f64().unwrap().exp()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    let without = lowbit(&["generate", "-p", "x", "--logprobs", "3"]).output().unwrap();
    assert_eq!(without.status.code(), Some(2), "the text alone has no place for them");
}

#[test]
fn a_model_that_is_not_there_is_answered_with_the_nearest() {
    let error = |arguments: &[&str]| refusal(lowbit(arguments).output().unwrap());
    let message = error(&["generate", "-p", "x", "-m", "./models/demo-4bti"]);
    assert!(message.contains("did you mean ./models/demo-4bit?"), "{message}");
    let message = error(&["inspect", "-m", "./modles/demo"]);
    assert!(message.contains("did you mean ./models?"), "{message}");
    let message = error(&["generate", "-f", "none"]);
    assert!(message.contains("none: No such file"), "{message}");
}

#[test]
fn what_is_unknown_is_answered_with_what_to_type() {
    let error = |arguments: &[&str]| {
        let output = lowbit(arguments).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(error(&["generate", "-p", "x", "--promt", "y"]).contains("--prompt"));
    assert!(error(&["generat"]).contains("generate"));
    assert!(error(&["perplexity", "--grammar", "x"]).contains("--json-schema"));
    assert!(error(&["generate", "-p", "x", "-cbx"]).contains("-cbx: there is no such flag"));
    assert!(error(&["chat", "models/demo", "-xtc"]).contains("-xtc: there is no such flag"));
}

#[test]
fn outside_the_repository_it_is_said_what_to_type_first() {
    let folder = tempfile::tempdir().unwrap();
    for command in [&["chat"][..], &["generate", "-p", "x"], &["-p", "x"], &[], &["inspect"]] {
        let words = if command.is_empty() { &["-n", "1"] } else { command };
        let refused = refusal(lowbit(words).current_dir(folder.path()).output().unwrap());
        assert!(
            refused.contains("no --model was given")
                && refused.contains("\n  -m mlx-community/Qwen3-0.6B-4bit "),
            "{refused}"
        );
    }
}

#[test]
fn a_chat_template_has_a_name_or_is_typed() {
    let folder = tempfile::tempdir().unwrap();
    with_template(folder.path());
    let model = folder.path().to_str().unwrap();
    let prompt = |template: &str| {
        let line = ["generate", "-m", model, "-p", "hi", "-n", "1", "--json", "--chat-template", template];
        json(&lowbit(&line).output().unwrap())["prompt_tokens"].clone()
    };
    let typed = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
                 {{ '<|im_start|>assistant\\n' }}";
    assert_eq!(prompt("chatml"), prompt(typed));
    assert_ne!(prompt("chatml"), prompt("llama3"));
    let refused = refusal(
        lowbit(&["generate", "-m", model, "-p", "hi", "--chat-template", "chatlm"]).output().unwrap(),
    );
    assert!(
        refused.contains(
            "--chat-template chatlm: there is no such file, and the names that are known are chatml, "
        ),
        "{refused}"
    );
}

#[test]
fn types_and_devices_have_the_peers_names() {
    let line = |more: &[&'static str]| [&["generate", "-p", "A vector is", "-n", "3"][..], more].concat();
    let want = tokens(&line(&["--device", "cpu"]));
    for more in
        [&["--device", "cpu:0", "-ctk", "f16", "-ctv", "F16"][..], &["-dev", "none", "--dtype", "float32"]]
    {
        assert_eq!(tokens(&line(more)), want, "{more:?}");
    }
    let int8 = tokens(&line(&["--device", "cpu", "--cache-type", "q8_0"]));
    for more in [&["-ctk", "q8_0", "-ctv", "Q8_0"][..], &["--kv-bits", "8"], &["--kv-cache-dtype", "int8"]] {
        assert_eq!(tokens(&line(&[&["--device", "cpu"], more].concat())), int8, "{more:?}");
    }
    let refused = refusal(lowbit(&line(&["-ctk", "q8_0"])).output().unwrap());
    assert!(
        refused.contains(
            "keys in q8_0 and values in f16: both have one type here; --cache-type q8_0 is of both"
        ),
        "{refused}"
    );
    let other = lowbit(&line(&["--cache-type", "q4_0"])).output().unwrap();
    let refused = String::from_utf8_lossy(&other.stderr);
    let want = "f32, f16, bf16 and q8_0 (8 bits: integers with scales) are known";
    assert!(other.status.code() == Some(2) && refused.contains(want), "{refused}");
    let two = lowbit(&line(&["--device", "CUDA0,CUDA1"])).output().unwrap();
    assert!(String::from_utf8_lossy(&two.stderr).contains("a model is on one device"));
    let listed = String::from_utf8(lowbit(&["--list-devices"]).output().unwrap().stdout).unwrap();
    assert!(
        listed.starts_with("cpu ") && listed.contains("\ncuda ") && listed.contains("\nvulkan "),
        "{listed}"
    );
}

#[test]
fn a_model_needs_no_flag() {
    let printed = |arguments: &[&str]| lowbit(arguments).output().unwrap().stdout;
    let want = printed(&["inspect", "--model", "models/demo-4bit"]);
    assert_eq!(printed(&["inspect", "models/demo-4bit"]), want);
    assert_eq!(
        printed(&["inspect", "models/demo-4bit/"]).len(),
        want.len() + 1,
        "its name is printed as it was typed"
    );
    let score = ["perplexity", "models/demo-4bit", "-f", "rustfmt.toml", "-c", "64", "--json"];
    assert!(json(&lowbit(&score).output().unwrap())["nll"].as_f64().unwrap() > 0.0);
    let chat = with_input(lowbit(&["models/demo-4bit", "-n", "2", "--json"]), b"A vector is\n");
    assert_eq!(json(&chat)["tokens"].as_array().unwrap().len(), 2);
}

#[test]
fn other_architectures_are_named_before_their_tokenizers() {
    let folder = tempfile::tempdir().unwrap();
    let source = root().join("tests/vectors/models/qwen3");
    std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let config = r#"{"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let message =
        refusal(lowbit(&["generate", "-p", "x", "-m", folder.path().to_str().unwrap()]).output().unwrap());
    assert!(message.contains("\"cohere2\" is not supported; supported are"), "{message}");
}

#[test]
fn help_is_grouped_and_says_how_to_begin() {
    let help = |arguments: &[&str]| String::from_utf8(lowbit(arguments).output().unwrap().stdout).unwrap();
    assert!(help(&["--help"]).contains("lowbit chat -m model.gguf"));
    for heading in ["Model:", "Device:", "Prompt:", "Sampling:", "Text:"] {
        assert!(help(&["generate", "--help"]).contains(heading), "{heading}");
    }
}
