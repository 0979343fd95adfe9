//! NVIDIA's ModelOpt: FP8 with a scale per matrix, and NVFP4. Its settings stand in config.json, or
//! beside it in hf_quant_config.json below `quantization`.

use serde_json::Value;

use super::nvfp4::{self, Global};
use super::{Adapter, fp8};
use crate::{FileError, Stored};
use lowbit_formats::DType;

pub(super) fn read(adapter: &mut Adapter<'_>) -> Result<(), FileError> {
    let beside = adapter.settings.get("quantization").filter(|value| value.is_object());
    let text = |key: &str| beside.unwrap_or(adapter.settings).get(key).and_then(Value::as_str);
    let algorithm = text("quant_algo").unwrap_or("none").to_uppercase();
    if !["FP8", "NVFP4", "FP8_PB_WO", "MIXED_PRECISION"].contains(&&algorithm[..]) {
        return Err(adapter.unsupported(format!("quant_algo {}", crate::shown(&algorithm))));
    }
    if let Some(cache) = text("kv_cache_quant_algo").filter(|cache| !cache.eq_ignore_ascii_case("none")) {
        return Err(adapter.unsupported(format!(
            "kv_cache_quant_algo {} (quantised keys and values; set it to null to have them in f16)",
            crate::shown(cache)
        )));
    }
    adapter.refuse_cache_scheme("kv_cache_scheme")?;
    for module in adapter.modules_with(".weight_scale_2") {
        let codes = adapter.tensors.get(&format!("{module}.weight"));
        if codes.is_some_and(|codes| codes.stored == Stored::Plain(DType::U8)) {
            let parts = [
                adapter.need(module, "weight")?,
                adapter.need(module, "weight_scale")?,
                adapter.need(module, "weight_scale_2")?,
            ];
            nvfp4::read_module(adapter, module, parts, Global::Multiplies)?;
            adapter.drop_without_effect(module, "input_scale");
        }
    }
    for module in adapter.modules_with(".weight") {
        fp8::read_if_e4m3(adapter, module)?;
    }
    Ok(())
}
