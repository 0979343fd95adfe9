//! gpt-oss' experts by MLX's names and in MLX's shapes.
//!
//! ```text
//! Hugging Face, below mlp.experts.     MLX, there
//! gate_up_proj       [E, H, 2I]        gate_proj.weight  [E, I, H], of columns 0, 2, 4, ..
//!                                      up_proj.weight    [E, I, H], of columns 1, 3, 5, ..
//! gate_up_proj in MXFP4  [E, 2I, ..]   gate_proj and up_proj in MXFP4, of such rows
//! gate_up_proj_bias  [E, 2I]           gate_proj.bias and up_proj.bias  [E, I]
//! down_proj          [E, I, H]         down_proj.weight  [E, H, I]
//! down_proj_bias     [E, H]            down_proj.bias    [E, H]
//! ```
//! Source: transformers 5.24 `models/gpt_oss`; mlx-lm 0.32 `models/gpt_oss.py`, `sanitize` (which
//! reads MXFP4 alone).

use std::path::Path;

use super::makers::Maker;
use crate::{Contents, FileError, Stored, TensorView, Tensors};

/// The `model_type` of these checkpoints.
pub(super) const MODEL_TYPE: &str = "gpt_oss";

const GATE_UP: &str = "mlp.experts.gate_up_proj";
const DOWN: &str = "mlp.experts.down_proj";
/// The two halves of [`GATE_UP`].
const HALVES: [&str; 2] = ["mlp.experts.gate_proj", "mlp.experts.up_proj"];

/// `tensors` with experts as MLX has them. `maker` has quantised them, if anybody has.
///
/// # Errors
/// [`FileError::Quantized`] for experts of other shapes.
pub(super) fn adapt(file: &Path, tensors: &Tensors, maker: Option<&mut Maker>) -> Result<Tensors, FileError> {
    let mut made = vec![];
    for view in tensors {
        if let Some((before, part)) = below(&view.name, GATE_UP) {
            for (index, half) in HALVES.iter().enumerate() {
                let experts = Experts { file, view, module: format!("{before}{half}"), part };
                made.push(experts.half(index)?);
            }
        } else if let Some((before, part)) = below(&view.name, DOWN) {
            made.push(Experts { file, view, module: format!("{before}{DOWN}"), part }.whole()?);
        } else {
            made.push(view.clone());
        }
    }
    if let Some(maker) = maker {
        let modules = std::mem::take(&mut maker.modules).into_iter();
        let named = modules.flat_map(|(name, format)| {
            let names = match below(&name, GATE_UP) {
                Some((before, "")) => HALVES.map(|half| format!("{before}{half}")).to_vec(),
                _ => vec![name],
            };
            names.into_iter().map(move |name| (name, format))
        });
        maker.modules = named.collect();
    }
    Tensors::new(made)
}

/// The parts of a name before and behind `module`.
fn below<'n>(name: &'n str, module: &str) -> Option<(&'n str, &'n str)> {
    let (before, part) = name.split_once(module)?;
    let is_whole = part.is_empty() || part.starts_with(['.', '_']);
    (is_whole && (before.is_empty() || before.ends_with('.'))).then_some((before, part))
}

/// A tensor of all experts: `part` of what MLX calls `module`.
struct Experts<'a> {
    file: &'a Path,
    view: &'a TensorView,
    module: String,
    part: &'a str,
}

