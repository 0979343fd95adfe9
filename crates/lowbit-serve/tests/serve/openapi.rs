//! `/openapi.json` is what the server does: its routes, and the fields that its handlers read.

use crate::embedding::Embedding;
use crate::support::client::Answer;
use crate::support::opened::serve;
use crate::support::{Running, Script, Scripted};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// The sources of the server, one after the other.
fn sources() -> String {
    fn read(folder: &Path, all: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.extension().is_some_and(|of| of == "rs") {
                true => *all += &std::fs::read_to_string(&entry).unwrap(),
                false if entry.is_dir() => read(&entry, all),
                false => {}
            }
        }
    }
    let mut all = String::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    all
}

/// The name in quotes at the start of a text.
fn quoted(text: &str) -> Option<&str> {
    let (name, _) = text.strip_prefix('"')?.split_once('"')?;
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    (name.len() > 1 && name.chars().all(is_name)).then_some(name)
}

/// Every name in quotes in the sources: fields are read by some of them.
fn names(sources: &str) -> BTreeSet<&str> {
    sources.match_indices('"').filter_map(|(at, _)| quoted(&sources[at..])).collect()
}

/// The names that methods which read fields are called with.
fn read_names(sources: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for method in ["take", "value", "need", "count", "object", "list", "text", "shift_remove"] {
        for (at, call) in sources.match_indices(&format!(".{method}")) {
            let rest = &sources[at + call.len()..];
            // `take::<Vec<String>>("name")`
            let rest =
                if rest.starts_with("::<") { rest.find('(').map_or("", |at| &rest[at..]) } else { rest };
            found.extend(rest.strip_prefix('(').and_then(quoted));
        }
    }
    found
}

fn properties(schema: &Value) -> &Map<String, Value> {
    schema["properties"].as_object().unwrap()
}

/// The names of all properties in a schema, at any depth.
fn all_properties<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                if let (true, Some(inner)) = (name == "properties", value.as_object()) {
                    found.extend(inner.keys().map(String::as_str));
                }
                all_properties(value, found);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| all_properties(value, found)),
        _ => {}
    }
}

