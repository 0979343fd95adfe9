//! An index on the loopback, honest or not.

use super::*;
use crate::tests::server::{Asked, Reply, limits, serve, sha256};

/// The archive that Python's zipfile makes of a folder, of `a.h` ("one " 40 times, deflated) and of
/// `b.so` ("two", stored), with a comment.
const ZIP: &str = "\
    504b0304140000000000000021500000000000000000000000000c0000006e76696469612f637531332f504b0304140000000800\
    0000215055bbefee09000000a0000000170000006e76696469612f637531332f696e636c7564652f612e68cbcf4b55c81fc41800\
    504b030414000000000000002150668aca110300000003000000140000006e76696469612f637531332f6c69622f622e736f7477\
    6f504b01021403140000000000000021500000000000000000000000000c00000000000000000000008001000000006e76696469\
    612f637531332f504b010214031400000008000000215055bbefee09000000a000000017000000000000000000000080012a0000\
    006e76696469612f637531332f696e636c7564652f612e68504b0102140314000000000000002150668aca110300000003000000\
    1400000000000000000000008001680000006e76696469612f637531332f6c69622f622e736f504b05060000000003000300c100\
    00009d00000009006120636f6d6d656e74";

fn zip() -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&ZIP[at..at + 2], 16).unwrap();
    (0..ZIP.len()).step_by(2).map(digit).collect()
}

fn index(address: &str) -> Index {
    Index { address: format!("{address}/simple/"), proxy: None, limits: limits() }
}

/// A line of the index's answer.
fn listed(filename: &str, url: &str, content: &[u8], yanked: &str) -> String {
    let digest = sha256(content);
    format!(
        "{{\"filename\": \"{filename}\", \"url\": \"{url}\", \"hashes\": {{\"sha256\": \"{digest}\"}}, \"yanked\": {yanked}}}"
    )
}

/// A wheel's file name for this machine.
fn name(version: &str) -> String {
    let arch = std::env::consts::ARCH;
    format!("pack_age-{version}-py3-none-manylinux2014_{arch}.manylinux_2_17_{arch}.whl")
}

fn honest(asked: &Asked) -> Reply {
    match asked.path.as_str() {
        "/simple/pack-age/" => {
            let files = [
                listed(&name("13.0.9"), "/files/old.whl", &zip(), "false"),
                listed(&name("13.0.10"), "../../files/new.whl#sha256=0", &zip(), "false"),
                listed(&name("13.1.1"), "/files/withdrawn.whl", &zip(), "\"it is broken\""),
                listed(&name("13.2.1rc1"), "/files/candidate.whl", &zip(), "false"),
                listed("pack_age-13.3.1-py3-none-win_amd64.whl", "/files/windows.whl", &zip(), "false"),
                listed(
                    "pack_age-13.3.1-py3-none-manylinux2014_m68k.whl",
                    "/files/other.whl",
                    &zip(),
                    "false",
                ),
                listed("pack_age-13.3.1.tar.gz", "/files/source.tar.gz", &zip(), "false"),
            ];
            Reply::new(200, format!("{{\"meta\": {{}}, \"files\": [{}]}}", files.join(", ")))
        }
        "/files/new.whl" => Reply::new(200, zip()),
        "/files/old.whl" => Reply::new(200, "another file"),
        _ => Reply::new(404, "no"),
    }
}

#[test]
fn wheels_of_this_machine_come_newest_first_and_are_verified() {
    let (address, log) = serve(honest);
    let index = index(&address);
    let wheels = index.wheels("pack-age").unwrap();
    let shown: Vec<_> = wheels.iter().map(Wheel::to_string).collect();
    assert_eq!(shown, ["pack-age 13.0.10", "pack-age 13.0.9"]);
    assert_eq!(wheels[0].minor(), (13, 0));
    let mut last = (0, 0);
    let bytes = index.download(&wheels[0], &mut |progress| last = (progress.bytes, progress.total)).unwrap();
    assert_eq!((bytes, last), (zip(), (zip().len() as u64, zip().len() as u64)));
    let accept = log.lock().unwrap()[0].header("Accept").unwrap().to_string();
    assert!(accept.starts_with("application/vnd.pypi.simple.v1+json"), "{accept}");

    let message = index.download(&wheels[1], &mut |_| {}).unwrap_err().to_string();
    let (got, want) = (sha256(b"another file"), sha256(&zip()));
    assert_eq!(message, format!("pack-age: what arrived has SHA-256 {got}, but the index says {want}"));
    let message = index.wheels("absent").unwrap_err().to_string();
    assert_eq!(message, "absent: the package index answers 404: there is no such package");
}

#[test]
fn a_cut_download_is_repeated() {
    let (address, log) = serve(|asked| match asked.number {
        1 => Reply::new(200, &zip()[..50]).with("Content-Length", zip().len()),
        _ => honest(asked),
    });
    let index = index(&address);
    let wheels = index.wheels("pack-age").unwrap();
    assert_eq!(index.download(&wheels[0], &mut |_| {}).unwrap(), zip());
    assert_eq!(log.lock().unwrap().len(), 3);
}

