use crate::{Codes, E2M1, E8M0, MicroscaledMode, Scales, Scheme};

/// MLX `mxfp4`: e2m1 codes, e8m0 scales, groups of 32.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4;

impl MicroscaledMode for Mxfp4 {
    const NAME: &'static str = "mxfp4";
    const GROUP: usize = 32;
    const SCHEME: Scheme = Scheme { bits: 4, codes: Codes::E2M1, scales: Scales::E8M0 { infinite: true } };
    type Code = E2M1;
    type Scale = E8M0;
}
