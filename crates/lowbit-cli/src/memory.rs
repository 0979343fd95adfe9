//! Memory: the most that this process has held, and what it may still take.

/// Peak resident bytes, mapped files included; `None` where the system does not say.
#[cfg(target_os = "linux")]
pub fn peak_bytes() -> Option<u64> {
    // Not getrusage: its figure outlives exec, so under `cargo run` it would be cargo's.
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    kilobytes(&status, "VmHWM:")
}

/// Peak resident bytes, mapped files included; `None` where the system does not say.
#[cfg(all(unix, not(target_os = "linux")))]
pub fn peak_bytes() -> Option<u64> {
    use nix::sys::resource::{UsageWho, getrusage};
    // macOS counts in bytes, the BSDs in kilobytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    u64::try_from(getrusage(UsageWho::RUSAGE_SELF).ok()?.max_rss()).ok().map(|rss| rss * unit)
}

/// Peak resident bytes, mapped files included; `None` where the system does not say.
#[cfg(not(unix))]
pub fn peak_bytes() -> Option<u64> {
    None
}

/// Bytes of memory that this process can take now without others losing theirs; `None` where the
/// system does not say.
#[cfg(target_os = "linux")]
pub fn available_bytes() -> Option<u64> {
    let text = |path: &str| std::fs::read_to_string(path).ok();
    let number = |path: &str| text(path)?.trim().parse::<u64>().ok();
    let system = text("/proc/meminfo").and_then(|text| kilobytes(&text, "MemAvailable:"));
    // A container's own limit, by the second and the first version of cgroups.
    let container =
        [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")];
    let left = container.into_iter().filter_map(|(limit, used)| {
        let [limit, used] = [limit, used].map(|name| number(&format!("/sys/fs/cgroup/{name}")));
        Some(limit?.saturating_sub(used?))
    });
    left.chain(system).min()
}

/// Bytes of memory that this process can take now without others losing theirs; `None` where the
/// system does not say.
#[cfg(target_os = "macos")]
pub fn available_bytes() -> Option<u64> {
    let said = std::process::Command::new("/usr/sbin/sysctl").args(["-n", "hw.memsize"]).output().ok()?;
    let total = String::from_utf8(said.stdout).ok()?.trim().parse::<u64>().ok()?;
    // macOS compresses or drops the memory that other processes hold; a quarter stays theirs.
    Some(total / 4 * 3)
}

/// Bytes of memory that this process can take now without others losing theirs; `None` where the
/// system does not say.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
pub fn available_bytes() -> Option<u64> {
    None
}

/// Resident pages of mapped files, in bytes. The system could take them back, but this process goes
/// on reading them.
#[cfg(target_os = "linux")]
pub fn mapped_bytes() -> u64 {
    kilobytes(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), "RssFile:").unwrap_or(0)
}

/// Resident pages of mapped files, in bytes: 0 where the system does not say.
#[cfg(not(target_os = "linux"))]
pub fn mapped_bytes() -> u64 {
    0
}

/// The value of a line such as `MemAvailable:  1234 kB`, in bytes.
#[cfg(target_os = "linux")]
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
