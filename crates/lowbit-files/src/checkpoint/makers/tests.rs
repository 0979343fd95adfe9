use std::path::Path;

use lowbit_formats::{FloatType, Format, Parts};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{Checkpoint, Layout, Stored};

/// The peers' weights: see tools/peer_vectors/makers.py.
struct Cases {
    described: Value,
    parts: Vec<u8>,
}

impl Cases {
    fn open() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/makers");
        let described = std::fs::read(folder.join("makers.json")).unwrap();
        let described = serde_json::from_slice(&described).unwrap();
        Self { described, parts: std::fs::read(folder.join("makers.safetensors")).unwrap() }
    }

    /// A checkpoint whose module `m` is the case's, without `left_out`, after `change` of its
    /// configuration.
    fn checkpoint(
        &self,
        case: &str,
        left_out: &str,
        change: impl FnOnce(&mut Value),
    ) -> Result<Checkpoint, String> {
        let file = SafeTensors::deserialize(&self.parts).unwrap();
        let of_case = |name: &str| Some(name.strip_prefix(case)?.strip_prefix('/')?.to_string());
        let parts = file.iter().filter_map(|(name, view)| Some((of_case(name)?, view)));
        // gpt-oss' parts have no dot before them.
        let name =
            |part: String| if part.starts_with('_') { format!("m{part}") } else { format!("m.{part}") };
        let parts = parts.filter(|(part, _)| part != left_out).map(|(part, view)| (name(part), view));
        let mut settings = self.described[case]["config"].clone();
        change(&mut settings);
        written(parts, &settings)
    }
}

/// A checkpoint of these tensors and settings.
fn written<'a>(
    parts: impl Iterator<Item = (String, TensorView<'a>)>,
    settings: &Value,
) -> Result<Checkpoint, String> {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({ "model_type": "llama", "quantization_config": settings }).to_string();
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let bytes = safetensors::serialize(parts, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    Checkpoint::open(folder.path()).map_err(|error| error.to_string())
}

/// The values of module `m`, and its format.
fn values(checkpoint: &Checkpoint) -> (Format, Vec<f32>) {
    let view =
        |part: &str| checkpoint.tensors().get(&format!("m.{part}")).unwrap_or_else(|| panic!("no {part}"));
    if checkpoint.expanded() == 1 {
        let (view, float) = (view("weight"), FloatType::F32);
        assert_eq!(
            (view.stored, checkpoint.quantization("m").unwrap()),
            (Stored::Plain(float.dtype()), None)
        );
        let bytes = view.bytes.get();
        return (Format::Float(float), (0..view.elements()).map(|i| float.get(&bytes, i)).collect());
    }
    let Stored::Plain(dtype) = view("scales").stored else { panic!("blocks") };
    let format = checkpoint.quantization("m").unwrap().unwrap().format(dtype).unwrap();
    let (groups, rows) = view("scales").shape.split_last().unwrap();
    let k = groups * format.block();
    let components = format.components(k).unwrap();
    let mut bytes = vec![];
    for component in &components {
        let view = view(component.name);
        let (dtype, columns) = (Stored::Plain(component.dtype), Some(&component.columns));
        assert_eq!((view.stored, view.shape.last()), (dtype, columns), "{}", view.name);
        assert_eq!(view.bytes.len(), view.bytes.get().len(), "{}", view.name);
        bytes.push(view.bytes.get());
    }
    let parts: Parts<'_> = std::array::from_fn(|i| bytes.get(i).map_or(&[][..], |bytes| bytes));
    let n = rows.iter().product();
    let mut values = vec![0.0; n * k];
    format.decode(&parts, n, k, &mut values).unwrap();
    (format, values)
}

#[test]
fn values_are_those_of_the_makers_own_code() {
    let cases = Cases::open();
    let formats = [
        ("ct_w4a16", "affine4g128", FloatType::BF16),
        ("ct_w4g32_f16", "affine4g32", FloatType::F16),
        ("ct_w4a16_asym", "affine4g64", FloatType::F32),
        ("ct_w8a16_channel", "affine8g128", FloatType::F16),
        ("ct_w3g32", "affine3g32", FloatType::F32),
        ("ct_w8a8", "affine8g128", FloatType::BF16),
        ("gptq_4", "affine4g128", FloatType::F32),
        ("gptq_4_sym", "affine4g64", FloatType::F16),
        ("gptq_8", "affine8g128", FloatType::F32),
        ("gptq_3", "affine3g32", FloatType::F32),
        ("gptq_2", "affine2g64", FloatType::F32),
        ("gptq_v2", "affine4g128", FloatType::F32),
        ("auto_round_auto_gptq", "affine4g128", FloatType::F32),
        ("auto_round", "affine4g128", FloatType::F32),
        ("awq", "affine4g64", FloatType::F32),
        ("auto_round_auto_awq", "affine4g64", FloatType::F32),
        ("ct_mxfp4", "mxfp4", FloatType::F32),
        ("ct_mxfp8", "mxfp8", FloatType::F32),
        ("gpt_oss", "mxfp4", FloatType::F32),
        ("fp8_blocks", "fp8g32", FloatType::F32),
        ("ct_fp8_channel", "fp8g128", FloatType::F32),
        ("ct_fp8_tensor", "fp8g128", FloatType::F32),
        ("ct_fp8_blocks", "fp8g32", FloatType::F32),
        ("modelopt_fp8", "fp8g128", FloatType::F32),
        ("ct_nvfp4", "fp4g16", FloatType::F32),
        ("modelopt_nvfp4", "fp4g16", FloatType::F32),
    ];
    assert_eq!(formats.len(), cases.described.as_object().unwrap().len());
    for (case, name, scales) in formats {
        let checkpoint = cases.checkpoint(case, "", |_| {}).unwrap();
        assert_eq!(checkpoint.layout(), Layout::HuggingFace, "{case}");
        let (format, values) = values(&checkpoint);
        assert_eq!(format, name.parse::<Format>().unwrap().with_float(scales), "{case}");
        let bytes: Vec<u8> = values.iter().flat_map(|value| (value + 0.0).to_le_bytes()).collect();
        let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, cases.described[case]["want"], "{case}");
        let names: Vec<_> = checkpoint.tensors().names().collect();
        assert!(names.iter().all(|name| ["m.biases", "m.scales", "m.weight"].contains(name)), "{names:?}");
        let activations = ["ct_nvfp4", "modelopt_fp8", "modelopt_nvfp4"].contains(&case);
        assert_eq!(checkpoint.without_effect().len(), usize::from(activations), "{case}");
        assert_eq!(checkpoint.surplus_quantization(), [""; 0]);
    }
}

