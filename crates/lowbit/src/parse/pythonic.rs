//! Calls as Python spells them, `[f(x=1, y="a"), g()]` or one on each line, with literals alone;
//! and as Gemma does, `call:f{x:1,y:<|"|>a<|"|>}`.

use serde_json::{Map, Number, Value};

/// Literals in literals.
const DEPTH: usize = 64;

/// The calls that `text` lists; `None` if it is anything else.
pub(super) fn calls(text: &str) -> Option<Vec<(String, Map<String, Value>)>> {
    let mut reader = Reader { rest: text.trim(), quote: None };
    let is_list = reader.eat("[");
    let mut calls = vec![];
    loop {
        let name = reader.name()?;
        reader.eat("(").then_some(())?;
        let mut arguments = Map::new();
        while !reader.eat(")") {
            let key = reader.name()?;
            reader.eat("=").then_some(())?;
            arguments.insert(key, reader.value(DEPTH)?);
            if !reader.eat(",") {
                reader.eat(")").then_some(())?;
                break;
            }
        }
        calls.push((name, arguments));
        let next = reader.eat(",") || !is_list && !reader.rest.is_empty();
        if !next {
            break;
        }
    }
    ((!is_list || reader.eat("]")) && reader.rest.is_empty()).then_some(calls)
}

/// The call that `text` is in Gemma's spelling, with texts between two `quote`s; `None` if it is
/// anything else.
pub(super) fn gemma(text: &str, quote: &str) -> Option<(String, Map<String, Value>)> {
    let mut reader = Reader { rest: text.trim().strip_prefix("call:")?, quote: Some(quote) };
    let name = reader.name()?;
    let Value::Object(arguments) = reader.dict(DEPTH)? else { return None };
    reader.rest.is_empty().then_some((name, arguments))
}

struct Reader<'a> {
    rest: &'a str,
    /// The quote on either side of a text, in Gemma's spelling; keys have none.
    quote: Option<&'a str>,
}

impl Reader<'_> {
    /// Steps over `token` and the white space behind it.
    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    fn name(&mut self) -> Option<String> {
        let end = self.rest.find(|c: char| !c.is_alphanumeric() && !['_', '.', '-'].contains(&c));
        let (name, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest.trim_start();
        (!name.is_empty()).then(|| name.into())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        let deeper = depth.checked_sub(1)?;
        if let Some(quote) = self.quote
            && let Some(text) = self.rest.strip_prefix(quote)
        {
            let (text, rest) = text.split_once(quote)?;
            self.rest = rest.trim_start();
            return Some(text.into());
        }
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => self.list("[", "]", deeper),
            '(' => self.list("(", ")", deeper),
            '{' => self.dict(deeper),
            first if first.is_ascii_digit() || ['-', '+', '.'].contains(&first) => self.number(),
            _ => match self.name()?.as_str() {
                "True" | "true" => Some(true.into()),
                "False" | "false" => Some(false.into()),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn number(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && !['-', '+', '.', '_'].contains(&c));
        let (number, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest.trim_start();
        let number = number.replace('_', "");
        let whole =
            number.parse::<i64>().map(Value::from).or_else(|_| number.parse::<u64>().map(Value::from));
        whole.ok().or_else(|| number.parse().ok().and_then(Number::from_f64).map(Value::Number))
    }

    fn list(&mut self, open: &str, close: &str, depth: usize) -> Option<Value> {
        self.eat(open);
        let mut values = vec![];
        while !self.eat(close) {
            values.push(self.value(depth)?);
            if !self.eat(",") {
                self.eat(close).then_some(())?;
                break;
            }
        }
        Some(Value::Array(values))
    }

    fn dict(&mut self, depth: usize) -> Option<Value> {
        self.eat("{").then_some(())?;
        let mut values = Map::new();
        while !self.eat("}") {
            let key = match self.quote {
                Some(_) => self.name()?,
                None => self.value(depth)?.as_str()?.to_string(),
            };
            self.eat(":").then_some(())?;
            values.insert(key, self.value(depth)?);
            if !self.eat(",") {
                self.eat("}").then_some(())?;
                break;
            }
        }
        Some(Value::Object(values))
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            if c == quote {
                self.rest = self.rest[at + 1..].trim_start();
                return Some(text);
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let escaped = chars.next()?.1;
            match escaped {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                '\\' | '\'' | '"' => text.push(escaped),
                '\n' => {}
                'x' | 'u' | 'U' => {
                    let digits = [('x', 2), ('u', 4), ('U', 8)].iter().find(|(kind, _)| *kind == escaped)?.1;
                    let code: String = chars.by_ref().take(digits).map(|(_, digit)| digit).collect();
                    text.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?)?);
                }
                other => text.extend(['\\', other]),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_are_read_as_python_reads_them() {
        let text = r#"[f(a="x\"\u00e9", b='y\n', c=-1.5, d=[1, True, None,], e={"k": (2,)}), mod.g()]"#;
        let want = json!({"a": "x\"\u{e9}", "b": "y\n", "c": -1.5, "d": [1, true, null], "e": {"k": [2]}});
        let calls = calls(text).unwrap();
        assert_eq!(calls[0], ("f".into(), want.as_object().unwrap().clone()));
        assert_eq!(calls[1], ("mod.g".into(), Map::new()));
        assert_eq!(super::calls("f(x=1)").unwrap().len(), 1);
    }

    #[test]
    fn gemma_quotes_texts_and_no_keys() {
        let text = "call:f{a:<|\"|>x, \"y\"}<|\"|>,b:{c:[1,true]},d:-0.5}";
        let want = json!({"a": "x, \"y\"}", "b": {"c": [1, true]}, "d": -0.5});
        assert_eq!(gemma(text, "<|\"|>"), Some(("f".into(), want.as_object().unwrap().clone())));
        assert_eq!(gemma("call:f{}", "<escape>"), Some(("f".into(), Map::new())));
        for text in ["f{}", "call:f", "call:f{a}", "call:f{a:<|\"|>x}", "call:f{} and", "call:{}"] {
            assert_eq!(gemma(text, "<|\"|>"), None, "{text}");
        }
    }

    #[test]
    fn what_is_no_list_of_calls_is_none() {
        let deep = format!("[f(x={}1{})]", "[".repeat(100), "]".repeat(100));
        for text in ["", "[]", "[f(]", "[f(x)]", "[f(x=g())]", "[f(x=\"a)]", "[f()] and", "[f(x=1]", &deep] {
            assert_eq!(calls(text), None, "{text}");
        }
    }
}
