//! llama.cpp's GBNF, written as llguidance's Lark.
//!
//! GBNF's rules are over characters. In Lark, whatever is regular is best one terminal, since a
//! terminal's alternatives are followed side by side: so rules that do not lead back to themselves
//! become terminals, and of the others each run of regular parts.
//!
//! Source: llama.cpp 1652066, `grammars/README.md` and `src/llama-grammar.cpp`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

/// The depth to which groups may be nested.
const DEPTH: usize = 100;

/// The most repetitions of a part, as llama.cpp has it.
const REPEATS: u32 = 2000;

/// Alternatives, each a sequence.
type Choice = Vec<Vec<Part>>;

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    /// A class of characters, as a regular expression.
    Class(String),
    /// A token by its id; `true` for any other.
    Token(u32, bool),
    Rule(String),
    Group(Choice),
    /// At least and at most so often.
    Repeat(Box<Part>, u32, Option<u32>),
}

/// The grammar `text` in Lark. `token` finds the id of a token by its spelling.
///
/// # Errors
/// A message with the line of what cannot be read.
pub(super) fn to_lark(text: &str, token: &dyn Fn(&str) -> Option<u32>) -> Result<String, String> {
    let mut reader = Reader { rest: text.chars().peekable(), line: 1, token };
    let rules = reader.rules().map_err(|problem| format!("line {}: {problem}", reader.line))?;
    if !rules.contains_key("root") {
        return Err("it has no rule root".into());
    }
    let named = rules.values().flat_map(|rule| names(rule));
    if let Some(missing) = named.into_iter().find(|name| !rules.contains_key(*name)) {
        return Err(format!("there is no rule {missing}"));
    }
    let regular = regular(&rules);
    let numbers = rules.keys().enumerate().map(|(number, name)| (name.as_str(), number)).collect();
    let mut writer = Writer { numbers, regular, lark: String::new(), terminals: 0 };
    let root = writer.name("root");
    writer.lark = format!("start: {root}\n");
    for (name, rule) in &rules {
        let left = writer.name(name);
        let right = match writer.regular[name.as_str()] {
            true => writer.terminal(rule),
            false => writer.rule(rule),
        };
        let _ = writeln!(writer.lark, "{left}: {right}");
    }
    Ok(writer.lark)
}

/// The names of the rules in a choice.
fn names(choice: &Choice) -> Vec<&str> {
    fn of<'a>(part: &'a Part, found: &mut Vec<&'a str>) {
        match part {
            Part::Rule(name) => found.push(name),
            Part::Group(choice) => choice.iter().flatten().for_each(|part| of(part, found)),
            Part::Repeat(part, ..) => of(part, found),
            Part::Text(_) | Part::Class(_) | Part::Token(..) => {}
        }
    }
    let mut found = vec![];
    choice.iter().flatten().for_each(|part| of(part, &mut found));
    found
}

fn has_token(part: &Part) -> bool {
    match part {
        Part::Token(..) => true,
        Part::Group(choice) => choice.iter().flatten().any(has_token),
        Part::Repeat(part, ..) => has_token(part),
        Part::Text(_) | Part::Class(_) | Part::Rule(_) => false,
    }
}

/// The rules that lead neither back to themselves nor to such a rule, nor to a token.
fn regular(rules: &BTreeMap<String, Choice>) -> BTreeMap<&str, bool> {
    let mut regular: BTreeMap<&str, bool> = rules.keys().map(|name| (name.as_str(), false)).collect();
    let named: BTreeMap<&str, Vec<&str>> =
        rules.iter().map(|(name, rule)| (name.as_str(), names(rule))).collect();
    // A rule is regular once all that it names are.
    loop {
        let is_next = |(name, rule): &(&String, &Choice)| {
            let is_plain = !rule.iter().flatten().any(has_token);
            !regular[name.as_str()] && is_plain && named[name.as_str()].iter().all(|name| regular[name])
        };
        let next: Vec<&str> = rules.iter().filter(is_next).map(|(name, _)| name.as_str()).collect();
        if next.is_empty() {
            return regular;
        }
        regular.extend(next.into_iter().map(|name| (name, true)));
    }
}

