/// A file that a model needs besides its configuration and weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Companion {
    /// Its name, or its path from the checkpoint's directory:
    /// `additional_chat_templates/tool_use.jinja`.
    pub name: String,
    /// Its content.
    pub bytes: Vec<u8>,
}
