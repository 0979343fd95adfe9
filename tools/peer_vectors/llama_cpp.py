"""Drives llama.cpp's own converter, quantiser and perplexity tool, from a source tree and a folder of built tools."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The converter knows tokenizers by a hash of what they do to a fixed text. Ours are none of those, so the answer is given
# to it; the rest of the script runs as it is.
DRIVER = """
import runpy, sys
tree, pre_tokenizer = sys.argv[1:3]
sys.argv = ["convert_hf_to_gguf.py"] + sys.argv[3:]
sys.path.insert(0, tree)
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
runpy.run_path(tree + "/convert_hf_to_gguf.py", run_name="__main__")
"""


@dataclass
class LlamaCpp:
    """`tree`: the sources, for the converter. `tools`: the folder of llama-quantize and llama-perplexity."""

    tree: Path
    tools: Path

    def convert(self, checkpoint: Path, out: Path, out_type: str, pre_tokenizer: str, mtp: bool = False) -> None:
        """With `mtp` as the converter does it by default: with the multi-token-prediction head, where there is one."""
        hybrid = "qwen3_next" in (text := (checkpoint / "config.json").read_text()) or "qwen3_5" in text
        without = hybrid and not (mtp and has_mtp(checkpoint))
        arguments = [str(checkpoint), "--outfile", str(out), "--outtype", out_type] + ["--no-mtp"] * without
        run([sys.executable, "-c", DRIVER, str(self.tree), pre_tokenizer, *arguments])

    def quantize(self, source: Path, out: Path, kind: str, *options: str) -> None:
        run([str(self.tools / "llama-quantize"), *options, str(source), str(out), kind, "1"])

    def perplexity_command(self, model: Path, text: Path) -> list[str]:
        """Repacked weights give wrong results on some CPUs, and f32 caches leave only the weights' error."""
        exact = ["--no-repack", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
        return [str(self.tools / "llama-perplexity"), "-m", str(model), "-f", str(text), "-c", "512", "-t", "1", *exact]

    def perplexity(self, model: Path, text: Path) -> dict:
        log = run(self.perplexity_command(model, text))
        chunks = int(re.search(r"over (\d+) chunks", log).group(1))
        estimate, error = re.search(r"PPL = ([\d.]+) \+/- ([\d.]+)", log).groups()
        running = [float(value) for value in re.findall(r"\[\d+\]([\d.]+),", log)]
        return {
            "perplexity": float(estimate),
            "standard_error": float(error),
            "chunks": chunks,
            "after_chunks_1_to_4": running[:4],
        }


def has_mtp(checkpoint: Path) -> bool:
    """Whether some file's header names such a tensor."""
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            if b'"mtp.' in file.read(int.from_bytes(file.read(8), "little")):
                return True
    return False


def run(command: list[str]) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{result.stdout[-4000:]}")
    return result.stdout
