//! Runs a model one block at a time, for learning models that do not fit end to end.

use crate::layers::Step;
use crate::tape::{Inventory, Var};
use crate::{Model, ModelError};
use lowbit_kernels::{KernelError, Tensor};

impl Model {
    /// The states before the first block, f32 `[T, hidden_size]`: the embeddings of the tokens of
    /// `batch`, one sequence after the other.
    ///
    /// # Errors
    /// As [`Self::forward_batch`].
    pub fn embed(&self, batch: &[&[u32]]) -> Result<Tensor, ModelError> {
        self.check_batch(batch.iter().map(|&tokens| (tokens, 0)))?;
        let ids = batch.concat();
        let ids = Tensor::new(&ids, &[ids.len()], self.device())?;
        Ok(self.decoder().embed(&ids, None)?.into_tensor())
    }

    /// The states after block `index`, from those before it: f32 `[T, hidden_size]`, whole
    /// sequences of these lengths one after the other. A tape that recorded `x` records the block,
    /// and computes with its parameters. All blocks in turn compute what a pass of the whole model
    /// computes. For models in f32, see [`Target::for_gradients`](crate::Target::for_gradients).
    ///
    /// # Errors
    /// [`KernelError::Value`] for a block that the model does not have, [`KernelError::Shape`]
    /// where `x` has other rows than the sequences, [`ModelError::ContextLength`] for a sequence
    /// that does not fit; those of the ops.
    pub fn block(&self, index: usize, x: &Var, lengths: &[usize]) -> Result<Var, ModelError> {
        self.check_block(index)?;
        let (tokens, limit) = (lengths.iter().sum::<usize>(), self.config().max_position_embeddings);
        if let Some(&tokens) = lengths.iter().find(|&&length| length > limit) {
            return Err(ModelError::ContextLength { tokens, limit });
        }
        let (got, want) = (x.tensor().shape(), [tokens, self.config().hidden_size]);
        if got != want || tokens == 0 {
            let want = format!("{} sequences of {tokens} tokens in all want {want:?}", lengths.len());
            return Err(KernelError::Shape { op: "block", operand: "x", got: got.to_vec(), want }.into());
        }
        let step = Step::whole(lengths.iter().copied(), self.device())?;
        Ok(self.decoder().block(index, x, &step)?)
    }

    /// The logits of states `[T, hidden_size]`, f32 `[T, vocab_size]`: those of a whole pass where
    /// the states are the last block's.
    ///
    /// # Errors
    /// [`ModelError::Headless`]; those of the ops.
    pub fn state_logits(&self, states: &Tensor) -> Result<Tensor, ModelError> {
        self.check_head()?;
        let hidden = self.decoder().unchanged(states.clone().into())?;
        Ok(self.decoder().logits(&hidden)?.into_tensor())
    }

    /// The named tensors of block `index`.
    ///
    /// # Errors
    /// [`KernelError::Value`] for a block that the model does not have.
    pub fn block_inventory(&self, index: usize) -> Result<Inventory, ModelError> {
        self.check_block(index)?;
        Ok(self.decoder().block_inventory(index))
    }

