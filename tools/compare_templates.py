#!/usr/bin/env python3
"""Compares renderings of published chat templates with transformers'.

    tools/compare_templates.py [FOLDER]

FOLDER has *.jinja files. Without it, llama-cpp-python's source distribution is downloaded, which carries those that
llama.cpp ships; they are their makers' and not part of this project. Every template renders plain chats, tools, tool
calls and results, reasoning, documents and content in parts. Equal is: the same text, or an error from both. Exits with
1 when a rendering differs.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

ROOT = Path(__file__).resolve().parent.parent

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'The city\'s "name" & <place>'},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": ["integer", "null"], "minimum": 1, "description": "How many\nlines"},
        "place": {"type": "object", "properties": {"lat": {"type": "number", "maximum": 90.0}}, "required": ["lat"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather é.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"city": "O'Hare \"x\" é\n", "days": 3, "far": 1e22, "ok": True, "no": None, "place": {"lat": 1.5}, "tags": ["a", "it's"]}
USER = {"role": "user", "content": " What <b>is</b> it? é "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}


def call(arguments, name="weather"):
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def chats() -> dict[str, list[dict]]:
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 1.5, "it\'s": "é"}'}
    called = {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS)]}
    spelled = {"role": "assistant", "content": "Let me see.", "tool_calls": [call(json.dumps(ARGUMENTS))]}
    silent = {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS), call({}, "now")]}
    reasoned = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it?\nIt is."}
    parts = {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "here"}]}
    return {
        "empty": [],
        "user": [USER],
        "system": [SYSTEM, USER],
        "turns": [SYSTEM, USER, answer, {"role": "user", "content": "again"}],
        "ends in an answer": [USER, answer],
        "begins with an answer": [answer],
        "two users": [USER, USER],
        "developer": [{"role": "developer", "content": "Rules"}, USER],
        "unknown role": [USER, {"role": "critic", "content": "Bad"}],
        "parts": [parts],
        "system in parts": [{"role": "system", "content": parts["content"]}, parts],
        "no content": [USER, {"role": "assistant", "content": None}],
        "no such key": [{"role": "user"}],
        "empty content": [{"role": "user", "content": ""}],
        "called": [USER, called],
        "result": [SYSTEM, USER, called, result, {"role": "assistant", "content": "Fine."}, USER],
        "ends in a result": [USER, called, result],
        "spelled": [USER, spelled, result],
        "several": [USER, silent, result, dict(result, content="12:00"), {"role": "assistant", "content": "So."}],
        "results in a row": [SYSTEM, USER, silent, result, dict(result, content=[{"type": "text", "text": "12"}])],
        "reasoned": [USER, reasoned, USER],
        "reasoned and called": [USER, dict(called, reasoning_content="hm"), result, reasoned, USER],
        "thinking": [USER, {"role": "assistant", "content": "Yes.", "thinking": "why?"}, USER],
    }


def variables() -> list[dict]:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    documents = [{"title": "One's", "text": "Text é", "doc_id": 1}, {"title": "Two", "text": 'a "b"', "doc_id": 2}]
    extras = [
        {},
        {"enable_thinking": True},
        {"enable_thinking": False},
        {"tools": TOOLS},
        {"tools": TOOLS, "enable_thinking": False},
        {"tools": [tool["function"] for tool in TOOLS]},
        {"tools": []},
        {"documents": documents},
        {"thinking": True, "reasoning_effort": "high", "tools": TOOLS, "documents": documents},
    ]
    return [tokens | extra for extra in extras]


def want(template: str, case: dict) -> dict:
    try:
        rendered, _ = render_jinja_template(
            [_normalize_chat_messages(case["messages"])],
            chat_template=template,
            add_generation_prompt=case["add_generation_prompt"],
            **case["variables"],
        )
        return {"text": rendered[0]}
    except Exception as error:  # Whatever Python raises inside of a template, RecursionError, too.
        return {"error": f"{type(error).__name__}: {error}"}


def lowbit(template: str, cases: list[dict]) -> list[dict]:
    command = [ROOT / "target/debug/examples/render_chat"]
    lines = "".join(json.dumps(case | {"template": template}) + "\n" for case in cases)
    done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def download(folder: Path) -> Path:
    package = ["llama-cpp-python", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *package], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        names = [m for m in archive.getmembers() if "/models/templates/" in m.name and m.name.endswith(".jinja")]
        archive.extractall(folder, names, filter="data")
    return (folder / names[0].name).parent


def compare(folder: Path, shown: int) -> bool:
    counts = {"equal": 0, "refused by both": 0, "different": 0}
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        cases = []
        for (name, messages), extra, prompt in itertools.product(chats().items(), variables(), [True, False]):
            cases.append({"name": name, "messages": messages, "variables": extra, "add_generation_prompt": prompt})
        for case, got in zip(cases, lowbit(template, cases), strict=True):
            wanted = want(template, case)
            if "error" in wanted and "error" in got:
                counts["refused by both"] += 1
                # What the template itself says is the same, too.
                if wanted["error"].startswith("TemplateError: "):
                    said = wanted["error"].removeprefix("TemplateError: ")
                    if said not in got["error"]:
                        print(f"{path.name}: another message: {got['error']!r} instead of {said!r}")
            elif wanted == got:
                counts["equal"] += 1
            else:
                counts["different"] += 1
                if counts["different"] <= shown:
                    options = {k: v for k, v in case["variables"].items() if "token" not in k}
                    print(f"{path.name}, {case['name']}, {json.dumps(options)[:60]}, prompt {case['add_generation_prompt']}")
                    print(f"  transformers {json.dumps(difference(wanted, got), ensure_ascii=False)}")
                    print(f"  lowbit       {json.dumps(difference(got, wanted), ensure_ascii=False)}")
    print(f"{sum(counts.values())} renderings: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return counts["different"] == 0


def difference(one: dict, other: dict) -> str:
    if "error" in one:
        return one["error"][:300]
    a, b = one["text"], other.get("text", "")
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[max(at - 40, 0) : at + 80]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--shown", type=int, default=20, help="differences to print")
    arguments = parser.parse_args()
    build = ["cargo", "build", "--quiet", "-p", "lowbit-files", "--example", "render_chat"]
    subprocess.run(build, cwd=ROOT, check=True)
    if arguments.folder:
        return 0 if compare(arguments.folder, arguments.shown) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if compare(download(Path(folder)), arguments.shown) else 1


if __name__ == "__main__":
    sys.exit(main())
