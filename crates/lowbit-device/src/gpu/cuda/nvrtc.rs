//! CUDA C++ to machine code, through NVIDIA's run-time compiler. It is opened by its path: Python's
//! packages and `lowbit setup cuda` put it where the loader does not look.

use super::toolkit::{self, CudaOptions, Found, Headers, NAMES};
use crate::KernelError;
use libloading::{Library, Symbol};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// The architecture that kernels are compiled for.
#[derive(Clone, Debug)]
pub struct Architecture {
    /// As in 90.
    pub capability: u32,
    /// The newest CUDA that the driver knows, major and minor.
    pub driver: (u32, u32),
    /// With the instructions that only this generation has, from Hopper on. Code that compiles
    /// without them compiles for every later generation.
    pub own_instructions: bool,
}

impl Architecture {
    /// As NVRTC spells it.
    pub fn name(&self) -> String {
        let own = if self.own_instructions && self.capability >= 90 { "a" } else { "" };
        format!("sm_{}{own}", self.capability)
    }
}

/// NVRTC and headers for a device. Nothing is loaded before the first kernel is compiled: as a rule
/// all are cached.
#[derive(Debug)]
pub struct Compiler {
    architecture: Architecture,
    found: Found,
    chosen: OnceLock<Result<Chosen, String>>,
}

/// Compiles a kernel that includes CUDA's headers, for an Ampere device and with what `options`
/// name, and says which library did it: whether kernels can be compiled, also where there is no
/// device.
///
/// `driver` is the newest CUDA that the driver knows, major and minor.
///
/// # Errors
/// [`KernelError::Kernel`], with what is missing or what the compiler says.
pub fn try_cuda_compiler(options: &CudaOptions, driver: (u32, u32)) -> Result<PathBuf, KernelError> {
    const SOURCE: &str = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n\
                          extern \"C\" __global__ void try_compiler(__half *x) { *x = __hadd(*x, *x); }\n";
    let refuse = |problem| KernelError::Kernel { name: "try_compiler".into(), problem };
    let architecture = Architecture { capability: 80, driver, own_instructions: true };
    let compiler = Compiler::new(&options.places, architecture).map_err(refuse)?;
    compiler.compile("try_compiler", SOURCE)?;
    match compiler.chosen.into_inner() {
        Some(Ok(Chosen { path, .. })) => Ok(path),
        _ => unreachable!("it has compiled"),
    }
}

/// The first library and the first folder of headers in `places`.
#[cfg(test)]
pub fn files(places: &[PathBuf]) -> (PathBuf, PathBuf) {
    let found = Found::look(places, |_| false).unwrap();
    (found.libraries[0].clone(), found.headers[0].folder.clone())
}

#[derive(Debug)]
struct Chosen {
    path: PathBuf,
    nvrtc: Nvrtc,
    options: Vec<CString>,
    /// True if the headers lack `nv/target`.
    lacks_targets: bool,
}

impl Compiler {
    /// Looks for files in `places`, as [`CudaOptions`](super::CudaOptions) describes them.
    ///
    /// # Errors
    /// The missing library, the places that were searched, and what brings it.
    pub fn new(places: &[PathBuf], architecture: Architecture) -> Result<Self, String> {
        let has = |name: &str| Nvrtc::open(Path::new(name)).is_ok();
        let found = Found::look(places, has)?;
        let compiler = Self { architecture, found, chosen: OnceLock::new() };
        // To load a library takes a tenth of a second or more; its name tells most of what there is
        // to refuse.
        let libraries = &compiler.found.libraries;
        let refusals: Vec<_> = libraries.iter().filter_map(|path| compiler.refusal_by_name(path)).collect();
        let by_loader = || {
            let serves = |name: &str| compiler.refusal_by_name(Path::new(name)).is_none() && has(name);
            NAMES.libraries.iter().any(|name| serves(name))
        };
        if libraries.len() == refusals.len() && !by_loader() {
            return Err(compiler.found.refused(&refusals));
        }
        Ok(compiler)
    }

    /// Why a library of this name does not serve, if its name tells.
    fn refusal_by_name(&self, path: &Path) -> Option<String> {
        let major = toolkit::major(path)?;
        let problem = match self.too_new(major) {
            Some(problem) => problem,
            None => self.found.headers_for((major, 0)).err()?,
        };
        Some(format!("{}: {problem}", path.display()))
    }

