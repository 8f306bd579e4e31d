"""What `pellucid bench` runs: prompts of random token ids, and how many tokens each is answered with."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace

NANO_REQUESTS, NANO_SEED, NANO_TOKENS = 256, 0, 10_000
NANO_LENGTHS = (100, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse `128` or `100:1024`.  Raises ArgumentTypeError, as argparse wants it."""
        low, _, high = text.partition(":")
        try:
            lengths = cls(low=int(low), high=int(high or low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no length; write N or LOW:HIGH") from None
        if not 1 <= lengths.low <= lengths.high:
            raise argparse.ArgumentTypeError(f"{text!r} must be at least 1, and LOW at most HIGH")
        return lengths

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        """One of them, all equally likely."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once; request i has prompts[i] and yields exactly output_lens[i] tokens."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of each request."""
        return [(len(prompt), num) for prompt, num in zip(self.prompts, self.output_lens, strict=True)]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def fitted(self, *, vocab_size: int, max_model_len: int) -> Workload:
        """The same lengths, with token ids modulo the vocabulary.

        Raises ValueError if a request is longer than the model's context.
        """
        longest = max(prompt + output for prompt, output in self.requests)
        if longest > max_model_len:
            raise ValueError(
                f"workload {self.name} has a request of {longest:,} tokens, max_model_len is "
                f"{max_model_len:,}; raise --max-model-len, or shorten --input-len and --output-len"
            )
        return replace(self, prompts=[[token % vocab_size for token in prompt] for prompt in self.prompts])

    def warm_up(self, max_tokens: int) -> Workload:
        """The first requests, together about `max_tokens` prompt tokens, with a few output tokens each."""
        num = total = 0
        while num < len(self.prompts) and total < max_tokens:
            total += len(self.prompts[num])
            num += 1
        return Workload("warm-up", self.prompts[:num], [min(4, length) for length in self.output_lens[:num]])


def nano() -> Workload:
    """The benchmark that nano-vllm publishes: 256 requests, 142,827 prompt and 133,966 output tokens.

    The order of the draws is part of it: each request's length, then its tokens; all output lengths last.
    """
    rng = random.Random(NANO_SEED)
    prompts = [_tokens(rng, rng.randint(*NANO_LENGTHS)) for _ in range(NANO_REQUESTS)]
    return Workload("nano", prompts, [rng.randint(*NANO_LENGTHS) for _ in range(NANO_REQUESTS)])


def random_lengths(name: str, num: int, inputs: Lengths, outputs: Lengths, seed: int) -> Workload:
    """`num` requests with lengths drawn from two ranges."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, inputs.draw(rng)) for _ in range(num)]
    return Workload(name, prompts, [outputs.draw(rng) for _ in range(num)])


def _tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randint(0, NANO_TOKENS) for _ in range(num)]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The lengths that a workload has unless the user says otherwise."""

    num_requests: int
    inputs: Lengths
    outputs: Lengths


RECIPES = {
    "random": Recipe(256, Lengths(low=100, high=1024), Lengths(low=100, high=1024)),
    "prefill": Recipe(16, Lengths(low=8000, high=8000), Lengths(low=1, high=1)),
    "latency": Recipe(1, Lengths(low=128, high=128), Lengths(low=256, high=256)),
}
WORKLOADS = ("nano", "random", "prefill")
TABLE_SIZES = (1, 32, 256)  # the batches of `bench table`


def choose(args: argparse.Namespace, seed: int) -> list[Workload]:
    """The workloads that the bench command's arguments ask for."""
    if args.measure == "table":
        latencies = [_from_recipe("latency", None, seed, num_requests=size) for size in TABLE_SIZES]
        return [nano(), *latencies, _from_recipe("prefill", None, seed)]
    if args.measure == "latency":
        return [_from_recipe("latency", args, seed, num_requests=size) for size in args.batch_size]
    if args.workload != "nano":
        return [_from_recipe(args.workload, args, seed, num_requests=args.num_requests)]
    given = [name for name in ("num_requests", "input_len", "output_len") if getattr(args, name) is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ValueError(f"nano is fixed, {flag} cannot change it; use throughput --workload random")
    return [nano()]


def _from_recipe(
    name: str, args: argparse.Namespace | None, seed: int, *, num_requests: int | None = None
) -> Workload:
    """args: whose lengths go before the recipe's, if they are given."""
    recipe = RECIPES[name]
    num = recipe.num_requests if num_requests is None else num_requests
    title = f"{name} B={num}" if name == "latency" else name
    inputs = (args.input_len if args else None) or recipe.inputs
    outputs = (args.output_len if args else None) or recipe.outputs
    return random_lengths(title, num, inputs, outputs, seed)


def positive(text: str) -> int:
    """Parse a whole number above 0.  Raises ArgumentTypeError, as argparse wants it."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)
