"""Draws a case from its seed.

Each option draws from its own generator, seeded by the case's seed and the option's name: leaving one out does not change
what the others draw, so that a failing case can be reduced to the options that matter.
"""

import copy
import json
import random

from .case import BASES, Case
from .options import OPTIONS


def draw(architecture: str, seed: str, without: frozenset[str] = frozenset()) -> tuple[Case, dict[str, str]]:
    """The case of a seed, and what each option that did something has changed in config.json."""
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
