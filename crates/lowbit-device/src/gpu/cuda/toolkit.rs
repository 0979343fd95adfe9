//! Finds NVIDIA's run-time compiler and CUDA's headers, and chooses those that a driver can use.

use std::path::{Path, PathBuf};

/// The files that CUDA uses: the compiler and headers, and the cache of kernels. The program
/// decides; nothing is read from the environment.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Keeps compiled kernels between runs.
    pub cache: Option<PathBuf>,
    /// The places in which NVIDIA's compiler (NVRTC) and CUDA's headers are looked for, in this
    /// order: folders of the CUDA toolkit, of conda, and of Python's packages (`site-packages`).
    /// They need not exist.
    pub places: Vec<PathBuf>,
    /// An older compute capability, as in 80 for 8.0, whose kernels the device runs instead of its
    /// own, to test and time them. They are chosen and written as for the older device, and
    /// compiled to machine code of this one, since it runs no other.
    pub architecture: Option<u32>,
}

impl CudaOptions {
    /// With NVRTC and headers from the first usable one of `places`, and without a cache.
    pub fn new(places: impl IntoIterator<Item: Into<PathBuf>>) -> Self {
        Self { places: places.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// With the kernels of an older compute [capability](Self::architecture), as in 80.
    #[must_use]
    pub fn with_architecture(self, capability: Option<u32>) -> Self {
        Self { architecture: capability, ..self }
    }

    /// With compiled kernels kept in the folder `cache`.
    #[must_use]
    pub fn with_cache(self, cache: impl Into<PathBuf>) -> Self {
        Self { cache: Some(cache.into()), ..self }
    }
}

/// The remedy for missing files.
const REMEDY: &str = "`lowbit setup cuda` brings NVRTC and the headers; so do NVIDIA's CUDA toolkit, and pip's \
                      nvidia-cuda-nvrtc and nvidia-cuda-runtime (nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12 \
                      for CUDA 12)";

/// The toolkit's folders of libraries and of headers, and Debian's of libraries, for the processor
/// of this program.
const PLATFORM: [&str; 3] = if cfg!(target_arch = "aarch64") {
    ["targets/sbsa-linux/lib", "targets/sbsa-linux/include", "lib/aarch64-linux-gnu"]
} else {
    ["targets/x86_64-linux/lib", "targets/x86_64-linux/include", "lib/x86_64-linux-gnu"]
};

/// The names that a system's NVRTC has.
pub(super) struct Names {
    /// Names of the library, the newest first: in a folder, or for the loader to find.
    pub libraries: &'static [&'static str],
    /// The start of the name of the library that NVRTC opens itself.
    builtins: &'static str,
    /// The folders of libraries in toolkits and in Python's packages.
    folders: &'static [&'static str],
}

const LINUX: Names = Names {
    libraries: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    builtins: "libnvrtc-builtins.so.",
    folders: &["lib64", "lib", PLATFORM[0], PLATFORM[2], "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
};

/// Every minor version has the name of the first.
const WINDOWS: Names = Names {
    libraries: &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
    builtins: "nvrtc-builtins64_",
    folders: &["bin/x64", "bin", "nvidia/cu13/bin/x86_64", "nvidia/cuda_nvrtc/bin"],
};

/// The names of this system.
pub(super) const NAMES: Names = if cfg!(windows) { WINDOWS } else { LINUX };

impl Names {
    /// True for `libnvrtc-builtins.so.13.0`, and not for `libnvrtc-builtins.alt.so.13.0`.
    pub fn is_builtins(&self, name: &str) -> bool {
        name.starts_with(self.builtins) && !name.contains(".alt.")
    }
}

/// The major version of CUDA that a library's name tells: `libnvrtc.so.13`, `nvrtc64_130_0.dll`.
pub(super) fn major(library: &Path) -> Option<u32> {
    let name = library.file_name()?.to_str()?;
    if let Some(rest) = name.strip_prefix("nvrtc64_") {
        return Some(rest.split('_').next()?.parse::<u32>().ok()? / 10);
    }
    library.extension()?.to_str()?.parse().ok()
}

/// Headers of one version of CUDA.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Headers {
    /// The folder that has `cuda_fp16.h`.
    pub folder: PathBuf,
    /// Major and minor.
    pub version: (u32, u32),
    /// The folder that has `nv/target`, which `cuda_fp16.h` includes. Python's
    /// `nvidia-cuda-runtime` lacks it.
    pub targets: Option<PathBuf>,
}

