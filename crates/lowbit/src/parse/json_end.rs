/// Finds where a JSON value ends that a name may precede, character by character.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonEnd {
    /// Open brackets.
    depth: usize,
    in_string: bool,
    escaped: bool,
    head: Head,
}

/// The text before the value, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Head {
    #[default]
    Nothing,
    Name,
    /// White space after a name: only the value, or a word in brackets such as `[ARGS]`, may
    /// follow.
    Named,
    /// Next to a word in brackets.
    Bracket,
}

/// The role of a character.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    Part,
    /// The value's last one.
    Last,
    /// It cannot be part of this.
    Alien,
}

impl JsonEnd {
    pub(super) fn step(&mut self, c: char) -> Step {
        if self.depth == 0 {
            return self.before(c);
        }
        if self.in_string {
            (self.in_string, self.escaped) = match c {
                _ if self.escaped => (true, false),
                '\\' => (true, true),
                '"' => (false, false),
                _ => (true, false),
            };
            return Step::Part;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => self.depth -= 1,
            _ => {}
        }
        if self.depth == 0 { Step::Last } else { Step::Part }
    }

    fn before(&mut self, c: char) -> Step {
        let is_word = c.is_alphanumeric() || ['_', '-', '.', ':', '/'].contains(&c);
        match (c, self.head) {
            ('{', _) | ('[', Head::Nothing) => self.depth = 1,
            ('[' | ']', _) => self.head = Head::Bracket,
            (c, Head::Name) if c.is_whitespace() => self.head = Head::Named,
            (c, _) if c.is_whitespace() => {}
            (_, Head::Nothing | Head::Name | Head::Bracket) if is_word => self.head = Head::Name,
            _ => return Step::Alien,
        }
        Step::Part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text up to the end of the value, or up to the character that is none of it.
    fn taken(text: &str) -> (String, Option<Step>) {
        let mut end = JsonEnd::default();
        for (at, c) in text.char_indices() {
            match end.step(c) {
                Step::Part => {}
                step => return (text[..at].into(), Some(step)),
            }
        }
        (text.into(), None)
    }

    #[test]
    fn a_value_ends_with_its_last_bracket() {
        for (text, want, step) in [
            (r#" {"a": "}\"]", "b": [1, {}]} more"#, r#" {"a": "}\"]", "b": [1, {}]"#, Some(Step::Last)),
            (r#"[{}] x"#, "[{}", Some(Step::Last)),
            (r#"f[ARGS]{"x": 1}[TOOL"#, r#"f[ARGS]{"x": 1"#, Some(Step::Last)),
            (r#"f [CALL_ID] a1 [ARGS] {}"#, r#"f [CALL_ID] a1 [ARGS] {"#, Some(Step::Last)),
            ("I will", "I ", Some(Step::Alien)),
            ("f(x)", "f", Some(Step::Alien)),
            (r#"{"a": "#, r#"{"a": "#, None),
        ] {
            assert_eq!(taken(text), (want.into(), step), "{text}");
        }
    }
}
