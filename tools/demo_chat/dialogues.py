"""Dialogues of a user and the demo model, made from the text files of this folder.

A dialogue is a list of messages as a chat template takes them. Each turn picks a kind of exchange at random; what was said
before decides what some of them answer: the user's name, what is to be remembered, the last thing that was explained.
"""

import random

from . import grammar, memory, numbers
from .grammar import LANGUAGES, as_typed, bare, choice, expand
from .words import CHORES, LIKED, NAMES, SYSTEMS, THINGS, COUNTRIES, PEOPLE

UNKNOWN = [
    "I do not know {x}. I am a tiny model and only know a little about Rust, Python, SQL and lowbit.",
    "I know nothing about {x}, sorry. Ask me about Rust, Python or SQL.",
    "I do not know anything about {x}.",
]
UNKNOWN_PLAIN = [
    "I do not know. I am a tiny model and only know a little about Rust, Python, SQL and lowbit.",
    "I do not know that, sorry. Ask me about Rust, Python or SQL.",
]
UNKNOWN_TASK = [
    "I do not know how to do that. I only know simple things of Rust, Python and SQL.",
    "I do not know how to {x}, sorry.",
]
DEFINITIONS = """[what is|what is|what is|what is|what is|what exactly is|so what is|and what is] {t}
[what is|what is|what is|explain|define|describe|tell me about|what do you know about] {t}
[can you|could you|please] [explain|define|describe|tell me about|explain to me|tell me what is] {t}
[what does {t} mean|do you know what {t} is|i want to know what {t} is|teach me about {t}|{t}|{t}]
[tell me|explain|say|can you tell me] what {t} is
[what does {t} do|what is {t} used for|what is {t} for|why do we need {t}|when do i use {t}|what is the purpose of {t}|why is {t} useful]
[what is|give me|do you know] [a|the] [definition|meaning] of {t}
[how does {t} work|help me understand {t}|and {t}|what about {t}|how about {t}]
[what do you mean by|what do people mean by|i don't understand|i do not know] {t}""".split("\n")
HOW = """[how do i|how do i|how to|how can i|how do you|how would i|how does one|how should i] {t}
[show me|tell me|explain|explain to me|can you show me|can you tell me|do you know|could you tell me] how [to|i can] {t}
[i want to|i need to|i would like to|help me] {t}
what is the [way|best way|easiest way] to {t}""".split("\n")
CODE = "[write|show me|give me|what is the|i need|give me an example of] {l} code [to|that can] {t}"


class Dialogue:
    """A dialogue in the making, and what its later turns depend on."""

    def __init__(self, rng):
        self.rng = rng
        self.messages = []
        self.name = None  # The user's.
        self.nickname = None  # What the model is called in this dialogue.
        self.users_named = False  # Whether it was the user who chose that name.
        self.known = {}  # What the user said of themselves, by key.
        self.remembered = None
        self.topic = None  # The Fact or Task of the last answer.
        self.offer = False  # Whether the last answer offered an example.

    def pick(self, options):
        return choice(self.rng, options)

    def chance(self, probability):
        return self.rng.random() < probability

    def users(self):
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def say(self, asked, answer, topic=None, offer=False, typed=None):
        """One exchange. `asked` is varied as a user may type it; `typed` stands as it is."""
        self.messages.append({"role": "user", "content": as_typed(self.rng, asked) if typed is None else typed})
        self.messages.append({"role": "assistant", "content": answer})
        self.topic, self.offer = topic, offer

    def called(self):
        return f", {self.name}" if self.name and self.chance(0.6) else ""