/// Everything usable in some places, in the order of the places.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub libraries: Vec<PathBuf>,
    pub headers: Vec<Headers>,
    places: Vec<PathBuf>,
}

impl Found {
    /// Looks for files alone. `loader_has` says whether the loader finds a library by name, and is
    /// only asked where no place has one.
    ///
    /// # Errors
    /// The missing library, the places that were searched, and what brings it.
    pub fn look(places: &[PathBuf], loader_has: impl Fn(&str) -> bool) -> Result<Self, String> {
        Self::look_for(&NAMES, places, loader_has)
    }

    /// [`Self::look`] for a system's names.
    fn look_for(
        names: &Names,
        places: &[PathBuf],
        loader_has: impl Fn(&str) -> bool,
    ) -> Result<Self, String> {
        let folders = |inner: &[&str]| -> Vec<PathBuf> {
            places.iter().flat_map(|place| inner.iter().map(|inner| place.join(inner))).collect()
        };
        let mut libraries: Vec<PathBuf> = folders(names.folders)
            .iter()
            .flat_map(|folder| names.libraries.iter().map(|name| folder.join(name)))
            .filter(|path| path.is_file())
            .collect();
        let mut same = vec![];
        // `lib64` is often a link to `lib`, and `libnvrtc.so` to the others.
        libraries.retain(|path| {
            let file = path.canonicalize().unwrap_or_else(|_| path.clone());
            let is_new = !same.contains(&file);
            same.push(file);
            is_new
        });
        let headers =
            folders(&["include", PLATFORM[1], "nvidia/cu13/include", "nvidia/cuda_runtime/include"]);
        let headers = headers.iter().filter_map(|folder| Headers::at(folder)).collect();
        let found = Self { libraries, headers, places: places.to_vec() };
        let has_library = !found.libraries.is_empty() || names.libraries.iter().any(|name| loader_has(name));
        match (!has_library, found.headers.is_empty()) {
            (false, false) => Ok(found),
            (true, true) => {
                Err(found.missing("NVIDIA's compiler (libnvrtc) and CUDA's headers (cuda_fp16.h) are"))
            }
            (true, false) => Err(found.missing("NVIDIA's compiler (libnvrtc) is")),
            (false, true) => Err(found.missing("CUDA's headers (cuda_fp16.h) are")),
        }
    }

    fn missing(&self, what: &str) -> String {
        let places: Vec<_> = self.places.iter().map(|place| place.display().to_string()).collect();
        format!("{what} in none of [{}], and not on the loader's path. {REMEDY}", places.join(", "))
    }

    /// The headers for an NVRTC of `version`: of the same version, or else of the same major one.
    ///
    /// # Errors
    /// Both versions.
    pub fn headers_for(&self, version: (u32, u32)) -> Result<&Headers, String> {
        let same = self.headers.iter().find(|headers| headers.version == version);
        let near = || self.headers.iter().find(|headers| headers.version.0 == version.0);
        same.or_else(near).ok_or_else(|| {
            let others: Vec<_> = self
                .headers
                .iter()
                .map(|Headers { version: (major, minor), folder, .. }| {
                    format!("{major}.{minor} in {}", folder.display())
                })
                .collect();
            format!("it wants headers of CUDA {}, and there are those of {}", version.0, others.join(", "))
        })
    }

    /// No library serves: `refusals` has the reason for each.
    pub fn refused(&self, refusals: &[String]) -> String {
        format!("no NVRTC serves this device: {}. {REMEDY}", refusals.join("; "))
    }
}

