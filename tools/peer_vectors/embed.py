"""Embeddings by sentence-transformers: `pip install sentence-transformers` beside tools/requirements.txt.

The checkpoint is tests/vectors/models/qwen3 with the files that sentence-transformers reads beside it. Those of the first
setting are committed with the embeddings; crates/lowbit/tests/api/embed.rs changes them as SETTINGS says. gemma.safetensors
has those of EmbeddingGemma, which is made of models/gemma3: see `gemma`.
"""

import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

MODELS = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "models"
END = "<|endoftext|>"

# The last one is cut where a setting has room for 24 tokens.
TEXTS = ["the thing in there", "", "7 and 8", "Hello, W\u00f6rld!\n", "the inner theme " * 4]
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}

# Name: (pooling mode, normalised, changes of the files, arguments of encode).
SETTINGS = {
    "last": ("lasttoken", True, {}, {}),
    "query": ("lasttoken", True, {}, {"prompt_name": "query"}),
    "mean": ("mean", False, {}, {}),
    "cls": ("cls", True, {}, {"prompt": "in the "}),
    "short": ("lasttoken", True, {"max_seq_length": 24}, {}),
    "short_left": ("mean", True, {"max_seq_length": 24, "truncation_side": "left"}, {"prompt_name": "query"}),
    "default": ("mean", True, {"default_prompt_name": "query", "include_prompt": False}, {}),
    "dimensions": ("lasttoken", True, {}, {"truncate_dim": 24, "normalize_embeddings": True}),
}

# Arguments of encode for EmbeddingGemma.
GEMMA = {"plain": {}, "query": {"prompt_name": "query"}}


def arguments(parser):
    pass


def write(folder, options):
    # Other subjects need not have this package.
    from sentence_transformers import SentenceTransformer

    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, (mode, normalised, changes, encode) in SETTINGS.items():
        with tempfile.TemporaryDirectory() as temporary:
            model = Path(temporary)
            directory(model, mode, normalised, changes)
            encoder = SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": torch.float32})
            arrays[name] = encoder.encode(TEXTS, **encode).astype(np.float32)
    # Prefix-less names, and no output layer.
    with tempfile.TemporaryDirectory() as temporary:
        headless(Path(temporary))
        encoder = SentenceTransformer(str(temporary), device="cpu", model_kwargs={"dtype": torch.float32})
        assert np.array_equal(encoder.encode(TEXTS), arrays["last"])
    # Tokens that see those after them, linear layers behind pooling.
    with tempfile.TemporaryDirectory() as temporary:
        gemma(Path(temporary))
        encoder = SentenceTransformer(str(temporary), device="cpu", model_kwargs={"dtype": torch.float32})
        embeddings = {name: encoder.encode(TEXTS, **encode).astype(np.float32) for name, encode in GEMMA.items()}
    versions = {name: importlib.metadata.version(name) for name in ["sentence-transformers", "transformers", "torch"]}
    save_file(arrays, folder / "expected.safetensors", {"source": "sentence-transformers", **versions})
    save_file(embeddings, folder / "gemma.safetensors", {"source": "sentence-transformers", **versions})
    (folder / "texts.json").write_text(json.dumps(TEXTS, ensure_ascii=False) + "\n")


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def directory(folder, mode, normalised, changes, model="qwen3"):
    model = MODELS / model
    for name in ["config.json", "model.safetensors"]:
        shutil.copy(model / name, folder)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    id_of = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    end = {"SpecialToken": {"id": END, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [text, end],
        "pair": [text, end, second, end],
        "special_tokens": {END: {"id": END, "ids": [id_of], "tokens": [END]}},
    }
    write_json(folder / "tokenizer.json", tokenizer)
    names = json.loads((model / "tokenizer_config.json").read_text())
    names |= {"pad_token": END, "model_max_length": 512}
    names |= {key: value for key, value in changes.items() if key == "truncation_side"}
    write_json(folder / "tokenizer_config.json", names)
    dense = ["Dense", "Dense"] if model.name == "gemma3" else []
    classes = ["Transformer", "Pooling"] + dense + ["Normalize"] * normalised
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(classes)
    ]
    write_json(folder / "modules.json", modules)
    key = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[mode]
    pooling = {"word_embedding_dimension": 64, f"pooling_mode_{key}": True}
    pooling |= {key: value for key, value in changes.items() if key == "include_prompt"}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    prompts = {"prompts": PROMPTS, "default_prompt_name": changes.get("default_prompt_name")}
    write_json(folder / "config_sentence_transformers.json", prompts)
    length = {"max_seq_length": changes.get("max_seq_length"), "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", length)


def headless(folder):
    directory(folder, "lasttoken", True, {})
    behead(folder, {"architectures": ["Qwen3Model"], "tie_word_embeddings": False})


def gemma(folder):
    """As EmbeddingGemma is published, with windows that are shorter than some texts."""
    directory(folder, "mean", True, {}, "gemma3")
    behead(folder, {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True})
    for name, inputs, outputs in [("2_Dense", 64, 96), ("3_Dense", 96, 64)]:
        function = "torch.nn.modules.linear.Identity"
        config = {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": function}
        write_json(folder / name / "config.json", config)
        rows, columns = np.indices((outputs, inputs))
        weight = ((rows * 37 + columns * 11) % 23 - 11) / 64
        save_file({"linear.weight": weight.astype(np.float32)}, folder / name / "model.safetensors", {"format": "pt"})


def behead(folder, changes):
    """Prefix-less names, as a model without its output layer saves them."""
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | changes)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
