//! Peers' results.

use super::*;

/// The peers' results with a decay per head, and per channel.
const PEERS: [&str; 2] = ["delta/gated_delta_rule", "delta/gated_delta_rule_channels"];

/// Checks a peer's results for the vectors' sequences against ours: both may be a bound away from
/// the exact values.
fn check_peer(file: &str, peer: &str, params: GatedDeltaRule, chunk: usize) {
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
    let mut state = Tensor::new(&start.f32s(), &start.shape, &device).unwrap();
    let last = file.get(&format!("{peer}.state"));
    if params.state_layout == StateLayout::ValueKey {
        let [s, h, i, j]: [usize; 4] = start.shape[..].try_into().unwrap();
        let values = start.f32s();
        let swapped: Vec<f32> =
            (0..s * h * i * j).map(|at| values[(at / (i * j) * i + at % i) * j + at / i % j]).collect();
        state = Tensor::new(&swapped, &[s, h, j, i], &device).unwrap();
    }
    assert_eq!(last.shape, state.shape());
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
        assert_within(&values(&state), &exact(last.f32s()), |i| 2.0 * want_state.bounds[i]);
    }
}

#[test]
fn agrees_with_transformers() {
    for file in PEERS {
        check_peer(file, "recurrent", GatedDeltaRule::new(10), cpu::CHUNK);
        check_peer(file, "chunked", GatedDeltaRule::new(10), 64);
    }
}

#[test]
fn agrees_with_mlx_lm() {
    let params =
        GatedDeltaRule { scale: 1.0, state_layout: StateLayout::ValueKey, ..GatedDeltaRule::new(10) };
    PEERS.iter().for_each(|file| check_peer(file, "mlx", params, cpu::CHUNK));
}
