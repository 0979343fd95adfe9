//! Kernels that clang compiled for this processor: a shared library each, kept on the disk under a
//! hash of its source.

#![allow(unsafe_code)] // Loading code.

use super::translate::{self, Translated};
use std::ffi::{CString, OsStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The start of every kernel: Metal's library.
const HEADERS: [(&str, &str); 4] = [
    ("metal.h", include_str!("shim/metal.h")),
    ("simdgroup.h", include_str!("shim/simdgroup.h")),
    ("numbers.h", include_str!("shim/numbers.h")),
    ("threads.h", include_str!("shim/threads.h")),
];
/// The code that runs the threads of all kernels.
const RUNTIME: &str = include_str!("shim/threads.cpp");

/// MSL is C++17 without exceptions and run-time types; its literals are float, halves are rounded
/// after every operation, and products and sums may be fused within an expression.
const LANGUAGE: &[&str] = &[
    "-std=c++17",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-ffp-contract=on",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-cl-single-precision-constant",
    "-mf16c",
    "-mfma",
    "-Wno-unknown-attributes",
    "-Wno-duplicate-decl-specifier",
    "-Wno-nan-infinity-disabled",
];

/// The folder for libraries.
fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/msl"))
}

/// Clang's optimisation, unless `LOWBIT_MSL_FLAGS` says otherwise: Metal's default, with all floats
/// taken for finite.
const OPTIMISE: &str = "-O1 -ffast-math";

fn flags() -> Vec<String> {
    let flags = std::env::var("LOWBIT_MSL_FLAGS").unwrap_or_else(|_| OPTIMISE.into());
    flags.split_whitespace().map(Into::into).collect()
}

/// clang 19 or what `CLANG` names.
fn clang() -> String {
    std::env::var("CLANG").unwrap_or_else(|_| "clang++-19".into())
}

fn hash(parts: &[&dyn AsRef<[u8]>]) -> String {
    let mut hasher = DefaultHasher::new();
    parts.iter().for_each(|part| part.as_ref().hash(&mut hasher));
    format!("{:016x}", hasher.finish())
}

/// A name beside `to` that no other thread or process uses.
fn part(to: &Path) -> PathBuf {
    static PARTS: AtomicUsize = AtomicUsize::new(0);
    to.with_extension(format!("{}-{}", std::process::id(), PARTS.fetch_add(1, Ordering::Relaxed)))
}

/// Gives what was written beside `to` that name.
fn rename(part: &Path, to: &Path) -> Result<(), String> {
    std::fs::rename(part, to).map_err(|error| format!("{}: {error}", to.display()))
}

/// Runs clang.
fn run(arguments: &[&OsStr]) -> Result<(), String> {
    let clang = clang();
    let done = Command::new(&clang).args(arguments).output().map_err(|error| format!("{clang}: {error}"))?;
    if !done.status.success() {
        return Err(format!("{clang}: {}", String::from_utf8_lossy(&done.stderr)));
    }
    Ok(())
}

/// Runs clang on `arguments`, which make the file `to`: it has all of it or is not there.
fn make(to: &Path, arguments: &[&OsStr]) -> Result<(), String> {
    let part = part(to);
    run(&[arguments, &[OsStr::new("-o"), part.as_os_str()]].concat())?;
    rename(&part, to)
}

/// Other threads write the same, while clang may be reading it: it would crash if the file were
/// cut.
fn write(file: &Path, text: &str) -> Result<(), String> {
    let part = part(file);
    std::fs::write(&part, text).map_err(|error| format!("{}: {error}", part.display()))?;
    rename(&part, file)
}

fn strings(values: &[impl AsRef<OsStr>]) -> impl Iterator<Item = &OsStr> {
    values.iter().map(AsRef::as_ref)
}

/// Made once per process: Metal's library, compiled, and the code that runs threads.
#[derive(Debug)]
pub(super) struct Shim {
    folder: PathBuf,
    header: PathBuf,
    flags: Vec<String>,
    pub runtime: Library,
}

