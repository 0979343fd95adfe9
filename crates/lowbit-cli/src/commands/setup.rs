use crate::Failure;

/// Flags of `setup`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// NVIDIA's run-time compiler and CUDA's headers, without the rest of its toolkit: from the
    /// Python package index into lowbit's cache, some 50 MB.
    Cuda(Cuda),
}

#[derive(clap::Args)]
struct Cuda {
    /// The version of CUDA, as in 13.0, of which nothing newer is taken
    /// [default: what NVIDIA's driver knows].
    #[arg(long, value_name = "MAJOR.MINOR", value_parser = version)]
    cuda_version: Option<(u32, u32)>,
    /// Another package index, with JSON answers [default: PIP_INDEX_URL, or the public one].
    #[arg(long, value_name = "URL")]
    index: Option<String>,
}

fn version(text: &str) -> Result<(u32, u32), String> {
    let parts =
        text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or_else(|| "a version such as 13.0 is wanted".into())
}

/// Brings what a device needs.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    let What::Cuda(cuda) = &arguments.what;
    cuda.run()
}

#[cfg(not(all(feature = "cuda", feature = "hub")))]
impl Cuda {
    fn run(&self) -> Result<(), Failure> {
        let _ = (self.cuda_version, &self.index);
        let missing = if cfg!(feature = "cuda") { "hub" } else { "cuda" };
        let problem = format!(
            "this program was built without {missing}: \
             `cargo install --path crates/lowbit-cli --features cuda` builds it with"
        );
        Err(problem.into())
    }
}

#[cfg(all(feature = "cuda", feature = "hub"))]
mod brought {
    use super::Cuda;
    use crate::cache::Environment;
    use crate::{Failure, cuda, out, progress};
    use lowbit::CudaOptions;
    use lowbit_files::staging::{Existing, Staged};
    use lowbit_hub::wheels::{self, Index, Wheel};
    use lowbit_kernels::gpu::{cuda_driver_version, try_cuda_compiler};
    use std::path::{Path, PathBuf};

    impl Cuda {
        pub(super) fn run(&self) -> Result<(), Failure> {
            let environment = Environment::of_process();
            let newest = match self.cuda_version {
                Some(version) => version,
                None => cuda_driver_version()?.ok_or(
                    "NVIDIA's driver is not installed (there is no libcuda), and it says which CUDA serves; \
                     --cuda-version 13.0 names one",
                )?,
            };
            let cache = environment
                .cache()
                .ok_or("there is no home folder for the cache; XDG_CACHE_HOME can name another")?;
            if is_there(&cache.join(cuda::toolkit_name(newest)), newest)? {
                return Ok(());
            }
            let index = self.index(&environment)?;
            let (compiler, headers) = choose(&index, newest)?;
            let folder = cache.join(cuda::toolkit_name(compiler.minor()));
            if is_there(&folder, newest)? {
                return Ok(());
            }
            let staged = Staged::directory(&folder, Existing::Refuse)?;
            for wheel in [&compiler, &headers] {
                bring(&index, wheel, staged.path())?;
            }
            // A toolkit that does not work does not get its name.
            check(staged.path(), newest)?;
            staged.commit()?;
            out::line!("{compiler} and {headers} are in {}, and compile kernels", folder.display())?;
            Ok(())
        }

        fn index(&self, environment: &Environment<'_>) -> Result<Index, Failure> {
            let mut index = Index::new();
            let named = (environment.variable)("PIP_INDEX_URL").filter(|value| !value.is_empty());
            let named = named.map(|value| value.into_string().map_err(|_| "PIP_INDEX_URL is not UTF-8"));
            if let Some(address) = self.index.clone().or(named.transpose()?) {
                index.address = address;
            }
            index.proxy = Index::proxy_of_environment();
            Ok(index)
        }
    }

    /// True if `folder` is there, which is then reported; an error if it does not work.
    fn is_there(folder: &Path, newest: (u32, u32)) -> Result<bool, Failure> {
        if !folder.is_dir() {
            return Ok(false);
        }
        let problem = |error| format!("{error}; remove {} to have it brought again", folder.display());
        check(folder, newest).map_err(problem)?;
        out::line!("{} is there already, and compiles kernels", folder.display())?;
        Ok(true)
    }

    /// Compiles a kernel with what is in `folder` alone.
    fn check(folder: &Path, newest: (u32, u32)) -> Result<(), String> {
        let used =
            try_cuda_compiler(&CudaOptions::new([folder]), newest).map_err(|error| error.to_string())?;
        match used.starts_with(folder) {
            true => Ok(()),
            false => Err(format!("{} does not serve, but {} does", folder.display(), used.display())),
        }
    }

