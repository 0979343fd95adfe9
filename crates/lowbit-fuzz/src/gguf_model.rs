use lowbit_files::gguf::{Array, Value, Writer};
use lowbit_files::{ChatTemplate, Checkpoint, Stored, Tokenizer};
use lowbit_formats::{DType, FloatType, Format};

use crate::choices::Choices;
use crate::model::{DIRECTORY, answer, check_message, patch};
use crate::tiny;

/// Three tokens with a meaning, and a token for each byte.
const VOCABULARY: usize = 3 + 256;

/// What tensors are stored as.
const STORED: [Stored; 9] = [
    Stored::Plain(DType::F32),
    Stored::Plain(DType::F16),
    Stored::Blocks(Format::Q8_0),
    Stored::Blocks(Format::Q4_0),
    Stored::Plain(DType::BF16),
    Stored::Blocks(Format::Q4_1),
    Stored::Blocks(Format::IQ4_NL),
    Stored::Plain(DType::I32),
    Stored::Blocks(Format::MXFP4),
];

struct Tensor {
    name: String,
    stored: Stored,
    shape: Vec<usize>,
    fill: Option<u8>,
}

struct Damaged {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
    patches: Vec<(usize, u8)>,
    /// Words of 8 bytes that are overwritten in the finished file.
    numbers: Vec<(usize, u64)>,
}

/// A tiny GGUF model of some architecture, damaged in up to 12 chosen ways: it is refused, or its tokenizer takes a text
/// and it answers.
pub fn gguf_model(data: &[u8]) {
    let mut choices = Choices(data);
    let mut damaged = Damaged::new(&mut choices);
    for _ in 0..12 {
        if choices.is_empty() {
            break;
        }
        damaged.damage(&mut choices);
    }
    let Some(file) = damaged.file() else { return };
    DIRECTORY.with(|directory| {
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, file).expect("a file");
        let checkpoint = match Checkpoint::open(&path) {
            Ok(checkpoint) => checkpoint,
            Err(error) => return check_message(&error),
        };
        let text = Tokenizer::from_checkpoint(&checkpoint)
            .and_then(|tokenizer| tokenizer.decode(&tokenizer.encode("Hi \u{e9}\n", true)?));
        let template = ChatTemplate::from_checkpoint(&checkpoint).map(drop);
        let settings = checkpoint.generation_config().map(drop);
        for error in [text.map(drop), template, settings].into_iter().filter_map(Result::err) {
            check_message(&error);
        }
        answer(&checkpoint);
    });
}

/// The file that `data` chooses, whole.
#[cfg(test)]
pub(crate) fn undamaged(data: &[u8]) -> Vec<u8> {
    Damaged::new(&mut Choices(data)).file().expect("a file")
}

impl Damaged {
    fn new(choices: &mut Choices<'_>) -> Self {
        let (model_type, gguf) = *choices.of(&tiny::ARCHITECTURES);
        let stored = *choices.of(&STORED[..4]);
        let mut metadata = vec![("general.architecture".to_string(), Value::String(gguf.into()))];
        metadata.extend(tiny::metadata(model_type).into_iter().map(|(key, number)| {
            let is_float = key.contains("epsilon") || key.contains("freq_base");
            let value = if is_float { Value::F32(number as f32) } else { Value::U32(number as u32) };
            (format!("{gguf}.{key}"), value)
        }));
        metadata.extend(tokenizer());
        let tensors = tiny::tensors(model_type, VOCABULARY, true).into_iter().map(|spec| {
            let is_matrix = spec.shape.len() >= 2 && spec.shape.last() == Some(&32);
            let stored = if is_matrix { stored } else { STORED[0] };
            Tensor { name: spec.gguf, stored, shape: spec.shape, fill: None }
        });
        let tensors = tensors.collect();
        Self { metadata, tensors, patches: vec![], numbers: vec![] }
    }

    fn damage(&mut self, choices: &mut Choices<'_>) {
        let kind = choices.byte() % 16;
        let (entries, tensors) = (self.metadata.len(), self.tensors.len());
        match kind {
            0..=3 => {
                let at = choices.below(entries);
                self.metadata[at].1 = value(choices);
            }
            4 => self.insert(choices),
            5 => drop(self.metadata.remove(choices.below(entries))),
            6 => self.patches.push((choices.below(1 << 16), choices.byte())),
            7 => self.numbers.push((choices.below(1 << 16), choices.number())),
            _ if tensors == 0 => {}
            8 | 9 => {
                let shape = &mut self.tensors[choices.below(tensors)].shape;
                if !shape.is_empty() {
                    let dimension = choices.below(shape.len());
                    shape[dimension] = choices.number() as usize;
                }
            }
            10 => drop(self.tensors[choices.below(tensors)].shape.pop()),
            11 => self.tensors[choices.below(tensors)].shape.insert(0, choices.below(3)),
            12 => self.tensors[choices.below(tensors)].stored = *choices.of(&STORED),
            13 => self.tensors[choices.below(tensors)].fill = Some(*choices.of(&[0, 0xff, 0x7f, 0x7b])),
            14 => drop(self.tensors.swap_remove(choices.below(tensors))),
            _ => self.tensors[choices.below(tensors)].name = choices.string(),
        }
        if self.metadata.is_empty() {
            *self = Self::new(&mut Choices(&[]));
        }
    }

