//! The code that GPTQ and AWQ share: scales by columns, bits that the configuration says, biases of
//! zeros.

use lowbit_formats::FloatType;
use serde_json::Value;

use super::Adapter;
use crate::{FileError, TensorView};

/// The scale of a row and a group, of scales `[groups, N]`.
pub(super) fn by_columns(
    view: &TensorView,
    float: FloatType,
    n: usize,
) -> impl Fn(usize, usize) -> f32 + Clone + Send + Sync + 'static {
    let bytes = view.bytes.get();
    move |row, group| float.get(&bytes, group * n + row)
}

/// Refuses other bits than the configuration says, unless it says others for some modules.
pub(super) fn said(adapter: &Adapter<'_>, view: &TensorView, bits: usize) -> Result<(), FileError> {
    let by_module = ["dynamic", "extra_config"]
        .iter()
        .any(|key| adapter.settings.get(key).and_then(Value::as_object).is_some_and(|map| !map.is_empty()));
    match adapter.number("bits")? {
        Some(said) if said != bits as i64 && !by_module => {
            Err(adapter.misfit(view, format!("that is {bits} bits, and the configuration says {said}")))
        }
        _ => Ok(()),
    }
}

/// Drops a bias of zeros, which AutoGPTQ writes for layers that have none.
pub(super) fn drop_zero_bias(adapter: &mut Adapter<'_>, module: &str) {
    let is_true = |key: &str| adapter.config.get(key).and_then(Value::as_bool) == Some(true);
    let promised = is_true("attention_bias") || is_true("mlp_bias");
    let kind = adapter.config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let in_qwen2 =
        kind.starts_with("qwen2") && ["q_proj", "k_proj", "v_proj"].iter().any(|end| module.ends_with(end));
    let is_zero = |view: &TensorView| view.bytes.get().iter().all(|&byte| byte == 0);
    if !promised && !in_qwen2 && adapter.tensors.get(&format!("{module}.bias")).is_some_and(is_zero) {
        adapter.take(module, "bias");
    }
}
