use std::ops::ControlFlow::Continue;
use std::path::Path;

use lowbit_files::Checkpoint;
use lowbit_kernels::Device;
use lowbit_models::{GenerationOptions, Logits, Model, ModelError, Session};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::choices::Choices;
use crate::tiny::{self, Spec};

const VOCABULARY: usize = 16;

thread_local! {
    /// In memory where the system has such a folder: writing and mapping is most of the work.
    pub(crate) static DIRECTORY: TempDir =
        TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary folder");
    static DEVICE: Device = Device::cpu(Some(1)).expect("a thread");
}

/// A tiny checkpoint of some architecture, damaged in up to 12 chosen ways (see `Damaged::damage`):
/// it is refused, or it answers.
pub fn model(data: &[u8]) {
    let mut choices = Choices(data);
    let mut damaged = Damaged::new(&mut choices);
    choices.spend(|choices| damaged.damage(choices));
    DIRECTORY.with(|directory| {
        damaged.write(directory.path());
        match Checkpoint::open(directory.path()) {
            Ok(checkpoint) => answer(&checkpoint),
            Err(error) => check_message(&error),
        }
    });
}

pub(crate) fn answer(checkpoint: &Checkpoint) {
    if let Err(error) = reply(checkpoint) {
        check_message(&error);
    }
}

/// Loads the model and runs it over a prompt and some tokens more.
pub(crate) fn reply(checkpoint: &Checkpoint) -> Result<(), ModelError> {
    DEVICE.with(|device| {
        let model = Model::load(checkpoint, device)?;
        let vocab_size = model.config().vocab_size;
        let mut cache = model.cache();
        let logits = model.forward(&[0, 2, 1], &mut cache, Logits::All)?.expect("logits were asked for");
        assert_eq!(logits.shape(), [3, vocab_size]);
        model.forward(&[3], &mut cache, Logits::Last)?;
        let mut session = Session::new(&model);
        let logits = session.prefill(&[1, 2], |_| Continue(()))?.expect("nobody broke it off");
        let options = GenerationOptions::default().with_max_tokens(2);
        let reply = session.generate(logits, &options, |_| Continue(()))?;
        assert!(reply.tokens.iter().all(|&id| (id as usize) < vocab_size));
        Ok(())
    })
}

/// A message is for a terminal: short, and without what a terminal obeys.
pub(crate) fn check_message(error: &dyn std::error::Error) {
    const MOST: usize = 8000;
    let message = error.to_string();
    let odd = message.chars().find(|&c| c != '\n' && (c.is_control() || c == '\u{202e}'));
    assert!(odd.is_none(), "{odd:?} in {:?}", &message.chars().take(MOST).collect::<String>());
    assert!(
        message.len() <= MOST,
        "{} bytes: {}",
        message.len(),
        &message.chars().take(2000).collect::<String>()
    );
}

/// The types that tensors are written in, and their sizes.
const DTYPES: [(&str, usize); 10] = [
    ("F32", 4),
    ("BF16", 2),
    ("F16", 2),
    ("U32", 4),
    ("U8", 1),
    ("F64", 8),
    ("I64", 8),
    ("BOOL", 1),
    ("F8_E4M3", 1),
    ("F99", 4),
];

struct Tensor {
    name: String,
    dtype: (&'static str, usize),
    shape: Vec<u64>,
    /// The source of its bytes.
    fill: Fill,
    /// Added to the end of its data_offsets.
    lie: u64,
}

#[derive(Clone, Copy)]
enum Fill {
    Plausible,
    /// A byte throughout: 0xff is NaN in every float, 0x7f infinity or close to it.
    Byte(u8),
}

struct Damaged {
    config: Map<String, Value>,
    tensors: Vec<Tensor>,
    mlx: bool,
    /// Places and bytes to overwrite in the finished files: config.json, model.safetensors.
    patches: [Vec<(usize, u8)>; 2],
}

impl Damaged {
    fn new(choices: &mut Choices<'_>) -> Self {
        let (model_type, _) = *choices.of(&tiny::ARCHITECTURES);
        let quantized = choices.byte() % 3 == 1;
        let config = tiny::config(model_type, VOCABULARY);
        let specs = tiny::tensors(model_type, VOCABULARY, false);
        let mut damaged = Self { config, tensors: vec![], mlx: quantized, patches: Default::default() };
        for spec in specs {
            damaged.add(spec, quantized);
        }
        if quantized {
            damaged.config.insert("quantization".into(), json!({"bits": 4, "group_size": 32}));
        }
        damaged
    }

