//! NVFP4 with a float per matrix, in MLX's tensors and in GGUF's; see
//! tools/peer_vectors/formats.py.

use std::path::Path;

use ::safetensors::SafeTensors;
use lowbit_formats::{DType, E4M3, Format, Minifloat, Parts};
use serde_json::json;

use crate::gguf::{Value, Writer};
use crate::{Checkpoint, Layout, Stored, safetensors};

/// The bytes of one of the vectors.
fn bytes_of(name: &str) -> Vec<u8> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/formats/global_scale.safetensors");
    let file = std::fs::read(path).unwrap();
    SafeTensors::deserialize(&file).unwrap().tensor(name).unwrap().data().to_vec()
}

fn f32s(name: &str) -> Vec<f32> {
    bytes_of(name).as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[track_caller]
fn assert_bits(got: &[f32], want: &[f32]) {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(want));
}

/// The values of a weight `[3, 5, 128]` in `format`.
fn decoded(format: Format, components: &[bytes::Bytes]) -> Vec<f32> {
    let parts: Parts<'_> = std::array::from_fn(|i| components.get(i).map_or(&[][..], |bytes| bytes));
    let mut values = vec![0.0; 3 * 5 * 128];
    format.decode(&parts, 15, 128, &mut values).unwrap();
    values
}

/// MLX's checkpoint of the vectors, with these numbers per matrix.
fn mlx(folder: &Path, global: &[f32], settings: serde_json::Value) -> Result<Checkpoint, String> {
    let config = json!({ "model_type": "qwen3_moe", "quantization": settings });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let module = "mlp.switch_mlp.up_proj";
    let global: Vec<u8> = global.iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensors = [
        ("weight", DType::U32, vec![3, 5, 16], bytes_of("weight")),
        ("scales", DType::U8, vec![3, 5, 8], bytes_of("scales")),
        ("global_scale", DType::F32, vec![global.len() / 4], global),
    ];
    let mut writer = safetensors::Writer::new();
    writer.metadata("format", "mlx");
    let tensors: Vec<_> = tensors.iter().filter(|(.., bytes)| !bytes.is_empty()).collect();
    for (part, dtype, shape, _) in &tensors {
        writer.tensor(&format!("{module}.{part}"), *dtype, shape).unwrap();
    }
    let mut body = writer.begin(folder, 1 << 30).unwrap();
    tensors.iter().for_each(|(.., bytes)| body.tensor(bytes).unwrap());
    body.finish().unwrap();
    Checkpoint::open(folder).map_err(|error| error.to_string())
}

fn nvfp4(module: serde_json::Value) -> serde_json::Value {
    json!({ "mode": "nvfp4", "bits": 4, "group_size": 16, "mlp.switch_mlp.up_proj": module })
}

#[test]
fn mlx_experts_are_times_their_global_scale() {
    let folder = tempfile::tempdir().unwrap();
    let settings = nvfp4(json!({ "mode": "nvfp4", "bits": 4, "group_size": 16, "global_scale": true }));
    let checkpoint = mlx(folder.path(), &f32s("global_scale"), settings).unwrap();
    let names: Vec<_> = checkpoint.tensors().names().collect();
    assert_eq!(names, ["mlp.switch_mlp.up_proj.scales", "mlp.switch_mlp.up_proj.weight"]);
    let quantization = checkpoint.quantization("mlp.switch_mlp.up_proj").unwrap().unwrap();
    assert_eq!(quantization.format(DType::F32), Ok(Format::Fp4));
    let bytes =
        |part: &str| checkpoint.tensors().get(&format!("mlp.switch_mlp.up_proj.{part}")).unwrap().bytes.get();
    let values = decoded(Format::Fp4, &[bytes("weight"), bytes("scales")]);
    assert_bits(&values, &f32s("decoded"));
}

#[test]
fn global_scales_of_other_sizes_and_modes_are_refused() {
    let message =
        |global: &[f32], settings| mlx(tempfile::tempdir().unwrap().path(), global, settings).unwrap_err();
    let module = json!({ "mode": "nvfp4", "bits": 4, "group_size": 16, "global_scale": true });
    for (global, settings, want) in [
        (&[1.0, 2.0][..], nvfp4(module.clone()), "f32 [2], but a number for each of 3 matrices is wanted"),
        (&[1.0, 2.0, f32::NAN], nvfp4(module.clone()), "f32 [3], but one of its values is NaN"),
        (
            &[1.0, 2.0, 3.0],
            json!({ "mode": "mxfp4", "bits": 4, "group_size": 32 }),
            "f32 [3], but only weights in nvfp4 have one",
        ),
        (&[], nvfp4(module), "u8 [3, 5, 8], but config.json says that there is a .global_scale beside it"),
    ] {
        let message = message(global, settings);
        assert!(message.ends_with(want), "{message}\nshould say: {want}");
    }
}

