//! A cache in which an earlier attack left links.
#![cfg(unix)]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::server::*;
use lowbit_files::names::SINGLE;

/// Plants a link in a cache whose folders are there, and resolves.
fn plant(link: &str, target: &Path) -> (Sandbox, Result<PathBuf, String>) {
    let sandbox = Sandbox::new();
    let path = sandbox.path("cache").join(link);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::create_dir_all(sandbox.path("elsewhere")).unwrap();
    std::fs::write(sandbox.path("elsewhere/main"), OTHER).unwrap();
    symlink(sandbox.path("").join(target), &path).unwrap();
    let (endpoint, _) = serve(|asked| honest(&small(), asked));
    let result = sandbox.resolve(&endpoint, "org/name").map_err(|error| error.to_string());
    assert_eq!(std::fs::read_to_string(sandbox.path("victim")).unwrap(), "precious");
    assert_eq!(std::fs::read_dir(sandbox.path("elsewhere")).unwrap().count(), 1, "{link}");
    assert_eq!(std::fs::read_to_string(sandbox.path("elsewhere/main")).unwrap(), OTHER);
    (sandbox, result)
}

#[test]
fn folders_that_are_links_are_not_written_to() {
    let repository = "models--org--name";
    for folder in ["", "/blobs", "/snapshots", "/refs"] {
        let (_, result) = plant(&format!("{repository}{folder}"), Path::new("elsewhere"));
        let message = result.unwrap_err();
        assert!(message.contains("should be a folder of the cache, but is a link; remove it"), "{message}");
    }
    let (_, result) = plant(".locks", Path::new("elsewhere"));
    assert!(result.unwrap_err().contains("/.locks: should be a folder of the cache, but is a link"));
    let (_, result) = plant(&format!("{repository}/snapshots/{COMMIT}"), Path::new("elsewhere"));
    let message = result.unwrap_err();
    assert!(message.contains("out of the cache; remove it"), "{message}");
}

#[test]
fn a_folder_of_templates_that_is_a_link_is_not_written_to() {
    let sandbox = Sandbox::new();
    let snapshot = sandbox.repository().join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(sandbox.path("cache/models--org--other")).unwrap();
    let elsewhere = sandbox.path("cache/models--org--other");
    symlink(&elsewhere, snapshot.join("additional_chat_templates")).unwrap();
    let mut all = small();
    all.extend(files(&[("additional_chat_templates/x.jinja", "x")]));
    let (endpoint, _) = serve(move |asked| honest(&all, asked));
    let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert!(
        message.contains("additional_chat_templates: should be a folder of the cache, but is a link"),
        "{message}"
    );
    assert_eq!(std::fs::read_dir(elsewhere).unwrap().count(), 0);
}

#[test]
fn links_in_the_place_of_files_are_replaced() {
    let blob = sha256(b"weights");
    for file in ["refs/main".into(), format!("blobs/{blob}"), format!("blobs/{blob}.incomplete")] {
        for target in ["victim", "elsewhere/main", "missing"] {
            let (sandbox, result) = plant(&format!("models--org--name/{file}"), Path::new(target));
            assert_eq!(std::fs::read_to_string(result.unwrap().join(SINGLE)).unwrap(), "weights");
            assert!(!sandbox.path("missing").exists());
            let main = sandbox.repository().join("refs/main");
            assert_eq!(std::fs::read_to_string(&main).unwrap(), COMMIT);
            assert!(std::fs::symlink_metadata(&main).unwrap().is_file());
        }
    }
    let (sandbox, result) = plant(&format!(".locks/models--org--name/{blob}.lock"), Path::new("victim"));
    assert!(result.unwrap_err().ends_with(".lock: should be a plain file"));
    assert!(!sandbox.repository().join("refs").exists());
}

#[test]
fn snapshots_whose_links_leave_the_cache_are_named() {
    for file in ["config.json", "tokenizer_config.json", "x.gguf", "README.md"] {
        let (_, result) = plant(&format!("models--org--name/snapshots/{COMMIT}/{file}"), Path::new("victim"));
        let message = result.unwrap_err();
        assert!(message.contains(&format!("{file}: is a link to ")), "{message}");
        assert!(message.ends_with("/victim, out of the cache; remove it"), "{message}");
    }
    // One that leads nowhere is replaced.
    let (_, result) =
        plant(&format!("models--org--name/snapshots/{COMMIT}/config.json"), Path::new("missing"));
    result.unwrap();
}

#[test]
fn a_ref_that_is_no_commit_is_none() {
    for main in ["../../..", "/etc", "", "main", "\0", &"a".repeat(1 << 20)] {
        let sandbox = Sandbox::new();
        std::fs::create_dir_all(sandbox.repository().join("refs")).unwrap();
        std::fs::write(sandbox.repository().join("refs/main"), main).unwrap();
        let (endpoint, _) = serve(|asked| honest(&small(), asked));
        sandbox.resolve(&endpoint, "org/name").unwrap();
        assert_eq!(std::fs::read_to_string(sandbox.repository().join("refs/main")).unwrap(), COMMIT);
    }
}

/// Users move caches, and leave links.
#[test]
fn a_moved_cache_is_read_and_written() {
    let (endpoint, asked) = serve(|asked| honest(&small(), asked));
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("disk")).unwrap();
    symlink(sandbox.path("disk"), sandbox.path("cache")).unwrap();
    sandbox.resolve(&endpoint, "org/name").unwrap();
    std::fs::rename(sandbox.path("disk/models--org--name"), sandbox.path("moved")).unwrap();
    symlink(sandbox.path("moved"), sandbox.repository()).unwrap();
    let requests = asked.lock().unwrap().len();
    sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(asked.lock().unwrap().len(), requests, "it is all there");
}
