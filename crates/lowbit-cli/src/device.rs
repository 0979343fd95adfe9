//! `--device`, and the flags that go with it.

use crate::habits::GpuLayers;
use crate::{Failure, out};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use lowbit::Device;
use lowbit_kernels::KernelError;
use lowbit_kernels::simd::Isa;
use std::ffi::OsStr;
use std::fmt::{self, Display, Formatter};

/// The kinds of GPUs, the preferred one first: its name, which is also the cargo feature's, and
/// whether this build has it.
const GPUS: [(&str, bool); 3] = [
    ("cuda", cfg!(feature = "cuda")),
    ("metal", cfg!(feature = "metal")),
    ("vulkan", cfg!(feature = "vulkan")),
];

/// The kinds of GPUs that this build has.
fn gpus() -> impl Iterator<Item = &'static str> {
    GPUS.into_iter().filter_map(|(name, is_built)| is_built.then_some(name))
}

/// Says that this build lacks the GPUs of this kind, and what has them.
fn not_built(name: &str) -> String {
    format!(
        "this program was built without {name}: `cargo install --path crates/lowbit-cli --features {name}` builds it with"
    )
}

/// A device as it was named.
#[derive(Clone, Debug, PartialEq)]
struct Named {
    /// `auto`, `cpu`, or one of [`GPUS`].
    kind: String,
    /// The index among the devices of this kind, if one was given.
    number: Option<usize>,
}

impl Named {
    /// `cuda`, `cuda:1`, and as llama.cpp calls them: `CUDA1`, `Vulkan0`, `MTL0`, `none`.
    fn parse(text: &str) -> Result<Self, String> {
        if text.contains(',') {
            return Err("a model is on one device, whole: one name is wanted".into());
        }
        let lower = text.to_ascii_lowercase();
        let kind = lower.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &lower[kind.len()..];
        let kind = kind.strip_suffix(':').unwrap_or(kind);
        let number = match digits {
            "" if lower.ends_with(':') => return Err("a number is wanted after the colon".into()),
            "" => None,
            _ => Some(digits.parse().map_err(|_| format!("there is no device of number {digits}"))?),
        };
        let kind = match kind {
            "none" => "cpu",
            "mtl" => "metal",
            kind => kind,
        };
        match number {
            Some(1..) if kind == "cpu" || kind == "metal" => {
                Err(format!("there is one {kind} device, {kind}:0"))
            }
            Some(number) if kind == "auto" => Err(format!("auto takes no number, but {number} was given")),
            _ => Ok(Self { kind: kind.into(), number }),
        }
    }
}

impl Display for Named {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.number {
            Some(number) => write!(f, "{}:{number}", self.kind),
            None => f.write_str(&self.kind),
        }
    }
}

/// Reads `--device`.
#[derive(Clone)]
struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = Named;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Named, clap::Error> {
        let refuse = |problem: String| command.clone().error(ErrorKind::InvalidValue, problem);
        let names: Vec<_> = ["auto", "cpu"].into_iter().chain(gpus()).collect();
        let named = match value.to_str().map(Named::parse) {
            Some(Ok(named)) => named,
            Some(Err(problem)) => {
                return Err(refuse(format!(
                    "--device {}: {problem}",
                    lowbit_files::shown(&value.to_string_lossy())
                )));
            }
            None => Named { kind: String::new(), number: None },
        };
        if let Some((name, _)) = GPUS.iter().find(|(name, is_built)| !is_built && *name == named.kind) {
            return Err(refuse(not_built(name)));
        }
        match names.contains(&named.kind.as_str()) {
            true => Ok(named),
            false => Err(PossibleValuesParser::new(names)
                .parse_ref(command, argument, value)
                .err()
                .unwrap_or_else(|| refuse("a device is wanted".into()))),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(["auto", "cpu"].into_iter().chain(gpus()).map(PossibleValue::new)))
    }
}