/// A GGUF file of the vectors' weight in NVFP4, and of f32 tensors beside it.
fn gguf(folder: &Path, architecture: &str, beside: &[(&str, &[f32])]) -> Result<Checkpoint, String> {
    let mut writer = Writer::new();
    writer.entry("general.architecture", Value::String(architecture.into())).unwrap();
    writer.tensor("blk.0.ffn_down_exps.weight", Stored::Blocks(Format::NVFP4), &[3, 5, 128]).unwrap();
    for (name, values) in beside {
        writer.tensor(name, Stored::Plain(DType::F32), &[values.len()]).unwrap();
    }
    let path = folder.join("model.gguf");
    let mut body = writer.begin(std::fs::File::create(&path).unwrap()).unwrap();
    body.tensor(&bytes_of("blocks")).unwrap();
    for (_, values) in beside {
        body.tensor(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    }
    body.finish().unwrap();
    Checkpoint::open(&path).map_err(|error| error.to_string())
}

const SCALE: &str = "blk.0.ffn_down_exps.scale";
const INPUT_SCALE: &str = "blk.0.ffn_down_exps.input_scale";

/// The format of a file's weight, and its values.
fn weight(checkpoint: &Checkpoint) -> (Format, Vec<f32>) {
    let view = checkpoint.tensors().get("blk.0.ffn_down_exps.weight").unwrap();
    let Stored::Blocks(format) = view.stored else { panic!("{}", view.stored) };
    let components: Vec<_> = view.components(format).unwrap().iter().map(|part| part.get()).collect();
    assert_eq!((view.shape.as_slice(), checkpoint.layout()), (&[3, 5, 128][..], Layout::Gguf));
    (format, decoded(format, &components))
}

#[test]
fn gguf_weights_are_times_their_scale() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = f32s("blocks.decoded");
    let (factors, ones) = ([0.75, 3e-3, -20.0], [1.0; 3]);
    // Half of the values are 0, whose signs GGML's blocks do not have.
    let same = |got: &[f32], want: &[f32]| {
        let [got, want] = [got, want].map(|values| values.iter().map(|x| x + 0.0).collect::<Vec<_>>());
        assert_bits(&got, &want);
    };
    let alone = gguf(folder.path(), "qwen3moe", &[]).unwrap();
    let (format, values) = weight(&alone);
    assert_eq!((format, alone.without_effect().len()), (Format::NVFP4, 0));
    same(&values, &blocks);

    let by_ones = gguf(folder.path(), "qwen3moe", &[(SCALE, &ones), (INPUT_SCALE, &factors)]).unwrap();
    let (format, values) = weight(&by_ones);
    assert_eq!(
        (format, by_ones.tensors().len(), by_ones.without_effect()),
        (Format::NVFP4, 1, &["input_scale".to_string()][..])
    );
    same(&values, &blocks);

    let scaled = gguf(folder.path(), "qwen3moe", &[(SCALE, &factors)]).unwrap();
    let (format, values) = weight(&scaled);
    assert_eq!((format, scaled.tensors().len()), (Format::Fp4, 1));
    // The scale of a group times its matrix' number is rounded, and then a code's value times it.
    let scales = bytes_of("scales");
    let want = blocks.iter().enumerate().map(|(i, &value)| {
        let scale = E4M3::decode(scales[i / 16]);
        value / scale * (scale * factors[i / (5 * 128)])
    });
    same(&values, &want.map(|x| if x.is_nan() { 0.0 } else { x }).collect::<Vec<_>>());

    // Gemma 4 multiplies its experts by such a tensor whatever their format.
    let own = gguf(folder.path(), "gemma4", &[(SCALE, &factors)]).unwrap();
    assert_eq!((weight(&own).0, own.tensors().len()), (Format::NVFP4, 2));
}

#[test]
fn gguf_scales_that_do_not_fit_are_refused() {
    let message = |values: &[f32]| {
        gguf(tempfile::tempdir().unwrap().path(), "qwen3moe", &[(SCALE, values)]).unwrap_err()
    };
    for (values, want) in [
        (&[1.0, 2.0][..], "f32 [2], but a number for each of 3 matrices is wanted"),
        (&[1.0, 0.0, 2.0], "f32 [3], but one of its values is 0"),
        (&[1.0, f32::INFINITY, 2.0], "f32 [3], but one of its values is inf"),
    ] {
        let message = message(values);
        assert!(message.ends_with(&format!("{SCALE} is {want}")), "{message}\nshould say: {want}");
    }
}
