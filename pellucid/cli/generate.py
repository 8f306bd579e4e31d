"""`pellucid generate`: complete prompts, from the command line, a file or stdin, as text or JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pellucid.cli.console import AnswerStream, complain, rule, write
from pellucid.cli.options import add_engine_options, add_sampling_options, open_llm, sampling_params
from pellucid.cli.prompts import (
    Prompts,
    Tool,
    add_prompt_arguments,
    read_prompts,
    read_tools,
    template_options,
)
from pellucid.sampling_params import SamplingParams
from pellucid.types import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from pellucid.llm import LLM

MAX_TOKENS = 256  # unless the user says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `generate` understands."""
    parser.usage = "%(prog)s [PROMPT ...] [OPTION ...]"
    add_prompt_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object a prompt, one a line")
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Complete every prompt; the exit status is 1 if one of them failed."""
    prompts, tools = read_prompts(args), read_tools(args.tools)
    template = template_options(args.think)
    with open_llm(args) as llm:
        sampling = sampling_params(args, llm.get_default_sampling_params(), max_tokens=MAX_TOKENS)
        if len(prompts) == 1 and sampling.n == 1 and sys.stdout.isatty() and not args.json:
            prompt = [*prompts.plain, *prompts.chats][0]
            stream = llm.stream(prompt, sampling, tools=tools, chat_template_kwargs=template)
            return _report_errors([AnswerStream().follow(stream)])
        outputs = _complete(llm, prompts, sampling, tools, template)
    for index, output in enumerate(outputs):
        if args.json:
            write(json.dumps(as_json(index, output), ensure_ascii=False) + "\n")
        else:
            _write_texts(index, output, titled=len(outputs) > 1)
    return _report_errors(outputs)


def _complete(
    llm: LLM,
    prompts: Prompts,
    sampling: SamplingParams,
    tools: list[Tool] | None,
    template: dict[str, object] | None,
) -> list[RequestOutput]:
    progress = len(prompts) > 1 and sys.stderr.isatty()
    if prompts.chats:
        return llm.chat(
            prompts.chats, sampling, use_tqdm=progress, tools=tools, chat_template_kwargs=template
        )
    return llm.generate(prompts.plain, sampling, use_tqdm=progress)


def _write_texts(index: int, output: RequestOutput, *, titled: bool) -> None:
    for completion in output.outputs:
        if titled or len(output.outputs) > 1:
            part = f", completion {completion.index}" if len(output.outputs) > 1 else ""
            rule(f"prompt {index}{part}")
        write(answer_text(completion) + "\n")


def answer_text(completion: CompletionOutput) -> str:
    """The text; the token ids where there is none, because no tokenizer is loaded."""
    return completion.text or " ".join(map(str, completion.token_ids))


def _report_errors(outputs: Sequence[RequestOutput]) -> int:
    failed = [(index, output.error) for index, output in enumerate(outputs) if output.error]
    for index, error in failed:
        complain(f"pellucid generate: prompt {index} failed: {error}")
    return 1 if failed else 0


def as_json(index: int, output: RequestOutput) -> dict[str, object]:
    """One output as a JSON object; log-probabilities only if they were asked for."""
    entry: dict[str, object] = {
        "index": index,
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_completion_json(completion) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        entry["prompt_logprobs"] = [_logprobs_json(entries) for entries in output.prompt_logprobs]
    if output.error:
        entry["error"] = output.error
    return entry


def _completion_json(completion: CompletionOutput) -> dict[str, object]:
    entry: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        entry["cumulative_logprob"] = completion.cumulative_logprob
        entry["logprobs"] = [_logprobs_json(entries) for entries in completion.logprobs]
    return entry


def _logprobs_json(entries: dict[int, Logprob] | None) -> list[dict[str, object]] | None:
    if entries is None:
        return None
    return [
        {"token_id": token, "logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
        for token, entry in entries.items()
    ]
