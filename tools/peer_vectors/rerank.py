"""Scores by sentence-transformers' cross-encoders: `pip install sentence-transformers` beside tools/requirements.txt.

The checkpoint is tests/vectors/models/qwen3 with the files of a case, which are in cases.json with the scores. A value in a file
that the checkpoint has too is added to it.
"""

import importlib.metadata
import json
import shutil
import tempfile
from pathlib import Path

import torch

MODEL = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "models" / "qwen3"

QUERY = "the thing in there"
DOCUMENTS = ["7 and 8", "the inner theme", "", "Hello, W\u00f6rld!\n", "the thing is in there " * 6]

FLAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<answer>"
PARTS = (
    '{% set one = messages | selectattr("role", "eq", "query") | first %}'
    '{% set other = messages | selectattr("role", "eq", "document") | first %}'
    "<{{ other.content[0].text }}> for <{{ one.content[0].text }}>?"
)
CALLED = FLAT + "{% if add_generation_prompt %} {{ hint }}{% endif %}"


def files(template, score=None, transformer=None, prompts=None, config=None):
    """The files of a case."""
    modules = [("", "sentence_transformers.base.modules.transformer.Transformer")]
    modules.append(("1_LogitScore", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"))
    return {
        "modules.json": [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)],
        "1_LogitScore/config.json": score or {"true_token_id": 97, "false_token_id": 98, "module_input_name": "causal_logits"},
        "sentence_bert_config.json": {"transformer_task": "text-generation"} | MESSAGE | (transformer or {}),
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"} | (prompts or {"prompts": {}}),
        "tokenizer_config.json": {"chat_template": template, "pad_token": "<|endoftext|>", "model_max_length": 512},
        "config.json": config or {},
    }


MESSAGE = {
    "modality_config": {
        "text": {"method": "forward", "method_output_name": "logits"},
        "message": {"method": "forward", "method_output_name": "logits"},
    },
    "module_output_name": "causal_logits",
}

IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
PROMPTS = {"prompts": {"find": "Find it."}, "default_prompt_name": "find"}
HINT = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True, "hint": "yes"}}}

# Name: (files, arguments of predict).
CASES = {
    "flat": (files(FLAT), {}),
    "parts": (files(PARTS), {}),
    "instruction": (files(FLAT), {"prompt": "Find a number."}),
    "default prompt": (files(FLAT, prompts=PROMPTS), {}),
    "one token, logits": (files(FLAT, score={"true_token_id": 97}, config=IDENTITY), {}),
    "called with variables": (files(CALLED, transformer=HINT), {}),
    "cut": (files(FLAT, transformer={"max_seq_length": 60}), {}),
}


def arguments(parser):
    pass


def write(folder, options):
    # Other subjects need not have this package.
    from sentence_transformers import CrossEncoder

    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for name, (made, predict) in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            model = Path(temporary)
            shutil.copytree(MODEL, model, dirs_exist_ok=True)
            for file, value in made.items():
                path = model / file
                path.parent.mkdir(exist_ok=True)
                if path.exists():
                    value = json.loads(path.read_text()) | value
                path.write_text(json.dumps(value))
            # As many tokens as the model has places for, unless a file says less.
            encoder = CrossEncoder(str(model), device="cpu", model_kwargs={"dtype": torch.float32})
            scores = encoder.predict([(QUERY, document) for document in DOCUMENTS], batch_size=1, **predict)
            cases.append({"name": name, "files": made, "arguments": predict, "scores": [float(score) for score in scores]})
    versions = {name: importlib.metadata.version(name) for name in ["sentence-transformers", "transformers", "torch"]}
    text = json.dumps({"source": versions, "query": QUERY, "documents": DOCUMENTS, "cases": cases}, indent=1, ensure_ascii=False)
    (folder / "cases.json").write_text(text + "\n")
