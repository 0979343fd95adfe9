//! Files and folders that people mistake for a checkpoint: errors say what they are and what to do
//! about it.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::gguf::Metadata;
use crate::names::{CONFIG, INDEX, Part, SINGLE, file_names};
use crate::{FileError, shown};

/// The directory that `file` is the model of: config.json, model.safetensors, its parts and its
/// index stand for it.
///
/// # Errors
/// [`FileError::NotACheckpoint`] for a safetensors file that its directory's model does not have.
pub(super) fn directory_of(file: &Path) -> Result<Option<PathBuf>, FileError> {
    let (Some(parent), Some(name)) = (file.parent(), file.file_name().and_then(OsStr::to_str)) else {
        return Ok(None);
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    if [CONFIG, INDEX, SINGLE, "tokenizer.json", "tokenizer_config.json"].contains(&name) {
        return Ok(Some(parent.into()));
    }
    if !name.ends_with(".safetensors") {
        return Ok(None);
    }
    let index = parent.join(INDEX);
    let is_shard = match index.exists() {
        true => super::shard_names(&index)?.iter().any(|shard| shard == name),
        false => Part::parse(name).is_some_and(|part| part.prefix == "model"),
    };
    if is_shard {
        return Ok(Some(parent.into()));
    }
    let problem = match name.contains("adapter") || name.contains("lora") {
        true => ADAPTER.to_string(),
        false => format!("is no part of a model that its directory holds ({SINGLE} or what {INDEX} names)"),
    };
    Err(FileError::not_a_checkpoint(file, problem))
}

const ADAPTER: &str = "is an adapter (LoRA), not a model: merge it into its model first, with merge_and_unload of peft or with \
                       mlx_lm.fuse";
const PYTORCH: &str = "PyTorch weights, which are not read; transformers writes safetensors: \
                       AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)";

/// The magic bytes of known file types, and their offsets.
const BEGINNINGS: &[(usize, &[u8], &str)] = &[
    (0, b"\x80\x02", PYTORCH),
    (0, b"\x80\x03", PYTORCH),
    (0, b"\x80\x04", PYTORCH),
    (0, b"\x89HDF\r\n", "a Keras or TensorFlow file (HDF5), which is not read; take the model's safetensors"),
    (0, b"\x1f\x8b", ARCHIVE),
    (0, b"BZh", ARCHIVE),
    (0, b"\xfd7zXZ", ARCHIVE),
    (0, b"\x28\xb5\x2f\xfd", ARCHIVE),
    (0, b"7z\xbc\xaf", ARCHIVE),
    (257, b"ustar", ARCHIVE),
    (4, b"TFL3", "a TensorFlow Lite model, which is not read; take the model's safetensors"),
    (0, b"\x93NUMPY", "a NumPy array, not a model"),
    (0, b"lmgg", OLD_GGML),
    (0, b"fmgg", OLD_GGML),
    (0, b"tjgg", OLD_GGML),
    (0, b"algg", OLD_GGML),
    (0, b"\x7fELF", "a program, not a model"),
    (0, b"MZ", "a program, not a model (a llamafile has a GGUF file inside: unzip it)"),
    (0, b"<!DOCTYPE", WEB_PAGE),
    (0, b"<!doctype", WEB_PAGE),
    (0, b"<html", WEB_PAGE),
    (0, b"<HTML", WEB_PAGE),
];

const ARCHIVE: &str = "an archive: unpack it, and name what comes out of it";
const OLD_GGML: &str = "in GGML's format from before GGUF, which is not read; take a GGUF file of the model";
const WEB_PAGE: &str = "a web page, not a model: its download went wrong (the hub has files under .../resolve/main/, not \
                        .../blob/main/)";

/// The kind of a file that is not GGUF; `None` when it may be GGUF or is of no known kind.
pub(super) fn file(path: &Path) -> Result<Option<String>, FileError> {
    let mut head = Vec::new();
    let file = crate::read::open_regular(path)?;
    file.take(512).read_to_end(&mut head).map_err(FileError::io(path))?;
    if head.starts_with(b"GGUF") || crate::read::is_pointer(&head) {
        return Ok(None);
    }
    if head.is_empty() {
        return Ok(Some("is empty".into()));
    }
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default().to_ascii_lowercase();
    let is_zip = head.starts_with(b"PK\x03\x04");
    let what = match extension.as_str() {
        "pt" | "pth" | "bin" | "ckpt" if is_zip => PYTORCH,
        "keras" => KERAS,
        "onnx" => ONNX,
        "mlmodel" => CORE_ML,
        "npz" => "NumPy arrays, as MLX's first checkpoints had them; take the model's safetensors",
        _ if is_zip && contains(&head, b"data.pkl") => PYTORCH,
        _ if is_zip => ARCHIVE,
        _ => {
            let begins = |(at, bytes, _): &&(usize, &[u8], _)| {
                head.get(*at..).is_some_and(|head| head.starts_with(bytes))
            };
            match BEGINNINGS.iter().find(begins) {
                Some((.., what)) => what,
                None if head.get(8) == Some(&b'{') => {
                    "a safetensors file; name the directory that config.json is in"
                }
                None if matches!(head[0], b'{' | b'[') => {
                    "JSON, not a model; name the directory of a checkpoint"
                }
                None if extension != "gguf" && std::str::from_utf8(&head).is_ok() => "a text, not a model",
                None => return Ok(None),
            }
        }
    };
    Ok(Some(format!("is {what}")))
}

const ONNX: &str = "an ONNX model, which is not read; take the model's safetensors";
const CORE_ML: &str = "a Core ML model, which is not read; take the model's safetensors";
const KERAS: &str = "a Keras model, which is not read; take the model's safetensors";

fn contains(bytes: &[u8], what: &[u8]) -> bool {
    bytes.windows(what.len()).any(|window| window == what)
}

/// The content of a directory without a model's weights or its configuration, if it is known.
pub(super) fn directory(path: &Path) -> Result<Option<String>, FileError> {
    let names = file_names(path, "")?;
    let has = |wanted: &dyn Fn(&str) -> bool| names.iter().find(|name| wanted(name)).map(shown);
    let ends = |extensions: &'static [&'static str]| {
        move |name: &str| extensions.iter().any(|extension| name.to_ascii_lowercase().ends_with(extension))
    };
    if has(&|name| name == "adapter_config.json" || name.starts_with("adapter")).is_some() {
        return Ok(Some(ADAPTER.into()));
    }
    if has(&|name| name == "model_index.json").is_some() {
        return Ok(Some("is a diffusion pipeline, which makes pictures; lowbit runs language models".into()));
    }
    let kinds: [(&'static [&'static str], &str); 9] = [
        (&[".incomplete", ".part", ".crdownload", ".aria2"], "whose download is not whole"),
        (&[".pth", ".pt", ".bin", ".ckpt", "pytorch_model.bin.index.json"], PYTORCH),
        (&[".onnx", "onnx"], ONNX),
        (&[".mlpackage", ".mlmodelc", ".mlmodel"], CORE_ML),
        (&[".keras", ".h5", "saved_model.pb", ".msgpack"], KERAS),
        (&[".npz"], "NumPy arrays, as MLX's first checkpoints had them; take the model's safetensors"),
        (
            &[".tflite", ".task", ".litertlm"],
            "a TensorFlow Lite model, which is not read; take the model's safetensors",
        ),
        (&[".engine", ".plan"], "a TensorRT engine, which is not read; take the model's safetensors"),
        (&[".zip", ".tar", ".gz", ".tgz", ".xz", ".zst", ".7z"], ARCHIVE),
    ];
    for (extensions, what) in kinds {
        if let Some(name) = has(&ends(extensions)) {
            return Ok(Some(format!("holds no safetensors, only {name}: {what}")));
        }
    }
    Ok(below(path, &names))
}

