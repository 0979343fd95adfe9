//! Folders for compiled kernels and for the lines typed in chats.

use std::ffi::OsString;
use std::path::PathBuf;

/// Reads a variable of the environment.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The folder of compiled kernels, and of what `lowbit setup` brings.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub fn cache(environment: Environment<'_>) -> Option<PathBuf> {
    let home = || folder(environment, "HOME").map(|home| home.join(".cache"));
    Some(folder(environment, "XDG_CACHE_HOME").or_else(home)?.join("lowbit"))
}

/// The folder of what was typed.
pub fn state(environment: Environment<'_>) -> Option<PathBuf> {
    let home = || folder(environment, "HOME").map(|home| home.join(".local/state"));
    Some(folder(environment, "XDG_STATE_HOME").or_else(home)?.join("lowbit"))
}

/// The folder that a variable names.
pub fn folder(environment: Environment<'_>, name: &str) -> Option<PathBuf> {
    environment(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    #[test]
    fn the_cache_is_where_the_environment_says() {
        let cache = |set: &[(&str, &str)]| {
            let environment = |name: &str| {
                let found = set.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| OsString::from(value))
            };
            cache(&environment)
        };
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")]), Some("/c/lowbit".into()));
        assert_eq!(cache(&[("XDG_CACHE_HOME", ""), ("HOME", "/h")]), Some("/h/.cache/lowbit".into()));
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn what_is_typed_is_where_the_environment_says() {
        let state = |set: &[(&str, &str)]| {
            let found =
                |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            state(&found)
        };
        assert_eq!(state(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")]), Some("/s/lowbit".into()));
        assert_eq!(state(&[("HOME", "/h")]), Some("/h/.local/state/lowbit".into()));
        assert_eq!(state(&[]), None);
    }
}
