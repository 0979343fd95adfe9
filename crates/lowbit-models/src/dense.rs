//! The linear layers that embedding models have behind pooling. Source: sentence-transformers 6.2
//! `Dense`.

use crate::layers::Linear;
use crate::tape::Var;
use crate::{ModelError, Target, Weights};
use lowbit_files::{Checkpoint, DenseModule, EmbeddingConfig, Layout};
use lowbit_kernels::{Device, Tensor};

/// A linear layer behind pooling. Its products are exact: there are few of them.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    linear: Linear,
    pub out_features: usize,
    tanh: bool,
}

impl Dense {
    /// Those of a checkpoint whose states have `width` values.
    pub(crate) fn all(
        checkpoint: &Checkpoint,
        target: &Target,
        mut width: usize,
    ) -> Result<Vec<Self>, ModelError> {
        // Settings that cannot be read matter to embeddings alone, which read them again.
        let Ok(EmbeddingConfig { dense, .. }) = checkpoint.embedding_config() else { return Ok(vec![]) };
        let target = target.clone().with_exact(true);
        let mut all = Vec::with_capacity(dense.len());
        for DenseModule { name, in_features, out_features, tanh, .. } in dense {
            if in_features != width {
                let (path, key) = (checkpoint.path().into(), format!("in_features of {name}"));
                let want = format!("{width} values come to it");
                return Err(ModelError::Config { path, key, got: in_features.to_string(), want });
            }
            let linear = match checkpoint.layout() {
                Layout::Gguf => {
                    Weights::new(checkpoint, &target).linear((&name, &name), out_features, in_features)?
                }
                Layout::HuggingFace | Layout::Mlx => {
                    let own = Checkpoint::open(&checkpoint.path().join(&name))?;
                    Weights::new(&own, &target).linear(("linear", "linear"), out_features, in_features)?
                }
            };
            width = out_features;
            all.push(Self { linear, out_features, tanh });
        }
        Ok(all)
    }

    /// Of rows side by side, on the host.
    pub fn forward(
        &self,
        rows: &[f32],
        count: usize,
        [device, host]: [&Device; 2],
    ) -> Result<Vec<f32>, ModelError> {
        let x = Tensor::new(rows, &[count, rows.len() / count], device)?;
        let y = self.linear.forward_f32(&Var::from(x))?.into_tensor().to_device(host)?;
        let y = y.as_slice::<f32>()?.iter();
        Ok(if self.tanh { y.map(|value| value.tanh()).collect() } else { y.copied().collect() })
    }
}
