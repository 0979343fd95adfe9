mod lists;

use super::instead::Instead;
use super::translate::translate;
use super::*;
use crate::Arguments;
use Instead::{Is, Means, With};
use clap::{Command, CommandFactory, Parser};
use std::collections::HashSet;
use std::ffi::OsString;

fn translated(line: &str) -> Result<String, String> {
    let arguments = ["lowbit"].into_iter().chain(line.split(' ')).map(OsString::from);
    let typed = translate(&Arguments::command(), arguments).map_err(|failure| failure.to_string())?;
    let words: Vec<_> = typed.arguments[1..].iter().map(|word| word.to_str().unwrap()).collect();
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
        ("generate --n_predict 5 --repeat_penalty=1.1", "generate --n-predict 5 --repetition-penalty=1.1"),
        ("generate -n5 -p x -t2", "generate --max-tokens=5 -p x --threads=2"),
        ("generate -hf=a/b --seed=3 -s=4", "generate --hf-repo=a/b --seed=3 --seed=4"),
        ("generate -e --no-escape -p x -e", "generate -p x -e"),
        ("generate -dt 0.1 -p x --prio 2", "generate -p x"),
        ("generate --rea off -p x", "generate --rea off -p x"),
        ("generate -rea off -p x", "generate --chat-template-kwargs={\"enable_thinking\": false} -p x"),
        (
            "generate --reasoning-budget 0 -p x",
            "generate --chat-template-kwargs={\"enable_thinking\": false} -p x",
        ),
        ("generate --mirostat 0 --typical-p 1.0 --xtc_probability=0.0 -p x", "generate -p x"),
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
        ("run org/name", "chat --model=org/name"),
        ("org/name", "chat --model=org/name"),
        ("./model.gguf -c 64", "chat --model=./model.gguf -c 64"),
        ("run org/name hello", "generate --model=org/name hello"),
        ("org/name -p hello", "generate --model=org/name -p hello"),
        ("ollama run org/name", "chat --model=org/name"),
        ("llama-cli -m x -no-cnv -p hi", "generate -m x --ignore-chat-template -p hi"),
        ("generate org/name hello", "generate --model=org/name hello"),
        ("generate and/or", "generate and/or"),
        ("inspect org/name", "inspect --model=org/name"),
        ("perplexity x.gguf -f t", "perplexity --model=x.gguf -f t"),
        ("perplexity x.gguf --compare y.gguf -f t", "perplexity x.gguf --compare y.gguf -f t"),
        ("bench x.gguf -p 4", "bench --model=x.gguf --prompt-tokens 4"),
        ("bench Q4_0 M=1", "bench Q4_0 M=1"),
        (
            "llama-quantize --token-embedding-type q8_0 in.gguf out.gguf q4_k_m 4",
            "quantize --rule=token_embd=q8_0 --model=in.gguf --output=out.gguf --format=q4_k_m --threads=4",
        ),
        ("quantize --tensor-type ffn_down=q6_k -m x -o y", "quantize --rule ffn_down=q6_k -m x -o y"),
        ("quantize --embed-bits 8 -m x -o y", "quantize --rule=embed_tokens=8 -m x -o y"),
        (
            "generate -mu https://huggingface.co/a/b/resolve/main/c.gguf -p x",
            "generate --hf-repo https://huggingface.co/a/b/resolve/main/c.gguf -p x",
        ),
        ("generate -p x --list-devices -m y", "devices"),
        ("--list-devices", "devices"),
        ("generate -ctk f16 -p x -mg 0 -sm none", "generate --cache-type-k f16 -p x"),
        (
            "generate -p x -md y --spec-draft-n-max 5 --draft-n-min 2",
            "generate -p x --draft-model y --draft-max 5 --draft-min 2",
        ),
        ("generate -p x --spec-type ngram-simple", "generate -p x --speculate=ngram"),
        ("chat --mtp", "chat --speculate=mtp"),
        ("llama-server -m x --mtp --draft-n 2", "serve -m x --speculate=mtp --draft-max 2"),
        ("serve -m x --spec-type ngram-mod --draft-min 2", "serve -m x --speculate=ngram"),
        ("quantize -ctk q8_0 -m x -o y", "quantize -m x -o y"),
        ("mlx_lm.generate --model x --kv-bits 8", "generate --model x --cache-type=q8_0"),
        ("vllm serve org/name --kv-cache-dtype int8", "serve --model=org/name --cache-type int8"),
        (
            "llama-server -m x --port 9 -np 4 -c 64 --api-key k",
            "serve -m x --port 9 --max-running 4 -c 64 --api-key k",
        ),
        ("llama-server -m x -a y -cb --metrics -to 600", "serve -m x --alias y"),
        ("mlx_lm.server --model x --host h --port 9", "serve --model x --host h --port 9"),
        ("vllm serve org/name --max-model-len 64", "serve --model=org/name --ctx-size 64"),
        ("serve -m x -ngl 99 -fa on --jinja", "serve -m x --n-gpu-layers 99"),
        ("mlx_lm generate --model x --prompt hi", "generate --model x --prompt hi"),
        ("mlx_lm.generate --model x --prompt hi", "generate --model x --prompt hi"),
        ("convert --hf-path x --mlx-path y -q --q-bits 4", "quantize --model x --output y --q-bits 4"),
        ("bench -m x -p 512 -n 128", "bench -m x --prompt-tokens 512 --generated-tokens 128"),
        ("bench -m x -d 4096 -r 3", "bench -m x --depth 4096 --runs 3"),
        ("generate -m x -j {}", "generate -m x --json-schema {}"),
        ("chat -m x --grammar-file g", "chat -m x --grammar g"),
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
        ("serve -m x --grammar x", "--grammar: generate and chat"),
        ("generate --chat-and-lora=3 --lora x", "--lora: adapters are not applied"),
        ("generate -m 100", "-n 100"),
        ("generate --kv-bits 4", "--ctx-size"),
        ("chat -p hi", "lowbit generate"),
        ("-m x -p hi -cnv", "-p: `lowbit generate`"),
        ("generate -cnv", "lowbit chat"),
        ("serve -m x --ssl-key-file k", "proxy"),
        ("llama-server -m x -cram 100", "--cache-memory"),
        ("serve -m x -md y", "a draft model is not served yet"),
        ("serve -m x --draft-model y", "a draft model is not served yet"),
        ("serve -p hi", "requests have their prompts"),
        ("generate -cbx", "there is no such flag"),
        ("generate -np", "`lowbit serve`"),
        ("generate -mu https://example.org/x.gguf", "download the file"),
        ("generate -mg 1", "--device cuda:1"),
        ("generate -temp 0.5", "--temp"),
        ("generate -ctkd f16", "--draft-model"),
        ("generate --spec-type draft-eagle3", "--speculate ngram"),
        ("generate --dry-anything 1", "--temp"),
        ("generate --mirostat 2", "--temp"),
        ("quantize -m x -o y --dtype float16", "--learn"),
        ("quantize --tensor-type a|b=q8_0", "regular expressions"),
        ("generate --xtc-probability 0.1", "--temp"),
    ];
    for (line, want) in cases {
        let message = translated(line).unwrap_err();
        assert!(message.contains(want), "{line}: {message}");
    }
}

