//! Opening a hostile file takes at most 12 times its size and 64 MB of memory, its own mapped pages
//! included. Each kind is opened in a process of its own, whose peak the system knows.
#![cfg(target_os = "linux")]

use lowbit_files::Checkpoint;
use std::path::{Path, PathBuf};
use std::process::Command;

const PATH: &str = "LOWBIT_TEST_HOSTILE_PATH";

/// The child's work. (Run as a test, without its variable, it does nothing.)
#[test]
fn child() {
    let Ok(path) = std::env::var(PATH) else { return };
    match Checkpoint::open(Path::new(&path)) {
        Ok(checkpoint) => {
            if let Some(metadata) = checkpoint.metadata() {
                for (key, _) in metadata.iter() {
                    _ = metadata.get::<Vec<usize>>(key);
                    _ = metadata.get::<&[String]>(key);
                }
            }
            _ = checkpoint.generation_config();
            println!("\nopened");
        }
        Err(error) => {
            let message = error.to_string();
            assert!(message.len() < 8000, "{} bytes", message.len());
            println!("\nrefused: {message}");
        }
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().find(|line| line.starts_with("VmHWM:")).unwrap());
}

/// The result of opening, and the peak in bytes.
fn open(path: &Path) -> (String, u64) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(PATH, path)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}: {text}{}", path.display(), String::from_utf8_lossy(&output.stderr));
    let find = |prefix: &str| text.lines().find_map(|line| line.strip_prefix(prefix)).map(str::to_string);
    let peak = find("VmHWM:").unwrap().trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024;
    (find("refused: ").unwrap_or_default(), peak)
}

/// `unit` with a running number for `#`, over and over up to about `bytes` bytes, with commas
/// between.
fn repeated(open: &str, unit: &str, close: &str, bytes: usize) -> Vec<u8> {
    let mut text = open.to_string();
    let mut number = 0u64;
    while text.len() < bytes {
        if number > 0 {
            text.push(',');
        }
        text.push_str(&unit.replace('#', &format!("{number:x}")));
        number += 1;
    }
    text.push_str(close);
    text.into_bytes()
}

fn safetensors(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header].concat()
}

/// A header with `tensors` and `entries`, then `body`.
fn gguf(tensors: u64, entries: u64, body: &[u8]) -> Vec<u8> {
    [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes(), body].concat()
}

/// An array of `count` elements of type `kind`, each `element`.
fn gguf_array(kind: u32, element: &[u8], bytes: usize) -> Vec<u8> {
    let count = bytes / element.len();
    let mut body = vec![];
    body.extend(1u64.to_le_bytes());
    body.push(b'k');
    body.extend(9u32.to_le_bytes());
    body.extend(kind.to_le_bytes());
    body.extend((count as u64).to_le_bytes());
    body.extend(element.repeat(count));
    gguf(0, 1, &body)
}

fn gguf_many(bytes: usize, each: &dyn Fn(u32) -> Vec<u8>) -> (u64, Vec<u8>) {
    let (mut body, mut count) = (vec![], 0u32);
    while body.len() < bytes {
        body.extend(each(count));
        count += 1;
    }
    (count.into(), body)
}

fn check(name: &str, file: &str, bytes: &[u8], others: &[(&str, &[u8])]) {
    let folder = tempfile::tempdir().unwrap();
    for (other, bytes) in others {
        std::fs::write(folder.path().join(other), bytes).unwrap();
    }
    let path: PathBuf = folder.path().join(file);
    std::fs::write(&path, bytes).unwrap();
    let (message, peak) = open(if file.ends_with(".gguf") { &path } else { folder.path() });
    let limit = 12 * bytes.len() as u64 + (64 << 20);
    println!(
        "{name}: {} bytes, peak {peak}, {:.1} times: {message}",
        bytes.len(),
        peak as f64 / bytes.len() as f64
    );
    assert!(peak <= limit, "{name}: {} bytes took {peak}; at most {limit} are to be", bytes.len());
}

