//! Checkpoints that are computed with, for paths that no script can answer.

use super::{Running, Script, Scripted};
use lowbit::{Checkpoint, Device, Model, Target, Tokenizer};
use lowbit_serve::Served;
use std::path::Path;

/// A checkpoint, opened.
pub struct Opened {
    pub checkpoint: Checkpoint,
    pub model: Model,
    pub tokenizer: Tokenizer,
}

pub fn open(folder: &Path) -> Opened {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let target = Target::new(&Device::cpu(Some(2)).unwrap(), None).unwrap().with_exact(true);
    let (model, tokenizer) =
        (Model::load_for(&checkpoint, target).unwrap(), Tokenizer::from_checkpoint(&checkpoint).unwrap());
    Opened { checkpoint, model, tokenizer }
}

/// A server of the checkpoint in `folder`, whose engine writes nothing.
pub fn serve(folder: &Path) -> Running {
    let Opened { checkpoint, model, tokenizer } = open(folder);
    let vocab_size = model.config().vocab_size;
    let served =
        Served::new("test", tokenizer, None).with_vocab_size(vocab_size).with_model(checkpoint, model);
    Running::of(served, Scripted::new(vec![Script::new(vec![])]), |_| {})
}
