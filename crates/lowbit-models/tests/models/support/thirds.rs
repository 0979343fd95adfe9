//! A grammar of ids, for tests.

use lowbit_models::{Constraint, Grammar, ModelError};

/// Texts of `length` tokens; the number of each divided by 3 leaves what its place leaves.
#[derive(Debug)]
pub struct Thirds {
    pub vocab_size: usize,
    pub length: usize,
}

impl Thirds {
    pub fn fit(ids: &[u32]) -> bool {
        ids.iter().zip(0..).all(|(id, place)| id % 3 == place % 3)
    }
}

impl Grammar for Thirds {
    fn start(&self) -> Box<dyn Constraint> {
        let bits = vec![0; self.vocab_size.div_ceil(32)];
        Box::new(Place { vocab_size: self.vocab_size as u32, left: self.length, place: 0, bits })
    }
}

#[derive(Debug)]
struct Place {
    vocab_size: u32,
    left: usize,
    place: u32,
    bits: Vec<u32>,
}

impl Constraint for Place {
    fn mask(&mut self) -> Result<&[u32], ModelError> {
        if self.vocab_size == 0 {
            return Err(ModelError::Grammar("no token is left".into()));
        }
        self.bits.fill(0);
        for id in (self.place % 3..self.vocab_size).step_by(3) {
            self.bits[id as usize / 32] |= 1 << (id % 32);
        }
        Ok(&self.bits)
    }

    fn accept(&mut self, id: u32) -> Result<bool, ModelError> {
        if id % 3 != self.place % 3 {
            return Err(ModelError::Grammar(format!("token {id} at place {}", self.place)));
        }
        (self.place, self.left) = (self.place + 1, self.left - 1);
        Ok(self.left == 0)
    }
}
