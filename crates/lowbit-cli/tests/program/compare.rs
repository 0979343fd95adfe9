//! `lowbit perplexity --compare`.

use crate::support::{json, lowbit, refusal, root};
use serde_json::Value;
use std::path::Path;

const TINY: &str = "tests/vectors/models/qwen3";
const TINY_4BIT: &str = "tests/vectors/models/qwen3-mlx-4bit";

/// A text of about `characters`.
fn text(folder: &Path, characters: usize) -> String {
    let path = folder.join("text.txt");
    let text = std::fs::read_to_string(root().join("models/demo/eval.txt")).unwrap();
    std::fs::write(&path, text.chars().take(characters).collect::<String>()).unwrap();
    path.to_str().unwrap().to_string()
}

fn compared(arguments: &[&str]) -> Value {
    let result = json(&lowbit(&[&["perplexity", "--json"], arguments].concat()).output().unwrap());
    result["models"].clone()
}

#[test]
fn a_model_beside_itself_differs_in_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    let result =
        &compared(&["--file", &file, "--context", "64", "--model", TINY, "--compare", TINY, "--exact"])[0];
    for key in ["kl", "log_ratio", "probability_rms"] {
        assert_eq!(result[key]["value"], 0.0, "{key}");
    }
    assert_eq!((&result["kl_max"], &result["same_top"]["value"]), (&0.0.into(), &1.0.into()));
    // Both perplexities are that of the plain command.
    let plain =
        lowbit(&["perplexity", "--json", "-f", &file, "-c", "64", "--model", TINY, "--exact"]).output();
    let plain = json(&plain.unwrap());
    assert_eq!(result["tokens"], plain["tokens"]);
    for key in ["perplexity", "teacher_perplexity"] {
        let (got, want) = (result[key]["value"].as_f64().unwrap(), plain["perplexity"].as_f64().unwrap());
        assert!((got / want - 1.0).abs() < 1e-12, "{key}: {got} for {want}");
    }
}

#[test]
fn a_quantised_model_is_off_and_of_several_each_has_its_row() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    let both = compared(&["--file", &file, "--context", "64", "--compare", TINY, TINY_4BIT, TINY]);
    let (quantised, same) = (&both[0], &both[1]);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    assert!(number(&quantised["kl"], "value") > 0.0 && number(&same["kl"], "value") == 0.0);
    assert!(number(quantised, "kl_max") >= number(quantised, "kl_99.9"));
    assert!(number(quantised, "kl_99.9") >= number(quantised, "kl_99"));
    assert!(number(quantised, "bits_per_weight") < number(same, "bits_per_weight"));
    assert_eq!(quantised["teacher_perplexity"], same["perplexity"]);
    let rows = lowbit(&["perplexity", "-f", &file, "-c", "64", "--compare", TINY, TINY_4BIT, TINY]).output();
    let rows = String::from_utf8(rows.unwrap().stdout).unwrap();
    assert_eq!(rows.lines().count(), 4, "{rows}");
    assert!(rows.lines().nth(1).unwrap().starts_with(TINY_4BIT), "{rows}");
}

#[test]
fn the_table_has_the_lines_of_llama_perplexity() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    let arguments =
        ["perplexity", "-f", &file, "-c", "64", "--score", "second-half", "-m", TINY_4BIT, "--compare", TINY];
    let table = String::from_utf8(lowbit(&arguments).output().unwrap().stdout).unwrap();
    let number = |c: char| c.is_ascii_digit() || c == '.' || c == '-';
    // Numbers after the label are left out, and so is how wide they are.
    let label = |line: &str| match line.split_once(": ") {
        Some((label, rest)) => {
            let units: String = rest.chars().filter(|&c| !number(c) && c != ' ').collect();
            format!("{label}:{units}")
        }
        None => line.to_string(),
    };
    let got: Vec<_> = table.lines().map(label).collect();
    let want = "====== Perplexity statistics ======
Mean PPL(Q)                   :±
Mean PPL(base)                :±
Cor(ln(PPL(Q)), ln(PPL(base))):%
Mean ln(PPL(Q)/PPL(base))     :±
Mean PPL(Q)/PPL(base)         :±
Mean PPL(Q)-PPL(base)         :±

====== KL divergence statistics ======
Mean    KLD:±
Maximum KLD:
99.9%   KLD:
99.0%   KLD:
95.0%   KLD:
90.0%   KLD:
Median  KLD:
10.0%   KLD:
 5.0%   KLD:
 1.0%   KLD:
 0.1%   KLD:
Minimum KLD:

====== Token probability statistics ======
Mean    Δp:±%
Maximum Δp:%
99.9%   Δp:%
99.0%   Δp:%
95.0%   Δp:%
90.0%   Δp:%
75.0%   Δp:%
Median  Δp:%
25.0%   Δp:%
10.0%   Δp:%
 5.0%   Δp:%
 1.0%   Δp:%
 0.1%   Δp:%
Minimum Δp:%
RMS Δp    :±%
Same top p:±%";
    assert_eq!(got, want.lines().collect::<Vec<_>>());
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    let run = |arguments: &[&str]| {
        refusal(lowbit(&[&["perplexity", "--file", &file], arguments].concat()).output().unwrap())
    };
    let other = run(&["--model", TINY, "--compare", "models/demo-4bit"]);
    assert!(other.contains(TINY) && other.contains("encode the text differently: token 0 is "), "{other}");
    assert!(run(&["--model", TINY, "--compare", "none"]).contains("none"));
    let short = folder.path().join("short.txt");
    std::fs::write(&short, "x").unwrap();
    let short = lowbit(&["perplexity", "-f", short.to_str().unwrap(), "-m", TINY, "--compare", TINY]);
    assert!(refusal({ short }.output().unwrap()).contains("tokens are too few"));
}

