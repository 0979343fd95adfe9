"""A checkpoint to be written: its config.json, and how its tensors are stored.

Options are functions that change a `Case` (see `OPTIONS` in options.py). Each draws from its own generator, seeded by
the case's seed and the option's name: leaving one out does not change what the others draw, so that a failing case can
be reduced to the options that matter.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peer_vectors import tiny
from peer_vectors.tiny import Tiny

# Checkpoints of `model_type`, as the test vectors have them.
BASES: dict[str, Callable[[], Tiny]] = {
    "llama": tiny.llama2,
    "mistral": tiny.mistral,
    "qwen3": tiny.qwen3,
    "qwen3_moe": tiny.qwen3_moe,
    "qwen3_next": tiny.qwen3_next,
    "qwen3_5": tiny.qwen3_5,
    "qwen3_5_moe": tiny.qwen3_5_moe,
}


@dataclass
class Case:
    """What the options have made of an architecture's base."""

    architecture: str
    root: dict
    dtype: str = "float32"
    keep_f32: tuple[str, ...] = ()
    shard_size: str = "1GB"
    # Experts one by one, or stacked.
    save_original_format: bool = True
    # config.json as save_pretrained writes it, instead of `root`.
    saved_config: bool = False
    # Changes to the tensors that transformers saved: name to tensor, and a generator.
    tensor_edits: list[Callable[[dict, "object"], dict]] = field(default_factory=list)
    # Changes to the files.
    file_edits: list[Callable[[Path], None]] = field(default_factory=list)
    # A key of the text model's configuration and a value that it has before its own.
    duplicate: tuple[str, object] | None = None

    @property
    def text(self) -> dict:
        """The part of the configuration that describes the text model."""
        return self.root.get("text_config") or self.root

    @property
    def nested(self) -> bool:
        return "text_config" in self.root

    def json(self) -> str:
        """config.json."""
        text = json.dumps(self.root, indent=2) + "\n"
        if self.duplicate:
            key, value = self.duplicate
            text = text.replace(f'"{key}":', f'"{key}": {json.dumps(value)}, "{key}":', 1)
        return text

    def tiny(self) -> Tiny:
        name = f"{self.architecture}-random"
        return Tiny(name, self.root, dtype=self.dtype, keep_f32=self.keep_f32, shard_size=self.shard_size)


def draw(architecture: str, seed: str, without: frozenset[str] = frozenset()) -> tuple[Case, dict[str, str]]:
    """The case of a seed, and what each option that did something has changed in config.json."""
    from .options import OPTIONS

    base = BASES[architecture]()
    case = Case(architecture, copy.deepcopy(base.config))
    case.text.pop("torch_dtype", None)
    case.text.pop("dtype", None)
    changed = {}
    for name, option in OPTIONS.items():
        if name in without:
            continue
        before = flat(case)
        option(case, random.Random(f"{architecture}/{seed}/{name}"))
        difference = changes(before, flat(case))
        if difference:
            changed[name] = ", ".join(difference)
    return case, changed


def flat(case: Case) -> dict[str, str]:
    """The case's fields and its configuration as `key: text`."""
    entries = {f"config.{key}": json.dumps(value) for key, value in case.root.items() if key != "text_config"}
    if case.nested:
        entries |= {f"config.text_config.{key}": json.dumps(value) for key, value in case.text.items()}
    fields = ["dtype", "keep_f32", "shard_size", "save_original_format", "saved_config", "duplicate"]
    entries |= {name: str(getattr(case, name)) for name in fields}
    entries["edits"] = " ".join(edit.__name__ for edit in case.tensor_edits + case.file_edits)
    return entries


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    gone = [f"{key} absent" for key in before if key not in after]
    return gone + [f"{key}={value}" for key, value in after.items() if before.get(key) != value]
