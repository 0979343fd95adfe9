//! The most memory that this process has held.

/// Peak resident bytes, mapped files included; `None` where the system does not say.
#[cfg(target_os = "linux")]
pub fn peak_bytes() -> Option<u64> {
    // Not getrusage: its figure outlives exec, so under `cargo run` it would be cargo's.
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Peak resident bytes, mapped files included; `None` where the system does not say.
#[cfg(not(target_os = "linux"))]
pub fn peak_bytes() -> Option<u64> {
    use nix::sys::resource::{UsageWho, getrusage};
    // macOS counts in bytes, the BSDs in kilobytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    u64::try_from(getrusage(UsageWho::RUSAGE_SELF).ok()?.max_rss()).ok().map(|rss| rss * unit)
}
