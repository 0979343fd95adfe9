"""What the files beside config.json hold: tensors that do not fit the configuration, or that nobody asks for."""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .case import Case


def ties(case: Case, r: random.Random) -> None:
    """The flag at the root, in `text_config`, in both, contradicting; weights that do not fit the flag."""
    values = [True, True, False, None]
    for part in [case.root, case.text] if case.nested else [case.root]:
        part.pop("tie_word_embeddings", None)
        value = r.choice(values)
        if value is not None:
            part["tie_word_embeddings"] = value
    form = r.random()
    if form < 0.2:
        case.tensor_edits.append(own_head)
    elif form < 0.3:
        case.tensor_edits.append(same_head)
    elif form < 0.35:
        case.tensor_edits.append(head_alone)


def head_and_embedding(tensors: dict) -> tuple[str, str]:
    embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    return "lm_head.weight", embedding


def own_head(tensors: dict, generator: torch.Generator) -> dict:
    """An output layer of its own, whatever the flag says."""
    head, embedding = head_and_embedding(tensors)
    value = tensors[embedding]
    own = 2 * value.shape[1] ** -0.5 * torch.randn(value.shape, generator=generator)
    return {**tensors, head: own.to(value.dtype)}


def same_head(tensors: dict, generator: torch.Generator) -> dict:
    """The embedding a second time as the output layer."""
    head, embedding = head_and_embedding(tensors)
    return {**tensors, head: tensors[embedding].clone()}


def head_alone(tensors: dict, generator: torch.Generator) -> dict:
    """The output layer without the embedding that is tied to it."""
    head, embedding = head_and_embedding(tensors)
    value = tensors.pop(embedding)
    return {head: value, **tensors}


def tensors(case: Case, r: random.Random) -> None:
    """Tensors that the model does not ask for."""
    if r.random() < 0.05:
        case.tensor_edits.append(extra_tensor)
    if r.random() < 0.05:
        case.tensor_edits.append(inverse_frequencies)
    if r.random() < 0.1:
        case.tensor_edits.append(stray_biases)
    if r.random() < 0.05:
        case.tensor_edits.append(r.choice([without_prefix, language_model_prefix]))


def extra_tensor(tensors: dict, generator: torch.Generator) -> dict:
    return {**tensors, "model.something_else.weight": torch.ones(3)}


def inverse_frequencies(tensors: dict, generator: torch.Generator) -> dict:
    """As old exporters wrote them."""
    return {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


def stray_biases(tensors: dict, generator: torch.Generator) -> dict:
    """Biases of the attention in the file, whatever `attention_bias` says."""
    edited = dict(tensors)
    for name, value in tensors.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(("q_proj.weight", "o_proj.weight")) and bias not in tensors:
            edited[bias] = (0.3 * torch.randn(len(value), generator=generator)).to(value.dtype)
    return edited


def without_prefix(tensors: dict, generator: torch.Generator) -> dict:
    """Names as the model without its output layer saves them."""
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def language_model_prefix(tensors: dict, generator: torch.Generator) -> dict:
    """Names of a text model inside a multimodal one."""
    deeper = "model.language_model."
    plain = {name for name in tensors if name.startswith("model.") and not name.startswith((deeper, "model.visual."))}
    return {deeper + name.removeprefix("model.") if name in plain else name: value for name, value in tensors.items()}


def stray_files(case: Case, r: random.Random) -> None:
    if r.random() < 0.05:
        case.file_edits.append(consolidated)
    if r.random() < 0.05:
        case.file_edits.append(single_beside_sharded)
    if r.random() < 0.03:
        case.root["transformers_weights"] = "other.safetensors"
        case.file_edits.append(other_weights)


def consolidated(out: Path) -> None:
    """The same weights in Mistral's own layout, which transformers does not look at."""
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, out / "consolidated.safetensors")


def single_beside_sharded(out: Path) -> None:
    """Other weights in shards, with their index, beside model.safetensors, which comes first."""
    single = out / "model.safetensors"
    if not single.exists():
        return
    other = {name: 1.5 * value for name, value in load_file(single).items()}
    save_file(other, out / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    names = ", ".join(f'"{name}": "model-00001-of-00001.safetensors"' for name in other)
    (out / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {' + names + "}}")


def other_weights(out: Path) -> None:
    """Weights under the name that config.json says, beside others under the usual one."""
    single = out / "model.safetensors"
    if single.exists():
        other = {name: value.flip(0) for name, value in load_file(single).items()}
        save_file(other, out / "other.safetensors", metadata={"format": "pt"})
