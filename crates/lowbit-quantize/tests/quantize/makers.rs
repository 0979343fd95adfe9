//! Checkpoints that other tools quantised: the tiny ones, packed as these tools pack.

use half::f16;
use lowbit_files::{Checkpoint, FileError, Stored, TensorView, safetensors};
use lowbit_formats::{DType, E2M1, E4M3, FloatType, Format, Minifloat};
use lowbit_kernels::Device;
use lowbit_models::{Logits, Model, Target};
use lowbit_quantize::{Mix, MlxFormat, Recipe};
use serde_json::{Value, json};
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const GROUP: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    /// The values themselves.
    Dense,
    CompressedTensors,
    Gptq,
    Awq,
}

/// A part of a module in a file.
type Part = (&'static str, DType, Vec<usize>, Vec<u8>);

/// A matrix in codes of 4 bits, of which 8 stands for 0, and scales in f16.
struct Codes {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<f16>,
}

impl Codes {
    fn new(values: &[f32], n: usize, k: usize) -> Self {
        let (mut codes, mut scales) = (vec![], vec![]);
        for group in values.chunks(GROUP) {
            let greatest = group.iter().fold(0f32, |most, value| most.max(value.abs()));
            let scale = f16::from_f32((greatest / 7.0).max(1e-4));
            codes.extend(
                group.iter().map(|value| ((value / scale.to_f32()).round().clamp(-8.0, 7.0) + 8.0) as u8),
            );
            scales.push(scale);
        }
        Self { n, k, codes, scales }
    }

    fn code(&self, row: usize, column: usize) -> u32 {
        self.codes[row * self.k + column].into()
    }

    fn scale(&self, row: usize, group: usize) -> f16 {
        self.scales[row * (self.k / GROUP) + group]
    }

    /// Words of eight codes.
    fn words(rows: usize, columns: usize, code: impl Fn(usize, usize, usize) -> u32) -> Vec<u8> {
        let word = |row, column| (0..8).fold(0, |word, i| word | code(row, column, i) << (4 * i));
        (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .flat_map(|(row, column)| word(row, column).to_le_bytes())
            .collect()
    }

    fn parts(&self, method: Method) -> Vec<Part> {
        let &Self { n, k, .. } = self;
        let groups = k / GROUP;
        let f16s = |values: Vec<f16>| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let by_rows = || f16s(self.scales.clone());
        let by_columns = || {
            f16s(
                (0..groups)
                    .flat_map(|g| (0..n).map(move |row| (row, g)))
                    .map(|(row, g)| self.scale(row, g))
                    .collect(),
            )
        };
        match method {
            Method::Dense => {
                let value =
                    |(i, &code): (usize, &u8)| (f32::from(code) - 8.0) * self.scales[i / GROUP].to_f32();
                let values = self.codes.iter().enumerate().map(value).flat_map(f32::to_le_bytes).collect();
                vec![("weight", DType::F32, vec![n, k], values)]
            }
            Method::CompressedTensors => vec![
                (
                    "weight_packed",
                    DType::I32,
                    vec![n, k / 8],
                    Self::words(n, k / 8, |row, column, i| self.code(row, 8 * column + i)),
                ),
                ("weight_scale", DType::F16, vec![n, groups], by_rows()),
                (
                    "weight_shape",
                    DType::I64,
                    vec![2],
                    [n as i64, k as i64].iter().flat_map(|n| n.to_le_bytes()).collect(),
                ),
                ("input_scale", DType::F32, vec![1], vec![0; 4]),
            ],
            Method::Gptq => vec![
                (
                    "qweight",
                    DType::I32,
                    vec![k / 8, n],
                    Self::words(k / 8, n, |row, column, i| self.code(column, 8 * row + i)),
                ),
                ("qzeros", DType::I32, vec![groups, n / 8], vec![0x77; groups * n / 2]),
                ("scales", DType::F16, vec![groups, n], by_columns()),
                (
                    "g_idx",
                    DType::I32,
                    vec![k],
                    (0..k).flat_map(|i| ((i / GROUP) as i32).to_le_bytes()).collect(),
                ),
                ("bias", DType::F16, vec![n], vec![0; 2 * n]),
            ],
            Method::Awq => {
                let order = [0, 2, 4, 6, 1, 3, 5, 7];
                let words = Self::words(k, n / 8, |row, column, i| self.code(8 * column + order[i], row));
                vec![
                    ("qweight", DType::I32, vec![k, n / 8], words),
                    ("qzeros", DType::I32, vec![groups, n / 8], vec![0x88; groups * n / 2]),
                    ("scales", DType::F16, vec![groups, n], by_columns()),
                ]
            }
        }
    }
}

fn settings(method: Method) -> Option<Value> {
    let weights =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": true});
    match method {
        Method::Dense => None,
        Method::CompressedTensors => Some(json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
        })),
        Method::Gptq => Some(
            json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": true, "desc_act": false}),
        ),
        Method::Awq => Some(
            json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": true, "version": "gemm"}),
        ),
    }
}

