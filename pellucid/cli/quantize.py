"""`pellucid quantize MODEL OUT --method M`: a quantized checkpoint, made one decoder layer at a time.

Engine options are for what the model itself does beside: write its own text, and answer the tasks.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from pellucid.cli.console import terminal
from pellucid.cli.eval import BUNDLED_ITEMS, evaluate
from pellucid.cli.options import add_engine_options, engine_options, open_llm
from pellucid.cli.scoring import read_items
from pellucid.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pellucid.models.checkpoint import Checkpoint
    from pellucid.quantize.output import Report
    from pellucid.quantize.run import Samples

METHODS = (
    "fp8, fp8-block, fp8-static, int8, smoothquant, int4, awq, gptq, nf4, mxfp4, nvfp4, "
    "or gguf:TYPE, as gguf:Q4_K_M"
)
INTEGERS = ("int4", "awq", "gptq")
OPTIONS = {  # of a recipe, and the methods that have them
    "bits": INTEGERS,
    "group_size": INTEGERS,
    "symmetric": INTEGERS,
    "act_order": ("gptq",),
    "dialect": ("awq", "gptq"),
}
GIB = 1 << 30
WORST = 10  # layers that are named
EXIT_TOO_FAR = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `quantize` understands."""
    parser.usage = "%(prog)s MODEL OUT --method METHOD [OPTION ...]"
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="the plain model: a folder, hub id, or sprout"
    )
    parser.add_argument("out", nargs="?", metavar="OUT", type=Path, help="folder to make")
    parser.add_argument("--method", metavar="METHOD", help=METHODS)
    parser.add_argument(
        "--bits", type=int, default=argparse.SUPPRESS, help="2 to 8, of int4, awq and gptq (default 4)"
    )
    parser.add_argument(
        "--group-size", type=int, default=argparse.SUPPRESS, metavar="N",
        help="inputs that share a scale, of int4, awq and gptq; 0 is a whole row (default 128)",
    )  # fmt: skip
    parser.add_argument(
        "--symmetric", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
        help="without zeros, of int4, awq and gptq (default yes, of awq no)",
    )  # fmt: skip
    parser.add_argument(
        "--act-order", choices=("static", "group", "none"), default=argparse.SUPPRESS,
        help="gptq takes large inputs first, in groups that stay where they are, or follow (default static)",
    )  # fmt: skip
    parser.add_argument(
        "--dialect", choices=("compressed-tensors",), default=argparse.SUPPRESS,
        help="write awq or gptq as compressed-tensors instead of in their own files",
    )  # fmt: skip
    parser.add_argument(
        "--ignore", nargs="+", action="extend", default=[], metavar="NAME",
        help="layers that stay plain: names, or regular expressions behind re:",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help="text, or JSON lines with text or messages; its last tenth measures bits per byte "
        "(default the bundled model's tasks, or what the model writes itself)",
    )  # fmt: skip
    parser.add_argument(
        "--num-samples", type=int, default=128, metavar="N", help="most samples (default 128)"
    )
    parser.add_argument(
        "--sample-length", type=int, default=2048, metavar="N", help="most tokens of a sample (default 2048)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on in OUT at the first layer that is not there"
    )
    parser.add_argument(
        "--max-error", type=float, default=argparse.SUPPRESS, metavar="X",
        help="exit with 1 if a layer's outputs are off by more, relatively",
    )  # fmt: skip
    parser.add_argument(
        "--eval-limit", type=int, default=10, metavar="N",
        help="items a task and mode that the bundled model answers before and after; 0 none (default 10)",
    )  # fmt: skip
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Quantize, and print what it cost."""
    import torch

    from pellucid.config import EngineConfig
    from pellucid.models.checkpoint import Checkpoint
    from pellucid.platform import detect
    from pellucid.quantize.run import Quantizer
    from pellucid.quantize.stage import Machine

    check(args)
    args.model = args.name
    config = EngineConfig.from_options(engine_options(args))
    checkpoint = Checkpoint.open(config.model)
    recipe, platform = recipe_of(args), detect(config.device.device)
    if config.device.num_threads:
        torch.set_num_threads(config.device.num_threads)
    samples = samples_for(args, checkpoint)
    machine = Machine(platform, torch.device(platform.device))
    quantizer = Quantizer(checkpoint, args.out, recipe, samples, machine)
    with tqdm(total=checkpoint.num_layers, unit="layer", desc=args.method, disable=None) as bar:
        try:
            report = quantizer.run(resume=args.resume, tell=lambda done: show_done(bar, done))
        except OSError as error:  # a full disk, say
            raise ValueError(str(error)) from error
    if is_bundled(args.name) and args.eval_limit:
        report.scores = scores(args)
        report.write(args.out)
    show(report)
    worst = max((each.error or 0.0 for each in report.matrices), default=0.0)
    return EXIT_TOO_FAR if worst > vars(args).get("max_error", float("inf")) else 0


def show_done(bar: tqdm[NoReturn], done: int) -> None:
    bar.update(done - bar.n)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for numbers that make no sense, and for what means nothing here."""
    if args.name is None or args.out is None or args.method is None:
        raise ValueError("say what to make of which model: pellucid quantize MODEL OUT --method gptq")
    given = engine_options(args)
    for name in ("quantization", "model", "load_format"):
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')} means nothing here; MODEL is read as it is")
    for name, least in (("num_samples", 1), ("sample_length", 2), ("eval_limit", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, must be at least {least}")


def recipe_of(args: argparse.Namespace):
    """Raises ValueError for options that the method does not have."""
    from pellucid.quantize.base import Recipe

    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    for name in given:
        if args.method not in OPTIONS[name]:
            option, methods = f"--{name.replace('_', '-')}", ", ".join(OPTIONS[name])
            raise ValueError(f"{option} is of {methods}, not of {args.method}; leave it out")
    return Recipe(method=args.method, ignore=tuple(args.ignore), **given)


def is_bundled(name: str) -> bool:
    from pellucid.models.checkpoint import BUNDLED

    return name in BUNDLED


def samples_for(args: argparse.Namespace, checkpoint: Checkpoint) -> Samples:
    """From the file that is named, the bundled tasks, or by the model itself."""
    from pellucid.quantize import calibration
    from pellucid.text.tokenizer import Tokenizer

    given = vars(args).get("calibration")
    length = min(args.sample_length, checkpoint.max_position_embeddings)
    if given is None and not is_bundled(args.name):
        return written_by(args, length)
    if checkpoint.tokenizer_path is None:
        raise ValueError("--calibration needs a tokenizer; leave --skip-tokenizer-init out")
    tokenizer = Tokenizer.load(checkpoint.tokenizer_path)
    if given is None:
        return calibration.of_bundled(tokenizer, num=args.num_samples, length=length)
    return calibration.of_file(given, tokenizer, num=args.num_samples, length=length)


def written_by(args: argparse.Namespace, length: int) -> Samples:
    """What the model writes behind tokens drawn at random, a tenth more to measure with."""
    from pellucid.quantize import calibration

    num, heldout = args.num_samples, max(1, args.num_samples // calibration.HELDOUT_SHARE)
    with open_llm(args) as llm:
        tokenizer = llm.llm_engine.tokenizer
        length = min(length, llm.llm_engine.capacity.max_model_len)
        special = tokenizer.special_ids if tokenizer else frozenset()
        size = tokenizer.vocab_size if tokenizer else 256
        ordinary = [token for token in range(size) if token not in special]
        draw = random.Random(0)
        prompts = [[draw.choice(ordinary)] for _ in range(num + heldout)]
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=length - 1, ignore_eos=True, detokenize=False, seed=i)
            for i in range(len(prompts))
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=True)
    ids = [prompt + list(out.outputs[0].token_ids) for prompt, out in zip(prompts, outputs, strict=True)]
    return calibration.of_ids("text of the model's own", ids[:num], ids[num:], tokenizer)


def scores(args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Shares of right answers by task and mode, of the model and of what was made of it."""
    items, _ = read_items(BUNDLED_ITEMS, [], args.eval_limit)
    found: list[dict[str, float]] = []
    for model in (args.name, str(args.out)):
        tallied, _ = evaluate(argparse.Namespace(**{**vars(args), "model": model}), items, [])
        found.append({f"{score.task}, {score.mode}": score.accuracy or 0.0 for score in tallied})
    before, after = found
    return {task: (before[task], after[task]) for task in before}


def show(report: Report) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("bits a weight of quantized matrices", "", f"{report.bits:.2f}")
    table.add_row("GiB of all weights", f"{report.plain_bytes / GIB:.3f}", f"{report.bytes / GIB:.3f}")
    if report.bits_per_byte:
        before, after = report.bits_per_byte
        table.add_row("bits per byte of held-out text", f"{before:.4f}", f"{after:.4f}")
    if report.scores:
        before, after = (sum(pair[i] for pair in report.scores.values()) / len(report.scores) for i in (0, 1))
        table.add_row("right answers to the bundled tasks", f"{before:.1%}", f"{after:.1%}")
    terminal().print(table)
    show_worst(report)


def show_worst(report: Report) -> None:
    from rich.table import Table

    known = sorted(
        (each for each in report.matrices if each.error is not None), key=lambda each: -(each.error or 0)
    )
    if not known:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("matrices whose outputs are off most")
    table.add_column("error", justify="right")
    for each in known[:WORST]:
        table.add_row(each.path, f"{each.error:.2%}")
    terminal().print(table)