impl Shim {
    /// The shim of this process.
    pub fn get() -> Result<&'static Self, String> {
        static SHIM: OnceLock<Result<Shim, String>> = OnceLock::new();
        SHIM.get_or_init(Self::new).as_ref().map_err(Clone::clone)
    }

    fn new() -> Result<Self, String> {
        let flags = flags();
        let mut parts: Vec<&dyn AsRef<[u8]>> = vec![&RUNTIME];
        HEADERS.iter().for_each(|(_, text)| parts.push(text));
        LANGUAGE.iter().for_each(|flag| parts.push(flag));
        flags.iter().for_each(|flag| parts.push(flag));
        let clang = clang();
        parts.push(&clang);
        let folder = folder().join(hash(&parts));
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let runtime = folder.join("threads.so");
        let header = folder.join("metal.pch");
        if !header.exists() || !runtime.exists() {
            for (name, text) in HEADERS {
                write(&folder.join(name), text)?;
            }
            let source = folder.join("threads.cpp");
            write(&source, RUNTIME)?;
            let options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"];
            let arguments: Vec<_> = strings(&options).chain([source.as_os_str()]).collect();
            make(&runtime, &arguments)?;
            let source = folder.join(HEADERS[0].0);
            let options = strings(LANGUAGE).chain(strings(&flags));
            let how = ["-Wall", "-Wextra", "-Werror", "-fPIC", "-x", "c++-header"];
            let arguments: Vec<_> = options.chain(strings(&how)).chain([source.as_os_str()]).collect();
            make(&header, &arguments)?;
        }
        Ok(Self { runtime: Library::open(&runtime, RTLD_GLOBAL)?, folder, header, flags })
    }

    /// The library of `kernel`, compiled where the disk does not have it.
    pub fn compile(&self, kernel: &Translated) -> Result<Library, String> {
        let (source, library) = self.files(kernel)?;
        if !library.exists() {
            // Of the system's libraries kernels need one.
            make(&library, &self.arguments(&["-fPIC", "-shared", "-nostdlib", "-lm"], &source))?;
        }
        Library::open(&library, RTLD_LOCAL)
    }

    /// Checks that `kernel` compiles: clang reads all of it, which takes it a fifth of the time,
    /// where the disk has no library.
    pub fn check(&self, kernel: &Translated) -> Result<(), String> {
        let (source, library) = self.files(kernel)?;
        if library.exists() { Ok(()) } else { run(&self.arguments(&["-fPIC", "-fsyntax-only"], &source)) }
    }

    /// The paths of its source, which is written, and of its library.
    fn files(&self, kernel: &Translated) -> Result<(PathBuf, PathBuf), String> {
        let stem = self.folder.join(hash(&[&kernel.text]));
        let (source, library) = (stem.with_extension("cpp"), stem.with_extension("so"));
        if !source.exists() {
            write(&source, &kernel.text)?;
        }
        Ok((source, library))
    }

    fn arguments<'a>(&'a self, how: &'a [&str], source: &'a Path) -> Vec<&'a OsStr> {
        let options = strings(LANGUAGE).chain(strings(&self.flags)).chain(strings(how));
        options.chain([OsStr::new("-include-pch"), self.header.as_os_str(), source.as_os_str()]).collect()
    }
}

// Linux's.
const RTLD_LOCAL: c_int = 0;
const RTLD_GLOBAL: c_int = 0x100;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A loaded library, which stays for as long as the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library(*mut c_void);

// SAFETY: it is a name for `dlsym`, which any thread may call.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library. With `RTLD_GLOBAL`, what it has is there for those loaded after it; kernels
    /// are kept apart, for many have one name.
    fn open(path: &Path, visibility: c_int) -> Result<Self, String> {
        const RTLD_NOW: c_int = 2;
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the name ends with a zero. The library is one that clang made of our source,
        // without constructors.
        let library = unsafe { dlopen(name.as_ptr(), RTLD_NOW | visibility) };
        if library.is_null() {
            Err(format!("{} cannot be loaded", path.display()))
        } else {
            Ok(Self(library))
        }
    }

    /// The address of the function called `name`.
    pub fn function(&self, name: &str) -> Result<*mut c_void, String> {
        let name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: the library is loaded, and the name ends with a zero.
        let address = unsafe { dlsym(self.0, name.as_ptr()) };
        if address.is_null() { Err(format!("there is no {name:?}")) } else { Ok(address) }
    }
}

/// The function that runs one thread of a kernel.
pub(super) fn entry(source: &crate::gpu::compile::Source) -> Result<(*mut c_void, usize), String> {
    let kernel = translate::translate(source)?;
    let library = Shim::get()?.compile(&kernel)?;
    Ok((library.function(translate::ENTRY)?, kernel.shared))
}

/// Checks that a kernel compiles; the error says what is wrong with it.
pub fn check(source: &crate::gpu::compile::Source) -> Result<(), String> {
    Shim::get()?.check(&translate::translate(source)?)
}
