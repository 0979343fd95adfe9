//! The words of a command line as the program takes them.

use super::instead::Instead;
use super::table;
use crate::Failure;
use clap::{ArgAction, Command};
use lowbit_files::shown;
use lowbit_quantize::Mix;
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;

use Instead::{Is, Means, Nothing, Runs, Say, Switch, Undoes, Unless, Value, With};

/// The values of a flag that switches something.
const SWITCH: [&str; 12] =
    ["on", "off", "auto", "always", "never", "1", "0", "true", "false", "True", "False", "T"];

/// Flags that every command has.
const EVERYWHERE: [&str; 4] = ["-h", "--help", "-V", "--version"];

/// The typed command line, as clap takes it.
#[derive(Debug)]
pub struct Typed {
    /// The program's name, the command and its flags.
    pub arguments: Vec<OsString>,
    /// Notes to the user about the translation.
    pub notes: Vec<String>,
}

/// The arguments (with the program's name before them) as `program` takes them.
///
/// # Errors
/// A message that says what to type instead.
pub fn translate(program: &Command, arguments: impl Iterator<Item = OsString>) -> Result<Typed, Failure> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let mut notes = vec![];
    if let Some(meant) = meant(program, arguments.get(1..).unwrap_or_default(), &mut notes)? {
        arguments.splice(1..=meant.replaces, [OsString::from(meant.name)]);
    }
    let Some(command) = arguments.get(1).and_then(|name| program.find_subcommand(name)) else {
        return Ok(Typed { arguments, notes });
    };
    let typed = arguments.split_off(2);
    let mut words = Words::new(command, notes);
    words.read(typed)?;
    if let Some(command) = words.runs {
        arguments.splice(1.., [command.into()]);
        return Ok(Typed { arguments, notes: vec![] });
    }
    words.place_texts();
    words.check()?;
    let notes = words.notes;
    arguments.extend(words.words.into_iter().flat_map(Word::arguments));
    Ok(Typed { arguments, notes })
}

/// The command that is meant where none of ours was typed.
struct Meant {
    name: String,
    /// This many arguments are in its place.
    replaces: usize,
}

fn meant(
    program: &Command,
    arguments: &[OsString],
    notes: &mut Vec<String>,
) -> Result<Option<Meant>, Failure> {
    let text = |at: usize| arguments.get(at).and_then(|word| word.to_str());
    let Some(first) = text(0) else { return Ok(None) };
    if EVERYWHERE.contains(&first) || first == "help" || program.find_subcommand(first).is_some() {
        return Ok(None);
    }
    if first.starts_with('-') || is_model(first) {
        return Ok(Some(Meant { name: talk_or_text(arguments).into(), replaces: 0 }));
    }
    // `mlx_lm generate` is `mlx_lm.generate`.
    let (name, replaces) = match text(1) {
        Some(second) if ["mlx_lm", "mlx-lm", "llama", "ollama", "vllm"].contains(&first) => (second, 2),
        _ => (first.strip_prefix("mlx_lm.").or(first.strip_prefix("llama-")).unwrap_or(first), 1),
    };
    let instead = table::COMMANDS.iter().find(|(names, _)| names.contains(&name));
    let name = match instead.map(|(_, instead)| *instead) {
        Some(Is(name)) => name,
        Some(Say(answer)) => return Err(format!("there is no `lowbit {first}`: {answer}").into()),
        _ if name != first && program.find_subcommand(name).is_some() => name,
        _ => return Ok(None),
    };
    let name = if name.is_empty() { talk_or_text(&arguments[replaces..]) } else { name };
    notes.push(format!("`lowbit {first}` is `lowbit {name}`"));
    Ok(Some(Meant { name: name.into(), replaces }))
}

/// `generate` where there is a prompt, else `chat`.
fn talk_or_text(arguments: &[OsString]) -> &'static str {
    let given = |flags: &[&str]| arguments.iter().any(|argument| flags.iter().any(|flag| argument == flag));
    let asks_once =
        given(&["-p", "--prompt", "-f", "--file", "-no-cnv", "--no-conversation", "-st", "--single-turn"]);
    let is_text = |at: usize| {
        arguments.get(at).and_then(|word| word.to_str()).is_some_and(|word| !word.starts_with('-'))
    };
    // As with ollama, a text after the model is its prompt.
    let with_text = is_text(0) && is_text(1);
    if (asks_once || with_text) && !given(&["-cnv", "--conversation"]) { "generate" } else { "chat" }
}

