//! Whole texts as one vector each: the states after the final norm, pooled, through the linear
//! layers that a checkpoint has behind that.
//!
//! Source: sentence-transformers 6.2 `Pooling`, `Dense`; llama.cpp (llama-cpp-python 0.3.36)
//! `llm_graph_context::build_pooling`.

use crate::layers::{Residual, Step};
use crate::{Model, ModelError};
use lowbit_files::Pooling;
use lowbit_formats::DType;
use lowbit_kernels::Tensor;
use std::ops::ControlFlow::{self, Continue};

/// A text whose states are pooled.
#[derive(Clone, Copy, Debug)]
pub struct Pooled<'a> {
    /// Its tokens.
    pub tokens: &'a [u32],
    /// The first tokens that are not pooled, but read: those of a prompt. The last one is pooled in
    /// any case where [`Pooling::Last`] is asked for.
    pub skip: usize,
}

/// The states of a text that were pooled so far.
struct Pool {
    pooling: Pooling,
    skip: usize,
    /// Tokens seen.
    seen: usize,
    sum: Vec<f64>,
    pooled: usize,
}

impl Pool {
    fn new(pooling: Pooling, text: &Pooled<'_>, hidden_size: usize) -> Self {
        // A text of its prompt alone has nothing after it.
        let skip = if text.skip < text.tokens.len() { text.skip } else { 0 };
        Self { pooling, skip, seen: 0, sum: vec![0.0; hidden_size], pooled: 0 }
    }

    /// Takes the states of the next tokens, one row each. For [`Pooling::Last`] only the text's
    /// last row comes.
    fn take(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.sum.len()) {
            let is_pooled = match self.pooling {
                Pooling::Mean => self.seen >= self.skip,
                Pooling::Cls => self.seen == self.skip,
                Pooling::Last => true,
            };
            self.seen += 1;
            if is_pooled {
                self.pooled += 1;
                self.sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
            }
        }
    }

    fn finish(self) -> Result<Vec<f32>, ModelError> {
        let count = self.pooled.max(1) as f64;
        let pooled: Vec<f32> = self.sum.iter().map(|sum| (sum / count) as f32).collect();
        match pooled.iter().position(|value| !value.is_finite()) {
            Some(element) => Err(ModelError::Pooled { element, got: pooled[element].to_string() }),
            None => Ok(pooled),
        }
    }
}

impl Model {
    /// The values of an embedding: as many as a state has, unless linear layers behind pooling
    /// change that.
    pub fn embedding_size(&self) -> usize {
        self.dense().last().map_or(self.config().hidden_size, |dense| dense.out_features)
    }

