use lowbit_files::gguf::{Array, Value, Writer};
use lowbit_files::{ChatTemplate, Checkpoint, Stored, Tokenizer};
use lowbit_formats::{DType, FloatType, Format};

use crate::choices::Choices;
use crate::model::{DIRECTORY, answer, check_message, patch};
use crate::tiny;

/// Three tokens with a meaning, and a token for each byte.
const VOCABULARY: usize = 3 + 256;

/// The types of tensors.
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

/// A tiny GGUF model of some architecture, damaged in up to 12 chosen ways: it is refused, or its
/// tokenizer takes a text and it answers.
pub fn gguf_model(data: &[u8]) {
    let mut choices = Choices(data);
    let mut damaged = Damaged::new(&mut choices);
    choices.spend(|choices| damaged.damage(choices));
    if let Some(file) = damaged.file() {
        run(&file);
    }
}

/// Opens a file and uses all of it. Whatever is refused, is refused in a message for a terminal.
fn run(file: &[u8]) {
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
            // Tensors that are too large to be written get their sizes afterwards, by `numbers`.
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
        8 => Value::Bool(choices.byte().is_multiple_of(2)),
        9 => Value::Array(Array::Bool(vec![true; choices.below(4)])),
        10 => Value::Array(Array::U8(vec![choices.byte(); choices.below(2000)])),
        _ => Value::Array(Array::String(vec![choices.string(); choices.below(5)])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reply;

    /// The error for which `damaged` is refused.
    #[track_caller]
    fn refused(damaged: &Damaged) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        std::fs::write(&path, damaged.file().unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        reply(&checkpoint).expect_err("a damaged model answered").to_string()
    }

    #[test]
    fn sizes_are_compared_with_tensors_first() {
        let huge = 1u64 << 40;
        let wrapping = (1u64 << 62) + 64;
        let cases = [
            (
                0,
                "attention.key_length",
                huge,
                "attention.key_length is 1099511627776, but tensors have 1 to 259 rows",
            ),
            (
                0,
                "rope.dimension_count",
                huge,
                "rope.dimension_count is 1099511627776, but heads have 16 elements",
            ),
            (0, "block_count", 1_000_000_000, "block_count is 1000000000, but the checkpoint has 21 tensors"),
            (4, "ssm.state_size", wrapping, "that is more than memory can hold"),
            (4, "ssm.inner_size", u64::MAX, "that is more than memory can hold"),
            (4, "ssm.inner_size", 1, "ssm.inner_size is less"),
            (4, "ssm.conv_kernel", u64::MAX, "linear_conv_kernel_dim is"),
            (4, "expert_count", u64::MAX, "18446744073709551615"),
            (4, "full_attention_interval", u64::MAX, "blk.1."),
            (5, "block_count", u64::MAX, "block_count is 18446744073709551615"),
        ];
        for (index, key, value, want) in cases {
            let mut damaged = Damaged::new(&mut Choices(&[index, 0]));
            let entry = damaged.metadata.iter_mut().find(|(name, _)| name.ends_with(key)).unwrap();
            entry.1 = Value::U64(value);
            let message = refused(&damaged);
            assert!(message.contains(want), "{key} {value}: {message}\nshould say: {want}");
        }
    }

    #[test]
    fn tensors_of_any_rank_are_refused_by_name() {
        for (index, at, rank) in
            (0..7).flat_map(|i| (0..30).flat_map(move |at| (0..5).map(move |r| (i, at, r))))
        {
            let mut damaged = Damaged::new(&mut Choices(&[index, 0]));
            let at = at % damaged.tensors.len();
            let tensor = &mut damaged.tensors[at];
            if rank == tensor.shape.len() {
                continue;
            }
            // As many values, where that is possible.
            let last = *tensor.shape.last().unwrap();
            let rest = tensor.shape.iter().product::<usize>() / last;
            tensor.shape =
                [vec![], vec![rest * last], vec![rest, last], vec![rest, 1, last], vec![1, rest, 1, last]]
                    [rank]
                    .clone();
            let name = tensor.name.clone();
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("model.gguf");
            std::fs::write(&path, damaged.file().unwrap()).unwrap();
            // Norms may have any number of dimensions, and leading ones of 1 are left out by
            // converters.
            if let Err(error) = reply(&Checkpoint::open(&path).unwrap()) {
                check_message(&error);
                let vocabulary = name == "token_embd.weight";
                assert!(vocabulary || error.to_string().contains(&name), "{name} {rank}: {error}");
            }
        }
    }

    #[test]
    fn no_message_shows_escapes_or_whole_values() {
        let texts = ["\u{1b}[2J\u{202e}\u{9b}\r\u{7}".to_string(), "y\u{1b}".repeat(1 << 16)];
        let whole = |index: usize| Damaged::new(&mut Choices(&[index as u8, 0]));
        for (text, index) in texts.iter().flat_map(|text| [0, 4].map(|index| (text, index))) {
            let values = [
                Value::String(text.clone()),
                Value::Array(Array::String(vec![text.clone(); 2])),
                Value::Array(Array::U8(vec![7; 1 << 20])),
            ];
            for at in 0..whole(index).metadata.len() {
                for value in &values {
                    let mut damaged = whole(index);
                    damaged.metadata[at].1 = value.clone();
                    run(&damaged.file().unwrap());
                }
                let mut damaged = whole(index);
                damaged.metadata[at].0 = text.clone();
                run(&damaged.file().unwrap());
            }
            for at in 0..whole(index).tensors.len() {
                let mut damaged = whole(index);
                damaged.tensors[at].name = text.clone();
                let file = damaged.file().unwrap();
                run(&file);
                run(&file[..file.len() - 100]);
            }
        }
    }
}
