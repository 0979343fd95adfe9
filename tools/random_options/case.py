"""A checkpoint to be written: its config.json, and how its tensors are stored."""

import json
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
    "qwen2": tiny.qwen2,
    "qwen2_moe": tiny.qwen2_moe,
    "mixtral": tiny.mixtral,
    "qwen3_vl": tiny.qwen3_vl,
    "phi3": tiny.phi3,
    "glm4": tiny.glm4,
    "glm4_moe": tiny.glm4_moe,
    "lfm2": tiny.lfm2,
    "lfm2_moe": tiny.lfm2_moe,
    "smollm3": tiny.smollm3,
    "seed_oss": tiny.seed_oss,
    "mistral3": tiny.mistral_small,
    "ministral3": tiny.ministral3,
    "gemma2": tiny.gemma2,
    "gemma3": tiny.gemma3,
    "gemma4": tiny.gemma4,
    "gemma4_moe": tiny.gemma4_moe,
    "gemma4_small": tiny.gemma4_small,
    "granite": tiny.granite,
    "granitemoehybrid": tiny.granite_hybrid_moe,
    "nemotron_h": tiny.nemotron_h_moe,
    "gpt_oss": tiny.gpt_oss,
    "olmo2": tiny.olmo2,
    "olmo3": tiny.olmo3,
    "exaone4": tiny.exaone4,
    "hunyuan_v1_dense": tiny.hunyuan,
    "minimax_m2": tiny.minimax_m2,
    "glm4_moe_lite": tiny.glm4_moe_lite,
    "deepseek_v3": tiny.deepseek_v3,
    "deepseek_v2": tiny.deepseek_v2,
    "kimi_linear": tiny.kimi_linear,
    "bailing_hybrid": tiny.bailing_hybrid,
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
