//! Zip files, as far as wheels need them: files that are stored or deflated, below 4 GiB, in memory
//! (PKWARE's APPNOTE 6.3). Checksums are not looked at: a wheel is verified as a whole.

use miniz_oxide::inflate::decompress_slice_iter_to_slice;

use crate::shown;

/// Of the end record, of an entry in the directory, and of a file's own header.
const END: u32 = 0x0605_4b50;
const ENTRY: u32 = 0x0201_4b50;
const HEADER: u32 = 0x0403_4b50;
/// Bytes of those, without names and comments.
const END_SIZE: usize = 22;
const ENTRY_SIZE: usize = 46;
const HEADER_SIZE: usize = 30;
/// How contents are kept.
const STORED: u16 = 0;
const DEFLATED: u16 = 8;

/// A file in the directory.
#[derive(Debug)]
pub struct Entry {
    pub name: String,
    method: u16,
    /// Bytes in the zip file.
    packed: usize,
    /// Bytes of the content.
    size: usize,
    /// The first byte of the file's own header.
    header: usize,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn usize_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32_at(bytes, at)?).ok()
}

/// The files of a zip file, without its folders.
///
/// # Errors
/// What is wrong with it.
pub fn entries(zip: &[u8]) -> Result<Vec<Entry>, String> {
    directory(zip).ok_or_else(|| "it is no zip file, or a broken one".to_string())
}

fn directory(zip: &[u8]) -> Option<Vec<Entry>> {
    // A comment of up to 65535 bytes may follow the end record.
    let last = zip.len().checked_sub(END_SIZE)?;
    let is_end = |&at: &usize| {
        let comment = u16_at(zip, at + 20).map_or(usize::MAX, usize::from);
        u32_at(zip, at) == Some(END) && comment == last - at
    };
    let end = (last.saturating_sub(usize::from(u16::MAX))..=last).rev().find(is_end)?;
    let (count, mut at) = (u16_at(zip, end + 10)?, usize_at(zip, end + 16)?);
    let mut entries = vec![];
    for _ in 0..count {
        if u32_at(zip, at)? != ENTRY {
            return None;
        }
        let lengths = [28, 30, 32].map(|field| u16_at(zip, at + field).map(usize::from));
        let [name, extra, comment] = [lengths[0]?, lengths[1]?, lengths[2]?];
        let start = at + ENTRY_SIZE;
        let text = zip.get(start..start + name)?;
        let entry = Entry {
            name: String::from_utf8(text.to_vec()).ok()?,
            method: u16_at(zip, at + 10)?,
            packed: usize_at(zip, at + 20)?,
            size: usize_at(zip, at + 24)?,
            header: usize_at(zip, at + 42)?,
        };
        if !entry.name.ends_with('/') {
            entries.push(entry);
        }
        at = start + name + extra + comment;
    }
    Some(entries)
}

impl Entry {
    /// The content of the file in `zip`, of at most `limit` bytes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn content(&self, zip: &[u8], limit: u64) -> Result<Vec<u8>, String> {
        let refuse = |problem: &str| format!("{}: {problem}", shown(&self.name));
        if self.size as u64 > limit {
            return Err(refuse("it unpacks to more bytes than are wanted"));
        }
        let packed = self.packed(zip).ok_or_else(|| refuse("it lies outside of the zip file"))?;
        match self.method {
            STORED if packed.len() == self.size => Ok(packed.to_vec()),
            STORED => Err(refuse(&format!("it has {} bytes, but should have {}", packed.len(), self.size))),
            DEFLATED => {
                let mut content = vec![0; self.size];
                // Neither a zlib header nor its checksum is there.
                let size = decompress_slice_iter_to_slice(&mut content, std::iter::once(packed), false, true);
                match size {
                    Ok(size) if size == self.size => Ok(content),
                    _ => Err(refuse("it does not unpack to the bytes that the directory promises")),
                }
            }
            method => Err(refuse(&format!("it is packed by method {method}, and only 0 and 8 are known"))),
        }
    }

    fn packed<'a>(&self, zip: &'a [u8]) -> Option<&'a [u8]> {
        if u32_at(zip, self.header)? != HEADER {
            return None;
        }
        // The extra field may be longer here than in the directory.
        let (name, extra) = (u16_at(zip, self.header + 26)?, u16_at(zip, self.header + 28)?);
        let start = self.header + HEADER_SIZE + usize::from(name) + usize::from(extra);
        zip.get(start..start.checked_add(self.packed)?)
    }
}
