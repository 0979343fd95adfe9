#!/usr/bin/env python3
"""Dynamo's frontend before two workers of the demo.

    tools/clients/dynamo.py LOWBIT_DYNAMO

Called by tools/check_dynamo. PyPI's ai-dynamo goes into target/dynamo, without its planner's package `aisimulate`, of which PyPI has a
placeholder alone. Frontend and workers find each other in a folder, with no etcd or NATS. Its router sends chats to the worker that has
their start by the workers' events: later turns must find the earlier ones, streams must add up to whole replies, and a schema must hold
a reply. What is not done must be refused by name; a client that goes away must end its reply. Then one worker is told to end: what it
was writing must come whole, and the other one goes on. Exits with 1 when one fails.
"""

import http.client
import json
import os
import random
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
VERSION = "1.6.1"
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
    subprocess.run([*pip, "--no-deps", f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}"], check=True)
    return python


def free_port():
    """A port that nobody has, and that Dynamo takes for a worker's figures: it reads 16 bits with a sign."""
    while True:
        port = random.randrange(20_000, 1 << 15)
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Worker:
    """A worker of the demo, whose system port has figures."""

    def __init__(self, program, name):
        self.log = FOLDER / f"{name}.log"
        self.port = free_port()
        model = ["--model", ROOT / "models/demo-chat", "--served-model-name", "demo", "--cache-memory", "0.2", "--drain-seconds", "60"]
        # A program that is not optimised is waited for 5 s by default; and here the frontend need not learn of the end first.
        environment = {"DYN_SYSTEM_PORT": str(self.port), "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "90",
                       "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1"}
        self.process = subprocess.Popen([*map(str, [program, *model])], stdout=open(self.log, "w"), stderr=subprocess.STDOUT,
                                        env=os.environ | environment)

    def figure(self, name):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def end(self):
        self.process.terminate()
        return self.process.wait(120)


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
    # One after the other: beside others a chat may well move to the worker that has less to do.
    hits = [chat(address, CHATS + number)[1][1:] for number in range(CHATS)]
    need("affinity", min(map(min, hits)) >= 64, f"later turns of {CHATS} chats of {TURNS} turns found {hits} tokens")
    first = chats(address)
    blocks = [worker.figure("dynamo_component_total_blocks") for worker in workers]
    need("figures", min(blocks) > 0, f"workers have {blocks[0]:.0f} and {blocks[1]:.0f} blocks")
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
    refusals(address, messages)
    leaves(address, messages, workers)
    ends(address, workers)


def refusals(address, messages):
    for fields, said in [({"n": 3}, "n: is not done here"), ({"min_tokens": 5}, "min_tokens: is not done here"),
                         ({"cache_salt": "mine"}, "cache_salt: is not done here"), ({"guided_regex": "("}, "guided_decoding: ")]:
        try:
            post(address, {"model": "demo", "messages": messages, **fields})
            need("refusal", False, f"{fields} was answered")
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            need("refusal", error.code == 400 and said in text, f"{fields} is answered with {error.code}, {text}")


def leaves(address, messages, workers):
    """A client that goes away in the middle of a long reply."""
    client = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    body = {"model": "demo", "messages": messages, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    client.getresponse().read(400)
    running = [worker.figure("dynamo_component_inflight_requests") for worker in workers]
    client.sock.close()
    client.close()
    start = time.monotonic()
    while any(worker.figure("dynamo_component_inflight_requests") for worker in workers) and time.monotonic() - start < 30:
        time.sleep(0.1)
    seconds = time.monotonic() - start
    need("abort", sum(running) == 1 and seconds < 30, f"{sum(running):.0f} reply ran, and none {seconds:.1f} s after its client had gone")


def ends(address, workers):
    """A worker that is told to end while both write."""
    tokens, started = 150, []

    def long(number):
        body = {"model": "demo", "messages": [{"role": "user", "content": said(number, 7)}], "max_tokens": tokens, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}
        line = json.dumps(body).encode()
        request = urllib.request.Request(f"{address}/v1/chat/completions", line, {"content-type": "application/json"})
        used = None
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                started.append(number)
                if line.startswith(b"data: {"):
                    used = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", used)
        return used

    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(long, number) for number in range(8)]
        while len({*started}) < 8:
            time.sleep(0.01)
        running = [worker.figure("dynamo_component_inflight_requests") for worker in workers]
        code = workers[0].end()
        written = [one.result() for one in replies]
    need("drain", code == 0 and all(running) and written == [tokens] * 8,
         f"a worker with {running[0]:.0f} replies ended with {code}; the 8 of both had {min(written)} to {max(written)} tokens of {tokens}")
    failed = 0
    for number in range(6):
        try:
            reply(address, [{"role": "user", "content": said(number, 9)}])
        except urllib.error.HTTPError:
            failed += 1
    need("end", failed == 0, f"with one worker left, {failed} of 6 requests failed")


def ready(address, workers):
    """Waits until the frontend knows the workers' model."""
    start = time.monotonic()
    while time.monotonic() - start < 120:
        for worker in workers:
            if worker.process.poll() is not None:
                sys.exit(worker.log.read_text()[-4000:])
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
    workers = [Worker(program, "one"), Worker(program, "two")]
    port = free_port()
    line = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv"]
    frontend = subprocess.Popen(line, stdout=open(FOLDER / "frontend.log", "w"), stderr=subprocess.STDOUT)
    try:
        ready(f"http://127.0.0.1:{port}", workers)
        # The second worker registers a moment after the first.
        time.sleep(5)
        check(f"http://127.0.0.1:{port}", workers)
    finally:
        for one in [frontend, *(worker.process for worker in workers)]:
            one.terminate()
            one.wait(120)
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