impl Headers {
    /// The headers in `folder`, if they are there.
    fn at(folder: &Path) -> Option<Self> {
        if !folder.join("cuda_fp16.h").is_file() {
            return None;
        }
        let version = version(&std::fs::read_to_string(folder.join("cuda.h")).ok()?)?;
        // The toolkit's, `nvidia-cuda-cccl`'s for CUDA 13, and `nvidia-cuda-cccl-cu12`'s.
        let targets = [folder.to_path_buf(), folder.join("cccl"), folder.join("../../cuda_cccl/include")];
        let targets = targets.into_iter().find(|folder| folder.join("nv/target").is_file());
        Some(Self { folder: folder.into(), version, targets })
    }
}

/// Major and minor version of CUDA that a `cuda.h` is of: it defines 13000 for 13.0.
fn version(header: &str) -> Option<(u32, u32)> {
    let line = header.lines().find_map(|line| line.trim().strip_prefix("#define CUDA_VERSION"))?;
    Some(split(line.trim().parse().ok()?))
}

/// Major and minor of what CUDA writes as 12080.
pub(super) fn split(version: u32) -> (u32, u32) {
    (version / 1000, version % 1000 / 10)
}

/// Our own `nv/target`, for places that have none: CUDA's headers choose code by it. `capability`
/// is the device's, as in
/// 90. Host code is never compiled here.
pub(super) fn targets(capability: u32) -> String {
    const CAPABILITIES: [u32; 22] =
        [35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];
    let mut text = String::from(
        "#pragma once\n\
         #define NV_TAKE_FROM_PARENTHESES(...) __VA_ARGS__\n\
         #define NV_TAKE_0(yes, no) NV_TAKE_FROM_PARENTHESES no\n\
         #define NV_TAKE_1(yes, no) NV_TAKE_FROM_PARENTHESES yes\n\
         #define NV_TAKE(condition, yes, no) NV_TAKE_##condition(yes, no)\n\
         #define NV_TAKE_IF(condition, yes, no) NV_TAKE(condition, yes, no)\n\
         #define NV_IF_ELSE_TARGET(condition, yes, no) NV_TAKE_IF(condition, yes, no)\n\
         #define NV_IF_TARGET(condition, yes, ...) NV_TAKE_IF(condition, yes, (__VA_ARGS__))\n\
         #define NV_IS_HOST 0\n#define NV_IS_DEVICE 1\n#define NV_ANY_TARGET 1\n#define NV_NO_TARGET 0\n",
    );
    for sm in CAPABILITIES {
        let (least, exactly) = (u32::from(capability >= sm), u32::from(capability == sm));
        text += &format!("#define NV_PROVIDES_SM_{sm} {least}\n#define NV_IS_EXACTLY_SM_{sm} {exactly}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder with empty files, and a `cuda.h` of a version.
    fn fill(root: &Path, files: &[&str], header: Option<(&str, u32)>) {
        for file in files {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), "").unwrap();
        }
        if let Some((folder, version)) = header {
            let text = format!("#ifndef X\n#define CUDA_VERSION {version}\n#endif\n");
            fs::write(root.join(folder).join("cuda.h"), text).unwrap();
        }
    }

    fn temporary(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("lowbit-toolkit-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn every_layout_is_found() {
        let root = temporary("layouts");
        let (toolkit, cu13, cu12, pip) =
            (root.join("toolkit"), root.join("cu13"), root.join("cu12"), root.join("pip"));
        fill(
            &toolkit,
            &["lib64/libnvrtc.so.12", "include/cuda_fp16.h", "include/nv/target"],
            Some(("include", 12040)),
        );
        let headers = "nvidia/cu13/include/cuda_fp16.h";
        fill(&cu13, &["nvidia/cu13/lib/libnvrtc.so.13", headers], Some(("nvidia/cu13/include", 13000)));
        fill(
            &cu12,
            &[
                "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
                "nvidia/cuda_runtime/include/cuda_fp16.h",
                "nvidia/cuda_cccl/include/nv/target",
            ],
            Some(("nvidia/cuda_runtime/include", 12090)),
        );
        let found = Found::look(&[toolkit.clone(), cu13.clone(), cu12.clone(), pip], |_| false).unwrap();
        let libraries = [
            toolkit.join("lib64/libnvrtc.so.12"),
            cu13.join("nvidia/cu13/lib/libnvrtc.so.13"),
            cu12.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        ];
        assert_eq!(found.libraries, libraries);
        let targets = |version| {
            let headers = found.headers_for(version).unwrap();
            (headers.version, headers.targets.is_some())
        };
        assert_eq!(targets((13, 0)), ((13, 0), false));
        assert_eq!(targets((12, 9)), ((12, 9), true));
        // The first of the same major version.
        assert_eq!(targets((12, 2)), ((12, 4), true));
        let message = found.headers_for((14, 1)).unwrap_err();
        assert!(
            message.starts_with("it wants headers of CUDA 14, and there are those of 12.4 in "),
            "{message}"
        );
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_layouts_of_windows_are_found() {
        let root = temporary("windows");
        let (toolkit, pip) = (root.join("toolkit"), root.join("pip"));
        fill(&toolkit, &["bin/nvrtc64_120_0.dll", "include/cuda_fp16.h"], Some(("include", 12090)));
        fill(
            &pip,
            &["nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll", "nvidia/cu13/include/cuda_fp16.h"],
            Some(("nvidia/cu13/include", 13000)),
        );
        let found = Found::look_for(&WINDOWS, &[toolkit.clone(), pip.clone()], |_| false).unwrap();
        let libraries =
            [toolkit.join("bin/nvrtc64_120_0.dll"), pip.join("nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll")];
        assert_eq!(found.libraries, libraries);
        assert_eq!(libraries.each_ref().map(|path| major(path)), [Some(12), Some(13)]);
        assert_eq!(["libnvrtc.so.13", "libnvrtc.so"].map(|name| major(Path::new(name))), [Some(13), None]);
        assert!(WINDOWS.is_builtins("nvrtc-builtins64_130.dll") && !WINDOWS.is_builtins("nvrtc64_130_0.dll"));
        assert!(LINUX.is_builtins("libnvrtc-builtins.so.13.0"));
        assert!(!LINUX.is_builtins("libnvrtc-builtins.alt.so.13.0"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_missing_is_named_with_its_remedy() {
        let root = temporary("missing");
        let empty = root.join("empty");
        let look = |places: &[PathBuf], loader: bool| Found::look(places, |_| loader).unwrap_err();
        let place = empty.display();
        for (message, what) in [
            (
                look(std::slice::from_ref(&empty), false),
                "NVIDIA's compiler (libnvrtc) and CUDA's headers (cuda_fp16.h) are",
            ),
            (look(std::slice::from_ref(&empty), true), "CUDA's headers (cuda_fp16.h) are"),
        ] {
            assert_eq!(
                message,
                format!("{what} in none of [{place}], and not on the loader's path. {REMEDY}")
            );
        }
        let headers = root.join("headers");
        fill(&headers, &["include/cuda_fp16.h"], Some(("include", 13000)));
        let message = look(std::slice::from_ref(&headers), false);
        assert!(message.starts_with("NVIDIA's compiler (libnvrtc) is in none of ["), "{message}");
        assert!(message.contains("`lowbit setup cuda`"), "{message}");
        assert!(Found::look(&[headers], |name| name == NAMES.libraries[1]).is_ok());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn targets_say_what_a_device_provides() {
        let text = targets(86);
        for line in [
            "#define NV_PROVIDES_SM_80 1\n",
            "#define NV_PROVIDES_SM_86 1\n",
            "#define NV_IS_EXACTLY_SM_86 1\n",
            "#define NV_PROVIDES_SM_90 0\n",
            "#define NV_IS_EXACTLY_SM_80 0\n",
        ] {
            assert!(text.contains(line), "{line}");
        }
    }
}
