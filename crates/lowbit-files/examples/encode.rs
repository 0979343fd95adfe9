//! Prints the token ids of texts, a line each, as llama.cpp's tests keep them
//! (`tools/compare_vocabularies`).
//!
//! `encode MODEL TEXTS`: a GGUF file or a checkpoint's folder, and a file of texts with a line
//! `__ggml_vocab_test__` between them.

use std::path::Path;

use lowbit_files::{Checkpoint, Tokenizer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, texts] = arguments.as_slice() else { return Err("encode MODEL TEXTS".into()) };
    let tokenizer = match lowbit_files::gguf::read(Path::new(model)) {
        Ok(file) => Tokenizer::from_gguf(&file.metadata)?,
        Err(_) => Tokenizer::from_checkpoint(&Checkpoint::open(Path::new(model))?)?,
    };
    let texts = std::fs::read_to_string(texts)?;
    let separator = "\n__ggml_vocab_test__\n";
    for text in texts.strip_suffix(separator).unwrap_or(&texts).split(separator) {
        let ids = tokenizer.encode(text, false)?;
        println!("{}", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
    }
    Ok(())
}
