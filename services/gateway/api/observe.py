"""The outer middleware: request ids; one log line, one span and HTTP metrics for each request.

Plain ASGI. Never logs what a request says.
"""

import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.api import trace
from services.gateway.api.note import Note, note_of
from services.gateway.api.tenant import tenant_in
from services.gateway.metrics import Metrics
from shared.log import FIELDS
from shared.tracing import Tracing

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
CLIENT_CLOSED_REQUEST = 499
"""Nobody sees this status but the log and the metrics (nginx's number)."""
POLLED = ("/health", "/ready", "/metrics")
"""Not worth a log line each."""


def route_of(path: str) -> str:
    """The path's label."""
    if path in ROUTES:
        return path
    return "/v1/models" if path.startswith("/v1/models/") else "other"


class Observe:
    """Echoes ``X-Request-Id`` (or makes one up), logs, counts and traces."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = note_of(scope)
        route = route_of(scope["path"])
        request_id = _given_id(scope) or note.id.encode()
        if self._tracing is not None and route not in POLLED:
            trace.begin(self._tracing, note, scope["method"], route, scope["headers"])
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
            status = CLIENT_CLOSED_REQUEST if note.client_gone else status or 500
            self._record(route, request_id.decode(), status, note, tenant_in(scope).name)

    def _record(self, route: str, request_id: str, status: int, note: Note, tenant: str) -> None:
        seconds = perf_counter() - note.arrived
        self._metrics.http_ended(route, status, seconds)
        if note.span is not None:
            trace.end(note.span, status, request_id, seconds)
        if route in POLLED:
            return
        facts = dict(note.facts)
        if note.ttft_s is not None:
            facts["ttft_ms"] = round(1000 * note.ttft_s)
        if tenant:
            facts["tenant"] = tenant
        duration_ms = round(1000 * seconds)
        told = "".join(f" {name}={value}" for name, value in facts.items())
        fields = {"request_id": request_id, "route": route, "status": status, "duration_ms": duration_ms, **facts}
        _log.info("%s %s %d %dms%s", request_id, route, status, duration_ms, told, extra={FIELDS: fields})


def _given_id(scope: Scope) -> bytes | None:
    """The client's own id if it is printable and short; it is echoed and logged, never a key of anything."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and 0 < len(value) <= MAX_REQUEST_ID_CHARS and value.isascii():
            given: bytes = value
            return given if given.decode().isprintable() else b"invalid"
    return None
