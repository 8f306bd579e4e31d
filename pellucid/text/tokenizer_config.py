"""The JSON files beside a tokenizer: named special tokens, whether to add them, and the chat templates.

Reads `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `chat_template.json` and
`additional_chat_templates/`; any of them may be absent.  Knows nothing about vocabularies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """What a checkpoint says about its tokenizer beyond the vocabulary."""

    special_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    add_bos_token: bool | None = None  # None leaves it to the tokenizer's post-processor
    chat_templates: dict[str, str] = field(default_factory=dict)  # "default", "tool_use", ...

    @classmethod
    def read(cls, folder: Path) -> TokenizerConfig:
        """Read the files in `folder`; what is missing there is left at its default."""
        config = _read_json(folder / "tokenizer_config.json")
        tokens = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
        add_bos = config.get("add_bos_token")
        return cls(
            special_tokens=tokens,
            add_bos_token=add_bos if isinstance(add_bos, bool) else None,
            chat_templates=_chat_templates(folder, config),
        )


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download the checkpoint again") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Named tokens, each written as a string or as {"content": ...}."""
    found: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _chat_templates(folder: Path, config: dict[str, object]) -> dict[str, str]:
    """All templates by name; a .jinja file overrides chat_template.json, which overrides the config entry."""
    templates = _named_templates(config, folder / "tokenizer_config.json")
    beside = folder / "chat_template.json"
    templates |= _named_templates(_read_json(beside), beside)
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        templates["default"] = jinja.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates


def _named_templates(config: dict[str, object], file: Path) -> dict[str, str]:
    """The file's chat_template: one, a list of {"name": ..., "template": ...}, or a mapping of names."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): str(template) for name, template in value.items()}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}  # type: ignore[union-attr]
    except (TypeError, KeyError):
        raise ValueError(
            f"chat_template in {file} is {value!r:.100}, must be a template, or a list of names and templates"
        ) from None
