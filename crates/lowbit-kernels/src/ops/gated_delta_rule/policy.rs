use super::Form;

/// Tokens of a sequence from which chunks are faster, measured at `Dk = Dv = 128`.
const CROSSOVER: usize = 6;

/// The form for a sequence of `tokens` tokens.
pub(super) fn form(asked: Form, tokens: usize) -> Form {
    match asked {
        Form::Auto if tokens >= CROSSOVER => Form::Chunked,
        Form::Auto => Form::Recurrent,
        chosen => chosen,
    }
}

/// Tokens a sequence, on average, from which chunks are faster on an H200: lengths are not known
/// when kernels are launched.
#[cfg(feature = "gpu")]
const GPU_CROSSOVER: usize = 20;

/// The form on a GPU for `sequences` sequences of `tokens` tokens in all. `chunks` says whether it
/// can do chunks.
#[cfg(feature = "gpu")]
pub(super) fn gpu_form(asked: Form, chunks: bool, tokens: usize, sequences: usize) -> Form {
    match asked {
        _ if !chunks => Form::Recurrent,
        Form::Auto if tokens >= GPU_CROSSOVER * sequences => Form::Chunked,
        Form::Auto => Form::Recurrent,
        chosen => chosen,
    }
}

/// Units of a GPU that share a column of the state, with planes of at least `plane` units: more
/// where there are few columns, fewer where their loads keep the device busy anyhow and sums cost
/// more; never so few that the columns do not fit into registers.
#[cfg(feature = "gpu")]
pub(super) fn gpu_lanes(key_dim: usize, columns: usize, plane: usize) -> usize {
    let lanes = if columns <= 1 << 14 { 16 } else { 4 };
    lanes.max(key_dim.div_ceil(32).next_power_of_two()).min(plane)
}

#[test]
fn chunks_from_the_crossover_unless_asked_otherwise() {
    for (asked, tokens, want) in [
        (Form::Auto, 1, Form::Recurrent),
        (Form::Auto, CROSSOVER - 1, Form::Recurrent),
        (Form::Auto, CROSSOVER, Form::Chunked),
        (Form::Auto, 4096, Form::Chunked),
        (Form::Recurrent, 4096, Form::Recurrent),
        (Form::Chunked, 1, Form::Chunked),
    ] {
        assert_eq!(form(asked, tokens), want, "{asked:?} {tokens}");
    }
}

#[cfg(feature = "gpu")]
#[test]
fn chunks_on_gpus_that_can() {
    for (asked, chunks, tokens, sequences, want) in [
        (Form::Auto, true, 1, 1, Form::Recurrent),
        (Form::Auto, true, GPU_CROSSOVER, 1, Form::Chunked),
        (Form::Auto, true, 2 * GPU_CROSSOVER - 1, 2, Form::Recurrent),
        (Form::Auto, false, 4096, 1, Form::Recurrent),
        (Form::Chunked, false, 4096, 1, Form::Recurrent),
        (Form::Chunked, true, 1, 1, Form::Chunked),
        (Form::Recurrent, true, 4096, 1, Form::Recurrent),
    ] {
        assert_eq!(
            gpu_form(asked, chunks, tokens, sequences),
            want,
            "{asked:?} {chunks} {tokens} {sequences}"
        );
    }
}

#[cfg(feature = "gpu")]
#[test]
fn lanes_of_a_column() {
    // (Dk, columns, plane) -> lanes
    let table = [
        ((128, 4096, 32), 16),
        ((128, 4096, 8), 8),
        ((128, 1 << 18, 32), 4),
        ((256, 1 << 18, 32), 8),
        ((16, 1, 4), 4),
    ];
    for ((key_dim, columns, plane), want) in table {
        assert_eq!(gpu_lanes(key_dim, columns, plane), want, "{key_dim} {columns} {plane}");
    }
}
