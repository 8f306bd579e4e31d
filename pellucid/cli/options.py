"""Command-line options made from the config dataclasses, so `--help` and the Python API never disagree.

An option that was not given leaves no trace in the namespace: defaults live in the dataclasses alone.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import Field, fields

from pellucid.config import SECTIONS, all_options
from pellucid.no_effect import ENGINE, UNSERVED, WITH_VALUE, WITH_VALUES
from pellucid.registry import load_object
from pellucid.sampling_params import SamplingParams

if typing.TYPE_CHECKING:
    from pellucid.llm import LLM

UNSET = argparse.SUPPRESS
HELP_WIDTH = 110

SHORT = {  # vLLM's
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
    "speculative_config": "-sc",
    "data_parallel_size_local": "-dpl",
    "data_parallel_start_rank": "-dpr",
    "master_addr": "-dpa",
    "master_port": "-dpp",
    "compilation_config": "-cc",
    "optimization_level": "-O",
}
SHORT_UNSERVED = {
    "-ac": "attention_config",
    "-dc": "diffusion_config",
    "-dcp": "decode_context_parallel_size",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpn": "data_parallel_rank",
    "-pcp": "prefill_context_parallel_size",
}

SAMPLING_HELP = {
    "max_tokens": "most tokens to generate",
    "temperature": "0 always takes the most likely token; 1 is the model's own distribution",
    "top_p": "keep the smallest set of tokens with this much probability",
    "top_k": "keep the N most likely tokens; 0 keeps all",
    "min_p": "keep tokens with at least this share of the most likely one's probability",
    "n": "completions per prompt",
    "stop": "text that ends the answer; may be given several times",
    "stop_token_ids": "token ids that end the answer, as 1,2,3",
    "ignore_eos": "go on after the model's end-of-text token",
    "min_tokens": "no end of text before this many tokens",
    "presence_penalty": "subtracted once from the logit of every token generated so far",
    "frequency_penalty": "subtracted for every time a token was generated",
    "repetition_penalty": "divides the logits of tokens seen so far, the prompt's too",
    "logit_bias": "added to the logits of tokens, as ID:BIAS,ID:BIAS",
    "allowed_token_ids": "only these token ids may be generated, as 1,2,3",
    "bad_words": "text that may not be generated; may be given several times",
    "logprobs": "report the N most likely tokens at every position (with --json)",
    "prompt_logprobs": "the same for the prompt (with --json)",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "keep the stop text in the answer",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line with a way out, and whose help is wide."""

    def __init__(self, **options: typing.Any) -> None:  # argparse's own constructor has these
        options.setdefault("formatter_class", _wide_help)
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: typing.Any = None, namespace: typing.Any = None) -> typing.Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self._command(parsed)
            flag = unknown[0].partition("=")[0]
            name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            base, dot, key = flag.partition(".")
            way_out = UNSERVED.get(SHORT_UNSERVED.get(base, name.partition(".")[0]))
            if way_out is not None:
                command.error(f"{base} is not supported: {way_out}")
            if dot and base in command._option_string_actions:  # vLLM's way to say a key of a JSON object
                command.error(f"{flag} is not known; say {base} '{{\"{key}\": ..}}'")
            near = difflib.get_close_matches(flag, list(command._option_string_actions), n=1)
            hint = f"did you mean {near[0]}?" if near else "nothing of that name is known"
            command.error(f"unknown argument {unknown[0]!r}; {hint}")
        return parsed

    def error(self, message: str) -> typing.NoReturn:
        sys.stderr.write(f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")
        sys.exit(2)

    def _command(self, parsed: argparse.Namespace) -> Parser:
        """The parser of the command that was chosen, however deep; this one, if it has no commands."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices[vars(parsed)[action.dest]]._command(parsed)
        return self


def _wide_help(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=36, width=HELP_WIDTH)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every engine option, one argument group a section."""
    for section, config in SECTIONS.items():
        add_section(parser, section, config)
    add_ignored(parser, ENGINE)


def add_ignored(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Take options that have no effect, unseen in the help."""
    for name in names:
        flag, flags = "--" + name.replace("_", "-"), argparse.BooleanOptionalAction
        said = [flag, *([SHORT[name]] if name in SHORT else [])]
        if name in WITH_VALUES:
            parser.add_argument(flag, dest=name, nargs="+", default=UNSET, help=argparse.SUPPRESS)
        elif name in WITH_VALUE:
            parser.add_argument(*said, dest=name, default=UNSET, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, dest=name, action=flags, default=UNSET, help=argparse.SUPPRESS)


def add_section(
    parser: argparse.ArgumentParser,
    section: str,
    config: type,
    *,
    several: Iterable[str] = (),
    only: Iterable[str] | None = None,
) -> None:
    """Add the fields of a config dataclass.

    several: those that take one value or more, also repeatedly.  only: some fields; None is all.
    """
    group = parser.add_argument_group(f"{section} options", (config.__doc__ or "").strip())
    hints = typing.get_type_hints(config)
    for field in fields(config):
        if only is not None and field.name not in only:
            continue
        if field.name in several:
            flag, text = "--" + field.name.replace("_", "-"), field.metadata["help"]
            group.add_argument(
                flag, dest=field.name, nargs="+", action="extend", default=UNSET, metavar="TEXT", help=text
            )
        else:
            _add(group, field, hints[field.name])


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """The engine options that the user gave, the model among them."""
    return chosen(args, [*(field.name for _, field in all_options()), *ENGINE])


def open_llm(args: argparse.Namespace) -> LLM:
    """An `LLM` with the options that the user gave; a context manager."""
    llm: LLM = load_object("pellucid.llm:LLM")(**engine_options(args))
    return llm


def add_sampling_options(
    parser: argparse.ArgumentParser, names: Iterable[str] = tuple(SAMPLING_HELP), *, max_tokens: int | None
) -> None:
    """Add sampling parameters.  max_tokens: the command's own default; None is up to the context."""
    group = parser.add_argument_group(
        "sampling options", "The checkpoint's generation config, if it has one, goes before these defaults."
    )
    hints = typing.get_type_hints(SamplingParams)
    for name in names:
        text = SAMPLING_HELP[name] + _default_text(name, max_tokens)
        flag = "--" + name.replace("_", "-")
        kind, _ = _plain_type(hints[name])
        if kind is bool:
            group.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=UNSET, help=text
            )
        elif name in ("stop", "bad_words"):
            group.add_argument(flag, dest=name, action="append", default=UNSET, metavar="TEXT", help=text)
        elif name in _SPELLED:
            metavar, parse = _SPELLED[name]
            group.add_argument(flag, dest=name, type=parse, default=UNSET, metavar=metavar, help=text)
        else:
            group.add_argument(flag, dest=name, type=kind, default=UNSET, metavar=_metavar(kind), help=text)


def _default_text(name: str, max_tokens: int | None) -> str:
    if name == "max_tokens":
        return f" (default {'up to the context' if max_tokens is None else max_tokens})"
    default = next(field.default for field in fields(SamplingParams) if field.name == name)
    return "" if default is None else f" (default {_said(default)})"


def _said(default: object) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def sampling_params(
    args: argparse.Namespace, defaults: SamplingParams, *, max_tokens: int | None
) -> SamplingParams:
    """`defaults` (the checkpoint's) with `max_tokens` and then what the user gave."""
    return defaults.clone(**{"max_tokens": max_tokens, **chosen(args, SAMPLING_HELP)})


def chosen(args: argparse.Namespace, names: Iterable[str]) -> dict[str, object]:
    """The options among `names` that the user gave."""
    given = vars(args)
    return {name: given[name] for name in names if name in given}


def _add(group: argparse._ArgumentGroup, field: Field[typing.Any], hint: object) -> None:
    kind, optional = _plain_type(hint)
    flags = ["--" + name.replace("_", "-") for name in (field.name, *field.metadata["alias"])]
    flags += [SHORT[field.name]] if field.name in SHORT else []
    text = field.metadata["help"].replace("%", "%%")
    if kind is bool:
        text += f" (default {_said(field.default)})"
        group.add_argument(
            *flags, dest=field.name, action=argparse.BooleanOptionalAction, default=UNSET, help=text
        )
        return
    if not optional:
        text += f" (default {field.default})"
    choices = field.metadata["choices"] or None
    group.add_argument(
        *flags, dest=field.name, type=kind, default=UNSET, choices=choices, help=text,
        metavar=None if choices else _metavar(kind),
    )  # fmt: skip


def _metavar(kind: type) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _plain_type(hint: object) -> tuple[type, bool]:
    """(int, True) for `int | None`; (str, False) for `str`.  Containers count as `str`."""
    arguments = typing.get_args(hint)
    if not arguments:
        return typing.cast(type, hint), False
    plain = [a for a in arguments if a is not type(None)]
    scalar = next((a for a in plain if a in (int, float, str, bool)), str)
    return scalar, type(None) in arguments


def token_ids(text: str) -> list[int]:
    """Parse `1,2,3` or `1 2 3`.  Raises ArgumentTypeError, naming the first that is no token id."""
    parts = text.replace(",", " ").split()
    for part in parts:
        if not part.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is no token id; write whole numbers, as 1,2,3")
    return [int(part) for part in parts]


def _biases(text: str) -> dict[int, float]:
    biases: dict[int, float] = {}
    for part in text.split(","):
        token, _, bias = part.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no bias; write ID:BIAS, as 42:-100") from None
    return biases


_SPELLED: dict[str, tuple[str, Callable[[str], object]]] = {
    "stop_token_ids": ("IDS", token_ids),
    "allowed_token_ids": ("IDS", token_ids),
    "logit_bias": ("BIASES", _biases),
}