/// The tiny checkpoint `name`, its layers' projections in codes of 4 bits as `method` packs them.
fn packed(name: &str, method: Method) -> TempDir {
    rewritten(name, settings(method), |view| of_view(view, method))
}

/// A module's parts by their full names.
type NamedPart = (String, DType, Vec<usize>, Vec<u8>);

/// The tiny checkpoint `name` with `settings`, and with what `parts` gives in place of a tensor.
fn rewritten(
    name: &str,
    settings: Option<Value>,
    parts: impl Fn(&TensorView) -> Option<Vec<NamedPart>>,
) -> TempDir {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models").join(name);
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
    }
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    if let Some(settings) = settings {
        config["quantization_config"] = settings;
    }
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(&source).unwrap();
    let (mut writer, mut bodies) = (safetensors::Writer::new(), vec![]);
    for view in checkpoint.tensors().iter() {
        let Stored::Plain(dtype) = view.stored else { panic!("{} is in blocks", view.name) };
        for (name, dtype, shape, bytes) in parts(view).unwrap_or_else(|| {
            vec![(view.name.clone(), dtype, view.shape.clone(), view.bytes.get().to_vec())]
        }) {
            writer.tensor(&name, dtype, &shape).unwrap();
            bodies.push(bytes);
        }
    }
    let mut body = writer.begin(folder.path(), u64::MAX).unwrap();
    bodies.iter().for_each(|bytes| body.tensor(bytes).unwrap());
    body.finish().unwrap();
    folder
}

/// A projection's parts; `None` for what is not packed.
fn of_view(view: &TensorView, method: Method) -> Option<Vec<NamedPart>> {
    let module = view.name.strip_suffix(".weight").filter(|name| name.contains(".layers."))?;
    let projection =
        module.ends_with("_proj") || module.ends_with("in_proj_qkv") || module.ends_with("in_proj_z");
    let &[n, k] = &view.shape[..] else { return None };
    if !projection || module.starts_with("mtp") || !n.is_multiple_of(8) || !k.is_multiple_of(GROUP) {
        return None;
    }
    let bytes = view.bytes.get();
    let values: Vec<f32> = (0..n * k).map(|i| FloatType::BF16.get(&bytes, i)).collect();
    let parts = Codes::new(&values, n, k).parts(method).into_iter();
    Some(parts.map(|(part, dtype, shape, bytes)| (format!("{module}.{part}"), dtype, shape, bytes)).collect())
}

