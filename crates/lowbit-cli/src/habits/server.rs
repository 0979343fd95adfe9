//! Flags of llama-server and of mlx_lm.server that `lowbit serve` does not have under that name.

use super::drafts::{DRAFT_MAX, DRAFT_MIN, DRAFT_MODEL, spec_type};
use super::instead::Instead::{self, *};
use super::reasons::EMBEDDINGS;

const SERVE: Option<&str> = Some("serve");

const KEPT: &str = "what requests have in common is kept for later ones";
const MEMORY: &str = "--cache-memory GB limits the memory of all caches";
const LOGGED: &str = "a line per request is always logged";
const PROXY: &str = "TLS and paths are those of a proxy in front";
const PAGE: &str = "a small page is always at /";
const ONE_MODEL: &str =
    "one model is served, and it stays loaded; --models FILE serves several, loaded when asked for";
const PROMPTS: &str = "requests have their prompts and messages";

const NO_DRAFT_MODEL: &str = "a draft model is not served yet: --speculate ngram guesses from the text, \
    --speculate mtp asks the model's own layer";
const AS_PAY: &str = "as many guesses are verified as pay";

/// As in `table.rs`.
pub const FLAGS: &[(Option<&str>, &[&str], Instead)] = &[
    (SERVE, &["-a", "--served-model-name"], Is("--alias")),
    (SERVE, &["-np", "--parallel", "-ns", "--sequences", "--decode-concurrency"], Is("--max-running")),
    (SERVE, &["--prompt-concurrency"], Nothing(1, "prompts are read in turns with the replies")),
    (SERVE, &["-cb", "--cont-batching"], Nothing(0, "batches are always continuous")),
    (SERVE, &["-nocb", "--no-cont-batching"], Say("--max-running 1 answers one request at a time")),
    (SERVE, &["-cram", "--cache-ram", "--prompt-cache-size", "--prompt-cache-bytes"], Say(MEMORY)),
    (SERVE, &["--cache-reuse", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"], Nothing(1, KEPT)),
    (SERVE, &["-cms", "--checkpoint-min-step", "-sps", "--slot-prompt-similarity"], Nothing(1, KEPT)),
    (SERVE, &["--kv-unified-per-slot"], Nothing(1, KEPT)),
    (SERVE, &["--cache-prompt", "--cache-idle-slots", "--no-cache-idle-slots"], Nothing(0, KEPT)),
    (SERVE, &["-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"], Nothing(0, KEPT)),
    (SERVE, &["--no-cache-prompt"], Say("caches that are kept change no reply; --cache-memory limits them")),
    (SERVE, &["--slot-save-path"], Say("caches are not kept in files")),
    (
        SERVE,
        &["--slots", "--no-slots", "--props", "--metrics"],
        Nothing(0, "/metrics and /health are always there"),
    ),
    (SERVE, &["-to", "--timeout"], Nothing(1, "a client that takes nothing for 30 s is given up")),
    (SERVE, &["--threads-http"], Nothing(1, "there are as many threads as cores")),
    (SERVE, &["--ssl-key-file", "--ssl-cert-file", "--ssl-keyfile", "--ssl-certfile"], Say(PROXY)),
    (SERVE, &["--api-prefix", "--path", "--reuse-port"], Say(PROXY)),
    (SERVE, &["--webui", "--no-webui", "--ui", "--no-ui"], Nothing(0, PAGE)),
    (SERVE, &["--allowed-origins", "--cors-origins"], Is("--allowed-origin")),
    (SERVE, &["--sleep-idle-seconds", "--keepalive"], Say(ONE_MODEL)),
    (SERVE, &["--models-dir", "--models-max", "--models-preset", "--models-autoload"], Say(ONE_MODEL)),
    (SERVE, &["--max-num-seqs"], Is("--max-running")),
    (SERVE, &["--max-model-len"], Is("--ctx-size")),
    (SERVE, &["--chat-template-config", "--chat-template-args"], Is("--chat-template-kwargs")),
    (SERVE, &["--log-level", "-lv", "--verbosity", "--log-verbosity"], Nothing(1, LOGGED)),
    (SERVE, &["--log-file"], Say("`2> FILE` keeps the log")),
    (SERVE, &["--verbose", "-v"], Nothing(0, LOGGED)),
    (SERVE, &["--reasoning-format"], Nothing(1, "reasoning is in reasoning_content, apart from the answer")),
    (SERVE, &["-embd", "--embedding", "--embeddings", "--reranking", "--rerank"], Say(EMBEDDINGS)),
    (SERVE, DRAFT_MODEL, Say(NO_DRAFT_MODEL)),
    (SERVE, &["--draft-model"], Say(NO_DRAFT_MODEL)),
    (SERVE, DRAFT_MAX, Is("--draft-max")),
    (SERVE, DRAFT_MIN, Nothing(1, AS_PAY)),
    (SERVE, &["--draft-min"], Nothing(1, AS_PAY)),
    (SERVE, &["--spec-type"], Value(spec_type)),
    (SERVE, &["--mtp"], Means("--speculate", "mtp")),
    (SERVE, &["-p", "--prompt", "-f", "--file", "-sys", "--system-prompt"], Say(PROMPTS)),
];
