"""Learns the demo model further on the dialogues, so that its weights are good once they have 4 bits.

All weights are trained, in f32 with bf16 products; the loss is on what the assistant says, and on documentation. In the
second half of the steps the forward pass sees the weights as `lowbit quantize` will round them, while gradients go to the
unrounded ones (straight-through), so that rounding costs little afterwards.
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from .dialogues import Generator
from .grammar import FOLDER

DEMO = FOLDER.parent.parent / "models" / "demo"
PREFIX = "model.language_model."
END = "<|endoftext|>"
LONGEST = 1024
CHUNK = 64
TEMPLATE = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8").strip()


# ---- data ----


def encode(tokenizer, messages):
    """A dialogue's token ids, and for each whether it is learned: the assistant's, up to <|im_end|>. The text is that of
    chat_template.jinja."""
    ids, learned = [], []
    for message in messages:
        says = message["role"] == "assistant"
        for text, learn in ((f"<|im_start|>{message['role']}\n", False), (f"{message['content']}<|im_end|>", says), ("\n", False)):
            part = tokenizer.encode(text, add_special_tokens=False).ids
            ids += part
            learned += [learn] * len(part)
    return ids[:LONGEST], learned[:LONGEST]


def encoded_dialogues(seeds):
    """The dialogues of a range of seeds, encoded: work of one process."""
    generator = Generator()
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = []
    for seed in seeds:
        ids, learned = encode(tokenizer, generator.dialogue(seed))
        found.append((np.asarray(ids, dtype=np.int32), np.asarray(learned)))
    return found


def data(count, first_seed=0):
    """`count` encoded dialogues, made by all cores."""
    step = 2000
    ranges = [range(s, min(s + step, first_seed + count)) for s in range(first_seed, first_seed + count, step)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return [sample for part in pool.map(encoded_dialogues, ranges, chunksize=1) for sample in part]


def documentation(path, length=512):
    """Pieces of a text whose documents END separates, all of it learned."""
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    documents = path.read_text(encoding="utf-8").split(END)
    pieces = []
    for encoding in tokenizer.encode_batch([text.strip() + END for text in documents], add_special_tokens=False):
        ids = np.asarray(encoding.ids, dtype=np.int32)
        pieces += [ids[i : i + length] for i in range(0, len(ids), length)]
    return [(ids, np.ones(len(ids), dtype=bool)) for ids in pieces if len(ids) > 32]


def batches(samples, tokens, rng):
    """The samples in batches of about `tokens` tokens, those of one batch similarly long; the batches in random order."""
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i][0]) // 16, rng.random()))
    found, batch = [], []
    for i in order:
        longest = max(len(samples[j][0]) for j in [*batch[-1:], i])
        if batch and longest * (len(batch) + 1) > tokens:
            found.append(batch)
            batch = []
        batch.append(i)
    found.append(batch)
    rng.shuffle(found)
    return found


def padded(samples, batch, pad, device):
    """A batch as `ids` and the `labels` of the next tokens (-100: not learned), both [rows, length]."""
    length = max(len(samples[i][0]) for i in batch)
    ids = np.full((len(batch), length), pad, dtype=np.int64)
    labels = np.full((len(batch), length), -100, dtype=np.int64)
    for row, i in enumerate(batch):
        text, learned = samples[i]
        ids[row, : len(text)] = text
        labels[row, : len(text) - 1] = np.where(learned[1:], text[1:], -100)
    return (torch.from_numpy(part).pin_memory().to(device, non_blocking=True) if device != "cpu" else torch.from_numpy(part)
            for part in (ids, labels))


# ---- the model ----


def delta_rule(query, key, value, g, beta, chunk_size=CHUNK, **_):
    """The gated delta rule over whole texts, chunked, without a loop over the rows of a chunk. Operands are as transformers'
    torch_chunk_gated_delta_rule takes them: query, key [batch, length, key heads, dim], value [batch, length, heads, dim],
    g and beta [batch, length, heads]; no initial state."""
    dtype, length, groups = query.dtype, query.shape[1], value.shape[2] // key.shape[2]
    query, key = (part.repeat_interleave(groups, dim=2) for part in (query, key))
    query, key, value, g, beta = (part.transpose(1, 2).float() for part in (query, key, value, g, beta))
    query, key = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    pad = -length % chunk_size
    query, key, value = (F.pad(part, (0, 0, 0, pad)).unflatten(2, (-1, chunk_size)) for part in (query, key, value))
    g, beta = (F.pad(part, (0, pad)).unflatten(2, (-1, chunk_size)) for part in (g, beta))
    g = g.cumsum(-1)
    lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    beta_key = key * beta[..., None]
    system = (beta_key @ key.transpose(-1, -2)) * decay
    right = torch.cat([value * beta[..., None], beta_key * g.exp()[..., None]], dim=-1)
    new_value, old_key = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    inside = (query @ key.transpose(-1, -2)) * decay
    query = query * g.exp()[..., None]
    key = key * (g[..., -1:] - g).exp()[..., None]
    last = g[..., -1].exp()[..., None, None]
    state, outputs = torch.zeros_like(key[:, :, 0].transpose(-1, -2) @ value[:, :, 0]), []
    for i in range(query.shape[2]):
        change = new_value[:, :, i] - old_key[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + inside[:, :, i] @ change)
        state = state * last[:, :, i] + key[:, :, i].transpose(-1, -2) @ change
    output = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length]
    return output.transpose(1, 2).to(dtype), None


def causal_conv(x, weight, bias=None, activation=None, **_):
    """A causal convolution per channel with SiLU: x [batch, channels, length], weight [channels, width]; as sums of shifted
    x, since torch's gradient of such a convolution is slow."""
    width, length = weight.shape[1], x.shape[2]
    assert bias is None and activation == "silu"
    x = F.pad(x, (width - 1, 0))
    return F.silu(sum(x[:, :, i : i + length] * weight[:, i, None] for i in range(width)))


