use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::*;

/// A hub with a cache of its own.
fn hub(cache: &Path, endpoint: &str) -> Hub {
    let cache = Cache::new(cache.into());
    Hub { builder: ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.into()), cache }
}

/// Nothing listens here.
const NOWHERE: &str = "http://127.0.0.1:1";

fn resolve_offline(cache: &Path, model: &str) -> Result<PathBuf, FileError> {
    hub(cache, NOWHERE).resolve(model, &mut |_| panic!("no download"))
}

/// A cache that holds `files` of `org/name`.
fn cache(files: &[(&str, &str)]) -> TempDir {
    let cache = TempDir::new().unwrap();
    let repository = cache.path().join("models--org--name");
    let snapshot = repository.join("snapshots/c0ffee");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repository.join("refs")).unwrap();
    std::fs::write(repository.join("refs/main"), "c0ffee").unwrap();
    for (name, content) in files {
        std::fs::write(snapshot.join(name), content).unwrap();
    }
    cache
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
    let directory = TempDir::new().unwrap();
    let path = directory.path().to_str().unwrap();
    assert_eq!(resolve(path).unwrap(), directory.path());
}

#[test]
fn what_is_neither_a_path_nor_a_name_is_refused() {
    let cache = TempDir::new().unwrap();
    for model in ["", "name", "a/b/c", "../x", "org/", "/name", "org/na me", "org/..", "org/name:../x"] {
        let message = resolve_offline(cache.path(), model).unwrap_err().to_string();
        let want =
            format!("{model}: there is no such file or directory, and it is no name of the form org/name");
        assert_eq!(message, want);
    }
}

#[test]
fn whole_models_come_from_the_cache() {
    let small = [("config.json", "{}"), ("tokenizer.json", "{}")];
    let single = cache(&[&small[..], &[(SINGLE, "")]].concat());
    let sharded = cache(&[&small[..], &[(INDEX, TWO)], &PARTS].concat());
    for cache in [single, sharded] {
        let path = resolve_offline(cache.path(), "org/name").unwrap();
        assert_eq!(path, cache.path().join("models--org--name/snapshots/c0ffee"));
    }
    let gguf =
        cache(&[small[0], ("x-Q8_0.gguf", ""), ("x-Q4_K_M.gguf", ""), ("big-Q2_K-00001-of-00002.gguf", "")]);
    let file = |name: &str| Some(gguf.path().join("models--org--name/snapshots/c0ffee").join(name));
    let resolved = |model| resolve_offline(gguf.path(), model).ok();
    assert_eq!(resolved("org/name"), file("x-Q4_K_M.gguf"));
    assert_eq!(resolved("org/name:q8_0"), file("x-Q8_0.gguf"));
    assert_eq!(resolved("org/name:Q2_K"), None, "a part is missing");
    assert_eq!(resolved("org/name:Q6_K"), None);
}

#[test]
fn without_a_network_the_error_says_so() {
    let empty = TempDir::new().unwrap();
    let part = cache(&[("config.json", "{}"), ("tokenizer.json", "{}"), (INDEX, TWO), PARTS[0]]);
    for cache in [empty, part] {
        let message = resolve_offline(cache.path(), "org/name").unwrap_err().to_string();
        let want = "org/name: there is no such path, and the hub's model cannot be downloaded: the list of its files: there is no network, or the hub cannot be reached";
        assert!(message.starts_with(want), "{message}");
    }
}

#[test]
fn gguf_files_are_chosen_by_tag() {
    let several =
        names(&["b-Q8_0.gguf", "b-IQ4_XS.gguf", "b.Q4_K_M.gguf", "mmproj-f16.gguf", "x/b-Q6_K.gguf"]);
    assert_eq!(choose::gguf(&several, None).unwrap(), ["b.Q4_K_M.gguf"]);
    assert_eq!(choose::gguf(&several, Some("iq4_xs")).unwrap(), ["b-IQ4_XS.gguf"]);
    let message = choose::gguf(&several, Some("Q6_K")).unwrap_err();
    assert_eq!(message, "none of its GGUF models is Q6_K: b-IQ4_XS, b-Q8_0, b.Q4_K_M");
    assert_eq!(choose::gguf(&names(&["README.md", "b.gguf"]), None).unwrap(), ["b.gguf"]);
    let parts = names(&["b-Q4_0-00002-of-00002.gguf", "b-Q4_0-00001-of-00002.gguf", "b-Q8_0.gguf"]);
    let chosen = choose::gguf(&parts, Some("Q4_0")).unwrap();
    assert_eq!(chosen, ["b-Q4_0-00001-of-00002.gguf", "b-Q4_0-00002-of-00002.gguf"]);
    assert_eq!(choose::expected(&chosen[1..]), chosen);
    choose::gguf(&names(&["pytorch_model.bin"]), None).unwrap_err();
}