    /// Machine code runs on every driver of its major version, and on later ones.
    fn too_new(&self, major: u32) -> Option<String> {
        let (knows, minor) = self.architecture.driver;
        (major > knows)
            .then(|| format!("its CUDA {major} is too new for this driver, which knows {knows}.{minor}"))
    }

    /// Machine code of `source`.
    ///
    /// # Errors
    /// [`KernelError::Kernel`], with NVRTC's log, or with the reason why no NVRTC serves.
    pub fn compile(&self, name: &str, source: &str) -> Result<Vec<u8>, KernelError> {
        let refuse = |problem: String| KernelError::Kernel { name: name.into(), problem };
        let chosen = self.chosen.get_or_init(|| self.choose()).as_ref();
        let Chosen { nvrtc, options, lacks_targets, .. } =
            chosen.map_err(|problem| refuse(problem.clone()))?;
        let targets = lacks_targets.then(|| toolkit::targets(self.architecture.capability));
        nvrtc.compile(source, options, targets.as_deref()).map_err(refuse)
    }

    /// The first library that the driver can use, that knows the device, and that has headers.
    fn choose(&self) -> Result<Chosen, String> {
        let mut refusals = vec![];
        for path in &self.found.libraries {
            match Nvrtc::open(path).and_then(|nvrtc| self.with_headers(nvrtc, path)) {
                Ok(chosen) => return Ok(chosen),
                Err(problem) => refusals.push(format!("{}: {problem}", path.display())),
            }
        }
        for &name in NAMES.libraries {
            let path = Path::new(name);
            // The loader gives back what is loaded already under that name.
            if self.found.libraries.iter().any(|library| library.ends_with(path)) {
                continue;
            }
            let Ok(nvrtc) = Nvrtc::open(path) else { continue };
            match self.with_headers(nvrtc, path) {
                Ok(chosen) => return Ok(chosen),
                Err(problem) => refusals.push(format!("{name}: {problem}")),
            }
        }
        Err(self.found.refused(&refusals))
    }

    fn with_headers(&self, nvrtc: Nvrtc, path: &Path) -> Result<Chosen, String> {
        let capability = self.architecture.capability;
        let (major, minor) = nvrtc.version;
        if let Some(problem) = self.too_new(major) {
            return Err(problem);
        }
        if !nvrtc.capabilities.contains(&capability) {
            return Err(format!("its CUDA {major}.{minor} does not know sm_{capability}"));
        }
        let Headers { folder, targets, .. } = self.found.headers_for(nvrtc.version)?;
        let mut options = vec![format!("--gpu-architecture={}", self.architecture.name())];
        options.extend(
            [Some(folder), targets.as_ref()]
                .into_iter()
                .flatten()
                .map(|folder| format!("--include-path={}", folder.display())),
        );
        let options = options.into_iter().map(CString::new).collect::<Result<_, _>>();
        let options = options.map_err(|error| error.to_string())?;
        Ok(Chosen { path: path.into(), nvrtc, options, lacks_targets: targets.is_none() })
    }
}

type Program = *mut c_void;
type Status = c_int;

/// NVRTC's functions, of which every version since 11.2 has these.
#[derive(Debug)]
struct Nvrtc {
    /// Major and minor.
    version: (u32, u32),
    /// The devices that it compiles for, as in 90.
    capabilities: Vec<u32>,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    code_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    code: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    describe: unsafe extern "C" fn(Status) -> *const c_char,
}

/// A program of NVRTC's, destroyed when it is dropped.
struct Owned<'a>(&'a Nvrtc, Program);

#[allow(unsafe_code)]
impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once.
        unsafe { (self.0.destroy)(&raw mut self.1) };
    }
}

