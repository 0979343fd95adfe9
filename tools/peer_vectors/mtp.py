"""Guesses of the layers for multi-token prediction of tests/vectors/models, computed with transformers' own layers: this
needs transformers alone. transformers leaves these layers out; here each is loaded as one more layer of its model, behind
the others, and what joins it is written out as vLLM's qwen3_next_mtp.py has it.

`ids` [T] is a text, `states` f32 [T, hidden_size] stands for what the output layer reads at each place, and row i of
`guesses` [.., 4] are the greedy guesses after the first `FIRST + i` tokens."""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

MODELS = ["qwen3_5", "glm4_moe", "deepseek_v3"]
# Tokens before the first guesses, and of the text.
FIRST, TOKENS, GUESSES = 5, 30, 4
NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def arguments(parser):
    parser.add_argument("--only", choices=MODELS, help="one of the models")


def with_one_more_layer(folder: Path, out: Path):
    """The checkpoint with the predicting layer as its last one, and the tensors that join it."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"]
    text["num_hidden_layers"] = layers + 1
    if "layer_types" in text:
        text["layer_types"] = [*text["layer_types"], "full_attention"]
    (out / "config.json").write_text(json.dumps(config))
    tensors, joints = {}, {}
    behind = f"model.layers.{layers}."
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("mtp.layers.0."):
            tensors[f"model.language_model.layers.{layers}." + name.removeprefix("mtp.layers.0.")] = tensor
        elif name.startswith("mtp."):
            joints[name.removeprefix("mtp.").removesuffix(".weight")] = tensor.float()
        elif name.startswith(behind) and name.removeprefix(behind).removesuffix(".weight") in NAMES:
            joints[NAMES[name.removeprefix(behind).removesuffix(".weight")]] = tensor.float()
        else:
            tensors[name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return config["architectures"][0], joints


class Guesser:
    def __init__(self, folder: Path):
        with tempfile.TemporaryDirectory() as out:
            architecture, joints = with_one_more_layer(folder, Path(out))
            model = getattr(transformers, architecture).from_pretrained(
                out, dtype=torch.float32, attn_implementation="eager"
            )
        model.eval()
        self.head = model.lm_head
        decoder = getattr(model.model, "language_model", model.model)
        self.embed, self.rotary, self.layer = decoder.embed_tokens, decoder.rotary_emb, decoder.layers[-1]
        self.fc = joints.pop("fc")
        self.norms = {}
        for name, weight in joints.items():
            norm = type(decoder.norm)(len(weight), eps=decoder.config.rms_norm_eps)
            norm.weight.data = weight
            self.norms[name] = norm

    def states(self, ids, states):
        """Those of a whole text: of each token and the state before it."""
        token = self.norms["pre_fc_norm_embedding"](self.embed(ids))
        x = torch.cat([token, self.norms["pre_fc_norm_hidden"](states)], -1) @ self.fc.T
        count = len(ids)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        y = self.layer(
            x[None],
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(x[None], positions),
        )
        y = y[0] if isinstance(y, tuple) else y
        return self.norms["norm"](y[0] if y.dim() == 3 else y)

    def guesses(self, ids, states):
        """After a text whose last token has no state yet."""
        found = []
        for _ in range(GUESSES):
            own = self.states(ids[1:], states)
            found.append(int(self.head(own[-1]).argmax()))
            ids = torch.cat([ids, torch.tensor(found[-1:])])
            states = torch.cat([states, own[-1:]])
        return found


@torch.no_grad()
def write(folder: Path, options):
    folder.mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else MODELS:
        guesser = Guesser(folder.parent / "models" / name)
        generator = torch.Generator().manual_seed(len(name))
        vocab_size, hidden_size = guesser.head.weight.shape
        ids = torch.randint(vocab_size, (TOKENS,), generator=generator)
        states = torch.randn(TOKENS, hidden_size, generator=generator)
        rows = [guesser.guesses(ids[:n], states[: n - 1]) for n in range(FIRST, TOKENS)]
        metadata = {"source": f"transformers {transformers.__version__}"}
        vectors = {"ids": ids.int(), "states": states, "guesses": torch.tensor(rows).int()}
        save_file(vectors, folder / f"{name}.safetensors", metadata=metadata)
