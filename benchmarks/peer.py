"""KV from another engine of one GPU or CPU: the same tokens, how fast it comes, and what it saves.

Two engines in this process share a device; prompts computed by the first are gone on with at the second.

    python benchmarks/peer.py --model shape:qwen3-8b --prompt-tokens 8000        # on a GPU
    python benchmarks/peer.py --model sprout --prompt-tokens 400 --device cpu --dtype float32
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

import torch

from pellucid import LLM, SamplingParams
from pellucid.connectors.peer import worker as peer_worker
from pellucid.connectors.peer.params import KVParams
from pellucid.text.outputs import OutputKind

NAME = "lender"


class Clock:
    """Seconds and bytes of each load."""

    def __init__(self) -> None:
        self.loads: list[tuple[float, int]] = []
        plain = peer_worker.PeerWorker._load

        def timed(worker: peer_worker.PeerWorker, what: dict[str, object], pages: list[int]) -> float:
            began = time.perf_counter()
            copies = plain(worker, what, pages)
            self.loads.append((time.perf_counter() - began, len(pages) * worker._page_bytes))
            return copies

        peer_worker.PeerWorker._load = timed  # type: ignore[method-assign]


def ask(
    llm: LLM, prompt: list[int], num: int, params: KVParams | None = None
) -> tuple[list[int], float, str]:
    """Tokens, seconds to the first of them, and what the engine calls the request."""
    engine = llm.llm_engine
    sampling = engine.own_sampling(SamplingParams(temperature=0, max_tokens=num, ignore_eos=True))
    (tokens,) = engine.tokenize([{"prompt_token_ids": prompt}])
    began, first, output = time.perf_counter(), 0.0, None
    name = engine.queue(
        tokens, sampling, kind=OutputKind.CUMULATIVE, kv_transfer=None if params is None else params.encode()
    )
    while engine.has_unfinished_requests():
        for output in engine.step():  # noqa: B007
            first = first or time.perf_counter() - began
    assert output is not None and output.error is None, output
    while not engine.is_finished():
        engine.step()
    return output.outputs[0].token_ids, first, name


def copy_rate(num_bytes: int, device: str) -> float:
    """GB/s of one copy from pinned memory to the device."""
    if device == "cpu":
        source = torch.empty(num_bytes, dtype=torch.uint8)
        target, began = torch.empty_like(source), time.perf_counter()
        target.copy_(source)
        return num_bytes / (time.perf_counter() - began) / 1e9
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    best = 1e9
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best / 1e9


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args(args)
    clock = Clock()
    options: dict[str, object] = {"model": given.model, "device": given.device, "dtype": given.dtype}
    options |= {"max_model_len": given.prompt_tokens + 300, "max_num_seqs": 8}
    # A share of the GPU's memory counts what others have there: the second engine's what the first one has.
    shares = [{"gpu_memory_utilization": 0.45}, {"gpu_memory_utilization": 0.9}]
    if given.device == "cpu":
        shares = [{"cpu_kv_cache_gib": 0.1}] * 2
    transfer = {"kv_connector": "PeerConnector", "engine_id": NAME}
    lends = transfer | {"kv_role": "kv_producer"}
    first = LLM(**options, **shares[0], kv_transfer_config=lends)  # type: ignore[arg-type]
    borrows = {"kv_connector": "PeerConnector", "kv_role": "kv_consumer"}
    second = LLM(**options, **shares[1], kv_transfer_config=borrows)  # type: ignore[arg-type]
    rng, same, rows = random.Random(1), 0, list[tuple[float, float]]()
    for _ in range(given.num_prompts + 1):
        prompt = [rng.randrange(100, 1000) for _ in range(given.prompt_tokens)]
        _, _, name = ask(first, prompt, 1, KVParams(do_remote_decode=True))
        expected, _, _ = ask(first, prompt, 64)  # from its own cache
        where = KVParams(do_remote_prefill=True, remote_engine_id=NAME, remote_request_id=name)
        tokens, brought, _ = ask(second, prompt, 64, where)
        second.reset_prefix_cache()
        _, computed, _ = ask(second, prompt, 64)
        second.reset_prefix_cache()
        same += tokens == expected
        rows.append((brought, computed))
    print(f"{same} of {len(rows)} texts equal those of one engine")
    print("prompt        seconds to the first token: brought, computed")
    for brought, computed in rows[1:]:
        print(f"{given.prompt_tokens:6d} {brought:10.4f} {computed:10.4f}")
    for seconds, num_bytes in clock.loads:
        rate, plain = num_bytes / seconds / 1e9, copy_rate(num_bytes, given.device)
        print(
            f"{num_bytes / 1e6:.0f} MB in {1e3 * seconds:.1f} ms: {rate:.1f} GB/s; a plain copy {plain:.1f}"
        )
    first.shutdown()
    second.shutdown()


if __name__ == "__main__":
    main()
