"""A JSON schema that refers to what is not there is refused; the library would let any JSON through."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("xgrammar")

from pellucid.sample.grammars.xgrammar import check_references

FOLLOWED = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    {"properties": {"$ref": {"type": "string"}}},
    {"enum": [{"$ref": "http://a.org"}]},
    {"properties": {"default": {"const": {"$dynamicRef": "x"}}}},
]
NOT_FOLLOWED = [
    {"$ref": "http://a.org/b.json"},
    {"$ref": "other.json#/a"},
    {"$ref": "#anchor"},
    {"$ref": ""},
    {"$ref": "#/"},
    {"$dynamicRef": "#a"},
    {"$recursiveRef": "#"},
    {"anyOf": [{"type": "null"}, {"items": {"$ref": "a"}}]},
    {"properties": {"default": {"$ref": "a"}}},
    {"$defs": {"enum": {"$ref": "a"}}},
    {"format": {"type": "json_schema", "json_schema": {"$ref": "a"}}},  # of a structural tag
]


@pytest.mark.parametrize("schema", FOLLOWED, ids=json.dumps)
def test_what_is_followed_is_let_through(schema: dict) -> None:
    check_references(json.dumps(schema))


@pytest.mark.parametrize("schema", NOT_FOLLOWED, ids=json.dumps)
def test_what_is_not_followed_is_refused(schema: dict) -> None:
    with pytest.raises(ValueError, match=r"(Ref|ref) '.*' is not followed: only \$ref is"):
        check_references(json.dumps(schema))
