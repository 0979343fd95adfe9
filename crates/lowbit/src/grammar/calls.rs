//! Calls of tools as grammars: the markup that each family has for them, with its arguments held to
//! the tools' schemas.

use super::front::Front;
use super::schema::{alone, spaced};
use super::{CallForm, Grammars, Source, literal};
use crate::Error;
use crate::parse::{CallMarker, CallStyle};
use llguidance::Matcher;
use llguidance::api::GrammarWithLexer;
use serde_json::{Value, json};
use std::fmt::Write;

/// The texts of calls whose arguments have a tag each.
struct Tags {
    name: [&'static str; 2],
    /// Around a key, and behind a value.
    argument: [&'static str; 3],
    end: &'static str,
}

const PARAMETERS: Tags = Tags {
    name: ["\n<function=", ">\n"],
    argument: ["<parameter=", ">\n", "\n</parameter>\n"],
    end: "</function>\n",
};

const ARG_KEYS: Tags =
    Tags { name: ["", "\n"], argument: ["<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"], end: "" };

/// Keywords of parameters that tags express, or that say nothing of values.
const EXPRESSED: [&str; 11] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "title",
    "description",
    "$defs",
    "definitions",
    "$schema",
    "examples",
    "default",
];

/// A grammar in the making.
struct Writer<'a> {
    grammars: &'a Grammars,
    form: &'a CallForm,
    /// Rules in Lark.
    rules: String,
    /// Those of arguments, by name.
    schemas: Vec<GrammarWithLexer>,
}

/// A tool that may be called.
#[derive(Clone, Debug)]
struct Tool {
    index: usize,
    name: String,
    parameters: Value,
    is_strict: bool,
}

impl Grammars {
    /// # Errors
    /// [`Error::Form`] for a family without such a grammar, and for schemas that cannot be
    /// enforced.
    pub(super) fn compile_calls(&self, form: &CallForm, prompt: &str) -> Result<Matcher, Error> {
        if form.tools.is_empty() {
            return Err(Error::form("tools", "there are none to call"));
        }
        let mut writer = Writer { grammars: self, form, rules: String::new(), schemas: vec![] };
        let start = match self.syntax.harmony_markers() {
            Some(markers) => writer.harmony(markers, prompt)?,
            None => writer.marked(prompt)?,
        };
        let lark = format!("start: {start}\n{}", writer.rules);
        let mut grammars = vec![GrammarWithLexer::from_lark(lark)];
        grammars.append(&mut writer.schemas);
        self.matcher(grammars).map_err(|problem| Error::form("tools", problem))
    }
}

