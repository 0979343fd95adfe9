//! The places in which NVIDIA's run-time compiler and CUDA's headers are looked for.

use crate::cache::Environment;
use lowbit::CudaOptions;
use std::path::{Path, PathBuf};

/// This machine's options for CUDA.
pub fn options() -> CudaOptions {
    let environment = Environment::of_process();
    let options = CudaOptions::new(places(&environment));
    match environment.cache() {
        Some(cache) => options.with_cache(cache),
        None => options,
    }
}

/// The places, the first to look at first: the toolkit that the environment names and the usual
/// ones; Python's packages of the active environment, of conda, of the python3 on the path and of
/// the user; what `lowbit setup cuda` brought; the distribution's packages.
fn places(environment: &Environment<'_>) -> Vec<PathBuf> {
    let named = |name| environment.folder(name);
    let mut places: Vec<_> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(named).collect();
    places.extend(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    let python = named("PATH").and_then(|path| {
        let mut folders = std::env::split_paths(&path);
        folders.find_map(|folder| python_of(&folder))
    });
    let conda = named("CONDA_PREFIX");
    places.extend(conda.clone());
    let user = environment.below_home(".local");
    for prefix in [named("VIRTUAL_ENV"), conda, python, user].into_iter().flatten() {
        places.extend(packages(&prefix));
    }
    places.extend(environment.cache().iter().flat_map(|cache| brought(cache)));
    places.push("/usr".into());
    let mut seen = std::collections::HashSet::new();
    places.retain(|place| seen.insert(place.clone()));
    places
}

/// The prefix of the Python whose program is in `folder`, if one is: on Windows that folder itself,
/// or the one that `Scripts` is in.
fn python_of(folder: &Path) -> Option<PathBuf> {
    let program = if cfg!(windows) { "python.exe" } else { "python3" };
    let is_prefix = cfg!(windows) && !folder.ends_with("Scripts");
    let prefix = if is_prefix { folder } else { folder.parent()? };
    folder.join(program).is_file().then(|| prefix.to_path_buf())
}

/// The folders of Python's packages below `prefix`: `lib/python3.12/site-packages`, or Debian's
/// `dist-packages`, or Windows' `Lib/site-packages`.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let lib = prefix.join("lib");
    let pythons = names(&lib).into_iter().filter(|name| name.starts_with("python3"));
    let folders =
        pythons.flat_map(|name| ["site-packages", "dist-packages"].map(|kind| lib.join(&name).join(kind)));
    folders.chain([prefix.join("Lib/site-packages")]).filter(|folder| folder.is_dir()).collect()
}

/// The name that `lowbit setup cuda` gives the folder of this version in the cache.
pub fn toolkit_name((major, minor): (u32, u32)) -> String {
    format!("cuda-{major}.{minor}")
}

/// The folders that `lowbit setup cuda` brought, the newest first.
fn brought(cache: &Path) -> Vec<PathBuf> {
    let version = |name: &String| {
        let (major, minor) = name.strip_prefix("cuda-")?.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let mut versions: Vec<(u32, u32)> = names(cache).iter().filter_map(version).collect();
    versions.sort_unstable();
    versions.into_iter().rev().map(|version| cache.join(toolkit_name(version))).collect()
}

/// The names in a folder, sorted; none if it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_their_order() {
        let root = tempfile::tempdir().unwrap();
        let path = |below: &str| root.path().join(below);
        for folder in [
            "venv/lib/python3.12/site-packages",
            "conda/lib/python3.11/site-packages",
            "python/bin",
            "python/lib/python3.10/dist-packages",
            "python/lib/python2.7/site-packages",
            "home/.local/lib/python3.9/site-packages",
            "home/.local/Lib/site-packages",
            "home/.cache/lowbit/cuda-12.9",
            "home/.cache/lowbit/cuda-13.0",
            "home/.cache/lowbit/cuda-13.10",
            "home/.cache/lowbit/cuda-13.2.lowbit-partial",
        ] {
            std::fs::create_dir_all(path(folder)).unwrap();
        }
        std::fs::write(path("python/bin/python3"), "").unwrap();
        let variables = [
            ("CUDA_HOME", path("toolkit")),
            ("VIRTUAL_ENV", path("venv")),
            ("CONDA_PREFIX", path("conda")),
            ("PATH", std::env::join_paths([path("nothing"), path("python/bin")]).unwrap().into()),
        ];
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.clone().into_os_string())
        };
        let want = [
            path("toolkit"),
            "/usr/local/cuda".into(),
            "/opt/cuda".into(),
            path("conda"),
            path("venv/lib/python3.12/site-packages"),
            path("conda/lib/python3.11/site-packages"),
            path("python/lib/python3.10/dist-packages"),
            path("home/.local/lib/python3.9/site-packages"),
            path("home/.local/Lib/site-packages"),
            path("home/.cache/lowbit/cuda-13.10"),
            path("home/.cache/lowbit/cuda-13.0"),
            path("home/.cache/lowbit/cuda-12.9"),
            "/usr".into(),
        ];
        let environment = Environment { variable: &variable, home: Some(path("home")) };
        assert_eq!(places(&environment), want);
        assert_eq!(
            places(&Environment { variable: &|_| None, home: None }),
            ["/usr/local/cuda", "/opt/cuda", "/usr"].map(PathBuf::from)
        );
    }
}
