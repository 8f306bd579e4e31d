"""From the bytes of a body to a request, or to a sentence that says what is wrong with it."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pellucid.server.errors import ApiError, field_fault

T = TypeVar("T", bound=BaseModel)


def parse(kind: type[T], body: bytes) -> T:
    """Raises a 400 for what is no request of this kind."""
    if not body:
        raise ApiError(400, "the request has no body, must have JSON")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        if faults[0]["type"] == "json_invalid":
            raise ApiError(400, _json_fault(body, str(faults[0]["msg"]))) from error
        if not faults[0]["loc"]:
            raise ApiError(400, "the body is no JSON object") from error
        raise field_fault(faults) from error


def _json_fault(body: bytes, message: str) -> str:
    """Why a body cannot be read; Python's words for it name the place."""
    if "recursion" in message:
        return "the body is nested too deeply: at most some 200 lists and objects may be within each other"
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except json.JSONDecodeError as error:
        return f"the body is no JSON: {error.msg} at character {error.pos}"
    except UnicodeDecodeError:
        return "the body is no JSON: it is not in UTF-8"
    except (RecursionError, ValueError) as error:
        return f"the body is no JSON: {error}"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "the body has half of a character (a surrogate), which no text contains"
    return f"the body is no JSON: {message}"