    /// A key that the model could have.
    fn insert(&mut self, choices: &mut Choices<'_>) {
        const KEYS: [&str; 16] = [
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "attention.recurrent_layers",
            "attention.sliding_window",
            "nextn_predict_layers",
            "vocab_size",
            "tokenizer.chat_template",
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.bos_token_id",
            "tokenizer.ggml.token_type",
            "general.alignment",
            "split.count",
            "general.sampling.temp",
            "attention.key_length",
            "rope.scaling.yarn_beta_fast",
        ];
        let key = *choices.of(&KEYS);
        let prefix = match &self.metadata[0].1 {
            Value::String(name) if !key.starts_with("tokenizer") && !key.starts_with("general") => {
                format!("{name}.")
            }
            _ => String::new(),
        };
        let key = format!("{prefix}{key}");
        self.metadata.retain(|(known, _)| *known != key);
        self.metadata.push((key, value(choices)));
    }

    /// None where not even the writer takes it.
    fn file(&self) -> Option<Vec<u8>> {
        let mut writer = Writer::new();
        for (key, value) in &self.metadata {
            writer.entry(key, value.clone()).ok()?;
        }
        let mut contents = vec![];
        for Tensor { name, stored, shape, fill } in &self.tensors {
            // What is too large to be written gets its sizes afterwards, by `numbers`.
            let elements = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
            elements.filter(|&n| n <= 1 << 16)?;
            let bytes = writer.tensor(name, *stored, shape).ok()?;
            let bytes: Vec<u8> = match (fill, stored) {
                (Some(byte), _) => vec![*byte; bytes],
                (None, Stored::Plain(DType::F32)) => {
                    (0..bytes / 4).flat_map(|i| tiny::value(name, i).to_le_bytes()).collect()
                }
                (None, Stored::Plain(dtype)) if FloatType::from_dtype(*dtype).is_some() => {
                    (0..bytes).map(|i| if i % 2 == 1 { 0x2c } else { (i * 7) as u8 }).collect()
                }
                // The first bytes of a block are its scale.
                _ => (0..bytes).map(|i| if i % 18 == 1 { 0x20 } else { (i * 5) as u8 & 0x3f }).collect(),
            };
            contents.push(bytes);
        }
        let mut body = writer.begin(Vec::new()).ok()?;
        contents.iter().try_for_each(|bytes| body.tensor(bytes)).ok()?;
        let mut file = body.finish().ok()?;
        for &(at, number) in &self.numbers {
            let at = at % file.len().saturating_sub(8).max(1);
            if let Some(word) = file.get_mut(at..at + 8) {
                word.copy_from_slice(&number.to_le_bytes());
            }
        }
        patch(&mut file, &self.patches);
        Some(file)
    }
}

fn tokenizer() -> Vec<(String, Value)> {
    let names = ["<unk>", "<s>", "</s>"].map(str::to_string).into_iter();
    let tokens = names.chain((0..=255u8).map(|byte| format!("<0x{byte:02X}>"))).collect();
    let kinds = (0..VOCABULARY as i32).map(|id| [2, 3, 3].get(id as usize).copied().unwrap_or(6)).collect();
    let entries = [
        ("model", Value::String("llama".into())),
        ("tokens", Value::Array(Array::String(tokens))),
        ("scores", Value::Array(Array::F32(vec![0.0; VOCABULARY]))),
        ("token_type", Value::Array(Array::I32(kinds))),
    ];
    entries.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).to_vec()
}

fn value(choices: &mut Choices<'_>) -> Value {
    match choices.byte() % 12 {
        0..=2 => Value::U32(choices.number() as u32),
        3 | 4 => Value::U64(choices.number()),
        5 => Value::I32(-(choices.below(300) as i32)),
        6 => Value::F32(choices.float() as f32),
        7 => Value::String(choices.string()),
        8 => Value::Bool(choices.byte() % 2 == 0),
        9 => Value::Array(Array::Bool(vec![true; choices.below(4)])),
        10 => Value::Array(Array::U8(vec![choices.byte(); choices.below(2000)])),
        _ => Value::Array(Array::String(vec![choices.string(); choices.below(5)])),
    }
}
