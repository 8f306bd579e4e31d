"""Addition, subtraction and multiplication, asked in English and Chinese, worked column by column.

Every partial result that the working states is listed in the item's problems, so a held-out product or sum
never appears as a step of another problem.
"""

from __future__ import annotations

from random import Random

from chat import Item, user
from words import FIRST_NAMES, ITEMS, ZH_ITEMS, ZH_NAMES, between, pick

_PLACES = {
    "en": ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands", "Hundred thousands"),
    "zh": ("个位", "十位", "百位", "千位", "万位", "十万位"),
}
_ASKS = {
    "en": (
        "{a}{op}{b}=?",
        "{a}{op}{b}=",
        "{a} {op} {b}",
        "{a} {op} {b} = ?",
        "What is {a} {op} {b}?",
        "what's {a}{op}{b}",
        "Calculate {a} {op} {b}.",
        "Compute {a}{op}{b}.",
        "How much is {a} {op} {b}?",
        "Please work out {a} {op} {b}.",
        "Solve: {a} {op} {b}",
        "What is {a} {name} {b}?",
        "Can you tell me what {a} {name} {b} is?",
        "{a} {name} {b} equals what?",
    ),
    "zh": (
        "{a}{op}{b}=?",
        "{a}{op}{b}等于多少？",
        "{a}{op}{b}等于几？",
        "{a} {op} {b} 是多少？",
        "计算{a}{op}{b}。",
        "请计算 {a} {op} {b}",
        "请问{a}{name}{b}等于多少？",
        "{a}{name}{b}是多少？",
        "帮我算一下{a}{name}{b}",
    ),
}
_NAMES = {
    "en": {"+": "plus", "-": "minus", "*": "times"},
    "zh": {"+": "加", "-": "减", "*": "乘以"},
}
_STORIES = {
    "en": {
        "+": "{who} has {a} {thing}s and gets {b} more. How many {thing}s does {who} have now?",
        "-": "{who} has {a} {thing}s and gives away {b}. How many {thing}s are left?",
        "*": "{who} has {a} boxes with {b} {thing}s each. How many {thing}s are there?",
    },
    "zh": {
        "+": "{who}有{a}个{thing}，又得到{b}个，现在一共有多少个{thing}？",
        "-": "{who}有{a}个{thing}，送出{b}个，还剩多少个{thing}？",
        "*": "{who}有{a}个箱子，每个箱子里有{b}个{thing}，一共有多少个{thing}？",
    },
}
_TIMES_SIGNS = ("*", "*", "×", "x")


def arithmetic(rng: Random) -> Item:
    """Draw a sum, a difference or a product in either language."""
    op = pick(rng, ("+", "+", "+", "-", "-", "-", "-", "*", "*"))
    return calculation(rng, op=op, language="en" if rng.random() < 0.62 else "zh")


def calculation(rng: Random, *, op: str, language: str, max_digits: int = 4) -> Item:
    """Draw one problem for the operator `+`, `-` or `*`."""
    a, b = _operands(rng, op, max_digits)
    working, problems = _WORKINGS[op](a, b, language)
    answer = {"+": a + b, "-": a - b, "*": a * b}[op]
    task = {"+": "add", "-": "sub", "*": "mul"}[op] if language == "en" else "zh_arith"
    return Item(
        task=task,
        problems=problems,
        messages=[user(_question(rng, op, language, a, b))],
        reasoning=working,
        reply=str(answer),
        answer=str(answer),
    )


def _operands(rng: Random, op: str, max_digits: int) -> tuple[int, int]:
    if op == "*":
        a, b = _number(rng, (0.25, 0.75)), _number(rng, (0.6, 0.4))
        return (a, b) if rng.random() < 0.7 else (b, a)
    weights = (0.14, 0.26, 0.42, 0.18)[:max_digits]
    return _number(rng, weights), _number(rng, weights)


def _number(rng: Random, weights: tuple[float, ...]) -> int:
    """Draw a number whose count of digits follows `weights` (of one digit, of two...)."""
    length = rng.choices(range(1, len(weights) + 1), weights)[0]
    return between(rng, 10 ** (length - 1) if length > 1 else 0, 10**length - 1)


