"""What `pellucid bench serve` sends: lanes of requests, ready as bytes.

A `Load` is small and says everything; each client process builds its own part of the same load from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import msgspec

from pellucid.cli.workloads import Lengths

# Token ids that are plain text in every vocabulary: above the special tokens that some begin with, and below
# the 4,096 tokens of the bundled model's.
FIRST_TOKEN, LAST_TOKEN = 1000, 4000
COUNTINGS = ("usage", "ids", "end")
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MOST_LONG = 1000  # prompts that the mixed workload has ready
LONG_OUTPUT = 16  # tokens that each of them asks for


@dataclass(frozen=True, slots=True)
class LoadRecipe:
    """What a workload is unless the user says otherwise.  limit: requests at a time; None is all at once."""

    num_requests: int
    inputs: Lengths
    outputs: Lengths
    limit: int | None
    text: str


def _recipe(num: int, inputs: int, outputs: int, limit: int | None, text: str) -> LoadRecipe:
    return LoadRecipe(num, Lengths(low=inputs, high=inputs), Lengths(low=outputs, high=outputs), limit, text)


LOADS = {
    "random": _recipe(256, 512, 128, None, "token ids at random"),
    "shared-prefix": _recipe(256, 128, 128, None, "the same, behind one of a few long prefixes"),
    "chat": _recipe(256, 1, 1, None, "bundled conversations, which end by themselves"),
    "idle": _recipe(64, 128, 16, 1, "single requests, one after another"),
    "load": _recipe(768, 512, 256, 256, "many streams at a time"),
    "mixed": _recipe(128, 64, 512, 32, "streams while long prompts arrive"),
}
FIXED_PACE = ("idle", "mixed")  # a rate would make something else of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How requests are written.

    counting: what is asked for to count tokens by: "usage" in chunks, "ids" in chunks, or usage at the "end".
    extra: fields of every request; those that are None are left out.
    """

    model: str
    endpoint: str = "completions"
    counting: str = "usage"
    temperature: float = 0.6
    extra: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run."""

    workload: str
    num_requests: int
    inputs: Lengths
    outputs: Lengths
    wire: Wire
    request_rate: float | None = None  # a second, with exponential gaps
    max_concurrency: int | None = None
    num_prefixes: int = 8
    prefix_len: int = 1024
    long_len: int = 8000  # tokens of mixed's long prompts
    long_every: float = 0.25  # seconds between two of them
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens, prompt and answer, of the longest request; chats end where they end."""
        match self.workload:
            case "chat":
                return 0
            case "shared-prefix":
                return self.prefix_len + self.inputs.high + self.outputs.high
            case "mixed":
                return max(self.long_len + LONG_OUTPUT, self.inputs.high + self.outputs.high)
        return self.inputs.high + self.outputs.high

    @property
    def setting(self) -> str:
        """What tells it from others of a sweep."""
        rate = "" if self.request_rate is None else f"{self.request_rate:g}/s"
        limit = "" if self.max_concurrency is None else f"{self.max_concurrency} at a time"
        return ", ".join(filter(None, [rate, limit])) or "all at once"

    def parts(self, num: int) -> int:
        """How many of `num` processes can share it."""
        return min(num, self.max_concurrency or num, self.num_requests)


