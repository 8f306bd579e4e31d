"""A server at a path, with keys of a file."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from pellucid.server.listener import bind
from pellucid.server.options import ServeOptions
from tests.patience import PATIENCE
from tests.server.conftest import running


def test_a_server_may_listen_at_a_path(tmp_path: Path) -> None:
    path, keys = tmp_path / "socket", tmp_path / "keys.yaml"
    keys.write_text("alice: {key: secret, requests_per_minute: 1}\n")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # by a server that was killed
    left.close()
    with running("--uds", str(path), "--api-key-file", str(keys)) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=PATIENCE
        ) as client:
            assert client.get("/health").status_code == 200
            body, headers = {"prompt": "Once", "max_tokens": 2}, {"Authorization": "Bearer secret"}
            assert client.post("/v1/completions", json=body).status_code == 401
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
            again = client.post("/v1/completions", json=body, headers=headers)
            assert again.status_code == 429 and again.json()["error"]["type"] == "RateLimitError"
        with pytest.raises(ValueError, match="where another server listens"):
            bind(ServeOptions(uds=str(path)))


def test_a_file_is_no_place_to_listen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="no socket"):
        bind(ServeOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"
