"""What a client is told when something is wrong, in OpenAI's shape or Anthropic's. Raised anywhere in the gateway.

``ApiError`` before the first byte is the response; after it, one event of the stream. Pure data.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_ROUTES = "/v1/messages"
"""Errors on these have Anthropic's shape."""
SHARED_ROUTES = "/v1/models"
"""What both kinds of client ask for."""
ANTHROPIC_HEADER = b"anthropic-version"
"""Anthropic's send it with every request."""
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer that is an error. ``message`` is for the client; it is never logged, as it may quote the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON object with its one key ``error``."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        error: dict[str, Any] = {
            "message": self.message,
            "type": TYPES.get(self.status, fallback),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """The same as Anthropic's clients read it."""
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        error = {"type": ANTHROPIC_TYPES.get(self.status, fallback), "message": self.message}
        return msgspec.json.encode({"type": "error", "error": error})

    def response(self) -> Response:
        """The whole HTTP answer, in the shape of the route it goes out on."""
        return ErrorResponse(self)


@contextmanager
def fields_called(names: Mapping[str, str]) -> Iterator[None]:
    """An error about one of these fields calls it as the client does: by ``names`` of their usual names."""
    try:
        yield
    except ApiError as error:
        name = names.get(error.param or "")
        if error.param is None or name is None:
            raise
        message, param = error.message.replace(error.param, name, 1), name.split(".")[0]
        raise ApiError(error.status, message, param=param, code=error.code, headers=error.headers) from None


class ErrorResponse(Response):
    """An ``ApiError``; only when it is sent does it know its route."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``Response``."""
        if speaks_anthropic(scope):
            error = self._error
            anthropic = Response(error.anthropic_body(), error.status, error.headers, media_type="application/json")
            await anthropic(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the answer is to have Anthropic's shape."""
    path = scope["path"]
    if _is_below(path, SHARED_ROUTES):
        return any(name == ANTHROPIC_HEADER for name, _ in scope["headers"])
    return _is_below(path, ANTHROPIC_ROUTES)


def _is_below(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """503: nothing is wrong with the request; try again soon."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def overloaded(message: str) -> ApiError:
    """429: too many ask for this at once; try again soon."""
    return ApiError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})


def too_late(message: str) -> ApiError:
    """504: it did not end by the deadline that it named."""
    return ApiError(504, message, code="deadline_exceeded")


def internal(message: str = "internal error") -> ApiError:
    """500: our fault."""
    return ApiError(500, message, code="internal_error")


def not_found(request: Request) -> ApiError:
    """404: there is nothing at this path."""
    return ApiError(404, f"there is nothing at {request.url.path[:100]}; /docs tells what there is")


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method, body too large) in our shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return not_found(request).response()
    message = str(error.detail or HTTPStatus(error.status_code).phrase)
    return ApiError(error.status_code, message, headers=error.headers).response()
