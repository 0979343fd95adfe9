use ::safetensors::{Dtype, serialize, tensor::TensorView as PeerView};

use super::*;

/// A file of `header` (as JSON) and `data`.
fn file(header: &str, data: &[u8]) -> Bytes {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes.into()
}

fn parse_bytes(bytes: &Bytes) -> Result<Safetensors, SafetensorsError> {
    parse(bytes, &Path::new("test.safetensors").into())
}

/// The message for a header over eight bytes of data.
#[track_caller]
fn refused(header: &str) -> String {
    parse_bytes(&file(header, &[0; 8])).expect_err("should be refused").to_string()
}

/// Name, dtype, shape and bytes.
type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// Some tensors, and the file that the peer writes for them.
fn peer_file() -> (Bytes, Vec<Tensor>) {
    let tensors = vec![
        ("b", Dtype::BF16, vec![2, 3], vec![1; 12]),
        ("a", Dtype::U32, vec![2], vec![2; 8]),
        ("scalar", Dtype::F64, vec![], vec![3; 8]),
        ("empty", Dtype::F8_E4M3, vec![0, 5], vec![]),
    ];
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, PeerView::new(*dtype, shape.clone(), data).unwrap()));
    let metadata = [("format".to_string(), "mlx".to_string())].into();
    (serialize(views, Some(metadata)).unwrap().into(), tensors)
}

#[test]
fn what_the_peer_writes_is_read() {
    let (bytes, tensors) = peer_file();
    let file = parse_bytes(&bytes).unwrap();
    assert_eq!(file.metadata("format"), Some("mlx"));
    assert_eq!(file.tensors.len(), tensors.len());
    for (name, _, shape, data) in tensors {
        let got = file.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!(got.shape, shape, "{name}");
        assert_eq!(got.bytes.get(), data, "{name}");
    }
    let stored = |name: &str| file.tensors.iter().find(|tensor| tensor.name == name).unwrap().stored;
    assert_eq!(stored("b"), Stored::Plain(DType::BF16));
    assert_eq!(stored("empty"), Stored::Plain(DType::F8E4M3));
    let range = bytes.as_ptr_range();
    assert!(
        file.tensors
            .iter()
            .all(|tensor| range.contains(&tensor.bytes.get().as_ptr()) || tensor.bytes.is_empty())
    );
}

#[test]
fn files_that_are_cut_anywhere_are_refused() {
    let whole = file(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, &[0; 8]);
    parse_bytes(&whole).unwrap();
    for length in 0..whole.len() {
        parse_bytes(&whole.slice(..length)).expect_err("a cut file");
    }
    let longer = [&whole[..], &[0]].concat().into();
    let message = parse_bytes(&longer).unwrap_err().to_string();
    assert_eq!(message, "the tensors end at offset 8, but the file holds 9 bytes of tensors");
}

#[test]
fn hostile_header_lengths_are_refused() {
    for length in [9, 1 << 31, u64::MAX - 7, u64::MAX] {
        let bytes = [&length.to_le_bytes()[..], b"{}      "].concat().into();
        let message = parse_bytes(&bytes).unwrap_err().to_string();
        assert!(message.contains(&format!("{length} bytes, but only 8 are left")), "{message}");
    }
}

#[test]
fn hostile_tensors_are_refused_by_name_and_sizes() {
    let cases = [
        (
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
            "tensor a, f32 [3], takes 12 bytes, but its data_offsets span 8",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#,
            "tensor a lies at 0..16, but the file holds 8 bytes of tensors",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551615]}}"#,
            "tensor a lies at 18446744073709551612..18446744073709551615, but the file holds 8 bytes",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}"#,
            "tensor a ends at offset 4, before it begins, at 8",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#,
            "tensor a, f32 [4294967296, 4294967296], takes more bytes than can be addressed",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                "b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            "tensor b begins at offset 4, inside tensor a, which ends at 8",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            "tensor a begins at offset 4, but the one before it ends at 0",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            "the tensors end at offset 4, but the file holds 8",
        ),
        (r#"{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}"#, r#"tensor a is of dtype "C64""#),
    ];
    for (header, want) in cases {
        let message = refused(header);
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
}

