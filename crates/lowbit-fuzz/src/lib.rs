//! The functions that are fuzzed, one per target. `fuzz/` runs them under libFuzzer; the tests here
//! run them on stable Rust, on the corpus and on seeded mutations of it. Each may refuse its input,
//! but not panic, and what it accepts must hold together.

mod block_decoders;
mod chat_template;
mod choices;
mod config_json;
mod gguf;
mod gguf_model;
mod hub;
mod model;
mod safetensors;
mod tiny;
mod tokenizer_json;

pub use block_decoders::block_decoders;
pub use chat_template::chat_template;
pub use config_json::config_json;
pub use gguf::gguf;
pub use gguf_model::gguf_model;
pub use hub::hub;
pub use model::model;
pub use safetensors::safetensors;
pub use tokenizer_json::tokenizer_json;

/// A target's name, which is its corpus' folder too, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("gguf", gguf),
    ("safetensors", safetensors),
    ("config_json", config_json),
    ("block_decoders", block_decoders),
    ("hub", hub),
    ("tokenizer_json", tokenizer_json),
    ("chat_template", chat_template),
    ("model", model),
    ("gguf_model", gguf_model),
];

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use lowbit_files::{Stored, TensorView};

fn file() -> Arc<Path> {
    Path::new("fuzz").into()
}

/// A view's bytes are in the file, and as many as its shape takes.
fn check_view(view: &TensorView, file: &Bytes) {
    let (range, within) = (view.bytes.get().as_ptr_range(), file.as_ptr_range());
    assert!(view.bytes.is_empty() || (within.start <= range.start && range.end <= within.end), "{view:?}");
    let bytes = match view.stored {
        Stored::Plain(dtype) => view.elements() * dtype.size(),
        Stored::Blocks(format) => {
            let (&k, rows) = view.shape.split_last().unwrap_or((&1, &[]));
            let components = format.components(k).expect("whole blocks");
            rows.iter().product::<usize>() * components.iter().map(|c| c.row_bytes()).sum::<usize>()
        }
    };
    assert_eq!(view.bytes.len(), bytes, "{view:?}");
}

/// The pieces of an input that stands for several.
fn split<'a>(data: &'a [u8], separator: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = Some(data);
    std::iter::from_fn(move || {
        let data = rest?;
        let at = data.windows(separator.len()).position(|window| window == separator);
        rest = at.map(|at| &data[at + separator.len()..]);
        Some(&data[..at.unwrap_or(data.len())])
    })
}
