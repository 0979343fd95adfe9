//! Requests: where they go, what goes with them, how long they may take, and when they are sent
//! again.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use ureq::config::Config;
use ureq::http::uri::{Authority, Scheme};
use ureq::http::{HeaderMap, HeaderName, Method, Uri};
use ureq::{Agent, Body, Proxy, Timeout};

use super::settings::{HubLimits, Token, endpoint};
use lowbit_files::shown;

/// Why something did not arrive.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Problem {
    /// Another attempt may succeed.
    Passing(String),
    /// It will not.
    Lasting(String),
}

impl Problem {
    pub fn text(self) -> String {
        let (Self::Passing(text) | Self::Lasting(text)) = self;
        text
    }
}

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Self::Lasting(text)
    }
}

/// The server that is asked: scheme, host and port.
#[derive(Clone, Debug, PartialEq)]
struct Origin(Scheme, String, u16);

impl Origin {
    fn of(uri: &Uri) -> Option<Self> {
        let scheme = uri.scheme()?.clone();
        let port = uri.port_u16().unwrap_or(if scheme == Scheme::HTTPS { 443 } else { 80 });
        Some(Self(scheme, uri.host()?.to_ascii_lowercase(), port))
    }
}

/// A server that files come from.
pub(crate) struct Site<'a> {
    /// As messages call it: "the hub".
    pub name: &'static str,
    pub address: &'a str,
    /// The variable or flag that says the address.
    pub setting: &'static str,
    pub token: Option<Token>,
    pub proxy: Option<Proxy>,
    pub limits: HubLimits,
}

/// Sends requests to a server, and to where it redirects them.
pub(crate) struct Client {
    name: &'static str,
    agent: Agent,
    base: Uri,
    origin: Origin,
    token: Option<Token>,
    pub limits: HubLimits,
}

/// A request to the endpoint.
#[derive(Clone, Copy, Default)]
pub(crate) struct Request<'a> {
    /// Below the endpoint.
    pub path: &'a str,
    /// The kind of answer that is wanted, where the server has several.
    pub accept: Option<&'static str>,
    /// True if only the headers are wanted.
    pub head: bool,
    /// The first byte that is wanted, and the raw ETag that the file must still have if the
    /// endpoint itself answers.
    pub from: Option<(u64, &'a str)>,
    /// The most bytes that the answer is expected to have.
    pub bytes: u64,
}

/// An answer that is no redirect, unless its headers alone are wanted.
pub(crate) struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Body,
    /// The endpoint's own headers about the file: in this answer, or in the redirects that led to
    /// another place.
    pub endpoint: HeaderMap,
    /// True if the endpoint itself sent this.
    pub is_endpoint: bool,
}