impl Writer<'_> {
    fn tools(&self) -> Result<Vec<Tool>, Error> {
        let tool = |(index, tool): (usize, &Value)| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function["name"].as_str().ok_or_else(|| Error::form("tools", "one has no name"))?;
            let parameters = match &function["parameters"] {
                Value::Object(map) if !map.is_empty() => Value::Object(map.clone()),
                _ => json!({"type": "object", "properties": {}}),
            };
            let is_strict = self.form.strict.iter().any(|strict| strict == name);
            Ok(Tool { index, name: name.into(), parameters, is_strict })
        };
        self.form.tools.iter().enumerate().map(tool).collect()
    }

    /// Calls between markers. Returns the start.
    fn marked(&mut self, prompt: &str) -> Result<String, Error> {
        let grammars = self.grammars;
        let syntax = &grammars.syntax;
        let (open, close, style) = syntax.call_style().map_err(|known| {
            let family = known.map_or_else(
                || "this model's chat template has no calls".into(),
                |open| format!("calls that begin with {open} cannot be held to a form yet"),
            );
            Error::form("tools", family)
        })?;
        let close = close.map(CallMarker::lark).unwrap_or_default();
        let mut calls = vec![];
        for tool in &self.tools()? {
            calls.push(self.call(tool, style)?);
        }
        let call = format!("({})", calls.join(" | "));
        let (marked, more) = match style {
            CallStyle::Json | CallStyle::Parameters | CallStyle::ArgKeys => {
                let call = format!("{} {call} {close}", open.lark());
                (call.clone(), format!("(\"\\n\" {call})*"))
            }
            CallStyle::Args => {
                let call = format!("{} {call}", open.lark());
                (call.clone(), format!("({call})*"))
            }
            CallStyle::List => {
                let more = if self.form.one { String::new() } else { format!("(\", \" {call})*") };
                (format!("{} \"[\" {call} {more} \"]\"", open.lark()), String::new())
            }
            CallStyle::Bare => (call, String::new()),
        };
        let calls = if self.form.one { marked } else { format!("{marked} {more}") };
        let Front { expression, rules } = syntax.front(prompt);
        self.rules += &rules;
        if self.form.required {
            return Ok(format!("{expression} {calls}"));
        }
        if let Some(other) = self.otherwise()? {
            return Ok(format!("{expression} ({calls} | {other})"));
        }
        match style {
            CallStyle::Bare => Ok(format!("{expression} ({calls} | /(?s:[^{{].*)/)")),
            _ if open.starts_with_token() => Ok(format!("{expression} /(?s:.*)/ ({calls})?")),
            _ => Err(Error::form(
                "tools",
                format!(
                    "calls that begin with {}, which is no token, are held to a form only where one is required",
                    open.spelled()
                ),
            )),
        }
    }

    /// A message to a function. Returns the start.
    fn harmony(&mut self, markers: [&CallMarker; 5], prompt: &str) -> Result<String, Error> {
        let [_, channel, constrain, message, _] = markers.map(CallMarker::lark);
        let mut calls = vec![];
        for tool in &self.tools()? {
            let header = literal(&format!("commentary to=functions.{} ", tool.name));
            let arguments = self.arguments(tool)?;
            calls.push(format!("{channel} {header} {constrain} \"json\" {message} {arguments}"));
        }
        let calls = calls.join(" | ");
        let front = self.grammars.syntax.harmony_front(prompt);
        if front.expression.is_empty() {
            return Err(Error::form("tools", "the prompt has begun a message already"));
        }
        self.rules += &front.rules;
        if self.form.required {
            return Ok(format!("analysis* ({calls})"));
        }
        let other = self.otherwise()?.unwrap_or_else(|| "/(?s:.*)/".into());
        Ok(format!("analysis* ({calls} | header {other})"))
    }

    /// The form of a reply without calls.
    fn otherwise(&mut self) -> Result<Option<String>, Error> {
        let Some(form) = &self.form.otherwise else { return Ok(None) };
        let Source { grammar, what } = self.grammars.source(form)?;
        if let Err(problem) = self.grammars.matcher(vec![grammar.clone()]) {
            return Err(self.grammars.refused(form, what, &problem));
        }
        self.schemas.push(GrammarWithLexer { name: Some("body".into()), ..grammar });
        Ok(Some("@body".into()))
    }

    /// A call between its markers.
    fn call(&mut self, tool: &Tool, style: CallStyle) -> Result<String, Error> {
        let name = literal(&tool.name);
        Ok(match style {
            CallStyle::Json => {
                let start = literal(&format!("\n{{\"name\": {name}, \"arguments\": "));
                format!("{start} {} {}", self.arguments(tool)?, literal("}\n"))
            }
            CallStyle::List => {
                let start = literal(&format!("{{\"name\": {name}, \"arguments\": "));
                format!("{start} {} {}", self.arguments(tool)?, literal("}"))
            }
            CallStyle::Bare => {
                let start = literal(&format!("{{\"name\": {name}, \"parameters\": "));
                format!("{start} {} {}", self.arguments(tool)?, literal("}"))
            }
            CallStyle::Args => {
                let marker = CallMarker::new("[ARGS]", Some(&self.grammars.tokenizer));
                format!("{} {} {}", literal(&tool.name), marker.lark(), self.arguments(tool)?)
            }
            CallStyle::Parameters => self.tagged(tool, &PARAMETERS)?,
            CallStyle::ArgKeys => self.tagged(tool, &ARG_KEYS)?,
        })
    }

    /// The arguments as a JSON object.
    fn arguments(&mut self, tool: &Tool) -> Result<String, Error> {
        let path = format!("tools.{}.parameters", tool.name);
        self.json(&tool.parameters, tool, &path, &json!({"type": "object"}))
    }

    /// A value of this schema; where it cannot be enforced and need not be, of `instead`.
    fn json(&mut self, schema: &Value, tool: &Tool, path: &str, instead: &Value) -> Result<String, Error> {
        Grammars::check_schema(schema, path)?;
        let schema = match self.grammars.refusal(schema) {
            None => schema,
            Some(problem) if tool.is_strict => return Err(self.grammars.blame(schema, path, &problem)),
            Some(_) => instead,
        };
        let name = format!("value{}", self.schemas.len());
        let grammar = GrammarWithLexer::from_json_schema(spaced(schema));
        self.schemas.push(GrammarWithLexer { name: Some(name.clone()), ..grammar });
        Ok(format!("@{name}"))
    }

    /// A call with a tag per argument, in the schema's order.
    fn tagged(&mut self, tool: &Tool, tags: &Tags) -> Result<String, Error> {
        let Tool { name, parameters, is_strict, .. } = tool;
        let path = format!("tools.{name}.parameters");
        let keys = parameters.as_object().into_iter().flat_map(|map| map.keys());
        if let Some(key) = keys.into_iter().find(|key| *is_strict && !EXPRESSED.contains(&key.as_str())) {
            return Err(Error::form(
                format!("{path}.{key}"),
                "it cannot be held to where arguments have tags",
            ));
        }
        let empty = serde_json::Map::new();
        let properties = parameters["properties"].as_object().unwrap_or(&empty);
        let required: Vec<&str> =
            parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if let Some(key) = required.iter().find(|key| *is_strict && !properties.contains_key(**key)) {
            return Err(Error::form(
                format!("{path}.required"),
                format!("{key} is not among the properties"),
            ));
        }
        let mut call = literal(&format!("{}{name}{}", tags.name[0], tags.name[1]));
        for (key, schema) in properties {
            let start = literal(&format!("{}{key}{}", tags.argument[0], tags.argument[1]));
            let value = self.value(tool, (key, &alone(schema, parameters)), tags.argument[2])?;
            let argument = format!("{start} {value}");
            let _ = match required.contains(&key.as_str()) {
                true => write!(call, " {argument}"),
                false => write!(call, " ({argument})?"),
            };
        }
        if !tags.end.is_empty() {
            let _ = write!(call, " {}", literal(tags.end));
        }
        Ok(call)
    }

    /// The value of an argument and the tag behind it. Strings are written without quotes.
    fn value(&mut self, tool: &Tool, (key, schema): (&str, &Value), end: &str) -> Result<String, Error> {
        let path = format!("tools.{}.parameters.properties.{key}", tool.name);
        if schema["type"] != "string" {
            let value = self.json(schema, tool, &path, &json!({}))?;
            return Ok(format!("{value} {}", literal(end)));
        }
        let texts: Option<Vec<String>> = match (&schema["enum"], &schema["const"]) {
            (Value::Array(texts), _) => Some(
                texts.iter().filter_map(Value::as_str).map(|text| literal(&format!("{text}{end}"))).collect(),
            ),
            (_, Value::String(text)) => Some(vec![literal(&format!("{text}{end}"))]),
            _ => None,
        };
        if let Some(texts) = texts.filter(|texts| !texts.is_empty()) {
            return Ok(format!("({})", texts.join(" | ")));
        }
        let held = ["pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "$ref"];
        if let Some(keyword) = held.iter().find(|keyword| tool.is_strict && schema.get(**keyword).is_some()) {
            let problem = "it cannot be held to where a text has no quotes";
            return Err(Error::form(format!("{path}.{keyword}"), problem));
        }
        let rule = format!("text{}_{}", tool.index, self.rules.lines().count());
        let _ = writeln!(self.rules, "{rule}[suffix={}]: /(?s:.*)/", literal(end));
        Ok(rule)
    }
}
