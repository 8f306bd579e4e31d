"""From prompts to outputs, step by step: text on the outside, the engine's loop within.

`LLM` and `AsyncLLM` are built on this.  The engine may be in this process or be several in others.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Integral
from typing import Any, Unpack

from pellucid.config import EngineConfig
from pellucid.engine.build import RunningEngine
from pellucid.engine.client import EngineClient, start_client
from pellucid.interrupts import held_back
from pellucid.lora.request import AdapterRef, LoRARequest
from pellucid.observe.statistics import EngineStats
from pellucid.resolve import Resolved
from pellucid.sample.grammars.base import GrammarRef, GrammarSpec, Spelling
from pellucid.sample.grammars.client import GrammarClient, Question
from pellucid.sample.grammars.wire import Verdict
from pellucid.sampling_params import SamplingParams, StructuredOutputsParams
from pellucid.text.chat import ChatOptions, Message, render_chat
from pellucid.text.outputs import OutputKind, OutputProcessor, fan_out
from pellucid.text.prompts import Prompt, TokenPrompt, bad_words_token_ids, tokenize_prompts
from pellucid.text.token_lists import check_leaves_a_token, check_lists
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import Request, RequestOutput, SeqUpdate

logger = logging.getLogger(__name__)
MOST_SPELLINGS = 64  # lists of bad words whose tokens are remembered
COMPILE_SECONDS = 5.0  # most that a grammar may take


@dataclass(frozen=True, slots=True)
class GrammarCheck:
    """What is asked about a request's grammar, and what the request carries when the answer is good."""

    kind: str  # of `StructuredOutputsParams`
    question: Question
    ref: GrammarRef

    def passed(self, verdict: Verdict) -> str:
        """The request's grammar.  Raises ValueError, in words, for one that cannot be."""
        if verdict.error is not None:
            raise ValueError(f"structured_outputs.{self.kind} {verdict.error}")
        return self.ref.encode()


