/// Asserts `|got - want| <= bound(i)`, element by element; `want` is the f64 reference.
///
/// # Panics
/// On a different length, an element over its bound, or a NaN on either side.
#[track_caller]
pub fn assert_within(got: &[f32], want: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len(), "length");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let (error, bound) = ((f64::from(got) - want).abs(), bound(i));
        // Not `error > bound`: a NaN must fail.
        if error.is_nan() || bound.is_nan() || error > bound {
            panic!("[{i}] got {got} want {want}: error {error:e} over bound {bound:e}");
        }
    }
}

/// Asserts that the values are the same bit for bit.
///
/// # Panics
/// On a different length or element.
#[track_caller]
pub fn assert_bits(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.to_bits(), want.to_bits(), "{what} [{i}]: got {got} want {want}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "over bound")]
    fn rejects_a_wrong_value_where_zero_is_expected() {
        assert_within(&[1.0], &[0.0], |_| 1e-6);
    }

    #[test]
    #[should_panic(expected = "over bound")]
    fn rejects_nan() {
        assert_within(&[f32::NAN], &[0.0], |_| 1.0);
    }

    #[test]
    #[should_panic(expected = "length")]
    fn rejects_a_short_output() {
        assert_within(&[], &[0.0], |_| 1.0);
    }

    #[test]
    fn accepts_the_bound_itself() {
        assert_within(&[1.5], &[1.0], |_| 0.5);
    }

    #[test]
    #[should_panic(expected = "want 0")]
    fn bits_tell_minus_zero() {
        assert_bits("zero", &[-0.0], &[0.0]);
    }
}
