//! transformers' own frequencies and rotations.

use super::*;
use crate::ops::testing::{devices, values};
use numcheck::{Vectors, gamma};

/// A case of tools/peer_vectors/ops.py.
struct Case {
    name: &'static str,
    theta: f64,
    rotary_dim: usize,
    layout: RopeLayout,
    scaling: RopeScaling,
}

fn cases() -> Vec<Case> {
    use RopeLayout::{HalfSplit, Interleaved};
    use RopeScaling::None;
    let case = |name, theta, rotary_dim, layout, scaling| Case { name, theta, rotary_dim, layout, scaling };
    let llama3 = |factor| {
        RopeScaling::Llama3(Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        })
    };
    let yarn = Yarn::new(4.0, 32768);
    let mscale = Yarn { factor: 40.0, mscale: Some(1.0), mscale_all_dim: Some(0.8), ..yarn };
    let untruncated = Yarn { truncate: false, beta_fast: 24.0, beta_slow: 2.0, ..yarn };
    vec![
        case("plain", 1e4, 128, HalfSplit, None),
        case("odd_sizes", 1e6, 36, HalfSplit, None),
        case("partial", 1e7, 16, HalfSplit, None),
        case("interleaved", 1e4, 64, Interleaved, None),
        case("linear", 1e4, 64, HalfSplit, RopeScaling::Linear { factor: 3.0 }),
        case("llama3", 5e5, 128, HalfSplit, llama3(8.0)),
        case("llama3_2", 5e5, 64, HalfSplit, llama3(32.0)),
        case("yarn", 1e6, 128, HalfSplit, RopeScaling::Yarn(yarn)),
        case("yarn_partial", 1e7, 64, HalfSplit, RopeScaling::Yarn(yarn)),
        case(
            "yarn_factor",
            1e4,
            64,
            HalfSplit,
            RopeScaling::Yarn(Yarn { attention_factor: Some(0.7), ..yarn }),
        ),
        case("yarn_mscale", 1e4, 64, Interleaved, RopeScaling::Yarn(mscale)),
        case("yarn_untruncated", 1.5e5, 64, HalfSplit, RopeScaling::Yarn(untruncated)),
    ]
}

#[test]
fn frequencies_and_rotations() {
    let vectors = Vectors::open("ops/rope");
    let cases = cases();
    assert_eq!(vectors.names().len(), 1 + 4 * cases.len(), "a case is not tested");
    let positions = vectors.get("positions").u32s();
    for Case { name, theta, rotary_dim, layout, scaling } in cases {
        let params = RopeParams { theta, rotary_dim, layout, scaling, freq_factors: None };
        let rotation = Rope::new(&params).unwrap();
        let get = |part: &str| vectors.get(&format!("{name}.{part}"));
        let want = get("inv_freq").f32s();
        assert_eq!(get("attention_factor").f32s(), [rotation.attention_factor()], "{name}");
        // Both sides' powers are within an ulp of the true one, so each other's within two.
        numcheck::assert_within(
            rotation.inv_freq(),
            &want.iter().map(|&f| f64::from(f)).collect::<Vec<_>>(),
            |i| gamma(4) * f64::from(want[i]),
        );
        // With transformers' frequencies the angles are its own, and only roundings are left, on
        // either side.
        let rotation = Rope { inv_freq: want, ..rotation };
        let (x, want) = (get("x"), get("rotated").f32s());
        let (xs, width) = (x.f32s(), x.shape[2]);
        let greatest = f64::from(xs.iter().fold(0f32, |a, b| a.max(b.abs())));
        for device in devices() {
            let x = Tensor::new(&xs, &x.shape, &device).unwrap();
            let at = Tensor::new(&positions, &[positions.len()], &device).unwrap();
            let y = rope(&x, &at, &rotation).unwrap();
            assert_eq!(width, y.dim(2));
            let want: Vec<f64> = want.iter().map(|&y| f64::from(y)).collect();
            let factor = f64::from(rotation.attention_factor());
            numcheck::assert_within(&values(&y), &want, |_| {
                2.0 * gamma(reference::ROUNDINGS) * 2.0 * greatest * factor
            });
        }
    }
}
