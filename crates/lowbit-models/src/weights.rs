use crate::ModelError;
use crate::arch::Architecture;
use crate::layers::{Linear, MergedLinear};
use crate::names::Name;
use crate::tape::Named;
use crate::target::{Placement, Target};
use lowbit_files::{Checkpoint, Layout, Quantization, Stored, TensorView};
use lowbit_formats::{FloatType, Format};
use lowbit_kernels::ops::CacheType;
use lowbit_kernels::{Device, KernelError, QuantizedTensor, Tensor};
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

/// A checkpoint's tensors as an architecture asks for them: by name, with the shape that its
/// configuration implies. Every tensor must be asked for: [`Weights::finish`] refuses what is left.
///
/// Names come in pairs, Hugging Face's (MLX's is the same) and GGUF's, both below the layer's
/// prefix.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    target: &'a Target,
    /// The architecture of the checkpoint.
    architecture: Option<&'static Architecture>,
    /// True if its tensors have the names of [`Architecture::aliases`].
    aliased: bool,
    prefix: String,
    /// True if weights stay as the file has them, for products in f32.
    exact: bool,
    used: Rc<RefCell<HashSet<String>>>,
    /// The tensors of weights that were read since the last one was placed.
    read: Rc<RefCell<Vec<TensorView>>>,
}

/// The tensors of a module's weight: scales and biases where MLX quantised it.
const PARTS: [&str; 3] = ["weight", "scales", "biases"];

/// True if a tensor of `shape` is stored with the dimensions `stored`: GGUF drops leading ones of
/// 1, such as that of one expert.
fn is_stored_as(stored: &[usize], shape: &[usize]) -> bool {
    let ones = shape.iter().take_while(|&&n| n == 1).count();
    stored == shape || stored == &shape[ones..]
}

impl<'a> Weights<'a> {
    /// All of `checkpoint`. Tensors that are not repacked stay in the mapped file where the device
    /// can read them there.
    pub fn new(checkpoint: &'a Checkpoint, target: &'a Target) -> Self {
        let (prefix, exact) = (String::new(), target.exact);
        let (used, read) = (Rc::default(), Rc::default());
        Self { checkpoint, target, architecture: None, aliased: false, prefix, exact, used, read }
    }

    /// The tensors below `json` or `gguf`, whichever this checkpoint has.
    pub fn below(&self, json: &str, gguf: &str) -> Self {
        let prefix = format!("{}{}", self.prefix, self.choose(json, gguf));
        Self { prefix, used: self.used.clone(), read: self.read.clone(), ..*self }
    }

    /// The same tensors, with what is special about this architecture's checkpoints.
    pub(crate) fn of(&self, architecture: &'static Architecture) -> Self {
        let (used, read) = (self.used.clone(), self.read.clone());
        let is_alias = |name: &str| {
            let in_layer = name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
            in_layer.is_some_and(|(_, name)| architecture.known_name(name) != name)
        };
        let aliased = !self.is_gguf() && !architecture.aliases.is_empty() && self.names().any(is_alias);
        let (architecture, prefix) = (Some(architecture), self.prefix.clone());
        Self { architecture, aliased, prefix, used, read, ..*self }
    }

    /// Layer `index`: `layers.{index}.` or `blk.{index}.`.
    pub fn layer(&self, index: usize) -> Self {
        self.below(&format!("layers.{index}."), &format!("blk.{index}."))
    }

    /// The layout of the checkpoint.
    pub fn layout(&self) -> Layout {
        self.checkpoint.layout()
    }

    /// The file or directory it is from, for errors.
    pub fn path(&self) -> &std::path::Path {
        self.checkpoint.path()
    }