const EMPTY: &[u8] = b"\x02\0\0\0\0\0\0\0{}";

#[test]
fn a_hostile_config_takes_little() {
    let model: [(&str, &[u8]); 1] = [("model.safetensors", EMPTY)];
    const WHOLE: usize = (16 << 20) - 64;
    // Below the limit of values, so that all of it is parsed.
    const PARSED: usize = 500_000;
    let cases = [
        ("deep", "[".repeat(WHOLE).into_bytes()),
        ("numbers", repeated("{\"a\":[", "0", "]}", WHOLE)),
        ("parsed numbers", repeated("{\"a\":[", "0", "]}", PARSED)),
        ("objects", repeated("{\"a\":[", "{}", "]}", WHOLE)),
        ("parsed objects", repeated("{\"a\":[", "{\"\":0}", "]}", PARSED)),
        ("parsed keys", repeated("{", "\"#\":0", "}", 2 * PARSED)),
        ("string", repeated("{\"a\":\"", "xxxxxxxxxxxxxxxx", "\"}", PARSED)),
    ];
    for (name, bytes) in cases {
        check(name, "config.json", &bytes, &model);
    }
}

#[test]
fn a_hostile_header_or_index_takes_little() {
    const BYTES: usize = 8 << 20;
    let config: (&str, &[u8]) = ("config.json", b"{}");
    let cases = [
        (
            "entries",
            repeated("{", "\"#\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", "}", BYTES),
        ),
        ("dimensions", repeated("{\"a\":{\"dtype\":\"U8\",\"shape\":[", "0", "]}}", BYTES)),
        ("metadata", repeated("{\"__metadata__\":{", "\"#\":\"\"", "}}", BYTES)),
        ("unknown keys", repeated("{\"a\":{", "\"#\":[]", "}}", BYTES)),
    ];
    for (name, header) in cases {
        check(name, "model.safetensors", &safetensors(&header), &[config]);
    }
    let one = repeated("{\"weight_map\":{", "\"#\":\"a.safetensors\"", "}}", BYTES);
    let many = repeated("{\"weight_map\":{", "\"#\":\"#.safetensors\"", "}}", BYTES);
    let wrong = repeated("{\"weight_map\":{", "\"#\":\"\"", "}}", BYTES);
    for (name, index) in [("one shard", one), ("many shards", many), ("no shards", wrong)] {
        let others = [config, ("a.safetensors", EMPTY)];
        check(name, "model.safetensors.index.json", &index, &others);
    }
}

#[test]
fn a_hostile_gguf_takes_little() {
    const BYTES: usize = 8 << 20;
    let string = |length: u64| [&length.to_le_bytes()[..], &vec![b'x'; length as usize]].concat();
    check("bytes", "m.gguf", &gguf_array(0, &[7], BYTES), &[]);
    check("bools", "m.gguf", &gguf_array(7, &[1], BYTES), &[]);
    check("empty strings", "m.gguf", &gguf_array(8, &string(0), BYTES), &[]);
    check("short strings", "m.gguf", &gguf_array(8, &string(1), BYTES), &[]);
    let (count, entries) = gguf_many(BYTES, &|number| {
        // A u8 under a name of its own.
        let key = format!("{number:x}");
        [&(key.len() as u64).to_le_bytes()[..], key.as_bytes(), &0u32.to_le_bytes(), &[1]].concat()
    });
    check("entries", "m.gguf", &gguf(0, count, &entries), &[]);
    check("fewer entries", "m.gguf", &gguf(0, 1 << 16, &entries[..entries.len().min(1 << 20)]), &[]);
    let (count, tensors) = gguf_many(BYTES, &|number| {
        let key = format!("{number:x}");
        let empty = [&1u32.to_le_bytes()[..], &0u64.to_le_bytes(), &0u32.to_le_bytes(), &0u64.to_le_bytes()];
        [&(key.len() as u64).to_le_bytes()[..], key.as_bytes(), &empty.concat()].concat()
    });
    check("tensors", "m.gguf", &gguf(count, 0, &tensors), &[]);
}
