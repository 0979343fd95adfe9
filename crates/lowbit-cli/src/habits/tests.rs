use super::*;
use crate::Arguments;
use clap::{CommandFactory, Parser};

fn translated(line: &str) -> Result<String, String> {
    let arguments = ["lowbit"].into_iter().chain(line.split(' ')).map(OsString::from);
    let arguments = translate(&Arguments::command(), arguments).map_err(|failure| failure.to_string())?;
    let words: Vec<_> = arguments[1..].iter().map(|word| word.to_str().unwrap()).collect();
    Ok(words.join(" "))
}

#[test]
fn flags_are_called_by_their_names_here() {
    let cases = [
        ("generate -p hi -n 5", "generate -p hi -n 5"),
        (
            "generate -hf org/name:Q4_K_M -ngl 99 -sys short",
            "generate --hf-repo org/name:Q4_K_M --n-gpu-layers 99 --system-prompt short",
        ),
        ("generate --n_predict 5 --repeat_penalty=1.1", "generate --n-predict 5 --repeat-penalty=1.1"),
        ("generate -n -1 --seed -1 -s -1", "generate --max-tokens=-1 --seed=-1 --seed=-1"),
        ("generate -p -", "generate --prompt=-"),
        ("generate --reverse-prompt User: -r ###", "generate --stop User: --stop ###"),
        ("generate -no-cnv -p x", "generate --ignore-chat-template -p x"),
        ("generate --mlock -fa on -p x -fa --color --numa_is_no_flag", "generate -p x --numa-is-no-flag"),
        ("generate -t 4 -tb 4 -b 2048 --temp 0", "generate -t 4 --temp 0"),
        ("generate --flash-attn=on -p x", "generate -p x"),
        ("generate -- -hf --mlock", "generate -- -hf --mlock"),
        ("generate --stop --- -p x", "generate --stop=--- -p x"),
        ("-m x -p hi", "generate -m x -p hi"),
        ("-m x", "chat -m x"),
        ("-m x -p hi -cnv", ""),
        ("-hf org/name -c 4096", "chat --hf-repo org/name -c 4096"),
        ("mlx_lm.generate --model x --prompt hi", "generate --model x --prompt hi"),
        ("convert --hf-path x --mlx-path y -q --q-bits 4", "quantize --model x --output y --q-bits 4"),
        ("bench -m x -p 512 -n 128", "bench -m x --prompt-tokens 512 --generated-tokens 128"),
        ("bench -m x -d 4096 -r 3", "bench -m x --depth 4096 --runs 3"),
        ("--help", "--help"),
        ("nothing -hf", "nothing -hf"),
    ];
    for (line, want) in cases.into_iter().filter(|(_, want)| !want.is_empty()) {
        assert_eq!(translated(line).as_deref(), Ok(want), "{line}");
    }
}

#[test]
fn what_is_not_here_is_answered() {
    let cases = [
        ("generate --grammar x", "--grammar: "),
        ("generate --chat-and-lora=3 --lora x", "--lora: adapters are not applied"),
        ("generate -m 100", "-n 100"),
        ("generate --kv-bits 8", "--ctx-size"),
        ("chat -p hi", "lowbit generate"),
        ("-m x -p hi -cnv", "-p: `lowbit generate`"),
        ("generate -cnv", "lowbit chat"),
        ("serve -m x", "no server"),
        ("./model.gguf", "lowbit chat --model ./model.gguf"),
        ("org/name", "lowbit chat --model org/name"),
        ("generate --xtc-probability 0.1", "--temp"),
    ];
    for (line, want) in cases {
        let message = translated(line).unwrap_err();
        assert!(message.contains(want), "{line}: {message}");
    }
}