/// True if someone who typed `word` meant a model.
fn is_model(word: &str) -> bool {
    let plain = |word: &str| !word.is_empty() && !word.contains(char::is_whitespace);
    word.split_once('/').is_some_and(|_| plain(word)) || is_checkpoint(word)
}

/// True if `word` is a checkpoint's file or directory.
fn is_checkpoint(word: &str) -> bool {
    word.ends_with(".gguf") || word.ends_with(".safetensors") || Path::new(word).is_dir()
}

/// A flag with its value, or a text.
#[derive(Debug)]
enum Word {
    /// The flag as clap has it, its value, and whether the two are joined.
    Flag(String, Option<OsString>, bool),
    Text(OsString),
    /// `--` and all after it.
    Rest(Vec<OsString>),
}

impl Word {
    fn arguments(self) -> Vec<OsString> {
        match self {
            Self::Flag(name, None, _) => vec![name.into()],
            Self::Flag(name, Some(value), false) => vec![name.into(), value],
            Self::Flag(name, Some(value), true) => {
                let mut joined = OsString::from(name + "=");
                joined.push(value);
                vec![joined]
            }
            Self::Text(text) => vec![text],
            Self::Rest(rest) => rest,
        }
    }
}

/// A flag of the command.
struct Own {
    /// Its long name, or the only one.
    long: String,
    takes_value: bool,
}

/// The words after the command.
struct Words<'a> {
    command: &'a Command,
    own: HashMap<String, Own>,
    words: Vec<Word>,
    notes: Vec<String>,
    /// The command that a flag asked for.
    runs: Option<&'static str>,
}

/// The words that are left to read.
type Rest = std::iter::Peekable<std::vec::IntoIter<OsString>>;

/// A flag as it was typed.
struct Flag {
    /// With the dashes and words joined as it was typed.
    typed: String,
    /// As in llama.cpp, words may be joined by `-` or `_`.
    name: String,
    /// The text after its `=`.
    value: Option<String>,
}

impl Flag {
    fn new(text: &str) -> Self {
        let (typed, value) = match text.split_once('=') {
            Some((flag, value)) if flag.len() > 1 => (flag, Some(value.to_string())),
            _ => (text, None),
        };
        let name = if typed.starts_with("--") { typed.replace('_', "-") } else { typed.to_string() };
        Self { typed: typed.into(), name, value }
    }

    /// Its value: the one behind `=`, or the next word if that does not look like a flag.
    fn take(&mut self, rest: &mut Rest) -> Option<OsString> {
        self.value.take().map(OsString::from).or_else(|| rest.next_if(is_value))
    }
}

impl<'a> Words<'a> {
    fn new(command: &'a Command, notes: Vec<String>) -> Self {
        Self { command, own: own(command), words: vec![], notes, runs: None }
    }

    fn read(&mut self, typed: Vec<OsString>) -> Result<(), Failure> {
        let mut rest = typed.into_iter().peekable();
        while let Some(word) = rest.next() {
            match word.to_str().filter(|text| text.starts_with('-') && text.len() > 1) {
                None => self.words.push(Word::Text(word)),
                Some("--") => self.words.push(Word::Rest([word].into_iter().chain(rest.by_ref()).collect())),
                Some(text) => self.flag(Flag::new(text), &mut rest)?,
            }
        }
        Ok(())
    }

    fn flag(&mut self, flag: Flag, rest: &mut Rest) -> Result<(), Failure> {
        let is_own = self.own.contains_key(&flag.name);
        let instead = table::instead(self.command.get_name(), &flag.name);
        match instead {
            Some(Value(of)) => {
                let next = flag.value.clone().or_else(|| rest.peek()?.to_str().map(str::to_string));
                match next.and_then(|value| of(&value)) {
                    Some(instead) => self.replace(flag, instead, rest),
                    None => self.push_typed(flag, rest),
                }
            }
            Some(instead) if !is_own => self.replace(flag, instead, rest),
            _ => self.push_typed(flag, rest),
        }
    }

