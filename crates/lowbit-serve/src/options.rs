//! A server's settings and limits.

use crate::ServeError;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;
use subtle::{Choice, ConstantTimeEq};

/// Settings of a server: [`ServeOptions::default`], with fields set.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServeOptions {
    /// The address or name to listen on: 127.0.0.1 by default.
    pub host: String,
    /// The port, 8080 by default; 0 takes any that is free.
    pub port: u16,
    /// Keys of which a request must have one; with none, none is asked for.
    pub keys: Keys,
    /// True to listen without keys on an address that other machines reach.
    pub no_auth: bool,
    /// Names of this machine, beside localhost and addresses, that requests may have as their
    /// `Host` where no keys are asked for.
    pub hosts: Vec<String>,
    /// Origins of pages, beside the server's own, that may send requests from a browser.
    pub origins: Vec<String>,
    /// Time that running replies have to end after a server was told to stop.
    pub drain: Duration,
    /// Limits of what a client may do.
    pub limits: Limits,
    /// The names of figures in `/metrics`.
    pub metric_names: MetricNames,
    /// True to leave the line `x-anthropic-billing-header` in the system prompts of Anthropic's
    /// clients. It is another in each request, so that nothing of such a prompt is found again.
    pub keep_billing_header: bool,
}

/// The names of figures in `/metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricNames {
    /// Names that begin with `lowbit_`.
    #[default]
    Lowbit,
    /// vLLM's (of 0.11), where it has the figure: what Gateway API and llm-d read.
    Vllm,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            host: Ipv4Addr::LOCALHOST.to_string(),
            port: 8080,
            keys: Keys::default(),
            no_auth: false,
            hosts: vec![],
            origins: vec![],
            drain: Duration::from_secs(20),
            limits: Limits::default(),
            metric_names: MetricNames::default(),
            keep_billing_header: false,
        }
    }
}

impl ServeOptions {
    /// The address to listen on.
    ///
    /// # Errors
    /// [`ServeError::Host`] when the host has none, [`ServeError::Exposed`] when other machines
    /// reach it and nothing keeps strangers out.
    pub fn address(&self) -> Result<SocketAddr, ServeError> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let wrong = |problem: String| ServeError::Host { host: self.host.clone(), problem };
        let address = found.map_err(|error| wrong(error.to_string()))?.next();
        let address = address.ok_or_else(|| wrong("it has no address".into()))?;
        if !address.ip().is_loopback() && self.keys.is_empty() && !self.no_auth {
            return Err(ServeError::Exposed { host: self.host.clone() });
        }
        Ok(address)
    }

    /// True if a request may have this `Host`. A page that another site's name resolves to this
    /// machine for (DNS rebinding) has that name there; where keys are asked for, it has none of
    /// them.
    pub(crate) fn knows_host(&self, host: &str) -> bool {
        let name = without_port(host);
        let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        let is_known = |known: &String| known.eq_ignore_ascii_case(name);
        let is_local =
            name.eq_ignore_ascii_case("localhost") || name.to_ascii_lowercase().ends_with(".localhost");
        !self.keys.is_empty()
            || is_address
            || is_local
            || is_known(&self.host)
            || self.hosts.iter().any(is_known)
    }

    /// True if a page of `origin` may send requests to this server, which it calls `host`.
    pub(crate) fn knows_origin(&self, origin: &str, host: &str) -> bool {
        let is_own = origin.split_once("://").is_some_and(|(_, own)| own.eq_ignore_ascii_case(host));
        is_own || self.origins.iter().any(|known| known.eq_ignore_ascii_case(origin))
    }
}

