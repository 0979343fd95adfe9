//! The packing of the codes of a span's quads into bytes: a span has as many vectors of 64 bytes as
//! its codes have bits, and each byte holds as many whole codes as it has room for, of neighbouring
//! quads. The bits that are left over in all vectors hold, one after the other, the codes of the
//! last quads.

use super::QUADS;

/// Bits of one quad's codes that lie together, in the bytes of a vector.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// The index of the span's vector.
    pub vector: usize,
    /// The lowest bit there, and in the code.
    pub at: usize,
    pub to: usize,
    /// The number of bits: 0 for an unused piece.
    pub width: usize,
}

impl Piece {
    const NONE: Self = Self { vector: 0, at: 0, to: 0, width: 0 };

    /// As many ones as it has bits.
    pub const fn mask(self) -> u8 {
        !(0xff << self.width) as u8
    }
}

/// The pieces of each quad's codes, the first of which is there.
pub(super) const fn pieces(bits: usize) -> [[Piece; 3]; QUADS] {
    // Whole codes in a byte, and the bits that are left over.
    let (whole, rest) = (8 / bits, 8 % bits);
    let mut all = [[Piece::NONE; 3]; QUADS];
    let (mut quad, mut left_over) = (0, 0);
    while quad < QUADS {
        if quad < whole * bits {
            all[quad][0] = Piece { vector: quad / whole, at: quad % whole * bits, to: 0, width: bits };
        } else {
            let (mut to, mut piece) = (0, 0);
            while to < bits {
                let (vector, at) = (left_over / rest, left_over % rest);
                let width = if rest - at < bits - to { rest - at } else { bits - to };
                all[quad][piece] = Piece { vector, at: whole * bits + at, to, width };
                (to, left_over, piece) = (to + width, left_over + width, piece + 1);
            }
        }
        quad += 1;
    }
    all
}

/// [`pieces`], known to the compiler.
pub(super) struct Bits<const BITS: usize>;

impl<const BITS: usize> Bits<BITS> {
    pub const PIECES: [[Piece; 3]; QUADS] = pieces(BITS);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_span_has_one_place() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let (mut places, mut codes) = (vec![0u8; bits], [0u8; QUADS]);
            for (quad, pieces) in pieces(bits).iter().enumerate() {
                for piece in pieces {
                    let (place, code) = (piece.mask() << piece.at, piece.mask() << piece.to);
                    assert_eq!((places[piece.vector] & place, codes[quad] & code), (0, 0), "{bits} bits");
                    places[piece.vector] |= place;
                    codes[quad] |= code;
                }
            }
            assert!(places.iter().all(|&place| place == 0xff), "{bits} bits: {places:?}");
            assert_eq!(codes.map(u32::from), [(1 << bits) - 1; QUADS], "{bits} bits");
        }
    }
}
