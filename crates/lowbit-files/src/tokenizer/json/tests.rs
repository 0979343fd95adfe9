use std::path::Path;

use serde_json::{Value, json};

use crate::Tokenizer;
use crate::tokenizer::guard::processor_time;

fn load(bytes: &[u8]) -> Result<Tokenizer, String> {
    Tokenizer::from_json(Path::new("tokenizer.json"), bytes).map_err(|error| error.to_string())
}

fn load_value(value: &Value) -> Result<Tokenizer, String> {
    load(&serde_json::to_vec(value).unwrap())
}

fn bpe() -> Value {
    json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3}, "merges": [["a", "b"]]})
}

/// A tokenizer with something of everything, its decoder last.
fn full() -> Value {
    json!({
        "version": "1.0",
        "truncation": {"max_length": 18446744073709551615u64, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        "padding": {"strategy": {"Fixed": 18446744073709551615u64}},
        "model": bpe(),
        "added_tokens": [added(3, "<s>"), added(4, "<new>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"},
            {"type": "Replace", "pattern": {"Regex": "c+"}, "content": "a"},
            {"type": "Replace", "pattern": {"String": "d"}, "content": "b"},
            {"type": "Prepend", "prepend": "a"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|b"}, "behavior": "MergedWithPrevious", "invert": false},
            {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "never", "split": false},
            {"type": "Digits", "individual_digits": true}]},
        "post_processor": template(json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]), 3),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    })
}

fn added(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
}

fn template(single: Value, id: u32) -> Value {
    json!({
        "type": "TemplateProcessing", "single": single,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}},
    })
}

fn replace(pattern: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn with(key: &str, value: Value) -> Value {
    let mut file = json!({"model": bpe()});
    file[key] = value;
    file
}

fn model(key: &str, value: Value) -> Value {
    let mut model = bpe();
    model[key] = value;
    with("model", model)
}

#[test]
fn all_parts_work() {
    let tokenizer = load_value(&full()).unwrap();
    // Prepend gives "ab", Replace of cc and d "a" and "b".
    assert_eq!(tokenizer.encode("b<new>ccd", true).unwrap(), [3, 2, 4, 0, 2]);
    assert_eq!(tokenizer.encode("b", false).unwrap(), [2]);
    assert_eq!(tokenizer.decode(&[3, 2, 4, 0]).unwrap(), "<s>ab<new>a");
    assert_eq!(tokenizer.vocab_size(), 5);
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = serde_json::to_vec(&full()).unwrap();
    for end in 0..whole.len() {
        let message = load(&whole[..end]).expect_err("cut");
        assert!(message.starts_with("tokenizer.json: tokenizer: EOF while parsing"), "{end}: {message}");
    }
    let demo = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json"))
        .unwrap();
    load(&demo).unwrap();
    for part in 0..200 {
        let message = load(&demo[..demo.len() * part / 200]).expect_err("cut");
        assert!(!message.contains("panicked"), "{part}: {message}");
    }
}

#[test]
fn flipped_bytes_are_read_or_refused() {
    let whole = serde_json::to_vec(&full()).unwrap();
    let mut random = 1u64;
    let mut below = |most: usize| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize % most
    };
    let mut read = 0;
    for _ in 0..3000 {
        let mut bytes = whole.clone();
        for _ in 0..2 {
            let at = below(bytes.len());
            bytes[at] = match below(3) {
                0 => b"\"{}[],:01"[below(9)],
                1 => bytes[below(whole.len())],
                _ => bytes[at] ^ 1 << below(7),
            };
        }
        if let Ok(tokenizer) = load(&bytes) {
            read += 1;
            let ids = tokenizer.encode("b <new>ccd 12", true).unwrap_or_default();
            _ = tokenizer.decode(&ids);
        }
    }
    assert!(read > 100, "{read}");
}

