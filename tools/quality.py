#!/usr/bin/env python3
"""What learning wins back of what rounding lost, as a table: lowbit's scales and codes, and mlx-lm's DWQ beside them.

    python tools/quality.py LOWBIT OUT [--learn scales codes by-block] [--formats 4 3 2 Q4_1 ..] [--steps 250]
        [--windows 16] [--device cpu] [--threads N] [--mlx-lm] [--llama-perplexity PROGRAM] [--model DIR --data FILE --text FILE]

LOWBIT is the program. A format is a number of bits (MLX affine, groups of 64) or one of llama.cpp's names. Each checkpoint goes
into OUT under its format's name; one that is there already is scored, not made again, and an interrupted run goes on. Losses are means over
the tokens of TEXT, in nats, in windows of 512 (lowbit perplexity --exact); with --llama-perplexity GGUF files are scored by that program, too.

Needs no packages, but --mlx-lm does: "mlx[cpu]" or mlx, mlx-lm and datasets. By default the models are the demo and its texts.
"""

import argparse
import csv
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 512


def run(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


class Quality:
    def __init__(self, options):
        self.options = options
        self.on_device = ["--device", options.device] + (["--threads", options.threads] if options.threads else [])

    def loss(self, path):
        out = run([self.options.lowbit, "perplexity", "--model", path, "--file", self.options.text, "--context", CONTEXT, "--exact",
                   "--json", *self.on_device])
        return json.loads(out)["nll"]

    def llama_loss(self, path):
        done = subprocess.run([self.options.llama_perplexity, "-m", path, "-f", self.options.text, "-c", str(CONTEXT), "--no-repack"],
                              capture_output=True, text=True)
        found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
        return math.log(float(found[1])) if found else math.nan

    def quantize(self, out, form, learn=()):
        """Writes `out`, and returns the seconds that took, 0 if it was there."""
        if out.exists():
            return 0.0
        form = ["--bits", form, "--group-size", 64] if form.isdigit() else ["--format", form]
        start = time.monotonic()
        run([self.options.lowbit, "quantize", "--model", self.options.model, "--output", out, *form, *learn])
        return time.monotonic() - start

    def rows(self):
        """Of the table: what it is, its loss, the share won back, and the seconds that it took."""
        options, whole = self.options, self.loss(self.options.model)
        yield "the model itself", whole, None, 0.0
        for form in options.formats:
            end = "" if form.isdigit() else ".gguf"
            rounded = options.out / f"{form}-rounded{end}"
            self.quantize(rounded, form)
            losses = {"": self.loss}
            if end and options.llama_perplexity:
                losses[", llama.cpp"] = self.llama_loss
            lost = {name: loss(rounded) for name, loss in losses.items()}
            yield from ((f"{form} rounded{name}", loss, None, 0.0) for name, loss in lost.items())
            for learn in options.learn:
                out = options.out / f"{form}-{learn}{end}"
                what = ["codes", "--by-block"] if learn == "by-block" else [learn]
                seconds = self.quantize(out, form, [
                    "--learn", *what, "--data", options.data, "--steps", options.steps, "--windows", options.windows, "--context", CONTEXT,
                    "--resume", "--log", options.out / f"{form}-{learn}.csv", *self.on_device])
                for name, loss in losses.items():
                    # llama.cpp scores the second half of each window: its own rounding is what it is compared with.
                    reference = whole if not name else self.llama_whole
                    yield f"{form} {learn}{name}", *self.won(loss(out), lost[name], reference), seconds
            if options.mlx_lm and form.isdigit():
                out = options.out / f"{form}-mlx-lm"
                seconds = 0.0 if out.exists() else self.dwq(out, form)
                yield f"{form} mlx-lm's DWQ", *self.won(self.loss(out), lost[""], whole), seconds

    @functools.cached_property
    def llama_whole(self):
        path = self.options.out / "BF16.gguf"
        self.quantize(path, "BF16")
        return self.llama_loss(path)

    @staticmethod
    def won(loss, rounded, whole):
        return loss, (rounded - loss) / (rounded - whole)

    def dwq(self, out, bits):
        """mlx-lm's DWQ with as many steps of as many windows. Its data are whole texts, which it cuts: one text per window."""
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            text = Path(options.data).read_text()
            # Bytes per token differ: windows are cut a little long, and mlx-lm cuts them to size.
            size = 6 * CONTEXT
            lines = [json.dumps({"text": text[at:at + size]}) for at in range(0, len(text) - size, size // 2)]
            (Path(folder) / "train.jsonl").write_text("\n".join(lines))
            # As long as lowbit's windows, with the token that is only predicted.
            rate = "2e-3" if int(bits) <= 2 else "3e-4"
            start = time.monotonic()
            run([sys.executable, "-m", "mlx_lm", "dwq", "--model", options.model, "--mlx-path", out, "--bits", bits, "--group-size", 64,
                 "--num-samples", min(options.steps * options.windows, len(lines) - 32), "--batch-size", options.windows,
                 "--max-seq-length", CONTEXT + 1, "--learning-rate", rate, "--data-path", folder])
            return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lowbit", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--learn", nargs="*", default=["scales", "codes"], choices=["scales", "codes", "by-block"])
    parser.add_argument("--formats", nargs="*", default=["4", "3", "2"])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--mlx-lm", action="store_true")
    parser.add_argument("--llama-perplexity", metavar="PROGRAM")
    parser.add_argument("--model", type=Path, default=ROOT / "models/demo")
    parser.add_argument("--data", type=Path, required=True, help="the text that is learned from")
    parser.add_argument("--text", type=Path, default=ROOT / "models/demo/eval.txt")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = csv.writer(sys.stdout)
    table.writerow(["what", "loss", "won back", "seconds"])
    for what, loss, share, seconds in Quality(options).rows():
        table.writerow([what, f"{loss:.4f}", "" if share is None else f"{share:.1%}", f"{seconds:.0f}"])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
