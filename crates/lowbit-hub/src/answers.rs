//! The hub's answers, checked: a repository's files, and the size and ETag of a file before it is
//! downloaded.

use serde::Deserialize;
use ureq::http::{HeaderMap, HeaderValue};

use super::client::{Answer, Client, Paced, Problem, Request};
use super::names::{Commit, ETag, FileName, ModelName};
use lowbit_files::shown;

/// A repository's state: its commit, and the files in its top folder.
pub(super) struct Listing {
    pub commit: Commit,
    pub files: Vec<FileName>,
}

#[derive(Deserialize)]
struct Info {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// The files that the repository's main branch has now.
pub(super) fn listing(client: &Client, model: ModelName<'_>) -> Result<Listing, Problem> {
    let limits = client.limits;
    let path = format!("api/models/{}/{}/revision/main", model.org, model.name);
    let answer = client.send(Request { path: &path, bytes: limits.list, ..Default::default() })?;
    check_status(client, &answer)?;
    let kind = answer.headers.get("Content-Type").and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or("no type").to_string();
    let bytes = body(client, answer, limits.list)?;
    let info: Info = serde_json::from_slice(&bytes).map_err(|error| {
        let (kind, error) = (shown(kind), shown(error));
        format!("the answer ({kind}) is no list of files; is a proxy or a login page in between? ({error})")
    })?;
    if info.siblings.len() > limits.listed {
        return Err(Problem::Lasting(format!(
            "the hub lists {} files; at most {} are read",
            info.siblings.len(),
            limits.listed
        )));
    }
    let commit = Commit::parse(&info.sha)
        .ok_or_else(|| format!("the hub says that its commit is {}, which is none", shown(&info.sha)))?;
    // Files in folders, and those whose names are not plain, are not part of a model.
    let mut files: Vec<_> =
        info.siblings.iter().filter_map(|sibling| FileName::parse(&sibling.rfilename)).collect();
    files.sort_unstable();
    files.dedup();
    Ok(Listing { commit, files })
}

/// All of a body of at most `limit` bytes.
fn body(client: &Client, mut answer: Answer, limit: u64) -> Result<Vec<u8>, Problem> {
    let mut paced = Paced::new(answer.body.as_reader(), client);
    let (mut bytes, mut buffer) = (Vec::new(), [0; 16 << 10]);
    loop {
        let read = paced.read(&mut buffer)?;
        if read == 0 {
            return Ok(bytes);
        }
        bytes.extend_from_slice(&buffer[..read]);
        if bytes.len() as u64 > limit {
            return Err(Problem::Lasting(format!("the answer has more than {limit} bytes")));
        }
    }
}

/// The hub's description of a file.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    /// Below the endpoint.
    pub path: String,
    pub etag: ETag,
    /// As it was sent, with quotes.
    pub raw_etag: String,
    pub bytes: u64,
}

/// Asks about `file` as it is in `commit`.
pub(super) fn remote(
    client: &Client,
    model: ModelName<'_>,
    commit: &Commit,
    file: &FileName,
) -> Result<Remote, Problem> {
    let path = format!("{}/{}/resolve/{}/{}", model.org, model.name, commit.as_str(), file.encoded());
    let answer = client.send(Request { path: &path, head: true, ..Default::default() })?;
    if !(300..400).contains(&answer.status) {
        check_status(client, &answer)?;
    }
    let answered = one(&answer.endpoint, "X-Repo-Commit")?;
    let same = answered.and_then(|value| Commit::parse(value.to_str().ok()?));
    if same.as_ref() != Some(commit) {
        let answered = answered.map_or("no commit".into(), |value| shown(lossy(value)).to_string());
        let want = commit.as_str();
        return Err(Problem::Lasting(format!(
            "the hub answers with {answered}, but was asked for commit {want}"
        )));
    }
    let (tag, etag) = etag(&answer)?.ok_or_else(|| "the hub sends no ETag".to_string())?;
    let bytes = match one(&answer.endpoint, "X-Linked-Size")? {
        Some(size) => Some(size),
        None => one(&answer.headers, "Content-Length")?,
    };
    let bytes = bytes.ok_or_else(|| "the hub does not say how long it is".to_string())?;
    let bytes =
        number(bytes).ok_or_else(|| format!("its length is {}, which is none", shown(lossy(bytes))))?;
    let raw_etag = one(&answer.endpoint, "ETag")?.unwrap_or(tag);
    let raw_etag = raw_etag.to_str().unwrap_or_default().trim_start_matches("W/").to_string();
    Ok(Remote { path, etag, raw_etag, bytes })
}