impl Client {
    /// `agent` makes a client of the settings that it is given.
    pub fn new(site: Site<'_>, agent: impl FnOnce(Config) -> Agent) -> Result<Self, String> {
        let Site { name, address, setting, token, proxy, limits } = site;
        let base = endpoint(name, setting, address)?;
        let origin = Origin::of(&base).ok_or_else(|| format!("{name}'s address has no host"))?;
        // Redirects are followed here: each is another place that the token must not go to.
        let config = Agent::config_builder()
            .proxy(proxy)
            .https_only(origin.0 == Scheme::HTTPS)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_response_header_size(limits.headers)
            .user_agent(concat!("lowbit/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(limits.connect))
            .timeout_connect(Some(limits.connect))
            .timeout_send_request(Some(limits.answer))
            .timeout_recv_response(Some(limits.answer))
            .timeout_per_read(Some(limits.idle))
            .timeout_per_write(Some(limits.idle))
            .build();
        Ok(Self { name, agent: agent(config), base, origin, token, limits })
    }

    /// True if requests carry a token.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Sends `request` and follows redirects.
    pub fn send(&self, request: Request<'_>) -> Result<Answer, Problem> {
        let base = self.base.to_string();
        let text = format!("{}/{}", base.trim_end_matches('/'), request.path);
        let mut uri: Uri = text.parse().map_err(|_| format!("{} is no address", shown(text)))?;
        let mut endpoint = HeaderMap::new();
        for _ in 0..=self.limits.redirects {
            let is_endpoint = Origin::of(&uri).as_ref() == Some(&self.origin);
            let (head, body) = self.send_once(&uri, request, is_endpoint)?.into_parts();
            if is_endpoint {
                take_over(&head.headers, &mut endpoint);
            }
            let status = head.status.as_u16();
            let is_redirect = matches!(status, 301 | 302 | 303 | 307 | 308);
            // The storage's signed addresses are for GET only, and the hub's own answer has all
            // that is needed.
            if !is_redirect || (request.head && is_endpoint && describes_a_file(&endpoint)) {
                return Ok(Answer { status, headers: head.headers, body, endpoint, is_endpoint });
            }
            uri = self.redirected(&uri, &head.headers)?;
        }
        Err(Problem::Lasting(format!("{} redirects more than {} times", self.name, self.limits.redirects)))
    }

    fn send_once(
        &self,
        uri: &Uri,
        request: Request<'_>,
        is_endpoint: bool,
    ) -> Result<ureq::http::Response<Body>, Problem> {
        let method = if request.head { Method::HEAD } else { Method::GET };
        let mut message = ureq::http::Request::builder().method(method).uri(uri.clone());
        // The file's own bytes are counted and verified, so they must not be compressed.
        message = message.header("Accept-Encoding", "identity");
        if let Some(kind) = request.accept {
            message = message.header("Accept", kind);
        }
        if let Some(token) = self.token.as_ref().filter(|_| is_endpoint) {
            message = message.header("Authorization", token.header());
        }
        if let Some((first, etag)) = request.from {
            message = message.header("Range", format!("bytes={first}-"));
            // Another host has an ETag of its own.
            if is_endpoint {
                message = message.header("If-Range", etag);
            }
        }
        let message = message.body(()).map_err(|error| error.to_string())?;
        // ureq looks names up on a thread of its own, and panics where there is none to be had.
        let thread = std::thread::Builder::new().spawn(|| ());
        thread.map_err(|error| format!("no thread can be started ({error})"))?;
        let least = self.limits.pace as f64 / self.limits.window.as_secs_f64().max(1e-3);
        let seconds =
            Duration::try_from_secs_f64(request.bytes as f64 / least.max(1.0)).unwrap_or(Duration::MAX);
        // Behind TLS a trickle of bytes may not be visible, so the whole body has a time limit,
        // too.
        let body = (self.limits.window + self.limits.idle).saturating_add(seconds);
        let message =
            self.agent.configure_request(message).timeout_recv_body(Some(body.min(LONGEST))).build();
        self.agent.run(message).map_err(|error| self.problem(&error))
    }

    /// The problem that an error of the connection means.
    pub fn problem(&self, error: &ureq::Error) -> Problem {
        let limits = self.limits;
        let (what, time) = match error {
            ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
                return Problem::Lasting(format!("no connection in {:?}", limits.connect));
            }
            ureq::Error::Timeout(Timeout::PerRead | Timeout::PerWrite) => ("nothing arrived", limits.idle),
            ureq::Error::Timeout(Timeout::RecvBody) => ("the answer trickles: less than", limits.window),
            ureq::Error::Timeout(_) => ("no answer", limits.answer),
            ureq::Error::Io(error) if is_cut(error.kind()) => {
                return Problem::Passing(format!("the connection was cut ({error})"));
            }
            ureq::Error::LargeResponseHeader(_, limit) => {
                return Problem::Lasting(format!("the answer's headers have more than {limit} bytes"));
            }
            ureq::Error::Io(_) | ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => {
                let text = format!("there is no network, or {} cannot be reached", self.name);
                return Problem::Lasting(format!("{text} ({})", shown(error)));
            }
            // Its message has the address, which may have a signature.
            ureq::Error::RequireHttpsOnly(_) => return Problem::Lasting("https leads to http".into()),
            _ => {
                return Problem::Lasting(format!(
                    "the answer is no HTTP that is understood ({})",
                    shown(error)
                ));
            }
        };
        match error {
            ureq::Error::Timeout(Timeout::RecvBody) => {
                Problem::Passing(format!("{what} {} bytes in {time:?}", limits.pace))
            }
            _ => Problem::Passing(format!("{what} in {time:?}")),
        }
    }

    /// The address to which `headers` redirect `uri`.
    fn redirected(&self, uri: &Uri, headers: &HeaderMap) -> Result<Uri, Problem> {
        let name = self.name;
        let location = headers.get("Location").ok_or_else(|| format!("{name} redirects to nowhere"))?;
        let location = location.to_str().map_err(|_| format!("{name} redirects to what is no address"))?;
        let refuse = |why: &str| {
            // The part after the question mark may be a signature.
            let place = location.split('?').next().unwrap_or_default();
            Problem::Lasting(format!("{name} redirects to {}: {why}", shown(place)))
        };
        let scheme = uri.scheme_str().unwrap_or_default();
        let authority = uri.authority().map(Authority::as_str).unwrap_or_default();
        let text = if location.starts_with("//") {
            format!("{scheme}:{location}")
        } else if location.starts_with('/') {
            format!("{scheme}://{authority}{location}")
        } else {
            location.to_string()
        };
        let next: Uri = text.parse().map_err(|_| refuse("that is no address"))?;
        if !matches!(next.scheme_str(), Some("http" | "https")) || next.host().is_none_or(str::is_empty) {
            return Err(refuse("only http and https addresses are followed"));
        }
        if scheme == "https" && next.scheme_str() != Some("https") {
            return Err(refuse("https leads to http"));
        }
        if next.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(refuse("an address should have no user"));
        }
        Ok(next)
    }

