//! `/openapi.json`: what this server takes and answers, for generators and testers of clients.

mod schemas;

use crate::openai::answer;
use axum::body::Body;
use axum::http::Response;
use schemas::schemas;
use serde_json::{Map, Value, json};

/// A method of a path.
struct Operation {
    method: &'static str,
    path: &'static str,
    about: &'static str,
    /// The name of the body's schema; empty for none.
    body: &'static str,
    answer: Answer,
}

/// The answer of a path.
#[derive(Clone, Copy, PartialEq)]
enum Answer {
    Json,
    /// Or events, where the request asks for a stream.
    Events,
    /// Or lines of JSON, unless the request asks for none.
    Lines,
    /// A text of this type.
    Text(&'static str),
}

const fn get(path: &'static str, about: &'static str, answer: Answer) -> Operation {
    Operation { method: "get", path, about, body: "", answer }
}

const fn post(path: &'static str, about: &'static str, body: &'static str, answer: Answer) -> Operation {
    Operation { method: "post", path, about, body, answer }
}

/// All paths and methods; `server.rs` has the handler of each.
const OPERATIONS: [Operation; 32] = [
    get("/", "A page to chat with the model", Answer::Text("text/html")),
    get("/page.js", "The page's script", Answer::Text("text/javascript")),
    get("/page.css", "The page's style", Answer::Text("text/css")),
    get("/openapi.json", "This description", Answer::Json),
    get("/health", "Whether requests are taken, and what runs", Answer::Json),
    get("/health/live", "Whether the process runs", Answer::Json),
    get("/health/ready", "Whether requests are taken", Answer::Json),
    get("/metrics", "Figures for Prometheus", Answer::Text("application/openmetrics-text")),
    get("/v1/models", "The models", Answer::Json),
    get("/v1/models/{name}", "A model", Answer::Json),
    get("/v1/cache", "The bytes of caches by kind", Answer::Json),
    Operation {
        method: "delete",
        path: "/v1/cache",
        about: "Drops the caches that are kept for later requests",
        body: "",
        answer: Answer::Json,
    },
    post("/v1/chat/completions", "OpenAI's chats", "Chat", Answer::Events),
    post("/v1/completions", "OpenAI's completions of texts", "Completion", Answer::Events),
    post("/v1/responses", "OpenAI's responses, without state", "Responses", Answer::Events),
    post("/v1/responses/input_tokens", "The tokens of OpenAI's responses", "InputTokens", Answer::Json),
    post("/v1/embeddings", "OpenAI's embeddings", "Embeddings", Answer::Json),
    post("/v1/rerank", "Scores of documents for a query", "Rerank", Answer::Json),
    post("/v2/rerank", "The same, as Cohere's clients call it", "Rerank", Answer::Json),
    post("/rerank", "The same, as llama-server's clients call it", "Rerank", Answer::Json),
    post("/v1/messages", "Anthropic's messages", "Messages", Answer::Events),
    post("/v1/messages/count_tokens", "The tokens of Anthropic's messages", "Count", Answer::Json),
    post("/api/chat", "Ollama's chats", "OllamaChat", Answer::Lines),
    post("/api/generate", "Ollama's texts", "OllamaGenerate", Answer::Lines),
    post("/api/embed", "Ollama's embeddings", "OllamaEmbed", Answer::Json),
    post("/api/embeddings", "Ollama's embedding of one text", "OllamaEmbedding", Answer::Json),
    get("/api/tags", "The models, for Ollama's clients", Answer::Json),
    post("/api/show", "A model, for Ollama's clients", "OllamaShow", Answer::Json),
    get("/api/version", "The server's version", Answer::Json),
    post("/tokenize", "Ids of a text or a conversation", "Tokenize", Answer::Json),
    post("/detokenize", "The text of ids", "Detokenize", Answer::Json),
    post("/apply-template", "The text that the model reads for a conversation", "Conversation", Answer::Json),
];

/// The path by which requests are counted: one of those above, or `other`.
pub(crate) fn counted(path: &str) -> &'static str {
    let of_model = path.starts_with("/v1/models/");
    let known = OPERATIONS.iter().map(|operation| operation.path).find(|known| *known == path);
    known.unwrap_or(if of_model { "/v1/models" } else { "other" })
}

/// The description.
pub(crate) async fn show() -> Response<Body> {
    answer(&description())
}

fn description() -> Value {
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        paths.entry(operation.path).or_insert_with(|| json!({}))[operation.method] = operation.described();
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "lowbit serve",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Unknown fields are ignored, and named in the header `warning`; fields that would \
                change the reply and are not done here are 400 with their names.",
        },
        "paths": paths,
        "security": [{}, {"bearer": []}, {"header": []}],
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

impl Operation {
    fn described(&self) -> Value {
        let object = || json!({"schema": {"type": "object"}});
        let content = match self.answer {
            Answer::Json => json!({"application/json": object()}),
            Answer::Events => json!({"application/json": object(), "text/event-stream": {}}),
            Answer::Lines => json!({"application/json": object(), "application/x-ndjson": {}}),
            Answer::Text(of) => json!({ of: {"schema": {"type": "string"}} }),
        };
        let mut responses = json!({"200": {"description": "The answer", "content": content}});
        let mut failures = vec![("401", "A key is missing"), ("403", "The host or origin is not known")];
        if !self.body.is_empty() {
            failures.extend([
                ("400", "The request is wrong; the error names the field"),
                ("404", "There is no such model"),
                ("408", "The body has not arrived"),
                ("413", "The body is too long"),
                ("429", "Too many requests are waiting"),
                ("500", "The model has failed"),
            ]);
        }
        failures.push(("503", "The server is stopping, has no room, or has lost its device"));
        // Its state is in the body of 503, too.
        let is_health = self.path.starts_with("/health");
        let of_failure = if is_health { "Health" } else { self.dialect() };
        for (status, description) in failures {
            let schema = json!({"$ref": format!("#/components/schemas/{of_failure}")});
            responses[status] =
                json!({"description": description, "content": {"application/json": {"schema": schema}}});
        }
        let mut described = json!({"summary": self.about, "responses": responses});
        if self.path.contains("{name}") {
            described["responses"]["404"] = described["responses"]["401"].clone();
            described["parameters"] = json!([{
                "name": "name", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1},
                "description": "The model's name, which may have slashes",
            }]);
        }
        if !self.body.is_empty() {
            let schema = json!({"$ref": format!("#/components/schemas/{}", self.body)});
            described["requestBody"] =
                json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        described
    }

    /// The schema of its errors.
    fn dialect(&self) -> &'static str {
        match self.path {
            path if path.starts_with("/v1/messages") => "AnthropicError",
            path if path.starts_with("/api/") => "OllamaError",
            _ => "Error",
        }
    }
}
