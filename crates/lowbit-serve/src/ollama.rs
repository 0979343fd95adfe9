//! Ollama's API: chats, texts, and the list of models. Streams are lines of JSON.

use crate::app::{App, Host, Record, rfc3339};
use crate::body;
use crate::error::{ApiError, Dialect};
use crate::fields::Fields;
use crate::form::{Wanted, format, hold};
use crate::openai::messages::{messages, tools};
use crate::openai::{Warnings, answer};
use crate::prompt::{Conversation, Prompt, check_tools, encode, set_effort};
use crate::run::{End, Job, Replies, Step, Tokens, Whole};
use crate::sampling::{max_tokens, options, stops, unknown_model};
use crate::served::Served;
use crate::stream::{Writer, stream};
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::Response;
use lowbit::{Call, Event as Part, Message, Piece};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// The two paths that write, which differ in where the text stands.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Chat,
    Generate,
}

/// Fields of requests that say nothing of the reply.
pub(crate) const WITHOUT_EFFECT: [&str; 1] = ["keep_alive"];

/// Those in `options`: settings of a runtime that lowbit does not have.
pub(crate) const OPTIONS_WITHOUT_EFFECT: [&str; 7] =
    ["num_ctx", "num_batch", "num_gpu", "num_thread", "num_keep", "main_gpu", "use_mmap"];

/// Those of `/api/show`.
pub(crate) const SHOW_WITHOUT_EFFECT: [&str; 1] = ["verbose"];

struct Asked {
    job: Job,
    model: String,
    stream: bool,
    warnings: Warnings,
}

/// `/api/chat`.
pub(crate) async fn chat(
    host: State<Arc<Host>>,
    record: Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    write(Kind::Chat, host, record, body).await
}

/// `/api/generate`.
pub(crate) async fn generate(
    host: State<Arc<Host>>,
    record: Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    write(Kind::Generate, host, record, body).await
}

async fn write(
    kind: Kind,
    State(host): State<Arc<Host>>,
    Extension(record): Extension<Arc<Record>>,
    body: Body,
) -> Result<Response<Body>, ApiError> {
    host.admit()?;
    let (app, asked) = body::worked(&host, body, move |app, fields| Asked::read(app, kind, fields)).await?;
    let (jobs, start) = (vec![asked.job], record.start);
    let lines = Lines { kind, model: asked.model, start, first: None };
    if asked.stream {
        return Ok(asked.warnings.on(stream(app, record, jobs, lines).await?));
    }
    let whole = Whole::one(Replies::submit(&app, &record, &jobs)?).await?;
    let value =
        lines.last(&whole.content, &whole.reasoning, &whole.calls, (whole.end.as_ref(), &whole.tokens));
    Ok(asked.warnings.on(answer(&value)))
}

impl Asked {
    fn read(app: &App, kind: Kind, mut fields: Fields) -> Result<Self, ApiError> {
        let served = &app.served;
        let mut warnings = Warnings::default();
        let model = name(&mut fields, served)?;
        let path = fields.path("options");
        let mut of_options = match fields.object("options")? {
            Some(options) => options,
            None => Fields::of(json!({}), &path)?,
        };
        let mut options = options(&mut of_options, served, app.random())?;
        // As with Ollama, -2 fills the context, too.
        let tokens = match of_options.value("num_predict") {
            Some(Value::Number(number)) if number.as_i64() == Some(-2) => Some(usize::MAX),
            Some(value) => {
                of_options.put("num_predict", value);
                max_tokens(&mut of_options, &["num_predict"], 1)?
            }
            None => None,
        };
        options.max_tokens = tokens.unwrap_or(options.max_tokens);
        let stops = stops(&mut of_options, "stop")?;
        of_options.ignore(&OPTIONS_WITHOUT_EFFECT);
        warnings.unknown(&of_options);
        let stream = fields.take("stream")?.unwrap_or(true);
        let wanted = form(&mut fields)?;
        fields.refuse(&["images"], "lowbit reads text alone")?;
        fields.refuse(&["suffix", "context", "template"], "is not done here")?;
        fields.ignore(&WITHOUT_EFFECT);
        let prompt = match kind {
            Kind::Chat => {
                let conversation = conversation(app, &mut fields, &mut warnings)?;
                let prompt = conversation.prompt(served)?;
                conversation.hold(served, &mut options, wanted.as_ref(), (&prompt.ids, false))?;
                prompt
            }
            Kind::Generate => {
                let prompt = text(app, &mut fields, &mut warnings)?;
                let ids = (!Arc::ptr_eq(&prompt.syntax, &served.plain)).then_some(&prompt.ids[..]);
                hold(served, &mut options, wanted.as_ref(), ids)?;
                prompt
            }
        };
        warnings.unknown(&fields);
        let Prompt { ids, syntax, calls, checkpoints } = prompt;
        let job =
            Job { prompt: ids, options, logprobs: None, checkpoints, syntax, stops, calls, one_call: false };
        Ok(Self { job, model, stream, warnings })
    }
}