@dataclass(frozen=True, slots=True)
class Order:
    """A request to send.  at: seconds after the start; None is as soon as there is room."""

    route: str
    body: bytes
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Requests that are counted together.

    limit: most under way at a time.  is_background: sends as long as other lanes have something to do.
    """

    name: str
    orders: list[Order]
    limit: int | None = None
    is_background: bool = False


def build_lanes(load: Load, part: int = 0, num_parts: int = 1) -> list[Lane]:
    """Part `part` of a load: every `num_parts`-th request, and that share of what is under way."""
    mine = range(part, load.num_requests, num_parts)
    times = _arrivals(load)
    orders = [
        Order(ENDPOINTS[endpoint], msgspec.json.encode(body), times[i])
        for i in mine
        for endpoint, body in [_body(load, i)]
    ]
    limit = load.max_concurrency
    if limit is not None:
        limit = limit // num_parts + (part < limit % num_parts)
    lanes = [Lane(name="streams" if load.workload == "mixed" else "", orders=orders, limit=limit)]
    if load.workload == "mixed":
        lanes.append(_long_prompts(load, part, num_parts))
    return lanes


def warm_up(load: Load, num: int) -> list[Lane]:
    """A few requests of other tokens, one after another."""
    orders = [
        Order(ENDPOINTS[endpoint], msgspec.json.encode(body))
        for i in range(num)
        for endpoint, body in [_body(load, load.num_requests + MOST_LONG + i)]
    ]
    return [Lane(name="", orders=orders, limit=1)]


def _arrivals(load: Load) -> list[float | None]:
    """When each request is due: a Poisson process, which is the same for every part."""
    if load.request_rate is None:
        return [None] * load.num_requests
    rng, now, times = random.Random(load.seed), 0.0, list[float | None]()
    for _ in range(load.num_requests):
        times.append(now)
        now += rng.expovariate(load.request_rate)
    return times


def _long_prompts(load: Load, part: int, num_parts: int) -> Lane:
    orders = [
        Order(
            ENDPOINTS[load.wire.endpoint],
            msgspec.json.encode(
                _written(load.wire, _tokens(_rng(load, load.num_requests + i), load.long_len), LONG_OUTPUT)
            ),
            (i + 1) * load.long_every,
        )
        for i in range(part, MOST_LONG, num_parts)
    ]
    return Lane(name="long prompts", orders=orders, is_background=True)


def _body(load: Load, i: int) -> tuple[str, dict[str, object]]:
    """Endpoint and fields of request i."""
    if load.workload == "chat":
        return "chat", _chat(load.wire, i)
    rng = _rng(load, i)
    prompt = _tokens(rng, load.inputs.draw(rng))
    if load.workload == "shared-prefix":
        # Prefixes are numbered from -1 down, requests from 0 up.
        prompt = [*_tokens(_rng(load, -1 - i % load.num_prefixes), load.prefix_len), *prompt]
    return load.wire.endpoint, _written(load.wire, prompt, load.outputs.draw(rng))


def _rng(load: Load, i: int) -> random.Random:
    return random.Random(f"{load.seed} {i}")


def _tokens(rng: random.Random, num: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=num)


def _written(wire: Wire, prompt: list[int], num_output: int) -> dict[str, object]:
    """A request for exactly `num_output` tokens.  A chat is text: as many short words."""
    fields: dict[str, object] = {"max_tokens": num_output, "ignore_eos": True}
    if wire.endpoint == "chat":
        text = " ".join([f"{token % 676 // 26 + 10:x}{chr(97 + token % 26)}" for token in prompt])
        return _request(wire, {"messages": [{"role": "user", "content": text}], **fields})
    return _request(wire, {"prompt": prompt, **fields})


def _request(wire: Wire, fields: dict[str, object]) -> dict[str, object]:
    common: dict[str, object] = {
        "model": wire.model,
        "temperature": wire.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if wire.counting == "ids":
        common["return_token_ids"] = True
    elif wire.counting == "usage":
        common["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    request = {**common, **fields, **wire.extra}
    return {name: value for name, value in request.items() if value is not None}


def _chat(wire: Wire, i: int) -> dict[str, object]:
    items = _conversations()
    item = items[i % len(items)]
    fields: dict[str, object] = {"messages": item["messages"], "max_tokens": item["max_tokens"]}
    if "tools" in item:
        fields["tools"] = item["tools"]
    fields["chat_template_kwargs"] = {"enable_thinking": item["enable_thinking"]}
    return _request(wire, fields)


@cache
def _conversations() -> list[dict[str, object]]:
    """The bundled model's held-out conversations, in an order that mixes their kinds."""
    found = list(_read_conversations())
    random.Random(0).shuffle(found)
    return found


def _read_conversations() -> Iterator[dict[str, object]]:
    folder = files("pellucid") / "assets" / "sprout" / "eval"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        for line in file.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            if "messages" in item:
                yield item
