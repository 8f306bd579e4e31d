"""What can be said about a server, as distinct from its engine; each field's text becomes `--help`."""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pellucid.config import json_object, option
from pellucid.server.parsers.compose import choose

PRINTABLE = re.compile("[!-~]+")
MORE_THAN_NOTHING = (
    *("max_waiting", "max_n", "max_stop_strings", "max_grammar_seconds", "max_body_mib", "request_seconds"),
    "log_stats_interval",
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where the server listens, whom it serves, and how much it takes on."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every one of this machine's")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = option(None, "a path to listen at instead, as a Unix socket")
    served_model_name: tuple[str, ...] = option((), "names that requests may call the model by")
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters that requests may name as their model from the start, as NAME=FOLDER or JSON with name and "
        "path; with enable_lora",
    )
    api_key: tuple[str, ...] = option((), "keys, one of which a request must bring; also PELLUCID_API_KEY")
    api_key_file: str | None = option(
        None, "keys with names and limits: YAML, NAME: {key: .., max_requests: N, requests_per_minute: N}"
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web pages that may call this server, such as https://a.org"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names that requests may call this server by, * for any; by default any, but localhost alone where "
        "it listens to this machine only",
    )
    max_waiting: int = option(2048, "most completions that wait for the engine; more are answered with 503")
    drain_seconds: float = option(30.0, "seconds that SIGTERM leaves to the requests under way")
    restart: bool = option(False, "start the engine anew when it dies, once")
    max_logprobs: int = option(20, "most likely tokens that a request may ask for")
    max_n: int = option(128, "most completions of a prompt")
    max_output_tokens: int | None = option(None, "most tokens of a completion, whatever a request asks for")
    max_stop_strings: int = option(64, "most stop strings of a request, and most bad words")
    max_stored_responses: int = option(1000, "most answers of /v1/responses that are kept for later requests")
    max_grammar_seconds: float = option(
        5.0, "most seconds of a processor's time to compile a request's grammar"
    )
    max_body_mib: float = option(8.0, "most MiB of a request's body")
    request_seconds: float = option(60.0, "most seconds that a request may take to come in")
    chat_template: str | None = option(None, "a file with a Jinja template, instead of the model's own")
    default_chat_template_kwargs: str | None = option(
        None, 'names for the template where a request says none, JSON: {"enable_thinking": false}'
    )
    root_path: str = option("", "the path under which a proxy shows this server")
    ssl_certfile: str | None = option(None, "certificate, for HTTPS")
    ssl_keyfile: str | None = option(None, "the certificate's key")
    ssl_ca_certs: str | None = option(None, "certificates that clients' own have to be signed by")
    reasoning_parser: str = option(
        "auto",
        "how reasoning is told from the answer: vLLM's names (qwen3, deepseek_r1, ...), FILE.py:Class, plain "
        "(not at all), auto (by the chat template)",
    )
    tool_call_parser: str = option(
        "auto",
        "how tool calls are found: vLLM's names (hermes, mistral, ...), FILE.py:Class, plain (not), auto (by "
        "the chat template)",
    )
    enable_auto_tool_choice: bool = option(True, "let the model itself decide whether to call a tool")
    otlp_traces_endpoint: str | None = option(
        None, "where a span for each request is sent, http://HOST:4318/v1/traces; needs pellucid[otel]"
    )
    enable_log_requests: bool = option(False, "log a line for each completion that has ended")
    log_prompts: bool = option(False, "show the beginning of prompts in these lines")
    log_stats_interval: float = option(10.0, "seconds between two lines of statistics, with --verbose")
    access_log: bool = option(False, "log every request")

    def __post_init__(self) -> None:
        choose(None, reasoning=self.reasoning_parser, tools=self.tool_call_parser)
        for name in MORE_THAN_NOTHING:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must be more than 0")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens is {self.max_output_tokens}, must be at least 1")
        for name in ("chat_template", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "api_key_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name} is {path!r}, which is no file")
        for name in ("drain_seconds", "max_logprobs", "max_stored_responses"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}, must be at least 0")
        for name in ("api_key", "served_model_name", "allowed_hosts"):
            if "" in getattr(self, name):  # an empty key would be every request's
                raise ValueError(f"{name} has an empty one; leave the option out, or give it a value")
        if self.log_prompts and not self.enable_log_requests:
            raise ValueError("log_prompts needs enable_log_requests")
        check_keys("api_key", self.api_key)
        _ = self.template_defaults  # which raises for what is none
        self._check_certificate()
        if not self.host:
            raise ValueError("host is empty; 0.0.0.0 is every address of this machine")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}, must be in [0, 65535]")

    @cached_property
    def template_defaults(self) -> Mapping[str, object]:
        """What `default_chat_template_kwargs` says."""
        return json_object("default_chat_template_kwargs", self.default_chat_template_kwargs or {})

    def _check_certificate(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs ssl_certfile")
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:
            raise ValueError(f"ssl_certfile {self.ssl_certfile!r} cannot be used: {error}") from error


def check_keys(name: str, keys: Sequence[str]) -> None:
    """Raise ValueError for a key that no header can bring."""
    for i, key in enumerate(keys):
        if not PRINTABLE.fullmatch(key):
            raise ValueError(
                f"{name} has at {i} a key with a character that no header brings as it is; use "
                "letters, digits and signs of ASCII, without spaces"
            )
