"""Two servers, one for prompts and one that goes on: what vLLM's proxies send, and what they get."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator
from contextlib import contextmanager

import httpx
import pytest

from pellucid.connectors.peer.params import KVParams
from pellucid.connectors.peer.trust import Trust
from tests.forked import Nursery
from tests.patience import PATIENCE
from tests.server.conftest import Running, running

PROMPT = "Sort these: 5 1 4 2 9 7. " * 20
BODY = {"model": "sprout", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
NOBODY = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False, **NOBODY}


def config(role: str, **more: object) -> str:
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": role, **more})


@pytest.fixture(scope="module")
def pair(nursery: Nursery) -> Generator[tuple[Running, Running], None, None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lends = config("kv_producer", kv_ip="127.0.0.1", kv_port=port)
    with (
        secret(),
        running("--dtype", "float32", "--kv-transfer-config", lends, forks=nursery) as first,
        running("--dtype", "float32", "--kv-transfer-config", config("kv_consumer"), forks=nursery) as second,
    ):
        yield first, second


@contextmanager
def secret() -> Generator[None, None, None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PELLUCID_SECRET", "known to both servers")
        yield


def post(server: Running, body: dict[str, object], route: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + route, json=body, timeout=PATIENCE)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_of_one_server_is_gone_on_with_at_another(
    pair: tuple[Running, Running], is_chat: bool
) -> None:
    first, second = pair
    body = dict(BODY) | {"max_tokens": 24}
    route = "/v1/chat/completions" if is_chat else "/v1/completions"
    if is_chat:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    kept = post(first, body | {"max_tokens": 1, "kv_transfer_params": KEEP}, route).json()
    params = kept["kv_transfer_params"]
    assert params["do_remote_prefill"] and params["remote_port"] and params["tp_size"] == 1
    answer = post(second, body | {"kv_transfer_params": params}, route).json()
    usage = answer["usage"]
    size = usage["prompt_tokens"] // len(params["remote_block_ids"])
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 2 * size > 0
    alone = post(first, body, route).json()
    assert [choice.get("text", choice.get("message")) for choice in answer["choices"]] == [
        choice.get("text", choice.get("message")) for choice in alone["choices"]
    ]
    assert "kv_transfer_params" not in alone


def test_kv_that_is_nowhere_is_computed(pair: tuple[Running, Running]) -> None:
    _, second = pair
    gone = KVParams(do_remote_prefill=True, remote_engine_id="gone", remote_request_id="1")
    with secret():
        nowhere = json.loads(Trust.of(()).sealed(gone).encode())
    prompt = "Nobody has this. " * 30
    answer = post(second, BODY | {"prompt": prompt, "kv_transfer_params": nowhere})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_host_that_a_client_makes_up_is_neither_believed_nor_asked(pair: tuple[Running, Running]) -> None:
    _, second = pair
    with socket.create_server(("127.0.0.1", 0)) as victim:
        host, port = victim.getsockname()
        made_up = {
            "do_remote_prefill": True,
            "remote_engine_id": "x",
            "remote_host": host,
            "remote_port": port,
        }
        answer = post(second, BODY | {"kv_transfer_params": made_up | {"remote_seal": "0" * 64}})
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and f"'x' at 127.0.0.1:{port} is not believed" in said
        victim.settimeout(0.2)
        with pytest.raises(TimeoutError):
            victim.accept()


def test_what_cannot_be_meant_is_refused(pair: tuple[Running, Running]) -> None:
    _, second = pair
    for wrong in ({"do_remote_prefill": True}, {"do_remote_prefill": "maybe"}):
        answer = post(second, BODY | {"kv_transfer_params": wrong})
        assert answer.status_code == 400 and "kv_transfer_params" in answer.json()["error"]["message"]
