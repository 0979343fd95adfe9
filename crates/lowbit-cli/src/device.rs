//! `--device`, and the flags that go with it.

use crate::habits::GpuLayers;
use crate::{Failure, out};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use lowbit::Device;
use lowbit_kernels::KernelError;
use lowbit_kernels::simd::Isa;
use std::ffi::OsStr;

/// The kinds of GPUs, the preferred one first: its name, which is also the cargo feature's, and whether this build has it.
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

/// Reads `--device`.
#[derive(Clone)]
struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        if let Some((name, _)) = GPUS.iter().find(|(name, is_built)| !is_built && *name == value) {
            return Err(command.clone().error(ErrorKind::InvalidValue, not_built(name)));
        }
        let names: Vec<_> = ["auto", "cpu"].into_iter().chain(gpus()).collect();
        PossibleValuesParser::new(names).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(["auto", "cpu"].into_iter().chain(gpus()).map(PossibleValue::new)))
    }
}

/// Where ops run.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceOptions {
    /// Where to run; auto takes the first of CUDA, Metal, Vulkan and the CPU that this build and this machine have
    /// [default: auto; cpu with --threads, --isa or --exact].
    #[arg(long, value_parser = DeviceParser)]
    device: Option<String>,
    /// Run the kernels of an older CUDA device, as in 80 for compute capability 8.0, to test or time them; means --device cuda.
    #[arg(long, value_name = "N", value_parser = cuda_arch)]
    cuda_arch: Option<u32>,
    /// CPU threads [default: one per core].
    #[arg(long, short)]
    pub threads: Option<usize>,
    /// The CPU's instruction set [default: the best that it has; `inspect --device cpu` lists them].
    #[arg(long, value_name = "ISA", value_parser = isa)]
    isa: Option<Isa>,
    /// As llama.cpp's -ngl: 0 runs on the CPU, anything else on the GPU that this build has.
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

/// What the flags ask for.
#[derive(Clone, Debug, PartialEq)]
enum Choice {
    Named(String),
    /// The CPU, because of this flag.
    Cpu(&'static str),
    /// The best that is there. Whether a GPU is expected.
    Auto(bool),
}

impl DeviceOptions {
    /// `exact` is --exact, which is about the CPU alone.
    fn choice(&self, exact: bool) -> Choice {
        let for_cpu =
            [(exact, "--exact"), (self.isa.is_some(), "--isa"), (self.threads.is_some(), "--threads")];
        let named = self.device.as_deref().filter(|name| *name != "auto");
        match (named.or(self.cuda_arch.map(|_| "cuda")), self.n_gpu_layers) {
            (Some(name), _) => Choice::Named(name.into()),
            (_, Some(GpuLayers::None)) => Choice::Cpu("-ngl 0"),
            (_, Some(GpuLayers::All)) => Choice::Auto(true),
            _ if self.device.is_some() => Choice::Auto(false),
            (None, _) => for_cpu
                .into_iter()
                .find_map(|(is_given, flag)| is_given.then_some(Choice::Cpu(flag)))
                .unwrap_or(Choice::Auto(false)),
        }
    }

    /// Whether a device is named.
    pub fn is_named(&self) -> bool {
        self.device.is_some() || self.cuda_arch.is_some() || self.n_gpu_layers.is_some()
    }

    /// The CPU with this many threads, and the instruction set that the flags name.
    pub fn cpu_with_threads(&self, threads: usize) -> Result<Device, Failure> {
        Ok(Device::cpu_with(Some(threads), self.isa.unwrap_or_else(Isa::detect))?)
    }

    /// The device that the flags name, or the best that is there; `exact` is --exact. Where this build has several, a line on
    /// standard error says which one it is.
    ///
    /// # Errors
    /// A device that is named cannot be used. Without a name, what cannot be used is said on standard error instead.
    pub fn device(&self, exact: bool) -> Result<Device, Failure> {
        Ok(self.find(exact)?.told())
    }

    /// As [`Self::device`], with what there is to say, which is not said yet.
    pub fn find(&self, exact: bool) -> Result<Found, Failure> {
        let cpu = || Device::cpu_with(self.threads, self.isa.unwrap_or_else(Isa::detect));
        let open = |name: &str| open(name, self.cuda_arch);
        match self.choice(exact) {
            Choice::Named(name) if self.cuda_arch.is_some() && name != "cuda" => {
                Err(format!("--cuda-arch is for --device cuda, not for --device {name}").into())
            }
            Choice::Named(name) => Ok(Found { device: open(&name).unwrap_or_else(cpu)?, notes: vec![] }),
            Choice::Cpu(flag) => Ok(Found::chosen(cpu()?, vec![], &format!(", because of {flag}"))),
            Choice::Auto(expected) => {
                let mut notes = vec![];
                let found = best(gpus().filter_map(open), &mut notes);
                if found.is_none() && expected && gpus().next().is_none() {
                    notes.push(
                        "this build has no GPU, so all layers run on the CPU; `cargo build --release --features cuda` has one"
                            .into(),
                    );
                }
                let device = found.map_or_else(cpu, Ok)?;
                Ok(Found::chosen(device, notes, ""))
            }
        }
    }
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

/// The first device that is there, works and is no program for the processor. What is there and does not work is noted.
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
fn open(name: &str, cuda_arch: Option<u32>) -> Option<Result<Device, KernelError>> {
    match name {
        #[cfg(feature = "cuda")]
        "cuda" => Some(Device::cuda(0, &crate::cuda::options().with_architecture(cuda_arch))),
        #[cfg(feature = "vulkan")]
        "vulkan" => {
            let cache = crate::cache::cache(&|name| std::env::var_os(name));
            let options = lowbit::VulkanOptions::default();
            Some(Device::vulkan(&cache.into_iter().fold(options, lowbit::VulkanOptions::with_cache)))
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

    #[test]
    fn flags_choose() {
        let choice = |flags: &str, exact| parse(flags).unwrap().choice(exact);
        assert_eq!(choice("", false), Choice::Auto(false));
        assert_eq!(choice("--device auto --threads 2", false), Choice::Auto(false));
        assert_eq!(choice("--device cpu", false), Choice::Named("cpu".into()));
        assert_eq!(choice("--device cpu --n-gpu-layers 99", false), Choice::Named("cpu".into()));
        assert_eq!(choice("--n-gpu-layers 0", false), Choice::Cpu("-ngl 0"));
        assert_eq!(choice("--n-gpu-layers 0 --device auto", false), Choice::Cpu("-ngl 0"));
        assert_eq!(choice("--n-gpu-layers 99 --threads 2", false), Choice::Auto(true));
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
        assert_eq!((options.choice(false), options.cuda_arch), (Choice::Named("cuda".into()), Some(80)));
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
                true => assert_eq!(parsed.unwrap(), Choice::Named(name.into())),
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
