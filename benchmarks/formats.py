"""What each format costs the bundled model: bits a weight, GiB, right answers, bits per byte; and its speed.

`python benchmarks/formats.py --limit 4` makes a checkpoint with each method in a temporary folder, on a
CPU, and scores it as `pellucid eval` does.  Prints a table in Markdown.

`OMP_NUM_THREADS=1 python benchmarks/formats.py --speed` times one request of Qwen3-0.6B's shape on one core,
weights random, and of GGUF files that are named behind it: the median step, of the time that the process has
the core, so that others who use it disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
        f"gguf:{kind}": Recipe(method=f"gguf:{kind}") for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
    },
    **{
        f"{method} of {bits} bits": Recipe(method=method, bits=bits, symmetric=False)
        for bits in (4, 3)
        for method in ("int4", "awq", "gptq")
    },
}
GIB = 1 << 30


STORED = {  # speeds: what config.json says of weights, by the names above; of all linear layers
    "fp8": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "fp8-block": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
    "int8": {"type": "int", "num_bits": 8, "strategy": "channel"},
    "int4, awq, gptq of 4 bits": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128},
    "nvfp4": {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32},
}
FILES = {  # and how files hold them
    "int8": "int-quantized",
    "int4, awq, gptq of 4 bits": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}
SHAPE = "shape:qwen3-0.6b"


def score(model: str, limit: int) -> tuple[float, float]:
    """(share of right answers, bits per byte)."""
    items, texts = read_items(BUNDLED_ITEMS, [], limit)
    texts = read_items(BUNDLED_ITEMS, ["python_bpb"], None)[1]
    with LLM(model=model, device="cpu") as llm:
        scores = tally(answer(llm, items), [TextBits(t.task, *text_bits(llm, t)) for t in texts])
    shares = [each.accuracy for each in scores if each.accuracy is not None]
    bits = next(each.bits_per_byte for each in scores if each.bits_per_byte is not None)
    return sum(shares) / len(shares), bits


def speed(model: str, steps: int, **options: object) -> float:
    """Tokens a second of one request."""
    with LLM(model, device="cpu", dtype="bfloat16", max_model_len=512, max_num_seqs=1, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        times: list[float] = []
        for _ in range(2):
            llm.llm_engine.add_request({"prompt_token_ids": list(range(9, 25))}, sampling)
            while llm.llm_engine.has_unfinished_requests():
                began = time.process_time()
                llm.llm_engine.step()
                times.append(time.process_time() - began)
    return 1 / statistics.median(times[steps:])


def speeds(files: list[str], steps: int) -> None:
    assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1"
    print("| format | tokens/s |\n|---|---|")
    dummy = {"load_format": "dummy"}
    print(f"| bfloat16 | {speed(SHAPE, steps, **dummy):.1f} |", flush=True)
    config = dict(Checkpoint.open(ModelConfig(model=SHAPE, load_format="dummy")).config)
    for name, weights in STORED.items():
        groups = {"all": {"targets": ["Linear"], "weights": weights}}
        said = {"format": FILES.get(name, "float-quantized"), "config_groups": groups, "ignore": ["lm_head"]}
        said["quant_method"] = "compressed-tensors"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
            options = dummy | {"skip_tokenizer_init": True}
            print(f"| {name} | {speed(folder, steps, **options):.1f} |", flush=True)
    print(f"| nf4 | {speed(SHAPE, steps, quantization='nf4', **dummy):.1f} |", flush=True)
    for file in files:
        print(f"| {Path(file).stem} | {speed(file, steps, skip_tokenizer_init=True):.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Formats of the bundled model, beside each other.")
    parser.add_argument("--limit", type=int, default=4, help="items a task and thinking mode")
    parser.add_argument("--num-samples", type=int, default=64, help="texts to calibrate with")
    parser.add_argument("--num-tokens", type=int, default=32, help="of each request that is timed")
    parser.add_argument("--speed", nargs="*", metavar="GGUF", help="times instead, and of these files")
    parser.add_argument("--only", nargs="*", default=[], help="these formats")
    args = parser.parse_args()
    if args.speed is not None:
        speeds(args.speed, args.num_tokens)
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