/// Every entry says something of a flag that some command does not have, and names ones that it
/// has.
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
    for (of, flags, instead) in table::flags() {
        let commands =
            program.get_subcommands().filter(|command| of.is_none_or(|of| of == command.get_name()));
        let commands: Vec<_> = commands.collect();
        assert!(!commands.is_empty(), "{of:?}");
        for flag in *flags {
            assert!(seen.insert((*of, *flag)), "{flag} is there twice");
            assert!(flag.starts_with('-') && !flag.contains('_'), "{flag}");
            let is_dead = commands.iter().all(|command| names(command).contains(*flag));
            assert!(!is_dead || matches!(instead, Instead::Value(_)), "{of:?} has {flag}");
        }
        if let Is(name) | With(name, _) | Means(name @ "--chat-template-kwargs", _) = instead {
            // Flags for all commands are for those that run a model.
            let of = of.unwrap_or("generate");
            assert!(names(program.find_subcommand(of).unwrap()).contains(*name), "{of} has no {name}");
        }
    }
    for (words, instead) in table::COMMANDS {
        assert!(words.iter().all(|word| program.find_subcommand(word).is_none()), "{words:?}");
        let is_lost =
            matches!(instead, Is(name) if !name.is_empty() && program.find_subcommand(name).is_none());
        assert!(!is_lost, "{words:?}");
    }
}

#[test]
fn the_last_of_a_repeated_flag_holds() {
    let line = ["lowbit", "generate", "-n", "5", "--n-predict", "7", "--max-tokens=9", "-e", "-e", "-p", "x"];
    let matches = Arguments::command().try_get_matches_from(line).unwrap();
    let matches = matches.subcommand().unwrap().1;
    assert_eq!(matches.get_raw("max_tokens").unwrap().collect::<Vec<_>>(), ["9"]);
    assert!(matches.get_flag("escape"));
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
        if let Ok(typed) = translate(&program, line.into_iter()) {
            let _ = Arguments::try_parse_from(typed.arguments);
        }
    }
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
    assert_eq!(GpuLayers::parse("20"), Ok(GpuLayers::Some(20)));
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