    /// The pooled states of each text, `[hidden_size]` values each: those that the output layer
    /// would read, f32 sums; through the checkpoint's linear layers behind pooling, if there are
    /// some ([`Self::embedding_size`] values). Texts are run together as far as a pass holds them,
    /// and a text that is longer in parts, so that memory is bounded by the longest text, not by
    /// their number.
    ///
    /// # Errors
    /// [`ModelError::InSequence`] with the error of [`Self::forward`] for a text, or
    /// [`ModelError::Pooled`] for states that are NaN or infinite.
    pub fn pooled(&self, texts: &[Pooled<'_>], pooling: Pooling) -> Result<Vec<Vec<f32>>, ModelError> {
        // Nothing breaks it off.
        Ok(self.pooled_in_passes(texts, pooling, || Continue(()))?.unwrap_or_default())
    }

    /// As [`Self::pooled`]. `between` is called between two passes, where others may use the
    /// device; if it returns `Break`, the result is `None`. A pass has at most 512 tokens on a CPU,
    /// and 4096 on a GPU.
    ///
    /// # Errors
    /// Those of [`Self::pooled`].
    pub fn pooled_in_passes(
        &self,
        texts: &[Pooled<'_>],
        pooling: Pooling,
        mut between: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Vec<Vec<f32>>>, ModelError> {
        if texts.is_empty() {
            return Ok(Some(vec![]));
        }
        self.check_batch(texts.iter().map(|text| (text.tokens, 0)))?;
        let most = self.device().plan().prompt_tokens;
        let mut all = Vec::with_capacity(texts.len());
        while let Some(text) = texts.get(all.len()) {
            let first = all.len();
            if first > 0 && between().is_break() {
                return Ok(None);
            }
            // A text whose tokens see those after them has no parts.
            let pools = match text.tokens.len() > most && self.config().causal {
                true => match self.pool_in_parts(text, pooling, most, &mut between)? {
                    Some(pool) => vec![pool],
                    None => return Ok(None),
                },
                false => {
                    self.pool_together(&texts[first..first + together(&texts[first..], most)], pooling)?
                }
            };
            for (index, pool) in pools.into_iter().enumerate() {
                let in_text =
                    |error| ModelError::InSequence { sequence: first + index, error: Box::new(error) };
                all.push(pool.finish().map_err(in_text)?);
            }
        }
        self.projected(all).map(Some)
    }

    /// Pooled states through the linear layers behind pooling.
    fn projected(&self, pooled: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, ModelError> {
        if self.dense().is_empty() {
            return Ok(pooled);
        }
        let mut rows = pooled.concat();
        for dense in self.dense() {
            rows = dense.forward(&rows, pooled.len(), [self.device(), self.host()])?;
        }
        Ok(rows.chunks_exact(self.embedding_size()).map(<[f32]>::to_vec).collect())
    }

    /// Texts in one pass.
    fn pool_together(&self, texts: &[Pooled<'_>], pooling: Pooling) -> Result<Vec<Pool>, ModelError> {
        let tokens: Vec<&[u32]> = texts.iter().map(|text| text.tokens).collect();
        let states = self.states(&tokens, pooling)?.to_device(self.host())?.cast(DType::F32)?;
        let (hidden_size, mut values) = (self.config().hidden_size, states.as_slice::<f32>()?);
        let pools = texts.iter().map(|text| {
            let rows = if pooling == Pooling::Last { 1 } else { text.tokens.len() };
            let (own, rest) = values.split_at(rows * hidden_size);
            values = rest;
            let mut pool = Pool::new(pooling, text, hidden_size);
            pool.take(own);
            pool
        });
        Ok(pools.collect())
    }

    /// The states after the final norm that are pooled, on the device: all, or each text's last.
    fn states(&self, texts: &[&[u32]], pooling: Pooling) -> Result<Tensor, ModelError> {
        let step = Step::whole(texts.iter().map(|tokens| tokens.len()), self.device())?;
        let ids = texts.concat();
        let ids = Tensor::new(&ids, &[ids.len()], self.device())?;
        let hidden = self.decoder().run_whole(&ids, &step)?;
        self.pooled_rows(&hidden, &step, pooling)
    }

    fn pooled_rows(&self, hidden: &Residual, step: &Step, pooling: Pooling) -> Result<Tensor, ModelError> {
        Ok(match pooling {
            Pooling::Last => self.decoder().normed(&hidden.last(step)?)?.into_tensor(),
            Pooling::Mean | Pooling::Cls => self.decoder().normed(hidden)?.into_tensor(),
        })
    }

    /// For a dry run: as [`Self::pooled`], without reading values.
    pub(crate) fn dry_states(&self, texts: &[&[u32]], pooling: Pooling) -> Result<(), ModelError> {
        self.states(texts, pooling).map(|_| ())
    }

    /// A text in parts of `most` tokens, each with the keys and values of those before it; `None`
    /// if `between` two of them breaks it off.
    fn pool_in_parts(
        &self,
        text: &Pooled<'_>,
        pooling: Pooling,
        most: usize,
        between: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Pool>, ModelError> {
        let (mut cache, mut pool) = (self.cache(), Pool::new(pooling, text, self.config().hidden_size));
        self.reserve(&mut cache, text.tokens.len())?;
        for part in text.tokens.chunks(most) {
            let before = cache.position();
            if before > 0 && between().is_break() {
                return Ok(None);
            }
            let step = Step::new([(before, part.len())], self.device())?;
            let ids = Tensor::new(part, &[part.len()], self.device())?;
            let hidden = self.decoder().run(&ids, &step, &mut [&mut cache])?;
            if pooling == Pooling::Last && cache.position() < text.tokens.len() {
                continue;
            }
            let states =
                self.pooled_rows(&hidden, &step, pooling)?.to_device(self.host())?.cast(DType::F32)?;
            pool.take(states.as_slice::<f32>()?);
        }
        Ok(Some(pool))
    }
}

/// The number of first `texts`, at least one, that have at most `most` tokens together.
fn together(texts: &[Pooled<'_>], most: usize) -> usize {
    let mut tokens = 0;
    let fitting = texts.iter().take_while(|text| {
        tokens += text.tokens.len();
        tokens <= most
    });
    fitting.count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Logits, Target};
    use lowbit_files::Checkpoint;
    use lowbit_kernels::Device;
    use std::path::Path;

    fn load(name: &str) -> Model {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
        let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
        Model::load_for(&Checkpoint::open(&models.join(name)).unwrap(), target).unwrap()
    }

    /// Sums of f32 in another order.
    #[track_caller]
    fn assert_near(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        let largest = want.iter().fold(0f32, |most, value| most.max(value.abs()));
        let far = got.iter().zip(want).find(|(got, want)| (*got - *want).abs() > 1e-4 * largest);
        assert!(largest > 0.0 && far.is_none(), "{far:?}, the largest is {largest}");
    }

    fn text(length: usize, first: u32) -> Vec<u32> {
        (0..length as u32).map(|i| (first + i * 7 + i * i) % 200).collect()
    }

    #[test]
    fn texts_pool_alike_alone_together_and_in_parts() {
        for name in ["qwen3", "qwen3_5"] {
            let model = load(name);
            let tokens = [text(40, 1), text(1, 5), text(500, 9), text(17, 3)];
            let texts: Vec<Pooled<'_>> = tokens.iter().map(|tokens| Pooled { tokens, skip: 0 }).collect();
            for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
                let together = model.pooled(&texts, pooling).unwrap();
                for (text, together) in texts.iter().zip(&together) {
                    let alone = model.pooled(&[*text], pooling).unwrap();
                    let parts = model.pool_in_parts(text, pooling, 64, &mut || Continue(())).unwrap();
                    let parts = parts.unwrap().finish().unwrap();
                    assert_near(&alone[0], together);
                    assert_near(&parts, together);
                }
            }
        }
    }

    #[test]
    fn the_last_state_makes_the_logits() {
        let model = load("qwen3");
        let tokens = text(40, 1);
        let logits = model.forward(&tokens, &mut model.cache(), Logits::Last).unwrap().unwrap();
        let pooled = model.pooled(&[Pooled { tokens: &tokens, skip: 0 }], Pooling::Last).unwrap().remove(0);
        let hidden = model.config().hidden_size;
        let pooled = Tensor::new(&pooled, &[1, hidden], model.device()).unwrap();
        let head = model.decoder().head().forward_f32(&crate::tape::Var::from(pooled)).unwrap().into_tensor();
        assert_near(head.as_slice::<f32>().unwrap(), logits.as_slice::<f32>().unwrap());
    }

    #[test]
    fn a_prompt_is_left_out_of_the_pool() {
        let model = load("qwen3");
        let tokens = text(9, 1);
        let rows = model.states(&[&tokens], Pooling::Mean).unwrap();
        let (rows, hidden) = (rows.as_slice::<f32>().unwrap(), model.config().hidden_size);
        let pooled =
            |skip, pooling| model.pooled(&[Pooled { tokens: &tokens, skip }], pooling).unwrap().remove(0);
        assert_eq!(pooled(4, Pooling::Cls), rows[4 * hidden..][..hidden]);
        assert_eq!(pooled(4, Pooling::Last), rows[8 * hidden..]);
        let mean = |skip: usize| -> Vec<f32> {
            let column = |at: usize| (skip..9).map(|row| f64::from(rows[row * hidden + at])).sum::<f64>();
            (0..hidden).map(|at| (column(at) / (9 - skip) as f64) as f32).collect()
        };
        assert_eq!(pooled(4, Pooling::Mean), mean(4));
        // Nothing comes after the prompt.
        assert_eq!(pooled(9, Pooling::Mean), mean(0));
    }

    #[test]
    fn bad_texts_are_named() {
        let model = load("qwen3");
        let pooled = |tokens: &[u32]| {
            let good = Pooled { tokens: &[1], skip: 0 };
            model.pooled(&[good, Pooled { tokens, skip: 0 }], Pooling::Last).unwrap_err().to_string()
        };
        assert_eq!(pooled(&[]), "sequence 1 of the batch: there are no tokens to start from");
        assert_eq!(pooled(&[275]), "sequence 1 of the batch: token 0 is 275, but the vocabulary has 275");
        let limit = model.config().max_position_embeddings;
        let want = format!(
            "sequence 1 of the batch: {} tokens do not fit the model's context of {limit}",
            limit + 1
        );
        assert_eq!(pooled(&vec![0; limit + 1]), want);
        assert!(model.pooled(&[], Pooling::Last).unwrap().is_empty());
    }
}
