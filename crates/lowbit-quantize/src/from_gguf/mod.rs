//! A GGUF file as MLX has it: its configuration and its tensors. (The tokenizer's files are `lowbit-files`'s: they are
//! [`Checkpoint::companions`].)

mod config;
mod left_out;
mod tensors;

use crate::QuantizeError;
use crate::tensor::Tensor;
use lowbit_files::Checkpoint;
use lowbit_files::gguf::Metadata;
use lowbit_formats::{FloatType, Format};
use lowbit_kernels::Device;
use lowbit_models::arch::{self, Architecture};
use lowbit_models::layers::DecoderConfig;
use lowbit_models::{Config, Model, Target, Weights};
use serde_json::Value as Json;

/// What MLX's layout has besides the tokenizer.
pub struct Converted {
    /// `config.json`.
    pub config: Json,
    pub tensors: Vec<Tensor>,
    /// What is not carried over, a sentence each.
    pub warnings: Vec<String>,
}

/// A GGUF model that lowbit computes.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    metadata: &'a Metadata,
    config: Config<'a>,
    architecture: &'static Architecture,
    decoder: DecoderConfig,
}

/// `checkpoint`, whose metadata is `metadata`, as MLX has it. All of its tensors are looked at before: what lowbit does not compute
/// is not converted either.
///
/// # Errors
/// As [`Model::load_for`]; [`QuantizeError`] for what MLX's layout has no name for.
pub fn convert(checkpoint: &Checkpoint, metadata: &Metadata) -> Result<Converted, QuantizeError> {
    // Nothing is copied or repacked: this reads the names, types and shapes, and some small tensors.
    let target = Target::new(&Device::cpu(Some(1))?, None)?.with_exact(true);
    let model = Model::load_for(checkpoint, target.clone())?;
    let config = Config::new(checkpoint)?;
    let architecture = arch::find(&config)?;
    let source = Source { checkpoint, metadata, config, architecture, decoder: model.config().clone() };
    let tensors = tensors::tensors(&source)?;
    let mut warnings = model.warnings().to_vec();
    let weights = Weights::new(checkpoint, &target);
    let config = config::config(&source, &weights, dtype(&tensors), &mut warnings)?;
    warnings.extend(left_out::warnings(&source)?);
    Ok(Converted { config, tensors, warnings })
}

/// The type that the new checkpoint computes in: what most values of the file's matrices are in, or bf16 where these are blocks. (Blocks'
/// scales are f16 in any case, and norms f32, whatever the model was trained in. Many models have activations beyond f16's
/// range.)
fn dtype(tensors: &[Tensor]) -> FloatType {
    let values = |is_counted: &dyn Fn(Format) -> bool| -> usize {
        let matrices = tensors.iter().filter(|tensor| tensor.shape.len() > 1);
        let counted = matrices.filter(|tensor| is_counted(tensor.source.format));
        counted.map(|tensor| tensor.shape.iter().product::<usize>()).sum()
    };
    let floats = [FloatType::F32, FloatType::F16, FloatType::BF16];
    let most = floats.into_iter().max_by_key(|&float| values(&|format| format == Format::Float(float)));
    let float = most.unwrap_or(FloatType::BF16);
    let blocks = values(&|format| !matches!(format, Format::Float(_)));
    if values(&|format| format == Format::Float(float)) >= blocks { float } else { FloatType::BF16 }
}
