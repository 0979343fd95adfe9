//! Several texts from the command line, from a file or from standard input.

use crate::{Failure, habits};
use lowbit_files::shown_path;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// The sources of texts.
#[derive(clap::Args)]
#[command(next_help_heading = "Texts")]
pub struct Texts {
    /// The texts [default: the lines of standard input].
    #[arg(value_name = "TEXT", conflicts_with_all = ["prompt", "file"])]
    texts: Vec<String>,
    /// Texts as llama.cpp takes them: one per line.
    #[arg(long, short, value_name = "LINES", conflicts_with = "file")]
    prompt: Option<String>,
    /// A file with a text per line, or .jsonl: an object per line, whose `text` is one; `-` is
    /// standard input.
    #[arg(long, short)]
    file: Option<PathBuf>,
}

impl Texts {
    /// All texts, at least one; a line break at the end begins none. `command` is in messages.
    ///
    /// # Errors
    /// No texts; a file that cannot be read; a line that is no such object.
    pub fn read(&self, command: &str) -> Result<Vec<String>, Failure> {
        let texts = match (&self.texts[..], &self.prompt, &self.file) {
            ([_, ..], ..) => self.texts.clone(),
            (_, Some(prompt), _) => prompt.split('\n').map(str::to_string).collect(),
            (_, _, Some(file)) => of_file(file)?,
            _ if std::io::stdin().is_terminal() => {
                let problem = format!(
                    "give texts: lowbit {command} -m MODEL \"a text\" .., --file FILE, or on standard input"
                );
                return Err(problem.into());
            }
            _ => of_file("-".as_ref())?,
        };
        if texts.is_empty() { Err("there are no texts".into()) } else { Ok(texts) }
    }
}

fn of_file(file: &Path) -> Result<Vec<String>, Failure> {
    let content = habits::read_marked_text(file)?;
    if !file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl")) {
        return Ok(content.lines().map(str::to_string).collect());
    }
    let mut texts = vec![];
    for (number, line) in content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let failed = |problem: &str| -> Failure {
            format!("{}: line {}: {problem}", shown_path(file), number + 1).into()
        };
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|error| failed(&error.to_string()))?;
        match value.get("text").and_then(serde_json::Value::as_str) {
            Some(text) => texts.push(text.into()),
            None => return Err(failed("it is no object whose \"text\" is a string")),
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_a_text_per_line() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, content: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            of_file(&path).map_err(|error| error.to_string().rsplit('/').next().unwrap().to_string())
        };
        let texts = |texts: &[&str]| Ok(texts.iter().map(|text| text.to_string()).collect::<Vec<_>>());
        assert_eq!(read("a.txt", "\u{feff}one\r\n\ntwo\n"), texts(&["one", "", "two"]));
        assert_eq!(
            read("a.jsonl", "{\"text\": \"a\\nb\", \"id\": 1}\n\n{\"text\": \"\"}"),
            texts(&["a\nb", ""])
        );
        let problem = "it is no object whose \"text\" is a string";
        assert_eq!(
            read("b.jsonl", "{\"text\": \"a\"}\n[\"text\"]"),
            Err(format!("b.jsonl: line 2: {problem}"))
        );
        assert_eq!(read("b.jsonl", "{\"text\": 3}"), Err(format!("b.jsonl: line 1: {problem}")));
        assert!(read("b.jsonl", "{").unwrap_err().starts_with("b.jsonl: line 1: EOF"));
    }
}
