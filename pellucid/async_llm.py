"""The asyncio API: many callers, one event loop, the engine in a process of its own.

`LLM` is its twin for scripts.  The loop only moves what the engine has said into mailboxes; nothing that a
caller does, or fails to do, holds it up.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar, Unpack

from pellucid.cluster.line import Line
from pellucid.config import EngineConfig
from pellucid.llm_engine import COMPILE_SECONDS, LLMEngine
from pellucid.lora.request import LoRARequest
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import Frame
from pellucid.resolve import Resolved
from pellucid.router.replicas import Replicas, start_replicas
from pellucid.sampling_params import SamplingParams
from pellucid.sleep.state import check_level, check_tags
from pellucid.text.chat import ChatOptions, Message
from pellucid.text.outputs import Observer, OutputKind, join_deltas
from pellucid.text.prompts import Prompt, TokenPrompt
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import RequestOutput

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 4  # that tokenize; the tokenizers library works without the interpreter's lock
SHORT = 4096  # letters, or sixteen times as many token ids: they take less time than finding a thread
HEARTBEAT = 0.25  # seconds between two looks at an engine that says nothing
ORDER_POLL = 0.01  # the same, while an engine falls asleep or wakes up
MOST_DELAY = 0.002  # seconds that an order waits for others
MOST_SILENCE = 0.02  # seconds that streams wait for a crowd of requests to be taken in


Viewer = Callable[[int, Frame], None]  # the engine's index, and what it shows
Sink = Callable[[Sequence[RequestOutput]], bool]  # takes outputs at once, or declines


class EngineDeadError(RuntimeError):
    """The engine has died; nothing can be served any more."""


class Mailbox:
    """What some requests have said and nobody has read yet; iterate over it to read.

    What comes while nobody reads joins what is there, so a slow reader costs no more memory than the answers
    do, and gets them in larger pieces.  To wake a reader for each output is dear, so it may leave a `sink`
    that takes them in its stead; it is then woken for what the sink declines, and for the end.
    """

    def __init__(self, kind: OutputKind, abort: Callable[[str], None]) -> None:
        self.request_ids: list[str] = []
        self.sink: Sink | None = None
        self._kind, self._abort = kind, abort
        self._unfinished: set[str] = set()
        self._news: dict[str, RequestOutput] = {}
        self._reader: asyncio.Future[None] | None = None

    def expect(self, request_id: str) -> None:
        """There will be outputs of this request, up to one that is finished."""
        self.request_ids.append(request_id)
        self._unfinished.add(request_id)

    def put(self, output: RequestOutput) -> None:
        """Add to what is new; `tell` when that is all for now."""
        older = self._news.get(output.request_id)
        is_part = older is not None and self._kind is OutputKind.DELTA
        self._news[output.request_id] = join_deltas(older, output) if older and is_part else output
        if output.finished:
            self._unfinished.discard(output.request_id)

    def tell(self) -> None:
        """Let the sink take what is new, or wake the reader.

        Only a reader that waits has passed on all that came before.  What the sink raises, the reader raises.
        """
        if self._reader is None or self._reader.done():
            return
        try:
            is_taken = self.sink is not None and bool(self._unfinished) and self.sink([*self._news.values()])
        except Exception as error:
            self._reader.set_exception(error)
            return
        if is_taken:
            self._news.clear()
        else:
            self._wake()

    def close(self) -> None:
        """Read no further: what is unfinished is aborted, and whoever waits here reads the end."""
        for request_id in self._unfinished:
            self._abort(request_id)
        self._unfinished.clear()
        self._news.clear()
        self.sink = None  # which knows who reads here: else both are left to the garbage collector
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._news:
            if not self._unfinished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._news.pop(next(iter(self._news)))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncLLM:
    """A model behind an event loop.  Options are `EngineConfig`'s, such as max_model_len or dtype.

    The constructor returns when the engine is ready.  All other methods belong to one event loop.  Raises
    ValueError, naming the nearest one, for an option that does not exist.
    """

    def __init__(self, model: str = "sprout", **options: object) -> None:
        self._config = EngineConfig.from_options({"model": model, **options})
        self._mailboxes: dict[str, Mailbox] = {}  # by request id
        self._observers: list[Observer] = []
        self._viewer: Viewer | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # never behind long texts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readable: set[int] = set()  # file descriptors that are watched
        self._writable: set[int] = set()
        self._is_turn_due = False
        self._due_since = self._handed_out = 0.0  # since when orders wait; seconds of time.monotonic
        self._death: asyncio.Future[str] | None = None
        self._next_beat: asyncio.TimerHandle | None = None
        self._is_shut_down = False
        self._falls_asleep = False
        self._adopt(*self._start())

    # Requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        kind: OutputKind = OutputKind.CUMULATIVE,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, output by output.  Leaving the iteration early aborts the request.

        kind: DELTA gives what is new, CUMULATIVE all so far.  Raises ValueError for what can never be served
        and EngineDeadError when the engine dies.
        """
        (tokens,) = await self.tokenize([prompt])
        grammar = await self.check_grammar(sampling_params)
        mailbox = self.open(
            [tokens],
            sampling_params,
            grammar=grammar,
            lora=self._front.adapter(lora_request),
            request_id=request_id,
            priority=priority,
            kind=kind,
        )
        async for output in self._outputs(mailbox):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        kind: OutputKind = OutputKind.CUMULATIVE,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, as `generate` completes a prompt; options: `render_chat`'s."""
        tokens = await self.tokenize_chat(messages, **options)
        grammar = await self.check_grammar(sampling_params)
        mailbox = self.open([tokens], sampling_params, grammar=grammar, request_id=request_id, kind=kind)
        async for output in self._outputs(mailbox):
            yield output

    def open(
        self,
        prompts: Sequence[TokenPrompt],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        kind: OutputKind = OutputKind.DELTA,
        grammar: str | None = None,
        lora: str | None = None,
        kv_transfer: str | None = None,
    ) -> Mailbox:
        """Queue prompts that `tokenize` has checked; the mailbox of their outputs.

        grammar: what `check_grammar` has returned.  lora: what `adapter` has.  kv_transfer: for a connector.
        Close the mailbox when done.
        Raises ValueError, and queues nothing, for parameters that cannot be served.
        """
        self._attach()
        if sampling_params is not None and sampling_params.structured_outputs and grammar is None:
            raise ValueError("structured_outputs needs the grammar that `await check_grammar(...)` returns")
        sampling = self._front.own_sampling(sampling_params, grammar=grammar)
        mailbox = Mailbox(kind, self.abort)
        try:
            for prompt in prompts:
                added = self._front.queue(
                    prompt,
                    sampling,
                    request_id=request_id,
                    priority=priority,
                    kind=kind,
                    grammar=grammar,
                    lora=lora,
                    kv_transfer=kv_transfer,
                )
                mailbox.expect(added)
                self._mailboxes[added] = mailbox
        except BaseException:
            mailbox.close()
            raise
        self._plan_turn()
        self._go_on()
        return mailbox

    def abort(self, request_id: str) -> None:
        """End a request within a step; unknown ids are ignored."""
        self._front.abort(request_id)
        self._plan_turn()

    def fail_all(self, error: str) -> None:
        """End every request with an error, and free what it holds."""
        for request_id in self._mailboxes:
            self._front.abort(request_id)
        self._deliver(self._front.outputs.fail_all(error))
        self._plan_turn()

    # Text

    async def tokenize(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True
    ) -> list[TokenPrompt]:
        """Check prompts of any kind and turn them into token ids; long ones in a thread."""
        if is_short(prompts):
            return self._front.tokenize(prompts, add_special_tokens=add_special_tokens)
        return await self._in_thread(self._front.tokenize, prompts, add_special_tokens=add_special_tokens)

    async def tokenize_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> TokenPrompt:
        """Render messages with the model's template, and check the prompt that comes of it.

        Long conversations, and those with tools, in a thread.
        """
        texts = [message.get("content") or "" for message in messages]
        if all(isinstance(text, str) for text in texts) and is_short(texts) and not options.get("tools"):
            return self._front.tokenize_chat(messages, **options)
        return await self._in_thread(self._front.tokenize_chat, messages, **options)

    async def spell(self, sampling: SamplingParams) -> None:
        """Tokenize its bad words, for which `open` would hold up the event loop."""
        if sampling.bad_words:
            await self._in_thread(self._front.spell, sampling.bad_words)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of any text, also one that is no prompt for this model."""
        return await self._in_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return await self._in_thread(
            self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    # Facts

    @property
    def error(self) -> str | None:
        """Why nothing can be served any more."""
        return self._engine.error

    @property
    def silence(self) -> float:
        """Seconds since an engine that has something to do has spoken; of several, the last that has."""
        return self._engine.silence

    @property
    def has_tokenizer(self) -> bool:
        return self._front.tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.  Raises ValueError if it was started without one."""
        if self._front.tokenizer is None:
            raise ValueError("this model has no tokenizer; give token ids, or start it with tokenizer=FOLDER")
        return self._front.tokenizer

    @property
    def resolved(self) -> Resolved:
        """What was decided when the engine started."""
        return self._front.resolved

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self._front.capacity.max_model_len

    @property
    def num_pages(self) -> int:
        """Pages of each engine's KV cache."""
        return self._front.capacity.num_pages

    @property
    def vocab_size(self) -> int:
        return self._front.vocab_size

    @property
    def stats(self) -> EngineStats:
        """As of the last step that has come home."""
        return self._front.stats

    @property
    def stats_per_engine(self) -> list[EngineStats]:
        """What `stats` sums up, for each data-parallel engine."""
        return self._front.stats_per_engine

    @property
    def num_completions(self) -> int:
        """Completions under way."""
        return self._front.outputs.num_completions

    @property
    def num_waiting(self) -> int:
        """Completions under way that the engine has not begun with, those on their way to it included."""
        num_running = sum(stats.num_running for stats in self.stats_per_engine)
        return max(0, self.num_completions - num_running)

    def default_sampling_params(
        self, *, max_tokens: int | None = SamplingParams.max_tokens
    ) -> SamplingParams:
        """What the checkpoint recommends.  max_tokens: if it says nothing about that."""
        return self._front.default_sampling_params(max_tokens=max_tokens)

    async def check_grammar(
        self, sampling: SamplingParams | None, *, seconds: float = COMPILE_SECONDS, client: str = ""
    ) -> str | None:
        """Have structured_outputs compiled, unless they have been; what `open` takes as the grammar.

        client: who asks; those who compile at the same time have equal shares.
        Cancelled, it ends the compile, if nobody else waits for it.  Raises ValueError for what is wrong, or
        takes longer than `seconds` to compile.
        """
        if sampling is None or sampling.structured_outputs is None:
            return None
        check = await asyncio.get_running_loop().run_in_executor(
            self._grammar_pool,
            functools.partial(self._front.grammar_check, sampling, seconds=seconds, client=client),
        )
        assert check is not None, "there are structured_outputs"
        return check.passed(await self._front.grammars.ask_async(check.question, check.ref.address))

    def adapter(self, request: LoRARequest | None) -> str | None:
        """What `open` takes as the adapter.  Raises ValueError for one that is not served."""
        return self._front.adapter(request)

    # Life

    def warm_up(self) -> None:
        """Start, in the background, what the first grammar would wait for."""
        threading.Thread(target=self._front.warm_up, name="warm-up", daemon=True).start()

    def watch(self, observer: Observer) -> None:
        """Tell `observer` what becomes of every completion."""
        self._observers.append(observer)

    def view(self, viewer: Viewer | None) -> None:
        """Show `viewer` what the engines do, some times a second and from the beginning; None: nobody."""
        if viewer is not None:
            self._attach()
        self._viewer = viewer
        self._engine.watch(is_on=viewer is not None)
        self._plan_turn()

    async def died(self) -> str:
        """Wait until the engine has died, and return `error`."""
        self._attach()
        assert self._death is not None
        return await asyncio.shield(self._death)

    async def restart(self) -> None:
        """Start the engine anew, after it has died.  Raises what the constructor raises."""
        assert self.error is not None, "a running engine is shut down first"
        self._detach()
        self._front.shutdown()
        engine, front = await asyncio.to_thread(self._start)
        if self._loop is not None:  # somebody has asked meanwhile, and has been told of the death
            self._detach()
        self._adopt(engine, front)
        self._attach()

    def pause(self, *, is_on: bool) -> None:
        """Have the engines stand still, with all that they hold, or go on."""
        self._attach()
        self._engine.pause(is_on=is_on)
        self._plan_turn()

    @property
    def is_sleeping(self) -> bool:
        """Is its memory given away, or about to be?"""
        return self._falls_asleep or bool(self.stats.sleep.away)

    async def sleep(self, level: int = 1) -> None:
        """Give memory away: weights to the host (1) or for good (2), and all KV; returns when that is done.

        Raises ValueError while requests are running.
        """
        self._attach()
        check_level(level)
        num_orders, self._falls_asleep = self.stats.sleep.num_orders, True
        self._engine.sleep(level)
        try:
            await self._order_done(num_orders)
        finally:
            self._falls_asleep = False

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back: "weights", then "kv_cache"; None: both.

        Raises ValueError, and sleeps on, if others have taken the room.
        """
        self._attach()
        num_orders = self.stats.sleep.num_orders
        self._engine.wake_up(check_tags(tags))
        await self._order_done(num_orders)

    async def _order_done(self, num_orders: int) -> None:
        """An order behind so many has been followed.  Raises ValueError if it was refused."""
        self._plan_turn()
        engine = self._engine
        while self.stats.sleep.num_orders <= num_orders:
            if engine.error is not None or engine is not self._engine:
                raise EngineDeadError(engine.error or "the engine has been started anew")
            await asyncio.sleep(ORDER_POLL)
        if error := self.stats.sleep.error:
            raise ValueError(error)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self._front.reset_prefix_cache()
        self._plan_turn()

    def shutdown(self) -> None:
        """End the engine and give its memory back; requests under way end with an error.

        So ends one that is starting anew, within `restart`.
        """
        self._is_shut_down = True
        if self._loop is not None and not self._loop.is_closed():
            self._deliver(self._front.outputs.fail_all("the engine was shut down"))
            self._detach()
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._engine.shutdown()
        self._front.grammars.shutdown()

    # The loop

    def _start(self) -> tuple[Replicas, LLMEngine]:
        """Start an engine; safe in a thread, for nothing here changes until it is adopted."""
        started = start_replicas(self._config, lambda: not self._is_shut_down)
        return started.engine, LLMEngine(self._config, started)

    def _adopt(self, engine: Replicas, front: LLMEngine) -> None:
        """Serve with this engine.  Raises RuntimeError, and ends it, after `shutdown`."""
        if self._is_shut_down:
            front.shutdown()
            raise RuntimeError("the engine is not wanted any more")
        self._engine, self._front = engine, front
        self._front.outputs.observers = self._observers
        if self._viewer is not None:
            self._engine.watch(is_on=True)

    def _attach(self) -> None:
        """Let the running event loop wake us when an engine has spoken or died."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop, self._death = loop, loop.create_future()
        self._readable, self._writable = set(), set()
        self._turn()
        self._beat(loop)

    def _detach(self) -> None:
        assert self._loop is not None
        self._watch_lines(self._loop, [])
        if self._next_beat is not None:
            self._next_beat.cancel()
        self._loop = None

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """An engine that is stuck says nothing: somebody has to look at the clock."""
        if self._loop is loop:
            self._turn()
            self._next_beat = loop.call_later(HEARTBEAT, self._beat, loop)

    def _plan_turn(self) -> None:
        """Orders that come together go out together."""
        if not self._is_turn_due and self._loop is not None:
            self._is_turn_due = True
            self._due_since = self._handed_out = time.monotonic()
            self._loop.call_soon(self._turn)

    def _go_on(self) -> None:
        """While a crowd is taken in, the engine begins with the first of it, and streams do not stop."""
        now = time.monotonic()
        if now - self._due_since > MOST_SILENCE:
            self._turn()
        elif now - self._handed_out > MOST_DELAY:
            self._engine.hand_out()
            self._handed_out = now

    def _turn(self) -> None:
        """Hand out what has come in and deliver what engines have done; never waits."""
        self._is_turn_due = False
        if self._loop is None:
            return
        while True:
            self._deliver(self._front.show(self._engine.poll()))
            if not self._engine.has_orders:  # a stop string is found here, and the engine told
                break
        for index, frame in self._engine.take_views():
            if self._viewer is not None:  # which may have seen enough with the frame before
                self._viewer(index, frame)
        self._watch_lines(self._loop, self._engine.lines)
        if self.error is not None and self._death is not None and not self._death.done():
            self._death.set_result(self.error)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        told: dict[Mailbox, None] = {}  # in order
        for output in outputs:
            mailbox = self._mailboxes[output.request_id]
            if output.finished:
                del self._mailboxes[output.request_id]
            mailbox.put(output)
            told[mailbox] = None
        for mailbox in told:
            mailbox.tell()

    def _watch_lines(self, loop: asyncio.AbstractEventLoop, lines: Sequence[Line]) -> None:
        """Have a turn when one can be read, or takes what it has not taken so far."""
        readable = {line.fileno() for line in lines}
        for file in self._readable - readable:
            loop.remove_reader(file)
        for file in readable - self._readable:
            loop.add_reader(file, self._turn)
        writable = {line.out_fileno() for line in lines if line.has_unsent}
        for file in self._writable - writable:
            loop.remove_writer(file)
        for file in writable - self._writable:
            loop.add_writer(file, self._turn)
        self._readable, self._writable = readable, writable

    async def _outputs(self, mailbox: Mailbox) -> AsyncGenerator[RequestOutput, None]:
        try:
            async for output in mailbox:
                if output.error is not None and self.error is not None:
                    raise EngineDeadError(self.error)
                yield output
        finally:
            mailbox.close()

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        call = functools.partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def is_short(prompts: Sequence[object]) -> bool:
    """Whether prompts, texts and lists of token ids, are tokenized sooner than a thread begins with it."""
    sizes = [len(prompt) if isinstance(prompt, str) else num_ids(prompt) / 16 for prompt in prompts]
    return sum(sizes) <= SHORT


def num_ids(prompt: object) -> float:
    """Token ids of a prompt; of anything else, more than is short."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    return len(ids) if isinstance(ids, Sized) and not isinstance(ids, str | Mapping) else math.inf
