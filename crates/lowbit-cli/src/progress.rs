//! Progress bars, on a terminal only.

use crate::out;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar on standard error of what is being done, which takes so many of the things that are
/// counted; hidden where that is no terminal.
pub fn bar(doing: &'static str, counted: &'static str, length: usize) -> ProgressBar {
    styled("{msg} {wide_bar} {pos} of {len} {prefix}, {eta} left", length)
        .with_message(doing)
        .with_prefix(counted)
}

/// Says on a bar what is being done now, and how many of the things that are counted are done, of
/// all.
pub fn show(
    bar: &ProgressBar,
    doing: impl Into<std::borrow::Cow<'static, str>>,
    counted: &'static str,
    (done, all): (u64, u64),
) {
    bar.set_message(doing);
    bar.set_prefix(counted);
    bar.set_length(all);
    bar.set_position(done);
}

/// A bar of bytes.
#[cfg(feature = "hub")]
pub fn bytes(doing: &'static str) -> ProgressBar {
    styled("{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left", 0).with_message(doing)
}

fn styled(template: &str, length: usize) -> ProgressBar {
    let shown = std::io::stderr().is_terminal();
    let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(length as u64), target).with_style(style)
}

/// A spinner while something of unknown length runs.
pub fn spinner(what: String) -> ProgressBar {
    let shown = std::io::stderr().is_terminal();
    let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::default_spinner();
    let spinner = ProgressBar::with_draw_target(None, target).with_style(style).with_message(what);
    // It turns on a thread of its own, and panics where there is none to be had. A still one is no
    // reason to stop.
    if shown && std::thread::Builder::new().spawn(|| ()).is_ok() {
        spinner.enable_steady_tick(std::time::Duration::from_millis(100));
    }
    spinner
}

/// Shows on a spinner how many of how many kernels are compiled. Where there is no terminal, a line
/// says that this is what takes time.
pub fn compiling(spinner: &ProgressBar) -> impl FnMut(usize, usize) + Send + use<> {
    let spinner = spinner.clone();
    move |done, of| match spinner.is_hidden() {
        true if done == 0 => out::note!("compiling {of} kernels"),
        true => {}
        false => spinner.set_message(format!("compiling kernels {done}/{of}")),
    }
}