struct Writer<'a> {
    numbers: BTreeMap<&'a str, usize>,
    regular: BTreeMap<&'a str, bool>,
    lark: String,
    /// Terminals of parts of rules so far.
    terminals: usize,
}

impl Writer<'_> {
    fn name(&self, name: &str) -> String {
        let number = self.numbers[name];
        if self.regular[name] { format!("RULE_{number}") } else { format!("rule_{number}") }
    }

    fn is_regular(&self, part: &Part) -> bool {
        match part {
            Part::Text(_) | Part::Class(_) => true,
            Part::Token(..) => false,
            Part::Rule(name) => self.regular[name.as_str()],
            Part::Group(choice) => choice.iter().flatten().all(|part| self.is_regular(part)),
            Part::Repeat(part, ..) => self.is_regular(part),
        }
    }

    /// A choice of regular parts.
    fn terminal(&self, choice: &Choice) -> String {
        let sequence = |parts: &Vec<Part>| match parts.is_empty() {
            true => "\"\"".into(),
            false => parts.iter().map(|part| self.regular_part(part)).collect::<Vec<_>>().join(" "),
        };
        choice.iter().map(sequence).collect::<Vec<_>>().join(" | ")
    }

    fn regular_part(&self, part: &Part) -> String {
        match part {
            Part::Text(text) => super::literal(text),
            Part::Class(class) => format!("/{class}/"),
            Part::Token(..) => String::new(),
            Part::Rule(name) => self.name(name),
            Part::Group(choice) => format!("({})", self.terminal(choice)),
            Part::Repeat(part, least, most) => repeated(&self.regular_part(part), *least, *most),
        }
    }

    /// A choice in a rule; its runs of regular parts become terminals.
    fn rule(&mut self, choice: &Choice) -> String {
        let mut all = vec![];
        for parts in choice {
            let (mut written, mut run) = (vec![], vec![]);
            for part in parts {
                if self.is_regular(part) {
                    run.push(part.clone());
                    continue;
                }
                self.end_run(&mut run, &mut written);
                written.push(self.part(part));
            }
            self.end_run(&mut run, &mut written);
            all.push(if written.is_empty() { "\"\"".into() } else { written.join(" ") });
        }
        all.join(" | ")
    }

    fn end_run(&mut self, run: &mut Vec<Part>, written: &mut Vec<String>) {
        if run.is_empty() {
            return;
        }
        let name = format!("PART_{}", self.terminals);
        self.terminals += 1;
        let right = self.terminal(&vec![std::mem::take(run)]);
        let _ = writeln!(self.lark, "{name}: {right}");
        written.push(name);
    }

    fn part(&mut self, part: &Part) -> String {
        match part {
            Part::Token(id, false) => format!("<[{id}]>"),
            Part::Token(id, true) => format!("<[^{id}]>"),
            Part::Group(choice) => format!("({})", self.rule(choice)),
            Part::Repeat(part, least, most) => {
                let one = self.rule(&vec![vec![(**part).clone()]]);
                repeated(&format!("({one})"), *least, *most)
            }
            other => self.regular_part(other),
        }
    }
}

