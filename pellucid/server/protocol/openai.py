"""OpenAI's requests, with vLLM's further fields.  What is None or absent takes the checkpoint's default.

Fields that nobody knows are ignored, with one line in the log for each name.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pellucid.sampling_params import SamplingParams
from pellucid.server.protocol.unserved import ALL, OLDER

logger = logging.getLogger(__name__)
MOST_NAMES = 100  # of unknown fields that are logged
INT64 = 2**63

JsonObject = dict[str, object]  # whose values come from JSON, so they are not looked at again, one by one
_ignored: set[str] = set()


def _no_booleans(value: object) -> object:
    """Python counts True as 1, and so would pydantic."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


Integer = Annotated[int, BeforeValidator(_no_booleans), Field(ge=-INT64, lt=INT64)]
Number = Annotated[float, BeforeValidator(_no_booleans)]
# Strict, which refuses booleans without Python looking at each of perhaps a million.
# The first that is wrong is enough: a list of another kind would be wrong a million times.
TokenIds = Annotated[list[Annotated[int, Field(strict=True, ge=-INT64, lt=INT64)]], Field(fail_fast=True)]
# Of these Python does look at each, while all others wait.
TokenSet = Annotated[TokenIds, Field(max_length=2**18)]
TokenBias = Annotated[dict[int, Number], Field(max_length=2**16)]
Words = Annotated[list[str], Field(max_length=2**12, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=2**17, fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class ApiRequest(BaseModel):
    """Any request: known fields are checked, others are let pass."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _note_ignored(self) -> ApiRequest:
        for name in self.model_extra or {}:
            is_refused = name in ALL or name.startswith(OLDER)
            if name not in _ignored and not is_refused and len(_ignored) < MOST_NAMES:
                _ignored.add(name)
                logger.warning("requests bring %.100r, which is ignored", name)
        return self


class StreamOptions(ApiRequest):
    """Whether a stream ends in a chunk of its own with the usage, or every chunk has it."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingRequest(ApiRequest):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Integer | None = None
    stop: str | Words | None = None
    stop_token_ids: TokenSet | None = None
    ignore_eos: bool | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    logit_bias: TokenBias | None = None
    allowed_token_ids: TokenSet | None = None
    bad_words: Words | None = None
    prompt_logprobs: Integer | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    kv_transfer_params: JsonObject | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    user: str | None = None
    request_id: str | None = None  # the header X-Request-Id comes before it

    @property
    def wants_usage(self) -> bool:
        """A last chunk with the usage?"""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """The usage so far in every chunk?"""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, defaults: SamplingParams, **changes: object) -> SamplingParams:
        """`defaults` with what the request says, and then `changes`.  Raises ValueError naming the field."""
        said = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return defaults.clone(**{**said, **changes})


SAMPLING_FIELDS = [
    field.name for field in fields(SamplingParams) if field.name in SamplingRequest.model_fields
]


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: str | TokenIds | Texts | ManyTokenIds
    echo: bool | None = False
    logprobs: Integer | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None


class TemplateRequest(ApiRequest):
    """What becomes of messages in the chat template, whether they are answered or counted."""

    tools: list[JsonObject] | None = None
    tool_choice: Literal["auto", "none", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    documents: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False

    @property
    def adds_generation_prompt(self) -> bool:
        """A new answer, unless the last message is to be continued and nothing else is said."""
        said = self.add_generation_prompt
        return not self.continue_final_message if said is None else said

    @property
    def template_options(self) -> dict[str, object]:
        """Further names for the template; what `chat_template_kwargs` says goes before the other fields."""
        options: dict[str, object] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)  # as most templates have it
        if self.documents is not None:
            options.setdefault("documents", self.documents)
        return options


class ChatRequest(SamplingRequest, TemplateRequest):
    """POST /v1/chat/completions."""

    messages: list[JsonObject] = Field(min_length=1)
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = False
    top_logprobs: Integer | None = None
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    include_reasoning: bool | None = True
    echo: bool | None = False


class TokenizeRequest(TemplateRequest):
    """POST /tokenize: a prompt, or messages as a chat renders them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    messages: list[JsonObject] | None = None


class DetokenizeRequest(ApiRequest):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
