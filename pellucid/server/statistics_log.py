"""A line of statistics every some seconds, as vLLM writes it, while anything is going on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from pellucid.async_llm import AsyncLLM
from pellucid.observe.statistics import EngineStats

logger = logging.getLogger(__name__)


async def log_statistics(llm: AsyncLLM, interval: float) -> None:
    """Write for ever.  interval: seconds."""
    before, since = llm.stats_per_engine, time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now = time.monotonic()
        for line in lines(before, llm.stats_per_engine, now - since):
            logger.info("%s", line)
        before, since = llm.stats_per_engine, now


def lines(before: Sequence[EngineStats], after: Sequence[EngineStats], seconds: float) -> list[str]:
    """One for each engine that has done or has to do anything, and one more if it has drafted."""
    found: list[str] = []
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if new.num_steps == old.num_steps and not new.num_running + new.num_waiting:
            continue
        num_prompt = new.num_prompt_tokens - old.num_prompt_tokens
        num_cached = new.num_cached_tokens - old.num_cached_tokens
        num_sampled = new.num_sampled_tokens - old.num_sampled_tokens
        found.append(
            f"Engine {index:03}: Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {num_sampled / seconds:.1f} tokens/s, "
            f"Running: {new.num_running} reqs, Waiting: {new.num_waiting} reqs, "
            f"GPU KV cache usage: {100 * new.kv_usage:.1f}%, "
            f"Prefix cache hit rate: {100 * num_cached / max(1, num_prompt):.1f}%"
        )
        num_drafts = new.num_drafts - old.num_drafts
        if num_drafts:
            num_draft = new.num_draft_tokens - old.num_draft_tokens
            num_accepted = new.num_accepted_tokens - old.num_accepted_tokens
            pairs = zip(new.num_accepted_per_position, old.num_accepted_per_position, strict=True)
            rates = [(after - before) / num_drafts for after, before in pairs]
            found.append(
                f"SpecDecoding metrics: Drafts by: {new.proposer}, "
                f"Mean acceptance length: {1 + num_accepted / num_drafts:.2f}, "
                f"Accepted: {num_accepted} tokens, Drafted: {num_draft} tokens, "
                f"Avg Draft acceptance rate: {100 * num_accepted / max(1, num_draft):.1f}%, "
                f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}, "
                + _choice(old, new)
            )
    return found


def _choice(old: EngineStats, new: EngineStats) -> str:
    """How many drafts were chosen, and what that has saved."""
    num_steps = max(1, new.num_steps - old.num_steps)
    share = (new.num_verifying_steps - old.num_verifying_steps) / num_steps
    mean = (new.num_draft_tokens - old.num_draft_tokens) / (new.num_drafts - old.num_drafts)
    saved = new.draft_seconds_saved - old.draft_seconds_saved
    return f"Steps with drafts: {100 * share:.1f}%, of {mean:.2f} a request, Saved: {saved:.2f} s"