/// Every entry says something of a flag that the command does not have, and names ones that it has.
#[test]
fn the_table_agrees_with_the_commands() {
    let program = Arguments::command();
    let names = |command: &Command| -> HashSet<String> {
        let longs =
            command.get_arguments().flat_map(|arg| arg.get_long_and_visible_aliases().unwrap_or_default());
        let shorts =
            command.get_arguments().flat_map(|arg| arg.get_short_and_visible_aliases().unwrap_or_default());
        longs.map(|name| format!("--{name}")).chain(shorts.map(|name| format!("-{name}"))).collect()
    };
    let mut seen = HashSet::new();
    for (of, flags, instead) in table::FLAGS {
        let commands =
            program.get_subcommands().filter(|command| of.is_none_or(|of| of == command.get_name()));
        let commands: Vec<_> = commands.collect();
        assert!(!commands.is_empty(), "{of:?}");
        for flag in *flags {
            assert!(seen.insert((*of, *flag)), "{flag} is there twice");
            assert!(flag.starts_with("--") || flag.starts_with('-'), "{flag}");
            for command in &commands {
                assert!(!names(command).contains(*flag), "{} has {flag}", command.get_name());
            }
        }
        if let Is(name) = instead {
            // What is for all commands is for those that run a model.
            let of = of.unwrap_or("generate");
            assert!(names(program.find_subcommand(of).unwrap()).contains(*name), "{of} has no {name}");
        }
    }
    for (words, instead) in table::COMMANDS {
        assert!(words.iter().all(|word| program.find_subcommand(word).is_none()), "{words:?}");
        assert!(!matches!(instead, Is(name) if program.find_subcommand(name).is_none()), "{words:?}");
    }
}

/// Nothing that is typed panics, and what has no flag of other programs stays as it is.
#[test]
fn arguments_of_any_kind_are_taken() {
    let words = [
        "generate",
        "chat",
        "-",
        "--",
        "-p",
        "-n",
        "-1",
        "--=",
        "--stop",
        "--stop=",
        "-fa",
        "on",
        "--lora",
        "é",
        "-é",
        "--é_é=é",
        "-m",
        "7",
        "",
        " ",
        "-hf",
        "\u{1b}[2J",
        "--seed",
        "-s",
        "--no_mmap",
        "-hf=x",
    ];
    let program = Arguments::command();
    let mut state = 1u64;
    for _ in 0..20_000 {
        let mut line = vec![OsString::from("lowbit")];
        for _ in 0..1 + state % 6 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            line.push(words[(state >> 33) as usize % words.len()].into());
        }
        if let Ok(arguments) = translate_quietly(&program, line) {
            let _ = Arguments::try_parse_from(arguments);
        }
    }
}

/// Without the notes, of which there would be thousands: all of them are about flags that are dropped.
fn translate_quietly(program: &Command, mut line: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    line.retain(|word| word != "-fa" && word != "--no_mmap");
    translate(program, line.into_iter())
}

#[test]
fn llama_cpps_numbers_are_read() {
    assert_eq!(token_count("-1"), Ok(usize::MAX));
    assert_eq!(token_count("12"), Ok(12));
    token_count("-3").unwrap_err();
    token_count("many").unwrap_err();
    assert_eq!(seed("-1"), Ok(None));
    assert_eq!(seed("18446744073709551615"), Ok(Some(u64::MAX)));
    seed("-2").unwrap_err();
    assert_eq!(GpuLayers::parse("0"), Ok(GpuLayers::None));
    assert_eq!(GpuLayers::parse("99"), Ok(GpuLayers::All));
    assert_eq!(GpuLayers::parse("all"), Ok(GpuLayers::All));
    assert_eq!(GpuLayers::parse("auto"), Ok(GpuLayers::Auto));
    GpuLayers::parse("some").unwrap_err();
}

#[test]
fn escapes_stand_for_characters() {
    let text = r#"a\nb\tc\\n\x41\"\'\q\xzz\xff\é\"#;
    assert_eq!(unescape(text), "a\nb\tc\\nA\"'\\q\\xzz\\xff\\é\\");
    assert_eq!(unescape(""), "");
}

#[test]
fn the_nearest_path_is_found() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("models/Qwen3-4B-4bit")).unwrap();
    std::fs::create_dir_all(folder.path().join("models/Llama-3")).unwrap();
    let near = |path: &str| {
        let found = nearest(&folder.path().join(path))?;
        Some(found.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_string())
    };
    assert_eq!(near("models/qwen3-4b-4bit").as_deref(), Some("models/Qwen3-4B-4bit"));
    assert_eq!(near("models/Qwen3-4B-4bti").as_deref(), Some("models/Qwen3-4B-4bit"));
    assert_eq!(near("model/Llama-3").as_deref(), Some("models"));
    assert_eq!(near("models/Mistral-7B").as_deref(), None);
    assert_eq!(near("models/Llama-3/x.gguf").as_deref(), None);
}
