"""Writes tests/vectors: the peers' own values, made with the peers' own packages.

    python tools/peer_vectors.py formats --ggml build/bin/libggml-base.so
    python tools/peer_vectors.py models --llama-cpp llama.cpp --tools build/bin
    python tools/peer_vectors.py demo
    python tools/peer_vectors.py gradients
    python tools/peer_vectors.py makers --auto-gptq auto_gptq-0.7.1 --autoawq autoawq-0.2.9
    python tools/peer_vectors.py config_keys
    python tools/peer_vectors.py quantize --llama-cpp llama.cpp --tools build/bin

Each subject is a module of peer_vectors/ with `arguments(parser)` and `write(folder, options)`; its docstring says
what it needs. The vectors are committed: run this only to add to them or to follow a new version of a peer.
"""

import argparse
import importlib
from pathlib import Path

SUBJECTS = [
    "config_keys",
    "delta",
    "demo",
    "embed",
    "files",
    "formats",
    "gradients",
    "jinja",
    "makers",
    "models",
    "mtp",
    "ops",
    "quantize",
    "rerank",
]
VECTORS = Path(__file__).resolve().parent.parent / "tests" / "vectors"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    modules = {}
    for name in SUBJECTS:
        module = modules[name] = importlib.import_module(f"peer_vectors.{name}")
        subject = subjects.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.arguments(subject)
    options = parser.parse_args()
    modules[options.subject].write(VECTORS / options.subject, options)


if __name__ == "__main__":
    main()
