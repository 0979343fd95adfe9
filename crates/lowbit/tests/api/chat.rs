//! Conversations with tiny models that have chat templates.

use crate::bigram::Bigram;
use lowbit::{
    Chat, ChatTemplate, Error, GenerationOptions, LanguageModel, Message, ModelError, Progress, ReplyOptions,
};
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/models/qwen3");
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

fn model(folder: &Path) -> LanguageModel {
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(Path::new(MODEL).join(name), folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
    LanguageModel::open(folder.to_str().unwrap()).unwrap()
}

/// A model that answers anything with "the", in three tokens, where its tokenizer would take two.
fn letters(folder: &Path) -> LanguageModel {
    let bigram = Bigram {
        added: &["</s>", "<u>", "</u>"],
        merged: &["th"],
        next: &[("</u>", "t"), ("t", "h"), ("h", "e")],
        template: "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}<u>{{ m.content }}</u>\
                   {% endif %}{% endfor %}",
    };
    bigram.write(folder);
    LanguageModel::open(folder.to_str().unwrap()).unwrap()
}

/// The tokens of the conversation so far by the template and the tokenizer, the next answer's start
/// included.
fn ids(model: &LanguageModel, messages: &[Message]) -> Vec<u32> {
    let text = model.chat_template().unwrap().render(messages, true).unwrap();
    model.tokenizer().encode(&text, false).unwrap()
}

fn options(max_tokens: usize) -> ReplyOptions {
    GenerationOptions::default().with_max_tokens(max_tokens).into()
}

#[test]
fn a_turn_adds_to_what_was_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let model = letters(folder.path());
    let mut chat = model.chat().with_message(Message::new("system", "Be brief."));
    for turn in 1..=3 {
        let (mut pieces, mut unread) = (String::new(), 0);
        let before = chat.session().tokens().to_vec();
        let reply = chat
            .say("on", &options(9), |progress| {
                match progress {
                    Progress::Text(piece) => pieces.push_str(piece),
                    Progress::Prompt(done, total) => unread = total - done,
                    _ => {}
                }
                Continue(())
            })
            .unwrap();
        assert_eq!((&pieces, unread), (&reply.text, 0));
        assert_eq!((reply.text.as_str(), reply.content.as_str()), ("the", "the"));
        assert_eq!(reply.tokens, [b't', b'h', b'e'].map(u32::from));
        assert_eq!(chat.messages().len(), 1 + 2 * turn);
        assert_eq!(chat.messages().last(), Some(&Message::new("assistant", "the")));
        assert_eq!(reply.cached_tokens, before.len(), "what was drawn stays");
        if turn > 1 {
            assert_eq!(reply.prompt_tokens, model.prompt("on").unwrap(), "the new message alone is read");
        }
        // Other tokens than the template's and the tokenizer's, but the same text.
        let said = [before, reply.prompt_tokens].concat();
        let all = ids(&model, &chat.messages()[..2 * turn]);
        assert_eq!(said == all, turn == 1);
        let decode = |ids: &[u32]| model.tokenizer().decode(ids).unwrap();
        assert_eq!(decode(&said), decode(&all));
    }
}

#[test]
fn what_is_refused_or_stopped_was_never_said() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let mut chat = model.chat();
    chat.say("hello", &options(3), |_| Continue(())).unwrap();
    let before = chat.messages().to_vec();

    let limit = model.model().config().max_position_embeddings;
    let error = chat.say(&"hello ".repeat(limit), &options(3), |_| Continue(())).unwrap_err();
    assert!(matches!(error, Error::Model(ModelError::ContextLength { .. })), "{error}");
    let small = options(3).with_context(9);
    let error = chat.say(&"hello ".repeat(9), &small, |_| Continue(())).unwrap_err();
    assert!(matches!(error, Error::Model(ModelError::ContextLength { limit: 9, .. })), "{error}");
    assert_eq!(chat.messages(), before);

    let unread = chat.say("and?", &options(3), |_| Break(())).unwrap();
    assert!(unread.is_unread() && unread.text.is_empty(), "{unread:?}");
    assert_eq!(chat.messages(), before);
    chat.say("and?", &options(3), |_| Continue(())).unwrap();
    assert_eq!(chat.messages().len(), 4);
}