/// A projection in e4m3 with a scale per block of 128 x 128 values, or the same values in f32.
fn in_fp8(view: &TensorView, dense: bool) -> Option<Vec<NamedPart>> {
    of_view(view, Method::Dense)?;
    let (module, bytes) = (view.name.strip_suffix(".weight")?, view.bytes.get());
    let [n, k] = [view.shape[0], view.shape[1]];
    let blocks = [n.div_ceil(128), k.div_ceil(128)];
    let scale = |i: usize| 0.001 + 0.0003 * ((i / k / 128 * blocks[1] + i % k / 128) as f32);
    let codes: Vec<u8> =
        (0..n * k).map(|i| E4M3::encode(FloatType::BF16.get(&bytes, i) / scale(i))).collect();
    let values = codes.iter().enumerate().map(|(i, &code)| E4M3::decode(code) * scale(i));
    if dense {
        let bytes = values.flat_map(f32::to_le_bytes).collect();
        return Some(vec![(view.name.clone(), DType::F32, view.shape.clone(), bytes)]);
    }
    let all = (0..blocks[0]).flat_map(|row| (0..blocks[1]).map(move |column| row * 128 * k + column * 128));
    let scales = all.flat_map(|i| scale(i).to_le_bytes()).collect();
    let scale_name = format!("{module}.weight_scale_inv");
    Some(vec![
        (view.name.clone(), DType::F8E4M3, view.shape.clone(), codes),
        (scale_name, DType::F32, blocks.into(), scales),
    ])
}

/// A projection in NVFP4 as ModelOpt has it, or the same values in f32.
fn in_nvfp4(view: &TensorView, dense: bool) -> Option<Vec<NamedPart>> {
    of_view(view, Method::Dense)?;
    let (module, bytes) = (view.name.strip_suffix(".weight")?, view.bytes.get());
    let ([n, k], factor) = ([view.shape[0], view.shape[1]], 0.0007f32);
    let scale_code = |i: usize| 40 + (i / 16 % 9) as u8;
    let scale = |i: usize| E4M3::decode(scale_code(i)) * factor;
    let code = |i: usize| E2M1::encode(FloatType::BF16.get(&bytes, i) / scale(i));
    if dense {
        let bytes = (0..n * k).flat_map(|i| (E2M1::decode(code(i)) * scale(i)).to_le_bytes()).collect();
        return Some(vec![(view.name.clone(), DType::F32, view.shape.clone(), bytes)]);
    }
    let codes = (0..n * k).step_by(2).map(|i| code(i) | code(i + 1) << 4).collect();
    let scales = (0..n * k).step_by(16).map(scale_code).collect();
    Some(vec![
        (view.name.clone(), DType::U8, vec![n, k / 2], codes),
        (format!("{module}.weight_scale"), DType::F8E4M3, vec![n, k / 16], scales),
        (format!("{module}.weight_scale_2"), DType::F32, vec![], factor.to_le_bytes().into()),
    ])
}

#[test]
fn models_in_fp8_and_nvfp4_compute_and_convert() {
    let fp8 = json!({
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    });
    let nvfp4 = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    type Parts = fn(&TensorView, bool) -> Option<Vec<NamedPart>>;
    let cases: [(_, Parts); 2] = [(fp8, in_fp8), (nvfp4, in_nvfp4)];
    for (name, (settings, parts)) in
        ["qwen3_5", "qwen3_moe"].iter().flat_map(|name| cases.clone().map(|case| (name, case)))
    {
        let (want, _) = logits(rewritten(name, None, |view| parts(view, true)).path());
        let folder = rewritten(name, Some(settings.clone()), |view| parts(view, false));
        let (got, warnings) = logits(folder.path());
        let error = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
        assert!(error <= 1e-5, "{name}: {error}");
        assert!(!warnings.iter().any(|warning| warning.contains("become f32")), "{warnings:?}");
        // Eight bits lose less than a hundredth of each kind of weight.
        let made = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mlx = Recipe::new(MlxFormat::for_mode("affine").with_bits(8).with_group_size(32));
        let gguf = Recipe::new(Mix::from_name("Q8_0").unwrap());
        for (recipe, output) in [(mlx, "new"), (gguf, "new.gguf")] {
            let output = made.path().join(output);
            let summary = recipe.run(&checkpoint, &output, |_| Continue(())).unwrap().summary;
            let lost = summary.kinds.iter().map(|kind| kind.relative_error()).fold(0.0, f64::max);
            assert!(lost < 0.01, "{name} as {output:?}: {lost}");
            logits(&output);
        }
    }
}