impl Experts<'_> {
    fn refuse(&self, want: &str) -> FileError {
        let got = format!("{} {:?}", self.view.stored, self.view.shape);
        FileError::Quantized {
            file: self.file.into(),
            tensor: self.view.name.clone(),
            got,
            want: want.into(),
        }
    }

    /// Bytes of an element.
    fn size(&self) -> Result<usize, FileError> {
        match self.view.stored {
            Stored::Plain(dtype) => Ok(dtype.size()),
            Stored::Blocks(_) => Err(self.refuse("plain elements are wanted")),
        }
    }

    fn made(&self, part: &str, shape: Vec<usize>, bytes: Contents) -> TensorView {
        let TensorView { stored, file, .. } = self.view;
        TensorView {
            name: format!("{}{part}", self.module),
            stored: *stored,
            shape,
            bytes,
            file: file.clone(),
        }
    }

    /// Gate's part of a tensor of both, or up's.
    fn half(&self, index: usize) -> Result<TensorView, FileError> {
        if self.part.is_empty() {
            return self.transposed([index, 2]);
        }
        let (part, &[experts, both, ref rest @ ..]) = (self.name(), &self.view.shape[..]) else {
            return Err(self.refuse("[E, 2 I, ..] is wanted"));
        };
        if !both.is_multiple_of(2) {
            return Err(self.refuse("as many rows of gate as of up are wanted"));
        }
        let row = rest.iter().product::<usize>() * self.size()?;
        let from = self.view.bytes.clone();
        let bytes = Contents::computed(from.len() / 2, move || {
            let bytes = from.get();
            let rows = bytes.chunks_exact(row.max(1)).skip(index).step_by(2);
            rows.flatten().copied().collect()
        });
        Ok(self.made(part, [&[experts, both / 2], rest].concat(), bytes))
    }

    fn whole(&self) -> Result<TensorView, FileError> {
        match self.part {
            "" => self.transposed([0, 1]),
            _ => Ok(self.made(self.name(), self.view.shape.clone(), self.view.bytes.clone())),
        }
    }

    /// The part's name in MLX.
    fn name(&self) -> &str {
        if self.part == "_bias" { ".bias" } else { self.part }
    }

    /// `[E, K, N]` as `[E, N / step, K]`, of the columns from `first` on, strided by `step`.
    fn transposed(&self, [first, step]: [usize; 2]) -> Result<TensorView, FileError> {
        let &[experts, k, columns] = &self.view.shape[..] else {
            return Err(self.refuse("[E, K, N] is wanted"));
        };
        if !columns.is_multiple_of(step) {
            return Err(self.refuse("as many columns of gate as of up are wanted"));
        }
        let (n, size, from) = (columns / step, self.size()?, self.view.bytes.clone());
        let bytes = Contents::computed(from.len() / step, move || {
            let (from, mut to) = (from.get(), vec![0; from.len() / step]);
            let stacks = from.chunks_exact((k * columns * size).max(1));
            for (from, to) in stacks.zip(to.chunks_exact_mut((n * k * size).max(1))) {
                transpose(from, to, [k, columns, n], [first, step], size);
            }
            to
        });
        Ok(self.made(".weight", vec![experts, n, k], bytes))
    }
}