#[test]
fn turns_are_taken_back_answered_again_and_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let model = letters(folder.path());
    let mut chat = model.chat();
    assert_eq!(chat.regenerate(&options(3), |_| Continue(())).unwrap(), None);
    let said = ["hello", "and?"].map(|text| chat.say(text, &options(5), |_| Continue(())).unwrap());
    let messages = chat.messages().to_vec();

    let again = chat.regenerate(&options(5), |_| Continue(())).unwrap().unwrap();
    assert_eq!((&again.text, again.prompt_tokens.len()), (&said[1].text, 1), "greedy, and one token is read");
    assert_eq!(chat.messages(), messages);
    let stopped = chat.regenerate(&options(5), |_| Break(())).unwrap().unwrap();
    assert!(stopped.is_unread());
    assert_eq!(chat.messages(), messages, "an answer that is not begun replaces none");

    assert_eq!(chat.undo().as_deref(), Some("and?"));
    let again = chat.say("and?", &options(5), |_| Continue(())).unwrap();
    assert_eq!(again.text, said[1].text);
    assert_eq!(again.prompt_tokens.len(), 1, "the message was read before");

    assert_eq!(chat.system(), None);
    chat.set_system(Some("Be brief."));
    chat.set_system(Some("Be kind."));
    assert_eq!((chat.system(), chat.messages().len()), (Some("Be kind."), 5));
    assert!(chat.drop_oldest());
    assert_eq!(chat.messages()[1..], messages[2..]);
    assert!(!chat.drop_oldest(), "the last turn stays");
    let fresh = chat.say("hello", &options(5), |_| Continue(())).unwrap();
    let mut loaded = model.chat();
    loaded.set_messages(chat.messages()[..4].to_vec());
    let answer = loaded.answer(&options(5), |_| Continue(())).unwrap();
    assert_eq!(answer.text, fresh.text, "a conversation from a file");
    chat.clear();
    assert_eq!(chat.messages(), [Message::new("system", "Be kind.")]);
    assert_eq!((chat.undo(), chat.messages().len()), (None, 1));
}

#[test]
fn a_caller_ends_a_reply() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let options = GenerationOptions::default().with_max_tokens(50);
    let (mut pieces, whole) = (0, model.stream("hello", &options, |_| Continue(())).unwrap());
    let cut = model
        .stream("hello", &options, |_| {
            pieces += 1;
            Break(())
        })
        .unwrap();
    assert!(cut.tokens.len() < whole.tokens.len(), "{cut:?}");
    assert_eq!(cut.finish, lowbit::Finish::Interrupted);
    assert!(
        pieces <= 2 && whole.text.starts_with(cut.text.trim_end_matches('\u{fffd}')),
        "{cut:?} {whole:?}"
    );
}

/// Answers anything with a thought and a call, in tokens that stand for more than a byte.
fn thinker<'a>(template: &'a str) -> Bigram<'a> {
    Bigram {
        added: &[
            "</s>",
            "<u>",
            "</u>",
            "+<think>",
            "+</think>",
            "+hm",
            "+<tool_call>",
            "+</tool_call>",
            "+{\"name\":\"f\"}",
        ],
        next: &[
            ("</u>", "<think>"),
            ("<think>", "hm"),
            ("hm", "</think>"),
            ("</think>", "A"),
            ("A", "<tool_call>"),
            ("<tool_call>", "{\"name\":\"f\"}"),
            ("{\"name\":\"f\"}", "</tool_call>"),
        ],
        template,
        ..Bigram::default()
    }
}

#[test]
fn a_template_drops_or_keeps_what_was_thought() {
    let turn = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}</u>{% else %}\
                {% if keep and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
                {% for call in m.tool_calls %}<tool_call>{\"name\":\"{{ call.function.name }}\"}</tool_call>{% endfor %}</s>\
                {% endif %}{% endfor %}";
    for keep in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        thinker(&format!("{{% set keep = {keep} %}}{turn}")).write(folder.path());
        let model = LanguageModel::open(folder.path().to_str().unwrap()).unwrap();
        let mut chat = model.chat();
        let mut parts = vec![];
        let first = chat
            .say("one", &options(50), |progress| {
                if let Progress::Event(event) = progress {
                    parts.push(event.clone());
                }
                Continue(())
            })
            .unwrap();
        assert_eq!(first.text, "<think>hm</think>A<tool_call>{\"name\":\"f\"}</tool_call>");
        assert_eq!((first.reasoning.as_str(), first.content.as_str()), ("hm", "A"));
        let call = &first.tool_calls[0];
        assert_eq!(
            (call.name.as_str(), call.arguments.as_str(), call.id.as_deref()),
            ("f", "{}", Some("call00001"))
        );
        assert_eq!(parts.len(), 3, "{parts:?}");
        let message = &chat.messages()[1];
        assert_eq!(message.reasoning_content.as_deref(), Some("hm"));
        assert_eq!((message.tool_calls.len(), message.tool_calls[0].name()), (1, "f"));

        let second = chat.say("two", &options(50), |_| Continue(())).unwrap();
        let read = first.prompt_tokens.len();
        let what_was_drawn = read + first.tokens.len() + 1;
        assert_eq!(second.cached_tokens, if keep { what_was_drawn } else { read }, "keep {keep}");
        assert_eq!(second.tool_calls[0].id.as_deref(), Some("call00002"));
        let said = [&chat.session().tokens()[..second.cached_tokens], &second.prompt_tokens[..]].concat();
        assert_eq!(said, ids(&model, &chat.messages()[..3]));
    }
}