def all_experts(self, hidden_states, top_k_index, top_k_weights):
    """Every expert on every token, those that were not chosen with weight 0: more work and no waiting for the GPU."""
    weights = torch.zeros(hidden_states.shape[0], self.num_experts, dtype=top_k_weights.dtype, device=hidden_states.device)
    weights = weights.scatter(1, top_k_index, top_k_weights)
    gate, up = torch.einsum("nh,eih->eni", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
    out = torch.einsum("eni,ehi->enh", self.act_fn(gate) * up, self.down_proj)
    return (out * weights.t()[..., None].to(out.dtype)).sum(0)


def load(device):
    """The demo model in f32, and the dtype of each tensor in its file."""
    config = AutoConfig.from_pretrained(DEMO).text_config
    modeling.Qwen3_5MoeExperts.forward = all_experts
    modeling.torch_chunk_gated_delta_rule = delta_rule
    modeling.causal_conv1d_fn = causal_conv
    model = modeling.Qwen3_5MoeForCausalLM(config)
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    state = {name.replace(PREFIX, "model."): tensor.float() for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.to(device), {name: tensor.dtype for name, tensor in tensors.items()}


def rounded(weight, bits, group=64):
    """What MLX's affine format keeps of `weight`: codes of `bits` bits, scale and bias in bf16 per `group` values of a row."""
    w = weight.bfloat16().float().unflatten(-1, (-1, group))
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-7)
    from_low = low.abs() > high.abs()
    scale = torch.where(from_low, scale, -scale)
    edge = torch.where(from_low, low, high)
    zero = torch.round(edge / scale)
    scale = torch.where(zero != 0, edge / zero, scale)
    bias = torch.where(zero != 0, edge, torch.zeros_like(edge))
    codes = torch.round((w - bias) / scale).clamp(0, 2**bits - 1)
    return (codes * scale.bfloat16().float() + bias.bfloat16().float()).flatten(-2)


def bits_of(name, tensor):
    """The bits that `lowbit quantize` gives a weight, None where it stays as it is."""
    if tensor.ndim < 2 or "conv1d" in name:
        return None
    return 8 if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) else 4


