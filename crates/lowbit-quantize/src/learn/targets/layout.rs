//! The bytes of a file of targets.
//!
//! ```text
//! lowbit targets 1\n
//! a line of JSON: what the targets are of (another run's are refused), how many tokens are known, and of which vocabulary
//! of each chunk of 16 windows: the windows, and SHA-256 of the header, the chunk's number (u64) and the windows
//! ```
//! The windows are those to learn from, in the order of the data, then those held out. Each is,
//! little-endian, with `K` for `top_k`:
//! ```text
//! ids      [tokens, K]  u16, or u32 where the vocabulary is more than 65536
//! ln_p     [tokens, K]  f16
//! ln_rest  [tokens]     f32
//! ```
//! All lengths follow from the data and from `K`: none is read.

use super::super::LearnOptions;
use super::super::state::{difference, digest, hexadecimal};
use super::refuse;
use crate::QuantizeError;
use lowbit_files::Checkpoint;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

const MAGIC: &[u8] = b"lowbit targets 1\n";
/// More than any header has.
const HEADER: u64 = 4096;
const DIGEST: usize = 32;
/// An interrupted run loses at most the work on one chunk: 16 windows of 512 tokens at a `K` of 128
/// are 6 MB.
pub const WINDOWS_PER_CHUNK: usize = 16;

/// The identity of a file's targets, in the order in which differences are told.
pub struct Identity {
    keys: Vec<(&'static str, Value)>,
    top_k: usize,
}

impl Identity {
    /// `windows` are those of the file, and whether there are others to learn from, which are not
    /// drawn.
    pub fn new(
        checkpoint: &Checkpoint,
        options: &LearnOptions,
        top_k: usize,
        (windows, some): (&[&Vec<u32>], bool),
    ) -> Self {
        let longest = windows.iter().map(|window| window.len()).max();
        let keys = vec![
            // As text: a float may change in its last digit when JSON is read.
            ("temperature", json!(options.temperature.to_string())),
            ("longest_window", json!(longest)),
            ("windows", json!(windows.len())),
            // All windows are the same ones for every seed.
            ("seed", if some { json!(options.seed) } else { Value::Null }),
            ("data", json!(hexadecimal(digest(windows.iter().copied())))),
            ("teacher", json!(fingerprint(checkpoint))),
        ];
        Self { keys, top_k }
    }
}

/// The digest of what a checkpoint computes with: its tensors and its configuration.
fn fingerprint(checkpoint: &Checkpoint) -> String {
    let mut digest = Sha256::new();
    if let Ok(config) = checkpoint.config() {
        digest.update(config.to_string());
    }
    let entries = checkpoint.metadata().into_iter().flat_map(|metadata| metadata.iter());
    // The tokens are the data's.
    for (key, value) in entries.filter(|(key, _)| !key.starts_with("tokenizer.")) {
        digest.update(format!("{key}={value:?}\n"));
    }
    for view in checkpoint.tensors().iter() {
        digest.update(format!("{} {} {:?}\n", view.name, view.stored, view.shape));
        digest.update(view.bytes.get());
        view.release();
    }
    hexadecimal(digest)
}

/// The places of everything in a file.
pub struct Layout {
    header: Vec<u8>,
    vocabulary: usize,
    top_k: usize,
    /// The start of each window, and its tokens.
    windows: Vec<(u64, usize)>,
    /// The end of each chunk, after that of the header.
    ends: Vec<u64>,
}

impl Layout {
    /// Of a new file, for a teacher with this vocabulary.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for more than a file can have.
    pub fn new(identity: &Identity, vocabulary: usize, windows: &[&Vec<u32>]) -> Result<Self, QuantizeError> {
        let top_k = identity.top_k.min(vocabulary);
        let mut keys: Map<String, Value> =
            identity.keys.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
        keys.insert("vocabulary".into(), json!(vocabulary));
        keys.insert("top_k".into(), json!(top_k));
        let header = [MAGIC, format!("{}\n", Value::Object(keys)).as_bytes()].concat();
        let mut layout = Self { header, vocabulary, top_k, windows: vec![], ends: vec![] };
        let mut at = layout.header.len() as u64;
        layout.ends.push(at);
        let too_large =
            || QuantizeError::Learn(format!("{top_k} targets per token are more than a file can have"));
        for chunk in windows.chunks(WINDOWS_PER_CHUNK) {
            for window in chunk {
                let bytes = layout.token_bytes().checked_mul(window.len()).ok_or_else(too_large)?;
                layout.windows.push((at, window.len()));
                at = at.checked_add(bytes as u64).ok_or_else(too_large)?;
            }
            at = at.checked_add(DIGEST as u64).ok_or_else(too_large)?;
            layout.ends.push(at);
        }
        Ok(layout)
    }

