//! The form that a request asks its reply to have: a schema, a grammar, or calls.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::prompt::{Choice, Conversation};
use crate::served::Served;
use axum::http::StatusCode;
use lowbit::{CallForm, Error, GenerationOptions, ReplyForm, Syntax};
use serde_json::Value;

/// A form and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wanted {
    form: ReplyForm,
    path: String,
}

impl Wanted {
    fn new(form: ReplyForm, path: &str) -> Self {
        Self { form, path: path.into() }
    }

    /// A schema at `path`, which may be spelled in a string.
    pub(crate) fn schema(schema: Value, path: &str) -> Result<Self, ApiError> {
        let schema = match schema {
            Value::String(text) => serde_json::from_str(&text)
                .map_err(|error| ApiError::field(path, format!("is no JSON schema: {error}")))?,
            schema => schema,
        };
        Ok(Self::new(ReplyForm::JsonSchema(schema), path))
    }

    /// A grammar in GBNF or Lark at `path`.
    fn grammar(text: String, path: &str) -> Option<Self> {
        (!text.trim().is_empty()).then(|| Self::new(ReplyForm::grammar(text), path))
    }
}

/// `{"type": "json_schema", ..}` at `path`, where the schema stands in it or in an object
/// `json_schema`; `None` for text.
///
/// # Errors
/// 400 for other types.
pub(crate) fn format(mut format: Fields, path: &str) -> Result<Option<Wanted>, ApiError> {
    match format.need::<String>("type")?.as_str() {
        "text" => Ok(None),
        // llama.cpp has schemas under this type, too.
        "json_object" => match format.value("schema") {
            Some(schema) => Wanted::schema(schema, &format!("{path}.schema")).map(Some),
            None => Ok(Some(Wanted::new(ReplyForm::JsonObject, path))),
        },
        "json_schema" => {
            let (mut inner, path) = match format.object("json_schema")? {
                Some(inner) => (inner, format!("{path}.json_schema")),
                None => (format, path.to_string()),
            };
            let path = format!("{path}.schema");
            let schema = inner.value("schema").ok_or_else(|| ApiError::field(&path, "is missing"))?;
            Wanted::schema(schema, &path).map(Some)
        }
        "regex" => {
            let pattern: String = format.need("pattern")?;
            Ok(Some(Wanted::new(ReplyForm::Regex(pattern), &format!("{path}.pattern"))))
        }
        "grammar" => {
            let text: String = format.need("grammar")?;
            Ok(Wanted::grammar(text, &format!("{path}.grammar")))
        }
        other => {
            let problem =
                format!("is {other}, but text, json_object, json_schema, regex or grammar is wanted");
            Err(ApiError::unsupported(&format!("{path}.type"), problem))
        }
    }
}

/// The form that a request asks for in OpenAI's field, llama.cpp's or vLLM's.
///
/// # Errors
/// 400 for more than one, and for what is none.
pub(crate) fn wanted(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    let mut found = vec![];
    if let Some(of) = fields.object("response_format")? {
        found.extend(format(of, "response_format")?);
    }
    found.extend(fields.take::<String>("grammar")?.and_then(|text| Wanted::grammar(text, "grammar")));
    // llama.cpp's clients send an empty schema for none.
    let schema = fields.value("json_schema").filter(|schema| *schema != Value::Object(Default::default()));
    found.extend(schema.map(|schema| Wanted::schema(schema, "json_schema")).transpose()?);
    found.extend(guided(fields, ["guided_json", "guided_regex", "guided_choice", "guided_grammar"], "")?);
    if let Some(mut outputs) = fields.object("structured_outputs")? {
        found.extend(guided(&mut outputs, ["json", "regex", "choice", "grammar"], "structured_outputs.")?);
        if outputs.take("json_object")? == Some(true) {
            found.push(Wanted::new(ReplyForm::JsonObject, "structured_outputs.json_object"));
        }
        outputs.refuse(&["structural_tag"], "is not done here")?;
    }
    match &found[..] {
        [first, second, ..] => {
            let problem = format!("is asked for beside {}, but a reply has one form", first.path);
            Err(ApiError::field(&second.path, problem))
        }
        _ => Ok(found.pop()),
    }
}

/// vLLM's four fields.
fn guided(fields: &mut Fields, names: [&str; 4], path: &str) -> Result<Vec<Wanted>, ApiError> {
    let [json, regex, choice, grammar] = names;
    let mut found = vec![];
    let at = |name: &str| format!("{path}{name}");
    found.extend(fields.value(json).map(|schema| Wanted::schema(schema, &at(json))).transpose()?);
    found.extend(fields.take(regex)?.map(|text| Wanted::new(ReplyForm::Regex(text), &at(regex))));
    found.extend(fields.take(choice)?.map(|texts| Wanted::new(ReplyForm::Choice(texts), &at(choice))));
    found.extend(fields.take::<String>(grammar)?.and_then(|text| Wanted::grammar(text, &at(grammar))));
    Ok(found)
}

