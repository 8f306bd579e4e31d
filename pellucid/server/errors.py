"""What goes wrong, as clients of OpenAI's API read it: a status and one body for all.

A `ValueError` of the engine's becomes a 400 only within `users_fault`, where it is the request's;
elsewhere it is a bug and a 500.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pellucid.server.protocol.anthropic_output import ErrorBody as MessagesError
from pellucid.server.protocol.anthropic_output import Failure
from pellucid.types import STUCK

logger = logging.getLogger(__name__)
RETRY_SECONDS = "1"
SHUTTING_DOWN = "the server is shutting down"
PAUSED = "the operator has paused the engine"
PUT_TO_SLEEP = "the operator has put the engine to sleep"
CLIENT_GONE = 499  # nginx's word for it; nobody reads it
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
MESSAGES_PATH = "/v1/messages"
MESSAGES_TYPES = {  # Anthropic's
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MOST_CHARACTERS = 4000  # of a message
KIND = re.compile(r"str|(list|dict)\[.*\]")  # one of a field's types, where pydantic names fields
FIELD = re.compile(r"(?:a token id in )?([a-z_]+)\b")


class ApiError(Exception):
    """An answer that is an error.  param: the field of the request that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        if len(message) > MOST_CHARACTERS:  # it may quote the request
            message = f"{message[:MOST_CHARACTERS]}..."
        self.status, self.message, self.param = status, message, param


class ErrorFacts(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    error: ErrorFacts


class AnswerFailedError(ApiError):
    """The engine has given a request up."""

    def __init__(self, message: str) -> None:
        ordered = dict.fromkeys((SHUTTING_DOWN, PAUSED, PUT_TO_SLEEP), 503)
        super().__init__({**ordered, STUCK: 400}.get(message, 500), message)


def overloaded(message: str) -> ApiError:
    return ApiError(503, message)


def unknown_model(name: str) -> ApiError:
    return ApiError(404, f"the model {name!r} does not exist; /v1/models lists those that do", param="model")


def encode_error(error: ApiError) -> bytes:
    """The body; a stream that has begun carries it as its last event."""
    message = error.message.encode("utf-8", "replace").decode()
    kind = TYPES.get(error.status, "InternalServerError")
    return msgspec.json.encode(ErrorBody(ErrorFacts(message, kind, error.param, error.status)))


def encode_messages_error(error: ApiError) -> bytes:
    """The body as Anthropic's clients expect it."""
    message = error.message.encode("utf-8", "replace").decode()
    return msgspec.json.encode(MessagesError(Failure(MESSAGES_TYPES.get(error.status, "api_error"), message)))


def route_path(scope: Mapping[str, Any]) -> str:
    """A request's path, without that under which a proxy shows this server."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def error_response(path: str, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """path: of the request, for Anthropic's routes have a form of their own."""
    if error.status in (429, 503) and "Retry-After" not in (headers or {}):
        headers = {"Retry-After": RETRY_SECONDS, **(headers or {})}
    elif error.status == 401:
        headers = {"WWW-Authenticate": "Bearer", **(headers or {})}
    body = encode_messages_error(error) if path.startswith(MESSAGES_PATH) else encode_error(error)
    return Response(body, error.status, dict(headers or {}), "application/json")


@contextmanager
def users_fault(fields: Mapping[str, object] | None = None) -> Generator[None, None, None]:
    """Within, a ValueError is the request's; its first word is the field, if `fields` has that."""
    try:
        yield
    except ValueError as error:
        match = FIELD.match(str(error))
        param = match[1] if match and fields is not None and match[1] in fields else None
        raise ApiError(400, str(error), param=param) from error


@contextmanager
def named(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Within, errors call fields by the names that the client has written.  names: by ours."""
    try:
        yield
    except ApiError as error:
        message = error.message
        for ours, theirs in names.items():
            message = re.sub(rf"^{ours}\b|\b{ours}(?==)", theirs, message)
        param = names.get(error.param or "", error.param)
        raise ApiError(error.status, message, param=param) from error


def install_error_handlers(app: FastAPI) -> None:
    """Whatever a route raises is answered in this form."""

    @app.exception_handler(ApiError)
    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: ApiError | HTTPException) -> Response:
        return refusal(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        _, *path = (fault := error.errors()[0])["loc"]
        if path and fault["type"] != "json_invalid":
            return refusal(request, field_fault([{**fault, "loc": path}]))
        return refusal(request, ApiError(400, _body_fault(fault, request)))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        logger.error("%s %s has failed", request.method, request.url.path, exc_info=error)
        failed = ApiError(500, "internal error; the server's log has it")
        return error_response(route_path(request.scope), failed, {"Connection": "close"})  # as uvicorn does


def refusal(request: Request, error: ApiError | HTTPException) -> Response:
    """What a request is answered that is refused."""
    if isinstance(error, ApiError):
        return error_response(route_path(request.scope), error)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(route_path(request.scope), ApiError(error.status_code, message), error.headers)


def field_fault(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """What is wrong with a field; if it may be of several types, what it is not of each.

    faults: pydantic's, whose first has a place.
    """
    path = [str(part) for part in faults[0]["loc"]]
    if len(path) > 1 and KIND.fullmatch(path[1]):
        reasons = dict.fromkeys(fault["msg"] for fault in faults if path[0] in fault["loc"])
        return ApiError(400, f"{path[0]}: {' or '.join(reasons)}", param=path[0])
    return ApiError(400, f"{'.'.join(path)}: {faults[0]['msg']}", param=path[0])


def _body_fault(fault: Mapping[str, Any], request: Request) -> str:
    """What is wrong with a body that has no fields."""
    if fault["type"] == "missing":
        return "the request has no body, must have JSON"
    if fault["type"] == "json_invalid":
        return f"the body is no JSON: {fault['ctx']['error']}"
    said = request.headers.get("content-type", "")
    return f"the body is of type {said!r}; send JSON, with the header 'Content-Type: application/json'"
