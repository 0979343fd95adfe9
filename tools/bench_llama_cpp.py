#!/usr/bin/env python3
"""Times llama.cpp and lowbit in turn on the same files: tools/bench_llama_cpp.sh builds what this needs and calls it.

Prints the medians of all rounds in tokens per second. `others` is how many cores other processes kept busy meanwhile, in the
median round: above 0.05, distrust figures of as many threads as the machine has cores. Models are made where they are
missing: the shape qwen3-0.5b of tools/random_checkpoint.py, all of whose matrices are of one type. lowbit alone reads the type
mlx-4bit: affine, 4 bits, groups of 64."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MLX = "mlx-4bit"


def make(models, binaries, kind):
    """The path of the model of that type, which is made if it is missing."""
    generate = [sys.executable, ROOT / "tools/random_checkpoint.py", "qwen3-0.5b"]
    path = models / (kind if kind == MLX else f"{kind}.gguf")
    if path.exists():
        return path
    # Under another name until it is complete.
    part = path.with_name(f"part-{path.name}")
    if kind == MLX:
        command = [*generate, part]
    elif kind == "f16":
        command = [*generate, part, "--gguf"]
    else:
        command = [binaries / "llama-quantize", "--pure", make(models, binaries, "f16"), part, kind]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part.rename(path)
    return path


def busy_seconds():
    """What all processors have worked since the start, hypervisor's share included; None where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run(command):
    """What a program prints as JSON, and how many cores others kept busy meanwhile."""
    before, begin, busy = os.times(), time.perf_counter(), busy_seconds()
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{command[0]} failed:\n{result.stderr[-4000:]}")
    if busy is None:
        return json.loads(result.stdout), 0.0
    after, wall = os.times(), time.perf_counter() - begin
    own = after.children_user - before.children_user + after.children_system - before.children_system
    return json.loads(result.stdout), max(0.0, (busy_seconds() - busy - own) / wall)


def llama_cpp(options, path, threads):
    depth = ["-d", options.depth] if options.depth else []
    command = [options.bin / "llama-bench", "-m", path, "-t", threads, "-r", 1, "-o", "json", *depth]
    figures, others = run([*command, "-p", options.prompt, "-n", options.generated])
    return {("tg" if figure["n_gen"] else "pp"): figure["avg_ts"] for figure in figures}, others


def lowbit(options, path, threads):
    command = [options.lowbit, "bench", "--model", path, "--threads", threads, "--json"]
    command += ["--prompt-tokens", options.prompt, "--generated-tokens", options.generated]
    command += ["--runs", 1] if options.has_runs else []
    command += ["--depth", options.depth] if options.depth else []
    command += ["--isa", options.isa] if options.isa else []
    figures, others = run(command)
    kinds = {"prompt": "pp", "generate": "tg"}
    # Versions before lowbit.bench/1 printed an array.
    figures = figures["rows"] if isinstance(figures, dict) else figures
    return {kinds[figure["case"].split()[0]]: figure["tokens_per_second"] for figure in figures}, others


def measure(options, kind, threads):
    """Prints a line for the prompt and one for the generation."""
    path = make(options.models, options.bin, kind)
    programs = [lowbit] if kind == MLX else [llama_cpp, lowbit]
    rounds = {program: [] for program in programs}
    busy = []
    for _ in range(options.rounds):
        for program in programs:
            figures, others = program(options, path, threads)
            rounds[program].append(figures)
            busy.append(others)
    for test, tokens in [("pp", options.prompt), ("tg", options.generated)]:
        speed = {program: statistics.median(each[test] for each in rounds[program]) for program in programs}
        peer = f"{speed[llama_cpp]:10.2f}" if llama_cpp in speed else f"{'-':>10}"
        ratio = f"{speed[lowbit] / speed[llama_cpp]:7.2f}" if llama_cpp in speed else f"{'-':>7}"
        name = f"{test}{tokens}" + (f" @ {options.depth}" if options.depth else "")
        others = statistics.median(busy)
        print(f"{kind:<9} {threads:>7} {name:<14} {peer} {speed[lowbit]:10.2f} {ratio} {others:7.2f}", flush=True)


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the folder of llama-bench and llama-quantize")
    parser.add_argument("--models", type=Path, required=True, help="the folder of the models")
    parser.add_argument("--lowbit", type=Path, help="the program; built here if none is named")
    parser.add_argument("--isa", help="lowbit's instruction set, instead of the best")
    parser.add_argument("--types", default=f"Q4_0,Q4_K,Q6_K,Q8_0,{MLX}")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="of one run of each program; 0 only makes the models")
    parser.add_argument("--prompt", type=int, default=512, help="tokens to read")
    parser.add_argument("--generated", type=int, default=128, help="tokens to write")
    parser.add_argument("--depth", type=int, default=0, help="tokens that stand before both")
    options = parser.parse_args()
    kinds = options.types.split(",")
    for kind in kinds:
        print(make(options.models, options.bin, kind))
    if not options.rounds:
        return
    if options.lowbit is None:
        subprocess.run(["cargo", "build", "--release", "--locked"], cwd=ROOT, check=True)
        options.lowbit = ROOT / "target/release/lowbit"
    # Without it each round of lowbit's is six runs.
    usage = subprocess.run([options.lowbit, "bench", "--help"], capture_output=True, text=True, check=True).stdout
    options.has_runs = "--runs" in usage
    print(f"tokens per second, medians of {options.rounds} rounds\n")
    print(f"{'type':<9} {'threads':>7} {'test':<14} {'llama.cpp':>10} {'lowbit':>10} {'ratio':>7} {'others':>7}")
    for kind in kinds:
        for threads in options.threads:
            measure(options, kind, threads)


main()