#[test]
fn packed_codes_stay_in_the_map() {
    let checkpoint = Cases::open().checkpoint("ct_w4a16", "", |_| {}).unwrap();
    let [one, other] = [0, 1].map(|_| checkpoint.tensors().get("m.weight").unwrap().bytes.get().as_ptr());
    let release = |name: &str| checkpoint.tensors().get(name).unwrap().release();
    release("m.weight");
    assert_eq!((one, other), (checkpoint.tensors().get("m.weight").unwrap().bytes.get().as_ptr(), one));
    assert_eq!(checkpoint.method(), Some("compressed-tensors"));
}

#[test]
fn what_cannot_be_computed_is_named() {
    let cases = Cases::open();
    let set = |path: &'static str, value: Value| {
        move |settings: &mut Value| *settings.pointer_mut(path).unwrap() = value.clone()
    };
    let add = |key: &'static str, value: Value| move |settings: &mut Value| settings[key] = value.clone();
    let refused = |case, change: &dyn Fn(&mut Value)| cases.checkpoint(case, "", change).unwrap_err();
    for (case, change, want) in [
        (
            "ct_w4a16",
            &set("/kv_cache_scheme", json!({"num_bits": 8, "type": "float"})) as &dyn Fn(&mut Value),
            "compressed-tensors with kv_cache_scheme (quantised keys and values; set it to null in config.json",
        ),
        (
            "ct_w4a16",
            &add("transform_config", json!({"config_groups": {"R1": {}}})),
            "with transform_config quant",
        ),
        ("ct_w4a16", &add("sparsity_config", json!({"format": "sparse-24-bitmask"})), "with sparsity_config"),
        (
            "ct_w4a16",
            &set("/format", json!("marlin-24")),
            "compressed-tensors with format marlin-24 quantization",
        ),
        (
            "ct_w4a16",
            &set("/config_groups/group_0/weights/num_bits", json!(8)),
            "m.weight_packed is i32 [32, 16], but no group of the configuration has integers of 4 bits without zero",
        ),
        ("gptq_4", &add("checkpoint_format", json!("marlin")), "GPTQ with checkpoint_format marlin"),
        (
            "gptq_4",
            &set("/bits", json!(8)),
            "m.qzeros is i32 [1, 4], but that is 4 bits, and the configuration says 8",
        ),
        ("awq", &set("/version", json!("gemv")), "AWQ with version gemv quantization is not supported"),
        (
            "auto_round",
            &set("/packing_format", json!("auto_round:fp8")),
            "with packing_format auto_round:fp8",
        ),
        (
            "modelopt_nvfp4",
            &add("kv_cache_scheme", json!({"num_bits": 8, "type": "float"})),
            "ModelOpt with kv_cache_scheme (quantised keys and values",
        ),
        ("modelopt_fp8", &set("/quant_algo", json!("W4A8_AWQ")), "ModelOpt with quant_algo W4A8_AWQ"),
        ("auto_round", &add("rotation_config", json!({})), "AutoRound with rotation_config"),
    ] {
        let message = refused(case, change);
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
    for (case, part, want) in [
        (
            "ct_w4a16",
            "weight_scale",
            "tensor m.weight_scale is missing, but m is quantised by compressed-tensors",
        ),
        ("ct_w4a16_asym", "weight_zero_point", "integers of 4 bits without zero points"),
        ("gptq_4", "qzeros", "tensor m.qzeros is missing, but m is quantised by GPTQ and needs it"),
        ("awq", "scales", "tensor m.scales is missing"),
    ] {
        let message = cases.checkpoint(case, part, |_| {}).unwrap_err();
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
}

/// The case's parts with one of them changed.
fn with_part(
    case: &str,
    part: &str,
    dtype: safetensors::Dtype,
    shape: &[usize],
    bytes: &[u8],
) -> Result<Checkpoint, String> {
    let cases = Cases::open();
    let file = SafeTensors::deserialize(&cases.parts).unwrap();
    let changed = TensorView::new(dtype, shape.to_vec(), bytes).unwrap();
    let own =
        file.iter().filter_map(|(name, view)| Some((name.strip_prefix(case)?.strip_prefix('/')?, view)));
    let others = own.filter(|(name, _)| *name != part).map(|(name, view)| (format!("m.{name}"), view));
    let parts: Vec<_> = others.chain([(format!("m.{part}"), changed)]).collect();
    written(parts.into_iter(), &cases.described[case]["config"])
}

#[test]
fn only_the_usual_order_of_groups_is_read() {
    let order = |of: &dyn Fn(i32) -> i32| -> Vec<u8> { (0..128).flat_map(|i| of(i).to_le_bytes()).collect() };
    let with = |case, part, of: &dyn Fn(i32) -> i32| {
        with_part(case, part, safetensors::Dtype::I32, &[128], &order(of))
    };
    let message = with("gptq_3", "g_idx", &|i| (i / 32 + 1) % 4).unwrap_err();
    assert!(
        message.contains("GPTQ with act-order (m.g_idx puts values into groups out of order)"),
        "{message}"
    );
    with("ct_w4g32_f16", "weight_g_idx", &|i| i / 32).unwrap();
    with("ct_w4g32_f16", "weight_g_idx", &|_| -1).unwrap();
    let message = with("ct_w4g32_f16", "weight_g_idx", &|i| i % 4).unwrap_err();
    assert!(message.contains("compressed-tensors with act-order (m.weight_g_idx"), "{message}");
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    use safetensors::Dtype::{F8_E4M3, F16, I8, I32, I64};
    let zeros = [0; 1 << 16];
    for (case, part, dtype, shape, want) in [
        (
            "ct_w4a16",
            "weight_shape",
            I64,
            &[2][..],
            "m.weight_shape is i64 [2], but the weight's sizes are wanted",
        ),
        (
            "ct_w4a16",
            "weight_packed",
            I64,
            &[32, 16],
            "m.weight_packed is i64 [32, 16], but i32 with whole words",
        ),
        (
            "ct_w4a16",
            "weight_packed",
            I32,
            &[32, 15],
            "but i32 with whole words for rows of 128 values is wanted",
        ),
        (
            "ct_w4a16",
            "weight_scale",
            F16,
            &[31, 1],
            "m.weight_scale is f16 [31, 1], but scales of rows [32] are",
        ),
        ("ct_w4a16", "weight_scale", I8, &[32, 1], "scales are f32, f16 or bf16"),
        ("ct_w4a16", "weight_scale", F16, &[32, 3], "4 bits and 3 groups of rows of 128 values (m)"),
        (
            "ct_w4a16_asym",
            "weight_zero_point",
            I32,
            &[4, 1],
            "m.weight_zero_point is i32 [4, 1], but i32 [4, 2] is",
        ),
        ("ct_w8a8", "weight_scale", F16, &[3, 3], "but scales of rows [32] are wanted"),
        ("gptq_4", "qweight", I32, &[5, 32], "but zero points of 32 columns in 2, 3, 4 or 8 bits are wanted"),
        ("gptq_4", "qweight", I32, &[0, 32], "m.qweight is i32 [0, 32], but a matrix of i32 is wanted"),
        ("gptq_4", "qzeros", I32, &[1, 3], "but zero points of 32 columns in 2, 3, 4 or 8 bits are wanted"),
        (
            "gptq_4",
            "scales",
            F16,
            &[1, 31],
            "m.scales is f16 [1, 31], but [1, 32] is wanted, as m.qweight and",
        ),
        ("gptq_2", "qweight", I32, &[6, 32], "2 bits and 2 groups of rows of 96 values (m)"),
        ("ct_mxfp4", "weight_scale", I8, &[32, 4], "m.weight_scale is i8 [32, 4], but u8 [32, 4] is wanted"),
        (
            "fp8_blocks",
            "weight_scale_inv",
            F16,
            &[3, 2],
            "m.weight_scale_inv is f16 [3, 2], but scales of 32 x 128 values in blocks of 16 x 64 are wanted",
        ),
        ("ct_fp8_channel", "weight_scale", F16, &[31, 1], "but scales of 32 x 128 values are wanted"),
        ("ct_fp8_channel", "weight_scale", F16, &[32, 7], "but scales of 32 x 128 values are wanted"),
        (
            "ct_nvfp4",
            "weight_global_scale",
            F16,
            &[1],
            "m.weight_global_scale is f16 [1], but its value is 0",
        ),
        ("ct_nvfp4", "weight_global_scale", F16, &[2], "but one number is wanted"),
        (
            "modelopt_nvfp4",
            "weight_scale",
            F8_E4M3,
            &[32, 7],
            "m.weight_scale is f8e4m3 [32, 7], but f8e4m3 [32, 8]",
        ),
        ("ct_mxfp8", "weight_scale", I8, &[32, 4], "m.weight_scale is i8 [32, 4], but scales are"),
        ("awq", "qzeros", I32, &[1, 4], "m.qzeros is i32 [1, 4], but [2, 4] is wanted, as m.scales says"),
        (
            "awq",
            "qweight",
            I32,
            &[128, 3],
            "m.qweight is i32 [128, 3], but [K, 32 / 8] is wanted, as m.scales says",
        ),
        ("awq", "scales", F16, &[32], "m.scales is f16 [32], but a matrix is wanted"),
    ] {
        let size = match dtype {
            I8 | F8_E4M3 => 1,
            F16 => 2,
            I32 => 4,
            _ => 8,
        };
        let bytes = &zeros[..shape.iter().product::<usize>() * size];
        let message = with_part(case, part, dtype, shape, bytes).unwrap_err();
        assert!(message.contains(want), "{case} {part}: {message}\nshould say: {want}");
    }
}

/// `quantization_config` of published models, as their config.json has them (July 2024 to 2026),
/// with tensors of that kind.
#[test]
fn published_configurations_are_read() {
    let cases = Cases::open();
    let published = [
        // Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4
        (
            "gptq_4_sym",
            json!({
                "batch_size": 1, "bits": 4, "block_name_to_quantize": null, "cache_block_outputs": true,
                "damp_percent": 0.01, "dataset": null, "desc_act": false, "exllama_config": {"version": 1},
                "group_size": 128, "max_input_length": null, "model_seqlen": null, "pad_token_id": null,
                "modules_in_block_to_quantize": null, "quant_method": "gptq", "sym": true, "tokenizer": null,
                "true_sequential": true, "use_cuda_fp16": false, "use_exllama": true
            }),
        ),
        // Of GPTQModel.
        (
            "gptq_4",
            json!({
                "bits": 8, "checkpoint_format": "gptq", "desc_act": false, "group_size": 128, "lm_head": false,
                "dynamic": {"+:.*down_proj": {"bits": 4}}, "pack_dtype": "int32", "quant_method": "gptq",
                "meta": {"quantizer": ["gptqmodel:2.1.0"], "static_groups": false}, "sym": false
            }),
        ),
        // Qwen/Qwen2.5-7B-Instruct-AWQ and Qwen/Qwen3-32B-AWQ
        (
            "awq",
            json!({
                "bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq",
                "version": "gemm", "zero_point": true
            }),
        ),
        (
            "awq",
            json!({
                "backend": "autoawq", "bits": 4, "do_fuse": false, "exllama_config": null,
                "fuse_max_seq_len": null, "group_size": 128, "modules_to_fuse": null,
                "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm", "zero_point": true
            }),
        ),
        // Intel's, of AutoRound.
        (
            "auto_round_auto_gptq",
            json!({
                "amp": true, "autoround_version": "0.5.1", "bits": 4, "data_type": "int", "group_size": 128,
                "iters": 200, "low_gpu_mem_usage": true, "packing_format": "auto_round:auto_gptq",
                "quant_method": "auto-round", "sym": false
            }),
        ),
        // RedHatAI/Qwen2.5-7B-Instruct-quantized.w4a16
        (
            "ct_w4a16",
            json!({
                "config_groups": {"group_0": {
                    "input_activations": null, "output_activations": null, "targets": ["Linear"],
                    "weights": {
                        "actorder": "weight", "block_structure": null, "dynamic": false, "group_size": 128,
                        "num_bits": 4, "observer": "mse", "observer_kwargs": {}, "strategy": "group",
                        "symmetric": true, "type": "int"
                    }
                }},
                "format": "pack-quantized", "global_compression_ratio": 1.89, "ignore": ["lm_head"],
                "kv_cache_scheme": null, "quant_method": "compressed-tensors",
                "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}
            }),
        ),
        // RedHatAI/Qwen3-8B-FP8-dynamic
        (
            "ct_fp8_channel",
            json!({
                "config_groups": {"group_0": {
                    "input_activations": {"dynamic": true, "num_bits": 8, "strategy": "token", "type": "float"},
                    "targets": ["Linear"],
                    "weights": {
                        "dynamic": false, "num_bits": 8, "strategy": "channel", "symmetric": true,
                        "type": "float"
                    }
                }},
                "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": null,
                "quant_method": "compressed-tensors", "quantization_status": "compressed"
            }),
        ),
        // Qwen/Qwen3-8B-FP8, whose blocks are of 128 x 128: one of these, with a scale of its own.
        (
            "fp8_blocks",
            json!({
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
                "weight_block_size": [16, 64]
            }),
        ),
        // nvidia/Qwen3-8B-NVFP4, but for its cache in FP8.
        (
            "modelopt_nvfp4",
            json!({
                "config_groups": {"group_0": {
                    "input_activations": {"dynamic": false, "group_size": 16, "num_bits": 4, "type": "float"},
                    "targets": ["Linear"],
                    "weights": {"dynamic": false, "group_size": 16, "num_bits": 4, "type": "float"}
                }},
                "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.29.0"},
                "quant_algo": "NVFP4", "quant_method": "modelopt"
            }),
        ),
        // openai/gpt-oss-20b
        (
            "gpt_oss",
            json!({
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
                ],
                "quant_method": "mxfp4"
            }),
        ),
    ];
    for (case, settings) in published {
        let own = values(&cases.checkpoint(case, "", |_| {}).unwrap());
        let got = values(&cases.checkpoint(case, "", |own| *own = settings.clone()).unwrap());
        assert_eq!(own.0, got.0, "{case}");
        let same = own.1.iter().zip(&got.1).all(|(own, got)| own.to_bits() == got.to_bits());
        assert!(same, "{case}");
    }
    // A file of its own beside config.json, as ModelOpt wrote it first.
    let refused = |settings: Value| written(std::iter::empty(), &settings).unwrap_err();
    for (settings, want) in [
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}),
            "bitsandbytes",
        ),
        (json!({"quant_method": "exl3", "version": "0.0.1", "bits": 4.0, "head_bits": 6}), "EXL3"),
        (json!({"quant_method": "hqq"}), "HQQ"),
    ] {
        let message = refused(settings);
        let names = message.contains(&format!("{want} quantization is not supported"));
        assert!(names && message.contains("`lowbit quantize`"), "{message}");
    }
}