/// ModelOpt's NVFP4 in GGUF and in MLX's layout, and from one to the other.
#[test]
fn nvfp4_keeps_its_codes_and_scales_between_layouts() {
    let settings = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    for name in ["qwen3_5", "qwen3_moe"] {
        let fits = |view: &TensorView| view.shape.last().is_some_and(|k| k.is_multiple_of(64));
        let source =
            rewritten(name, Some(settings.clone()), |view| in_nvfp4(view, false).filter(|_| fits(view)));
        let (want, _) = logits(source.path());
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let open = |path: &Path| Checkpoint::open(path).unwrap();
        let run = |recipe: Recipe<'_>, from: &Path, to: &str| {
            let made = recipe.run(&open(from), &path(to), |_| Continue(())).unwrap();
            assert!(made.summary.fallbacks.is_empty(), "{name} {to}");
            made.summary
        };
        let near = |to: &str| {
            let (got, _) = logits(&path(to));
            let error = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            assert!(error <= 1e-5, "{name} as {to}: {error}");
        };
        let gguf = || Recipe::new(Mix::from_name("NVFP4").unwrap());
        let summary = run(gguf(), source.path(), "a.gguf");
        let lost = summary.kinds.iter().map(|kind| kind.relative_error()).fold(0.0, f64::max);
        assert!(lost < 1e-6, "{name}: {lost}");
        near("a.gguf");
        let stored = |file: &str| {
            let views = open(&path(file));
            let stored = views.tensors().iter().map(|view| (view.name.clone(), view.stored));
            stored.filter(|(_, stored)| matches!(stored, Stored::Blocks(_))).collect::<Vec<_>>()
        };
        // With its `.scale`, a weight is opened as products of both.
        let of_a = stored("a.gguf");
        assert!(of_a.len() >= 4 && of_a.iter().all(|(_, stored)| *stored == Stored::Blocks(Format::Fp4)));
        run(gguf(), &path("a.gguf"), "b.gguf");
        let [a, b] = ["a.gguf", "b.gguf"].map(|file| std::fs::read(path(file)).unwrap());
        assert!(a == b, "{name}: the same again");

        // mlx-lm's experts have a scale per matrix, other layers none.
        run(Recipe::new(MlxFormat::for_mode("nvfp4")), &path("a.gguf"), "mlx");
        let mlx = open(&path("mlx"));
        let experts = "model.layers.0.mlp.switch_mlp.up_proj";
        if name == "qwen3_moe" {
            assert_eq!(mlx.config().unwrap()["quantization"][experts]["global_scale"], true);
            let products = mlx.quantization(experts).unwrap().unwrap();
            assert_eq!(products.format(DType::F32), Ok(Format::Fp4));
            let module = "blk.0.ffn_up_exps.weight";
            let of_mlx = ["weight", "scales"]
                .map(|part| mlx.tensors().get(&format!("{experts}.{part}")).unwrap().bytes.get().to_vec());
            let gguf = open(&path("a.gguf"));
            let of_gguf = gguf.tensors().get(module).unwrap().components(Format::Fp4).unwrap();
            assert_eq!(of_mlx[0], of_gguf[0].get());
            let floats =
                |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect::<Vec<_>>();
            for (got, want) in floats(&of_mlx[1]).into_iter().zip(floats(&of_gguf[1].get())) {
                assert!((got - want).abs() <= want * 2.0 * f32::EPSILON, "{got} {want}");
            }
        }
        // Weights in nvfp4 without such a scale keep their own, too; rows of other lengths become
        // Q8_0.
        let made = gguf().run(&mlx, &path("c.gguf"), |_| Continue(())).unwrap();
        let lost = made.summary.kinds.iter().map(|kind| kind.relative_error()).fold(0.0, f64::max);
        assert!(lost < 0.01, "{name} from MLX: {lost}");
        assert!(stored("c.gguf").iter().any(|(_, stored)| *stored == Stored::Blocks(Format::NVFP4)));
        logits(&path("c.gguf"));

        // Of floats.
        let floats = rewritten(name, None, |view| in_nvfp4(view, true));
        let made = gguf().run(&open(floats.path()), &path("d.gguf"), |_| Continue(())).unwrap();
        let lost = made.summary.kinds.iter().map(|kind| kind.relative_error()).fold(0.0, f64::max);
        assert!(lost < 0.15, "{name}: {lost}");
        logits(&path("d.gguf"));
    }
}