    /// Of a file that is there; `None` where its header is not whole.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`] for a file of something else; [`QuantizeError::Io`].
    pub fn read(
        file: &mut File,
        path: &Path,
        identity: &Identity,
        windows: &[&Vec<u32>],
    ) -> Result<Option<Self>, QuantizeError> {
        let mut head = vec![];
        let read = file.rewind().and_then(|()| file.take(HEADER).read_to_end(&mut head));
        read.map_err(|error| QuantizeError::Io { path: path.to_path_buf(), error })?;
        let other = || refuse(path, "is no file of a teacher's targets, or of another version of lowbit");
        let Some(rest) = head.strip_prefix(MAGIC) else {
            return if MAGIC.starts_with(&head) { Ok(None) } else { Err(other()) };
        };
        let Some(line) = rest.iter().position(|&byte| byte == b'\n') else {
            return if (head.len() as u64) < HEADER { Ok(None) } else { Err(other()) };
        };
        let header: Value = serde_json::from_slice(&rest[..line]).map_err(|_| other())?;
        let vocabulary = header["vocabulary"].as_u64().and_then(|size| u32::try_from(size).ok());
        let vocabulary = vocabulary.filter(|&size| size > 0).ok_or_else(other)? as usize;
        let top_k = json!(identity.top_k.min(vocabulary));
        let mine = identity.keys.iter().map(|(key, value)| (*key, value)).chain([("top_k", &top_k)]);
        if let Some(difference) = difference(mine, &header) {
            return Err(refuse(path, &format!("has the targets of another run: {difference}")));
        }
        let layout = Self::new(identity, vocabulary, windows)?;
        if head.starts_with(&layout.header) { Ok(Some(layout)) } else { Err(other()) }
    }

    pub fn header(&self) -> &[u8] {
        &self.header
    }

    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    pub fn top_k(&self) -> usize {
        self.top_k
    }

    pub fn chunks(&self) -> usize {
        self.ends.len() - 1
    }

    /// The bytes of so many chunks, and the header before them.
    pub fn chunk_end(&self, chunks: usize) -> u64 {
        self.ends[chunks]
    }

    /// The bytes of the whole file.
    pub fn end(&self) -> u64 {
        self.chunk_end(self.chunks())
    }

    /// The number of whole chunks in a file of this many bytes.
    pub fn whole_chunks(&self, length: u64) -> usize {
        self.ends[1..].iter().take_while(|&&end| end <= length).count()
    }

    /// The start of a window, and its bytes.
    pub fn window(&self, place: usize) -> (u64, usize) {
        let (start, tokens) = self.windows[place];
        (start, tokens * self.token_bytes())
    }

    pub fn id_bytes(&self) -> usize {
        if self.vocabulary <= 1 << 16 { 2 } else { 4 }
    }

    /// The bytes of a token.
    pub fn token_bytes(&self) -> usize {
        self.top_k * (self.id_bytes() + 2) + 4
    }

    /// That of a chunk.
    pub fn checksum(&self, chunk: usize, content: &[u8]) -> [u8; DIGEST] {
        let digest = Sha256::new().chain_update(&self.header).chain_update((chunk as u64).to_le_bytes());
        digest.chain_update(content).finalize().into()
    }

    /// Compares the checksums of the first chunks; the digest of all of them.
    ///
    /// # Errors
    /// [`QuantizeError::Learn`], which names the chunk; [`QuantizeError::Io`].
    pub fn check(&self, file: &mut File, path: &Path, chunks: usize) -> Result<String, QuantizeError> {
        let io = |error| QuantizeError::Io { path: path.to_path_buf(), error };
        let mut all = Sha256::new();
        file.seek(SeekFrom::Start(self.ends[0])).map_err(io)?;
        for chunk in 0..chunks {
            let mut content = vec![0; (self.ends[chunk + 1] - self.ends[chunk]) as usize];
            file.read_exact(&mut content).map_err(io)?;
            let (content, checksum) = content.split_at(content.len() - DIGEST);
            if self.checksum(chunk, content)[..] != *checksum {
                let problem =
                    format!("is damaged: the checksum of chunk {} of {} is wrong", chunk + 1, self.chunks());
                return Err(refuse(path, &problem));
            }
            all.update(checksum);
        }
        Ok(hexadecimal(all))
    }
}