/// A `Host` without its port.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Limits of what a client may do.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a request's body.
    pub body: usize,
    /// Bytes of all bodies that are being read or worked on.
    pub bodies: usize,
    /// Connections at a time; others wait.
    pub connections: usize,
    /// Time for a request's header to arrive, also after the last request of a connection.
    pub header: Duration,
    /// Time for the next bytes of a body to arrive.
    pub body_idle: Duration,
    /// Time for the client to take bytes.
    pub write_idle: Duration,
    /// Silence in a stream after which a comment is sent.
    pub ping: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 32 << 20,
            bodies: 256 << 20,
            connections: 1024,
            header: Duration::from_secs(10),
            body_idle: Duration::from_secs(30),
            write_idle: Duration::from_secs(30),
            ping: Duration::from_secs(1),
        }
    }
}

/// Tools in a request.
pub(crate) const TOOLS: usize = 256;
/// Bytes of all tools of a request.
pub(crate) const TOOLS_BYTES: usize = 1 << 20;
/// Texts that end a reply, and the bytes of each.
pub(crate) const STOPS: usize = 16;
pub(crate) const STOP_BYTES: usize = 256;
/// Likeliest tokens that are told beside each token.
pub(crate) const LOGPROBS: u64 = 20;
/// Replies to a prompt.
pub(crate) const REPLIES: u64 = 8;
/// Prompts of a request.
pub(crate) const PROMPTS: usize = 64;

/// Keys that clients show. They are not printed.
#[derive(Clone, Default)]
pub struct Keys(Vec<Arc<str>>);

impl Keys {
    /// These keys; empty ones are left out.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Self {
        Self(keys.into_iter().filter(|key| !key.is_empty()).map(Arc::from).collect())
    }

    /// The keys of a file's text: one per line, without the white space around it; empty lines and
    /// those that begin with # are left out.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
        Self::new(lines.map(String::from))
    }

    /// With those of `other`.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if `shown` is one of them. The time that this takes depends on lengths alone.
    pub(crate) fn has(&self, shown: &str) -> bool {
        let found =
            self.0.iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(shown.as_bytes()));
        found.into()
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_reach_needs_a_key() {
        let with = |host: &str, keys: &[&str], no_auth| {
            let keys = Keys::new(keys.iter().map(|key| key.to_string()));
            ServeOptions { host: host.into(), keys, no_auth, ..Default::default() }.address()
        };
        assert_eq!(with("127.0.0.1", &[], false).unwrap().to_string(), "127.0.0.1:8080");
        assert!(with("::1", &[], false).unwrap().ip().is_loopback());
        let error = with("0.0.0.0", &[""], false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "other machines reach 0.0.0.0: name a key (--api-key), or say --no-auth to serve anyone"
        );
        assert!(with("0.0.0.0", &["k"], false).is_ok() && with("0.0.0.0", &[], true).is_ok());
    }

    #[test]
    fn keys_come_from_lines() {
        let keys = Keys::parse("# ours\n one \n\ntwo\n");
        assert!(
            keys.has("one") && keys.has("two") && !keys.has("") && !keys.has("# ours") && !keys.has("on")
        );
        assert_eq!(format!("{keys:?}"), "Keys(2)");
    }

    #[test]
    fn names_of_strangers_are_no_hosts() {
        let mut options = ServeOptions { hosts: vec!["box.lan".into()], ..Default::default() };
        for host in
            ["localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:8080", "[::1]:8080", "[::1]", "box.lan:1"]
        {
            assert!(options.knows_host(host), "{host}");
        }
        for host in ["", "evil.example", "evil.example:8080", "localhost.evil.example", "box.lan.evil"] {
            assert!(!options.knows_host(host), "{host}");
        }
        options.keys = Keys::new(["k".into()]);
        assert!(options.knows_host("any.example"));
    }

    #[test]
    fn pages_of_others_are_no_origins() {
        let options = ServeOptions { origins: vec!["https://a.example".into()], ..Default::default() };
        assert!(options.knows_origin("http://localhost:8080", "localhost:8080"));
        assert!(options.knows_origin("https://a.example", "localhost:8080"));
        for origin in ["null", "http://localhost:3000", "http://a.example", ""] {
            assert!(!options.knows_origin(origin, "localhost:8080"), "{origin}");
        }
    }
}