/// The file's ETag: that of an LFS file, not of the pointer to it.
fn etag(answer: &Answer) -> Result<Option<(&HeaderValue, ETag)>, Problem> {
    let tag = match one(&answer.endpoint, "X-Linked-ETag")? {
        Some(tag) => Some(tag),
        None => one(&answer.endpoint, "ETag")?,
    };
    let Some(tag) = tag else { return Ok(None) };
    let etag = ETag::parse(tag)
        .ok_or_else(|| format!("the hub's ETag is {}, which is no plain name", shown(lossy(tag))))?;
    Ok(Some((tag, etag)))
}

/// Checks that `answer` is from the file that was asked about, as far as it says.
pub(super) fn same_file(answer: &Answer, remote: &Remote) -> Result<(), Problem> {
    match etag(answer)? {
        Some((_, now)) if now != remote.etag => {
            let (was, now) = (remote.etag.as_str(), now.as_str());
            Err(Problem::Lasting(format!(
                "it changed while it was downloaded: its ETag was {was} and is {now}"
            )))
        }
        _ => Ok(()),
    }
}

/// A header's value. Two different ones are an error: it is unclear which one counts.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a HeaderValue>, Problem> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    match values.all(|value| Some(value) == first) {
        true => Ok(first),
        false => Err(Problem::Lasting(format!("the hub sends several {name} that differ"))),
    }
}

fn number(value: &HeaderValue) -> Option<u64> {
    let text = value.to_str().ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

fn lossy(value: &HeaderValue) -> String {
    // The value is cut to this length anyway.
    String::from_utf8_lossy(&value.as_bytes()[..value.len().min(1000)]).into_owned()
}

/// The length that an answer with content announces: all of it, or what is left from `first` of
/// `total` bytes.
///
/// `None` when it is chunked.
pub(super) fn announced(answer: &Answer, first: u64, total: u64) -> Result<Option<u64>, Problem> {
    let length = one(&answer.headers, "Content-Length")?.and_then(number);
    if answer.status == 206 {
        let range = one(&answer.headers, "Content-Range")?.map(lossy).unwrap_or_default();
        let last = total.saturating_sub(1);
        let wanted = [format!("bytes {first}-{last}/{total}"), format!("bytes {first}-{last}/*")];
        if !wanted.contains(&range) {
            let want = &wanted[0];
            return Err(Problem::Lasting(format!(
                "the hub sends {}, but was asked for {want}",
                shown(range)
            )));
        }
    }
    Ok(length)
}

/// Checks that the answer has what was asked for.
pub(super) fn check_status(client: &Client, answer: &Answer) -> Result<(), Problem> {
    let status = answer.status;
    let reason = answer.headers.get("X-Error-Message").map(|reason| format!(" ({})", shown(lossy(reason))));
    let reason = reason.unwrap_or_default();
    let answers = format!("the hub answers {status}");
    let token = match client.has_token() {
        true => "the access token may not read it",
        false => "it needs an access token (HF_TOKEN)",
    };
    Err(match status {
        200 | 206 => return Ok(()),
        401 | 404 => {
            Problem::Lasting(format!("{answers}: there is no such model or file, or {token}{reason}"))
        }
        403 => Problem::Lasting(format!(
            "{answers}: access is refused; its page on the hub may ask for consent, or {token}{reason}"
        )),
        408 | 425 | 429 | 500..=599 => Problem::Passing(format!("{answers}{reason}")),
        _ => Problem::Lasting(format!("{answers}{reason}")),
    })
}