#[allow(unsafe_code)]
impl Nvrtc {
    /// The library at `path`, or that the loader finds by this name. It stays loaded.
    fn open(path: &Path) -> Result<Self, String> {
        // NVRTC opens this one by its name alone; the loader takes one that is loaded already.
        let builtins = path.parent().filter(|folder| folder.is_dir()).map(builtins).unwrap_or_default();
        for path in builtins {
            // SAFETY: it is NVIDIA's, whose start-up code has no conditions.
            if let Ok(library) = unsafe { Library::new(path.as_os_str()) } {
                std::mem::forget(library);
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::new(path.as_os_str()) }.map_err(|error| error.to_string())?;
        let library: &'static Library = Box::leak(Box::new(library));
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the functions have these types in all versions, and the numbers are variables of
        // their types.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
                symbol(library, c"nvrtcVersion")?;
            let counted: unsafe extern "C" fn(*mut c_int) -> Status =
                symbol(library, c"nvrtcGetNumSupportedArchs")?;
            let known: unsafe extern "C" fn(*mut c_int) -> Status =
                symbol(library, c"nvrtcGetSupportedArchs")?;
            if version(&raw mut major, &raw mut minor) != 0 || counted(&raw mut count) != 0 {
                return Err("it does not say what it is".into());
            }
            let mut capabilities: Vec<c_int> = vec![0; count.max(0) as usize];
            if known(capabilities.as_mut_ptr()) != 0 {
                return Err("it does not say which devices it knows".into());
            }
            Ok(Self {
                version: (major.max(0) as u32, minor.max(0) as u32),
                capabilities: capabilities.into_iter().map(|capability| capability.max(0) as u32).collect(),
                create: symbol(library, c"nvrtcCreateProgram")?,
                compile: symbol(library, c"nvrtcCompileProgram")?,
                code_size: symbol(library, c"nvrtcGetCUBINSize")?,
                code: symbol(library, c"nvrtcGetCUBIN")?,
                log_size: symbol(library, c"nvrtcGetProgramLogSize")?,
                log: symbol(library, c"nvrtcGetProgramLog")?,
                destroy: symbol(library, c"nvrtcDestroyProgram")?,
                describe: symbol(library, c"nvrtcGetErrorString")?,
            })
        }
    }

    /// Machine code of `source`, or what is wrong. `targets` is what `nv/target` includes.
    fn compile(&self, source: &str, options: &[CString], targets: Option<&str>) -> Result<Vec<u8>, String> {
        let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
        let (source, targets) = (text(source)?, targets.map(text).transpose()?);
        let (contents, names) =
            (targets.as_ref().map_or(null(), |targets| targets.as_ptr()), c"nv/target".as_ptr());
        let count = c_int::from(targets.is_some());
        let mut program = null_mut();
        // SAFETY: all texts end with a zero and live until the call returns, which copies them;
        // there are `count` headers.
        let status = unsafe {
            (self.create)(
                &raw mut program,
                source.as_ptr(),
                null(),
                count,
                &raw const contents,
                &raw const names,
            )
        };
        self.check(status)?;
        let program = Owned(self, program);
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is valid and this thread's alone, and the options are as many as are
        // said.
        let status = unsafe { (self.compile)(program.1, options.len() as c_int, options.as_ptr()) };
        self.check(status).map_err(|problem| {
            let log = self.output(&program, self.log_size, self.log).unwrap_or_default();
            format!("{problem}\n{}", String::from_utf8_lossy(&log).trim_end_matches('\0'))
        })?;
        self.output(&program, self.code_size, self.code)
    }

    /// The program's output of one kind.
    fn output(
        &self,
        program: &Owned<'_>,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        write: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: the program is valid.
        self.check(unsafe { size(program.1, &raw mut bytes) })?;
        let mut output = vec![0u8; bytes];
        // SAFETY: the buffer is as long as NVRTC says.
        self.check(unsafe { write(program.1, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }

    fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC's texts are constants that end with a zero.
        let text = unsafe { CStr::from_ptr((self.describe)(status)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// The function of this name.
///
/// # Safety
/// `F` is its type.
#[allow(unsafe_code)]
unsafe fn symbol<F: Copy>(library: &'static Library, name: &CStr) -> Result<F, String> {
    // SAFETY: the caller's; the library stays loaded.
    let symbol: Result<Symbol<'_, F>, _> = unsafe { library.get(name.to_bytes_with_nul()) };
    symbol.map(|symbol| *symbol).map_err(|_| format!("it has no {}", name.to_string_lossy()))
}

/// The library that NVRTC in `folder` opens itself.
fn builtins(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_builtins =
        |path: &PathBuf| path.file_name().is_some_and(|name| NAMES.is_builtins(&name.to_string_lossy()));
    entries.map(|entry| entry.path()).filter(is_builtins).collect()
}