/// The choice of a device.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceOptions {
    /// Device to run on; auto takes the first of CUDA, Metal, Vulkan and the CPU that this build
    /// and this machine have; cuda:1 is the second CUDA device, vulkan:1 the second of Vulkan's,
    /// the best of which comes first; `lowbit devices` lists all
    /// [default: auto; cpu with --threads, --isa or --exact].
    #[arg(long, value_parser = DeviceParser)]
    device: Option<Named>,
    /// Run the kernels of an older CUDA device, as in 80 for compute capability 8.0, to test or
    /// time them; means --device cuda.
    #[arg(long, value_name = "N", value_parser = cuda_arch)]
    cuda_arch: Option<u32>,
    /// CPU threads [default: one per core].
    #[arg(long, short)]
    pub threads: Option<usize>,
    /// The CPU's instruction set
    /// [default: the best that it has; `inspect --device cpu` lists them].
    #[arg(long, value_name = "ISA", value_parser = isa)]
    isa: Option<Isa>,
    /// As llama.cpp's -ngl: 0 runs on the CPU, anything else on the GPU that this build has, with
    /// all layers.
    #[arg(long, visible_alias = "gpu-layers", value_name = "N", value_parser = GpuLayers::parse)]
    n_gpu_layers: Option<GpuLayers>,
}

/// The instruction set of this name.
fn isa(name: &str) -> Result<Isa, String> {
    let names: Vec<_> = Isa::all().into_iter().map(Isa::name).collect();
    Isa::named(name).ok_or_else(|| format!("this processor has {}", names.join(", ")))
}

/// Reads `--cuda-arch`.
fn cuda_arch(value: &str) -> Result<u32, String> {
    if !cfg!(feature = "cuda") {
        return Err(not_built("cuda"));
    }
    value.parse().map_err(|_| "a compute capability without its point is wanted, as in 80".into())
}

/// The device that the flags ask for.
#[derive(Clone, Debug, PartialEq)]
enum Choice {
    Named(Named),
    /// The CPU, because of this flag.
    Cpu(&'static str),
    /// The best device of the machine, and whether a GPU is expected.
    Auto(bool),
}

impl DeviceOptions {
    /// `exact` is --exact, which is about the CPU alone.
    fn choice(&self, exact: bool) -> Choice {
        let for_cpu =
            [(exact, "--exact"), (self.isa.is_some(), "--isa"), (self.threads.is_some(), "--threads")];
        let named = self.device.clone().filter(|named| named.kind != "auto");
        let cuda = || self.cuda_arch.map(|_| Named { kind: "cuda".into(), number: None });
        match (named.or_else(cuda), self.n_gpu_layers) {
            (Some(named), _) => Choice::Named(named),
            (_, Some(GpuLayers::None)) => Choice::Cpu("-ngl 0"),
            (_, Some(GpuLayers::All | GpuLayers::Some(_))) => Choice::Auto(true),
            _ if self.device.is_some() => Choice::Auto(false),
            (None, _) => for_cpu
                .into_iter()
                .find_map(|(is_given, flag)| is_given.then_some(Choice::Cpu(flag)))
                .unwrap_or(Choice::Auto(false)),
        }
    }

    /// The same with the device of this name, as `--device` has it.
    pub fn named(&self, name: &str) -> Result<Self, String> {
        let named = Named::parse(name)?;
        match GPUS.iter().find(|(gpu, _)| *gpu == named.kind) {
            Some((gpu, false)) => return Err(not_built(gpu)),
            None if !["auto", "cpu"].contains(&named.kind.as_str()) => {
                return Err(format!("there is no device {}", lowbit_files::shown(name)));
            }
            _ => {}
        }
        Ok(Self { device: Some(named), n_gpu_layers: None, ..self.clone() })
    }

    /// True if a device is named.
    pub fn is_named(&self) -> bool {
        self.device.is_some() || self.cuda_arch.is_some() || self.n_gpu_layers.is_some()
    }

