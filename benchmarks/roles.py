"""What long prompts do to streams beside them: engines that do all, and engines with roles.

Streams decode all the time; prompts come at a steady rate, each for a few tokens.  Times between a stream's
tokens, without prompts and with them; the first line is for two GPUs:

    python benchmarks/roles.py --kv-buffer-device cuda --max-num-seqs 64  # of Qwen3-8B, from GPU to GPU
    python benchmarks/roles.py --model sprout --device cpu --prompt-tokens 400 --streams 2 --seconds 6
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence

from pellucid import LLM, SamplingParams
from pellucid.llm_engine import LLMEngine
from pellucid.text.outputs import OutputKind

LAYOUTS = {
    "two engines that do all": {"data_parallel_size": 2},
    "one for prompts, one that decodes": {"prefill_engines": 1, "decode_engines": 1},
}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def measure(engine: LLMEngine, given: argparse.Namespace, *, has_prompts: bool) -> tuple[list[float], int]:
    """Seconds between tokens of streams; how many prompts were answered meanwhile."""
    rng = random.Random(0)
    long, short = (
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (given.stream_tokens, 2)
    )

    def prompt(num: int) -> dict[str, object]:
        return {"prompt_token_ids": [rng.randrange(100, 1000) for _ in range(num)]}

    def add(words: dict[str, object], sampling: SamplingParams) -> str:
        return engine.add_request(words, sampling, kind=OutputKind.DELTA)  # type: ignore[arg-type]

    num_prompts = int(given.seconds / given.every) + 1 if has_prompts else 0
    prompts = [prompt(given.prompt_tokens) for _ in range(num_prompts)]  # to draw them takes milliseconds
    streams = dict.fromkeys((add(prompt(16), long) for _ in range(given.streams)), 0.0)
    gaps, num_answered, begun = list[float](), 0, time.perf_counter()
    until, next_prompt = begun + given.seconds, begun + 1.0
    while (now := time.perf_counter()) < until:
        if prompts and now >= next_prompt:
            add(prompts.pop(), short)
            next_prompt += given.every
        for output in engine.step():
            now = time.perf_counter()
            if output.request_id not in streams:
                num_answered += output.finished
                continue
            if last := streams[output.request_id]:
                gaps.append(now - last)
            streams[output.request_id] = now
            if output.finished:  # another one in its place
                del streams[output.request_id]
                streams[add(prompt(16), long)] = 0.0
    for name in streams:
        engine.abort(name)
    while not engine.is_finished():
        engine.step()
    return gaps, num_answered


def loads(counted: Mapping[str, int]) -> str:
    """How KV has moved, by an engine's counters; nothing if none has."""
    if not (num := counted.get("kv_peer_loads", 0)):
        return ""
    num_bytes, whole, copies = (
        counted[f"kv_peer_{name}"] for name in ("bytes_loaded", "load_microseconds", "copy_microseconds")
    )
    return (
        f"{num} loads of {num_bytes / num / 1e6:,.0f} MB, {counted['kv_peer_failed_loads']} failed: "
        f"{whole / num / 1e3:.1f} ms from the question to the engine's knowing of it, "
        f"of which copies {copies / num / 1e3:.1f} ms, {num_bytes / copies / 1e3:.1f} GB/s"
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shape:qwen3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--stream-tokens", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two prompts")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-num-seqs", type=int, help="slots of each engine")
    parser.add_argument(
        "--kv-buffer-device", choices=("cpu", "cuda"), default="cpu", help="where prompts' KV lies meanwhile"
    )
    given = parser.parse_args(args)
    options = {
        "model": given.model, "device": given.device, "max_num_seqs": given.max_num_seqs,
        "max_model_len": given.prompt_tokens + given.stream_tokens,
    }  # fmt: skip
    lends = {"kv_connector": "PeerConnector", "kv_buffer_device": given.kv_buffer_device}
    print(
        f"{'':36s}{'between tokens, ms: p50':>24s}{'p99':>9s}{'most':>9s}{'prompts':>9s}{'p99, of none':>14s}"
    )
    for name, layout in LAYOUTS.items():
        own = {"kv_transfer_config": lends} if "prefill_engines" in layout else {}
        with LLM(**options, **layout, **own) as llm:  # type: ignore[arg-type]
            measure(llm.llm_engine, given, has_prompts=False)
            alone = float("nan")
            for has_prompts in (False, True):
                gaps, num = measure(llm.llm_engine, given, has_prompts=has_prompts)
                shown = [1e3 * each for each in (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps))]
                alone = alone if has_prompts else shown[1]
                title = name + (", prompts" if has_prompts else "")
                figures = f"{shown[0]:16.2f}{shown[1]:9.2f}{shown[2]:9.1f}{num:9d}{shown[1] / alone:14.2f}"
                print(f"{title:44s}{figures}", flush=True)
            if said := loads(llm.llm_engine.stats.of_features):
                print(said, flush=True)


if __name__ == "__main__":
    main()