/// The place of the model below `path`, if there is exactly one.
fn below(path: &Path, names: &[String]) -> Option<String> {
    let is_model = |folder: &Path| {
        folder.join(CONFIG).is_file() || file_names(folder, ".gguf").is_ok_and(|names| !names.is_empty())
    };
    let folders = names.iter().map(|name| path.join(name)).filter(|path| path.is_dir());
    // The hub's cache has a model in snapshots/<commit>.
    let snapshots = file_names(&path.join("snapshots"), "").unwrap_or_default();
    let snapshots = snapshots.iter().map(|name| path.join("snapshots").join(name));
    let mut models = folders.chain(snapshots).filter(|folder| is_model(folder));
    let model = models.next()?;
    models.next().is_none().then(|| format!("holds no model itself; {} does", shown(model.display())))
}

/// transformers' class names with these endings are not models that write text.
const CLASSES: &[(&str, &str)] = &[
    ("ForMaskedLM", "fills gaps in a text"),
    ("ForPreTraining", "fills gaps in a text"),
    ("ForSequenceClassification", "classifies texts"),
    ("ForTokenClassification", "classifies words"),
    ("ForQuestionAnswering", "finds answers in a text"),
    ("ForMultipleChoice", "chooses among answers"),
    ("ForImageClassification", "classifies pictures"),
    ("ForMaskedImageModeling", "fills gaps in pictures"),
    ("ForObjectDetection", "finds things in pictures"),
    ("ForSemanticSegmentation", "segments pictures"),
    ("ForDepthEstimation", "estimates depth in pictures"),
    ("ForAudioClassification", "classifies sounds"),
    ("ForCTC", "writes down speech"),
    ("ForSpeechSeq2Seq", "writes down speech"),
    ("ForTextToWaveform", "speaks"),
    ("EncoderModel", "makes embeddings"),
];

