use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::*;

fn vectors(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/files").join(name)
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Path::new("template.jinja")).unwrap()
}

fn render(source: &str) -> String {
    template(source).render::<Message>(&[], false).unwrap()
}

#[track_caller]
fn refused(source: &str) -> String {
    let rendered = ChatTemplate::new(source, Path::new("template.jinja"))
        .and_then(|template| template.render::<Message>(&[], false));
    rendered.expect_err("should be refused").to_string()
}

#[test]
fn templates_render_as_in_transformers() {
    let cases: Vec<Json> = serde_json::from_slice(&std::fs::read(vectors("chat.json")).unwrap()).unwrap();
    assert!(cases.len() >= 36);
    for case in cases {
        let path = vectors("chat").join(case["template"].as_str().unwrap()).with_extension("jinja");
        let mut template = ChatTemplate::new(&std::fs::read_to_string(&path).unwrap(), &path).unwrap();
        for (name, value) in case["variables"].as_object().unwrap() {
            template = template.with(name, value);
        }
        let messages = case["messages"].as_array().unwrap();
        let rendered = template.render(messages, case["add_generation_prompt"].as_bool().unwrap());
        match (rendered, case["text"].as_str()) {
            (Ok(text), Some(want)) => assert_eq!(text, want, "{case}"),
            (Err(error), None) => {
                let want = case["error"].as_str().unwrap();
                assert!(error.to_string().contains(want), "{error}\nshould say: {want}");
            }
            (rendered, want) => panic!("{rendered:?} instead of {want:?} for {case}"),
        }
    }
}

#[test]
fn messages_are_what_templates_expect() {
    let source =
        "{% for m in messages %}[{{ m.role }}] {{ m['content'] }}\n{% endfor %}{{ add_generation_prompt }}";
    let messages = [Message::new("user", "a"), Message::new("assistant", "b\n")];
    assert_eq!(template(source).render(&messages, true).unwrap(), "[user] a\n[assistant] b\n\nTrue");
}

/// As transformers 5.24 has it: what a message has as null it does not have, but an argument may be
/// null, and the content beside calls, for which DeepSeek's templates ask.
#[test]
fn null_fields_of_messages_are_absent() {
    let source =
        "{% for m in messages %}{{ m | tojson }}{% if m.content is string %}!{% endif %}{% endfor %}";
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": null}}}]);
    let messages = [
        json!({"role": "assistant", "content": null, "reasoning_content": null, "thinking": "t", "tool_calls": call}),
        json!({"role": "user", "content": "", "name": null}),
    ];
    let want = concat!(
        r#"{"thinking": "t", "role": "assistant", "content": null, "#,
        r#""tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": null}}}], "#,
        r#""reasoning_content": "t"}{"role": "user", "content": ""}!"#,
    );
    assert_eq!(template(source).render(&messages, false).unwrap(), want);
}

/// Expected strings are what `json.dumps(x, ensure_ascii=False)` gives in Python 3.11.
#[test]
fn tojson_is_pythons() {
    let value = json!({"b": [1, 2.0, null, true], "a": "<\u{e9}\">", "e": {}, "l": []});
    let render = |options: &str| {
        let source = format!("{{{{ value | tojson({options}) }}}}");
        template(&source).with("value", &value).render::<Message>(&[], false).unwrap()
    };
    assert_eq!(render(""), r#"{"b": [1, 2.0, null, true], "a": "<é\">", "e": {}, "l": []}"#);
    assert_eq!(render("sort_keys=true"), r#"{"a": "<é\">", "b": [1, 2.0, null, true], "e": {}, "l": []}"#);
    assert_eq!(
        render("ensure_ascii=true"),
        r#"{"b": [1, 2.0, null, true], "a": "<\u00e9\">", "e": {}, "l": []}"#
    );
    assert_eq!(render("separators=[',', ':']"), r#"{"b":[1,2.0,null,true],"a":"<é\">","e":{},"l":[]}"#);
    let indented = "{\n  \"b\": [\n    1,\n    2.0,\n    null,\n    true\n  ],\n  \"a\": \"<é\\\">\",\n  \"e\": {},\n  \"l\": []\n}";
    assert_eq!(render("indent=2"), indented);
    assert!(refused("{{ 1 | tojson(color='red') }}").contains("color"));
}

#[test]
fn generation_blocks_render_their_body() {
    assert_eq!(render("a\n{%- generation -%}\n b {% endgeneration %}c"), "ab c");
    assert_eq!(render("{% if generation is defined %}x{% endif %}{{ '{% generation' }}"), "{% generation");
}

#[test]
fn hostile_templates_are_refused() {
    assert!(refused("{% if %}").starts_with("template.jinja: chat template: "));
    assert!(refused("{% include 'other' %}").contains("include"));
    assert!(refused("{{ raise_exception('no thanks') }}").contains("no thanks"));
    assert!(refused("{{ nothing.at.all }}").contains("undefined"));
    let endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}";
    assert!(refused(endless).contains("the template takes more than"));
    assert!(refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").contains("recurses"));
}

/// A value that nests without end stops where it is written: nothing of it is kept.
#[test]
fn endless_values_are_refused() {
    struct Endless;
    impl Serialize for Endless {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_seq([Endless])
        }
    }
    let template = template("{{ messages }}");
    let error = template.render(&[Endless], false).unwrap_err().to_string();
    assert!(error.contains("messages: nests deeper than"), "{error}");
    let error = template.with("tools", Endless).render::<Message>(&[], false).unwrap_err().to_string();
    assert!(error.contains("variable tools: nests deeper than"), "{error}");
}

#[test]
fn reasoning_is_found_under_any_of_its_names() {
    let source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}|{{ messages[0] }}";
    let rendered =
        template(source).render(&[json!({"role": "assistant", "reasoning": "why"})], false).unwrap();
    let all = "{'thinking': 'why', 'role': 'assistant', 'reasoning': 'why', 'reasoning_content': 'why'}";
    assert_eq!(rendered, format!("why|why|{all}"));
}
