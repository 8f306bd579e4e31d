"""How many of a model's answers stay the same, token for token, when its steps are cut in another way.

Every request is answered alone, and then in company, with drafts, in small prompt chunks.  Noise is a
function of (seed, position), so only rounding can make answers part: sums of products, and of attention over
keys, are added up in another order when a step has another shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import median

from pellucid import LLM, SamplingParams
from pellucid.models.checkpoint import ASSETS

NUM_PROMPTS, NUM_TOKENS = 16, 100
DTYPES, TEMPERATURES = ("float32", "bfloat16"), (0.0, 1.0)
COMPANY = "all at once"
WAYS: dict[str, dict[str, object]] = {  # options of the engine; but in company, one request after another
    COMPANY: {},
    "drafts from the text, k = 4": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "prompt chunks of 32": {"max_num_batched_tokens": 32},
}

Answers = list[list[int]]  # token ids of each request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    columns = ("dtype", "temperature", "compared with alone", "alike", "the others part at token")
    sys.stdout.write(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n")
    for dtype in DTYPES:
        base = {"model": args.model, "device": args.device, "dtype": dtype}
        alone = answer_all({**base, **WAYS[COMPANY]}, at_once=False)
        for way, options in WAYS.items():
            found = answer_all({**base, **options}, at_once=way == COMPANY)
            for temperature, expected, answers in zip(TEMPERATURES, alone, found, strict=True):
                print_row(dtype, temperature, way, parted_at(expected, answers))


def answer_all(options: dict[str, object], *, at_once: bool) -> list[Answers]:
    """All prompts' answers, for each temperature, by a fresh engine without a prefix cache."""
    prompts = read_prompts()
    with LLM(**options, enable_prefix_caching=False, max_num_seqs=NUM_PROMPTS) as llm:
        found: list[Answers] = []
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
                for seed in range(NUM_PROMPTS)
            ]
            if at_once:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            else:
                pairs = zip(prompts, params, strict=True)
                outputs = [llm.generate([text], own, use_tqdm=False)[0] for text, own in pairs]
            found.append([output.outputs[0].token_ids for output in outputs])
        return found


def read_prompts() -> list[str]:
    """Beginnings of the held-out Python modules, of 200 to 950 characters."""
    lines = (ASSETS / "sprout" / "eval" / "python_bpb.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:NUM_PROMPTS]]
    return [text[: 200 + 50 * i] for i, text in enumerate(texts)]


def parted_at(expected: Answers, found: Answers) -> list[int]:
    """The first token, from 1 on, at which an answer is another one, for each that is."""
    parted: list[int] = []
    for ours, theirs in zip(expected, found, strict=True):
        assert len(ours) == len(theirs) == NUM_TOKENS, (len(ours), len(theirs))
        parted += [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b][:1]
    return parted


def print_row(dtype: str, temperature: float, way: str, parted: Sequence[int]) -> None:
    where = f"{min(parted)} to {max(parted)}, median {median(parted):.0f}" if parted else ""
    alike = NUM_PROMPTS - len(parted)
    sys.stdout.write(f"| {dtype} | {temperature:g} | {way} | {alike} of {NUM_PROMPTS} | {where} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