#[test]
fn comparisons_are_exact_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    // Its numbers are those of the teacher but for 8-bit rounding, which activations in 8 bits
    // would hide.
    let eight = folder.path().join("eight");
    let eight = eight.to_str().unwrap();
    let made = lowbit(&["quantize", "-m", TINY, "-o", eight, "--bits", "8", "--group-size", "32"]).output();
    assert!(made.unwrap().status.success());
    let kl = |more: &[&str]| {
        let arguments = ["--file", &file, "-c", "64", "-m", eight, "--compare", TINY, "--device", "cpu"];
        compared(&[&arguments[..], more].concat())[0]["kl"]["value"].as_f64().unwrap()
    };
    assert_eq!(kl(&[]), kl(&["--exact"]));
    assert_ne!(kl(&[]), kl(&["--no-exact"]));
    let both = ["perplexity", "-f", &file, "-m", eight, "--compare", TINY, "--exact", "--no-exact"];
    assert_eq!(lowbit(&both).output().unwrap().status.code(), Some(2));
}

#[test]
fn tables_have_every_position_and_layer() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    let csv = folder.path().join("table.csv");
    let run = |more: &[&str]| {
        let arguments = ["perplexity", "--json", "-f", &file, "-c", "32", "--compare", TINY, TINY_4BIT, TINY];
        lowbit(&[&arguments[..], &["--csv", csv.to_str().unwrap()], more].concat()).output().unwrap()
    };
    let models = json(&run(&[]))["models"].clone();
    let table = std::fs::read_to_string(&csv).unwrap();
    let mut lines = table.lines();
    assert_eq!(lines.next(), Some("model,by,index,tokens,kl,kl_median,kl_99,nll,teacher_nll,same_top"));
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    assert!(rows.iter().all(|row| row.len() == 10), "{table}");
    for model in models.as_array().unwrap() {
        let name = format!("\"{}\"", model["model"].as_str().unwrap());
        let of = |by: &str| rows.iter().filter(|row| row[0] == name && row[1] == by).collect::<Vec<_>>();
        let number = |row: &[&str], column: usize| row[column].parse::<f64>().unwrap();
        let positions = of("position");
        assert_eq!(
            positions.iter().map(|row| number(row, 2)).collect::<Vec<_>>(),
            (1..32).map(f64::from).collect::<Vec<_>>()
        );
        // The means of all positions together are the mean.
        let count: f64 = positions.iter().map(|row| number(row, 3)).sum();
        assert_eq!(count, model["tokens"].as_f64().unwrap());
        let kl: f64 = positions.iter().map(|row| number(row, 3) * number(row, 4)).sum::<f64>() / count;
        let want = model["kl"]["value"].as_f64().unwrap();
        assert!((kl - want).abs() <= 1e-9 * want.max(1e-9), "{kl} for {want}");
        let layers = of("layer");
        assert!((2..=8).contains(&layers.len()) && layers.iter().all(|row| row[3].is_empty()), "{table}");
    }
    // An own table is replaced by force alone, and nothing else is.
    assert!(refusal(run(&[])).contains("table.csv exists already"));
    assert!(run(&["--force"]).status.success());
    std::fs::write(&csv, "mine").unwrap();
    let message = refusal(run(&["--force"]));
    assert!(
        message.contains("table.csv: is not a table of lowbit perplexity's, and is not replaced"),
        "{message}"
    );
    let same = refusal(run(&["--plot", csv.to_str().unwrap(), "--force"]));
    assert!(same.contains("are the same file"), "{same}");
    let text = ["perplexity", "-f", &file, "-m", TINY_4BIT, "--compare", TINY, "--csv", &file, "--force"];
    assert!(refusal(lowbit(&text).output().unwrap()).contains("--csv"));
    assert_eq!(std::fs::read_to_string(&csv).unwrap(), "mine");
}

#[test]
fn plots_are_drawn_once_and_replaced_by_force_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = text(folder.path(), 1500);
    let plot = folder.path().join("plot.svg");
    let run = |more: &[&str]| {
        let arguments = ["perplexity", "-f", &file, "-c", "32", "--compare", TINY, "-m", TINY_4BIT];
        lowbit(&[&arguments[..], &["--plot", plot.to_str().unwrap()], more].concat()).output().unwrap()
    };
    std::fs::write(&plot, "mine").unwrap();
    assert!(refusal(run(&[])).contains("plot.svg exists already"));
    assert!(refusal(run(&["--force"])).contains("plot.svg: is not a plot of lowbit's, and is not replaced"));
    assert_eq!(std::fs::read_to_string(&plot).unwrap(), "mine");
    std::fs::remove_file(&plot).unwrap();
    assert!(run(&[]).status.success());
    assert!(refusal(run(&[])).contains("plot.svg exists already"));
    assert!(run(&["--force"]).status.success());
    let svg = std::fs::read_to_string(&plot).unwrap();
    // A bin per position, since windows of 32 tokens have fewer than bins: mean, median and 99th
    // percentile; the layers; and one dot.
    let layers = svg.matches("<circle").count() - (3 * 31 + 1);
    assert!((2..=8).contains(&layers), "{layers} layers");
    assert_eq!(svg.matches("<polyline").count(), 4);
    let names = || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names().count(), 2, "{:?}", names().collect::<Vec<_>>());
}