    /// The newest compiler that a driver for `newest` can use, and headers of the same version. A
    /// driver knows all devices that it runs on, and so does a compiler of its version.
    fn choose(index: &Index, newest: (u32, u32)) -> Result<(Wheel, Wheel), Failure> {
        let suffix = match newest.0 {
            13.. => "",
            12 => "-cu12",
            _ => {
                let (major, minor) = newest;
                return Err(format!(
                    "the driver knows CUDA {major}.{minor}; lowbit needs one that knows 12.0 or newer"
                )
                .into());
            }
        };
        let wheels = |package: &str| index.wheels(&format!("nvidia-cuda-{package}{suffix}"));
        let (compilers, headers) = (wheels("nvrtc")?, wheels("runtime")?);
        let pair = compilers.iter().filter(|compiler| compiler.minor() <= newest).find_map(|compiler| {
            let headers = headers.iter().find(|headers| headers.minor() == compiler.minor())?;
            Some((compiler.clone(), headers.clone()))
        });
        pair.ok_or_else(|| {
            let (major, minor) = newest;
            format!("the package index has no nvidia-cuda-nvrtc{suffix} for this machine up to CUDA {major}.{minor}").into()
        })
    }

    /// Downloads a wheel and unpacks what of it is needed into `folder`.
    fn bring(index: &Index, wheel: &Wheel, folder: &Path) -> Result<(), Failure> {
        let bar = progress::bytes("download");
        bar.set_message(wheel.to_string());
        let bytes = index.download(wheel, &mut |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.bytes);
        });
        bar.finish_and_clear();
        let bytes = bytes?;
        out::note!("{wheel}: {:.1} MB, SHA-256 {}", bytes.len() as f64 / 1e6, wheel.sha256);
        wheels::unpack(&wheel.package, &bytes, folder, |name| place(&wheel.package, name))?;
        Ok(())
    }

    /// The path of a wheel's file in the folder: `nvidia/cu13/lib/libnvrtc.so.13` goes to `lib`,
    /// `nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll` to `bin`, `nvidia/cu13/include/cuda.h` to
    /// `include`.
    fn place(package: &str, name: &str) -> Option<PathBuf> {
        if name.ends_with("/License.txt") {
            return Some(format!("LICENSE-{package}.txt").into());
        }
        let (_, below) = name.strip_prefix("nvidia/")?.split_once('/')?;
        // The others are of another compiler version, and static.
        let is_library = |file: &str| {
            let is = (file.starts_with("libnvrtc") && file.contains(".so."))
                || (file.starts_with("nvrtc") && file.ends_with(".dll"));
            is && !file.contains(".alt.")
        };
        match below.split_once('/')? {
            ("include", _) => Some(below.into()),
            ("lib", file) if is_library(file) => Some(below.into()),
            ("bin", file) => {
                let file = file.rsplit('/').next().filter(|file| is_library(file))?;
                Some(Path::new("bin").join(file))
            }
            _ => None,
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn files_of_both_layouts_have_their_places() {
            let place = |name| place("p", name).map(|path| path.to_str().unwrap().to_string());
            for (name, want) in [
                ("nvidia/cu13/lib/libnvrtc.so.13", Some("lib/libnvrtc.so.13")),
                ("nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9", Some("lib/libnvrtc-builtins.so.12.9")),
                ("nvidia/cu13/lib/libnvrtc.alt.so.13", None),
                ("nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll", Some("bin/nvrtc64_130_0.dll")),
                ("nvidia/cu13/bin/x86_64/nvrtc64_130_0.alt.dll", None),
                ("nvidia/cuda_nvrtc/bin/nvrtc-builtins64_129.dll", Some("bin/nvrtc-builtins64_129.dll")),
                ("nvidia/cu13/lib/libnvrtc_static.a", None),
                ("nvidia/cuda_runtime/lib/libcudart.so.12", None),
                ("nvidia/cuda_runtime/include/cuda_fp16.h", Some("include/cuda_fp16.h")),
                (
                    "nvidia/cu13/include/cooperative_groups/details/sync.h",
                    Some("include/cooperative_groups/details/sync.h"),
                ),
                ("nvidia/__init__.py", None),
                ("nvidia_cuda_nvrtc-13.0.88.dist-info/licenses/License.txt", Some("LICENSE-p.txt")),
                ("nvidia_cuda_nvrtc-13.0.88.dist-info/RECORD", None),
            ] {
                assert_eq!(place(name), want.map(String::from), "{name}");
            }
        }
    }
}
