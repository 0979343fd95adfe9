/// The translation of another program's flag or command.
#[derive(Clone, Copy, Debug)]
pub enum Instead {
    /// The same under another name.
    Is(&'static str),
    /// This flag, with a value that begins with these letters and ends with the typed one.
    With(&'static str, &'static str),
    /// This flag with this value. The typed one has no value of its own, or it was looked at by
    /// [`Self::Value`].
    Means(&'static str, &'static str),
    /// Nothing, for this reason; the flag has this many values.
    Nothing(usize, &'static str),
    /// As [`Self::Nothing`], for a flag that may have one of a switch's values.
    Switch(&'static str),
    /// Nothing where its value says what is done anyway, and else what to do here.
    Unless(&'static [&'static str], &'static str),
    /// Takes these flags back, which were typed before it; without them nothing, for this reason.
    Undoes(&'static [&'static str], &'static str),
    /// The translation depends on the value; `None` is for a value that a flag of ours, or none,
    /// takes.
    Value(fn(&str) -> Option<Instead>),
    /// Another command, alone.
    Runs(&'static str),
    /// Advice on what to do here.
    Say(&'static str),
}
