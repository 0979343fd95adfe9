"""GGUF files, tokenizers and chat templates, as their peers write, cut and render them.

Packages: gguf, numpy, sentencepiece, tokenizers, transformers, llama-cpp-python (for llama.cpp's tokenizers; with
LLAMA_CPP_LIB_PATH its Python part uses a libllama built elsewhere).

- small.gguf: every value type, several tensor types, an alignment of 64.
- byte_level.gguf, sentencepiece.gguf: vocabularies trained here on the demo's eval.txt. byte_level.gguf has no
  `tokenizer.ggml.pre`: ids.json has llama.cpp's ids of every text under some.
- boundaries.gguf: a byte-level vocabulary of the texts themselves, whose tokens span words: its ids show where a text is
  cut. ids.json has llama.cpp's ids under every `tokenizer.ggml.pre` that lowbit knows; where llama.cpp approximates a
  published pattern, tokenizers' with that pattern.
- tokenizer/: the byte-level one as tokenizer.json, with transformers' ids in ids.json.
- chat/*.jinja: templates in the styles of published ones, written for these tests; chat.json has what transformers
  renders from them.
"""

import json
import re
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

EVAL = Path(__file__).resolve().parents[2] / "models" / "demo" / "eval.txt"
PRES = ["default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "smollm", "tekken"]
RUST = Path(__file__).resolve().parents[2] / "crates" / "lowbit-files" / "src" / "tokenizer" / "gguf" / "byte_level.rs"
# Those that llama.cpp approximates: a constant of byte_level.rs, or patterns; whether words that are tokens stay whole;
# and the names.
APPROXIMATED = [
    (["TEKKEN"], True, ["tekken"]),
    (["GPT_4O"], False, ["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]),
    ([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "DEEPSEEK_CJK", r"\p{N}"], False, ["deepseek-coder"]),
    (["JAIS_2"], False, ["jais-2"]),
    ([r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", "SPARK_2_5", r"\p{N}"], False, ["spark2_5"]),
    (["EXAONE_MOE"], False, ["exaone-moe"]),
    (["BAILING"], False, ["bailingmoe", "bailingmoe2", "llada-moe"]),
    ([r"[^\n]+|[\n]+", "QWEN_2"], False, ["laguna"]),
    ([r"\d{1,3}(?=(?:\d{3})*\b)", "GPT_4O"], False, ["tiny_aya", "cohere2moe"]),
    (["YOUTU_SCRIPTS", "YOUTU"], True, ["youtu"]),
]
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "  two  and   three    spaces",
    "\n\n\t\ttabs and\r\nlines\n \n  \n",
    "It's we'll THEY'RE I'd don't",
    "0 12 345 6789 1234567890 3.14 1e-5",
    "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u0420\u0443\u0441\u0441\u043a\u0438\u0439 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2713\u20ac\u00a0nbsp\u2003em",
    "e\u0301 combining, \ufeffbom, \u200bzero width",
    "def f(x):\n    return x**2  # squared\n\n\nif __name__ == '__main__':\n\tprint(f(3))",
    "fn main() { println!(\"{}\", vec![1, 2, 3].len()); } // ok",
    "SELECT * FROM table WHERE a<>b AND c>=10;",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think> ok",
    "half a <|im_start| > token </s",
    "word" * 30,
    "=====-----____....!!!!????",
    "CamelCase HTTPServer snake_case kebab-case",
    "\u2581 a literal \u2581\u2581 underline",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4! \uff11\uff12\uff13\u3001\u5168\u89d2\u3002\u3000\u3072\u3089\u304c\u306a\u30ab\u30bf\u30ab\u30ca\u6f22\u5b57\u6df7\u3056\u308a",
    "WE'LL DON'T I'M You'Re it'S o'clock 'tis",
    "\u00c4rger \u00e9t\u00e9 \u0130stanbul'da \u1e9e \u01c5 \u02b0 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0664\u0665\u0666 \u05e9\u05dc\u05d5\u05dd, \u0b95\u0bcd\u0bb7",
    "a  b   c    \n  d\t\te \r\n\r\n f\u00a0\u00a0g\u2003\u2003 h   ",
    "x=1,000,000.50;y[2024-11-22]={\"k\":`v`};// https://a.b/c?d=e&f#g",
    "\u20ac5 \u00a310 \u2260 \u2264\u2265 \u2192\u2190 \u2018quoted\u2019 \u201cdouble\u201d \u2014dash\u2014\u2026 \u00bd \u00b2 \u2163",
    "\ud83e\uddd1\u200d\ud83d\udcbb\ud83d\udc4d\ud83c\udffd\ud83d\udc4d\ud83c\udffd 1\ufe0f\u20e3 \u2764\ufe0f\u200d\ud83d\udd25 \u0e01\u0e33 \u0e19\u0e49\u0e33",
    "/path/to/File.TXT\n/next//line/\n\n\n  /x  /\n",
]


def arguments(parser):
    pass


def write(folder: Path, options):
    folder.mkdir(parents=True, exist_ok=True)
    small_gguf(folder / "small.gguf")
    ids = {"texts": TEXTS}
    tokenizer = train_byte_level()
    byte_level_gguf(folder / "byte_level.gguf", tokenizer, None)
    ids["byte_level"] = {pre: llama_cpp_byte_level(tokenizer, pre) for pre in PRES}
    ids["boundaries"] = boundaries(folder / "boundaries.gguf")
    ids["tokenizer"] = save_tokenizer(folder / "tokenizer", tokenizer)
    ids["sentencepiece"] = sentencepiece_gguf(folder / "sentencepiece.gguf")
    (folder / "ids.json").write_text(as_lines(ids), encoding="utf-8")
    (folder / "chat.json").write_text(json.dumps(chats(folder / "chat"), ensure_ascii=False, indent=1) + "\n")


def as_lines(ids: dict) -> str:
    """A line for each text."""

    def text(value, indent):
        if isinstance(value, str):
            return json.dumps(value)
        if isinstance(value, list):
            rows = [indent + " " + json.dumps(row, ensure_ascii=False) for row in value]
            return "[\n" + ",\n".join(rows) + "\n" + indent + "]"
        rows = [f"{indent} {json.dumps(key)}: " + text(inner, indent + " ") for key, inner in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + indent + "}"

    return text(ids, "") + "\n"


def small_gguf(path: Path):
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for name in ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]:
        info = np.iinfo(name)
        getattr(writer, f"add_{name}")(f"test.{name}", int(info.max))
        writer.add_key_value(
            f"test.{name}s", [int(info.min), 1], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[name.upper()]
        )
    writer.add_float32("test.float32", 0.1)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "na\u00efve \U0001f642")
    writer.add_array("test.strings", ["", "a", "\u65e5\u672c"])
    writer.add_array("test.float32s", [1.5, -2.0])
    writer.add_array("test.bools", [True, False])
    weights = random.standard_normal((3, 64)).astype(np.float32)
    writer.add_tensor("f32", weights[:, :5].copy())
    writer.add_tensor("f16", weights[:2, :7].astype(np.float16))
    writer.add_tensor("i32", np.arange(24, dtype=np.int32).reshape(2, 3, 4))
    for name in ["Q4_0", "Q8_0", "BF16"]:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.add_tensor("f64", random.standard_normal(1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN_2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([EVAL.read_text(encoding="utf-8")], trainer)
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens(USER_DEFINED)
    return tokenizer


def byte_level_gguf(path: Path, tokenizer: tokenizers.Tokenizer, pre: str | None):
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([token_type(token) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    finish(writer)


def boundaries(path: Path) -> dict:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(CONTROL[:2])
    byte_level_gguf(path, tokenizer, None)
    rust = RUST.read_text(encoding="utf-8")
    constants = dict(re.findall(r'const (\w+): &str = r#*"(.*?)"#*;', rust))
    table = rust[rust.index("const PRES") : rust.index("pub(super) fn build")]
    lists = re.findall(r'&\[((?:\s*"[\w.\-]+",?)+\s*)\],\s*&\[', table)
    ids = {pre: llama_cpp_byte_level(tokenizer, pre) for names in lists for pre in re.findall(r'"(.*?)"', names)}
    for patterns, whole_words, pres in APPROXIMATED:
        own = published(tokenizer, [constants.get(pattern, pattern) for pattern in patterns], whole_words)
        first = ids[pres[0]]
        bos = [row[:1] if row and row[0] == tokenizer.token_to_id("<s>") else [] for row in first]
        ids |= {pre: [start + row for start, row in zip(bos, own)] for pre in pres}
    same = {}
    for pre, rows in ids.items():
        same[pre] = next((first for first in same if ids[first] == rows), rows)
    return same


def published(tokenizer: tokenizers.Tokenizer, patterns: list[str], whole_words: bool) -> list[list[int]]:
    described = json.loads(tokenizer.to_str())
    described["model"]["ignore_merges"] = whole_words
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


def token_type(token: str) -> gguf.TokenType:
    if token in CONTROL:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.USER_DEFINED if token in USER_DEFINED else gguf.TokenType.NORMAL


def finish(writer: gguf.GGUFWriter):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(path: Path) -> list[list[int]]:
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=True) if text else [] for text in TEXTS]


def llama_cpp_byte_level(tokenizer: tokenizers.Tokenizer, pre: str) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        byte_level_gguf(path, tokenizer, pre)
        return llama_cpp_ids(path)


def save_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer) -> list[list[int]]:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return [fast(text)["input_ids"] for text in TEXTS]


def sentencepiece_gguf(path: Path) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "model")
        sentencepiece.SentencePieceTrainer.train(
            input=str(EVAL),
            model_prefix=prefix,
            model_type="bpe",
            vocab_size=700,
            character_coverage=1.0,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            minloglevel=2,
        )
        processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    types = [gguf.TokenType.NORMAL] * len(processor)
    for id in range(len(processor)):
        if processor.is_unknown(id):
            types[id] = gguf.TokenType.UNKNOWN
        elif processor.is_control(id):
            types[id] = gguf.TokenType.CONTROL
        elif processor.is_byte(id):
            types[id] = gguf.TokenType.BYTE
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([processor.id_to_piece(id) for id in range(len(processor))])
    writer.add_token_scores([processor.get_score(id) for id in range(len(processor))])
    writer.add_token_types(types)
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    finish(writer)
    # sentencepiece takes the names of control tokens for text, llama.cpp for the tokens.
    plain = [not any(token in text for token in CONTROL) for text in TEXTS]
    own = [processor.encode(text, add_bos=True) if is_plain else None for text, is_plain in zip(TEXTS, plain)]
    return {"sentencepiece": own, "llama.cpp": llama_cpp_ids(path)}


def chats(folder: Path) -> list[dict]:
    conversations = [
        [{"role": "user", "content": 'Hi <b> "there" & \u00e9'}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": " spaces \n"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
            {"role": "user", "content": "again"},
        ],
        [{"role": "assistant", "content": "first"}],
    ]
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    cases = []
    for path in sorted(folder.glob("*.jinja")):
        for messages in conversations:
            for extra in [{}, {"enable_thinking": False}, {"tools": [{"name": "f", "about": "<'\u00e9'>", "n": [1, 2.5, None, True]}]}]:
                case = {"template": path.stem, "messages": messages, "variables": variables | extra}
                case["add_generation_prompt"] = extra == {} or len(messages) > 1
                try:
                    rendered, _ = render_jinja_template(
                        [messages],
                        chat_template=path.read_text(encoding="utf-8"),
                        add_generation_prompt=case["add_generation_prompt"],
                        **case["variables"],
                    )
                    case["text"] = rendered[0]
                except Exception as error:
                    case["error"] = str(error)
                cases.append(case)
    return cases
