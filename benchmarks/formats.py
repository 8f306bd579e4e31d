"""What each format costs the bundled model: bits a weight, GiB, right answers, bits per byte, tokens/s.

`python benchmarks/formats.py --limit 4` makes a checkpoint with each method in a temporary folder, on a
CPU, and scores it as `pellucid eval` does.  Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from pellucid import LLM, SamplingParams
from pellucid.cli.eval import BUNDLED_ITEMS, answer, tally, text_bits
from pellucid.cli.eval import Bits as TextBits
from pellucid.cli.scoring import read_items
from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import detect
from pellucid.quantize.base import Recipe
from pellucid.quantize.calibration import of_bundled
from pellucid.quantize.run import Quantizer
from pellucid.quantize.stage import Machine
from pellucid.text.tokenizer import Tokenizer

RECIPES = {
    "fp8": Recipe(method="fp8"),
    "fp8-block": Recipe(method="fp8-block"),
    "fp8-static": Recipe(method="fp8-static"),
    "int8": Recipe(method="int8"),
    "smoothquant": Recipe(method="smoothquant"),
    "nf4": Recipe(method="nf4"),
    "mxfp4": Recipe(method="mxfp4"),
    "nvfp4": Recipe(method="nvfp4"),
    **{
        f"{method} of {bits} bits": Recipe(method=method, bits=bits, symmetric=False)
        for bits in (4, 3)
        for method in ("int4", "awq", "gptq")
    },
}
GIB = 1 << 30


def score(model: str, limit: int, num_tokens: int) -> tuple[float, float, float]:
    """(share of right answers, bits per byte, tokens a second of 8 requests)."""
    items, texts = read_items(BUNDLED_ITEMS, [], limit)
    texts = read_items(BUNDLED_ITEMS, ["python_bpb"], None)[1]
    with LLM(model=model, device="cpu") as llm:
        scores = tally(answer(llm, items), [TextBits(t.task, *text_bits(llm, t)) for t in texts])
        sampling = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        best = 0.0
        for _ in range(3):
            began = time.perf_counter()
            llm.generate([[i + 1] for i in range(8)], sampling, use_tqdm=False)
            best = max(best, 8 * num_tokens / (time.perf_counter() - began))
    shares = [each.accuracy for each in scores if each.accuracy is not None]
    bits = next(each.bits_per_byte for each in scores if each.bits_per_byte is not None)
    return sum(shares) / len(shares), bits, best


def main() -> None:
    parser = argparse.ArgumentParser(description="Formats of the bundled model, beside each other.")
    parser.add_argument("--limit", type=int, default=4, help="items a task and thinking mode")
    parser.add_argument("--num-samples", type=int, default=64, help="texts to calibrate with")
    parser.add_argument("--num-tokens", type=int, default=64, help="of each request that is timed")
    parser.add_argument("--only", nargs="*", default=[], help="these formats")
    args = parser.parse_args()
    checkpoint = Checkpoint.open(ModelConfig(model="sprout"))
    assert checkpoint.tokenizer_path is not None
    samples = of_bundled(Tokenizer.load(checkpoint.tokenizer_path), num=args.num_samples, length=1024)
    machine = Machine(detect("cpu"), torch.device("cpu"))
    print("| format | bits a weight | GiB | right answers | bits per byte | tokens/s, CPU |")
    print("|---|---|---|---|---|---|")

    def row(name: str, bits: float, size: int, model: str) -> None:
        right, per_byte, speed = score(model, args.limit, args.num_tokens)
        print(
            f"| {name} | {bits:.2f} | {size / GIB:.4f} | {right:.1%} | {per_byte:.4f} | {speed:,.0f} |",
            flush=True,
        )

    plain = sum(file.stat().st_size for file in checkpoint.files)
    if not args.only:
        row("bfloat16", 16, plain, "sprout")
    for name, recipe in RECIPES.items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = Quantizer(checkpoint, Path(folder) / "out", recipe, samples, machine).run()
            row(name, report.bits, report.bytes, str(Path(folder) / "out"))


if __name__ == "__main__":
    main()