/// Serves `files` as the repository `org/name` does; returns the endpoint and what was asked for.
fn serve(files: &'static [(&'static str, &'static str)]) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let request = lines.next().unwrap_or_default();
            let first_byte = lines.take_while(|line| !line.is_empty()).any(|line| line.contains("bytes=0-0"));
            let path = request.split(' ').nth(1).unwrap_or_default().to_string();
            let (status, body) = answer(files, &path);
            let size = body.len();
            let body = if first_byte { &body[..size.min(1)] } else { &body };
            let head = format!(
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nContent-Range: bytes 0-0/{size}\r\n\
                 ETag: \"{path}\"\r\nX-Repo-Commit: c0ffee\r\nConnection: close\r\n\r\n",
                body.len()
            )
            .replace("/org/name/resolve/main/", "");
            log.lock().unwrap().push(path);
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).unwrap();
        }
    });
    (endpoint, asked)
}

fn answer(files: &[(&str, &str)], path: &str) -> (u16, String) {
    if path == "/api/models/org/name/revision/main" {
        let siblings: Vec<_> =
            files.iter().map(|(name, _)| serde_json::json!({ "rfilename": name })).collect();
        return (200, serde_json::json!({ "siblings": siblings, "sha": "c0ffee" }).to_string());
    }
    let name = path.strip_prefix("/org/name/resolve/main/");
    match files.iter().find(|(known, _)| Some(*known) == name) {
        Some((_, content)) => (206, content.to_string()),
        None => (404, "no".into()),
    }
}

#[test]
fn only_what_is_needed_is_downloaded_and_cached() {
    static FILES: [(&str, &str); 8] = [
        ("README.md", "read me"),
        ("config.json", "{\"model_type\": \"x\"}"),
        ("tokenizer.json", "{ }"),
        (INDEX, TWO),
        PARTS[0],
        PARTS[1],
        ("model.fp32.safetensors", "large"),
        ("original/consolidated.safetensors", "larger"),
    ];
    let (endpoint, asked) = serve(&FILES);
    let cache = TempDir::new().unwrap();
    let mut done = Vec::new();
    let mut progress = |Progress { file, bytes, total }: Progress<'_>| {
        if bytes == total {
            done.push(file.to_string());
        }
    };
    let path = hub(cache.path(), &endpoint).resolve("org/name", &mut progress).unwrap();
    for name in ["config.json", "tokenizer.json", INDEX, PARTS[0].0, PARTS[1].0] {
        let want = FILES.iter().find(|(known, _)| *known == name).unwrap().1;
        assert_eq!(std::fs::read_to_string(path.join(name)).unwrap(), want, "{name}");
        assert!(done.contains(&name.to_string()), "{name} in {done:?}");
    }
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 5);
    let requests = asked.lock().unwrap().len();
    assert_eq!(hub(cache.path(), &endpoint).resolve("org/name", &mut |_| {}).unwrap(), path);
    assert_eq!(asked.lock().unwrap().len(), requests, "the second time it is in the cache");
}

#[test]
fn what_the_hub_does_not_have_is_refused() {
    static FILES: [(&str, &str); 2] = [("x-Q8_0.gguf", "8"), ("x-Q6_K.gguf", "6")];
    let (endpoint, _) = serve(&FILES);
    let cache = TempDir::new().unwrap();
    let resolve = |model| hub(cache.path(), &endpoint).resolve(model, &mut |_| {});
    let message = resolve("org/other").unwrap_err().to_string();
    assert_eq!(
        message,
        "org/other: there is no such path, and the hub's model cannot be downloaded: the list of its files: the hub \
         answers 404: there is no such model or file, or it needs an access token"
    );
    let message = resolve("org/name").unwrap_err().to_string();
    assert_eq!(message, "org/name: none of its GGUF models is Q4_K_M: x-Q6_K, x-Q8_0");
    let path = resolve("org/name:Q6_K").unwrap();
    assert_eq!(std::fs::read_to_string(path).unwrap(), "6");
}