/// A model's name, which Ollama's clients give with a tag.
///
/// # Errors
/// 404 for one that is not served.
pub(crate) fn name(fields: &mut Fields, served: &Served) -> Result<String, ApiError> {
    let name: String = fields.need("model")?;
    let plain = name.strip_suffix(":latest").unwrap_or(&name);
    match served.is_named(&name) || served.is_named(plain) {
        true => Ok(name),
        false => Err(unknown_model(&name, served)),
    }
}

/// The reply's form: `"json"`, or a schema.
fn form(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    const NAME: &str = "format";
    match fields.value(NAME) {
        None => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) if text == "json" => {
            format(Fields::of(json!({"type": "json_object"}), NAME)?, NAME)
        }
        Some(schema @ Value::Object(_)) => Wanted::schema(schema, NAME).map(Some),
        Some(_) => Err(ApiError::field(NAME, "must be \"json\" or a JSON schema")),
    }
}

fn conversation(app: &App, fields: &mut Fields, warnings: &mut Warnings) -> Result<Conversation, ApiError> {
    let mut list = fields.list("messages")?.unwrap_or_default();
    // The tool's name is its result's alone here.
    for message in list.iter_mut().filter_map(Value::as_object_mut) {
        if let Some(name) = message.shift_remove("tool_name") {
            message.insert("name".into(), name);
        }
        if let Some(thinking) = message.shift_remove("thinking") {
            message.insert("reasoning_content".into(), thinking);
        }
        if message.get("images").is_some_and(|images| images.as_array().is_none_or(|list| !list.is_empty())) {
            return Err(ApiError::unsupported("messages.images", "lowbit reads text alone"));
        }
    }
    let mut conversation = Conversation { messages: messages(list)?, ..Conversation::default() };
    let list = fields.list("tools")?.unwrap_or_default();
    check_tools(&list)?;
    (conversation.tools, conversation.strict) = tools(list, |warning| warnings.say(warning))?;
    think(app, fields, &mut conversation, warnings)?;
    Ok(conversation)
}

/// The prompt of `/api/generate`: a user's message, or with `raw`, or without a template, a plain
/// text.
fn text(app: &App, fields: &mut Fields, warnings: &mut Warnings) -> Result<Prompt, ApiError> {
    let served = &app.served;
    let prompt: String = fields.take("prompt")?.unwrap_or_default();
    let system: Option<String> = fields.take("system")?;
    if fields.take("raw")?.unwrap_or(false) || served.template.is_none() {
        let ids = encode(|| served.tokenizer.encode(&prompt, true))?;
        return Ok(Prompt { ids: ids.into(), syntax: served.plain.clone(), calls: 0, checkpoints: vec![] });
    }
    let mut conversation = Conversation::default();
    conversation.messages.extend(system.map(|system| Message::new("system", system)));
    conversation.messages.push(Message::new("user", prompt));
    think(app, fields, &mut conversation, warnings)?;
    conversation.prompt(served)
}

/// The wanted reasoning: true, false, or how much.
fn think(
    app: &App,
    fields: &mut Fields,
    conversation: &mut Conversation,
    warnings: &mut Warnings,
) -> Result<(), ApiError> {
    let effort = match fields.value("think") {
        None => return Ok(()),
        Some(Value::Bool(true)) => "high".to_string(),
        Some(Value::Bool(false)) => "none".to_string(),
        Some(Value::String(effort)) => effort,
        Some(_) => return Err(ApiError::field("think", "must be a boolean or a string")),
    };
    if !set_effort(&app.served, &mut conversation.variables, &effort) && effort != "none" {
        warnings.say("think: the chat template does not ask for it, ignored");
    }
    Ok(())
}

/// The lines of a stream.
struct Lines {
    kind: Kind,
    model: String,
    start: Instant,
    first: Option<Instant>,
}

