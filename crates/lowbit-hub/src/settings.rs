//! Settings of the hub and its cache, and the limits of an answer: time, bytes and attempts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::Proxy;
use ureq::http::HeaderValue;

use lowbit_files::shown;

/// The most bytes of a stored token.
const TOKEN: u64 = 4096;

/// Settings for finding models by name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HubSettings {
    /// The folder of `models--org--name` folders, as huggingface_hub keeps it.
    pub cache: PathBuf,
    /// The hub's or a mirror's address.
    pub endpoint: String,
    /// Goes to the endpoint alone, never to another host.
    pub token: Option<Token>,
    /// True if only the cache is used.
    pub offline: bool,
    /// The proxy of all connections.
    pub proxy: Option<Proxy>,
    /// The limits of an answer.
    pub limits: HubLimits,
}

/// An access token, ready for its header. It is never printed.
#[derive(Clone, Debug)]
pub struct Token(HeaderValue);

impl Token {
    /// From the token's text.
    ///
    /// # Errors
    /// The token's fault, without the token.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("the access token is empty, or has characters that no token has".into());
        }
        let mut header =
            HeaderValue::try_from(format!("Bearer {text}")).map_err(|error| error.to_string())?;
        header.set_sensitive(true);
        Ok(Self(header))
    }

    pub(super) fn header(&self) -> &HeaderValue {
        &self.0
    }
}

/// The limits of an answer. Exceeding one is an error.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HubLimits {
    /// The longest wait for a connection.
    pub connect: Duration,
    /// The longest time from a request to the end of its answer's headers.
    pub answer: Duration,
    /// The longest time without a byte.
    pub idle: Duration,
    /// The longest time without a byte in all attempts together: none is begun that could take
    /// longer.
    pub silence: Duration,
    /// In each `window`, `pace` bytes must arrive.
    pub window: Duration,
    /// See `window`.
    pub pace: u64,
    /// The number of attempts before a request's error is final.
    pub attempts: u32,
    /// The pause before the second attempt; each further one is twice as long.
    pub backoff: Duration,
    /// Redirects of one request.
    pub redirects: u32,
    /// Bytes of an answer's headers.
    pub headers: usize,
    /// Bytes of the list of a model's files.
    pub list: u64,
    /// Files of a repository.
    pub listed: usize,
    /// Files that are downloaded for a model.
    pub files: usize,
    /// Bytes of a file of weights.
    pub file: u64,
}

impl Default for HubLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            // As huggingface_hub waits.
            answer: Duration::from_secs(10),
            idle: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            window: Duration::from_secs(60),
            pace: 256 << 10,
            attempts: 4,
            backoff: Duration::from_millis(500),
            redirects: 5,
            headers: 64 << 10,
            list: 16 << 20,
            listed: 100_000,
            files: 2048,
            file: 1 << 40,
        }
    }
}

impl HubSettings {
    /// The hub itself, with `cache`, without a token or a proxy.
    pub fn new(cache: PathBuf) -> Self {
        let endpoint = "https://huggingface.co".into();
        let limits = HubLimits::default();
        Self { cache, endpoint, token: None, offline: false, proxy: None, limits }
    }

