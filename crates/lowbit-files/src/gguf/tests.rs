use std::path::{Path, PathBuf};

use bytes::Bytes;
use lowbit_formats::{DType, Format};

use super::*;
use crate::Stored;

fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/files/small.gguf")
}

fn parse_bytes(bytes: impl Into<Bytes>) -> Result<Gguf, GgufError> {
    parse(&bytes.into(), &Path::new("test.gguf").into())
}

#[track_caller]
fn refused(bytes: impl Into<Bytes>) -> String {
    parse_bytes(bytes).expect_err("should be refused").to_string()
}

#[track_caller]
fn assert_refused(bytes: impl Into<Bytes>, want: &str) {
    let message = refused(bytes);
    assert!(message.contains(want), "{message}\nshould say: {want}");
}

/// The pieces of a file, put together with no regard to whether they make sense.
struct Pieces {
    version: u32,
    counts: Option<[u64; 2]>,
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: usize,
}

impl Pieces {
    fn new() -> Self {
        Self { version: 3, counts: None, entries: vec![], tensors: vec![], data: 0 }
    }

    fn entry(mut self, key: &[u8], kind: u32, value: &[u8]) -> Self {
        self.entries.push([&string(key)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let mut tensor = string(name.as_bytes());
        tensor.extend((dims.len() as u32).to_le_bytes());
        tensor.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        tensor.extend(kind.to_le_bytes());
        tensor.extend(offset.to_le_bytes());
        self.tensors.push(tensor);
        self
    }

    fn data(self, data: usize) -> Self {
        Self { data, ..self }
    }

    fn bytes(self) -> Vec<u8> {
        let counts = self.counts.unwrap_or([self.tensors.len() as u64, self.entries.len() as u64]);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        bytes.extend(self.entries.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(32) + self.data, 0);
        bytes
    }
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

const F32: u32 = 0;
const Q4_0: u32 = 2;

#[test]
fn what_the_peer_writes_is_read() {
    let Gguf { metadata, tensors } = read(&small()).unwrap();
    assert_eq!(metadata.get::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(metadata.value("test.int8"), Some(&Value::I8(127)));
    assert_eq!(metadata.value("test.int8s"), Some(&Value::Array(Array::I8(vec![-128, 1]))));
    assert_eq!(metadata.value("test.uint64"), Some(&Value::U64(u64::MAX)));
    assert_eq!(metadata.get::<f32>("test.float32").unwrap(), 0.1);
    assert_eq!(metadata.get::<f64>("test.float64").unwrap(), 0.1);
    assert!(metadata.get::<bool>("test.bool").unwrap());
    assert_eq!(metadata.get::<&str>("test.string").unwrap(), "na\u{ef}ve \u{1f642}");
    assert_eq!(metadata.get::<&[String]>("test.strings").unwrap(), ["", "a", "\u{65e5}\u{672c}"]);
    assert_eq!(metadata.value("test.bools"), Some(&Value::Array(Array::Bool(vec![true, false]))));
    let stored: Vec<_> =
        tensors.iter().map(|view| (view.name.as_str(), view.stored, &view.shape[..])).collect();
    assert_eq!(
        stored,
        [
            ("f32", Stored::Plain(DType::F32), &[3, 5][..]),
            ("f16", Stored::Plain(DType::F16), &[2, 7]),
            ("i32", Stored::Plain(DType::I32), &[2, 3, 4]),
            ("Q4_0", Stored::Blocks(Format::Q4_0), &[3, 64]),
            ("Q8_0", Stored::Blocks(Format::Q8_0), &[3, 64]),
            ("BF16", Stored::Plain(DType::BF16), &[3, 64]),
            ("f64", Stored::Plain(DType::F64), &[1]),
        ]
    );
    let i32s: Vec<u8> = (0..24i32).flat_map(i32::to_le_bytes).collect();
    assert_eq!(tensors[2].bytes.get(), i32s);
}

#[test]
fn what_is_written_is_what_the_peer_writes() {
    let Gguf { metadata, tensors } = read(&small()).unwrap();
    let mut writer = Writer::new();
    for (key, value) in metadata.iter() {
        writer.entry(key, value.clone()).unwrap();
    }
    for view in &tensors {
        assert_eq!(writer.tensor(&view.name, view.stored, &view.shape).unwrap(), view.bytes.len());
    }
    let mut body = writer.begin(Vec::new()).unwrap();
    for view in &tensors {
        body.tensor(&view.bytes.get()).unwrap();
    }
    assert!(body.finish().unwrap() == std::fs::read(small()).unwrap(), "the files differ");
}

#[test]
fn a_writer_refuses_what_cannot_be_read() {
    let mut writer = Writer::new();
    let alignment = writer.entry("general.alignment", Value::U32(48));
    assert_eq!(alignment, Err(GgufError::Alignment(48)));
    writer.entry("a", Value::U8(1)).unwrap();
    assert_eq!(writer.entry("a", Value::U8(2)), Err(GgufError::DuplicateKey("a".into())));
    let f32s = Stored::Plain(DType::F32);
    assert_eq!(writer.tensor("t", f32s, &[2]), Ok(8));
    assert_eq!(writer.tensor("t", f32s, &[2]), Err(GgufError::DuplicateTensor("t".into())));
    writer.tensor("rank", f32s, &[1; 5]).expect_err("five dimensions");
    writer.tensor("huge", f32s, &[usize::MAX, 2]).expect_err("overflow");
    writer.tensor("block", Stored::Blocks(Format::Q4_0), &[31]).expect_err("a part of a block");
    writer.tensor("type", Stored::Plain(DType::U64), &[1]).expect_err("no such type in GGUF");
    let mut body = writer.begin(Vec::new()).unwrap();
    let message = body.tensor(&[0; 7]).unwrap_err().to_string();
    assert_eq!(message, "tensor t takes 8 bytes, but 7 were given");
    body.tensor(&[0; 8]).expect_err("no more tensors");
}

#[test]
fn a_writer_wants_all_tensors() {
    let mut writer = Writer::new();
    writer.tensor("t", Stored::Plain(DType::F32), &[2]).unwrap();
    let message = writer.begin(Vec::new()).unwrap().finish().unwrap_err().to_string();
    assert_eq!(message, "the bytes of tensor t are missing");
}

#[test]
fn files_that_are_cut_anywhere_are_refused() {
    let whole = Bytes::from(std::fs::read(small()).unwrap());
    // The last tensor takes 8 bytes; what follows is padding.
    let end = whole.len() - 56;
    parse_bytes(whole.slice(..end)).unwrap();
    for length in 0..end {
        parse_bytes(whole.slice(..length)).expect_err("a cut file");
    }
}

#[test]
fn other_files_are_refused() {
    assert_refused(&b""[..], "it begins with []");
    assert_refused(&b"GGML...."[..], "not with \"GGUF\"");
    assert_refused(Pieces { version: 1, ..Pieces::new() }.bytes(), "version 1 is not supported");
    assert_refused(Pieces { version: 4, ..Pieces::new() }.bytes(), "version 4 is not supported");
    assert_refused(Pieces { version: 3 << 24, ..Pieces::new() }.bytes(), "big-endian");
    parse_bytes(Pieces { version: 2, ..Pieces::new() }.bytes()).expect("version 2");
}

#[test]
fn hostile_counts_and_lengths_are_refused_without_allocating() {
    for count in [1000, 1 << 40, u64::MAX] {
        let pieces = || Pieces { counts: Some([count, 0]), ..Pieces::new() };
        assert_refused(pieces().bytes(), &format!("{count} tensors, of at least 24 bytes each"));
        let pieces = || Pieces { counts: Some([0, count]), ..Pieces::new() };
        assert_refused(pieces().bytes(), &format!("{count} metadata entries, of at least 13 bytes each"));
        let strings = [&8u32.to_le_bytes()[..], &count.to_le_bytes()].concat();
        let want = format!("{count} elements of k, of at least 8 bytes each, but only");
        assert_refused(Pieces::new().entry(b"k", 9, &strings).bytes(), &want);
        assert_refused(
            Pieces::new().entry(b"k", 8, &count.to_le_bytes()).bytes(),
            &format!("k takes {count} bytes"),
        );
    }
}

#[test]
fn malformed_metadata_is_refused_by_key() {
    let nested = [&9u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    let cases = [
        (Pieces::new().entry(b"\xff", 0, &[0]), "metadata key 0 at offset 32 is not UTF-8"),
        (Pieces::new().entry(b"k", 8, &string(b"\xc3")), "k at offset 45 is not UTF-8"),
        (Pieces::new().entry(b"k", 13, &[0]), "k is of value type 13"),
        (Pieces::new().entry(b"k", 7, &[2]), "k is a bool of value 2"),
        (Pieces::new().entry(b"k", 9, &nested), "k is an array of arrays"),
        (Pieces::new().entry(b"k", 0, &[1]).entry(b"k", 0, &[1]), "metadata key \"k\" occurs twice"),
        (Pieces::new().entry(b"general.alignment", 4, &[0; 4]), "general.alignment is 0"),
        (Pieces::new().entry(b"general.alignment", 4, &[3, 0, 0, 0]), "general.alignment is 3"),
        (Pieces::new().entry(b"general.alignment", 4, &[0, 0, 0, 128]), "general.alignment is 2147483648"),
        (
            Pieces::new().entry(b"general.alignment", 0, &[32]),
            "general.alignment should be a u32, but is u8 32",
        ),
    ];
    for (pieces, want) in cases {
        assert_refused(pieces.bytes(), want);
    }
}

#[test]
fn hostile_tensors_are_refused_by_name_and_sizes() {
    let half = 1 << 63;
    let cases = [
        (
            Pieces::new().tensor("t", &[4], F32, 0).data(15),
            "t, f32 [4], takes 16 bytes at offset 0, but the file holds 15",
        ),
        (
            Pieces::new().tensor("t", &[4], F32, 32).data(16),
            "takes 16 bytes at offset 32, but the file holds 16",
        ),
        (
            Pieces::new().tensor("t", &[4], F32, u64::MAX - 31).data(16),
            "at offset 18446744073709551584, but the file",
        ),
        (
            Pieces::new().tensor("t", &[4], F32, 8).data(64),
            "t is at offset 8, which is no multiple of the alignment, 32",
        ),
        (
            Pieces::new().tensor("t", &[half, 2], F32, 0),
            "t, f32 [9223372036854775808, 2], takes more bytes than",
        ),
        (Pieces::new().tensor("t", &[half], F32, 0), "takes more bytes than can be addressed"),
        (Pieces::new().tensor("t", &[1 << 62, 4], Q4_0, 0), "takes more bytes than can be addressed"),
        (Pieces::new().tensor("t", &[1; 5], F32, 0), "t has 5 dimensions; at most 4"),
        (
            Pieces::new().tensor("t", &[33], Q4_0, 0).data(64),
            "t: Q4_0 stores rows in blocks of 32 values, but a row has 33",
        ),
        (
            Pieces::new().tensor("t", &[32], 36, 0).data(64),
            "t is of type IQ4_NL_4_4, which is not supported; supported are f32",
        ),
        (Pieces::new().tensor("t", &[32], 99, 0).data(64), "t is of type 99, which is not supported"),
        (
            Pieces::new().tensor("t", &[1], F32, 0).tensor("t", &[1], F32, 32).data(64),
            "tensor t occurs twice",
        ),
        (
            Pieces::new().tensor("a", &[9], F32, 0).tensor("b", &[1], F32, 32).data(64),
            "b begins at offset 32, inside tensor a, which ends at 36",
        ),
        (
            Pieces::new().tensor("a", &[1], F32, 0).tensor("b", &[1], F32, 0).data(64),
            "b begins at offset 0, inside tensor a",
        ),
    ];
    for (pieces, want) in cases {
        assert_refused(pieces.bytes(), want);
    }
    let empty = Pieces::new().tensor("e", &[0, 7], F32, 0).tensor("s", &[], F32, 0).data(4);
    let tensors = parse_bytes(empty.bytes()).unwrap().tensors;
    assert_eq!((tensors[0].bytes.len(), &tensors[0].shape[..]), (0, &[7, 0][..]));
    assert_eq!(tensors[1].bytes.len(), 4);
}

#[test]
fn values_of_other_types_are_refused_by_key_and_types() {
    let pieces = Pieces::new()
        .entry(b"u8", 0, &[200])
        .entry(b"i8", 1, &[200])
        .entry(b"s", 8, &string(b"text"))
        .entry(b"a", 9, &[&5u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[255; 4]].concat());
    let metadata = parse_bytes(pieces.bytes()).unwrap().metadata;
    assert_eq!(metadata.get::<usize>("u8").unwrap(), 200);
    assert_eq!(metadata.get::<Vec<i32>>("a").unwrap(), [-1]);
    assert_eq!(metadata.find::<u32>("absent").unwrap(), None);
    let cases = [
        (metadata.get::<u32>("absent").map(drop), "test.gguf: metadata key absent is missing"),
        (metadata.get::<u32>("i8").map(drop), "test.gguf: i8 should be a u32, but is i8 -56"),
        (metadata.get::<u32>("s").map(drop), "test.gguf: s should be a u32, but is string \"text\""),
        (metadata.get::<&str>("u8").map(drop), "test.gguf: u8 should be a string, but is u8 200"),
        (metadata.get::<f32>("u8").map(drop), "test.gguf: u8 should be a float, but is u8 200"),
        (metadata.find::<bool>("a").map(drop), "test.gguf: a should be a bool, but is array of 1 i32"),
        (
            metadata.get::<Vec<u32>>("a").map(drop),
            "test.gguf: a should be an array of u32, but is array of 1 i32",
        ),
        (metadata.get::<&[String]>("a").map(drop), "test.gguf: a should be an array of strings"),
    ];
    for (result, want) in cases {
        let message = result.unwrap_err().to_string();
        assert!(message.starts_with(want), "{message}\nshould say: {want}");
    }
}
