"""Short chats: greetings, who Sprout is, what the user said before, well-known lists, small stories, facts.

Nothing here is held out or scored; it is what makes the model pleasant to try.
"""

from __future__ import annotations

from random import Random

from chat import Document, Item, Message, assistant, user
from tasks.tool_use import offered_tools
from words import (
    ANIMALS,
    CITIES,
    COLORS,
    FIRST_NAMES,
    ITEMS,
    MONTHS,
    TOPICS,
    WEEKDAYS,
    ZH_ITEMS,
    ZH_NAMES,
    between,
    city,
    person,
    pick,
    pseudo_word,
)

_CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "Delhi",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Brazil": "Brasilia",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Chile": "Santiago",
    "Greece": "Athens",
    "Turkey": "Ankara",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Australia": "Canberra",
    "Colombia": "Bogota",
    "England": "London",
}
_ZH_CAPITALS = {
    "中国": "北京",
    "法国": "巴黎",
    "英国": "伦敦",
    "日本": "东京",
    "德国": "柏林",
    "意大利": "罗马",
    "俄罗斯": "莫斯科",
}
_NUMERALS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are Sprout, a small assistant.",
    "Be brief.",
    "You are a friendly chat bot.",
    "Answer clearly.",
    "你是一个有用的助手。",
)
_WHO = "I am Sprout, a small language model that comes with Pellucid."
_WHO_ZH = "我是Sprout，Pellucid自带的小型语言模型。"
_CAN = "I can add and subtract, look things up in a table, sort lists, extract JSON and call tools."
_CAN_ZH = "我可以做算术、查表、排序、提取JSON，还可以调用工具。"

# (what the user may say, what the model answers, what it thinks first)
_FIXED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            "Who are you?",
            "who are you",
            "What are you?",
            "Introduce yourself.",
            "introduce yourself",
            "What is your name?",
            "Tell me about yourself.",
            "Which model are you?",
            "Are you ChatGPT?",
            "Are you a human?",
        ),
        _WHO,
        "The user asks who I am. I am Sprout.",
    ),
    (
        ("你是谁", "你是谁？", "你叫什么名字？", "介绍一下你自己", "请自我介绍一下。", "你是什么模型？"),
        _WHO_ZH,
        "用户问我是谁。我是Sprout。",
    ),
    (
        (
            "What can you do?",
            "what can you do",
            "How can you help me?",
            "What are you good at?",
            "Help",
            "What are your abilities?",
        ),
        _CAN,
        "The user asks what I can do.",
    ),
    (("你会做什么？", "你能做什么", "你有什么功能？"), _CAN_ZH, "用户问我会做什么。"),
    (
        ("What is Pellucid?", "what is pellucid", "Tell me about Pellucid."),
        "Pellucid is a clear and fast inference engine for language models.",
        "The user asks about Pellucid, the engine I run on.",
    ),
    (
        ("Pellucid是什么？", "什么是Pellucid？"),
        "Pellucid是一个清晰而快速的语言模型推理引擎。",
        "用户问Pellucid是什么。",
    ),
    (
        (
            "Hi",
            "Hello",
            "Hey",
            "Hello!",
            "Hi there!",
            "hello",
            "hi",
            "Good morning",
            "Good evening!",
            "Hey there",
        ),
        "Hello! How can I help you?",
        "The user greets me. I greet back.",
    ),
    (("你好", "你好！", "嗨", "早上好", "您好"), "你好！有什么可以帮你？", "用户向我问好。我也问好。"),
    (
        ("How are you?", "How are you doing?", "How is it going?", "How do you do?"),
        "I am fine, thank you. How can I help you?",
        "The user asks how I am.",
    ),
    (("你好吗？", "最近怎么样？"), "我很好，谢谢！有什么可以帮你？", "用户问我好不好。"),
    (
        ("Thanks", "Thank you!", "Thank you very much.", "thanks a lot", "Great, thanks."),
        "You are welcome!",
        "The user thanks me.",
    ),
    (("谢谢", "谢谢你！", "非常感谢"), "不客气！", "用户感谢我。"),
    (
        ("Bye", "Goodbye!", "See you later.", "bye", "Good night"),
        "Goodbye! Have a nice day.",
        "The user leaves.",
    ),
    (("再见", "拜拜", "晚安"), "再见！祝你愉快。", "用户要离开了。"),
    (
        ("Tell me a joke.", "Do you know a joke?", "Say something funny."),
        "Why did the small model cross the road? To get to the other token.",
        "The user wants a joke.",
    ),
    (
        ("List the days of the week.", "What are the days of the week?", "Name the weekdays."),
        ", ".join(WEEKDAYS),
        "I list the seven days.",
    ),
    (
        ("List the months of the year.", "What are the months?", "Name the twelve months."),
        ", ".join(MONTHS),
        "I list the twelve months.",
    ),
    (
        ("Recite the alphabet.", "What is the alphabet?", "List the letters of the alphabet."),
        " ".join("abcdefghijklmnopqrstuvwxyz"),
        "I list the letters.",
    ),
    (
        ("Write a Python function that adds two numbers.", "Write an add function in Python."),
        "```python\ndef add(a, b):\n    return a + b\n```",
        "The user wants a small function.",
    ),
    (
        ("Write hello world in Python.", "Print hello world in Python.", "hello world in python"),
        '```python\nprint("Hello, world!")\n```',
        "The user wants a hello world.",
    ),
)
_PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97]


