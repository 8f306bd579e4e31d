"""Adapters over HTTP: listed, named as a model, loaded and unloaded while the server runs."""

from __future__ import annotations

import json
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import httpx
import openai
import pytest
from websockets.sync.client import connect

from pellucid import LLM, SamplingParams
from pellucid.async_llm import AsyncLLM
from pellucid.server.adapters import named
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Running, running

PROMPT = list(range(5, 60))


@pytest.fixture(scope="module")
def served(tiny: Path, adapters: dict[str, Path]) -> Generator[Running, None, None]:
    folder = str(adapters["all"] / "adapter")
    same = json.dumps({"name": "same", "path": folder})
    lora = ("--enable-lora", "--max-loras", "1", "--lora-modules", f"all={folder}", same)
    with running("--model", str(tiny), "--served-model-name", "base", *lora) as server:
        yield server


def text(server: Running, model: str) -> str:
    answer = server.client().completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def alone(model: Path) -> str:
    with LLM(str(model), cpu_kv_cache_gib=0.01) as llm:
        return llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text


def post(server: Running, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


def test_an_adapter_is_a_model_to_requests(served: Running, tiny: Path, adapters: dict[str, Path]) -> None:
    listed = {model.id: model for model in served.client().models.list().data}
    assert listed.keys() == {"base", "all", "same"} and (listed["all"].model_extra or {})["parent"] == "base"
    assert text(served, "base") == alone(tiny)
    assert text(served, "all") == alone(adapters["all"] / "merged") != alone(tiny)
    assert text(served, "same") == text(served, "all")
    for wrong in ("x", "=x", '{"name": "x"}', "{x"):
        with pytest.raises(ValueError, match="must be NAME=FOLDER"):
            named(cast(AsyncLLM, None), [wrong], [])
    with pytest.raises(openai.NotFoundError, match="nobody"):
        text(served, "nobody")


def test_who_watches_sees_each_adapters_requests(served: Running) -> None:
    def told() -> dict[str, list[int]]:
        with connect(served.url.replace("http", "ws") + "/xray", max_size=None) as socket:
            adapters = json.loads(socket.recv(PATIENCE))["requests"]["adapters"]
        return {name: counts for name, *counts in adapters}

    before = told()["all"]
    text(served, "all")
    text(served, "base")
    assert told()["all"] == [0, before[1] + 1]


def test_adapters_come_and_go(served: Running, adapters: dict[str, Path], tmp_path: Path) -> None:
    path = str(adapters["one"] / "adapter")
    assert post(served, "/v1/load_lora_adapter", lora_name="new", lora_path=path).status_code == 200
    assert text(served, "new") == alone(adapters["one"] / "merged")
    again = post(served, "/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert again.status_code == 400 and "already" in again.json()["error"]["message"]
    assert post(served, "/v1/unload_lora_adapter", lora_name="new").status_code == 200
    with pytest.raises(openai.NotFoundError):
        text(served, "new")
    assert post(served, "/v1/unload_lora_adapter", lora_name="new").status_code == 404
    nowhere = post(served, "/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path))
    assert nowhere.status_code == 400 and "no LoRA adapter" in nowhere.json()["error"]["message"]


def test_a_pause_says_nothing_of_an_adapter(served: Running, adapters: dict[str, Path]) -> None:
    path = str(adapters["one"] / "adapter")
    httpx.post(f"{served.url}/pause?mode=keep")
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(post, served, "/v1/load_lora_adapter", lora_name="late", lora_path=path)
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 1)
        httpx.post(f"{served.url}/pause")
        assert loading.result().status_code == 503 and "paused" in loading.result().text
    httpx.post(f"{served.url}/resume")
    assert post(served, "/v1/unload_lora_adapter", lora_name="late").status_code == 404


def test_of_two_at_once_one_has_the_name(served: Running, adapters: dict[str, Path]) -> None:
    paths = [str(adapters[name] / "adapter") for name in ("one", "all")]
    httpx.post(f"{served.url}/pause?mode=keep")
    with ThreadPoolExecutor(2) as threads:
        loading = [
            threads.submit(post, served, "/v1/load_lora_adapter", lora_name="two", lora_path=path)
            for path in paths
        ]
        eventually(lambda: served.metric("vllm:num_requests_waiting") == 2)
        httpx.post(f"{served.url}/resume")
    first, second = sorted((each.result() for each in loading), key=lambda answer: answer.status_code)
    assert (first.status_code, second.status_code) == (200, 400) and "already" in second.text
    assert post(served, "/v1/unload_lora_adapter", lora_name="two").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"), [({"lora_name": "x"}, "lora_path"), ({"lora_name": 5, "lora_path": "x"}, "lora_name")]
)
def test_a_field_that_is_wrong_is_named(served: Running, body: dict[str, object], param: str) -> None:
    error = post(served, "/v1/load_lora_adapter", **body).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    headers = {"Content-Type": "application/json"}
    cut = httpx.post(f"{served.url}/v1/load_lora_adapter", content=b'{"lora_name"', headers=headers)
    assert cut.status_code == 400 and "is no JSON: Expecting" in cut.json()["error"]["message"]
