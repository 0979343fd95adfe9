"""The keys of `config.json` that transformers reads for each supported model type, and what it takes for a missing one.

Packages: transformers.

keys.json: `generation`, sampling's keys, which old configurations have among their own; and for each model type `fields`, what
its configuration class declares with defaults, and `reads`, what else its configuration and modeling code asks for.
"""

import ast
import dataclasses
import importlib.util
import inspect
import json
import math
import textwrap
from pathlib import Path

import transformers
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPES = [
    "llama",
    "mistral",
    "mistral3",
    "ministral3",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_vl",
    "qwen3_vl_text",
    "gemma2",
    "gemma3",
    "granite",
    "granitemoehybrid",
    "nemotron_h",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
    "gpt_oss",
    "phi3",
    "glm4",
    "glm4_moe",
    "lfm2",
    "lfm2_moe",
    "smollm3",
    "seed_oss",
    "olmo2",
    "olmo3",
    "exaone4",
    "hunyuan_v1_dense",
    "minimax_m2",
    "glm4_moe_lite",
    "deepseek_v3",
    "deepseek_v2",
    "kimi_linear",
    "bailing_hybrid",
]
# Those of the same classes under a name that transformers knows from the checkpoints' own code.
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
# What code asks of the object, not of config.json.
METHODS = {"get_text_config", "is_heterogeneous", "kv_sharing_modes"}
# Of parts that see or hear, which stand in the same file.
VISION = {
    "attention_chunk_size",
    "attention_context_left",
    "attention_context_right",
    "attention_invalid_logits_value",
    "attention_logit_cap",
    "conv_kernel_size",
    "gradient_clipping",
    "output_proj_dims",
    "pooling_kernel_size",
    "position_embedding_size",
    "residual_weight",
    "standardize",
    "subsampling_conv_channels",
    "use_clipped_linears",
    "depth",
    "in_channels",
    "num_heads",
    "num_position_embeddings",
    "out_hidden_size",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
}
# Where a configuration takes keys that it does not declare.
TAKERS = {"__post_init__"}
ROPE_TAKERS = {"convert_rope_params_to_dict"}
MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}


def arguments(parser):
    pass


def write(folder: Path, options):
    folder.mkdir(parents=True, exist_ok=True)
    keys = {
        "transformers": transformers.__version__,
        "generation": sorted(GenerationConfig._get_default_generation_params()),
        "model_types": {name: model_type(CONFIG_MAPPING[name]) for name in MODEL_TYPES},
    }
    keys["model_types"] |= {name: keys["model_types"][same] for name, same in OTHER_NAMES.items()}
    (folder / "keys.json").write_text(json.dumps(keys, indent=1) + "\n")


def model_type(configuration: type) -> dict:
    fields = {field.name: spelled(field.default) for field in dataclasses.fields(configuration)}
    reads = set(configuration.attribute_map.values())
    wanted = TAKERS | ROPE_TAKERS if "rope_parameters" in fields else TAKERS
    for base in inspect.getmro(configuration):
        if base.__module__.startswith("transformers."):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            takers = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
            reads = reads.union(*map(keyword_reads, takers))
    # A multimodal model's own code reads its parts' configurations; only the text part's matters, which has its own entry.
    if "text_config" not in fields:
        reads |= modeling_reads(configuration.__module__.replace("configuration_", "modeling_"))
    if "rope_parameters" not in fields:
        # The base class would warn of them.
        reads -= {"rope_scaling", "rope_theta"}
    return {"fields": fields, "reads": sorted(reads - METHODS - set(fields))}


def spelled(default):
    """A default as transformers writes it to config.json."""
    if isinstance(default, (list, tuple)):
        return [spelled(value) for value in default]
    return {"__float__": "Infinity"} if default == math.inf else default


def modeling_reads(module: str) -> set[str]:
    names = set()
    for module, wanted in [(module, None), ("transformers.masking_utils", MASKS)]:
        source = Path(importlib.util.find_spec(module).origin).read_text()
        for node in ast.parse(source).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (not wanted or node.name in wanted):
                names |= attribute_reads(node)
    others = {"text_config", "vision_config", "image_token_id", "video_token_id"} | VISION
    return {name for name in names if not name.startswith("_")} - others


def keyword_reads(tree: ast.AST) -> set[str]:
    """The names in `kwargs.pop("name")` and its like."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    calls = [call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "kwargs"]
    calls = [call for call in calls if call.func.attr in ("pop", "get", "setdefault")]
    return {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}


def attribute_reads(tree: ast.AST) -> set[str]:
    """The names in `config.name`, `self.config.name` and `getattr(config, "name")`."""

    def is_config(node: ast.AST) -> bool:
        return (isinstance(node, ast.Name) and node.id == "config") or (
            isinstance(node, ast.Attribute) and node.attr in ("config", "text_config")
        )

    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            names.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if is_config(node.args[0]) and isinstance(node.args[1], ast.Constant):
                names.add(node.args[1].value)
    return names
