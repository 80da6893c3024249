"""The outer middleware: request ids, one log line per request, HTTP metrics. Plain ASGI, so that nothing hides a
disconnect from the endpoints. Never logs what a request says.
"""

import logging
from dataclasses import dataclass, field
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.ids import new_id
from services.gateway.metrics import Metrics

_log = logging.getLogger("services.gateway.access")

REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID_CHARS = 128
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/health",
    "/ready",
    "/metrics",
    "/debug/state",
    "/openapi.json",
    "/docs",
)
"""Labels of the HTTP metrics; every other path is ``other``."""
POLLED = ("/health", "/ready", "/metrics")
"""Not worth a log line each."""


@dataclass
class Note:
    """What the endpoint tells the log about a request."""

    arrived: float = field(default_factory=perf_counter)
    """perf_counter() of its arrival."""
    detail: str = ""
    client_gone: bool = False


def note_of(scope: Scope) -> Note:
    """The request's note; made on first use."""
    state = scope.setdefault("state", {})
    if "note" not in state:
        state["note"] = Note()
    note = state["note"]
    assert isinstance(note, Note)
    return note


def route_of(path: str) -> str:
    """The path's label."""
    if path in ROUTES:
        return path
    return "/v1/models" if path.startswith("/v1/models/") else "other"


class Observe:
    """Echoes ``X-Request-Id`` (or makes one up), logs and counts."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = note_of(scope)
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._record(scope, request_id, 499 if note.client_gone else status or 500, note)

    def _record(self, scope: Scope, request_id: bytes, status: int, note: Note) -> None:
        route = route_of(scope["path"])
        seconds = perf_counter() - note.arrived
        self._metrics.http_ended(route, status, seconds)
        if route not in POLLED:
            _log.info("%s %s %d %.0fms %s", request_id.decode(), route, status, seconds * 1000, note.detail)


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is printable and short; it is echoed and logged, never a key of anything."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and 0 < len(value) <= MAX_REQUEST_ID_CHARS and value.isascii():
            given: bytes = value
            return given if given.decode().isprintable() else b"invalid"
    return new_id().encode()