    /// The CPU with this many threads, and the instruction set that the flags name.
    pub fn cpu_with_threads(&self, threads: usize) -> Result<Device, Failure> {
        Ok(Device::cpu_with(Some(threads), self.isa.unwrap_or_else(Isa::detect))?)
    }

    /// The device that the flags name, or the best that is there; `exact` is --exact. Where this
    /// build has several, a line on standard error says which one it is.
    ///
    /// # Errors
    /// A device that is named cannot be used. Without a name, what cannot be used is said on
    /// standard error instead.
    pub fn device(&self, exact: bool) -> Result<Device, Failure> {
        Ok(self.find(exact)?.told())
    }

    /// As [`Self::device`], with what there is to say, which is not said yet.
    pub fn find(&self, exact: bool) -> Result<Found, Failure> {
        let cpu = || Device::cpu_with(self.threads, self.isa.unwrap_or_else(Isa::detect));
        match self.choice(exact) {
            Choice::Named(named) if self.cuda_arch.is_some() && named.kind != "cuda" => {
                Err(format!("--cuda-arch is for --device cuda, not for --device {named}").into())
            }
            Choice::Named(named) => {
                let device = open(&named, self.cuda_arch).unwrap_or_else(cpu)?;
                let notes = self.all_layers(&device).into_iter().collect();
                Ok(Found { device, notes })
            }
            Choice::Cpu(flag) => Ok(Found::chosen(cpu()?, vec![], &format!(", because of {flag}"))),
            Choice::Auto(expected) => {
                let mut notes = vec![];
                let best_of = |kind: &str| open(&Named { kind: kind.into(), number: None }, self.cuda_arch);
                let found = best(gpus().filter_map(best_of), &mut notes);
                if found.is_none() && expected && gpus().next().is_none() {
                    notes.push(
                        "this build has no GPU, so all layers run on the CPU; `cargo build --release --features cuda` has one"
                            .into(),
                    );
                }
                let device = found.map_or_else(cpu, Ok)?;
                notes.extend(self.all_layers(&device));
                Ok(Found::chosen(device, notes, ""))
            }
        }
    }
}

impl DeviceOptions {
    /// A note on a number of layers that may be less than a model has.
    fn all_layers(&self, device: &Device) -> Option<String> {
        match (self.n_gpu_layers, device) {
            (Some(GpuLayers::Some(layers)), Device::Gpu(_)) => Some(format!(
                "-ngl {layers} means all layers here: a model is on one device, whole (-ngl 0 takes the CPU)"
            )),
            _ => None,
        }
    }
}

/// Lists the devices that this build can name, a line for each.
///
/// # Errors
/// Standard output cannot be written to.
pub fn list() -> Result<(), Failure> {
    let isas: Vec<_> = Isa::all().into_iter().map(Isa::name).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    out::line!("{:<10} {threads} threads, {}", "cpu", isas.join(", "))?;
    for kind in gpus() {
        for number in 0.. {
            let named = Named { kind: kind.into(), number: Some(number) };
            match open(&named, None) {
                None => break,
                Some(Ok(Device::Gpu(gpu))) => {
                    let memory = gpu.total_memory().map(|bytes| format!(", {:.1} GB", bytes as f64 / 1e9));
                    out::line!("{:<10} {}{}", named.to_string(), gpu.product(), memory.unwrap_or_default())?;
                }
                Some(Err(KernelError::NoGpu { .. })) if number > 0 => break,
                Some(Err(KernelError::NoGpu { problem, .. })) => {
                    out::line!("{kind:<10} none: {problem}")?;
                    break;
                }
                Some(Ok(Device::Cpu(_))) => break,
                Some(Err(error)) => out::line!("{:<10} cannot be used: {error}", named.to_string())?,
            }
            if kind == "metal" {
                break;
            }
        }
    }
    for (kind, _) in GPUS.iter().filter(|(_, is_built)| !is_built) {
        out::line!("{kind:<10} {}", not_built(kind))?;
    }
    Ok(())
}

/// A device, and what a user should know of it.
pub struct Found {
    device: Device,
    notes: Vec<String>,
}

impl Found {
    /// A device that was not named: where this build has several, which one it is, and `why`.
    fn chosen(device: Device, mut notes: Vec<String>, why: &str) -> Self {
        if gpus().next().is_some() {
            notes.push(format!("running on {}{why}", described(&device)));
        }
        Self { device, notes }
    }

