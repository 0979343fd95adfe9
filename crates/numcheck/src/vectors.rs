use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// A file of peers' values.
pub struct Vectors {
    path: String,
    bytes: Vec<u8>,
}

/// One array of it.
#[derive(Clone, Debug)]
pub struct Vector {
    /// As the peer shaped it.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: Dtype,
    /// Little-endian elements.
    pub bytes: Vec<u8>,
}

impl Vectors {
    /// `tests/vectors/{name}.safetensors`, from the workspace's root.
    ///
    /// # Panics
    /// When the file is missing or damaged.
    #[track_caller]
    pub fn open(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/vectors/{name}.safetensors"));
        let path = path.display().to_string();
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self { path, bytes }
    }

    /// The array called `name`.
    ///
    /// # Panics
    /// When there is none.
    #[track_caller]
    pub fn get(&self, name: &str) -> Vector {
        let file =
            SafeTensors::deserialize(&self.bytes).unwrap_or_else(|error| panic!("{}: {error}", self.path));
        let view = file.tensor(name).unwrap_or_else(|error| panic!("{}: {name}: {error}", self.path));
        Vector { shape: view.shape().to_vec(), dtype: view.dtype(), bytes: view.data().to_vec() }
    }

    /// The names of all arrays, sorted.
    pub fn names(&self) -> Vec<String> {
        let file =
            SafeTensors::deserialize(&self.bytes).unwrap_or_else(|error| panic!("{}: {error}", self.path));
        let mut names: Vec<_> = file.names().into_iter().map(str::to_string).collect();
        names.sort();
        names
    }
}

impl Vector {
    /// The elements, floats widened to f32.
    ///
    /// # Panics
    /// When they are not floats of 16 or 32 bits.
    #[track_caller]
    pub fn f32s(&self) -> Vec<f32> {
        let pairs = || self.bytes.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b));
        match self.dtype {
            Dtype::F32 => self.bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            Dtype::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
            Dtype::BF16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
            other => panic!("{other:?} are not f32, f16 or bf16"),
        }
    }

    /// The elements as u32 (also read from i32 and i64).
    ///
    /// # Panics
    /// When they are not integers of these types, or are negative.
    #[track_caller]
    pub fn u32s(&self) -> Vec<u32> {
        match self.dtype {
            Dtype::U32 | Dtype::I32 => {
                self.bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()
            }
            Dtype::I64 | Dtype::U64 => {
                let wide = self.bytes.as_chunks::<8>().0.iter().map(|&b| u64::from_le_bytes(b));
                wide.map(|id| u32::try_from(id).expect("a u32")).collect()
            }
            other => panic!("{other:?} are not u32, i32 or i64"),
        }
    }
}
