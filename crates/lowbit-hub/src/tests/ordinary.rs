//! Ordinary use: names, caches, downloads, and hubs that say no.

use std::path::Path;

use super::server::*;
use crate::HubError;
use crate::{Progress, choose};
use lowbit_files::names::{INDEX, SINGLE};

/// Nothing listens here.
const NOWHERE: &str = "http://127.0.0.1:1";

/// A cache that holds `files` of `org/name`, as those are where links cannot be made.
fn cached(files: &[(&str, &str)]) -> Sandbox {
    let sandbox = Sandbox::new();
    let snapshot = sandbox.repository().join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(sandbox.repository().join("refs")).unwrap();
    std::fs::write(sandbox.repository().join("refs/main"), COMMIT).unwrap();
    for (name, content) in files {
        std::fs::write(snapshot.join(name), content).unwrap();
    }
    sandbox
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| name.to_string()).collect()
}

const TWO: &str =
    r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
const PARTS: [(&str, &str); 2] =
    [("model-00001-of-00002.safetensors", "1"), ("model-00002-of-00002.safetensors", "2")];

#[test]
fn paths_are_themselves() {
    let sandbox = Sandbox::new();
    let path = sandbox.folder.path().to_str().unwrap();
    assert_eq!(crate::resolve(path).unwrap(), sandbox.folder.path());
}

#[test]
fn what_is_neither_a_path_nor_a_name_is_refused() {
    let sandbox = Sandbox::new();
    for model in ["", "name", "a/b/c", "../x", "org/", "/name", "org/na me", "org/..", "org/name:../x"] {
        let message = sandbox.resolve(NOWHERE, model).unwrap_err().to_string();
        let want =
            format!("{model}: there is no such file or directory, and it is no name of the form org/name");
        assert_eq!(message, want);
    }
    sandbox.is_untouched();
}

#[test]
fn whole_models_come_from_the_cache() {
    let small = [("config.json", "{}"), ("tokenizer.json", "{}")];
    let single = cached(&[&small[..], &[(SINGLE, "")]].concat());
    let sharded = cached(&[&small[..], &[(INDEX, TWO)], &PARTS].concat());
    let unindexed = cached(&[&small[..], &PARTS].concat());
    // The single file is the one that is opened.
    let both = cached(&[&small[..], &[(SINGLE, ""), (INDEX, TWO)]].concat());
    for sandbox in [single, sharded, unindexed, both] {
        let path = sandbox.resolve(NOWHERE, "org/name").unwrap();
        assert_eq!(path, sandbox.repository().join("snapshots").join(COMMIT));
    }
    let gguf =
        cached(&[small[0], ("x-Q8_0.gguf", ""), ("x-Q4_K_M.gguf", ""), ("big-Q2_K-00001-of-00002.gguf", "")]);
    let file = |name: &str| Some(gguf.repository().join("snapshots").join(COMMIT).join(name));
    let resolved = |model| gguf.resolve(NOWHERE, model).ok();
    assert_eq!(resolved("org/name"), file("x-Q4_K_M.gguf"));
    assert_eq!(resolved("org/name:q8_0"), file("x-Q8_0.gguf"));
    assert_eq!(resolved("org/name:Q2_K"), None, "a part is missing");
    assert_eq!(resolved("org/name:Q6_K"), None);
}

#[test]
fn without_a_network_the_error_says_so() {
    let part = cached(&[("config.json", "{}"), ("tokenizer.json", "{}"), (INDEX, TWO), PARTS[0]]);
    for sandbox in [Sandbox::new(), part] {
        let message = sandbox.resolve(NOWHERE, "org/name").unwrap_err().to_string();
        let want = "org/name: there is no such path, and the hub's model cannot be downloaded: the list of its files: there is no network, or the hub cannot be reached";
        assert!(message.starts_with(want), "{message}");
    }
}

