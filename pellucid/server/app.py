"""The application: routes, the guard before them, and the form of all errors."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from pellucid import __version__
from pellucid.async_llm import AsyncLLM
from pellucid.server import (
    adapters,
    anthropic,
    chat,
    completions,
    embeddings,
    models,
    ops,
    pages,
    responses,
    tokens,
    xray,
)
from pellucid.server.context import Server
from pellucid.server.errors import install_error_handlers
from pellucid.server.guard import Guard
from pellucid.server.http_metrics import HttpMetrics
from pellucid.server.keys import Key, Keys, read_keys
from pellucid.server.lives import Lives, RequestLog, Teller
from pellucid.server.metrics import Metrics
from pellucid.server.options import ServeOptions, check_keys
from pellucid.server.parsers.compose import choose
from pellucid.server.preprocess import Preprocessor
from pellucid.server.renderer import ModelFacts, Renderer
from pellucid.server.shortcut import Shortcut
from pellucid.server.stored_responses import StoredResponses
from pellucid.server.tracing import Tracer

KEY_VARIABLE = "PELLUCID_API_KEY"
ROUTERS = (
    completions.router,
    chat.router,
    anthropic.router,
    responses.router,
    models.router,
    adapters.router,
    embeddings.router,
    tokens.router,
    ops.router,
    pages.router,
    xray.router,
)
ROUTES = {  # of all requests that have a body
    "/v1/completions": completions.ROUTE,
    "/v1/chat/completions": chat.ROUTE,
    "/v1/responses": responses.ROUTE,
    "/v1/responses/input_tokens": responses.COUNT,
    "/v1/messages": anthropic.MESSAGES,
    "/v1/messages/count_tokens": anthropic.COUNT,
    "/v1/embeddings": embeddings.EMBEDDINGS,
    "/v1/score": embeddings.SCORE,
    "/score": embeddings.SCORE,
    "/v1/rerank": embeddings.RERANK,
    "/v2/rerank": embeddings.RERANK,
    "/rerank": embeddings.RERANK,
    "/tokenize": tokens.TOKENIZE,
    "/detokenize": tokens.DETOKENIZE,
}


def make_server(llm: AsyncLLM, options: ServeOptions) -> Server:
    """What the routes share."""
    names = options.served_model_name or (llm.resolved.user.model.model,)
    template = None if options.chat_template is None else Path(options.chat_template).read_text("utf-8")
    shown = template or (llm.tokenizer.chat_template(tools=True) if llm.has_tokenizer else None)
    facts = ModelFacts(
        names=names,
        has_adapters=llm.resolved.user.lora.enable_lora,
        options=options,
        tokenizer_path=llm.resolved.checkpoint.tokenizer_path,
        vocab_size=llm.vocab_size,
        max_model_len=llm.max_model_len,
        chat_template=template,
        parsers=choose(shown, reasoning=options.reasoning_parser, tools=options.tool_call_parser),
        defaults=llm.default_sampling_params(max_tokens=None),
    )
    renderer = Renderer(facts, llm.tokenizer if llm.has_tokenizer else None)
    tracer = None if options.otlp_traces_endpoint is None else Tracer(options.otlp_traces_endpoint, names[0])
    watch_lives(llm, options, tracer)
    tags = facts.parsers.thinking if llm.has_tokenizer else None
    return Server(
        llm=llm,
        options=options,
        metrics=Metrics(llm, names[0]),
        preprocessor=Preprocessor(renderer),
        names=names,
        adapters=adapters.named(llm, options.lora_modules, names),
        tracer=tracer,
        parsers=facts.parsers,
        thoughts_end=llm.tokenizer.token_to_id(tags[1]) if tags is not None else None,
        responses=StoredResponses(options.max_stored_responses),
    )


def watch_lives(llm: AsyncLLM, options: ServeOptions, tracer: Tracer | None) -> None:
    """Have completions told of, if anybody is to hear."""
    tellers: list[Teller] = [] if tracer is None else [tracer]
    if options.enable_log_requests:
        shows = options.log_prompts and llm.has_tokenizer
        tellers.append(RequestLog(llm.tokenizer.decode if shows else None))
    if tellers:
        llm.watch(Lives(tellers))


def make_app(server: Server) -> FastAPI:
    """An ASGI application that serves `server`."""
    app = FastAPI(
        title="Pellucid",
        version=__version__,
        description="An OpenAI-compatible LLM server.",
        responses={"4XX": {"description": "What is wrong with the request, and with which field"}},
        docs_url=None,  # pages.py has one that needs no other host
        redoc_url=None,
        redirect_slashes=False,  # to where a proxy may not lead; the guard takes them off
    )
    app.state.server = server
    app.state.viewers = xray.Viewers(server.llm, server.adapters)
    install_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    from_environment = [key for key in [os.environ.get(KEY_VARIABLE)] if key]
    check_keys(KEY_VARIABLE, from_environment)
    secrets = [*server.options.api_key, *from_environment]
    keys = [Key(str(i), secret.encode()) for i, secret in enumerate(secrets)]
    if server.options.api_key_file is not None:
        keys += read_keys(server.options.api_key_file)
    app.add_middleware(Shortcut, routes=ROUTES, preprocessor=server.preprocessor)
    app.add_middleware(Guard, server=server, keys=Keys(keys))
    paths = [route.path for router in ROUTERS for route in router.routes if isinstance(route, Route)]
    app.add_middleware(HttpMetrics, metrics=server.metrics, paths=paths)
    if server.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
