//! Whole lists of flags, each typed after the commands that it is for. A flag is known where it
//! works, is said to be without effect, or is refused with what to type or why.

use super::super::translate::translate;
use crate::Arguments;
use clap::error::ErrorKind;
use clap::{Command, CommandFactory, Error};
use std::ffi::OsString;
use std::path::Path;

/// The outcome of parsing a line.
#[derive(Debug, PartialEq)]
enum Taken {
    Works,
    /// Said to be without effect.
    Idle,
    Refused,
    /// No flag of that name is known, or its value is refused without a word of what to type.
    Unknown,
    /// The arguments around the flag are parsed differently because of it.
    Misread,
}

/// The arguments after a flag, which must be there in the end.
fn after(command: &str) -> [&'static str; 2] {
    match command {
        "generate" | "chat" => ["--seed", "77"],
        "quantize" => ["--output", "canary"],
        "perplexity" => ["--file", "canary"],
        _ => ["--device", "cpu"],
    }
}

fn taken(program: &mut Command, command: &str, line: &str, model: &[&str]) -> (Taken, String) {
    let after = after(command);
    let words = ["lowbit", command].into_iter().chain(model.iter().copied());
    let words = words.chain(line.split(' ')).chain(after).map(OsString::from);
    let typed = match translate(program, words) {
        Ok(typed) => typed,
        Err(failure) => {
            let message = failure.to_string();
            let is_unknown = message.contains("there is no such flag");
            return (if is_unknown { Taken::Unknown } else { Taken::Refused }, message);
        }
    };
    if typed.arguments == ["lowbit", "devices"] {
        return (Taken::Works, String::new());
    }
    let matches = match program.try_get_matches_from_mut(&typed.arguments) {
        Ok(matches) => matches,
        Err(error) => return refused(program, (command, line), model, &error),
    };
    let Some((name, matches)) = matches.subcommand() else { return (Taken::Misread, "no command".into()) };
    let found = program.find_subcommand(name).unwrap();
    let texts = found.get_positionals().filter(|arg| matches.get_raw(arg.get_id().as_str()).is_some());
    let has_texts = texts.count() > 0;
    let canary = matches.get_raw(after[0].trim_start_matches('-'));
    let canary = canary.is_some_and(|mut values| values.any(|value| value == after[1]));
    match (name == command && !has_texts && canary, typed.notes.is_empty()) {
        (false, _) => (Taken::Misread, format!("{:?}", typed.arguments)),
        (true, true) => (Taken::Works, String::new()),
        (true, false) => (Taken::Idle, typed.notes.join("; ")),
    }
}

/// The outcome of a line that clap refused.
fn refused(
    program: &mut Command,
    (command, line): (&str, &str),
    model: &[&str],
    error: &Error,
) -> (Taken, String) {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => (Taken::Works, String::new()),
        // The flag is the model's.
        ErrorKind::ArgumentConflict if !model.is_empty() && text.contains("--model") => {
            taken(program, command, line, &[])
        }
        // The message names what else the flag needs.
        ErrorKind::MissingRequiredArgument => (Taken::Refused, text),
        ErrorKind::ValueValidation | ErrorKind::InvalidValue
            if !text.contains("invalid digit") && !text.contains("invalid float") =>
        {
            (Taken::Refused, text)
        }
        ErrorKind::ArgumentConflict => (Taken::Misread, text),
        _ => (Taken::Unknown, text),
    }
}

/// The lines of a list that are unknown or misread, and how many lines there are.
fn wrong(list: &str) -> (Vec<String>, usize) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/cases/flags").join(list);
    let text = std::fs::read_to_string(path).unwrap();
    let mut program = Arguments::command();
    let (mut commands, mut wrong, mut count) = (vec![], vec![], 0);
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with("# ")) {
        if let Some(header) = line.strip_prefix("## ") {
            commands = header.split_once(": ").unwrap().1.split(' ').collect();
            continue;
        }
        count += 1;
        for command in &commands {
            let (taken, why) = taken(&mut program, command, line, &["--model", "a/b"]);
            if [Taken::Unknown, Taken::Misread].contains(&taken) {
                wrong
                    .push(format!("{command} {line}: {taken:?}: {}", why.lines().next().unwrap_or_default()));
            }
        }
    }
    (wrong, count)
}

#[test]
fn flags_that_people_type_are_known() {
    let (wrong, count) = wrong("typed.txt");
    assert_eq!(count, 308);
    assert!(wrong.is_empty(), "{} of {count}:\n{wrong:#?}", wrong.len());
}

#[test]
fn all_flags_of_the_peers_are_known() {
    let (wrong, count) = wrong("peers.txt");
    assert!(count > 800, "{count}");
    assert!(wrong.is_empty(), "{} of {count}:\n{wrong:#?}", wrong.len());
}
