#!/usr/bin/env python3
"""Renders a few conversations with each of llama.cpp's built-in chat templates, as JSON: what `--chat-template NAME` is tested with.

    tools/builtin_templates.py LLAMA_CPP VERSION > tests/vectors/cases/chat-templates/llama_cpp.json

LLAMA_CPP is a source tree, of which src/llama-chat.cpp is compiled alone; VERSION is written into the file.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONVERSATIONS = [
    [["user", "hi"]],
    [["system", "Be brief."], ["user", "hi"], ["assistant", "Hello."], ["user", "bye"]],
    [["user", " one \n"], ["assistant", " two "], ["user", "it's \"three\""], ["assistant", "four"], ["user", "five"]],
]

PROGRAM = r"""
#include "llama-chat.h"
#include "llama.h"
#include <cstdio>
#include <string>
#include <vector>

int main(int argc, char ** argv) {
    const char * names[256];
    int count = llama_chat_builtin_templates(names, 256);
    std::vector<llama_chat_message> all;
    for (int i = 1; i + 1 < argc; i += 2) all.push_back({argv[i], argv[i + 1]});
    std::vector<const llama_chat_message *> chat;
    for (auto & message : all) chat.push_back(&message);
    for (int i = 0; i < count; i++) {
        std::string text;
        if (llm_chat_apply_template(llm_chat_template_from_str(names[i]), chat, text, true) < 0) continue;
        printf("%s%c%s%c", names[i], 0, text.c_str(), 0);
    }
}
"""


def main():
    tree, version = Path(sys.argv[1]), sys.argv[2]
    rendered = {}
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "main.cpp"), Path(folder, "main")
        source.write_text(PROGRAM)
        include = [f"-I{tree / name}" for name in ("include", "ggml/include", "src")]
        subprocess.run(["c++", "-std=c++17", *include, source, tree / "src/llama-chat.cpp", "-o", program], check=True)
        for conversation in CONVERSATIONS:
            words = [word for message in conversation for word in message]
            parts = subprocess.run([program, *words], check=True, capture_output=True).stdout.decode().split("\0")
            for name, text in zip(parts[::2], parts[1::2]):
                rendered.setdefault(name, []).append(text)
    print(json.dumps({"made_by": version, "conversations": CONVERSATIONS, "rendered": rendered}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