/// OpenAI's `tool_choice`.
///
/// # Errors
/// 400 for another.
pub(crate) fn choice(choice: Option<Value>) -> Result<Choice, ApiError> {
    const NAME: &str = "tool_choice";
    let Some(choice) = choice else { return Ok(Choice::Auto) };
    if let Some(text) = choice.as_str() {
        return match text {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" => Ok(Choice::Required),
            other => {
                let problem = format!("is {other}, but auto, none, required or a function is wanted");
                Err(ApiError::unsupported(NAME, problem))
            }
        };
    }
    let mut fields = Fields::of(choice, NAME)?;
    let of: String = fields.need("type")?;
    if of != "function" {
        let problem = format!("is {of}: a function can be named");
        return Err(ApiError::unsupported(&fields.path("type"), problem));
    }
    // /v1/responses has no object of its own for the function.
    match fields.object("function")? {
        Some(mut function) => function.need("name").map(Choice::Named),
        None => fields.need("name").map(Choice::Named),
    }
}

impl Conversation {
    /// The calls that the reply must have, or that are held to schemas in it.
    fn calls(&self, one_call: bool, wanted: Option<&Wanted>) -> Result<Option<CallForm>, ApiError> {
        let is_required = match &self.choice {
            Choice::None => return Ok(None),
            Choice::Auto => false,
            Choice::Required | Choice::Named(_) => true,
        };
        if self.tools.is_empty() {
            return match is_required {
                true => Err(ApiError::field("tool_choice", "requires a call, but there are no tools")),
                false => Ok(None),
            };
        }
        if !is_required && self.strict.is_empty() && wanted.is_none() {
            return Ok(None);
        }
        let mut tools = self.tools.clone();
        if let Choice::Named(name) = &self.choice {
            tools.retain(|tool| tool["function"]["name"] == **name);
            if tools.is_empty() {
                return Err(ApiError::field(
                    "tool_choice",
                    format!("names {name}, which is none of the tools"),
                ));
            }
        }
        let one = one_call || matches!(self.choice, Choice::Named(_));
        let otherwise = wanted.filter(|_| !is_required).map(|wanted| wanted.form.clone());
        let form = CallForm::new(tools, is_required).with_strict(self.strict.clone()).with_one(one);
        Ok(Some(form.with_otherwise(otherwise)))
    }

    /// Holds the reply to `prompt` to what the request asks for.
    ///
    /// # Errors
    /// 400 for a form that cannot be enforced, with its path.
    pub(crate) fn hold(
        &self,
        served: &Served,
        options: &mut GenerationOptions,
        wanted: Option<&Wanted>,
        (prompt, one_call): (&[u32], bool),
    ) -> Result<(), ApiError> {
        match self.calls(one_call, wanted)? {
            Some(calls) => {
                let path = wanted.map_or("tool_choice", |wanted| &wanted.path);
                held(served, options, (&ReplyForm::Calls(calls), path), Some(prompt))
            }
            None => hold(served, options, wanted, Some(prompt)),
        }
    }
}

/// Holds a reply to the form that is wanted of it, if any. `prompt` is `None` for a text that goes
/// on.
///
/// # Errors
/// 400 for a form that cannot be enforced, with its path.
pub(crate) fn hold(
    served: &Served,
    options: &mut GenerationOptions,
    wanted: Option<&Wanted>,
    prompt: Option<&[u32]>,
) -> Result<(), ApiError> {
    let Some(Wanted { form, path }) = wanted else { return Ok(()) };
    held(served, options, (form, path), prompt)
}

fn held(
    served: &Served,
    options: &mut GenerationOptions,
    (form, path): (&ReplyForm, &str),
    prompt: Option<&[u32]>,
) -> Result<(), ApiError> {
    if options.stop_ids.is_empty() && !served.tokenizer.eos_ids().is_empty() {
        return Err(ApiError::field(
            "ignore_eos",
            format!("cannot be true beside {path}, whose end is the reply's"),
        ));
    }
    let grammars = served.grammars.get_or_init(|| {
        let syntax = |template| Syntax::new(template, Some(&served.tokenizer));
        let syntax = served.template.as_ref().map_or_else(Syntax::plain, syntax);
        let stop_ids = served.tokenizer.eos_ids();
        lowbit::Grammars::new(&served.tokenizer, &syntax, served.vocab_size, stop_ids)
            .map_err(|error| error.to_string())
    });
    let unusable = |problem: &dyn std::fmt::Display| {
        let message = format!("{path}: this model's replies cannot be held to a form: {problem}");
        ApiError::new(StatusCode::BAD_REQUEST, "unsupported_value", message)
    };
    let grammars = grammars.as_ref().map_err(|error| unusable(error))?;
    let grammar = grammars.compile(form, prompt).map_err(|error| match error {
        Error::Form { path: inner, problem } => ApiError::field(&within(path, &inner), problem),
        error => unusable(&error),
    })?;
    options.grammar = Some(grammar);
    Ok(())
}

/// The path of the part `inner` of a form that stands at `path`: tools have paths of their own.
fn within(path: &str, inner: &str) -> String {
    match inner.split_once('.') {
        _ if inner.starts_with("tools") => inner.into(),
        Some(("schema", rest)) => format!("{path}.{rest}"),
        _ => path.into(),
    }
}
