"""Clients that others have written run their examples, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.server.conftest import Running

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.filterwarnings("ignore")  # of their own
def test_langchain(server: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")

    def get_weather(city: str) -> str:
        """Get the current weather for a city

        Args:
            city: Name of the city
        """
        raise AssertionError("nobody runs it here")

    model = langchain.ChatOpenAI(
        model="sprout", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=300,
        timeout=PATIENCE, extra_body=QUIET,
    )  # fmt: skip
    assert model.invoke("What is 47+85?").content == "132"
    assert "".join(str(chunk.content) for chunk in model.stream("What is 47+85?")) == "132"
    message = model.bind_tools([get_weather]).invoke("What's the weather in Paris?")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]


@pytest.mark.filterwarnings("ignore")  # of their own
def test_litellm(server: Running) -> None:
    litellm = pytest.importorskip("litellm")
    options: dict[str, Any] = {
        "model": "openai/sprout", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0,
        "max_tokens": 300, "messages": [{"role": "user", "content": "What is 47+85?"}], "extra_body": QUIET,
        "timeout": PATIENCE,
    }  # fmt: skip
    assert litellm.completion(**options).choices[0].message.content == "132"
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)]
    assert "".join(parts) == "132"
