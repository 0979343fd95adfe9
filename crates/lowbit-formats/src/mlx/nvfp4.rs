use crate::{Codes, E2M1, E4M3, MicroscaledMode, Scales, Scheme};

/// MLX `nvfp4`: e2m1 codes, e4m3 scales, groups of 16. Values beyond 6 * 448 are encoded as 6 *
/// 448, as MLX does.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4;

impl MicroscaledMode for Nvfp4 {
    const NAME: &'static str = "nvfp4";
    const GROUP: usize = 16;
    const SCHEME: Scheme = Scheme { bits: 4, codes: Codes::E2M1, scales: Scales::E4M3 };
    type Code = E2M1;
    type Scale = E4M3;
}
