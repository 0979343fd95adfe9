//! A GGUF file as MLX has it: its configuration and its tensors. (The tokenizer's files are
//! `lowbit-files`'s: they are [`Checkpoint::companions`].)

mod config;
mod left_out;
mod tensors;

use crate::QuantizeError;
use crate::computed::Computed;
use crate::converted::Converted;
use crate::tensor::Tensor;
use lowbit_files::gguf::Metadata;
use lowbit_formats::{FloatType, Format};

/// A GGUF model that lowbit computes.
struct Source<'a> {
    computed: &'a Computed<'a>,
    metadata: &'a Metadata,
}

/// Converts `computed`, a GGUF file with this metadata, to MLX's layout.
///
/// # Errors
/// [`QuantizeError`] for what MLX's layout has no name for.
pub fn convert(computed: &Computed<'_>, metadata: &Metadata) -> Result<Converted, QuantizeError> {
    let source = Source { computed, metadata };
    let tensors = tensors::tensors(&source)?;
    let mut warnings = lowbit_models::warnings(computed.checkpoint)?;
    let config = config::config(&source, dtype(&tensors), &mut warnings)?;
    warnings.extend(left_out::warnings(&source)?);
    Ok(Converted { config, tensors, warnings })
}

/// The type that the new checkpoint computes in: what most values of the file's matrices are in, or
/// bf16 where these are blocks. (Blocks' scales are f16 in any case, and norms f32, whatever the
/// model was trained in. Many models have activations beyond f16's range.)
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
