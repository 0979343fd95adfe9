//! A model's name and size as llama.cpp's converter writes them.

use super::Planned;

/// A folder's name as a title: `my-model-v2` is `My Model v2`.
pub(super) fn title(name: &str) -> String {
    let capitalised = |word: &str| {
        let mut after_letter = false;
        let letters = word.chars().map(|c| {
            let first = c.is_alphabetic() && !after_letter;
            after_letter = c.is_alphabetic();
            if first { c.to_ascii_uppercase() } else { c }
        });
        letters.collect::<String>()
    };
    let is_number =
        |word: &str| word.strip_prefix('v').unwrap_or(word).starts_with(|c: char| c.is_ascii_digit());
    let is_lower = |word: &str| word.chars().any(char::is_lowercase) && !word.chars().any(char::is_uppercase);
    let replaced = name.replace('-', " ");
    let words = replaced.split_whitespace().map(|word| match is_lower(word) && !is_number(word) {
        true => capitalised(word),
        false => word.to_string(),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The number of parameters, as names of models have it: `7.1B`, or `8x1.2B` for the part of such a
/// mixture that a token sees with one expert.
pub(super) fn size_label(tensors: &[Planned]) -> String {
    let (mut shared, mut of_one_expert, mut counts) = (0, 0, vec![]);
    for tensor in tensors {
        let (name, shape) = tensor.name_and_shape();
        let size: usize = shape.iter().product();
        match shape {
            [experts, _, _] if name.contains("_exps.") && *experts > 0 => {
                of_one_expert += size / experts;
                counts.push(*experts);
            }
            _ => shared += size,
        }
    }
    match counts.iter().sum::<usize>().checked_div(counts.len()) {
        Some(experts) => format!("{experts}x{}", rounded(shared + of_one_expert)),
        None => rounded(shared),
    }
}

/// A count with at least two digits.
fn rounded(count: usize) -> String {
    let count = count as f64;
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M")];
    let (unit, suffix) = units.into_iter().find(|(unit, _)| count > *unit).unwrap_or((1e3, "K"));
    let scaled = count / unit;
    let whole = format!("{scaled:.0}");
    let decimals = 2usize.saturating_sub(whole.trim_start_matches('0').len());
    format!("{scaled:.decimals$}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_llama_cpps() {
        for (name, want) in [
            ("demo", "Demo"),
            ("qwen3_5_moe", "Qwen3_5_Moe"),
            ("llama-bias", "Llama Bias"),
            ("Qwen3-0.6B-base", "Qwen3 0.6B Base"),
            ("model-v2-7b", "Model v2 7b"),
        ] {
            assert_eq!(title(name), want);
        }
        for (count, want) in [(192_000, "192K"), (9_000_000, "9.0M"), (596_000_000, "596M"), (1_500, "1.5K")]
        {
            assert_eq!(rounded(count), want);
        }
    }
}
