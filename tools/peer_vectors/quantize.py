"""What llama-quantize makes of the tiny checkpoints, and which types it gives the tensors of larger models.

Packages: numpy, gguf, and for the converter torch, transformers and sentencepiece. `--llama-cpp` and `--tools` as for the
subject models, whose files are read.

files.json: for each GGUF file below tests/vectors/models and each type of file, the SHA-256 of llama-quantize's output;
and of its output with `--tensor-type` for some tensors.
types.json: models by their metadata and tensors, and the type that each tensor gets in each type of file: a letter per
tensor, which `letters` explains.
converted.json: for each checkpoint, the metadata and the tensors (type, shape, SHA-256) of the file that the converter and then
llama-quantize make of it as Q4_K_M. Of longer lists there is the digest of their JSON; of `ssm_a`, which hangs on the
last bit of exp, the values.
"""

import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

MIXES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ4_NL IQ4_XS MXFP4_MOE"
MODELS = Path(__file__).resolve().parent.parent.parent / "tests" / "vectors" / "models"
CHECKPOINTS = ["llama-bias", "llama2", "llama3", "qwen3", "qwen3-yarn", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
OUT_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# The converter knows tokenizers by a hash, and so none of ours: it is told the names of their cuts.
PRE = {"demo": "qwen35"}


def arguments(parser):
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's source tree")
    parser.add_argument("--tools", type=Path, required=True, help="the folder of the built llama-quantize")


def write(folder, options):
    folder.mkdir(parents=True, exist_ok=True)
    tool = str(options.tools / "llama-quantize")
    files = {path.parent.name: digests(tool, path) for path in sorted(MODELS.glob("*/model.gguf"))}
    ruled = {"model": "qwen3_5-gguf", "mix": "Q4_K_M", "rules": ["ffn_down=Q5_1", "attn_v=Q8_0", "blk.1.ffn_up=F16"]}
    ruled["digest"] = digest(tool, MODELS / ruled["model"] / "model.gguf", ruled["mix"], ruled["rules"])
    save(folder / "files.json", {"models": files, "ruled": ruled})
    demo = MODELS.parent.parent.parent / "models" / "demo"
    checkpoints = [demo, *(MODELS / name for name in CHECKPOINTS)]
    save(folder / "converted.json", {"models": {path.name: converted(options, path) for path in checkpoints}})
    save(folder / "types.json", {"letters": LETTERS, "models": [types(tool, *model) for model in synthetic()]})


def save(path, content):
    content = {"made_by": "llama-quantize of llama-cpp-python 0.3.36", **content}
    # Numbers of a list on one line.
    text = re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1))
    path.write_text(text + "\n")
    print(path.name, flush=True)