    fn check_block(&self, index: usize) -> Result<(), KernelError> {
        let count = self.config().num_hidden_layers;
        if index < count {
            return Ok(());
        }
        let (got, want) = (index.to_string(), format!("the model has {count} blocks"));
        Err(KernelError::Value { op: "block", operand: "index", got, want })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::Residual;
    use crate::tape::{Gradients, Parameter, Parameters, Tape};
    use crate::{Target, tape};
    use lowbit_files::Checkpoint;
    use lowbit_formats::DType;
    use lowbit_kernels::Device;
    use lowbit_kernels::ops::WeightPart;
    use std::path::Path;
    use std::rc::Rc;

    fn load(name: &str) -> Model {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
        let target = Target::for_gradients(&Device::cpu(Some(2)).unwrap(), None).unwrap();
        Model::load_for(&Checkpoint::open(&models.join(name)).unwrap(), target).unwrap()
    }

    fn texts() -> [Vec<u32>; 3] {
        [17, 40, 1].map(|count| (1..=count).map(|i| (i * 7 + i * i) % 200).collect())
    }

    /// The inputs of the output layer, block by block.
    fn by_block(model: &Model, batch: &[&[u32]], tape: Option<&Tape>) -> Var {
        let lengths: Vec<usize> = batch.iter().map(|tokens| tokens.len()).collect();
        let x = model.embed(batch).unwrap();
        let mut x = tape.map_or_else(|| Var::from(x.clone()), |tape| tape.leaf(x.clone()));
        for index in 0..model.config().num_hidden_layers {
            x = model.block(index, &x, &lengths).unwrap();
        }
        let update = Tensor::zeros(x.tensor().shape(), DType::F32, model.device());
        model.decoder().normed(&Residual { stream: x, update: update.into() }).unwrap()
    }

    /// The gradients of the sum of the squares of `y`.
    fn gradients(tape: &Tape, y: &Var) -> Gradients {
        tape.backward(&[(y, y.tensor())]).unwrap()
    }

    /// The blocks' weights and tensors: all but the embedding and what follows the last block.
    fn parameters(model: &Model) -> Rc<Parameters> {
        let blocks = (0..model.config().num_hidden_layers).map(|i| model.block_inventory(i).unwrap());
        let all = blocks.flat_map(|tape::Inventory { weights, tensors }| {
            let weights =
                weights.into_iter().map(|w| (w.name, Parameter::Weight(w.value, WeightPart::Values)));
            weights
                .chain(tensors.into_iter().map(|t| (t.name, Parameter::Tensor(t.value))))
                .collect::<Vec<_>>()
        });
        Rc::new(all.collect())
    }

    #[test]
    fn blocks_one_after_the_other_are_the_model() {
        for name in ["qwen3", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe-mlx-4bit"] {
            let (model, texts) = (load(name), texts());
            let batch: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
            let whole = model.normed(&batch, None).unwrap().into_tensor();
            let got = by_block(&model, &batch, None).into_tensor();
            assert_eq!(got.as_slice::<f32>().unwrap(), whole.as_slice::<f32>().unwrap(), "{name}");

            let parameters = parameters(&model);
            let tape = Tape::new(parameters.clone());
            let want = gradients(&tape, &model.normed(&batch, Some(&tape)).unwrap());
            let tape = Tape::new(parameters.clone());
            let got = gradients(&tape, &by_block(&model, &batch, Some(&tape)));
            assert!(!got.parameters().is_empty() && got.parameters().len() == want.parameters().len());
            for (name, got) in got.parameters() {
                let of = |gradient: &lowbit_kernels::ops::WeightGradient| {
                    let tensors = gradient.tensors();
                    tensors.iter().flat_map(|x| x.as_slice::<f32>().unwrap().to_vec()).collect::<Vec<_>>()
                };
                assert_eq!(of(got), of(&want.parameters()[name]), "{name}");
            }
        }
    }

    #[test]
    fn bad_blocks_are_refused() {
        let model = load("qwen3");
        let x: Var = model.embed(&[&[1, 2, 3]]).unwrap().into();
        let message = |result: Result<Var, ModelError>| result.unwrap_err().to_string();
        let count = model.config().num_hidden_layers;
        let want = format!("block: index is {count}, but the model has {count} blocks");
        assert_eq!(message(model.block(count, &x, &[3])), want);
        assert_eq!(model.block_inventory(count).unwrap_err().to_string(), want);
        let hidden = model.config().hidden_size;
        let want =
            format!("block: x is [3, {hidden}], but 2 sequences of 4 tokens in all want [4, {hidden}]");
        assert_eq!(message(model.block(0, &x, &[3, 1])), want);
        let limit = model.config().max_position_embeddings;
        let want = format!("{} tokens do not fit the model's context of {limit}", limit + 1);
        assert_eq!(message(model.block(0, &x, &[limit + 1])), want);
        let error = model.embed(&[&[1], &[1_000_000]]).unwrap_err().to_string();
        assert!(error.contains("sequence 1") && error.contains("1000000"), "{error}");
        assert!(model.embed(&[&[]]).is_err());
    }
}