fn logits(path: &Path) -> (Vec<f32>, Vec<String>) {
    let target = Target::new(&Device::cpu(Some(1)).unwrap(), None).unwrap().with_exact(true);
    let model =
        Model::load_for(&Checkpoint::open(path).unwrap(), target).unwrap_or_else(|error| panic!("{error}"));
    let tokens: Vec<u32> = (1..24).map(|i| i * 7 % 200).collect();
    let logits = model.forward(&tokens, &mut model.cache(), Logits::All).unwrap().unwrap();
    (logits.as_slice::<f32>().unwrap().to_vec(), model.warnings().to_vec())
}

#[test]
fn models_compute_with_the_makers_values() {
    for name in ["llama3", "qwen3_moe", "qwen3_5"] {
        let (want, _) = logits(packed(name, Method::Dense).path());
        for method in [Method::CompressedTensors, Method::Gptq, Method::Awq] {
            let (got, warnings) = logits(packed(name, method).path());
            let error = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            assert!(error <= 1e-4, "{name} {method:?}: {error}");
            let named = warnings.iter().any(|warning| {
                warning.ends_with("input_scale of compressed-tensors without effect: activations are floats")
            });
            assert_eq!(named, method == Method::CompressedTensors, "{warnings:?}");
        }
    }
}

#[test]
fn conversion_to_the_same_codes_loses_nothing() {
    for (method, scales) in [
        (Method::CompressedTensors, FloatType::F16),
        (Method::Gptq, FloatType::F16),
        (Method::Awq, FloatType::F32),
    ] {
        let (source, folder) = (packed("qwen3_moe", method), tempfile::tempdir().unwrap());
        let output = folder.path().join("new");
        let rules = ["embed_tokens=none", "lm_head=none", "mlp.gate=none"].map(|rule| rule.parse().unwrap());
        let recipe = Recipe::new(MlxFormat::default().with_group_size(GROUP)).with_rules(rules.into());
        let checkpoint = Checkpoint::open(source.path()).unwrap();
        recipe.run(&checkpoint, &output, |_| Continue(())).unwrap();
        let made = Checkpoint::open(&output).unwrap();
        let format = Format::affine(4, GROUP, scales).unwrap();
        assert_eq!(
            (made.method(), &made.config().unwrap()["quantization_config"]["quant_method"]),
            (None, &Value::Null)
        );
        let mut seen = 0;
        for module in [
            "model.layers.0.self_attn.o_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.0.self_attn.q_proj",
        ] {
            for component in format.components(GROUP).unwrap() {
                let name = format!("{module}.{}", component.name);
                let Some(old) = checkpoint.tensors().get(&name) else { continue };
                let new = made.tensors().get(&name).unwrap();
                assert_eq!(
                    (old.stored, &old.shape, old.bytes.get()),
                    (new.stored, &new.shape, new.bytes.get()),
                    "{name}"
                );
                seen += 1;
            }
        }
        assert!(seen >= 6);
        let (got, want) = (logits(&output).0, logits(source.path()).0);
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-4), "{method:?}");
        let rules = ["token_embd=F32", "output.weight=F32"].map(|rule| rule.parse().unwrap());
        for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"] {
            let file = folder.path().join(format!("{name}.gguf"));
            let mix = Recipe::new(Mix::from_name(name).unwrap()).with_rules(rules.clone().into());
            let summary = mix.run(&checkpoint, &file, |_| Continue(())).unwrap().summary;
            let lost =
                summary.kinds.iter().find(|kind| kind.relative_error() > 1e-6).map(|kind| kind.kind.name());
            assert_eq!(lost, None, "{method:?} {name}");
            let got = logits(&file).0;
            assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-4), "{method:?} {name}");
        }
    }
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_refused_by_name() {
    let folder = packed("llama3", Method::Gptq);
    let config = folder.path().join("config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    settings["quantization_config"] = json!({"quant_method": "exl3", "bits": 4.0});
    std::fs::write(&config, settings.to_string()).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(&error, FileError::Quantization { method, .. } if method == "EXL3"), "{error}");
}
