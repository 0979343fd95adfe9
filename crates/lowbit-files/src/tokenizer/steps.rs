//! A tokenizer's steps: the crate's, but with patterns whose errors are not dropped, and with a
//! time limit.

use std::path::{Path, PathBuf};

use fancy_regex::{Regex, RegexBuilder};
use regex_automata::Input;
use regex_automata::meta::Regex as Automaton;
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pattern::Pattern;
use tokenizers::{
    DecoderWrapper, Model, NormalizedString, Normalizer, NormalizerWrapper, Offsets, PostProcessorWrapper,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper, Result, SplitDelimiterBehavior, Token,
    TokenizerImpl,
};

use super::guard::{check_budget, keep_failure};

/// The crate's tokenizer, of these steps.
pub(super) type Inner =
    TokenizerImpl<TimedModel, Normalize, PreTokenize, PostProcessorWrapper, DecoderWrapper>;

/// Bytes of a pattern.
const PATTERN: usize = 16 << 10;

/// The most backtracking steps per match. No published pattern takes as many as its text has
/// characters.
const BACKTRACKS: usize = 1_000_000;

/// The end of most published patterns: white space, but not the last of it before a word.
const WHITE_SPACE: &str = r"|\s+(?!\S)|\s+";

/// A regular expression, where the crate's takes its failure for the end of the text.
#[derive(Clone)]
pub(super) enum Matcher {
    /// The part of the pattern before [`WHITE_SPACE`], and `\s+`: without look-ahead, they need not
    /// step back, which takes memory for each character and fails on a million spaces.
    Words(Automaton),
    Any(Box<Regex>),
}

impl Matcher {
    pub(super) fn new(pattern: &str) -> Result<Self> {
        if pattern.len() > PATTERN {
            return Err(
                format!("a pattern has {} bytes; at most {PATTERN} are supported", pattern.len()).into()
            );
        }
        if let Some(words) = pattern.strip_suffix(WHITE_SPACE)
            && !is_possessive(words)
            && let Ok(syntax) = regex_automata::util::syntax::parse(words)
            && syntax.properties().minimum_len() > Some(0)
            && let Ok(automaton) = Automaton::new_many(&[words, r"\s+"])
        {
            return Ok(Self::Words(automaton));
        }
        Ok(Self::Any(Box::new(RegexBuilder::new(pattern).backtrack_limit(BACKTRACKS).build()?)))
    }

    /// The first match from `at` on.
    fn find(&self, text: &str, at: usize) -> Result<Option<(usize, usize)>> {
        match self {
            Self::Any(regex) => Ok(regex.find_from_pos(text, at)?.map(|found| (found.start(), found.end()))),
            Self::Words(automaton) => Ok(automaton.find(Input::new(text).range(at..)).map(|found| {
                let (start, mut end) = (found.start(), found.end());
                let is_white_space = found.pattern().as_usize() == 1;
                if is_white_space && end < text.len() {
                    let last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
                    if end - start > last {
                        end -= last;
                    }
                }
                (start, end)
            })),
        }
    }
}

/// True for a quantifier that keeps what it took (`?+`, `*+`, `++`): the automaton's parser takes
/// it for a repetition that is repeated, and `x?+` for any number of `x`.
fn is_possessive(pattern: &str) -> bool {
    let (mut class, mut is_quantified) = (0u32, false);
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => drop(characters.next()),
            '[' => class += 1,
            ']' => class = class.saturating_sub(1),
            '+' if class == 0 && is_quantified => return true,
            _ => {}
        }
        is_quantified = class == 0 && ['?', '*', '+'].contains(&character);
    }
    false
}

impl Pattern for &Matcher {
    fn find_matches(&self, inside: &str) -> Result<Vec<(Offsets, bool)>> {
        if inside.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut pieces = Vec::new();
        // The end of the last piece, and the place to look at: behind an empty match, a character
        // later.
        let (mut end, mut at) = (0, 0);
        while let Some((start, stop)) = self.find(inside, at)? {
            check_budget()?;
            // As iterators over matches have it: none is empty right behind another.
            if start != stop
                || pieces.last().is_none_or(|(last, is_match): &(Offsets, bool)| !is_match || last.1 != start)
            {
                if end != start {
                    pieces.push(((end, start), false));
                }
                pieces.push(((start, stop), true));
                end = stop;
            }
            at = match inside[stop..].chars().next() {
                Some(next) if start == stop => stop + next.len_utf8(),
                Some(_) => stop,
                None => break,
            };
        }
        if end != inside.len() {
            pieces.push(((end, inside.len()), false));
        }
        Ok(pieces)
    }
}

/// A step that changes the text.
#[derive(Clone)]
pub(super) enum Normalize {
    Sequence(Vec<Normalize>),
    Replace(Matcher, String),
    Other(NormalizerWrapper),
}