#[test]
fn offline_nothing_is_asked() {
    let (endpoint, asked) = serve(|_| Reply::new(500, ""));
    let sandbox = Sandbox::new();
    let mut hub = sandbox.hub(&endpoint);
    hub.settings.offline = true;
    let message = hub.resolve("org/name", &mut |_| {}).unwrap_err().to_string();
    assert!(message.contains("HF_HUB_OFFLINE is set, and "), "{message}");
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn gguf_files_are_chosen_by_tag() {
    let gguf = |names: &[String], tag| choose::gguf(names, tag, 100);
    let several = names(&[
        "b-Q8_0.gguf",
        "b-IQ4_XS.gguf",
        "b.Q4_K_M.gguf",
        "b-UD-Q2_K.gguf",
        "mmproj-f16.gguf",
        "x/b-Q6_K.gguf",
    ]);
    assert_eq!(gguf(&several, None).unwrap(), ["b.Q4_K_M.gguf"]);
    assert_eq!(gguf(&several, Some("iq4_xs")).unwrap(), ["b-IQ4_XS.gguf"]);
    assert_eq!(gguf(&several, Some("UD-Q2_K")).unwrap(), ["b-UD-Q2_K.gguf"]);
    assert_eq!(gguf(&several, Some("Q2_K")).unwrap(), ["b-UD-Q2_K.gguf"]);
    gguf(&several, Some("4_XS")).unwrap_err();
    assert_eq!(gguf(&several, Some("b-UD-Q2_K.gguf")).unwrap(), ["b-UD-Q2_K.gguf"]);
    let alike = names(&["b-Q4_0-v2.gguf", "b-Q4_0.gguf"]);
    assert_eq!(gguf(&alike, Some("b-Q4_0.gguf")).unwrap(), ["b-Q4_0.gguf"]);
    let message = gguf(&several, Some("Q6_K")).unwrap_err();
    assert_eq!(message, "none of its GGUF models is Q6_K: b-IQ4_XS, b-Q8_0, b-UD-Q2_K, b.Q4_K_M");
    assert_eq!(gguf(&names(&["README.md", "b.gguf"]), None).unwrap(), ["b.gguf"]);
    let parts = names(&["b-Q4_0-00002-of-00002.gguf", "b-Q4_0-00001-of-00002.gguf", "b-Q8_0.gguf"]);
    let chosen = gguf(&parts, Some("Q4_0")).unwrap();
    assert_eq!(chosen, ["b-Q4_0-00001-of-00002.gguf", "b-Q4_0-00002-of-00002.gguf"]);
    let message = gguf(&parts[..1], None).unwrap_err();
    assert_eq!(message, "its part b-Q4_0-00001-of-00002.gguf is missing");
    let message = gguf(&names(&["b-00001-of-99999.gguf"]), None).unwrap_err();
    assert_eq!(message, "b-00001-of-99999.gguf is one of 99999 parts; at most 100 are downloaded");
    let message = gguf(&names(&["pytorch_model.bin"]), None).unwrap_err();
    let want = "it has neither config.json with safetensors nor GGUF files; pytorch_model.bin is a PyTorch file, which is not read";
    assert_eq!(message, want);
}

/// Those files alone are downloaded that a checkpoint has, into huggingface_hub's layout.
#[test]
fn only_what_is_needed_is_downloaded_and_cached() {
    let all = files(&[
        ("README.md", "read me"),
        ("config.json", "{\"model_type\": \"x\"}"),
        ("tokenizer.json", "{ }"),
        ("special_tokens_map.json", "{  }"),
        ("additional_chat_templates/tool_use.jinja", "{{ tools }}"),
        ("additional_chat_templates/notes.txt", "notes"),
        (INDEX, TWO),
        PARTS[0],
        PARTS[1],
        ("model.fp32.safetensors", "large"),
        ("pytorch_model.bin", "pickle"),
        ("original/consolidated.safetensors", "larger"),
    ]);
    let known = all.clone();
    let (endpoint, asked) = serve(move |asked| honest(&known, asked));
    for endpoint in [endpoint.clone(), format!("{endpoint}/"), format!("{endpoint}/mirror/")] {
        let sandbox = Sandbox::new();
        let mut done = Vec::new();
        let mut progress = |Progress { file, bytes, total }: Progress<'_>| {
            if bytes == total {
                done.push(file.to_string());
            }
        };
        let path = sandbox.hub(&endpoint).resolve("org/name", &mut progress).unwrap();
        let template = "additional_chat_templates/tool_use.jinja";
        let wanted = [
            "config.json",
            PARTS[0].0,
            PARTS[1].0,
            INDEX,
            "tokenizer.json",
            "special_tokens_map.json",
            template,
        ];
        let mut tree = vec!["victim".to_string(), "cache/models--org--name/refs/main".into()];
        for name in wanted {
            let content = &all.iter().find(|(known, _)| *known == name).unwrap().1;
            assert_eq!(&std::fs::read(path.join(name)).unwrap(), content, "{name}");
            assert!(done.contains(&name.to_string()), "{name} in {done:?}");
            let lfs = name.contains("safetensors");
            let blob = if lfs { sha256(content) } else { git(content) };
            tree.push(format!("cache/models--org--name/blobs/{blob}"));
            let up = if name == template { "../../.." } else { "../.." };
            tree.push(format!("cache/models--org--name/snapshots/{COMMIT}/{name} -> {up}/blobs/{blob}"));
        }
        tree.sort();
        if cfg!(unix) {
            assert_eq!(sandbox.tree(), tree);
        }
        assert_eq!(std::fs::read_to_string(sandbox.repository().join("refs/main")).unwrap(), COMMIT);
        let requests = asked.lock().unwrap().len();
        assert_eq!(sandbox.resolve(&endpoint, "org/name").unwrap(), path);
        assert_eq!(asked.lock().unwrap().len(), requests, "the second time it is in the cache");
    }
}