#[test]
fn malformed_headers_are_refused() {
    let cases = [
        ("", "it begins with None"),
        ("[]", "it begins with Some(5b), not with '{'"),
        (" {}", "it begins with Some(20), not with '{'"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#, "EOF"),
        (r#"{"a":{"dtype":"F32","shape":[2]}}"#, "a: missing field `data_offsets`"),
        (r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#, "a: invalid value: integer `-2`"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}}"#, "a: "),
        (r#"{"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}}"#, "a: invalid type"),
        (r#"{"__metadata__":{"format":7}}"#, "__metadata__: invalid type"),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                "a":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}"#,
            "a occurs twice",
        ),
    ];
    for (header, want) in cases {
        let message = refused(header);
        assert!(message.contains(want), "{message}\nshould say: {want}");
    }
    let message = parse_bytes(&file("{\"\u{e9}\":1}", &[]).slice(..)).unwrap_err().to_string();
    assert!(message.contains("\u{e9}: invalid type"), "{message}");
    let not_utf8 = [&4u64.to_le_bytes()[..], b"{\"\xff\""].concat().into();
    parse_bytes(&not_utf8).expect_err("a name that is not UTF-8");
}

/// Writes `tensors` to a new directory.
fn write(tensors: &[TensorView], max_shard_bytes: u64) -> tempfile::TempDir {
    let directory = tempfile::TempDir::new().unwrap();
    let mut writer = Writer::new();
    writer.metadata("format", "mlx");
    for view in tensors {
        let Stored::Plain(dtype) = view.stored else { panic!("{view:?} is plain") };
        writer.tensor(&view.name, dtype, &view.shape).unwrap();
    }
    let mut body = writer.begin(directory.path(), max_shard_bytes).unwrap();
    tensors.iter().for_each(|view| body.tensor(&view.bytes.get()).unwrap());
    body.finish().unwrap();
    directory
}

#[test]
fn what_is_written_is_what_the_peer_writes() {
    let (bytes, _) = peer_file();
    let directory = write(&parse_bytes(&bytes).unwrap().tensors, u64::MAX);
    assert_eq!(std::fs::read(directory.path().join("model.safetensors")).unwrap(), bytes);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn shards_hold_what_one_file_would() {
    let (bytes, _) = peer_file();
    let tensors = parse_bytes(&bytes).unwrap().tensors;
    for (max, files) in [(0, 3), (8, 3), (16, 2), (19, 2)] {
        let directory = write(&tensors, max);
        let name = |i| format!("model-{i:05}-of-{files:05}.safetensors");
        assert!((1..=files).all(|i| directory.path().join(name(i)).exists()), "at most {max} bytes");
        std::fs::write(directory.path().join("config.json"), "{}").unwrap();
        let checkpoint = crate::Checkpoint::open(directory.path()).unwrap();
        assert_eq!(checkpoint.tensors().len(), tensors.len());
        for want in &tensors {
            let got = checkpoint.tensors().get(&want.name).unwrap();
            assert_eq!(
                (got.stored, &got.shape, got.bytes.get()),
                (want.stored, &want.shape, want.bytes.get())
            );
        }
        let index = std::fs::read(directory.path().join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 28);
    }
}

#[test]
fn a_writer_refuses_what_cannot_be_read() {
    let directory = tempfile::TempDir::new().unwrap();
    let mut writer = Writer::new();
    assert_eq!(writer.tensor("t", DType::F16, &[3]), Ok(6));
    writer.tensor("t", DType::F16, &[3]).expect_err("a name that is taken");
    writer.tensor("__metadata__", DType::F16, &[3]).expect_err("a name that is taken");
    writer.tensor("u", DType::F16, &[usize::MAX]).expect_err("overflow");
    let mut body = writer.begin(directory.path(), u64::MAX).unwrap();
    let message = body.tensor(&[0; 5]).unwrap_err().to_string();
    assert!(message.ends_with("model.safetensors: tensor t takes 6 bytes, but 5 were given"), "{message}");
    body.tensor(&[0; 6]).expect_err("no more tensors");
    let mut writer = Writer::new();
    writer.tensor("t", DType::F16, &[3]).unwrap();
    let message = writer.begin(directory.path(), u64::MAX).unwrap().finish().unwrap_err().to_string();
    assert!(message.ends_with("the bytes of tensor t are missing"), "{message}");
    let missing = directory.path().join("missing");
    let message = Writer::new().begin(&missing, 0).unwrap_err().to_string();
    let file = missing.join("model.safetensors");
    assert!(message.contains(&format!("{}: ", file.display())), "{message}");
}
