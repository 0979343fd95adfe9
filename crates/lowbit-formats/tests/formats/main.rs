//! Every format against its peer's own values (`tools/peer_vectors.py formats`), and its
//! properties.

mod check;
mod decode;
mod encode;
mod pack;
mod peer;
mod properties;
