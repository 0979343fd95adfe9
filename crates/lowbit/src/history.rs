//! Alignment of two token sequences: the lengths up to which both have the same text.

use lowbit_files::{FileError, TokenStream, Tokenizer};

/// Lengths of starts that say the same: in what a session has read, and in a conversation as it is
/// tokenised now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Said {
    pub(crate) read: usize,
    pub(crate) all: usize,
}

/// All starts that say the same.
#[derive(Debug, PartialEq)]
pub(crate) struct Aligned {
    /// Up to here both are the same tokens.
    same: usize,
    /// Those behind it, where both have the same text in other tokens.
    behind: Vec<Said>,
}

impl Aligned {
    /// The longest of at most `read` tokens that the session has read.
    pub(crate) fn within(&self, read: usize) -> Said {
        let behind = self.behind.iter().rev().find(|said| said.read <= read);
        let same = self.same.min(read);
        behind.copied().unwrap_or(Said { read: same, all: same })
    }
}

/// Compares the tokens that a session has `read` with `all` tokens of the conversation, of which at
/// most `most` are taken. A model may sample a text in other tokens than the tokenizer would
/// choose: that is not a difference.
pub(crate) fn aligned(
    tokenizer: &Tokenizer,
    read: &[u32],
    all: &[u32],
    most: usize,
) -> Result<Aligned, FileError> {
    let same = read.iter().zip(&all[..most]).take_while(|(a, b)| a == b).count();
    let mut aligned = Aligned { same, behind: vec![] };
    if same == read.len() || same == most {
        return Ok(aligned);
    }
    let mut sides = [Side::new(tokenizer, read, same)?, Side::new(tokenizer, &all[..most], same)?];
    loop {
        let [a, b] = &sides;
        if !common(a.ahead.as_bytes(), b.ahead.as_bytes()) {
            return Ok(aligned);
        }
        if a.is_whole && b.is_whole && a.ahead.len() == b.ahead.len() {
            aligned.behind.push(Said { read: a.at, all: b.at });
            for side in &mut sides {
                side.ahead.clear();
                if !side.step()? {
                    return Ok(aligned);
                }
            }
            continue;
        }
        // The one whose text is shorter goes on; one that waits for the rest of a character has no
        // more text than it shows.
        let shorter =
            usize::from(a.ahead.len() > b.ahead.len() || (a.ahead.len() == b.ahead.len() && a.is_whole));
        if !sides[shorter].step()? {
            return Ok(aligned);
        }
    }
}

/// True if one is the start of the other.
fn common(a: &[u8], b: &[u8]) -> bool {
    a.iter().zip(b).all(|(a, b)| a == b)
}

/// One of two sequences.
struct Side<'t> {
    tokens: &'t [u32],
    stream: TokenStream<'t>,
    /// Tokens that were taken.
    at: usize,
    /// Their text since both sides were equal.
    ahead: String,
    /// True if the last token completed its text.
    is_whole: bool,
}

impl<'t> Side<'t> {
    fn new(tokenizer: &'t Tokenizer, tokens: &'t [u32], same: usize) -> Result<Self, FileError> {
        let stream = tokenizer.stream(&tokens[..same])?;
        let mut side = Self { tokens, stream, at: same, ahead: String::new(), is_whole: true };
        side.step()?;
        Ok(side)
    }

    /// Takes the next token; whether there was one.
    fn step(&mut self) -> Result<bool, FileError> {
        let Some(&id) = self.tokens.get(self.at) else { return Ok(false) };
        self.at += 1;
        let text = self.stream.push(id)?;
        self.is_whole = text.is_some();
        self.ahead.push_str(&text.unwrap_or_default());
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_in_other_tokens_are_the_same() {
        let vocab = r#"{"a":0,"b":1,"c":2,"ab":3,"bc":4,"abc":5,"\u00c3":6,"\u00a9":7,"\u00c3\u00a9":8}"#;
        let merges = r#"["a b","b c","ab c","\u00c3 \u00a9"]"#;
        let model = format!(r#"{{"type":"BPE","vocab":{vocab},"merges":{merges}}}"#);
        let json = format!(
            r#"{{"version":"1.0","added_tokens":[],"decoder":{{"type":"ByteLevel","add_prefix_space":false,
            "trim_offsets":false,"use_regex":true}},"model":{model}}}"#
        );
        let tokenizer = Tokenizer::from_json("tokenizer.json".as_ref(), json.as_bytes()).unwrap();
        let last = |read: &[u32], all: &[u32]| {
            let Said { read, all } = aligned(&tokenizer, read, all, all.len()).unwrap().within(usize::MAX);
            (read, all)
        };
        assert_eq!(last(&[], &[0]), (0, 0));
        assert_eq!(last(&[0, 1], &[0, 1, 2]), (2, 2));
        assert_eq!(last(&[0, 1, 2, 2], &[5, 2, 0]), (4, 2), "abc cc");
        assert_eq!(last(&[0, 1], &[5]), (0, 0), "ab is no whole token of abc");
        assert_eq!(last(&[0, 1, 0], &[3, 1]), (2, 1), "ab and then others");
        assert_eq!(last(&[2, 6, 7, 1], &[2, 8, 1]), (4, 3), "\u{e9} of two tokens");
        assert_eq!(last(&[2, 6], &[2, 8]), (1, 1), "half a character");
        let aligned = aligned(&tokenizer, &[2, 0, 1, 0, 4], &[2, 3, 0, 1, 2], 5).unwrap();
        for (read, want) in [(9, (5, 5)), (4, (4, 3)), (3, (3, 2)), (2, (1, 1)), (1, (1, 1)), (0, (0, 0))] {
            let said = aligned.within(read);
            assert_eq!((said.read, said.all), want, "at most {read}");
        }
    }
}