#[test]
fn what_is_no_index_is_said() {
    let (address, _) = serve(|_| Reply::new(200, "<html>please log in</html>"));
    let message = index(&address).wheels("pack-age").unwrap_err().to_string();
    assert!(
        message.starts_with("pack-age: the package index does not answer with a list of files in JSON; "),
        "{message}"
    );
    // A port that nobody listens to.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let message = index(&format!("http://{closed}")).wheels("pack-age").unwrap_err().to_string();
    let want = "pack-age: there is no network, or the package index cannot be reached (";
    assert!(message.starts_with(want), "{message}");
    let message = index("https://user:secret@host").wheels("pack-age").unwrap_err().to_string();
    assert_eq!(
        message,
        "pack-age: the package index's address (--index) is host/simple/: it should have no user and no query"
    );
    let mut wheel = Listed {
        filename: name("1.0"),
        url: "http://elsewhere/x.whl".into(),
        hashes: Hashes { sha256: Some(sha256(b"")) },
        yanked: serde_json::Value::Null,
    };
    wheel.url = "http://elsewhere/x.whl".into();
    let wheel = wheel.wheel("pack-age", "https://index/simple/pack-age/").unwrap();
    let message = Index::new().download(&wheel, &mut |_| {}).unwrap_err().to_string();
    assert_eq!(message, "pack-age: the index refers to http://elsewhere, which is no https");
}

#[test]
fn files_go_where_they_are_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| name.strip_prefix("nvidia/cu13/").map(PathBuf::from);
    assert_eq!(unpack("p", &zip(), folder.path(), place).unwrap(), 2);
    assert_eq!(std::fs::read_to_string(folder.path().join("include/a.h")).unwrap(), "one ".repeat(40));
    assert_eq!(std::fs::read_to_string(folder.path().join("lib/b.so")).unwrap(), "two");
    for outside in ["../a", "/a", "a/../../b", ""] {
        let message = unpack("p", &zip(), folder.path(), |_| Some(outside.into())).unwrap_err().to_string();
        assert_eq!(message, "p: nvidia/cu13/include/a.h leads out of the folder");
    }
}

/// Whatever is wrong with a file, nothing panics, and what is written is what was packed.
#[test]
fn broken_zip_files_are_errors() {
    let (whole, folder) = (zip(), tempfile::tempdir().unwrap());
    let path = folder.path().join("x");
    let unpack = |bytes: &[u8]| unpack("p", bytes, folder.path(), |_| Some("x".into()));
    for length in 0..whole.len() {
        let message = unpack(&whole[..length]).unwrap_err().to_string();
        assert!(message.starts_with("p: it is no zip file, or a broken one: "), "{length}: {message}");
        assert!(!path.exists());
    }
    let (one, two) = ("one ".repeat(40), "two");
    let mut refused = 0;
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            refused += usize::from(unpack(&bytes).is_err());
            if let Ok(text) = std::fs::read_to_string(&path) {
                assert!(text == one || text == two, "{at}, {value}: {text}");
                std::fs::remove_file(&path).unwrap();
            }
        }
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn contents_are_what_the_directory_promises() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |bytes: &[u8]| {
        let place = |name: &str| Some(name.into());
        unpack("p", bytes, folder.path(), place).unwrap_err().to_string()
    };
    // The two of b.so, which is stored.
    let at = zip().windows(3).position(|bytes| bytes == b"two").unwrap();
    let mut bytes = zip();
    bytes[at] = b'T';
    assert_eq!(refused(&bytes), "p: nvidia/cu13/lib/b.so: it does not unpack: Invalid checksum");
    // The size of a.h in the directory, whose header there is the second.
    let header = zip().windows(4).position(|bytes| bytes == [0x50, 0x4b, 1, 2]).unwrap();
    let header =
        header + 4 + zip()[header + 4..].windows(4).position(|bytes| bytes == [0x50, 0x4b, 1, 2]).unwrap();
    for (size, message) in [
        (159_u32, "it does not unpack: File is larger than its declared uncompressed size"),
        (161, "it unpacks to 160 bytes, but should to 161"),
        (u32::MAX - 1, "it unpacks to more bytes than are wanted"),
    ] {
        let mut bytes = zip();
        bytes[header + 24..header + 28].copy_from_slice(&size.to_le_bytes());
        assert_eq!(refused(&bytes), format!("p: nvidia/cu13/include/a.h: {message}"));
    }
}

#[test]
fn relative_addresses() {
    let folder = "https://index/a/simple/pack-age/";
    for (relative, whole) in [
        ("x.whl", "https://index/a/simple/pack-age/x.whl"),
        ("/x.whl", "https://index/x.whl"),
        ("../../x.whl", "https://index/a/x.whl"),
        ("../../../../../../x.whl", "https://index/x.whl"),
    ] {
        assert_eq!(joined(folder, relative), whole);
    }
}

/// Both wheels that `lowbit setup cuda` brings, whatever their layout.
#[test]
#[ignore = "asks the public index"]
fn the_public_index_has_nvidias_compiler() {
    let mut index = Index::new();
    index.proxy = Index::proxy_of_environment();
    for (package, minor, file) in [
        ("nvidia-cuda-runtime", (13, 0), "nvidia/cu13/include/cuda_fp16.h"),
        ("nvidia-cuda-runtime-cu12", (12, 4), "nvidia/cuda_runtime/include/cuda_fp16.h"),
        ("nvidia-cuda-nvrtc-cu12", (12, 4), "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
    ] {
        let wheels = index.wheels(package).unwrap();
        let wheel = wheels.iter().find(|wheel| wheel.minor() == minor).expect("a wheel for this machine");
        let bytes = index.download(wheel, &mut |_| {}).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let count = unpack(package, &bytes, folder.path(), |name| Some(name.into())).unwrap();
        println!("{wheel}: {} bytes, {count} files", bytes.len());
        assert!(folder.path().join(file).is_file(), "{wheel}");
    }
}
