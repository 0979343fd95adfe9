"""A checkpoint that answers as a script says.

Each token of a reply is a token of the vocabulary of its own, and all that the model knows is which token follows which: the embedding is
a row of random signs, attention and the MLP are zeros, and an output row is the sum of the rows that it follows. The chat template ends a
prompt with the token of the script and of the turn, which is the number of tools' results before it.
"""

import json
import math
import random
import re
import struct

HIDDEN, HEAD, INNER = 512, 64, 64
END = "<|im_end|>"
# Scripts are told apart by a tool that a request offers, and a request without one has a script of its own.
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<tool_call></tool_call><|im_end|>
{% endif -%}
{%- set turn = namespace(count=0) -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% if message.role == 'tool' %}{% set turn.count = turn.count + 1 %}{% endif -%}
{%- endfor -%}
{%- set names = (tools or []) | map(attribute='function') | map(attribute='name') | list -%}
{%- set script = namespace(name='') -%}
{%- for name in SCRIPTS if name in names %}{% set script.name = name %}{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '<|' ~ script.name ~ ':' ~ turn.count ~ '|>' }}{% endif -%}"""


def call(name, **arguments):
    """A reply that calls a function."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def pieces(text, known):
    """The text in pieces that are not known yet, which then are."""
    found, piece = [], ""
    for word in re.findall(r"\s*\S{1,6}|\s+$", text):
        piece += word
        if piece not in known:
            found.append(piece)
            known.add(piece)
            piece = ""
    # A known end goes with what stands before it.
    while piece in known and found:
        piece = found.pop() + piece
    found += [piece] if piece else []
    known.update(found)
    return found


def write(folder, base, scripts):
    """A checkpoint in `folder` with the tokenizer of `base` and these scripts, `{tool: [reply, ..]}`, `""` for no tool."""
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokens = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    # A marker that is a token is one nowhere else, and a reply's tokens are its own.
    known, successors = {*tokens, "<tool_call>", "</tool_call>"}, {}

    def added(content, special):
        tokens[content] = len(tokens)
        like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append({"id": tokens[content], "content": content, "special": special, **like})
        return tokens[content]

    for tool, replies in scripts.items():
        for turn, reply in enumerate(replies):
            chain = [added(f"<|{tool}:{turn}|>", True)]
            chain += [added(piece, False) for piece in pieces(reply, known)]
            for one, next_one in zip(chain, [*chain[1:], tokens[END]]):
                successors.setdefault(next_one, []).append(one)
    vocabulary = math.ceil(len(tokens) / 32) * 32
    signs = random.Random(1)
    embedding = [[signs.choice((-1.0, 1.0)) for _ in range(HIDDEN)] for _ in range(vocabulary)]
    zero = [0.0] * HIDDEN
    head = [[sum(column) for column in zip(*map(embedding.__getitem__, successors[row]))] if row in successors else zero for row in range(vocabulary)]
    shapes = {"self_attn.q_proj": (HEAD, HIDDEN), "self_attn.k_proj": (HEAD, HIDDEN), "self_attn.v_proj": (HEAD, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, HEAD), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    tensors = {f"model.layers.0.{name}.weight": (shape, [0.0] * (shape[0] * shape[1])) for name, shape in shapes.items()}
    norms = ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"]
    tensors |= {f"{name}.weight": ((HIDDEN,), [1.0] * HIDDEN) for name in norms}
    for name, rows in {"model.embed_tokens": embedding, "lm_head": head}.items():
        tensors[f"{name}.weight"] = ((vocabulary, HIDDEN), [value for row in rows for value in row])
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": vocabulary,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": tokens[END],
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[END], "do_sample": False}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = TEMPLATE.replace("SCRIPTS", json.dumps([tool for tool in scripts if tool]))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tensors(path, tensors):
    """A safetensors file of `{name: (shape, values)}` in f16."""
    header, offset = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, offset + 2 * len(values)]}
        offset += 2 * len(values)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(struct.pack(f"<{len(values)}e", *values))
