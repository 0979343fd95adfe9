//! SentencePiece's `precompiled_charsmap`: a length in bytes, a double-array trie of that length,
//! then the replacements, each ended by a zero byte. A key's value in the trie is where its
//! replacement starts.

use std::collections::HashSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::tokenizer::limit;

/// Keys are UTF-8; the longest that is looked up is a character with its marks.
const KEY: usize = 64;

/// Checks that every path through the trie stays inside it and ends at a replacement, and returns
/// how many times longer than its key a replacement is at most.
pub(super) fn check(base64: &str) -> Result<usize, String> {
    if base64.len() > limit::CHARSMAP {
        return Err(format!("{} bytes; at most {} are supported", base64.len(), limit::CHARSMAP));
    }
    let bytes = STANDARD.decode(base64).map_err(|error| error.to_string())?;
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or("it is cut")?;
    let length = u32::from_le_bytes(*length) as usize / 4 * 4;
    let (units, replacements) = rest.split_at_checked(length).ok_or("it is cut")?;
    let units: Vec<Unit> = units
        .chunks_exact(4)
        .map(|unit| Unit(u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]])))
        .collect();
    let replacements = std::str::from_utf8(replacements).map_err(|error| error.to_string())?;
    let root = units.first().ok_or("the trie is empty")?;
    let mut growth = 1;
    let mut seen = HashSet::new();
    let mut level = vec![root.offset()];
    // Level by level, so that a position is first met with the shortest key that leads to it.
    for key in 1..=KEY {
        let mut next = Vec::new();
        for position in level {
            for byte in 1..=255 {
                let child = position ^ byte;
                let unit = units.get(child).ok_or("a path leads out of the trie")?;
                if unit.label() != byte || !seen.insert(child) {
                    continue;
                }
                let child = child ^ unit.offset();
                if unit.has_leaf() {
                    let value = units.get(child).ok_or("a path leads out of the trie")?.value();
                    let text = replacements.get(value..).ok_or("a key has no replacement")?;
                    let length = text.bytes().position(|byte| byte == 0).unwrap_or(text.len());
                    growth = growth.max(length.div_ceil(key));
                }
                next.push(child);
            }
        }
        level = next;
    }
    match level.is_empty() {
        true => Ok(growth),
        false => Err(format!("a key has more than {KEY} bytes")),
    }
}

/// A cell of the trie, with the same fields as in Darts-clone.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    fn has_leaf(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    fn value(self) -> usize {
        (self.0 & 0x7fff_ffff) as usize
    }

    fn label(self) -> usize {
        (self.0 & 0x8000_00ff) as usize
    }

    fn offset(self) -> usize {
        (self.0 as usize >> 10) << ((self.0 & 1 << 9) >> 6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(units: &[u32], replacements: &str) -> String {
        let mut bytes = (4 * units.len() as u32).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(replacements.as_bytes());
        STANDARD.encode(bytes)
    }

    /// A trie whose one key is "a".
    fn one_key(value: u32, size: usize) -> Vec<u32> {
        let mut units = vec![0; size];
        units[0] = 256 << 10;
        units[256 ^ 97] = 97 | 1 << 8 | (1 << 10);
        units[256 ^ 97 ^ 1] = value;
        units
    }

    #[test]
    fn paths_stay_inside() {
        assert_eq!(check(&encoded(&one_key(0, 512), "bcd\0")), Ok(3));
        assert!(check(&encoded(&one_key(9, 512), "bcd\0")).unwrap_err().contains("no replacement"));
        assert!(check(&encoded(&one_key(0, 400), "bcd\0")).unwrap_err().contains("out of the trie"));
        assert!(check(&encoded(&[], "")).unwrap_err().contains("empty"));
        assert!(check("AAA").is_err());
        assert!(check("/////w==").unwrap_err().contains("cut"));
    }
}
