mod batch;
mod batch_guesses;
mod model;
mod request;
mod scaling;
mod server;
mod speculation;

use crate::options::{ModelOptions, at_least_one};
use crate::out::Unwritable;
use crate::{Failure, explain, json, out, progress};
use lowbit::Device;
use lowbit_files::staging::{open_to_write, sync};
use lowbit_kernels::bench::{self, Case, Limits, Row};
use server::ServerArguments;
use speculation::GuessArguments;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Flags of `bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Words that a case's line must contain: an op, a format, a size such as M=1.
    filter: Vec<String>,
    #[command(flatten)]
    pub model: ModelOptions,
    /// With --model: prompt lengths in tokens [default: 512, 4096]. With --server: one length
    /// [default: 512].
    #[arg(long, value_delimiter = ',', value_parser = at_least_one())]
    pub prompt_tokens: Vec<usize>,
    /// With --model or --server: tokens to write [default: 128].
    #[arg(long, value_parser = at_least_one())]
    pub generated_tokens: Option<usize>,
    /// With --model: lengths in tokens of a text that stands before each prompt and reply; it is
    /// not timed.
    #[arg(long, value_delimiter = ',', default_values_t = [0], requires = "model")]
    pub depth: Vec<usize>,
    /// With --model: numbers of sequences, up to 256, that are written side by side; the times are
    /// those of all together, as of llama.cpp's llama-batched-bench [default prompt length: 512].
    #[arg(long, value_delimiter = ',', requires = "model", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub batch: Vec<usize>,
    /// With --model: timed runs of each case, whose median is printed. One that is not timed comes
    /// before them.
    #[arg(long, default_value_t = 5, requires = "model", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1000))]
    pub runs: usize,
    /// Add the rows to bench/record/<device>/<date>.csv.
    #[arg(long)]
    pub record: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    /// List the cases that the words leave, and time none.
    #[arg(long, conflicts_with_all = ["model", "hf_repo"])]
    list: bool,
    /// Time how ops grow with their sizes and with threads, instead of the layers of known models.
    #[arg(long, conflicts_with = "model")]
    scaling: bool,
    /// Say on standard error which kernel each product takes, how it is cut, and why; and what
    /// Vulkan's driver made of each kernel.
    #[arg(long)]
    explain: bool,
    #[command(flatten)]
    pub guesses: GuessArguments,
    #[command(flatten)]
    server: ServerArguments,
}

/// Tokens that a model writes in a timed run, unless a flag says otherwise.
const GENERATED: usize = 128;

/// Checks and times the ops; with --model, times a whole model.
pub fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.explain {
        explain::start();
    }
    if let Some(url) = &arguments.server.server {
        return server::run(arguments, url);
    }
    arguments.guesses.check()?;
    if arguments.model.is_named() {
        return match (arguments.batch.is_empty(), arguments.guesses.draft_accept) {
            (true, _) => model::run(arguments),
            (false, None) => batch::run(arguments),
            (false, Some(_)) => batch_guesses::run(arguments),
        };
    }
    for (flag, given) in [
        ("--prompt-tokens", !arguments.prompt_tokens.is_empty()),
        ("--generated-tokens", arguments.generated_tokens.is_some()),
    ] {
        if given {
            return Err(format!("{flag} goes with --model or --server").into());
        }
    }
    let filter = arguments.filter.join(" ");
    if arguments.list {
        return list(arguments, &filter);
    }
    if arguments.scaling {
        return scaling::run(arguments, &filter);
    }
    let device = arguments.model.device()?;
    let rows = time(&bench::cases(&filter, &device), &filter, &device, arguments.json)?;
    if arguments.json {
        print_json(rows.iter().map(|row| (row_json(row), &device)).collect())?;
    }
    if arguments.record {
        record(&device, "", &rows)?;
    }
    Ok(())
}

/// Lists the cases that `filter` leaves.
fn list(arguments: &Arguments, filter: &str) -> Result<(), Failure> {
    let cases = match arguments.scaling {
        true => bench::scaling_cases(filter),
        false => bench::cases(filter, &arguments.model.device()?),
    };
    check(&cases, filter)?;
    if arguments.json {
        let case = |Case { op, shape, format, dtype, .. }: &Case| {
            let dtype = dtype.dtype().to_string();
            serde_json::json!({ "op": op, "shape": shape, "format": format, "dtype": dtype })
        };
        let cases: Vec<_> = cases.iter().map(case).collect();
        return json::print("bench", &serde_json::json!({ "cases": cases }));
    }
    cases.iter().try_for_each(|case| out::line!("{case}"))?;
    Ok(())
}

fn check(cases: &[Case], filter: &str) -> Result<(), Failure> {
    match cases.is_empty() {
        true => Err(format!("no benchmark case matches {filter:?}; `lowbit bench --list` shows all").into()),
        false => Ok(()),
    }
}

/// Prints rows, each with where it was measured.
fn print_json(rows: Vec<(serde_json::Value, &Device)>) -> Result<(), Failure> {
    let with_place = |(mut row, device): (serde_json::Value, &Device)| {
        row["device"] = device.to_string().into();
        row["threads"] = threads(device).into();
        row["version"] = env!("CARGO_PKG_VERSION").into();
        row
    };
    let rows: Vec<_> = rows.into_iter().map(with_place).collect();
    json::print("bench", &serde_json::json!({ "rows": rows }))
}

/// Prints what was measured of the model at `path`.
fn print_figures(figures: &[impl serde::Serialize], path: &Path, device: &Device) -> Result<(), Failure> {
    let path = path.display().to_string();
    let rows = figures.iter().map(|figure| {
        let mut row = serde_json::to_value(figure)?;
        row["model"] = path.as_str().into();
        Ok((row, device))
    });
    print_json(rows.collect::<Result<_, serde_json::Error>>()?)
}

/// Of a CPU; `None` for a GPU.
fn threads(device: &Device) -> Option<usize> {
    match device {
        Device::Cpu(cpu) => Some(cpu.threads()),
        Device::Gpu(_) => None,
    }
}

/// Checks and times `cases`, those that `filter` left, and prints them unless `quiet`.
fn time(cases: &[Case], filter: &str, device: &Device, quiet: bool) -> Result<Vec<Row>, Failure> {
    check(cases, filter)?;
    let spinner = progress::spinner("measuring the limits".into());
    let limits = Limits::measure(device)?;
    spinner.finish_and_clear();
    if !quiet {
        print_header(device, &limits)?;
    }
    let mut rows = vec![];
    for case in cases {
        let spinner = progress::spinner(case.to_string());
        let row = bench::run(case, device, &limits)?;
        spinner.finish_and_clear();
        if !quiet {
            print_row(&row)?;
        }
        rows.push(row);
    }
    Ok(rows)
}

fn print_header(device: &Device, limits: &Limits) -> Result<(), Unwritable> {
    let bandwidth = format!("{:.1} GB/s", limits.bytes_per_second / 1e9);
    let rates = [
        (Some(limits.f32_per_second), "f32"),
        (limits.bf16_per_second, "bf16"),
        (limits.int8_per_second, "int8"),
    ];
    match device {
        Device::Cpu(cpu) => {
            let rates =
                rates.iter().filter_map(|(rate, name)| Some(format!(", {name} {:.1} Gop/s", (*rate)? / 1e9)));
            let rates: String = rates.collect();
            out::line!("{device}, {} threads: reads {bandwidth}{rates}\n", cpu.threads())
        }
        Device::Gpu(_) if limits.f32_per_second.is_finite() => {
            let rate = limits.f32_per_second / 1e12;
            out::line!(
                "{device}: a copy reads and writes {bandwidth}, the vendor's bf16 product {rate:.1} Top/s\n"
            )
        }
        Device::Gpu(_) => out::line!("{device}: a copy reads and writes {bandwidth}\n"),
    }?;
    out::line!(
        "{:<18} {:<28} {:<11} {:<5} {:>12} {:>10} {:>8} {:>9} {:>7} {:>8}",
        "op",
        "shape",
        "format",
        "dtype",
        "median us",
        "± us",
        "GB/s",
        "GFLOP/s",
        "limit",
        "error"
    )
}

fn print_row(row: &Row) -> Result<(), Unwritable> {
    let Row { op, shape, format, dtype, median_us, deviation_us, share_of_limit, error_over_bound, .. } = row;
    out::line!(
        "{op:<18} {shape:<28} {format:<11} {dtype:<5} {median_us:>12.1} {deviation_us:>10.1} {:>8.2} {:>9.2} {:>6.1}% {error_over_bound:>8.4}",
        row.gigabytes_per_second(),
        row.gigaflops(),
        share_of_limit * 100.0,
    )
}

fn row_json(row: &Row) -> serde_json::Value {
    let Row { op, shape, format, dtype, median_us, deviation_us, bytes, flops, .. } = row;
    serde_json::json!({
        "op": op, "shape": shape, "format": format, "dtype": dtype, "median_us": median_us,
        "deviation_us": deviation_us, "bytes": bytes, "flops": flops, "share_of_limit": row.share_of_limit,
        "error_over_bound": row.error_over_bound,
    })
}

/// Appends rows to today's record, whose name ends in `suffix`.
fn record(device: &Device, suffix: &str, rows: &[Row]) -> Result<(), Failure> {
    let threads = threads(device).map(|threads| threads.to_string()).unwrap_or_default();
    let line = |row: &Row| format!("{},{threads},{}\n", row.csv(), env!("CARGO_PKG_VERSION"));
    let (header, lines) =
        (format!("{},threads,version", Row::HEADER), rows.iter().map(line).collect::<String>());
    let folder = PathBuf::from(format!("bench/record/{device}"));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let days = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86400;
    let path = folder.join(format!("{}{suffix}.csv", date(days)));
    append(&path, &header, &lines).map_err(|error| format!("{}: {error}", path.display()))?;
    out::note!("recorded in {}", path.display());
    Ok(())
}

/// Appends all lines or, where the disk is full, none; one process at a time. A new file begins
/// with `header`.
fn append(path: &Path, header: &str, lines: &str) -> std::io::Result<()> {
    let new = File::create_new(path);
    let mut file = match new {
        // Opening a FIFO for writing would wait for a reader.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            open_to_write(path).map_err(Error::other)?
        }
        new => new?,
    };
    // A file system without locks has one user, as a rule.
    let _ = file.lock();
    let length = file.seek(SeekFrom::End(0))?;
    let text = if length == 0 { format!("{header}\n{lines}") } else { lines.to_string() };
    if length > 0 && !has_header(&mut file, header)? {
        return Err(Error::other(format!(
            "has other columns than {header}: an earlier version wrote it; move it away"
        )));
    }
    file.seek(SeekFrom::End(0))?;
    let written = file.write_all(text.as_bytes()).and_then(|()| sync(&file));
    if written.is_err() {
        let _ = file.set_len(length);
    }
    written
}

fn has_header(file: &mut File, header: &str) -> std::io::Result<bool> {
    let (want, mut head) = (format!("{header}\n"), vec![]);
    file.rewind()?;
    file.take(want.len() as u64).read_to_end(&mut head)?;
    Ok(head == want.as_bytes())
}

/// Days since 1970-01-01 as year, month and day (Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms").
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn records_of_several_processes_do_not_mix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.csv");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let (path, lines) = (&path, format!("{writer},a\n{writer},b\n"));
                scope.spawn(move || (0..10).for_each(|_| super::append(path, "op,x", &lines).unwrap()));
            }
        });
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (81, "op,x"));
        assert!(lines[1..].chunks(2).all(|pair| pair[0].split_once(",a").unwrap().0 == &pair[1][..1]));
        let message = super::append(&path, "op,y", "1,2\n").unwrap_err().to_string();
        assert_eq!(message, "has other columns than op,y: an earlier version wrote it; move it away");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn dates() {
        let days = [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_778, "2026-11-21")];
        for (days, want) in days {
            assert_eq!(super::date(days), want);
        }
    }
}
