"""One completion as it grows: token ids in, text and log-probabilities out.

Joins the detokenizer, the stop strings and the log-probabilities of one request; `outputs` joins completions.
Knows nothing about other requests or about time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pellucid.text.detokenizer import Detokenizer, make_detokenizer
from pellucid.text.stop import StopStrings
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import CompletionOutput, FinishReason, Logprob, Request, SeqUpdate, TokenLogprobs


class Completion:
    """What one request has generated so far; read it by `snapshot`, all of it, or by `delta`, what is new.

    A stop string may end it before the engine knows: `matched_stop` then tells, and later updates must not
    come here.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if sampling.logprobs is None else []
        self.cumulative_logprob: float | None = None if sampling.logprobs is None else 0.0
        self.extras: dict[str, Any] | None = None
        self._request = request
        self._tokenizer = tokenizer if sampling.detokenize else None
        self._detokenizer: Detokenizer | None = None  # until the first tokens come
        self._stops: StopStrings | None = None
        if sampling.stop and self._tokenizer is not None:
            include = sampling.include_stop_str_in_output
            self._stops = StopStrings(list(sampling.stop), include_in_output=include)
        self._text = ""  # up to the last snapshot
        self._new_texts: list[str] = []  # since the last snapshot or delta
        self._num_read = 0  # tokens that are text already; the others wait until somebody looks
        self._num_tokens_out = 0  # tokens that earlier deltas have shown

    @property
    def matched_stop(self) -> bool:
        return self._stops is not None and self._stops.matched is not None

    def extend(self, update: SeqUpdate) -> None:
        """Take in the tokens and the finish of one update.

        Tokens behind the one that completes a stop string are dropped, however many come at once.
        """
        assert self.finish_reason is None, f"{self._request.id} is finished, but got {update}"
        new = update.new_token_ids
        if new and self._detokenizer is None and self._tokenizer is not None:
            self._detokenizer = self._make_detokenizer(self._tokenizer)
        if new and self._stops is not None:
            new = new[: self._num_wanted(update, self._stops)]
        self.token_ids += new
        if self.logprobs is not None and update.logprobs is not None:
            self._add_logprobs(self.logprobs, update.logprobs[: len(new)])
        if update.extras is not None:
            self.extras = {**(self.extras or {}), **update.extras}
        if self._stops is not None and self._stops.matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._stops.matched
        elif update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
            self._flush(update)

    def snapshot(self) -> CompletionOutput:
        """Everything so far, in lists of its own."""
        self._text += self._take_new_text()
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return self._output(self._text, list(self.token_ids), logprobs)

    def delta(self) -> CompletionOutput:
        """What came since the last delta; cumulative_logprob stays cumulative."""
        first, self._num_tokens_out = self._num_tokens_out, len(self.token_ids)
        logprobs = None if self.logprobs is None else self.logprobs[first:]
        return self._output(self._take_new_text(), self.token_ids[first:], logprobs)

    def _make_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """Not before it is needed: by then the device is at work, and waits for no reader."""
        skips = self._request.sampling.skip_special_tokens
        return make_detokenizer(tokenizer, self._request.prompt_token_ids, skip_special_tokens=skips)

    def _take_new_text(self) -> str:
        if self.finish_reason is None:
            self._read(len(self.token_ids))
        text = "".join(self._new_texts)
        self._new_texts.clear()
        return text

    def _output(
        self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            extras=self.extras,
        )

    def _read(self, end: int) -> None:
        """Turn tokens up to `end` into text; with stop strings that has happened."""
        if self._detokenizer is not None and self._num_read < end:
            self._new_texts.append(self._detokenizer.feed(self.token_ids[self._num_read : end]))
        self._num_read = end

    def _num_wanted(self, update: SeqUpdate, stops: StopStrings) -> int:
        """Read the new tokens one by one; how many there are up to the one that completes a stop string."""
        new = update.new_token_ids
        assert self._detokenizer is not None, "stop strings need a tokenizer"
        self._num_read += len(new)
        for num, token_id in enumerate(new[:-1] if self._ends_hidden(update) else new, start=1):
            armed = len(self.token_ids) + num > self._request.sampling.min_tokens
            self._new_texts.append(stops.feed(self._detokenizer.feed([token_id]), armed=armed))
            if stops.matched is not None:
                return num
        return len(new)

    def _ends_hidden(self, update: SeqUpdate) -> bool:
        """A token that ends the text is kept among the ids but is no part of the text."""
        if update.finish_reason is not FinishReason.STOP or not update.new_token_ids:
            return False
        if self._request.sampling.include_stop_str_in_output:
            return False
        return update.new_token_ids[-1] in self._request.stop_token_ids

    def _flush(self, update: SeqUpdate) -> None:
        """The text ends here: what was held back for what might follow is shown."""
        if self._detokenizer is None:
            return
        self._read(len(self.token_ids) - self._ends_hidden(update))
        rest = self._detokenizer.flush()
        self._new_texts.append(rest if self._stops is None else self._stops.flush() + rest)

    def _add_logprobs(self, logprobs: list[dict[int, Logprob]], new: Sequence[TokenLogprobs]) -> None:
        num_top = self._request.sampling.logprobs or 0
        logprobs += [logprob_dict(entry, num_top, self._tokenizer) for entry in new]
        self.cumulative_logprob = sum((e.logprobs[0] for e in new), self.cumulative_logprob or 0.0)


def logprob_dict(entry: TokenLogprobs, num_top: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """vLLM's shape: the chosen token first, with its rank, then the `num_top` most likely, ranked from 1."""
    ranks = [entry.rank, *range(1, num_top + 1)]
    return {
        token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token))
        for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=False)
    }
