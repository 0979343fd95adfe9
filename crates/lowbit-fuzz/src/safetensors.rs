use ::safetensors::SafeTensors as Peer;
use bytes::Bytes;
use lowbit_files::{Tensors, safetensors};

use crate::{check_view, file};

/// A safetensors file: what is accepted, the `safetensors` package accepts too, with the same
/// tensors.
pub fn safetensors(data: &[u8]) {
    let bytes = Bytes::copy_from_slice(data);
    let Ok(parsed) = safetensors::parse(&bytes, &file()) else { return };
    parsed.tensors.iter().for_each(|view| check_view(view, &bytes));
    let peer = Peer::deserialize(data).expect("the peer accepts it");
    assert_eq!(peer.len(), parsed.tensors.len());
    for view in &parsed.tensors {
        let tensor = peer.tensor(&view.name).expect("the peer has it");
        assert_eq!((tensor.shape(), tensor.data()), (&view.shape[..], &view.bytes.get()[..]), "{view:?}");
    }
    Tensors::new(parsed.tensors).expect("names are unique");
}
