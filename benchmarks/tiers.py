"""Time to the first token of a prompt that was there before: computed again, from host memory, from disk.

    python benchmarks/tiers.py --model shape:qwen3-8b --input-len 8000 --folder /tmp/kv

Also what share of the plain copy rate a load reaches, and what the tiers cost when nothing is found.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

from pellucid import LLM, SamplingParams
from pellucid.connectors.tiers.host import Tiers
from pellucid.connectors.tiers.worker import Tiers as WorkerTiers

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(100, 4000) for _ in range(length)]}


def seconds(llm: LLM, *prompts: dict[str, list[int]]) -> float:
    began = time.perf_counter()
    llm.generate(list(prompts), FIRST, use_tqdm=False)
    return time.perf_counter() - began


def settle(llm: LLM) -> None:
    """Until no save is under way."""
    engine = llm.llm_engine.engine
    while engine.has_work:
        engine.step()
    time.sleep(0.3)


def halves(llm: LLM) -> tuple[Tiers, WorkerTiers]:
    engine = llm.llm_engine.engine
    host = engine.scheduler.features._features["kv_transfer"].connector
    return host, engine.executor.worker.runner.features._features["kv_transfer"].connector


def forget_cache(llm: LLM) -> None:
    """The engine's own pool, and not the tiers."""
    llm.llm_engine.engine.scheduler.kv.clear()


def plain_rate(device: torch.device) -> float:
    """Bytes a second from pinned memory of the host, by one copy of 1 GiB."""
    if device.type == "cpu":
        return 0.0
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    rates = list[float]()
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(source.nbytes / (time.perf_counter() - began))
    return max(rates)


def measure(llm: LLM, length: int, repeats: int) -> None:
    host, worker = halves(llm)
    seconds(llm, prompt(length, 0))
    settle(llm)
    times: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    rates = list[float]()
    for i in range(1, 1 + repeats):
        asked = prompt(length, i)
        times["computed"].append(seconds(llm, asked))
        settle(llm)
        forget_cache(llm)
        times["host"].append(seconds(llm, asked))
        num_bytes, spent = worker.last_load
        rates.append(num_bytes / spent if spent else 0.0)
        settle(llm)
        if host._has_disk:
            while host._writing:
                time.sleep(0.05)
                llm.llm_engine.engine.step()
            forget_cache(llm)
            host.pool.reset()
            times["disk"].append(seconds(llm, asked))
            settle(llm)
    computed = statistics.median(times["computed"])
    for name, each in times.items():
        if each:
            median = statistics.median(each)
            say(f"first token of {length} tokens, {name:9}{1000 * median:9.1f} ms  x{computed / median:.2f}")
    say(f"{host.stats}")
    plain, rate = plain_rate(worker._pages.device), statistics.median(rates)
    share = f", {rate / plain:.0%} of one plain copy of 1 GiB ({plain / 1e9:.1f} GB/s)" if plain else ""
    say(f"loads {rate / 1e9:.1f} GB/s{share}")


def fresh(llm: LLM, length: int, repeats: int, seed: int) -> list[float]:
    """Seconds for eight prompts that nobody has asked before, and short answers."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    times = list[float]()
    for i in range(repeats + 1):
        asked = [prompt(length, seed + 100 * i + n) for n in range(8)]
        began = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        times.append(time.perf_counter() - began)
    return times[1:]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="sprout")
    parser.add_argument("--input-len", type=int, default=8000)
    parser.add_argument("--size", type=float, default=12.0, help="GiB of host memory")
    parser.add_argument("--folder", help="measure a disk, too")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    options = {"model": args.model, "skip_tokenizer_init": True, "max_model_len": args.input_len + 192}
    tiers: dict[str, object] = {"kv_offloading_size": args.size}
    if args.folder:
        tiers["kv_offloading_path"] = args.folder
    llm = LLM(**options, **tiers)
    measure(llm, args.input_len, args.repeats)
    with_tiers = fresh(llm, args.input_len, args.repeats, 10_000)
    llm.shutdown()
    if args.folder:
        shutil.rmtree(Path(args.folder))
    llm = LLM(**options)
    without = fresh(llm, args.input_len, args.repeats, 50_000)
    llm.shutdown()
    a, b = min(with_tiers), min(without)
    say(f"eight new prompts: {1000 * a:.0f} ms with tiers, {1000 * b:.0f} without: {a / b - 1:+.1%}")


if __name__ == "__main__":
    main()