#[test]
fn every_field_that_is_read_is_a_property() {
    let server = Running::new(Scripted::new(vec![]));
    let described = server.get("/openapi.json").ok();
    let mut known = BTreeSet::new();
    all_properties(&described["components"]["schemas"], &mut known);
    let sources = sources();
    // Kinds of answers and events, and what is refused by name.
    let others = ["text_completion", "images", "prompt_tokens"];
    let read = read_names(&sources);
    assert!(read.len() > 60, "{read:?}");
    let missing: Vec<&&str> =
        read.iter().filter(|name| !known.contains(**name) && !others.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// A path, a body that it answers with 200, and the object in it whose fields are tried.
struct Case<'a> {
    server: &'a Running,
    path: &'static str,
    body: Value,
    inside: Option<&'static str>,
}

impl Case<'_> {
    /// The answer to the body with these fields.
    fn with(&self, names: &[&str], value: &Value) -> Answer {
        let mut body = self.body.clone();
        let object = match self.inside {
            Some(name) => &mut body[name],
            None => &mut body,
        };
        names.iter().for_each(|name| object[*name] = value.clone());
        self.server.post(self.path, &body)
    }

    fn is_unknown(&self, answer: &Answer, name: &str) -> bool {
        let path = self.inside.map(|inside| format!("{inside}.")).unwrap_or_default();
        let warnings = answer.header("warning").unwrap_or_default();
        answer.status == 200
            && warnings
                .split(['"', ';'])
                .any(|text| text.trim() == format!("{path}{name}: unknown field, ignored"))
    }

    /// True if the field is refused whenever it asks for something, and for no other reason.
    fn is_refused(&self, name: &str) -> bool {
        let silent = |value: Value| {
            let answer = self.with(&[name], &value);
            answer.status == 200 && answer.header("warning").is_none()
        };
        self.with(&[name], &json!("zz")).status == 400 && silent(json!(false)) && silent(json!({}))
    }

    /// The names among these that are read, though nobody described them.
    fn check_undescribed(&self, names: &[&str], wrong: &mut Vec<String>) {
        let answer = self.with(names, &json!("zz"));
        if names.iter().all(|name| self.is_unknown(&answer, name)) {
            return;
        }
        match names {
            [name] if self.is_refused(name) => {}
            [name] => wrong.push(format!("{} reads {name}: {}", self.path, answer.text())),
            _ => {
                let (some, others) = names.split_at(names.len() / 2);
                self.check_undescribed(some, wrong);
                self.check_undescribed(others, wrong);
            }
        }
    }

    fn check(&self, described: &Value, names: &BTreeSet<&str>, wrong: &mut Vec<String>) {
        let reference =
            &described["paths"][self.path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let schema = reference["$ref"].as_str().unwrap().strip_prefix("#/components/schemas/").unwrap();
        let schema = &described["components"]["schemas"][schema];
        let (schema, body) = match self.inside {
            Some(name) => (&schema["properties"][name], &self.body[name]),
            None => (schema, &self.body),
        };
        let (known, body) = (properties(schema), body.as_object().unwrap());
        let answer = self.with(&[], &Value::Null);
        assert_eq!(
            (answer.status, answer.header("warning")),
            (200, None),
            "{}: {}",
            self.path,
            answer.text()
        );
        for name in body.keys().filter(|name| !known.contains_key(*name)) {
            wrong.push(format!("{} reads {name}", self.path));
        }
        for name in known.keys().filter(|name| !body.contains_key(*name)) {
            if self.is_unknown(&self.with(&[name], &json!("zz")), name) {
                wrong.push(format!("{} does not read {name}", self.path));
            }
        }
        let others: Vec<&str> = names.iter().copied().filter(|name| !known.contains_key(*name)).collect();
        // As many as a header of warnings names.
        others.chunks(16).for_each(|names| self.check_undescribed(names, wrong));
    }
}

#[test]
fn the_fields_of_each_path_are_those_that_its_handler_reads() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    Embedding::default().write(folders[0].path());
    crate::reranker::make(
        folders[1].path(),
        &crate::reranker::case(&crate::reranker::peer(), "flat")["files"],
    );
    let [embeds, ranks] = folders.each_ref().map(|folder| serve(folder.path()));
    let writes = Running::new(Scripted::new(vec![Script::new(vec![])]));
    let described = writes.get("/openapi.json").ok();
    let messages = json!([{"role": "user", "content": "hi"}]);
    let texts = json!({"query": "a", "documents": ["b"]});
    let conversation = json!({"messages": messages});
    let named = json!({"model": "test", "messages": messages});
    let mut cases = vec![];
    for (server, path, body) in [
        (&writes, "/v1/chat/completions", conversation.clone()),
        (&writes, "/v1/completions", json!({"prompt": "a"})),
        (&writes, "/v1/responses", json!({"input": "a"})),
        (&writes, "/v1/responses/input_tokens", json!({"input": "a"})),
        (&writes, "/v1/messages", json!({"max_tokens": 5, "messages": messages})),
        (&writes, "/v1/messages/count_tokens", conversation.clone()),
        (&writes, "/api/chat", named),
        (&writes, "/api/generate", json!({"model": "test", "prompt": "a"})),
        (&writes, "/api/show", json!({"model": "test"})),
        (&writes, "/tokenize", conversation.clone()),
        (&writes, "/detokenize", json!({"tokens": [1]})),
        (&writes, "/apply-template", conversation),
        (&embeds, "/v1/embeddings", json!({"input": "a"})),
        (&embeds, "/api/embed", json!({"model": "test", "input": "a"})),
        (&embeds, "/api/embeddings", json!({"model": "test", "prompt": "a"})),
        (&ranks, "/v1/rerank", texts.clone()),
        (&ranks, "/v2/rerank", texts.clone()),
        (&ranks, "/rerank", texts),
    ] {
        cases.push(Case { server, path, body, inside: None });
    }
    let body = json!({"model": "test", "prompt": "a", "options": {"seed": 1}});
    cases.push(Case { server: &writes, path: "/api/generate", body, inside: Some("options") });
    let posts =
        described["paths"].as_object().unwrap().iter().filter(|(_, methods)| methods["post"].is_object());
    let posts: BTreeSet<&str> = posts.map(|(path, _)| path.as_str()).collect();
    assert_eq!(cases.iter().map(|case| case.path).collect::<BTreeSet<_>>(), posts);
    let sources = sources();
    let (names, mut wrong) = (names(&sources), vec![]);
    assert!(names.len() > 200);
    cases.iter().for_each(|case| case.check(&described, &names, &mut wrong));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_route_is_described() {
    let server = Running::new(Scripted::new(vec![]));
    let described = server.get("/openapi.json").ok();
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let mut routes = vec![];
    for line in source.lines().filter_map(|line| line.trim().strip_prefix(".route(\"")) {
        let (path, handlers) = line.split_once('"').unwrap();
        for method in ["get", "post", "delete"] {
            if handlers.contains(&format!("{method}(")) {
                routes.push((path.replace("{*name}", "{name}"), method.to_string()));
            }
        }
    }
    let mut known: Vec<(String, String)> = vec![];
    for (path, methods) in described["paths"].as_object().unwrap() {
        known.extend(methods.as_object().unwrap().keys().map(|method| (path.clone(), method.clone())));
    }
    routes.sort();
    known.sort();
    assert_eq!(known, routes);
    assert!(known.len() > 25);
    // Every schema that is named is there.
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(name, value)| match value.as_str() {
                Some(of) if name == "$ref" => found.push(of.into()),
                _ => references(value, found),
            }),
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let mut found = vec![];
    references(&described, &mut found);
    for of in found {
        let name = of.strip_prefix("#/components/schemas/").unwrap();
        assert!(described["components"]["schemas"][name].is_object(), "{of}");
    }
}
