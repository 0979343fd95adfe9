//! Peers' results.

use super::*;

/// The peers' results with a decay per head, and per channel.
const PEERS: [&str; 2] = ["delta/gated_delta_rule", "delta/gated_delta_rule_channels"];

/// Checks a peer's results for the vectors' sequences against ours: both may be a bound away from
/// the exact values. The peer's state may be `transposed`.
fn check_peer(file: &str, peer: &str, (params, transposed): (GatedDeltaRule, bool), chunk: usize) {
    let file = numcheck::Vectors::open(file);
    let device = Device::cpu(None).unwrap();
    let load = |name: &str| {
        let vector = file.get(name);
        // [2, T, ..] is [2 T, ..] here.
        let tokens = vector.shape[0] * vector.shape[1];
        let shape = [&[tokens], &vector.shape[2..]].concat();
        Tensor::new(&vector.f32s(), &shape, &device).unwrap()
    };
    let [q, k, v, log_decay, beta] = ["q", "k", "v", "log_decay", "beta"].map(load);
    let tokens = q.dim(0) as u32;
    let start = file.get("state");
    let state = Tensor::new(&start.f32s(), &start.shape, &device).unwrap();
    let mut last = file.get(&format!("{peer}.state")).f32s();
    if transposed {
        let (rows, columns) = (state.dim(2), state.dim(3));
        for matrix in last.chunks_exact_mut(rows * columns) {
            let from = matrix.to_vec();
            crate::gemm::transpose((&from, rows), (matrix, columns), (columns, rows));
        }
    }
    let cu_seqlens = Tensor::new(&[0, tokens / 2, tokens], &[3], &device).unwrap();
    let params = GatedDeltaRule { exact: true, ..params };
    let (raw, made, slots) = (None, Made::Raw, None);
    let case = Case { q, k, v, log_decay, beta, raw, made, cu_seqlens, state, slots, params };
    let (want_y, want_state) =
        reference(&case.inputs(), &case.state, &case.params, chunk, |_, _| true).unwrap();
    for form in [Form::Auto, Form::Recurrent, Form::Chunked] {
        let case = Case { params: GatedDeltaRule { form, ..params }, ..case.clone() };
        let (y, state) = case.run().unwrap();
        let exact = |peer: Vec<f32>| peer.into_iter().map(f64::from).collect::<Vec<_>>();
        let y_of_peer = exact(file.get(&format!("{peer}.y")).f32s());
        assert_within(&values(&y), &y_of_peer, |i| 2.0 * want_y.bounds[i]);
        assert_within(&values(&state), &exact(last.clone()), |i| 2.0 * want_state.bounds[i]);
    }
}

#[test]
fn agrees_with_transformers() {
    for file in PEERS {
        check_peer(file, "recurrent", (GatedDeltaRule::new(10), false), cpu::CHUNK);
        check_peer(file, "chunked", (GatedDeltaRule::new(10), false), 64);
    }
}

/// Its state is `[Dv, Dk]`.
#[test]
fn agrees_with_mlx_lm() {
    let params = GatedDeltaRule { scale: 1.0, ..GatedDeltaRule::new(10) };
    PEERS.iter().for_each(|file| check_peer(file, "mlx", (params, true), cpu::CHUNK));
}