    /// A flag that has no meaning of another program's.
    fn push_typed(&mut self, mut flag: Flag, rest: &mut Rest) -> Result<(), Failure> {
        if self.own.contains_key(&flag.name) || flag.typed.starts_with("--") {
            let name = std::mem::take(&mut flag.name);
            return self.push(&name, flag, rest);
        }
        let Some(letters) = flag.typed.strip_prefix('-').filter(|letters| letters.chars().count() > 1) else {
            let name = std::mem::take(&mut flag.name);
            return self.push(&name, flag, rest);
        };
        // `-n5`: clap would take other letters for flags of their own.
        let (first, value) = letters.split_at(letters.chars().next().map_or(0, char::len_utf8));
        let first = format!("-{first}");
        let takes_value = self.own.get(&first).is_some_and(|own| own.takes_value);
        if takes_value && flag.value.is_none() && value.starts_with(|c: char| c.is_ascii_digit()) {
            flag.value = Some(value.into());
            return self.push(&first, flag, rest);
        }
        let typed = shown(&flag.typed);
        let answer = match self.own.contains_key(&format!("--{letters}")) {
            true => format!("its name has two dashes: --{}", shown(letters)),
            false => format!(
                "there is no such flag, and flags of one letter are not joined; `lowbit {} --help` lists all",
                self.command.get_name()
            ),
        };
        Err(format!("{typed}: {answer}").into())
    }

    /// A flag of ours, or one that clap is to refuse.
    fn push(&mut self, name: &str, mut flag: Flag, rest: &mut Rest) -> Result<(), Failure> {
        let own = self.own.get(name);
        let is_joined = flag.value.is_some();
        let value = match own {
            Some(own) if own.takes_value => flag.take(rest),
            _ => flag.value.take().map(OsString::from),
        };
        if name == "-m" {
            check_model_flag(value.as_ref())?;
        }
        // Values that begin with a dash need `--name=value`, which short names do not offer.
        let is_dashed = value.as_ref().is_some_and(|value| value.to_string_lossy().starts_with('-'));
        let name = match own {
            Some(own) if is_dashed || is_joined => own.long.clone(),
            _ => name.to_string(),
        };
        self.words.push(Word::Flag(name, value, is_dashed || is_joined));
        Ok(())
    }

    fn replace(&mut self, mut flag: Flag, instead: Instead, rest: &mut Rest) -> Result<(), Failure> {
        let typed = flag.typed.clone();
        let no_effect = |why: &str| format!("{typed} is of no effect: {why}");
        match instead {
            Is(name) => return self.push(name, flag, rest),
            With(name, prefix) => {
                let Some(value) = flag.take(rest) else { return Err(missing(&typed)) };
                let mut whole = OsString::from(prefix);
                whole.push(value);
                self.words.push(Word::Flag(name.into(), Some(whole), true));
            }
            Means(name, value) => {
                if self.own.get(&flag.name).is_none_or(|own| own.takes_value) {
                    flag.take(rest);
                }
                let value = (!value.is_empty()).then(|| value.into());
                self.words.push(Word::Flag(name.into(), value, true));
            }
            Nothing(values, why) => {
                for _ in 0..values {
                    flag.take(rest);
                }
                self.notes.push(no_effect(why));
            }
            Switch(why) => {
                if flag.value.is_none() {
                    rest.next_if(|next| SWITCH.iter().any(|value| next == value));
                }
                self.notes.push(no_effect(why));
            }
            Unless(neutral, answer) => {
                let value = flag.take(rest);
                let value = value.as_ref().and_then(|value| value.to_str());
                if !value.is_some_and(|value| neutral.iter().any(|one| is_same(one, value))) {
                    return Err(format!("{typed}: {answer}").into());
                }
                self.notes.push(no_effect("it says what is done in any case"));
            }
            Undoes(names, why) => {
                let before = self.words.len();
                self.words.retain(|word| !matches!(word, Word::Flag(name, ..) if names.contains(&&**name)));
                if self.words.len() == before {
                    self.notes.push(no_effect(why));
                }
            }
            Runs(command) => self.runs = Some(command),
            Value(_) => {}
            Say(answer) => return Err(format!("{typed}: {answer}").into()),
        }
        Ok(())
    }

    fn has(&self, names: &[&str]) -> bool {
        self.words.iter().any(|word| matches!(word, Word::Flag(name, ..) if names.contains(&&**name)))
    }

