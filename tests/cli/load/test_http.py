"""Responses are understood however the network cuts them."""

from __future__ import annotations

import pytest

from pellucid.cli.load.http import BrokenResponseError, ResponseReader, Target

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n11;note=x\r\n, world\r\n0\r\n\r\n:-)\r\n0\r\n\r\n"
)
SIZED = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nConnection: close\r\n\r\nwait"


def read(data: bytes, size: int) -> tuple[ResponseReader, bytes]:
    reader, body = ResponseReader(), b""
    for begin in range(0, len(data), size):
        assert not reader.is_complete
        body += reader.feed(data[begin : begin + size])
    return reader, body


@pytest.mark.parametrize("size", range(1, len(CHUNKED) + 1))
def test_chunks_are_joined_for_every_cut(size: int) -> None:
    reader, body = read(CHUNKED, size)
    assert reader.is_complete and reader.keeps_alive and reader.status == 200
    assert body == b"hello, world\r\n0\r\n\r\n:-)"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_body_of_known_length(size: int) -> None:
    reader, body = read(SIZED, size)
    assert (reader.status, body, reader.is_complete, reader.keeps_alive) == (503, b"wait", True, False)


def test_an_interim_response_is_passed_over() -> None:
    reader, body = read(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, 1000)
    assert (reader.status, body) == (503, b"wait")


def test_a_body_may_end_with_its_connection() -> None:
    reader, body = read(b"HTTP/1.1 200 OK\r\n\r\nall of it", 6)
    assert body == b"all of it" and not reader.is_complete
    reader.close()
    assert reader.is_complete


def test_half_a_response_is_none() -> None:
    reader, _ = read(CHUNKED[:-4], 1000)
    with pytest.raises(BrokenResponseError, match="closed the connection"):
        reader.close()


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", CHUNKED.replace(b"5\r\nh", b"xyz\r\nh")])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenResponseError):
        ResponseReader().feed(data)


@pytest.mark.parametrize(
    "url,route",
    [
        ("http://a:8000", "http://a:8000/v1/models"),
        ("http://a:8000/v1/", "http://a:8000/v1/models"),
        ("a:81/llm/v1", "http://a:81/llm/v1/models"),
        ("https://a.org", "https://a.org:443/v1/models"),
        ("http://[::1]:9", "http://[::1]:9/v1/models"),
    ],
)
def test_addresses_come_with_and_without_v1(url: str, route: str) -> None:
    assert Target.parse(url, None).url("/v1/models") == route


def test_other_addresses_are_refused() -> None:
    with pytest.raises(ValueError, match="ftp"):
        Target.parse("ftp://a", None)
