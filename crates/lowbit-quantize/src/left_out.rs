//! Tensors that a conversion leaves out.

use crate::computed::Computed;
use lowbit_files::shown;
use lowbit_models::arch::Extra;

/// A sentence for each kind of tensor that is left out, with their number; `kept` are the kinds
/// that are not.
pub fn extras(computed: &Computed<'_>, kept: &[Extra]) -> Vec<String> {
    let layers = computed.decoder().num_hidden_layers;
    let path = computed.config.path().display();
    let mut warnings = vec![];
    for (kind, what, why) in [
        (
            Extra::Prediction,
            "of the layers of multi-token prediction",
            "conversions keep those of Qwen3-Next's and Qwen3.5's published checkpoints",
        ),
        (Extra::Vision, "of the part that sees images", "lowbit computes texts alone"),
        (Extra::Audio, "of the part that hears", "lowbit computes texts alone"),
        (Extra::Constant, "that are constants", "every reader computes them itself"),
    ] {
        let names = computed.checkpoint.tensors().names();
        let names: Vec<_> =
            names.filter(|name| computed.architecture.extra(name, layers) == Some(kind)).collect();
        let Some(first) = names.first().filter(|_| !kept.contains(&kind)) else { continue };
        let (count, first) = (names.len(), shown(first));
        let tensors = if count == 1 { "tensor" } else { "tensors" };
        warnings.push(format!("{path}: {count} {tensors} {what} ({first}, ..) left out: {why}"));
    }
    warnings
}