/// `to[j, i] = from[i, first + step j]`, elements of `size` bytes, for `from` `[k, columns]` and
/// `to` `[n, k]`.
fn transpose(
    from: &[u8],
    to: &mut [u8],
    [k, columns, n]: [usize; 3],
    [first, step]: [usize; 2],
    size: usize,
) {
    /// Rows at a time: their cache lines stay while columns go by.
    const ROWS: usize = 64;
    for start in (0..k).step_by(ROWS) {
        for j in 0..n {
            for i in start..k.min(start + ROWS) {
                let (source, target) = ((i * columns + first + step * j) * size, (j * k + i) * size);
                to[target..target + size].copy_from_slice(&from[source..source + size]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowbit_formats::{DType, Format};
    use std::collections::BTreeMap;

    fn view(name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> TensorView {
        let (stored, file) = (Stored::Plain(dtype), Path::new("model.safetensors").into());
        TensorView { name: name.into(), stored, shape: shape.into(), bytes: bytes.into(), file }
    }

    fn pairs(tensors: &Tensors, name: &str) -> (Vec<usize>, Vec<u16>) {
        let view = tensors.get(name).unwrap_or_else(|| panic!("no {name}"));
        let bytes = view.bytes.get();
        (view.shape.clone(), bytes.as_chunks().0.iter().map(|&pair| u16::from_le_bytes(pair)).collect())
    }

    #[test]
    fn gate_and_up_alternate_and_plain_weights_are_transposed() {
        // Two experts, H = 3, I = 2: element (e, h, c) is 100 e + 10 h + c.
        let stack = |k: usize, n: usize| {
            let each =
                (0..2).flat_map(|e| (0..k).flat_map(move |i| (0..n).map(move |j| 100 * e + 10 * i + j)));
            each.flat_map(|x| (x as u16).to_le_bytes()).collect::<Vec<u8>>()
        };
        let bias = |n: usize| (0..2 * n as u16).flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
        let p = "model.layers.7.mlp.experts.";
        let named =
            |part: &str, shape: &[usize], bytes| view(&format!("{p}{part}"), DType::BF16, shape, bytes);
        let tensors = Tensors::new(vec![
            named("gate_up_proj", &[2, 3, 4], stack(3, 4)),
            named("down_proj", &[2, 2, 3], stack(2, 3)),
            named("gate_up_proj_bias", &[2, 4], bias(4)),
            named("down_proj_bias", &[2, 3], bias(3)),
            view("model.norm.weight", DType::BF16, &[1], vec![1, 2]),
        ])
        .unwrap();
        let made = adapt(Path::new("config.json"), &tensors, None).unwrap();
        let of = |part: &str| pairs(&made, &format!("{p}{part}"));
        assert_eq!(made.len(), 7);
        assert_eq!(
            of("gate_proj.weight"),
            (vec![2, 2, 3], vec![0, 10, 20, 2, 12, 22, 100, 110, 120, 102, 112, 122])
        );
        assert_eq!(
            of("up_proj.weight"),
            (vec![2, 2, 3], vec![1, 11, 21, 3, 13, 23, 101, 111, 121, 103, 113, 123])
        );
        assert_eq!(
            of("down_proj.weight"),
            (vec![2, 3, 2], vec![0, 10, 1, 11, 2, 12, 100, 110, 101, 111, 102, 112])
        );
        assert_eq!(of("gate_proj.bias"), (vec![2, 2], vec![0, 2, 4, 6]));
        assert_eq!(of("up_proj.bias"), (vec![2, 2], vec![1, 3, 5, 7]));
        assert_eq!(of("down_proj.bias"), (vec![2, 3], vec![0, 1, 2, 3, 4, 5]));
        assert_eq!(pairs(&made, "model.norm.weight"), (vec![1], vec![0x201]));
        // MLX's names stay.
        let again = adapt(Path::new("config.json"), &made, None).unwrap();
        assert!(again.names().eq(made.names()));
    }

    #[test]
    fn quantised_rows_alternate_and_keep_their_format() {
        let p = "layers.0.mlp.experts.";
        let tensors = Tensors::new(vec![
            view(&format!("{p}gate_up_proj.weight"), DType::U32, &[1, 4, 1], (0..16).collect()),
            view(&format!("{p}gate_up_proj.scales"), DType::U8, &[1, 4, 2], (0..8).collect()),
            view(&format!("{p}down_proj.scales"), DType::U8, &[1, 2, 2], (0..4).collect()),
        ])
        .unwrap();
        let modules = ["gate_up_proj", "down_proj"].map(|name| (format!("{p}{name}"), Format::Mxfp4));
        let mut maker =
            Maker { method: "MXFP4", modules: BTreeMap::from(modules), expanded: 0, without_effect: vec![] };
        let made = adapt(Path::new("config.json"), &tensors, Some(&mut maker)).unwrap();
        let bytes = |name: &str| made.get(&format!("{p}{name}")).unwrap().bytes.get().to_vec();
        assert_eq!(bytes("gate_proj.weight"), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(bytes("up_proj.weight"), [4, 5, 6, 7, 12, 13, 14, 15]);
        assert_eq!(
            (bytes("gate_proj.scales"), bytes("up_proj.scales")),
            (vec![0, 1, 4, 5], vec![2, 3, 6, 7])
        );
        assert_eq!(bytes("down_proj.scales"), [0, 1, 2, 3]);
        let names: Vec<_> = maker.modules.keys().map(String::as_str).collect();
        assert_eq!(names, ["down_proj", "gate_proj", "up_proj"].map(|name| format!("{p}{name}")));
    }

    #[test]
    fn experts_of_other_shapes_are_refused() {
        let message = |part: &str, shape: &[usize]| {
            let bytes = vec![0; 2 * shape.iter().product::<usize>()];
            let view = view(&format!("mlp.experts.{part}"), DType::BF16, shape, bytes);
            let tensors = Tensors::new(vec![view]).unwrap();
            adapt(Path::new("config.json"), &tensors, None).unwrap_err().to_string()
        };
        for (part, shape, want) in [
            (
                "gate_up_proj",
                &[2, 3, 5][..],
                "bf16 [2, 3, 5], but as many columns of gate as of up are wanted",
            ),
            ("gate_up_proj", &[2, 3], "bf16 [2, 3], but [E, K, N] is wanted"),
            ("gate_up_proj_bias", &[2, 3], "bf16 [2, 3], but as many rows of gate as of up are wanted"),
            ("gate_up_proj_bias", &[3], "bf16 [3], but [E, 2 I, ..] is wanted"),
            ("down_proj", &[6], "bf16 [6], but [E, K, N] is wanted"),
        ] {
            assert_eq!(message(part, shape), format!("config.json: tensor mlp.experts.{part} is {want}"));
        }
    }
}