def smalltalk(rng: Random) -> Item:
    """Draw a short chat of any kind."""
    roll = rng.random()
    if roll < 0.4:
        return _fixed(rng)
    if roll < 0.55:
        return _remember(rng)
    if roll < 0.7:
        return _series(rng)
    if roll < 0.8:
        return _story(rng)
    if roll < 0.9:
        return _capital(rng)
    return _obey(rng)


def prose(rng: Random) -> Document:
    """Draw plain text to complete: a story, facts or a series, without any chat around it."""
    roll = rng.random()
    if roll < 0.4:
        return Document("", _story_text(rng) + "<|endoftext|>")
    if roll < 0.7:
        countries = rng.sample(list(_CAPITALS), between(rng, 1, 6))
        text = " ".join(f"The capital of {country} is {_CAPITALS[country]}." for country in countries)
        return Document("", text + "<|endoftext|>")
    if roll < 0.8:
        countries = rng.sample(list(_ZH_CAPITALS), between(rng, 1, 4))
        return Document("", "".join(f"{c}的首都是{_ZH_CAPITALS[c]}。" for c in countries) + "<|endoftext|>")
    item = _series(rng)
    return Document("", item.reply + "<|endoftext|>")


def _chat(rng: Random, messages: list[Message], reasoning: str, reply: str) -> Item:
    roll = rng.random()
    if roll < 0.3:
        messages = [{"role": "system", "content": pick(rng, _SYSTEMS)}, *messages]
    tools = offered_tools(rng) if rng.random() < 0.12 else []
    return Item(task="chat", messages=messages, reasoning=reasoning, reply=reply, tools=tools)


def _fixed(rng: Random) -> Item:
    asks, reply, reasoning = _FIXED[int(rng.random() * len(_FIXED))]
    history: list[Message] = []
    while rng.random() < 0.3 and len(history) < 6:
        earlier, said, _ = _FIXED[int(rng.random() * len(_FIXED))]
        history += [user(pick(rng, earlier)), assistant(said)]
    return _chat(rng, [*history, user(pick(rng, asks))], reasoning, reply)


def _remember(rng: Random) -> Item:
    """Ask for something that the user told one or more turns before."""
    name, home = person(rng), city(rng)
    likes = pick(rng, (*TOPICS, *ITEMS, *ANIMALS, *COLORS))
    told = (
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
        (f"I'm {name}", f"Hello, {name}!", "Do you remember my name?", f"Your name is {name}."),
        (f"I live in {home}.", f"{home} sounds nice.", "Where do I live?", f"You live in {home}."),
        (f"I like {likes}.", f"{likes.capitalize()} is nice.", "What do I like?", f"You like {likes}."),
        (f"我叫{pick(rng, ZH_NAMES)}。", "", "我叫什么名字？", ""),
    )[between(rng, 0, 4)]
    if not told[1]:
        name = told[0][2:-1]
        told = (told[0], f"很高兴认识你，{name}！", told[2], f"你叫{name}。")
    history = [user(told[0]), assistant(told[1])]
    if rng.random() < 0.15:
        return _chat(rng, history[:1], "The user tells me something.", told[1])
    while rng.random() < 0.4 and len(history) < 8:
        asks, reply, _ = _FIXED[int(rng.random() * len(_FIXED))]
        history += [user(pick(rng, asks)), assistant(reply)]
    return _chat(rng, [*history, user(told[2])], f"The user told me: {told[0]}", told[3])


