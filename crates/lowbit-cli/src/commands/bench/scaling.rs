//! `bench --scaling`: how times grow with sizes and threads.

use super::{Arguments, print_json, record, row_json, threads, time};
use crate::{Failure, out};
use lowbit::Device;
use lowbit_kernels::bench::{Row, scaling_cases};

/// A time may grow this much more than the work does from one size to the next.
const STEP: f64 = 1.3;

/// Times the cases with 1, 2, 4, .. threads, up to those asked for, and names every step in time
/// that the work does not explain.
pub fn run(arguments: &Arguments, filter: &str) -> Result<(), Failure> {
    let mut all = vec![];
    let device = arguments.model.device()?;
    let most = threads(&device).unwrap_or(1);
    let halves = std::iter::successors(Some(most), |&threads| (threads > 1).then_some(threads / 2));
    let mut counts: Vec<_> = halves.collect();
    counts.reverse();
    for threads in counts {
        let device = match &device {
            Device::Cpu(_) => arguments.model.device.cpu_with_threads(threads)?,
            Device::Gpu(_) => device.clone(),
        };
        let rows = time(&scaling_cases(filter), filter, &device, arguments.json)?;
        if arguments.record {
            record(&device, "-scaling", &rows)?;
        }
        all.extend(rows.into_iter().map(|row| (device.clone(), row)));
    }
    if arguments.json {
        print_json(all.iter().map(|(device, row)| (row_json(row), device)).collect())?;
    }
    for pair in all.windows(2) {
        let [(device, before), (other, after)] = pair else { unreachable!("windows of two") };
        let (threads, others) = (threads(device).unwrap_or(1), threads(other).unwrap_or(1));
        if let Some(step) = unexplained_step(before, after).filter(|_| threads == others) {
            let Row { op, format, .. } = before;
            let (from, to) = (&before.shape, &after.shape);
            out::note!(
                "{op} {format}, {threads} threads: {step:.2} times the work's growth from {from} to {to}"
            );
        }
    }
    Ok(())
}

/// The growth of the time divided by that of the work, if that is too much. The work is operations
/// or bytes, whichever grows more.
fn unexplained_step(before: &Row, after: &Row) -> Option<f64> {
    if (&before.op, &before.format) != (&after.op, &after.format) || after.flops <= before.flops {
        return None;
    }
    let work = f64::max(after.flops as f64 / before.flops as f64, after.bytes as f64 / before.bytes as f64);
    let step = after.median_us / before.median_us / work;
    (step > STEP).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(flops: usize, median_us: f64) -> Row {
        let [op, shape, format, dtype] = ["quantized_matmul", "M=1", "Q4_0", "f32"].map(String::from);
        let (deviation_us, share_of_limit, error_over_bound) = (0.1, 0.5, 0.0);
        let bytes = 100;
        Row {
            op,
            shape,
            format,
            dtype,
            median_us,
            deviation_us,
            bytes,
            flops,
            share_of_limit,
            error_over_bound,
        }
    }

    #[test]
    fn steps_beyond_the_work_are_found() {
        assert_eq!(unexplained_step(&row(100, 10.0), &row(200, 25.9)), None);
        assert_eq!(unexplained_step(&row(100, 10.0), &row(200, 30.0)), Some(1.5));
        // The next sweep begins.
        assert_eq!(unexplained_step(&row(400, 10.0), &row(200, 30.0)), None);
        assert_eq!(unexplained_step(&row(100, 10.0), &Row { format: "Q8_0".into(), ..row(200, 90.0) }), None);
    }
}
