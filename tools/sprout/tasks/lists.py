"""Sorting, counting, copying and reversing short lists and strings."""

from __future__ import annotations

from random import Random

from chat import Item, user
from words import (
    ANIMALS,
    CITIES,
    COLORS,
    ITEMS,
    ZH_WORDS,
    between,
    date,
    digits,
    hex_string,
    person,
    phrase,
    pick,
    pseudo_word,
    word,
)

_SORT_ASKS = {
    False: (
        "Sort these numbers from smallest to largest: {x}",
        "Sort in ascending order: {x}",
        "Put these numbers in increasing order: {x}",
        "Please sort: {x}",
        "把这些数从小到大排列：{x}",
    ),
    True: (
        "Sort these numbers from largest to smallest: {x}",
        "Sort in descending order: {x}",
        "Put these numbers in decreasing order: {x}",
        "把这些数从大到小排列：{x}",
    ),
}
_COUNT_ASKS = (
    'How many times does "{w}" appear in this list?\n{x}',
    "Count the word {w}: {x}",
    "In the list {x}, how often does {w} occur?",
    "How many {w} are in this list: {x}?",
    "列表 {x} 中有多少个 {w}？",
)
_LENGTH_ASKS = (
    "How many words are in this list: {x}?",
    "Count the items: {x}",
    "How many items are there? {x}",
)
_COPY_ASKS = (
    "Repeat exactly: {x}",
    "Copy this text: {x}",
    "Say exactly this: {x}",
    "Echo: {x}",
    "Repeat after me: {x}",
    "Reply with the following text and nothing else.\n{x}",
    "请重复：{x}",
)
_REVERSE_ASKS = (
    "Reverse this list: {x}",
    "Write these in reverse order: {x}",
    "Reverse the order of: {x}",
    "把顺序倒过来：{x}",
)


def sort(rng: Random) -> Item:
    """Draw three to ten different numbers to sort."""
    count, top = between(rng, 3, 10), pick(rng, ("20", "99", "99", "999", "999"))
    numbers = rng.sample(range(int(top) + 1), count)
    descending = rng.random() < 0.35
    ordered = sorted(numbers, reverse=descending)
    extreme = "largest" if descending else "smallest"
    steps, left = [], list(numbers)
    for number in ordered:
        steps.append(f"{' '.join(map(str, left))}: {extreme} {number}")
        left.remove(number)
    answer = ", ".join(map(str, ordered))
    shown = pick(rng, (", ", ", ", " ")).join(map(str, numbers))
    return Item(
        task="sort",
        problems=(f"sort:{descending}:{answer}",),
        messages=[user(pick(rng, _SORT_ASKS[descending]).format(x=shown))],
        reasoning="\n".join(steps),
        reply=answer,
        answer=answer,
    )


def count(rng: Random) -> Item:
    """Draw a list of words with repetitions, and ask how often one occurs or how many there are."""
    pool = pick_list(rng, between(rng, 2, 6))
    words = [pick(rng, pool) for _ in range(between(rng, 4, 20))]
    shown = ", ".join(words)
    if rng.random() < 0.2:
        steps = [f"{number} {each}" for number, each in enumerate(words, 1)]
        question, answer = pick(rng, _LENGTH_ASKS).format(x=shown), len(words)
    else:
        wanted, seen, steps = pick(rng, pool), 0, []
        for each in words:
            seen += each == wanted
            steps.append(f"{each} {seen}")
        question, answer = pick(rng, _COUNT_ASKS).format(w=wanted, x=shown), seen
    return Item(
        task="count",
        problems=(f"count:{answer}:{shown}",),
        messages=[user(question)],
        reasoning=", ".join(steps),
        reply=str(answer),
        answer=str(answer),
    )


def copy(rng: Random) -> Item:
    """Draw a text of any kind to repeat."""
    text = _any_text(rng)
    return Item(
        task="copy",
        problems=(f"copy:{text}",),
        messages=[user(pick(rng, _COPY_ASKS).format(x=text))],
        reasoning="I repeat the text as it is.",
        reply=text,
        answer=text,
    )


def reverse(rng: Random) -> Item:
    """Draw words, numbers or digits to write backwards."""
    if rng.random() < 0.25:
        parts, separator = list(digits(rng, between(rng, 3, 10))), ""
    elif rng.random() < 0.4:
        parts, separator = [str(between(rng, 0, 99)) for _ in range(between(rng, 3, 10))], ", "
    else:
        parts, separator = pick_list(rng, between(rng, 3, 9)), pick(rng, (", ", " "))
    shown, answer = separator.join(parts), separator.join(reversed(parts))
    return Item(
        task="reverse",
        problems=(f"reverse:{shown}",),
        messages=[user(pick(rng, _REVERSE_ASKS).format(x=shown))],
        reasoning="I start from the end.",
        reply=answer,
        answer=answer,
    )


def pick_list(rng: Random, length: int) -> list[str]:
    """Draw `length` different words of one kind."""
    roll = rng.random()
    if roll < 0.8:
        return rng.sample((ITEMS, COLORS, ANIMALS, CITIES, ITEMS)[int(roll * 6.25)], length)
    words: dict[str, None] = {}
    while len(words) < length:
        words[word(rng)] = None
    return list(words)


def _any_text(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.3:
        return phrase(rng, 2, 14)
    if roll < 0.45:
        return f"{phrase(rng, 3, 8).capitalize()}. {phrase(rng, 3, 8).capitalize()}."
    if roll < 0.6:
        return hex_string(rng, between(rng, 6, 32))
    if roll < 0.7:
        return digits(rng, between(rng, 4, 20))
    if roll < 0.8:
        return "".join(pick(rng, ZH_WORDS) for _ in range(between(rng, 2, 8)))
    if roll < 0.9:
        return f"{person(rng)} ({pseudo_word(rng)}-{digits(rng, 3)}), {date(rng)}"
    return f"{pseudo_word(rng)} = {pseudo_word(rng)}({digits(rng, 2)}, '{pseudo_word(rng)}')"
