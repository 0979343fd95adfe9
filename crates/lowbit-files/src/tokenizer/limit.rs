//! Limits of a tokenizer: several times the most that a published one has, and little enough that
//! loading it takes a few seconds and less than a gigabyte.

/// Tokens of a vocabulary (published: 901,629, XLM-V).
pub(super) const TOKENS: usize = 1 << 21;
/// Ids are below this.
pub(super) const ID: u32 = 1 << 24;
/// Bytes of a token.
pub(super) const TOKEN: usize = 4096;
/// Merges (published: 580,604, Gemma).
pub(super) const MERGES: usize = 1 << 22;
/// Added tokens (published: 65,790, Llasa).
pub(super) const ADDED: usize = 1 << 18;
/// Bytes of all added tokens.
pub(super) const ADDED_BYTES: usize = 8 << 20;
/// Characters of a word that WordPiece looks at (published: 100); it takes their square in time.
pub(super) const WORD: usize = 256;
/// Bytes of a Unigram token (published: 64): each may be looked at, at each place of a text.
pub(super) const PIECE: usize = 512;
/// Different beginnings of a Unigram vocabulary's tokens.
pub(super) const NODES: usize = 1 << 21;
/// Steps of a normalizer, pre-tokenizer, post-processor or decoder, and how deep they are nested.
pub(super) const STEPS: usize = 64;
pub(super) const NESTED: usize = 8;
/// The most that all steps together may lengthen a text, as a factor (published: 66, T5: a charsmap
/// of NFKC 11 times, `▁` for two spaces twice, and for a space three times).
pub(super) const GROWTH: usize = 128;
/// Bytes of a step's strings, except a charsmap.
pub(super) const STRING: usize = 16 << 10;
/// Bytes of a charsmap in base64 (published: 316,720).
pub(super) const CHARSMAP: usize = 4 << 20;