class LLMEngine:
    """Add requests, call `step` until `is_finished`; each step returns the outputs that changed."""

    def __init__(self, config: EngineConfig, started: RunningEngine[EngineClient] | None = None) -> None:
        """started: the engine of this configuration, if it runs already."""
        started = started or start_client(config)
        self.engine: EngineClient = started.engine
        self.resolved, self.capacity = started.resolved, started.capacity
        checkpoint, follows = self.resolved.checkpoint, config.model.generation_config != "none"
        folder = checkpoint.tokenizer_path
        try:
            self.tokenizer: Tokenizer | None = None if folder is None else Tokenizer.load(folder)
            self.eos_token_ids = eos_token_ids(self.resolved, self.tokenizer)
            self._recommended = recommended(checkpoint.generation_config) if follows else {}
        except BaseException:
            self.engine.shutdown()
            raise
        self.outputs = OutputProcessor(self.tokenizer)
        self.grammars = GrammarClient(self._spelling)
        spell = partial(bad_words_token_ids, vocab_size=self.vocab_size)
        self._spellings = lru_cache(MOST_SPELLINGS)(spell)
        self._ids = itertools.count()
        self._seeds = random.Random(config.model.seed)
        self._untold: list[RequestOutput] = []  # that no step has returned yet
        self._has_warned = False  # of a priority that nobody looks at

    @classmethod
    def from_options(cls, **options: object) -> LLMEngine:
        """LLMEngine.from_options(model=..., max_model_len=...).  Raises ValueError for an unknown option."""
        return cls(EngineConfig.from_options(options))

    # Requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> str:
        """Queue one prompt and return its request id.  Raises ValueError if it can never be served."""
        (tokens,) = self.tokenize([prompt])
        return self.add_tokens(tokens, sampling_params, request_id=request_id, priority=priority, kind=kind)

    def add_tokens(
        self,
        prompt: TokenPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> str:
        """Queue a prompt that `tokenize` or `tokenize_chat` has checked."""
        sampling = self.own_sampling(sampling_params)
        return self.queue(prompt, sampling, request_id=request_id, priority=priority, kind=kind)

    def queue(
        self,
        prompt: TokenPrompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        kind: OutputKind = OutputKind.CUMULATIVE,
        grammar: str | None = None,
        lora: str | None = None,
        kv_transfer: str | None = None,
    ) -> str:
        """Queue a prompt; `sampling` comes from `own_sampling`, and several requests may share it.

        grammar: what `check_grammar` has returned for it, if that is at hand.  lora: what `adapter` has
        returned.  kv_transfer: for a KV connector.  Raises ValueError for a priority that is no integer.
        """
        self._check_priority(priority)
        # The engine never sees an id twice: the end of an old request must not be taken for a new one's.
        own_id = next(own for i in self._ids if not self.outputs.is_running(own := str(i)))
        request_id = own_id if request_id is None else request_id
        if sampling.structured_outputs is not None:
            grammar = self.check_grammar(sampling) if grammar is None else grammar
            sampling = sampling.clone(structured_outputs=None)
        request = Request(
            id=own_id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            seed=self._seeds.getrandbits(62) if sampling.seed is None else sampling.seed,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self.spell(sampling.bad_words or ()),
            cache_salt=prompt.cache_salt,
            grammar=grammar,
            lora=lora,
            kv_transfer=kv_transfer,
            is_quiet=kind is OutputKind.FINAL_ONLY and not sampling.shows_tokens_at_once,
            is_streamed=kind is not OutputKind.FINAL_ONLY,
            priority=int(priority),
            arrival=time.monotonic(),
        )
        with held_back:
            for part, parent in fan_out(request, request_id):
                self.outputs.add(part, prompt=prompt.text, parent=parent, kind=kind)
                self.engine.add(part)
        return request_id

    def tokenize(self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True) -> list[TokenPrompt]:
        """Check prompts of any kind and turn them into token ids."""
        return tokenize_prompts(
            prompts,
            self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.capacity.max_model_len,
            add_special_tokens=add_special_tokens,
        )

    def tokenize_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> TokenPrompt:
        """Render messages with the model's template, and check the prompt that comes of it."""
        if self.tokenizer is None:
            raise ValueError("a chat needs a tokenizer; this engine was started without one")
        text = render_chat(self.tokenizer, messages, **options)
        (prompt,) = tokenize_prompts(
            [text],
            self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.capacity.max_model_len,
            add_special_tokens=False,  # the template has put them where they belong
        )
        return prompt

    def own_sampling(self, sampling: SamplingParams | None, *, grammar: str | None = None) -> SamplingParams:
        """A copy that stays as it is, whatever the user does with theirs; None is what the model recommends.

        grammar: as `queue` has it.  Raises ValueError for parameters that this model cannot serve.
        """
        sampling = self.default_sampling_params() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling_params has {sampling!r:.100}, must be SamplingParams")
        sampling = sampling.clone()  # which checks all that needs no model
        sampling.check_token_ids(self.vocab_size)
        if self.tokenizer is None and (sampling.stop or sampling.bad_words):
            raise ValueError("stop and bad_words are strings and need a tokenizer; use stop_token_ids")
        unknown = [name for name in sampling.extra_args or () if name not in self.resolved.features]
        if unknown:
            known = ", ".join(self.resolved.features)
            raise ValueError(f"extra_args has {unknown[0]!r}, which is no feature here (known: {known})")
        self._check_lists(sampling)
        if grammar is None:
            self.check_grammar(sampling)
        return sampling

    def check_grammar(self, sampling: SamplingParams, *, seconds: float = COMPILE_SECONDS) -> str | None:
        """Have structured_outputs compiled, unless they have been; what `queue` takes as the grammar.

        Any thread may call it, and waits.  Raises ValueError for what is wrong, or takes too long to compile.
        """
        check = self.grammar_check(sampling, seconds=seconds)
        return None if check is None else check.passed(self.grammars.ask(check.question))

    def grammar_check(
        self, sampling: SamplingParams, *, seconds: float, client: str = ""
    ) -> GrammarCheck | None:
        """The first half of `check_grammar`, which does not wait for a compile.

        It takes time for a large grammar, and starts the process that compiles if nobody has.
        """
        wish = sampling.structured_outputs
        if wish is None:
            return None
        if self.tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer; this engine was started without one")
        if self.resolved.speculative.is_synthetic:
            raise ValueError("structured_outputs means nothing where drafts stand by chance (synthetic)")
        thinking = self._thinking(sampling, wish)
        try:
            question = self.grammars.question(GrammarSpec(wish.kind, wish.text), seconds, client)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{wish.kind} {error}") from error
        ref = GrammarRef(address=self.grammars.address, digest=question.digest, thinking=thinking)
        return GrammarCheck(wish.kind, question, ref)

    def warm_up(self) -> None:
        """Load what the first grammar would wait for.  Any thread may call it, and waits some seconds."""
        if self.tokenizer is not None:
            self.grammars.warm_up()

    def adapter(self, request: LoRARequest | None) -> str | None:
        """What `queue` takes as the adapter; None: there is none.

        Raises ValueError for a folder without an adapter that is served, as far as its config tells.
        """
        if request is None:
            return None
        lora = self.resolved.user.lora
        if not lora.enable_lora:
            raise ValueError(
                f"adapter {request.lora_name!r}: the engine has no room for any; start with enable_lora=True"
            )
        return AdapterRef.find(request, lora.max_lora_rank).encode()

    def default_sampling_params(
        self, *, max_tokens: int | None = SamplingParams.max_tokens
    ) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, where it says anything.

        max_tokens: if it says nothing about that.
        """
        said: dict[str, Any] = {"max_tokens": max_tokens, **self._recommended}
        return SamplingParams(**said)

    def abort(self, request_id: str) -> None:
        """End a request; its last output comes with the next step.  Unknown ids are ignored."""
        for engine_id in self.outputs.engine_ids(request_id):
            self.engine.abort(engine_id)

    # The loop

    def step(self) -> list[RequestOutput]:
        """Run the loop once; the outputs that changed.

        A Ctrl-C is held back until all is whole, and loses nothing: what has changed, the next step returns.
        """
        with held_back:
            self._untold += self.show(self.engine.step())
        untold, self._untold = self._untold, []
        return untold

    def show(self, updates: Sequence[SeqUpdate]) -> list[RequestOutput]:
        """What users see of the engine's updates; the engine is told of texts that have ended."""
        changed = [output for update in updates if (output := self.outputs.update(update))]
        for engine_id in self.outputs.take_aborts():
            self.engine.abort(engine_id)
        return changed

    def is_finished(self) -> bool:
        """Has every request got its last output, and every step in flight come home?"""
        return not (self.has_unfinished_requests() or self.engine.has_work)

    def has_unfinished_requests(self) -> bool:
        """Has some request not got its last output?"""
        return self.outputs.num_requests > 0 or bool(self._untold)

    # Facts

    @property
    def vocab_size(self) -> int:
        return self.resolved.checkpoint.vocab_size

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def stats_per_engine(self) -> list[EngineStats]:
        """What `stats` sums up, for each data-parallel engine."""
        return self.engine.stats_per_engine()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self.engine.clear_prefix_cache()

    def shutdown(self) -> None:
        """Stop the workers and give their memory back."""
        self.engine.shutdown()
        self.grammars.shutdown()

    def _check_priority(self, priority: int) -> None:
        if not isinstance(priority, Integral):
            raise ValueError(f"priority is {priority!r}, must be an integer")
        if priority and self.resolved.user.scheduler.scheduling_policy != "priority" and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a request has priority %s, but all run in the order in which they came; start with "
                "scheduling_policy='priority' (--scheduling-policy priority)",
                priority,
            )

    def _check_lists(self, sampling: SamplingParams) -> None:
        """Raise ValueError for lists of tokens that are too long, or that rule out everything."""
        ends = {*(sampling.stop_token_ids or ()), *(() if sampling.ignore_eos else self.eos_token_ids)}
        words, most = self.spell(sampling.bad_words or ()), self.resolved.user.scheduler.max_listed_tokens
        check_lists(sampling, stop_token_ids=ends, bad_words=words, max_listed=most)
        check_leaves_a_token(sampling, stop_token_ids=ends, bad_words=words, vocab_size=self.vocab_size)

    def _spelling(self) -> Spelling:
        assert self.tokenizer is not None, "without a tokenizer there is no grammar"
        return spelling_of(self.resolved, self.tokenizer)

    def _thinking(
        self, sampling: SamplingParams, wish: StructuredOutputsParams
    ) -> tuple[int | None, int] | None:
        """The tokens around what is free.  Raises ValueError if this model has no such."""
        if wish.thinking is None:
            return None
        start, end = wish.thinking
        thinking = None if start is None else self._token_id(start), self._token_id(end)
        allowed = sampling.allowed_token_ids
        if allowed is not None and thinking[1] not in allowed and thinking[0] in (None, *allowed):
            raise ValueError(
                f"allowed_token_ids is without {end!r}, behind which the structured output begins"
            )
        return thinking

    def _token_id(self, text: str) -> int:
        """The one token that `text` is."""
        token_id = None if self.tokenizer is None else self.tokenizer.token_to_id(text)
        if token_id is None:
            raise ValueError(f"structured_outputs.thinking has {text!r}, which is no token of this model")
        return token_id

    def spell(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of bad words, remembered for a while.  Any thread may call it."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise ValueError("bad_words are strings and need a tokenizer; use stop_token_ids")
        return self._spellings(tuple(words), self.tokenizer)


def recommended(generation_config: Mapping[str, object]) -> dict[str, Any]:
    """generation_config.json as sampling parameters, where it says anything; do_sample false is greedy.

    Raises ValueError for values that no request may have.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    said: dict[str, Any] = {
        name: generation_config[name] for name in names if generation_config.get(name) is not None
    }
    if generation_config.get("max_new_tokens") is not None:
        said["max_tokens"] = generation_config["max_new_tokens"]
    if generation_config.get("do_sample") is False:
        said["temperature"] = 0.0
    try:
        SamplingParams(**said)
    except ValueError as error:
        raise ValueError(
            f"{error}: so says generation_config.json; generation_config='none' passes over it"
        ) from error
    return said


def spelling_of(resolved: Resolved, tokenizer: Tokenizer) -> Spelling:
    """The model's tokens as bytes."""
    vocab_size = resolved.checkpoint.vocab_size
    return Spelling(
        token_bytes=tokenizer.spell_all()[:vocab_size],
        vocab_size=vocab_size,
        stop_token_ids=eos_token_ids(resolved, tokenizer),
    )


def eos_token_ids(resolved: Resolved, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends a text: config.json, generation_config.json and the tokenizer each may name tokens.

    Some name one that the model has no logit for, as -1, or a tokenizer's that was added later.
    """
    own, vocab_size = resolved.checkpoint.eos_token_ids, resolved.checkpoint.vocab_size
    named = None if tokenizer is None else tokenizer.eos_token_id
    all_named = own if named is None or named in own else (*own, named)
    return tuple(token for token in all_named if 0 <= token < vocab_size)