/// DeepSeek's templates add arguments to a text, and leave out calls beside a content; gpt-oss's
/// takes one of reasoning and content.
#[test]
fn a_template_that_refuses_calls_gets_them_as_it_takes_them() {
    let text = "{{ '<tool_call>' + call.function.arguments + 'f' }}";
    let either = "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}f";
    let silent = "{% if m.content is none %}f{% endif %}";
    for (call, answer, want) in [
        (text, "A", "one|A<tool_call>{}f|two|"),
        (either, "A", "one|Af|two|"),
        (silent, "", "one|Nonef|two|"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let calls = format!("{{% for call in m.tool_calls %}}{call}{{% endfor %}}");
        let template = format!("{{% for m in messages %}}{{{{ m.content }}}}{calls}</u>{{% endfor %}}");
        let thinker = thinker(&template);
        let mut next = thinker.next.to_vec();
        if answer.is_empty() {
            next[3] = ("</think>", "<tool_call>");
        }
        Bigram { next: &next, ..thinker }.write(folder.path());
        let model = LanguageModel::open(folder.path().to_str().unwrap()).unwrap();
        let mut chat = model.chat();
        let first = chat.say("one", &options(50), |_| Continue(())).unwrap();
        assert_eq!((first.content.as_str(), first.tool_calls.len()), (answer, 1));
        let reply = chat.say("two", &options(50), |_| Continue(())).unwrap();
        let said = [&chat.session().tokens()[..reply.cached_tokens], &reply.prompt_tokens[..]].concat();
        assert_eq!(model.tokenizer().decode(&said).unwrap().replace("</u>", "|"), want);
    }
}

/// The demo has gated delta nets, whose states do not go back by themselves.
#[test]
fn a_model_with_delta_nets_goes_back_to_its_marks() {
    let demo = LanguageModel::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo-4bit")).unwrap();
    // It opens the answer with what answers that were given do not have.
    let template = "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}\n\
                    assistant: Well, {% endif %}";
    let template = ChatTemplate::new(template, "template".as_ref()).unwrap();
    let mut chat = Chat::new(demo.model(), demo.tokenizer(), Some(&template));
    let said = ["What is a vector?", "And a slice?", "And a map?"]
        .map(|text| chat.say(text, &options(6), |_| Continue(())).unwrap());
    for (turn, reply) in said.iter().enumerate().skip(1) {
        let before = &said[turn - 1];
        let (start, end) = (before.cached_tokens, before.cached_tokens + before.prompt_tokens.len());
        assert!(
            (start + 1..end).contains(&reply.cached_tokens),
            "turn {turn}: {start}, {end}, {}",
            reply.cached_tokens
        );
    }
    for _ in 0..2 {
        let again = chat.regenerate(&options(6), |_| Continue(())).unwrap().unwrap();
        assert_eq!(again.text, said[2].text);
        assert!(again.prompt_tokens.len() < said[2].prompt_tokens.len());
    }
    chat.undo();
    chat.undo();
    let again = chat.say("And a slice?", &options(6), |_| Continue(())).unwrap();
    assert_eq!(again.text, said[1].text);
    assert!(again.cached_tokens >= said[1].cached_tokens);
    let fresh = Chat::new(demo.model(), demo.tokenizer(), Some(&template));
    let mut fresh = fresh.with_message(chat.messages()[0].clone()).with_message(chat.messages()[1].clone());
    let reply = fresh.say("And a slice?", &options(6), |_| Continue(())).unwrap();
    assert_eq!((reply.text, reply.cached_tokens), (said[1].text.clone(), 0));
}

#[test]
fn what_is_no_model_is_an_error_of_files() {
    for name in ["no/such/path/at/all", "../../tests"] {
        let error = LanguageModel::open(name).unwrap_err();
        // A name that is no path is looked for on the hub.
        assert!(matches!(error, Error::File(_) | Error::Hub(_)), "{error:?}");
        assert!(error.to_string().contains(name), "{error}");
    }
}
