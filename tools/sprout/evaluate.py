"""Score an exported model on its held-out sets, greedily, thinking and not, and print a table.

Scoring: `exact`, the text after </think>, stripped, equals the answer; `tool_call`, exactly one call, name and
arguments equal as JSON; `json`, the parsed JSON equals; `text_bpb`, total -log2 p of all tokens but the first,
over UTF-8 bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from chat import Json, Message, prompt_text
from export import load
from generate import generate
from model import Qwen3, packed_attention

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_BATCH_TOKENS = 160_000


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of a held-out file that asks for text."""

    id: str
    task: str
    messages: list[Message]
    tools: list[Json]
    thinking: bool
    kind: str
    answer: Json
    max_tokens: int


def read_problems(folder: Path) -> list[Problem]:
    """Read every chat item of a folder of held-out sets."""
    return [
        Problem(
            line["id"],
            line["task"],
            line["messages"],
            line.get("tools", []),
            line["enable_thinking"],
            line["kind"],
            line["answer"],
            line["max_tokens"],
        )
        for line in _lines(folder)
        if line["kind"] != "text_bpb"
    ]


def read_texts(folder: Path) -> list[str]:
    """Read every text of the bits-per-byte set."""
    return [line["text"] for line in _lines(folder) if line["kind"] == "text_bpb"]


def is_right(kind: str, answer: Json, output: str) -> bool:
    """Apply the scoring rule `kind` to the model's whole output text."""
    final = output.rsplit("</think>", maxsplit=1)[-1].strip()
    if kind == "exact":
        return final == answer
    calls = _CALL.findall(final)
    if kind == "tool_call" and len(calls) != 1:
        return False
    try:
        return json.loads(calls[0] if kind == "tool_call" else final) == answer
    except ValueError:
        return False


class Evaluator:
    """A model with its tokenizer, answering held-out problems in batches."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.model = load(folder, device)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.stops = {self.tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")}

    def prompt_ids(self, problem: Problem) -> list[int]:
        text = prompt_text(problem.messages, problem.tools, thinking=problem.thinking)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def answers(self, problems: list[Problem]) -> Iterator[tuple[Problem, list[int], list[int]]]:
        """Yield each problem with its prompt and greedy output, as token ids."""
        for batch in self._batches(problems):
            prompts = [self.prompt_ids(problem) for problem in batch]
            limits = [problem.max_tokens for problem in batch]
            outputs = generate(self.model, prompts, limits, stops=self.stops, device=self.device)
            yield from zip(batch, prompts, outputs, strict=True)

    def bits_per_byte(self, texts: list[str]) -> float:
        bits, size = 0.0, 0
        for text in texts:
            ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids, device=self.device)
            chances = token_logits(self.model, ids).float().log_softmax(-1)
            bits -= chances[:-1].gather(1, ids[1:, None]).sum().item() / math.log(2)
            size += len(text.encode())
        return bits / size

    def _batches(self, problems: list[Problem]) -> Iterator[list[Problem]]:
        ordered = sorted(problems, key=lambda problem: (len(self.prompt_ids(problem)), problem.max_tokens))
        batch: list[Problem] = []
        for problem in ordered:
            size = len(self.prompt_ids(problem)) + problem.max_tokens
            if batch and size * (len(batch) + 1) > _BATCH_TOKENS:
                yield batch
                batch = []
            batch.append(problem)
        yield batch


@torch.inference_mode()
def token_logits(model: Qwen3, ids: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the logits [T, V] of one text's ids [T]."""
    ends = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
    positions = torch.arange(len(ids), device=ids.device)
    hidden = model(ids, positions, packed_attention(ends, len(ids)), dtype)
    return model.logits(hidden)


def evaluate(
    folder: Path, heldout: Path, device: torch.device, draft: Path | None = None
) -> dict[str, object]:
    """Score the model of `folder`: accuracy by task and mode, bits per byte, and how often `draft` agrees."""
    evaluator = Evaluator(folder, device)
    tally: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    wrong: list[dict[str, object]] = []
    spoken: list[tuple[list[int], list[int]]] = []
    for problem, prompt, ids in evaluator.answers(read_problems(heldout)):
        output = evaluator.tokenizer.decode(ids, skip_special_tokens=False)
        right = is_right(problem.kind, problem.answer, output)
        tally[problem.task, problem.thinking].append(right)
        spoken.append((prompt, ids))
        if not right:
            wrong.append({"id": problem.id, "answer": problem.answer, "output": output})
    metrics: dict[str, object] = {
        "accuracy": {
            f"{task} ({'thinking' if thinking else 'direct'})": sum(rights) / len(rights)
            for (task, thinking), rights in sorted(tally.items())
        },
        "python_bits_per_byte": evaluator.bits_per_byte(read_texts(heldout)),
        "wrong": wrong,
    }
    if draft is not None:
        metrics["draft_agreement"] = agreement(load(draft, device), spoken, device)
        metrics["draft_bits_per_byte"] = Evaluator(draft, device).bits_per_byte(read_texts(heldout))
    return metrics


def agreement(draft: Qwen3, spoken: list[tuple[list[int], list[int]]], device: torch.device) -> float:
    """Give the fraction of the model's own output tokens that the draft would have proposed."""
    agreed = total = 0
    for prompt, output in spoken:
        if output:
            ids = torch.tensor(prompt + output, device=device)
            guesses = token_logits(draft, ids)[len(prompt) - 1 : -1].argmax(-1)
            agreed += int((guesses == ids[len(prompt) :]).sum())
            total += len(output)
    return agreed / max(1, total)


def report(metrics: dict[str, object]) -> str:
    """Lay the metrics out as lines for a terminal."""
    accuracy = metrics["accuracy"]
    assert isinstance(accuracy, dict)
    lines = [f"{name:32s} {value:7.1%}" for name, value in accuracy.items()]
    lines += [f"{name:32s} {value:7.4f}" for name, value in metrics.items() if isinstance(value, float)]
    return "\n".join(lines)


def _lines(folder: Path) -> Iterator[dict]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("pellucid/assets/sprout"))
    parser.add_argument("--heldout", type=Path, default=Path("pellucid/assets/sprout/eval"))
    parser.add_argument("--draft", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="where to write the metrics as JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metrics = evaluate(options.model, options.heldout, device, options.draft)
    sys.stdout.write(report(metrics) + "\n")
    if options.out is not None:
        options.out.write_text(json.dumps(metrics, ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
