//! Checks that the bytes that arrived are those that the hub's ETag names.

use std::fmt::Write;

use sha1::{Digest as _, Sha1};
use sha2::Sha256;

use super::names::{Digest, ETag};

/// Takes a file's bytes in their order.
#[derive(Clone)]
pub(super) enum Verifier {
    Sha256(Sha256),
    /// Of git's blob, and of the content alone.
    Sha1(Sha1, Sha1),
    /// The ETag says nothing about the content.
    Length,
}

impl Verifier {
    /// For a file of that many bytes.
    pub fn new(etag: &ETag, bytes: u64) -> Self {
        match etag.digest() {
            Digest::Sha256 => Self::Sha256(Sha256::new()),
            Digest::Sha1 => Self::Sha1(Sha1::new_with_prefix(format!("blob {bytes}\0")), Sha1::new()),
            Digest::Unknown => Self::Length,
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(sha256) => sha256.update(bytes),
            Self::Sha1(blob, content) => {
                blob.update(bytes);
                content.update(bytes);
            }
            Self::Length => {}
        }
    }

    /// # Errors
    /// Both digests.
    pub fn finish(self, etag: &ETag) -> Result<(), String> {
        let (kind, digests) = match self {
            Self::Sha256(sha256) => ("SHA-256", vec![hex(&sha256.finalize())]),
            Self::Sha1(blob, content) => {
                ("git blob's SHA-1", vec![hex(&blob.finalize()), hex(&content.finalize())])
            }
            Self::Length => return Ok(()),
        };
        let want = etag.as_str();
        match digests.iter().any(|digest| digest.eq_ignore_ascii_case(want)) {
            true => Ok(()),
            false => Err(format!("what arrived has {kind} {}, but the hub says {want}", digests[0])),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ureq::http::HeaderValue;

    fn verify(etag: &'static str, content: &[u8]) -> Result<(), String> {
        let etag = ETag::parse(&HeaderValue::from_static(etag)).unwrap();
        let mut verifier = Verifier::new(&etag, content.len() as u64);
        content.chunks(3).for_each(|chunk| verifier.update(chunk));
        verifier.finish(&etag)
    }

    #[test]
    fn digests_are_those_of_sha256sum_git_and_sha1sum() {
        // `printf '{}\n' | sha256sum`, `| git hash-object --stdin`, `| sha1sum`.
        let content = b"{}\n";
        for etag in SUMS {
            verify(etag, content).unwrap();
            assert!(verify(etag, b"{}").unwrap_err().ends_with(etag));
        }
        verify("no-digest", b"anything").unwrap();
    }

    const SUMS: [&str; 3] = [
        "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356",
        "0967ef424bce6791893e9a57bb952f80fd536e93",
        "5f36b2ea290645ee34d943220a14b54ee5ea5be5",
    ];
}
