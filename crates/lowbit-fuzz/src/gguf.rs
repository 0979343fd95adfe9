use bytes::Bytes;
use lowbit_files::gguf::{self, Gguf, Writer};
use lowbit_files::{ChatTemplate, Tensors, Tokenizer};

use crate::{check_view, file};

/// A GGUF file: its metadata and tensors, its tokenizer and chat template, and what writing it
/// again gives.
pub fn gguf(data: &[u8]) {
    let bytes = Bytes::copy_from_slice(data);
    let Ok(parsed) = gguf::parse(&bytes, &file()) else { return };
    parsed.tensors.iter().for_each(|view| check_view(view, &bytes));
    let written = write(&parsed);
    let again = gguf::parse(&written, &file()).expect("what was written is read");
    assert_eq!(write(&again), written);
    Tensors::new(parsed.tensors).expect("names are unique");
    for (key, _) in parsed.metadata.iter() {
        _ = parsed.metadata.get::<usize>(key);
        _ = parsed.metadata.get::<f32>(key);
        _ = parsed.metadata.get::<&str>(key);
        _ = parsed.metadata.get::<Vec<u32>>(key);
        _ = parsed.metadata.get::<&[String]>(key);
    }
    _ = ChatTemplate::from_gguf(&parsed.metadata);
    if let Ok(tokenizer) = Tokenizer::from_gguf(&parsed.metadata) {
        let ids = tokenizer.encode("Hi \u{e9}\u{1f642}\n 12", true).expect("every text has ids");
        tokenizer.decode(&ids).expect("ids have tokens");
    }
}

fn write(parsed: &Gguf) -> Bytes {
    let mut writer = Writer::new();
    for (key, value) in parsed.metadata.iter() {
        writer.entry(key, value.clone()).expect("a unique key");
    }
    for view in &parsed.tensors {
        writer.tensor(&view.name, view.stored, &view.shape).expect("a unique name and a shape that was read");
    }
    let mut body = writer.begin(Vec::new()).expect("memory to write to");
    parsed.tensors.iter().for_each(|view| body.tensor(&view.bytes.get()).expect("as many bytes as planned"));
    body.finish().expect("all tensors").into()
}