    fn add(&mut self, Spec { json, mut shape, .. }: Spec, quantized: bool) {
        if quantized && json.ends_with("conv1d.weight") {
            // As mlx-lm has it.
            shape.swap(1, 2);
        }
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        let (name, dtype) = (json, DTYPES[0]);
        let tensor = |name, dtype, shape| Tensor { name, dtype, shape, fill: Fill::Plausible, lie: 0 };
        let is_matrix = shape.len() >= 2 && shape.last() == Some(&32);
        let Some(module) = name.strip_suffix(".weight").filter(|_| quantized && is_matrix) else {
            self.tensors.push(tensor(name, dtype, shape));
            return;
        };
        let columns = |n: u64| [&shape[..shape.len() - 1], &[n]].concat();
        self.tensors.push(tensor(name.clone(), DTYPES[3], columns(4)));
        self.tensors.push(tensor(format!("{module}.scales"), DTYPES[0], columns(1)));
        self.tensors.push(tensor(format!("{module}.biases"), DTYPES[0], columns(1)));
    }

    fn damage(&mut self, choices: &mut Choices<'_>) {
        let kind = choices.byte() % 16;
        let count = self.tensors.len();
        let at = if kind >= 6 { choices.below(count) } else { 0 };
        match kind {
            0..=3 => self.set(choices),
            4 => {
                let section = self.section(choices);
                let keys: Vec<String> = section.keys().cloned().collect();
                if !keys.is_empty() {
                    let at = choices.below(keys.len());
                    section.remove(&keys[at]);
                }
            }
            5 => {
                let file = choices.below(2);
                let at = choices.below(1 << 16);
                let byte = choices.byte();
                self.patches[file].push((at, byte));
            }
            6 | 7 if !self.tensors[at].shape.is_empty() => {
                let shape = &mut self.tensors[at].shape;
                let dimension = choices.below(shape.len());
                shape[dimension] = choices.number();
            }
            8 => drop(self.tensors[at].shape.pop()),
            9 => self.tensors[at].shape.insert(0, [1, 0, choices.number()][usize::from(choices.byte() % 3)]),
            10 => self.tensors[at].dtype = *choices.of(&DTYPES),
            11 => self.tensors[at].fill = Fill::Byte(*choices.of(&[0, 0xff, 0x7f, 0x80, 1, 0x7b])),
            12 => drop(self.tensors.swap_remove(at)),
            13 => self.tensors[at].name = choices.string(),
            14 => self.tensors[at].lie = choices.number(),
            _ => {
                let name = self.tensors[choices.below(count)].name.replace("layers.0", "layers.1");
                self.tensors[at].name = name;
            }
        }
        if self.tensors.is_empty() {
            *self = Self::new(&mut Choices(&[]));
        }
    }

    /// The root, or an object in it.
    fn section(&mut self, choices: &mut Choices<'_>) -> &mut Map<String, Value> {
        let name = ["", "text_config", "rope_parameters", "rope_scaling", "quantization"][choices.below(5)];
        match self.config.get(name) {
            Some(Value::Object(_)) => self.config[name].as_object_mut().expect("an object"),
            _ => &mut self.config,
        }
    }

    /// A key of the configuration, one that it has or one that it could have, becomes something
    /// else.
    fn set(&mut self, choices: &mut Choices<'_>) {
        const OTHERS: [&str; 28] = [
            "rope_parameters",
            "rope_scaling",
            "quantization",
            "quantization_config",
            "text_config",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
            "layer_types",
            "tie_word_embeddings",
            "partial_rotary_factor",
            "full_attention_interval",
            "shared_expert_intermediate_size",
            "decoder_sparse_step",
            "mlp_only_layers",
            "rope_type",
            "factor",
            "rope_theta",
            "bits",
            "group_size",
            "mode",
            "eos_token_id",
            "head_dim",
            "hidden_act",
            "original_max_position_embeddings",
            "attention_factor",
            "linear_conv_kernel_dim",
            "num_key_value_heads",
        ];
        let own = !choices.byte().is_multiple_of(4);
        let section = self.section(choices);
        let keys: Vec<String> = section.keys().cloned().collect();
        let key = match own && !keys.is_empty() {
            true => keys[choices.below(keys.len())].clone(),
            false => OTHERS[choices.below(OTHERS.len())].to_string(),
        };
        section.insert(key, choices.json());
    }

    fn write(&self, directory: &Path) {
        let mut config = serde_json::to_vec(&self.config).expect("JSON");
        patch(&mut config, &self.patches[0]);
        std::fs::write(directory.join("config.json"), config).expect("a file");
        let mut file = self.safetensors();
        patch(&mut file, &self.patches[1]);
        std::fs::write(directory.join("model.safetensors"), file).expect("a file");
    }