def _question(rng: Random, op: str, language: str, a: int, b: int) -> str:
    if rng.random() < 0.12 and (op != "-" or a >= b):
        people, things = (FIRST_NAMES, ITEMS) if language == "en" else (ZH_NAMES, ZH_ITEMS)
        return _STORIES[language][op].format(who=pick(rng, people), thing=pick(rng, things), a=a, b=b)
    sign = pick(rng, _TIMES_SIGNS) if op == "*" else op
    return pick(rng, _ASKS[language]).format(a=a, b=b, op=sign, name=_NAMES[language][op])


def _problem(op: str, a: int, b: int) -> tuple[str, ...]:
    """Name a problem whatever the order of its numbers; those of single digits are never held out."""
    if max(a, b) < 10:
        return ()
    low, high = sorted((a, b))
    return (f"{op}:{high},{low}",)


def _column(language: str, place: int, sum_text: str, digit: int, carry: int, *, borrow: bool = False) -> str:
    name = _PLACES[language][place]
    if language == "zh":
        return f"{name}：{sum_text}，写{digit}，{'借' if borrow else '进'}{carry}。"
    return f"{name}: {sum_text}, write {digit}, {'borrow' if borrow else 'carry'} {carry}."


def _result(language: str, text: str) -> str:
    return f"结果是{text}。" if language == "zh" else f"The result is {text}."


def _work_addition(a: int, b: int, language: str) -> tuple[str, tuple[str, ...]]:
    lines, carry = [f"{a}+{b}"], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(_column(language, place, f"{x}+{y}+{carry}={total}", total % 10, total // 10))
        carry = total // 10
    lines.append(_result(language, f"{a}+{b}={a + b}"))
    return "\n".join(lines), _problem("+", a, b)


def _work_subtraction(a: int, b: int, language: str) -> tuple[str, tuple[str, ...]]:
    high, low = max(a, b), min(a, b)
    lines, borrow = [f"{a}-{b}"], 0
    if a < b:
        lines.append(
            f"{a}比{b}小，先算{b}-{a}。" if language == "zh" else f"{a} is less than {b}, so take {b}-{a}."
        )
    for place in range(len(str(high))):
        x, y = high // 10**place % 10, low // 10**place % 10
        lent = 10 if x - y - borrow < 0 else 0
        digit = x + lent - y - borrow
        column = f"{x + lent}-{y}-{borrow}={digit}"
        borrow = lent // 10
        lines.append(_column(language, place, column, digit, borrow, borrow=True))
    lines.append(_result(language, f"{a}-{b}={a - b}"))
    return "\n".join(lines), _problem("-", a, b)


def _work_row(a: int, digit: int, language: str) -> list[str]:
    """Multiply by one digit, column by column."""
    lines, carry = [], 0
    for place in range(len(str(a))):
        x = a // 10**place % 10
        total = x * digit + carry
        text = f"{x}*{digit}+{carry}={total}"
        lines.append(_column(language, place, text, total % 10, total // 10))
        carry = total // 10
    return [*lines, f"{a}*{digit}={a * digit}"]


def _work_multiplication(a: int, b: int, language: str) -> tuple[str, tuple[str, ...]]:
    top, bottom = max(a, b), min(a, b)
    problems = _problem("*", a, b)
    lines = [f"{top}*{bottom}", *_work_row(top, bottom % 10, language)]
    if bottom >= 10:
        ones, tens = top * (bottom % 10), top * (bottom // 10)
        lines += _work_row(top, bottom // 10, language)
        lines.append(f"{top}*{bottom // 10 * 10}={tens * 10}")
        added, addition = _work_addition(tens * 10, ones, language)
        lines.append(added)
        problems += _problem("*", top, bottom % 10) + _problem("*", top, bottom // 10) + addition
        problems += _problem("*", top, bottom // 10 * 10)
    lines.append(_result(language, f"{a}*{b}={a * b}"))
    return "\n".join(lines), problems


_WORKINGS = {"+": _work_addition, "-": _work_subtraction, "*": _work_multiplication}
