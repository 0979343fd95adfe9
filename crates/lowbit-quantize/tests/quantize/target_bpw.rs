//! Bits shared out among the weights of tiny checkpoints.

use crate::support::{checkpoint, data};
use lowbit_kernels::Device;
use lowbit_quantize::{Budget, Made, MlxFormat, Progress, Recipe, Rule};
use std::ops::ControlFlow::{Break, Continue};
use std::path::Path;

fn in_groups_of_32(mode: &str) -> Recipe<'static> {
    Recipe::new(MlxFormat::for_mode(mode).with_group_size(32))
}

fn made(name: &str, output: &Path, recipe: &Recipe<'_>, bits_per_weight: f64) -> Result<Made, String> {
    let (data, device) = (data(1500, 48), Device::cpu(Some(2)).unwrap());
    let recipe = recipe.clone().with_budget(Budget { bits_per_weight, data: &data, device: &device });
    recipe.run(&checkpoint(name), output, |_| Continue(())).map_err(|error| error.to_string())
}

/// Bits per weight of all that is quantised, and the bits of modules with an entry of their own.
fn bits(made: &Made, output: &Path) -> (f64, Vec<String>) {
    let text = std::fs::read_to_string(output.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let modules = config["quantization"].as_object().unwrap().values().filter(|value| value.is_object());
    let bits = modules.map(|module| module["bits"].to_string()).collect();
    let is_affine = |(name, _): &(String, usize)| name.starts_with("affine");
    let kinds = made.summary.kinds.iter().filter(|kind| kind.formats.iter().any(is_affine));
    let sums =
        kinds.fold((0.0, 0.0), |sums, kind| (sums.0 + kind.bytes as f64, sums.1 + kind.parameters as f64));
    (8.0 * sums.0 / sums.1, bits)
}

#[test]
fn bits_per_weight_are_what_was_asked_for() {
    for name in ["qwen3", "qwen3_moe"] {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("new");
        let made = made(name, &output, &in_groups_of_32("affine"), 4.6).unwrap();
        assert!(made.rules.len() > 10, "{name}: {:?}", made.rules);
        // Nothing is left of the checkpoint of 8 bits.
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
        let (bits_per_weight, mut bits) = bits(&made, &output);
        assert!((4.3..=4.6).contains(&bits_per_weight), "{name}: {bits_per_weight}");
        bits.sort();
        bits.dedup();
        assert!(bits.len() > 2, "{name}: all weights have {bits:?} bits");
    }
}

/// More bits than a weight has in the source save nothing.
#[test]
fn no_weight_gets_more_bits_than_its_source_has() {
    let folder = tempfile::tempdir().unwrap();
    let (name, output) = ("qwen3-mlx-4bit", folder.path().join("new"));
    let made = made(name, &output, &in_groups_of_32("affine"), 4.6).unwrap();
    let (bits_per_weight, bits) = bits(&made, &output);
    assert!((4.3..=4.6).contains(&bits_per_weight), "{bits_per_weight}");
    // Those of 4 bits have no entry of their own.
    assert!(bits.len() > 3 && bits.len() < made.rules.len(), "{bits:?}");
    assert!(bits.iter().all(|bits| bits == "3" || bits == "2"), "{bits:?}");
}

#[test]
fn own_rules_hold_and_impossible_budgets_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new");
    let (affine, own): (_, Rule) = (in_groups_of_32("affine"), "embed_tokens=8".parse().unwrap());
    let rules = made("qwen3", &output, &affine.clone().with_rules(vec![own.clone()]), 7.0).unwrap().rules;
    assert_eq!(rules[0], own);
    assert!(!rules[1..].iter().any(|rule| format!("{rule:?}").contains("embed_tokens")));
    std::fs::remove_dir_all(&output).unwrap();
    let message = made("qwen3", &output, &affine, 2.9).unwrap_err();
    assert!(message.contains("2.9 bits per weight are too few: 2 bits everywhere are 3.000"), "{message}");
    let message = made("qwen3", &output, &in_groups_of_32("mxfp4"), 4.5).unwrap_err();
    assert!(message.contains("mxfp4 has one number of bits"), "{message}");
    let (data, device) = (data(1500, 48), Device::cpu(Some(1)).unwrap());
    let recipe = affine.with_budget(Budget { bits_per_weight: 4.0, data: &data, device: &device });
    let stopped = recipe.run(&checkpoint("qwen3"), &output, |progress| match progress {
        Progress::Budget(..) => Break(()),
        other => panic!("{other:?} before bits were shared out"),
    });
    assert!(stopped.is_err());
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}
