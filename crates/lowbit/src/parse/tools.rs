use serde_json::Value;

/// The tools that a model was given: how the values of arguments without quotes are read.
#[derive(Clone, Debug, Default)]
pub(super) struct Tools(Vec<Value>);

impl Tools {
    /// `tools` is a list of functions' schemas, as templates take it.
    pub(super) fn new(tools: Option<&Value>) -> Self {
        Self(tools.and_then(Value::as_array).cloned().unwrap_or_default())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.function(name).is_some()
    }

    /// A schema stands in `function`, or by itself.
    fn function(&self, name: &str) -> Option<&Value> {
        let functions = self.0.iter().map(|tool| tool.get("function").unwrap_or(tool));
        functions.into_iter().find(|function| function["name"] == name)
    }

    /// The value that `text` spells for the argument `key` of `name`: text where the schema says
    /// so, else JSON if it is that.
    pub(super) fn value(&self, name: &str, key: &str, text: &str) -> Value {
        let schema = self.function(name).and_then(|function| function["parameters"]["properties"].get(key));
        let kind = schema.and_then(|schema| schema["type"].as_str()).unwrap_or_default();
        match (kind, text.trim()) {
            ("string", _) => text.into(),
            // Templates print these as Python does.
            ("boolean", "True") => true.into(),
            ("boolean", "False") => false.into(),
            (_, trimmed) => serde_json::from_str(trimmed).unwrap_or_else(|_| text.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_schema_says_what_a_value_is() {
        let properties = json!({"s": {"type": "string"}, "b": {"type": "boolean"}, "n": {"type": "integer"}});
        let function = json!({"name": "f", "parameters": {"type": "object", "properties": properties}});
        for tools in [json!([{"type": "function", "function": function}]), json!([function])] {
            let tools = Tools::new(Some(&tools));
            assert!(tools.has("f") && !tools.has("g") && !tools.is_empty());
            let values = [("s", "5", json!("5")), ("b", "True", json!(true)), ("n", " 5\n", json!(5))];
            for (key, text, want) in values {
                assert_eq!(tools.value("f", key, text), want);
            }
            assert_eq!(tools.value("f", "unknown", "[1, 2]"), json!([1, 2]));
            assert_eq!(tools.value("g", "s", "5"), json!(5));
            assert_eq!(tools.value("g", "s", " a b"), json!(" a b"));
        }
        assert!(Tools::new(None).is_empty() && Tools::new(Some(&json!({}))).is_empty());
    }
}
