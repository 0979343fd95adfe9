"""Exchanges in which the model uses what was said before."""

from . import grammar
from .grammar import as_typed, choice, expand
from .words import NAMES, VALUES

NAMED = """my name is {x}|my name is {x}|my name's {x}|i am {x}|i'm {x}|call me {x}|you can call me {x}|i am called {x}|people call me {x}
hi, i'm {x}|hello, i am {x}|hi, my name is {x}|hello! my name is {x}|hey, this is {x}|please call me {x}|this is {x}|it's {x}|{x} is my name
hi i am {x}|hello my name is {x}|my name is {x}, what is yours|i am {x}, and you|the name is {x}|name's {x}""".replace("\n", "|").split("|")
WHO = """what is my name|what is my name|what's my name|do you know my name|do you remember my name|who am i|tell me my name|say my name
what am i called|can you tell me my name|how am i called|what was my name|what was my name again|remember my name|my name|do you know who i am
can you say my name|did i tell you my name|what is my name again|and what is my name|please say my name""".replace("\n", "|").split("|")
UNNAMED = ["You have not told me your name yet. What is it?", "I do not know your name. What is it?"]
TELL = {
    "age": ["i am {x} years old", "i'm {x}", "my age is {x}", "i am {x}"],
    "job": ["i work as a {x}", "my job is {x}", "i am a {x} by profession"],
    "city": ["i live in {x}", "my city is {x}", "i am from {x}", "i come from {x}"],
    "dog's name": ["my dog is called {x}", "i have a dog called {x}", "i have a dog named {x}", "my dog's name is {x}"],
    "cat's name": ["my cat is called {x}", "i have a cat called {x}", "i have a cat named {x}", "my cat's name is {x}"],
    "hobby": ["my hobby is {x}"],
}
ASK = {
    "age": ["how old am i", "what is my age"],
    "job": ["what is my job", "what do i work as", "what is my profession"],
    "city": ["where do i live", "in which city do i live", "what is my city", "where am i from"],
    "dog's name": ["what is my dog called", "what is my dog's name", "how is my dog called", "what is the name of my dog"],
    "cat's name": ["what is my cat called", "what is my cat's name", "how is my cat called", "what is the name of my cat"],
}


def turn(d, generator):
    """One exchange of this kind."""
    kind = d.rng.random()
    if d.name is None and kind < 0.3:
        tell_name(d)
    elif kind < 0.35:
        ask_name(d)
    elif kind < 0.38:
        name_model(d)
    elif kind < 0.52:
        tell_value(d)
    elif kind < 0.7:
        ask_value(d)
    elif kind < 0.77:
        keep(d, generator)
    elif kind < 0.85:
        kept(d)
    else:
        what_was_said(d)


def someone(d):
    name = d.pick(NAMES) if d.chance(0.6) else grammar.pseudo_word(d.rng).capitalize()
    return name.lower() if d.chance(0.15) else name


def tell_name(d):
    d.name = someone(d)
    form = d.pick(NAMED)
    answers = ["Nice to meet you, {x}!", "Hello, {x}! Nice to meet you.", "Hi, {x}! How can I help you?"]
    if form.endswith("yours"):
        answers = ["Nice to meet you, {x}! My name is demo-chat."]
    typed = as_typed(d.rng, form.replace("{x}", "\0"), keep=True).replace("\0", d.name)
    d.say(None, d.pick(answers).replace("{x}", d.name), typed=typed)


def ask_name(d):
    d.say(d.pick(WHO), f"Your name is {d.name}." if d.name else d.pick(UNNAMED))
    if d.name is None and d.chance(0.4):
        d.name = someone(d)
        typed = d.pick([d.name, f"it is {d.name}", f"It's {d.name}", f"my name is {d.name}", f"{d.name}.", f"I am {d.name}"])
        d.say(None, f"Nice to meet you, {d.name}!", typed=typed)


def own_name(d):
    return f"My name is demo-chat, but you call me {d.nickname}." if d.users_named else f"I am {d.nickname}."


def name_model(d):
    d.nickname = someone(d)
    form = expand(d.rng, "[i will call you|i call you|can i call you|your name is now|from now on your name is|i name you|may i call you] {x}")
    typed = as_typed(d.rng, form.replace("{x}", "\0"), keep=True).replace("\0", d.nickname)
    d.users_named = True
    d.say(None, f"All right, you can call me {d.nickname}.", typed=typed)


def plain(d, key):
    return key.replace("favourite", "favorite") if d.chance(0.4) else key


def tell_value(d):
    key = d.pick(list(VALUES))
    value = d.known[key] = d.pick(VALUES[key])
    form = d.pick(TELL.get(key, []) + ["my {k} is {x}"]).replace("{k}", plain(d, key))
    typed = as_typed(d.rng, form.replace("{x}", "\0"), keep=True).replace("\0", value)
    d.say(None, d.pick([f"I will remember that your {key} is {value}.", f"Good to know! Your {key} is {value}."]), typed=typed)


def ask_value(d):
    key = d.pick(list(d.known)) if d.known and d.chance(0.75) else d.pick(list(VALUES))
    form = d.pick(ASK.get(key, ["what is my {k}", "what is my {k}", "do you know my {k}", "do you remember my {k}", "tell me my {k}"]))
    answer = f"Your {key} is {d.known[key]}." if key in d.known else f"You have not told me your {key}."
    d.say(form.replace("{k}", plain(d, key)), answer)


def keep(d, generator):
    what = d.pick(["the number {n}", "the number {n}", "the word {w}", "{n}", "{w}", "the code {n}", "this: {w} {w}", "the password {w}{n}"])
    what = what.replace("{n}", str(int(10 ** (d.rng.random() * 4))))
    while "{w}" in what:
        what = what.replace("{w}", choice(d.rng, generator.words), 1)
    typed = expand(d.rng, "[remember|please remember|can you remember|keep in mind|don't forget|Remember|Please remember] ") + " " + what
    d.remembered = what.removeprefix("this: ")
    d.say(None, f"All right, I will remember {d.remembered}.", typed=typed)


def kept(d):
    form = "[what did i ask you to remember|what should you remember|what was the number|what was the word|what did i want you to remember|which word did you remember|do you remember what i told you|what was the code|what did you remember]"
    d.say(expand(d.rng, form), f"You asked me to remember {d.remembered}." if d.remembered else "You have not asked me to remember anything.")


def what_was_said(d):
    users = d.users()
    kind = d.rng.random()
    if kind < 0.45:
        form = "[what did i just say|what did i just ask|what was my last question|what was my last message|what did i say|repeat my last message|what did i ask you|what did i write]"
        answer = f"You said: {users[-1]}" if users else "You have not said anything yet."
    elif kind < 0.8:
        form = "[say that again|repeat that|what did you say|can you repeat that|repeat your last answer|once more|say it again|please repeat|repeat that please|again please|pardon, what did you say]"
        answer = d.messages[-1]["content"] if users else "I have not said anything yet."
    else:
        form = "[what was my first question|what did i say first|what was my first message|how did this chat begin|what did i ask first]"
        answer = f"You first said: {users[0]}" if users else "This is the first thing that you said."
    if len(answer) < 160:
        d.say(expand(d.rng, form), answer)
