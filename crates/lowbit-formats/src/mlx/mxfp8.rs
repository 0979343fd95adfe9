use crate::{Codes, E4M3, E8M0, MicroscaledMode, Scales, Scheme};

/// MLX `mxfp8`: e4m3 codes, e8m0 scales, groups of 32.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp8;

impl MicroscaledMode for Mxfp8 {
    const NAME: &'static str = "mxfp8";
    const GROUP: usize = 32;
    const SCHEME: Scheme = Scheme { bits: 8, codes: Codes::E4M3, scales: Scales::E8M0 { infinite: true } };
    type Code = E4M3;
    type Scale = E8M0;
}
