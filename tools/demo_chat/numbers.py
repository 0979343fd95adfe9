"""Exchanges with counting, small sums, lists and repeated words."""

from . import grammar
from .grammar import as_typed, choice, expand
from .words import DAYS, LEGS, MONTHS, NAMES, OPPOSITES, SOUNDS

SUMS = {"+": ["plus", "+", "and"], "-": ["minus", "-"], "*": ["times", "*", "x", "multiplied by"]}


def turn(d, generator):
    """One exchange of this kind."""
    makers = [count, count, count, sums, sums, sums, repeat, repeat, repeat, compare, neighbour, animals, opposite, hello_to]
    d.pick(makers)(d, generator)


def listed(numbers):
    return ", ".join(str(n) for n in numbers)


def count(d, _):
    kind = d.rng.random()
    end = 2 + int(d.rng.random() * 19) if d.chance(0.7) else d.pick([5, 10, 10, 20])
    number = d.pick([str(end), WORDS[end]]) if end <= 12 else str(end)
    if kind < 0.5:
        form, answer = f"[count|count up|please count|can you count|count for me|could you count] [to|to|up to|from 1 to|from one to] {number}", listed(range(1, end + 1))
    elif kind < 0.65:
        form, answer = f"[count down|count backwards|can you count down|count down] from {number}[| to 1| to one]", listed(range(end, 0, -1))
    elif kind < 0.8:
        start = 1 + int(d.rng.random() * 40)
        form, answer = f"[count|can you count|please count] from {start} to {start + end}", listed(range(start, start + end + 1))
    elif kind < 0.9:
        odd = d.chance(0.5)
        form = f"[list|count|name|give me] the {'odd' if odd else 'even'} numbers [to|up to|until] {end + 2}"
        answer = listed(range(1 if odd else 2, end + 3, 2))
    else:
        big = d.pick([50, 100, 1000, 10000, 1000000, "a million", "a thousand", "a hundred", "infinity"])
        form, answer = f"[count|can you count] [to|up to] {big}", f"That is far! I begin: {listed(range(1, 11))}, and so on"
    d.say(expand(d.rng, form), answer + ".")


WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def sums(d, _):
    sign = d.pick(list(SUMS))
    limit = 11 if sign == "*" else 21
    a, b = int(d.rng.random() * limit), int(d.rng.random() * limit)
    if d.chance(0.12):
        a, b = int(10 ** (1.7 + 3 * d.rng.random())), int(10 ** (1.7 + 3 * d.rng.random()))
        answer = "That is too hard for me. I can only do sums of small numbers."
    else:
        answer = f"{a} {sign} {b} = {({'+': a + b, '-': a - b, '*': a * b})[sign]}"
    spoken = d.pick(SUMS[sign])
    left, right = (WORDS[a], WORDS[b]) if a < 13 and b < 13 and d.chance(0.2) else (a, b)
    gap = "" if spoken in "+-*" and d.chance(0.4) else " "
    form = f"[what is|how much is|calculate|compute|what's|can you compute|solve|] {left}{gap}{spoken}{gap}{right}"
    d.say(None, answer, typed=as_typed(d.rng, expand(d.rng, form), keep=True) + d.pick(["", "", " =" if gap else "="][: 3 if d.chance(0.2) else 2]))


def phrase(d, generator):
    words = [choice(d.rng, generator.words) for _ in range(1 + int(d.rng.random() * 7))]
    for i in range(len(words)):
        if d.chance(0.35):
            words[i] = d.pick(["the", "a", "is", "I", "you", "and", "of", "to", "in", "my", "not", "we", "like", "this", "it", "good", "cat", "dog"])
        elif d.chance(0.15):
            words[i] = grammar.pseudo_word(d.rng)
        elif d.chance(0.05):
            words[i] = str(int(10 ** (d.rng.random() * 3)))
    text = " ".join(words)
    if d.chance(0.5):
        text = text[0].upper() + text[1:]
    return text + d.pick(["", "", "", "!", ".", "?"])


