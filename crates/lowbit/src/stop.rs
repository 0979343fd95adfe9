//! Texts that end a reply.

/// Passes a text on piece by piece up to the first stop text, which may span pieces. The end of a
/// piece that could be the start of a stop text is held back.
pub struct StopTexts {
    stops: Vec<String>,
    held: String,
    /// By its index.
    found: Option<usize>,
}

impl StopTexts {
    /// Empty ones of `stops` are ignored.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, held: String::new(), found: None }
    }

    /// The stop text that was found: nothing is passed on any more.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.stops[index].as_str())
    }

    /// Takes the next piece of text and returns what can be passed on.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        if let Some((start, index)) = self.first() {
            self.found = Some(index);
            self.held.truncate(start);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// The held-back text, at the end of the reply.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The start of the stop text that is complete first, and its index; of several that end there,
    /// the longest. So the result does not depend on how the text was cut into pieces.
    fn first(&self) -> Option<(usize, usize)> {
        let places = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        places.min().map(|(_, start, index)| (start, index))
    }
}

/// Length of the longest prefix of `stop` that `text` ends with.
fn begun(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(length, _)| length).rev();
    lengths.into_iter().find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.into()).collect();
        let mut filter = StopTexts::new(stops);
        let mut text = String::new();
        for piece in pieces {
            text += &filter.push(piece);
        }
        text += &filter.flush();
        (text, filter.found().is_some())
    }

    #[test]
    fn a_stop_text_may_span_pieces() {
        assert_eq!(pass(&["\nUser:"], &["Hi", " there\n", "Us", "er: no"]), ("Hi there".into(), true));
        assert_eq!(pass(&["\nUser:"], &["Hi\nUs", "ual"]), ("Hi\nUsual".into(), false));
        assert_eq!(pass(&["aab"], &["aa", "ab", "c"]), ("a".into(), true));
        assert_eq!(pass(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
        assert_eq!(pass(&[], &["a", "b"]), ("ab".into(), false));
        assert_eq!(pass(&["ab"], &["a"]), ("a".into(), false));
    }

    #[test]
    fn the_stop_text_that_was_found_is_known() {
        let mut filter = StopTexts::new(["", "late", "stop"].map(String::from).to_vec());
        assert_eq!((filter.push("a sto"), filter.found()), ("a ".into(), None));
        assert_eq!((filter.push("p late"), filter.found()), (String::new(), Some("stop")));
    }

    #[test]
    fn what_is_whole_first_counts_in_whatever_pieces_it_comes() {
        assert_eq!(pass(&["abcd", "c"], &["abcd"]), ("ab".into(), true));
        // Every text of up to 7 of three letters, whole and cut at every place, against the plain
        // definition.
        let stops = ["ab", "bca", "cc", "aabb"];
        for number in 0..3_usize.pow(7) {
            let letter = |index| ["a", "b", "c"][number / 3_usize.pow(index) % 3];
            let text: String = (0..7).map(letter).collect();
            let end = (0..=7).find(|&end| stops.iter().any(|stop| text[..end].ends_with(stop)));
            let start = end.and_then(|end| {
                stops.iter().filter(|stop| text[..end].ends_with(*stop)).map(|stop| end - stop.len()).min()
            });
            let want = (text[..start.unwrap_or(7)].to_string(), start.is_some());
            for cut in 0..=7 {
                assert_eq!(pass(&stops, &[&text[..cut], &text[cut..]]), want, "{text} cut at {cut}");
            }
        }
    }
}
