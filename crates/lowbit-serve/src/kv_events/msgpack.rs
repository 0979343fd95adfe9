//! MessagePack, as much of it as events need.

/// Values after each other.
#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn put(&mut self, tag: u8, bytes: &[u8]) -> &mut Self {
        self.0.push(tag);
        self.0.extend_from_slice(bytes);
        self
    }

    /// An array of the next `count` values.
    pub(super) fn array(&mut self, count: usize) -> &mut Self {
        match count {
            0..16 => self.put(0x90 | count as u8, &[]),
            16..0x1_0000 => self.put(0xdc, &(count as u16).to_be_bytes()),
            _ => self.put(0xdd, &(count as u32).to_be_bytes()),
        }
    }

    pub(super) fn nil(&mut self) -> &mut Self {
        self.put(0xc0, &[])
    }

    pub(super) fn float(&mut self, value: f64) -> &mut Self {
        self.put(0xcb, &value.to_be_bytes())
    }

    /// In the shortest form.
    pub(super) fn number(&mut self, value: u64) -> &mut Self {
        match value {
            0..0x80 => self.put(value as u8, &[]),
            0x80..0x100 => self.put(0xcc, &[value as u8]),
            0x100..0x1_0000 => self.put(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..0x1_0000_0000 => self.put(0xce, &(value as u32).to_be_bytes()),
            _ => self.put(0xcf, &value.to_be_bytes()),
        }
    }

    pub(super) fn numbers(&mut self, values: impl ExactSizeIterator<Item = u64>) -> &mut Self {
        self.array(values.len());
        for value in values {
            self.number(value);
        }
        self
    }

    /// A text of fewer than 32 bytes.
    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        assert!(text.len() < 32, "{text}");
        self.put(0xa0 | text.len() as u8, text.as_bytes())
    }
}