class Rounding:
    """Swaps the weights for their rounded values for a pass, and back for the optimiser's step."""

    def __init__(self, model):
        self.weights = {4: [], 8: []}
        for name, p in model.named_parameters():
            if bits := bits_of(name, p):
                self.weights[bits].append(p)

    @torch.no_grad()
    def __enter__(self):
        self.kept = [(p, p.data) for weights in self.weights.values() for p in weights]
        for bits, weights in self.weights.items():
            # All weights at once: a launch per operation, not one per operation and weight.
            groups = rounded(torch.cat([p.data.reshape(-1, 64) for p in weights]), bits)
            for p, part in zip(weights, groups.split([p.numel() // 64 for p in weights]), strict=True):
                p.data = part.reshape(p.shape)

    def __exit__(self, *_):
        for p, kept in self.kept:
            p.data = kept


def losses(model, ids, labels, device):
    """The sum of the losses, the number of learned tokens, and how many of these were the likeliest."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device != "cpu"):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        chosen = labels >= 0
        logits = model.lm_head(hidden[chosen]).float()
    targets = labels[chosen]
    return F.cross_entropy(logits, targets, reduction="sum"), targets.numel(), (logits.argmax(-1) == targets).sum()


# ---- the run ----


def evaluate(model, samples, device, tokens):
    total = count = right = 0
    with torch.no_grad():
        for batch in batches(samples, tokens, random.Random(0)):
            loss, n, hits = losses(model, *padded(samples, batch, 0, device), device)
            total, count, right = total + loss.item(), count + n, right + hits.item()
    return f"loss {total / count:.4f}, likeliest {100 * right / count:.2f} %"


def rate(done, peak, warm=0.05):
    """The learning rate when a share `done` of the run is over: up to `peak`, then down as a cosine."""
    if done < warm:
        return peak * max(done / warm, 0.02)
    return peak * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * (done - warm) / (1 - warm))))


def plan(samples, texts, options):
    """The run's batches, each with the list that it is taken from."""
    rng = random.Random(1)
    share = options.text_share * sum(len(ids) for ids, _ in samples)
    steps = []
    for _ in range(options.epochs):
        epoch = [(samples, batch) for batch in batches(samples, options.tokens, rng)]
        pieces = batches(texts, options.tokens, rng) if texts else []
        while pieces and sum(len(texts[i][0]) for batch in pieces for i in batch) > share:
            pieces.pop()
        epoch += [(texts, batch) for batch in pieces]
        rng.shuffle(epoch)
        steps += epoch
    return steps[: options.steps] if options.steps else steps


def optimizer_of(model, device):
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if bits_of(name, p)], "weight_decay": 0.02},
        {"params": [p for name, p in named if not bits_of(name, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device != "cpu")


def train(options):
    start = time.monotonic()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, dtypes = load(device)
    samples = data(options.dialogues)
    texts = documentation(options.text) if options.text else []
    steps = plan(samples, texts, options)
    print(f"{len(samples)} dialogues, {len(texts)} pieces of documentation: {len(steps)} steps, {time.monotonic() - start:.0f} s", flush=True)
    if texts:
        print("documentation, as it is:", evaluate(model, texts[:64], device, options.tokens), flush=True)
    optimizer, rounding = optimizer_of(model, device), Rounding(model)
    model.train()
    begun, done = time.monotonic(), 0.0
    for step, (source, batch) in enumerate(steps):
        done = step / len(steps)
        if options.seconds:
            done = max(done, (time.monotonic() - begun) / (options.seconds - (begun - start)))
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(done, options.rate)
        with rounding if done >= 0.5 else contextlib.nullcontext():
            loss, n, hits = losses(model, *padded(source, batch, 0, device), device)
            (loss / n).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step}, {100 * done:.0f} %: loss {loss.item() / n:.4f}, likeliest {100 * hits.item() / n:.1f} %", flush=True)
    print(f"{step + 1} steps, {time.monotonic() - start:.0f} s", flush=True)
    model.eval()
    save(model, dtypes, options.output)
    held_out = data(options.held_out, first_seed=10_000_000)
    print("held out, f32:", evaluate(model, held_out, device, options.tokens), flush=True)
    with rounding:
        print("held out, rounded:", evaluate(model, held_out, device, options.tokens), flush=True)
        if texts:
            print("documentation, rounded:", evaluate(model, texts[:64], device, options.tokens), flush=True)


def save(model, dtypes, output):
    """Writes a checkpoint in the layout of models/demo, with the chat template."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, p in model.state_dict().items():
        stored = name.replace("model.", PREFIX, 1)
        if stored in dtypes:
            tensors[stored] = p.detach().to("cpu", dtypes[stored]).contiguous()
    assert tensors.keys() == dtypes.keys()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    write_settings(output)


def write_settings(output):
    """The checkpoint's files but for its weights."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(DEMO / name, output / name)
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    recommended = {"do_sample": True, "eos_token_id": [8191, 8189], "pad_token_id": 8189, "temperature": 0.7, "top_p": 0.9}
    (output / "generation_config.json").write_text(json.dumps(recommended, indent=2) + "\n")


def arguments(parser):
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint to write, in bf16")
    parser.add_argument("--dialogues", type=int, default=300_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=49_152, help="tokens per step, with padding: few and large steps keep a GPU busy")
    parser.add_argument("--steps", type=int, help="end after as many steps")
    parser.add_argument("--seconds", type=float, help="end after as many seconds, with the schedule cut to fit")
    parser.add_argument("--held-out", type=int, default=300, help="dialogues to score at the end")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--text", type=Path, help="documentation, documents separated by <|endoftext|>")
    parser.add_argument("--text-share", type=float, default=0.1, help="tokens of documentation per token of dialogues")
