//! Flags that are answered by a part of their name: a peer adds more of a kind with each version.
//! `table.rs` has single flags, which come first.

use super::instead::Instead::{self, *};
use super::reasons::*;

/// Names with one `*`, which stands for any letters, and what they are answered with; the first
/// that fits holds.
pub const CLASSES: &[(&[&str], Instead)] = &[
    // Speculative decoding.
    (&["--spec-*", "--no-spec-*", "--draft-*", "--*-draft", "--lookup-*", "--*-draft-tokens"], Say(DRAFTS)),
    // Sampling.
    (&["--xtc-*", "--dry-*", "--mirostat-*", "--dynatemp-*", "--adaptive-*", "--top-n*"], Say(SAMPLERS)),
    (&["--samp*", "--typical*"], Say(SAMPLERS)),
    (&["--grammar-*", "--json-schema*"], Say(GRAMMAR)),
    // Files and what they hold.
    (&["--lora*", "--control-vector*", "--adapter*"], Say(ADAPTERS)),
    (
        &["--mmproj*", "--no-mmproj*", "--image*", "--audio*", "--video*", "--mtmd-*", "--vision-*"],
        Say(TEXT_ALONE),
    ),
    (&["--tts-*", "--diffusion-*", "--rerank*", "--cls-*"], Say(NO_TEXT)),
    (&["--embd-*", "--embedding*"], Say(EMBEDDINGS)),
    (&["--rope-*", "--yarn-*", "--grp-attn-*"], Say(ROPE)),
    (&["--kv-*", "--quantized-kv-*", "--cache-type-*"], Say(CACHES)),
    (&["--*-default", "--fim-*"], Say("presets are not kept: name the model with -hf org/name")),
    (&["--prompt-cache-*"], Say(PROMPT_CACHE)),
    // Devices, cores and scheduling.
    (&["--cpu-moe*", "--n-cpu-*", "--override-tensor*", "--tensor-split*"], Say(ONE_DEVICE)),
    (&["--cpu-*"], Say(AFFINITY)),
    (&["--prio-*", "--poll-*", "--fit-*"], Nothing(1, "the system decides")),
    // Logging.
    (&["--log-*", "--no-log-*"], Switch("there is no log")),
    // A server.
    (
        &[
            "--api-*",
            "--cors-*",
            "--no-cors-*",
            "--ssl-*",
            "--sse-*",
            "--slot*",
            "--no-slots",
            "--models-*",
            "--no-models-*",
        ],
        Say(SERVER),
    ),
    (
        &[
            "--ui*",
            "--no-ui*",
            "--webui*",
            "--no-webui*",
            "--mcp-*",
            "--tools-*",
            "--threads-http",
            "--media-*",
        ],
        Say(SERVER),
    ),
    // Quantising.
    (&["--imatrix*", "--include-weights", "--exclude-weights", "--*-frequency"], Say(IMATRIX)),
];

/// True if `pattern` matches `name`.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => {
            name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        }
    }
}

/// The translation of a flag of this name.
pub fn instead(name: &str) -> Option<Instead> {
    let found = CLASSES.iter().find(|(patterns, _)| patterns.iter().any(|pattern| fits(pattern, name)));
    found.map(|(_, instead)| *instead)
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn a_star_stands_for_any_letters() {
        assert!(fits("--dry-*", "--dry-base") && fits("--*-draft", "--threads-draft") && fits("--x", "--x"));
        assert!(!fits("--dry-*", "--dr") && !fits("--a-*-a", "--a-a") && !fits("--x", "--xy"));
    }
}
