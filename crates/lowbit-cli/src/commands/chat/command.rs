//! Commands that can be typed instead of a message.

/// A line that begins with a slash and a word.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Command<'a> {
    Help,
    Exit,
    Clear,
    Regenerate,
    Undo,
    /// Shows the system message.
    ShowSystem,
    /// Sets the system message; `None` removes it.
    System(Option<&'a str>),
    Read(&'a str),
    Save(&'a str),
    Load(&'a str),
}

/// Shown by `/help`.
pub const HELP: &str = "\
/help            this list
/clear           forget the conversation, but not the system message
/regen           answer the last message again
/undo            take the last message and its answer back
/system [TEXT]   show the system message, or set it; - removes it
/read FILE       put a text file before the next message
/save FILE       write the conversation to a file
/load FILE       go on with the conversation of a file
/exit            end the chat, as Ctrl-D does
A \\ at the end of a line, or Alt-Enter, continues the message on the next line. A message that begins with / is typed with
a space before it.";

impl<'a> Command<'a> {
    /// The command that `line` is; `None` for a message.
    pub fn parse(line: &'a str) -> Option<Result<Self, String>> {
        let rest = line.strip_prefix('/')?;
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let (name, argument) = (&rest[..end], rest[end..].trim());
        // `/etc/passwd` is no command.
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_lowercase()) {
            return None;
        }
        Some(Self::named(name, argument))
    }

    fn named(name: &str, argument: &'a str) -> Result<Self, String> {
        let alone = |command| match argument {
            "" => Ok(command),
            _ => Err(format!("/{name} takes nothing after it")),
        };
        let file = |command: fn(&'a str) -> Self| match argument {
            "" => Err(format!("/{name} needs a file's name")),
            _ => Ok(command(argument)),
        };
        match name {
            "help" => alone(Self::Help),
            "exit" | "quit" | "bye" => alone(Self::Exit),
            "clear" => alone(Self::Clear),
            "regen" => alone(Self::Regenerate),
            "undo" => alone(Self::Undo),
            "system" => Ok(match argument {
                "" => Self::ShowSystem,
                "-" => Self::System(None),
                text => Self::System(Some(text)),
            }),
            "read" => file(Self::Read),
            "save" => file(Self::Save),
            "load" => file(Self::Load),
            _ => Err(format!(
                "/{name} is no command: /help lists them, and a space before it makes it a message"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages_are_told_apart() {
        let of = Command::parse;
        assert_eq!(of("/help"), Some(Ok(Command::Help)));
        assert_eq!(of("/bye "), Some(Ok(Command::Exit)));
        assert_eq!(of("/system"), Some(Ok(Command::ShowSystem)));
        assert_eq!(of("/system -"), Some(Ok(Command::System(None))));
        assert_eq!(of("/system Be  brief.\nVery."), Some(Ok(Command::System(Some("Be  brief.\nVery.")))));
        assert_eq!(of("/read my file.txt "), Some(Ok(Command::Read("my file.txt"))));
        assert_eq!(of("/undo 2"), Some(Err("/undo takes nothing after it".into())));
        assert_eq!(of("/save"), Some(Err("/save needs a file's name".into())));
        assert!(of("/clean").unwrap().unwrap_err().starts_with("/clean is no command"));
        for message in ["", "hello", " /help", "/", "//", "/etc/passwd holds what?", "/Help", "/5"] {
            assert_eq!(of(message), None, "{message:?}");
        }
    }
}
