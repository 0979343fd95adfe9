//! Conversations with a tiny model that has a chat template.

use lowbit::{Error, GenerationOptions, LanguageModel, Message, ModelError};
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

/// What the template and the tokenizer make of the conversation so far, the next answer's start included.
fn ids(model: &LanguageModel, messages: &[Message]) -> Vec<u32> {
    let text = model.chat_template().unwrap().render(messages, true).unwrap();
    model.tokenizer().encode(&text, false).unwrap()
}

#[test]
fn a_turn_adds_to_what_the_session_has_read() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let options = GenerationOptions::default().with_max_tokens(3);
    let mut chat = model.chat().with_message(Message::new("system", "Be brief."));
    for turn in 1..=2 {
        let mut pieces = String::new();
        let reply = chat
            .say("hello", &options, |piece| {
                pieces.push_str(piece);
                Continue(())
            })
            .unwrap();
        assert_eq!(pieces, reply.text);
        assert_eq!(chat.messages().len(), 1 + 2 * turn);
        assert_eq!(chat.messages().last(), Some(&Message::new("assistant", &reply.text)));
    }
    assert_eq!(model.prompt("hello").unwrap(), ids(&model, &chat.messages()[1..2]));
    let (next, read) = (chat.ask("and?").unwrap(), chat.session().tokens().to_vec());
    let all = ids(&model, chat.messages());
    assert_eq!([read, next].concat(), all, "what was read and what is to be run are the whole conversation");
}

#[test]
fn what_is_refused_or_taken_back_was_never_said() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let options = GenerationOptions::default().with_max_tokens(3);
    let mut chat = model.chat();
    chat.say("hello", &options, |_| Continue(())).unwrap();
    let before = chat.messages().to_vec();

    let limit = model.model().config().max_position_embeddings;
    let error = chat.say(&"hello ".repeat(limit), &options, |_| Continue(())).unwrap_err();
    assert!(matches!(error, Error::Model(ModelError::ContextLength { .. })), "{error}");
    assert_eq!(chat.messages(), before);

    let tokens = chat.ask("and?").unwrap();
    assert!(!tokens.is_empty());
    chat.take_back();
    assert_eq!(chat.messages(), before);
    chat.say("and?", &options, |_| Continue(())).unwrap();
    assert_eq!(chat.messages().len(), 4);
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

#[test]
fn what_is_no_model_is_an_error_of_files() {
    for name in ["no/such/path/at/all", "../../tests"] {
        let error = LanguageModel::open(name).unwrap_err();
        assert!(matches!(error, Error::File(_)), "{error:?}");
        assert!(error.to_string().contains(name), "{error}");
    }
}
