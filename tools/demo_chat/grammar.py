"""Reads the text files of this folder, and says one thing in many ways."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TOKENIZER = FOLDER.parent.parent / "models" / "demo" / "tokenizer.json"
LANGUAGES = {"rust": "Rust", "python": "Python", "sql": "SQL"}
PROPER = LANGUAGES | {"i": "I", "i'm": "I'm", "i've": "I've", "english": "English", "sqlite": "SQLite", "gguf": "GGUF"}
QUESTION = re.compile(
    r"(and |so )?(what|who|where|when|why|how|which|whose|do|does|did|can|could|is|are|am|will|would|should|may|have)\b"
)


def choice(rng, options):
    return options[int(rng.random() * len(options))]


def expand(rng, text):
    """Replaces each [a|b|] of `text`, innermost first, by one of its alternatives."""
    while "[" in text:
        end = text.index("]")
        start = text.rindex("[", 0, end)
        text = text[:start] + choice(rng, text[start + 1 : end].split("|")) + text[end + 1 :]
    return re.sub(" +", " ", text).strip()


def lines_of(name):
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("# "):
            yield line


@dataclass
class Intent:
    name: str
    asked: list = field(default_factory=list)
    answers: list = field(default_factory=list)


def talk():
    """The intents of talk.txt."""
    intents = []
    for line in lines_of("talk.txt"):
        mark, rest = line[0], line[2:]
        if mark == "=":
            intents.append(Intent(rest))
        else:
            {"?": intents[-1].asked, "!": intents[-1].answers}[mark].append(rest)
    return intents


@dataclass
class Fact:
    """A word and what it means; `names` begin with the one that answers use."""

    subject: str
    names: list
    meaning: str = ""
    more: str = ""
    example: list = field(default_factory=list)


def facts():
    """The words of facts.txt."""
    found, subject = [], None
    for line in lines_of("facts.txt"):
        mark, rest = line[0], line[2:]
        if mark == "@":
            subject = rest
        elif mark == "=":
            found.append(Fact(subject, [name.strip() for name in rest.split("|")]))
        elif mark == "+":
            found[-1].more = rest
        elif mark == "~":
            found[-1].example.append(rest)
        else:
            assert not found[-1].meaning, line
            found[-1].meaning = line
    return found


@dataclass
class Task:
    """Something to do, how it may be called, and its answer by language."""

    names: list
    answers: dict = field(default_factory=dict)


def tasks():
    """The tasks of tasks.txt."""
    found = []
    for line in lines_of("tasks.txt"):
        if line.startswith("> "):
            found.append(Task([name.strip() for name in line[2:].split("|")]))
        else:
            language, answer = line.split(": ", 1)
            found[-1].answers[language] = answer
    return found


def bare(name):
    """A word's name without its article, in lower case."""
    return re.sub("^(an?|the) ", "", name).lower()


def vocabulary():
    """Words of the tokenizer's vocabulary: `words` of lower-case letters."""
    vocab = json.loads(TOKENIZER.read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(token[1:] for token in vocab if re.fullmatch("Ġ[a-z]{3,9}", token))


def pseudo_word(rng):
    """A word that does not exist."""
    syllables = [choice(rng, "bcdfgjklmnprstvwz") + choice(rng, "aeiou") for _ in range(2 + int(rng.random() * 2))]
    return "".join(syllables) + choice(rng, ["", "", "n", "r", "l", "s", "x", "th"])


def typo(rng, text):
    """Swaps, drops or doubles one letter."""
    places = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if len(places) < 4:
        return text
    i = choice(rng, places)
    middle = choice(rng, [text[i + 1] + text[i], text[i], text[i] * 2 + text[i + 1], ""])
    return text[:i] + middle + text[i + 2 :]


def as_typed(rng, text, keep=False):
    """What a user may type for `text`: with or without capitals, punctuation, politeness and typing errors. With `keep`
    only its case and end vary, and of these nothing that an answer copies."""
    asks = bool(QUESTION.match(text.lower()))
    if not keep:
        if asks and rng.random() < 0.08:
            text = choice(rng, ["hey, ", "so ", "and ", "ok, ", "well, ", "hm, ", "tell me, ", "hi, ", "hello, ", "hi! ", "um, "]) + text
        if rng.random() < 0.05:
            text += choice(rng, [" please", ", please", " now", " then"])
        if rng.random() < 0.06:
            text = typo(rng, text)
        if rng.random() < 0.25:
            text = text.replace("'s", "s").replace("n't", "nt").replace("'m", "m").replace("'re", "re")
        elif rng.random() < 0.3:
            text = text.replace("what is", "what's")
    if text and rng.random() < 0.5:
        if not keep or rng.random() < 0.7:
            text = " ".join(PROPER.get(word, word) for word in text.split(" "))
        text = text[0].upper() + text[1:]
    end = choice(rng, ["?", "?", "?", "", ""]) if asks else choice(rng, ["", "", "", ".", "!"])
    return text + ("" if text and not text[-1].isalnum() else end)
