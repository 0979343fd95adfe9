//! Low-bit language models: load a checkpoint, generate text, chat, measure, quantise.
//!
//! ```
//! # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
//! let text = lowbit::generate("models/demo-4bit", "A vector is")?;
//! println!("A vector is{text}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`LanguageModel`] answers many prompts, streams and takes [`GenerationOptions`]; a [`Chat`] is
//! a conversation. They are made of parts, for callers who want logits, caches or tokens:
//!
//! ```
//! # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
//! #     .expect("the repository");
//! use lowbit::{Checkpoint, Device, GenerationOptions, Model, Session, Tokenizer};
//! use std::ops::ControlFlow::Continue;
//!
//! let checkpoint = Checkpoint::open("models/demo-4bit".as_ref())?;
//! let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
//! let model = Model::load(&checkpoint, &Device::cpu(None)?)?;
//!
//! let mut session = Session::new(&model);
//! let prompt = tokenizer.encode("A vector is", true)?;
//! let logits = session.prefill(&prompt, |_| Continue(()))?.expect("nothing interrupts it");
//! let options = GenerationOptions::default().with_max_tokens(50).with_stop_ids(tokenizer.eos_ids().to_vec());
//! let written = session.generate(logits, &options, |_| Continue(()))?;
//! println!("{}", tokenizer.decode(&written.tokens)?);
//! # Ok::<(), lowbit::Error>(())
//! ```
//!
//! All errors become one [`Error`]. Everything else that the crates below export is under
//! [`files`], [`formats`], [`kernels`], [`models`] and [`quantize`](mod@quantize). The program is
//! the crate `lowbit-cli`.
//!
//! # Features
//!
//! The default build runs on the CPU and has `hub` alone. Building the others needs nothing but
//! Rust; running them needs what the last column says.
//!
//! | feature | brings | needs at run time |
//! |---|---|---|
//! | `grammar` | `Grammars`: replies in the form of a JSON schema, a regular expression or a grammar | |
//! | `hub` | `resolve`: models by their name on the Hugging Face hub; without it every model is a path, and no TLS is built | a network for what is not in huggingface_hub's cache |
//! | `cuda` | `Device::cuda` | a driver for CUDA 12 or newer; NVRTC and CUDA's headers, see `CudaOptions` |
//! | `vulkan` | `Device::vulkan` | Vulkan 1.3 |
//! | `metal` | `Device::metal` | macOS with Metal Shading Language 3.2 (run by clang on a CPU, not on a Mac yet) |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod chat;
mod embed;
mod error;
#[cfg(feature = "grammar")]
mod grammar;
mod history;
mod language_model;
mod parse;
mod reply;
mod reply_stream;
mod rerank;
mod respelled;
mod stop;

pub use chat::Chat;
pub use embed::{EmbedOptions, Embedder, FittedTokens, Prompt, cosine};
pub use error::Error;
#[cfg(feature = "grammar")]
pub use grammar::{CallForm, FORM_BYTES, Grammars, ReplyForm};
pub use language_model::{LanguageModel, generate};
pub use parse::{Call, Event, ReplyParser, Syntax};
pub use reply::{Progress, Reply, ReplyOptions, reply};
pub use reply_stream::{Piece, ReplyStream};
pub use rerank::{RerankOptions, Reranker, Score};
pub use respelled::render as render_chat;

pub use lowbit_files::{
    ChatTemplate, Checkpoint, EmbeddingConfig, FileError, Layout, Message, Pooling, SpecialTokens, Stored,
    TensorView, Tensors, TokenStream, Tokenizer, ToolCall,
};
pub use lowbit_formats::{DType, FloatType, Format, FormatError};
#[cfg(feature = "hub")]
pub use lowbit_hub::{HubError, resolve};
#[cfg(feature = "cuda")]
pub use lowbit_kernels::gpu::CudaOptions;
#[cfg(feature = "vulkan")]
pub use lowbit_kernels::gpu::VulkanOptions;
pub use lowbit_kernels::{Cpu, Device, KernelError, QuantizedTensor, Tensor, gpu::Gpu, ops::SampleParams};
pub use lowbit_models::{
    Cache, ComparedToken, Constraint, DraftModel, Drafter, Finish, Generation, GenerationOptions, Grammar,
    Logits, Model, ModelError, Mtp, Ngrams, Perplexity, Predictor, Scoring, Session, Speculated, Speculation,
    Statistics, Target, compare, compare_layers, dry_batches, dry_chat, dry_generation, dry_guesses,
    dry_perplexity, dry_pooled, dry_speculation, layers::DecoderConfig, perplexity,
};

/// Files: checkpoints, safetensors, GGUF, tokenizers, chat templates.
pub use lowbit_files as files;
/// Weight formats.
pub use lowbit_formats as formats;
/// Models by name, and packages of a Python index.
#[cfg(feature = "hub")]
pub use lowbit_hub as hub;
/// Devices, tensors and ops.
pub use lowbit_kernels as kernels;
/// Architectures, caches, generation.
pub use lowbit_models as models;
/// Quantising checkpoints.
pub use lowbit_quantize as quantize;