    /// Repeats `work` while its problem may be temporary.
    pub fn retried<T>(&self, mut work: impl FnMut() -> Result<T, Problem>) -> Result<T, Problem> {
        let mut attempts = Attempts::new(self.limits);
        loop {
            match work() {
                Err(problem) => attempts.next(problem)?,
                done => return done,
            }
        }
    }
}

/// Longer than any file takes.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// Counts attempts and pauses between them.
pub(super) struct Attempts {
    made: u32,
    /// When the last byte arrived, or the first attempt was begun.
    heard: Instant,
    limits: HubLimits,
}

impl Attempts {
    pub fn new(limits: HubLimits) -> Self {
        Self { made: 0, heard: Instant::now(), limits }
    }

    /// Resets the count: much has arrived since the last attempt.
    pub fn reset(&mut self) {
        self.made = 0;
    }

    /// Something has arrived in the last attempt.
    pub fn heard(&mut self) {
        self.heard = Instant::now();
    }

    /// Pauses before another attempt, or gives the problem back.
    pub fn next(&mut self, problem: Problem) -> Result<(), Problem> {
        self.made += 1;
        let limits = self.limits;
        let pause = limits.backoff * (1 << (self.made - 1).min(6));
        // An attempt may be as long without a byte as its answer may take, or the pause between
        // two.
        let silence = self.heard.elapsed() + pause + limits.answer.max(limits.idle);
        match problem {
            Problem::Passing(text) if self.made >= limits.attempts || silence > limits.silence => {
                let times = if self.made == 1 { "attempt" } else { "attempts" };
                Err(Problem::Lasting(format!("{text}, in {} {times}", self.made)))
            }
            Problem::Passing(_) => {
                std::thread::sleep(pause);
                Ok(())
            }
            lasting => Err(lasting),
        }
    }
}

/// A body that must arrive at a minimum rate.
pub(crate) struct Paced<'a, R> {
    body: R,
    client: &'a Client,
    since: Instant,
    bytes: u64,
}

impl<'a, R: Read> Paced<'a, R> {
    pub fn new(body: R, client: &'a Client) -> Self {
        Self { body, client, since: Instant::now(), bytes: 0 }
    }

    /// Fills part of `buffer`; 0 is the end.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Problem> {
        let limits = self.client.limits;
        let read = self.body.read(buffer).map_err(|error| self.client.problem(&error.into()))?;
        self.bytes += read as u64;
        if self.since.elapsed() >= limits.window {
            if self.bytes < limits.pace && read > 0 {
                let text = format!("the answer trickles: {} bytes in {:?}", self.bytes, limits.window);
                return Err(Problem::Passing(text));
            }
            (self.since, self.bytes) = (Instant::now(), 0);
        }
        Ok(read)
    }
}

fn is_cut(kind: ErrorKind) -> bool {
    use ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, Interrupted, TimedOut, UnexpectedEof, WouldBlock,
    };
    matches!(
        kind,
        BrokenPipe
            | ConnectionAborted
            | ConnectionReset
            | Interrupted
            | TimedOut
            | UnexpectedEof
            | WouldBlock
    )
}

fn describes_a_file(headers: &HeaderMap) -> bool {
    let has = |name| headers.contains_key(name);
    has("X-Repo-Commit") && has("X-Linked-Size") && (has("X-Linked-ETag") || has("ETag"))
}

/// Keeps the last of each header that describes a file.
fn take_over(headers: &HeaderMap, known: &mut HeaderMap) {
    for name in ["etag", "x-linked-etag", "x-linked-size", "x-repo-commit"].map(HeaderName::from_static) {
        if headers.contains_key(&name) {
            known.remove(&name);
            for value in headers.get_all(&name) {
                known.append(name.clone(), value.clone());
            }
        }
    }
}
