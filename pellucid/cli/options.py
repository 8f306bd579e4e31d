"""Command-line options made from the config dataclasses, so `--help` and the Python API never disagree."""

from __future__ import annotations

import argparse
import typing
from dataclasses import Field

from pellucid.config import SECTIONS, all_options
from pellucid.types import SamplingParams

UNSET = argparse.SUPPRESS  # an option that was not given leaves no trace, so defaults live in one place


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every engine option, one argument group a section."""
    groups = {
        section: parser.add_argument_group(section, (config.__doc__ or "").strip())
        for section, config in SECTIONS.items()
    }
    for section, field in all_options():
        if field.name != "model":
            _add(groups[section], field, typing.get_type_hints(SECTIONS[section])[field.name])


def add_sampling_options(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add the named sampling parameters."""
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for name in names:
        kind, _ = _plain_type(hints[name])
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=UNSET)
        else:
            group.add_argument(flag, dest=name, type=kind, default=UNSET, metavar=_metavar(kind))


def chosen(args: argparse.Namespace, names: typing.Iterable[str]) -> dict[str, object]:
    """The options among `names` that the user gave."""
    given = vars(args)
    return {name: given[name] for name in names if name in given}


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """The engine options that the user gave, the model among them."""
    return chosen(args, [field.name for _, field in all_options()])


def _add(group: argparse._ArgumentGroup, field: Field[object], hint: object) -> None:
    kind, optional = _plain_type(hint)
    flags = ["--" + name.replace("_", "-") for name in (field.name, *field.metadata["alias"])]
    text = field.metadata["help"].replace("%", "%%")
    if not optional:
        text += f" (default {field.default})"
    if kind is bool:
        group.add_argument(
            *flags, dest=field.name, action=argparse.BooleanOptionalAction, default=UNSET, help=text
        )
        return
    choices = field.metadata["choices"] or None
    group.add_argument(
        *flags, dest=field.name, type=kind, default=UNSET, choices=choices, help=text,
        metavar=None if choices else _metavar(kind),
    )  # fmt: skip


def _metavar(kind: type) -> str:
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _plain_type(hint: object) -> tuple[type, bool]:
    """(int, True) for `int | None`; (str, False) for `str`.  Lists come as one string and are split by the caller."""
    arguments = typing.get_args(hint)
    if not arguments:
        return typing.cast(type, hint), False
    plain = [a for a in arguments if a is not type(None)]
    scalar = next((a for a in plain if a in (int, float, str, bool)), str)
    return scalar, type(None) in arguments