#[test]
fn what_the_hub_does_not_have_is_refused() {
    let known = files(&[("x-Q8_0.gguf", "8"), ("x-Q6_K.gguf", "6")]);
    let (endpoint, _) = serve(move |asked| honest(&known, asked));
    let sandbox = Sandbox::new();
    let message = sandbox.resolve(&endpoint, "org/other").unwrap_err().to_string();
    assert_eq!(
        message,
        "org/other: there is no such path, and the hub's model cannot be downloaded: the list of its files: the hub \
         answers 404: there is no such model or file, or it needs an access token (HF_TOKEN)"
    );
    let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert_eq!(message, "org/name: none of its GGUF models is Q4_K_M: x-Q6_K, x-Q8_0");
    let path = sandbox.resolve(&endpoint, "org/name:Q6_K").unwrap();
    assert_eq!(std::fs::read_to_string(path).unwrap(), "6");
}

#[test]
fn a_hub_that_says_no_is_quoted() {
    let problem = |status: u16, token| {
        let (endpoint, asked) = serve(move |_| {
            Reply::new(status, "<html>").with("X-Error-Message", format!("gated\u{9b}2J{}", "!".repeat(500)))
        });
        let sandbox = Sandbox { token, ..Sandbox::new() };
        let error = sandbox.resolve(&endpoint, "org/name").unwrap_err();
        sandbox.is_untouched();
        let HubError::Download { problem, .. } = error else { panic!("{error}") };
        let problem = problem.replace(&"!".repeat(190), "!");
        (problem, asked.lock().unwrap().len())
    };
    let (text, requests) = problem(401, None);
    assert!(
        text.starts_with("the hub answers 401: there is no such model or file, or it needs an access token"),
        "{text}"
    );
    assert!(text.contains("(gated\\u{9b}2J!") && text.ends_with(" [...])"), "{text}");
    assert_eq!(requests, 1, "another attempt does not help");
    let (text, _) = problem(403, Some("secret"));
    let want = "the hub answers 403: access is refused; its page on the hub may ask for consent, or the access token may not read it (gated";
    assert!(text.starts_with(want), "{text}");
    let (text, requests) = problem(503, None);
    assert!(text.starts_with("the hub answers 503 (gated") && text.ends_with(", in 4 attempts"), "{text}");
    assert_eq!(requests, 4);
    assert!(problem(418, None).0.starts_with("the hub answers 418 (gated"));
}

#[test]
fn passing_errors_are_tried_again() {
    let (endpoint, asked) = serve(|asked| match asked.number % 3 {
        0 => Reply::new(503, ""),
        // Hangs up without a word.
        1 => Reply { raw: Some(Vec::new()), ..Reply::default() },
        _ => honest(&small(), asked),
    });
    let sandbox = Sandbox::new();
    sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(asked.lock().unwrap().len(), 3 * 7);
}

