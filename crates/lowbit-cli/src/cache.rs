//! Folders for compiled kernels and for the lines typed in chats.

use std::ffi::OsString;
use std::path::PathBuf;

/// Folders that the process' environment names.
pub struct Environment<'a> {
    /// Reads a variable.
    pub variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// The user's own folder: `HOME`, or what the system knows without it.
    pub home: Option<PathBuf>,
}

impl Environment<'_> {
    /// The environment of this process.
    pub fn of_process() -> Self {
        Self { variable: &|name| std::env::var_os(name), home: std::env::home_dir() }
    }

    /// The folder of compiled kernels, and of what `lowbit setup` brings.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub fn cache(&self) -> Option<PathBuf> {
        Some(self.folder("XDG_CACHE_HOME").or_else(|| self.below_home(".cache"))?.join("lowbit"))
    }

    /// The folder of what was typed.
    pub fn state(&self) -> Option<PathBuf> {
        Some(self.folder("XDG_STATE_HOME").or_else(|| self.below_home(".local/state"))?.join("lowbit"))
    }

    /// The folder that a variable names.
    pub fn folder(&self, name: &str) -> Option<PathBuf> {
        (self.variable)(name).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// A folder of the user's own one.
    pub fn below_home(&self, folder: &str) -> Option<PathBuf> {
        self.home.as_ref().filter(|home| !home.as_os_str().is_empty()).map(|home| home.join(folder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of an environment with these variables and this home.
    fn found(
        folder: fn(&Environment<'_>) -> Option<PathBuf>,
        set: &[(&str, &str)],
        home: Option<&str>,
    ) -> Option<PathBuf> {
        let variable = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        folder(&Environment { variable: &variable, home: home.map(PathBuf::from) })
    }

    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    #[test]
    fn the_cache_is_where_the_environment_says() {
        let cache = |set: &[(&str, &str)], home| found(|environment| environment.cache(), set, home);
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/c")], Some("/h")), Some("/c/lowbit".into()));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "")], Some("/h")), Some("/h/.cache/lowbit".into()));
        assert_eq!(cache(&[], None), None);
        assert_eq!(cache(&[], Some("")), None);
    }

    #[test]
    fn what_is_typed_is_where_the_environment_says() {
        let state = |set: &[(&str, &str)], home| found(|environment| environment.state(), set, home);
        assert_eq!(state(&[("XDG_STATE_HOME", "/s")], Some("/h")), Some("/s/lowbit".into()));
        assert_eq!(state(&[], Some("/h")), Some("/h/.local/state/lowbit".into()));
        assert_eq!(state(&[], None), None);
    }
}
