#!/usr/bin/env python3
"""Dynamo's frontend before two workers of the demo.

    tools/clients/dynamo.py LOWBIT_DYNAMO

Called by tools/check_dynamo. PyPI's ai-dynamo goes into target/dynamo, without its planner's package `aisimulate`, of which PyPI has a
placeholder alone. Frontend and workers find each other in a folder, with no etcd or NATS. Its router sends chats to the worker that has
their start by the workers' events: later turns must find the earlier ones, streams must add up to whole replies, and a schema must hold a reply. Then one worker is told to end, and the other one goes on. Exits with 1 when one fails.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "target/dynamo"
PACKAGES = "uvloop pydantic<=2.13.5 aiohttp msgspec prometheus-client<1 pyzmq tqdm typing-extensions zstandard transformers".split()
CHATS, TURNS = 6, 4
WORDS = "vector matrix number list index where each value first last sum order text line block table".split()
problems = []


def need(name, good, text):
    print(f"{name}: {text}{'' if good else '  WRONG'}", flush=True)
    if not good:
        problems.append(name)


def installed():
    python = FOLDER / "venv/bin/python"
    if not python.exists():
        venv.create(FOLDER / "venv", with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES], check=True)
    subprocess.run([*pip, "--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"], check=True)
    return python


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def post(address, body):
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def reply(address, messages, stream=False, **fields):
    """A reply's text, and the tokens of its prompt that were cached."""
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 16, "stream": stream, **fields}
    if not stream:
        whole = json.loads(post(address, body))
        details = whole["usage"].get("prompt_tokens_details") or {}
        return whole["choices"][0]["message"]["content"] or "", details.get("cached_tokens") or 0
    body["stream_options"] = {"include_usage": True}
    text, cached = "", 0
    for line in post(address, body).splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            cached = ((chunk.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
    return text, cached


def said(chat, turn):
    return " ".join(WORDS[(7 * chat + 3 * turn + index * (chat + 2)) % len(WORDS)] for index in range(90))


def chat(address, number):
    messages, texts, hits = [], [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": said(number, turn)})
        text, cached = reply(address, messages, stream=turn % 2 == 1)
        messages.append({"role": "assistant", "content": text or "Well."})
        texts.append(text)
        hits.append(cached)
    return texts, hits


def chats(address):
    with ThreadPoolExecutor(CHATS) as pool:
        return list(pool.map(lambda number: chat(address, number), range(CHATS)))


def check(address, workers):
    first = chats(address)
    hits = [hit for _, all_hits in first for hit in all_hits[1:]]
    need("affinity", min(hits) >= 64, f"{CHATS} chats of {TURNS} turns: later turns found {min(hits)} to {max(hits)} tokens")
    again = chats(address)
    different = sum(one != other for (texts, _), (others, _) in zip(first, again) for one, other in zip(texts, others))
    need("replies", different == 0, f"{different} of {CHATS * TURNS} replies differ the second time")
    messages = [{"role": "user", "content": said(1, 1)}]
    streamed, whole = reply(address, messages, stream=True)[0], reply(address, messages)[0]
    need("streams", streamed == whole, f"a stream adds up to {streamed!r}, whole it is {whole!r}")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    held = reply(address, messages, max_tokens=40, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})[0]
    try:
        good = json.loads(held)["a"] in ("x", "y")
    except (ValueError, KeyError):
        good = False
    need("form", good, f"held to a schema: {held!r}")
    try:
        post(address, {"model": "demo", "messages": messages, "n": 3})
        need("refusal", False, "n = 3 was answered")
    except urllib.error.HTTPError as error:
        need("refusal", True, f"n = 3 is answered with {error.code}")
    workers[0].terminate()
    workers[0].wait(60)
    failed = 0
    for number in range(6):
        try:
            reply(address, [{"role": "user", "content": said(number, 9)}])
        except urllib.error.HTTPError:
            failed += 1
    need("end", failed == 0, f"one worker ended with {workers[0].returncode}: {failed} of 6 requests failed")


def ready(address, begin):
    """Waits until the frontend knows both workers' model."""
    while time.monotonic() - begin < 120:
        try:
            with urllib.request.urlopen(f"{address}/v1/models", timeout=5) as answer:
                if json.load(answer)["data"]:
                    return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.3)
    sys.exit((FOLDER / "frontend.log").read_text()[-4000:])


def run(program):
    store = FOLDER / "store"
    shutil.rmtree(store, ignore_errors=True)
    os.environ |= {"DYN_FILE_KV": str(store), "DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    logs = [FOLDER / "one.log", FOLDER / "two.log", FOLDER / "frontend.log"]
    model = ["--model", ROOT / "models/demo-chat", "--served-model-name", "demo", "--cache-memory", "0.2"]
    line = [*map(str, [program, *model])]
    workers = [subprocess.Popen(line, stdout=open(log, "w"), stderr=subprocess.STDOUT) for log in logs[:2]]
    port = free_port()
    line = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"]
    frontend = subprocess.Popen(line, stdout=open(logs[2], "w"), stderr=subprocess.STDOUT)
    try:
        ready(f"http://127.0.0.1:{port}", time.monotonic())
        # The second worker registers a moment after the first.
        time.sleep(5)
        check(f"http://127.0.0.1:{port}", workers)
    finally:
        for one in [frontend, *workers]:
            one.terminate()
            one.wait(60)
    sys.exit(bool(problems))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    program = Path(sys.argv[1]).resolve()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if Path(sys.prefix) != (FOLDER / "venv"):
        sys.exit(subprocess.run([installed(), __file__, program]).returncode)
    run(program)


if __name__ == "__main__":
    main()
