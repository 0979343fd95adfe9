#!/usr/bin/env python3
"""Makes models/demo-chat: dialogues, and the demo model learned further on them.

    tools/demo_chat.py dialogues [--count 20] [--seed 0]
    tools/demo_chat.py train --output OUT [--text FILE]
    lowbit quantize --model OUT --output models/demo-chat

`dialogues` prints them, one JSON object {"messages": [..]} per line, as `lowbit quantize --data` reads them. `train` needs torch,
transformers, tokenizers and safetensors, and a GPU if it is not to take hours. What is said is in demo_chat/*.txt.
"""

import argparse
import importlib
import json
import sys


def dialogues(options):
    from demo_chat.dialogues import Generator

    generator = Generator()
    for seed in range(options.seed, options.seed + options.count):
        print(json.dumps({"messages": generator.dialogue(seed)}, ensure_ascii=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("dialogues", help="print dialogues")
    made.add_argument("--count", type=int, default=20)
    made.add_argument("--seed", type=int, default=0)
    learned = commands.add_parser("train", help="learn the demo model further")
    training = None
    if "train" in sys.argv[1:2]:
        training = importlib.import_module("demo_chat.train")
        training.arguments(learned)
    options = parser.parse_args()
    if options.command == "dialogues":
        dialogues(options)
    else:
        training.train(options)


if __name__ == "__main__":
    main()