fn repeated(part: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (_, Some(0)) => "\"\"".into(),
        (0, None) => format!("({part})*"),
        (1, None) => format!("({part})+"),
        (0, Some(1)) => format!("({part})?"),
        (least, None) => format!("({part}){{{least},}}"),
        (least, Some(most)) => format!("({part}){{{least},{most}}}"),
    }
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
    token: &'a dyn Fn(&str) -> Option<u32>,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<char> {
        let next = self.rest.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn takes(&mut self, wanted: char) -> bool {
        let is = self.rest.peek() == Some(&wanted);
        if is {
            self.next();
        }
        is
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        match self.takes(wanted) {
            true => Ok(()),
            false => Err(self.unexpected(&format!("{wanted:?}"))),
        }
    }

    fn unexpected(&mut self, wanted: &str) -> String {
        match self.rest.peek() {
            Some(found) => format!("{wanted} is wanted, but {found:?} stands there"),
            None => format!("{wanted} is wanted, but the text ends"),
        }
    }

    /// Skips white space and comments; ends of lines, too, if `lines`.
    fn space(&mut self, lines: bool) {
        while let Some(&c) = self.rest.peek() {
            match c {
                ' ' | '\t' => drop(self.next()),
                '\r' | '\n' if lines => drop(self.next()),
                '#' => {
                    while self.rest.peek().is_some_and(|&c| c != '\n') {
                        self.next();
                    }
                }
                _ => return,
            }
        }
    }

    fn rules(&mut self) -> Result<BTreeMap<String, Choice>, String> {
        let mut rules = BTreeMap::new();
        self.space(true);
        while self.rest.peek().is_some() {
            let name = self.name()?;
            self.space(false);
            for c in "::=".chars() {
                self.expect(c)?;
            }
            self.space(true);
            let rule = self.choice(0)?;
            self.space(false);
            if self.rest.peek().is_some_and(|c| !['\r', '\n'].contains(c)) {
                return Err(self.unexpected("the end of the rule"));
            }
            self.space(true);
            rules.insert(name, rule);
        }
        Ok(rules)
    }

    fn name(&mut self) -> Result<String, String> {
        let mut name = String::new();
        while let Some(c) = self.rest.next_if(|c| c.is_ascii_alphanumeric() || ['-', '_'].contains(c)) {
            name.push(c);
        }
        if name.is_empty() { Err(self.unexpected("a rule's name")) } else { Ok(name) }
    }

    /// Alternatives at a depth of groups. In groups, lines may end anywhere.
    fn choice(&mut self, depth: usize) -> Result<Choice, String> {
        if depth > DEPTH {
            return Err(format!("groups are nested more than {DEPTH} deep"));
        }
        let mut choice = vec![self.sequence(depth)?];
        while self.takes('|') {
            self.space(true);
            choice.push(self.sequence(depth)?);
        }
        Ok(choice)
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Part>, String> {
        let mut parts = vec![];
        loop {
            let Some(&c) = self.rest.peek() else { return Ok(parts) };
            let part = match c {
                '"' => Part::Text(self.text()?),
                '[' => Part::Class(self.class()?),
                '.' => {
                    self.next();
                    Part::Class("(?s:.)".into())
                }
                '(' => {
                    self.next();
                    self.space(true);
                    let choice = self.choice(depth + 1)?;
                    self.expect(')')?;
                    Part::Group(choice)
                }
                '<' | '!' => self.token()?,
                c if c.is_ascii_alphanumeric() || c == '_' => Part::Rule(self.name()?),
                _ => return Ok(parts),
            };
            parts.push(self.repetition(part)?);
            self.space(depth > 0);
        }
    }

    fn repetition(&mut self, mut part: Part) -> Result<Part, String> {
        loop {
            self.space(false);
            let (least, most) = match self.rest.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.next();
                    let (least, most) = self.bounds()?;
                    if self.rest.peek() != Some(&'}') {
                        return Err(self.unexpected("'}'"));
                    }
                    (least, most)
                }
                _ => return Ok(part),
            };
            self.next();
            part = Part::Repeat(Box::new(part), least, most);
        }
    }

    /// `m`, `m,` or `m,n`.
    fn bounds(&mut self) -> Result<(u32, Option<u32>), String> {
        self.space(false);
        let least = self.number()?;
        self.space(false);
        let most = match self.takes(',') {
            false => Some(least),
            true => {
                self.space(false);
                if self.rest.peek() == Some(&'}') { None } else { Some(self.number()?) }
            }
        };
        self.space(false);
        match most.is_some_and(|most| most < least) {
            true => Err(format!("{{{least},{}}} is no range", most.unwrap_or_default())),
            false => Ok((least, most)),
        }
    }

    fn number(&mut self) -> Result<u32, String> {
        let mut digits = String::new();
        while let Some(c) = self.rest.next_if(char::is_ascii_digit) {
            digits.push(c);
        }
        if digits.is_empty() {
            return Err(self.unexpected("a number"));
        }
        let number = digits.parse().ok().filter(|&number| number <= REPEATS);
        number.ok_or_else(|| format!("{digits} repetitions are asked for, but {REPEATS} may be"))
    }

    fn text(&mut self) -> Result<String, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.rest.peek() {
                Some('"') => break,
                None | Some('\n') => return Err(self.unexpected("'\"'")),
                Some(_) => text.push(self.character()?),
            }
        }
        self.next();
        Ok(text)
    }

    /// A character, which may be escaped.
    fn character(&mut self) -> Result<char, String> {
        let Some(c) = self.next() else { return Err("a character is wanted, but the text ends".into()) };
        if c != '\\' {
            return Ok(c);
        }
        match self.next() {
            Some('n') => Ok('\n'),
            Some('r') => Ok('\r'),
            Some('t') => Ok('\t'),
            Some('x') => self.code(2),
            Some('u') => self.code(4),
            Some('U') => self.code(8),
            Some(c) if ['\\', '"', '[', ']', '-', '^', '/'].contains(&c) => Ok(c),
            Some(c) => Err(format!("\\{c} is no escape")),
            None => Err("an escape is wanted, but the text ends".into()),
        }
    }

    fn code(&mut self, digits: usize) -> Result<char, String> {
        let mut text = String::new();
        while text.len() < digits
            && let Some(c) = self.rest.next_if(char::is_ascii_hexdigit)
        {
            text.push(c);
        }
        let code = u32::from_str_radix(&text, 16).ok().filter(|_| text.len() == digits);
        code.and_then(char::from_u32)
            .ok_or_else(|| format!("{text:?} are not {digits} digits of a character"))
    }

    /// `[a-z]`, `[^..]`.
    fn class(&mut self) -> Result<String, String> {
        self.next();
        let mut class = String::from(if self.takes('^') { "[^" } else { "[" });
        loop {
            match self.rest.peek() {
                Some(']') => break,
                None | Some('\n') => return Err(self.unexpected("']'")),
                Some(_) => {}
            }
            let first = self.character()?;
            let _ = write!(class, "\\u{{{:x}}}", u32::from(first));
            if self.takes('-') {
                if self.rest.peek() == Some(&']') {
                    class += "\\u{2d}";
                    break;
                }
                let last = self.character()?;
                if last < first {
                    return Err(format!("{first:?}-{last:?} is no range"));
                }
                let _ = write!(class, "-\\u{{{:x}}}", u32::from(last));
            }
        }
        self.next();
        match class.as_str() {
            "[" => Err("[] takes no character".into()),
            "[^" => Ok("(?s:.)".into()),
            _ => Ok(class + "]"),
        }
    }

    /// `<think>`, `<[123]>`, and either behind `!`.
    fn token(&mut self) -> Result<Part, String> {
        let is_other = self.takes('!');
        if self.rest.peek() != Some(&'<') {
            return Err(self.unexpected("a token, as in <think> or <[123]>"));
        }
        let mut spelling = String::new();
        loop {
            match self.next() {
                None | Some('\n') => return Err(format!("the token {spelling} has no end")),
                Some(c) => spelling.push(c),
            }
            if spelling.ends_with('>') {
                break;
            }
        }
        let number = spelling.strip_prefix("<[").and_then(|rest| rest.strip_suffix("]>"));
        let id = match number {
            Some(number) => number.parse().ok(),
            None => (self.token)(&spelling),
        };
        id.map(|id| Part::Token(id, is_other)).ok_or_else(|| format!("there is no token {spelling}"))
    }
}