    /// The prefix of all names that are asked for.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The full names of all tensors, whatever the prefix.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.checkpoint.tensors().iter().map(|view| view.name.as_str())
    }

    /// True if the weights, scales and biases of two modules, by Hugging Face's names, are the same
    /// byte for byte; `None` when a module has no weight. Modules of a checkpoint that is not
    /// written yet are not the same: its tensors show the same zeros, whatever they will hold, and
    /// a copy of another module is not written.
    pub fn are_same(&self, one: &str, other: &str) -> Option<bool> {
        let view = |module: &str, part: &str| {
            self.checkpoint.tensors().get(&self.name(&format!("{module}.{part}"), ""))
        };
        view(one, "weight").and(view(other, "weight"))?;
        let same = |part: &&str| match (view(one, part), view(other, part)) {
            (Some(one), Some(other)) if one.stored == other.stored && one.shape == other.shape => {
                let (one, other) = (one.bytes.get(), other.bytes.get());
                one.as_ptr() != other.as_ptr() && one == other
            }
            (Some(_), Some(_)) => false,
            (one, other) => one.is_none() && other.is_none(),
        };
        Some(PARTS.iter().all(same))
    }

    /// True if this is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        self.layout() == Layout::Gguf
    }

    /// The device of the tensors.
    pub fn device(&self) -> &Device {
        &self.target.device
    }

    /// The type of activations.
    pub fn activations(&self) -> FloatType {
        self.target.activations
    }

    /// The type of cached keys and values.
    pub fn cache(&self) -> CacheType {
        self.target.cache
    }

    /// The longest sequence that is computed, if it is shorter than the model's context:
    /// [`Target::with_context`].
    pub fn context(&self) -> Option<usize> {
        self.target.context
    }

    /// True if projections of the same experts become one weight, which then has none of the
    /// checkpoint's names.
    pub fn joins_experts(&self) -> bool {
        self.device().plan().joins_weights && self.target.joins_experts
    }

    /// True if there is a tensor of this name.
    pub fn has(&self, json: &str, gguf: &str) -> bool {
        self.checkpoint.tensors().get(&self.name(json, gguf)).is_some()
    }

    /// True if a module of this name has a weight.
    pub fn has_module(&self, (json, gguf): Name<'_>) -> bool {
        let has = |name: &str| self.checkpoint.tensors().get(name).is_some();
        match self.choose(json, gguf) {
            "" => false,
            _ => {
                let name = self.name(json, gguf);
                has(&name) || has(&format!("{name}.weight"))
            }
        }
    }

    /// The shape of a tensor, if it is there.
    pub fn shape(&self, json: &str, gguf: &str) -> Option<Vec<usize>> {
        self.checkpoint.tensors().get(&self.name(json, gguf)).map(|view| view.shape.clone())
    }

    /// Checks that there can be `layers` layers: each has at least one tensor.
    ///
    /// # Errors
    /// [`ModelError::Config`] under the name `key`.
    pub fn check_layers(&self, key: &str, layers: usize) -> Result<(), ModelError> {
        let count = self.checkpoint.tensors().len();
        if layers <= count {
            return Ok(());
        }
        Err(self.refuse_size(key, layers.to_string(), format!("the checkpoint has {count} tensors")))
    }

    /// Checks that some tensor has a dimension of at least `size`, before anything of that size is
    /// allocated.
    ///
    /// # Errors
    /// [`ModelError::Config`] under the name `key`.
    pub fn check_size(&self, key: &str, size: usize) -> Result<(), ModelError> {
        // A tensor without elements may claim any size.
        let filled = self.checkpoint.tensors().iter().filter(|view| !view.bytes.is_empty());
        let most = filled.flat_map(|view| view.shape.iter().copied()).max().unwrap_or(0);
        if (1..=most).contains(&size) {
            return Ok(());
        }
        Err(self.refuse_size(key, size.to_string(), format!("tensors have 1 to {most} rows")))
    }

    /// The product of `sizes`, which may still be added to some others of its kind.
    ///
    /// # Errors
    /// [`ModelError::Config`] under the names `keys` when no tensor could have as many rows.
    pub fn product<const N: usize>(&self, keys: [&str; N], sizes: [usize; N]) -> Result<usize, ModelError> {
        /// More than any machine has bytes.
        const MOST: usize = 1 << 56;
        let product = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        product.filter(|&product| product <= MOST).ok_or_else(|| {
            let got = sizes.map(|size| size.to_string()).join(" * ");
            self.refuse_size(&keys.join(" * "), got, "that is more than memory can hold".into())
        })
    }

    fn refuse_size(&self, key: &str, got: String, want: String) -> ModelError {
        ModelError::Config { path: self.checkpoint.path().to_path_buf(), key: key.into(), got, want }
    }

    /// A linear layer `[n, k]`: its `.weight` in whatever format it is stored, its `.bias` if there
    /// is one.
    ///
    /// # Errors
    /// [`ModelError::Missing`], [`ModelError::Tensor`], [`ModelError::Weight`].
    pub fn linear(&self, name: Name<'_>, n: usize, k: usize) -> Result<Linear, ModelError> {
        let weight = self.matrix(name, &[n, k])?;
        Ok(Linear::new(weight, self.bias(name, n, self.device())?))
    }

    /// Linear layers `[n, k]` of the same input: the name and n of each.
    ///
    /// # Errors
    /// As [`Self::linear`].
    pub fn merged<const N: usize>(
        &self,
        parts: [(Name<'_>, usize); N],
        k: usize,
    ) -> Result<MergedLinear<N>, ModelError> {
        let mut linears = Vec::with_capacity(N);
        for (name, n) in parts {
            let weight = self.named(name, self.mapped_matrix(name, &[n, k])?);
            linears.push(Linear::new(weight, self.bias(name, n, &self.target.host)?));
        }
        let linears = linears.try_into().expect("one per part");
        let (name, _) = parts[0];
        self.placed(|placement| MergedLinear::new(linears, placement))
            .map_err(|error| self.weight_error(&self.name(name.0, name.1), error))
    }

    /// As [`Self::merged`], from one matrix that has the rows of all: the name of the whole, and
    /// the n of each part.
    ///
    /// # Errors
    /// As [`Self::linear`].
    pub fn fused<const N: usize>(
        &self,
        name: Name<'_>,
        parts: [usize; N],
        k: usize,
    ) -> Result<MergedLinear<N>, ModelError> {
        let n = parts.iter().sum();
        let weight = self.named(name, self.mapped_matrix(name, &[n, k])?);
        let whole = Linear::new(weight, self.bias(name, n, &self.target.host)?);
        self.placed(|placement| MergedLinear::fused(whole, parts, placement))
            .map_err(|error| self.weight_error(&self.name(name.0, name.1), error))
    }

    /// A linear layer's bias, if there is one.
    fn bias(
        &self,
        (json, gguf): Name<'_>,
        n: usize,
        device: &Device,
    ) -> Result<Option<Named<Tensor>>, ModelError> {
        let (json, gguf) = (format!("{json}.bias"), format!("{gguf}.bias"));
        if !self.has(&json, &gguf) {
            return Ok(None);
        }
        let bias = Tensor::new(&self.values((&json, &gguf), n)?, &[n], device)?;
        Ok(Some(self.named((&json, &gguf), bias)))
    }

    /// A weight of `shape` `[.., N, K]` named with or without `.weight`, in whatever format it is
    /// stored.
    ///
    /// # Errors
    /// [`ModelError::Missing`], [`ModelError::Tensor`], [`ModelError::Weight`].
    pub fn matrix(&self, name: Name<'_>, shape: &[usize]) -> Result<Named<QuantizedTensor>, ModelError> {
        let weight = self.moved(&self.name(name.0, name.1), self.mapped_matrix(name, shape)?)?;
        Ok(self.named(name, weight))
    }

    /// The tensors that `make` makes of a weight of `shape`, which it gets on the host: parts with
    /// names of their own.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub(crate) fn parts<const N: usize>(
        &self,
        name: Name<'_>,
        shape: &[usize],
        names: [Name<'_>; N],
        make: impl FnOnce(&QuantizedTensor) -> Result<Vec<QuantizedTensor>, KernelError>,
    ) -> Result<[Named<QuantizedTensor>; N], ModelError> {
        let whole = self.name(name.0, name.1);
        let parts = make(&self.mapped_matrix(name, shape)?);
        let parts = parts.map_err(|error| self.weight_error(&whole, error))?;
        let moved =
            names.iter().zip(parts).map(|(name, part)| Ok(self.named(*name, self.moved(&whole, part)?)));
        let moved = moved.collect::<Result<Vec<_>, ModelError>>()?;
        Ok(moved.try_into().expect("one for each name"))
    }

    /// With its full name.
    fn named<T>(&self, (json, gguf): Name<'_>, value: T) -> Named<T> {
        Named { name: self.name(json, gguf).into(), value }
    }

    /// A weight read through the map, on the device.
    fn moved(&self, name: &str, weight: QuantizedTensor) -> Result<QuantizedTensor, ModelError> {
        self.placed(|placement| placement.weight(&weight)).map_err(|error| self.weight_error(name, error))
    }

    /// The result of `place` for weights that were read through the map. If it copied them, their
    /// pages are given back.
    fn placed<T>(
        &self,
        place: impl FnOnce(Placement<'_>) -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let placement = Placement { device: self.device(), repack: !self.exact };
        let placed = place(placement)?;
        for view in self.read.borrow_mut().drain(..) {
            if placement.repack || placement.device.plan().copies_weights {
                view.release();
            }
        }
        Ok(placed)
    }

    /// True if all computation with them must be exact to f32: see [`Target::with_exact`].
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// The same weights for products that are exact to f32: routers choose, and a small error would
    /// choose otherwise.
    pub fn exactly(&self) -> Self {
        let (used, read) = (self.used.clone(), self.read.clone());
        Self { exact: true, prefix: self.prefix.clone(), used, read, ..*self }
    }

    fn mapped_matrix(&self, (json, gguf): Name<'_>, shape: &[usize]) -> Result<QuantizedTensor, ModelError> {
        let module = self.name(json, gguf);
        let with_suffix = format!("{module}.weight");
        let bare = self.checkpoint.tensors().get(&module).is_some();
        let name = if bare { module.clone() } else { with_suffix };
        let view = self.view(&name)?;
        let scales = format!("{module}.scales");
        if self.layout() != Layout::Gguf && self.checkpoint.tensors().get(&scales).is_some() {
            return self.mlx_matrix(&module, &view, shape);
        }
        let format = match view.stored {
            Stored::Blocks(format) => format,
            Stored::Plain(dtype) => match FloatType::from_dtype(dtype) {
                Some(float) => Format::Float(float),
                None => return Err(self.refuse(&view, "f32, f16, bf16 or a quantised type".into())),
            },
        };
        if !is_stored_as(&view.shape, shape) {
            return Err(self.refuse(&view, format!("{shape:?}")));
        }
        let parts = view.components(format).map_err(|error| self.weight_error(&name, error.into()))?;
        let components = parts.into_iter().enumerate().map(|(index, bytes)| {
            self.component(format, index, &TensorView { bytes, ..view.clone() }, shape)
        });
        let components = components.collect::<Result<_, _>>()?;
        QuantizedTensor::new(format, shape, components).map_err(|error| self.weight_error(&name, error))
    }

    /// A weight in MLX's layout: `weight`, `scales` and perhaps `biases` below `module`.
    fn mlx_matrix(
        &self,
        module: &str,
        weight: &TensorView,
        shape: &[usize],
    ) -> Result<QuantizedTensor, ModelError> {
        let quantization =
            self.checkpoint.quantization(module)?.ok_or_else(|| ModelError::ConfigMissing {
                path: self.checkpoint.path().to_path_buf(),
                key: format!("quantization of {module}, which has scales,"),
            })?;
        let scales = self.view(&format!("{module}.scales"))?;
        let format = self.mlx_format(&quantization, &scales)?;
        let mut components = vec![];
        for (index, component) in format.components(shape[shape.len() - 1])?.iter().enumerate() {
            let view = match component.name {
                "weight" => weight.clone(),
                name => self.view(&format!("{module}.{name}"))?,
            };
            components.push(self.component(format, index, &view, shape)?);
        }
        let weight_name = format!("{module}.weight");
        QuantizedTensor::new(format, shape, components)
            .map_err(|error| self.weight_error(&weight_name, error))
    }

    fn mlx_format(&self, quantization: &Quantization, scales: &TensorView) -> Result<Format, ModelError> {
        match scales.stored {
            Stored::Plain(dtype) => Ok(quantization.format(dtype)?),
            Stored::Blocks(_) => Err(self.refuse(scales, "a plain type".into())),
        }
    }

    /// Component `index` of a weight of `shape`: its type and shape must be what `format` wants.
    fn component(
        &self,
        format: Format,
        index: usize,
        view: &TensorView,
        shape: &[usize],
    ) -> Result<Tensor, ModelError> {
        let (&k, rows) = shape.split_last().expect("a weight has dimensions");
        let component =
            format.components(k).map_err(|error| self.weight_error(&view.name, error.into()))?[index];
        let want = [rows, &[component.columns]].concat();
        if let Stored::Plain(dtype) = view.stored
            && (dtype != component.dtype || !is_stored_as(&view.shape, &want))
        {
            return Err(self.refuse(view, format!("{} {want:?}", component.dtype)));
        }
        self.read.borrow_mut().push(view.clone());
        let bytes = match self.looks_only() {
            true => view.bytes.unread()?,
            false => view.bytes.get(),
        };
        Tensor::mapped(bytes, &want, component.dtype, &self.target.host)
            .map_err(|error| self.weight_error(&view.name, error))
    }

    /// The weights of `experts` experts, `[experts, n, k]`, from one stacked tensor,
    /// `switch_mlp.{part}` in MLX's layout, or from one tensor per expert, `experts.{e}.{part}` (or
    /// `experts.{part}.{e}`, as ModelOpt has exported some), which are then copied into one.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn experts(&self, name: Name<'_>, shape: [usize; 3]) -> Result<Named<QuantizedTensor>, ModelError> {
        let by_part = format!("{}.0", name.0.replace("switch_mlp.", "experts."));
        let single = |e: usize| match self.has(&format!("{by_part}.weight"), "") {
            true => format!("{}{e}", by_part.trim_end_matches('0')),
            false => name.0.replace("switch_mlp.", &format!("experts.{e}.")),
        };
        let first = self.name(&format!("{}.weight", single(0)), "");
        if self.is_gguf() || self.checkpoint.tensors().get(&first).is_none() {
            return self.matrix(name, &shape);
        }
        let [experts, n, k] = shape;
        let singles = (0..experts).map(|e| self.mapped_matrix((&single(e), ""), &[n, k]));
        let mut singles = singles.collect::<Result<Vec<_>, _>>()?;
        if self.target.outline {
            singles.truncate(1);
        }
        if self.device().is_dry_run() {
            // On the host they would be copied.
            singles = singles.iter().map(|one| self.moved(&first, one.clone())).collect::<Result<_, _>>()?;
        }
        let stacked = QuantizedTensor::stack(&singles).map_err(|error| self.weight_error(&first, error))?;
        Ok(self.named(name, self.moved(&first, stacked)?))
    }

    /// The biases of `experts` experts' projection `name`, one row each, f32 `[experts, n]`.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn expert_biases(
        &self,
        (json, gguf): Name<'_>,
        experts: usize,
        n: usize,
    ) -> Result<Named<QuantizedTensor>, ModelError> {
        let (json, gguf) = (format!("{json}.bias"), format!("{gguf}.bias"));
        let name = (&*json, &*gguf);
        let shape = [experts, n];
        let count = self.product(["num_experts", "moe_intermediate_size"], shape)?;
        let values = Tensor::new(&self.values(name, count)?, &shape, self.device())?;
        let biases = QuantizedTensor::new(Format::Float(FloatType::F32), &shape, vec![values]);
        Ok(self.named(name, biases.map_err(|error| self.weight_error(&self.name(name.0, name.1), error))?))
    }

    /// A vector of `len` values (or a tensor of as many: a conv kernel `[C, 1, W]`), widened to
    /// f32.
    ///
    /// # Errors
    /// [`ModelError::Missing`], [`ModelError::Tensor`].
    pub fn vector(&self, name: Name<'_>, len: usize) -> Result<Named<Tensor>, ModelError> {
        Ok(self.named(name, Tensor::new(&self.values(name, len)?, &[len], self.device())?))
    }

    /// The same as plain values.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn values(&self, (json, gguf): Name<'_>, len: usize) -> Result<Vec<f32>, ModelError> {
        let view = self.view(&self.name(json, gguf))?;
        let float = match view.stored {
            Stored::Plain(dtype) => FloatType::from_dtype(dtype),
            Stored::Blocks(_) => None,
        };
        let float = float.ok_or_else(|| self.refuse(&view, "f32, f16 or bf16".into()))?;
        if view.shape.iter().product::<usize>() != len {
            return Err(self.refuse(&view, format!("{len} values")));
        }
        let bytes = view.bytes.get();
        Ok((0..len).map(|i| float.get(&bytes, i)).collect())
    }

    /// The weight of a norm as the model computes with it: 1 is added where the checkpoint stores
    /// `w - 1`.
    ///
    /// # Errors
    /// As [`Self::vector`].
    pub fn norm(&self, (json, gguf): Name<'_>, len: usize) -> Result<Named<Tensor>, ModelError> {
        let module = format!("{}{json}", self.prefix);
        let (json, gguf) = (format!("{json}.weight"), format!("{gguf}.weight"));
        let mut values = self.values((&json, &gguf), len)?;
        let offset_norms = self.architecture.and_then(|architecture| architecture.offset_norms);
        if offset_norms.is_some_and(|norms| norms.contain(self.layout(), &module)) {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(self.named((&json, &gguf), Tensor::new(&values, &[len], self.device())?))
    }

    /// True if weights are looked at and never computed with.
    pub(crate) fn looks_only(&self) -> bool {
        self.target.outline || self.device().is_dry_run()
    }

    /// Refuses tensors that were not asked for, except those whose full name `ignored` accepts.
    ///
    /// # Errors
    /// [`ModelError::Surplus`].
    pub fn finish(&self, ignored: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let used = self.used.borrow();
        let mut surplus = self
            .checkpoint
            .tensors()
            .iter()
            .map(|view| view.name.as_str())
            .filter(|name| !used.contains(*name) && !ignored(name));
        match surplus.next() {
            None => Ok(()),
            Some(name) => Err(ModelError::Surplus {
                path: self.checkpoint.path().to_path_buf(),
                name: name.to_string(),
                count: 1 + surplus.count(),
            }),
        }
    }

    /// Marks a module's weight, with its scales and biases, as known without reading it.
    pub fn ignore(&self, (json, gguf): Name<'_>) {
        let module = self.name(json, gguf);
        self.used.borrow_mut().extend(PARTS.map(|part| format!("{module}.{part}")));
    }

    fn choose<'n>(&self, json: &'n str, gguf: &'n str) -> &'n str {
        if self.is_gguf() { gguf } else { json }
    }

    /// The full name in the checkpoint of what layers call `json`, or `gguf`.
    fn name(&self, json: &str, gguf: &str) -> String {
        let name = self.choose(json, gguf);
        match self.architecture.filter(|_| self.aliased) {
            Some(architecture) => format!("{}{}", self.prefix, architecture.stored_name(name, self.layout())),
            None => format!("{}{name}", self.prefix),
        }
    }

    fn view(&self, name: &str) -> Result<TensorView, ModelError> {
        let missing = || ModelError::missing_tensor(self.checkpoint.path(), name, self.names());
        let view = self.checkpoint.tensors().get(name).ok_or_else(missing)?;
        self.used.borrow_mut().insert(name.to_string());
        Ok(view.clone())
    }

    fn refuse(&self, view: &TensorView, want: String) -> ModelError {
        let got = format!("{} {:?}", view.stored, view.shape);
        ModelError::Tensor { path: view.file.to_path_buf(), name: view.name.clone(), got, want }
    }

    fn weight_error(&self, name: &str, error: KernelError) -> ModelError {
        ModelError::Weight {
            path: self.checkpoint.path().to_path_buf(),
            name: name.to_string(),
            error: Box::new(error),
        }
    }
}