impl Normalizer for Normalize {
    fn normalize(&self, text: &mut NormalizedString) -> Result<()> {
        check_budget()?;
        keep_failure(match self {
            Self::Sequence(steps) => steps.iter().try_for_each(|step| step.normalize(text)),
            Self::Replace(matcher, content) => text.replace(matcher, content),
            Self::Other(step) => step.normalize(text),
        })
    }
}

impl<N: Into<NormalizerWrapper>> From<N> for Normalize {
    fn from(step: N) -> Self {
        Self::Other(step.into())
    }
}

/// A step that cuts the text into words.
#[derive(Clone)]
pub(super) enum PreTokenize {
    Sequence(Vec<PreTokenize>),
    /// A space before each part that does not start with one.
    Space,
    Split {
        matcher: Matcher,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    Other(PreTokenizerWrapper),
}

/// Words are the matches of `matcher`, and what is between them.
pub(super) fn split_by(matcher: Matcher) -> PreTokenize {
    PreTokenize::Split { matcher, behavior: SplitDelimiterBehavior::Isolated, invert: false }
}

impl PreTokenizer for PreTokenize {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> Result<()> {
        check_budget()?;
        match self {
            Self::Sequence(steps) => steps.iter().try_for_each(|step| step.pre_tokenize(text)),
            Self::Split { matcher, behavior, invert: false } => {
                text.split(|_, part| part.split(matcher, *behavior))
            }
            Self::Split { matcher, behavior, invert: true } => {
                text.split(|_, part| part.split(tokenizers::pattern::Invert(matcher), *behavior))
            }
            Self::Space => text.split(|_, mut part| {
                if !part.get().starts_with(' ') {
                    part.prepend(" ");
                }
                Ok([part])
            }),
            Self::Other(step) => step.pre_tokenize(text),
        }
    }
}

impl<P: Into<PreTokenizerWrapper>> From<P> for PreTokenize {
    fn from(step: P) -> Self {
        Self::Other(step.into())
    }
}

/// A model that looks at the time before each word.
#[derive(Clone)]
pub(super) struct TimedModel(pub(super) ModelWrapper);

impl Model for TimedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        check_budget()?;
        self.0.tokenize(word)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> std::collections::HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.0.save(folder, prefix)
    }

    fn get_trainer(&self) -> Self::Trainer {
        self.0.get_trainer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(matcher: &Matcher, text: &str) -> Vec<(Offsets, bool)> {
        matcher.find_matches(text).unwrap()
    }

    #[test]
    fn matches_cover_the_text() {
        let matcher = Matcher::new(r"\s+(?!\S)|b").unwrap();
        assert_eq!(pieces(&matcher, "a b  "), [((0, 2), false), ((2, 3), true), ((3, 5), true)]);
        assert_eq!(pieces(&matcher, ""), [((0, 0), false)]);
    }

    /// Both ways of matching give what iterating over the whole pattern's matches gives.
    #[test]
    fn matches_are_those_of_the_whole_pattern() {
        let texts = [
            "",
            " ",
            "a",
            "  a",
            "a  ",
            " a\n\n b\u{a0}\u{a0}c ",
            "\u{3000}\u{65e5} \r\n x",
            "'s 12  \t!",
            "aab\u{e9}",
            "..a+?",
        ];
        for pattern in [
            r"'s| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            // Ling's, of which the automaton's parser reads something else.
            r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}|\s+(?!\S)|\s+",
            r"[a?+]+|\?|\++|\s+(?!\S)|\s+",
            r"a|\s+(?!\S)|\s+",
            r"a*|\s+(?!\S)|\s+",
            r"a*(?!b)",
            r"(?=a)|b",
            r"(?<=a)",
            "a*",
        ] {
            let whole = Regex::new(pattern).unwrap();
            for text in texts.iter().filter(|text| !text.is_empty()) {
                let want: Vec<_> =
                    whole.find_iter(text).map(|m| m.unwrap()).map(|m| (m.start(), m.end())).collect();
                let got = pieces(&Matcher::new(pattern).unwrap(), text);
                assert!(got.windows(2).all(|pair| pair[0].0.1 == pair[1].0.0), "{pattern} {text:?} {got:?}");
                assert_eq!(got.last().unwrap().0.1, text.len());
                let got: Vec<_> =
                    got.iter().filter(|(_, is_match)| *is_match).map(|(offsets, _)| *offsets).collect();
                assert_eq!(got, want, "{pattern} {text:?}");
            }
        }
    }

    #[test]
    fn a_pattern_that_steps_back_for_ever_is_an_error() {
        let matcher = Matcher::new(r"(?:a(?=.)|a(?=.))*(?=b)c").unwrap();
        assert!((&matcher).find_matches(&"a".repeat(40)).is_err());
        assert!(Matcher::new(&"a".repeat(PATTERN + 1)).is_err());
        assert!(Matcher::new("(").is_err());
    }
}
