//! Names that may become a path or a part of an address: plain ones, and nothing else.
//!
//! A hub's answer is not trusted. Commits, ETags and file names reach the file system only as these
//! types.

use std::fmt::{self, Display, Formatter};

use ureq::http::HeaderValue;

/// The most bytes of an organisation's or a model's name, as on the hub.
const PART: usize = 96;
/// The most bytes of a file's name: below what file systems allow, with room for `.incomplete`.
const FILE: usize = 200;
/// The folder of named chat templates.
pub(super) const TEMPLATES: &str = "additional_chat_templates/";
/// The most bytes of an ETag.
const ETAG: usize = 128;

/// The hosts of the hub's pages.
const HOSTS: [&str; 3] = ["huggingface.co/", "hf.co/", "www.huggingface.co/"];

/// `org/name` or `org/name:tag`, also as the address of the hub's page or file:
/// `https://huggingface.co/org/name`, `hf.co/org/name:tag`,
/// `https://huggingface.co/org/name/resolve/main/FILE.gguf`, whose tag is the file's name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ModelName<'a> {
    /// The name as the user wrote it.
    pub whole: &'a str,
    pub org: &'a str,
    pub name: &'a str,
    pub tag: Option<&'a str>,
}

impl<'a> ModelName<'a> {
    pub fn parse(whole: &'a str) -> Option<Self> {
        let (path, file) = match address(whole) {
            Some(path) => page(path)?,
            None => (whole, None),
        };
        // A shell completes the name of a directory with a slash.
        let path = path.strip_suffix('/').unwrap_or(path);
        let (repository, tag) = match path.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, file),
        };
        let (org, name) = repository.split_once('/')?;
        // `models--a--b--c` would be the folder of both `a--b/c` and `a/b--c`: the hub has neither.
        let is_part = |part: &str| is_word(part) && !part.contains("--") && !part.contains("..");
        let all = is_part(org) && is_part(name) && tag.is_none_or(is_word);
        all.then_some(Self { whole, org, name, tag })
    }

    /// The repository's folder in the cache, as huggingface_hub calls it.
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.name)
    }
}

/// The part of an address after the hub's host. The address may lack its scheme.
fn address(text: &str) -> Option<&str> {
    let schemes = ["https://", "http://", "hf://"];
    let scheme = schemes.iter().find_map(|scheme| text.strip_prefix(scheme));
    let host = HOSTS.iter().find_map(|host| scheme.unwrap_or(text).strip_prefix(host));
    host.or_else(|| text.strip_prefix("hf://"))
}

/// The repository of a page's path, and the file of it that the page shows. Only the main branch is
/// read.
fn page(path: &str) -> Option<(&str, Option<&str>)> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let Some((start, _)) = path.match_indices('/').nth(1) else { return Some((path, None)) };
    let (repository, rest) = path.split_at(start);
    match rest.trim_matches('/').split('/').collect::<Vec<_>>()[..] {
        [""] | ["tree", "main"] => Some((repository, None)),
        ["blob" | "resolve", "main", file] if file.ends_with(".gguf") => Some((repository, Some(file))),
        ["blob" | "resolve", "main", _] => Some((repository, None)),
        _ => None,
    }
}