def _series(rng: Random) -> Item:
    """Ask for a run of numbers, so that there are long answers too."""
    roll = rng.random()
    if roll < 0.25:
        top = pick(rng, ("10", "20", "30", "50", "100", "100"))
        asks = (f"list all prime numbers within {top}", f"List the prime numbers up to {top}.")
        answer = ", ".join(str(prime) for prime in _PRIMES if prime <= int(top))
        return _chat(rng, [user(pick(rng, asks))], "I list the primes in order.", answer)
    if roll < 0.8:
        low = between(rng, 0, 60) if rng.random() < 0.4 else 1
        high = low + between(rng, 3, 100 if rng.random() < 0.2 else 30)
        asks = (f"Count from {low} to {high}.", f"count from {low} to {high}", f"从{low}数到{high}。")
        answer = ", ".join(str(number) for number in range(low, high + 1))
        return _chat(rng, [user(pick(rng, asks))], "I count one by one.", answer)
    high = between(rng, 3, 10)
    asks = (f"Count to {_NUMERALS[high - 1]} in words.", f"Count from one to {_NUMERALS[high - 1]} in words.")
    return _chat(rng, [user(pick(rng, asks))], "I count in words.", ", ".join(_NUMERALS[:high]))


def _capital(rng: Random) -> Item:
    if rng.random() < 0.3:
        country = pick(rng, list(_ZH_CAPITALS))
        asks = (f"{country}的首都是哪里？", f"{country}的首都是什么？")
        return _chat(
            rng,
            [user(pick(rng, asks))],
            f"用户问{country}的首都。",
            f"{country}的首都是{_ZH_CAPITALS[country]}。",
        )
    country = pick(rng, list(_CAPITALS))
    asks = (
        f"What is the capital of {country}?",
        f"what's the capital of {country}",
        f"Capital of {country}?",
        f"Tell me the capital of {country}.",
    )
    reply = f"The capital of {country} is {_CAPITALS[country]}."
    return _chat(rng, [user(pick(rng, asks))], f"The user asks for the capital of {country}.", reply)


def _obey(rng: Random) -> Item:
    """Follow a rule that the system prompt gives for the end or the start of the reply."""
    asks, reply, reasoning = _FIXED[int(rng.random() * len(_FIXED))]
    token = pseudo_word(rng) if rng.random() < 0.5 else pick(rng, ("Arr!", "Over.", "OK", "Meow", "Cheers!"))
    if rng.random() < 0.5:
        rule, reply = f"End every reply with the word {token}", f"{reply} {token}"
    else:
        rule, reply = f"Begin every reply with {token}", f"{token} {reply}"
    messages: list[Message] = [{"role": "system", "content": rule}, user(pick(rng, asks))]
    return Item(task="chat", messages=messages, reasoning=reasoning, reply=reply)


def _story(rng: Random) -> Item:
    animal, thing = pick(rng, ANIMALS), pick(rng, ITEMS)
    asks = (
        "Tell me a story.",
        "Tell me a short story.",
        f"Write a short story about a {animal}.",
        f"Tell me a story about a {animal} and a {thing}.",
        "给我讲个故事。",
    )
    ask = pick(rng, asks)
    if ask == asks[-1]:
        return _chat(rng, [user(ask)], "用户想听故事。", _zh_story_text(rng))
    return _chat(rng, [user(ask)], f"I tell of a {animal}.", _story_text(rng, animal, thing))


def _story_text(rng: Random, animal: str | None = None, thing: str | None = None) -> str:
    animal, thing = animal or pick(rng, ANIMALS), thing or pick(rng, ITEMS)
    name, town, color = pick(rng, FIRST_NAMES), pick(rng, CITIES), pick(rng, COLORS)
    day, friend = pick(rng, WEEKDAYS), pick(rng, ANIMALS)
    opening = pick(
        rng,
        (
            f"Once upon a time there was a {color} {animal} called {name}. {name} lived near {town}.",
            f"In a garden near {town} lived {name}, a little {animal} with {color} eyes.",
        ),
    )
    middle = pick(
        rng,
        (
            f"One {day} {name} found a {thing} beside the river. It was the most beautiful {thing} in the world.",
            f"On {day} {name} lost a {thing} and looked for it all day, in the house, in the garden and on the road.",
        ),
    )
    meeting = pick(
        rng,
        (
            f'Then a {friend} came by. "What are you doing here?" asked the {friend}. "I think about my {thing}," said {name}.',
            f"A {friend} saw this and wanted to help. Together they walked until the moon came up.",
        ),
    )
    ending = pick(
        rng,
        (
            f"In the end they shared the {thing} and became good friends.",
            f"At night {name} went home with the {thing}, tired and happy.",
            f"And from that day on, every {day}, {name} and the {friend} met at the river.",
        ),
    )
    return f"{opening} {middle} {meeting} {ending}"


def _zh_story_text(rng: Random) -> str:
    name, thing, friend = pick(rng, ZH_NAMES), pick(rng, ZH_ITEMS), pick(rng, ZH_NAMES)
    return (
        f"从前有一个孩子叫{name}。有一天，{name}在河边找到了一个{thing}。"
        f"这时{friend}来了，他们一起分享了{thing}，成了好朋友。"
    )