#[test]
fn what_does_not_hold_together_is_refused() {
    let sequence =
        |kind: &str, key: &str, steps: Vec<Value>| with(kind, json!({"type": "Sequence", key: steps}));
    let nested = |depth: usize| {
        (0..depth).fold(json!({"type": "NFC"}), |step, _| json!({"type": "Sequence", "normalizers": [step]}))
    };
    let a = || json!({"Sequence": {"id": "A", "type_id": 0}});
    let unigram = |extra: Value| {
        let mut model = json!({"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]], "unk_id": 0});
        model.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        with("model", model)
    };
    let cases = [
        (json!({}), "missing field `model`"),
        (json!([1]), "expected a string"),
        (with("version", json!("2.0")), "version is 2.0"),
        (model("type", json!("Magic")), "is not BPE, Unigram, WordPiece or WordLevel"),
        (model("vocab", json!({"a": 0, "b": 0})), "tokens a and b have the same id 0"),
        (model("vocab", json!({"a": 4294967295u32})), "token a has id 4294967295; ids are below 16777216"),
        (model("vocab", json!({"a": 1u64 << 60})), "expected u32"),
        (model("vocab", json!({"a": -1})), "expected u32"),
        (model("vocab", json!({"a".repeat(5000): 0})), "has 5000 bytes; at most 4096"),
        (model("vocab", json!([["a", 0.5]])), "should be an object of tokens and their ids"),
        (model("merges", json!([["a", "q"]])), "out of vocabulary"),
        (model("merges", json!([["ab", "ab"]])), "joins ab and ab, but that is no token"),
        (model("merges", json!([["a"]])), "two tokens"),
        (model("merges", json!([["a", "b", "c"]])), "two tokens"),
        (model("merges", json!(["ab"])), "ab is not two tokens"),
        (model("merges", json!(["a b c"])), "is not two tokens"),
        (model("continuing_subword_prefix", json!("\u{e9}\u{e9}")), "joins a and b"),
        (model("dropout", json!(7)), "ropout"),
        (with("model", json!({"type": "BPE", "vocab": {}})), "merges is missing"),
        (with("model", json!({"type": "WordLevel", "vocab": {"a": 0}})), "unk_token is missing"),
        (
            with(
                "model",
                json!({"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 1u64 << 60}),
            ),
            "max_input_chars_per_word is 1152921504606846976; at most 256",
        ),
        (unigram(json!({"unk_id": 2})), "unk_id is 2, but there are 2 tokens"),
        (unigram(json!({"vocab": [["a", null]]})), "invalid type: null"),
        (unigram(json!({"vocab": [["a".repeat(600), 0]]})), "has 600 bytes; at most 512"),
        (with("added_tokens", json!([added(4, "")])), "added token 4 is empty"),
        (with("added_tokens", json!([added(9, "<x>")])), "<x> has id 9, but would get 4"),
        (with("added_tokens", json!([added(1, "a")])), "a has id 1, but would get 0"),
        (with("added_tokens", json!([added(u32::MAX, "<x>")])), "ids are below 16777216"),
        (with("added_tokens", json!([added(4, &"x".repeat(5000))])), "has 5000 bytes"),
        (with("normalizer", json!("NFC")), "a step without a type"),
        (with("normalizer", json!({"type": "Zalgo"})), "type Zalgo is none of BertNormalizer"),
        (with("normalizer", nested(9)), "nests them more than 8 times"),
        (sequence("normalizer", "normalizers", vec![json!({"type": "NFC"}); 64]), "more than 64 steps"),
        (sequence("normalizer", "normalizers", vec![replace("a", "aa"); 8]), "256 times longer; at most 128"),
        (with("normalizer", replace("", &"a".repeat(128))), "129 times longer"),
        (with("normalizer", replace("a", &"a".repeat(20_000))), "content has more than 16384 bytes"),
        (sequence("normalizer", "normalizers", vec![json!({"type": "ByteLevel"}); 8]), "256 times longer"),
        (with("normalizer", json!({"type": "Prepend", "prepend": "a".repeat(128)})), "129 times longer"),
        (
            with("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
            "charsmap: it is cut",
        ),
        (with("normalizer", json!({"type": "Precompiled"})), "precompiled_charsmap is no text"),
        (
            with("normalizer", json!({"type": "Replace", "pattern": 1, "content": ""})),
            "neither a String nor a Regex",
        ),
        (with("pre_tokenizer", split("(")), "pattern ("),
        (with("pre_tokenizer", split(&"a".repeat(20_000))), "neither a String nor a Regex of at most 16384"),
        (
            with(
                "pre_tokenizer",
                json!({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated"}),
            ),
            "no invert",
        ),
        (with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})), "FixedLength of 0"),
        (with("post_processor", template(json!([a()]), 77)), "<s> has id 77, which is no token's"),
        (with("post_processor", template(json!([]), 3)), "not the one Sequence A"),
        (with("post_processor", template(json!([a(), a()]), 3)), "not the one Sequence A"),
        (
            with("post_processor", template(json!([{"Sequence": {"id": "B", "type_id": 0}}]), 3)),
            "not the one Sequence A",
        ),
        (
            with("post_processor", template(json!([a(), {"SpecialToken": {"id": "x", "type_id": 0}}]), 3)),
            "x is not in special_tokens",
        ),
        (
            sequence(
                "post_processor",
                "processors",
                vec![template(json!([a()]), 3), template(json!([a()]), 3)],
            ),
            "more than one step that adds tokens",
        ),
        (
            with(
                "post_processor",
                json!({"type": "RobertaProcessing", "sep": ["</s>", 9], "cls": ["<s>", 0], "trim_offsets": true, "add_prefix_space": true}),
            ),
            "sep has id 9",
        ),
        (with("decoder", json!({"type": "Strip", "content": " ", "start": 0})), "Strip has no stop"),
        (sequence("decoder", "decoders", vec![replace("a", "aa"); 8]), "256 times longer"),
    ];
    for (file, want) in cases {
        let message = load_value(&file).expect_err(want);
        assert!(message.contains(want) && !message.contains("panicked"), "{message}\nshould say: {want}");
        assert!(message.len() < 1200, "{message}");
    }
}

#[test]
fn duplicate_keys_are_refused() {
    for text in [
        r#"{"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}, "merges": []}}"#,
        r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "merges": []}}"#,
        r#"{"model": {"vocab": {}, "merges": []}, "model": {"vocab": {}, "merges": []}}"#,
    ] {
        load(text.as_bytes()).expect_err(text);
    }
}

#[test]
fn patterns_that_do_not_end_are_errors() {
    let text = "a".repeat(40);
    for step in [
        with("pre_tokenizer", split("(?:a(?=.)|a(?=.))*(?=b)c")),
        with(
            "normalizer",
            json!({"type": "Replace", "pattern": {"Regex": "(?:a(?=.)|a(?=.))*(?=b)c"}, "content": ""}),
        ),
        with(
            "normalizer",
            json!({"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "(?:a(?=.)|a(?=.))*(?=b)c"}, "content": ""}]}),
        ),
    ] {
        let Err(error) = load_value(&step).unwrap().encode(&text, false) else { panic!("it ends") };
        let message = error.to_string();
        assert!(message.contains("tokenizer.json: tokenizer: ") && message.contains("acktrack"), "{message}");
    }
    // Each match alone is quick enough, but there is one at each position.
    let slow = load_value(&with("pre_tokenizer", split("(?=((?:a(?=.)|a(?=.)){13}b|a))a"))).unwrap();
    let start = processor_time();
    let Err(error) = slow.encode(&"a".repeat(20_000), false) else { panic!("it ends") };
    assert!(error.to_string().contains("takes too long"), "{error}");
    let seconds = (processor_time() - start).as_secs();
    assert!(seconds < 6, "{seconds} s");
}

#[test]
fn panics_of_the_library_are_errors() {
    // Its Strip assumes more characters than a token has.
    let file = with("decoder", json!({"type": "Strip", "content": "a", "start": 0, "stop": 3}));
    let message = load_value(&file).unwrap().decode(&[0]).unwrap_err().to_string();
    assert!(message.contains("the tokenizers library panicked"), "{message}");
}

#[test]
fn many_added_tokens_load_in_time() {
    let tokens =
        |count: u32| (0..count).map(|i| added(4 + i, &format!("<extra_token_{i}>"))).collect::<Vec<_>>();
    let file = with("added_tokens", tokens(100_000).into());
    let start = processor_time();
    let tokenizer = load_value(&file).unwrap();
    let seconds = (processor_time() - start).as_secs();
    assert!(seconds < 10, "{seconds} s");
    assert_eq!(tokenizer.encode("a<extra_token_99999>", false).unwrap(), [0, 100_003]);
    let message = load_value(&with("added_tokens", tokens(262_145).into())).unwrap_err();
    assert!(message.contains("more than 262144 values"), "{message}");
}

#[test]
fn added_tokens_that_look_around_take_linear_time() {
    let mut token = added(4, "<m>");
    for key in ["single_word", "lstrip", "rstrip"] {
        token[key] = true.into();
    }
    let tokenizer = load_value(&with("added_tokens", json!([token]))).unwrap();
    let text = "<m> a ".repeat(1 << 17);
    assert!(tokenizer.encode(&text, false).unwrap().len() >= 1 << 18);
}

#[test]
fn deep_nesting_and_many_values_are_refused() {
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        let deep = open.repeat(100_000) + "1" + &close.repeat(100_000);
        let file = format!(r#"{{"normalizer": {deep}}}"#);
        assert!(load(file.as_bytes()).unwrap_err().contains("recursion limit"));
        let file = format!(r#"{{"unknown": {deep}}}"#);
        load(file.as_bytes()).unwrap_err();
    }
    let file = format!(r#"{{"decoder": [{}1]}}"#, "1,".repeat(70_000));
    assert!(load(file.as_bytes()).unwrap_err().contains("more than 65536 values"));
}

/// T5's steps, with a charsmap as long as its own makes texts.
#[test]
fn published_steps_are_within_the_limits() {
    let steps = |count: usize| {
        let mut file = with(
            "pre_tokenizer",
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true}),
        );
        file["normalizer"] = json!({"type": "Sequence", "normalizers": [
            replace("a", &"a".repeat(11)),
            {"type": "Strip", "strip_left": false, "strip_right": true},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u{2581}".repeat(count)}]});
        load_value(&file)
    };
    assert!(steps(1).is_ok());
    assert!(steps(3).unwrap_err().contains("longer"));
}

#[test]
fn each_kind_of_model_encodes() {
    let unigram = json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -1.5], ["b", -2.0]]});
    let cases = [
        (unigram, "abax", vec![2, 1, 0]),
        (
            json!({"type": "WordPiece", "unk_token": "?", "vocab": {"?": 0, "a": 1, "##b": 2}}),
            "abb",
            vec![1, 2, 2],
        ),
        (json!({"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "ab": 1}}), "ab", vec![1]),
        (json!({"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["#version: 0.2", "a b"]}), "ab", vec![2]),
    ];
    for (model, text, want) in cases {
        assert_eq!(load_value(&with("model", model)).unwrap().encode(text, false).unwrap(), want);
    }
}

/// The time to load the demo's tokenizer, here and by the crate alone; `--ignored --nocapture`
/// prints it.
#[test]
#[ignore = "a measurement"]
fn loading_the_demos_tokenizer_is_timed() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json");
    let demo = std::fs::read(demo).unwrap();
    let best = |load: &dyn Fn()| {
        let times = (0..20).map(|_| {
            let start = processor_time();
            load();
            processor_time() - start
        });
        times.min().unwrap()
    };
    let own = best(&|| drop(load(&demo).unwrap()));
    let alone = best(&|| drop(tokenizers::Tokenizer::from_bytes(&demo).unwrap()));
    println!("{own:?}; the crate alone {alone:?}");
}