/// Files of LFS have the digest in another header, and are elsewhere; small ones are behind a
/// relative redirect.
#[test]
fn redirects_are_followed_as_the_hub_has_them() {
    let (storage, stored) = serve(|asked| {
        let mut asked = asked.clone();
        asked.path = asked.path.split('?').next().unwrap().into();
        if asked.method == "HEAD" {
            return Reply::new(403, "signed for GET");
        }
        honest(&small(), &asked).with("ETag", "\"another\"").with("X-Repo-Commit", "none")
    });
    let (endpoint, asked) = serve(move |asked| {
        let path = asked.path.clone();
        let reply =
            honest(&small(), &Asked { path: path.trim_start_matches("/cache").into(), ..asked.clone() });
        if asked.is_list() || path.starts_with("/cache") {
            return reply;
        }
        let header = |name: &str| reply.headers.iter().find(|(known, _)| known == name).unwrap().1.clone();
        if !path.ends_with("safetensors") {
            return Reply::new(307, "moved").with("Location", format!("/cache{path}"));
        }
        Reply::new(302, "moved")
            .with("Location", format!("{storage}{path}?signature=x"))
            .with("ETag", "\"pointer\"")
            .with("X-Linked-ETag", header("ETag"))
            .with("X-Linked-Size", "7")
            .with("X-Repo-Commit", COMMIT)
    });
    let sandbox = Sandbox { token: Some("secret"), ..Sandbox::new() };
    let path = sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(std::fs::read_to_string(path.join(SINGLE)).unwrap(), "weights");
    let all = asked.lock().unwrap();
    assert!(all.iter().all(|asked| asked.header("Authorization") == Some("Bearer secret")), "{all:?}");
    let all = stored.lock().unwrap();
    assert!(all.len() == 1 && all.iter().all(|asked| asked.header("Authorization").is_none()), "{all:?}");
}

#[test]
fn what_python_downloaded_in_part_or_whole_is_used() {
    let weights = "w".repeat(100_000).into_bytes();
    let mut known = small();
    known[2].1.clone_from(&weights);
    let (endpoint, asked) = serve(move |asked| honest(&known, asked));
    let sandbox = Sandbox::new();
    let blobs = sandbox.repository().join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), &weights[..60_000]).unwrap();
    std::fs::write(blobs.join(git(&small()[0].1)), &small()[0].1).unwrap();
    let path = sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(std::fs::read(path.join(SINGLE)).unwrap(), weights);
    let asked = asked.lock().unwrap();
    let ranges: Vec<_> = asked.iter().filter_map(|asked| asked.header("Range")).collect();
    assert_eq!(ranges, ["bytes=60000-"]);
    assert!(!asked.iter().any(|asked| asked.is("GET", CONFIG)), "its blob was there");
}

#[test]
fn a_new_commit_replaces_the_old_one_only_when_it_is_whole() {
    let sandbox = cached(&[("config.json", "{}")]);
    std::fs::write(sandbox.repository().join("refs/main"), OTHER).unwrap();
    let main = || std::fs::read_to_string(sandbox.repository().join("refs/main")).unwrap();
    let (endpoint, _) = serve(|asked| match asked.path.ends_with(SINGLE) {
        true => Reply::new(404, ""),
        false => honest(&small(), asked),
    });
    sandbox.resolve(&endpoint, "org/name").unwrap_err();
    assert_eq!(main(), OTHER);
    let (endpoint, asked) = serve(|asked| honest(&small(), asked));
    sandbox.resolve(&endpoint, "org/name").unwrap();
    assert_eq!(main(), COMMIT);
    let asked = asked.lock().unwrap();
    assert!(
        !asked.iter().any(|asked| asked.path.ends_with("tokenizer.json")),
        "what is here is not asked for"
    );
}

#[test]
fn four_at_once_download_once() {
    let (endpoint, asked) = serve(|asked| Reply {
        drip: asked.is("GET", SINGLE).then_some((40, std::time::Duration::from_millis(30))),
        ..honest(&small(), asked)
    });
    let sandbox = Sandbox::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| sandbox.resolve(&endpoint, "org/name").unwrap());
        }
    });
    let asked = asked.lock().unwrap();
    for name in ["config.json", SINGLE] {
        let gets = asked.iter().filter(|asked| asked.is("GET", &format!("/{name}"))).count();
        assert_eq!(gets, 1, "{name}");
    }
    assert_eq!(sandbox.tree().len(), 1 + 1 + 3 + 3, "{:?}", sandbox.tree());
}

#[test]
fn errors_of_the_disk_are_named() {
    let text = |kind: std::io::ErrorKind| crate::cache::problem(Path::new("/cache/x"), &kind.into());
    assert_eq!(text(std::io::ErrorKind::StorageFull), "/cache/x: the disk is full");
    assert_eq!(text(std::io::ErrorKind::QuotaExceeded), "/cache/x: the disk quota is used up");
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("cache"), "a file").unwrap();
    let (endpoint, _) = serve(|asked| honest(&small(), asked));
    let message = sandbox.resolve(&endpoint, "org/name").unwrap_err().to_string();
    assert!(message.contains("tokenizer.json: ") && message.contains("/cache: "), "{message}");
}
