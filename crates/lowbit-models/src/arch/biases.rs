//! Which linear layers have biases.

use crate::{Config, ModelError, Weights};

/// The layers of attention, and of the MLP, that one flag is about.
const ATTENTION: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Checks that the file has exactly the biases that the configuration's flags promise: transformers replaces missing ones
/// by zeros and drops surplus ones, mlx-lm refuses to load either. GGUF has no flags.
///
/// # Errors
/// [`ModelError::Missing`], or [`ModelError::Config`] for a bias that contradicts its flag or that the architecture does not have.
pub(super) fn check(config: &Config<'_>, weights: &Weights<'_>, layers: usize) -> Result<(), ModelError> {
    if config.is_gguf() {
        return Ok(());
    }
    let flag = |key: &'static str| Ok::<_, ModelError>((key, config.flag(key, false)?));
    let flags = [flag("attention_bias")?, flag("mlp_bias")?];
    for name in weights.names().filter(|name| !super::is_extra(name, layers)) {
        let promised = flags.iter().find(|(key, _)| is_about(key, name));
        if let (Some(module), Some((_, true))) = (name.strip_suffix(".weight"), promised) {
            let bias = format!("{module}.bias");
            if !weights.has(&bias, "") {
                return Err(ModelError::missing_tensor(config.path(), &bias, weights.names()));
            }
        }
        if name.ends_with(".bias") && !matches!(promised, Some((_, true))) {
            let (key, got) = promised
                .map_or(("this architecture's configuration", "without it"), |(key, _)| (*key, "false"));
            return Err(config.refuse(key, got, &format!("there is a tensor {}", lowbit_files::shown(name))));
        }
    }
    Ok(())
}

/// Whether `key` is about the tensor `name`.
fn is_about(key: &str, name: &str) -> bool {
    let Some((module, _)) = name.rsplit_once('.') else { return false };
    let Some((parent, projection)) = module.rsplit_once('.') else { return false };
    match key {
        "attention_bias" => parent.ends_with(".self_attn") && ATTENTION.contains(&projection),
        _ => parent.ends_with(".mlp") && MLP.contains(&projection),
    }
}
