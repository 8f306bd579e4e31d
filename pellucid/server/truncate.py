"""`truncate_prompt_tokens`: a prompt that is too long keeps its last tokens."""

from __future__ import annotations

from collections.abc import Mapping

from pellucid.server.context import Server
from pellucid.types import SamplingParams

AS_MANY_AS_FIT = -1
LONG = 100_000  # characters
SPARE = 64  # tokens before those that are kept: a text cut anywhere is spelled otherwise for a while


def most_prompt_tokens(wish: int, sampling: SamplingParams, server: Server) -> int:
    """How many tokens a prompt keeps.  Raises ValueError if that would be none."""
    if wish == 0:
        raise ValueError("truncate_prompt_tokens is 0, must be at least 1, or -1 for as many as fit")
    if wish != AS_MANY_AS_FIT:
        return wish
    return max(1, server.llm.max_model_len - (sampling.max_tokens or 1))


async def truncated(
    prompt: Mapping[str, object], most: int, server: Server, *, add_special_tokens: bool
) -> dict[str, object]:
    """The same prompt with its last `most` tokens; its text is left out if some have gone."""
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(text, str):
        text = _end_of(text, most, server)
        ids = await server.llm.encode(text, add_special_tokens=add_special_tokens)
    if not isinstance(ids, list) or not ids:
        return dict(prompt)  # which is refused in its turn
    if len(ids) <= most:
        return {**prompt, "prompt_token_ids": ids}
    rest = {name: value for name, value in prompt.items() if name != "prompt"}
    return {**rest, "prompt_token_ids": ids[-most:]}


def _end_of(text: str, most: int, server: Server) -> str:
    """What is kept of a long text, and some of what is not: to tokenize megabytes takes a second."""
    if len(text) < LONG or (longest := server.llm.tokenizer.longest_token) is None:
        return text
    return text[-(most + SPARE) * longest :]
