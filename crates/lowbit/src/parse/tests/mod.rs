//! Replies in the forms of each family, in every cut into two pieces and character by character,
//! with markers that are text and with markers that are tokens.

mod families;

use super::*;
use serde_json::json;

/// A tokenizer whose added tokens are `added`, from id 1 on.
fn tokenizer(added: &[&str]) -> Tokenizer {
    let tokens = added.iter().enumerate().map(|(index, content)| {
        json!({"id": index + 1, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": false})
    });
    let json = json!({
        "version": "1.0",
        "added_tokens": tokens.collect::<Vec<_>>(),
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    });
    Tokenizer::from_json("tokenizer.json".as_ref(), json.to_string().as_bytes()).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    // Templates show markers in texts of their own; here they are all that there is.
    ChatTemplate::new(&format!("{{% raw %}}{source}{{% endraw %}}"), "template".as_ref()).unwrap()
}

fn tools() -> Value {
    let properties = json!({"s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}});
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}])
}

/// One input of a parser.
#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    Token(u32),
}

/// `reply` in characters, and in tokens where `syntax` has markers for them.
fn pieces(reply: &str, added: &[&str]) -> Vec<Piece> {
    let (mut pieces, mut rest) = (vec![], reply);
    while let Some(first) = rest.chars().next() {
        let token = added.iter().enumerate().filter(|(_, token)| rest.starts_with(**token));
        let token = token.max_by_key(|(_, token)| token.len());
        let length = token.map_or(first.len_utf8(), |(_, token)| token.len());
        pieces.push(match token {
            Some((index, _)) => Piece::Token(index as u32 + 1),
            None => Piece::Text(first.into()),
        });
        rest = &rest[length..];
    }
    pieces
}

/// The parts, those of a kind joined, as one text: `(reasoning)`, content, `<name arguments id>`.
fn parts(syntax: &Syntax, prompt: &str, pieces: impl IntoIterator<Item = Piece>) -> Vec<Event> {
    let mut parser = syntax.parser(prompt, 0);
    let mut events = vec![];
    for piece in pieces {
        events.extend(match piece {
            Piece::Text(text) => parser.text(&text),
            Piece::Token(id) => parser.token(id),
        });
    }
    events.extend(parser.finish());
    let mut joined: Vec<Event> = vec![];
    for event in events {
        match (joined.last_mut(), event) {
            (Some(Event::Content(before)), Event::Content(text)) => before.push_str(&text),
            (Some(Event::Reasoning(before)), Event::Reasoning(text)) => before.push_str(&text),
            (_, event) => joined.push(event),
        }
    }
    joined
}

fn show(events: &[Event]) -> String {
    let show = |event: &Event| match event {
        Event::Reasoning(text) => format!("({text})"),
        Event::Content(text) => text.clone(),
        Event::Call(Call { id, name, arguments }) => {
            let id = id.as_deref().unwrap();
            format!("<{name} {arguments}{}>", if id.starts_with("call0000") { "" } else { id })
        }
    };
    events.iter().map(show).collect::<Vec<_>>().join("|")
}

#[test]
fn a_plain_syntax_takes_all_for_content() {
    let reply = "<think>a</think><tool_call>{\"name\": \"f\"}</tool_call> ";
    let syntax = Syntax::plain();
    assert!(syntax.is_plain() && !Syntax::new(&template("<think>"), None).is_plain());
    assert_eq!(show(&parts(&syntax, "", [Piece::Text(reply.into())])), reply);
    let held = syntax.parser("", 0).text("<thi");
    assert_eq!(held, [Event::Content("<thi".into())], "nothing is held back");
}

/// Any cut into pieces gives the same parts.
#[test]
fn parts_do_not_depend_on_pieces() {
    let template =
        template("<think></think><tool_call></tool_call>[TOOL_CALLS]<|python_tag|><|tool_call_start|>");
    let syntax = Syntax::new(&template.with("tools", tools()), None);
    let words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\":\"f\"}",
        "[TOOL_CALLS]",
        "f[ARGS]",
        "{}",
        " ",
        "a",
        "<",
        "[f()]",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "\n",
        "<function=f>",
        "</function>",
    ];
    let mut random = 1u64;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for _ in 0..3000 {
        let reply: String = (0..draw(9)).map(|_| words[draw(words.len())]).collect();
        let whole = parts(&syntax, "", [Piece::Text(reply.clone())]);
        let letters = reply.chars().map(|c| Piece::Text(c.into()));
        assert_eq!(parts(&syntax, "", letters), whole, "{reply}");
        let mut cut = vec![];
        let mut rest = reply.as_str();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(1 + draw(rest.len()));
            cut.push(Piece::Text(piece.into()));
            rest = after;
        }
        assert_eq!(parts(&syntax, "", cut.clone()), whole, "{cut:?}");
    }
}