    /// Bytes of a GPU's memory, where it tells.
    pub fn gpu_memory(&self) -> Option<usize> {
        self.device.gpu_memory()
    }

    /// The device, after a line on standard error for each note.
    pub fn told(self) -> Device {
        self.notes.iter().for_each(|note| out::note!("note: {note}"));
        self.device
    }
}

/// A device as the note calls it.
fn described(device: &Device) -> String {
    match device {
        Device::Cpu(_) => device.to_string(),
        Device::Gpu(gpu) => format!("{device} ({})", gpu.product()),
    }
}

/// The first device that is there, works and is no program for the processor. Devices that are
/// there and do not work are noted.
fn best(
    devices: impl Iterator<Item = Result<Device, KernelError>>,
    notes: &mut Vec<String>,
) -> Option<Device> {
    for device in devices {
        match device {
            Ok(device) if is_software(&device) => {}
            Ok(device) => return Some(device),
            Err(KernelError::NoGpu { .. }) => {}
            Err(error) => notes.push(format!("a GPU is not used: {error}")),
        }
    }
    None
}

fn is_software(device: &Device) -> bool {
    match device {
        Device::Cpu(_) => false,
        Device::Gpu(gpu) => gpu.is_software(),
    }
}

/// The GPU of this name, CUDA's with the kernels of `cuda_arch`; `None` for the CPU.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn open(named: &Named, cuda_arch: Option<u32>) -> Option<Result<Device, KernelError>> {
    match named.kind.as_str() {
        #[cfg(feature = "cuda")]
        "cuda" => {
            let options = crate::cuda::options().with_architecture(cuda_arch);
            Some(Device::cuda(named.number.unwrap_or(0), &options))
        }
        #[cfg(feature = "vulkan")]
        "vulkan" => {
            let cache = crate::cache::Environment::of_process().cache();
            let options = lowbit::VulkanOptions::default();
            let options = cache.into_iter().fold(options, lowbit::VulkanOptions::with_cache);
            let options = named.number.into_iter().fold(options, lowbit::VulkanOptions::with_device);
            Some(Device::vulkan(&options))
        }
        #[cfg(feature = "metal")]
        "metal" => Some(Device::metal()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        device: DeviceOptions,
    }

    fn parse(flags: &str) -> Result<DeviceOptions, String> {
        let program = Program::try_parse_from(["program"].into_iter().chain(flags.split_whitespace()));
        program.map(|program| program.device).map_err(|error| error.to_string())
    }

    fn named(text: &str) -> Named {
        Named::parse(text).unwrap()
    }

    #[test]
    fn names_are_the_peers_too() {
        let of = |kind: &str, number| Named { kind: kind.into(), number };
        for (text, want) in [
            ("cuda", of("cuda", None)),
            ("cuda:1", of("cuda", Some(1))),
            ("CUDA12", of("cuda", Some(12))),
            ("Vulkan0", of("vulkan", Some(0))),
            ("vulkan:1", of("vulkan", Some(1))),
            ("MTL0", of("metal", Some(0))),
            ("none", of("cpu", None)),
            ("cpu:0", of("cpu", Some(0))),
            ("npu", of("npu", None)),
        ] {
            assert_eq!(named(text), want, "{text}");
        }
        for (text, want) in [
            ("CUDA0,CUDA1", "a model is on one device, whole: one name is wanted"),
            ("cuda:", "a number is wanted after the colon"),
            ("cpu:1", "there is one cpu device, cpu:0"),
            ("cuda:99999999999999999999", "there is no device of number 99999999999999999999"),
            ("auto:1", "auto takes no number, but 1 was given"),
        ] {
            assert_eq!(Named::parse(text).unwrap_err(), want, "{text}");
        }
        assert_eq!(named("cuda:1").to_string(), "cuda:1");
        let message = parse("--device cpu:1").unwrap_err();
        assert!(message.starts_with("error: --device cpu:1: there is one cpu device, cpu:0"), "{message}");
    }

    #[test]
    fn flags_choose() {
        let choice = |flags: &str, exact| parse(flags).unwrap().choice(exact);
        assert_eq!(choice("", false), Choice::Auto(false));
        assert_eq!(choice("--device auto --threads 2", false), Choice::Auto(false));
        let cpu = || Choice::Named(named("cpu"));
        assert_eq!(choice("--device cpu", false), cpu());
        assert_eq!(choice("--device none", false), cpu());
        assert_eq!(choice("--device cpu --n-gpu-layers 99", false), cpu());
        assert_eq!(choice("--n-gpu-layers 0", false), Choice::Cpu("-ngl 0"));
        assert_eq!(choice("--n-gpu-layers 0 --device auto", false), Choice::Cpu("-ngl 0"));
        assert_eq!(choice("--n-gpu-layers 99 --threads 2", false), Choice::Auto(true));
        assert_eq!(choice("--n-gpu-layers 20", false), Choice::Auto(true));
        assert_eq!(choice("--n-gpu-layers auto", false), Choice::Auto(false));
        assert_eq!(choice("--threads 2", false), Choice::Cpu("--threads"));
        assert_eq!(choice("--isa portable", false), Choice::Cpu("--isa"));
        assert_eq!(choice("", true), Choice::Cpu("--exact"));
    }

    #[test]
    fn an_architecture_means_cuda() {
        let parsed = parse("--cuda-arch 80");
        if !cfg!(feature = "cuda") {
            let message = parsed.unwrap_err();
            assert!(message.contains("this program was built without cuda: `cargo install"), "{message}");
            return;
        }
        let options = parsed.unwrap();
        assert_eq!((options.choice(false), options.cuda_arch), (Choice::Named(named("cuda")), Some(80)));
        assert!(options.is_named());
        let message = parse("--device cpu --cuda-arch 80").unwrap().device(false).unwrap_err().to_string();
        assert_eq!(message, "--cuda-arch is for --device cuda, not for --device cpu");
        let message = parse("--cuda-arch 8.0").unwrap_err();
        assert!(message.contains("a compute capability without its point is wanted, as in 80"), "{message}");
    }

    #[test]
    fn devices_that_are_not_built_name_their_feature() {
        for (name, is_built) in GPUS {
            let parsed = parse(&format!("--device {name}")).map(|options| options.choice(false));
            match is_built {
                true => assert_eq!(parsed.unwrap(), Choice::Named(named(name))),
                false => {
                    let message = parsed.unwrap_err();
                    let want = format!(
                        "error: this program was built without {name}: `cargo install --path crates/lowbit-cli \
                         --features {name}` builds it with\n"
                    );
                    assert!(message.starts_with(&want), "{message}");
                }
            }
        }
        assert!(parse("--device gpu").unwrap_err().contains("[possible values: auto, cpu"));
    }

    #[test]
    fn the_first_device_that_works_is_taken_and_failures_are_noted() {
        let gpu = |problem: &str| KernelError::Gpu { device: "cuda:0".into(), problem: problem.into() };
        let absent = || KernelError::NoGpu { device: "vulkan".into(), problem: "no adapter".into() };
        let cpu = || Device::cpu(Some(1)).unwrap();
        let mut notes = vec![];
        assert!(best([Err(gpu("no compiler")), Err(absent()), Ok(cpu())].into_iter(), &mut notes).is_some());
        assert_eq!(notes, ["a GPU is not used: cuda:0: no compiler"]);
        assert!(best([Err(absent())].into_iter(), &mut notes).is_none());
        assert_eq!(notes.len(), 1);
    }
}
