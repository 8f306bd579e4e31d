"""Requests made from the server's own description: whatever they hold, none is answered with a 500."""

from __future__ import annotations

import warnings

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import booleans
from schemathesis import Case

from tests.server.conftest import Running

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
    "/v1/models/{name}",
)
DEMANDED = ("model", "prompt", "messages", "tokens", "max_tokens")
MOST_ROUNDS = 8  # until one of the requests is answered


def make_sensible(case: Case, is_bare: bool) -> Case:
    """Get past the first checks, and be short.  A bare request has only what routes demand."""
    body = case.body
    if isinstance(body, dict):
        if is_bare:
            case.body = body = {name: value for name, value in body.items() if name in DEMANDED}
        body["model"] = "sprout"
        for name in {"max_tokens", *({"max_completion_tokens"} & body.keys())}:
            if body.get(name) is None or (isinstance(body[name], int | float) and body[name] > 3):
                body[name] = 3
        for name in ("n", "best_of"):
            if isinstance(body.get(name), int | float) and body[name] > 2:
                body[name] = 2
        body.pop("min_tokens", None)
        for message in body.get("messages") or ():
            if isinstance(message, dict):
                message.setdefault("role", "user")
                message.setdefault("content", "Hi")
    return case


@pytest.mark.parametrize("path", ROUTES)
def test_no_request_is_answered_with_a_500(server: Running, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operations = [found.ok() for found in schema.get_all_operations()]
    (operation,) = [found for found in operations if found.path == path]
    statuses: set[int] = set()

    @given(case=operation.as_strategy(), is_bare=booleans())
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    def ask(case: Case, is_bare: bool) -> None:
        reply = make_sensible(case, is_bare).call(timeout=60)
        statuses.add(reply.status_code)
        assert reply.status_code < 500 and '"code":500' not in reply.text, reply.text

    for number in range(MOST_ROUNDS):
        seed(number)(ask)()
        if 200 in statuses or path == "/v1/models/{name}":
            break
    else:
        pytest.fail(f"nothing got through: {statuses}")
    server.wait_until_idle()
