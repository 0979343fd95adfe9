use super::*;
use crate::ops::testing::{device, fetched};

fn subtracts_on(device: &Device) {
    for (positions, first, want) in
        [(&[70u32, 64, 65][..], 64u32, &[6u32, 0, 1][..]), (&[3, 0], 0, &[3, 0]), (&[], 5, &[])]
    {
        let at = Tensor::new(positions, &[positions.len()], device).unwrap();
        let first = Tensor::new(&[first], &[1], device).unwrap();
        assert_eq!(fetched(&cache_places(&at, &first).unwrap()).as_slice::<u32>().unwrap(), want);
    }
    // More than the units of a cube.
    let positions: Vec<u32> = (1000..1300).collect();
    let at = Tensor::new(&positions, &[300], device).unwrap();
    let first = Tensor::new(&[1000u32], &[1], device).unwrap();
    let want: Vec<u32> = (0..300).collect();
    assert_eq!(fetched(&cache_places(&at, &first).unwrap()).as_slice::<u32>().unwrap(), want);
}

#[test]
fn subtracts() {
    subtracts_on(&device());
}

#[cfg(feature = "gpu")]
#[test]
fn subtracts_on_a_gpu() {
    let gpu = crate::ops::testing::gpu();
    subtracts_on(&gpu);
    let (at, first) = (Tensor::new(&[3u32], &[1], &gpu).unwrap(), Tensor::new(&[4u32], &[1], &gpu).unwrap());
    assert_eq!(fetched(&cache_places(&at, &first).unwrap()).as_slice::<u32>().unwrap(), [u32::MAX]);
}

#[test]
fn refusals_name_both_sides() {
    let device = device();
    let ids = |ids: &[u32]| Tensor::new(ids, &[ids.len()], &device).unwrap();
    let refused = |at: &Tensor, first: &Tensor| cache_places(at, first).unwrap_err().to_string();
    assert_eq!(
        refused(&ids(&[64, 63]), &ids(&[64])),
        "cache_places: positions is 63, but the cache begins with position 64"
    );
    assert_eq!(refused(&ids(&[1]), &ids(&[0, 0])), "cache_places: first is [2], but one position wants [1]");
    let floats = Tensor::zeros(&[1], DType::F32, &device);
    assert_eq!(refused(&floats, &ids(&[0])), "cache_places: positions is f32, but u32 is wanted");
    assert_eq!(refused(&ids(&[0]), &floats), "cache_places: first is f32, but u32 is wanted");
}
