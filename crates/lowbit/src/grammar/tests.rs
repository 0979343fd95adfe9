//! Forms followed token by token, on the demo's tokenizer and on SentencePiece's.

use super::*;
use lowbit_files::{ChatTemplate, Checkpoint};
use lowbit_models::Constraint;
use numcheck::Random;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The demo's tokenizer, and SentencePiece's in GGUF.
static TOKENIZERS: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| {
    ["models/demo-chat", "tests/vectors/files/sentencepiece.gguf"].map(|name| {
        let path = root().join(name);
        let checkpoint = Checkpoint::open(&path);
        match checkpoint {
            Ok(checkpoint) => Tokenizer::from_checkpoint(&checkpoint).unwrap(),
            // A file of metadata alone.
            Err(error) => panic!("{error}"),
        }
    })
});

/// The demo's grammars, of replies without reasoning.
static DEMO: LazyLock<Grammars> = LazyLock::new(|| grammars(&TOKENIZERS[0], &Syntax::plain()));

fn grammars(tokenizer: &Tokenizer, syntax: &Syntax) -> Grammars {
    // A model may have more rows than its tokenizer has tokens.
    Grammars::new(tokenizer, syntax, tokenizer.vocab_size() + 40, tokenizer.eos_ids()).unwrap()
}

fn is_allowed(mask: &[u32], id: u32) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

/// The place in a text at which it is refused; `None` for one that is taken. A whole text must be
/// complete, or allow its end.
fn refused(grammars: &Grammars, form: &ReplyForm, prompt: Option<&str>, text: &str) -> Option<usize> {
    let tokenizer = &grammars.tokenizer;
    let prompt = prompt.map(|prompt| tokenizer.encode(prompt, false).unwrap());
    let grammar = grammars.compile(form, prompt.as_deref()).unwrap_or_else(|error| panic!("{error}"));
    let mut constraint = grammar.start();
    let ids = tokenizer.encode(text, false).unwrap();
    let mut is_complete = false;
    for (place, &id) in ids.iter().enumerate() {
        if is_complete || !is_allowed(constraint.mask().unwrap(), id) {
            return Some(place);
        }
        is_complete = constraint.accept(id).unwrap();
    }
    let ends = is_complete || {
        let mask = constraint.mask().unwrap();
        tokenizer.eos_ids().iter().any(|&id| is_allowed(mask, id))
    };
    (!ends).then_some(ids.len())
}

#[track_caller]
fn takes(form: &ReplyForm, texts: &[&str], not: &[&str]) {
    for text in texts {
        assert_eq!(refused(&DEMO, form, None, text), None, "{form:?} takes {text:?}");
    }
    for text in not {
        assert!(refused(&DEMO, form, None, text).is_some(), "{form:?} does not take {text:?}");
    }
}

fn error(form: &ReplyForm) -> String {
    DEMO.compile(form, None).unwrap_err().to_string()
}

fn schema(schema: Value) -> ReplyForm {
    ReplyForm::JsonSchema(schema)
}

#[test]
fn characters_that_span_tokens_are_followed() {
    // SentencePiece puts a space before a text.
    let any = ReplyForm::Lark("start: \" \"? value\nvalue: %json {\"type\": \"object\"}".into());
    for tokenizer in TOKENIZERS.iter() {
        let grammars = grammars(tokenizer, &Syntax::plain());
        for text in [
            r#"{"a": [1, -2.5e3, true, null]}"#,
            "{\"na\u{ef}ve\": \"\u{4e2d} \u{1f600}\\n\"}",
            "{\n  \"x\": {}\n}",
        ] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text, "the tokenizer has it");
            assert_eq!(refused(&grammars, &any, None, text), None, "{tokenizer:?}: {text}");
        }
        for text in [r#"{"a": 01}"#, r#"["a"]"#, r#"{"a": 1"#, r#"{"a": 1} x"#] {
            assert!(refused(&grammars, &any, None, text).is_some(), "{tokenizer:?}: {text}");
        }
    }
}