fn is_word(part: &str) -> bool {
    part.len() <= PART
        && part.starts_with(|c: char| c.is_ascii_alphanumeric())
        && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// A commit: 40 hexadecimal digits (SHA-1), or 64 (SHA-256).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Commit(String);

impl Commit {
    pub fn parse(text: &str) -> Option<Self> {
        (matches!(text.len(), 40 | 64) && is_hex(text)).then(|| Self(text.to_ascii_lowercase()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of a file in a repository's top folder, where all files of a model are but for chat
/// templates with names, `additional_chat_templates/NAME.jinja`, and sentence-transformers'
/// modules, `1_Pooling/config.json` and, of linear layers, `2_Dense/model.safetensors`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FileName(String);

impl FileName {
    pub fn parse(name: &str) -> Option<Self> {
        let template = name.strip_prefix(TEMPLATES).filter(|name| name.ends_with(".jinja"));
        (is_module(name) || Self::is_plain(template.unwrap_or(name))).then(|| Self(name.into()))
    }

    fn is_plain(name: &str) -> bool {
        // A terminal may not show combining letters.
        let letter = |c: char| c.is_alphanumeric() && c.escape_debug().len() == 1;
        let plain = |c: char| letter(c) || "-_.+=()[],@~#& ".contains(c);
        name.len() <= FILE
            && name.starts_with(|c: char| letter(c) || c == '_')
            && !name.ends_with(['.', ' '])
            && name.chars().all(plain)
            && !is_device(name)
    }

    /// True if it names the settings of one of sentence-transformers' modules, or a linear layer's
    /// weights.
    pub fn is_module(&self) -> bool {
        is_module(&self.0)
    }

    /// The settings of the module in `folder`, if that is a module's.
    pub fn of_module(folder: &str) -> Option<Self> {
        Some(format!("{folder}/config.json")).filter(|name| is_module(name)).map(Self)
    }

    /// The folder that it is in, if that is not the top one.
    pub fn folder(&self) -> Option<&str> {
        self.0.split_once('/').map(|(folder, _)| folder)
    }

    /// True if it names a chat template in the templates' folder.
    pub fn is_template(&self) -> bool {
        self.0.starts_with(TEMPLATES)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As in an address.
    pub fn encoded(&self) -> String {
        let encode = |byte: u8| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        };
        self.0.bytes().map(encode).collect()
    }
}

/// True if `name` is `N_NAME/config.json` or `N_Dense/model.safetensors`.
fn is_module(name: &str) -> bool {
    let weights = name.strip_suffix("/model.safetensors").filter(|folder| folder.ends_with("_Dense"));
    let folder = name.strip_suffix("/config.json").or(weights);
    folder.and_then(|folder| folder.split_once('_')).is_some_and(|(number, name)| {
        let digits = (1..=2).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
        digits && (1..=32).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphabetic())
    })
}

impl Display for FileName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// True if Windows takes the name for a device's: `NUL`, `com1.txt`.
fn is_device(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().trim_end().to_ascii_lowercase();
    let numbered = |prefix| {
        stem.strip_prefix(prefix).is_some_and(|rest| rest.len() == 1 && rest.as_bytes()[0].is_ascii_digit())
    };
    matches!(stem.as_str(), "con" | "prn" | "aux" | "nul") || numbered("com") || numbered("lpt")
}

/// An entity tag, which is a blob's name in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ETag(String);

/// The digest of the content that an [`ETag`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Digest {
    /// 64 digits: of the content, as for LFS files.
    Sha256,
    /// 40 digits: of git's blob, as for other files; some mirrors take that of the content.
    Sha1,
    /// Any other ETag says nothing.
    Unknown,
}

impl ETag {
    /// From a header: `"..."` or `W/"..."`.
    pub fn parse(header: &HeaderValue) -> Option<Self> {
        let text = header.to_str().ok()?.trim();
        let text = text.strip_prefix("W/").unwrap_or(text);
        let text = match text.strip_prefix('"') {
            Some(rest) => rest.strip_suffix('"')?,
            None => text,
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let all = (1..=ETAG).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(plain)
            && ![".incomplete", ".lock", "."].iter().any(|end| text.ends_with(end))
            && !is_device(text);
        all.then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn digest(&self) -> Digest {
        match self.0.len() {
            64 if is_hex(&self.0) => Digest::Sha256,
            40 if is_hex(&self.0) => Digest::Sha1,
            _ => Digest::Unknown,
        }
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn etag(text: &str) -> Option<String> {
        let header = HeaderValue::from_bytes(text.as_bytes()).ok()?;
        ETag::parse(&header).map(|etag| etag.0)
    }

    #[test]
    fn models_have_an_organisation_and_a_name() {
        let parse = |name| ModelName::parse(name).map(|name| (name.org, name.name, name.tag));
        assert_eq!(parse("Qwen/Qwen3-0.6B"), Some(("Qwen", "Qwen3-0.6B", None)));
        assert_eq!(parse("a/b:UD-Q4_K_XL"), Some(("a", "b", Some("UD-Q4_K_XL"))));
        let long = format!("a/{}", "b".repeat(97));
        for name in
            ["a", "/a", "a/", "a/b/c", "../a", "a/..", "a/.b", "a--b/c", "a/b--c", "a/b..c", "a/b\n", "a/b\0"]
        {
            assert_eq!(parse(name), None, "{name:?}");
        }
        for name in ["a/b:", "a/b:../c", "a/b:c/d", "a\\b", "a/b c", "ä/b", "a/b%2f", "", "/", ":", &long] {
            assert_eq!(parse(name), None, "{name:?}");
        }
    }

    #[test]
    fn addresses_of_the_hub_are_names() {
        let parse = |name| ModelName::parse(name).map(|name| (name.org, name.name, name.tag));
        let plain = Some(("Qwen", "Qwen3-0.6B", None));
        for name in [
            "Qwen/Qwen3-0.6B/",
            "https://huggingface.co/Qwen/Qwen3-0.6B",
            "http://www.huggingface.co/Qwen/Qwen3-0.6B/",
            "huggingface.co/Qwen/Qwen3-0.6B",
            "hf.co/Qwen/Qwen3-0.6B",
            "hf://Qwen/Qwen3-0.6B",
            "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main",
            "https://huggingface.co/Qwen/Qwen3-0.6B?show_file_info=x#readme",
            "https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json",
        ] {
            assert_eq!(parse(name), plain, "{name}");
        }
        assert_eq!(parse("hf.co/a/b:Q8_0"), Some(("a", "b", Some("Q8_0"))));
        let file = Some(("a", "b", Some("b-Q8_0.gguf")));
        assert_eq!(parse("https://huggingface.co/a/b/resolve/main/b-Q8_0.gguf?download=true"), file);
        for name in [
            "https://example.org/a/b",
            "https://huggingface.co/a",
            "https://huggingface.co/a/b/tree/other",
            "https://huggingface.co/a/b/resolve/main/sub/b.gguf",
            "https://huggingface.co.example.org/a/b",
            "https://huggingface.co/a/b/../c",
            "hf://a",
            "a/b//",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    #[test]
    fn commits_are_hexadecimal() {
        assert_eq!(Commit::parse(&"aF".repeat(20)).unwrap().as_str(), "af".repeat(20));
        assert!(Commit::parse(&"0".repeat(64)).is_some());
        for text in ["", "main", "c0ffee", "..", "../../../../../../../../../../../../../.."] {
            assert_eq!(Commit::parse(text), None, "{text}");
        }
        for text in ["0".repeat(41), format!("{}/", "0".repeat(39)), "g".repeat(40), "0".repeat(1 << 20)] {
            assert_eq!(Commit::parse(&text), None);
        }
    }

    #[test]
    fn etags_are_plain_tokens() {
        let (sha1, sha256) = ("a".repeat(40), "b".repeat(64));
        assert_eq!(etag(&format!("\"{sha1}\"")), Some(sha1.clone()));
        assert_eq!(etag(&format!("W/\"{sha256}\"")), Some(sha256));
        assert_eq!(etag("5f-1_x.y"), Some("5f-1_x.y".into()));
        for text in
            ["", "\"\"", "\"/etc/passwd\"", "/etc/passwd", "..", ".", "\"../x\"", "a/b", "a\\b", "C:x", "\"a"]
        {
            assert_eq!(etag(text), None, "{text}");
        }
        for text in ["a.incomplete", "a.lock", ".hidden", "a\tb", "a b", "nul", "a\u{e9}", &"a".repeat(129)] {
            assert_eq!(etag(text), None, "{text}");
        }
        let digest = |text: &str| ETag(text.into()).digest();
        assert_eq!((digest(&sha1), digest("abc")), (Digest::Sha1, Digest::Unknown));
        assert_eq!(digest(&"z".repeat(40)), Digest::Unknown);
    }

    #[test]
    fn file_names_are_bare() {
        for name in ["config.json", "x-Q4_K_M.gguf", "_a", "Modell (2) ü.gguf", "漢字.safetensors"] {
            assert_eq!(FileName::parse(name).unwrap().as_str(), name);
        }
        let template = FileName::parse("additional_chat_templates/tool use.jinja").unwrap();
        assert_eq!(
            (template.is_template(), &*template.encoded()),
            (true, "additional_chat_templates/tool%20use.jinja")
        );
        let module = FileName::parse("1_Pooling/config.json").unwrap();
        assert_eq!((module.is_module(), module.is_template()), (true, false));
        assert!(FileName::parse("2_Dense/model.safetensors").unwrap().is_module());
        let long = "a".repeat(201);
        for name in [
            "1_Pooling/model.safetensors",
            "1_/config.json",
            "1_../config.json",
            "1_a/b/config.json",
            "Pooling/config.json",
            "/1_Pooling/config.json",
            "",
            ".",
            "..",
            "/a",
            "a/b",
            "../a",
            "additional_chat_templates/a",
            "additional_chat_templates/.jinja",
            "additional_chat_templates/../a.jinja",
            "additional_chat_templates/a/b.jinja",
            "x/additional_chat_templates/a.jinja",
            "a\\b",
            "a\0",
            "a\nb",
            "C:a",
            ".config.json",
            "-a",
            "a.",
            "a ",
        ] {
            assert_eq!(FileName::parse(name), None, "{name:?}");
        }
        for name in ["nul", "COM1.gguf", "a\u{202e}b", "a%2fb", "a*b", "a?b", "a|b", "a\"b", "\u{7f}", &long]
        {
            assert_eq!(FileName::parse(name), None, "{name:?}");
        }
        assert_eq!(FileName::parse("a b#ü.gguf").unwrap().encoded(), "a%20b%23%C3%BC.gguf");
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_one_plain_component(
            text in "\\PC{0,40}|[a-zA-Z0-9./\\\\:_-]{0,80}|additional_chat_templates/[a-zA-Z0-9./\\\\:_-]{0,40}",
        ) {
            let names = [
                FileName::parse(&text).map(|name| name.0),
                Commit::parse(&text).map(|commit| commit.0),
                etag(&text),
                ModelName::parse(&text).map(|name| name.folder()),
            ];
            for name in names.into_iter().flatten() {
                let name = name.strip_prefix(TEMPLATES).unwrap_or(&name);
                let name = if is_module(name) { name.trim_end_matches("/config.json") } else { name }.to_string();
                let path = std::path::Path::new(&name);
                let components: Vec<_> = path.components().collect();
                prop_assert_eq!(components, [std::path::Component::Normal(name.as_ref())]);
                prop_assert!(name.len() <= 255);
                prop_assert_eq!(lowbit_files::shown(&name).to_string(), name);
            }
        }
    }
}
