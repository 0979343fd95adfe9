//! The device and the types that a model runs with, and the place of its weights.

use lowbit_formats::FloatType;
use lowbit_kernels::ops::CacheType;
use lowbit_kernels::{Device, KernelError, QuantizedTensor};

/// The device that a model runs on, and the types of its activations and cache.
#[derive(Clone, Debug)]
pub struct Target {
    /// The device of the weights.
    pub device: Device,
    /// The device that can read the mapped file: `device` itself if it is a CPU.
    pub host: Device,
    /// The type of activations, except the residual stream and the logits, which are f32.
    pub activations: FloatType,
    /// The type of cached keys and values.
    pub cache: CacheType,
    /// True if it is [`Self::with_cache`]'s.
    own_cache: bool,
    /// True if products on the CPU are exact to f32: see [`Self::with_exact`].
    pub(crate) exact: bool,
    /// True if a GPU computes several projections of the same experts as one product.
    pub(crate) joins_experts: bool,
    /// True if nothing is computed: see [`Self::outline`].
    pub(crate) outline: bool,
    /// See [`Self::with_context`].
    pub(crate) context: Option<usize>,
}

/// The type of cached keys and values.
fn cache_type(device: &Device, activations: FloatType, exact: bool) -> CacheType {
    device.plan().cache.filter(|_| !exact).unwrap_or(activations).into()
}

impl Target {
    /// `device` with activations of the given type, or of the type it is fastest with.
    ///
    /// # Errors
    /// As [`Device::host`].
    pub fn new(device: &Device, activations: Option<FloatType>) -> Result<Self, KernelError> {
        let activations = activations.unwrap_or_else(|| device.activations());
        let cache = cache_type(device, activations, false);
        let (device, host, exact) = (device.clone(), device.host()?, false);
        Ok(Self {
            device,
            host,
            activations,
            cache,
            own_cache: false,
            exact,
            joins_experts: true,
            outline: false,
            context: None,
        })
    }

    /// For a model that learns: products are [exact](Self::with_exact), and each weight is one of
    /// the checkpoint's, so that it can be a [parameter](crate::tape::Parameter). Activations are
    /// of the given type, or of [the device's](Device::activations_for_gradients): bf16 on tensor
    /// cores, where products of f32 are a tenth as fast.
    ///
    /// # Errors
    /// As [`Device::host`].
    pub fn for_gradients(device: &Device, activations: Option<FloatType>) -> Result<Self, KernelError> {
        let activations = activations.unwrap_or_else(|| device.activations_for_gradients());
        let target = Self::new(device, Some(activations))?.with_exact(true);
        Ok(Self { joins_experts: false, ..target })
    }

    /// True if products are [exact](Self::with_exact).
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// For a model that computes nothing: weights are looked at, and neither read nor copied.
    pub(crate) fn outline(device: &Device) -> Result<Self, KernelError> {
        Ok(Self { outline: true, ..Self::new(device, None)?.with_exact(true) })
    }

    /// The same for another device of the same kind.
    pub fn on(&self, device: Device) -> Self {
        Self { device, ..self.clone() }
    }

    /// With `exact`, products on the CPU multiply decoded weights in f32, read from the mapped file
    /// as it is. By default weights are repacked at load, activations are rounded to 8 bits and
    /// keys and values are cached in f16, as llama.cpp does: several times as fast
    /// ([`QuantizedTensor::to_panels`]). With AMX, products and attention of many rows are in bf16
    /// then. Other devices compute the same either way.
    pub fn with_exact(self, exact: bool) -> Self {
        let own = cache_type(&self.device, self.activations, exact);
        Self { cache: if self.own_cache { self.cache } else { own }, exact, ..self }
    }

    /// With keys and values cached in this type. [`CacheType::Int8`] halves what a step behind a
    /// long text reads, and what it holds; on a GPU other floats than the activations' are slow.
    /// Models with latent attention cache floats, and so do gradients.
    pub fn with_cache(self, cache: CacheType) -> Self {
        Self { cache, own_cache: true, ..self }
    }

    /// The same with the type of cache that the device and [`Self::with_exact`] choose.
    pub fn with_usual_cache(self) -> Self {
        let exact = self.exact;
        Self { own_cache: false, ..self }.with_exact(exact)
    }

    /// For sequences of up to `context` tokens, where that decides what is computed: LongRoPE's
    /// frequencies have one set of divisors up to the original training's length, and another one
    /// beyond. By default sequences may be as long as the model's context, as in mlx-lm and
    /// llama.cpp; transformers goes by the tokens that there are.
    pub fn with_context(self, context: Option<usize>) -> Self {
        Self { context, ..self }
    }
}

/// The device of weights, and whether they are repacked for products in integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement<'a> {
    pub device: &'a Device,
    pub repack: bool,
}

impl Placement<'_> {
    /// True if weights are repacked on the CPU, after which their rows cannot be taken apart.
    pub fn repacks(self) -> bool {
        self.repack && !self.device.plan().copies_weights
    }

    /// A weight that was read through the map, as products read it.
    pub fn weight(self, weight: &QuantizedTensor) -> Result<QuantizedTensor, KernelError> {
        let weight = weight.to_device(self.device)?;
        if self.repack { weight.to_panels() } else { Ok(weight) }
    }
}