impl Lines {
    fn line(&self, content: &str, thinking: &str, calls: &[Call]) -> Value {
        let mut line = json!({"model": self.model, "created_at": rfc3339()});
        let mut message = json!({"role": "assistant", "content": content});
        if !calls.is_empty() {
            let one = |call: &Call| {
                let arguments =
                    serde_json::from_str(&call.arguments).unwrap_or(Value::String(call.arguments.clone()));
                json!({"function": {"name": call.name, "arguments": arguments}})
            };
            message["tool_calls"] = calls.iter().map(one).collect();
        }
        if !thinking.is_empty() {
            let holder = if self.kind == Kind::Chat { &mut message } else { &mut line };
            holder["thinking"] = thinking.into();
        }
        match self.kind {
            Kind::Chat => line["message"] = message,
            Kind::Generate => line["response"] = content.into(),
        }
        line["done"] = false.into();
        line
    }

    /// The last line, with the figures. Times are in nanoseconds.
    fn last(
        &self,
        content: &str,
        thinking: &str,
        calls: &[Call],
        (end, tokens): (Option<&End>, &Tokens),
    ) -> Value {
        let mut line = self.line(content, thinking, calls);
        let (whole, first) = (self.start.elapsed(), self.first.unwrap_or(self.start) - self.start);
        line["done"] = true.into();
        line["done_reason"] = if end == Some(&End::Length) { "length" } else { "stop" }.into();
        line["total_duration"] = json!(whole.as_nanos() as u64);
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = tokens.prompt.into();
        line["prompt_eval_duration"] = json!(first.as_nanos() as u64);
        line["eval_count"] = tokens.written.into();
        line["eval_duration"] = json!((whole - first).as_nanos() as u64);
        line
    }

    fn parts(&self, piece: Piece, out: &mut String) {
        for part in piece.events {
            let line = match part {
                Part::Reasoning(text) => self.line("", &text, &[]),
                Part::Content(text) => self.line(&text, "", &[]),
                Part::Call(call) => self.line("", "", &[call]),
            };
            out.push_str(&format!("{line}\n"));
        }
    }
}

impl Writer for Lines {
    fn step(&mut self, _: usize, step: Step, out: &mut String) {
        match step {
            Step::Started(_) => {}
            Step::Token { piece, .. } => {
                self.first.get_or_insert_with(Instant::now);
                self.parts(piece, out);
            }
            Step::Ended { piece, end, tokens, .. } => {
                self.parts(piece, out);
                out.push_str(&format!("{}\n", self.last("", "", &[], (Some(&end), &tokens))));
            }
            Step::Failed(error) => self.failed(&error, out),
        }
    }

    fn done(&mut self, _: &mut String) {}

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        out.push_str(&format!("{}\n", error.body(Dialect::Ollama)));
    }

    fn ping(&self) -> String {
        // Lines of JSON have no comments.
        format!("{}\n", self.line("", "", &[]))
    }

    fn content_type(&self) -> &'static str {
        "application/x-ndjson"
    }
}

/// `/api/tags`.
pub(crate) async fn tags(State(host): State<Arc<Host>>) -> Response<Body> {
    let one = |name: &String| {
        json!({
            "name": name,
            "model": name,
            "modified_at": rfc3339(),
            "size": 0,
            "digest": "",
            "details": details(),
        })
    };
    let models: Vec<Value> = host.models.entries().iter().flat_map(|entry| entry.names()).map(one).collect();
    answer(&json!({"models": models}))
}

fn details() -> Value {
    json!({"format": "", "family": "", "families": null, "parameter_size": "", "quantization_level": ""})
}

/// `/api/show`.
pub(crate) async fn show(State(host): State<Arc<Host>>, body: Body) -> Result<Response<Body>, ApiError> {
    let shown = body::worked(&host, body, |app, mut fields| {
        let mut warnings = Warnings::default();
        name(&mut fields, &app.served)?;
        fields.ignore(&SHOW_WITHOUT_EFFECT);
        warnings.unknown(&fields);
        let mentions = |text| app.served.template.as_ref().is_some_and(|template| template.mentions(text));
        let tools = mentions("tools").then_some("tools");
        let thinks = (mentions("<think>") || mentions("reasoning_content")).then_some("thinking");
        let embeds = app.served.texts_of_embeddings().is_ok().then_some("embedding");
        let more = tools.into_iter().chain(thinks).chain(embeds);
        let capabilities: Vec<&str> = ["completion"].into_iter().chain(more).collect();
        let shown = json!({
            "details": details(),
            "model_info": {"general.context_length": app.context()},
            "capabilities": capabilities,
        });
        Ok((shown, warnings))
    });
    let (shown, warnings) = shown.await?.1;
    Ok(warnings.on(answer(&shown)))
}

/// `/api/version`.
pub(crate) async fn version() -> Response<Body> {
    answer(&json!({"version": env!("CARGO_PKG_VERSION")}))
}
