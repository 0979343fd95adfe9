"""A server for a check."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def started(lowbit, log, *flags):
    """`lowbit serve` with these flags, and its address once it is ready.

    What it says goes to the file `log`: nobody reads a pipe while clients ask.
    """
    with open(log, "w") as file:
        line = map(str, [lowbit, "serve", "--port", "0", *flags])
        server = subprocess.Popen([*line], cwd=ROOT, stderr=file)
    while server.poll() is None:
        for text in Path(log).read_text().splitlines():
            if text.startswith("page"):
                return server, text.split()[1].rstrip("/")
        time.sleep(0.02)
    sys.exit(f"the server did not start: {Path(log).read_text()}")


def stopped(server, log):
    """Ends a server, which must say so. Returns what it said."""
    server.terminate()
    server.wait(60)
    said = Path(log).read_text()
    if server.returncode != 0 or not said.endswith("stopped\n"):
        sys.exit(f"the server ended with {server.returncode}: {said[-2000:]}")
    return said
