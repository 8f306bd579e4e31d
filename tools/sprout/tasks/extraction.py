"""JSON extraction: a sentence about a person, an order or a flight, and the fields to answer with as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from chat import Item, Json, Message, dumps, user
from words import (
    CITIES,
    COLORS,
    CURRENCIES,
    ITEMS,
    JOBS,
    WEEKDAYS,
    ZH_CITIES,
    ZH_ITEMS,
    ZH_JOBS,
    ZH_NAMES,
    between,
    city,
    clock,
    date,
    digits,
    email,
    person,
    phrase,
    pick,
    word,
)


@dataclass(frozen=True, slots=True)
class Schema:
    """One kind of record: how to draw each field, and sentences that tell all of the fields they name."""

    name: str
    fields: dict[str, Callable[[Random], Json]]
    sentences: tuple[str, ...]
    chinese: bool = False


_CENTS = ("25", "50", "75", "99", "10", "49", "95", "5")


def _price(rng: Random) -> float:
    return round(between(rng, 1, 999) + int(pick(rng, _CENTS)) / 100, 2)


def _title(rng: Random) -> str:
    return phrase(rng, 2, 3).title()


def _thing(rng: Random) -> str:
    return pick(rng, ITEMS)


_SCHEMAS = (
    Schema(
        "person",
        {
            "name": person,
            "age": lambda rng: between(rng, 18, 90),
            "city": city,
            "job": lambda rng: pick(rng, JOBS),
        },
        (
            "{name}, {age}, lives in {city} and works as a {job}.",
            "{name} is a {age}-year-old {job} from {city}.",
            "My name is {name}, I am {age} years old and I live in {city}. I am a {job}.",
            "In {city} we met {name}, a {job}, who is {age} years old.",
            "The {job} {name} ({age}) moved to {city} last year.",
        ),
    ),
    Schema(
        "order",
        {
            "customer": person,
            "item": _thing,
            "quantity": lambda rng: between(rng, 1, 60),
            "price": _price,
        },
        (
            "{customer} ordered {quantity} {item}s for {price} dollars.",
            "Order: {quantity} x {item} at ${price}, customer {customer}.",
            "We sold {quantity} {item}s to {customer} and were paid ${price}.",
            "For {price} dollars {customer} bought {quantity} {item}s.",
        ),
    ),
    Schema(
        "flight",
        {
            "number": lambda rng: f"{pick(rng, ('BA', 'LH', 'AF', 'UA', 'CA', 'QF'))}{digits(rng, 3)}",
            "from": lambda rng: pick(rng, CITIES),
            "to": city,
            "date": date,
            "time": clock,
        },
        (
            "Flight {number} leaves {from} for {to} on {date} at {time}.",
            "On {date} flight {number} goes from {from} to {to}, departing at {time}.",
            "Your flight to {to} is {number}; it departs from {from} at {time} on {date}.",
        ),
    ),
    Schema(
        "event",
        {"title": _title, "date": date, "place": city, "guests": lambda rng: between(rng, 5, 900)},
        (
            'The event "{title}" takes place in {place} on {date} with {guests} guests.',
            "{guests} guests are expected at {title} in {place} on {date}.",
            "Join us for {title} on {date} in {place}! We expect {guests} guests.",
        ),
    ),
    Schema(
        "book",
        {"title": _title, "author": person, "year": lambda rng: between(rng, 1900, 2030)},
        (
            '"{title}" was written by {author} in {year}.',
            "{author} published the book {title} in {year}.",
            "In {year} appeared {title}, a novel by {author}.",
        ),
    ),
    Schema(
        "contact",
        {"name": person, "email": email, "phone": lambda rng: f"555-{digits(rng, 4)}"},
        (
            "You can reach {name} at {email} or {phone}.",
            "Contact: {name}, phone {phone}, e-mail {email}.",
            "Write to {email} or call {phone} and ask for {name}.",
        ),
    ),
    Schema(
        "product",
        {
            "product": _thing,
            "color": lambda rng: pick(rng, COLORS),
            "price": _price,
            "stock": lambda rng: between(rng, 0, 500),
        },
        (
            "The {color} {product} costs {price} dollars and we have {stock} in stock.",
            "We have {stock} {color} {product}s left, at ${price} each.",
            "Now only ${price}: the {product} in {color}, {stock} available.",
        ),
    ),
    Schema(
        "meeting",
        {
            "person": person,
            "day": lambda rng: pick(rng, WEEKDAYS),
            "time": clock,
            "room": lambda rng: pick(rng, "ABCDEFGH") + digits(rng, 2),
        },
        (
            "Meet {person} on {day} at {time} in room {room}.",
            "The meeting with {person} is in room {room} on {day} at {time}.",
            "{person} will wait for you in {room} at {time} on {day}.",
        ),
    ),
    Schema(
        "payment",
        {
            "sender": person,
            "receiver": person,
            "amount": lambda rng: between(rng, 1, 9999),
            "currency": lambda rng: pick(rng, CURRENCIES),
        },
        (
            "{sender} paid {amount} {currency} to {receiver}.",
            "{receiver} received {amount} {currency} from {sender}.",
            "A transfer of {amount} {currency} was made by {sender} in favour of {receiver}.",
        ),
    ),
    Schema(
        "sensor",
        {
            "sensor": word,
            "value": lambda rng: between(rng, -40, 120),
            "active": lambda rng: rng.random() < 0.5,
        },
        (
            "Sensor {sensor} reads {value}; active: {active}.",
            "The {sensor} sensor shows {value} degrees (active = {active}).",
        ),
    ),
    Schema(
        "人",
        {
            "姓名": lambda rng: pick(rng, ZH_NAMES),
            "年龄": lambda rng: between(rng, 18, 90),
            "城市": lambda rng: pick(rng, ZH_CITIES),
            "职业": lambda rng: pick(rng, ZH_JOBS),
        },
        (
            "{姓名}今年{年龄}岁，住在{城市}，是一名{职业}。",
            "{姓名}是{城市}的{职业}，{年龄}岁。",
            "来自{城市}的{职业}{姓名}今年{年龄}岁了。",
        ),
        chinese=True,
    ),
    Schema(
        "订单",
        {
            "顾客": lambda rng: pick(rng, ZH_NAMES),
            "商品": lambda rng: pick(rng, ZH_ITEMS),
            "数量": lambda rng: between(rng, 1, 99),
            "价格": lambda rng: between(rng, 1, 999),
        },
        (
            "{顾客}买了{数量}个{商品}，花了{价格}元。",
            "{顾客}用{价格}元订购了{数量}个{商品}。",
        ),
        chinese=True,
    ),
)
_ASKS = {
    False: (
        "Extract {keys} as JSON.\n\n{text}",
        "Extract the fields {keys} from this text as a JSON object:\n{text}",
        "{text}\n\nReturn a JSON object with the keys {keys}.",
        "Text: {text}\nAnswer with JSON only. Keys: {keys}.",
        "Turn this into JSON with {keys}: {text}",
        "{text}\nGive me {keys} in JSON.",
    ),
    True: (
        "从下面的句子中提取{keys}，用JSON回答。\n{text}",
        "{text}\n请用JSON给出{keys}。",
        "把{keys}提取为JSON：{text}",
    ),
}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def extract(rng: Random) -> Item:
    """Draw a sentence and ask for some of its fields as JSON."""
    schema = _SCHEMAS[int(rng.random() * len(_SCHEMAS))]
    record = {name: draw(rng) for name, draw in schema.fields.items()}
    text = pick(rng, schema.sentences).format(**{name: _spoken(value) for name, value in record.items()})
    keys = list(record)
    if rng.random() < 0.4:
        keys = rng.sample(keys, between(rng, 2, len(keys)))
    answer: dict[str, Json] = {key: record[key] for key in keys}
    reply = dumps(answer)
    lead = "字段：" if schema.chinese else "The fields are "
    shown = ", ".join(f"{key} = {dumps(value)}" for key, value in answer.items())
    return Item(
        task="json_extract",
        problems=(f"json:{schema.name}:{dumps(record)}",),
        messages=_question(rng, schema, answer, text),
        reasoning=f"{lead}{shown}{'。' if schema.chinese else '.'}",
        reply=reply,
        kind="json",
        answer=answer,
    )


def _spoken(value: Json) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _question(rng: Random, schema: Schema, answer: dict[str, Json], text: str) -> list[Message]:
    if rng.random() < 0.15:
        properties: Json = {key: {"type": _JSON_TYPES[type(value)]} for key, value in answer.items()}
        wanted = dumps({"type": "object", "properties": properties, "required": list(answer)})
        return [user(f"{text}\n\nReply with JSON that matches this schema: {wanted}")]
    listed = "、".join(answer) if schema.chinese else ", ".join(answer)
    content = pick(rng, _ASKS[schema.chinese]).format(keys=listed, text=text)
    if rng.random() < 0.2:
        return [{"role": "system", "content": "You extract data and answer with JSON."}, user(content)]
    return [user(content)]
