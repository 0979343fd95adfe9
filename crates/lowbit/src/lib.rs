//! Low-bit language models: load a checkpoint, generate text, quantise.
//!
//! ```no_run
//! use lowbit::{Checkpoint, Device, GenerationOptions, Model, SampleParams, Session, Tokenizer, resolve};
//! use std::ops::ControlFlow::Continue;
//!
//! let checkpoint = Checkpoint::open("models/demo-4bit".as_ref())?;
//! let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
//! let model = Model::load(&checkpoint, &Device::cpu(None)?)?;
//!
//! let mut session = Session::new(&model);
//! let prompt = tokenizer.encode("A vector is", true)?;
//! let logits = session.prefill(&prompt, |_| Continue(()))?.expect("nothing breaks off");
//! let options = GenerationOptions { max_tokens: 50, ..GenerationOptions::default() };
//! let written = session.generate(logits, &options, |_| Continue(()))?;
//! println!("{}", tokenizer.decode(&written.tokens)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use lowbit_files::{ChatTemplate, Checkpoint, Message, TokenStream, Tokenizer, resolve};
pub use lowbit_formats::{DType, Format};
pub use lowbit_kernels::{Device, ops::SampleParams};
pub use lowbit_models::{
    Finish, Generation, GenerationOptions, Logits, Model, Perplexity, Scoring, Session, Target, perplexity,
};
pub use lowbit_quantize as quantize;
