"""From requests to prompts: the model's name, its chat template, its tokenizer and its limits, and no engine.

The same in the server's process and in that which reads large requests (`reader.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from pellucid.sampling_params import SamplingParams
from pellucid.server.errors import unknown_model
from pellucid.server.options import ServeOptions
from pellucid.server.parsers.compose import Parsers
from pellucid.server.protocol.openai import ChatRequest, TokenizeRequest
from pellucid.server.tools import ToolUse
from pellucid.text.chat import render_chat
from pellucid.text.prompts import Prompt, TokenPrompt, tokenize_prompts
from pellucid.text.tokenizer import Tokenizer

AS_MANY_AS_FIT = -1
LONG = 100_000  # characters
SPARE = 64  # tokens before those that are kept: a text cut anywhere is spelled otherwise for a while


class Named(Protocol):
    """A request that may name a model."""

    @property
    def model(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What prompts of a served model depend on; can be sent to another process."""

    names: tuple[str, ...]  # of the model; answers carry the first
    has_adapters: bool = False  # names of which come and go: whoever hands requests to the engine knows them
    options: ServeOptions
    tokenizer_path: Path | None
    vocab_size: int
    max_model_len: int
    chat_template: str | None = None  # instead of the model's own
    parsers: Parsers = field(default_factory=Parsers)
    defaults: SamplingParams  # the checkpoint's; max_tokens is None if it says nothing of that


class Renderer:
    """Makes prompts of requests, wherever it is.  Its methods take as long as their texts are long."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None) -> None:
        self.facts = facts
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.  Raises ValueError if it was started without one."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer; give token ids, or start it with tokenizer=FOLDER")
        return self._tokenizer

    @cached_property
    def shows_special_tokens(self) -> bool:
        """Do the parsers read some of them?"""
        ids = map(self.tokenizer.token_to_id, self.facts.parsers.keeps)
        return any(id in self.tokenizer.special_ids for id in ids)

    def check_model(self, request: Named) -> str:
        """The model's name for the answer, or an adapter's.  Raises a 404 for what can be neither."""
        names = self.facts.names
        if not request.model:
            return names[0]
        if request.model not in names and not self.facts.has_adapters:
            raise unknown_model(request.model)
        return request.model

    def default_sampling_params(self) -> SamplingParams:
        """The checkpoint's, with as many tokens as `SamplingParams` has where it says nothing of that."""
        defaults = self.facts.defaults
        return (
            defaults
            if defaults.max_tokens is not None
            else defaults.clone(max_tokens=SamplingParams.max_tokens)
        )

    def render(self, body: ChatRequest | TokenizeRequest) -> str:
        """A chat as the template writes it; encode it without special tokens.

        Raises ValueError for what the template refuses.
        """
        return render_chat(
            self.tokenizer,
            body.messages or (),
            tools=tools_of(body).tools or None,
            chat_template=self.facts.chat_template,
            chat_template_kwargs={**self.facts.options.template_defaults, **body.template_options},
            add_generation_prompt=body.adds_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        )

    def tokenize(self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True) -> list[TokenPrompt]:
        """Prompts that are checked.  Raises ValueError for what the model cannot take."""
        return tokenize_prompts(
            prompts,
            self._tokenizer,
            vocab_size=self.facts.vocab_size,
            max_model_len=self.facts.max_model_len,
            add_special_tokens=add_special_tokens,
        )

    def most_prompt_tokens(self, wish: int, sampling: SamplingParams) -> int:
        """How many tokens a prompt keeps by `truncate_prompt_tokens`.  Raises ValueError if none."""
        if wish == 0:
            raise ValueError("truncate_prompt_tokens is 0, must be at least 1, or -1 for as many as fit")
        if wish != AS_MANY_AS_FIT:
            return wish
        return max(1, self.facts.max_model_len - (sampling.max_tokens or 1))

    def truncated(
        self, prompt: Mapping[str, object], most: int, *, add_special_tokens: bool
    ) -> dict[str, object]:
        """The same prompt with its last `most` tokens; its text is left out if some have gone."""
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if isinstance(text, str):
            end = self._end_of(text, most)
            ids = self.tokenizer.encode(end, add_special_tokens=add_special_tokens)
        if not isinstance(ids, list) or not ids:
            return dict(prompt)  # which is refused in its turn
        if len(ids) <= most:
            return {**prompt, "prompt_token_ids": ids}
        rest = {name: value for name, value in prompt.items() if name != "prompt"}
        return {**rest, "prompt_token_ids": ids[-most:]}

    def shortened(
        self, prompt: Mapping[str, object], most: int, *, add_special_tokens: bool
    ) -> dict[str, object]:
        """The same prompt with its first tokens, `most` with what the tokenizer puts around a text.

        So texts are cut whose vectors are wanted: the last token may be one that was put behind.
        """
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not isinstance(text, str):
            return {**prompt, "prompt_token_ids": ids[:most]} if isinstance(ids, list) else dict(prompt)
        text = text[: self._num_characters(text, most)]
        bare = self.tokenizer.encode(text, add_special_tokens=False)
        whole = self.tokenizer.encode(text) if add_special_tokens else bare
        if len(whole) <= most:
            return {**prompt, "prompt_token_ids": whole}
        around = max(0, len(whole) - len(bare))
        first = next((i for i in range(around + 1) if whole[i : i + len(bare)] == bare), 0)
        kept = [*whole[:first], *bare[: max(0, most - around)], *whole[first + len(bare) :]]
        return {name: value for name, value in prompt.items() if name != "prompt"} | {
            "prompt_token_ids": kept[:most]
        }

    def _end_of(self, text: str, most: int) -> str:
        """What is kept of a long text, and some of what is not."""
        return text[-self._num_characters(text, most) :]

    def _num_characters(self, text: str, most: int) -> int:
        """How many to tokenize for so many tokens, all of a short text: megabytes take a second."""
        if len(text) < LONG or (longest := self.tokenizer.longest_token) is None:
            return len(text)
        return (most + SPARE) * longest


def tools_of(body: ChatRequest | TokenizeRequest) -> ToolUse:
    """The tools that the prompt tells of, whether or not this server finds their calls."""
    return ToolUse.from_request(body.tools, body.tool_choice, parallel_tool_calls=body.parallel_tool_calls)
