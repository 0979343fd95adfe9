//! Flags of speculation in llama.cpp's programs.

use super::instead::Instead::{self, *};
use super::reasons::DRAFTS;

pub const DRAFT_MODEL: &[&str] =
    &["-md", "-hfd", "-hfrd", "--model-draft", "--hf-repo-draft", "--spec-draft-model", "--spec-draft-hf"];
pub const DRAFT_MAX: &[&str] = &["--draft", "--draft-n", "--spec-draft-n-max"];
pub const DRAFT_MIN: &[&str] = &["--draft-n-min", "--spec-draft-n-min"];

/// The flag for a value of --spec-type.
pub fn spec_type(value: &str) -> Option<Instead> {
    Some(match value {
        "none" => Nothing(1, "nothing is guessed unless --speculate or --draft-model says so"),
        "draft-mtp" => Means("--speculate", "mtp"),
        "draft-simple" => Nothing(1, "--draft-model names the model that guesses"),
        _ if value.starts_with("ngram-") => Means("--speculate", "ngram"),
        _ => Say(DRAFTS),
    })
}