    /// The settings of the environment, as huggingface_hub reads it: `HF_HUB_CACHE`, `HF_HOME` and
    /// `XDG_CACHE_HOME` for the cache, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, and `HF_TOKEN`,
    /// `HF_TOKEN_PATH` or the token that `hf auth login` stored.
    ///
    /// # Errors
    /// The variable that is wrong.
    pub fn from_env(
        variable: &dyn Fn(&str) -> Option<OsString>,
        home: Option<&Path>,
    ) -> Result<Self, String> {
        let first =
            |names: &[&str]| names.iter().find_map(|name| variable(name).filter(|value| !value.is_empty()));
        let text = |names: &[&str]| match first(names).map(OsString::into_string) {
            Some(Err(_)) => Err(format!("{} is not UTF-8", names[0])),
            Some(Ok(text)) => Ok(Some(text)),
            None => Ok(None),
        };
        let path = |names: &[&str]| first(names).map(|value| expand(value.into(), home));
        let hugging_face = path(&["HF_HOME"]).or_else(|| {
            let caches = path(&["XDG_CACHE_HOME"]).or_else(|| home.map(|home| home.join(".cache")));
            caches.map(|caches| caches.join("huggingface"))
        });
        let cache = path(&["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
            .or_else(|| hugging_face.as_ref().map(|folder| folder.join("hub")))
            .ok_or("there is no home folder for the cache; HF_HOME can name another")?;
        let mut settings = Self::new(cache);
        if let Some(endpoint) = text(&["HF_ENDPOINT"])? {
            settings.endpoint = endpoint;
        }
        let truth =
            |value: String| matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE");
        settings.offline = text(&["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])?.is_some_and(truth);
        let stored = || {
            let default = hugging_face.as_ref().map(|folder| folder.join("token"));
            let bytes = lowbit_files::read::read(&path(&["HF_TOKEN_PATH"]).or(default)?, TOKEN).ok()?;
            String::from_utf8(bytes).ok().filter(|text| !text.trim().is_empty())
        };
        let token = text(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])?.or_else(stored);
        settings.token = token.map(|token| Token::new(&token)).transpose()?;
        Ok(settings)
    }
}

/// `~` is the home folder.
fn expand(path: PathBuf, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

/// An address that may be asked: `http` or `https`, a host, and no user.
/// `name` is the server's in messages, and `setting` what says its address.
pub(super) fn endpoint(name: &str, setting: &str, text: &str) -> Result<ureq::http::Uri, String> {
    let problem = |why: &str| format!("{name}'s address ({setting}) is {}: {why}", shown(without_user(text)));
    let uri: ureq::http::Uri =
        text.trim_end_matches('/').parse().map_err(|_| problem("that is no address"))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
        return Err(problem("it should start with https:// or http:// and have a host"));
    }
    if uri.query().is_some() || uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(problem("it should have no user and no query"));
    }
    Ok(uri)
}

/// The address without its password, for messages.
fn without_user(address: &str) -> &str {
    address.rsplit_once('@').map_or(address, |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<HubSettings, String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        HubSettings::from_env(&variable, Some(Path::new("/home/u")))
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let cache = |variables: &[(&str, &str)]| read(variables).unwrap().cache;
        assert_eq!(cache(&[]), Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HF_HOME", "")]), Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("HF_HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/h/hub"));
        assert_eq!(cache(&[("HF_HUB_CACHE", "~/c"), ("HF_HOME", "/h")]), Path::new("/home/u/c"));
        let message = HubSettings::from_env(&|_| None, None).unwrap_err();
        assert_eq!(message, "there is no home folder for the cache; HF_HOME can name another");
    }

    #[test]
    fn tokens_come_from_the_variable_or_the_file_and_are_not_printed() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let header =
            |settings: HubSettings| settings.token.map(|token| token.0.to_str().unwrap().to_string());
        assert_eq!(header(read(&[("HF_HOME", home)]).unwrap()), None);
        std::fs::write(folder.path().join("token"), " stored\n").unwrap();
        assert_eq!(header(read(&[("HF_HOME", home)]).unwrap()), Some("Bearer stored".into()));
        let settings = read(&[("HF_HOME", home), ("HF_TOKEN", "secret")]).unwrap();
        assert!(!format!("{settings:?}").contains("secret"));
        assert_eq!(header(settings), Some("Bearer secret".into()));
        let message = read(&[("HF_TOKEN", "sec ret\r\nX: y")]).unwrap_err();
        assert_eq!(message, "the access token is empty, or has characters that no token has");
    }

    #[test]
    fn offline_is_said_as_huggingface_hub_takes_it() {
        for (value, offline) in
            [("1", true), ("true", true), ("Yes", true), ("ON", true), ("0", false), ("", false)]
        {
            assert_eq!(read(&[("HF_HUB_OFFLINE", value)]).unwrap().offline, offline, "{value}");
        }
    }

    #[test]
    fn endpoints_are_addresses() {
        let endpoint = |text| endpoint("the hub", "HF_ENDPOINT", text);
        for text in ["https://huggingface.co", "http://127.0.0.1:80/", "https://mirror/path/hub/"] {
            let uri = endpoint(text).unwrap();
            assert_eq!(uri.to_string().trim_end_matches('/'), text.trim_end_matches('/'));
        }
        for text in
            ["", "huggingface.co", "file:///etc/passwd", "ftp://x", "https://", "https://x?y=z", "a b"]
        {
            assert!(endpoint(text).unwrap_err().starts_with("the hub's address (HF_ENDPOINT) is "), "{text}");
        }
        let message = endpoint("https://user:secret@mirror").unwrap_err();
        assert!(!message.contains("secret") && message.contains("mirror"), "{message}");
    }
}