#[test]
fn schemas_are_enforced() {
    let person = schema(json!({
        "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"$ref": "#/$defs/age"}},
        "required": ["name", "age"],
        "additionalProperties": false,
    }));
    let good = [
        r#"{"name": "Ada", "age": 36}"#,
        "{\"name\":\"\",\"age\":0}",
        "{\n  \"name\": \"a\\\"\",\n  \"age\": 150\n}",
    ];
    let bad = [
        r#"{"name": "Ada"}"#,
        r#"{"name": "Ada", "age": 151}"#,
        r#"{"name": "Ada", "age": "36"}"#,
        r#"{"name": "Adaaaaa", "age": 3}"#,
        r#"{"name": "Ada", "age": 36, "x": 1}"#,
        "{\"name\": \"Ada\",\n\n\n\"age\": 36}",
    ];
    takes(&person, &good, &bad);
    takes(&ReplyForm::JsonObject, &["{}", r#"{"a": {"b": []}}"#], &["[]", "1", "{", "null"]);
    takes(&schema(json!(true)), &["1", "[]", "\"x\""], &["x"]);
}

#[test]
fn texts_in_other_forms() {
    let date = ReplyForm::Regex(r"^\d{4}-\d{2}-\d{2}$".into());
    takes(&date, &["2026-11-27"], &["2026-11-2", "2026-11-271", "x"]);
    takes(&ReplyForm::Regex("a|b/c".into()), &["a", "b/c"], &["ab", ""]);
    let choice = ReplyForm::Choice(vec!["yes".into(), "no\"\n".into()]);
    takes(&choice, &["yes", "no\"\n"], &["ye", "yesno", "maybe"]);
    let lark = ReplyForm::grammar("start: word (\",\" word)*\nword: /[a-z]+/\n".into());
    assert!(matches!(lark, ReplyForm::Lark(_)));
    takes(&lark, &["a", "ab,cd,e"], &["a,", "A", "a, b"]);
}

/// llama.cpp's own kinds of grammars: regular, recursive, with classes, comments and repetitions.
#[test]
fn gbnf_is_read() {
    let json = r#"# a comment
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;
    let form = ReplyForm::grammar(json.into());
    assert!(matches!(form, ReplyForm::Gbnf(_)));
    let good = [r#"{"a": [1, 2.5e-3, "x\n\u00e9"], "b": {}}"#, "{}", "{\n  \"a\": true }"];
    takes(&form, &good, &["[1]", r#"{"a": }"#, r#"{"a": 1,}"#, r#"{"a"  : 1}"#]);
    let moves = "root ::= (\"1. \" move \" \" move \"\\n\"){1,2}\nmove ::= [a-h] [1-8] | \"O-O\" \"-O\"? | .";
    let form = ReplyForm::Gbnf(moves.into());
    takes(&form, &["1. e4 O-O\n", "1. e4 O-O-O\n1. x \n\n"], &["1. e9 e4\n", "1. e4"]);
    let nested = ReplyForm::Gbnf("root ::= \"(\" root? \")\" | [^()]{2}".into());
    takes(&nested, &["()", "((()))", "((xy))", "\u{4e2d}\u{1f600}"], &["(()", "(x)", "xyz"]);
}

#[test]
fn gbnf_that_cannot_be_read_is_named() {
    for (text, want) in [
        ("root ::= \"a", "grammar: line 1: '\"' is wanted, but the text ends"),
        ("root ::= b", "grammar: there is no rule b"),
        ("a ::= \"b\"\n\n", "grammar: it has no rule root"),
        ("root ::= \"a\"\nroot2 = b", "grammar: line 2: ':' is wanted, but '=' stands there"),
        ("root ::= [z-a]", "grammar: line 1: 'z'-'a' is no range"),
        ("root ::= \"a\"{3,2}", "grammar: line 1: {3,2} is no range"),
        ("root ::= \"a\"{9999}", "grammar: line 1: 9999 repetitions are asked for, but 2000 may be"),
        ("root ::= \"\\q\"", "grammar: line 1: \\q is no escape"),
        ("root ::= <nothing>", "grammar: line 1: there is no token <nothing>"),
        ("root ::= (\"a\" | \"b\"", "grammar: line 1: ')' is wanted, but the text ends"),
    ] {
        assert_eq!(error(&ReplyForm::Gbnf(text.into())), want);
    }
}

/// T20: a schema that cannot be enforced is named by its path.
#[test]
fn t20_what_cannot_be_enforced_is_named() {
    let with = |inner: Value| {
        schema(
            json!({"type": "object", "properties": {"a": {"type": "array", "items": inner}}, "$defs": {"d": {"type": "null"}}}),
        )
    };
    let message = error(&with(json!({"type": "array", "uniqueItems": true})));
    assert_eq!(message, "schema.properties.a.items: Unimplemented keys: [\"uniqueItems\"]");
    let message = error(&with(json!({"not": {}, "$ref": "#/$defs/d"})));
    assert!(message.starts_with("schema.properties.a.items: Unimplemented keys: [\"not\"]"), "{message}");
    let message = error(&with(json!({"type": "string", "format": "colour"})));
    assert_eq!(message, "schema.properties.a.items: Unknown format: colour");
    let message = error(&with(json!({"$ref": "#/$defs/none"})));
    assert!(message.starts_with("schema.properties.a.items: "), "{message}");
    let refers =
        schema(json!({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "if": {}, "then": {}}}}));
    assert!(error(&refers).starts_with("schema.$defs.x: Unimplemented keys: "), "{}", error(&refers));
    assert!(error(&schema(json!({"type": "text"}))).starts_with("schema: "));
    assert!(error(&schema(json!([1]))).starts_with("schema: "));
    let large = json!({"type": "string", "enum": ["x".repeat(FORM_BYTES)]});
    assert!(error(&schema(large)).starts_with("schema: it has 26"));
}

/// Hostile forms are refused, in little time and stack.
#[test]
fn hostile_forms_are_bounded() {
    let start = std::time::Instant::now();
    let nested = |open: &str, close: &str, count: usize| open.repeat(count) + "\"a\"" + &close.repeat(count);
    let chain: String = (0..1900).map(|i| format!("r{i} ::= r{} \"x\"\n", i + 1)).collect();
    let schema_of = |value: Value| ReplyForm::JsonSchema(value);
    let mut deep = json!({"type": "integer"});
    for _ in 0..60 {
        deep = json!({"type": "array", "items": deep});
    }
    let forms = [
        ReplyForm::Gbnf(format!("root ::= {}", nested("(", ")", 5000))),
        ReplyForm::Lark(format!("start: {}", nested("(", ")", 5000))),
        ReplyForm::Lark(format!("start: {}", nested("~", "", 5000))),
        ReplyForm::Gbnf(format!("root ::= r0\n{chain}r1900 ::= root")),
        ReplyForm::Lark("start: a\n".to_string() + &"a: a | a a\n".repeat(3000)),
        ReplyForm::Regex("(a?){2000}".repeat(20)),
        ReplyForm::Regex("(".repeat(3000)),
        ReplyForm::Regex("((((a{100}){100}){100}){100})".into()),
        ReplyForm::Regex("(?=a)".into()),
        ReplyForm::Regex(String::new()),
        ReplyForm::Choice(vec![]),
        ReplyForm::Lark("start: @other".into()),
        ReplyForm::Lark("start: %json {".into()),
        ReplyForm::Gbnf("root ::= root".into()),
        schema_of(deep),
        schema_of(json!({"$ref": "#"})),
        schema_of(json!({"type": "string", "pattern": "(a{1000}){1000}"})),
        schema_of(json!({"allOf": vec![json!({"enum": (0..300).collect::<Vec<_>>()}); 30]})),
        schema_of(json!({"type": "array", "items": {"type": "null"}, "minItems": 1_000_000_000})),
    ];
    for form in forms {
        if let Ok(grammar) = DEMO.compile(&form, None) {
            let _ = grammar.start().mask();
        }
    }
    // Two seconds each, were it a release build; these are not optimised alike.
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

/// A walk over tokens that are allowed, at random: the text of it; `None` for one that was cut.
fn walk(
    constraint: &mut dyn Constraint,
    grammars: &Grammars,
    random: &mut Random,
    most: usize,
) -> Option<String> {
    let tokenizer = &grammars.tokenizer;
    let mut ids = vec![];
    while ids.len() < most {
        let mask = constraint.mask().unwrap();
        let allowed: Vec<u32> = (0..32 * mask.len() as u32).filter(|&id| is_allowed(mask, id)).collect();
        assert!(!allowed.is_empty());
        let id = allowed[random.below(allowed.len())];
        if tokenizer.eos_ids().contains(&id) {
            return Some(tokenizer.decode(&ids).unwrap());
        }
        assert!(tokenizer.token(id).is_some(), "ids without a token are never allowed");
        ids.push(id);
        if constraint.accept(id).unwrap() {
            return Some(tokenizer.decode(&ids).unwrap());
        }
    }
    None
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    id: u16,
    kind: Kind,
    #[serde(default)]
    notes: Vec<String>,
    at: Option<[i8; 2]>,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Buy,
    Sell,
}

/// Whatever is drawn, the text satisfies the schema: serde reads it strictly.
#[test]
fn t19_random_walks_satisfy_the_schema() {
    let form = schema(json!({
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 65535},
            "kind": {"enum": ["buy", "sell"]},
            "notes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
            "at": {"anyOf": [{"type": "null"}, {
                "type": "array",
                "items": {"type": "integer", "minimum": -128, "maximum": 127},
                "minItems": 2,
                "maxItems": 2,
            }]},
        },
        "required": ["id", "kind", "at"],
        "additionalProperties": false,
    }));
    let mut random = Random::new(19);
    let mut whole = 0;
    for tokenizer in TOKENIZERS.iter() {
        let grammars = grammars(tokenizer, &Syntax::plain());
        let grammar = grammars.compile(&form, None).unwrap();
        for _ in 0..40 {
            let Some(text) = walk(&mut *grammar.start(), &grammars, &mut random, 120) else { continue };
            let order: Order = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(
                order.notes.len() <= 2 && order.notes.iter().all(|note| note.chars().count() <= 8),
                "{text}"
            );
            let _ = (order.id, order.kind == Kind::Buy, order.at);
            whole += 1;
        }
    }
    assert!(whole >= 60, "{whole} of 80 were whole");
}

/// A tokenizer with a token per byte, and these tokens of markup from id 256 on; `<end>` ends.
fn bytes_and(added: &[&str]) -> Tokenizer {
    let of_byte = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            let before =
                (0..byte).filter(|byte| !matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)).count();
            char::from_u32(0x100 + before as u32).unwrap()
        }
    };
    let vocabulary: serde_json::Map<String, Value> =
        (0..=u8::MAX).map(|byte| (of_byte(byte).to_string(), Value::from(byte))).collect();
    let tokens = added.iter().chain(&["<end>"]).enumerate().map(|(index, content)| {
        json!({"id": index + 256, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": false})
    });
    let json = json!({
        "version": "1.0",
        "added_tokens": tokens.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    Tokenizer::from_json("tokenizer.json".as_ref(), json.to_string().as_bytes()).unwrap()
}

/// A model whose template mentions `markup`, with these tokens.
fn model(markup: &str, added: &[&str]) -> Grammars {
    let template = format!("{{% raw %}}{markup}{{% endraw %}}");
    let template = ChatTemplate::new(&template, "template".as_ref()).unwrap();
    let tokenizer = bytes_and(added);
    let syntax = Syntax::new(&template, Some(&tokenizer));
    let end = tokenizer.id("<end>").unwrap();
    Grammars::new(&tokenizer, &syntax, tokenizer.vocab_size(), &[end]).unwrap()
}

/// As [`refused`], for a reply to a prompt in which `<end>` is spelled where the reply ends.
#[track_caller]
fn reply(grammars: &Grammars, form: &ReplyForm, prompt: &str, text: &str) -> bool {
    let tokenizer = &grammars.tokenizer;
    let prompt = tokenizer.encode(prompt, false).unwrap();
    let mut constraint = grammars.compile(form, Some(&prompt)).unwrap().start();
    let (ids, end) = (tokenizer.encode(text, false).unwrap(), tokenizer.id("<end>").unwrap());
    let mut is_complete = false;
    for &id in &ids {
        if is_complete || !is_allowed(constraint.mask().unwrap(), id) {
            return false;
        }
        if id == end {
            return true;
        }
        is_complete = constraint.accept(id).unwrap();
    }
    is_complete
}

/// T18, T19: reasoning in front is free, but does not end the reply; the form begins behind it.
#[test]
fn t19_the_form_begins_behind_the_reasoning() {
    let ok = schema(json!({"const": {"ok": true}}));
    for added in [&["<think>", "</think>"][..], &[]] {
        let model = model("<think></think>", added);
        let json = r#"{"ok": true}"#;
        // Opened by the prompt.
        assert!(reply(&model, &ok, "<think>\n", &format!("a {{\"x\" 中\n</think>\n\n{json}")));
        assert!(!reply(&model, &ok, "<think>\n", "a<end>"));
        assert!(!reply(&model, &ok, "<think>\n", &format!("a</think>\n\n{json}x")));
        assert!(!reply(&model, &ok, "<think>\n", "a</think>\n\nx"));
        // Opened by the model, or not at all.
        assert!(reply(&model, &ok, "hi", &format!("<think>a</think>{json}")));
        assert!(reply(&model, &ok, "hi", json));
        assert!(!reply(&model, &ok, "hi", "<think>a<end>"));
        // Closed by the prompt.
        assert!(reply(&model, &ok, "<think>\n\n</think>\n\n", json));
        assert!(!reply(&model, &ok, "<think>\n\n</think>\n\n", &format!("<think>a</think>{json}")));
    }
}

/// A marker that is a token is none in a text; its characters are text.
#[test]
fn markup_is_no_text() {
    let model = model("<tool_call></tool_call>", &["<tool_call>", "</tool_call>"]);
    let form = schema(json!({"type": "string"}));
    assert!(!reply(&model, &form, "hi", "\"<tool_call>\""));
    assert!(reply(&model, &form, "hi", "\"< tool_call>\""));
}

fn tools() -> Vec<Value> {
    let f = json!({"name": "f", "parameters": {
        "type": "object",
        "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["s"],
        "additionalProperties": false,
    }});
    let g = json!({"name": "g", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}});
    [f, g].map(|function| json!({"type": "function", "function": function})).into()
}

/// A family: its template, its tokens, calls in its form, and calls that are not.
type Family = (&'static str, &'static [&'static str], &'static [&'static str], &'static [&'static str]);

const FAMILIES: &[Family] = &[
    (
        "<tool_call></tool_call>",
        &["<tool_call>", "</tool_call>"],
        &[
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"a\", \"n\": 5}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        ],
        &[
            "<tool_call>\n{\"name\": \"h\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 5}}\n</tool_call>",
            "no",
        ],
    ),
    (
        "<tool_call></tool_call><function=",
        &["<tool_call>", "</tool_call>"],
        &[
            "<tool_call>\n<function=f>\n<parameter=s>\na <b>\nc\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ],
        &[
            "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=n>\nx\n</parameter>\n</function>\n</tool_call>",
        ],
    ),
    (
        "<tool_call></tool_call><arg_key>",
        &["<tool_call>", "</tool_call>"],
        &[
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
            "<tool_call>g\n</tool_call>",
        ],
        &["<tool_call>f\n</tool_call>", "<tool_call>h\n</tool_call>"],
    ),
    (
        "[TOOL_CALLS]",
        &["[TOOL_CALLS]"],
        &["[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"s\": \"a\"}}]"],
        &["[TOOL_CALLS][]", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]"],
    ),
    (
        "[TOOL_CALLS][ARGS]",
        &["[TOOL_CALLS]", "[ARGS]"],
        &["[TOOL_CALLS]f[ARGS]{\"s\": \"a\"}"],
        &["[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}"],
    ),
    (
        "{\"name\": function name, \"parameters\"",
        &[],
        &["{\"name\": \"f\", \"parameters\": {\"s\": \"a\", \"n\": 7}}"],
        &["{\"name\": \"f\", \"parameters\": {}}", "no"],
    ),
];

/// Calls that are required, of each family, and what its parser makes of them.
#[test]
fn required_calls_are_written_as_the_family_does() {
    for (markup, added, good, bad) in FAMILIES {
        let tools = tools();
        let template = format!("{{% raw %}}{markup}{{% endraw %}}");
        let template = ChatTemplate::new(&template, "template".as_ref()).unwrap().with("tools", &tools);
        let tokenizer = bytes_and(added);
        let syntax = Syntax::new(&template, Some(&tokenizer));
        let end = tokenizer.id("<end>").unwrap();
        let model = Grammars::new(&tokenizer, &syntax, tokenizer.vocab_size(), &[end]).unwrap();
        let names = vec!["f".into(), "g".into()];
        let required = ReplyForm::Calls(CallForm::new(tools.clone(), true).with_strict(names));
        for call in *good {
            assert!(
                reply(&model, &required, "hi", &format!("{call}<end>"))
                    || reply(&model, &required, "hi", call),
                "{call}"
            );
            let mut stream = crate::ReplyStream::new((&tokenizer, &syntax), &[], vec![], 0).unwrap();
            let mut events = vec![];
            for id in tokenizer.encode(call, false).unwrap() {
                events.extend(stream.push(id).unwrap().events);
            }
            events.extend(stream.finish().unwrap().events);
            let [crate::Event::Call(parsed)] = &events[..] else { panic!("{call}: {events:?}") };
            assert!(["f", "g"].contains(&parsed.name.as_str()), "{parsed:?}");
        }
        for call in *bad {
            assert!(!reply(&model, &required, "hi", &format!("{call}<end>")), "{call}");
        }
        // One call alone, of one tool.
        let one = ReplyForm::Calls(CallForm::new(tools[..1].to_vec(), true).with_one(true));
        assert!(reply(&model, &one, "hi", good[0]), "{}", good[0]);
    }
}

/// Calls that are not required: any text may stand instead, or a form.
#[test]
fn calls_that_are_not_required_are_held_from_their_trigger_on() {
    let model = model("<tool_call></tool_call>", &["<tool_call>", "</tool_call>"]);
    let strict = CallForm::new(tools(), false).with_strict(vec!["f".into()]);
    let form = ReplyForm::Calls(strict.clone());
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"a\"}}\n</tool_call>";
    for (text, want) in [
        ("Any text.<end>".to_string(), true),
        (format!("Text. {call}<end>"), true),
        (format!("{call}\n{call}<end>"), true),
        ("Text. <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><end>".into(), false),
    ] {
        assert_eq!(reply(&model, &form, "hi", &text), want, "{text}");
    }
    let or = ReplyForm::Calls(strict.with_otherwise(Some(schema(json!({"type": "integer"})))));
    assert!(reply(&model, &or, "hi", "55<end>") && reply(&model, &or, "hi", &format!("{call}<end>")));
    assert!(!reply(&model, &or, "hi", "text<end>"));
}

#[test]
fn harmony_writes_messages() {
    let added =
        ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];
    let model = model(&added.join(" "), &added);
    let prompt = "<|start|>assistant";
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let ok = schema(json!({"const": {"ok": true}}));
    let json = r#"{"ok": true}"#;
    for text in [
        format!("<|channel|>final<|message|>{json}"),
        format!("{thought}<|channel|>final <|constrain|>json<|message|>{json}"),
    ] {
        assert!(reply(&model, &ok, prompt, &text), "{text}");
    }
    assert!(!reply(&model, &ok, prompt, &format!("{thought}<|channel|>final<|message|>x")));
    let required = ReplyForm::Calls(CallForm::new(tools(), true));
    let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\": \"a\"}";
    assert!(
        reply(&model, &required, prompt, call)
            && reply(&model, &required, prompt, &format!("{thought}{call}"))
    );
    assert!(!reply(&model, &required, prompt, "<|channel|>final<|message|>no"));
}

#[test]
fn a_family_without_a_grammar_is_named() {
    let gemma = model("<|tool_call><tool_call|>", &["<|tool_call>", "<tool_call|>"]);
    let required = ReplyForm::Calls(CallForm::new(tools(), true));
    let message = gemma.compile(&required, Some(&[])).unwrap_err().to_string();
    assert_eq!(message, "tools: calls that begin with <|tool_call> cannot be held to a form yet");
    let plain = model("", &[]).compile(&required, Some(&[])).unwrap_err().to_string();
    assert_eq!(plain, "tools: this model's chat template has no calls");
    let coder = model("<tool_call></tool_call><function=", &["<tool_call>", "</tool_call>"]);
    let tool = json!({"name": "h", "parameters": {"type": "object", "properties": {"s": {"type": "string", "pattern": "a+"}}}});
    let strict = ReplyForm::Calls(CallForm::new(vec![tool.clone()], true).with_strict(vec!["h".into()]));
    let message = coder.compile(&strict, Some(&[])).unwrap_err().to_string();
    let want = "tools.h.parameters.properties.s.pattern: it cannot be held to where a text has no quotes";
    assert_eq!(message, want);
    assert!(coder.compile(&ReplyForm::Calls(CallForm::new(vec![tool], true)), Some(&[])).is_ok());
}
