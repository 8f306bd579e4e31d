"""Key-value look-ups in tables of up to about 3,500 tokens, as chats and as plain text dumps.

Keys, values and layouts are drawn from many styles so that what is learned is looking up, not a format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from chat import Document, Item, user
from words import COMMON_WORDS, ZH_WORDS, between, city, digits, email, hex_string, person, pick, pseudo_word

Maker = Callable[[Random], str]

# Each maker with the tokens that one draw takes, about; tables are sized by it.
_KEYS: tuple[tuple[Maker, float], ...] = (
    (pseudo_word, 3.0),
    (lambda rng: pick(rng, COMMON_WORDS) + "_" + pseudo_word(rng), 5.0),
    (lambda rng: pick(rng, COMMON_WORDS) + "-" + pick(rng, COMMON_WORDS), 4.0),
    (lambda rng: hex_string(rng, 6), 5.5),
    (lambda rng: hex_string(rng, 8), 7.5),
    (lambda rng: digits(rng, 5), 5.0),
    (lambda rng: f"{pick(rng, ('K', 'ID', 'REF', 'user', 'item'))}-{digits(rng, 4)}", 6.0),
    (lambda rng: f"{pseudo_word(rng).capitalize()} {pseudo_word(rng).capitalize()}", 6.5),
    (person, 3.0),
    (lambda rng: pick(rng, ZH_WORDS) + digits(rng, 3), 5.0),
)
_VALUES: tuple[tuple[Maker, float], ...] = (
    (lambda rng: digits(rng, 4), 4.0),
    (lambda rng: str(between(rng, 10, 99_999)), 4.5),
    (pseudo_word, 3.0),
    (lambda rng: pick(rng, COMMON_WORDS), 1.5),
    (lambda rng: hex_string(rng, 6), 5.5),
    (lambda rng: hex_string(rng, 8), 7.5),
    (city, 2.5),
    (email, 6.0),
    (lambda rng: f"{between(rng, 0, 99)}.{digits(rng, 2)}", 5.0),
    (lambda rng: f"{pick(rng, COMMON_WORDS)} {pseudo_word(rng)}", 4.5),
)


class Layout(NamedTuple):
    """How a table is written; `cost` is the tokens that a line takes beside its key and value."""

    opening: str
    line: str
    separator: str
    closing: str
    cost: float


@dataclass(frozen=True, slots=True)
class Table:
    """Pairs of keys and values in one layout."""

    layout: Layout
    pairs: list[tuple[str, str]]

    def lines(self, pairs: list[tuple[str, str]]) -> list[str]:
        return [self.layout.line.format(k=key, v=value) for key, value in pairs]

    def text(self) -> str:
        return self.layout.opening + self.layout.separator.join(self.lines(self.pairs)) + self.layout.closing


_LAYOUTS = (
    Layout("", "{k}: {v}", "\n", "", 2.0),
    Layout("", "{k} = {v}", "\n", "", 2.0),
    Layout("", "{k} -> {v}", "\n", "", 2.5),
    Layout("", "- {k}: {v}", "\n", "", 3.0),
    Layout("key,value\n", "{k},{v}", "\n", "", 2.0),
    Layout("| key | value |\n| --- | --- |\n", "| {k} | {v} |", "\n", "", 4.0),
    Layout("", "The code of {k} is {v}.", "\n", "", 6.0),
    Layout("", "The value of {k} is {v}.", " ", "", 6.0),
    Layout("", "{k} {v}", "\n", "", 1.0),
    Layout("{", '"{k}": "{v}"', ", ", "}", 5.0),
)
_ASKS = {
    "en": (
        "What is the value of {k}?",
        "What is the value for {k}?",
        "Look up {k}.",
        "Give me the value of {k}.",
        "Which value belongs to {k}?",
        "{k}?",
        "What does {k} map to?",
        "Find {k} and reply with its value only.",
        "Return the entry for {k}.",
        "What is {k}?",
    ),
    "zh": ("{k}的值是什么？", "{k}对应的值是多少？", "查找{k}。", "请给出{k}的值。", "{k}是多少？"),
}
_ASKS_KEY = (
    "Which key has the value {v}?",
    "Which entry has the value {v}?",
    "{v} is the value of which key?",
)
_OPENINGS = {
    "en": (
        "",
        "",
        "Here is a table:\n",
        "Use this data:\n",
        "Data:\n",
        "Read the following records.\n",
        "Here are some key-value pairs:\n",
        "Remember this list:\n",
        "Context:\n",
    ),
    "zh": ("", "以下是数据：\n", "请阅读下面的表格：\n", "资料：\n"),
}


def lookup(rng: Random, *, max_tokens: float, min_tokens: float = 40) -> Item:
    """Draw a table of about min_tokens to max_tokens and a question about one or a few keys."""
    table = _table(rng, _size(rng, min_tokens, max_tokens))
    roll = rng.random()
    if roll < 0.06:
        return _ask_for_key(rng, table)
    if roll < 0.42 and len(table.pairs) > 8:
        return _ask_for_several(rng, table)
    return _ask_for_value(rng, table)


def lookup_of_size(rng: Random, *, tokens: float) -> Item:
    """Draw a table of about `tokens` tokens and a question for one value."""
    return _ask_for_value(rng, _table(rng, tokens))


def dump(rng: Random, *, max_tokens: float) -> Document:
    """Draw a table to read and some of its lines, shuffled, to learn: every line is one look-up."""
    table = _table(rng, _size(rng, 60, max_tokens / 1.6))
    count = max(4, int(len(table.pairs) * rng.uniform(0.3, 0.6)))
    again = table.lines(rng.sample(table.pairs, min(len(table.pairs), count)))
    head = "" if rng.random() < 0.7 else "Again:\n"
    return Document(f"{table.text()}\n\n{head}", table.layout.separator.join(again) + "<|endoftext|>")


def _ask_for_value(rng: Random, table: Table) -> Item:
    key, value = table.pairs[int(rng.random() * len(table.pairs))]
    language = "en" if rng.random() < 0.85 else "zh"
    question = pick(rng, _ASKS[language]).format(k=key)
    seek = f"我要查找{key}。" if language == "zh" else f"I look for {key}."
    reasoning = "\n".join([seek, *table.lines([(key, value)])])
    opened = pick(rng, _OPENINGS[language]) + table.text()
    return _item(rng, opened, question, reasoning, value)


def _ask_for_several(rng: Random, table: Table) -> Item:
    chosen = rng.sample(table.pairs, between(rng, 2, 8))
    question = "Give me the values of " + ", ".join(key for key, _ in chosen) + "."
    reasoning = "\n".join(["I look up each key in turn.", *table.lines(chosen)])
    reply = "\n".join(f"{key}: {value}" for key, value in chosen)
    return _item(rng, pick(rng, _OPENINGS["en"]) + table.text(), question, reasoning, reply)


def _ask_for_key(rng: Random, table: Table) -> Item:
    owners: dict[str, list[str]] = {}
    for key, value in table.pairs:
        owners.setdefault(value, []).append(key)
    unique = [value for value, keys in owners.items() if len(keys) == 1]
    if not unique:
        return _ask_for_value(rng, table)
    value = pick(rng, unique)
    key = owners[value][0]
    reasoning = "\n".join([f"I look for the value {value}.", *table.lines([(key, value)])])
    opened = pick(rng, _OPENINGS["en"]) + table.text()
    return _item(rng, opened, pick(rng, _ASKS_KEY).format(v=value), reasoning, key)


def _item(rng: Random, table_text: str, question: str, reasoning: str, answer: str) -> Item:
    before = rng.random() < 0.12
    content = f"{question}\n\n{table_text}" if before else f"{table_text}\n\n{question}"
    return Item(
        task="kv_lookup",
        problems=(f"kv:{answer}:{table_text}",),
        messages=[user(content)],
        reasoning=reasoning,
        reply=answer,
        answer=answer,
    )


def _size(rng: Random, low: float, high: float) -> float:
    """Draw a size, half of the time evenly and half of the time evenly in its logarithm."""
    if rng.random() < 0.5:
        return rng.uniform(low, high)
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _table(rng: Random, tokens: float) -> Table:
    layout = _LAYOUTS[int(rng.random() * len(_LAYOUTS))]
    key, key_cost = _KEYS[int(rng.random() * len(_KEYS))]
    value, value_cost = _VALUES[int(rng.random() * len(_VALUES))]
    count = max(3, int(tokens / (key_cost + value_cost + layout.cost)))
    pairs: dict[str, str] = {}
    for _ in range(count):
        pairs[key(rng)] = value(rng)
    return Table(layout, list(pairs.items()))
