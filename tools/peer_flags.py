#!/usr/bin/env python3
"""Lists all flags of llama.cpp's programs and of mlx-lm's, each with a value where it takes one, for tools/check_flags.

    tools/peer_flags.py LLAMA_CPP MLX_LM > tests/vectors/cases/flags/peers.txt

LLAMA_CPP is a source tree (common/arg.cpp, tools/), MLX_LM the folder of the package mlx_lm. Flags are read from the sources: of
llama.cpp with regular expressions, of mlx-lm from its calls of add_argument.
"""

import ast
import re
import sys
from pathlib import Path

# What stands for a value by the hint that llama.cpp prints; anything else is `1`.
HINTS = {"FNAME": "f", "FILE": "f", "PATH": "f", "[on|off|auto]": "on", "[on|off]": "on", "STRING": "x", "PROMPT": "x", "TYPE": "f16"}

# llama.cpp's programs whose flags are typed after a command, by what arg.cpp calls them; without one, all programs have a flag.
EXAMPLES = {"generate chat": {"COMPLETION", "CLI", "SERVER", "COMMON"}, "perplexity": {"PERPLEXITY"}, "quantize": {"IMATRIX"}}

MLX = {
    "generate chat": ["generate.py", "chat.py", "cache_prompt.py", "server.py"],
    "perplexity": ["perplexity.py"],
    "bench": ["benchmark.py"],
    "quantize": ["convert.py", "quant/awq.py", "quant/dwq.py", "quant/dynamic_quant.py", "quant/gptq.py", "fuse.py"],
}


def strings(text):
    return re.findall(r'"((?:[^"\\]|\\.)*)"', text)


def llama_cpp(tree):
    """Yields the programs, all names and the values of each flag of arg.cpp."""
    source = (tree / "common/arg.cpp").read_text()
    for part in source.split("add_opt(common_arg(")[1:]:
        handler = re.search(r"\[[^\]]*\]\s*\((common_params[^)]*)\)", part)
        parameters = [one for one in handler.group(1).split(",") if one.strip()]
        head = part[: handler.start()]
        groups = re.findall(r"\{([^{}]*)\}", head)
        names = strings(groups[0])
        values = len(parameters) - 1
        if "bool" in handler.group(1):
            names, values = names + strings(groups[1]), 0
        hints = strings(head[head.find("}") + 1 :])
        hint = hints[0] if values and hints else ""
        examples = re.search(r"set_examples\(\{([^}]*)\}\)", part)
        examples = set(re.findall(r"LLAMA_EXAMPLE_(\w+)", examples.group(1))) if examples else {"COMMON"}
        yield examples, [name for name in names if name.startswith("-")], [HINTS.get(hint, "1")] * values


def in_source(path, test):
    """Yields the names and values of each flag of a program that compares arguments with its flags in a chain of `else if`."""
    for branch in re.split(r"\bif(?= \((?:arg ==|llama_supports_rpc|strcmp\(argv))", path.read_text()):
        head, _, body = branch.partition("{")
        names = [name for name in strings(head) if name.startswith("-")]
        if re.match(test, head.strip()) and names:
            yield names, ["1"] if "++" in body else []


def mlx_lm(path):
    """Yields the names and values of each flag of an argparse program."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
            continue
        names = [one.value for one in call.args if isinstance(one, ast.Constant) and str(one.value).startswith("-")]
        options = {one.arg: one.value for one in call.keywords}
        action = options.get("action")
        is_switch = getattr(action, "value", "") == "store_true" or getattr(action, "attr", "") == "BooleanOptionalAction"
        choices = getattr(options.get("choices"), "elts", [])
        kind = getattr(options.get("type"), "id", "")
        value = str(choices[0].value) if choices and isinstance(choices[0], ast.Constant) else "x" if kind == "str" else "1"
        yield names, [] if is_switch else [value]


def main():
    tree, package = map(Path, sys.argv[1:3])
    lines = {command: {} for command in ["generate chat", "quantize", "perplexity", "bench"]}
    for examples, names, values in llama_cpp(tree):
        for command, wanted in EXAMPLES.items():
            # What all programs have is typed after those that run a model.
            if examples & wanted or (command == "perplexity" and "COMMON" in examples):
                lines[command].update({" ".join([name, *values]): None for name in names})
    own = {"bench": ("llama-bench/llama-bench.cpp", r"\((llama_supports_rpc|arg ==)"), "quantize": ("quantize/quantize.cpp", r"\(strcmp\(argv")}
    for command, (file, test) in own.items():
        for names, values in in_source(tree / "tools" / file, test):
            lines[command].update({" ".join([name, *values]): None for name in names})
    for command, files in MLX.items():
        for names, values in (flag for file in files if (package / file).is_file() for flag in mlx_lm(package / file)):
            lines[command].update({" ".join([name, *values]): None for name in names})
    print("# All flags of llama.cpp's programs and of mlx-lm's: made by tools/peer_flags.py.")
    for command, flags in lines.items():
        print(f"\n## llama.cpp, mlx-lm: {command}")
        print("\n".join(flags))


if __name__ == "__main__":
    main()
