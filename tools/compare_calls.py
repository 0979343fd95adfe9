#!/usr/bin/env python3
"""Compares what replies are taken apart into with what published chat templates made them of.

    tools/compare_calls.py [FOLDER]

FOLDER has *.jinja files, by default those of llama.cpp, as for tools/compare_templates.py. With transformers, each template
renders an answer with reasoning, content and two calls of tools, which is how its model writes one. `Syntax` and
`ReplyParser` must give the calls back, with their arguments, and the reasoning and the content where the template shows them.
Templates that show no calls are counted, those whose calls are not read here are listed below. Exits with 1 for any other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_templates import ROOT, call, download, want

PROPERTIES = {
    "s": {"type": "string", "description": "A text."},
    "n": {"type": "integer", "description": "A number."},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["s"]},
        },
    }
    for name in ["look_up", "look_down"]
]
CALLS = [("look_up", {"s": "a b", "n": 5}), ("look_down", {"s": "7"})]
USER = {"role": "user", "content": "hi"}
REASONING, CONTENT, RESULT = "Hm, é.", "Let me look.", "QQ42QQ"

# Calls of forms of their own, which no model that lowbit computes writes.
UNREAD = {
    "GigaChat3-10B-A1.8B",
    "Kimi-K3",
    "MiniMax-M3",
    "fireworks-ai-llama-3-firefunction-v2",
    "meetkai-functionary-medium-v3.2",
    "muse-glimmer",
    "upstage-Solar-Open-100B",
}


def answers():
    """The answer in the forms that templates take it in: arguments as objects or as text, one call or two, with less beside them."""
    for count in [2, 1]:
        for content, reasoning in [(CONTENT, REASONING), (CONTENT, None), ("", REASONING), (None, None)]:
            for as_text in [False, True]:
                calls = CALLS[:count]
                spelled = [call(json.dumps(a) if as_text else a, name) for name, a in calls]
                answer = {"role": "assistant", "content": content, "tool_calls": spelled}
                yield (answer | {"reasoning_content": reasoning} if reasoning else answer), calls


def case(template: str, answer: dict) -> dict | None:
    """The answer as the template renders it, without what ends it; None when the template refuses it or shows no call."""
    variables = {"tools": TOOLS, "bos_token": "", "eos_token": "<EOS>"}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": RESULT}

    def text(messages, prompt):
        return want(template, {"messages": messages, "add_generation_prompt": prompt, "variables": variables}).get("text")

    results = [result] * len(answer["tool_calls"])
    prompt, full = text([USER], True), text([USER, answer, *results], False)
    if prompt is None or full is None:
        return None
    at = next((i for i, (x, y) in enumerate(zip(prompt, full)) if x != y), min(len(prompt), len(full)))
    # Not inside of a marker that the prompt has otherwise.
    at = max(full.rfind(">", 0, at), full.rfind("]", 0, at), full.rfind("\n", 0, at)) + 1
    # gpt-oss ends a call by a token that is no part of the reply; what is behind it would be another message.
    reply = full[at:].split(RESULT)[0].split("<|call|>")[0]
    if not all(function["function"]["name"] in reply for function in answer["tool_calls"]):
        return None
    return {"template": template, "tools": TOOLS, "prompt": full[:at], "reply": reply}


def parsed(cases: list[dict]) -> list[dict]:
    command = [ROOT / "target/debug/examples/parse_reply"]
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def compare(folder: Path) -> bool:
    counts, failed = {"read": 0, "without calls": 0, "unread": 0}, []
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        found = ((case(template, answer), answer, calls) for answer, calls in answers())
        shown, answer, calls = next((one for one in found if one[0]), (None, None, None))
        if shown is None or path.stem in UNREAD:
            counts["without calls" if shown is None else "unread"] += 1
            continue
        got = parsed([shown])[0]
        problems = []
        if [(one["name"], json.loads(one["arguments"])) for one in got["calls"]] != calls:
            problems.append(f"calls {got['calls']}")
        for key, text in [("reasoning", answer.get("reasoning_content")), ("content", answer["content"])]:
            # Beside a call, gpt-oss's template gives content as reasoning.
            if text and text in shown["reply"] and text not in got[key] and text not in got["reasoning"]:
                problems.append(f"{key} {got[key]!r}")
        if problems:
            failed.append(path.stem)
            print(f"{path.stem}: {', '.join(problems)}, of {shown['reply']!r}")
        else:
            counts["read"] += 1
    print(f"{sum(counts.values()) + len(failed)} templates: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.parse_args()
    build = ["cargo", "build", "--quiet", "-p", "lowbit", "-p", "lowbit-cli", "--example", "parse_reply"]
    subprocess.run(build, cwd=ROOT, check=True)
    if arguments.folder:
        return 0 if compare(arguments.folder) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if compare(download(Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
