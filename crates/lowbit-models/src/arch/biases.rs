//! The linear layers that have biases.

use super::Architecture;
use crate::{Config, ModelError, Weights};

/// Modules of a layer, and what says whether they have biases.
#[derive(Clone, Copy, Debug)]
pub struct Biases {
    /// The source of the promise.
    pub promise: Promise,
    /// The modules, as the layers here call them.
    pub modules: &'static [&'static str],
}

/// The source that says whether there is a bias.
#[derive(Clone, Copy, Debug)]
pub enum Promise {
    /// A flag of `config.json`; where it is missing, its default in the architecture's table, or
    /// false.
    Flag(&'static str),
    /// The architecture: there always is one.
    Always,
}

/// The flags of most architectures.
pub const BY_FLAGS: &[Biases] = &[
    Biases {
        promise: Promise::Flag("attention_bias"),
        modules: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
    },
    Biases { promise: Promise::Flag("mlp_bias"), modules: MLP },
];

/// Queries, keys and values.
pub const QKV: &[&str] = &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];

/// The MLP.
pub const MLP: &[&str] = &["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

/// Checks that the file has exactly the biases that are promised: transformers replaces missing
/// ones by zeros and drops surplus ones, mlx-lm refuses to load either. GGUF promises nothing.
///
/// # Errors
/// [`ModelError::Missing`], or [`ModelError::Config`] for a bias that contradicts its flag or that
/// the architecture does not have.
pub(super) fn check(
    config: &Config<'_>,
    weights: &Weights<'_>,
    architecture: &Architecture,
    layers: usize,
) -> Result<(), ModelError> {
    if config.is_gguf() {
        return Ok(());
    }
    let promised = |biases: &Biases| match biases.promise {
        Promise::Flag(key) => config.flag(key, false),
        Promise::Always => Ok(true),
    };
    let promised = architecture.biases.iter().map(promised).collect::<Result<Vec<_>, _>>()?;
    for name in weights.names().filter(|name| !architecture.is_extra(name, layers)) {
        let mut groups = architecture.biases.iter().zip(&promised);
        let group = groups.find(|(group, _)| {
            group
                .modules
                .iter()
                .any(|module| is_of(name, &architecture.stored_name(module, weights.layout())))
        });
        if let (Some(module), Some((_, true))) = (name.strip_suffix(".weight"), group) {
            let bias = format!("{module}.bias");
            if !weights.has(&bias, "") {
                return Err(ModelError::missing_tensor(config.path(), &bias, weights.names()));
            }
        }
        if name.ends_with(".bias") && !matches!(group, Some((_, true))) {
            let (key, got) = match group {
                Some((Biases { promise: Promise::Flag(key), .. }, _)) => (*key, "false"),
                _ => ("this architecture's configuration", "without it"),
            };
            return Err(config.refuse(key, got, &format!("there is a tensor {}", lowbit_files::shown(name))));
        }
    }
    Ok(())
}

/// True if `name` is a parameter of `module`, as the checkpoint calls it, in some layer.
fn is_of(name: &str, module: &str) -> bool {
    let Some((found, _)) = name.rsplit_once('.') else { return false };
    found.strip_suffix(module).is_some_and(|before| before.ends_with('.'))
}