    /// Texts that are no flags' values: a model where it was given as a positional argument, and
    /// llama-quantize's arguments.
    fn place_texts(&mut self) {
        let is_named = self.has(&["-m", "--model", "--hf-repo"]);
        let texts: Vec<usize> =
            (0..self.words.len()).filter(|&at| matches!(self.words[at], Word::Text(_))).collect();
        let Some(&first) = texts.first() else { return };
        let text = |at: usize| match &self.words[at] {
            Word::Text(text) => text.to_string_lossy().into_owned(),
            _ => String::new(),
        };
        let has_prompt = self.has(&["-p", "--prompt", "-f", "--file"]);
        let is_model = match self.command.get_name() {
            _ if is_named => false,
            "chat" | "inspect" | "serve" => is_model(&text(first)),
            "quantize" => true,
            "perplexity" => !self.has(&["--compare"]) && texts.len() == 1,
            "bench" => is_checkpoint(&text(first)),
            "generate" => {
                is_checkpoint(&text(first)) || is_model(&text(first)) && (has_prompt || texts.len() > 1)
            }
            _ => false,
        };
        let name = |name: &str, word: &mut Word| {
            if let Word::Text(text) = word {
                *word = Word::Flag(name.into(), Some(std::mem::take(text)), true);
            }
        };
        if self.command.get_name() == "quantize" {
            let flags =
                texts.iter().skip(usize::from(is_model)).map(|&at| (at, text(at))).collect::<Vec<_>>();
            for (at, text) in flags {
                let flag = match Mix::from_name(&text) {
                    Some(_) => "--format",
                    None if text.parse::<usize>().is_ok() => "--threads",
                    None => "--output",
                };
                name(flag, &mut self.words[at]);
            }
        }
        if is_model {
            name("--model", &mut self.words[first]);
        }
    }

    /// Refuses flags that are ours under another meaning.
    fn check(&self) -> Result<(), Failure> {
        let is_quantize = self.command.get_name() == "quantize";
        if is_quantize && self.has(&["--dtype"]) && !self.has(&["--learn", "--target-bpw"]) {
            let answer = "--dtype is the type in which --learn computes; weights that are not quantised keep their type, \
                          and --format F16, BF16 or F32 writes a GGUF file with that type";
            return Err(answer.into());
        }
        Ok(())
    }
}

fn missing(flag: &str) -> Failure {
    format!("{flag}: a value is missing").into()
}

/// True if two values are the same, as texts or as numbers.
fn is_same(one: &str, value: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    one.eq_ignore_ascii_case(value) || number(one).is_some_and(|one| number(value) == Some(one))
}

/// The flags of `command` by each of their names.
fn own(command: &Command) -> HashMap<String, Own> {
    let mut own = HashMap::new();
    for name in EVERYWHERE {
        own.insert(name.into(), Own { long: name.into(), takes_value: false });
    }
    for arg in command.get_arguments().filter(|arg| !arg.is_positional()) {
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        let longs = arg.get_long_and_visible_aliases().unwrap_or_default().into_iter();
        let hidden = arg.get_aliases().unwrap_or_default().into_iter();
        let longs = longs.chain(hidden).map(|name| format!("--{name}"));
        let shorts = arg.get_short_and_visible_aliases().unwrap_or_default().into_iter();
        let names: Vec<_> = longs.chain(shorts.map(|name| format!("-{name}"))).collect();
        for name in &names {
            own.insert(name.clone(), Own { long: names[0].clone(), takes_value });
        }
    }
    own
}

/// True if this argument is the value of the flag before it: it does not look like a flag itself.
fn is_value(argument: &OsString) -> bool {
    let Some(text) = argument.to_str() else { return true };
    let Some(rest) = text.strip_prefix('-') else { return true };
    let name = rest.strip_prefix('-').unwrap_or(rest);
    let name = name.split_once('=').map_or(name, |(name, _)| name);
    let is_flag = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    !is_flag && text != "--"
}

/// mlx-lm's `-m` is the number of tokens.
fn check_model_flag(value: Option<&OsString>) -> Result<(), Failure> {
    let number = value.and_then(|value| value.to_str()).and_then(|value| value.parse::<u64>().ok());
    match number.filter(|number| !Path::new(&number.to_string()).exists()) {
        Some(number) => Err(format!("-m names the model here; -n {number} is the number of tokens").into()),
        None => Ok(()),
    }
}