/// Parts of the names of classes that attend to both sides. Those of decoders, such as Qwen3Model,
/// end in Model, too.
const ENCODERS: [&str; 18] = [
    "Albert",
    "Bart",
    "Bert",
    "BERT",
    "BigBird",
    "CLIP",
    "Canine",
    "Deberta",
    "Electra",
    "Ernie",
    "Longformer",
    "MPNet",
    "Nomic",
    "Siglip",
    "T5",
    "ViT",
    "Wav2Vec2",
    "XLM",
];

/// The kind of a model that is no decoder, according to `config`.
pub(super) fn kind(config: &Value) -> Option<String> {
    let architectures = config.get("architectures").and_then(Value::as_array);
    let class = architectures.and_then(|list| list.first()).and_then(Value::as_str).unwrap_or_default();
    if config.get("is_encoder_decoder") == Some(&Value::Bool(true)) {
        return Some(format!("is an encoder-decoder model ({}); {RUNS}", shown(class)));
    }
    if let Some((_, does)) = CLASSES.iter().find(|(suffix, _)| class.ends_with(suffix)) {
        return Some(format!("is a model ({}) that {does}; {RUNS}", shown(class)));
    }
    let is_encoder = class.ends_with("Model") && ENCODERS.iter().any(|part| class.contains(part));
    is_encoder.then(|| format!("is a model ({}) that makes embeddings; {RUNS}", shown(class)))
}

/// The kind of a GGUF file that is not a model that writes text.
pub(super) fn gguf_kind(metadata: &Metadata) -> Option<String> {
    let text = |key| metadata.find::<&str>(key).ok().flatten().unwrap_or_default();
    let what = match (text("general.type"), text("general.architecture")) {
        ("adapter", _) => return Some(ADAPTER.into()),
        ("mmproj", _) | (_, "clip") => {
            "is the part of a model that sees (mmproj); name the file of the model itself"
        }
        ("imatrix", _) => "is an importance matrix, which llama-quantize takes, not a model",
        (_, "bert" | "modern-bert" | "nomic-bert" | "nomic-bert-moe" | "jina-bert-v2" | "t5encoder") => {
            "is a model that makes embeddings"
        }
        (_, "t5") => "is an encoder-decoder model",
        (_, "flux" | "sd1" | "sd3" | "sdxl" | "wan" | "ltxv" | "qwen_image") => {
            "is a model that makes pictures"
        }
        _ => return None,
    };
    Some(format!("{what}; {RUNS}"))
}

const RUNS: &str = "lowbit runs models that write text, and embedding models that were made of them";