def run(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(f"{command} failed:\n{result.stdout[-2000:]}")
    return result.stdout


def digests(tool, model):
    return {mix: digest(tool, model, mix) for mix in MIXES.split()}


def digest(tool, model, mix, rules=()):
    given = [word for rule in rules for word in ("--tensor-type", rule)]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.gguf"
        run(tool, "--allow-requantize", *given, str(model), str(out), mix, "1")
        return hashlib.sha256(out.read_bytes()).hexdigest()


def out_type(checkpoint):
    """The type that the converter keeps a checkpoint's weights in, without loss."""
    config = json.loads((checkpoint / "config.json").read_text())
    return OUT_TYPES[config.get("dtype") or config.get("torch_dtype") or config["text_config"]["dtype"]]


def converted(options, checkpoint):
    import gguf

    from .llama_cpp import LlamaCpp

    llama = LlamaCpp(options.llama_cpp, options.tools)
    with tempfile.TemporaryDirectory() as scratch:
        plain, quantised = Path(scratch) / "plain.gguf", Path(scratch) / "quantised.gguf"
        llama.convert(checkpoint, plain, out_type(checkpoint), PRE.get(checkpoint.name, "gpt-2"))
        llama.quantize(plain, quantised, "Q4_K_M")
        reader = gguf.GGUFReader(quantised)
        keys = {key: short(field.contents()) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        return {"metadata": keys, "tensors": {tensor.name: described(tensor) for tensor in reader.tensors}}


def short(value):
    if isinstance(value, list) and len(value) > 8:
        return hashlib.sha256(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
    return value


def described(tensor):
    values = tensor.name.endswith("ssm_a")
    content = tensor.data.tolist() if values else hashlib.sha256(tensor.data.tobytes()).hexdigest()
    return {"type": tensor.tensor_type.name, "shape": [int(n) for n in reversed(tensor.shape)], "content": content}


def synthetic():
    """(name, metadata below the architecture's name, tensors): what the choice of types depends on."""
    k, odd = 256, 96
    attention = {"attn_q": k, "attn_k": k, "attn_v": k, "attn_output": k}
    dense = {"ffn_gate": k, "ffn_up": k, "ffn_down": k}
    experts = {"ffn_gate_inp": k, "ffn_gate_exps": k, "ffn_up_exps": k, "ffn_down_exps": k}
    shared = {"ffn_gate_shexp": k, "ffn_up_shexp": k, "ffn_down_shexp": k}
    delta = {"attn_qkv": k, "attn_gate": k, "ssm_alpha": k, "ssm_beta": k, "ssm_out": k, "ssm_conv1d": 4}

    def layers(count, parts):
        every = [parts(i) if callable(parts) else parts for i in range(count)]
        return [(f"blk.{i}.{name}.weight", width) for i, part in enumerate(every) for name, width in part.items()]

    def hybrid(feedforward):
        return lambda i: (attention if i % 4 == 3 else delta) | feedforward

    tied, head = [("token_embd.weight", k)], [("token_embd.weight", k), ("output.weight", k)]
    heads = lambda count, keys, **more: {"attention.head_count": count, "attention.head_count_kv": keys, **more}
    return [
        ("llama", heads(8, 8), head + layers(18, attention | dense)),
        ("llama", heads(64, 8), head + layers(80, attention | dense)),
        ("qwen3", heads(16, 4), tied + layers(28, attention | dense)),
        ("qwen3", heads(4, 2), [("token_embd.weight", odd)] + layers(6, dict.fromkeys(attention | dense, odd))),
        ("qwen3moe", heads(8, 2, expert_count=8), head + layers(12, attention | experts)),
        ("qwen3moe", heads(32, 4, expert_count=128), head + layers(17, attention | experts)),
        ("qwen35", heads(16, 4), head + layers(20, hybrid(dense))),
        ("qwen35moe", heads(16, 2, expert_count=256), head + layers(16, hybrid(experts | shared))),
    ]


def types(tool, architecture, metadata, tensors):
    import gguf

    count = 1 + max(int(name.split(".")[1]) for name, _ in tensors if name.startswith("blk."))
    metadata = {"block_count": count, **metadata}
    shape = lambda name, width: ([2] if "_exps" in name else []) + [2, width]
    tensors = [(name, shape(name, width)) for name, width in tensors]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {**metadata, **required(architecture)}.items():
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
        if architecture.startswith("qwen35"):
            writer.add_array(f"{architecture}.rope.dimension_sections", [1, 1, 1, 1])
        for name, size in tensors:
            writer.add_tensor(name, np.zeros(size, np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = {mix: chosen(run(tool, "--dry-run", str(path), mix), tensors) for mix in MIXES.split()}
    return {"architecture": architecture, "metadata": metadata, "tensors": dict(tensors), "types": found}


def required(architecture):
    """Keys that llama-quantize wants, but that do not matter."""
    keys = {"context_length": 512, "embedding_length": 256, "attention.layer_norm_rms_epsilon": 1e-6}
    if architecture.startswith("qwen35"):
        sizes = {"conv_kernel": 4, "inner_size": 256, "state_size": 64, "time_step_rank": 4, "group_count": 4}
        keys |= {f"ssm.{key}": size for key, size in sizes.items()} | {"full_attention_interval": 4}
    if architecture.endswith("moe"):
        keys |= {"expert_used_count": 2, "expert_feed_forward_length": 256}
    return keys


LETTERS = dict(zip("F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split(), "abcdefghijklmnop"))


def chosen(log, tensors):
    """The types of all tensors, from the lines of a dry run."""
    line = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- \[.*\], type = +(\w+), .*size = .*?(?:\((\w+)\))?$", re.M)
    found = {name: (new or old).upper() for name, old, new in line.findall(log)}
    assert len(found) == len(tensors), log[-2000:]
    return "".join(LETTERS[found[name]] for name, _ in tensors)
