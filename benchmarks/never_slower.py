"""What drafts save or cost against none: whole runs by turns, in one process, of engines that live on.

Each turn runs the same requests once without drafts, once with as many as they are worth (`adaptive`), and
once with all in every step; shown are the ratios of the first turn, and of all turns together.

    python benchmarks/never_slower.py                                     # the bundled model on its own tasks
    python benchmarks/never_slower.py --rates 0.8 0.5 0.2 --drafts ngram  # acceptance by chance
    python benchmarks/never_slower.py --model shape:qwen3-8b --rates 0.8 0.5 0.2 --drafts eagle3 --rows 1 32

With several rates there is one more task, in which they take turns in the middle of a run.
On a CPU engines of one process differ by some percent, for where their memory lies: `--twice` builds the one
without drafts first and last, goes by the mean of the two, and shows what they differ by.  One request of the
bundled model takes a sixth of a second: `--seconds 4` has as many turns as tell more than the clock's noise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from pellucid import LLM, SamplingParams
from pellucid.config import ModelConfig
from pellucid.executor.local import LocalExecutor
from pellucid.models.checkpoint import ASSETS, Checkpoint
from pellucid.spec.synthetic import SyntheticVerifier
from pellucid.worker.worker import Worker

SPROUT = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "medusa": {"model": "sprout-medusa", "num_speculative_tokens": 3},
    "eagle3": {"model": "sprout-eagle3", "num_speculative_tokens": 4},
    "mtp": {"method": "mtp", "num_speculative_tokens": 4},
    "draft_model": {"model": "sprout-draft", "num_speculative_tokens": 4},
}
DUMMY = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "eagle3": {"model": "", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "draft_model": {"model": "shape:qwen3-0.6b", "num_speculative_tokens": 4},
}
TASKS = ("random", "python", "copy", "json_extract")
OPENING = 200  # characters of a module that are given
OFF, ADAPTIVE, FIXED, AGAIN = "off", "adaptive", "fixed", "off again"
Prompts = list[list[int]]


@dataclass
class Engine:
    """One that lives on, and what its runs took."""

    llm: LLM
    verifier: object = None
    seconds: list[float] = field(default_factory=list[float])
    lengths: list[float] = field(default_factory=list[float])  # tokens a verification

    @classmethod
    def of(cls, llm: LLM) -> Engine:
        engine: Any = llm.llm_engine.engine
        executor = engine.executor
        assert isinstance(executor, LocalExecutor) and isinstance(executor.worker, Worker)
        launcher: Any = executor.worker.runner.launcher
        return cls(llm, getattr(launcher, "eager", launcher).step.verifier)

    def set_rate(self, rate: float) -> None:
        """Let each draft stand with this chance, if those before it do."""
        if isinstance(self.verifier, SyntheticVerifier):
            self.verifier.rates[:-1] = rate

    def run(self, prompts: Prompts, num_tokens: int, temperature: float) -> None:
        self.llm.reset_prefix_cache()
        params = [
            SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed)
            for seed in range(len(prompts))
        ]
        before, began = self.llm.llm_engine.stats, time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        self.seconds.append(time.perf_counter() - began)
        after = self.llm.llm_engine.stats
        num = after.num_drafts - before.num_drafts
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        self.lengths.append(1 + accepted / num if num else 1.0)


@contextmanager
def switching(engine: Engine, rates: Sequence[float], seconds: float) -> Iterator[None]:
    """Another rate after each of so many seconds, while a run goes on."""
    done = threading.Event()

    def turn() -> None:
        number = 0
        while not done.wait(seconds):
            number += 1
            engine.set_rate(rates[number % len(rates)])

    engine.set_rate(rates[0])
    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main() -> None:
    args = parse()
    if args.clock == "process":
        time.perf_counter = time.process_time  # what the engine goes by, too
    is_sprout = args.model == "sprout"
    known = SPROUT if is_sprout else DUMMY
    sys.stdout.write(
        "| drafts | task | rows | off, ms a token | adaptive, of off: first | all | of the best | fixed | "
        "tokens a verification |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    for name in args.drafts or known:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            config = dict(known.get(name) or {"model": name, "num_speculative_tokens": 4})
            if config.get("model") == "":
                config["model"] = write_eagle3(Path(folder), args.model)
            engines = {}
            kinds = [kind for kind in (OFF, ADAPTIVE, FIXED) if kind == OFF or kind in args.kinds]
            kinds += [AGAIN] * args.twice
            for number, kind in enumerate(kinds, start=1):
                llm = stack.enter_context(LLM(**options(args, config, kind, number / len(kinds))))
                engines[kind] = Engine.of(llm)
            for task in tasks_of(args):
                for num_rows in args.rows:
                    measure(name, task, num_rows, engines, args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--drafts", nargs="+", help=f"of {', '.join(SPROUT)}, or a head's folder")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the bundled model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rates", type=float, nargs="+", help="let drafts stand by chance instead")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--turns", type=int, default=5, help="at least")
    parser.add_argument("--seconds", type=float, default=0.0, help="for so long at least, without drafts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--clock", choices=("wall", "process"), default="wall",
        help="process: the processor's time, for one thread on a machine that others use, too",
    )  # fmt: skip
    parser.add_argument("--twice", action="store_true", help="an engine without drafts at either end")
    parser.add_argument("--kinds", nargs="+", choices=(OFF, ADAPTIVE, FIXED), default=[OFF, ADAPTIVE, FIXED])
    return parser.parse_args()


def options(args: argparse.Namespace, config: dict, kind: str, share: float) -> dict[str, Any]:
    """Of one engine; `share` of the memory is for it and those before it."""
    common: dict[str, Any] = {
        "model": args.model, "device": args.device, "dtype": args.dtype, "num_threads": args.threads,
        "max_num_seqs": max(args.rows), "gpu_memory_utilization": 0.92 * share, "cpu_kv_cache_gib": 1.0,
    }  # fmt: skip
    if args.model != "sprout":
        common |= {"max_model_len": 2048, "load_format": "dummy"}
    if kind in (OFF, AGAIN):
        return common
    own = config | {"adaptive": kind == ADAPTIVE}
    if args.rates:
        num = config["num_speculative_tokens"]
        own |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [args.rates[0] ** (i + 1) for i in range(num)],
        }
    return common | {"speculative_config": own}


def write_eagle3(folder: Path, model: str) -> str:
    """The config of a head of one layer for a model of any size, with the public ones' vocabulary."""
    target = Checkpoint.open(ModelConfig(model=model)).config
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "rope_theta", "vocab_size", "max_position_embeddings", "hidden_act",
    )  # fmt: skip
    config = {name: target[name] for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": 32000, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tasks_of(args: argparse.Namespace) -> list[str]:
    if not args.rates:
        return args.tasks
    several = ["switching"] if len(args.rates) > 1 else []
    return [*(f"chance {rate:g}" for rate in args.rates), *several]


def prompts_of(llm: LLM, task: str, num: int) -> Prompts:
    """Openings of modules, questions without thinking, or random ids."""
    name = "python_bpb" if task == "python" else task
    file = ASSETS / "sprout" / "eval" / f"{name}.jsonl"
    if not file.is_file():
        rng = random.Random(num)
        most = min(4000, llm.llm_engine.vocab_size)
        return [[rng.randrange(10, most) for _ in range(64)] for _ in range(num)]
    items = list(map(json.loads, file.read_text(encoding="utf-8").splitlines()))
    if task == "python":
        texts = [item["text"][:OPENING] for item in items]
        prompts = [llm.get_tokenizer().encode(text) for text in texts]
    else:
        asked = [item for item in items if not item["enable_thinking"]]
        prompts = [
            llm.llm_engine.tokenize_chat(
                item["messages"], tools=item.get("tools"), chat_template_kwargs={"enable_thinking": False}
            ).token_ids
            for item in asked
        ]
    return [list(prompts[i % len(prompts)]) for i in range(num)]


def measure(
    name: str, task: str, num_rows: int, engines: dict[str, Engine], args: argparse.Namespace
) -> None:
    prompts = prompts_of(engines[OFF].llm, task, num_rows)
    # By chance or at random a text says nothing; greedy ones would go in circles.
    temperature = 1.0 if task == "random" or args.rates else args.temperature
    for engine in engines.values():
        engine.seconds.clear()
        engine.lengths.clear()
    for turn in count():
        if turn >= args.turns and sum(engines[OFF].seconds) >= args.seconds:
            break
        kinds = list(engines)
        for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
            engine = engines[kind]
            if task == "switching":
                expected = statistics.median(engines[OFF].seconds or [1.0])
                with switching(engine, args.rates, expected / 4):
                    engine.run(prompts, args.tokens, temperature)
                continue
            if args.rates:
                engine.set_rate(float(task.removeprefix("chance ")))
            engine.run(prompts, args.tokens, temperature)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    print_row(name, task, num_rows, engines, args.tokens)


def print_row(name: str, task: str, num_rows: int, engines: dict[str, Engine], num_tokens: int) -> None:
    off = engines[OFF].seconds
    if AGAIN in engines:
        again = engines[AGAIN].seconds
        sys.stdout.write(f"without drafts, the last engine by the first: {sum(again) / sum(off):.3f}\n")
        off = [statistics.mean(pair) for pair in zip(off, again, strict=True)]
    cells = [name, task, str(num_rows), f"{1000 * statistics.median(off) / num_tokens:.3f}"]

    whole = {kind: sum(off) / sum(engine.seconds) for kind, engine in engines.items()}
    adaptive, fixed = whole.get(ADAPTIVE), whole.get(FIXED)
    if adaptive is None:
        cells += ["-"] * 3
    else:
        first = off[0] / engines[ADAPTIVE].seconds[0]
        cells += [f"{ratio:.3f}" for ratio in (first, adaptive, adaptive / max(1.0, fixed or 1.0))]
    cells.append("-" if fixed is None else f"{fixed:.3f}")
    last = [engines[kind].lengths for kind in (FIXED, ADAPTIVE) if kind in engines]
    cells.append(f"{statistics.median(last[0]):.2f}" if last else "-")
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
