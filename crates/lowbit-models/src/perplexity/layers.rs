use super::compare::divergence;
use crate::tape::Var;
use crate::{Model, ModelError};
use std::ops::Range;

/// Logits that are copied to the host at a time: 16 MB.
const LOGITS: usize = 1 << 22;

/// For each layer the mean over `tokens`, one text from its start, of `KL(teacher || model)`, in
/// nats, between the next-token distributions that both would have if the layer were the last: its
/// states go through the final norm and the output layer. This shows in which layers a quantised
/// model departs from its teacher. The last layer's value is the mean of
/// [`compare`](super::compare())'s divergences.
///
/// Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
///
/// # Errors
/// [`ModelError::TooShort`] for less than two tokens; [`ModelError::Vocabulary`] for vocabularies
/// of different sizes, [`ModelError::Layers`] for different numbers of layers; as
/// [`Model::forward`], the teacher's within [`ModelError::Teacher`]; [`ModelError::Divergence`]
/// where the model gives a token a probability of 0 and the teacher does not.
pub fn compare_layers(model: &Model, teacher: &Model, tokens: &[u32]) -> Result<Vec<f64>, ModelError> {
    let config = [model, teacher].map(Model::config);
    let (vocabularies, layers) = (config.map(|of| of.vocab_size), config.map(|of| of.num_hidden_layers));
    if vocabularies[0] != vocabularies[1] {
        return Err(ModelError::Vocabulary { model: vocabularies[0], teacher: vocabularies[1] });
    }
    if layers[0] != layers[1] {
        return Err(ModelError::Layers { model: layers[0], teacher: layers[1] });
    }
    if tokens.len() < 2 {
        return Err(ModelError::TooShort { tokens: tokens.len(), context: 2 });
    }
    let scored = tokens.len() - 1;
    let of_teacher = |error| ModelError::Teacher(Box::new(error));
    let mut states: Var = model.embed(&[tokens])?.into();
    let mut wanted: Var = teacher.embed(&[tokens]).map_err(of_teacher)?.into();
    let mut divergences = Vec::with_capacity(layers[0]);
    for index in 0..layers[0] {
        states = model.block(index, &states, &[tokens.len()])?;
        wanted = teacher.block(index, &wanted, &[tokens.len()]).map_err(of_teacher)?;
        let (mut sum, rows) = (0.0, (LOGITS / vocabularies[0].max(1)).max(1));
        for first in (0..scored).step_by(rows) {
            let rows = first..scored.min(first + rows);
            let teacher_logits = host_logits(teacher, &wanted, rows.clone()).map_err(of_teacher)?;
            let logits = host_logits(model, &states, rows.clone())?;
            let pairs =
                teacher_logits.chunks_exact(vocabularies[0]).zip(logits.chunks_exact(vocabularies[0]));
            for (position, (p, q)) in rows.zip(pairs) {
                sum += divergence(p, q).map_err(|(token, probability)| ModelError::Divergence {
                    position,
                    token,
                    probability,
                })?;
            }
        }
        divergences.push(sum / scored as f64);
    }
    Ok(divergences)
}

/// The logits that some states would lead to.
fn host_logits(model: &Model, states: &Var, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
    let logits = model.state_logits(&states.tensor().rows(rows.start, rows.end)?)?;
    Ok(logits.to_device(model.host())?.as_slice::<f32>()?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perplexity::{Scoring, compare};
    use crate::{Target, perplexity::Statistics};
    use lowbit_files::Checkpoint;
    use lowbit_kernels::Device;
    use std::ops::ControlFlow::Continue;
    use std::path::Path;

    fn load(name: &str) -> Model {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/models");
        let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
        Model::load_for(&Checkpoint::open(&models.join(name)).unwrap(), target).unwrap()
    }

    #[test]
    fn the_last_layer_is_the_models_own_divergence() {
        let tokens: Vec<u32> = (1..=40).map(|i| (i * 7 + i * i) % 200).collect();
        for (student, teacher) in [("qwen3_5-mlx-8bit", "qwen3_5"), ("qwen3_next-mlx-4bit", "qwen3_next")] {
            let [student, teacher] = [student, teacher].map(load);
            let layers = compare_layers(&student, &teacher, &tokens).unwrap();
            let all =
                compare(&student, &teacher, &tokens, 40, (Scoring::All, None), |_| Continue(())).unwrap();
            let want = Statistics::new(&all).unwrap().kl.value;
            let last = *layers.last().unwrap();
            assert_eq!(layers.len(), teacher.config().num_hidden_layers);
            assert!(
                (last - want).abs() < 1e-4 * want && layers.iter().all(|&kl| kl > 0.0),
                "{layers:?} {want}"
            );
            assert!(compare_layers(&teacher, &teacher, &tokens).unwrap().iter().all(|&kl| kl < 1e-9));
        }
    }

    #[test]
    fn models_that_cannot_be_compared() {
        let [one, other] = ["qwen3", "qwen3_5_moe"].map(load);
        let refused = |tokens: &[u32], model| compare_layers(model, &one, tokens).unwrap_err().to_string();
        assert!(refused(&[1, 2], &other).contains("but the teacher"), "{}", refused(&[1, 2], &other));
        assert!(refused(&[1], &one).contains("1 tokens"), "{}", refused(&[1], &one));
    }
}
