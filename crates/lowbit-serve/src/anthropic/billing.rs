//! The line that Claude Code writes before its system prompt.

use serde_json::Value;

const HEADER: &str = "x-anthropic-billing-header:";

/// A system prompt without that line: `x-anthropic-billing-header: cc_version=2.1.0; cch=a5145;`.
/// Its `cch` is another in each request, so that no prompt would share its start with an earlier
/// one, and it tells a model nothing. It stands in the first block, alone or with text right behind
/// it.
pub(super) fn without_billing(mut system: Value) -> Value {
    match &mut system {
        Value::String(text) => *text = rest(text).into(),
        Value::Array(blocks) => {
            if let Some(Value::String(text)) = blocks.first_mut().and_then(|block| block.get_mut("text")) {
                *text = rest(text).into();
                if text.is_empty() {
                    blocks.remove(0);
                }
            }
        }
        _ => {}
    }
    system
}

/// The text behind the header and its pairs `name=value;`, or all of it if it has none.
fn rest(text: &str) -> &str {
    let Some(mut rest) = text.strip_prefix(HEADER) else { return text };
    while let Some(behind) = behind_pair(rest.trim_start_matches(' ')) {
        rest = behind;
    }
    let line = rest.trim_start_matches([' ', '\r']);
    line.strip_prefix('\n').unwrap_or(rest)
}

/// The text behind a pair at its start.
fn behind_pair(text: &str) -> Option<&str> {
    let (name, value) = text.split_once('=')?;
    let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let end = value.find(|c: char| c == ';' || c.is_whitespace()).unwrap_or(value.len());
    let behind = &value[end..];
    is_name.then(|| behind.strip_prefix(';').unwrap_or(behind))
}

#[cfg(test)]
mod tests {
    use super::rest;

    #[test]
    fn the_header_alone_goes() {
        for (text, want) in [
            (
                "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=a5145;\nYou are",
                "You are",
            ),
            ("x-anthropic-billing-header: cc_version=2.1.9; cch=a5145;You are a=b.", "You are a=b."),
            ("x-anthropic-billing-header: cch=00000;", ""),
            ("x-anthropic-billing-header: cch=00000\r\n\nYou", "\nYou"),
            ("x-anthropic-billing-header:", ""),
            ("x-anthropic-billing-header: is a name.", " is a name."),
            ("You are. x-anthropic-billing-header: cch=1;", "You are. x-anthropic-billing-header: cch=1;"),
            ("", ""),
        ] {
            assert_eq!(rest(text), want, "{text}");
        }
    }
}
