"""The offline API: `LLM.generate`, `LLM.chat`, `LLM.stream`, with vLLM's names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Self, TypeGuard, TypeVar

import numpy as np
from tqdm import tqdm

from pellucid import collector
from pellucid.config import EngineConfig
from pellucid.interrupts import held_back
from pellucid.judging import chance, joined, judgements
from pellucid.llm_engine import LLMEngine
from pellucid.lora.request import LoRARequest
from pellucid.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringOutput,
    ScoringRequestOutput,
    recipe_of,
    vector_of,
)
from pellucid.progress import tell
from pellucid.sampling_params import SamplingParams
from pellucid.sleep.state import Rests, check_level, check_tags
from pellucid.text.chat import Message
from pellucid.text.outputs import OutputKind
from pellucid.text.prompts import Prompt, TokenPrompt
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import RequestOutput

T = TypeVar("T")


class LLM:
    """A model in this process.  Options are `EngineConfig`'s, such as max_model_len or dtype.

    Raises ValueError, naming the nearest one, for an option that does not exist.
    """

    def __init__(self, model: str = "sprout", **options: object) -> None:
        tell(f"starting {model}")
        config = EngineConfig.from_options({"model": model, **options})
        with collector.paused():  # what a start makes is there to stay
            self.llm_engine = LLMEngine(config)
        self._readers: dict[str, deque[RequestOutput]] = {}  # where each running request's outputs go

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        prompts: text, token ids, dicts, or a list of any mixture of them.  sampling_params: one for all or
        one for each; None takes the checkpoint's recommendation.  lora_request: the adapter, likewise.
        Raises ValueError, before anything runs, for a prompt or a parameter that cannot be served.
        """
        tokens = self.llm_engine.tokenize(as_list(prompts))
        return self._run(tokens, sampling_params, use_tqdm, priority, lora_request)

    def chat(  # noqa: PLR0913  vLLM's
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's chat template.

        chat_template_kwargs: for the template, such as {"enable_thinking": False}.
        """
        if not isinstance(messages, Sequence):
            raise ValueError(
                f"messages is a {type(messages).__name__}, must be a list of messages or of lists"
            )
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokens = [
            self.llm_engine.tokenize_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        return self._run(tokens, sampling_params, use_tqdm, None, lora_request)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer one prompt, or one conversation, piece by piece; every item shows all so far.

        Closing the iterator early aborts the request.
        """
        if is_conversation(prompt):
            tokens = self.llm_engine.tokenize_chat(
                prompt, tools=tools, chat_template_kwargs=chat_template_kwargs
            )
        else:
            (tokens,) = self.llm_engine.tokenize([prompt])  # type: ignore[list-item]
        ids: list[str] = []
        yield from self._outputs(ids, lambda: ids.append(self.llm_engine.add_tokens(tokens, sampling_params)))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every text: the last token's hidden state, or the mean of all where the checkpoint
        says so; normalized unless it or `pooling_params` say otherwise.

        Raises ValueError for a prompt that cannot be served, and for a checkpoint that pools in another way.
        """
        params = pooling_params or PoolingParams()
        sampling, normalizes = recipe_of(self.llm_engine.resolved.checkpoint.path)
        tokens = self.llm_engine.tokenize(as_list(prompts))
        outputs = self._run(tokens, sampling, use_tqdm, None, lora_request)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(vector_of(output, params, normalizes=normalizes).tolist()),
                output.prompt_token_ids,
            )
            for output in outputs
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        classifier_from_token: Sequence[str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """How near texts are: the cosine of vectors, of each pair, or of one with each of the others.

        classifier_from_token: two words, as ["no", "yes"]; the score is then how likely the second one is
        behind both texts, if one of the two is (Qwen3-Reranker).
        """
        first, second = as_list(data_1), as_list(data_2)
        if len(first) not in (1, len(second)):
            raise ValueError(
                f"data_1 has {len(first)} texts for {len(second)} in data_2; give one, or equally many"
            )
        if classifier_from_token is not None:
            return self._judge(first, second, classifier_from_token, use_tqdm, lora_request)
        params = PoolingParams(normalize=True)
        outputs = self.embed([*first, *second], use_tqdm, pooling_params=params, lora_request=lora_request)
        left, right = outputs[: len(first)] * (len(second) // len(first)), outputs[len(first) :]
        return [
            ScoringRequestOutput(
                b.request_id,
                ScoringOutput(float(np.dot(a.outputs.embedding, b.outputs.embedding))),
                [*a.prompt_token_ids, *b.prompt_token_ids],
            )
            for a, b in zip(left, right, strict=True)
        ]

    def _judge(
        self,
        first: Sequence[Prompt],
        second: Sequence[Prompt],
        words: Sequence[str],
        use_tqdm: bool,
        lora_request: LoRARequest | None,
    ) -> list[ScoringRequestOutput]:
        """How likely the second word is behind each pair, against the first."""
        asked, engine = judgements(words, self.get_tokenizer()), self.llm_engine
        right = engine.tokenize(second, add_special_tokens=False)
        prompts = engine.tokenize(joined(engine.tokenize(first), right))
        sides = [self._run(prompts, sampling, use_tqdm, None, lora_request) for sampling in asked]
        return [
            ScoringRequestOutput(b.request_id, ScoringOutput(chance(a, b)), b.prompt_token_ids)
            for a, b in zip(*sides, strict=True)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.  Raises ValueError if it was started without one."""
        if self.llm_engine.tokenizer is None:
            raise ValueError("this model has no tokenizer; give tokenizer=FOLDER")
        return self.llm_engine.tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends (generation_config.json)."""
        return self.llm_engine.default_sampling_params()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give memory away: weights to the host (1) or for good (2), and all KV.

        Raises ValueError while requests are under way.  Those that come meanwhile wait until `wake_up`.
        """
        if num := self.llm_engine.outputs.num_completions:
            raise ValueError(f"{num} requests are under way, and their KV would be lost; end them before")
        level = check_level(level)
        self._follow(lambda rest: rest.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back: "weights", then "kv_cache"; None: both.

        Raises ValueError, and sleeps on, if others have taken the room.
        """
        back = check_tags(tags)
        self._follow(lambda rest: rest.wake_up(back))

    def shutdown(self) -> None:
        """Give the memory back; the object is of no use afterwards."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[TokenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        """Run all prompts to their ends.  Interrupted, it aborts them, so that the next call starts clean."""
        params = one_for_each(sampling_params, len(prompts), "sampling_params")
        priorities = one_for_each(0 if priority is None else priority, len(prompts), "priority")
        own = self._own_sampling(params)
        wishes = one_for_each(lora_request, len(prompts), "lora_request")
        adapters = [self.llm_engine.adapter(wish) for wish in wishes]
        ids: list[str] = []
        done: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(prompts), desc="prompts", disable=not use_tqdm, dynamic_ncols=True)
        with collector.without_old(), bar:
            for output in self._outputs(ids, lambda: self._add_all(ids, prompts, own, priorities, adapters)):
                done[output.request_id] = output
                bar.update(1)
        if self.llm_engine.engine.error is not None:
            raise RuntimeError(f"the engine has died: {self.llm_engine.engine.error}")
        return [done[request_id] for request_id in ids]

    def _own_sampling(self, params: Sequence[SamplingParams | None]) -> list[SamplingParams]:
        """Checked copies; neighbours that are alike, as they mostly are, share one."""
        own: list[SamplingParams] = []
        for i, sampling in enumerate(params):
            is_alike = i > 0 and sampling == params[i - 1]
            own.append(own[-1] if is_alike else self.llm_engine.own_sampling(sampling))
        return own

    def _add_all(
        self,
        ids: list[str],
        prompts: Sequence[TokenPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        adapters: Sequence[str | None],
    ) -> None:
        """Queue all prompts, and add their ids to `ids`."""
        kind = OutputKind.FINAL_ONLY
        for prompt, sampling, level, lora in zip(prompts, params, priorities, adapters, strict=True):
            ids.append(self.llm_engine.queue(prompt, sampling, priority=level or 0, kind=kind, lora=lora))
            held_back.let_through()

    def _abort_all(self, ids: Collection[str]) -> None:
        """Abort requests, and step until their ends have come."""
        with held_back, collector.paused():
            for request_id in ids:
                self.llm_engine.abort(request_id)
            while any(map(self.llm_engine.outputs.engine_ids, ids)):
                self._step()
                held_back.let_through()

    def _outputs(self, ids: list[str], queue: Callable[[], None]) -> Iterator[RequestOutput]:
        """Step until some requests are finished, yielding their outputs; others' wait for their own reader.

        queue: adds requests, and their ids to `ids`.  Left early (an exception, a closed iterator), this
        aborts what is unfinished.
        """
        arrived: deque[RequestOutput] = deque()
        try:
            with held_back:
                queue()
                self._readers.update(dict.fromkeys(ids, arrived))
            num_unfinished = len(ids)
            while num_unfinished:
                if not arrived:
                    self._step_until(arrived)
                output = arrived.popleft()
                num_unfinished -= output.finished
                yield output
        finally:
            for request_id in ids:  # first: a Ctrl-C may cut the aborts short
                self._readers.pop(request_id, None)
            self._abort_all(ids)

    def _step_until(self, arrived: Collection[RequestOutput]) -> None:
        """Step until an output has arrived."""
        with held_back:
            while not arrived:
                self._step()
                held_back.let_through()

    def _follow(self, order: Callable[[Rests], None]) -> None:
        """Give the engine an order, and step until it is done.  Raises ValueError if it was refused."""
        engine = self.llm_engine.engine
        num_orders = engine.stats().sleep.num_orders
        order(engine.rest)
        while engine.stats().sleep.num_orders <= num_orders:
            if engine.error is not None:
                raise RuntimeError(f"the engine has died: {engine.error}")
            self._step()
        if error := engine.stats().sleep.error:
            raise ValueError(error)

    def _step(self) -> None:
        for output in self.llm_engine.step():
            if output.request_id in self._readers:
                self._readers[output.request_id].append(output)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, a dict, token ids) or many, as a list.  Raises ValueError for what has no order."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_ordered(prompts):
        raise ValueError(
            f"prompts is {prompts!r:.100}, must be text, token ids, a dict, or a list of these: outputs come "
            "in the order of the prompts"
        )
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def is_ordered(values: object) -> TypeGuard[Sequence[object]]:
    """A list, tuple, range or array, rather than a set, an iterator or no container at all?"""
    return isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim > 0)


def is_conversation(prompt: Prompt | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    """Messages, rather than a prompt?"""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def one_for_each(value: T | Sequence[T], num: int, name: str) -> list[T]:
    """A list as long as the prompts, from one value or a list.  Raises ValueError if the lengths differ."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num  # type: ignore[list-item]
    if len(value) != num:
        raise ValueError(f"{name} has {len(value)} entries for {num} prompts; give one, or one for each")
    return list(value)