def repeat(d, generator):
    text = phrase(d, generator) if d.chance(0.9) else d.pick(["hello", "Hello!", "hello world", "Hello, world!", "hi", "yes", "I am a robot", "lowbit is great"])
    form = d.pick(["repeat after me: ", "repeat: ", "repeat ", "say ", "say: ", "please say ", "can you say ", "echo ", "write ", "repeat the following: ",
                   "repeat after me ", "please repeat: ", "print ", "type ", "say the words ", "repeat this: ", "could you say "])
    form = form.capitalize() if d.chance(0.5) else form
    answer = text
    if d.chance(0.25):
        typed = f'{form}"{text}"'
    elif d.chance(0.15) and len(text) < 12:
        times = 2 + int(d.rng.random() * 4)
        typed, answer = f"{form}{text} {d.pick([WORDS[times], str(times)])} times", " ".join([text] * times)
    else:
        typed = form + text
    d.say(None, answer, typed=typed)


def hello_to(d, _):
    name = d.pick(NAMES) if d.chance(0.6) else grammar.pseudo_word(d.rng).capitalize()
    word, answer = d.pick([("hello", "Hello"), ("hi", "Hi"), ("goodbye", "Goodbye"), ("thank you", "Thank you")])
    d.say(None, f"{answer}, {name}!", typed=expand(d.rng, f"[say|Say|please say|can you say] {word} to {name}"))


def compare(d, _):
    a, b = int(10 ** (d.rng.random() * 2.5)), int(10 ** (d.rng.random() * 2.5))
    kind = d.rng.random()
    if kind < 0.5:
        larger = d.chance(0.5)
        if a == b:
            b += 1
        word = d.pick(["larger", "bigger", "greater", "more"] if larger else ["smaller", "less"])
        answer = max(a, b) if larger else min(a, b)
        d.say(expand(d.rng, f"[which is|what is|which number is|which one is] {word}[|,] {a} or {b}"), f"{answer} is {'larger' if larger else 'smaller'}.")
    else:
        parity = "even" if a % 2 == 0 else "odd"
        d.say(expand(d.rng, f"is {a} [even|odd|even or odd|an even number|an odd number]"), f"{a} is {parity}.")


def neighbour(d, _):
    kind = d.rng.random()
    after = d.chance(0.6)
    if kind < 0.4:
        n = 1 + int(d.rng.random() * 98)
        before, this, then = n - 1, n, n + 1
    else:
        cycle = DAYS if kind < 0.75 else MONTHS
        i = int(d.rng.random() * len(cycle))
        before, this, then = cycle[i - 1], cycle[i], cycle[(i + 1) % len(cycle)]
    said = d.pick([str(this), str(this).lower()])
    form = f"[what comes|what number comes|what is] {'after' if after else 'before'} {said}" if kind < 0.4 else f"[what comes|what is|which comes|what day or month is] {'after' if after else 'before'} {said}"
    d.say(expand(d.rng, form), f"{then} comes after {this}." if after else f"{before} comes before {this}.")


def animals(d, _):
    if d.chance(0.5):
        animal = d.pick(list(SOUNDS))
        d.say(expand(d.rng, f"[what sound does a {animal} make|what does a {animal} say|how does a {animal} sound|what noise does a {animal} make]"), f"A {animal} says {SOUNDS[animal]}.")
    else:
        animal = d.pick(list(LEGS))
        article = "An" if animal[0] in "aeiou" else "A"
        form = f"[how many legs does {article.lower()} {animal} have|how many legs has {article.lower()} {animal}|how many legs do {animal}s have]"
        d.say(expand(d.rng, form), f"{article} {animal} has {LEGS[animal] or 'no'} legs.")


def opposite(d, _):
    pair = d.pick(OPPOSITES).split()
    if d.chance(0.5):
        pair.reverse()
    form = f"[what is the opposite of|the opposite of|what's the opposite of|tell me the opposite of|opposite of] {pair[0]}"
    d.say(expand(d.rng, form), f"The opposite of {pair[0]} is {pair[1]}.")
