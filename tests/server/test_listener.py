"""A server at a path, with certificates, and keys of a file."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from pellucid.server.listener import bind
from pellucid.server.options import ServeOptions
from tests.forked import Nursery
from tests.patience import PATIENCE
from tests.server.conftest import running


def certificate(folder: Path) -> tuple[str, str]:
    """A new one, signed by itself, and its key."""
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", key, "-out", certificate]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_server_may_listen_at_a_path_and_know_its_clients(tmp_path: Path, nursery: Nursery) -> None:
    """By certificates, and by keys of a file."""
    path, keys = tmp_path / "socket", tmp_path / "keys.yaml"
    keys.write_text("alice: {key: secret, requests_per_minute: 1}\n")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # by a server that was killed
    left.close()
    own, key = certificate(tmp_path)

    def client(context: ssl.SSLContext) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(path), verify=context)
        return httpx.Client(transport=transport, base_url="https://localhost", timeout=PATIENCE)

    secured = ["--ssl-certfile", own, "--ssl-keyfile", key, "--ssl-ca-certs", own]
    with running("--uds", str(path), "--api-key-file", str(keys), *secured, forks=nursery) as server:
        assert server.url == f"unix:{path}"
        context = ssl.create_default_context(cafile=own)
        with client(context) as stranger, pytest.raises(httpx.TransportError):
            stranger.get("/health")
        context.load_cert_chain(own, key)
        with client(context) as known:
            assert known.get("/health").status_code == 200
            body, headers = {"prompt": "Once", "max_tokens": 2}, {"Authorization": "Bearer secret"}
            assert known.post("/v1/completions", json=body).status_code == 401
            assert known.post("/v1/completions", json=body, headers=headers).status_code == 200
            again = known.post("/v1/completions", json=body, headers=headers)
            assert again.status_code == 429 and again.json()["error"]["type"] == "RateLimitError"
        with pytest.raises(ValueError, match="where another server listens"):
            bind(ServeOptions(uds=str(path)))
    assert not path.exists(), "a server that ends leaves nothing behind"


def test_a_file_is_no_place_to_listen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="no socket"):
        bind(ServeOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"
