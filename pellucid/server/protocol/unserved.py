"""Fields of OpenAI's, vLLM's and their relatives' that nobody here obeys.

A request whose answer they would change is refused: to ignore them would be to answer another request.  What
changes no answer (`metadata`, `store`, `prediction`) is not here.
"""

from __future__ import annotations

from collections.abc import Mapping

STRUCTURED = "say structured_outputs or response_format"
UNSERVED = {  # and what to do instead
    "add_special_tokens": "the chat template has put them where they belong",
    "audio": "answers are text",
    "best_of": "as many answers are made as are returned; leave it out, or let it equal n",
    "chat_template": "templates come with the model or with --chat-template, never from a request",
    "ebnf": STRUCTURED,
    "function_call": "say tool_choice",
    "functions": "say tools",
    "json_schema": STRUCTURED,
    "logprob_token_ids": "logprobs are those of the most likely tokens",
    "mcp_servers": "this server calls no other",
    "modalities": "answers are text",
    "prompt_embeds": "give text or token ids as prompt",
    "regex": STRUCTURED,
    "repetition_detection": "use a repetition_penalty, or max_tokens",
    "thinking_token_budget": "an answer thinks as long as it likes, up to max_tokens",
    "use_beam_search": "tokens are sampled; temperature 0 takes the most likely ones",
    "web_search_options": "this server calls no other",
}
OLDER = "guided_"  # what the names of structured_outputs in vLLM began with
HARMLESS: dict[str, object] = {"function_call": "none", "modalities": ["text"]}


def check_served(extra: Mapping[str, object], *, n: int = 1) -> None:
    """Raise ValueError, beginning with its name, for a field that asks for what nobody does.

    extra: fields that the request's model does not have; None, False and what is empty ask for nothing.
    """
    for name, value in extra.items():
        if name.startswith(OLDER) and value is not None:  # an empty schema is one of anything
            raise ValueError(f"{name} is not supported: {STRUCTURED}")
        if name in UNSERVED and not _is_harmless(name, value, n):
            raise ValueError(f"{name} is not supported: {UNSERVED[name]}")


def _is_harmless(name: str, value: object, n: int) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    return value == n if name == "best_of" else value == HARMLESS.get(name, object())