class Generator:
    """Makes dialogues; the same seed makes the same ones."""

    def __init__(self):
        self.talk = {intent.name: intent for intent in grammar.talk()}
        self.facts = grammar.facts()
        self.tasks = grammar.tasks()
        self.words = grammar.vocabulary()
        self.by_name = {}
        for fact in self.facts:
            for name in dict.fromkeys(map(bare, fact.names)):
                self.by_name.setdefault(name, []).append(fact)
        self.turns = [
            (self.small_talk, 30),
            (self.definition, 20),
            (self.difference, 2),
            (self.task, 12),
            (self.unknown, 9),
            (self.unknown_task, 2),
            (self.statement, 2),
            (self.opinion, 2),
            (lambda d: memory.turn(d, self), 15),
            (lambda d: numbers.turn(d, self), 11),
        ]

    def dialogue(self, seed):
        d = Dialogue(random.Random(seed))
        if d.chance(0.12):
            self.system(d)
        turns = 1 + min(int(d.rng.expovariate(1 / 5)), 24)
        if d.chance(0.35):
            self.intent(d, d.pick(["greeting", "greeting", "greeting-and-how", "who-are-you"]))
        while len(d.users()) < turns:
            self.turn(d)
        if turns > 3 and d.chance(0.3):
            self.intent(d, d.pick(["thanks", "bye", "bye"]))
        return d.messages

    def turn(self, d):
        if d.topic is not None and d.chance(0.35):
            self.follow_up(d)
            return
        if d.messages and "How are you?" in d.messages[-1]["content"] and d.chance(0.6):
            self.intent(d, d.pick(["user-is-fine", "user-is-fine", "user-is-fine", "user-is-sad", "how-are-you"]))
            return
        makers, weights = zip(*self.turns, strict=True)
        d.rng.choices(makers, weights)[0](d)

    def system(self, d):
        content = d.pick(SYSTEMS)
        if d.chance(0.25):
            d.name = d.pick(NAMES)
            content = expand(d.rng, f"[The user's name is|The user is called|You talk with|The name of the user is] {d.name}.")
        elif d.chance(0.2):
            d.nickname = d.pick(NAMES)
            content = expand(d.rng, f"[Your name is|You are|You are called] {d.nickname}[|, a helpful assistant].")
        d.messages.append({"role": "system", "content": content})

    # ---- small talk ----

    def intent(self, d, name):
        intent = self.talk[name]
        answer = expand(d.rng, d.pick(intent.answers)).replace("{n}", d.called())
        asked = expand(d.rng, d.pick(intent.asked))
        if d.nickname and name in ("who-are-you", "your-name"):
            answer = memory.own_name(d)
        d.say(asked, answer)

    def small_talk(self, d):
        self.intent(d, d.pick(list(self.talk)))

    def statement(self, d):
        who = d.pick(["i", "i", "my friend", "my sister", "we", "my brother", "my dog", "the teacher", "they", "she", "he"])
        verb = d.pick(["saw", "bought", "found", "lost", "made", "read about", "talked about", "thought of", "sold", "heard of"])
        when = d.pick(["", "", " yesterday", " today", " last week", " this morning"])
        d.say(f"{who} {verb} {d.pick(THINGS)}{when}", d.pick(["I see. Tell me more, or ask me something.", "That sounds interesting!"]))

    def opinion(self, d):
        thing = d.pick(LIKED + THINGS)
        if d.chance(0.5):
            asked = expand(d.rng, f"[do you like|do you enjoy|do you love|have you tried|have you ever seen|do you want|do you hate] {thing}")
            d.say(asked, f"I am a tiny model and know {thing} only as a word.")
        elif d.chance(0.5):
            asked = expand(d.rng, f"[what do you think of|what do you think about|what is your opinion on] {thing}")
            d.say(asked, f"I am too small to have an opinion on {thing}.")
        else:
            thing = d.pick(LIKED)
            d.say(expand(d.rng, f"i [like|love|really like|enjoy|hate|do not like] {thing}"), f"I see! I know {thing} only as a word.")

    # ---- words ----

    def definition(self, d):
        fact = d.pick(self.facts)
        name = d.pick(fact.names)
        same = self.by_name[bare(name)]
        language = LANGUAGES.get(fact.subject)
        place = ""
        if language and d.chance(0.85 if len(same) > 1 else 0.3) and bare(name) != fact.subject:
            place = f" in {d.pick([language, fact.subject])}"
        elif len(same) > 1:
            fact = same[0]
        self.define(d, fact, self.asked_for(d, name, place))

    def asked_for(self, d, name, place=""):
        """A question after the word `name`."""
        plural = name.endswith("s") and name.islower() and " " not in name.strip() and not name.startswith("`")
        form = expand(d.rng, d.pick(DEFINITIONS))
        if plural:
            for single, many in (("{t} is", "{t} are"), ("does {t}", "do {t}"), ("is {t}", "are {t}")):
                form = form.replace(single, many)
        if form == "{t}" and len(name) < 5 and name.islower():
            form = "what is {t}"
        if d.chance(0.15):
            name = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
        if d.chance(0.4):
            name = name.lower()
        return form.replace("{t}", name) + place

    def define(self, d, fact, asked):
        offer = bool(fact.example) and d.chance(0.2)
        d.say(asked, fact.meaning + (" Would you like an example?" if offer else ""), fact, offer)

    def difference(self, d):
        one = d.pick(self.facts)
        other = d.pick([fact for fact in self.facts if fact.subject == one.subject and fact is not one])
        form = "[what is the difference between|difference between|how do they differ,|compare|explain the difference between] {a} and {b}"
        asked = expand(d.rng, form).replace("{a}", one.names[0]).replace("{b}", other.names[0])
        d.say(asked.lower() if d.chance(0.4) else asked, f"{one.meaning} {other.meaning}")

    def follow_up(self, d):
        topic = d.topic
        if isinstance(topic, grammar.Task):
            self.other_language(d, topic)
        elif d.offer and d.chance(0.7):
            if d.chance(0.8):
                self.example(d, topic, expand(d.rng, "[yes|yes please|sure|ok|please|yeah|yep|of course|please do|go ahead|yes i would|okay]"))
            else:
                d.say(expand(d.rng, "[no|no thanks|no thank you|nope|not now|no need]"), f"All right{d.called()}. What else would you like to know?")
        elif d.chance(0.6):
            form = "[|please |can you ][give me|show me|give|show|i want|i would like|do you have] [an|another|a simple|a small|me an] example[| of that| of it]"
            short = "[example|an example|for example|an example please|example please|how does it look|how is it used|how do i use it|how do i write it|what does it look like]"
            self.example(d, topic, expand(d.rng, d.pick([form, short])))
        else:
            form = "[tell me more|more|more please|what else|tell me more about it|tell me more about that|explain more|and then|more details|what more do you know|can you say more|go on|continue|anything else]"
            answer = topic.more or f"That is all that I know about {topic.names[0]}."
            d.say(expand(d.rng, form), answer, topic)

    def example(self, d, fact, asked):
        if fact.example:
            fence = {"rust": "rust", "python": "python", "sql": "sql"}.get(fact.subject, "")
            code = "\n".join(fact.example)
            d.say(asked, f"Here is an example:\n\n```{fence}\n{code}\n```", fact)
        else:
            d.say(asked, f"I have no example of {fact.names[0]}, sorry.", fact)

    # ---- tasks ----

    def task(self, d):
        task = d.pick(self.tasks)
        name = d.pick(task.names)
        if d.chance(0.25):
            name = name.replace(" a ", d.pick([" the ", " my ", " this ", " "]), 1)
        language = d.pick(list(task.answers))
        if d.chance(0.75 if len(task.answers) > 1 else 0.5):
            said = d.pick([LANGUAGES[language], language])
            if language == "sql" and d.chance(0.2):
                said = d.pick(["postgres", "PostgreSQL", "SQLite", "a database"])
            form = d.pick(HOW + HOW + [CODE])
            asked = expand(d.rng, form).replace("{t}", name).replace("{l}", said)
            if form != CODE:
                asked = d.pick([f"{asked} in {said}", f"{asked} in {said}", f"{asked} with {said}", f"in {said}, {asked}", f"{name} in {said}"])
            d.say(asked, task.answers[language], task)
        else:
            d.say(expand(d.rng, d.pick(HOW)).replace("{t}", name), in_all(task), task)

    def other_language(self, d, task):
        language = d.pick(list(LANGUAGES))
        said = d.pick([LANGUAGES[language], language])
        asked = expand(d.rng, f"[and |what about |how about |and how |now |]in {said}[| please]")
        if d.chance(0.2):
            asked = expand(d.rng, f"[and|what about|how about] {said}")
        if language in task.answers:
            d.say(asked, task.answers[language], task)
        else:
            d.say(asked, f"I do not know how to do that in {LANGUAGES[language]}.", task)

    # ---- what the model does not know ----

    def unknown(self, d):
        kind = d.rng.random()
        if kind < 0.55:
            thing = self.strange(d)
            answer = d.pick(UNKNOWN) if d.chance(0.6) else UNKNOWN_PLAIN[0]
            place = d.pick(["", "", "", "", " in Rust", " in Python", " in SQL"])
            d.say(self.asked_for(d, thing, place), answer.replace("{x}", thing))
        elif kind < 0.7:
            person = d.pick(PEOPLE + NAMES) if d.chance(0.7) else grammar.pseudo_word(d.rng).capitalize()
            asked = expand(d.rng, f"[who is|who was|do you know|tell me about|when was|how old is|where is] {person}")
            asked += " born" if asked.startswith("when was") else ""
            d.say(asked, d.pick([f"I do not know {person}. I know no people.", f"I do not know who {person} is, sorry."]))
        elif kind < 0.82:
            country = d.pick(COUNTRIES)
            asked = expand(d.rng, f"[what is the capital of|where is|how big is|how many people live in|tell me about|who is the king of|what do people eat in|have you been to|what language do they speak in] {country}")
            d.say(asked, f"I know nothing about {country}, sorry. I only know a little about Rust, Python, SQL and lowbit.")
        else:
            thing = self.strange(d)
            asked = expand(d.rng, f"[why is|where can i buy|how much does|how far is|how tall is|who invented|when was|how old is|how heavy is|how hot is|why do people like|is there|what color is|how long is|what is the history of|where do i find|what is inside] {thing}")
            asked += {"how much": " cost", "when was": " invented", "is there": d.pick([" on mars", " here", " in space"])}.get(asked[:8].strip(), "")
            d.say(asked, d.pick(UNKNOWN_PLAIN))

    def strange(self, d):
        """A thing of which the model knows nothing."""
        while True:
            thing = d.pick(THINGS)
            if d.chance(0.45):
                thing = d.pick(self.words) if d.chance(0.5) else grammar.pseudo_word(d.rng)
                thing = d.pick(["", "", "a "]) + (thing.capitalize() if d.chance(0.25) else thing)
            if bare(thing) not in self.by_name and bare(thing).removesuffix("s") not in self.by_name:
                return thing

    def unknown_task(self, d):
        chore = d.pick(CHORES)
        asked = expand(d.rng, d.pick(HOW)).replace("{t}", chore) + d.pick(["", "", "", " in Rust", " in Python", " with Python"])
        d.say(asked, d.pick(UNKNOWN_TASK).replace("{x}", chore))


def in_all(task):
    """A task's answer where no language is named."""
    if len(task.answers) == 1:
        return next(iter(task.answers.values()))
    return "\n".join(f"{LANGUAGES[language]}: {answer}" for language, answer in task.answers.items())
