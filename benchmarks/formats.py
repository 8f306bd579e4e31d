"""What each format costs the bundled model: bits a weight, GiB, right answers, bits per byte; and its speed.

`python benchmarks/formats.py --limit 4` makes a checkpoint with each method in a temporary folder, on a
CPU, and scores it as `pellucid eval` does.  Prints a table in Markdown.

`OMP_NUM_THREADS=1 python benchmarks/formats.py --speed` times one request of Qwen3-0.6B's shape on one core,
weights random, and of GGUF files that are named behind it: the median step, of the time that the process has
the core, so that others who use it disturb less.  `--speed --device cuda` times 1, 32 and 256 requests of
Qwen3-8B's shape, 128 tokens in and 256 out: the better of two whole runs.  Of GGUF's mixes files are written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from gguf_files import write_random

from pellucid import LLM, SamplingParams
from pellucid.cli.eval import BUNDLED_ITEMS, answer, tally, text_bits
from pellucid.cli.eval import Bits as TextBits
from pellucid.cli.scoring import read_items
from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from pellucid.platform import detect
from pellucid.quantize.base import METHODS, Recipe
from pellucid.quantize.calibration import of_bundled
from pellucid.quantize.dialects import config_of
from pellucid.quantize.gguf import MIXES
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
    **{f"gguf:{mix}": Recipe(method=f"gguf:{mix}") for mix in MIXES},
    **{
        f"{method} of {bits} bits": Recipe(method=method, bits=bits, symmetric=False)
        for bits in (4, 3)
        for method in ("int4", "awq", "gptq")
    },
}
GIB = 1 << 30


TIMED = {  # by config.json's words for them, with random weights
    **{name: RECIPES[name] for name in ("fp8", "fp8-block", "fp8-static", "int8", "nf4", "mxfp4", "nvfp4")},
    **{f"int4, awq, gptq of {n} bits": Recipe(method="int4", bits=n, symmetric=True) for n in (4, 3)},
}
SHAPES = {"cpu": "shape:qwen3-0.6b", "cuda": "shape:qwen3-8b"}
NUM_IN, NUM_OUT = 128, 256  # tokens of requests on a GPU
Speed = Callable[..., list[float]]  # tokens a second of a model, by options of the engine


def score(model: str, limit: int) -> tuple[float, float]:
    """(share of right answers, bits per byte)."""
    items, texts = read_items(BUNDLED_ITEMS, [], limit)
    texts = read_items(BUNDLED_ITEMS, ["python_bpb"], None)[1]
    with LLM(model=model, device="cpu") as llm:
        scores = tally(answer(llm, items), [TextBits(t.task, *text_bits(llm, t)) for t in texts])
    shares = [each.accuracy for each in scores if each.accuracy is not None]
    bits = next(each.bits_per_byte for each in scores if each.bits_per_byte is not None)
    return sum(shares) / len(shares), bits


def speed_on_cpu(model: str, num_tokens: int, **options: object) -> list[float]:
    """Tokens a second of one request."""
    with LLM(model, device="cpu", dtype="bfloat16", max_model_len=512, max_num_seqs=1, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        times: list[float] = []
        for _ in range(2):
            llm.llm_engine.add_request({"prompt_token_ids": list(range(9, 25))}, sampling)
            while llm.llm_engine.has_unfinished_requests():
                began = time.process_time()
                llm.llm_engine.step()
                times.append(time.process_time() - began)
    return [1 / statistics.median(times[num_tokens:])]


def speed_on_gpu(model: str, nums: Sequence[int], **options: object) -> list[float]:
    """Tokens a second of so many requests, prompts and all."""
    sampling = SamplingParams(temperature=0.6, max_tokens=NUM_OUT, ignore_eos=True, detokenize=False)
    rates: list[float] = []
    with LLM(model, device="cuda", dtype="bfloat16", max_model_len=8192, **options) as llm:
        for num in nums:
            prompts = [[10 + i] * NUM_IN for i in range(num)]
            seconds: list[float] = []
            for _ in range(3):  # the first one is to warm up
                llm.reset_prefix_cache()
                began = time.perf_counter()
                llm.generate(prompts, sampling, use_tqdm=False)
                seconds.append(time.perf_counter() - began)
            rates.append(num * NUM_OUT / min(seconds[1:]))
    return rates


def speeds(speed: Speed, shape: str, only: Sequence[str], files: Sequence[str]) -> None:
    def row(name: str, model: str, **options: object) -> None:
        if not only or name in only:
            cells = (f"{rate:,.1f}" for rate in speed(model, **options))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)

    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    row("bfloat16", shape, **dummy)
    config = dict(Checkpoint.open(ModelConfig(model=shape, load_format="dummy")).config)
    for name, recipe in TIMED.items():
        dialect, format = METHODS.load(recipe.kind)(recipe).formats()
        said = {"quantization_config": config_of(dialect, format, recipe, ["lm_head"])}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config | said))
            row(name, folder, **dummy)
    for mix in MIXES:
        if not only or f"gguf:{mix}" in only:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{mix}.gguf"
                write_random(file, shape, mix)
                row(f"gguf:{mix}", str(file), skip_tokenizer_init=True)
    for file in files:
        row(Path(file).stem, file, skip_tokenizer_init=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Formats of the bundled model, beside each other.")
    parser.add_argument("--limit", type=int, default=4, help="items a task and thinking mode")
    parser.add_argument("--num-samples", type=int, default=64, help="texts to calibrate with")
    parser.add_argument("--num-tokens", type=int, default=32, help="of each request that is timed")
    parser.add_argument("--speed", nargs="*", metavar="GGUF", help="times instead, and of these files")
    parser.add_argument("--device", choices=SHAPES, default="cpu", help="of times")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 32, 256], help="requests at once, on a GPU"
    )
    parser.add_argument("--only", nargs="*", default=[], help="these formats")
    args = parser.parse_args()
    if args.speed is not None:
        nums = args.rows if args.device == "cuda" else [1]
        cells = "".join(f" {num} at once |" for num in nums)
        print(f"| tokens a second |{cells}\n|---{'|---' * len(nums)}|")
        speed = partial(speed_on_gpu, nums=nums)
        if args.device == "cpu":
            assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1"
            speed = partial(speed_on_cpu, num_tokens=args.num_tokens)
        speeds(speed, SHAPES[args.device], args.only, args.speed)
        return
    checkpoint = Checkpoint.open(ModelConfig(model="sprout"))
    assert checkpoint.tokenizer_path is not None
    samples = of_bundled(Tokenizer.load(checkpoint.tokenizer_path), num=args.num_samples, length=1024)
    machine = Machine(detect("cpu"), torch.device("cpu"))
    print("| format | bits a weight | GiB | right answers | bits per byte |\n|---|---|---|---|---|")

    def row(name: str, bits: float, size: int, model: str) -> None:
        right, per_byte = score(model, args.limit)
        print(f"| {name} | {bits:.2f} | {size / GIB:.4f} | {right:.1%} | {per_byte:.4f} |", flush=True)

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