    fn safetensors(&self) -> Vec<u8> {
        let (mut header, mut data) = (Map::new(), vec![]);
        if self.mlx {
            header.insert("__metadata__".into(), json!({"format": "mlx"}));
        }
        for Tensor { name, dtype: (dtype, size), shape, fill, lie } in &self.tensors {
            let start = data.len();
            let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
            // More is only claimed.
            let elements = elements.filter(|&n| n <= 1 << 16).unwrap_or(16) as usize;
            match fill {
                Fill::Byte(byte) => data.resize(start + elements * size, *byte),
                Fill::Plausible if *dtype == "F32" => {
                    data.extend((0..elements).flat_map(|i| tiny::value(name, i).to_le_bytes()));
                }
                Fill::Plausible => data.extend((0..elements * size).map(|i| (i * 5) as u8 & 0x3f)),
            }
            let offsets = [start as u64, (data.len() as u64).wrapping_add(*lie)];
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        }
        let header = serde_json::to_vec(&header).expect("JSON");
        [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
    }
}

pub(crate) fn patch(bytes: &mut [u8], patches: &[(usize, u8)]) {
    for &(at, byte) in patches {
        if !bytes.is_empty() {
            let at = at % bytes.len();
            bytes[at] ^= byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts text that must not reach a terminal as it is in every place of the configuration and of
    /// the header.
    #[test]
    fn no_message_shows_escapes_or_whole_values() {
        let texts = ["\u{1b}[2J\u{202e}\u{9b}\r\u{7}".to_string(), "y\u{1b}".repeat(1 << 16)];
        let directory = TempDir::new().unwrap();
        let mut refused = 0;
        let mut look = |damaged: &Damaged| {
            damaged.write(directory.path());
            let result = Checkpoint::open(directory.path()).map_err(ModelError::from);
            if let Err(error) = result.and_then(|checkpoint| reply(&checkpoint)) {
                check_message(&error);
                refused += 1;
            }
        };
        let whole = |index: usize| Damaged::new(&mut Choices(&[index as u8, (index % 2) as u8]));
        for (text, index) in texts.iter().flat_map(|text| [0, 3, 4, 6].map(|index| (text, index))) {
            let values = [json!(text), json!([text]), json!({ text.as_str(): text })];
            let keys: Vec<String> = whole(index).config.keys().cloned().collect();
            let others = ["rope_scaling", "quantization_config", "layer_types", "rope_parameters"];
            for (key, value) in keys.iter().map(String::as_str).chain(others).zip(values.iter().cycle()) {
                let mut damaged = whole(index);
                damaged.config.insert(key.into(), value.clone());
                look(&damaged);
            }
            let scaling = json!({"rope_type": text, "type": text, "factor": text});
            let mut damaged = whole(index);
            damaged.config.insert("rope_scaling".into(), scaling);
            look(&damaged);
            for at in (0..whole(index).tensors.len()).step_by(3) {
                let mut damaged = whole(index);
                damaged.tensors[at].name = text.clone();
                look(&damaged);
                damaged.tensors[at].lie = 1;
                look(&damaged);
            }
            // With a type that safetensors does not have.
            let mut damaged = whole(index);
            damaged.tensors[0].name = text.clone();
            damaged.tensors[0].dtype = *DTYPES.last().unwrap();
            look(&damaged);
        }
        assert!(refused > 100, "{refused} messages were looked at");
    }

    /// Otherwise the targets would look at refusals alone.
    #[test]
    fn undamaged_models_answer() {
        for (index, (model_type, gguf)) in tiny::ARCHITECTURES.into_iter().enumerate() {
            let directory = TempDir::new().unwrap();
            for layout in [0, 1] {
                Damaged::new(&mut Choices(&[index as u8, layout])).write(directory.path());
                let checkpoint = Checkpoint::open(directory.path()).unwrap();
                reply(&checkpoint).unwrap_or_else(|error| panic!("{model_type} {layout}: {error}"));
            }
            for stored in 0..4 {
                let path = directory.path().join("model.gguf");
                std::fs::write(&path, crate::gguf_model::undamaged(&[index as u8, stored])).unwrap();
                let checkpoint = Checkpoint::open(&path).unwrap();
                let tokenizer = lowbit_files::Tokenizer::from_checkpoint(&checkpoint).unwrap();
                assert!(!tokenizer.encode("Hi", true).unwrap().is_empty());
                reply(&checkpoint).unwrap_or_else(|error| panic!("{gguf} {stored}: {error}"));
            }
        }
    }
}
